"""Fisher merging and RegMean: statistics of each task's model, and the merge by them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tvb_mergekit.core.basis import Linear, Step
from tvb_mergekit.core.learned import FisherMean, regression_mean
from tvb_mergekit.learn import statistics
from tvb_mergekit.learn.descent import passing
from tvb_mergekit.learn.models import bases_of, check_mixture, check_untied, mixtures_of
from tvb_mergekit.learn.work import Request, Work
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.matrices import merge_one
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.stream import Item, Part, Sink


class StatisticsMethod(Work):
    """Fisher merging or RegMean.

    Attributes:
        dimensions: for each weight of a linear layer, the dimension of its inputs.
    """

    def __init__(self, request: Request, plan: Plan) -> None:
        check_mixture(plan, request.mixture)
        super().__init__(request, plan)
        self.fisher = request.method == "fisher"
        self.dimensions = self.models.dimensions()
        self.mixtures = torch.zeros(0)

    @property
    def disk(self) -> int:
        """The bytes of the statistics, one file a task."""
        sizes = {item.name: item.shape for item in self.plan.tasks.items}
        squares = (sizes[name][where] ** 2 for name, where in self.dimensions.items())
        return 4 * len(self.tasks) * sum(map(math.prod, sizes.values()) if self.fisher else squares)

    @property
    def outputs(self) -> list[Path]:
        return [self.place / f"{number}.safetensors" for number in range(len(self.tasks))]

    def learn(self) -> None:
        self.mixtures = mixtures_of(self.plan, self.request.mixture)
        count = sum(map(len, self.examples.values()))
        update = self.plan.engine.progress(self.method, count, "example")
        for task, file in zip(self.tasks, self.outputs, strict=True):
            save_file(self._sums(task, update), file)
        self.passes = count, count * max(1, self.request.samples) * self.fisher

    def _sums(self, task: str, update: Any) -> dict[str, Tensor]:
        request, examples = self.request, self.examples[task]
        model = self.models.load(task)
        parameters = self.models.named(model, task)
        with passing(self.device, self.dtype):
            if self.fisher:
                check_untied(parameters, f"the model of {task}")
                seed, samples = f"{request.seed} {task}", request.samples
                return statistics.fisher(model, parameters, examples, samples, seed, update)
            layers = statistics.linear_layers(model)
            places = {n: id(p) for n, p in parameters.items() if n in self.dimensions}
            linear = {name: layers[place] for name, place in places.items() if place in layers}
            return statistics.grams(model, linear, examples, update)

    def merge_into(self, plan: Plan, sink: Sink, items: Sequence[Item]) -> None:
        bases, encoder = bases_of(plan), self.mixtures
        files = [Checkpoint.open(file) for file in self.outputs]
        held = set.intersection(*(set(file.tensors) for file in files))
        if self.request.normalize:
            names = sorted(held)  # a sum in one order
            totals = [sum(_sum(f.tensor(n)) for n in names) for f in files]
            scales = [1 / total if total else 0.0 for total in totals]
            encoder = torch.tensor(scales, dtype=torch.float64)[:, None] * encoder
        # Tensor -> the tensor with its statistics. Without any, it is the mean of the bases.
        known = {i.name: i.counted_as for i in items if i.tunables and i.counted_as in held}
        mean: Step = Linear.of(bases.mean(1, keepdim=True), add_base=True)
        # A mean of T/M task vectors becomes their sum under `lambda_scale: tasks`.
        bases = bases * plan.basis.scale
        weighted: Step = FisherMean(bases, encoder)

        def with_sums(item: Item) -> Item:
            parts = (Part.of(file, known[item.name], "delta") for file in files)
            return replace(item, inputs=(*item.inputs, *parts))

        if self.fisher:
            items = [with_sums(item) if item.name in known else item for item in items]
        update = plan.engine.progress("Merged model", sum(item.nbytes for item in items))
        engine = plan.engine.under(update)
        for by_data, group in itertools.groupby(items, lambda item: item.name in known):
            some = list(group)
            if not by_data or self.fisher:
                step = weighted if by_data else mean
                steps = {item.name: step for item in some if item.tunables}
                combine_pass(some, steps, sink, engine)
                continue
            for item in some:
                name = known[item.name]
                one = partial(self._regression, name, encoder, files)
                merge_one(item, bases, one, sink, engine)
                update(item.nbytes)

    def _regression(self, name: str, encoder: Tensor, files: Any, bases: Tensor) -> Tensor:
        how = ((file.tensor(name) for file in files), encoder, self.request.off_diagonal)
        if self.dimensions[name] == 1:
            return regression_mean(name, bases, *how)
        return regression_mean(name, bases.mT, *how).T

    def facts(self) -> dict[str, Any]:
        request = self.request
        return {
            "mixture": request.mixture,
            "normalize": request.normalize,
            "seed": request.seed,
            "subsample": request.subsample,
            "samples": request.samples,
            "precision": request.precision,
            "off_diagonal": None if self.fisher else request.off_diagonal,
            "tasks": self.data_facts(),
        }


def _sum(tensor: Tensor) -> float:
    """In float64, without a copy of a complete embedding."""
    return sum(float(part.double().sum()) for part in tensor.reshape(-1).split(2**22))
