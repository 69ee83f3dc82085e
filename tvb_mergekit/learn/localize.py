"""Localize-and-Stitch: a mask of each basis, and the merge of the masked bases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tvb_mergekit.core.basis import Step
from tvb_mergekit.core.learned import Stitch
from tvb_mergekit.learn.data import drawn
from tvb_mergekit.learn.descent import History, Moving
from tvb_mergekit.learn.gradients import GradientMethod
from tvb_mergekit.learn.models import base_names, bases_of, check_mixture, mixtures_of
from tvb_mergekit.learn.work import Request, save
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.store.routing import LEARNED
from tvb_mergekit.tensors.checkpoint import Checkpoint, facts_in
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.stream import Item, Part, Sink, TensorInfo, Weights


class Localize(GradientMethod):
    """Learns masks one after another. The merge is theta_0 and their mean where masks overlap."""

    def __init__(self, request: Request, plan: Plan) -> None:
        if not request.dataless:
            check_mixture(plan, request.mixture)
        super().__init__(request, plan)

    @property
    def outputs(self) -> list[Path]:
        count = bases_of(self.plan).shape[1]
        return [self.place / f"basis-{number:03d}.safetensors" for number in range(count)]

    def _own_facts(self) -> dict[str, Any]:
        names = ("density", "penalty", "dataless")
        return {name: getattr(self.request, name) for name in names}

    def learn(self) -> None:
        request, plan = self.request, self.plan
        matrix, weights = bases_of(plan) * plan.basis.scale, torch.zeros(0)
        if not request.dataless:
            weights = mixtures_of(plan, request.mixture)
            weights = weights / weights.sum(0)
            self._prepare(matrix.shape[1])

        def learn_one(number: int, file: Path) -> None:
            bases = self.models.stacked(matrix[:, number : number + 1])
            mask = Mask(self.base, bases, request.density, penalty=request.penalty)
            if not request.dataless:
                self._note(self._learn_mask(mask, weights[:, number].tolist(), number))
            self._write(file, mask)

        for number, file in enumerate(self.outputs):
            learn_one(number, file)  # its memory is free before the next basis is read

    def _learn_mask(self, mask: Mask, weights: Sequence[float], number: int) -> History:
        factor, seed = len(self.tasks) / len(self.outputs), f"{self.request.seed} {number}"
        train, held = [split.train for split in self.splits], [split.held for split in self.splits]
        own = partial(drawn, weights, train, factor)
        held_out = drawn(weights, held, factor, seed)
        return self._descend(mask, lambda epoch: own(f"{seed} {epoch}"), held_out)

    def _write(self, file: Path, mask: Mask) -> None:
        names, entries = base_names(self.plan), mask.kept()
        packed = {names[n]: torch.from_numpy(np.packbits(e.cpu())) for n, e in entries.items()}
        shapes = {names[item.name]: item.shape for item in self.plan.tasks.items}
        save(file, packed, {**self.facts(), "shapes": shapes})

    def merge_into(self, plan: Plan, sink: Sink, items: Sequence[Item]) -> None:
        masks, names = [Masks(file) for file in self.outputs], base_names(plan)

        def with_masks(item: Item) -> Item:
            own = (Part.of(each, names[str(item.counted_as)]) for each in masks)
            return replace(item, inputs=(*item.inputs, *own))

        stitched = [with_masks(item) if item.tunables else item for item in items]
        moving = [item.name for item in items if item.tunables]
        step: Step = Stitch(bases_of(plan) * plan.basis.scale)
        combine_pass(stitched, dict.fromkeys(moving, step), sink, plan.engine)


class Masks(Weights):
    """The masks of the tensors of one basis, a bit an entry in a file, read as zeros and ones."""

    holds = "delta"

    def __init__(self, file: Path) -> None:
        self.stored, shapes = Checkpoint.open(file), facts_in(file, LEARNED)["shapes"]
        self.tensors = {n: TensorInfo(tuple(shape), torch.float32) for n, shape in shapes.items()}

    def read(self, name: str, start: int, stop: int, out: Tensor) -> Tensor:
        first, last = start // 8, -(-stop // 8)
        packed = self.stored.read(name, first, last, torch.empty(last - first, dtype=torch.uint8))
        bits = np.unpackbits(packed.numpy())[start - 8 * first :][: stop - start]
        return out[: stop - start].copy_(torch.from_numpy(bits))


class Mask(Moving):
    """theta_0 + sigma(S) * B for one basis B [1, n], with the penalty lambda ||sigma(S)||_1.

    Localize-and-Stitch (He et al., 2024); the weighted objective of the paper.
    """

    def __init__(
        self,
        base: Mapping[str, Tensor],
        bases: Mapping[str, Tensor],
        density: float,
        bias: float = 5.0,
        penalty: float = 0.0,
    ) -> None:
        """Set S to `bias` at the largest entries of B, a fraction `density`, else to -`bias`."""
        super().__init__(base, bases)
        self.density, self.penalty = density, penalty
        sizes = {n: torch.where(b[0] != 0, b[0].abs(), -torch.inf) for n, b in bases.items()}
        chosen = largest(sizes, density)
        self.scores = {
            name: torch.where(chosen[name], bias, -bias).to(size.dtype).requires_grad_()
            for name, size in sizes.items()
        }
        self.variables = list(self.scores.values())

    def theta(self, name: str) -> Tensor:
        own = self.scores[name]
        return self.base[name] + own.sigmoid() * self.bases[name][0]

    def merged(self) -> Callable[[str], Tensor]:
        kept = self.kept()
        return lambda name: self.base[name] + self.bases[name][0] * kept[name]

    def add_penalty(self) -> float:
        if not self.penalty:
            return 0.0
        total = 0.0
        for own in self.variables:
            mass = self.penalty * own.sigmoid().sum()
            mass.backward()
            total += float(mass.detach())
        return total

    def kept(self) -> dict[str, Tensor]:
        """The binary mask of each tensor: the largest S where B is not 0, by the density."""
        with torch.no_grad():
            pairs = [(name, own, self.bases[name][0]) for name, own in self.scores.items()]
            sizes = {name: torch.where(basis != 0, own, -torch.inf) for name, own, basis in pairs}
        return largest(sizes, self.density)


def largest(sizes: Mapping[str, Tensor], density: float) -> dict[str, Tensor]:
    """Masks of the largest entries, a fraction `density` over all tensors.

    Compares in float32, leaves out -inf, and prefers the first of equal entries. Bisection finds
    the threshold without a copy of all entries.
    """
    wanted = max(1, round(density * sum(size.numel() for size in sizes.values())))
    low, high = -(2**31), 2**31 - 1
    while low < high:  # the largest threshold that lets enough pass
        middle = (low + high + 1) // 2
        if sum(int((_ordered(size) >= middle).sum()) for size in sizes.values()) >= wanted:
            low = middle
        else:
            high = middle - 1
    found = {name: _ordered(size) > low for name, size in sizes.items()}
    left = wanted - sum(int(mask.sum()) for mask in found.values())
    for name, size in sizes.items():
        if left > 0:
            places = ((_ordered(size) == low) & (size > -torch.inf)).nonzero()[:left, 0]
            found[name][places] = True
            left -= len(places)
    return found


def _ordered(values: Tensor) -> Tensor:
    """Integers in the order of float32 values."""
    bits = values.detach().float().view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
