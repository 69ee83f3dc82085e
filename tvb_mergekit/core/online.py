"""Algorithm 1 of the paper: an endless stream of tasks within a budget of M vectors.

Below the budget a new task vector joins the bases. At the budget the M bases B are compressed to
M - 1, U = B W_e, and the new task vector joins U. The cost of a step depends on M alone: a step
reads the M bases and the new model, never a previous model.

Two things are known for every task ever added:
* the composed encoder E [T, M]: B = T E. A step makes it [[E W_e, 0], [0, 1]]; products of convex
  columns stay convex.
* the composed decoder D [M, T]: tau_hat = B D. A step makes it [[W_d D, 0], [0, 1]].

Errors follow from the Gram matrix of all tasks. It is known until a task joins compressed bases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tvb_mergekit.core.basis import encode
from tvb_mergekit.core.encoders import Gram, balanced
from tvb_mergekit.core.settings import Settings

COMPRESSIONS = ("ae", "balanced")


@dataclass(frozen=True)
class Buffer:
    """T tasks in M bases, all float64.

    Attributes:
        encoder: E [T, M]; decoder: D [M, T].
        gram: [T, T] of all task vectors; None if unknown.
        basis_weights: w [M] with sum_m w_m B_m = the sum of all task vectors, else None.
    """

    encoder: Tensor
    decoder: Tensor
    gram: Tensor | None
    basis_weights: Tensor | None

    @property
    def uncompressed(self) -> bool:
        """Whether the bases are the task vectors, and have the same Gram matrix."""
        identity = torch.eye(len(self.encoder), dtype=torch.float64)
        return self.gram is not None and torch.equal(self.encoder, identity)


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
    compressed = count >= budget
    inner = torch.eye(count, dtype=torch.float64)
    encoder, decoder, weights = buffer.encoder, buffer.decoder, buffer.basis_weights
    if compressed:  # U = B W_e
        old, size = products[:count, :count], budget - 1
        if how == "balanced":
            assert weights is not None
            encoding = balanced(Gram.of(old), size, weights.numpy())
            weights = torch.full_like(weights[:size], float(weights.sum()) / size)
        else:
            encoding, weights = encode(old, settings.but(num_bases=size)), None
        inner = encoding.encoder
        encoder, decoder = encoder @ inner, encoding.decoder @ decoder
    if weights is not None:
        weights = torch.cat([weights, torch.ones(1, dtype=torch.float64)])
    matrix, encoder, decoder = map(_with_task, (inner, encoder, decoder))
    gram_bases = matrix.T @ products @ matrix
    gram = products if buffer.uncompressed else None
    gram_bases = (gram_bases + gram_bases.T) / 2
    return Round(matrix, encoder, decoder, gram_bases, gram, weights, compressed)


def _with_task(coefficients: Tensor) -> Tensor:
    """[[coefficients, 0], [0, 1]]."""
    extended: Tensor = torch.block_diag(coefficients, torch.ones(1, 1, dtype=torch.float64))
    return extended
