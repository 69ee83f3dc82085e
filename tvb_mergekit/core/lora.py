"""Low-rank updates: Gram matrix, linear combinations and truncation, from the factors alone.

A model fine-tuned by LoRA has the task vector s B A in each matrix that it targets. The inner
product of two of those is sum((B1^T B2) * (A1 A2^T)), and a linear combination of several is low
rank again, with the factors stacked. Nothing of the size of a matrix is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tvb_mergekit.core.gram import GramSums, symmetric
from tvb_mergekit.errors import UserError


@dataclass(frozen=True)
class Factors:
    """The update left @ right of one matrix; left [out, r], right [r, in], float32 on the CPU."""

    left: Tensor
    right: Tensor

    @property
    def rank(self) -> int:
        return self.left.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[1]


def factor_gram(updates: Sequence[Mapping[str, Factors]]) -> GramSums:
    """The Gram matrix [T, T] of T task vectors, float64, each given by the factors of its matrices.

    A matrix that a task does not change is zero there; `num_parameters` counts the matrices that
    any of them changes. Per matrix O(R^2 (out + in)) for the sum R of the ranks, in float64.
    """
    sums = GramSums(torch.zeros(len(updates), len(updates), dtype=torch.float64))
    for name in _names(updates):
        owners = [i for i, update in enumerate(updates) if name in update]
        parts = [updates[i][name] for i in owners]
        left = torch.cat([part.left for part in parts], dim=1).double()
        right = torch.cat([part.right for part in parts], dim=0).double()
        products = (left.T @ left) * (right @ right.T)
        ranks = torch.tensor([part.rank for part in parts])
        of = torch.repeat_interleave(torch.tensor(owners), ranks)
        rows = torch.zeros(len(updates), len(of), dtype=torch.float64)
        rows.index_add_(0, of, products)
        sums.gram.index_add_(1, of, rows)
        sums.num_parameters += left.shape[0] * right.shape[1]
    sums.gram = symmetric(sums.gram)
    return sums


def combine_factors(
    updates: Sequence[Mapping[str, Factors]], coefficients: Tensor
) -> dict[str, Factors]:
    """sum_i coefficients[i] * update_i with the factors stacked: exact, the ranks add up.

    `coefficients` is [T] float64; updates with a zero there are left out.
    """
    used = [(u, c) for u, c in zip(updates, coefficients.tolist(), strict=True) if c != 0]
    combined = {}
    for name in _names(update for update, _ in used):
        parts = [(update[name], c) for update, c in used if name in update]
        left = torch.cat([part.left * c for part, c in parts], dim=1)
        combined[name] = Factors(left, torch.cat([part.right for part, _ in parts], dim=0))
    return combined


def truncate(update: Mapping[str, Factors], rank: int) -> dict[str, Factors]:
    """The nearest update of at most `rank` in each matrix, by QR and SVD in float64.

    Both factors get the square roots of the singular values.

    Raises:
        UserError: the rank is below 1.
    """
    if rank < 1:
        raise UserError(f"the rank of an adapter is {rank}; expected 1 or more")
    nearest = {}
    for name, both in update.items():
        left, left_core = torch.linalg.qr(both.left.double())
        right, right_core = torch.linalg.qr(both.right.double().T)
        u, s, vh = torch.linalg.svd(left_core @ right_core.T, full_matrices=False)
        root = s[:rank].sqrt()
        nearest[name] = Factors(
            (left @ (u[:, :rank] * root)).float(), ((right @ vh[:rank].T) * root).T.float()
        )
    return nearest


def _names(updates: Iterable[Mapping[str, Factors]]) -> list[str]:
    """All changed matrices, sorted: sums must not depend on the order of files."""
    return sorted({name for update in updates for name in update})
