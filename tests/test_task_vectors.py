"""Stores of all tasks: their merges, and how they change."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import contents, merge, recipe, refused, tvb, write
from test_lossless_store import ONE_LAYER, bfloat, check_export
from tiny import TASKS, load
from torch import Tensor
from worlds import SIX, Models

import tvb_mergekit
from tvb_mergekit.store import api
from tvb_mergekit.store import store as stores
from tvb_mergekit.store.store import Bases

World = Callable[[str], Models]
WEIGHTS = {"math": 2.0, "safety": -2.0, "poems": 3.0}


@pytest.fixture
def llamas(world: World) -> Models:
    """The first task has a weight; five tasks of six are built."""
    return weighted(world("six"))


def weighted(models: Models) -> Models:
    return replace(models, own={0: {"weight": 2.0}})


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Six tasks in bfloat16, for which stores of any form are built."""
    made = bfloat(ONE_LAYER, tmp_path_factory.mktemp("six"), tasks=SIX)
    return replace(made, own=own(SIX))


def own(tasks: Sequence[str]) -> dict[int, dict[str, float]]:
    """The weights of tasks in a recipe."""
    return {k: {"weight": WEIGHTS[task]} for k, task in enumerate(tasks) if task in WEIGHTS}


def flat(state: Mapping[str, Any], names: Sequence[str]) -> Tensor:
    return torch.cat([torch.as_tensor(state[name]).double().reshape(-1) for name in names])


def vectors_of(bases: Bases) -> Tensor:
    """The task vectors as the library reads them, with their weights, [d, K] float64."""
    bases.check_base(api.open_model(bases.facts.base_model), "the base")
    states = [{name: v.tensor(name) for name in bases.names} for v in bases.vectors]
    return torch.stack([flat(state, bases.names) for state in states], 1) * bases.scales


def taus_of(models: Models, tasks: Sequence[str], names: Sequence[str]) -> Tensor:
    return torch.stack([flat(models.tau(task), names) for task in tasks], 1)


def close(found: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def files(folder: Path) -> dict[str, bytes]:
    """The files of vectors."""
    return {name: data for name, data in contents(folder).items() if "/model" in f"/{name}"}


# basis, method, keys of each
OVER: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "all": ({"basis": "none"}, "basis_ties", {"density": 0.4}),
    "ae": ({"steps": 50}, "basis_ties", {"merge_func": "mean"}),
    "balanced": ({"basis": "balanced"}, "basis_ta", {"lambda_scale": "tasks"}),
    "tsvm": ({"basis": "balanced"}, "basis_tsvm", {}),
    "pca": ({"basis": "pca"}, "basis_negate", {"forget": "code", "alpha": 0.7, "lambda_": 0.2}),
    "excluded": ({"basis": "balanced", "exclude": "w1"}, "basis_ta", {}),
}


@pytest.mark.parametrize("case", OVER)
def test_merges_over_task_vectors(case: str, tmp_path: Path) -> None:
    """They are merges over the models, next to a base of zeros."""
    built, method, keys = OVER[case]
    torch.manual_seed(0)
    shapes = {"w0": (40, 30), "w1": (20, 50), "b": (300,)}
    base = {name: torch.zeros(shape).bfloat16() for name, shape in shapes.items()}
    models = {t: {n: torch.randn(s).bfloat16() for n, s in shapes.items()} for t in TASKS}
    bases = tvb_mergekit.build(base, models, tmp_path / "store", lossless=True)
    found = tvb_mergekit.merge(bases, base, method, **built, **keys)
    want = tvb_mergekit.merge(tvb_mergekit.build(base, models, **built), base, method, **keys)
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=2**-7, atol=1e-3)  # one rounding


def test_templates_the_library_and_exports(llamas: Models, tmp_path: Path) -> None:
    """A store's own recipes, `tvb merge`, `merge` and `export` agree with float64."""
    bases = llamas.build(tmp_path / "store", "--keep", 0.5, tasks=TASKS)
    names, found, base = bases.names, vectors_of(bases), load(llamas.base)
    start = flat(base, names)
    for method, want in (
        ("add", start + 0.4 * found.sum(1)),
        ("forget-code", start - found[:, 1]),
    ):
        tvb("merge", tmp_path / "store", tmp_path / method, "--method", method, "--quiet")
        close(flat(load(tmp_path / method), names), want)
    three = tvb_mergekit.merge(
        bases, llamas.base, basis="balanced", num_bases=3, lambda_scale="tasks"
    )
    close(flat(three, names), start + 0.4 * found.sum(1))
    tvb("export", tmp_path / "store", "--all", tmp_path / "all", "--quiet")
    assert sorted(p.name for p in (tmp_path / "all").iterdir()) == sorted(TASKS)
    assert "tvb" not in (tmp_path / "all/math/config.json").read_text()
    for k, task in enumerate(TASKS):
        want = start + found[:, k] / float(bases.weights[k])
        close(flat(load(tmp_path / "all" / task), names), want)
    listed = [tmp_path / "store" / task for task in TASKS]
    over = recipe("basis_ta", llamas.base, listed, basis="balanced", num_bases=2)
    tvb("build", write(over, tmp_path / "over"), tmp_path / "bases", "--quiet")
    assert stores.load(tmp_path / "bases").num_bases == 2  # bases of stored task vectors
    some = recipe("basis_ta", llamas.base, listed[1:4], {1: {"weight": 0.5}}, basis="none")
    merged = merge(some, tmp_path / "some")
    want = start + 0.4 * (found[:, 1] + 0.5 * found[:, 2] + found[:, 3])
    close(flat(merged.tensors, names), want)
    assert merged.facts["tasks"] == list(TASKS[1:4])
    assert merged.facts["from_store"] == str(bases.path)


JOINING = {
    "--lossless": "joins 5 tasks without loss",
    "--keep=0.25": "joins 5 tasks",
}


@pytest.mark.parametrize("form", JOINING)
def test_a_task_joins_and_leaves(form: str, six: Models, tmp_path: Path) -> None:
    """As if the store had been built so; `undo` takes either back."""
    store, rest = tmp_path / "store", [task for task in SIX if task != "code"]
    six.build(store, form, tasks=TASKS, own=own(TASKS))
    words = ("--task", "poems", "--weight", 3, "--quiet")
    assert JOINING[form] in tvb("add", store, six.models["poems"], *words).output
    whole, grown = six.build(tmp_path / "six", form), stores.load(store)
    exact = ["gram", "encoder"] if form == "--lossless" else []
    alike(grown, whole, "matrix_norms", "decoder", *exact)
    assert "gram" in grown.tensors
    for name, data in contents(tmp_path / "six").items():
        if name.split("/")[0] in SIX:
            assert (store / name).read_bytes() == data, name
    tvb("export", store, tmp_path / "poems", "--task", "poems", "--quiet")
    if form == "--lossless":
        check_export(six.models["poems"], tmp_path / "poems")
    tvb("remove", store, "--task", "code")
    tvb("inspect", store)
    small = stores.load(store)
    assert small.tasks == rest and not (store / "code").exists()
    alike(small, six.build(tmp_path / "five", form, tasks=rest, own=own(rest)))
    tvb("merge", store, tmp_path / "out", "--method", "add", "--quiet")
    out = load(tmp_path / "out")
    if form == "--lossless":
        keys = {"basis": "none", "tasks": rest, "own": own(rest)}
        want = six.merge("basis_ta", tmp_path / "models", **keys).tensors
        assert all(torch.equal(tensor, want[name]) for name, tensor in out.items())
    else:
        total = vectors_of(small).sum(1)
        close(flat(out, small.names), flat(six.states[0], small.names) + 0.4 * total)
    tvb("undo", store)
    assert stores.load(store).tasks == list(SIX)
    tvb("inspect", store)
    words = ("--task", "again", "--budget", 3, "--force", "--quiet")
    tvb("add", store, six.models["chat"], *words)
    bases = stores.load(store)
    assert bases.num_bases == 3 and not bases.keeps_tasks and "math" in bases.tasks
    known = [error is not None for error in bases.facts.errors.values()]
    assert known == [form == "--lossless"] * len(known)


def alike(found: Bases, want: Bases, *names: str) -> None:
    """The same files, by their names, and the same numbers up to rounding."""
    one, two = (contents(Path(str(bases.path))) for bases in (found, want))
    assert one.keys() == two.keys() and found.tasks == want.tasks
    for key in ("relative_error", "norms", "bits", "bytes", "density"):
        mine, theirs = getattr(found.facts, key), getattr(want.facts, key)
        assert mine == (theirs if theirs is None else pytest.approx(theirs, rel=1e-6)), key
    for name in ("gram_bases", "errors", "norms", "weights", *names):
        made, tensor, atol = found.tensors[name], want.tensors[name], 1e-12
        if name == "gram_bases" and want.facts.store.codec == "sampled":
            torch.testing.assert_close(made[:-1, :-1], tensor[:-1, :-1])
            torch.testing.assert_close(made[-1, -1], tensor[-1, -1])
            # A product of two samples has the mean of the product, and this deviation at most.
            atol = 8 / 0.25 * float(tensor.diagonal().max()) / want.facts.num_parameters**0.5
        torch.testing.assert_close(made, tensor, rtol=1e-6, atol=atol)


OVER_TO = [("ae", 3, "--keep=0.3"), ("balanced", 3, "--keep=0.5"), ("balanced", 9, "--keep=0.1")]


@pytest.mark.parametrize(("compress", "budget", "form"), OVER_TO)
def test_task_vectors_go_over_to_algorithm_1(llamas, compress, budget, form, tmp_path):
    store = tmp_path / "store"
    old = llamas.build(store, form, tasks=TASKS)
    found = vectors_of(old)
    words = ("--task", "poems", "--budget", budget, "--compress", compress, "--quiet")
    done = tvb("add", store, llamas.models["poems"], *words)
    assert "by Algorithm 1" in done.output and "relative errors: not known" in done.output
    grown = stores.load(store)
    assert grown.num_bases == min(budget, 6) and not grown.keeps_tasks and grown.facts.bits is None
    tau = taus_of(llamas, SIX, old.names)
    if compress == "balanced":
        assert grown.basis_weights is not None
        total = vectors_of(grown) @ grown.basis_weights
        torch.testing.assert_close(total, found.sum(1) + tau[:, -1], rtol=1e-4, atol=1e-6)
    assert set(grown.facts.errors.values()) == {None}


# Mistakes


MISTAKES: dict[str, tuple[str, str]] = {
    "compress alone": ("add {z} {m} --task new --compress ae", "keeps all tasks; --budget M"),
    "no such task": ("remove {z} --task mth", "did you mean `math`?"),
}


@pytest.fixture(scope="module")
def made(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    weighted(world("six")).build(folder / "store", "--keep", 0.5, tasks=TASKS)
    return folder


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line(llamas, made, case):
    words, wants = MISTAKES[case]
    before = files(made)
    assert wants in refused(*words.format(z=made / "store", m=llamas.models["poems"]).split())
    assert files(made) == before


def test_what_removal_leaves(made: Path, llamas: Models, tmp_path: Path) -> None:
    """Recipes that name a removed task are refused; the last task stays."""
    store = Path(shutil.copytree(made / "store", tmp_path / "store"))
    tvb("remove", store, "--task", "code")
    over = recipe("basis_ta", llamas.base, [store / task for task in TASKS], basis="none")
    assert "is not a vector" in merge(over, tmp_path / "out", fails=True).output
    write(over, tmp_path / "r")
    assert "is not a vector" in refused("inspect", tmp_path / "r.yml")
    for task in ("math", "safety", "chat"):
        tvb("remove", store, "--task", task)
    assert "its only task" in refused("remove", store, "--task", "legal")
    other = llamas.build(tmp_path / "bases", basis="balanced", num_bases=2, tasks=TASKS)
    assert "it holds 2 bases" in refused("remove", other.path, "--task", "math")


def test_mergekits_own_methods_are_told_the_way_out(made, llamas, tmp_path):
    listed = [made / "store" / task for task in TASKS]
    for method in ("task_arithmetic", "linear"):
        its = recipe(method, llamas.base, listed, weight=1.0)
        said = merge(its, tmp_path / "out", fails=True).output
        assert "is a vector of a store" in said and "`tvb export`" in said
    named = recipe("basis_ta", llamas.base, listed, {0: {"task": "x"}})
    assert "its store calls it" in merge(named, tmp_path / "out", fails=True).output


def test_weights_go_through_generations(six: Models, tmp_path: Path) -> None:
    """A store's own times a recipe's: exports are of the task as it was trained."""
    store = six.build(tmp_path / "store", "--lossless", tasks=TASKS, own=own(TASKS))
    made = recipe("basis_ta", six.base, [tmp_path / "store" / "math"], {0: {"weight": 3.0}})
    write({**made, "parameters": {"basis": "none"}}, tmp_path / "r")
    tvb("build", tmp_path / "r.yml", tmp_path / "dense", "--dtype", "float32", "--quiet")
    assert stores.load(tmp_path / "dense").facts.parameters["weights"] == {"math": 6.0}
    tvb("export", tmp_path / "dense", tmp_path / "math", "--task", "math", "--quiet")
    close(flat(load(tmp_path / "math"), store.names), flat(load(six.models["math"]), store.names))


def test_a_task_called_base_and_a_damaged_one(llamas: Models, tmp_path: Path) -> None:
    listed = [llamas.models[task] for task in TASKS[:3]]
    made = recipe("basis_ta", llamas.base, listed, {0: {"task": "base"}})
    write(made, tmp_path / "r")
    store = tmp_path / "store"
    tvb("build", tmp_path / "r.yml", store, "--keep", 0.5, "--quiet")
    tvb("merge", store, tmp_path / "before", "--method", "add", "--quiet")
    shutil.rmtree(store / "code")
    assert "take it out with `tvb remove`" in refused("inspect", store)
    tvb("remove", store, "--task", "code")
    tvb("add", store, llamas.models["legal"], "--task", "legal", "--quiet")
    tvb("remove", store, "--task", "base")
    tvb("merge", store, tmp_path / "after", "--method", "add", "--quiet")
    bases = stores.load(store)
    want = flat(load(llamas.base), bases.names) + 0.4 * vectors_of(bases).sum(1)
    close(flat(load(tmp_path / "after"), bases.names), want)
