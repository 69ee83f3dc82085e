"""The exact solver: at the spectral bound where Theorem 1 allows it, and never above Adam."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import approx_fprime, minimize
from torch import Tensor

from tvb_mergekit.encoders import Encoding, Gram, encode
from tvb_mergekit.encoders.exact import FLOOR, _objective, most_uniform_vector
from tvb_mergekit.recipe import Settings

quick = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


def solve(gram: Tensor, count: int, **keys: Any) -> Encoding:
    return encode(gram, Settings(method="basis_ta", num_bases=count, **keys))


def check_convex(encoder: Tensor | None) -> None:
    assert encoder is not None and encoder.min() >= 0
    assert (encoder.sum(0) - 1).abs().max() <= 1e-12


def random_gram(seed: int, size: int) -> np.ndarray:
    """Correlated, nearly orthogonal or opposed task vectors."""
    random = np.random.default_rng(seed)
    vectors = random.standard_normal((int(random.integers(size, 50 * size)), size))
    shared = random.uniform(-0.9, 1.5)
    vectors += shared * (vectors.mean(axis=1, keepdims=True) if shared < 0 else vectors[:, :1])
    return vectors.T @ vectors / len(vectors)


@quick
@given(seeds, st.integers(2, 12), st.data())
def test_reaches_the_spectral_bound_where_it_is_attainable(
    seed: int, size: int, data: st.DataObject
) -> None:
    """Theorem 1: a positive vector well inside the top-M eigenspace, a mixture of eigenvectors."""
    count = data.draw(st.integers(1, size - 1))
    decay = data.draw(st.floats(0.0, 1.5))
    random = np.random.default_rng(seed)
    frame = random.standard_normal((size, size))
    frame[:, 0] = random.uniform(0.2, 1.0, size)
    vectors = np.linalg.qr(frame)[0]
    turn = np.linalg.qr(random.standard_normal((count, count)))[0]
    vectors[:, :count] = vectors[:, :count] @ turn  # the positive vector is no eigenvector
    values = 10.0 ** (-decay * np.arange(size))
    gram = (vectors * values) @ vectors.T
    result = solve(torch.from_numpy((gram + gram.T) / 2), count, solver="exact")
    check_convex(result.encoder)
    if result.relative_gap is not None:
        # eigenvalues of G are known to 1e-16 of the largest, and no better
        known = 1e-14 * values[0] / values[count:].sum()
        assert abs(result.relative_gap) <= 1e-8 + known
    else:
        assert result.loss <= 1e-12 * values.sum()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seeds, st.integers(3, 10), st.sampled_from([1.0, 5.0]), st.data())
def test_never_above_adam(seed: int, size: int, temperature: float, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, size - 1))
    gram = torch.from_numpy(random_gram(seed, size))
    exact = solve(gram, count, solver="exact")
    adam = solve(gram, count, temperature=temperature)
    assert exact.loss <= adam.loss * (1 + 1e-6)
    assert exact.loss >= exact.spectral_bound * (1 - 1e-9)


@quick
@given(seeds, st.integers(3, 10), st.data())
def test_order_of_tasks_does_not_matter(seed: int, size: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, size))
    order = data.draw(st.permutations(range(size)))
    gram = torch.from_numpy(random_gram(seed, size))
    gram = (gram + gram.T) / 2
    straight = solve(gram, count, solver="exact")
    permuted = solve(gram[order][:, order], count, solver="exact")
    total = float(torch.trace(gram))
    assert permuted.loss == pytest.approx(straight.loss, rel=1e-6, abs=1e-12 * total)
    check_convex(permuted.encoder)


@pytest.mark.parametrize("seed", range(6))
def test_no_search_over_whole_encoders_finds_less(seed: int) -> None:
    """Independent solver: variable projection over all T M entries of W_e, from many starts."""
    size, count = 6, 3
    matrix = random_gram(seed + 100, size)
    gram = Gram.from_array(matrix)
    random = np.random.default_rng(seed)

    def loss(flat: np.ndarray) -> float:
        frame = np.linalg.qr(gram.root @ flat.reshape(size, count))[0]
        return float(np.square(gram.root - frame @ (frame.T @ gram.root)).sum())

    found = min(
        minimize(
            loss,
            random.dirichlet(np.full(size, 1.0), count).T.ravel(),
            method="L-BFGS-B",
            bounds=[(1e-9, None)] * (size * count),
        ).fun
        for _ in range(6)
    )
    exact = solve(torch.from_numpy(matrix), count, solver="exact")
    assert exact.loss <= found * (1 + 10 * FLOOR)


def test_gradient_of_the_loss_given_row_sums() -> None:
    gram = Gram.from_array(random_gram(7, 6))
    for count in (1, 3, 5):
        objective = _objective(gram, count, gram.total)
        point = np.random.default_rng(count).uniform(0.1, 1, 6)
        numeric = approx_fprime(point, lambda x, f=objective: f(x)[0])
        assert np.abs(numeric - objective(point)[1]).max() <= 1e-6


def test_most_uniform_vector() -> None:
    assert np.allclose(most_uniform_vector(np.eye(4)), 0.25)
    opposed = np.array([[1.0], [-1.0], [0.0]]) / np.sqrt(2)
    assert most_uniform_vector(opposed).min() <= 0


@pytest.mark.parametrize(
    ("gram", "count", "loss"),
    [
        (torch.eye(5), 2, 3.0),  # every span loses as much
        (torch.eye(4), 4, 0.0),
        (torch.ones(4, 4), 2, 0.0),  # identical tasks, rank 1 < M
        (torch.zeros(3, 3), 1, 0.0),
        (torch.eye(2) * 2 - 1, 1, 0.0),  # tau_2 = -tau_1
    ],
)
def test_degenerate_gram_matrices(gram: Tensor, count: int, loss: float) -> None:
    result = solve(gram.double(), count, solver="exact")
    assert result.loss == pytest.approx(loss, abs=1e-10)
    check_convex(result.encoder)
    assert result.decoder.isfinite().all()
