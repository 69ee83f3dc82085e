# mypy: disable-error-code="no-untyped-call, no-any-return"
"""Quantizing and decoding groups of 64 elements on a CPU, compiled by numba: see core.quantize."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from torch import Tensor

from tvb_mergekit.core.quantize import GROUP
from tvb_mergekit.tensors.kernels import _entry, _from_float16, _inner, _to_float16

# Of the largest magnitude, the first guesses at the end of the levels: the least squares scale is
# found from each, and the best is kept. More gain less than a hundredth of the error.
GUESSES = {
    1: (1.0, 0.6, 0.3),
    2: (0.35, 0.5, 0.65, 0.8, 1.0),
    3: (0.45, 0.6, 0.75, 0.9, 1.05),
    4: (0.6, 0.7, 0.8, 0.9, 1.0),
    8: (0.95, 0.98, 1.0),
}


def encode(values: Tensor, bits: int, blocks: Tensor, rest: Tensor) -> tuple[float, float]:
    """The codes of finite float32 `values`, in units, such that each group's squared error is
    least, as far as the guesses find it; returns the values' squared norm and the squared error.

    Args:
        blocks: uint8, `block_bytes` of them; empty where the error alone is wanted.
        rest: [n] for what the codes leave of the values, which it may take the place of; or empty.
    """
    least = -float(1 << (bits - 1))
    offsets = np.array([0, 0.5], np.float32)  # the longer side to the larger elements; symmetric
    inverses = (least + offsets) / np.array(GUESSES[bits], np.float32)[:, None]
    square, error = _encode(values.numpy(), bits, inverses, blocks.numpy(), rest.numpy())
    return square, error


def decode(blocks: Tensor, bits: int, unit: float, start: int, stop: int, out: Tensor) -> None:
    """Fill `out` [stop - start] float32 with elements `start` to `stop`, counted from the first of
    the blocks."""
    _decode(blocks.numpy(), bits, unit, start, stop, out.numpy())


_compiled = numba.njit(nogil=True, error_model="numpy")
# Sums in any order, of finite numbers; a loop of GROUP steps is vectorized whole.
_sums = numba.njit(nogil=True, error_model="numpy", fastmath=True)


@_sums
def _ends(x: Any) -> Any:
    high = low = np.float32(0)
    for k in range(GROUP):
        high, low = max(high, x[k]), min(low, x[k])
    return high, low


@_sums
def _fit(x: Any, padding: Any, one: Any, two: Any, least: Any) -> Any:
    """For the levels that x gets by `one`, the inverse of a scale, and by `two` with half-integer
    levels, the sums that tell the best scale: x l and l l of either. `padding`: zeros at the end.
    """
    half, most = np.float32(0.5), -least - np.float32(1)
    product = square = products = squares = np.float32(0)
    for k in range(GROUP):
        level = min(max(np.rint(x[k] * one), least), most)
        product += x[k] * level
        square += level * level
        level = min(max(np.rint(x[k] * two - half), least), most) + half
        products += x[k] * level
        squares += level * level
    return product, square, products, squares - padding * half * half


@_sums
def _round(x: Any, inverse: Any, offset: Any, least: Any, levels: Any) -> None:
    most = -least - np.float32(1)
    for k in range(GROUP):
        levels[k] = np.int8(min(max(np.rint(x[k] * inverse - offset), least), most))


@_compiled
def _scale_of(x: Any, padding: Any, least: Any, inverses: Any) -> Any:
    """The scale of one group as the bits of a float16, of which the lowest chooses the levels.

    Levels l with the scale sum x l / sum l l lower the squared error by (sum x l)^2 / sum l l.
    """
    high, low = _ends(x)
    end = high if high >= -low else low
    if end == 0:
        return np.uint16(0)
    gain, scale, odd, inverse = np.float32(0), np.float32(0), np.uint16(0), np.float32(1) / end
    for k in range(len(inverses)):
        one, two = inverses[k, 0] * inverse, inverses[k, 1] * inverse
        product, square, products, squares = _fit(x, padding, one, two, least)
        fit = product / square if square > 0 else np.float32(0)
        if product * fit > gain:
            gain, scale, odd = product * fit, fit, np.uint16(0)
        fit = products / squares
        if products * fit > gain:
            gain, scale, odd = products * fit, fit, np.uint16(1)
    size = min(_to_float16(abs(scale)), np.uint16(0x7BFE)) & np.uint16(0x7FFE)
    return np.uint16(size | odd | np.uint16(0x8000) * np.uint16(scale < 0))


@_inner
def _masks(bits: int) -> Any:
    """Of fields of `bits`, 2 `bits` and 4 `bits` in every 8, 16 and 32."""
    one = np.uint64((1 << bits) - 1) * np.uint64(0x0101010101010101)
    two = np.uint64((1 << 2 * bits) - 1) * np.uint64(0x0001000100010001)
    return one, two, np.uint64((1 << 4 * bits) - 1) * np.uint64(0x0000000100000001)


@_compiled
def _pack(words: Any, bits: int, codes: Any) -> None:
    """Each word holds eight codes, the lowest bits of its bytes, which take `bits` bytes. Bytes are
    put together to pairs, those to fours, and those to eights."""
    one, two, four = _masks(bits)
    first, second, third = np.uint64(8 - bits), np.uint64(16 - 2 * bits), np.uint64(32 - 4 * bits)
    for eight in range(8):
        word = words[eight] & one
        word = (word | word >> first) & two
        word = (word | word >> second) & four
        word |= word >> third
        for byte in range(bits):
            codes[eight * bits + byte] = word >> np.uint64(8 * byte) & np.uint64(255)


@_compiled
def _unpack(codes: Any, bits: int, words: Any) -> None:
    """The same backwards."""
    one, two, four = _masks(bits)
    first, second, third = np.uint64(8 - bits), np.uint64(16 - 2 * bits), np.uint64(32 - 4 * bits)
    for eight in range(8):
        word = np.uint64(0)
        for byte in range(bits):
            word |= np.uint64(codes[eight * bits + byte]) << np.uint64(8 * byte)
        if bits < 8:
            word = (word | word << third) & four
            word = (word | word << second) & two
            word = (word | word << first) & one
        words[eight] = word


@_sums
def _leave(x: Any, levels: Any, scale: Any, offset: Any, rest: Any) -> Any:
    """rest = what is left of a group; its squared norm, and that of x."""
    square = error = np.float32(0)
    for k in range(GROUP):
        square += x[k] * x[k]
        rest[k] = x[k] - scale * (np.float32(levels[k]) + offset)
        error += rest[k] * rest[k]
    return square, error


@_entry
def _encode(values: Any, bits: int, inverses: Any, blocks: Any, rest: Any) -> Any:
    least, square, error = -np.float32(1 << (bits - 1)), 0.0, 0.0
    last, left = np.zeros(GROUP, np.float32), np.empty(GROUP, np.float32)
    levels, size = np.empty(GROUP, np.int8), 2 + 8 * bits
    words, block = levels.view(np.uint64), np.empty(size, np.uint8)
    for start in range(0, len(values), GROUP):
        count = min(GROUP, len(values) - start)
        x = values[start : start + GROUP]
        if count < GROUP:
            last[:count], x = x, last
        word = _scale_of(x, np.float32(GROUP - count), least, inverses)
        scale, offset = _from_float16(word), np.float32(word & 1) / np.float32(2)
        _round(x, np.float32(1) / scale if scale else np.float32(0), offset, least, levels)
        own = rest[start : start + GROUP] if len(rest) >= start + GROUP else left
        norm, lost = _leave(x, levels, scale, offset, own)
        lost -= np.float32(GROUP - count) * (scale * offset) ** 2
        square, error = square + norm, error + lost
        if count < GROUP and len(rest):
            rest[start:] = own[:count]
        if not len(blocks):
            continue
        place = start // GROUP * size
        whole = blocks[place : place + size] if count == GROUP else block
        whole[0], whole[1] = word & 255, word >> 8
        _pack(words, bits, whole[2:])
        if count < GROUP:
            blocks[place:] = block[: len(blocks) - place]
    return square, error


@_inner  # not as sums: the same to the bit as `core.quantize.decode`
def _elements(levels: Any, half: Any, step: Any, offset: Any, made: Any) -> None:
    for k in range(GROUP):
        made[k] = step * (np.float32(np.int8((levels[k] ^ half) - half)) + offset)


@_entry
def _decode(blocks: Any, bits: int, unit: float, start: int, stop: int, out: Any) -> None:
    size, half = 2 + 8 * bits, np.int8(-128) if bits == 8 else np.int8(1 << (bits - 1))
    last, padded = np.empty(GROUP, np.float32), np.zeros(size, np.uint8)
    levels = np.empty(GROUP, np.int8)
    words = levels.view(np.uint64)
    for group in range(start // GROUP, -(-stop // GROUP)):
        first, block = group * GROUP, blocks[group * size : (group + 1) * size]
        low, high = max(start, first), min(stop, first + GROUP)
        if len(block) < size:
            padded[: len(block)] = block
            block = padded
        word = np.uint16(block[0]) | np.uint16(block[1]) << np.uint16(8)
        step, offset = _from_float16(word) * np.float32(unit), np.float32(word & 1) / np.float32(2)
        _unpack(block[2:], bits, words)
        if high - low == GROUP:
            _elements(levels, half, step, offset, out[low - start : high - start])
        else:
            _elements(levels, half, step, offset, last)
            out[low - start : high - start] = last[low - first : high - first]
