"""Task vectors at 1, 2, 3, 4 or 8 bits an element: the meaning of codes, the choice of widths.

A tensor is flattened and cut into groups of 64 elements, or of 1024 for smaller scales per element;
the last group may be shorter. Element j of a group is `unit * scale * (q_j + h)`:
* `unit`, a power of two for all of a vector, lets scales fit float16 for any task vector.
* `scale` is the group's float16, which may be negative.
* q_j is an integer of b bits in two's complement, -2^(b-1) ... 2^(b-1) - 1.
* h is 1/2 if the lowest bit of the scale's mantissa is set, else 0. With h = 0 zero is exact, and
  one sign has one level more. With h = 1/2 levels are symmetric; one bit is sign times magnitude.

In memory and in files a group is a block of bytes: the scale, then the codes as a stream of bits.
Code j is bits b j ... b j + b - 1, the least first. A block of n elements has 2 + ceil(n b / 8)
bytes. `tensors.codes` compiles `decode` for a CPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GROUP = 64  # elements to a scale
LONG = 1024  # elements to a scale if few bits are mixed
BITS = (1, 2, 3, 4, 8)
LEAST_BITS = 0.1  # on average


class Width(NamedTuple):
    """The code of a tensor's elements. At 0 bits all elements are 0, without bytes."""

    bits: int
    group: int = GROUP

    @property
    def block(self) -> int:
        return 2 + self.group * self.bits // 8  # bytes of a complete group


# The widths of a tensor if bits are mixed, in the order of their bytes.
CHOICES = tuple(Width(*each) for each in (
    (0,), (1, LONG), (1,), (2, LONG), (2,), (3, LONG), (3,), (4,), (8,),
))  # fmt: skip


def block_bytes(numel: int, width: Width) -> int:
    """The bytes of a tensor's blocks."""
    if not width.bits:
        return 0
    groups, rest = divmod(numel, width.group)
    return groups * width.block + (2 + -(-rest * width.bits // 8) if rest else 0)


def unit_of(norm: float, numel: int) -> float:
    """The power of two for a vector of this norm: about 16 times its root mean square.

    Then scales from 2^-20 to 2^20 of the root mean square have float16's full precision.
    """
    if not (norm > 0 and math.isfinite(norm)):
        return 1.0
    return 2.0 ** min(127, max(-126, round(math.log2(norm / math.sqrt(numel))) + 4))


def decode(blocks: Tensor, width: Width, unit: float, numel: int) -> Tensor:
    """The elements [numel] float32 of blocks (uint8), on the blocks' device."""
    bits, half = width.bits, 1 << (width.bits - 1)
    padding = -len(blocks) % width.block
    whole = torch.nn.functional.pad(blocks, (0, padding)).view(-1, width.block)
    scales = whole[:, :2].contiguous().view(torch.float16)
    codes = whole[:, 2:].contiguous()
    if bits == 8:
        levels = codes.view(torch.int8).float()
    else:
        places = torch.arange(8, dtype=torch.int32, device=blocks.device)
        each = codes.view(-1, bits).int() << 8 * places[:bits]  # b bytes hold 8 codes
        words = each.sum(1, dtype=torch.int32)[:, None]
        values = (words >> bits * places) & (2 * half - 1)
        levels = ((values ^ half) - half).float().view(-1, width.group)
    offset = (scales.view(torch.int16) & 1).float() / 2
    return (scales.float() * unit * (levels + offset)).view(-1)[:numel]


def mean_bytes(numels: Sequence[int], bits: float) -> int:
    """The bytes of tensors of these sizes at `bits` on average, in groups of 64.

    Linear between the two nearest of 0 and BITS.
    """
    high = next(choice for choice in (0, *BITS) if choice >= bits)
    low = max(choice for choice in (0, *BITS) if choice <= bits)
    more = 0.0 if high == low else (bits - low) / (high - low)
    below, above = (sum(block_bytes(n, Width(each)) for n in numels) for each in (low, high))
    return int(below + more * (above - below))


def bits_within(numels: Sequence[int], room: float) -> float:
    """The bits on average whose codes fit `room` bytes: the inverse of `mean_bytes`."""
    steps = [(bits, mean_bytes(numels, bits)) for bits in (0, *BITS)]
    for (low, below), (high, above) in itertools.pairwise(steps):
        if room < above:
            return max(LEAST_BITS, low + (high - low) * (room - below) / (above - below))
    return BITS[-1]


def choose_widths(
    errors: NDArray[np.float64], numels: Sequence[int], most: int, owners: Sequence[int]
) -> NDArray[np.int64]:
    """Indices into CHOICES [K] with nearly the least sum of errors in `most` bytes; deterministic.

    A Lagrange multiplier would choose points on the lower convex hull of each tensor's errors over
    bytes. So the hulls' steps are made in the order of the error that a byte saves, if they fit.
    The best step of each vector comes first, so that a small vector is not lost next to large ones.

    Args:
        errors: the squared error of each tensor at each of CHOICES, [K, 9].
        numels: [K].
        owners: the vector of each tensor, [K].
    """
    chosen = np.zeros(len(numels), np.int64)
    steps: list[tuple[float, int, int, int]] = []  # (-error saved by a byte, tensor, choice, bytes)
    sizes = np.array([[block_bytes(n, width) for width in CHOICES] for n in numels]).tolist()
    for tensor, corners in enumerate(map(_hull, sizes, errors.tolist())):
        for (size, error, _), (more, less, choice) in itertools.pairwise(corners):
            steps.append(((less - error) / (more - size), tensor, choice, more - size))
    steps.sort()
    firsts: dict[int, tuple[float, int, int, int]] = {}  # the best step of each vector
    for step in steps:
        _, tensor, choice, size = step
        if size == sizes[tensor][choice] <= most:  # a tensor's first step, from 0 bytes
            firsts.setdefault(owners[tensor], step)
    first = set(firsts.values())
    left, full = most, set[int]()  # a later step of a tensor builds on the previous one
    for _, tensor, choice, size in (*firsts.values(), *(s for s in steps if s not in first)):
        if tensor in full or size > left:
            full.add(tensor)
            continue
        left -= size
        chosen[tensor] = choice
    # If bytes are left over, one width for all tensors may have the smaller error.
    totals = np.sum(sizes, axis=0)
    alike = (np.full(len(numels), k) for k in range(len(CHOICES)) if totals[k] <= most)
    return min(
        (chosen, *alike), key=lambda each: float(np.take_along_axis(errors, each[:, None], 1).sum())
    )


def _hull(sizes: Sequence[int], errors: Sequence[float]) -> list[tuple[int, float, int]]:
    """Corners of the falling lower convex hull of errors over bytes: (bytes, error, choice)."""
    hull: list[tuple[int, float, int]] = []
    for choice, point in enumerate(zip(sizes, errors, strict=True)):
        if hull and point[1] >= hull[-1][1]:
            continue
        while len(hull) > 1 and _slope(hull[-2], point) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append((*point, choice))
    return hull


def _slope(left: Sequence[float], right: Sequence[float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])
