"""Core on arbitrary inputs: encoders meet their bounds or train as the authors do; sums, Trim and
merges of entries equal dense float64."""

import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import reference
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference import Array, Dense
from scipy.linalg import helmert
from torch import Tensor

from tvb_mergekit.core.basis import Step, build, encode, warnings
from tvb_mergekit.core.encoders.balanced import balanced
from tvb_mergekit.core.gram import SUMMED, Gram, GramSums, check_copied
from tvb_mergekit.core.methods.ties import BINS, count_magnitudes, trim_elect_merge, trim_thresholds
from tvb_mergekit.core.settings import Settings, resolve_settings
from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors.passes import gram_pass
from tvb_mergekit.tensors.stream import Item, Part

quick, few = settings(max_examples=60), settings(max_examples=25)
seeds = st.integers(0, 2**32 - 1)


def solve(gram: Tensor | Array, **keys: Any) -> Any:
    return encode(torch.as_tensor(gram), Settings("basis_ta", keys))


@st.composite
def task_vectors(draw: st.DrawFn) -> Array:
    """[d, T] of all kinds that task vectors may be, at all scales."""
    size = draw(st.integers(1, 12))
    random, rank = np.random.default_rng(draw(seeds)), draw(st.integers(1, size))
    vectors, normal = random.standard_normal((2 * size, size)), random.standard_normal
    kinds = {
        "plain": vectors,
        "correlated": vectors + normal((2 * size, 1)),
        "orthogonal": normal((60 * size, size)),
        "opposed": vectors - 0.9 * vectors.mean(axis=1, keepdims=True),
        "deficient": vectors[:, :rank] @ normal((rank, size)),
        "identical": vectors[:, random.integers(0, max(1, size // 2), size)],
        "uneven": vectors * 10.0 ** random.uniform(-4, 0, size),
        "unit": np.eye(size),
        "negative": np.eye(size) - 1 / size,  # correlations -1/(T-1): the sum is 0
        "zero": 0 * vectors,
    }
    scaled: Array = kinds[draw(st.sampled_from(list(kinds)))] * 10.0 ** draw(st.integers(-4, 4))
    return scaled


def some_gram(seed: int, size: int, shared: float | None = None) -> Array:
    """The Gram matrix of correlated, nearly orthogonal or opposed task vectors."""
    random = np.random.default_rng(seed)
    vectors = random.standard_normal((int(random.integers(size, 50 * size)), size))
    shared = random.uniform(-0.9, 1.5) if shared is None else shared
    vectors += shared * (vectors.mean(axis=1, keepdims=True) if shared < 0 else vectors[:, :1])
    gram: Array = vectors.T @ vectors / len(vectors)
    return gram


def check_convex(encoder: Tensor) -> None:
    assert encoder.min() >= 0 and (encoder.sum(0) - 1).abs().max() <= 1e-12


@quick
@given(task_vectors(), st.data())
def test_every_closed_form(tau: Array, data: st.DataObject) -> None:
    gram, size = tau.T @ tau, tau.shape[1]
    count, total = data.draw(st.integers(1, size)), float(np.trace(gram))
    eigenvalues = np.sort(np.linalg.eigvalsh(gram))[::-1]
    for basis in ("balanced", "groups", "pca", "rand_select", "none"):
        size_key = {} if basis == "none" else {"num_bases": count}
        found = solve(gram, basis=basis, seed=3, **size_key)
        bases = size if basis == "none" else count
        assert found.encoder.shape == (size, bases)
        for value in (found.encoder, found.decoder, found.reconstruction, found.eigenvalues):
            assert value.dtype == torch.float64 and value.isfinite().all()
        lost = reference.loss(gram, found.reconstruction.numpy())
        assert found.loss == pytest.approx(lost, rel=1e-9, abs=1e-9 * total)
        np.testing.assert_allclose(found.eigenvalues, eigenvalues, atol=1e-12 * total)
        assert found.spectral_bound == pytest.approx(eigenvalues[bases:].sum(), abs=1e-12 * total)
        assert found.retained_energy == pytest.approx(1 - lost / total if total else 1, abs=1e-9)
        if basis == "groups":  # even sums, few tasks in each
            check_convex(found.encoder)
            np.testing.assert_allclose(found.encoder.sum(1), count / size, rtol=0, atol=1e-12)
            assert (found.encoder > 1e-12).sum() <= size + count - np.gcd(size, count)
        if basis != "pca":
            product = found.encoder @ found.decoder
            assert torch.allclose(found.reconstruction, product, rtol=0, atol=1e-12)
            # least squares: what is lost is orthogonal to every basis
            rest = gram @ (product.numpy() - np.eye(size))
            assert np.abs(found.encoder.numpy().T @ rest).max() <= 1e-9 * total


@quick
@given(task_vectors(), st.data())
def test_balanced_meets_its_bound(tau: Array, data: st.DataObject) -> None:
    """Convex columns, the row sums of the weights, and the least loss among such encoders."""
    gram, size = tau.T @ tau, tau.shape[1]
    count, total = data.draw(st.integers(1, size)), float(np.trace(gram))
    weighted = data.draw(st.booleans())
    each = st.floats(0.1, 100) if weighted else st.just(1.0)
    weights = np.array(data.draw(st.lists(each, min_size=size, max_size=size)))
    if weighted:
        found = balanced(Gram.of(torch.from_numpy(gram)), count, weights)
    else:
        found = solve(gram, basis="balanced", num_bases=count)
    check_convex(found.encoder)
    rows = count * weights / weights.sum()
    np.testing.assert_allclose(found.encoder.sum(1), rows, rtol=0, atol=1e-12 * count)
    if weights @ gram @ weights > 1e-6 * total * (weights @ weights):
        want = reference.balanced_bound(gram, count, weights)
        assert found.loss == pytest.approx(want, rel=1e-9, abs=1e-9 * total)
    if count == 1:
        np.testing.assert_allclose(found.encoder[:, 0], weights / weights.sum(), rtol=1e-12)


def test_groups_are_those_with_the_longest_means() -> None:
    """Of all ways to make three pairs, and of planted groups whose tasks are listed apart."""
    pairs = [((0, a), b, tuple({*range(1, 6)} - {a, *b})) for a in range(1, 6)
             for b in itertools.combinations(set(range(1, 6)) - {a}, 2)]  # fmt: skip
    for seed in range(10):
        gram = some_gram(seed, 6)
        longest = max(sum(gram[np.ix_(p, p)].sum() / 4 for p in three) for three in pairs)
        encoder = solve(gram, basis="groups", num_bases=3).encoder.numpy()
        assert np.trace(encoder.T @ gram @ encoder) == pytest.approx(longest, rel=1e-6)
    random = np.random.default_rng(0)
    centres = random.standard_normal((50, 4))[:, np.arange(12) % 4]
    tau = centres + 0.3 * random.standard_normal((50, 12))
    encoder = solve(tau.T @ tau, basis="groups", num_bases=4).encoder.numpy()
    np.testing.assert_array_equal(encoder, np.tile(np.eye(4), (3, 1)) / 3)


def test_last_digits_do_not_choose_between_equal_groups() -> None:
    """Two kinds of tasks in three groups: many exchanges gain the same."""
    kinds, found = np.tile(np.eye(2), (3, 1)), set()
    for seed in range(10):
        noise = 1e-12 * np.random.default_rng(seed).standard_normal((6, 6))
        gram = np.eye(6) + kinds @ kinds.T + noise + noise.T
        found.add(solve(gram, basis="groups", num_bases=3).encoder.numpy().tobytes())
    assert len(found) == 1


def test_last_digits_do_not_choose_the_balanced_bases() -> None:
    for seed, size in itertools.product(range(3), (4, 8, 12)):
        gram = some_gram(seed, size, 0.5)
        noise = 1e-9 * gram.max() * np.random.default_rng(seed).standard_normal(gram.shape)
        for count in (2, size // 2, size - 1):
            both = (gram, gram + noise + noise.T)
            one, two = (solve(g, basis="balanced", num_bases=count).encoder for g in both)
            assert float((one - two).abs().max()) < 1e-6


def test_balanced_columns_are_apart() -> None:
    """None of 300 random rotations within the same span puts the columns further apart."""
    for seed in range(4):
        random, size, count = np.random.default_rng(seed), 8, 4
        found = solve(some_gram(seed, size), basis="balanced", num_bases=count).encoder
        apart = found.numpy() - 1 / size
        frame = np.linalg.svd(apart)[0][:, : count - 1]
        turns = np.linalg.qr(random.standard_normal((300, count - 1, count - 1)))[0]
        others = frame @ turns @ helmert(count)
        furthest = (np.linalg.norm(others[0]) / (size * -others.min(axis=(1, 2)))).max()
        assert np.linalg.norm(apart) >= furthest


PLAIN = {"steps": 50, "weight_decay": 0.0}


@pytest.mark.parametrize(
    ("size", "count", "keys"),
    [
        (8, 4, {"steps": 400}),
        (8, 4, {**PLAIN, "steps": 300, "learning_rate": 0.02, "weight_decay": 1e-4}),
        (8, 4, {"steps": 300, "seed": 3, "temperature": 1.0, "anneal_every": 50,
                "anneal_factor": 0.3}),
        (8, 4, {"steps": 300, "basis": "linear_ae", "temperature": 2.0}),
        (1, 1, PLAIN),
        (33, 2, PLAIN),
    ],
)  # fmt: skip
def test_adam_is_the_authors_procedure(size: int, count: int, keys: dict[str, Any]) -> None:
    gram = some_gram(1, size, 0.0)
    before = torch.get_rng_state()
    found = solve(gram, num_bases=count, **keys)
    assert torch.equal(torch.get_rng_state(), before)
    given = {key: value for key, value in keys.items() if key != "basis"}
    want = reference.adam(gram, count, softmax="basis" not in keys, **given)
    np.testing.assert_allclose(found.encoder, want.encoder, atol=1e-5)
    np.testing.assert_allclose(found.decoder, want.decoder, atol=1e-4)
    if "basis" not in keys:  # to the bit
        assert np.array_equal(found.encoder, want.encoder / want.encoder.sum(0))
        check_convex(found.encoder)


@quick
@given(task_vectors(), st.data())
def test_pca_is_the_best_fit_around_the_mean(tau: Array, data: st.DataObject) -> None:
    size, total = tau.shape[1], float(np.square(tau).sum())
    count, mean = data.draw(st.integers(1, size)), tau.mean(axis=1, keepdims=True)
    found = solve(tau.T @ tau, basis="pca", num_bases=count)
    scales = np.linalg.svd(tau - mean, compute_uv=False)
    encoder, vectors = found.encoder.numpy(), found.decoder.numpy().T
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(count), atol=1e-12)
    made = encoder.any(axis=0)  # rounding makes no basis: F J has at most T - 1 directions
    expected = np.where(made, vectors - vectors.mean(axis=0), 0)
    np.testing.assert_allclose(encoder, expected, atol=1e-12)
    assert not (count == size and made[-1])
    assert made[: len(scales)][scales[:count] > 1e-7 * math.sqrt(total)].all()
    rebuilt, atol = tau @ encoder @ vectors.T + mean, 1e-12 * math.sqrt(total)
    np.testing.assert_allclose(tau @ found.reconstruction.numpy(), rebuilt, atol=atol)
    assert found.loss == pytest.approx(np.square(scales[count:]).sum(), abs=1e-12 * total)
    sizes = np.abs(vectors)
    first = np.argmax(sizes >= sizes.max(axis=0) * (1 - 1e-9), axis=0)
    assert (vectors[first, np.arange(count)] > 0).all()


def test_what_is_not_finite_is_refused() -> None:
    with pytest.raises(UserError, match="holds NaN or infinity"):
        solve(torch.tensor([[1.0, 0.0], [0.0, math.nan]]))
    with pytest.raises(UserError, match="lower `learning_rate`"):
        solve(1e30 * np.eye(4), steps=5, learning_rate=1e30)


# Task vectors of any models

CPU = torch.device("cpu")
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
