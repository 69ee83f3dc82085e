"""TIES's Trim without sorting: thresholds from histograms of magnitudes, in bounded memory.

The bins are the leading bits of the float32 pattern, which orders positive floats: 2^14 bins an
octave (a relative width of 6e-5, a share of at most about 4e-5 for a smooth distribution) from
2^-48 to 2^16. Smaller magnitudes share the lowest bin, larger ones the highest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

_SHIFT = 23 - 14  # mantissa bits that a bin ignores
_FIRST = (127 - 48) << 14  # bin number of 2^-48
BINS = 64 << 14


class MagnitudeHistogram:
    """Counts of |x| for `rows` streams of values (one per basis), int64, 8 MB a row.

    Several add up by their `counts`.
    """

    def __init__(self, rows: int) -> None:
        self.counts = torch.zeros(rows, BINS, dtype=torch.int64, device="cpu")

    def add(self, values: Tensor) -> None:
        """Count `values` [rows, n], float32, on the device of the counts."""
        for row, stream in zip(self.counts, values, strict=True):
            bins = bin_numbers(stream).long()
            # A new table for each chunk would cost ten times more.
            row.scatter_add_(0, bins, torch.ones_like(bins))

    def thresholds(self, density: float) -> Tensor:
        """For each row the t whose share of |x| >= t is nearest to `density`: [rows] float32.

        The share is within 1e-4 of `density`, except among many equal magnitudes: these are kept
        or dropped together.
        """
        numbers = []
        for row in self.counts:
            kept = _from_the_top(row)  # number of values in this bin or above
            numbers.append((kept - density * kept[:1]).abs().argmin())
        return bin_edges(torch.stack(numbers))


class WithinBins:
    """Counts, for one bin of each row, of the bits that `MagnitudeHistogram` ignores.

    `bins` [rows] int64 are the bins of the k-th largest magnitudes.
    """

    def __init__(self, coarse: MagnitudeHistogram, k: int) -> None:
        self.k = k
        bins, above = [], []
        for row in coarse.counts:
            kept = _from_the_top(row)
            bins.append((kept >= k).sum() - 1)
            above.append(kept[bins[-1]])
        self.bins, self._above = torch.stack(bins), torch.stack(above)  # values in it or higher
        self.counts = torch.zeros(len(bins), 1 << _SHIFT, dtype=torch.int64, device="cpu")

    def fresh(self) -> WithinBins:
        made = copy.copy(self)
        made.counts = torch.zeros_like(self.counts)
        return made

    def add(self, values: Tensor) -> None:
        """Count `values` [rows, n], float32."""
        for row, number, stream in zip(self.counts, self.bins.tolist(), values, strict=True):
            rest = stream.contiguous().view(torch.int32) & ((1 << _SHIFT) - 1)
            mine = rest[bin_numbers(stream) == number]
            row += torch.bincount(mine, minlength=1 << _SHIFT)

    def thresholds(self) -> Tensor:
        """The k-th largest magnitude of each row, [rows] float32."""
        higher = (self._above - self.counts.sum(1))[:, None]
        last = (higher + self.counts.flip(1).cumsum(1).flip(1) >= self.k).sum(1) - 1
        return bin_edges(self.bins, last)


Histogram = MagnitudeHistogram | WithinBins


def _from_the_top(counts: Tensor) -> Tensor:
    return counts.flip(0).cumsum(0).flip(0)


def table_bytes(rows: int) -> int:
    """The bytes of a `MagnitudeHistogram` while it computes its thresholds."""
    return 8 * BINS * (rows + 5)


def bin_numbers(values: Tensor) -> Tensor:
    """The bin of each magnitude, int32, same shape as `values` (float32)."""
    pattern = values.contiguous().view(torch.int32) & 0x7FFFFFFF
    return pattern.bitwise_right_shift_(_SHIFT).sub_(_FIRST).clamp_(0, BINS - 1)


def bin_edges(number: Tensor, rest: Tensor | int = 0) -> Tensor:
    """The magnitude of these remaining bits in each bin, the smallest by default; 0 for bin 0."""
    pattern = (((number + _FIRST) << _SHIFT) + rest).to(torch.int32)
    return pattern.view(torch.float32).masked_fill(number == 0, 0.0)


def exact_thresholds(
    sweep: Callable[[Callable[[], Histogram]], Histogram], rows: int, numel: int, density: float
) -> Tensor:
    """The k-th largest magnitude of each row, k = max(1, int(density * numel)): [rows] float32.

    mergekit's rule for one tensor (`trim: tensor`), by two sweeps over all values. The first counts
    the leading bits, the second the remaining bits of the values in the k-th magnitude's bin.
    In the lowest bin, which has no single width, the threshold is 0 and all values are kept.

    Args:
        sweep: makes one or several histograms by the given function, adds all values to them, and
            returns their sum.
    """
    coarse = sweep(lambda: MagnitudeHistogram(rows))
    assert isinstance(coarse, MagnitudeHistogram)
    empty = WithinBins(coarse, max(1, int(density * numel)))
    del coarse
    fine = sweep(empty.fresh)
    assert isinstance(fine, WithinBins)
    return fine.thresholds()
