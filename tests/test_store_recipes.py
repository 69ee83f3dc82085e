"""Recipes over a store give what the same recipes give over the models."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import torch
import yaml
from commands import Result, assert_same, merge, ready, recipe, tvb, write
from reference import Dense, merged
from test_codecs import models, tau_of, vector
from tiny import TASKS, llama, load
from worlds import Models, World, adapters, save, tensors_of

import tvb_mergekit
from tvb_mergekit.plugin.ways import ALL_TASKS
from tvb_mergekit.store import store as stores
from tvb_mergekit.store.store import Bases

NONE = {"basis": "none"}
MODELS = Path(__file__).parent.parent / "recipes/quickstart/models"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made = models("bfloat16", tmp_path_factory.mktemp("family"), llama, tasks=TASKS)
    state = dict(load(Path(made.listed[1])))
    state["model.norm.weight"][:2] = torch.tensor([-0.0, 1e-12])  # a sum would lose them
    save(Path(made.listed[1]), state)
    return replace(made, own={0: {"weight": 2.0}})


@pytest.fixture(scope="module")
def built(family: Models, tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return family.build(tmp_path_factory.mktemp("built") / "store", "--lossless")


ALL, SOME = slice(None), slice(1, 4)
FORGET = {"forget": "code", "alpha": 1}
PCA, BALANCED = ({"basis": basis, "num_bases": 2} for basis in ("pca", "balanced"))
FILTERS = [{"filter": "mlp", "value": 0.9}, {"value": 0.1}]
TOKENS = {"tokenizer_source": "base"}
# method, keys, how many of the tasks
MERGES: dict[str, tuple[str, dict[str, Any], slice]] = {
    "addition": ("basis_ta", NONE, ALL),
    "addition of some": ("basis_ta", NONE, SOME),
    "ae": ("basis_ta", {"num_bases": 2, "steps": 50}, ALL),
    "balanced": ("basis_ties", BALANCED, ALL),
    "by filter": ("basis_ties", {**NONE, "lambda": FILTERS, "density": FILTERS}, ALL),
    "iso": ("basis_iso", NONE, ALL),
    "wudi": ("basis_wudi", NONE, ALL),
    "pca": ("basis_negate", {**PCA, **FORGET}, ALL),
    "excluded": ("basis_ties", {**PCA, "exclude": "mlp"}, ALL),
    "tokenizer": ("basis_ta", {**NONE, "extra": TOKENS}, ALL),
    "slices": ("basis_wudi", {**NONE, "layers": [(0, 1), (1, 2), (1, 2)]}, SOME),
}


@pytest.mark.parametrize("case", MERGES)
def test_merges_over_lossless_stores_are_those_of_the_models(case, family, built, tmp_path):
    """To the bit, by recipes over the store and by the library; a store by its name is all."""
    method, keys, chosen = MERGES[case]
    keys = dict(keys)
    layers, tasks = keys.pop("layers", None), TASKS[chosen]
    own = family.own if chosen is ALL else {1: {"weight": 0.5}}
    numbers = [TASKS.index(task) for task in tasks]
    vectors = [built.path / task for task in tasks]
    made = []
    for name, listed, weights in (
        ("models", [family.listed[n] for n in numbers], own),
        ("store", vectors, {} if chosen is ALL else own),
        *([("all", [built.path], {})] if chosen is ALL else []),
    ):
        document = recipe(method, family.base, listed, weights, **keys)
        if layers:
            del document["models"]
            document |= commands.slices(family.base, listed, layers, weights)
        made.append(merge(document, tmp_path / name))
    want, *found = made
    for each in found:
        assert_same(each, want)
        assert each.facts["tasks"] == list(tasks)
        assert each.facts["parameters"]["weights"] == want.facts["parameters"]["weights"]
        for name, tensor in want.basis.items():
            torch.testing.assert_close(torch.tensor(each.basis[name]), torch.tensor(tensor))
    plain = chosen is ALL and not {"extra", "lambda"} & {*keys}
    if method != "basis_negate" and plain:
        dtype = want.tensors["model.norm.weight"].dtype
        state = tvb_mergekit.merge(built, family.base, method, dtype=dtype, **keys)
        assert all(torch.equal(state[name], tensor) for name, tensor in want.tensors.items())


@pytest.mark.parametrize("method", ["basis_ta", "basis_ties", "basis_iso", "basis_wudi"])
def test_merges_over_adapters_are_those_of_the_adapters(method: str, tmp_path: Path) -> None:
    """Also of a recipe in another folder, and as an adapter."""
    made = adapters(tmp_path / "in", ({}, {"target_modules": ["q_proj"]}, {"r": 3}))
    store = made.build(tmp_path / "store", own={1: {"weight": -0.5}}).path
    assert store is not None
    want = made.merge(method, tmp_path / "want", own={1: {"weight": -0.5}}, **NONE)
    over = recipe(method, made.base, ["../store"], **NONE)
    with pytest.MonkeyPatch.context() as patch:
        (tmp_path / "cwd").mkdir()
        patch.chdir(tmp_path / "cwd")
        assert_same(merge(over, Path("out")), want)
        if method != "basis_ties":
            tvb("merge", write(over, Path("lora")), "lora", "--lora", "--quiet")
            direct = made.recipe(method, own={1: {"weight": -0.5}}, **NONE)
            tvb("merge", write(direct, Path("direct")), "direct", "--lora", "--quiet")
            one, two = (commands.contents(Path(name)) for name in ("lora", "direct"))
            assert one["adapter_model.safetensors"] == two["adapter_model.safetensors"]


def test_a_store_of_bases_is_the_models_of_its_recipe(world: World, tmp_path: Path) -> None:
    """Every `tvb merge STORE --method`, against the dense reference; weights of the store count."""
    made, built = world("llama"), {**PCA, "lambda": 0.25, "exclude": "norm"}
    bases = made.build(tmp_path / "my store", own={0: {"weight": 2.0}}, **built)
    states = [{n: t.double() for n, t in state.items()} for state in made.states]
    names = [name for name in states[0] if "norm" not in name]
    dense = Dense(states[0], states[1:], names, [2.0, 1, 1, 1, 1])
    columns = torch.stack([vector(each, dense.names) for each in tensors_of(bases)], 1).numpy()
    want = np.column_stack([dense.tau @ bases.encoder.numpy(), dense.tau.mean(axis=1)])
    np.testing.assert_allclose(columns, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())
    rebuilt = columns @ bases.reconstruction(TASKS).numpy()
    for name in (*ALL_TASKS, "forget-code"):
        document = ready(tmp_path / "my store", name)
        keys, method = document["parameters"], document["merge_method"]
        assert method == ALL_TASKS.get(name, "basis_negate")
        tvb("merge", tmp_path / "my store", tmp_path / name, "--method", name, "--quiet")
        made_of = merged(dense, method, keys, columns[:, :2], rebuilt, TASKS)
        found, skip = load(tmp_path / name), made_of.boundary
        commands.assert_close(found, made_of.tensors, dense.base, skip, 2e-5)
    text = yaml.safe_load((tmp_path / "add" / "mergekit_config.yml").read_text())
    assert text["models"] == [{"model": str(tmp_path / "my store")}]  # as it was given
    card = (tmp_path / "add" / "README.md").read_text()
    assert f"in the merge:\n* {tmp_path / 'my store'}\n\n" in card
    half = recipe("basis_ta", made.base, [bases.path], {0: {"weight": 0.5}}, lambda_=0.5)
    assert_same(merge(half, tmp_path / "half"), Result(tmp_path / "add"))
    assert Result(tmp_path / "half").facts["parameters"]["basis_weights"] == [0.5, 0.5]
    named = {0: {"weight": 0.001}}
    listed = [bases.path / name for name in ("B1", "B0")]
    weighted = merge(recipe("basis_ta", made.base, listed, named), tmp_path / "weighted")
    assert weighted.facts["parameters"]["basis_weights"] == [1.0, 0.001]


@pytest.mark.parametrize("words", [("--keep", 0.5), (), ("--dtype", "bfloat16")])
def test_builds_over_stores(words, family, built, tmp_path):
    """Bases or task vectors of stored vectors, whose weights are multiplied; errors of samples are
    unknown. An export is the task as it was trained."""
    store = family.build(tmp_path / "store", *words).path
    over = recipe("basis_ta", family.base, [store], {0: {"weight": 3.0}})
    for name, keys, more in (("bases", BALANCED, ()), ("tasks", {}, ("--dtype", "float32"))):
        document = {**over, "parameters": keys} if keys else over
        tvb("build", write(document, tmp_path / name), tmp_path / name, *more, "--quiet")
    bases, tasks = stores.load(tmp_path / "bases"), stores.load(tmp_path / "tasks")
    assert bases.num_bases == 2 and bases.tasks == list(TASKS)
    assert (set(bases.facts.errors.values()) == {None}) == ("--keep" in words)
    weights = {"math": 6.0, **dict.fromkeys(TASKS[1:], 3.0)}
    assert bases.facts.parameters["weights"] == tasks.facts.parameters["weights"] == weights
    given, names = stores.load(store), bases.facts.tensors
    old = torch.stack([vector(each, names) for each in tensors_of(given)], 1)
    if not words:
        old -= vector(family.states[0], names)[:, None]
    found = torch.stack([vector(each, names) for each in tensors_of(tasks)], 1)
    torch.testing.assert_close(found, old, rtol=1e-6, atol=1e-8)
    some = [name for name in names if "mlp" not in name]  # whose G is known to no store
    part = write({**over, "parameters": {"exclude": "mlp"}}, tmp_path / "part")
    told = json.loads(tvb("inspect", part, "--json", "--quiet").stdout)["norms"]
    for number, task in ((0, "math"), (3, "chat")):
        known = weights[task] * float(tau_of(family, number, some).norm())
        assert told[task] == pytest.approx(known, rel=0.1)
    scaled = old * torch.tensor([6.0, 3, 3, 3, 3])
    columns = torch.stack([vector(each, names) for each in tensors_of(bases)], 1)
    torch.testing.assert_close(columns, scaled @ bases.encoder, rtol=2**-7, atol=1e-4)
    if not words:  # without loss only from models, and in plain numbers otherwise
        again = write({**over, "parameters": NONE}, tmp_path / "r")
        said = commands.refused("build", again, tmp_path / "no", "--lossless")
        assert "or a vector of a store" in said
        tvb("build", again, tmp_path / "plain", "--quiet")
        assert {v.dtype for v in stores.load(tmp_path / "plain").facts.vectors} == {"float32"}


# message: method, base, what is listed, keys
STORE, BASES = "built", "bases"
FORCED = {"tokenizer": {"source": "base", "tokens": {"t5": {"source": "base", "force": True}}}}
REFUSED: dict[str, tuple[str, str, list[Any], dict[str, Any]]] = {
    "is of a store, a difference": ("task_arithmetic", "base", [STORE], {"weight": 1.0}),
    "has no vector 'mth' (did you mean `math`?)": ("basis_ta", "base", ["built/mth"], {}),
    "are two stores": ("basis_ta", "base", ["built/math", "bases/B0"], {}),
    "lists built/math twice": ("basis_ta", "base", ["built/math", "built/math"], {}),
    "is not a vector of": ("basis_ta", "base", ["built/math", "code"], {}),
    "make sense together only": ("basis_ta", "base", ["bases/B0"], {}),
    "a store names its tasks itself": ("basis_ta", "base", [STORE], {"own": {0: {"task": "x"}}}),
    "`basis` was set when the bases were built": ("basis_ta", "base", [BASES], {"basis": "pca"}),
    "belongs to the base": ("basis_ta", "math", [STORE], {}),
    "a store: name the base": ("basis_ta", "built", [STORE], {}),
    "the base's own vocabulary": ("basis_ta", "base", [STORE], {"extra": FORCED}),
}


@pytest.fixture(scope="module")
def standing(family: Models, built: Bases) -> Path:
    """base, math, code, built, bases side by side."""
    folder = family.base.parent
    (folder / "built").symlink_to(built.path)
    family.build(folder / "bases", **BALANCED)
    return folder


@pytest.mark.parametrize("message", REFUSED)
def test_recipes_that_do_not_fit_the_store(message, standing, tmp_path, monkeypatch):
    monkeypatch.chdir(standing)
    method, base, names, keys = REFUSED[message]
    parameters = {key: value for key, value in keys.items() if key != "own"}
    document = recipe(method, Path(base), names, keys.get("own"), **parameters)
    output = merge(document, tmp_path / "out", fails=True).output
    (line,) = [line for line in output.splitlines() if line.startswith("Error: ")]
    assert message in line and "Traceback" not in output


def test_weights_that_cancel_and_a_removal_leave_the_merge_of_the_models(tmp_path: Path) -> None:
    """G of a store is of its weighted task vectors, and a part of it has other last digits."""
    base, names, two = MODELS / "base", ("copy", "sort", "upper"), {"basis": "ae", "num_bases": 2}
    scales, back = (
        {k: {"weight": w} for k, w in enumerate(ws)} for ws in ((2, 0.5, 1), (0.5, 2, 1))
    )
    store, whole = tmp_path / "store", tmp_path / "whole"
    for out, listed, own in ((store, names, scales), (whole, ("max", *names), {})):
        made = recipe("basis_ta", base, [MODELS / name for name in listed], own)
        tvb("build", write(made, out), out, "--quiet")
    tvb("remove", whole, "--task", "max")
    want = merge(recipe("basis_ta", base, [MODELS / n for n in names], **two), tmp_path / "want")
    for name, over, own in (("over", [store / n for n in names], back), ("rest", [whole], {})):
        assert_same(merge(recipe("basis_ta", base, over, own, **two), tmp_path / name), want)


def test_names_of_tasks_that_mergekit_would_split(tiny_models: Path, tmp_path: Path) -> None:
    """At `+` begins an adapter, at `@` a revision, at `/` a vector of a store."""
    names, models = ["math/easy", "x+y", "a@b"], [tiny_models / name for name in "abc"]
    own = {number: {"task": name} for number, name in enumerate(names)}
    store = tmp_path / "store"
    tvb("build", write(recipe("basis_ta", tiny_models / "base", models, own), store), store)
    over = recipe("basis_ta", tiny_models / "base", [store / name for name in names], basis="none")
    made = merge(over, tmp_path / "out")
    assert made.facts["tasks"] == names
    tvb("export", store, tmp_path / "all", "--all", "--quiet")
    for name, model in zip(names, models, strict=True):  # forgetting c++: test_cli.py
        (folder,) = (tmp_path / "all").glob(re.sub(r"\W", "?", name))
        back = load(folder)
        assert all(torch.allclose(back[n], tensor, atol=1e-6) for n, tensor in load(model).items())
