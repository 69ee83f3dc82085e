"""The Gram pass and Trim on arbitrary tensors, against dense float64."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference import Array, Dense
from torch import Tensor

from tvb_mergekit.core.basis import Step, build, warnings
from tvb_mergekit.core.gram import SUMMED, GramSums, check_copied
from tvb_mergekit.core.methods.ties import BINS, count_magnitudes, trim_elect_merge, trim_thresholds
from tvb_mergekit.core.settings import resolve_settings
from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors.passes import gram_pass
from tvb_mergekit.tensors.stream import Item, Part

CPU = torch.device("cpu")
quick, few = settings(max_examples=60), settings(max_examples=25)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = st.one_of(
    st.integers(1, 50), st.sampled_from([SUMMED - 1, SUMMED, SUMMED + 1, 3 * SUMMED, 2**17 + 5])
)
State = dict[str, Tensor]


class Models:
    """A base and T models of any dtypes, lengths and scales; float64 has no compiled loop."""

    def __init__(self, data: st.DataObject) -> None:
        size = data.draw(st.integers(1, 6))
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
        kinds = st.sampled_from(data.draw(st.sampled_from([DTYPES, (*DTYPES, torch.float64)])))
        dtypes = [data.draw(kinds) for _ in range(size + 1)]
        self.base: State = {}
        self.models: list[State] = [{} for _ in range(size)]
        for number in range(data.draw(st.integers(1, 4))):
            shape = (1, data.draw(LENGTHS))[data.draw(st.integers(0, 1)) :]
            scale = 10.0 ** data.draw(st.integers(-3, 0))
            base = torch.randn(shape, generator=generator)
            self.base[f"t{number}"] = base.to(dtypes[0])
            for model, dtype in zip(self.models, dtypes[1:], strict=True):
                moved = base + scale * torch.randn(shape, generator=generator)
                model[f"t{number}"] = moved.to(dtype)
        self.tasks = [f"task{i}" for i in range(size)]
        self.weights = [data.draw(st.sampled_from([1.0, -0.5, 2.0])) for _ in self.tasks]
        self.dense = Dense(self.base, self.models, list(self.base), self.weights)
        assume((self.dense.tau != 0).any(axis=0).all())  # else refused

    def items(self) -> list[Item]:
        part = Part.in_memory
        return [
            Item(n, tuple(base.shape), part(base), tuple(part(model[n]) for model in self.models))
            for n, base in self.base.items()
        ]


# The Gram pass


@quick
@given(st.data())
def test_the_sums_equal_the_dense_products(data: st.DataObject) -> None:
    made = Models(data)
    sums = gram_pass(made.items(), made.tasks).scaled(made.weights)
    tau = made.dense.tau
    scale = np.outer(np.linalg.norm(tau, axis=0), np.linalg.norm(tau, axis=0))
    assert (np.abs(sums.gram.numpy() - tau.T @ tau) <= 5e-6 * scale).all()  # float32 sums
    assert torch.equal(sums.gram, sums.gram.T)
    assert sums.num_parameters == len(tau)
    assert sums.base_norm_squared == pytest.approx(made.dense.theta @ made.dense.theta, rel=1e-5)


def test_what_the_gram_matrix_says_of_the_models() -> None:
    def told(gram: Array, base: float, weights: list[float]) -> list[str]:
        tasks, sums = ["a", "b", "c"], GramSums(torch.from_numpy(gram), base**2, 9)
        found = build(resolve_settings("basis_ta", {"basis": "none"}, tasks), tasks, weights, sums)
        return warnings(found, {task: f"./{task}" for task in tasks})

    gram, plain = np.eye(3), [1.0, 1.0, 1.0]
    assert told(gram, 10.0, [1.0, 5.0, 1.0]) == []  # weights do not count
    assert told(2 * gram + 2, 10.0, plain) == []  # cosines of 0.5
    (one,) = told(np.diag([1, 36.0, 1]), 20.0, plain)
    assert "task `b` (./b): its task vector's norm is 6, the median of the other tasks' 1" in one
    (one,) = told(np.diag([1, 1, 6.25]), 4.0, plain)
    assert "task `c` (./c): its task vector's norm is 2.5, the base's 4; fine-tuning moves" in one
    gram[0, 1] = gram[1, 0] = 1 - 1e-7
    (one,) = told(gram, 10.0, [1.0, 3.0, 1.0])
    assert "tasks `a` and `b` have the same task vector up to scale" in one
    found = told(np.full((3, 3), 1.0), 10.0, [1.0, -3.0, 1.0])
    assert [line[:17] for line in found] == ["tasks `a` and `b`", "tasks `a` and `c`"]
    with pytest.raises(UserError, match="task `b`: its task vector is zero in every tensor"):
        told(np.diag([1.0, 0.0, 1.0]), 10.0, plain)


# Values, Trim, Elect, Merge


def test_an_excluded_tensor_of_the_base_may_hold_infinity_but_no_nan() -> None:
    mask = torch.tensor([torch.inf])
    check_copied("mask", mask, excluded=True)
    with pytest.raises(UserError, match=r"0 NaN and 1 infinite .* leave the tensor out"):
        check_copied("mask", mask, excluded=False)
    with pytest.raises(UserError, match=r"1 NaN and 0 infinite .* diverged: take another$"):
        check_copied("mask", mask - mask, excluded=True)


@quick
@given(st.integers(1, 4), st.sampled_from(["sum", "mean", "max"]), st.integers(0, 2**31))
def test_trim_elect_merge_entry_by_entry(size: int, how: str, seed: int) -> None:
    """Small whole numbers, so that entries are equal to thresholds, to each other and to 0."""
    random = np.random.default_rng(seed)
    bases = random.integers(-3, 4, (size, 50)).astype(np.float64)
    thresholds, base = random.integers(0, 4, size), random.integers(-9, 9, 50)
    want = base.astype(np.float64)
    for n, column in enumerate(bases.T):
        left = [b for b, t in zip(column, thresholds, strict=True) if abs(b) >= t]
        agreeing = [b for b in left if b * sum(left) > 0] or [0.0]
        pick = {"sum": sum, "mean": np.mean, "max": lambda x: max(x, key=abs)}[how]
        want[n] += 0.5 * pick(agreeing)
    limits = torch.from_numpy(thresholds).float()
    direction = partial(trim_elect_merge, thresholds=limits.tolist(), merge_func=how)
    merge = Step([(0.5, torch.eye(size))], direction=direction).on(CPU)
    found = merge(torch.from_numpy(base).float(), torch.from_numpy(bases).float())
    np.testing.assert_allclose(found[0], want, rtol=1e-6)


@few
@given(st.data(), st.integers(20_000, 200_000), st.floats(0.001, 1.0), st.integers(0, 2**31))
def test_the_histogram_keeps_the_asked_share(data, length, density, seed):
    random = np.random.default_rng(seed)
    kind = data.draw(st.sampled_from(["normal", "uniform", "laplace", "wide", "tiny"]))
    values = getattr(random, kind if kind in ("uniform", "laplace") else "normal")(size=length)
    values *= {"wide": 10.0 ** random.uniform(-6, 0, length), "tiny": 1e-10}.get(kind, 1.0)
    row = torch.from_numpy(values.astype(np.float32))
    counts = torch.zeros(1, BINS, dtype=torch.int64)
    for chunk in row.split(7001):
        count_magnitudes(counts, chunk[None])
    (limit,) = trim_thresholds(counts, density).tolist()
    share = float((row.abs() >= limit).double().mean())
    assert abs(share - density) <= 1e-4 + 1 / length
