"""Task vectors at 1, 2, 3, 4 or 8 bits an element: what their codes mean, and who gets how many.

A tensor is flattened and cut into groups of 64 elements, the last of which may be shorter. Element
j of a group is `unit * scale * (q_j + h)`: the group's float16 `scale`, which may be negative; an
integer q_j of b bits, -2^(b-1) ... 2^(b-1) - 1 in two's complement; and h, 1/2 where the lowest bit
of the scale's mantissa is set and 0 where it is not. With h = 0 zero is exact, and one sign has a
longer side; with h = 1/2 the levels are symmetric, and one bit is sign times magnitude. `unit` is
a power of two for a whole vector, so that scales fit float16 however small a task vector is.

In memory and in files a group is a block of bytes: the scale, then the codes as a stream of bits:
code j takes bits b j ... b j + b - 1, the least first. A whole block is 2 + 8 b bytes; a last group
of n elements takes 2 + ceil(n b / 8). `tensors.codes` has the same compiled for a CPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GROUP = 64  # elements to a scale
BITS = (1, 2, 3, 4, 8)
CHOICES = (0, *BITS)  # of each tensor where bits are mixed
LEAST_BITS = 0.1  # in the mean


def block_bytes(numel: int, bits: int) -> int:
    """How many bytes the blocks of a tensor take; none at 0 bits, which all decode to 0."""
    if not bits:
        return 0
    groups, rest = divmod(numel, GROUP)
    return groups * (2 + 8 * bits) + (2 + -(-rest * bits // 8) if rest else 0)


def unit_of(norm: float, numel: int) -> float:
    """The power of two for a vector of this norm: 16 times its root mean square, about.

    Scales from 2^-20 to 2^20 of the root mean square are float16 numbers of full precision then.
    """
    if not (norm > 0 and math.isfinite(norm)):
        return 1.0
    return 2.0 ** min(127, max(-126, round(math.log2(norm / math.sqrt(numel))) + 4))


def decode(blocks: Tensor, bits: int, unit: float, numel: int) -> Tensor:
    """The elements [numel] in float32 that blocks (uint8) stand for, on the blocks' device."""
    half = 1 << (bits - 1)
    size = 2 + 8 * bits
    whole = torch.nn.functional.pad(blocks, (0, -len(blocks) % size)).view(-1, size)
    scales = whole[:, :2].contiguous().view(torch.float16)
    codes = whole[:, 2:].contiguous()
    if bits == 8:
        levels = codes.view(torch.int8).float()
    else:
        places = torch.arange(8, dtype=torch.int32, device=blocks.device)
        each = codes.view(-1, bits).int() << 8 * places[:bits]  # b bytes hold 8 codes
        words = each.sum(1, dtype=torch.int32)[:, None]
        values = (words >> bits * places) & (2 * half - 1)
        levels = ((values ^ half) - half).float().view(-1, GROUP)
    offset = (scales.view(torch.int16) & 1).float() / 2
    return (scales.float() * unit * (levels + offset)).view(-1)[:numel]


def mean_bytes(numels: Sequence[int], bits: float) -> int:
    """The bytes of tensors of these sizes at `bits` in the mean: between two of CHOICES, as far
    between their bytes."""
    high = next(choice for choice in CHOICES if choice >= bits)
    low = max(choice for choice in CHOICES if choice <= bits)
    more = 0.0 if high == low else (bits - low) / (high - low)
    sizes = (sum(block_bytes(numel, choice) for numel in numels) for choice in (low, high))
    below, above = sizes
    return int(below + more * (above - below))


def choose_bits(
    errors: NDArray[np.float64],
    numels: Sequence[int],
    most: int,
    limits: NDArray[np.int64],
    owners: Sequence[int],
) -> NDArray[np.int64]:
    """The bits of each tensor [K] with the least sum of errors in `most` bytes, as far as one
    Lagrange multiplier finds it; deterministic.

    A multiplier chooses points on the lower convex hull of each tensor's errors over bytes. So the
    hulls' steps are taken in the order of the error that a byte saves, each as long as it fits; but
    first, if it fits, the best step of each vector, so that none is lost beside larger ones.

    Args:
        errors: the squared error of each tensor at each of CHOICES, [K, 6].
        numels: [K].
        limits: the most bits that each may get, [K].
        owners: the vector that each is of, [K].
    """
    bits = np.zeros(len(numels), np.int64)
    steps: list[tuple[float, int, int, int]] = []  # (-error saved by a byte, tensor, bits, bytes)
    hulls = [
        _hull([block_bytes(n, b) for b in CHOICES if b <= limit], each.tolist())
        for n, limit, each in zip(numels, limits.tolist(), errors, strict=True)
    ]
    for tensor, hull in enumerate(hulls):
        for (size, error, _), (more, less, place) in itertools.pairwise(hull):
            steps.append(((less - error) / (more - size), tensor, CHOICES[place], more - size))
    steps.sort()
    firsts: dict[int, tuple[float, int, int, int]] = {}  # of each vector
    for step in steps:
        _, tensor, choice, size = step
        if size == block_bytes(numels[tensor], choice) <= most:
            firsts.setdefault(owners[tensor], step)
    chosen = set(firsts.values())
    left, full = most, set[int]()  # a later step of a tensor builds on the one before
    for _, tensor, choice, size in (*firsts.values(), *(s for s in steps if s not in chosen)):
        if tensor in full or size > left:
            full.add(tensor)
            continue
        left -= size
        bits[tensor] = choice
    # What was left over, too little for the next step, may make one width for all the better.
    sizes = {width: sum(block_bytes(n, width) for n in numels) for width in CHOICES}
    width = max(w for w, size in sizes.items() if size <= most and w <= min(limits, default=0))
    uniform = np.full(len(numels), width)
    return min((bits, uniform), key=lambda each: _total(errors, each))


def _total(errors: NDArray[np.float64], bits: NDArray[np.int64]) -> float:
    places = np.searchsorted(CHOICES, bits)
    return float(np.take_along_axis(errors, places[:, None], 1).sum())


def _hull(sizes: Sequence[int], errors: Sequence[float]) -> list[tuple[int, float, int]]:
    """The lower convex hull, falling, of errors over bytes: (bytes, error, place)."""
    hull: list[tuple[int, float, int]] = []
    for place, point in enumerate(zip(sizes, errors, strict=False)):
        if hull and (point[1] >= hull[-1][1] or point[0] == hull[-1][0]):  # no gain; empty
            continue
        while len(hull) > 1 and _slope(hull[-2], point) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append((*point, place))
    return hull


def _slope(left: Sequence[float], right: Sequence[float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])
