"""WEMoE over bases: learns routers that combine the bases of the MLPs for each sequence.

Tang et al., "Merging Multi-Task Models via Weight-Ensembling Mixture of Experts" (ICML 2024). Their
routers see the mean over tokens of their output; with one layer that is the output for the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from tvb_mergekit.errors import UserError
from tvb_mergekit.learn.data import Batch
from tvb_mergekit.learn.descent import Moving
from tvb_mergekit.learn.gradients import GradientMethod
from tvb_mergekit.learn.models import bases_of
from tvb_mergekit.learn.work import Request, save
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.store.attach import LiveSink
from tvb_mergekit.store.routing import ROUTERS, Routed, routed_parameters, router_of
from tvb_mergekit.tensors.merging import merge_items
from tvb_mergekit.tensors.stream import Item, Sink


class Routers(Moving):
    """The routers of a model as variables. Its weights do not move."""

    def __init__(self, routed: Routed) -> None:
        super().__init__({}, {})
        self.routed = routed
        self.variables = [p for router in routed.routers.values() for p in router.parameters()]

    def begin(self, batch: Batch) -> None:
        """Note the tokens of the prompts: those up to the first one whose successor counts."""
        counted = batch.counted.long()
        self.routed.prompts = (counted.cumsum(1) == counted) & batch.mask.bool()

    def theta(self, name: str) -> NoReturn:
        raise AssertionError("routers move no weights")


class Wemoe(GradientMethod):
    """Learns R_l for the linear layers in MLPs. All tensors are merged by the recipe."""

    how = "merged by the recipe, and have routers for the MLPs"

    def __init__(self, request: Request, plan: Plan) -> None:
        super().__init__(request, plan)
        config: Any = self.models.empty.config
        self.width = int(config.get_text_config().hidden_size)
        if request.learning_rate is None:  # a step moves r by the rate times the sum of |inputs|
            self.schedule = replace(self.schedule, rate=self.schedule.rate / self.width)
        self.routed = self._routed()

    def _routed(self) -> dict[str, str]:
        """The tensors to route -> the name of the MLP.

        Raises:
            UserError: there are none.
        """
        model, every = self.models.empty, routed_parameters(self.models.empty)
        found = {name: every[name] for name in self.models.named(model) if name in every}
        if not found:
            raise UserError(
                "wemoe routes the linear layers in modules named mlp, ffn or feed_forward, and the "
                "merge moves none of them; choose another method"
            )
        return found

    def _sizes(self, bases: int) -> list[int]:
        """The sizes of a router's layers, from that of a token in front of an MLP."""
        return [self.width] * self.request.depth + [bases]

    @property
    def outputs(self) -> list[Path]:
        return [self.place / ROUTERS]

    def _own_facts(self) -> dict[str, Any]:
        lambdas = dict.fromkeys(i.tunables.lambda_ for i in self.plan.items() if i.tunables)
        own = {key: getattr(self.request, key) for key in ("unlabeled", "depth")}
        settings = self.plan.recipe.settings
        merge = {"merge_method": settings.method, **settings.in_force()}
        return {**own, "lambda": [*lambdas], "merge": merge}

    def _routers(self) -> dict[str, nn.Sequential]:
        """Routers whose outputs are 0, so that the model is the one merged by the recipe."""
        sizes = self._sizes(bases_of(self.plan).shape[1])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.request.seed)
            found = {mlp: router_of(sizes) for mlp in dict.fromkeys(self.routed.values())}
        for router in found.values():
            for parameter in router.to(self.device)[-1].parameters():
                nn.init.zeros_(parameter)
        return found

    def learn(self) -> None:
        self._prepare(1, moves=False)
        held = {name: p.detach() for name, p in self._parameters.items()}
        items = [item for item in self.plan.items() if item.name in held]
        self.merge_into(self.plan, LiveSink(held), [replace(i, out=torch.float32) for i in items])
        stacked = self.models.stacked(bases_of(self.plan), self.routed)
        bases = {name: each.view(-1, *held[name].shape) for name, each in stacked.items()}
        routed = Routed(self._model, self._routers(), bases)
        routed.route()
        self._note(self._descend_on_all(Routers(routed)))
        found = {item.name: bases[item.name].to(item.out) for item in items if item.name in bases}
        for mlp, router in routed.routers.items():
            found |= {f"{mlp}.router.{key}": each for key, each in router.state_dict().items()}
        save(self.outputs[0], found, self.facts())

    def merge_into(self, plan: Plan, sink: Sink, items: Sequence[Item]) -> None:
        merge_items(plan.basis, items, sink, plan.engine)
