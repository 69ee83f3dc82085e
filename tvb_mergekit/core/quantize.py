"""Task vectors at 1, 2, 3, 4 or 8 bits an element: what the codes of a zoo mean.

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

import math

import torch
from torch import Tensor

GROUP = 64  # elements to a scale
BITS = (1, 2, 3, 4, 8)


def block_bytes(numel: int, bits: int) -> int:
    """How many bytes the blocks of a tensor take."""
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
