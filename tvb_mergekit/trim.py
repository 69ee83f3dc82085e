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

    mergekit's rule for one tensor (`trim: tensor`), by two sweeps over `blocks()`: a histogram,
    then the values of the one bin that holds the k-th. Values of a lowest bin are not collected:
    there the threshold is 0 and all are kept.
    """
    histogram = MagnitudeHistogram(rows)
    for values in blocks():
        histogram.add(values)
    k = max(1, int(density * numel))
    above = histogram.counts.flip(1).cumsum(1).flip(1)
    number = (above >= k).sum(1) - 1  # the bin of the k-th largest
    found: list[list[Tensor]] = [[] for _ in range(rows)]
    for values in blocks():
        for row in range(rows):
            if number[row] > 0:
                mine = bin_numbers(values[row]) == number[row]
                found[row].append(values[row][mine].abs().cpu())
    result = torch.zeros(rows, device="cpu")
    for row in range(rows):
        if number[row] > 0:
            larger = int(above[row, number[row] + 1]) if number[row] + 1 < BINS else 0
            ordered = torch.cat(found[row]).sort(descending=True).values
            result[row] = ordered[k - larger - 1]
    return result
