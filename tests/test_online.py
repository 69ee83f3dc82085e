"""Algorithm 1 (`tvb add`) against a dense float64 one that holds every task vector and every basis.

The dense one is written from the paper: AE_Train is autograd Adam (`reference.adam`); the rotation
of `balanced`, which the formulas leave open, is taken from the product and checked at every step.
"""

from typing import Any

import numpy as np
import pytest
import reference
import torch
from commands import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Array, Dense
from scipy.linalg import block_diag
from torch import Tensor

import tvb_mergekit as tvb
from tvb_mergekit.store import api
from tvb_mergekit.store.store import Bases

SHAPES = {"a.weight": (50, 60), "b.weight": (3000,), "c.bias": (7,)}
State = dict[str, Tensor]


def family(tasks: int) -> tuple[State, list[State]]:
    draw = torch.Generator().manual_seed(0)

    def noise() -> State:
        return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}

    base, common, owns = noise(), noise(), [noise() for _ in range(tasks)]
    sizes = [0.012 + 0.002 * index for index in range(tasks)]
    return base, [
        {n: base[n] + size * (own[n] + 0.5 * common[n]) for n in SHAPES}
        for size, own in zip(sizes, owns, strict=True)
    ]


class Naive:
    """Algorithm 1 with d x M matrices, in float64."""

    def __init__(self, dense: Dense, budget: int, how: str, **keys: Any) -> None:
        self.dense, self.budget, self.how, self.keys = dense, budget, how, keys
        size = len(dense.theta)
        self.bases: Array = np.zeros((size, 0))
        self.encoder, self.decoder = np.zeros((2, 0, 0))
        self.weights: Array | None = np.zeros(0)
        self.order: list[int] = []
        self.condition = 1.0  # the largest of a least squares decoder

    def add(self, index: int, inner: Array | None) -> None:
        """`inner` is W_e of `balanced`, [M, M - 1]."""
        count = self.bases.shape[1]
        if count == self.budget:
            gram = self.bases.T @ self.bases
            if self.how == "ae":
                found = reference.adam(gram, count - 1, **self.keys)
                self.weights = None
            else:
                assert inner is not None and self.weights is not None
                reference.check_encoder("balanced", inner, self.weights)
                found = reference.from_encoder(gram, inner)
                self.condition = max(self.condition, np.linalg.cond(inner.T @ gram @ inner))
                self.weights = np.full(count - 1, self.weights.sum() / (count - 1))
            self.bases = self.bases @ found.encoder
            self.encoder = self.encoder @ found.encoder
            self.decoder = found.decoder @ self.decoder
        self.bases = np.concatenate([self.bases, self.dense.tau[:, [index]]], axis=1)
        self.encoder, self.decoder = block_diag(self.encoder, 1), block_diag(self.decoder, 1)
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


def matrix_of(bases: Bases) -> Array:
    """B [d, M] as stored."""
    names = sorted(bases.facts.tensors)
    columns = [reference.flat({n: v.tensor(n) for n in names}, names) for v in bases.vectors]
    return np.stack(columns, axis=1)


def off(found: Array, expected: Array) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def check_state(bases: Bases, naive: Naive, tolerance: float = 1e-5) -> None:
    """Bases, composed coefficients, and errors.

    Bases are stored in float32, so a least squares decoder is known to 2^-24 times the condition
    number of its equations.
    """
    solved = max(tolerance, 2**-24 * naive.condition)
    for found, expected, most in (
        (matrix_of(bases), naive.bases, tolerance),
        (bases.encoder.numpy(), naive.encoder, tolerance),
        (bases.decoder.numpy(), naive.decoder, solved),
        (naive.tau @ bases.encoder.numpy(), naive.bases, tolerance),
    ):
        assert off(found, expected) <= most
    assert bases.num_bases == naive.bases.shape[1] <= naive.budget
    assert len(bases.facts.vectors) == bases.num_bases
    weights = bases.facts.basis_weights
    assert (weights is None) == (naive.weights is None)
    if naive.weights is not None:
        np.testing.assert_allclose(weights, naive.weights, rtol=1e-12)
    check_errors(bases, matrix_of(bases), naive.tau)


def check_errors(bases: Bases, stored: Array, tau: Array, unit: float = 2e-7) -> None:
    """They are those of the stored bases, up to their rounding, while G is known; else unknown.

    Squares are known to 1e-6 of squared terms, so an error near 0 is known to its root.
    """
    decoder, norms = bases.decoder.numpy(), np.linalg.norm(tau, axis=0)
    missing = np.linalg.norm(stored @ decoder - tau, axis=0)
    moved = np.abs(bases.encoder.numpy() @ decoder - np.eye(len(norms)))
    sizes = np.linalg.norm(stored, axis=0)
    room = 1e-3 * norms @ moved + 4 * unit * (sizes @ np.abs(decoder) + norms)
    for k, (task, norm) in enumerate(zip(bases.tasks, norms, strict=True)):
        found = bases.facts.errors[task]
        assert bases.facts.norms[task] == pytest.approx(norm, rel=1e-6)
        assert (found is None) == ("gram" not in bases.tensors), task
        assert found is None or abs(found * norm - missing[k]) <= room[k], task


def check_merges(bases: Bases, base: State, naive: Naive, forget: int) -> None:
    """The negation of an old task beside an addition; task arithmetic over all of them."""
    added = (naive.bases * naive.shares).sum(axis=1)
    negated = {"forget": bases.tasks[forget], "alpha": 0.7, "lambda_": 0.2}
    deltas = {"basis_negate": (0.2 * added - 0.7 * naive.rebuilt[:, forget], negated)}
    if naive.weights is not None:
        scaled = {"lambda_": 0.3, "lambda_scale": "tasks"}
        deltas["basis_ta"] = (0.3 * naive.tau.sum(axis=1), scaled)
    for method, (delta, keys) in deltas.items():
        want = naive.dense.split(naive.dense.theta + delta)
        assert_close(tvb.merge(bases, base, method, **keys), want, base, strict=1e-5)


@pytest.mark.parametrize("how", ["balanced", "ae"])
def test_additions_are_those_of_the_paper(how: Any) -> None:
    """From nothing; onto builds below."""
    base, models = family(12)
    order = [int(index) for index in (np.arange(12) * 7 + 3) % 12]
    more: dict[str, Any] = {"steps": 500} if how == "ae" else {}
    naive, bases = Naive(Dense(base, models, list(SHAPES)), 4, how, **more), None
    more |= {"budget": 4, "compress": how}
    for index in order:
        before = [] if bases is None else [v.tensor("a.weight").clone() for v in bases.vectors]
        grown, inner = api.add(bases, base, models[index], f"t{index}", **more), None
        if bases is not None:  # W_e of the step: the columns of old tasks are the old ones times it
            old, new = bases.encoder.numpy(), grown.encoder.numpy()[:-1, :-1]
            inner = np.linalg.lstsq(old, new)[0].clip(min=0)
        for old, vector in zip(before, bases.vectors if bases else (), strict=True):
            assert torch.equal(old, vector.tensor("a.weight"))
        naive.add(index, inner)
        bases = grown
        check_state(bases, naive)
        more = {}
    assert bases is not None
    check_merges(bases, base, naive, forget=7)


# Properties

RELATED = st.tuples(st.sampled_from(["again", "scaled", "near"]), st.integers(0, 20))
KINDS = st.one_of(st.sampled_from([("new", 0), ("mixture", 0), ("orthogonal", 0)]), RELATED)
UNITS = {torch.float32: 2e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}  # of rounding
SIZE = 600
BEGINNINGS = {  # the basis of a build, or None, and how to compress -> how to go on
    (None, "ae"): {"compress": "ae", "steps": 50},
    (None, "balanced"): {"compress": "balanced"},
    ("ae", "ae"): {"compress": "ae"},
    ("balanced", "balanced"): {"compress": "balanced"},
    ("groups", "balanced"): {"compress": "balanced"},
    ("none", "balanced"): {"compress": "balanced"},
}


def next_vector(kind: str, number: int, before: list[Tensor], draw: torch.Generator) -> Tensor:
    """A task vector that relates to those before in one of the ways that are hard."""
    noise = 0.02 * torch.randn(SIZE, generator=draw)
    if not before or kind == "new":
        return noise + (0.5 * before[0] if before else 0.0)
    old = before[number % len(before)]
    mixture = torch.stack([(0.3 + 0.1 * i) * v for i, v in enumerate(before)]).mean(dim=0)
    fresh = torch.nn.functional.one_hot(torch.tensor(len(before)), SIZE).float()
    return {"again": old, "scaled": -0.5 * old, "near": old + 1e-4 * noise, "mixture": mixture,
            "orthogonal": 0.7 * fresh}[kind]  # fmt: skip


def check_stream(bases: Bases, base: State, tau: Array, unit: float, known: bool) -> None:
    """What holds at every step; `known`: whether all inner products are."""
    stored = np.stack([v.tensor("w").double().numpy() for v in bases.vectors], axis=1)
    stored = stored * bases.scales.numpy()  # task vectors are kept without their weights
    encoder, scale, count = bases.encoder.numpy(), np.linalg.norm(tau), tau.shape[1]
    assert encoder.min() >= 0  # convex columns
    np.testing.assert_allclose(encoder.sum(axis=0), 1, atol=1e-12)
    assert np.linalg.norm(stored - tau @ encoder) <= 2 * count * unit * scale
    if (weights := bases.facts.basis_weights) is not None:  # the sum of all is kept
        room = 4 * count**1.5 * unit * scale
        assert np.linalg.norm(stored @ np.array(weights) - tau.sum(axis=1)) <= room
        np.testing.assert_allclose(sum(weights), count, rtol=1e-12)
        keys: dict[str, Any] = {"basis": "none"} if bases.facts.whole else {}
        merged = tvb.merge(bases, base, lambda_=0.5, lambda_scale="tasks", **keys)["w"]
        assert np.linalg.norm(merged.double().numpy() - 0.5 * tau.sum(axis=1)) <= room
    assert ("gram" in bases.tensors) == known == (bases.facts.loss is not None)
    if known:
        assert off(bases.tensors["gram"].numpy(), tau.T @ tau) <= 3 * unit
    check_errors(bases, stored, tau, unit)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(KINDS, st.sampled_from([1.0, 0.5, 2.0, -1.0])), min_size=2, max_size=9),
    st.sampled_from(list(UNITS)),
    st.integers(0, 1000),
    st.integers(2, 5),
    st.sampled_from(list(BEGINNINGS)),
)
def test_streams_of_vectors_that_are_hard(tasks, dtype, seed, budget, begin):
    draw, vectors, (basis, _) = torch.Generator().manual_seed(seed), list[Tensor](), begin
    for kind, _ in tasks:
        vectors.append(next_vector(*kind, vectors, draw))
    base, weights = {"w": torch.zeros(SIZE)}, [weight for _, weight in tasks]
    tau = torch.stack(vectors).T.double().numpy() * np.array(weights)
    more: dict[str, Any] = {"budget": budget, **BEGINNINGS[begin]}
    total, first, bases, singles = len(vectors), 0, None, True
    if basis is not None:
        first = min(total, budget) if basis == "none" else max(2, total // 2)
        keys: dict[str, Any] = {} if basis == "none" else {"num_bases": min(budget, first)}
        keys |= {"steps": 50} if basis == "ae" else {}
        bases = tvb.build(
            base,
            {f"t{i}": {"w": vectors[i]} for i in range(first)},
            weights={f"t{i}": weights[i] for i in range(first)},
            dtype=dtype,
            basis=basis,
            **keys,
        )
        singles = torch.equal(bases.encoder, torch.eye(first, dtype=torch.float64))
    for i in range(first, total):
        new = {"w": vectors[i]}
        more |= {"budget": 2 + seed % 4} if i == total - 1 else {}
        bases = tvb.add(bases, base, new, f"t{i}", weight=weights[i], dtype=dtype, **more)
        more = {}
        # G is known for as long as every basis before this step was a task vector
        known = singles and i <= budget
        check_stream(bases, base, tau[:, : i + 1], UNITS[dtype], known)
