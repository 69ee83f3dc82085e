"""A user's mistakes: each is one line that says where it is, what was found and what to do.

A case is a recipe and the faults of files or machine. `tvb check` runs all cases in process
(test_check.py); a few run end to end here.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import Fault, run
from safetensors.torch import load_file


@dataclass(frozen=True)
class Case:
    """One command line, in a folder that holds base, a, b, c and recipe.yml."""

    recipe: Any = None  # a mapping, or the YAML text itself; None: `recipe()`
    wants: tuple[str, ...] = ()  # regular expressions found in the error line (ok: in stderr)
    setup: Callable[[Path], object] = lambda folder: None
    args: tuple[str, ...] = ("--quiet",)
    out: str = "out"
    fault: Fault | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    command: str = "mergekit-yaml"
    ok: bool = False  # the merge succeeds
    leaves: str = ""  # what it may leave beside OUT
    foreign: bool = False  # no recipe of ours: mergekit's own complaint, a traceback, will do


def recipe(
    parameters: Mapping[str, Any] | None = None,
    *,
    method: str = "basis_ta",
    models: Sequence[Any] = ("./a", "./b", "./c"),
    first: Mapping[str, Any] | None = None,
    **top: Any,
) -> dict[str, Any]:
    """A valid recipe without training, with changes; `first` is added to the first model."""
    entries = [{"model": model} if isinstance(model, str) else dict(model) for model in models]
    entries[0] |= dict(first or {})
    defaults = {"basis": "balanced", "num_bases": 2}
    given = dict(parameters or {})
    if {"basis", "basis_ratio", "energy"} & set(given):
        defaults = {}
    result = {"merge_method": method, "base_model": "./base", "models": entries}
    result |= {"parameters": defaults | given, **top}
    return {key: value for key, value in result.items() if value is not ...}


def snapshot(folder: Path) -> dict[str, str]:
    """Every path below `folder` with its contents' hash; links are not followed."""
    found = {}
    for path in folder.rglob("*"):
        content = os.readlink(path) if path.is_symlink() else ""
        if path.is_file() and not path.is_symlink():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = content
    return found


def prepare(folder: Path, models: Path, case: Case) -> None:
    """Make the case's folder (hard links: setups replace files, never write into them)."""
    shutil.copytree(models, folder, copy_function=os.link)
    written = recipe() if case.recipe is None else case.recipe
    text = written if isinstance(written, str) else yaml.safe_dump(written, allow_unicode=True)
    (folder / "recipe.yml").write_text(text, encoding="utf-8")
    case.setup(folder)


def check(folder: Path, models: Path, case: Case) -> None:
    """Run the case in the new folder `folder`, and judge what it said and did."""
    prepare(folder, models, case)
    before = snapshot(folder)
    out = ["--out-path", case.out, "-I", "between"] if "multi" in case.command else [case.out]
    ended = run([case.command, "recipe.yml", *out, *case.args], folder, case.fault, **case.env)
    after = snapshot(folder)
    changed = {p for p in before | after if before.get(p) != after.get(p)}
    said = ended.err
    assert case.foreign or "Traceback" not in ended.out + said, said[-2000:]
    if case.ok:
        assert ended.code == 0, said[-2000:]
        where = Path(os.path.realpath(folder / case.out))
        allowed = {where, folder / (case.leaves or case.out)}
        changed = {p for p in changed if not allowed & {folder / p, *(folder / p).parents}}
        assert before.keys() <= after.keys() and (where / "basis" / "basis.json").is_file()
        assert all(
            t.isfinite().all() for f in where.glob("*.safetensors") for t in load_file(f).values()
        )
        if case.command == "mergekit-yaml" and case.args == ("--quiet",):
            assert not ended.out and bool(said) == bool(case.wants)
    else:
        assert ended.code != 0, f"it was not refused: {changed}"
        if not case.foreign:
            (*rest, last) = said.splitlines()
            assert last.startswith("Error: "), said
            assert not [line for line in rest if line.startswith("Error: ")], said
            said = last
        changed = {p for p in changed if not case.leaves or not p.startswith(case.leaves)}
    assert not changed
    for want in case.wants:
        assert re.search(want, said), f"{want!r} is not in: {said[-2000:]}"


# Wrong recipes


def wrong(parameters: Mapping[str, Any] | None, *wants: str, **keys: Any) -> Case:
    return Case(recipe(parameters, **keys), wants)


def model(parameters: Mapping[str, Any], *wants: str) -> Case:
    return Case(recipe(first={"parameters": parameters}), wants)


def negate(parameters: Mapping[str, Any], *wants: str) -> Case:
    given = {"basis": "balanced", "num_bases": 2, "alpha": 1.0, **parameters}
    return Case(recipe(given, method="basis_negate"), wants)


def slices(*sources: tuple[str, ...]) -> dict[str, object]:
    """One slice per argument, of one layer each."""
    pieces = [
        {"sources": [{"model": m, "layer_range": [i, i + 1]} for m in listed]}
        for i, listed in enumerate(sources)
    ]
    return recipe() | {"models": None, "slices": pieces}


ALL = ("./base", "./a", "./b", "./c")
AE = {"basis": "ae", "num_bases": 2}
NAMED = {"model": "./c", "parameters": {"task": "a"}}
RECIPES = {
    # a key that nobody knows, or that stands in the wrong place
    "misspelt parameter": wrong({"lamda": 0.5}, "`lamda`", r"`lambda`\?", "parameters"),
    "misspelt top": wrong({}, "`paramters`", r"`parameters`\?", paramters={"lambda": 0.5}),
    "weight beside model": wrong(
        {}, "`weight`", r"`models`\[0\]", "parameters", first={"weight": 2}
    ),
    "lambda under model": model({"lambda": 2}, "`lambda`", r"models\[0\]"),
    "model key global": wrong({"weight": 2}, "`weight`", "one model"),
    "parameter at top": wrong({}, "`num_bases`", "parameters", num_bases=2),
    # values
    "null": wrong({"lambda": None}, "`parameters.lambda`|`lambda`", "None|empty"),
    "gradient": wrong(AE | {"num_bases": [2, 3]}, "`num_bases`", r"\[2, 3\]", "one value"),
    "M > T": wrong({"num_bases": 4}, "`num_bases` is 4", "3 models"),
    "two sizes": wrong({"energy": 0.9, "num_bases": 2}, "`num_bases`", "`energy`", "one"),
    "weight 0": model({"weight": 0}, "`weight` is 0", "other than 0"),
    "no expression": wrong({"exclude": "*.bias"}, "`exclude`", "regular expression"),
    "no such matrices": wrong(
        {"matrices": "norm"}, "`matrices` is 'norm'", "two or three", method="basis_wudi"
    ),
    "all excluded": wrong({"exclude": "."}, "no tensor takes part", "exclude"),
    "dtype": wrong({}, "`?dtype`?", "bfloat17", "bfloat16", dtype="bfloat17"),
    # forgetting
    "forget unknown": negate({"forget": "aa"}, "`forget`", "'aa'", "'a'", "b, c"),
    "alpha for some tensors": negate(
        {"forget": "a", "alpha": [{"filter": "mlp", "value": 1.0}]}, "`alpha`", "filter"
    ),
    # models
    "no base": wrong({}, "`base_model` is missing", base_model=...),
    "models text": Case(recipe() | {"models": "./a"}, ("`models`", "'./a'", "list")),
    "model key lost": Case(recipe() | {"models": [{"path": "./a"}]}, ("`path`", "model")),
    "same folder": Case(recipe(models=("./a", "a/")), (r"`models\[1\]", "a/", "once")),
    "same by a link": Case(
        recipe(models=("./a", "./link")),
        (r"`models\[1\]", "./link", "once"),
        lambda folder: (folder / "link").symlink_to("a"),
    ),
    "base as model": Case(recipe(models=("./a", "base/")), (r"`models\[1\]", "base model")),
    "task names": Case(recipe(models=("./a", "./b/../b", NAMED)), ("./a", "./c", "'a'", "`task:`")),
    "slice without base": Case(slices(ALL, ALL[1:]), (r"`slices\[1\].sources`", "./base")),
    "both": Case(slices(ALL) | {"models": recipe()["models"]}, ("models", "slices")),
    "path": Case(recipe(models=("./a", "./nope")), ("./nope", "no such folder")),
    "plus in a path": Case(recipe(models=("./a", "./b+c")), (r"\./b\+c", "lora-merge-cache")),
    # no recipe at all
    "list": Case("- merge_method: basis_ta\n", ("recipe.yml", "a list, expected a mapping")),
    "near method": wrong(
        {}, "`merge_method` is 'basis_tai': .*mean `basis_ta`\\?", method="basis_tai"
    ),
    "syntax of any method": Case("merge_method: linear\nmodels: [\n", ("recipe.yml, line 3",)),
    "another encoding": Case(
        setup=lambda f: (f / "recipe.yml").write_bytes(b"merge_method: linear\n# \xe4\n"),
        wants=("recipe.yml, line 2: no UTF-8",),
    ),
    "key twice": Case(
        "parameters: {lambda: 1}\n" + yaml.safe_dump(recipe()), ("`parameters`", "twice|second")
    ),
}


ENDS = ("misspelt parameter", "near method", "path", "all excluded", "another encoding")


@pytest.mark.parametrize("name", ENDS)
def test_recipe(name: str, tmp_path: Path, tiny_models: Path) -> None:
    check(tmp_path / "work", tiny_models, RECIPES[name])
