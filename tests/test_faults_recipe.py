"""Wrong recipes: each mistake is one line that says where it is, what was found and expected."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from test_faults import Case, Outcome, check, outcomes, recipe, tiny_models  # noqa: F401

FORGET = {"basis": "balanced", "num_bases": 2, "alpha": 1.0}
NEGATE = {"method": "basis_negate"}
AE = {"basis": "ae", "num_bases": 2}


def slices(*sources: tuple[str, ...]) -> dict[str, object]:
    """One slice per argument, of one layer each."""
    pieces = [
        {"sources": [{"model": m, "layer_range": [i, i + 1]} for m in listed]}
        for i, listed in enumerate(sources)
    ]
    return recipe() | {"models": None, "slices": pieces}


def link(folder: Path) -> None:
    (folder / "link").symlink_to("a")


def without(*keys: str) -> dict[str, object]:
    return {key: value for key, value in recipe().items() if key not in keys}


ALL = ("./base", "./a", "./b", "./c")
CASES = {
    # a key that nobody knows, or that stands in the wrong place
    "misspelt parameter": Case(recipe({"lamda": 0.5}), (r"`lamda`", r"`lambda`\?", "parameters")),
    "misspelt top": Case(recipe(paramters={"lambda": 0.5}), (r"`paramters`", r"`parameters`\?")),
    "misspelt base": Case(recipe(base_modle="./base"), (r"`base_modle`", r"`base_model`\?")),
    "misspelt model parameter": Case(
        recipe(first={"parameters": {"wieght": 2}}), (r"`wieght`", r"`weight`\?", r"models\[0\]")
    ),
    "misspelt beside model": Case(
        recipe(first={"parameter": {"weight": 2}}),
        (r"`parameter`", r"`parameters`\?", r"`models`\[0\]"),
    ),
    "weight beside model": Case(
        recipe(first={"weight": 2}), (r"`weight`", r"`models`\[0\]", "parameters")
    ),
    "global key under model": Case(
        recipe(first={"parameters": {"num_bases": 2}}), ("`num_bases`", r"models\[0\]")
    ),
    "lambda under model": Case(
        recipe(first={"parameters": {"lambda": 2}}), ("`lambda`", r"models\[0\]")
    ),
    "model key global": Case(recipe({"weight": 2}), ("`weight`", "one model")),
    "parameter at top": Case(recipe(num_bases=2), ("`num_bases`", "parameters")),
    "key of another method": Case(recipe({"density": 0.2}), ("`density`", "basis_ties")),
    # values
    "null": Case(recipe({"lambda": None}), ("`parameters.lambda`|`lambda`", "None|empty")),
    "null basis": Case(recipe({"basis": None}), ("basis", "None|empty")),
    "dict": Case(recipe({"num_bases": {"a": 2}}), ("num_bases", "a")),
    "list of values": Case(recipe({"basis": ["ae", "pca"]}), ("`basis`", "one value")),
    "empty list": Case(recipe({"lambda": []}), ("`lambda`", r"\[\]")),
    "lambda nan": Case(recipe({"lambda": float("nan")}), ("`lambda` is nan", "a number")),
    "lambda inf": Case(recipe({"lambda": float("inf")}), ("`lambda` is inf", "a number")),
    "lambda text": Case(recipe({"lambda": "big"}), ("`lambda` is 'big'", "a number")),
    "lambda comma": Case(recipe({"lambda": "0,4"}), ("`lambda` is '0,4'", "a number")),
    "lambda in a filter": Case(
        recipe({"lambda": [{"filter": "mlp", "value": "x"}, {"value": 0.4}]}),
        ("`lambda` is 'x'", "a number"),
    ),
    "temperature 0": Case(recipe(AE | {"temperature": 0}), ("`temperature` is 0", "> 0")),
    "temperature of balanced": Case(recipe({"temperature": 2}), ("`temperature`", "balanced")),
    "gradient": Case(recipe(AE | {"num_bases": [2, 3]}), ("`num_bases`", r"\[2, 3\]", "one value")),
    "M > T": Case(recipe({"num_bases": 4}), ("`num_bases` is 4", "3 models")),
    "M = 0": Case(recipe({"num_bases": 0}), ("`num_bases` is 0", ">= 1")),
    "M broken": Case(recipe({"num_bases": 1.5}), ("`num_bases` is 1.5", "whole number")),
    "M true": Case(recipe({"num_bases": True}), ("`num_bases` is True", "whole number")),
    "percent": Case(recipe({"basis_ratio": 50}), ("`basis_ratio` is 50", r"\(0, 1\]")),
    "two sizes": Case(recipe({"energy": 0.9, "num_bases": 2}), ("`num_bases`", "`energy`", "one")),
    "weight 0": Case(
        recipe(first={"parameters": {"weight": 0}}), ("`weight` is 0", "other than 0")
    ),
    "weight 1e300": Case(
        recipe(first={"parameters": {"weight": 1e300}}), (r"`weight` is 1e\+300", r"1e\+06\]$")
    ),
    "capitals": Case(recipe({"basis": "AE"}), ("`basis` is 'AE'", "`ae`")),
    "no expression": Case(recipe({"exclude": "*.bias"}), ("`exclude`", "regular expression")),
    "all excluded": Case(recipe({"exclude": "."}), ("no tensor takes part", "exclude")),
    "dtype": Case(recipe(dtype="bfloat17"), ("`?dtype`?", "bfloat17", "bfloat16")),
    "dtype whole": Case(recipe(dtype="int8"), ("`?dtype`?", "int8")),
    # forgetting
    "forget unknown": Case(
        recipe(FORGET | {"forget": "aa"}, **NEGATE), ("`forget`", "'aa'", "'a'", "b, c")
    ),
    "forget yes": Case(recipe(FORGET | {"forget": True}, **NEGATE), ("`forget`", "True", "quote")),
    "forget list": Case(
        recipe(FORGET | {"forget": ["a", "b"]}, **NEGATE), ("`forget`", '"math,code"')
    ),
    "forget nothing": Case(recipe(FORGET, **NEGATE), ("`forget", "`alpha")),
    "alpha < 0": Case(
        recipe(FORGET | {"forget": "a", "alpha": -1}, **NEGATE),
        ("`alpha` is -1", r"in \[0, 1e\+30\]"),
    ),
    "alpha for some tensors": Case(
        recipe(FORGET | {"forget": "a", "alpha": [{"filter": "mlp", "value": 1.0}]}, **NEGATE),
        ("`alpha`", "filter"),
    ),
    # models
    "no base": Case(without("base_model"), ("`base_model` is missing",)),
    "no models": Case(without("models"), ("models",)),
    "models empty": Case(recipe() | {"models": []}, ("models",)),
    "models text": Case(recipe() | {"models": "./a"}, ("`models`", "'./a'", "list")),
    "model text": Case(
        recipe() | {"models": ["./a", "./b"]}, (r"`models.0`", "'./a'", "dictionary|model:")
    ),
    "model key lost": Case(recipe() | {"models": [{"path": "./a"}]}, ("`path`", "model")),
    "same text": Case(recipe(models=("./a", "./a")), (r"`models\[1\]", "./a", "once")),
    "same folder": Case(recipe(models=("./a", "a/")), (r"`models\[1\]", "a/", "once")),
    "same by a link": Case(
        recipe(models=("./a", "./link")), (r"`models\[1\]", "./link", "once"), link
    ),
    "base as model": Case(recipe(models=("./a", "base/")), (r"`models\[1\]", "base model")),
    "task names": Case(
        recipe(models=("./a", "./b/../b", {"model": "./c", "parameters": {"task": "a"}})),
        ("./a", "./c", "'a'", "`task:`"),
    ),
    "slice without base": Case(slices(ALL, ALL[1:]), (r"`slices\[1\].sources`", "./base")),
    "slices differ": Case(slices(ALL, ALL[:3]), (r"`slices\[1\].sources`", "./c")),
    "slice respelt": Case(slices(ALL, ("base/", *ALL[1:])), (r"slices\[1\]", "base/", "./base")),
    "both": Case(slices(ALL) | {"models": recipe()["models"]}, ("models", "slices")),
    "path": Case(recipe(models=("./a", "./nope")), ("./nope", "no such folder")),
    "path like a repository": Case(
        recipe(models=("./a", "models/nope")), ("models/nope", "folder")
    ),
    "path bare": Case(recipe(models=("./a", "nope")), ("nope", "folder")),
    "home": Case(recipe(models=("./a", "~/nope")), ("~/nope", "no such folder")),
    "environment variable": Case(recipe(models=("./a", "$HOME/nope")), (r"\$HOME/nope", "folder")),
    "plus in a path": Case(recipe(models=("./a", "./b+c")), (r"\./b\+c", "lora-merge-cache")),
    # no recipe at all
    "not a dictionary": Case("- merge_method: basis_ta\n- models: []\n", ("recipe.yml", "list")),
    "text": Case("basis_ta\n", ("ValidationError",), foreign=True),
    "empty": Case("", ("ValidationError",), foreign=True),
    "near method": Case(
        recipe(method="basis_tai"), ("`merge_method` is 'basis_tai': .*mean `basis_ta`\\?",)
    ),
    "unknown method": Case(
        recipe(method="linaer"), ("`merge_method` is 'linaer': expected one of",)
    ),
    "syntax of any method": Case("merge_method: linear\nmodels: [\n", ("recipe.yml, line 3",)),
    "no text of any method": Case("models:\n- \x00", ("recipe.yml, line 2: .*0x0000",)),
    "syntax": Case("merge_method: basis_ta\nmodels: [\n", ("recipe.yml", "line 3")),
    "tabs": Case("merge_method: basis_ta\nparameters:\n\tlambda: 0.4\n", ("recipe.yml", "line 3")),
    "no text": Case("merge_method: basis_ta\n\x00", ("recipe.yml, line 2",)),
    "another encoding": Case(
        setup=lambda f: (f / "recipe.yml").write_bytes(b"merge_method: linear\n# \xe4\n"),
        wants=("recipe.yml, line 2: no UTF-8",),
    ),
    "key twice": Case(
        "parameters: {lambda: 1}\n" + yaml.safe_dump(recipe()), ("`parameters`", "twice|second")
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_recipe(name: str, outcomes: dict[str, Outcome]) -> None:  # noqa: F811
    check(outcomes[name], CASES[name])
