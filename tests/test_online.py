"""Algorithm 1 (`tvb add`) against a dense float64 one that holds every task vector and every basis.

The dense one is written from the paper: AE_Train is autograd Adam (`reference.adam`), the rotation
of `balanced` is open in the formulas and is taken from the product, and what they do say of it is
checked at every step. Adam sees float32 rounding of G only: 100 to 4000 steps, 16 compressions in a
row, left a relative difference of the bases of 1e-7 to 1e-6; 100 steps are taken, for time.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import pytest
import reference
import tiny
import torch
import yaml
from click.testing import CliRunner
from commands import assert_close, merge, ready, recipe
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import Array, Dense
from safetensors.torch import save_file
from test_lora import train
from torch import Tensor

import tvb_mergekit as tvb
from tvb_mergekit import api, cli, online
from tvb_mergekit.store import Bases

Found = TypeVar("Found")

STEPS = 100  # of Adam
LEARNED = "learned"  # which few steps leave well-conditioned, unlike least squares
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
        self.dense, self.budget, self.how = dense, budget, how
        self.keys = {"steps": steps} | ({"decoder": LEARNED} if steps == STEPS else {})
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
            found = reference.adam(gram, count, **self.keys)
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
                found = reference.adam(gram, count - 1, **self.keys)
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


def spied(call: Callable[[], Found]) -> tuple[Found, Array | None]:
    """What a step gives, and the W_e that `balanced` chose in it."""
    seen: list[Array] = []
    true = online.balanced

    def spy(*args: Any) -> Any:
        encoding = true(*args)
        assert encoding.encoder is not None
        seen.append(encoding.encoder.numpy())
        return encoding

    with mock.patch.object(online, "balanced", spy):
        found = call()
    return found, seen[0] if seen else None


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


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("how", "order"),
    [
        ("balanced", 0),
        ("balanced", 2),
        ("ae", 2),
        *(pytest.param(*case, marks=SLOW) for case in (("balanced", 1), ("ae", 0), ("ae", 1))),
    ],
)
def test_twenty_tasks_from_nothing(how: str, order: int) -> None:
    base, models = family(20)
    dense = Dense(base, models, list(SHAPES))
    naive, bases = Naive(dense, 4, how), None
    for index in orders(20)[order]:
        more: dict[str, Any] = {"budget": 4, "compress": how} if bases is None else {}
        if bases is None and how == "ae":
            more |= {"steps": STEPS, "decoder": LEARNED}
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
@pytest.mark.parametrize("basis", ["balanced", "ae", pytest.param("none", marks=SLOW)])
def test_twelve_tasks_onto_bases_that_were_built_offline(
    tmp_path: Path, basis: str, how: str
) -> None:
    base, models = family(20, seed=1)
    order = orders(20)[2]
    first = order[:8] if basis != "none" else order[:4]
    dense = Dense(base, models, list(SHAPES))
    more: dict[str, Any] = {} if basis == "none" else {"num_bases": 4}
    if basis == "ae":
        more |= {"steps": STEPS, "decoder": LEARNED}
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
    last = 20 if steps == STEPS or how == "balanced" else len(first) + 2
    for index in order[len(first) : last]:
        bases, inner = spied(
            lambda i=index: tvb.add(store, base, models[i], f"t{i}", compress=how)  # type: ignore[misc]
        )
        naive.add(index, inner)
        check_state(bases, naive)
    check_merges(tvb.load(store), base, naive)
    check_merges(tvb.load(store), base, naive, forget=len(first))


def test_the_next_step_of_an_old_store_is_by_least_squares(tmp_path: Path) -> None:
    """Of one from before `decoder` was a key: what was learned then, and what is best now."""
    base, models = family(5, seed=3)
    tau = np.stack([np.concatenate([(m[n] - base[n]).double().ravel() for n in SHAPES])
                    for m in models], axis=1)  # fmt: skip
    store = tmp_path / "store"
    given = {f"t{i}": models[i] for i in range(4)}
    built = tvb.build(base, given, store, num_bases=3, steps=1000, decoder=LEARNED)
    facts = json.loads((store / "basis.json").read_text())
    assert facts["parameters"].pop("decoder") == LEARNED
    assert facts.pop("decoder_losses")[LEARNED] == facts["loss"]
    del facts["checksum"]
    (store / "basis.json").write_text(json.dumps(facts))
    grown = tvb.add(store, base, models[4], "t4", compress="ae")
    assert grown.facts["decoder_losses"] is None
    assert grown.facts["parameters"]["decoder"] == "least_squares"
    assert built.encoder is not None and grown.encoder is not None
    old = tau[:, :4] @ built.encoder.numpy()
    inner = np.linalg.lstsq(tau @ grown.encoder.numpy()[:, :2], old, rcond=None)[0]
    assert off(grown.decoder.numpy()[:2, :4], inner @ built.decoder.numpy()) <= 1e-5


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


@dataclass
class Stream:
    """Vectors that come one after another, and what was found of them."""

    kinds: list[Any]
    weights: list[float]
    dtype: str
    seed: int
    size: int = 600
    vectors: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.seed)
        self.vectors = []
        for kind in self.kinds:
            self.vectors.append(next_vector(kind, self.vectors, draw, self.size))
        self.base = {"w": torch.zeros(self.size)}  # so that float32 differences are exact
        self.unit = {"float32": 2e-7, "bfloat16": 4e-3, "float16": 5e-4}[self.dtype]

    def tau(self, count: int) -> Array:
        vectors = torch.stack(self.vectors[:count]).T.double().numpy()
        return vectors * np.array(self.weights[:count])

    def build(self, count: int, basis: str, budget: int) -> Bases:
        size = {} if basis == "none" else {"num_bases": min(budget, count)}
        if basis == "exact":
            basis, size["solver"] = "ae", "exact"  # type: ignore[assignment]
        return tvb.build(
            self.base,
            {f"t{i}": {"w": v} for i, v in enumerate(self.vectors[:count])},
            weights={f"t{i}": w for i, w in enumerate(self.weights[:count])},
            dtype=DTYPES[self.dtype],
            basis=basis,
            **size,
        )

    def add(self, bases: Bases | None, **more: Any) -> Bases:
        index = 0 if bases is None else len(bases.tasks)
        vector, weight = {"w": self.vectors[index]}, self.weights[index]
        kind = DTYPES[self.dtype]
        return tvb.add(bases, self.base, vector, f"t{index}", weight=weight, dtype=kind, **more)

    def check(self, bases: Bases, known: bool, exact: bool) -> None:
        """`known`: whether all inner products are; `exact`: whether the errors are numbers."""
        count = len(bases.tasks)
        tau, unit = self.tau(count), self.unit
        assert bases.encoder is not None
        stored = np.stack([v.tensor("w").double().numpy() for v in bases.vectors], axis=1)
        encoder, decoder = bases.encoder.numpy(), bases.decoder.numpy()
        scale = np.linalg.norm(tau)
        # convex columns
        assert encoder.min() >= 0
        np.testing.assert_allclose(encoder.sum(axis=0), 1, atol=1e-12)
        assert np.linalg.norm(stored - tau @ encoder) <= 2 * count * unit * scale
        if bases.basis_weights is not None:
            total = stored @ bases.basis_weights.numpy()
            assert np.linalg.norm(total - tau.sum(axis=1)) <= 4 * count**1.5 * unit * scale
            np.testing.assert_allclose(bases.basis_weights.sum(), count, rtol=1e-12)
            merged = tvb.merge(bases, self.base, lambda_=0.5, lambda_scale="tasks")["w"]
            arithmetic = 0.5 * tau.sum(axis=1)
            missed = np.linalg.norm(merged.double().numpy() - arithmetic)
            assert missed <= 4 * count**1.5 * unit * scale
        products = stored.T @ stored
        found = bases.tensors["gram_bases"].numpy()
        assert np.linalg.norm(found - products) <= 4 * unit * scale**2
        assert ("gram" in bases.tensors) == known == (bases.facts["loss"] is not None)
        if known:
            assert off(bases.tensors["gram"].numpy(), tau.T @ tau) <= 3 * unit
        true = np.linalg.norm(stored @ decoder - tau, axis=0)
        norms = np.linalg.norm(tau, axis=0)
        for task, error, norm in zip(bases.tasks, true, norms, strict=True):
            bounds = bases.facts["errors"][task]
            low, high = bounds["at_least"], bounds["at_most"]
            assert low <= error / norm <= high, (task, low, error / norm, high)
            # One number, where no large terms cancel. Squares are known to 1e-6 of squared terms
            # of up to ten norms, so an error near 0 is known to its root.
            steep = np.abs(decoder).max() > 3 or norms.max() > 10 * norm
            if exact and self.dtype == "float32" and not steep:
                assert high - low <= (1e-4 if error > 0.1 * norm else 2e-2), (task, low, high)


STREAMS = st.builds(
    Stream,
    st.lists(KINDS, min_size=2, max_size=12),
    st.lists(st.sampled_from([1.0, 0.5, 2.0, -1.0]), min_size=12, max_size=12),
    st.sampled_from(list(DTYPES)),
    st.integers(0, 1000),
)
EXAMPLES = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@EXAMPLES
@given(STREAMS, st.integers(2, 5), st.sampled_from(["ae", "exact", "balanced"]))
def test_properties_from_nothing(stream: Stream, budget: int, how: str) -> None:
    more: dict[str, Any] = {"budget": budget, "compress": "ae" if how == "exact" else how}
    more |= {"ae": {"steps": 50}, "exact": {"solver": "exact"}}.get(how, {})
    bases: Bases | None = None
    for count in range(1, len(stream.vectors) + 1):
        bases = stream.add(bases, **more)
        more = {}
        # G is known for as long as every basis before this step was a task vector
        known = count <= budget + 1
        stream.check(bases, known=known, exact=known and how != "exact")


@EXAMPLES
@given(STREAMS, st.integers(2, 5), st.sampled_from(["exact", "balanced", "none"]))
def test_properties_after_a_build(stream: Stream, budget: int, basis: str) -> None:
    total = len(stream.vectors)
    count = min(total, budget) if basis == "none" else max(2, total // 2)
    bases = stream.build(count, basis, budget)
    singles = bases.num_bases == count and torch.equal(
        bases.encoder,
        torch.eye(count, dtype=torch.float64),  # type: ignore[arg-type]
    )
    how = "ae" if basis == "exact" else "balanced"
    more: dict[str, Any] = {"budget": budget, "compress": how}
    compressed = later = 0  # compressions; and of them, of what came after an earlier one
    for number in range(count + 1, total + 1):
        full = bases.num_bases == budget
        before = int(not singles) + compressed
        later += full and before > 0 and number > count + 1
        compressed += full
        known = singles and number <= budget + 1
        bases = stream.add(bases, **more)
        more = {}
        stream.check(bases, known=known, exact=not later and basis != "exact")


# The commands, on Llama checkpoints


def tvb_command(*words: str | Path, env: Mapping[str, str] | None = None, rc: int = 0) -> str:
    """Run `tvb` within this process; its one line of output."""
    with mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1", **(env or {})}):
        done = CliRunner().invoke(cli.main, [*map(str, words)])
    assert done.exit_code == rc, (done.output, done.exception)
    assert "Traceback" not in done.output
    return done.output


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    tasks = [f"t{i}" for i in range(20)]
    small = partial(tiny.llama, hidden_size=16, intermediate_size=24, num_hidden_layers=1)
    return tiny.family(tmp_path_factory.mktemp("llamas"), small, tasks, scale=0.01)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("how", ["ae", "balanced"])
def test_twenty_llamas_and_the_recipes_of_their_store(
    tmp_path: Path, llamas: tuple[Path, list[Path]], how: str
) -> None:
    base, models = llamas
    store = tmp_path / "a store" / "s[1]"
    states = [tiny.load(path) for path in models]
    start = tiny.load(base)
    names = sorted(start)
    naive = Naive(Dense(start, states, names), 4, how, 4000)
    total = 20 if how == "balanced" else 5  # with `ae` each compression trains for a second
    for index in range(total):
        more = ["--base", base, "--budget", 4, "--compress", how] if index == 0 else []
        said, inner = spied(
            lambda m=more, i=index: tvb_command(  # type: ignore[misc]
                "add", store, models[i], "--task", f"t{i}", "--quiet", *map(str, m)
            )
        )
        assert re.search(rf"{index + 1} tasks? in {min(index + 1, 4)} of at most 4 bases", said)
        assert said.count("\n") == 1
        naive.add(index, inner)
    bases = tvb.load(store)
    assert sorted(bases.names) == names
    check_merges(bases, start, naive)
    assert not list(store.parent.glob(".s*adding*"))

    def run_recipe(name: str, expected: Array, skip: Array | None = None) -> None:
        found = merge(
            {**ready(store, name), "dtype": "float32"}, tmp_path / name.removesuffix(".yml")
        ).tensors
        split = naive.dense.split
        skipped = None if skip is None else {n: m.bool() for n, m in split(skip).items()}
        assert_close(found, split(expected), start, skip=skipped, strict=1e-5)

    dense, summed = naive.dense, naive.bases * naive.shares
    lambda_ = 0.4 if how == "ae" else 0.4 * total / 4  # lambda_scale: tasks
    run_recipe("add.yml", reference.addition(dense, summed, lambda_))
    want = reference.ties(dense, summed, lambda_)
    run_recipe("ties.yml", want.merged, want.boundary.astype(float))
    gone = naive.rebuilt[:, [1]]
    run_recipe("forget-t1.yml", reference.negation(dense, summed, gone, 0.0, 1.0))
    shown = tvb_command("inspect", store)
    assert all(f"t{i}" in shown for i in range(total))


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("first", ["models", "adapters"])
def test_adapters_join_models_and_each_other(
    tmp_path: Path,
    llamas: tuple[Path, list[Path]],
    first: str,
) -> None:
    base, models = llamas
    start = tiny.load(base)
    listed: list[str | Path] = list(models[:2]) if first == "models" else []
    states = [tiny.load(path) for path in models[: len(listed)]]
    targets = [["q_proj", "up_proj"], ["q_proj"], ["up_proj", "q_proj"]]
    for index, names in enumerate(targets):
        added = train(base, tmp_path / f"a{index}", seed=index, target_modules=names)
        listed.append(f"{base}+{tmp_path}/a{index}")
        states.append({name: start[name].double() + change for name, change in added.items()})
    known = [n for n in start if listed[0] == models[0] or "q_proj" in n or "up_proj" in n]
    naive = Naive(Dense(start, states, known), 3, "balanced")
    for index, model in enumerate(listed):
        more: list[Any] = ["--base", base, "--budget", 3, "--compress", "balanced"]
        words = ["add", tmp_path / "s", model, "--task", f"t{index}", "--quiet"]
        _, inner = spied(
            lambda w=words, m=more if index == 0 else []: tvb_command(*w, *map(str, m))  # type: ignore[misc]
        )
        naive.add(index, inner)
    bases = tvb.load(tmp_path / "s")
    assert set(bases.names) == set(known)
    naive.dense.names = bases.names
    naive.dense.__post_init__()
    rows = np.concatenate([np.arange(i, j) for i, j in places(start, known, bases.names)])
    naive.bases = naive.bases[rows]
    check_state(bases, naive)


def places(start: State, old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Where the tensors of `new` lie in a vector over `old`."""
    ends = np.cumsum([start[name].numel() for name in old])
    spans = {n: (int(e) - start[n].numel(), int(e)) for n, e in zip(old, ends, strict=True)}
    return [spans[name] for name in new]


# Mistakes


def digests(store: Path) -> dict[str, tuple[int, bytes]]:
    files = [file for file in store.parent.rglob("*") if file.is_file()]
    return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


def changed(source: Path, folder: Path, edit: Callable[[State], State]) -> Path:
    """A copy of a model with other tensors."""
    shutil.copytree(source, folder)
    save_file(edit(tiny.load(source)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def without(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if "up_proj" not in name}


def reshaped(state: State) -> State:
    return {n: t[:, :-1].contiguous() if "up_proj" in n else t for n, t in state.items()}


def poisoned(state: State) -> State:
    name = next(n for n in state if "up_proj" in n)
    broken = state[name].clone()
    broken[0, 0] = float("nan")
    return state | {name: broken}


def rewritten(store: Path, edit: Callable[[Any], object]) -> None:
    facts = json.loads((store / "basis.json").read_text())
    edit(facts)
    (store / "basis.json").write_text(json.dumps(facts))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, llamas: tuple[Path, list[Path]]) -> Path:
    """Stores: balanced, ae, pca, rand_proj, of three tasks and two bases; adapters."""
    folder = tmp_path_factory.mktemp("built")
    base, models = llamas
    for basis in ("balanced", "ae", "pca", "rand_proj"):
        more = {"steps": 20} if basis == "ae" else {}
        three = {f"t{i}": models[i] for i in range(3)}
        tvb.build(base, three, folder / basis, basis=basis, num_bases=2, **more)
    for index in range(2):
        train(base, folder / f"adapter{index}", seed=index)
    names = [f"{base}+{folder}/adapter{index}" for index in range(2)]
    file = folder / "adapters.yml"
    file.write_text(yaml.safe_dump(recipe("basis_ta", base, names, basis="balanced", num_bases=1)))
    tvb_command("build", file, folder / "adapters", "--adapters", "--quiet")
    return folder


MISTAKES: dict[str, tuple[str, str]] = {  # -> store, what is said
    "another base": ("balanced", "belongs to the base"),
    "a name that is there": ("balanced", "is in .* already"),
    "the budget is too small": ("balanced", "the budget is 1: expected 2 or more"),
    "no budget": ("balanced", "the budget is 0: expected 2 or more"),
    "a negative budget": ("balanced", "the budget is -3: expected 2 or more"),
    "a budget below the bases": ("three", "the budget is 2, and the store holds 3 bases"),
    "a tensor is missing": ("balanced", "up_proj"),
    "another shape": ("balanced", "up_proj"),
    "not a number": ("balanced", "1 NaN"),
    "identical to the base": ("balanced", "identical to the base"),
    "balanced on ae": ("ae", "compress by ae, or build the store with `basis: balanced`"),
    "adapters": ("adapters", "holds adapters, whose ranks would grow"),
    "pca": ("pca", "are pca, no convex combinations"),
    "rand_proj": ("rand_proj", "are rand_proj, no convex combinations"),
    "a changed file": ("balanced", "the file was changed"),
    "a missing file": ("balanced", "missing from its store"),
    "a newer format": ("balanced", "format version 99"),
    "a new store without a budget": ("none", "a new one needs --base BASE and --budget M"),
    "a new store without a base": ("none", "needs --base BASE"),
    "a name with a comma": ("balanced", "comma"),
    "an empty name": ("balanced", "`task` is empty"),
    "no weight": ("balanced", "weight"),
    "a weight of infinity": ("balanced", "weight"),
    "no such model": ("balanced", "no-such-model"),
    "the base itself": ("balanced", "base"),
    "a folder of other things": ("things", "is not a basis store"),
}


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_the_store_stays(
    tmp_path: Path,
    built: Path,
    llamas: tuple[Path, list[Path]],
    mistake: str,
) -> None:
    base, models = llamas
    kind, expected = MISTAKES[mistake]
    place = tmp_path / "stores"
    store = place / kind
    place.mkdir()
    if kind == "three":
        shutil.copytree(built / "balanced", store)
        tvb_command("add", store, models[4], "--task", "t4", "--budget", 3, "--quiet")
    elif kind == "things":
        store.mkdir()
        (store / "thesis.txt").write_text("all my work")
    elif kind != "none":
        shutil.copytree(built / kind, store)
    model, task, more = models[3], "new", list[Any]()
    copy = tmp_path / "model"
    match mistake:
        case "another base":
            more = ["--base", models[7]]
        case "a name that is there":
            task = "t1"
        case "the budget is too small":
            more = ["--budget", "1"]
        case "no budget":
            more = ["--budget", "0"]
        case "a negative budget":
            more = ["--budget", "-3"]
        case "a budget below the bases":
            more = ["--budget", "2"]
        case "a tensor is missing":
            model = changed(model, copy, without)
        case "another shape":
            model = changed(model, copy, reshaped)
        case "not a number":
            model = changed(model, copy, poisoned)
        case "identical to the base":
            model = changed(base, copy, lambda state: state)
        case "balanced on ae":
            more = ["--compress", "balanced"]
        case "a changed file":
            file = store / "basis-001" / "model.safetensors"
            raw = bytearray(file.read_bytes())
            raw[-1] ^= 1
            file.write_bytes(raw)
        case "a missing file":
            (store / "basis-001" / "model.safetensors").unlink()
        case "a newer format":
            rewritten(store, lambda facts: facts.update(format_version=99))
        case "a new store without a budget":
            more = ["--base", base]
        case "a folder of other things":
            more = ["--base", base, "--budget", "3"]
        case "a name with a comma":
            task = "a,b"
        case "an empty name":
            task = ""
        case "no weight":
            more = ["--weight", "0"]
        case "a weight of infinity":
            more = ["--weight", "inf"]
        case "no such model":
            model = tmp_path / "no-such-model"
        case "the base itself":
            model = base
    before = digests(store)
    said = tvb_command("add", store, model, "--task", task, "--quiet", *more, rc=1)
    assert said.count("\n") == 1, said
    assert re.search(expected, said), said
    assert digests(store) == before
    assert {entry.name for entry in place.iterdir()} <= {store.name}


def test_bases_loaded_before_an_addition_are_not_mixed_with_those_after(tmp_path: Path) -> None:
    """The old bases, or an error; never old coefficients over new vectors."""
    base, models = family(5)
    store = tmp_path / "s"
    three = {f"t{i}": models[i] for i in range(3)}
    tvb.build(base, three, store, basis="balanced", num_bases=2)
    expected = tvb.merge(tvb.load(store), base, "basis_negate", forget="t1", alpha=1.0)
    old = tvb.load(store)
    tvb.add(store, base, models[4], "t4")
    try:
        merged = tvb.merge(old, base, "basis_negate", forget="t1", alpha=1.0)
    except tvb.UserError:
        return
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark needs Linux")
def test_the_benchmark_of_steps_runs(tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "evals" / "speed" / "online.py"
    words = ["--tasks", "3", "--megabytes", "2", "--budget", "2"]
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [row[:2] for row in rows] == [["1", "1"], ["2", "2"], ["3", "2"]]
    assert not list(tmp_path.glob("run-*"))


def test_what_a_user_put_into_a_store_stays_in_it(tmp_path: Path) -> None:
    base, models = family(5)
    store = tmp_path / "s"
    tvb.build(base, {"t0": models[0], "t1": models[1]}, store, basis="balanced", num_bases=2)
    (store / "notes").mkdir()
    (store / "notes" / "why.txt").write_text("kept")
    (store / "recipes" / "mine.yml").write_text("merge_method: basis_ta\n")
    recipes, kept = store / "recipes", {}
    for index, name in ((2, "add.yml.old"), (3, "add.yml.old2"), (4, "add.yml.old3")):
        kept[name] = (recipes / "add.yml").read_text().replace("0.4", f"0.{index + 5}")
        (recipes / "add.yml").write_text(kept[name])
        tvb.add(store, base, models[index], f"t{index}")
        assert (store / "notes" / "why.txt").read_text() == "kept"
        assert (recipes / "mine.yml").read_text() == "merge_method: basis_ta\n"
        assert {p.name: p.read_text() for p in recipes.glob("*.old*")} == kept
        assert "0.4" in (recipes / "add.yml").read_text()
        assert (recipes / f"forget-t{index}.yml").is_file()


def test_a_tensor_that_the_store_has_tied_must_not_be_trained_on_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    embed = torch.randn(9, 5)
    base = {"embed": embed, "head": embed}
    tied = []
    for _ in range(2):
        moved = embed + 0.1 * torch.randn(9, 5)
        tied.append({"embed": moved, "head": moved})
    bases = tvb.build(base, {"a": tied[0], "b": tied[1]}, basis="none")
    own = {"embed": tied[0]["embed"] + 0.1, "head": tied[1]["embed"] - 0.1}
    with pytest.raises(tvb.UserError, match=r"`head`.*tied there, and on its own"):
        tvb.add(bases, base, own, "c", budget=3)
