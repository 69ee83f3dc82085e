"""The passes of `tvb_mergekit.tensors.passes` on a few items, as tests ask for them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.core.basis import Combination, Step, Tunables
from tvb_mergekit.core.gram import GramSums
from tvb_mergekit.tensors.merging import merge_items
from tvb_mergekit.tensors.output import MemorySink
from tvb_mergekit.tensors.passes import combine_pass, gram_pass
from tvb_mergekit.tensors.stream import Engine, Item, Part, Sink


def held_item(
    name: str, base: Tensor, models: Sequence[Tensor], out: torch.dtype = torch.float32
) -> Item:
    """An item of tensors in memory."""
    parts = tuple(map(Part.in_memory, models))
    return Item(name, tuple(base.shape), Part.in_memory(base), parts, out)


def gram_of(
    items: Sequence[Item],
    tasks: Sequence[str],
    engine: Engine = Engine(),
    **how: Any,
) -> GramSums:
    """The sums of a Gram pass."""
    return gram_pass(items, tasks, engine, **how)


def combine(
    items: Sequence[Item],
    matrix: Tensor,
    sink: Sink,
    engine: Engine = Engine(),
    *,
    add_base: bool = False,
    **how: Any,
) -> None:
    """Give `sink` the columns of task vectors @ matrix; items without inputs stay the base's."""
    names = [item.name for item in items if item.inputs]
    combine_pass(items, dict.fromkeys(names, Step.of(matrix, add_base)), sink, engine, **how)


def merge_tensor(
    basis: Combination,
    name: str,
    base: Tensor,
    models: Sequence[Tensor],
    tunables: Tunables,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """One merged tensor in `dtype`, on the base's device."""
    item = replace(held_item(name, base, models, dtype), tunables=tunables)
    sink = MemorySink([item])
    merge_items(basis, [item], sink, Engine(device))
    return sink.states[0][name].to(base.device)
