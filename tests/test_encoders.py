"""Encoders: the closed forms meet their bounds, the training is the authors', the rest is exact."""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits
from torch import Tensor

from tvb_mergekit.encoders import Encoding, Gram, balanced, encode, num_bases, projection
from tvb_mergekit.errors import UserError
from tvb_mergekit.recipe import Settings

quick = settings(max_examples=150, deadline=None, derandomize=True)


def options(**keys: Any) -> Settings:
    return Settings(method="basis_ta", **keys)


def gram_of(vectors: np.ndarray) -> Tensor:
    return torch.from_numpy(vectors.T @ vectors)


@st.composite
def gram_matrices(draw: st.DrawFn, low: int = 1, high: int = 16) -> Tensor:
    """Gram matrices of all kinds that task vectors may have, at all scales."""
    size = draw(st.integers(low, high))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = ["plain", "correlated", "orthogonal", "opposed", "deficient", "identical", "unit"]
    kind = draw(st.sampled_from([*kinds, "negative", "zero", "uneven"]))
    vectors = random.standard_normal((2 * size, size))
    if kind == "correlated":
        vectors += random.standard_normal((2 * size, 1))
    elif kind == "orthogonal":
        vectors = random.standard_normal((60 * size, size))
    elif kind == "opposed":
        vectors -= 0.9 * vectors.mean(axis=1, keepdims=True)
    elif kind == "deficient":
        rank = draw(st.integers(1, size))
        vectors = vectors[:, :rank] @ random.standard_normal((rank, size))
    elif kind == "identical":
        vectors = vectors[:, random.integers(0, max(1, size // 2), size)]
    elif kind == "uneven":
        vectors *= 10.0 ** random.uniform(-4, 0, size)
    scale = 10.0 ** draw(st.integers(-8, 8))
    if kind == "unit":
        return torch.eye(size, dtype=torch.float64) * scale
    if kind == "negative":  # equal correlation -1/(T-1): the task vectors sum to 0
        return (torch.eye(size, dtype=torch.float64) - 1 / size) * scale
    return gram_of(vectors * (0.0 if kind == "zero" else 1.0)) * scale


def loss_of(gram: Tensor, reconstruction: Tensor) -> float:
    error = reconstruction - torch.eye(len(gram), dtype=torch.float64)
    return float(torch.trace(error.T @ gram @ error))


def check_convex(encoder: Tensor) -> None:
    assert encoder.min() >= 0
    assert (encoder.sum(0) - 1).abs().max() <= 1e-12


def check_common(gram: Tensor, result: Encoding, count: int) -> None:
    """What holds for every basis with an encoder."""
    total = float(torch.trace(gram))
    assert result.encoder is not None and result.reconstruction is not None
    assert result.encoder.shape == (len(gram), count) == (result.num_tasks, result.num_bases)
    for value in (result.encoder, result.decoder, result.reconstruction, result.eigenvalues):
        assert value.dtype == torch.float64 and value.isfinite().all()
    assert abs(result.loss - loss_of(gram, result.reconstruction)) <= 1e-9 * total
    assert (result.eigenvalues.diff() <= 0).all() and result.eigenvalues.min() >= 0
    assert abs(float(result.eigenvalues.sum()) - total) <= 1e-12 * total
    assert result.spectral_bound == pytest.approx(float(result.eigenvalues[count:].sum()))
    assert result.retained_energy <= 1.0


@quick
@given(gram_matrices(), st.data())
def test_balanced_meets_its_bound_for_every_gram_matrix(gram: Tensor, data: st.DataObject) -> None:
    size, total = len(gram), float(torch.trace(gram))
    count = data.draw(st.integers(1, size))
    result = encode(gram, options(basis="balanced", num_bases=count))
    check_common(gram, result, count)
    assert result.encoder is not None and result.row_sums is not None
    check_convex(result.encoder)
    assert (result.row_sums - count / size).abs().max() <= 1e-12
    bound = result.balanced_bound
    assert bound is not None
    assert abs(result.loss - bound) <= 1e-9 * max(bound, 1e-12 * total)
    eigenvalues, rounding = result.eigenvalues, 1e-12 * total
    assert bound >= float(eigenvalues[count:].sum()) - rounding
    assert bound <= float(eigenvalues[count - 1 :].sum()) + rounding
    if count == 1:
        assert torch.allclose(result.encoder, torch.full((size, 1), 1 / size, dtype=torch.float64))


@quick
@given(gram_matrices(low=2), st.data())
def test_balanced_with_task_weights(gram: Tensor, data: st.DataObject) -> None:
    size, total = len(gram), float(torch.trace(gram))
    count = data.draw(st.integers(1, size))
    weights = np.array(data.draw(st.lists(st.floats(0.1, 100), min_size=size, max_size=size)))
    result = balanced(Gram.of(gram), count, weights)
    assert result.encoder is not None and result.balanced_bound is not None
    check_convex(result.encoder)
    rows = count / weights.sum() * torch.from_numpy(weights)
    assert (result.encoder.sum(1) - rows).abs().max() <= 1e-12 * count
    bound = result.balanced_bound
    assert abs(result.loss - bound) <= 1e-9 * max(bound, 1e-6 * total)


def test_balanced_columns_are_apart() -> None:
    """With as many bases as tasks nothing need be mixed; with two the halves need not overlap."""
    gram = gram_of(np.random.default_rng(0).standard_normal((20, 6)))
    full = encode(gram, options(basis="balanced", num_bases=6)).encoder
    assert full is not None
    assert torch.allclose(full.max(0).values, torch.ones(6, dtype=torch.float64), atol=1e-3)
    half = encode(gram, options(basis="balanced", num_bases=2)).encoder
    assert half is not None and half.min() <= 1e-15
    with pytest.raises(UserError, match="expected 6 positive numbers"):
        balanced(Gram.of(gram), 2, np.zeros(6))


def naive_adam(gram: Tensor, count: int, keys: Settings) -> tuple[Tensor, Tensor]:
    """The authors' procedure, written out."""
    size = len(gram)
    torch.manual_seed(keys.seed)
    a = torch.nn.Parameter(torch.randn(size, count))
    w_d = torch.nn.Parameter(torch.zeros(count, size))
    adam = torch.optim.Adam([a, w_d], lr=keys.learning_rate, weight_decay=keys.weight_decay)
    tau, g = keys.temperature, gram.float()
    for step in range(1, keys.steps + 1):
        adam.zero_grad()
        e = torch.softmax(a / tau, dim=0) @ w_d - torch.eye(size)
        ((e * (g @ e)).sum() / size**2).backward()
        adam.step()
        if keys.anneal_every and step % keys.anneal_every == 0:
            tau = max(0.1, tau * keys.anneal_factor)
    return torch.softmax(a / tau, dim=0).detach(), w_d.detach()


@pytest.mark.parametrize(
    "keys",
    [
        {"steps": 1000},
        {"steps": 300, "seed": 3, "temperature": 1.0, "anneal_every": 50, "anneal_factor": 0.3},
    ],
)
def test_adam_is_the_authors_procedure(keys: dict[str, object]) -> None:
    gram = gram_of(np.random.default_rng(1).standard_normal((40, 8))) / 40
    chosen = options(num_bases=4, decoder="learned", **keys)
    before = torch.get_rng_state()
    result = encode(gram, chosen)
    assert torch.equal(torch.get_rng_state(), before)
    encoder, decoder = naive_adam(gram, 4, chosen)
    torch.set_rng_state(before)
    assert result.encoder is not None
    assert (result.encoder - encoder).abs().max() <= 1e-5
    assert (result.decoder - decoder).abs().max() <= 1e-5
    assert (result.encoder.sum(0) - 1).abs().max() <= 1e-15
    check_common(gram, result, 4)


def test_the_decoder_is_least_squares_unless_the_learned_one_is_asked_for() -> None:
    gram = gram_of(np.random.default_rng(1).standard_normal((40, 8))) / 40
    default, learned = (encode(gram, options(steps=300, **k)) for k in ({}, {"decoder": "learned"}))
    assert default.encoder is not None and learned.encoder is not None
    assert torch.equal(default.encoder, learned.encoder)
    inner = default.encoder.T @ gram @ default.encoder
    best = torch.linalg.solve(inner, default.encoder.T @ gram)
    assert torch.allclose(default.decoder, best, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(learned.decoder, best, rtol=1e-3)
    losses = {"least_squares": default.loss, "learned": learned.loss}
    assert default.decoder_losses == learned.decoder_losses == losses
    assert losses["least_squares"] < losses["learned"]
    assert encode(gram, options(solver="exact")).decoder_losses is None


def test_adam_with_default_steps_nears_the_bound_and_repeats() -> None:
    random = np.random.default_rng(2)
    gram = gram_of(random.standard_normal((80, 8)) + random.standard_normal((80, 1))) / 80
    first, second = (encode(gram, options()) for _ in range(2))
    assert first.relative_gap is not None and 0 <= first.relative_gap < 0.02
    assert first.encoder is not None and second.encoder is not None
    assert torch.equal(first.encoder, second.encoder)


def test_diverged_training_names_the_remedy() -> None:
    gram = 1e30 * torch.eye(4, dtype=torch.float64)
    with pytest.raises(UserError, match="lower `learning_rate`"):
        encode(gram, options(num_bases=2, steps=5, learning_rate=1e30))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("place", "work", "keys"),
    [
        ("autoencoder", "_train", {}),
        ("exact", "_best_row_sums", {"solver": "exact"}),
        ("balanced", "completion", {"basis": "balanced"}),
    ],
)
def test_one_thread_works_on_the_gram_matrix(
    place: str, work: str, keys: dict[str, str], fails: bool
) -> None:
    """Whatever PyTorch and the BLAS of numpy and scipy had before, and they have it after."""

    def counts() -> set[int]:
        return {torch.get_num_threads(), *(pool["num_threads"] for pool in threadpool_info())}

    seen, threads = [], torch.get_num_threads()
    module = sys.modules[f"tvb_mergekit.encoders.{place}"]
    original = getattr(module, work)

    def look(*words: Any) -> Any:
        seen.append(counts())
        return 1 / 0 if fails else original(*words)

    gram = gram_of(np.random.default_rng(0).standard_normal((20, 4)))
    try:
        with threadpool_limits(2), mock.patch.object(module, work, look):
            torch.set_num_threads(2)
            with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
                encode(gram, options(num_bases=2, **keys))
            assert seen == [{1}] and counts() == {2}
    finally:
        torch.set_num_threads(threads)


def test_linear_autoencoder_nears_the_bound() -> None:
    gram = gram_of(np.random.default_rng(3).standard_normal((40, 6))) / 40
    result = encode(gram, options(basis="linear_ae", num_bases=3, steps=1500))
    check_common(gram, result, 3)
    assert result.relative_gap is not None and result.relative_gap < 1e-3


@quick
@given(gram_matrices(), st.data())
def test_pca_is_the_best_fit_around_the_mean(gram: Tensor, data: st.DataObject) -> None:
    size, total = len(gram), float(torch.trace(gram))
    count = data.draw(st.integers(1, size))
    result = encode(gram, options(basis="pca", num_bases=count))
    check_common(gram, result, count)
    assert result.encoder is not None and result.reconstruction is not None
    vectors = result.decoder.T
    assert torch.allclose(vectors.T @ vectors, torch.eye(count, dtype=torch.float64), atol=1e-12)
    centering = torch.eye(size, dtype=torch.float64) - 1 / size
    expected = centering @ vectors @ vectors.T + 1 / size
    assert torch.allclose(result.reconstruction, expected, atol=1e-12)
    centred = torch.linalg.eigvalsh(centering @ gram @ centering).flip(0).clamp(min=0)
    assert result.loss == pytest.approx(float(centred[count:].sum()), abs=1e-12 * total)
    sizes = vectors.abs()
    first = (sizes >= sizes.max(0).values * (1 - 1e-9)).int().argmax(0)
    assert (vectors[first, torch.arange(count)] > 0).all()


def test_random_selection_takes_tasks_themselves() -> None:
    gram = gram_of(np.random.default_rng(4).standard_normal((40, 8)))
    result = encode(gram, options(basis="rand_select", num_bases=3, seed=5))
    check_common(gram, result, 3)
    assert result.encoder is not None and result.reconstruction is not None
    chosen = result.encoder.argmax(0)
    torch.manual_seed(5)
    assert chosen.tolist() == sorted(torch.randperm(8)[:3].tolist())
    assert torch.equal(result.encoder, torch.eye(8, dtype=torch.float64)[:, chosen])
    kept = result.reconstruction[:, chosen]
    assert torch.allclose(kept, result.encoder, atol=1e-12)


def test_projection_is_the_one_on_the_sketch() -> None:
    random = np.random.default_rng(6)
    tasks, omega = random.standard_normal((50, 8)), random.standard_normal((50, 3))
    result = projection(gram_of(tasks), gram_of(omega), torch.from_numpy(omega.T @ tasks))
    assert result.encoder is None and result.reconstruction is None and result.row_sums is None
    assert result.mixing is not None
    q = omega @ result.mixing.numpy()
    assert np.allclose(q.T @ q, np.eye(3))
    assert np.allclose(q.T @ tasks, result.decoder.numpy())
    assert result.loss == pytest.approx(np.square(tasks - q @ (q.T @ tasks)).sum())
    assert result.relative_gap is not None and result.relative_gap > 0
    flat = torch.ones(2, 2, dtype=torch.float64)
    with pytest.raises(UserError, match="no 2 independent directions"):
        projection(gram_of(tasks), flat - 2, torch.zeros(2, 8, dtype=torch.float64))
    with pytest.raises(UserError, match=r"expected \[M, M\] and \[M, 8\]"):
        projection(gram_of(tasks), flat, torch.zeros(3, 8, dtype=torch.float64))


def test_none_is_the_identity() -> None:
    result = encode(torch.eye(3, dtype=torch.float64), options(basis="none"))
    assert result.encoder is not None and torch.equal(result.encoder, result.decoder)
    assert result.loss == 0.0 and result.relative_gap is None and result.retained_energy == 1.0


def test_number_of_bases() -> None:
    eigenvalues = torch.tensor([6.0, 3.0, 1.0, 0.0], dtype=torch.float64)
    for keys, count in [
        ({}, 2),
        ({"num_bases": 4}, 4),
        ({"basis_ratio": 0.1}, 1),
        ({"energy": 0.6}, 1),
        ({"energy": 0.61}, 2),
        ({"energy": 1.0}, 3),
        ({"basis": "none"}, 4),
    ]:
        assert num_bases(eigenvalues, options(**keys)) == count
    with pytest.raises(UserError, match="`num_bases` is 5: expected 1 to 4"):
        num_bases(eigenvalues, options(num_bases=5))
    assert num_bases(torch.zeros(3), options(energy=0.9)) == 1


@pytest.mark.parametrize(
    ("gram", "fragment"),
    [
        (torch.zeros(2, 3), "shape"),
        (torch.zeros(0, 0), "shape"),
        (torch.tensor([[1.0, 0.0], [0.0, math.nan]]), r"not finite in rows \[1\]"),
        (torch.tensor([[1.0, 0.5], [0.0, 1.0]]), "not symmetric"),
    ],
)
def test_what_is_no_gram_matrix_is_refused(gram: Tensor, fragment: str) -> None:
    with pytest.raises(UserError, match=fragment):
        encode(gram, options())


def test_rand_proj_is_sent_elsewhere() -> None:
    with pytest.raises(UserError, match="projection"):
        encode(torch.eye(2, dtype=torch.float64), options(basis="rand_proj"))
