"""Algorithm 1 (`tvb add`) against a dense float64 one that holds every task vector and every basis.

The dense one is written from the paper: AE_Train is autograd Adam (`reference.adam`), the rotation
of `balanced` is open in the formulas and is taken from the product, and what they do say of it is
checked at every step. Adam sees float32 rounding of G only: 100 to 4000 steps, 16 compressions in a
row, left a relative difference of the bases of 1e-7 to 1e-6; 200 steps are taken, for time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import reference
import tiny
import torch
from commands import Result, assert_close, run
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from reference import Array, Dense
from safetensors.torch import load_file
from torch import Tensor

import tvb_mergekit as tvb
from tvb_mergekit import api, online
from tvb_mergekit.store import Bases

STEPS = 200  # of Adam
SHAPES = {"a.weight": (50, 60), "b.weight": (3000,), "c.bias": (7,)}
State = dict[str, Tensor]


def family(tasks: int, seed: int = 0) -> tuple[State, list[State]]:
    """Correlated task vectors of unequal length."""
    draw = torch.Generator().manual_seed(seed)

    def noise() -> State:
        return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}

    base, common = noise(), noise()
    models = []
    for index in range(tasks):
        size = 0.02 * (0.6 + 0.1 * index)
        own = noise()
        models.append({n: base[n] + size * (own[n] + 0.5 * common[n]) for n in SHAPES})
    return base, models


class Naive:
    """Algorithm 1 with d x M matrices, in float64."""

    def __init__(self, dense: Dense, budget: int, how: str, steps: int = STEPS) -> None:
        self.dense, self.budget, self.how, self.steps = dense, budget, how, steps
        size = len(dense.theta)
        self.bases: Array = np.zeros((size, 0))
        self.encoder: Array = np.zeros((0, 0))
        self.decoder: Array = np.zeros((0, 0))
        self.weights: Array | None = np.zeros(0)
        self.order: list[int] = []

    def start(self, order: Sequence[int], basis: str, count: int, stored: Array) -> None:
        """From bases that were built offline; `stored` is the encoder that was found."""
        tau = self.dense.tau[:, order]
        gram = tau.T @ tau
        if basis == "none":
            found = reference.identity(len(order))
        elif basis == "ae":
            found = reference.adam(gram, count, steps=self.steps)
        else:
            reference.check_encoder(basis, gram, stored)
            found = reference.from_encoder(gram, stored)
        self.bases, self.encoder, self.decoder = tau @ found.encoder, found.encoder, found.decoder
        self.weights = None if basis == "ae" else np.full(count, len(order) / count)
        self.order = list(order)

    def add(self, index: int, inner: Array | None) -> None:
        """`inner` is W_e of `balanced`, [M, M - 1]."""
        count = self.bases.shape[1]
        if count == self.budget:
            gram = self.bases.T @ self.bases
            if self.how == "ae":
                found = reference.adam(gram, count - 1, steps=self.steps)
                self.weights = None
            else:
                assert inner is not None and self.weights is not None
                check_balanced(gram, self.weights, inner)
                found = reference.from_encoder(gram, inner)
                self.weights = np.full(count - 1, self.weights.sum() / (count - 1))
            self.bases = self.bases @ found.encoder
            self.encoder = self.encoder @ found.encoder
            self.decoder = found.decoder @ self.decoder
        self.bases = np.concatenate([self.bases, self.dense.tau[:, [index]]], axis=1)
        self.encoder, self.decoder = bordered(self.encoder), bordered(self.decoder)
        if self.weights is not None:
            self.weights = np.append(self.weights, 1.0)
        self.order.append(index)

    @property
    def rebuilt(self) -> Array:
        return self.bases @ self.decoder

    @property
    def tau(self) -> Array:
        return self.dense.tau[:, self.order]

    @property
    def shares(self) -> Array:
        """v: w with mean 1."""
        count = self.bases.shape[1]
        return np.ones(count) if self.weights is None else self.weights / self.weights.mean()


def bordered(square: Array) -> Array:
    rows, columns = square.shape
    grown = np.zeros((rows + 1, columns + 1))
    grown[:rows, :columns] = square
    grown[rows, columns] = 1.0
    return grown


def check_balanced(gram: Array, weights: Array, inner: Array) -> None:
    """What the formulas say of the encoder for task weights w (shared/design.md, section 1)."""
    count = inner.shape[1]
    assert inner.min() >= 0
    np.testing.assert_allclose(inner.sum(axis=0), 1, atol=1e-12)
    np.testing.assert_allclose(inner.sum(axis=1), count / weights.sum() * weights, rtol=1e-11)
    total = gram @ weights
    deflated = gram - np.outer(total, total) / (weights @ total)
    bound = np.sort(np.linalg.eigvalsh(deflated))[::-1][count - 1 :].sum()
    reached = reference.loss(gram, reference.from_encoder(gram, inner).reconstruction)
    assert reached <= bound * (1 + 1e-5) + 1e-9 * np.trace(gram)


def matrix_of(bases: Bases) -> Array:
    """B [d, M] as stored."""
    names = list(SHAPES) if set(SHAPES) == set(bases.names) else bases.names
    columns = [reference.flat({n: v.tensor(n) for n in names}, names) for v in bases.vectors]
    return np.stack(columns, axis=1)


def off(found: Array, expected: Array) -> float:
    """Relative difference."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def spied(call: Callable[[], Bases]) -> tuple[Bases, Array | None]:
    """A step, and the W_e that `balanced` chose in it."""
    seen: list[Array] = []
    true = online.balanced

    def spy(*args: Any) -> Any:
        encoding = true(*args)
        assert encoding.encoder is not None
        seen.append(encoding.encoder.numpy())
        return encoding

    with mock.patch.object(online, "balanced", spy):
        bases = call()
    return bases, seen[0] if seen else None


def check_state(bases: Bases, naive: Naive, tolerance: float = 1e-5) -> None:
    """Bases, composed coefficients, and what a store says of its errors."""
    assert bases.encoder is not None
    assert off(matrix_of(bases), naive.bases) <= tolerance
    assert off(bases.encoder.numpy(), naive.encoder) <= tolerance
    assert off(bases.decoder.numpy(), naive.decoder) <= tolerance
    assert off(naive.tau @ bases.encoder.numpy(), naive.bases) <= tolerance
    products = naive.bases.T @ naive.bases
    assert off(bases.tensors["gram_bases"].numpy(), products) <= tolerance
    assert bases.num_bases == naive.bases.shape[1] <= naive.budget
    assert len(bases.facts["store"]["folders"]) == bases.num_bases
    if naive.weights is None:
        assert bases.basis_weights is None
    else:
        np.testing.assert_allclose(bases.basis_weights, naive.weights, rtol=1e-12)
    check_errors(bases, naive.tau)


def check_errors(bases: Bases, tau: Array) -> None:
    """The bounds hold for the bases as they are stored."""
    missing = np.linalg.norm(matrix_of(bases) @ bases.decoder.numpy() - tau, axis=0)
    norms = np.linalg.norm(tau, axis=0)
    for task, true, norm in zip(bases.tasks, missing, norms, strict=True):
        bounds = bases.facts["errors"][task]
        assert bases.facts["norms"][task] == pytest.approx(norm, rel=1e-6)
        assert bounds["at_least"] <= true / norm <= bounds["at_most"], (task, true / norm, bounds)


def check_merges(bases: Bases, base: State, naive: Naive, forget: int = 0) -> None:
    """Addition, ties, and the negation of an old task, by the library."""
    dense = naive.dense
    summed = naive.bases * naive.shares
    count, total = summed.shape[1], len(naive.order)
    task = bases.tasks[forget]

    def close(merged: Mapping[str, Tensor], delta: Array, skip: Array | None = None) -> None:
        expected = dense.split(dense.theta + delta)
        skipped = None if skip is None else {n: m.bool() for n, m in dense.split(skip).items()}
        assert_close(merged, expected, base, skip=skipped, strict=1e-5)

    merged = tvb.merge(bases, base, "basis_ta", lambda_=0.3)
    close(merged, 0.3 * summed.sum(axis=1))
    merged = tvb.merge(bases, base, "basis_ta", lambda_=0.3, lambda_scale="tasks")
    close(merged, 0.3 * total / count * summed.sum(axis=1))
    if naive.weights is not None:  # task arithmetic over all of them
        close(merged, 0.3 * naive.tau.sum(axis=1))
    gone = naive.rebuilt[:, forget]
    merged = tvb.merge(bases, base, "basis_negate", forget=task, alpha=0.7)
    close(merged, -0.7 * gone)
    merged = tvb.merge(bases, base, "basis_negate", forget=task, alpha=0.7, lambda_=0.2)
    close(merged, 0.2 * summed.sum(axis=1) - 0.7 * gone)
    for trim in ("model", "tensor"):
        want = reference.ties(dense, summed, 0.4, 0.3, trim)
        merged = tvb.merge(bases, base, "basis_ties", lambda_=0.4, density=0.3, trim=trim)
        assert want.boundary.mean() < 0.01
        close(merged, want.merged - dense.theta, want.boundary.astype(float))


def orders(tasks: int) -> list[list[int]]:
    shuffled = list(range(tasks))
    random.Random(1).shuffle(shuffled)
    return [list(range(tasks)), list(range(tasks))[::-1], shuffled]


@pytest.mark.parametrize("how", ["ae", "balanced"])
@pytest.mark.parametrize("order", range(3))
def test_twenty_tasks_from_nothing(how: str, order: int) -> None:
    base, models = family(20)
    dense = Dense(base, models, list(SHAPES))
    naive, bases = Naive(dense, 4, how), None
    for index in orders(20)[order]:
        more = {"budget": 4, "compress": how} if bases is None else {}
        if bases is None and how == "ae":
            more["steps"] = STEPS
        before = bases
        bases, inner = spied(
            lambda b=before, m=more, i=index: api.add(b, base, models[i], f"t{i}", **m)  # type: ignore[misc]
        )
        naive.add(index, inner)
        check_state(bases, naive)
    assert bases is not None
    check_merges(bases, base, naive)
    check_merges(bases, base, naive, forget=11)


@pytest.mark.parametrize("how", ["ae", "balanced"])
@pytest.mark.parametrize("basis", ["balanced", "ae", "none"])
def test_twelve_tasks_onto_bases_that_were_built_offline(
    tmp_path: Path, basis: str, how: str
) -> None:
    base, models = family(20, seed=1)
    order = orders(20)[2]
    first = order[:8] if basis != "none" else order[:4]
    dense = Dense(base, models, list(SHAPES))
    more: dict[str, Any] = {} if basis == "none" else {"num_bases": 4}
    if basis == "ae":
        more["steps"] = STEPS
    store = tmp_path / "store"
    built = tvb.build(base, {f"t{i}": models[i] for i in first}, store, basis=basis, **more)
    assert built.encoder is not None
    steps = STEPS if basis == "ae" else 4000  # a store keeps the settings it was built with
    naive = Naive(dense, 4, how, steps)
    naive.start(first, basis, 4, built.encoder.numpy())
    if basis == "ae" and how == "balanced":
        with pytest.raises(tvb.UserError, match=r"do not hold it: compress by ae"):
            tvb.add(store, base, models[order[8]], "new", compress=how)
        return
    last = 20 if steps == STEPS or how == "balanced" else len(first) + 3
    for index in order[len(first) : last]:
        bases, inner = spied(
            lambda i=index: tvb.add(store, base, models[i], f"t{i}", compress=how)  # type: ignore[misc]
        )
        naive.add(index, inner)
        check_state(bases, naive)
    check_merges(tvb.load(store), base, naive)
    check_merges(tvb.load(store), base, naive, forget=len(first))


# Properties

KINDS = st.one_of(
    st.just("new"),
    st.tuples(st.just("again"), st.integers(0, 20)),
    st.tuples(st.just("scaled"), st.integers(0, 20)),
    st.tuples(st.just("near"), st.integers(0, 20)),
    st.just("mixture"),
    st.just("orthogonal"),
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def next_vector(kind: Any, before: list[Tensor], draw: torch.Generator, size: int) -> Tensor:
    """A task vector that relates to those before in one of the ways that are hard."""
    noise = 0.02 * torch.randn(size, generator=draw)
    if not before or kind == "new":
        return noise + (0.5 * before[0] if before else 0.0)
    if kind == "mixture":
        return sum((0.3 + 0.1 * i) * v for i, v in enumerate(before)) / len(before)  # type: ignore[return-value]
    if kind == "orthogonal":
        fresh = torch.zeros(size)
        fresh[len(before)] = 0.7
        return fresh
    old = before[kind[1] % len(before)]
    return {"again": old, "scaled": -0.5 * old, "near": old + 1e-4 * noise}[kind[0]]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kinds=st.lists(KINDS, min_size=2, max_size=12),
    budget=st.integers(2, 5),
    how=st.sampled_from(["ae", "exact", "balanced"]),
    weights=st.lists(st.sampled_from([1.0, 0.5, 2.0, -1.0]), min_size=12, max_size=12),
    dtype=st.sampled_from(list(DTYPES)),
    seed=st.integers(0, 1000),
)
def test_properties(
    kinds: list[Any], budget: int, how: str, weights: list[float], dtype: str, seed: int
) -> None:
    check_properties(kinds, budget, how, weights, dtype, seed)


def check_properties(
    kinds: list[Any], budget: int, how: str, weights: list[float], dtype: str, seed: int
) -> None:
    size, draw = 600, torch.Generator().manual_seed(seed)
    zero = {"w": torch.zeros(size)}  # so that float32 differences are exact
    vectors: list[Tensor] = []
    for kind in kinds:
        vectors.append(next_vector(kind, vectors, draw, size))
    bases: Bases | None = None
    exact = True
    for count, (vector, weight) in enumerate(zip(vectors, weights, strict=False), start=1):
        more: dict[str, Any] = {}
        if bases is None:
            more = {"budget": budget, "compress": "ae" if how == "exact" else how}
            more |= {"steps": 50} if how == "ae" else {"solver": "exact"} if how == "exact" else {}
        known = bases is None or (bases.encoder is not None and bases.num_bases == count - 1)
        compressions = max(0, count - budget)
        bases = tvb.add(
            bases, zero, {"w": vector}, f"t{count}", weight=weight, dtype=DTYPES[dtype], **more
        )
        tau = torch.stack(vectors[:count]).T.double().numpy() * np.array(weights[:count])
        assert bases.encoder is not None
        stored = np.stack([v.tensor("w").double().numpy() for v in bases.vectors], axis=1)
        encoder, decoder = bases.encoder.numpy(), bases.decoder.numpy()
        unit = {"float32": 2e-7, "bfloat16": 4e-3, "float16": 5e-4}[dtype]
        scale = np.linalg.norm(tau)
        # convex columns
        assert encoder.min() >= 0
        np.testing.assert_allclose(encoder.sum(axis=0), 1, atol=1e-12)
        assert np.linalg.norm(stored - tau @ encoder) <= 2 * count * unit * scale
        if bases.basis_weights is not None:
            total = stored @ bases.basis_weights.numpy()
            assert np.linalg.norm(total - tau.sum(axis=1)) <= 4 * count**1.5 * unit * scale
            np.testing.assert_allclose(bases.basis_weights.sum(), count, rtol=1e-12)
        products = stored.T @ stored
        found = bases.tensors["gram_bases"].numpy()
        assert np.linalg.norm(found - products) <= 3 * unit * np.linalg.norm(products) + 1e-30
        # G is there while it is known
        assert ("gram" in bases.tensors) == known
        if known:
            gram = tau.T @ tau
            assert off(bases.tensors["gram"].numpy(), gram) <= 3 * unit
            assert bases.facts["loss"] is not None
        else:
            assert bases.facts["loss"] is None
        # the errors
        true = np.linalg.norm(stored @ decoder - tau, axis=0)
        norms = np.linalg.norm(tau, axis=0)
        for task, error, norm in zip(bases.tasks, true, norms, strict=True):
            bounds = bases.facts["errors"][task]
            low, high = bounds["at_least"], bounds["at_most"]
            assert low <= error / norm <= high, (task, low, error / norm, high)
            if compressions <= 1 and dtype == "float32":
                assert high - low <= 1e-4, (task, low, error / norm, high)
