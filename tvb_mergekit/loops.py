# mypy: disable-error-code="attr-defined, call-arg, no-any-return, no-untyped-call, return-value"
# mypy: disable-error-code="var-annotated"
"""The inner loops of `kernels`, compiled by numba; to them arrays and intrinsics are untyped.

Inputs are given by their addresses, [1 + T] int64, theta_0 first, and by `KINDS` of their dtypes.
The first `deltas` of the T are differences from theta_0 already. `rows` are float32, with room for
`columns`: theta_0, the T task vectors, zeros up to a multiple of TILE, what is made of them, and
zeros in the last. Nothing is checked here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import binding, ir
from numba import carray, config, njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

from tvb_mergekit import kernels
from tvb_mergekit.cache import user_folder
from tvb_mergekit.kernels import BFLOAT16, FLOAT32, TILE, ZERO

Function = TypeVar("Function", bound=Callable[..., Any])


def _build() -> str:
    """Of all that the machine code follows from."""
    host = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    sources = [Path(file).read_bytes() for file in (__file__, kernels.__file__)]
    digest = hashlib.sha256(repr((numba.__version__, binding.llvm_version_info, *host)).encode())
    for source in sources:
        digest.update(source)
    return digest.hexdigest()[:16]


BUILD = _build()


class _Cache(FunctionCache):
    """Machine code on disk; where it is damaged or cannot be written, it is compiled again."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(Exception):
            super().save_overload(sig, data)


def _compiled(**options: Any) -> Callable[[Function], Function]:
    """Compiled at the first call, and kept in the user's cache where that can be written."""

    def decorate(function: Function) -> Function:
        made = njit(nogil=True, error_model="numpy", **options)(function)
        given = config.CACHE_DIR
        # Beside the package it would be left behind when that is uninstalled.
        config.CACHE_DIR = str((Path(given) if given else user_folder() / "compiled") / BUILD)
        try:
            made._cache = _Cache(function)
        except RuntimeError:  # there is no place to keep it
            pass
        finally:
            config.CACHE_DIR = given
        return made

    return decorate


# Sums may be reordered, which vectorizes them, but NaN and infinity must come through.
_REORDERED = {"reassoc", "contract", "nsz"}


@intrinsic
def _pointer(_context: Any, address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), generate


@intrinsic
def _of_bfloat16(_context: Any, _bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        bits = builder.shl(builder.zext(args[0], word), ir.Constant(word, 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def _of_float16(_context: Any, _bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def _to_float16(_context: Any, _value: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic
def _bits(_context: Any, _value: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def _prefetch(_context: Any, address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        how = [ir.Constant(word, value) for value in (0, 3, 1)]  # to read, keep near, data
        builder.call(function, [builder.inttoptr(args[0], pointer), *how])
        return _context.get_dummy_value()

    return types.void(address), generate


@_compiled()
def _less_float32(stored: Any, minus: Any, row: Any) -> None:
    for k in range(len(row)):
        row[k] = stored[k] - minus[k]


@_compiled()
def _less_bfloat16(stored: Any, minus: Any, row: Any) -> None:
    for k in range(len(row)):
        row[k] = _of_bfloat16(stored[k]) - minus[k]


@_compiled()
def _less_float16(stored: Any, minus: Any, row: Any) -> None:
    for k in range(len(row)):
        row[k] = _of_float16(stored[k]) - minus[k]


@_compiled()
def _less(address: int, kind: int, start: int, minus: Any, row: Any) -> None:
    """row = the elements from `start` on, in float32, less `minus`. One loop to a function: they
    are vectorized so."""
    if kind == ZERO:
        row[:] = 0
    elif kind == FLOAT32:
        floats = carray(_pointer(address + 4 * start), (len(row),), np.float32)
        _less_float32(floats, minus, row)
    else:
        words = carray(_pointer(address + 2 * start), (len(row),), np.uint16)
        if kind == BFLOAT16:
            _less_bfloat16(words, minus, row)
        else:
            _less_float16(words, minus, row)


@_compiled()
def _read(addresses: Any, kinds: Any, deltas: int, start: int, count: int, rows: Any) -> None:
    """theta_0 and the task vectors of `count` columns into the rows."""
    base, zero = rows[0][:count], rows[len(rows) - 1][:count]
    _less(addresses[0], kinds[0], start, zero, base)
    for i in range(1, 1 + deltas):
        _less(addresses[i], kinds[i], start, zero, rows[i][:count])
    for i in range(1 + deltas, len(addresses)):
        _less(addresses[i], kinds[i], start, base, rows[i][:count])


@_compiled()
def _fetch(addresses: Any, kinds: Any, start: int, count: int) -> None:
    for i in range(1 if kinds[0] == ZERO else 0, len(addresses)):
        size = 4 if kinds[i] == FLOAT32 else 2
        first = addresses[i] + size * start
        for at in range(first, first + size * count, 64):
            _prefetch(at)


@_compiled(fastmath=_REORDERED)
def _add_tile(rows: Any, i: int, j: int, count: int, sums: Any) -> None:
    """sums[i, j] += x_i x_j^T of a tile of TILE x TILE rows, from i and j on."""
    zero = np.float32(0)
    a00 = a01 = a02 = a03 = a10 = a11 = a12 = a13 = zero
    a20 = a21 = a22 = a23 = a30 = a31 = a32 = a33 = zero
    x0, x1, x2, x3 = rows[1 + i], rows[2 + i], rows[3 + i], rows[4 + i]
    y0, y1, y2, y3 = rows[1 + j], rows[2 + j], rows[3 + j], rows[4 + j]
    for k in range(count):
        p0, p1, p2, p3 = x0[k], x1[k], x2[k], x3[k]
        q0, q1, q2, q3 = y0[k], y1[k], y2[k], y3[k]
        a00 += p0 * q0
        a01 += p0 * q1
        a02 += p0 * q2
        a03 += p0 * q3
        a10 += p1 * q0
        a11 += p1 * q1
        a12 += p1 * q2
        a13 += p1 * q3
        a20 += p2 * q0
        a21 += p2 * q1
        a22 += p2 * q2
        a23 += p2 * q3
        a30 += p3 * q0
        a31 += p3 * q1
        a32 += p3 * q2
        a33 += p3 * q3
    tile = ((a00, a01, a02, a03), (a10, a11, a12, a13), (a20, a21, a22, a23), (a30, a31, a32, a33))
    for p in range(TILE):
        for q in range(TILE):
            sums[i + p, j + q] += tile[p][q]


@_compiled(fastmath=_REORDERED)
def _add_triangle(rows: Any, i: int, count: int, sums: Any) -> None:
    """The same on the diagonal, where the half below is left out."""
    zero = np.float32(0)
    a00 = a01 = a02 = a03 = a11 = a12 = a13 = a22 = a23 = a33 = zero
    x0, x1, x2, x3 = rows[1 + i], rows[2 + i], rows[3 + i], rows[4 + i]
    for k in range(count):
        p0, p1, p2, p3 = x0[k], x1[k], x2[k], x3[k]
        a00 += p0 * p0
        a01 += p0 * p1
        a02 += p0 * p2
        a03 += p0 * p3
        a11 += p1 * p1
        a12 += p1 * p2
        a13 += p1 * p3
        a22 += p2 * p2
        a23 += p2 * p3
        a33 += p3 * p3
    tile = ((a00, a01, a02, a03), (zero, a11, a12, a13), (zero, zero, a22, a23))
    for p in range(3):
        for q in range(p, TILE):
            sums[i + p, i + q] += tile[p][q]
    sums[i + 3, i + 3] += a33


@_compiled(fastmath=_REORDERED)
def _dot(x: Any) -> float:
    total = np.float32(0)
    for k in range(len(x)):
        total += x[k] * x[k]
    return total


@_compiled()
def gram(
    addresses: Any,
    kinds: Any,
    deltas: int,
    numel: int,
    chunk: int,
    columns: int,
    rows: Any,
    sums: Any,
    norms: Any,
) -> None:
    """For each chunk, sums [chunks, padded T, padded T] += T^T T above the diagonal and norms
    [chunks] += ||theta_0||^2: in float64, of float32 sums over `columns`, or fewer."""
    for number in range(len(sums)):
        start, stop = number * chunk, min((number + 1) * chunk, numel)
        # Of many float32 sums the roundings cancel: a short tensor has many if they are short.
        width = min(columns, max(32, (stop - start) // 2048 * 32))
        for at in range(start, stop, width):
            count = min(width, stop - at)
            _read(addresses, kinds, deltas, at, count, rows)
            if at + width < numel:
                _fetch(addresses, kinds, at + width, min(width, numel - at - width))
            norms[number] += _dot(rows[0][:count])
            for i in range(0, sums.shape[1], TILE):
                _add_triangle(rows, i, count, sums[number])
                for j in range(i + TILE, sums.shape[1], TILE):
                    _add_tile(rows, i, j, count, sums[number])


@_compiled(fastmath={"contract"})
def _weigh(rows: Any, weights: Any, made: Any) -> None:
    """made = weights @ task vectors, in the order of the tasks; TILE of them at a time."""
    count = len(made)
    for i in range(0, len(weights), TILE):
        w0, w1, w2, w3 = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        x0, x1, x2, x3 = rows[1 + i], rows[2 + i], rows[3 + i], rows[4 + i]
        if i == 0:
            for k in range(count):
                made[k] = w0 * x0[k] + w1 * x1[k] + w2 * x2[k] + w3 * x3[k]
        else:
            for k in range(count):
                made[k] = made[k] + w0 * x0[k] + w1 * x1[k] + w2 * x2[k] + w3 * x3[k]


@_compiled()  # two roundings, whatever the processor: see combine.py
def _add(start: Any, made: Any, scale: float, out: Any) -> None:
    for k in range(len(made)):
        out[k] = start[k] + np.float32(scale * made[k])


@_compiled()
def _store_float32(row: Any, out: Any) -> bool:
    worst = np.uint32(0)
    for k in range(len(row)):
        out[k] = row[k]
        worst = max(worst, _bits(row[k]) & np.uint32(0x7F800000))
    return worst == np.uint32(0x7F800000)


@_compiled()
def _store_bfloat16(row: Any, out: Any) -> bool:
    worst = np.uint32(0)
    for k in range(len(row)):
        bits = _bits(row[k])
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
        if bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):  # NaN, which would be rounded away
            rounded = np.uint32(0x7FC0)
        out[k] = rounded
        worst = max(worst, rounded & np.uint32(0x7F80))
    return worst == np.uint32(0x7F80)


@_compiled()
def _store_float16(row: Any, out: Any) -> bool:
    worst = np.uint16(0)
    for k in range(len(row)):
        half = _to_float16(row[k])
        out[k] = half
        worst = max(worst, half & np.uint16(0x7C00))
    return worst == np.uint16(0x7C00)


@_compiled()
def _store(row: Any, address: int, kind: int, start: int) -> bool:
    """Write a row from element `start` on, rounded to nearest; whether something is not finite."""
    if kind == FLOAT32:
        return _store_float32(row, carray(_pointer(address + 4 * start), (len(row),), np.float32))
    words = carray(_pointer(address + 2 * start), (len(row),), np.uint16)
    if kind == BFLOAT16:
        return _store_bfloat16(row, words)
    return _store_float16(row, words)


@_compiled()
def combine(
    addresses: Any,
    kinds: Any,
    deltas: int,
    numel: int,
    columns: int,
    weights: Any,
    scales: Any,
    ends: Any,
    with_base: bool,
    rows: Any,
    outs: Any,
    kind: int,
) -> bool:
    """See `kernels.Combining`; whether something is not finite."""
    bad = False
    for at in range(0, numel, columns):
        count = min(columns, numel - at)
        _read(addresses, kinds, deltas, at, count, rows)
        if at + columns < numel:
            _fetch(addresses, kinds, at + columns, min(columns, numel - at - columns))
        start = rows[0 if with_base else len(rows) - 1][:count]
        made, out = rows[len(rows) - 3][:count], rows[len(rows) - 2][:count]
        step = 0
        for number in range(len(outs)):
            if step == ends[number]:
                out[:] = start
            first = step
            while step < ends[number]:
                _weigh(rows, weights[step], made)
                _add(start if step == first else out, made, scales[step], out)
                step += 1
            bad |= _store(out, outs[number], kind, at)
    return bad
