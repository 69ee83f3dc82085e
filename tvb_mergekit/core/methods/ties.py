"""TIES over bases: Trim, Elect, Merge (Yadav et al., NeurIPS 2023, arXiv 2306.01708).

Trim sorts nothing. A histogram of magnitudes gives the thresholds in bounded memory. Its bins are
the leading bits of the float32 pattern, which orders positive floats: 2^14 bins an octave (a
relative width of 6e-5, a share of at most about 4e-5 for a smooth distribution) from 2^-48 to 2^24.
Smaller magnitudes share the lowest bin, larger ones the highest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from tvb_mergekit.core.registry import Fraction, Key, merge_method

_SHIFT = 23 - 14  # mantissa bits that a bin ignores
_FIRST = (127 - 48) << 14  # bin number of 2^-48
BINS = 72 << 14


@merge_method(
    "basis_ties",
    title="TIES on Task Vector Bases",
    merges="entries",
    keys={
        "merge_func": Key("of entries of one sign", Literal["sum", "mean", "max"], "sum"),
        "density": Key("share of a basis to keep", Fraction, 0.2, varying=True),
    },
    lambda_=0.4,
)
def trim_elect_merge(bases: Tensor, *, thresholds: Sequence[float], merge_func: str) -> Tensor:
    """TrimElectMerge(B_1 ... B_M) [n] of the bases [M, n], which it overwrites."""
    # Trim: the largest entries of each basis stay
    for row, threshold in zip(bases, thresholds, strict=True):
        row.masked_fill_(row.abs() < threshold, 0)
    # Elect: the sign that has the larger sum
    sign = bases.sum(0).sign_()
    # Merge: what agrees with it, as magnitudes; 0 for the other sign
    agreeing = bases.mul_(sign).clamp_(min=0)
    if merge_func == "max":
        return agreeing.amax(0).mul_(sign)
    total = agreeing.sum(0)
    if merge_func == "mean":
        total /= agreeing.sign_().sum(0).clamp_(min=1)
    return total.mul_(sign)


def count_magnitudes(counts: Tensor, values: Tensor) -> None:
    """Add a histogram of `values` [M, n], float32, to `counts` [M, BINS], int64: 9 MB a basis."""
    for row, stream in zip(counts, values, strict=True):
        pattern = stream.contiguous().view(torch.int32) & 0x7FFFFFFF
        bins = pattern.bitwise_right_shift_(_SHIFT).sub_(_FIRST).clamp_(0, BINS - 1)
        # Into one table: a new one for each chunk would cost ten times more. `scatter_add_` needs
        # bins in int64, and takes half as long again.
        row.index_add_(0, bins, torch.ones_like(bins, dtype=torch.int64))


def trim_thresholds(counts: Tensor, density: float) -> Tensor:
    """For each basis the t whose share of |x| >= t is nearest to `density`: [M] float32.

    The share is within 1e-4 of `density`, except among many equal magnitudes: these are kept or
    dropped together.
    """
    # Numbers of values in each bin or above, basis by basis
    above = (row.flip(-1).cumsum(-1).flip(-1) for row in counts)
    number = torch.stack([(kept - density * kept[:1]).abs().argmin() for kept in above])
    # The smallest magnitude in each bin; 0 for bin 0
    pattern = ((number + _FIRST) << _SHIFT).to(torch.int32)
    return pattern.view(torch.float32).masked_fill(number == 0, 0.0)
