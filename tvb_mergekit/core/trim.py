"""TIES's Trim without sorting: thresholds from histograms of magnitudes, in bounded memory.

The bins are the leading bits of the float32 pattern, which orders positive floats: 2^14 bins an
octave (a relative width of 6e-5, a share of at most about 4e-5 for a smooth distribution) from
2^-48 to 2^24. Smaller magnitudes share the lowest bin, larger ones the highest.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SHIFT = 23 - 14  # mantissa bits that a bin ignores
_FIRST = (127 - 48) << 14  # bin number of 2^-48
BINS = 72 << 14


class Histogram:
    """Counts of magnitudes for `rows` streams of values (one per basis), int64.

    Bins have 9 MB a row. Several histograms add up by their `counts`.
    """

    def __init__(self, rows: int) -> None:
        self.counts = torch.zeros(rows, BINS, dtype=torch.int64, device="cpu")

    def add(self, values: Tensor) -> None:
        """Count `values` [rows, n], float32, on the device of the counts."""
        for row, stream in zip(self.counts, values, strict=True):
            bins = bin_numbers(stream)
            # Into one table: a new one for each chunk would cost ten times more. `scatter_add_`
            # needs bins in int64, and takes half as long again.
            row.index_add_(0, bins, torch.ones_like(bins, dtype=torch.int64))

    def thresholds(self, density: float) -> Tensor:
        """For each row the t whose share of |x| >= t is nearest to `density`: [rows] float32.

        The share is within 1e-4 of `density`, except among many equal magnitudes: these are kept
        or dropped together.
        """
        numbers = []
        for row in self.counts:
            kept = row.flip(-1).cumsum(-1).flip(-1)  # number of values in this bin or above
            numbers.append((kept - density * kept[:1]).abs().argmin())
        return bin_edges(torch.stack(numbers))


def table_bytes(rows: int) -> int:
    """The bytes of a `Histogram` while it computes its thresholds."""
    return 8 * BINS * (rows + 5)


def bin_numbers(values: Tensor) -> Tensor:
    """The bin of each magnitude, int32, same shape as `values` (float32)."""
    pattern = values.contiguous().view(torch.int32) & 0x7FFFFFFF
    return pattern.bitwise_right_shift_(_SHIFT).sub_(_FIRST).clamp_(0, BINS - 1)


def bin_edges(number: Tensor) -> Tensor:
    """The smallest magnitude in each bin; 0 for bin 0."""
    pattern = ((number + _FIRST) << _SHIFT).to(torch.int32)
    return pattern.view(torch.float32).masked_fill(number == 0, 0.0)
