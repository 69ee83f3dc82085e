"""TIES's Trim without sorting: thresholds from histograms of magnitudes, in bounded memory.

The bins are the leading bits of the float32 pattern, which orders positive floats: 2^14 bins an
octave (a relative width of 6e-5, a share of at most about 4e-5 for a smooth distribution) from
2^-48 to 2^24. Smaller magnitudes share the lowest bin, larger ones the highest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_SHIFT = 23 - 14  # mantissa bits that a bin ignores
_FIRST = (127 - 48) << 14  # bin number of 2^-48
BINS = 72 << 14


class Histogram:
    """Counts of magnitudes for `rows` streams of values (one per basis), int64.

    Bins have 9 MB a row. With `within`, one bin of each row, the counts are of the bits that bins
    ignore, of the values in this bin. Several histograms add up by their `counts`.
    """

    def __init__(self, rows: int, within: Sequence[int] | None = None) -> None:
        self.within = within
        columns = BINS if within is None else 1 << _SHIFT
        self.counts = torch.zeros(rows, columns, dtype=torch.int64, device="cpu")

    def add(self, values: Tensor) -> None:
        """Count `values` [rows, n], float32, on the device of the counts."""
        for place, (row, stream) in enumerate(zip(self.counts, values, strict=True)):
            found = bin_numbers(stream)
            if self.within is not None:
                rest = stream.contiguous().view(torch.int32) & ((1 << _SHIFT) - 1)
                found = rest[found == self.within[place]]
            bins = found.long()
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


def _from_the_top(counts: Tensor) -> Tensor:
    return counts.flip(-1).cumsum(-1).flip(-1)


def table_bytes(rows: int) -> int:
    """The bytes of a `Histogram` while it computes its thresholds."""
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
    k, bins, above = max(1, int(density * numel)), list[int](), list[int]()
    for counts in sweep(lambda: Histogram(rows)).counts:
        kept = _from_the_top(counts)
        bins.append(int((kept >= k).sum()) - 1)
        above.append(int(kept[bins[-1]]))  # values in this bin or above
    del counts, kept  # the table of bins, before the second
    fine = sweep(lambda: Histogram(rows, bins)).counts
    higher = torch.tensor(above, device="cpu")[:, None] - fine.sum(1, keepdim=True)
    last = (higher + _from_the_top(fine) >= k).sum(1) - 1
    return bin_edges(torch.tensor(bins, device="cpu"), last)
