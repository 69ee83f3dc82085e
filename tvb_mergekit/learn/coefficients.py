"""AdaMerging and aTLAS: coefficients of the bases, and the merge by them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from tvb_mergekit.core.merge import Linear, Step
from tvb_mergekit.learn import kept
from tvb_mergekit.learn.data import shuffled
from tvb_mergekit.learn.descent import Moving
from tvb_mergekit.learn.gradients import GradientMethod
from tvb_mergekit.learn.models import bases_of
from tvb_mergekit.learn.work import CostEstimate
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.tensors.matrices import slice_of
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.stream import Item, Sink

PER = Literal["layer", "tensor"]
LAYER = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True)
class Rows:
    """The coefficients of each tensor: `blocks` rows, from `first[name]` on."""

    first: Mapping[str, int]
    titles: Sequence[str]
    blocks: int = 1

    @classmethod
    def of(cls, names: Sequence[str], per: PER, blocks: int = 1) -> Rows:
        """A row for each tensor, or for each layer and each tensor outside the layers.

        Args:
            blocks: rows of each tensor, one for each piece by `torch.tensor_split`.
        """
        titles, first = dict[str, int](), dict[str, int]()
        for name in names:
            layer = LAYER.match(name) if per == "layer" else None
            first[name] = titles.setdefault(layer[1] if layer else name, blocks * len(titles))
        return cls(first, list(titles), blocks)

    def of_tensor(self, name: str) -> slice:
        return slice(self.first[name], self.first[name] + self.blocks)

    @property
    def count(self) -> int:
        return self.blocks * len(self.titles)


class Coefficients(Moving):
    """theta_0 + sum_m c_m B_m, with c [M] for each layer, tensor or block of a tensor.

    AdaMerging (Yang et al., ICLR 2024) and aTLAS (Zhang et al., NeurIPS 2024) over bases.
    """

    def __init__(
        self,
        base: Mapping[str, Tensor],
        bases: Mapping[str, Tensor],
        rows: Rows,
        start: float | Tensor,
        nonnegative: bool = False,
    ) -> None:
        """Begin at c = `start`, a number or [rows, M].

        Args:
            nonnegative: learn square roots of c.
        """
        super().__init__(base, bases)
        self.rows, self.nonnegative = rows, nonnegative
        example = next(iter(bases.values()))
        value = example.new_zeros(rows.count, example.shape[0]) + torch.as_tensor(start).to(example)
        if nonnegative:
            value.sqrt_()
        self.variables = [value.requires_grad_()]

    @property
    def values(self) -> Tensor:
        """c [rows, M]."""
        (value,) = self.variables
        return value.square() if self.nonnegative else value

    def theta(self, name: str) -> Tensor:
        own, bases = self.values[self.rows.of_tensor(name)], self.bases[name]
        pieces = bases.tensor_split(self.rows.blocks, dim=1)
        moved = [row @ piece for row, piece in zip(own, pieces, strict=True)]
        return torch.cat(moved).add(self.base[name])


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
