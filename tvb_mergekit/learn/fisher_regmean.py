"""Fisher merging and RegMean: statistics of each task's model, and the merge by them."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pydantic
import torch
from torch import Tensor

from tvb_mergekit.core.learned import FisherMean, regression_bytes, regression_mean
from tvb_mergekit.core.merge import Linear, Step
from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.learn import kept, statistics
from tvb_mergekit.learn.descent import passing
from tvb_mergekit.learn.models import bases_of, check_mixture, check_untied, mixtures_of
from tvb_mergekit.learn.work import LEARNED, CostEstimate, Request, Work, hash_of
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.store.facts import FOLDER, FileRecord, check_files
from tvb_mergekit.store.forms import slugs
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.checkpoint import Checkpoint, facts_in
from tvb_mergekit.tensors.engine import block_budget
from tvb_mergekit.tensors.matrices import merge_one
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.stream import Item, Part, Sink

LOG = logging.getLogger(__name__)


class LearnedFacts(pydantic.BaseModel):
    """The keys of `learned.json` that --from needs."""

    method: str
    files: dict[str, FileRecord]


class StatisticsMethod(Work):
    """Fisher merging or RegMean. Several processes share the tasks.

    Attributes:
        dimensions: for each weight of a linear layer, the dimension of its inputs.
        tasks_facts: for each task, the facts about its statistics.
    """

    folder = "statistics"

    def __init__(self, request: Request, plan: Plan) -> None:
        check_mixture(plan, request.mixture)
        super().__init__(request, plan)
        self.fisher = request.method == "fisher"
        self.dimensions = self.models.dimensions()
        self.tasks_facts: list[dict[str, Any]] = []
        self.mixtures = torch.zeros(0)

    def costs(self) -> CostEstimate:
        forward = sum(file.count(self.share) for file in self.files)
        sizes, merging = {item.name: item.shape for item in self.plan.tasks.items}, 0
        if self.fisher:  # the sums, and the gradient of one tensor
            numels = [math.prod(shape) for shape in sizes.values()]
            held, stored = 4 * (sum(numels) + max(numels)), 4 * sum(numels)
        else:  # sums in float64, and a product in float32
            layers = {name: (sizes[name], where) for name, where in self.dimensions.items()}
            squares = [shape[where] ** 2 for shape, where in layers.values()]
            held, stored = 8 * sum(squares) + 8 * max(squares, default=0), 4 * sum(squares)
            each = (layer_bytes(shape, self.num_bases, where) for shape, where in layers.values())
            merging = max(each, default=0)
        memory = self.model_bytes + held
        if self.models.stored is not None:  # a store's vectors are decoded into the model
            memory += block_budget()
        if not self.files:
            memory = stored = 0
        backward = forward * max(1, self.request.samples) * self.fisher
        return self.estimate(forward, backward, max(memory, merging), stored * len(self.tasks))

    @property
    def outputs(self) -> list[Path]:
        return [self.place / f"{name}.safetensors" for name in slugs(self.tasks)]

    def finished(self) -> list[Path]:
        """The finished files in OUT.partial, or of --from.

        Raises:
            UserError: a file does not fit.
        """
        source = self.request.source
        if source is None:
            return super().finished()
        if self.request.partial.is_dir():
            LOG.warning("%s is neither used nor deleted (--from)", self.request.partial)
        file = Path(source) / FOLDER / LEARNED
        try:
            found = LearnedFacts.model_validate_json(file.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"--from {source}: not an --out of `tvb learn` ({file})") from error
        if found.method != self.method:
            raise UserError(f"--from {source}: learned by {found.method}, not by {self.method}")
        check_files(self.place, found.files, LEARNED, "restore it, or learn again", checksums=True)
        for task, file in zip(self.tasks, self.outputs, strict=True):
            if not (facts := facts_in(file, kept.STATISTICS)):
                raise UserError(f"--from {source}: no statistics of {task} ({file})")
            if facts["weights"] != self.models.weights(task):
                raise UserError(f"{file}: statistics of another model than this recipe's {task}")
            if facts.get("tensors") != hash_of(sorted(self.tensors)):
                raise UserError(
                    f"{file}: statistics of other tensors than this recipe's (`exclude`)"
                )
            self.tasks_facts.append(facts)
        return self.outputs

    def learn(self) -> None:
        request, world = self.request, ranks.world()
        self.mixtures = mixtures_of(self.plan, request.mixture)
        if request.source is not None:
            return
        files = dict(zip(self.tasks, self.outputs, strict=True))
        self.tasks_facts = self._wanted()
        wanted = {facts["task"]: facts for facts in self.tasks_facts}
        done = world.share(lambda: [task for task in self.tasks if files[task].is_file()])
        for task in done:
            kept.check_same(files[task], kept.STATISTICS, wanted[task])
        if done:
            LOG.warning("--resume: the statistics of %s are complete", listed(done))
        mine = [task for task in self.tasks if task not in done][world.rank :: world.size]
        total = sum(wanted[task]["examples"] for task in mine)
        update = self.plan.engine.progress(self.method, total, "example")
        for task in mine:
            kept.save(files[task], kept.STATISTICS, self._sums(task, update), wanted[task])
        forward = sum(facts["examples"] for facts in self.tasks_facts)
        self.passes = forward, forward * max(1, request.samples) * self.fisher
        world.collect(None)

    def _wanted(self) -> list[dict[str, Any]]:
        keys = ("method", "seed", "samples", "precision")
        same, weights = {key: getattr(self.request, key) for key in keys}, self.models.weights
        same["tensors"] = hash_of(sorted(self.tensors))
        return [{**facts, **same, "weights": weights(facts["task"])} for facts in self.data_facts()]

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
                size = layer_bytes(item.shape, bases.shape[1], self.dimensions[name])
                merge_one(item, bases, one, size, sink, engine)
                update(item.nbytes)

    def _regression(self, name: str, encoder: Tensor, files: Any, bases: Tensor) -> Tensor:
        how = ((file.tensor(name) for file in files), encoder, self.request.off_diagonal)
        if self.dimensions[name] == 1:
            return regression_mean(name, bases, *how)
        return regression_mean(name, bases.mT, *how).T

    def facts(self) -> dict[str, Any]:
        request = self.request
        drawn = {key: getattr(request, key) for key in ("seed", "subsample")}
        return {
            "mixture": request.mixture,
            "normalize": request.normalize,
            **(drawn if request.source is None else dict.fromkeys(drawn)),  # see `tasks`
            "off_diagonal": None if self.fisher else request.off_diagonal,
            "tasks": self.tasks_facts,
        }


def _sum(tensor: Tensor) -> float:
    """In float64, without a copy of a complete embedding."""
    return sum(float(part.double().sum()) for part in tensor.reshape(-1).split(2**22))


def layer_bytes(shape: Sequence[int], bases: int, dimension: int) -> int:
    """Memory to merge a linear layer whose inputs lie in `dimension` of its weight."""
    return regression_bytes(bases, shape[1 - dimension], shape[dimension])
