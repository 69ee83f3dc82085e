# mypy: disable-error-code="no-untyped-call, no-any-return"
"""Quantizing and decoding groups of elements on a CPU, compiled by numba: see core.quantize."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
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
    least = -float(1 << (width.bits - 1))
    offsets = np.array([0, 0.5], np.float32)  # the longer side to the larger elements; symmetric
    inverses = (least + offsets) / np.array(GUESSES[width.bits], np.float32)[:, None]
    return _encode(width.bits, inverses, values.numpy(), blocks.numpy(), rest.numpy())


def decode(blocks: Tensor, width: Width, unit: float, start: int, stop: int, out: Tensor) -> None:
    """Fill `out` [stop - start] float32 with elements `start` to `stop` of the blocks."""
    _decode(blocks.numpy(), width.bits, unit, start, out[: stop - start].numpy())


# Adds finite numbers in any order, which makes vector instructions possible.
_reordered = numba.njit(nogil=True, error_model="numpy", fastmath=True, forceinline=True)


@inlined
def _largest(x: Any) -> Any:
    """The element of the largest magnitude.

    Compares bits, with the sign as the lowest: integers are compared in vectors, floats are not.
    """
    most = np.uint32(0)
    for k in range(len(x)):
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
    for k in range(len(x)):
        level = min(max(np.rint(x[k] * one), least), most)
        product += x[k] * level
        square += level * level
        level = min(max(np.rint(x[k] * two - half), least), most) + half
        products += x[k] * level
        squares += level * level
    return product, square, products, squares


@inlined
def _scale_of(x: Any, least: Any, inverses: Any) -> Any:
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


@compiled
def _encode(bits: int, inverses: Any, values: Any, blocks: Any, rest: Any) -> Any:
    least, square, error, place = -np.float32(1 << (bits - 1)), 0.0, 0.0, 0
    mask = np.uint32((1 << bits) - 1)
    for first in range(0, len(values), GROUP):
        x = values[first : first + GROUP]
        word = _scale_of(x, least, inverses)
        scale, offset = from_float16(word), np.float32(word & 1) / np.float32(2)
        inverse = np.float32(1) / scale if scale else np.float32(0)
        blocks[place], blocks[place + 1] = word & 255, word >> 8
        place += 2
        held, count = np.uint32(0), np.uint32(0)  # bits that are not yet a byte
        for k in range(len(x)):
            value = x[k]
            level = min(max(np.rint(value * inverse - offset), least), -least - np.float32(1))
            missed = value - scale * (level + offset)
            square, error = square + value * value, error + missed * missed
            rest[first + k] = missed
            held |= (np.uint32(np.int32(level)) & mask) << count
            count += np.uint32(bits)
            if count >= 8:
                blocks[place], held = held & np.uint32(255), held >> np.uint32(8)
                place, count = place + 1, count - np.uint32(8)
        if count:  # the last group may end within a byte
            blocks[place] = held
    return square, error


@compiled  # not reordered: the same to the bit as `core.quantize.decode`
def _decode(blocks: Any, bits: int, unit: float, start: int, out: Any) -> None:
    half, size, stop = 1 << (bits - 1), 2 + GROUP * bits // 8, start + len(out)
    for first in range(start // GROUP * GROUP, stop, GROUP):
        place = first // GROUP * size
        word = np.uint16(blocks[place]) | np.uint16(blocks[place + 1]) << np.uint16(8)
        zero = np.float32(half) - np.float32(word & 1) / np.float32(2)
        step = from_float16(word) * np.float32(unit)
        for k in range(max(start - first, 0), min(stop - first, GROUP)):
            at, shift = place + 2 + (k * bits >> 3), k * bits & 7
            code = np.uint32(blocks[at]) >> np.uint32(shift)
            if shift + bits > 8:
                code |= np.uint32(blocks[at + 1]) << np.uint32(8 - shift)
            level = code & np.uint32(2 * half - 1) ^ np.uint32(half)
            out[first + k - start] = step * (np.float32(level) - zero)
