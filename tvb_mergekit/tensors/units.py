# mypy: disable-error-code="no-untyped-call, no-any-return, arg-type"
"""Blocks of 16-bit weights as differences from the base, in units in the last place, by numba.

`_order` maps the 16 bits of numbers to integers in the order of the numbers, -0 before +0. The
differences of the orders, modulo 2^16, are symbols: 0, -1, 1, -2, 2 ... They are sorted by the
exponent of the base's element, which decides how large they are. Few different symbols then stand
side by side, and the Huffman codes of zstd are nearly as short as their entropy. `docs/files.md`
has the format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

SECTION = 1024  # bytes of symbols that may get a Huffman code of their own
HEAD = 8  # bytes of two numbers

inlined = numba.njit(nogil=True, error_model="numpy", forceinline=True)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at the first call, and keep the code on disk if a folder can be written."""
    try:
        return numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:
        return numba.njit(nogil=True, error_model="numpy")(function)


@inlined
def _order(bits: Any) -> Any:
    """The order of 16 bits as an int32; its own inverse."""
    return np.int32(np.int16(bits)) ^ ((np.int32(np.int16(bits)) >> 15) & 0x7FFF)


@inlined
def _counts(base: Any, shift: Any, mask: Any) -> Any:
    """Counts of each exponent in four parts of the base: one count would wait for itself."""
    counts, part = np.zeros((4, np.int64(mask) + 1), np.int64), len(base) // 4
    one, two, three, four = counts[0], counts[1], counts[2], counts[3]
    for k in range(part):
        one[base[k] >> shift & mask] += 1
        two[base[k + part] >> shift & mask] += 1
        three[base[k + 2 * part] >> shift & mask] += 1
        four[base[k + 3 * part] >> shift & mask] += 1
    for k in range(4 * part, len(base)):
        four[base[k] >> shift & mask] += 1
    return counts


@inlined
def _pack(symbols: Any, bits: int, made: Any) -> None:
    most, each = np.uint16((1 << bits) - 1), 8 // bits
    for byte in range(-(-len(symbols) // each)):
        word = np.uint16(0)
        for k in range(min(each, len(symbols) - byte * each)):
            word |= min(symbols[byte * each + k], most) << np.uint16(bits * k)
        made[byte] = word


@inlined
def _unpack(stored: Any, bits: int, symbols: Any) -> None:
    most, each = np.uint8((1 << bits) - 1), 8 // bits
    whole = len(symbols) // each
    for byte in range(whole):
        for k in range(each):
            symbols[byte * each + k] = stored[byte] >> np.uint8(bits * k) & most
    for k in range(whole * each, len(symbols)):
        symbols[k] = stored[whole] >> np.uint8(bits * (k - whole * each)) & most


@inlined
def _width(symbols: Any) -> Any:
    """The bits of symbols: 2 if less than an eighth of them does not fit, 4 if a sixteenth."""
    over_two = over_four = 0
    for k in range(len(symbols)):
        over_two += symbols[k] >= 3
        over_four += symbols[k] >= 15
    return 2 if 8 * over_two < len(symbols) else 4 if 16 * over_four < len(symbols) else 8


@compiled
def pack(base: Any, theta: Any, shift: Any, made: Any, cuts: Any) -> Any:
    """Fill `made` with the block, and `cuts` with the ends of sections; returns both lengths.

    Args:
        base, theta: uint16 [n], patterns.
        shift: bits of the mantissa.
        made: uint8, at least 4 n + 300.
        cuts: int64, at least 260.
    """
    shift, mask = np.uint16(shift), np.uint16((1 << (15 - shift)) - 1)
    counts, symbols = _counts(base, shift, mask).sum(0), np.empty(len(base), np.uint16)
    ends = counts[::-1].cumsum()[::-1]  # of the symbols of each exponent
    places = ends - counts
    for k in range(len(base)):
        exponent = base[k] >> shift & mask
        unit = np.int32(np.int16(_order(theta[k]) - _order(base[k])))
        symbols[places[exponent]] = np.uint16((unit << 1) ^ (unit >> 31))
        places[exponent] += 1
    rest, large, far = HEAD + len(counts), 0, 0
    for exponent in range(len(counts) - 1, -1, -1):
        group = symbols[ends[exponent] - counts[exponent] : ends[exponent]]
        bits: Any = _width(group) if len(group) else 0
        made[HEAD + exponent] = bits
        for k in range(len(group)):
            over = np.int64(group[k]) - ((1 << bits) - 1)
            large, far = large + (over >= 0), far + (over >= 255)
    for k in range(4):
        made[k], made[4 + k] = large >> 8 * k & 255, far >> 8 * k & 255
    high, low, place = rest + large, rest + large + far, rest + large + 2 * far
    cuts[0], cuts[1], cuts[2], cuts[3], sections = rest, high, low, place, 4
    for exponent in range(len(counts) - 1, -1, -1):
        group = symbols[ends[exponent] - counts[exponent] : ends[exponent]]
        bits = made[HEAD + exponent]
        for k in range(len(group)):
            over = np.int64(group[k]) - ((1 << bits) - 1)
            if over >= 0:
                made[rest], rest = min(over, 255), rest + 1
            if over >= 255:
                made[high], high = over - 255 >> 8, high + 1
                made[low], low = over - 255 & 255, low + 1
        if bits == 2:  # known bits take half the time
            _pack(group, 2, made[place:])
        elif bits == 4:
            _pack(group, 4, made[place:])
        else:
            _pack(group, 8, made[place:])
        place += (len(group) * bits + 7) // 8
        if place - cuts[sections - 1] >= SECTION:
            cuts[sections], sections = place, sections + 1
    cuts[sections] = place
    return place, sections + 1


@inlined
def _take(base: Any, k: int, shift: Any, mask: Any, places: Any, symbols: Any, theta: Any) -> None:
    """The next symbol of the exponent of element k."""
    exponent = base[k] >> shift & mask
    place = places[exponent]
    places[exponent] = place + np.uint32(1)
    theta[k] = symbols[place]


@compiled
def unpack(stored: Any, base: Any, shift: Any, theta: Any) -> bool:
    """Fill `theta` from a block and its base; False if the block does not fit the base."""
    shift, mask = np.uint16(shift), np.uint16((1 << (15 - shift)) - 1)
    counts, symbols, first = _counts(base, shift, mask), np.empty(len(base), np.uint16), 0
    places = np.empty(counts.shape, np.uint32)  # of the next symbol of each part
    rest = HEAD + np.int64(mask) + 1
    if rest > len(stored):
        return False
    large = far = np.int64(0)
    for k in range(4):
        large, far = large | stored[k] << 8 * k, far | stored[4 + k] << 8 * k
    most_rest, most_high = rest + large, rest + large + far
    high, place = most_rest, most_high + far
    for exponent in range(np.int64(mask), -1, -1):
        count, bits = counts[:, exponent].sum(), stored[HEAD + exponent]
        group, size = symbols[first : first + count], (count * bits + 7) // 8
        if not count:
            continue
        if bits not in (2, 4, 8) or place + size > len(stored):
            return False
        if bits == 2:
            _unpack(stored[place:], 2, group)
        elif bits == 4:
            _unpack(stored[place:], 4, group)
        else:
            _unpack(stored[place:], 8, group)
        for k in range(count):
            if group[k] == (1 << bits) - 1:
                if rest == most_rest:
                    return False
                group[k] += stored[rest]
                if stored[rest] == 255:
                    if high == most_high:
                        return False
                    group[k] += np.uint16(stored[high]) << np.uint16(8) | stored[high + far]
                    high += 1
                rest += 1
        place += size
        for row in range(4):
            places[row, exponent], first = first, first + counts[row, exponent]
    part, one, two, three, four = len(base) // 4, places[0], places[1], places[2], places[3]
    for k in range(part):  # an element waits for the previous one of its exponent and part
        _take(base, k, shift, mask, one, symbols, theta)
        _take(base, k + part, shift, mask, two, symbols, theta)
        _take(base, k + 2 * part, shift, mask, three, symbols, theta)
        _take(base, k + 3 * part, shift, mask, four, symbols, theta)
    for k in range(4 * part, len(base)):
        _take(base, k, shift, mask, four, symbols, theta)
    for k in range(len(base)):  # a loop of its own, in 16 bits, is vectorized
        unit = (theta[k] >> np.uint16(1)) ^ np.uint16(-(theta[k] & np.uint16(1)))
        theta[k] = np.uint16(_order(np.uint16(_order(base[k]) + unit)))
    return place == len(stored) and rest == most_rest and high == most_high
