"""WEMoE over bases: learns routers that combine the bases of the MLPs for each sequence.

Tang et al., "Merging Multi-Task Models via Weight-Ensembling Mixture of Experts" (ICML 2024). Their
routers see the mean over tokens of their output; with one layer that is the output for the mean.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from tvb_mergekit.errors import UserError
from tvb_mergekit.learn import kept
from tvb_mergekit.learn.data import Batch, shuffled
from tvb_mergekit.learn.descent import Moving
from tvb_mergekit.learn.gradients import GradientMethod
from tvb_mergekit.learn.models import bases_of
from tvb_mergekit.learn.work import CostEstimate
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.store.live import LiveSink
from tvb_mergekit.store.routing import BLOCK, ROUTERS, Routed, routed_layers
from tvb_mergekit.tensors.merging import merge_items
from tvb_mergekit.tensors.stream import Item, Sink


class Routers(Moving):
    """The routers of a model as variables. Its weights do not move."""

    def __init__(self, routed: Routed) -> None:
        super().__init__({}, {})
        self.routed = routed
        layers = (layer for layers in routed.routers.values() for layer in layers)
        self.variables = [tensor for layer in layers for tensor in layer]

    def begin(self, batch: Batch) -> None:
        """Note the tokens of the prompts: those up to the first one whose successor counts."""
        counted = batch.counted.long()
        self.routed.prompts = (counted.cumsum(1) == counted) & batch.mask.bool()

    def theta(self, name: str) -> NoReturn:
        raise AssertionError("routers move no weights")


class Wemoe(GradientMethod):
    """Learns R_l for the linear layers in MLPs. All tensors are merged by the recipe's addition."""

    how = "merged by addition, and have routers for the MLPs"

    @property
    def routed(self) -> dict[str, str]:
        """The tensors to route -> the name of the MLP.

        Raises:
            UserError: there are none.
        """
        empty = self.models.empty
        moved, layers = self.models.named(empty), routed_layers(empty)
        weights = {name: mlp for name, mlp in layers.items() if name in moved}
        biases = {f"{name[:-6]}bias": mlp for name, mlp in weights.items()}
        found = weights | {name: mlp for name, mlp in biases.items() if name in moved}
        if not found:
            raise UserError(
                "wemoe routes the linear layers in modules named mlp, ffn or feed_forward, and the "
                "merge moves none of them; choose another method"
            )
        return found

    @property
    def _width(self) -> int:
        """n, the size of a token in front of an MLP."""
        config: Any = self.models.empty.config
        return int(config.get_text_config().hidden_size)

    def costs(self) -> CostEstimate:
        bases, routed = self.most_bases, self.routed
        items = [item for item in self.plan.tasks.items if item.name in routed]
        size = self._width + 1
        routers = (
            len(set(routed.values())) * size * (bases + (self.request.depth - 1) * self._width)
        )
        # Variables, their gradients, moments and best values; combined weights and their gradients.
        largest = max(BLOCK, *(4 * item.numel for item in items))
        memory = 4 * bases * sum(item.numel for item in items) + 20 * routers + 3 * largest
        disk = 4 * routers + bases * sum(item.numel * item.out.itemsize for item in items)
        return self.estimate(*self._passes(1), memory + self.model_bytes * bool(self.files), disk)

    @property
    def outputs(self) -> list[Path]:
        return [self.place / ROUTERS]

    def _own_facts(self) -> dict[str, Any]:
        basis = self.plan.basis
        assert basis is not None
        lambdas = [item.tunables and item.tunables.lambda_ for item in self.plan.items()]
        addition = hashlib.sha256(json.dumps([basis.scale, lambdas]).encode()).hexdigest()
        request = self.request
        return {"unlabeled": request.unlabeled, "depth": request.depth, "addition": addition}

    def _start(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """Routers whose outputs are 0, so that the model is the one merged by addition."""
        n, bases = self._width, bases_of(self.plan).shape[1]
        generator = torch.Generator().manual_seed(self.request.seed)

        def layer(outputs: int, last: bool) -> tuple[Tensor, Tensor]:
            # The authors draw all weights so. A last layer of 0 begins at lambda exactly.
            weight = torch.randn(outputs, n, generator=generator) * (0.0 if last else 0.01)
            both = weight.to(self.device), torch.zeros(outputs, device=self.device)
            return both[0].requires_grad_(), both[1].requires_grad_()

        hidden = self.request.depth - 1
        return {
            mlp: [*(layer(n, False) for _ in range(hidden)), layer(bases, True)]
            for mlp in dict.fromkeys(self.routed.values())
        }

    def learn(self) -> None:
        request, wanted, file = self.request, self._wanted(), self.outputs[0]
        if self._is_finished(file, wanted):
            return
        self._prepare(1, moves=False)
        held = {name: p.detach() for name, p in self._parameters.items()}
        items = [replace(i, out=torch.float32) for i in self.plan.items() if i.name in held]
        self.merge_into(self.plan, LiveSink(held), items)
        shapes = {name: tensor.shape for name, tensor in held.items()}
        stacked = self.models.stacked(bases_of(self.plan), self.routed)
        bases = {name: each.view(-1, *shapes[name]) for name, each in stacked.items()}
        routed = Routed(self._model, self._start(), bases)
        train = [split.train for split in self.splits]
        apart = [example for split in self.splits for example in split.held]
        seed = request.seed
        routed.route()
        moving = Routers(routed)
        history = self._descend(moving, lambda epoch: shuffled(train, f"{seed} {epoch}"), apart)
        found = {i.name: bases[i.name].to(i.out) for i in self.plan.tasks.items if i.name in bases}
        for mlp, layers in routed.routers.items():
            for number, (weight, bias) in enumerate(layers):
                found[f"{mlp}.router.{number}.weight"] = weight.detach()
                found[f"{mlp}.router.{number}.bias"] = bias.detach()
        self._finish(history, wanted, lambda facts: kept.save(file, kept.LEARNED, found, facts))

    def merge_into(self, plan: Plan, sink: Sink, items: Sequence[Item]) -> None:
        assert plan.basis is not None
        merge_items(plan.basis, items, sink, plan.engine)
