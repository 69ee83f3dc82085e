"""AdaMerging and aTLAS: coefficients of the bases, and the merge by them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tvb_mergekit.core.merge import Linear, Step
from tvb_mergekit.learn import kept
from tvb_mergekit.learn.batches import shuffled
from tvb_mergekit.learn.gradients import GradientMethod
from tvb_mergekit.learn.mixtures import bases_of
from tvb_mergekit.learn.moving import PER, Coefficients, Rows
from tvb_mergekit.learn.work import CostEstimate
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.tensors.matrices import slice_of
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.stream import Item, Sink


class CoefficientMethod(GradientMethod):
    """Learns c for the merge theta_0 + sum_m c_m B_m, for each layer, tensor or block."""

    def costs(self) -> CostEstimate:
        bases = self.most_bases
        # Coefficients, their gradients, moments and best values, and the start.
        memory = self._memory(bases) + 32 * self.rows.count * bases
        return self.estimate(*self._passes(1), memory, 0)

    @property
    def rows(self) -> Rows:
        return Rows.of(self.plan.tasks.names, self.per, self.request.blocks)

    @property
    def per(self) -> PER:
        return "layer" if self.method == "adamerging" else "tensor"

    @property
    def outputs(self) -> list[Path]:
        return [self.place / "coefficients.safetensors"]

    def _own_facts(self) -> dict[str, Any]:
        adamerging, request = self.method == "adamerging", self.request
        facts = {"per": self.per, "blocks": request.blocks, "nonnegative": request.nonnegative}
        return {**facts, "start": self._start().tolist()} if adamerging else facts

    def _start(self) -> Tensor:
        """The first coefficients, [rows, M] float64.

        aTLAS begins at 0. AdaMerging begins at the recipe's addition; a row gets the mean lambda
        of its tensors.
        """
        plan, basis, rows = self.plan, self.plan.basis, self.rows
        assert basis is not None
        columns = bases_of(plan).shape[1]
        if self.method != "adamerging":  # a square has no gradient at 0
            start = 0.1 if self.request.nonnegative else 0.0
            return torch.full((rows.count, columns), start).double()
        found: list[list[float]] = [[] for _ in range(rows.count)]
        for item in plan.items():
            if item.tunables is not None:
                found[rows.first[str(item.counted_as)]].append(item.tunables.lambda_)
        lambdas = torch.tensor([sum(some) / len(some) for some in found], dtype=torch.float64)
        addition = torch.ones(columns, dtype=torch.float64)
        if plan.recipe.store is not None:  # its bases may stand for several tasks
            addition = basis.addition[:columns] / torch.tensor(plan.recipe.weights).double()
        return basis.scale * torch.outer(lambdas, addition)

    def learn(self) -> None:
        request, wanted, file = self.request, self._wanted(), self.outputs[0]
        if self._is_finished(file, wanted):
            return
        self._prepare(1)
        bases, rows = self.models.stacked(bases_of(self.plan)), self.rows
        moving = Coefficients(self.base, bases, rows, self._start(), request.nonnegative)
        train = [split.train for split in self.splits]
        held = [example for split in self.splits for example in split.held]
        seed = request.seed
        history = self._descend(moving, lambda epoch: shuffled(train, f"{seed} {epoch}"), held)
        values = {"coefficients": moving.values.detach()}
        wanted["rows"] = list(rows.titles)
        self._finish(history, wanted, lambda facts: kept.save(file, kept.LEARNED, values, facts))

    def merge_into(self, plan: Plan, sink: Sink, items: Sequence[Item]) -> None:
        values, rows = load_file(self.outputs[0])["coefficients"], self.rows
        weights = values.double() @ bases_of(plan).T  # of the plan's vectors
        pieces, steps = list[Item](), dict[str, Step]()
        joined = Joined(sink, {item.name: item for item in items})
        for item in items:
            if item.tunables is None:
                pieces.append(item)
                continue
            own = weights[rows.of_tensor(str(item.counted_as))]
            for number, (first, piece) in enumerate(blocks_of(item, rows.blocks)):
                name = item.name if rows.blocks == 1 else f"{item.name}, block {number}"
                joined.places[name] = item.name, first
                pieces.append(replace(piece, name=name))
                steps[name] = Linear([[(1.0, own[number])]])
        combine_pass(pieces, steps, joined, plan.engine)


class Joined:
    """A `stream.Sink` that hands pieces of tensors on as parts of these tensors.

    Attributes:
        places: for each piece its tensor, and its first element there.
    """

    def __init__(self, sink: Sink, items: Mapping[str, Item]) -> None:
        self._sink, self._items = sink, items
        self.places: dict[str, tuple[str, int]] = {}

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        name, first = self.places.get(item.name, (item.name, 0))
        self._sink.write(self._items[name], first + start, first + stop, values)


def blocks_of(item: Item, blocks: int) -> list[tuple[int, Item]]:
    """The first element of each block, and the block, as `torch.tensor_split` cuts the entries.

    Empty blocks are left out, except the first.
    """
    if blocks == 1:
        return [(0, item)]
    least, more = divmod(item.numel, blocks)
    sizes = [least + (number < more) for number in range(blocks)]
    starts = [0, *itertools.accumulate(sizes)]
    return [
        (start, slice_of(item, start, (size,)))
        for start, size in zip(starts, sizes, strict=False)
        if size or not start
    ]
