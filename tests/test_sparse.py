"""Sparse vectors: their files by the manual's program, stores of them, and the stitched merge."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
import transformers
import yaml
from commands import assert_close, merge, ready, recipe, refused, tvb
from formats import sparse as by_the_format
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_tune_line import moved_as_merged
from tiny import family, load
from torch import Tensor

import tvb_mergekit
from tvb_mergekit.core.learned import Stitch
from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.document import read_document
from tvb_mergekit.plugin.inputs import Options, dense_of
from tvb_mergekit.plugin.planner import planned
from tvb_mergekit.store import store as stores
from tvb_mergekit.store.sparse import sparse_store
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.sparse import SPAN, Sparse, write_sparse
from tvb_mergekit.tensors.stream import Item, Part
from tvb_mergekit.tensors.writing import MemorySink, content_hash
from tvb_mergekit.tune.merges import read_tuned

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TASKS = ("math", "code", "chat")
Array = NDArray[np.float64]


SHAPES = st.sampled_from(
    [(), (0,), (3, 0), (1,), (255,), (256,), (257,), (2, 3, 100), (SPAN,), (3, SPAN // 2 - 5)]
)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_what_is_written_is_read(data: st.DataObject) -> None:
    kinds = st.tuples(SHAPES, st.sampled_from([0, 0.003, 0.05, 0.5, 1]))
    given_, dtype = data.draw(st.lists(kinds, max_size=4)), data.draw(st.sampled_from(DTYPES))
    size = data.draw(st.sampled_from([1e-6, 1.0]))
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    state = {
        f"layer.{k}.counts": size * torch.randn(shape) * (torch.rand(shape) < density)
        for k, (shape, density) in enumerate(given_)
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        write_sparse(file, iter(state.items()), dtype)
        assert [each.name for each in file.parent.iterdir()] == [file.name]
        vector, found = Sparse.open(file.parent), by_the_format(file)
        with safe_open(file, "pt") as stored:
            said = stored.metadata()
            held = [(name, stored.get_tensor(name)) for name in stored.keys()]
        assert said.pop("xxh3_128", None) == content_hash(said, held)
        assert list(vector.tensors) == list(state) == list(found)
        kept = 0
        for name, tensor in state.items():
            want = tensor.to(dtype).float()
            assert torch.equal(vector.tensor(name), want)
            np.testing.assert_array_equal(found[name], want.numpy())
            start = data.draw(st.integers(0, tensor.numel()))
            stop = data.draw(st.integers(start, tensor.numel()))
            vector.ahead(name, start, stop)
            chunk = torch.full((stop - start + 1,), 7.0)
            part = vector.read(name, start, stop, chunk)
            assert torch.equal(part, want.reshape(-1)[start:stop]) and chunk[-1] == 7
            kept += int(want.count_nonzero())
        assert vector.count == kept
        assert vector.nbytes < file.stat().st_size
        assert len(vector.fingerprint()) == 64 and len(vector.stamp()) == 1


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    file, one = tmp_path / "v.safetensors", ("w", torch.ones(3))

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield one
        raise KeyboardInterrupt

    for vectors, dtype, told in (
        ([one, one], torch.float16, "`w` is given twice"),
        ([("w", torch.tensor([1e5]))], torch.float16, "`w`: values overflow float16"),
        ([("w", torch.tensor([torch.nan]))], torch.float32, "overflow float32.*take small"),
        ([one], torch.int8, "expected torch.float16, .bfloat16 or .float32"),
    ):
        with pytest.raises(UserError, match=told):
            write_sparse(file, vectors, dtype)
    with pytest.raises(KeyboardInterrupt):
        write_sparse(file, broken())
    with pytest.raises(FileNotFoundError):
        write_sparse(tmp_path / "none" / "v.safetensors", [one])
    assert list(tmp_path.iterdir()) == []


Change = Callable[[dict[str, Tensor], dict[str, Any]], object]


def _with(part: str, values: list[int], dtype: torch.dtype = torch.uint8) -> Change:
    return lambda held, said: held.update({f"w.{part}": torch.tensor(values, dtype=dtype)})


def _shape(*shape: object) -> Change:
    return lambda held, said: said["tensors"].update(w=list(shape))


U16 = torch.uint16
DAMAGE: dict[str, tuple[Change, str]] = {
    "a newer version": (lambda held, said: said.update(version=2), "of version 2, .* upgrade it"),
    "no shapes": (lambda held, said: said.pop("tensors"), "does not describe sparse"),
    "a shape too large": (_shape(2**70), "does not describe sparse"),
    "a negative shape": (_shape(-1, -300), "does not describe sparse"),
    "counts that are missing": (lambda held, said: held.pop("w.counts"), "`w.counts` does not fit"),
    "counts beyond a block": (_with("counts", [65534, 5], U16), "not what was"),
    "counts of bytes": (_with("counts", [2, 1]), "not what was"),
    "integer values": (_with("values", [1, 1, 1], torch.int8), "values in int8, expected"),
    "a place twice": (_with("offsets", [3, 3, 0]), "not what was"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_files_that_do_not_hold_what_they_say(case: str, tmp_path: Path) -> None:
    tensor, file = torch.zeros(300), tmp_path / "model.safetensors"
    tensor[[3, 5, 299]] = 1.0
    write_sparse(file, [("w", tensor)])
    held = {name: value.clone() for name, value in load_file(file).items()}
    said = {"version": 1, "tensors": {"w": [300]}}
    change, told = DAMAGE[case]
    change(held, said)
    save_file(held, file, {"tvb_sparse": json.dumps(said)})
    with pytest.raises(UserError, match=told) as error:
        Sparse.open(file).tensor("w")
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


@given(st.integers(1, 4), st.integers(1, 600), st.integers(0, 2**16))
@settings(max_examples=30, deadline=None)
def test_overlaps_are_averaged(count: int, numel: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = draw.standard_normal((count, numel)) * (draw.random((count, numel)) < 0.4)
    start = draw.standard_normal(numel)
    want = start + rows.sum(0) / np.maximum((rows != 0).sum(0), 1)
    with tempfile.TemporaryDirectory() as folder:
        parts: list[Part] = []
        for k, row in enumerate(rows):
            file = Path(folder) / f"{k}.safetensors"
            write_sparse(file, [("w", torch.from_numpy(row))], torch.float32)
            parts.append(Part.of(Sparse.open(file), "w", "delta"))
        base = torch.from_numpy(start).float()
        held = Part(torch.float32, lambda a, b, out: base[a:b], held=True)
        sink = MemorySink(1)
        combine_pass([Item("w", (numel,), held, tuple(parts))], {"w": Stitch(count)}, sink)
    np.testing.assert_allclose(sink.states[0]["w"], want, rtol=1e-6, atol=1e-6)


# Stores


@dataclass
class World:
    """Three models, and stores of sparse bases of them."""

    folder: Path
    base: Path
    models: list[Path]

    def recipe(self, file: Path) -> Path:
        """Two balanced bases of the models; the first model counts twice."""
        keys, own = {"basis": "balanced", "num_bases": 2}, {0: {"weight": 2.0}}
        made = recipe("basis_ta", self.base, self.models, own, dtype=None, **keys)
        file.write_text(yaml.safe_dump(made))
        return file

    def masked(self, recipe_: Path, out: Path, dtype: torch.dtype = torch.float16) -> Path:
        """The store of the bases of a recipe, with masks that are drawn."""
        document, files = read_document(recipe_), []
        with planned(document, Options()) as plan:
            plan.build()
            assert plan.basis is not None
            dense = dense_of(document, plan)
            bases = plan.basis.weighted_encoder
            items = {item.base.name: item for item in plan.tasks.items if item.base}
            for m in range(bases.shape[1]):
                torch.manual_seed(m)
                files.append(out.with_name(f"{out.name}-{m}.safetensors"))
                vectors = ((str(n), _masked(item, bases[:, m])) for n, item in items.items())
                write_sparse(files[-1], vectors, dtype)
            sparse_store(dense, files, out, plan.engine)
        return out

    @property
    def dense(self) -> reference.Dense:
        return reference.Dense.of(self.base, self.models, [2.0, 1.0, 1.0])


def _masked(item: Item, column: Tensor) -> Tensor:
    """A fifth of the entries of a basis, 1.1 times as large."""
    whole = torch.stack([item.whole(part).double() for part in item.inputs])
    if item.inputs[0].holds == "weight":
        assert item.base is not None
        whole -= item.whole(item.base).double()
    vector = 1.1 * column @ whole
    return (vector * (torch.rand(len(vector)) < 0.2)).view(item.shape)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    made = World(folder, *family(folder, tasks=TASKS))
    made.masked(made.recipe(folder / "sparse.yml"), folder / "sparse")
    return made


@pytest.fixture(scope="module")
def sparse(world: World) -> Path:
    return world.folder / "sparse"


def vectors_of(store: Path, dense: reference.Dense) -> Array:
    """The bases of a store, by the manual's program, [d, M]."""
    states = [by_the_format(f) for f in sorted(store.glob("basis-*/model.safetensors"))]
    columns = [np.concatenate([state[n].ravel() for n in dense.names]) for state in states]
    return np.stack(columns, 1).astype(float)


def check(bases: Bases, dense: reference.Dense, vectors: Array, encoder: Array) -> None:
    facts, tensors, tau = bases.facts, bases.tensors, dense.tau
    assert facts.store.codec == "sparse" and facts.store.compress is None
    assert facts.store.basis_weights is None and bases.shares.tolist() == [1.0] * len(vectors[0])
    np.testing.assert_allclose(tensors["gram_bases"], vectors.T @ vectors, rtol=1e-5)
    np.testing.assert_allclose(bases.encoder, encoder, rtol=1e-6, atol=1e-9)
    low, high = bases.tensors["errors"].numpy()
    errors = np.linalg.norm(vectors @ bases.decoder.numpy() - tau, axis=0)
    assert (low <= errors).all() and (errors <= high).all()
    assert facts.density == pytest.approx((vectors != 0).mean())
    assert bases.path is not None
    stored = [file.stat().st_size for file in bases.path.glob("*/*.safetensors")]
    assert facts.bytes == sum(stored)


def test_a_store_of_a_recipe(world: World, sparse: Path) -> None:
    bases, dense = stores.check(sparse), world.dense
    vectors, gram, encoder = vectors_of(sparse, dense), dense.gram, bases.tensors["encoder"].numpy()
    reference.check_encoder("balanced", gram, encoder)
    check(bases, dense, vectors, encoder)
    want = np.linalg.lstsq(vectors, dense.tau, rcond=None)[0]
    np.testing.assert_allclose(bases.decoder, want, rtol=1e-4, atol=1e-6)
    loss = float(np.square(vectors @ want - dense.tau).sum())
    assert bases.facts.loss == pytest.approx(loss, rel=1e-4)
    assert bases.facts.retained_energy == pytest.approx(1 - loss / np.trace(gram), rel=1e-4)
    low, high = bases.tensors["errors"]
    assert ((high - low) <= 1e-3 * bases.tensors["norms"]).all()
    assert sorted(p.name for p in sparse.iterdir()) == [
        "basis-000", "basis-001", "basis.json", "basis.safetensors", "recipes",
    ]  # fmt: skip
    assert not list(world.folder.glob("*partial*")) and not list(world.folder.glob(".*"))


def test_a_store_of_a_store(world: World, tmp_path: Path) -> None:
    """The bases have another order and weights."""
    source, dense, file = tmp_path / "source", world.dense, world.recipe(tmp_path / "r.yml")
    tvb("build", file, source, "--quiet", "--bits", 3)
    listed = [source / "basis-001", source / "basis-000"]
    turned = recipe("basis_ta", world.base, listed, {0: {"weight": 0.5}}, dtype=None)
    file.write_text(yaml.safe_dump(turned))
    bases = stores.check(world.masked(file, tmp_path / "made", torch.bfloat16))
    first = stores.load(source)
    assert first.encoder is not None
    vectors = vectors_of(tmp_path / "made", dense)
    check(bases, dense, vectors, first.encoder[:, [1, 0]].numpy() * [0.5, 1])
    assert bases.facts.loss is None and bases.facts.bits is None
    assert bases.facts.store.dtype == "bfloat16"
    shutil.rmtree(source)  # the store does not need it
    tvb("merge", tmp_path / "made", tmp_path / "out", "--method", "add", "--quiet")


METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "ties": ("basis_ties", {"density": 0.1, "lambda": 1.0}),
    "tsvm": ("basis_tsvm", {"lambda": 1.0}),
    "negate": ("basis_negate", {"forget": "code", "alpha": 0.7, "lambda": 0.2}),
}


@pytest.mark.parametrize("case", METHODS)
def test_merges_over_it(world: World, sparse: Path, case: str, tmp_path: Path) -> None:
    method, keys = METHODS[case]
    dense, listed = world.dense, [sparse / "basis-000", sparse / "basis-001"]
    merged = merge(recipe(method, world.base, listed, **keys), tmp_path / "out")
    vectors, skip = vectors_of(sparse, dense), None
    if method == "basis_ties":
        found = reference.ties(dense, vectors, 1.0, keys["density"], "model")
        want = found.merged
        skip = {n: t.bool() for n, t in dense.split(found.boundary.astype(float)).items()}
    elif method == "basis_negate":
        forgotten = vectors @ stores.load(sparse).decoder.numpy()[:, [1]]
        want = reference.negation(dense, vectors, forgotten, 0.2, 0.7)
    else:
        want = reference.by_matrices(dense, vectors, method, keys, 1.0)
    assert_close(merged.tensors, dense.split(want), load(world.base), skip, strict=1e-5)
    assert merged.facts["from_store"] == str(sparse)


def test_every_command(world: World, sparse: Path, tmp_path: Path) -> None:
    dense = world.dense
    vectors, base = vectors_of(sparse, dense), load(world.base)
    told = tvb("inspect", sparse).output
    assert "sparse float16 (20 % of the entries)" in told
    said = json.loads(tvb("inspect", sparse, "--json").output)
    assert said["density"] == pytest.approx(0.2, 0.01)
    for name in ("add", "iso", "forget-math"):
        assert "over 2 bases" in tvb("check", sparse / "recipes" / f"{name}.yml").output
    tvb("merge", sparse, tmp_path / "add", "--method", "add", "--quiet")
    by_mergekit = merge(ready(sparse, "add.yml"), tmp_path / "by-mergekit")
    want = dense.split(reference.addition(dense, vectors, 0.4))
    library = tvb_mergekit.merge(tvb_mergekit.load(sparse), world.base, lambda_=0.4)
    for found in (load(tmp_path / "add"), by_mergekit.tensors, library):
        assert_close(found, want, base)

    decoder = stores.load(sparse).decoder.numpy()
    model = transformers.AutoModelForCausalLM.from_pretrained(world.base)
    live = tvb_mergekit.attach(model, sparse)
    tvb("export", sparse, "--all", tmp_path / "all", "--quiet")
    for k, task in enumerate(TASKS):
        column = vectors @ decoder[:, k] / (2.0 if k == 0 else 1.0)
        found = load(tmp_path / "all" / task)
        assert_close(found, dense.split(dense.theta + column), base)
        moved = live.use(task).state_dict()
        assert all(torch.equal(moved[name], tensor) for name, tensor in found.items())
    tvb("export", sparse, tmp_path / "one", "--basis", 1, "--quiet")
    assert_close(load(tmp_path / "one"), dense.split(dense.theta + vectors[:, 1]), base)

    tuned = read_tuned(str(sparse), Options())
    made = merge(tuned.at(0.55), tmp_path / "tuned").tensors
    assert moved_as_merged(tuned, tmp_path / "line", {0.55: made}) == len(made)


def test_what_is_refused(world: World, sparse: Path, tmp_path: Path) -> None:
    said = refused("add", sparse, world.models[0], "--task", "new", "--quiet")
    assert "holds sparse bases, whose masks" in said
    assert "nothing to undo" in refused("undo", sparse)
    assert "no task can be taken out" in refused("remove", sparse, "--task", "math")
    listed = [sparse / "basis-000", sparse / "basis-001"]
    (tmp_path / "r.yml").write_text(yaml.safe_dump(recipe("basis_ta", world.base, listed)))
    assert "lists the bases of" in refused("build", tmp_path / "r.yml", tmp_path / "out")
    stock = recipe("task_arithmetic", world.base, listed, weight=1.0)
    said = merge(stock, tmp_path / "stock", fails=True).output
    assert "is a basis vector of a store" in " ".join(said.split())
