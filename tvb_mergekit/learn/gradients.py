"""The common part of methods by gradients: schedules, the model, finished files, passes."""

from __future__ import annotations

import hashlib
import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from tvb_mergekit.errors import UserError
from tvb_mergekit.learn import kept
from tvb_mergekit.learn.data import Example, Split, amount, entropy, held_out, response_loss
from tvb_mergekit.learn.descent import Descent, History, Moving, Schedule
from tvb_mergekit.learn.models import bases_of, load_model
from tvb_mergekit.learn.work import Request, Work
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.tensors import ranks

LOG = logging.getLogger(__name__)

SCHEDULES = {
    "localize": Schedule(epochs=10, rate=3.0, batch=8, mask=True),
    "adamerging": Schedule(epochs=10, rate=0.001, batch=16),
    "atlas": Schedule(epochs=10, rate=0.1, batch=16, decay=0.1, clip=1.0, cosine=True),
}
# Options of all methods by gradients that shape the result, in a file's facts.
SHAPING = ("method", "mixture", "seed", "subsample", "held_out", "precision")


class GradientMethod(Work):
    """A method that moves the base's model in steps.

    Attributes:
        base: theta_0 of each tensor that moves, flattened.
        splits: the examples of each task.
        histories: of the finished files.
        learned: the facts in the last finished file.
    """

    folder = "learned"
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
        self.learned: dict[str, Any] = {}
        every = self.models.named(self.models.empty)
        first = {id(parameter): name for name, parameter in reversed(every.items())}
        if twice := [name for name, p in every.items() if first[id(p)] != name]:
            other = first[id(every[twice[0]])]
            raise UserError(
                f"tensors `{other}` and `{twice[0]}` are tied in the base's model, and two in "
                "others: they cannot be learned apart; set `exclude` to one of them"
            )

    def _passes(self, runs: int) -> tuple[int, int]:
        """Forward and backward passes of all runs, if none ends early."""
        used = [file.count(self.share) for file in self.files]
        if not used:
            return 0, 0
        held = [held_out(some, self.request.held_out) for some in used]
        train = [some - apart for some, apart in zip(used, held, strict=True)]
        factor, epochs = len(used) / runs, self.schedule.epochs
        steps, apart = amount(factor, train), amount(factor, held) if any(held) else 0
        last = apart or min(self.schedule.batch, steps)
        return runs * (epochs * (steps + apart) + last), runs * epochs * steps

    def _memory(self, bases: int) -> int:
        """Bytes of bases, theta, theta_0, and the temporaries of one tensor."""
        sizes = [item.numel for item in self.plan.tasks.items]
        models = 2 * self.model_bytes if self.files else 0
        return 4 * bases * sum(sizes) + models + 24 * max(sizes)

    @abstractmethod
    def _own_facts(self) -> dict[str, Any]:
        """The method's own facts about a file."""

    def _wanted(self, scale: float | None = None) -> dict[str, Any]:
        """The facts that a finished file must have.

        Args:
            scale: of the bases, if the file depends on it.
        """
        request, plan = self.request, self.plan
        tensors = json.dumps([[item.name, list(item.shape)] for item in plan.tasks.items])
        return {
            "bases": {
                "fingerprints": list(plan.tasks.fingerprints.values()),
                "encoder": bases_of(plan).tolist(),
                "scale": scale,
                "tensors": hashlib.sha256(tensors.encode()).hexdigest(),
            },
            "data": [[file.task, file.sha256] for file in self.files],
            **{key: getattr(request, key) for key in SHAPING},
            "schedule": asdict(self.schedule),
            **self._own_facts(),
        }

    def _prepare(self, runs: int) -> None:
        """Load the base's model, and split the examples, for a number of descents."""
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
        self.base = {name: p.detach().clone().view(-1) for name, p in self._parameters.items()}
        self.splits = [
            Split.of(examples, request.held_out, f"{request.seed} {task}")
            for task, examples in self.examples.items()
        ]
        self._update = self.plan.engine.progress(self.method, self._passes(runs)[0], "example")

    def _descend(
        self, moving: Moving, examples: Callable[[int], Sequence[Example]], held: Sequence[Example]
    ) -> History:
        loss = entropy if self.method == "adamerging" else response_loss
        model = self._model, self._parameters
        descent = Descent(*model, moving, loss, self.schedule, self.dtype, self._update)
        return descent.run(examples, held)

    def _is_finished(self, file: Path, wanted: Mapping[str, Any]) -> bool:
        if not file.is_file():
            return False
        facts = kept.check_same(file, kept.LEARNED, wanted)
        LOG.warning("--resume: %s is complete", file.stem)
        self._note(History(**facts["history"]), facts)
        return True

    def _finish(
        self, history: History, facts: dict[str, Any], write: Callable[[dict[str, Any]], None]
    ) -> None:
        facts = {**facts, "history": asdict(history), "tasks": self.data_facts()}
        self._note(history, facts)
        ranks.world().share(lambda: write(facts))

    def _note(self, history: History, facts: dict[str, Any]) -> None:
        self.histories.append(history)
        self.learned = facts
        self.passes = self.passes[0] + history.forward, self.passes[1] + history.backward

    def facts(self) -> dict[str, Any]:
        left = ("bases", "data", "history", "rows", "basis", "method", "dtype")
        found = {key: value for key, value in self.learned.items() if key not in left}
        return {**found, "history": [asdict(history) for history in self.histories]}
