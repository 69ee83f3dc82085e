"""Task vectors at 1, 2, 3, 4 or 8 bits an element: the meaning of codes.

A tensor is flattened and cut into groups of 64 elements; the last group may be shorter. Element j
of a group is `unit * scale * (q_j + h)`:
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

import math
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 64  # elements to a scale
BITS = (1, 2, 3, 4, 8)


class Width(NamedTuple):
    """The code of a tensor's elements."""

    bits: int
    group: int = GROUP
    head: int = 2  # bytes of a group before its elements

    @property
    def block(self) -> int:
        return self.head + self.group * self.bits // 8  # bytes of a complete group


def block_bytes(numel: int, width: Width) -> int:
    """The bytes of a tensor's blocks."""
    groups, rest = divmod(numel, width.group)
    return groups * width.block + (width.head + -(-rest * width.bits // 8) if rest else 0)


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
    whole = torch.nn.functional.pad(blocks, (0, -len(blocks) % width.block)).view(-1, width.block)
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
