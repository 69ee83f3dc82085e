"""Algorithm 1 (`tvb add`) against a dense float64 one that holds every task vector and every basis.

The dense one is written from the paper: AE_Train is autograd Adam (`reference.adam`), the rotation
of `balanced` is open in the formulas and is taken from the product, and what they do say of it is
checked at every step. Adam sees float32 rounding of G only: 100 to 4000 steps, 16 compressions in a
row, left a relative difference of the bases of 1e-7 to 1e-6. For time there are 100 steps and 8
compressions, and the learned decoder, which few steps leave well-conditioned.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import commands
import numpy as np
import pytest
import reference
import tiny
import torch
from commands import assert_close, merge, ready
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import Array, Dense
from scipy.linalg import block_diag
from torch import Tensor

import tvb_mergekit as tvb
from tvb_mergekit.core import online
from tvb_mergekit.store import api
from tvb_mergekit.store.store import Bases

Found = TypeVar("Found")

SHAPES = {"a.weight": (50, 60), "b.weight": (3000,), "c.bias": (7,)}
State = dict[str, Tensor]


def family(tasks: int, seed: int = 0) -> tuple[State, list[State]]:
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

    def __init__(self, dense: Dense, budget: int, how: str, **keys: Any) -> None:
        self.dense, self.budget, self.how, self.keys = dense, budget, how, keys
        size = len(dense.theta)
        self.bases: Array = np.zeros((size, 0))
        self.encoder: Array = np.zeros((0, 0))
        self.decoder: Array = np.zeros((0, 0))
        self.weights: Array | None = np.zeros(0)
        self.order: list[int] = []
        self.condition = 1.0  # the largest of a least squares decoder

    def start(self, order: Sequence[int], stored: Array) -> None:
        """From bases that were built offline; `stored` is the encoder that was found."""
        self.order = list(order)
        gram, count = self.tau.T @ self.tau, stored.shape[1]
        if self.how == "ae":
            found = reference.adam(gram, count, **self.keys)
            self.weights = None
        else:
            reference.check_encoder("balanced", gram, stored)
            found = reference.from_encoder(gram, stored)
            self.weights = np.full(count, len(order) / count)
        self.bases, self.encoder = self.tau @ found.encoder, found.encoder
        self.decoder = found.decoder

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
                # The product saw the G of bases in float32.
                reference.check_encoder("balanced", gram, inner, self.weights, (1e-5, 1e-9))
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
    names = sorted(bases.names)
    columns = [reference.flat({n: v.tensor(n) for n in names}, names) for v in bases.vectors]
    return np.stack(columns, axis=1)


def off(found: Array, expected: Array) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def spied(call: Callable[..., Found], *args: Any, **more: Any) -> tuple[Found, Array | None]:
    """What a step gives, and the W_e that `balanced` chose in it."""
    seen: list[Array] = []
    true = online.balanced

    def spy(*args: Any) -> Any:
        encoding = true(*args)
        assert encoding.encoder is not None
        seen.append(encoding.encoder.numpy())
        return encoding

    with mock.patch.object(online, "balanced", spy):
        found = call(*args, **more)
    return found, seen[0] if seen else None


def check_state(bases: Bases, naive: Naive, tolerance: float = 1e-5) -> None:
    """Bases, composed coefficients, and errors.

    Bases are stored in float32, so a least squares decoder is known to 2^-24 times the condition
    number of its equations.
    """
    assert bases.encoder is not None
    solved = max(tolerance, 2**-24 * naive.condition)
    for found, expected, most in (
        (matrix_of(bases), naive.bases, tolerance),
        (bases.encoder.numpy(), naive.encoder, tolerance),
        (bases.decoder.numpy(), naive.decoder, solved),
        (naive.tau @ bases.encoder.numpy(), naive.bases, tolerance),
        (bases.tensors["gram_bases"].numpy(), naive.bases.T @ naive.bases, tolerance),
    ):
        assert off(found, expected) <= most
    assert bases.num_bases == naive.bases.shape[1] <= naive.budget
    assert len(bases.facts["store"]["folders"]) == bases.num_bases
    assert (bases.basis_weights is None) == (naive.weights is None)
    if naive.weights is not None:
        np.testing.assert_allclose(bases.basis_weights, naive.weights, rtol=1e-12)
    check_errors(bases, matrix_of(bases), naive.tau)


def check_errors(bases: Bases, stored: Array, tau: Array, unit: float = 2e-7) -> None:
    """They are those of the stored bases, up to their rounding, while G is known; else unknown.

    Squares are known to 1e-6 of squared terms, so an error near 0 is known to its root.
    """
    assert bases.encoder is not None
    decoder, norms = bases.decoder.numpy(), np.linalg.norm(tau, axis=0)
    missing = np.linalg.norm(stored @ decoder - tau, axis=0)
    moved = np.abs(bases.encoder.numpy() @ decoder - np.eye(len(norms)))
    sizes = np.linalg.norm(stored, axis=0)
    room = 1e-3 * norms @ moved + 4 * unit * (sizes @ np.abs(decoder) + norms)
    for k, (task, norm) in enumerate(zip(bases.tasks, norms, strict=True)):
        found = bases.facts["errors"][task]
        assert bases.facts["norms"][task] == pytest.approx(norm, rel=1e-6)
        assert (found is None) == ("gram" not in bases.tensors), task
        assert found is None or abs(found * norm - missing[k]) <= room[k], task


def check_merges(bases: Bases, base: State, naive: Naive, forget: int = 0) -> None:
    """Addition, ties, and the negation of an old task, by the library."""
    dense = naive.dense
    summed = naive.bases * naive.shares
    count, total = summed.shape[1], len(naive.order)

    def close(delta: Array, skip: Array | None = None, /, *method: str, **keys: Any) -> None:
        merged = tvb.merge(bases, base, *method, **keys)
        skipped = None if skip is None else {n: m.bool() for n, m in dense.split(skip).items()}
        assert_close(merged, dense.split(dense.theta + delta), base, skip=skipped, strict=1e-5)

    added, gone = summed.sum(axis=1), naive.rebuilt[:, forget]
    close(0.3 * added, None, "basis_ta", lambda_=0.3)
    scaled = {"lambda_": 0.3, "lambda_scale": "tasks"}
    close(0.3 * total / count * added, None, "basis_ta", **scaled)
    if naive.weights is not None:  # task arithmetic over all of them
        close(0.3 * naive.tau.sum(axis=1), None, "basis_ta", **scaled)
    keys = {"forget": bases.tasks[forget], "alpha": 0.7}
    close(-0.7 * gone, None, "basis_negate", **keys)
    close(0.2 * added - 0.7 * gone, None, "basis_negate", lambda_=0.2, **keys)
    want = reference.ties(dense, summed, 0.4, 0.3)
    assert want.boundary.mean() < 0.01
    skip = want.boundary.astype(float)
    close(want.merged - dense.theta, skip, "basis_ties", lambda_=0.4, density=0.3)


@pytest.mark.parametrize("built", [False, True], ids=["from nothing", "onto a build"])
@pytest.mark.parametrize("how", ["balanced", "ae"])
def test_additions_are_those_of_the_paper(how: Any, built: bool) -> None:
    base, models = family(12)
    order = [int(index) for index in (np.arange(12) * 7 + 3) % 12]
    more: dict[str, Any] = {"steps": 500} if how == "ae" else {}
    naive, bases = Naive(Dense(base, models, list(SHAPES)), 4, how, **more), None
    if built:  # its settings are those of all additions
        first, order = order[:6], order[6:]
        states = {f"t{i}": models[i] for i in first}
        bases = tvb.build(base, states, basis=how, num_bases=4, **more)
        assert bases.encoder is not None
        naive.start(first, bases.encoder.numpy())
        more = {}
    else:
        more |= {"budget": 4, "compress": how}
    for index in order:
        before = [] if bases is None else [v.tensor("a.weight").clone() for v in bases.vectors]
        grown, inner = spied(api.add, bases, base, models[index], f"t{index}", **more)
        for old, vector in zip(before, bases.vectors if bases else (), strict=True):
            assert torch.equal(old, vector.tensor("a.weight"))
        naive.add(index, inner)
        bases = grown
        check_state(bases, naive)
        more = {}
    assert bases is not None
    check_merges(bases, base, naive, forget=7)


# Properties

KINDS = st.one_of(
    st.just("new"),
    st.tuples(st.just("again"), st.integers(0, 20)),
    st.tuples(st.just("scaled"), st.integers(0, 20)),
    st.tuples(st.just("near"), st.integers(0, 20)),
    st.just("mixture"),
    st.just("orthogonal"),
)
UNITS = {torch.float32: 2e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}  # of rounding
SIZE = 600


def next_vector(kind: Any, before: list[Tensor], draw: torch.Generator) -> Tensor:
    """A task vector that relates to those before in one of the ways that are hard."""
    noise = 0.02 * torch.randn(SIZE, generator=draw)
    if not before or kind == "new":
        return noise + (0.5 * before[0] if before else 0.0)
    if kind == "mixture":
        return sum((0.3 + 0.1 * i) * v for i, v in enumerate(before)) / len(before)  # type: ignore[return-value]
    if kind == "orthogonal":
        fresh = torch.zeros(SIZE)
        fresh[len(before)] = 0.7
        return fresh
    old = before[kind[1] % len(before)]
    return {"again": old, "scaled": -0.5 * old, "near": old + 1e-4 * noise}[kind[0]]


@dataclass
class Stream:
    """Vectors that come one after another, and what was found of them."""

    kinds: list[Any]
    weights: list[float]
    dtype: torch.dtype
    seed: int
    vectors: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.seed)
        for kind in self.kinds:
            self.vectors.append(next_vector(kind, self.vectors, draw))
        self.base = {"w": torch.zeros(SIZE)}  # so that float32 differences are exact

    def build(self, count: int, basis: str, budget: int) -> Bases:
        more: dict[str, Any] = {} if basis == "none" else {"num_bases": min(budget, count)}
        if basis == "ae":
            more["steps"] = 50
        return tvb.build(
            self.base,
            {f"t{i}": {"w": v} for i, v in enumerate(self.vectors[:count])},
            weights={f"t{i}": w for i, w in enumerate(self.weights[:count])},
            dtype=self.dtype,
            basis=basis,  # type: ignore[arg-type]
            **more,
        )

    def add(self, bases: Bases | None, **more: Any) -> Bases:
        index = 0 if bases is None else len(bases.tasks)
        vector, weight = {"w": self.vectors[index]}, self.weights[index]
        more |= {"weight": weight, "dtype": self.dtype}
        return tvb.add(bases, self.base, vector, f"t{index}", **more)

    def check(self, bases: Bases, known: bool) -> None:
        """`known`: whether all inner products are."""
        count = len(bases.tasks)
        unit = UNITS[self.dtype]
        tau = torch.stack(self.vectors[:count]).T.double().numpy() * np.array(self.weights[:count])
        stored = np.stack([v.tensor("w").double().numpy() for v in bases.vectors], axis=1)
        assert bases.encoder is not None
        encoder, scale = bases.encoder.numpy(), np.linalg.norm(tau)
        assert encoder.min() >= 0  # convex columns
        np.testing.assert_allclose(encoder.sum(axis=0), 1, atol=1e-12)
        assert np.linalg.norm(stored - tau @ encoder) <= 2 * count * unit * scale
        if bases.basis_weights is not None:
            room = 4 * count**1.5 * unit * scale
            total = stored @ bases.basis_weights.numpy()
            assert np.linalg.norm(total - tau.sum(axis=1)) <= room
            np.testing.assert_allclose(bases.basis_weights.sum(), count, rtol=1e-12)
            merged = tvb.merge(bases, self.base, lambda_=0.5, lambda_scale="tasks")["w"]
            assert np.linalg.norm(merged.double().numpy() - 0.5 * tau.sum(axis=1)) <= room
        found = bases.tensors["gram_bases"].numpy()
        assert np.linalg.norm(found - stored.T @ stored) <= 4 * unit * scale**2
        assert ("gram" in bases.tensors) == known == (bases.facts["loss"] is not None)
        if known:
            assert off(bases.tensors["gram"].numpy(), tau.T @ tau) <= 3 * unit
        check_errors(bases, stored, tau, unit)


STREAMS = st.builds(
    Stream,
    st.lists(KINDS, min_size=2, max_size=9),
    st.lists(st.sampled_from([1.0, 0.5, 2.0, -1.0]), min_size=12, max_size=12),
    st.sampled_from(list(UNITS)),
    st.integers(0, 1000),
)
BEGINNINGS = {  # the basis of a build, or None, and how to compress -> how to go on
    (None, "ae"): {"compress": "ae", "steps": 50},
    (None, "balanced"): {"compress": "balanced"},
    ("ae", "ae"): {"compress": "ae"},
    ("balanced", "balanced"): {"compress": "balanced"},
    ("groups", "balanced"): {"compress": "balanced"},
    ("none", "balanced"): {"compress": "balanced"},
}


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(STREAMS, st.integers(2, 5), st.sampled_from(list(BEGINNINGS)))
def test_streams_of_vectors_that_are_hard(stream, budget, begin):
    basis, _ = begin
    more: dict[str, Any] = {"budget": budget, **BEGINNINGS[begin]}
    total, bases, singles = len(stream.vectors), None, True
    if basis is not None:
        count = min(total, budget) if basis == "none" else max(2, total // 2)
        bases = stream.build(count, basis, budget)
        assert bases.encoder is not None
        singles = torch.equal(bases.encoder, torch.eye(count, dtype=torch.float64))
    for number in range(1 if bases is None else len(bases.tasks) + 1, total + 1):
        bases = stream.add(bases, **more)
        more = {}
        # G is known for as long as every basis before this step was a task vector
        stream.check(bases, known=singles and number <= budget + 1)


# The commands, on Llama checkpoints


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    tasks = [f"t{i}" for i in range(8)]
    small = partial(tiny.llama, hidden_size=16, intermediate_size=24, num_hidden_layers=1)
    return tiny.family(tmp_path_factory.mktemp("llamas"), small, tasks, scale=0.01)


def tvb_add(store: Path, model: Path | str, task: str, *words: object) -> str:
    return commands.tvb("add", store, model, "--task", task, "--quiet", *words).stdout


def test_llamas_and_the_recipes_of_their_store(tmp_path, llamas):
    base, models = llamas
    store, total = tmp_path / "a store" / "s[1]", 7
    start = tiny.load(base)
    states = [tiny.load(path) for path in models]
    naive = Naive(Dense(start, states, sorted(start)), 4, "balanced")
    for index in range(total):
        more = ["--base", base, "--budget", 4, "--compress", "balanced"] if index == 0 else []
        said, inner = spied(tvb_add, store, models[index], f"t{index}", *more)
        assert re.search(rf"{index + 1} tasks? in {min(index + 1, 4)} of at most 4 bases", said)
        assert said.count("\n") == 1
        naive.add(index, inner)
    bases = tvb.load(store)
    assert sorted(bases.names) == sorted(start)
    check_state(bases, naive)
    assert not list(store.parent.glob(".s*adding*"))

    def run_recipe(name: str, expected: Array, skip: Array | None = None) -> None:
        made = {**ready(store, name), "dtype": "float32"}
        found = merge(made, tmp_path / name).tensors
        split = naive.dense.split
        skipped = None if skip is None else {n: m.bool() for n, m in split(skip).items()}
        assert_close(found, split(expected), start, skip=skipped, strict=1e-5)

    dense, summed = naive.dense, naive.bases * naive.shares
    lambda_ = 0.4 * total / 4  # lambda_scale: tasks
    run_recipe("add", reference.addition(dense, summed, lambda_))
    want = reference.ties(dense, summed, lambda_)
    run_recipe("ties", want.merged, want.boundary.astype(float))
    gone = naive.rebuilt[:, [1]]
    run_recipe("forget-t1", reference.negation(dense, summed, gone, 0.0, 1.0))
    for folder in (store, tmp_path / "add"):
        shown = commands.tvb("inspect", folder).stdout
        assert all(f"t{i}" in shown for i in range(total))


def test_a_tensor_that_the_store_has_tied_must_not_be_trained_on_its_own() -> None:
    torch.manual_seed(0)
    embed = torch.randn(9, 5)
    moved = [embed + 0.1 * torch.randn(9, 5) for _ in range(2)]
    base, *tied = ({"embed": each, "head": each} for each in (embed, *moved))
    bases = tvb.build(base, {"a": tied[0], "b": tied[1]}, basis="none")
    own = {"embed": moved[0] + 0.1, "head": moved[1] - 0.1}
    with pytest.raises(tvb.UserError, match=r"`head`.*the same tensor as embed"):
        tvb.add(bases, base, own, "c", budget=3)
