"""Chunks of task vectors in, merged chunks out: addition, negation, and TIES over bases.

Everything is computed in float32, and cast once to the output dtype by the caller.

A coefficient multiplies a finished direction: theta_0 + fl(scale * direction), two roundings of
each entry by itself, where a fused product and sum would round as the chunk and the processor have
it. So a direction that is computed once gives the merged weights for any scale, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from tvb_mergekit.errors import UserError

# From (theta_0 [n], task vectors [T, n]), float32 and overwritten, to the merged tensor [n].
MergeChunk = Callable[[Tensor, Tensor], Tensor]

Step = tuple[float, Tensor]  # a scale, and the weights [T] of the direction that it scales
ADDING_ROWS = 1  # float32 rows of a chunk that `adding` holds beside the task vectors


def adding(steps: Sequence[Step], device: torch.device) -> MergeChunk:
    """theta_0 + sum over steps of scale * sum_i weights[i] * tau_i.

    Addition over bases and negation are both this, since B = T W_e and T_hat = T R
    (paper Eqs. 7 and 9): the steps are (lambda, W_e 1) and (-alpha, R[:, forget] 1). For rand_proj
    the rows of Omega stand in the place of task vectors.
    """
    turned = [(scale, weights.to(device, torch.float32)) for scale, weights in steps]

    def merge(base32: Tensor, tau: Tensor) -> Tensor:
        for scale, weights in turned:
            base32 += torch.mv(tau.T, weights).mul_(scale)
        return base32

    return merge


def trimming(
    encoder: Tensor, thresholds: Tensor, merge_func: str, scale: float, device: torch.device
) -> MergeChunk:
    """theta_0 + scale * TrimElectMerge(B_1 ... B_M) (Yadav et al., NeurIPS 2023), B = T @ encoder.

    Trim keeps |B| >= threshold; Elect takes the sign of the sum of what is left; Merge is the
    `sum`, the `mean` or the entry of largest magnitude (`max`) over the entries of that sign.
    """
    # hardshrink drops |x| <= its limit, Trim |x| < the threshold: the float32 just below.
    limits = torch.nextafter(thresholds.cpu(), thresholds.cpu().neg()).clamp(min=0).tolist()
    weights = encoder.T.to(device, torch.float32)

    def merge(base32: Tensor, tau: Tensor) -> Tensor:
        bases = weights @ tau
        for row, limit in zip(bases, limits, strict=True):
            row.copy_(hardshrink(row, limit))  # Trim
        sign = bases.sum(0).sign_()  # Elect
        up = _merge(bases.clamp(min=0), merge_func)
        down = _merge(bases.clamp_(max=0), merge_func)
        merged = (up * sign.clamp(min=0)).addcmul_(down, sign.clamp_(max=0), value=-1)
        return base32.add_(merged.mul_(scale))

    return merge


def _merge(agreeing: Tensor, merge_func: str) -> Tensor:
    """Merge entries of one sign [M, n], the others being 0."""
    if merge_func == "max":
        return agreeing.amax(0).clamp_(min=0) + agreeing.amin(0).clamp_(max=0)  # one is 0
    total = agreeing.sum(0)
    if merge_func == "mean":
        total /= (agreeing != 0).sum(0).clamp_(min=1)
    return total


def trimming_rows(bases: int) -> int:
    """Float32 rows of a chunk that `trimming` holds beside the task vectors: the bases twice, a
    mask of them, and a few rows."""
    return 2 * bases + -(-bases // 4) + 8


def fits(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether a cast leaves all values finite; much cheaper than to look at the 16-bit result."""
    if not values.numel():
        return True
    low, high = map(float, torch.aminmax(values))
    largest = torch.finfo(dtype).max
    return -largest <= low and high <= largest  # NaN is neither


def check_output(name: str, merged: Tensor, dtype: torch.dtype) -> None:
    """Raise UserError where a value overflowed (float16 does above 65504)."""
    # A sum is not finite if an entry is not, and takes one pass without a mask.
    if torch.isfinite(merged.sum(dtype=torch.float32)) or torch.isfinite(merged).all():
        return
    raise UserError(
        f"tensor `{name}`: values overflow {str(dtype).removeprefix('torch.')} in the output; "
        "set `dtype: bfloat16` or `float32`, or a smaller lambda or alpha"
    )
