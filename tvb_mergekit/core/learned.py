"""Merges of one tensor by data: Fisher, RegMean and Localize-and-Stitch (paper, table 1).

Fisher and RegMean are weighted means of theta_0 + B_m, by statistics of the models. A basis mixes
the tasks' statistics as it mixes their task vectors: sum_i W[i, m] of task i, with W = W_e >= 0.
All return D, the difference of the merged tensor from theta_0.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tvb_mergekit.errors import UserError

SINGULAR = 1e-13  # of a pivot of a matrix whose diagonal is 1


def task_factors(mixture: Tensor, encoder: Tensor) -> Tensor:
    """The factors s [T] of `lambda_scale: tasks`, for statistics mixed by W and B = T W_e.

    The mean over bases is sum_j (k_ij / w_i) tau_j where task i alone has information, with
    k = W W_e^T and w = W 1. That is shorter than tau_i, the published merge. For task vectors that
    are orthogonal and equally long, s_i = w_i / ||k_i|| gives it the length of tau_i. It is T/M at
    least, where tau_i then counts once at most (s_i k_ii <= w_i): so `groups` keep all of tau_i.

    Args:
        mixture: W [T, M], not negative.
        encoder: W_e [T, M].
    """
    tasks, count = encoder.shape
    sums, shares = mixture.sum(1), mixture @ encoder.T
    lengths = sums / torch.linalg.vector_norm(shares, dim=1)
    once = (sums / shares.diagonal()).clamp(max=tasks / count)
    return torch.where(sums > 0, torch.maximum(lengths, once), 1.0)


def fisher_mean(
    bases: Tensor, informations: Iterable[Tensor], mixture: Tensor, factors: Tensor, unseen: float
) -> Tensor:
    """sum_i F_i s_i sum_m W[i, m] B_m / sum_i F_i sum_m W[i, m], entry by entry.

    With all s_i = 1 it is the paper's sum_m F~_m B_m / sum_m F~_m, F~_m = sum_i W[i, m] F_i.

    Args:
        bases: B [M, ...] float32.
        informations: F_i of each task; one is held at a time.
        mixture, factors: W [T, M] and s [T].
        unseen: factor of the mean of the bases, which an entry without information gets.
    """
    mixed, total = torch.zeros_like(bases), torch.zeros_like(bases[0])
    every = zip(informations, mixture.tolist(), factors.tolist(), strict=True)
    for own, weights, factor in every:
        own = own.to(bases.device)
        total.add_(own, alpha=sum(weights))
        for place, weight in zip(mixed, weights, strict=True):
            place.add_(own, alpha=factor * weight)
    merged = mixed.div_(total).mul_(bases).sum(0)
    return torch.where(total > 0, merged, unseen * bases.mean(0))


def regression_mean(
    name: str,
    bases: Tensor,
    grams: Iterable[Tensor],
    mixture: Tensor,
    factors: Tensor,
    unseen: float,
    off_diagonal: float,
) -> Tensor:
    """D [m, n] with theta_0 + D = (sum_m G~_m)^-1 sum_m G~_m (theta_0 + B_m), transposed.

    RegMean (Jin et al., ICLR 2023): G~_m = sum_i W[i, m] X_i^T X_i; task i's part on the right
    side has the factor s_i. In float64, by Cholesky.

    Args:
        bases: [M, m, n] float32, m outputs and n inputs of a linear layer; not changed.
        grams: X_i^T X_i [n, n] of each of the T tasks; one is held at a time.
        mixture, factors, unseen: as in `fisher_mean`; unseen is an input that is 0 in all data.
        off_diagonal: a factor for all entries of X_i^T X_i except the diagonal.

    Raises:
        UserError: the sum is singular.
    """
    _, outputs, inputs = bases.shape
    normal = bases.new_zeros(inputs, inputs, dtype=torch.float64)
    right = bases.new_zeros(outputs, inputs, dtype=torch.float64)
    every = zip(grams, mixture.tolist(), factors.tolist(), strict=True)
    for gram, weights, factor in every:
        one = gram.to(bases.device).double()  # widened on the device
        one = one.mul(off_diagonal).diagonal_scatter(one.diagonal())
        normal.add_(one, alpha=sum(weights))
        # sum_m B_m G~_m = sum_i (sum_m W[i, m] B_m) X_i^T X_i
        mixed = sum(w * base.double() for w, base in zip(weights, bases, strict=True))
        right.addmm_(mixed * factor, one)
    dead = normal.diagonal() == 0
    normal.diagonal()[dead] = 1
    right[:, dead] = unseen * bases[:, :, dead].mean(0, dtype=torch.float64)
    # With a diagonal of ones the pivots of Cholesky show whether the sum is singular.
    scales = normal.diagonal().rsqrt()
    root, failed = torch.linalg.cholesky_ex(normal * scales * scales[:, None])
    if failed or float(root.diagonal().min()) ** 2 < SINGULAR:
        raise UserError(
            f"tensor `{name}`: the sum of X^T X over its {inputs} inputs is singular; take more "
            "data, or --off-diagonal below 1"
        )
    return torch.cholesky_solve(right.mul_(scales).T, root).T.mul(scales).float()


def stitch(bases: Tensor, masks: Tensor) -> Tensor:
    """sum_m mask_m B_m / max(1, sum_m mask_m), entry by entry: overlapping bases are averaged.

    Localize-and-Stitch (He et al., 2024); `bases` and `masks`, of zeros and ones, are [M, ...].
    """
    return (bases * masks).sum(0).div_(masks.sum(0).clamp(min=1))
