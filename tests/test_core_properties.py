"""The streamed core against dense arithmetic on arbitrary tensors: Gram pass, Trim, combining."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from modes import in_every_thread
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tvb_mergekit import engine
from tvb_mergekit.engine import Tunables, build_basis, merge_tensor
from tvb_mergekit.errors import UserError
from tvb_mergekit.gram import GramSums, Sketch, block_budget
from tvb_mergekit.layout import BLOCK, Needs, chunk_length, plan_layout
from tvb_mergekit.progress import Progress
from tvb_mergekit.recipe import resolve_settings
from tvb_mergekit.stream import Item, Part, gram_of, held_item
from tvb_mergekit.trim import Histogram, MagnitudeHistogram, exact_thresholds
from tvb_mergekit.writing import MemorySink

CPU = torch.device("cpu")
quick = settings(max_examples=60, deadline=None, derandomize=True)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = st.one_of(
    st.integers(1, 50), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 2**17 + 5])
)
Models = dict[str, tuple[Tensor, list[Tensor]]]


@st.composite
def models(draw: st.DrawFn, most: int = 4) -> Models:
    """Named tensors of a base and T models, of any dtypes, lengths and scales."""
    size = draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtypes = [draw(st.sampled_from(DTYPES)) for _ in range(size + 1)]
    made = {}
    for number in range(draw(st.integers(1, most))):
        length = draw(LENGTHS)
        scale = 10.0 ** draw(st.integers(-3, 0))
        base = torch.randn(length, generator=generator)
        listed = [
            (base + scale * torch.randn(length, generator=generator)).to(dtypes[1 + i])
            for i in range(size)
        ]
        made[f"t{number}"] = (base.to(dtypes[0]), listed)
    return made


def items_of(made: Models, held: bool = True) -> list[Item]:
    """In memory, or as if they were read."""
    if held:
        return [held_item(name, base, listed) for name, (base, listed) in made.items()]
    return [
        Item(name, tuple(base.shape), read_part(base), tuple(map(read_part, listed)))
        for name, (base, listed) in made.items()
    ]


def read_part(tensor: Tensor) -> Part:
    def read(start: int, stop: int, room: Tensor) -> Tensor:
        return room[: stop - start].copy_(tensor.reshape(-1)[start:stop])

    return Part(tensor.dtype, read)


def tasks_of(made: Models) -> list[str]:
    return [f"task{i}" for i in range(len(next(iter(made.values()))[1]))]


def dense(made: Models) -> np.ndarray:
    columns = []
    for index in range(len(tasks_of(made))):
        parts = [m[index].double() - base.double() for base, m in made.values()]
        columns.append(torch.cat(parts).numpy())
    return np.stack(columns, axis=1)


@quick
@given(models())
def test_gram_pass_equals_the_dense_product(made: Models) -> None:
    sums = gram_of(items_of(made), tasks_of(made))
    tau = dense(made)
    want = tau.T @ tau
    scale = np.sqrt(np.outer(np.diag(want), np.diag(want)))
    assert (np.abs(sums.gram.numpy() - want) <= 1e-6 * scale).all()
    assert torch.equal(sums.gram, sums.gram.T)
    assert sums.num_parameters == len(tau)
    base = np.concatenate([base.double().numpy() for base, _ in made.values()])
    assert sums.base_norm_squared == pytest.approx(float(base @ base), rel=1e-5)


@quick
@given(models(), st.integers(1, 4))
def test_budget_and_devices_do_not_change_the_sums(made: Models, columns: int) -> None:
    sketch = Sketch(columns, 5)
    one = gram_of(items_of(made), tasks_of(made), sketch=sketch)
    small = gram_of(items_of(made), tasks_of(made), sketch=sketch, budget=2**20)
    two = gram_of(items_of(made, False), tasks_of(made), sketch=sketch, devices=[CPU, CPU])
    assert torch.equal(one.gram, two.gram)
    pairs = [(one.gram, small.gram)]
    for left, right in (
        (one.sketch_gram, small.sketch_gram),
        (one.sketch_tasks, small.sketch_tasks),
    ):
        assert left is not None and right is not None
        pairs.append((left, right))
    for left, right in pairs:
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12 * float(left.abs().max()))


@quick
@given(models(), st.sampled_from([None, 2]), st.sampled_from([2**24, 2**26, 2**28]))
def test_sums_are_the_same_to_the_bit_however_they_are_shared(
    made: Models, columns: int | None, budget: int
) -> None:
    """Pieces, threads and devices do not matter; the length of a chunk is the same."""
    sketch = None if columns is None else Sketch(columns, 3)
    one = gram_of(items_of(made), tasks_of(made), sketch=sketch)
    devices = [CPU] * 3
    other = gram_of(
        items_of(made, False), tasks_of(made), sketch=sketch, devices=devices, budget=budget
    )
    assert torch.equal(one.gram, other.gram)
    assert one.base_norm_squared == other.base_norm_squared
    if columns is not None:
        assert one.sketch_gram is not None and other.sketch_gram is not None
        assert torch.equal(one.sketch_gram, other.sketch_gram)


class Allocations(TorchDispatchMode):
    """The largest tensor that any operation makes, in bytes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given_to = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given_to:
            Allocations.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("megabytes", [1, 4])
def test_no_buffer_grows_with_the_tensor(megabytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVB_MERGEKIT_BLOCK_MB", str(megabytes))
    budget = block_budget()
    assert budget == megabytes * 2**20
    base = torch.randn(3_000_000)
    made = {"t": (base, [base.bfloat16() + 0.01 for _ in range(6)])}
    Allocations.largest = 0
    with in_every_thread(Allocations):
        gram_of(items_of(made, False), tasks_of(made), budget=budget)
    assert 10_000 < Allocations.largest <= budget
    for rows in (1, 3, 8, 20):
        layout = plan_layout(Needs(rows, 4 * rows + 4), [CPU], budget)
        assert layout.chunk % BLOCK == 0 and layout.chunk >= BLOCK
        assert layout.chunk <= chunk_length(rows, "cpu")
        assert 4 * rows * layout.chunk <= layout.nbytes <= budget
    with pytest.raises(UserError, match=r"too little for 1000 models at a time: \d"):
        plan_layout(Needs(1000, 4004), [CPU], budget)


@quick
@given(models(most=1), st.data())
def test_adding_task_vectors_equals_float64(made: Models, data: st.DataObject) -> None:
    ((base, listed),) = made.values()
    tasks = tasks_of(made)
    weights = [data.draw(st.floats(-3, 3)) for _ in listed]
    cut = data.draw(st.integers(0, len(listed)))  # two steps, as negation beside addition has
    scale = data.draw(st.floats(-2, 2))
    parts = [*weights[:cut], *[0.0] * (len(listed) - cut)], [*[0.0] * cut, *weights[cut:]]
    steps = [(one, torch.tensor(part)) for one, part in zip((1.0, scale), parts, strict=True)]
    weights[cut:] = [scale * weight for weight in weights[cut:]]
    before = [tensor.clone() for tensor in (base, *listed)]
    settings_ = resolve_settings("basis_ta", {"basis": "none"}, tasks)
    assume(all((model.float() != base.float()).any() for model in listed))  # else refused
    basis = build_basis(settings_, tasks, [1.0] * len(tasks), lambda: items_of(made))
    with mock.patch.object(basis, "steps", lambda *_: steps):
        out = merge_tensor(basis, "t0", base, listed, Tunables(1.0), torch.float32, CPU)
    tau = torch.stack([m.double() - base.double() for m in listed])
    moved = torch.tensor(weights, dtype=torch.float64)[:, None] * tau
    want = base.double() + moved.sum(0)
    roundings = len(listed) + 5  # each of a partial sum, a weight or a product
    slack = 2.0**-24 * roundings * (base.double().abs() + moved.abs().sum(0)) + 1e-38
    assert ((out.double() - want).abs() <= slack).all()
    for old, new in zip(before, (base, *listed), strict=True):
        assert torch.equal(old, new)


METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "addition": ("basis_ta", {"basis": "pca"}),
    "negation": ("basis_negate", {"basis": "balanced", "forget": "task0", "alpha": 0.5}),
    "projection": ("basis_negate", {"basis": "rand_proj", "forget": "task0", "alpha": 0.5}),
    "ties": ("basis_ties", {"basis": "balanced"}),
    "ties by tensor": ("basis_ties", {"basis": "none", "trim": "tensor", "merge_func": "max"}),
    "ties mean": ("basis_ties", {"basis": "none", "merge_func": "mean"}),
}


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(made=models(), threads=st.sampled_from([1, 3]), kept=st.booleans())
def test_merging_from_files_is_merging_in_memory(
    method: str, made: Models, threads: int, kept: bool
) -> None:
    """To the bit: in pieces that are read, by several threads, or a tensor at a time."""
    name, keys = METHODS[method]
    tasks = tasks_of(made)
    assume(method != "projection" or sum(b.numel() for b, _ in made.values()) > 100)
    settings_ = resolve_settings(name, keys, tasks)
    basis = build_basis(settings_, tasks, [1.0] * len(tasks), lambda: items_of(made))
    tunables = Tunables(0.7, 0.5, 0.3)
    jobs = {n: engine.Job(n, tunables) for n in made}
    if kept:
        del jobs["t0"]
    items = [replace(item, out=torch.bfloat16) for item in items_of(made, False)]
    sink, seen = MemorySink(1), [0]
    engine.merge_items(basis, items, jobs, sink, devices=[CPU] * threads, progress=counting(seen))
    for n, (base, listed) in made.items():
        want = merge_tensor(basis, n, base, listed, tunables, torch.bfloat16, CPU)
        want = want if n in jobs else base.bfloat16()
        assert torch.equal(sink.states[0][n], want)
    assert seen == [0]  # all the bytes that were announced


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(made=models(), scale=st.floats(-2, 2), out=st.sampled_from(DTYPES))
def test_a_direction_alone_gives_every_merge(
    method: str, made: Models, scale: float, out: torch.dtype
) -> None:
    """theta_0 + fl(scale * direction), to the bit of the output dtype."""
    name, keys = METHODS[method]
    tasks = tasks_of(made)
    assume(method != "projection" or sum(b.numel() for b, _ in made.values()) > 100)
    assume((dense(made) != 0).any(0).all())
    settings_ = resolve_settings(name, keys, tasks)
    basis = build_basis(settings_, tasks, [1.0] * len(tasks), lambda: items_of(made))
    jobs = {n: engine.Job(n, Tunables(0.0, density=0.3), alone=True) for n in made}
    sink = MemorySink(1)
    engine.merge_items(basis, items_of(made, False), jobs, sink)
    if name == "basis_negate":
        tunables = Tunables(0.0, -scale)
    else:
        tunables = Tunables(scale, density=0.3)
    for n, (base, listed) in made.items():
        found = base.float() + scale * sink.states[0][n]
        assert torch.equal(found.to(out), merge_tensor(basis, n, base, listed, tunables, out, CPU))


def counting(left: list[int]) -> Progress:
    """Progress that subtracts what is told from what was announced."""

    def start(title: str, total: int) -> Any:
        left[0] += total

        def update(nbytes: int) -> None:
            left[0] -= nbytes

        return update

    return start


# Trim


@quick
@given(
    st.integers(20_000, 200_000),
    st.sampled_from(["normal", "uniform", "laplace", "wide", "tiny"]),
    st.floats(0.001, 1.0),
    st.integers(0, 2**31),
)
def test_the_histogram_keeps_the_asked_share(
    length: int, kind: str, density: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    values = {
        "normal": lambda: random.normal(size=length),
        "uniform": lambda: random.uniform(-1, 1, length),
        "laplace": lambda: random.laplace(size=length),
        "wide": lambda: random.normal(size=length) * 10.0 ** random.uniform(-6, 0, length),
        "tiny": lambda: random.normal(size=length) * 1e-10,
    }[kind]()
    row = torch.from_numpy(values.astype(np.float32))
    histogram = MagnitudeHistogram(1)
    for piece in row.split(7001):
        histogram.add(piece[None])
    (limit,) = histogram.thresholds(density).tolist()
    share = float((row.abs() >= limit).double().mean())
    assert abs(share - density) <= 1e-4 + 1 / length


@quick
@given(
    st.integers(1, 6000),
    st.floats(0.001, 1.0),
    st.sampled_from([0, 1, 3]),
    st.integers(0, 2**31),
)
def test_trim_tensor_is_topk(length: int, density: float, decimals: int, seed: int) -> None:
    """Also where magnitudes are equal (rounded values) and where most are 0."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(3, length, generator=generator)
    if decimals:
        values = values.mul(10**decimals / 10).round().div(10**decimals)

    def sweep(fresh: Callable[[], Histogram]) -> Histogram:
        total, other = fresh(), fresh()
        for number, piece in enumerate(values.split(1000, dim=1)):
            (other if number % 2 else total).add(piece)
        total.counts += other.counts
        return total

    limits = exact_thresholds(sweep, 3, length, density)
    count = max(1, int(density * length))
    assert torch.equal(limits, values.abs().topk(count, dim=1).values[:, -1])


def whole(made: Models, method: str, keys: dict[str, Any], tunables: Tunables) -> dict[str, Tensor]:
    tasks = tasks_of(made)
    settings_ = resolve_settings(method, keys, tasks)
    basis = build_basis(settings_, tasks, [1.0] * len(tasks), lambda: items_of(made))
    return {
        name: merge_tensor(basis, name, base, listed, tunables, torch.float32, CPU)
        for name, (base, listed) in made.items()
    }


@quick
@given(models(), st.floats(0.01, 1.0))
def test_one_task_trimmed_by_tensor_is_exactly_topk(made: Models, density: float) -> None:
    """With one basis, TIES is Trim: what is kept, and nothing else, is added as it is."""
    single = {name: (base, listed[:1]) for name, (base, listed) in made.items()}
    keys = {"basis": "none", "trim": "tensor"}
    merged = whole(single, "basis_ties", keys, Tunables(1.0, density=density))
    for name, (base, (model,)) in single.items():
        tau = model.float() - base.float()
        count = max(1, int(density * tau.numel()))
        limit = tau.abs().topk(count).values[-1]
        kept = torch.where(tau.abs() >= (0.0 if density >= 1 else limit), tau, 0.0)
        assert torch.equal(merged[name], base.float() + kept)


@pytest.mark.parametrize("density", [0.001, 0.05, 0.2, 0.5, 0.9, 1.0])
def test_the_kept_share_of_a_whole_model(density: float) -> None:
    """`trim: model` counts over all tensors together, however they are cut and scaled."""
    generator = torch.Generator().manual_seed(0)
    made: Models = {}
    for number, (length, scale) in enumerate([(300_000, 1.0), (500_000, 0.1), (7, 50.0)]):
        base = torch.randn(length, generator=generator)
        made[f"t{number}"] = (base, [base + scale * torch.randn(length, generator=generator)])
    merged = whole(made, "basis_ties", {"basis": "none"}, Tunables(1.0, density=density))
    tau = torch.cat([listed[0] - base for base, listed in made.values()])
    moved = torch.cat([merged[name] != base for name, (base, _) in made.items()])
    kept = float(moved.double().mean())
    assert kept == pytest.approx(density, abs=1e-4)
    limit = tau.abs().sort(descending=True).values[round(density * len(tau)) - 1]
    differs = moved != (tau.abs() >= limit)
    assert float(differs.double().mean()) <= 1e-4
    assert (tau[differs].abs() - limit).abs().max() <= 2e-4 * limit if differs.any() else True


def test_equal_magnitudes_are_kept_together() -> None:
    base = torch.zeros(1000)
    model = torch.cat([torch.full((600,), 0.5), torch.full((400,), -0.25)])
    made: Models = {"t": (base, [model])}
    for trim in ("model", "tensor"):
        merged = whole(
            made, "basis_ties", {"basis": "none", "trim": trim}, Tunables(1.0, density=0.5)
        )
        assert torch.equal(merged["t"], torch.where(model == 0.5, model, 0.0))


def test_weights_scale_the_sums_exactly() -> None:
    generator = torch.Generator().manual_seed(0)
    square = torch.randn(5, 5, dtype=torch.float64, generator=generator)
    sums = GramSums(square @ square.T, 1.0, 7)
    weights = [1.0, -2.0, 0.5, 4.0, -1.0]
    scaled = sums.scaled(weights)
    turned = torch.diag(torch.tensor(weights, dtype=torch.float64))
    torch.testing.assert_close(scaled.gram, turned @ sums.gram @ turned, rtol=1e-15, atol=0)
    assert (scaled.num_parameters, scaled.base_norm_squared) == (7, 1.0)
    assert engine.Tunables.of({"lambda": 0.0, "alpha": None}).lambda_ == 0.0
