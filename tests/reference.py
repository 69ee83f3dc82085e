"""A dense reference in float64, written from the formulas and from nothing of this package.

The matrix of task vectors T [d, T] is dense, each encoder is naive, Trim sorts. Two encoders come
from a merge's own files, because the formulas leave them open: the columns of `rand_select`
and the rotation of `balanced`. `check_encoder` checks their properties.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import expm
from tiny import load
from torch import Tensor

Array = NDArray[np.float64]
State = Mapping[str, Tensor]
Value = float | Callable[[str], float]


@dataclass
class Dense:
    """Base and models as flat float64 vectors over `names`, the tensors that take part."""

    base: State
    models: Sequence[State]
    names: Sequence[str]
    weights: Sequence[float] = ()
    theta: Array = field(init=False)  # [d]
    tau: Array = field(init=False)  # [d, T], scaled by the weights

    def __post_init__(self) -> None:
        self.theta = flat(self.base, self.names)
        columns = [flat(model, self.names) - self.theta for model in self.models]
        self.tau = np.stack(columns, axis=1) * np.array(self.weights or [1.0] * len(columns))

    @classmethod
    def of(cls, base: Path, models: Sequence[Path], weights: Sequence[float] = ()) -> "Dense":
        """All tensors of checkpoints."""
        first, *others = (load(path) for path in (base, *models))
        return cls(first, others, list(first), weights)

    @property
    def gram(self) -> Array:
        return self.tau.T @ self.tau

    def spread(self, value: Value) -> Array | float:
        """A number, or one number per tensor, as a factor of a [d] vector."""
        if not callable(value):
            return value
        return np.concatenate([np.full(self.base[n].numel(), value(n)) for n in self.names])

    def split(self, vector: Array) -> dict[str, Tensor]:
        """[d] back to named float64 tensors."""
        sizes = [self.base[name].numel() for name in self.names]
        pieces = zip(self.names, torch.from_numpy(vector).split(sizes), strict=True)
        return {name: piece.reshape(self.base[name].shape) for name, piece in pieces}


def flat(state: State, names: Sequence[str]) -> Array:
    return np.concatenate([state[n].double().reshape(-1).numpy() for n in names])


# Encoders: W_e [T, M], W_d [M, T] and the whole map R [T, T] with T_hat = T R


@dataclass
class Coefficients:
    encoder: Array
    decoder: Array
    reconstruction: Array


def from_encoder(gram: Array, encoder: Array) -> Coefficients:
    """W_d = (W_e^T G W_e)^-1 W_e^T G."""
    decoder = np.linalg.solve(encoder.T @ gram @ encoder, encoder.T @ gram)
    return Coefficients(encoder, decoder, encoder @ decoder)


def pca(tau: Array, count: int) -> Coefficients:
    """From the SVD of the centred task vectors: B = U_M S_M = (T J) V_M."""
    size = tau.shape[1]
    mean = np.ones((size, size)) / size
    centering = np.eye(size) - mean
    vectors = np.linalg.svd(tau @ centering, full_matrices=False)[2].T[:, :count]
    for column in vectors.T:
        if column[np.argmax(np.abs(column))] < 0:
            column *= -1
    encoder = centering @ vectors
    return Coefficients(encoder, vectors.T, encoder @ vectors.T + mean)


ADAM: dict[str, Any] = {"seed": 0, "steps": 4000, "learning_rate": 0.01, "weight_decay": 1e-6}
ADAM |= {"temperature": 5.0, "anneal_every": 0, "anneal_factor": 0.9}


def adam(gram: Array, count: int, softmax: bool = True, **keys: Any) -> Coefficients:
    """The authors' training, with autograd and PyTorch's global seed."""
    size, how = len(gram), SimpleNamespace(**ADAM | keys)
    target = torch.tensor(gram, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(how.seed)
        logits = torch.nn.Parameter(torch.randn(size, count))
    trained = torch.nn.Parameter(torch.zeros(count, size))
    trained_by = {"lr": how.learning_rate, "weight_decay": how.weight_decay}
    optimizer = torch.optim.Adam([logits, trained], **trained_by)
    for step in range(1, how.steps + 1):
        scaled = logits / how.temperature
        encoder = torch.softmax(scaled, dim=0) if softmax else scaled
        error = encoder @ trained - torch.eye(size)
        loss = torch.sum(error * (target @ error)) / size**2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if how.anneal_every and step % how.anneal_every == 0:
            how.temperature = max(0.1, how.temperature * how.anneal_factor)
    scaled = (logits / how.temperature).detach()
    encoder64 = (torch.softmax(scaled, dim=0) if softmax else scaled).double().numpy()
    return from_encoder(gram, encoder64)


def loss(gram: Array, reconstruction: Array) -> float:
    error = reconstruction - np.eye(len(gram))
    return float(np.trace(error.T @ gram @ error))


def balanced_bound(gram: Array, count: int, weights: Array) -> float:
    """The eigenvalues beyond the (M-1)-th of G - G w w^T G / (w^T G w)."""
    rest = gram - np.outer(gram @ weights, gram @ weights) / (weights @ gram @ weights)
    return float(np.sort(np.linalg.eigvalsh(rest))[::-1][count - 1 :].sum())


def check_encoder(basis: str, encoder: Array, weights: Array | None = None) -> None:
    """Check the properties of an encoder whose entries the formulas leave open (its loss:
    test_core.py). `weights` are those of the tasks for `balanced`."""
    size, count = encoder.shape
    if basis == "rand_select":
        assert set(np.unique(encoder)) <= {0.0, 1.0}
        assert (encoder.sum(axis=0) == 1).all() and (encoder.sum(axis=1) <= 1).all()
        return
    assert encoder.min() >= 0
    np.testing.assert_allclose(encoder.sum(axis=0), 1, atol=1e-12)
    if basis in ("balanced", "groups"):
        shares = np.full(size, 1 / size) if weights is None else weights / weights.sum()
        np.testing.assert_allclose(encoder.sum(axis=1), count * shares, rtol=1e-12)


def ties(
    dense: Dense, bases: Array, lambda_: Value, density: Value = 0.2, merge_func: str = "sum"
) -> tuple[Array, NDArray[np.bool_]]:
    """Trim by a full sort, Elect, Merge; and the entries [d] whose fate rests on rounding.

    These are the entries of any basis within 2e-4 of its threshold, which is found from bins of a
    relative width of 6e-5, and those whose sum is zero up to rounding.
    """
    thresholds, boundary = np.empty_like(bases), np.zeros(len(bases), dtype=bool)
    start = 0
    for name in dense.names:
        size = dense.base[name].numel()
        if not size:
            continue
        share = density(name) if callable(density) else density
        for column in range(bases.shape[1]):
            sizes, count, limit = np.abs(bases[:, column]), share * len(bases), 0.0
            if share < 1:
                falling = np.sort(sizes)[::-1]
                limit = falling[max(1, round(count)) - 1]
                if count % 1 == 0.5:  # either neighbour is nearest
                    boundary |= np.isin(sizes, falling[max(0, int(count) - 1) : int(count) + 1])
            thresholds[start : start + size, column] = limit
        start += size
    boundary |= (np.abs(np.abs(bases) - thresholds) <= 2e-4 * thresholds).any(axis=1)
    kept = np.where(np.abs(bases) >= thresholds, bases, 0.0)
    total = kept.sum(axis=1)
    # A basis is rounded relative to its summands, which may be longer than the basis.
    boundary |= kept.any(axis=1) & (np.abs(total) <= 1e-6 * np.abs(bases).max(initial=0.0))
    elected = np.sign(total)
    agreeing = np.where(np.sign(kept) == elected[:, None], kept, 0.0)
    merged = agreeing.sum(axis=1)
    if merge_func == "max":
        merged = elected * np.abs(agreeing).max(axis=1)
    elif merge_func == "mean":
        merged = merged / np.maximum((agreeing != 0).sum(axis=1), 1)
    return dense.theta + dense.spread(lambda_) * merged, boundary


# Matrices of all bases [M, m, n]


def svd(matrix: Array, largest: float = 0.0) -> tuple[Array, Array, Array]:
    """The triples of singular values above float32's rounding."""
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    there = s > 1e-6 * s.max(initial=largest)
    return u * there, s * there, vt * there[:, None]


def isotropic(bases: Array, common: float = 1.0) -> Array:
    """Iso-C; below 1 Iso-CTS (Marczak et al., ICML 2025, algorithm 2)."""
    count, rank = len(bases), min(bases.shape[1:])
    u, s, vt = svd(bases.sum(0))
    own = round((rank - int(rank * common)) / count)
    if not own:
        return s.mean() * u @ vt
    shared = u[:, : rank - count * own]
    found = [(*svd(base - shared @ shared.T @ base, s.max()), own) for base in bases]
    left, sizes, right = side_by_side([*found, (u, s, vt, rank - count * own)])
    return sizes.mean() * orthonormal(left) @ orthonormal(right)


def side_by_side(found: Sequence[tuple[Array, Array, Array, int]]) -> tuple[Array, Array, Array]:
    """The first k triples of each (U, S, V^T, k)."""
    left = np.concatenate([u[:, :k] for u, _, _, k in found], 1)
    right = np.concatenate([vt[:k] for _, _, vt, k in found])
    return left, np.concatenate([s[:k] for _, s, _, k in found]), right


def singular_vectors(bases: Array) -> Array:
    """TSV-M (Gargiulo et al., CVPR 2025)."""
    each = min(bases.shape[1:]) // len(bases)
    left, sizes, right = side_by_side([(*svd(base), each) for base in bases])
    return orthonormal(left) * sizes @ orthonormal(right)


def interference_free(bases: Array, flow_time: float | str = "auto") -> Array:
    """WUDI (Cheng et al., 2025) from the sum, by least squares row by row, or for a time by the
    matrix exponential of dD/dt = R - D A. `auto` ends it where the median input is half settled."""
    scales = [1 / np.linalg.norm(base) if base.any() else 0.0 for base in bases]
    sides = np.concatenate([by * base for by, base in zip(scales, bases, strict=True)])
    goals = np.concatenate([by * base @ base.T for by, base in zip(scales, bases, strict=True)], 1)
    total, (rows, columns) = bases.sum(0), bases.shape[1:]
    if flow_time == "exact":
        return total + np.linalg.lstsq(sides, (goals - total @ sides.T).T, rcond=1e-6)[0].T
    if flow_time == "auto":
        median = np.linalg.svd(sides)[1][min(sides.shape) // 2] ** 2
        flow_time = min(300.0, 0.5 / max(median, 1e-9))
    flow = np.zeros((columns + rows, columns + rows))  # of D and the identity, side by side
    flow[:columns, :columns], flow[columns:, :columns] = -sides.T @ sides, goals @ sides
    grown = expm(float(flow_time) * flow)[:, :columns]
    return total @ grown[:columns] + grown[columns:]


def orthonormal(matrix: Array) -> Array:
    """U V^T of U S V^T."""
    u, _, vt = svd(matrix)
    return u @ vt


def by_matrices(
    dense: Dense, bases: Array, method: str, parameters: Mapping[str, object], scaled: Value
) -> Array:
    """theta_0 + scaled * D for each matrix; to all else the mean of the bases, with `lambda`."""
    chosen, count = parameters.get("matrices"), bases.shape[1]
    factor = dense.tau.shape[1] / count if parameters.get("lambda_scale") == "tasks" else 1.0
    own = {"basis_iso": ["common"], "basis_wudi": ["flow_time"]}.get(method, [])
    keys = {key: parameters[key] for key in own if key in parameters}
    parts = []
    for name in dense.names:
        shape = tuple(dense.base[name].shape)
        piece = bases[sum(map(len, parts)) :][: dense.base[name].numel()]
        by = scaled(name) if callable(scaled) else scaled
        wanted = not re.search("embed|wte|wpe|lm_head|output.weight", name)
        wanted &= len(shape) == 2 or "expert" in name
        if chosen is not None:
            wanted = re.search(str(chosen), name) is not None
        if method == "basis_tsvm" and min(shape[-2:]) < count:
            wanted = False
        if wanted and len(shape) in (2, 3) and piece.size:
            slices = np.moveaxis(piece.T.reshape(count, -1, *shape[-2:]), 1, 0)
            turned = "transposed" in parameters and re.search(str(parameters["transposed"]), name)
            slices = slices.swapaxes(-2, -1) if turned else slices
            merged = np.stack([OF_MATRICES[method](each, **keys) for each in slices])
            parts.append(by * (merged.swapaxes(-2, -1) if turned else merged).ravel())
        else:
            parts.append(by / factor * piece.mean(1))
    return dense.theta + np.concatenate(parts)


OF_MATRICES: dict[str, Callable[..., Array]] = {
    "basis_iso": isotropic,
    "basis_tsvm": singular_vectors,
    "basis_wudi": interference_free,
}


# A whole merge


@dataclass
class Expected:
    """Named float64 tensors; `boundary` (Trim) are the entries that rounding may turn."""

    tensors: dict[str, Tensor]
    boundary: dict[str, Tensor] | None = None


def coefficients(
    dense: Dense, parameters: Mapping[str, object], stored: Mapping[str, Array]
) -> Coefficients:
    """W_e, W_d and R of the recipe's `parameters`; `stored` is its basis.safetensors."""
    basis, gram = parameters.get("basis", "ae"), dense.gram
    ratio: Any = parameters.get("basis_ratio", 0.5)
    count: Any = parameters.get("num_bases") or max(1, math.floor(ratio * len(gram) + 0.5))
    if basis == "none":
        return Coefficients(*[np.eye(len(gram))] * 3)
    if basis == "pca":
        return pca(dense.tau, count)
    if basis in ("ae", "linear_ae"):
        given = {key: parameters[key] for key in ADAM if key in parameters}
        return adam(gram, count, basis == "ae", **given)
    if "encoder" not in stored:  # a merge that needs their sum alone
        assert basis in ("balanced", "groups") and not stored
        even, none = np.full((len(gram), count), 1 / len(gram)), np.full((count, len(gram)), np.nan)
        return Coefficients(even, none, even @ none)
    encoder = stored["encoder"]
    assert encoder.shape == (len(gram), count)
    check_encoder(str(basis), encoder)
    return from_encoder(gram, encoder)


def expect(
    dense: Dense,
    method: str,
    parameters: Mapping[str, object],
    stored: Mapping[str, Array],
    tasks: Sequence[str],
    varying: Mapping[str, Value] | None = None,
) -> Expected:
    """The merged tensors of a recipe; `varying` gives lambda, alpha or density tensor by tensor."""
    found = coefficients(dense, parameters, stored)
    bases, rebuilt = dense.tau @ found.encoder, dense.tau @ found.reconstruction
    return merged(dense, method, parameters, bases, rebuilt, tasks, varying)


def merged(
    dense: Dense,
    method: str,
    parameters: Mapping[str, object],
    bases: Array,
    rebuilt: Array,
    tasks: Sequence[str],
    varying: Mapping[str, Value] | None = None,
) -> Expected:
    """The merged tensors from B [d, M] and T_hat [d, T]."""
    chosen: dict[str, Value] = {"lambda": 0.0 if method == "basis_negate" else 0.4, "density": 0.2}
    if method in OF_MATRICES:
        chosen["lambda"] = 1.0
    known: Mapping[str, Any] = parameters
    chosen |= {k: known[k] for k in ("lambda", "alpha", "density") if k in known}
    chosen |= varying or {}
    by_tasks = parameters.get("lambda_scale") == "tasks"
    factor = rebuilt.shape[1] / bases.shape[1] if by_tasks else 1.0
    given = chosen["lambda"]
    scaled: Value = (lambda name: factor * given(name)) if callable(given) else factor * given
    if method in ("basis_ta", "basis_negate"):
        found = dense.theta + dense.spread(scaled) * bases.sum(axis=1)
        for name in str(parameters["forget"]).split(",") if method == "basis_negate" else ():
            forgotten = rebuilt[:, list(tasks).index(name.strip())]
            found -= dense.spread(chosen["alpha"]) * forgotten
        return Expected(dense.split(found))
    if method in OF_MATRICES:
        return Expected(dense.split(by_matrices(dense, bases, method, parameters, scaled)))
    how = {k: str(parameters[k]) for k in ("merge_func",) if k in parameters}
    return Expected(*map(dense.split, ties(dense, bases, scaled, chosen["density"], **how)))
