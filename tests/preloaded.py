"""A first call of the compiled loops, which imports most of numba: `processes` forks after it."""

import torch
from passing import combine, gram_of

from tvb_mergekit.tensors.stream import held_item
from tvb_mergekit.tensors.writing import MemorySink

ITEMS = [held_item("w", torch.ones(3), [torch.zeros(3)])]
gram_of(ITEMS, ["task"])
combine(ITEMS, torch.ones(1, 1), MemorySink(1), add_base=True)
