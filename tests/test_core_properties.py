"""The streamed core against dense arithmetic on arbitrary tensors: Gram pass, Trim, combining."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tvb_mergekit import engine
from tvb_mergekit.combine import add_task_vectors
from tvb_mergekit.engine import Tunables, build_basis, merge_tensor
from tvb_mergekit.gram import (
    BLOCK,
    DEFAULT_BUDGET,
    GramSums,
    Sketch,
    Slot,
    TaskVectorBlocks,
    block_budget,
    chunk_length,
    gram_pass,
)
from tvb_mergekit.recipe import resolve_settings
from tvb_mergekit.trim import MagnitudeHistogram, exact_thresholds

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


def slots_of(made: Models) -> list[Slot]:
    return [
        Slot(name, base.numel(), base.nbytes, lambda pair=(base, listed): pair)
        for name, (base, listed) in made.items()
    ]


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
    sums = gram_pass(slots_of(made), tasks_of(made))
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
    one = gram_pass(slots_of(made), tasks_of(made), sketch=sketch)
    small = gram_pass(slots_of(made), tasks_of(made), sketch=sketch, budget=2**20)
    two = gram_pass(slots_of(made), tasks_of(made), sketch=sketch, devices=[CPU, CPU])
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


class Allocations(TorchDispatchMode):
    """The largest tensor that any operation makes, in bytes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given_to = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given_to:
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("megabytes", [1, 4])
def test_no_buffer_grows_with_the_tensor(megabytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVB_MERGEKIT_BLOCK_MB", str(megabytes))
    budget = block_budget()
    assert budget == megabytes * 2**20
    base = torch.randn(3_000_000)
    made = {"t": (base, [base.bfloat16() + 0.01 for _ in range(6)])}
    with Allocations() as seen:
        gram_pass(slots_of(made), tasks_of(made), budget=budget)
    assert 0 < seen.largest <= budget
    for rows in (1, 3, 8, 50, 1000):
        length = chunk_length(rows, CPU, budget)
        assert length % BLOCK == 0 and length >= BLOCK
        assert 4 * rows * length <= budget or length == BLOCK


@quick
@given(models(most=1), st.data())
def test_adding_task_vectors_equals_float64(made: Models, data: st.DataObject) -> None:
    ((base, listed),) = made.values()
    weights = [data.draw(st.floats(-3, 3)) for _ in listed]
    before = [tensor.clone() for tensor in (base, *listed)]
    out = torch.empty(base.shape)
    blocks = TaskVectorBlocks(len(listed), CPU, DEFAULT_BUDGET)
    add_task_vectors(base, listed, weights, blocks, out)
    tau = torch.stack([m.double() - base.double() for m in listed])
    parts = torch.tensor(weights, dtype=torch.float64)[:, None] * tau
    want = base.double() + parts.sum(0)
    steps = len(listed) + 2  # roundings, each of a partial sum
    slack = 2.0**-24 * steps * (base.double().abs() + parts.abs().sum(0)) + 1e-38
    assert ((out.double() - want).abs() <= slack).all()
    for old, new in zip(before, (base, *listed), strict=True):
        assert torch.equal(old, new)


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

    def blocks() -> Iterator[Tensor]:
        yield from values.split(1000, dim=1)

    limits = exact_thresholds(blocks, 3, length, density)
    count = max(1, int(density * length))
    assert torch.equal(limits, values.abs().topk(count, dim=1).values[:, -1])


def whole(made: Models, method: str, keys: dict[str, Any], tunables: Tunables) -> dict[str, Tensor]:
    tasks = tasks_of(made)
    settings_ = resolve_settings(method, keys, tasks)
    basis = build_basis(settings_, tasks, [1.0] * len(tasks), slots_of(made))
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
