"""Merges over bases that use data: Fisher, RegMean and Localize-and-Stitch (paper, table 1).

Fisher and RegMean are weighted means of theta_0 + B_m, by statistics of the models. A basis mixes
the tasks' statistics as it mixes their task vectors: sum_i W_e[i, m] of task i, with W_e >= 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tvb_mergekit.core.basis import Compute
from tvb_mergekit.errors import UserError

SINGULAR = 1e-13  # of a pivot of a matrix whose diagonal is 1


@dataclass(frozen=True, eq=False)
class FisherMean:
    """theta_0 + sum_m F~_m B_m / sum_m F~_m, entry by entry, F~_m = sum_i W_e[i, m] F_i.

    If every F~_m is 0, the bases have equal weights. A step of `combine_pass`: the rows of a chunk
    are the N vectors, then F_1 ... F_T.

    Attributes:
        bases: [N, M], B = vectors @ bases.
        encoder: W_e [T, M], without negative entries.
    """

    bases: Tensor
    encoder: Tensor
    count = 1

    @property
    def rows(self) -> int:
        return 4 * self.encoder.shape[1] + 4

    def on(self, device: torch.device) -> Compute:
        vectors, count = self.bases.shape
        bases = self.bases.T.to(device, torch.float32)
        encoder = self.encoder.T.to(device, torch.float32)

        def compute(base32: Tensor, rows: Tensor) -> Tensor:
            weights = encoder @ rows[vectors:]
            total = weights.sum(0)
            weights = torch.where(total > 0, weights / total, 1 / count)
            return torch.mm(bases, rows[:vectors]).mul_(weights).sum(0).add_(base32)[None]

        return compute


@dataclass(frozen=True, eq=False)
class Stitch:
    """theta_0 + sum_m mask_m B_m / max(1, sum_m mask_m), entry by entry.

    Averages the bases where their masks overlap (Localize-and-Stitch, He et al., 2024). A step of
    `combine_pass`: the rows of a chunk are the N vectors, then the M masks, of zeros and ones.

    Attributes:
        bases: [N, M], B = vectors @ bases.
    """

    bases: Tensor
    count = 1

    @property
    def rows(self) -> int:
        return self.bases.shape[1] + 2

    def on(self, device: torch.device) -> Compute:
        vectors, bases = len(self.bases), self.bases.T.to(device, torch.float32)

        def compute(base32: Tensor, rows: Tensor) -> Tensor:
            masks = rows[vectors:]
            masked = torch.mm(bases, rows[:vectors]).mul_(masks)
            return masked.sum(0).div_(masks.sum(0).clamp_(min=1)).add_(base32)[None]

        return compute


def regression_mean(
    name: str, bases: Tensor, grams: Iterable[Tensor], encoder: Tensor, off_diagonal: float
) -> Tensor:
    """D [m, n] float32 with theta_0 + D = (sum_m G~_m)^-1 sum_m G~_m (theta_0 + B_m), transposed.

    RegMean (Jin et al., ICLR 2023): G~_m = sum_i W_e[i, m] X_i^T X_i. The column of an input that
    is always 0 in the data becomes the mean of the bases. In float64, by Cholesky.

    Args:
        name: of the tensor, for messages.
        bases: [M, m, n] float32, m outputs and n inputs of a linear layer; not changed.
        grams: X_i^T X_i [n, n] of each of the T tasks; one is held at a time.
        encoder: W_e [T, M], without negative entries.
        off_diagonal: a factor for all entries of X_i^T X_i except the diagonal.

    Raises:
        UserError: the sum is singular.
    """
    _, outputs, inputs = bases.shape
    normal = bases.new_zeros(inputs, inputs, dtype=torch.float64)
    right = bases.new_zeros(outputs, inputs, dtype=torch.float64)
    for gram, weights in zip(grams, encoder.tolist(), strict=True):
        one = gram.to(bases.device).to(torch.float64, copy=True)  # widened on the device
        diagonal = one.diagonal().clone()
        one.mul_(off_diagonal)
        one.diagonal().copy_(diagonal)
        normal.add_(one, alpha=sum(weights))
        # sum_m B_m G~_m = sum_i (sum_m W_e[i, m] B_m) X_i^T X_i
        mixed = torch.zeros_like(right)
        for weight, base in zip(weights, bases, strict=True):
            mixed.add_(base, alpha=weight)
        right.addmm_(mixed, one)
    unseen = normal.diagonal() == 0
    normal.diagonal()[unseen] = 1
    right[:, unseen] = bases[:, :, unseen].mean(0, dtype=torch.float64)
    scales = normal.diagonal().rsqrt()
    factor, failed = torch.linalg.cholesky_ex(normal.mul_(scales).mul_(scales[:, None]))
    if failed or float(factor.diagonal().min()) ** 2 < SINGULAR:
        raise UserError(
            f"tensor `{name}`: the sum of X^T X over its {inputs} inputs is singular; take more "
            "data, or --off-diagonal below 1"
        )
    solved = torch.cholesky_solve(right.mul_(scales).T, factor)
    return solved.T.mul(scales).float()
