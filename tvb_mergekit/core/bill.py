"""An upper bound of the memory of merging one matrix."""

from __future__ import annotations

from tvb_mergekit.core.matrices import BLOCK
from tvb_mergekit.core.methods.iso import own_share
from tvb_mergekit.core.methods.wudi import flow_dtype
from tvb_mergekit.core.settings import Settings


def matrix_bytes(
    settings: Settings, count: int, rows: int, columns: int, sampled: bool = False
) -> int:
    """An upper bound of the bytes of all tensors of `merge_matrix`, M bases [m, n] included."""
    matrix, rank, longer = 4 * rows * columns, min(rows, columns), max(rows, columns)
    square, side = 8 * rank**2, columns if sampled else min(columns, count * rows)
    if settings.method == "basis_wudi":
        unit = flow_dtype(settings.flow_time, count).itemsize
        normal, push = unit * side**2, unit * side * rows  # eigh needs three more of the first
        stacked = unit * side * columns if side < columns else 0
        steps = max(3 * normal, normal + push, 2 * push + (1 + unit // 4) * matrix)
        first, last = 2 * stacked, stacked + normal + push + steps
        return (count + 1) * matrix + max(first, last) + 128 * side
    isotropic = settings.method == "basis_iso"
    share = own_share(rank, count, settings.common) if isotropic else rank // count
    top, held = share, 4 * (rows + columns) * count * share
    if isotropic:
        top = rank - count * share if share else 0
        held = matrix + (4 * (rows + columns) * rank + 8 * rows * top if share else 0)
    pieces = 16 * max(rows * min(BLOCK, columns), columns * min(BLOCK, rows))
    eigen = 4 * square  # with LAPACK's own
    polar = matrix + square + pieces
    triples = square + 8 * (2 * rank + longer) * top + pieces
    return count * matrix + held + max(eigen, polar, triples) + 256 * rank
