"""Low-rank updates, and their Gram matrix from the factors alone.

A model fine-tuned by LoRA has the task vector s B A in each target matrix. The inner product of
two task vectors is sum((B1^T B2) * (A1 A2^T)), without a tensor of the size of a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tvb_mergekit.core.gram import GramSums, symmetric


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


def cores_of(updates: Sequence[Factors]) -> tuple[Tensor, Tensor, Tensor]:
    """P [m, p], the cores C_i [T, p, q] and Q [n, q], float64: each update is P C_i Q^T.

    Orthonormal P and Q (QR) span the columns of all `left` and the rows of all `right`, so p and q
    are at most the sum of all ranks. Whatever commutes with P and Q may work on the cores.
    """
    left, of_left = torch.linalg.qr(torch.cat([each.left for each in updates], 1).double())
    right, of_right = torch.linalg.qr(torch.cat([each.right for each in updates]).T.double())
    # P^T left_i and (right_i Q)^T are columns of the two triangles
    columns = [of.split([each.rank for each in updates], 1) for of in (of_left, of_right)]
    cores = [one @ other.T for one, other in zip(*columns, strict=True)]
    return left, torch.stack(cores), right


def factor_gram(updates: Sequence[Mapping[str, Factors]]) -> GramSums:
    """The Gram matrix [T, T] float64 of T task vectors, each given by the factors of its matrices.

    A matrix without factors counts as zero; `num_parameters` counts matrices with factors of any
    task. Costs O(R^2 (out + in)) a matrix for the sum R of the ranks.
    """
    sums = GramSums.zero(len(updates))
    # Sorted: sums must not depend on the order of files.
    for name in sorted({name for update in updates for name in update}):
        owners = [i for i, update in enumerate(updates) if name in update]
        parts = [updates[i][name] for i in owners]
        left = torch.cat([part.left for part in parts], dim=1).double()
        right = torch.cat([part.right for part in parts], dim=0).double()
        ranks = torch.tensor([part.rank for part in parts])
        of = torch.repeat_interleave(torch.tensor(owners), ranks)
        for owner, part in zip(owners, parts, strict=True):  # never [R, R]
            products = (part.left.double().T @ left) * (part.right.double() @ right.T)
            sums.gram[owner].index_add_(0, of, products.sum(0))
        sums.num_parameters += left.shape[0] * right.shape[1]
    sums.gram = symmetric(sums.gram)
    sums.matrix_squares[1:] = sums.gram.diagonal()
    return sums
