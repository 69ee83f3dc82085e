"""A first call of the compiled loops, which imports most of numba: `processes` forks after it."""

import torch
from passing import combine, gram_of

from tvb_mergekit.core.quantize import Width, block_bytes
from tvb_mergekit.tensors import codes
from tvb_mergekit.tensors.stream import held_item
from tvb_mergekit.tensors.writing import MemorySink

ITEMS = [held_item("w", torch.ones(3), [torch.zeros(3)])]
gram_of(ITEMS, ["task"])
combine(ITEMS, torch.ones(1, 1), MemorySink(1), add_base=True)
CODED = torch.empty(block_bytes(3, Width(2)), dtype=torch.uint8)
codes.encode(torch.ones(3), Width(2), torch.empty(3), CODED)
codes.decode(CODED, Width(2), 1.0, 0, 3, torch.empty(3))
