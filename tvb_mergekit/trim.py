"""TIES's Trim without sorting: thresholds from histograms of magnitudes, in bounded memory.

The bins are the leading bits of the float32 pattern, which orders positive floats: 2^14 bins an
octave (a relative width of 6e-5, a share of at most about 4e-5 for a smooth distribution) from
2^-48 to 2^16. Smaller magnitudes share the lowest bin, larger ones the highest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_SHIFT = 23 - 14  # mantissa bits that a bin ignores
_FIRST = (127 - 48) << 14  # bin number of 2^-48
BINS = 64 << 14


class MagnitudeHistogram:
    """Counts of |x| for `rows` streams of values (one per basis), 8 MB each, float32 input."""

    def __init__(self, rows: int) -> None:
        self.counts = torch.zeros(rows, BINS, dtype=torch.int64, device="cpu")

    def add(self, values: Tensor) -> None:
        """Count `values` [rows, n], float32, on any device."""
        for row, bins in zip(self.counts, bin_numbers(values).long(), strict=True):
            if bins.device.type == "cpu":  # a new table for each chunk would cost ten times more
                row.scatter_add_(0, bins, torch.ones_like(bins))
            else:
                row += torch.bincount(bins, minlength=BINS).cpu()

    def thresholds(self, density: float) -> Tensor:
        """For each row the t whose share of |x| >= t is nearest to `density`: [rows] float32.

        The share is within 1e-4 of `density` unless more than that share of the values is equal
        to the last one kept: equal magnitudes are kept or dropped together.
        """
        kept = self.counts.flip(1).cumsum(1).flip(1)  # number of values in this bin or above
        wanted = density * kept[:, :1]
        number = (kept - wanted).abs().argmin(dim=1)
        return bin_edges(number)


def bin_numbers(values: Tensor) -> Tensor:
    """The bin of each magnitude, int32, same shape as `values` (float32)."""
    pattern = values.contiguous().view(torch.int32) & 0x7FFFFFFF
    return pattern.bitwise_right_shift_(_SHIFT).sub_(_FIRST).clamp_(0, BINS - 1)


def bin_edges(number: Tensor) -> Tensor:
    """The smallest magnitude in each bin; 0 for the lowest."""
    pattern = ((number + _FIRST) << _SHIFT).to(torch.int32)
    return pattern.view(torch.float32).masked_fill(number == 0, 0.0)


def exact_thresholds(
    blocks: Callable[[], Iterator[Tensor]], rows: int, numel: int, density: float
) -> Tensor:
    """The k-th largest magnitude of each row, k = max(1, int(density * numel)): [rows] float32.

    mergekit's rule for one tensor (`trim: tensor`), by two sweeps over `blocks()`: a histogram of
    the leading bits, then one of the remaining bits of the values in the bin that holds the k-th.
    In the lowest bin, which has no single width, the threshold is 0 and all are kept.
    """
    histogram = MagnitudeHistogram(rows)
    for values in blocks():
        histogram.add(values)
    k = max(1, int(density * numel))
    above = histogram.counts.flip(1).cumsum(1).flip(1)  # values in this bin or a higher one
    number = (above >= k).sum(1) - 1  # the bin of the k-th largest
    fine = torch.zeros(rows, 1 << _SHIFT, dtype=torch.int64, device="cpu")
    for values in blocks():
        mine = bin_numbers(values) == number.to(values.device)[:, None]
        rest = values.contiguous().view(torch.int32) & ((1 << _SHIFT) - 1)
        for row in range(rows):
            fine[row] += torch.bincount(rest[row][mine[row]], minlength=1 << _SHIFT).cpu()
    higher = above.gather(1, number[:, None]) - fine.sum(1, keepdim=True)
    last = (higher + fine.flip(1).cumsum(1).flip(1) >= k).sum(1) - 1
    pattern = ((number + _FIRST) << _SHIFT) + last
    return pattern.to(torch.int32).view(torch.float32).masked_fill(number == 0, 0.0)
