"""Algorithm 1 of the paper: an endless stream of tasks within a budget of M vectors.

Below the budget a new task vector joins the bases. At the budget the M bases B are compressed to
M - 1, U = B W_e, and the new task vector joins U. The cost of a step depends on M alone: a step
reads the M bases and the new model, never a previous model.

Three things are known for every task ever added:
* the composed encoder E [T, M]: B = T E. A step makes it [[E W_e, 0], [0, 1]]; products of convex
  columns stay convex.
* the composed decoder D [M, T]: tau_hat = B D. A step makes it [[W_d D, 0], [0, 1]].
* bounds of the errors ||tau_hat_i - tau_i||. A step moves tau_hat_i by B (W_e W_d - I) D_i. The
  bases' Gram matrix gives the length of this move, and the error changes by at most that length.
  The Gram matrix of all tasks gives the error itself; it is known until tasks join compressed
  bases. ||tau_hat_i|| and ||tau_i|| limit every error, too.

The bounds include rounding, relative to the summed vectors: NOISE for inner products, ARITHMETIC
and the cast to a store's dtype for bases. So a small length is known less well if large terms
cancel, as for duplicate tasks and nearly equal bases. The bounds are those of tau_hat = B D as an
exact sum of the stored bases; `reported` adds the errors of float32 sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.core.encoders import Encoding, Gram, balanced, encode
from tvb_mergekit.settings import Settings

COMPRESSIONS = ("ae", "balanced")
# Error of a basis relative to the norms of its summands, in float32.
ARITHMETIC = 5e-7
# Error of <a, b> relative to ||a|| ||b||: float32 sums; 5e-7 was seen for 100 elements, 2e-7 for
# 2,000, 3e-9 for 3,000,000.
NOISE = 1e-6


@dataclass(frozen=True)
class Buffer:
    """T tasks in M bases, all float64.

    Attributes:
        dtype, numel: of the stored bases.
        encoder: E [T, M]; decoder: D [M, T].
        gram: [T, T] of all task vectors; None if unknown.
        basis_weights: w [M] with sum_m w_m B_m = the sum of all task vectors, else None.
        norms: [T], ||tau_i||.
        errors: [2, T], bounds of ||tau_hat_i - tau_i||.
        exact: the bases are B = T E up to rounding. Otherwise they are the task vectors or samples,
            and may be more than the budget.
    """

    dtype: torch.dtype
    numel: int
    encoder: Tensor
    decoder: Tensor
    gram: Tensor | None
    basis_weights: Tensor | None
    norms: Tensor
    errors: Tensor
    exact: bool = True

    @property
    def uncompressed(self) -> bool:
        """Whether the bases are the task vectors, and have the same Gram matrix."""
        identity = torch.eye(len(self.encoder), dtype=torch.float64)
        return self.gram is not None and torch.equal(self.encoder, identity)

    def rounding(self, norms: Tensor, terms: Tensor) -> Tensor:
        """Bounds of the errors of stored vectors from their norms.

        `terms` has, for each vector, the sum of the norms of its summands.
        """
        return cast_loss(norms, self.dtype, self.numel) + ARITHMETIC * terms


@dataclass(frozen=True)
class Round:
    """One round of Algorithm 1: the facts of T + 1 tasks in M' bases, named as in `Buffer`.

    Attributes:
        matrix: [M + 1, M'], from the M previous bases and the new task vector to the new bases.
        gram_bases: [M', M'], the Gram matrix of the new bases.
        compressed: whether the previous bases were compressed.
    """

    matrix: Tensor
    encoder: Tensor
    decoder: Tensor
    gram_bases: Tensor
    gram: Tensor | None
    basis_weights: Tensor | None
    errors: Tensor
    compressed: bool


def add_task(buffer: Buffer, products: Tensor, budget: int, how: str, settings: Settings) -> Round:
    """Add a task to a buffer, and compress its bases first if the budget needs it.

    Args:
        products: [M + 1, M + 1] float64, the Gram matrix of the M bases and the new task vector.
        budget: the most bases after the round, at least 2 and the number of exact bases.
        how: `ae`, by `settings`, as in the paper. Or `balanced`, if the buffer has basis weights:
            each basis is weighted by its number of tasks, so that sum_m w_m B_m stays the sum of
            all tasks.
        settings: of the autoencoder.
    """
    count = len(products) - 1
    products = (products + products.T) / 2
    old, norms = products[:count, :count], _norms(products)
    compressed = count >= budget
    inner = torch.eye(count, dtype=torch.float64)
    encoder, decoder, errors = buffer.encoder, buffer.decoder, buffer.errors
    weights = buffer.basis_weights
    if compressed:
        encoding = _compress(old, weights, how, settings, budget - 1)
        assert encoding.encoder is not None and encoding.reconstruction is not None
        errors = _errors_with(encoding.reconstruction @ decoder, buffer, old)
        inner = encoding.encoder
        encoder, decoder = encoder @ inner, encoding.decoder @ decoder
        if weights is not None:
            share = float(weights.sum()) / (budget - 1)
            weights = torch.full_like(weights[: budget - 1], share) if how == "balanced" else None
    if weights is not None:
        weights = torch.cat([weights, torch.ones(1, dtype=torch.float64)])
    matrix, encoder, decoder = map(_with_task, (inner, encoder, decoder))
    gram_bases = matrix.T @ products @ matrix
    gram_bases = (gram_bases + gram_bases.T) / 2
    errors = torch.cat([errors, torch.zeros(2, 1, dtype=torch.float64)], dim=1)
    # ||tau_hat_i|| and ||tau_i|| limit each error.
    tasks = torch.cat([buffer.norms, norms[-1:]])
    sizes = torch.stack([tasks * (1 - NOISE), tasks * (1 + NOISE)])
    limits = of_sum(lengths(products, matrix @ decoder), sizes)
    high = torch.minimum(errors[1], limits[1])
    errors = torch.stack([torch.maximum(errors[0], limits[0]).minimum(high), high])
    lost = buffer.rounding(_norms(gram_bases), norms @ matrix.abs())
    if not compressed and buffer.exact:
        lost[:-1] = 0  # the previous bases are not written again
    return Round(
        matrix=matrix,
        encoder=encoder,
        decoder=decoder,
        gram_bases=gram_bases,
        gram=products if buffer.uncompressed else None,
        basis_weights=weights,
        errors=_widened(errors, lost @ decoder.abs()),
        compressed=compressed,
    )


def _errors_with(decoder: Tensor, buffer: Buffer, gram_bases: Tensor) -> Tensor:
    """Bounds [2, T] of the errors if tau_hat = B `decoder` [M, T]; `gram_bases` is B^T B."""
    gram = gram_bases if buffer.uncompressed else buffer.gram
    if gram is None:
        return of_sum(buffer.errors, lengths(gram_bases, decoder - buffer.decoder))
    # Both the bases and the vectors of `gram` may have been rounded.
    norms = _norms(gram)
    lost = buffer.rounding(_norms(gram_bases), norms @ buffer.encoder.abs()) @ decoder.abs()
    lost = lost + buffer.rounding(norms, norms)
    return _widened(errors_of(gram, buffer.encoder @ decoder), lost)


def _compress(
    gram: Tensor, weights: Tensor | None, how: str, settings: Settings, count: int
) -> Encoding:
    """Compress bases with this Gram matrix to `count`."""
    if how != "balanced":
        return encode(gram, settings.model_copy(update={"num_bases": count}))
    assert weights is not None
    return balanced(Gram.of(gram), count, weights.numpy())


def cast_loss(norms: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
    """Bounds of the errors of a cast of vectors of `numel` elements and these norms.

    Half a unit of each element's last place, or half of the smallest number of `dtype`.
    """
    kind = torch.finfo(dtype)
    return kind.eps / 2 * (norms + kind.smallest_normal * math.sqrt(numel))


def errors_of(gram: Tensor, reconstruction: Tensor) -> Tensor:
    """Bounds [2, T] of ||tau_hat_i - tau_i|| from the Gram matrix and the map T_hat = T R."""
    return lengths(gram, reconstruction - torch.eye(len(gram), dtype=torch.float64))


def reported(
    tasks: Sequence[str], norms: Mapping[str, float], bounds: Tensor, sizes: Tensor, decoder: Tensor
) -> dict[str, Any]:
    """`errors` of basis.json: task -> bounds of ||tau_hat - tau|| / ||tau||, tau_hat in float32.

    Args:
        bounds: [2, T], of ||tau_hat_i - tau_i|| without the errors of float32 sums.
        sizes: [M], the norms of the vectors; decoder: [M, T], their coefficients.
    """
    bounds = _widened(bounds, ARITHMETIC * (sizes @ decoder.abs()))
    made = {}
    for task, (least, most) in zip(tasks, bounds.T.tolist(), strict=True):
        norm = norms[task] or math.inf
        made[task] = {"at_least": least / norm, "at_most": most / norm}
    return made


def _norms(gram: Tensor) -> Tensor:
    return gram.diagonal().clamp(min=0).sqrt()


def lengths(gram: Tensor, columns: Tensor) -> Tensor:
    """Bounds [2, T] of the lengths of V C, from V^T V and the `columns` C [M, T]."""
    squares = (columns * (gram @ columns)).sum(0)
    noise = NOISE * (_norms(gram) @ columns.abs()).square()
    return torch.stack([squares - noise, squares + noise]).clamp(min=0).sqrt()


def of_sum(one: Tensor, two: Tensor) -> Tensor:
    """Bounds [2, T] of ||x + y||, and of ||x - y||, from bounds of ||x|| and of ||y||."""
    low = torch.maximum(one[0] - two[1], two[0] - one[1]).clamp(min=0)
    return torch.stack([low, one[1] + two[1]])


def _widened(bounds: Tensor, most: Tensor) -> Tensor:
    """Bounds of lengths after an error of at most `most`."""
    return of_sum(bounds, torch.stack([torch.zeros_like(most), most]))


def _with_task(coefficients: Tensor) -> Tensor:
    """[[coefficients, 0], [0, 1]]."""
    extended: Tensor = torch.block_diag(coefficients, torch.ones(1, 1, dtype=torch.float64))
    return extended
