# mypy: disable-error-code="no-untyped-call, no-any-return"
"""CPU loops compiled by numba: Gram sums, and combinations of task vectors.

Each PyTorch operation is a pass over memory and needs the interpreter's lock. These loops process a
few hundred columns while they lie in the first cache, without the lock. `passes` does the same in
PyTorch for other devices and dtypes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba.core.caching import UserWideCacheLocator
from numpy.typing import NDArray
from torch import Tensor

from tvb_mergekit.core.gram import GramSums
from tvb_mergekit.core.merge import Linear
from tvb_mergekit.tensors.layout import COLUMNS, FUSED, PADDING
from tvb_mergekit.tensors.stream import Piece, PieceBuffer

BFLOAT16, FLOAT16, FLOAT32, ABSENT = range(4)  # types of a stored row
KINDS = dict(zip(FUSED, (BFLOAT16, FLOAT16, FLOAT32), strict=True))
TILE = 4  # rows of the inputs are padded with zeros to a multiple
NO_OUTPUT = torch.empty(0, 0, dtype=torch.float32, device="cpu")


class Compiled:
    """Sums of the chunks of a piece, and the outputs of one `Linear` step. One instance per thread.

    Args:
        chunk: columns of each chunk whose sums are wanted; 0: no sums.
        step: None: no outputs.
    """

    def __init__(self, tasks: int, chunk: int = 0, step: Linear | None = None) -> None:
        self._tasks, self._chunk = tasks, chunk
        self._padded = -(-tasks // TILE) * TILE
        outputs = [] if step is None else step.outputs
        terms = [term for output in outputs for term in output]
        each = np.zeros((len(terms), self._padded), np.float32)
        for row, (_scale, weights) in zip(each, terms, strict=True):
            row[:tasks] = weights.to(torch.float32).numpy()
        scales = np.array([scale for scale, _weights in terms], np.float32)
        ends = np.cumsum([len(output) for output in outputs], dtype=np.int64)
        self._step = each, scales, ends, step is not None and step.add_base
        rows = 1 + self._padded + (1 if step is None else 3)
        self._rows: NDArray[np.float32] = torch.zeros(
            rows, COLUMNS + PADDING, dtype=torch.float32, device="cpu"
        ).numpy()

    def __call__(
        self,
        buffer: PieceBuffer,
        piece: Piece,
        found: Sequence[Tensor],
        out: Tensor = NO_OUTPUT,
    ) -> tuple[bool, list[GramSums]]:
        """Fill `out` [outputs, n], whose rows have stride 1, from the tensors of a piece.

        Args:
            found: as `buffer.read(piece, copy=True)` gives them.

        Returns:
            Whether all outputs are finite, and the sums of each chunk.
        """
        outputs, numel, memory = len(out), piece.numel, buffer.memory
        starts = [(t.data_ptr() - memory.data_ptr()) // t.itemsize for t in found]
        kinds = [KINDS[t.dtype] for t in found]
        if piece.item.base is None:  # theta_0 is zero
            starts, kinds = [0, *starts], [ABSENT, *kinds]
        words, floats = memory.numpy().view(np.uint16), memory.numpy().view(np.float32)
        deltas = [part.holds for part in piece.item.inputs].count("delta")
        stored = words, floats, np.array(starts, np.int64), np.array(kinds, np.int64), deltas
        count = -(-numel // self._chunk) if self._chunk else 0
        sums, norms = np.zeros((count, self._padded, self._padded)), np.zeros(count)
        between = out.stride(0)
        flat = out.as_strided([(outputs - 1) * between + numel if outputs else 0], [1])
        written = flat.view(torch.uint8).numpy(), between * out.element_size(), KINDS[out.dtype]
        bad = _walk(stored, numel, self._step, self._rows, written, (self._chunk, sums, norms))
        # Only the blocks on and above the diagonal are filled.
        upper = np.triu(sums[:, : self._tasks, : self._tasks])
        whole = torch.from_numpy(upper + np.triu(upper, 1).transpose(0, 2, 1))
        each = zip(whole, norms.tolist(), strict=True)
        return not bad, [GramSums(gram, norm) for gram, norm in each]


class SharedLocator(UserWideCacheLocator):
    """The folder of compiled code of all environments of a user with this source and numba."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
        return f"tvb-mergekit-{numba.__version__}-{source[:16]}"


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at the first call, and keep the code on disk if a folder can be written."""
    config: Any = numba.config
    own = config.CACHE_LOCATOR_CLASSES
    if not (config.CACHE_DIR or own):  # of the user
        config.CACHE_LOCATOR_CLASSES = f"{__name__}.{SharedLocator.__name__},InTreeCacheLocator"
    try:
        return numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:
        return numba.njit(nogil=True, error_model="numpy")(function)
    finally:
        config.CACHE_LOCATOR_CLASSES = own


inlined = numba.njit(nogil=True, error_model="numpy", forceinline=True)
# Sums may be reordered, which vectorizes them, but NaN and infinity must come through.
_reordered = numba.njit(nogil=True, fastmath={"reassoc", "contract", "nsz"})


@inlined
def float_of(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


@inlined
def bits_of(value: Any) -> Any:
    return np.float32(value).view(np.uint32)


@inlined
def from_float16(word: Any) -> Any:
    """Widen exactly: a product moves the exponent to float32's bias, also for subnormal numbers."""
    bits = np.uint32(word)
    size = bits_of(float_of((bits & np.uint32(0x7FFF)) << np.uint32(13)) * np.float32(2.0**112))
    special = np.uint32(bits & np.uint32(0x7C00) == np.uint32(0x7C00)) * np.uint32(0x7F800000)
    return float_of((bits & np.uint32(0x8000)) << np.uint32(16) | size | special)


@inlined
def _widen(kind: int, place: int, words: Any, floats: Any, minus: Any, row: Any) -> None:
    """row = the elements from `place` on, in float32, less `minus`."""
    halves = words[place : place + len(row)]
    if kind == BFLOAT16:
        for k in range(len(row)):
            row[k] = float_of(np.uint32(halves[k]) << np.uint32(16)) - minus[k]
    elif kind == FLOAT16:
        for k in range(len(row)):
            row[k] = from_float16(halves[k]) - minus[k]
    else:
        whole = floats[place : place + len(row)]
        for k in range(len(row)):
            row[k] = whole[k] - minus[k]


@inlined
def _task_vectors(stored: Any, at: int, count: int, rows: Any) -> None:
    """theta_0 and the task vectors of `count` columns into the first rows; the last holds zeros.

    `stored` is one memory as words and as floats, the start and the type of each row, and the
    number of inputs, at the start, that are differences from theta_0.
    """
    words, floats, starts, kinds, deltas = stored
    base, zeros = rows[0][:count], rows[len(rows) - 1][:count]
    if kinds[0] == ABSENT:
        base[:] = 0
    else:
        _widen(kinds[0], at + starts[0], words, floats, zeros, base)
    for i in range(1, 1 + deltas):
        _widen(kinds[i], at + starts[i], words, floats, zeros, rows[i][:count])
    for i in range(1 + deltas, len(starts)):
        _widen(kinds[i], at + starts[i], words, floats, base, rows[i][:count])


@_reordered
def _square(x: Any) -> Any:
    total = np.float32(0)
    for k in range(len(x)):
        total += x[k] * x[k]
    return total


@_reordered
def _add_tile(rows: Any, i: int, j: int, count: int, sums: Any) -> None:
    """sums [4, 4] += x y^T of 4 rows from i and 4 from j on: as many as registers hold."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
    c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = np.float32(0)
    x0, x1, x2, x3 = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
    y0, y1, y2, y3 = rows[j], rows[j + 1], rows[j + 2], rows[j + 3]
    for k in range(count):
        a0 += x0[k] * y0[k]
        a1 += x0[k] * y1[k]
        a2 += x0[k] * y2[k]
        a3 += x0[k] * y3[k]
        b0 += x1[k] * y0[k]
        b1 += x1[k] * y1[k]
        b2 += x1[k] * y2[k]
        b3 += x1[k] * y3[k]
        c0 += x2[k] * y0[k]
        c1 += x2[k] * y1[k]
        c2 += x2[k] * y2[k]
        c3 += x2[k] * y3[k]
        d0 += x3[k] * y0[k]
        d1 += x3[k] * y1[k]
        d2 += x3[k] * y2[k]
        d3 += x3[k] * y3[k]
    made = (a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3), (d0, d1, d2, d3)
    for p in range(TILE):
        for q in range(TILE):
            sums[p, q] += made[p][q]


@inlined
def _add_products(rows: Any, count: int, number: int, sums: Any, norms: Any) -> None:
    """Add the products of `count` columns to the sums of chunk `number`."""
    norms[number] += _square(rows[0][:count])
    for i in range(0, sums.shape[1], TILE):
        for j in range(i, sums.shape[1], TILE):
            _add_tile(rows[1:], i, j, count, sums[number, i : i + TILE, j : j + TILE])


@numba.njit(nogil=True, fastmath={"contract"})
def _weigh(rows: Any, weights: Any, made: Any) -> None:
    """made = weights @ task vectors, in the order of the tasks; TILE of them at a time."""
    for k in range(len(made)):
        made[k] = 0
    for i in range(0, len(weights), TILE):
        w0, w1, w2, w3 = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        x0, x1, x2, x3 = rows[1 + i], rows[2 + i], rows[3 + i], rows[4 + i]
        for k in range(len(made)):
            made[k] = made[k] + w0 * x0[k] + w1 * x1[k] + w2 * x2[k] + w3 * x3[k]


@inlined  # two roundings, whatever the processor: see core.merge
def _add(made: Any, scale: float, total: Any) -> None:
    for k in range(len(made)):
        total[k] += np.float32(scale * made[k])


@inlined
def _to_bfloat16(value: Any) -> Any:
    """Rounded to nearest, ties to even; a NaN stays one."""
    bits = bits_of(value)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    nan = bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000)
    return np.uint16(0x7FC0) if nan else np.uint16(rounded)


@inlined
def to_float16(value: Any) -> Any:
    """Rounded as in `_to_bfloat16`: below 2^-14 by a sum with 0.5, above by a shift."""
    bits = bits_of(value)
    size = bits & np.uint32(0x7FFFFFFF)
    odd = (size >> np.uint32(13)) & np.uint32(1)
    small = bits_of(float_of(size) + np.float32(0.5)) - np.uint32(0x3F000000)
    large = np.uint32(size - np.uint32(112 << 23) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    half = small if size < np.uint32(113 << 23) else min(large, np.uint32(0x7C00))
    finite = np.uint32(0x7E00) if size > np.uint32(0x7F800000) else half
    return np.uint16(bits >> np.uint32(16) & np.uint32(0x8000) | finite)


@inlined
def _store(row: Any, out: Any, kind: int) -> bool:
    """Write a row of float32 as bytes; return whether it has NaN or infinity."""
    worst = np.uint32(0)
    if kind == FLOAT32:
        words = out.view(np.uint32)
        for k in range(len(row)):
            words[k] = bits_of(row[k])
            worst = max(worst, np.uint32(words[k] & np.uint32(0x7F800000)))
        return worst == np.uint32(0x7F800000)
    halves = out.view(np.uint16)
    if kind == BFLOAT16:
        for k in range(len(row)):
            halves[k] = _to_bfloat16(row[k])
            worst = max(worst, np.uint32(halves[k] & np.uint16(0x7F80)))
        return worst == np.uint32(0x7F80)
    for k in range(len(row)):
        halves[k] = to_float16(row[k])
        worst = max(worst, np.uint32(halves[k] & np.uint16(0x7C00)))
    return worst == np.uint32(0x7C00)


@compiled
def _walk(stored: Any, numel: int, linear: Any, rows: Any, written: Any, summed: Any) -> bool:
    """Fill `out`, bytes with a row every `stride`; return whether it has NaN or infinity.

    Unless `chunk` is 0, add T^T T of each chunk to `sums` [chunks, T, T] and ||theta_0||^2 to
    `norms` [chunks], in float64 of float32 sums over COLUMNS.
    """
    (weights, scales, ends, with_base), (out, stride, kind) = linear, written
    chunk, sums, norms = summed
    bad, size = False, 4 if kind == FLOAT32 else 2
    for at in range(0, numel, COLUMNS):
        count = min(COLUMNS, numel - at)
        _task_vectors(stored, at, count, rows)
        if chunk:
            _add_products(rows, count, at // chunk, sums, norms)
        made, total = rows[len(rows) - 3][:count], rows[len(rows) - 2][:count]
        step = 0
        for number in range(len(ends)):
            start = rows[0] if with_base else rows[len(rows) - 1]  # zeros
            for k in range(count):  # assigning a slice takes ten times as long
                total[k] = start[k]
            while step < ends[number]:
                _weigh(rows, weights[step], made)
                _add(made, scales[step], total)
                step += 1
            place = number * stride + size * at
            bad |= _store(total, out[place : place + size * count], kind)
    return bad
