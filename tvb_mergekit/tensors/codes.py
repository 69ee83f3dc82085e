# mypy: disable-error-code="no-untyped-call, no-any-return"
"""Quantizing and decoding groups of elements on a CPU, compiled by numba: see core.quantize."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from tvb_mergekit.core.quantize import GROUP, Width
from tvb_mergekit.tensors.kernels import (
    bits_of,
    compiled,
    float_of,
    from_float16,
    inlined,
    to_float16,
)

# First guesses at the last level, as shares of the largest magnitude. Each leads to a least squares
# scale, and the best is kept. More guesses reduce the error by less than a thousandth.
GUESSES = {
    1: (1.0, 0.4),
    2: (0.45, 0.6, 0.75, 0.95),
    3: (0.5, 0.65, 0.8, 0.95),
    4: (0.6, 0.7, 0.8, 0.9, 1.0),
    8: (1.0,),
}


def encode(values: Tensor, width: Width, rest: Tensor, blocks: Tensor) -> tuple[float, float]:
    """Code finite float32 `values`, in units, with a small squared error in each group.

    Args:
        rest: [n] for the errors; may be `values`.
        blocks: uint8, `block_bytes` of them.

    Returns:
        The squared norm of the values, and the squared error.
    """
    bits, size = width.bits, width.block
    least = -float(1 << (bits - 1))
    offsets = np.array([0, 0.5], np.float32)  # the longer side to the larger elements; symmetric
    inverses = (least + offsets) / np.array(GUESSES[bits], np.float32)[:, None]
    ragged = len(values) % GROUP
    whole = len(values) - ragged
    codes = blocks[: whole // GROUP * size]
    # The compiled loop gets complete groups: choosing between two arrays in it, and counting their
    # references, would take as long as all the rest.
    encode_groups = functools.partial(_encode, bits, inverses)
    square, error = encode_groups(values[:whole].numpy(), 0, codes.numpy(), rest.numpy())
    if not ragged:
        return square, error
    last, left, block = torch.zeros(GROUP), torch.empty(GROUP), torch.empty(size, dtype=torch.uint8)
    last[:ragged] = values[whole:]
    encode_groups(last.numpy(), GROUP - ragged, block.numpy(), left.numpy())
    more = [float(part[:ragged].double().square().sum()) for part in (last, left)]
    rest[whole:] = left[:ragged]
    blocks[len(codes) :] = block[: len(blocks) - len(codes)]
    return square + more[0], error + more[1]


def decode(blocks: Tensor, width: Width, unit: float, start: int, stop: int, out: Tensor) -> None:
    """Fill `out` [stop - start] float32 with elements `start` to `stop` of the blocks."""
    group, size, decode_groups = GROUP, width.block, _decoder(width.bits)
    # Complete groups are decoded in place; a part of a group may come before them and after them.
    cuts = {start, min(-(-start // group) * group, stop), max(stop // group * group, start), stop}
    for low, high in itertools.pairwise(sorted(cuts)):
        first, made = low // group, out[low - start : high - start]
        if low % group == high % group == 0:
            decode_groups(blocks[first * size : high // group * size].numpy(), unit, made.numpy())
        else:
            block, elements = blocks[first * size : (first + 1) * size], torch.empty(group)
            padded = torch.nn.functional.pad(block, (0, size - len(block)))
            decode_groups(padded.numpy(), unit, elements.numpy())
            made.copy_(elements[low - first * group : high - first * group])


# Adds finite numbers in any order: a loop of GROUP steps becomes vector instructions only.
_reordered = numba.njit(nogil=True, error_model="numpy", fastmath=True, forceinline=True)


@inlined
def _largest(x: Any) -> Any:
    """The element of the largest magnitude.

    Compares bits, with the sign as the lowest: integers are compared in vectors, floats are not.
    """
    most = np.uint32(0)
    for k in range(GROUP):
        bits = bits_of(x[k])
        most = max(most, np.uint32(bits << np.uint32(1) | bits >> np.uint32(31)))
    return float_of(np.uint32(most >> np.uint32(1) | most << np.uint32(31)))


@_reordered
def _fit(x: Any, one: Any, two: Any, least: Any) -> Any:
    """Sums of x l and of l l over a group, with integer levels l and with half-integer levels.

    `one` and `two` are inverses of the scales for rounding.
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
    return product, square, products, squares


@_reordered
def _round(x: Any, inverse: Any, offset: Any, least: Any, levels: Any) -> None:
    most = -least - np.float32(1)
    for k in range(GROUP):
        levels[k] = np.int8(min(max(np.rint(x[k] * inverse - offset), least), most))


@inlined
def _scale_of(x: Any, padding: Any, least: Any, inverses: Any) -> Any:
    """The scale of one group as the bits of a float16; the lowest bit chooses the levels.

    Levels l with the scale sum x l / sum l l lower the squared error by (sum x l)^2 / sum l l.
    """
    largest = _largest(x)
    if largest == 0:
        return np.uint16(0)
    gain, scale, odd, inverse = np.float32(0), np.float32(0), np.uint16(0), np.float32(1) / largest
    for k in range(len(inverses)):
        one, two = inverses[k, 0] * inverse, inverses[k, 1] * inverse
        product, square, products, squares = _fit(x, one, two, least)
        squares -= padding * np.float32(0.25)  # of zeros at the end
        fit = product / square if square > 0 else np.float32(0)
        if product * fit > gain:
            gain, scale, odd = product * fit, fit, np.uint16(0)
        fit = products / squares
        if products * fit > gain:
            gain, scale, odd = products * fit, fit, np.uint16(1)
    size = min(to_float16(abs(scale)), np.uint16(0x7BFE)) & np.uint16(0x7FFE)
    if not size:  # too small for a scale
        return np.uint16(0)
    return np.uint16(size | odd | np.uint16(0x8000) * np.uint16(scale < 0))


@inlined
def _masks(bits: int) -> Any:
    """Masks of fields of `bits`, 2 `bits` and 4 `bits` in every 8, 16 and 32."""
    one = np.uint64((1 << bits) - 1) * np.uint64(0x0101010101010101)
    two = np.uint64((1 << 2 * bits) - 1) * np.uint64(0x0001000100010001)
    return one, two, np.uint64((1 << 4 * bits) - 1) * np.uint64(0x0000000100000001)


@inlined
def _pack(words: Any, bits: int, codes: Any) -> None:
    """Pack eight codes, the lowest bits of each byte of a word, into `bits` bytes."""
    one, two, four = _masks(bits)
    first, second, third = np.uint64(8 - bits), np.uint64(16 - 2 * bits), np.uint64(32 - 4 * bits)
    for eight in range(8):
        word = words[eight] & one
        word = (word | word >> first) & two
        word = (word | word >> second) & four
        word |= word >> third
        for byte in range(bits):
            codes[eight * bits + byte] = word >> np.uint64(8 * byte) & np.uint64(255)


@inlined
def _unpack(codes: Any, bits: int, turned: Any, words: Any) -> None:
    """Undo `_pack`, and flip the bits of `turned`."""
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
        words[eight] = word ^ turned


@_reordered
def _errors_of(x: Any, levels: Any, scale: Any, offset: Any, rest: Any) -> Any:
    """Put the errors of a run into `rest`; return the squared norms of x and of the errors."""
    square = error = np.float32(0)
    for k in range(GROUP):
        square += x[k] * x[k]
        rest[k] = x[k] - scale * (np.float32(levels[k]) + offset)
        error += rest[k] * rest[k]
    return square, error


@compiled
def _encode(
    bits: int, inverses: Any, values: Any, padding: int, blocks: Any, rest: Any
) -> Any:  # fmt: skip
    least, square, error, place = -np.float32(1 << (bits - 1)), 0.0, 0.0, 0
    levels, zeros = np.empty(GROUP, np.int8), np.float32(padding)
    words = levels.view(np.uint64)
    for first in range(0, len(values), GROUP):
        x = values[first : first + GROUP]
        word = _scale_of(x, zeros, least, inverses)
        scale, offset = from_float16(word), np.float32(word & 1) / np.float32(2)
        inverse = np.float32(1) / scale if scale else np.float32(0)
        blocks[place], blocks[place + 1] = word & 255, word >> 8
        _round(x, inverse, offset, least, levels)
        norm, lost = _errors_of(x, levels, scale, offset, rest[first : first + GROUP])
        square, error = square + norm, error + lost
        _pack(words, bits, blocks[place + 2 : place + 2 + 8 * bits])
        place += 2 + 8 * bits
    return square, error


@inlined  # not reordered: the same to the bit as `core.quantize.decode`
def _elements(levels: Any, step: Any, zero: Any, made: Any) -> None:
    for k in range(GROUP):
        made[k] = step * (np.float32(levels[k]) - zero)


@functools.cache
def _decoder(bits: int) -> Any:
    """Decoding, compiled for one width: known shifts take half the time."""
    half = 1 << (bits - 1)
    # With its highest bit turned a code is its integer and `half` more, and not negative.
    turned = np.uint64(half * 0x0101010101010101)

    @compiled
    def decode(blocks: Any, unit: float, out: Any) -> None:
        levels = np.empty(GROUP, np.uint8)
        words, place = levels.view(np.uint64), 0
        for first in range(0, len(out), GROUP):
            word = np.uint16(blocks[place]) | np.uint16(blocks[place + 1]) << np.uint16(8)
            zero = np.float32(half) - np.float32(word & 1) / np.float32(2)
            step = from_float16(word) * np.float32(unit)
            _unpack(blocks[place + 2 : place + 2 + 8 * bits], bits, turned, words)
            _elements(levels, step, zero, out[first : first + GROUP])
            place += 2 + 8 * bits

    return decode
