"""Stores of codes: their files and merges; how stores of all tasks, in any form, change."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import formats
import numpy as np
import pytest
import torch
from commands import contents, merge, recipe, refused, tvb, write
from hypothesis import given, settings
from hypothesis import strategies as st
from test_lossless_store import ONE_LAYER, bfloat, check_export
from tiny import TASKS, load
from torch import Tensor
from worlds import SIX, Models

import tvb_mergekit
from tvb_mergekit.core.quantize import Width, block_bytes
from tvb_mergekit.store import api
from tvb_mergekit.store import store as stores
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.layout import Needs, plan_layout
from tvb_mergekit.tensors.quantized import Codes
from tvb_mergekit.tensors.stream import Item, Part, Piece
from tvb_mergekit.tensors.summing import Chunks

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


def dense(bases: Bases) -> Tensor:
    """The vectors as their files say, [d, K] float64."""
    assert bases.path is not None
    folders = bases.facts.store.folders
    states = [formats.codes(bases.path / name) for name in folders]
    for state, vector in zip(states, bases.sources, strict=True):
        for name in bases.names:
            whole = vector.tensor(name).reshape(-1)
            np.testing.assert_allclose(whole.numpy(), state[name].reshape(-1), rtol=1e-6)
            start, stop = len(whole) // 3, len(whole) - len(whole) // 5
            assert torch.equal(vector.read(name, start, stop, whole.clone()), whole[start:stop])
    return torch.stack([flat(state, bases.names) for state in states], 1)


def vectors_of(bases: Bases) -> Tensor:
    """The vectors as the library reads them, [d, K] float64."""
    bases.check_base(api.open_model(bases.facts.base_model), "the base")
    states = [{name: v.tensor(name) for name in bases.names} for v in bases.vectors]
    return torch.stack([flat(state, bases.names) for state in states], 1)


def taus_of(models: Models, tasks: Sequence[str], names: Sequence[str]) -> Tensor:
    return torch.stack([flat(models.tau(task), names) for task in tasks], 1)


def close(found: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def files(folder: Path) -> dict[str, bytes]:
    """The files of vectors."""
    return {name: data for name, data in contents(folder).items() if "/model" in f"/{name}"}


STORED = [("llama", 8), ("llama", 3), ("gpt2", 2), ("tied", 2), ("bf16", 4), ("mixed adapters", 2)]


@pytest.mark.parametrize(("name", "bits"), STORED)
def test_a_store_holds_what_it_says(world, name, bits, tmp_path):
    """Codes, errors, Gram matrix and bytes, against float64 from the files; the same twice."""
    given = weighted(world(name))
    tasks = given.tasks
    bases = given.build(tmp_path / "store", "--bits", bits)
    facts, tensors = bases.facts, bases.tensors
    assert bases.keeps_tasks and facts.store.folders == list(tasks)
    found, tau = dense(bases), taus_of(given, tasks, bases.names)
    if name == "tied":
        assert "lm_head.weight" not in bases.names
    errors = (found - tau).norm(dim=0) / tau.norm(dim=0)
    for task, error in zip(tasks, errors.tolist(), strict=True):
        assert facts.relative_error[task] == pytest.approx(error, rel=1e-4)
    products, most = found.T @ found, 1e-6 * float(found.square().sum())
    torch.testing.assert_close(tensors["gram_bases"], products, rtol=1e-5, atol=most)
    numels = [bases.vectors[0].tensors[n].numel for n in bases.names]
    with_sum = [torch.cat([m, m.sum(1, keepdim=True)], 1) for m in (tau, found - tau)]
    for tensor, want in zip(("tensor_squares", "tensor_errors"), with_sum, strict=True):
        squares = torch.stack([part.square().sum(0) for part in want.split(numels)])
        torch.testing.assert_close(tensors[tensor], squares, rtol=2e-4, atol=1e-12)
    codes = sum(v.nbytes for v in bases.vectors)
    assert facts.bits == bits
    assert codes == len(tasks) * sum(block_bytes(numel, Width(bits)) for numel in numels)
    stored = [f.stat().st_size for f in (tmp_path / "store").glob("*/*.safetensors")]
    assert facts.bytes == sum(stored)
    again = given.build(tmp_path / "again", "--bits", bits)
    assert again.path is not None and files(again.path) == files(tmp_path / "store")


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 150)), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([2, 3, 4, 8]), st.integers(0, 2**16), st.integers(-12, 3),
)  # fmt: skip
@settings(max_examples=20, deadline=None)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of models unlike the base
def test_any_shapes_and_dtypes(shapes, dtype, bits, seed, size):
    """Files read by the manual's program are what is merged, and lose what is told."""
    torch.manual_seed(seed)
    base = {f"w{k}": torch.randn(shape) for k, shape in enumerate(shapes)} | {"v": torch.randn(900)}
    models = {
        task: {name: (value + 10.0 ** (size / 3) * torch.randn_like(value)).to(dtype)
               for name, value in base.items()}
        for task in ("a", "b")
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        bases = tvb_mergekit.build(base, models, Path(folder) / "store", bits=bits)
        found = dense(bases)
        merged = tvb_mergekit.merge(bases, base, basis="none", lambda_=1.0)
        start = flat(base, bases.names)
        want = start + found.sum(1)
        atol = 1e-6 * float(want.abs().max())
        torch.testing.assert_close(flat(merged, bases.names), want, rtol=1e-5, atol=atol)
        for k, task in enumerate(models):
            tau = flat({n: models[task][n].float() - base[n] for n in bases.names}, bases.names)
            error = float((found[:, k] - tau).norm() / tau.norm())
            assert bases.facts.relative_error[task] == pytest.approx(error, rel=1e-3, abs=1e-6)


# basis, method, keys of each
OVER: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "all": ({"basis": "none"}, "basis_ties", {"density": 0.4}),
    "ae": ({"steps": 50}, "basis_ties", {"trim": "tensor", "merge_func": "mean"}),
    "balanced": ({"basis": "balanced"}, "basis_ta", {"lambda_scale": "tasks"}),
    "energy": ({"basis": "balanced", "energy": 0.7}, "basis_tsvm", {}),
    "pca": ({"basis": "pca"}, "basis_negate", {"forget": "code", "alpha": 0.7, "lambda_": 0.2}),
    "excluded": ({"basis": "balanced", "exclude": "w1"}, "basis_ta", {}),
}


@pytest.mark.parametrize("case", OVER)
def test_merges_over_task_vectors(case: str, tmp_path: Path) -> None:
    """They are merges over models with the decoded task vectors, which a zero base holds."""
    built, method, keys = OVER[case]
    torch.manual_seed(0)
    shapes = {"w0": (40, 30), "w1": (20, 50), "b": (300,)}
    base = {name: torch.zeros(shape) for name, shape in shapes.items()}
    models = {t: {n: torch.randn(shape) for n, shape in shapes.items()} for t in TASKS}
    bases = tvb_mergekit.build(base, models, tmp_path / "store", bits=2)
    pairs = zip(TASKS, bases.vectors, strict=True)
    decoded = {task: {name: vector.tensor(name) for name in shapes} for task, vector in pairs}
    found = tvb_mergekit.merge(bases, base, method, **built, **keys)
    want = tvb_mergekit.merge(tvb_mergekit.build(base, decoded, **built), base, method, **keys)
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)


def test_templates_the_library_and_exports(llamas: Models, tmp_path: Path) -> None:
    """A store's own recipes, `tvb merge`, `merge` and `export` agree with float64."""
    bases = llamas.build(tmp_path / "store", "--bits", 2, tasks=TASKS)
    names, found, base = bases.names, dense(bases), load(llamas.base)
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


@pytest.mark.parametrize("basis", ["balanced", "pca"])
def test_bases_at_few_bits(llamas: Models, basis: str, tmp_path: Path) -> None:
    """Of any basis; errors of tasks are bounded, and merges use the bases as they are."""
    bases = llamas.build(tmp_path / "s", "--bits", 3, basis=basis, num_bases=2, tasks=TASKS)
    assert not bases.keeps_tasks and bases.facts.store.folders[:2] == ["basis-000", "basis-001"]
    found, tau = dense(bases), taus_of(llamas, TASKS, bases.names)
    errors = (found @ bases.reconstruction(TASKS) - tau).norm(dim=0) / tau.norm(dim=0)
    for task, error in zip(TASKS, errors.tolist(), strict=True):
        known = bases.facts.errors[task]
        assert known.at_least <= error <= known.at_most < error + 0.5
    tvb("merge", tmp_path / "s", tmp_path / "out", "--method", "add", "--quiet")
    want = flat(load(llamas.base), bases.names) + 0.4 * found[:, :2].sum(1)
    close(flat(load(tmp_path / "out"), bases.names), want)
    said = refused("add", tmp_path / "s", llamas.models["poems"], "--task", "poems", "--quiet")
    assert "holds bases at 3 bits" in said


JOINING = {
    "--lossless": "joins 5 tasks without loss",
    "--bits=2": "stay as they are",
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
    assert ("gram" in grown.tensors) == (form != "--bits=2")
    for name, data in contents(tmp_path / "six").items():
        if name.split("/")[0] in SIX:
            assert (store / name).read_bytes() == data, name
    tvb("export", store, tmp_path / "poems", "--task", "poems", "--quiet")
    if form == "--lossless":
        check_export(six.models["poems"], tmp_path / "poems")
    tvb("remove", store, "--task", "code")
    tvb("check", store)
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
        total = (vectors_of(small) * small.scales).sum(1)
        close(flat(out, small.names), flat(six.states[0], small.names) + 0.4 * total)
    tvb("undo", store)
    assert stores.load(store).tasks == list(SIX)
    tvb("check", store)
    words = ("--task", "again", "--budget", 3, "--force", "--quiet")
    tvb("add", store, six.models["chat"], *words)
    bases = stores.load(store)
    assert bases.num_bases == 3 and not bases.keeps_tasks and "math" in bases.tasks
    for known in bases.facts.errors.values():
        assert known.at_least <= known.at_most and (form != "--lossless" or known.at_most < 1)


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


OVER_TO = [("ae", 3, "--keep=0.3"), ("balanced", 3, "--bits=2"), ("balanced", 9, "--keep=0.1")]


@pytest.mark.parametrize(("compress", "budget", "form"), OVER_TO)
def test_task_vectors_go_over_to_algorithm_1(llamas, compress, budget, form, tmp_path):
    store = tmp_path / "store"
    old = llamas.build(store, form, tasks=TASKS)
    found = vectors_of(old) * old.scales
    words = ("--task", "poems", "--budget", budget, "--compress", compress, "--quiet")
    done = tvb("add", store, llamas.models["poems"], *words)
    assert "by Algorithm 1" in done.output and "relative error at most: math" in done.output
    grown = stores.load(store)
    assert grown.num_bases == min(budget, 6) and not grown.keeps_tasks and grown.facts.bits is None
    tau = taus_of(llamas, SIX, old.names)
    if compress == "balanced":
        assert grown.basis_weights is not None
        total = vectors_of(grown) @ grown.basis_weights
        torch.testing.assert_close(total, found.sum(1) + tau[:, -1], rtol=1e-4, atol=1e-6)
    for later in (False, True):  # the bounds hold later, too, when bases are compressed
        if later:
            words = ("--task", "again", "--weight", 6, "--force", "--quiet")
            tvb("add", store, llamas.models["chat"], *words)
            grown = stores.load(store)
            tau = torch.cat([tau, 6 * taus_of(llamas, ["chat"], old.names)], 1)
        errors = (vectors_of(grown) @ grown.decoder - tau).norm(dim=0) / tau.norm(dim=0)
        for task, error in zip(grown.tasks, errors.tolist(), strict=True):
            known = grown.facts.errors[task]
            assert known.at_least - 1e-6 <= error <= known.at_most + 1e-6, task


def test_begun_by_additions(llamas: Models, tmp_path: Path) -> None:
    """A store of one task, and the library's way to the same."""
    store = tmp_path / "store"
    words = ("--base", llamas.base, "--bits", 2, "--quiet")
    tvb("add", store, llamas.models["math"], "--task", "math", "--weight", 2, *words)
    tvb_mergekit.add(store, llamas.base, llamas.models["code"], "code")
    two = llamas.build(tmp_path / "two", "--bits", 2, tasks=TASKS[:2])
    assert {n: v for n, v in files(store).items() if n.split("/")[0] in TASKS} == {
        n: v for n, v in files(tmp_path / "two").items() if "/" in n
    }
    torch.testing.assert_close(stores.load(store).tensors["gram_bases"], two.tensors["gram_bases"])
    models = {task: llamas.models[task] for task in TASKS[:2]}
    made = tvb_mergekit.build(llamas.base, models, tmp_path / "lib", weights={"math": 2.0}, bits=2)
    assert made.keeps_tasks and files(tmp_path / "lib").keys() == files(tmp_path / "two").keys()
    gone = tvb_mergekit.remove(tmp_path / "lib", "math")
    assert gone.tasks == ["code"]


def test_an_accelerator_decodes_the_same(llamas: Models, tmp_path: Path) -> None:
    """PyTorch's operations on the codes of a piece, where a CPU decodes as it reads."""
    bases = llamas.build(tmp_path / "store", "--bits", 3, tasks=TASKS)
    name = "model.embed_tokens.weight"
    parts = tuple(Part.of(vector, name, "delta") for vector in bases.vectors)
    item = Item(name, bases.vectors[0].tensors[name].shape, None, parts)
    layout = plan_layout(Needs(len(parts), 4 * len(parts)), Engine(memory=2**26))
    chunks = Chunks(layout, torch.device("cpu"))
    chunks.packed = True
    for start, stop in ((0, item.numel), (1024, 2500)):
        for place, _, tau in chunks.walk(Piece(item, start, stop, 0)):
            for row, vector in zip(tau, bases.vectors, strict=True):
                want = vector.tensor(name).view(-1)[start + place.start : start + place.stop]
                assert torch.equal(row, want)


# Mistakes


MISTAKES: dict[str, tuple[str, str]] = {
    "bits": ("build {r} {o} --bits 9", "--bits 9: expected 8, 4, 3, 2, 1, or less than 2"),
    "too small": ("build {r} {o} --size 6KB", "6,000 bytes: the other files"),
    "a size and energy": ("build {e} {o} --size 6MB", "--size: `energy` chooses M"),
    "a sample joins": ("add {z} {m} --task new --bits 0.5", "a sample does not join the codes"),
    "compress alone": ("add {z} {m} --task new --compress ae", "keeps all tasks; --budget M"),
    "with a budget": ("add {z} {m} --task new --bits 2 --budget 3", "with none of --budget"),
    "no such task": ("remove {z} --task mth", "did you mean `math`?"),
}


@pytest.fixture(scope="module")
def made(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    weighted(world("six")).build(folder / "store", "--bits", 2, tasks=TASKS)
    return folder


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line(llamas, made, case, tmp_path):
    words, wants = MISTAKES[case]
    places = {
        "r": made / "store.yml", "z": made / "store", "o": tmp_path / "out",
        "m": llamas.models["poems"],
        "e": write(llamas.recipe(basis="balanced", energy=0.9), tmp_path / "e"),
    }  # fmt: skip
    before = files(made)
    assert wants in refused(*words.format(**places).split())
    assert files(made) == before and not (tmp_path / "out").exists()


def test_what_removal_leaves(made: Path, llamas: Models, tmp_path: Path) -> None:
    """Recipes that name a removed task are refused; the last task stays."""
    store = Path(shutil.copytree(made / "store", tmp_path / "store"))
    tvb("remove", store, "--task", "code")
    over = recipe("basis_ta", llamas.base, [store / task for task in TASKS], basis="none")
    assert "no such task" in merge(over, tmp_path / "out", fails=True).output
    write(over, tmp_path / "r")
    assert "(removed?), which holds math, safety" in refused("inspect", tmp_path / "r.yml")
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
        assert "is a task vector of a store" in said and "tvb export STORE --all DIR" in said
    named = recipe("basis_ta", llamas.base, listed, {0: {"task": "x"}})
    assert "its store calls it" in merge(named, tmp_path / "out", fails=True).output


def test_weights_go_through_generations(llamas: Models, tmp_path: Path) -> None:
    """A store's own times a recipe's: exports are of the task as it was trained."""
    store = llamas.build(tmp_path / "store", "--bits", 8, tasks=TASKS)
    made = recipe("basis_ta", llamas.base, [tmp_path / "store" / "math"], {0: {"weight": 3.0}})
    write({**made, "parameters": {"basis": "none"}}, tmp_path / "r")
    for name, words in (("dense", ()), ("coded", ("--bits", "8"))):
        tvb("build", tmp_path / "r.yml", tmp_path / name, *words, "--quiet")
        assert stores.load(tmp_path / name).facts.parameters["weights"] == {"math": 6.0}
        tvb("export", tmp_path / name, tmp_path / f"{name}-math", "--task", "math", "--quiet")
        tau = flat(llamas.tau("math"), store.names) / 2
        start, made = load(llamas.base), load(tmp_path / f"{name}-math")
        found = flat(made, store.names) - flat(start, store.names)
        assert float((found - tau).norm() / tau.norm()) < 0.02


def test_a_task_called_base_and_a_damaged_one(llamas: Models, tmp_path: Path) -> None:
    listed = [llamas.models[task] for task in TASKS[:3]]
    made = recipe("basis_ta", llamas.base, listed, {0: {"task": "base"}})
    write(made, tmp_path / "r")
    store = tmp_path / "store"
    tvb("build", tmp_path / "r.yml", store, "--bits", 2, "--quiet")
    tvb("merge", store, tmp_path / "before", "--method", "add", "--quiet")
    shutil.rmtree(store / "code")
    assert "take it out with `tvb remove`" in refused("inspect", store)
    tvb("remove", store, "--task", "code")
    tvb("add", store, llamas.models["legal"], "--task", "legal", "--quiet")
    tvb("remove", store, "--task", "base")
    tvb("merge", store, tmp_path / "after", "--method", "add", "--quiet")
    bases = stores.load(store)
    want = flat(load(llamas.base), bases.names) + 0.4 * dense(bases).sum(1)
    close(flat(load(tmp_path / "after"), bases.names), want)


def test_short_tensors_and_small_tasks(tmp_path: Path) -> None:
    """Errors of a few elements are as exact as those of many, and no task is lost."""
    torch.manual_seed(0)
    shapes = {f"s{k}": (1 + k % 5,) for k in range(40)} | {"w": (300, 50), "v": (200, 50)}
    base = {name: torch.randn(shape) for name, shape in shapes.items()}
    models = {
        task: {n: v + size * torch.randn_like(v) for n, v in base.items()}
        for task, size in (("a", 0.01), ("b", 0.02), ("small", 0.0002))
    }
    bases = tvb_mergekit.build(base, models, tmp_path / "store", bits=2)
    for row, name in enumerate(bases.names):
        for k, (task, vector) in enumerate(zip(models, bases.vectors, strict=True)):
            tau = models[task][name] - base[name]
            left = float((tau - vector.tensor(name)).double().square().sum())
            found = float(bases.tensors["tensor_errors"][row, k])
            assert found == pytest.approx(left, rel=1e-3, abs=1e-6 * float(tau.square().sum()))
    text = (tmp_path / "store" / "a" / "model.safetensors").read_bytes()
    later = re.sub(rb'version\\": \d', rb'version\\": 7', text).replace(b'"w\\": [1', b'"w\\": [5')
    (tmp_path / "later.safetensors").write_bytes(later)
    with pytest.raises(tvb_mergekit.UserError, match=r"codes of version 7.*upgrade it"):
        Codes.open(tmp_path / "later.safetensors")
