# mypy: disable-error-code="no-untyped-call, no-any-return"
"""Quantizing and decoding groups of 64 elements on a CPU, compiled by numba: see core.quantize."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from torch import Tensor

from tvb_mergekit.core.quantize import GROUP
from tvb_mergekit.tensors.kernels import _from_float16, _to_float16

# Of the largest magnitude, the first guesses at the end of the levels: the least squares scale is
# found from each, and the best is kept. More gain less than a hundredth of the error.
GUESSES = {
    1: (1.0, 0.6, 0.3),
    2: (0.35, 0.5, 0.65, 0.8, 1.0),
    3: (0.45, 0.6, 0.75, 0.9, 1.05),
    4: (0.6, 0.7, 0.8, 0.9, 1.0),
    8: (0.95, 0.98, 1.0),
}


def encode(
    values: Tensor, bits: int, unit: float, blocks: Tensor, rest: Tensor
) -> tuple[float, float]:
    """The codes of finite float32 `values`, such that each group's squared error is least, as far
    as the guesses find it; returns the values' squared norm, and the squared error of all.

    Args:
        blocks: uint8, `block_bytes` of them; empty where the error alone is wanted.
        rest: [n] for what the codes leave of the values, which it may take the place of; or empty.
    """
    guesses = np.array(GUESSES[bits], np.float32)
    found = _encode(values.numpy(), bits, unit, guesses, blocks.numpy(), rest.numpy())
    square, error = (of * unit**2 for of in found)  # not in float32, which tiny squares underflow
    return square, error


def decode(blocks: Tensor, bits: int, unit: float, start: int, stop: int, out: Tensor) -> None:
    """Fill `out` [stop - start] float32 with elements `start` to `stop`, counted from the first of
    the blocks."""
    _decode(blocks.numpy(), bits, unit, start, stop, out.numpy())


_compiled = numba.njit(nogil=True, error_model="numpy", cache=True)
# Sums in any order, of finite numbers; a loop of GROUP steps is vectorized whole.
_sums = numba.njit(nogil=True, error_model="numpy", fastmath=True)


@_sums
def _ends(x: Any) -> Any:
    high = low = np.float32(0)
    for k in range(GROUP):
        high, low = max(high, x[k]), min(low, x[k])
    return high, low


@_sums
def _fit(x: Any, count: int, guess: Any, offset: Any, least: Any) -> Any:
    """(what the squared error of x falls by, the scale that does it) for the levels that the
    scale `guess` gives: (sum x l)^2 / sum l^2 and sum x l / sum l^2. x is 0 from `count` on."""
    inverse, most = np.float32(1) / guess, -least - np.float32(1)
    product = square = np.float32(0)
    for k in range(GROUP):
        level = min(max(np.rint(x[k] * inverse - offset), least), most) + offset
        product += x[k] * level
        square += level * level
    square -= np.float32(GROUP - count) * offset * offset
    return (product * product / square, product / square) if square > 0 else (square, square)


@_sums
def _round(x: Any, inverse: Any, offset: Any, least: Any, levels: Any) -> None:
    most = -least - np.float32(1)
    for k in range(GROUP):
        levels[k] = np.int32(min(max(np.rint(x[k] * inverse - offset), least), most))


@_compiled
def _scale_of(x: Any, count: int, bits: int, guesses: Any) -> Any:
    """The scale of one group as the bits of a float16, of which the lowest chooses the levels."""
    least = -np.float32(1 << (bits - 1))
    high, low = _ends(x)
    end = high if high >= -low else low
    if end == 0:
        return np.uint16(0)
    gain, scale, odd = np.float32(0), np.float32(0), np.uint16(0)
    for guess in guesses:
        for way in range(2):  # the longer side to the larger elements; or symmetric levels
            offset = np.float32(0.5) * np.float32(way)
            found, fit = _fit(x, count, guess * end / (least + offset), offset, least)
            if found > gain:
                gain, scale, odd = found, fit, np.uint16(way)
    size = min(_to_float16(abs(scale)), np.uint16(0x7BFE)) & np.uint16(0x7FFE)
    return np.uint16(size | odd | np.uint16(0x8000) * np.uint16(scale < 0))


@_compiled
def _pack(levels: Any, bits: int, codes: Any) -> None:
    """The lowest bits of 64 integers, eight of which take `bits` bytes."""
    if bits == 8:
        for k in range(GROUP):
            codes[k] = levels[k] & 255
        return
    mask = np.int32((1 << bits) - 1)
    for eight in range(8):
        packed = np.int32(0)
        for k in range(8):
            packed |= (levels[8 * eight + k] & mask) << np.int32(bits * k)
        for byte in range(bits):
            codes[eight * bits + byte] = (packed >> np.int32(8 * byte)) & 255


@_sums
def _distance(x: Any, count: int, levels: Any, scale: Any, offset: Any) -> Any:
    """The squared norm of a group, and its squared error."""
    square = error = np.float32(0)
    for k in range(GROUP):
        left = x[k] - scale * (np.float32(levels[k]) + offset)
        square += x[k] * x[k]
        error += left * left
    return square, error - np.float32(GROUP - count) * (scale * offset) ** 2


@_compiled
def _encode(values: Any, bits: int, unit: float, guesses: Any, blocks: Any, rest: Any) -> Any:
    least, factor = -np.float32(1 << (bits - 1)), np.float32(1 / unit)
    x, levels = np.empty(GROUP, np.float32), np.empty(GROUP, np.int32)
    block, error = np.empty(2 + 8 * bits, np.uint8), 0.0
    square = 0.0
    for start in range(0, len(values), GROUP):
        count = min(GROUP, len(values) - start)
        for k in range(count):
            x[k] = values[start + k] * factor
        for k in range(count, GROUP):
            x[k] = 0
        word = _scale_of(x, count, bits, guesses)
        scale, offset = _from_float16(word), np.float32(word & 1) / np.float32(2)
        inverse = np.float32(1) / scale if scale else np.float32(0)
        _round(x, inverse, offset, least, levels)
        found = _distance(x, count, levels, scale, offset)
        square, error = square + found[0], error + found[1]
        if len(rest):
            step = scale * np.float32(unit)
            for k in range(count):
                rest[start + k] = values[start + k] - step * (np.float32(levels[k]) + offset)
        if not len(blocks):
            continue
        block[0], block[1] = word & 255, word >> 8
        _pack(levels, bits, block[2:])
        place = start // GROUP * len(block)
        end = min(place + len(block), len(blocks))
        for k in range(place, end):
            blocks[k] = block[k - place]
    return square, error


@_compiled
def _decode_block(block: Any, bits: int, unit: float, made: Any) -> None:
    """made [64] = the elements of a group."""
    word = np.uint16(block[0]) | np.uint16(block[1]) << np.uint16(8)
    step, offset = _from_float16(word) * np.float32(unit), np.float32(word & 1) / np.float32(2)
    half = np.int32(1 << (bits - 1))
    mask = np.int32(2 * half - 1)
    if bits == 8:
        for k in range(GROUP):
            made[k] = step * (np.float32(np.int8(block[2 + k])) + offset)
        return
    for eight in range(8):
        packed = np.int32(0)
        for byte in range(bits):
            packed |= np.int32(block[2 + eight * bits + byte]) << np.int32(8 * byte)
        for k in range(8):
            level = (((packed >> np.int32(bits * k)) & mask) ^ half) - half
            made[8 * eight + k] = step * (np.float32(level) + offset)


@_compiled
def _decode(blocks: Any, bits: int, unit: float, start: int, stop: int, out: Any) -> None:
    size = 2 + 8 * bits
    made, padded = np.empty(GROUP, np.float32), np.zeros(size, np.uint8)
    for group in range(start // GROUP, -(-stop // GROUP)):
        first, block = group * GROUP, blocks[group * size : (group + 1) * size]
        low, high = max(start, first), min(stop, first + GROUP)
        if high - low == GROUP and len(block) == size:
            _decode_block(block, bits, unit, out[low - start : high - start])
        else:
            padded[: len(block)] = block
            _decode_block(padded, bits, unit, made)
            out[low - start : high - start] = made[low - first : high - first]
