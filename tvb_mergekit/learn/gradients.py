"""Methods by gradients: their common part, and AdaMerging and aTLAS, which learn coefficients."""

from __future__ import annotations

import itertools
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from tvb_mergekit.core.basis import Linear, Step
from tvb_mergekit.errors import UserError
from tvb_mergekit.learn.data import (
    Example,
    Split,
    amount,
    entropy,
    held_out,
    response_loss,
    shuffled,
)
from tvb_mergekit.learn.descent import Descent, History, Moving, Schedule
from tvb_mergekit.learn.models import bases_of, check_untied, load_model
from tvb_mergekit.learn.work import Request, Work, save
from tvb_mergekit.names import LAYER
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.tensors.matrices import Joined, slice_of
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.stream import Item, Sink

SCHEDULES = {
    "localize": Schedule(epochs=10, rate=3.0, batch=8, mask=True),
    "adamerging": Schedule(epochs=10, rate=0.001, batch=16),
    "wemoe": Schedule(epochs=10, rate=1.0, batch=16),  # over the size of a hidden state
    "atlas": Schedule(epochs=10, rate=0.1, batch=16, decay=0.1, clip=1.0, cosine=True),
}
PER = Literal["layer", "tensor"]
# Options of all methods by gradients that shape the result.
SHAPING = ("mixture", "seed", "subsample", "held_out", "precision")


def _layers(config: Any) -> int | None:
    return getattr(config.get_text_config(), "num_hidden_layers", None)


class GradientMethod(Work):
    """A method that moves the base's model in steps.

    Attributes:
        base: theta_0 of each tensor that moves, flattened.
        splits: the examples of each task.
        histories: of the descents.
    """

    by_gradient = True

    def __init__(self, request: Request, plan: Plan) -> None:
        super().__init__(request, plan)
        given: dict[str, Any] = {"epochs": request.epochs, "patience": request.patience}
        given |= {"rate": request.learning_rate, "batch": request.batch_size}
        changes = {key: value for key, value in given.items() if value is not None}
        self.schedule = replace(SCHEDULES[request.method], **changes)
        self.base: dict[str, Tensor] = {}
        self.splits: list[Split] = []
        self.histories: list[History] = []
        check_untied(self.models.named(self.models.empty), "the base's model")
        pairs = [(i.name, i.base.name) for i in plan.tensors.items if i.base and i.base.name]
        moved = any(re.findall(r"\d+", one) != re.findall(r"\d+", two) for one, two in pairs)
        if moved or _layers(plan.config) != _layers(self.models.empty.config):
            raise UserError(
                f"`slices` change the base's layers, and {request.method} learns on the base: list "
                "the models under `models`"
            )

    def _passes(self, runs: int) -> int:
        """Forward passes of all runs, if none ends early."""
        used = [file.count(self.share) for file in self.files]
        held = [held_out(some, self.request.held_out) for some in used]
        train = [some - apart for some, apart in zip(used, held, strict=True)]
        factor, epochs = len(used) / runs, self.schedule.epochs
        steps, apart = amount(factor, train), amount(factor, held) if any(held) else 0
        return runs * (epochs * (steps + apart) + (apart or min(self.schedule.batch, steps)))

    @abstractmethod
    def _own_facts(self) -> dict[str, Any]:
        """The method's own facts."""

    def _prepare(self, runs: int, moves: bool = True) -> None:
        """Load the base's model, and split the examples, for a number of descents.

        Args:
            moves: whether the descents move the model's weights, from `base`.
        """
        request = self.request
        model = load_model(self.models.folder(None), self.device, self.models.trust)
        if request.checkpointing:
            layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
            if not layers:
                raise UserError("--checkpointing: this model's code has no layers for it")
            for layer in layers:  # transformers' own switch works in training mode alone
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        model.requires_grad_(False)
        self._model, self._parameters = model, self.models.named(model)
        if moves:
            self.base = {n: p.detach().clone().view(-1) for n, p in self._parameters.items()}
        self.splits = [
            Split.of(examples, request.held_out, f"{request.seed} {task}")
            for task, examples in self.examples.items()
        ]
        self._update = self.plan.engine.progress(self.method, self._passes(runs), "example")

    def _descend(
        self, moving: Moving, examples: Callable[[int], Sequence[Example]], held: Sequence[Example]
    ) -> History:
        loss = entropy if self.unlabeled else response_loss
        model = self._model, self._parameters if moving.base else {}
        descent = Descent(*model, moving, loss, self.schedule, self.dtype, self._update)
        return descent.run(examples, held)

    def _descend_on_all(self, moving: Moving) -> History:
        """Learn from the examples of all tasks, shuffled again for each epoch."""
        train, seed = [split.train for split in self.splits], self.request.seed
        held = [example for split in self.splits for example in split.held]
        return self._descend(moving, lambda epoch: shuffled(train, f"{seed} {epoch}"), held)

    def _note(self, history: History) -> None:
        self.histories.append(history)
        self.passes = self.passes[0] + history.forward, self.passes[1] + history.backward

    def facts(self) -> dict[str, Any]:
        return {
            **{key: getattr(self.request, key) for key in SHAPING},
            "schedule": asdict(self.schedule),
            **self._own_facts(),
            "tasks": self.data_facts(),
            "history": [asdict(history) for history in self.histories],
        }


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
            if float(value.min()) <= 0:
                raise UserError(
                    "--nonnegative begins at the recipe's `lambda`: make it larger than 0"
                )
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

    @property
    def rows(self) -> Rows:
        return Rows.of(self.plan.tasks.names, self.per, self.request.blocks)

    @property
    def per(self) -> PER:
        return "layer" if self.method == "adamerging" else "tensor"

    @property
    def outputs(self) -> list[Path]:
        return [self.place / "coefficients.safetensors"]

    @property
    def _scale(self) -> float:
        """The factor of bases while aTLAS learns: T / M under `lambda_scale: tasks`.

        Without it coefficients of few bases stay too small: AdamW moves them by the rate at most,
        means of tasks are shorter than task vectors, and M/T of the examples make fewer steps.
        """
        return self.plan.basis.scale if self.method == "atlas" else 1.0

    def _own_facts(self) -> dict[str, Any]:
        adamerging, request = self.method == "adamerging", self.request
        facts = {"per": self.per, "blocks": request.blocks, "nonnegative": request.nonnegative}
        return facts | ({"start": self._start().tolist()} if adamerging else {"scale": self._scale})

    def _start(self) -> Tensor:
        """The first coefficients, [rows, M] float64.

        aTLAS begins at 0. AdaMerging begins at the recipe's addition; a row gets the mean lambda
        of its tensors.
        """
        plan, basis, rows = self.plan, self.plan.basis, self.rows
        columns = bases_of(plan).shape[1]
        if self.method != "adamerging":  # a square has no gradient at 0
            start = 0.1 / self._scale if self.request.nonnegative else 0.0
            return torch.full((rows.count, columns), start).double()
        found: list[list[float]] = [[] for _ in range(rows.count)]
        for item in plan.items():
            if item.tunables is not None:
                found[rows.first[str(item.counted_as)]].append(item.tunables.lambda_)
        lambdas = torch.tensor([sum(some) / len(some) for some in found], dtype=torch.float64)
        addition = torch.ones(columns, dtype=torch.float64)
        if plan.recipe.store is not None:  # its bases may stand for several tasks
            addition = basis.directions["lambda"][:columns]
            addition = addition / torch.tensor(plan.recipe.weights).double()
        return basis.scale * torch.outer(lambdas, addition)

    def learn(self) -> None:
        self._prepare(1)
        bases, rows = self.models.stacked(bases_of(self.plan) * self._scale), self.rows
        moving = Coefficients(self.base, bases, rows, self._start(), self.request.nonnegative)
        self._note(self._descend_on_all(moving))
        values = {"coefficients": moving.values.detach() * self._scale}
        save(self.outputs[0], values, {**self.facts(), "rows": list(rows.titles)})

    def merge_into(self, plan: Plan, sink: Sink, items: Sequence[Item]) -> None:
        values, rows = load_file(self.outputs[0])["coefficients"], self.rows
        weights = values.double() @ bases_of(plan).T  # of the plan's vectors
        pieces, steps = list[Item](), dict[str, Step]()
        joined = Joined(sink, {})
        for item in items:
            if item.tunables is None:
                pieces.append(item)
                continue
            own = weights[rows.of_tensor(str(item.counted_as))]
            for number, (first, piece) in enumerate(blocks_of(item, rows.blocks)):
                name = item.name if rows.blocks == 1 else f"{item.name}, block {number}"
                joined.places[name] = item, first
                pieces.append(replace(piece, name=name))
                steps[name] = Linear([[(1.0, own[number])]])
        combine_pass(pieces, steps, joined, plan.engine)


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
        for number, (start, size) in enumerate(zip(starts, sizes, strict=False))
        if size or not number
    ]
