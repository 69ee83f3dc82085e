"""Fisher and RegMean: each task's model is visited once; what is summed of it lies in a file."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tvb_mergekit.core.gram import block_budget
from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.learn import kept, statistics
from tvb_mergekit.learn.descent import passing
from tvb_mergekit.learn.merging import ByStatistics, layer_bytes, mixtures_of
from tvb_mergekit.learn.running import Costs, Request, Work
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.progress import bars
from tvb_mergekit.store.bits import slugs
from tvb_mergekit.tensors import ranks

LOG = logging.getLogger(__name__)


class Visits(Work):
    """Statistics of the models of the tasks; of several processes each visits its share of them."""

    folder = "statistics"

    def __init__(self, request: Request, plan: Plan) -> None:
        super().__init__(request, plan)
        self.dimensions = self.models.dimensions()
        self.told: list[Mapping[str, Any]] = []

    def costs(self) -> Costs:
        request, fisher = self.request, self.request.method == "fisher"
        forward = sum(used for used, _ in self.examples_used.values())
        sizes, merging = {item.name: item.shape for item in self.plan.tasks.items}, 0
        if fisher:  # the sums, and the gradient of one tensor
            numels = [math.prod(shape) for shape in sizes.values()]
            held, stored = 4 * (sum(numels) + max(numels)), 4 * sum(numels)
        else:  # sums in float64, and a product in float32
            layers = {name: (sizes[name], where) for name, where in self.dimensions.items()}
            squares = [shape[where] ** 2 for shape, where in layers.values()]
            held, stored = 8 * sum(squares) + 8 * max(squares, default=0), 4 * sum(squares)
            each = (layer_bytes(shape, self.most_bases, where) for shape, where in layers.values())
            merging = max(each, default=0)
        visiting = self.model_bytes + held
        activations: int | None = 0
        if self.models.stored is not None:  # whose vectors are decoded into the model
            visiting += block_budget()
        if self.files:
            activations = self.models.activations(1, self.longest, backward=fisher)
        else:
            visiting = stored = 0
        backward = forward * max(1, request.samples) * fisher
        return Costs(
            forward, backward, max(visiting, merging), activations, stored * len(self.tasks)
        )

    def known(self) -> None:
        for task, file in self._places().items():
            told = kept.told_in(file, kept.STATISTICS)
            if told is None:
                raise UserError(f"--from {self.request.source}: no statistics of {task} ({file})")
            if told["weights"] != self.models.weights(task):
                raise UserError(f"{file}: statistics of another model than this recipe's {task}")
            self.told.append(told)

    @property
    def outputs(self) -> list[Path]:
        return list(self._places().values())

    def _places(self) -> dict[str, Path]:
        """Task -> the file of its statistics."""
        names = (f"{name}.safetensors" for name in slugs(self.tasks))
        return {task: self.place / name for task, name in zip(self.tasks, names, strict=True)}

    def learn(self) -> ByStatistics:
        request, files = self.request, self._places()
        mixtures = mixtures_of(self.plan, request.mixture)
        if request.source is None:
            wanted = self._wanted()
            self.told = list(wanted.values())
            done = [task for task in self.tasks if files[task].is_file()]
            for task in done:
                kept.check_same(files[task], kept.STATISTICS, wanted[task])
            if done:
                LOG.warning("--resume: the statistics of %s are there", listed(done))
            left = [task for task in self.tasks if task not in done]
            world = ranks.world()
            mine = left[world.rank :: world.size]
            total = sum(wanted[task]["examples"] for task in mine)
            tell = bars(request.options.quiet)(request.method, total, "example")
            for task in mine:
                kept.save(files[task], kept.STATISTICS, self._sums(task, tell), wanted[task])
            forward = sum(told["examples"] for told in self.told)
            backward = forward * max(1, request.samples) * (request.method == "fisher")
            self.passes = forward, backward
            world.collect(None)
        return ByStatistics(
            request.method,
            self.outputs,
            mixtures,
            self.dimensions,
            request.off_diagonal,
            request.normalize,
            self.write,
        )

    def _wanted(self) -> dict[str, dict[str, Any]]:
        """Task -> what its statistics must be of."""
        request = self.request
        return {
            file.task: {
                "method": request.method,
                "task": file.task,
                "weights": self.models.weights(file.task),
                "file": os.path.abspath(file.path),
                "sha256": file.sha256,
                "lines": len(file.records),
                "examples": file.count(self.share),
                "seed": request.seed,
                "samples": request.samples,
                "precision": request.precision,
            }
            for file in self.files
        }

    def _sums(self, task: str, tell: Any) -> dict[str, torch.Tensor]:
        """The statistics of one task."""
        request, examples = self.request, self.examples[task]
        path = examples[0].path
        model = self.models.load(task)
        parameters = self.models.named(model, task)
        with passing(self.device, self.dtype):
            if request.method == "fisher":
                seed, samples = f"{request.seed} {task}", request.samples
                return statistics.fisher(model, parameters, examples, path, samples, seed, tell)
            layers = statistics.linear_layers(model)
            places = {n: id(p) for n, p in parameters.items() if n in self.dimensions}
            linear = {name: layers[place] for name, place in places.items() if place in layers}
            return statistics.grams(model, linear, examples, path, tell)

    def facts(self) -> dict[str, Any]:
        regmean = self.request.method == "regmean"
        return {
            "mixture": self.request.mixture,
            "seed": self.request.seed,
            "subsample": self.request.subsample,
            "normalize": self.request.normalize,
            "off_diagonal": self.request.off_diagonal if regmean else None,
            "tasks": self.told,
        }
