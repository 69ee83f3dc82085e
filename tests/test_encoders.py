"""Encoders: closed forms meet their bounds, training is the authors'."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import helmert
from torch import Tensor

from tvb_mergekit.core.basis import encode
from tvb_mergekit.core.encoders.balanced import balanced
from tvb_mergekit.core.gram import Gram
from tvb_mergekit.core.settings import Settings
from tvb_mergekit.errors import UserError

quick = settings(max_examples=60)
seeds = st.integers(0, 2**32 - 1)
Array = reference.Array


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
    found, scales = (
        solve(tau.T @ tau, basis="pca", num_bases=count),
        np.linalg.svd(tau - mean, compute_uv=False),
    )
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


@pytest.mark.parametrize(
    ("gram", "keys", "message"),
    [
        (torch.tensor([[1.0, 0.0], [0.0, math.nan]]), {}, "holds NaN or infinity"),
        (1e30 * np.eye(4), {"steps": 5, "learning_rate": 1e30}, "lower `learning_rate`"),
    ],
)
def test_refused(gram: Tensor, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        solve(gram, **keys)
