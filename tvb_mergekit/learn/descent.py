"""Gradient descent: epochs, a held-out loss, and the best epoch.

A model's weights are set to theta, a function of a few variables, before a pass. In the backward
pass the gradient of each weight goes on to the variables and is dropped, so only one tensor's
gradient is held.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tvb_mergekit.errors import UserError
from tvb_mergekit.learn.data import Batch, Example, LossFunction, runs
from tvb_mergekit.learn.statistics import WEIGHTS, Parameters, gradients_to

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The steps of a descent.

    Attributes:
        rate: of AdamW; with `mask` the root mean square of a step.
        mask: plain descent on gradients divided by their root mean square. A mask is an order of
            entries, and Adam would give all of them equal steps.
        cosine: whether the rate falls to 0 along a cosine.
        patience: the number of epochs without a lower held-out loss that ends the descent.
    """

    epochs: int
    rate: float
    batch: int
    decay: float = 0.0
    clip: float | None = None
    mask: bool = False
    cosine: bool = False
    patience: int = 3


@dataclass
class History:
    """Mean losses with penalty, and held-out losses, at the start and after each epoch.

    The start has no loss. `best` is the epoch that is kept, or 0 for the start.
    """

    losses: list[float | None] = field(default_factory=list)
    held: list[float | None] = field(default_factory=list)
    best: int = 0
    forward: int = 0
    backward: int = 0
    stopped: str | None = None


class Moving(ABC):
    """theta_0 plus a differentiable function of `variables` and the bases.

    Attributes:
        base: theta_0 of each tensor, flattened.
        bases: B_m of each tensor, [M, n].
        variables: the tensors to learn.
    """

    def __init__(self, base: Mapping[str, Tensor], bases: Mapping[str, Tensor]) -> None:
        self.base, self.bases = base, bases
        self.variables: list[Tensor] = []

    @abstractmethod
    def theta(self, name: str) -> Tensor:
        """The weights of one tensor, flattened [n]."""

    def begin(self, batch: Batch) -> None:
        """Prepare the pass of a batch."""
        return None

    def add_penalty(self) -> float:
        """Add the gradient of the penalty to the variables, and return the penalty."""
        return 0.0

    def merged(self) -> Callable[[str], Tensor]:
        """A function that returns the weights of one tensor in the merged model."""
        return self.theta

    def attached(self, parameters: Parameters) -> AbstractContextManager[None]:
        """Compute the gradients of these parameters, and pass them on to the variables."""

        def pull(name: str, gradient: Tensor) -> None:
            with torch.enable_grad():
                self.theta(name).backward(gradient.view(-1))

        return gradients_to(pull, parameters)

    def set(self, parameters: Parameters, theta: Callable[[str], Tensor] | None = None) -> None:
        """Write theta into a model's parameters."""
        theta = theta or self.theta
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.view(-1).copy_(theta(name))


@dataclass(eq=False)
class Descent:
    """Learns the variables of one `Moving`.

    Attributes:
        parameters: of `model`, by tensor.
        loss: the sum over a batch.
        dtype: of the passes, by `torch.autocast`.
        update: called with the number of finished examples, and the loss as text.
    """

    model: nn.Module
    parameters: Parameters
    moving: Moving
    loss: LossFunction
    schedule: Schedule
    dtype: torch.dtype = torch.float32
    update: Callable[..., object] = lambda done, note: None

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        schedule, variables = self.schedule, self.moving.variables
        kind = torch.optim.SGD if schedule.mask else torch.optim.AdamW
        self.optimizer = kind(variables, lr=schedule.rate, weight_decay=schedule.decay)
        self.history = History()
        self.best = [variable.detach().clone() for variable in variables]

    def run(self, examples: Callable[[int], Sequence[Example]], held: Sequence[Example]) -> History:
        """Learn, and set the variables to those of the best epoch.

        Args:
            examples: of an epoch, by its number from 1 on.
            held: examples to choose the epoch by. Without any, the last epoch is kept whose
                weights gave a finite loss.

        Raises:
            UserError: the loss is not finite at the start, or after one step.
        """
        history, schedule = self.history, self.schedule
        history.losses.append(None)
        try:
            history.held.append(self.held_loss(held) if held else None)
        except NotFinite as error:
            raise UserError(f"{error}, at the start; {WEIGHTS}") from error
        for epoch in range(1, schedule.epochs + 1):
            try:
                some = examples(epoch)
                mean = self._epoch(some, epoch, keep=not held)
                if not held and epoch == schedule.epochs:
                    self.held_loss(some[: schedule.batch])
                    self._keep(epoch)
                seen = self.held_loss(held) if held else None
            except NotFinite as error:
                if epoch == 1 or (not held and not history.best):
                    raise UserError(f"{error}; lower --learning-rate, or {WEIGHTS}") from error
                history.stopped = str(error)
                LOG.warning("%s; epoch %d is kept", error, history.best)
                break
            history.losses.append(mean)
            history.held.append(seen)
            least = history.held[history.best]
            if seen is not None and least is not None:
                if seen < least:
                    self._keep(epoch)
                elif schedule.patience <= epoch - history.best and epoch < schedule.epochs:
                    history.stopped = f"no lower held-out loss in {schedule.patience} epochs"
                    break
        with torch.no_grad():
            for best, variable in zip(self.best, self.moving.variables, strict=True):
                variable.copy_(best)
        return history

    def _keep(self, epoch: int) -> None:
        """Note the present variables as the best, those after an epoch."""
        self.history.best = epoch
        for best, variable in zip(self.best, self.moving.variables, strict=True):
            best.copy_(variable.detach())

    def held_loss(self, examples: Sequence[Example]) -> float:
        """The mean loss of the merged model, without gradients."""
        self.optimizer.zero_grad()  # frees the last step's gradients: comparing masks needs memory
        self.moving.set(self.parameters, self.moving.merged())
        batches = runs(examples, self.schedule.batch)
        total = sum(len(batch) * self._mean(batch) for batch in batches)
        self.history.forward += len(examples)
        return total / len(examples)

    def _epoch(self, examples: Sequence[Example], epoch: int, keep: bool) -> float:
        """The mean loss of one epoch of steps; with `keep` its start becomes the best if finite."""
        total, schedule = 0.0, self.schedule
        batches = runs(examples, schedule.batch)
        with self.moving.attached(self.parameters):
            for number, batch in enumerate(batches):
                if schedule.cosine:
                    done = (epoch - 1 + number / len(batches)) / schedule.epochs
                    for group in self.optimizer.param_groups:
                        group["lr"] = schedule.rate * (1 + math.cos(math.pi * done)) / 2
                total += self.gradients(batch) * len(batch)
                if keep and not number:
                    self._keep(epoch - 1)
                self._step()
        self.history.forward += len(examples)
        self.history.backward += len(examples)
        return total / len(examples)

    def gradients(self, batch: Sequence[Example]) -> float:
        """Compute the gradients of the mean loss plus the penalty, and return this sum."""
        self.optimizer.zero_grad()
        self.moving.set(self.parameters)
        mean = self._mean(batch, backward=True)
        for variable in self.moving.variables:
            if variable.grad is None:
                variable.grad = torch.zeros_like(variable)
        return mean + self.moving.add_penalty()

    def _mean(self, batch: Sequence[Example], backward: bool = False) -> float:
        """The mean loss of a batch."""
        tensors = Batch.of(batch, self.device)
        self.moving.begin(tensors)
        with passing(self.device, self.dtype), torch.set_grad_enabled(backward):
            ids, mask = tensors.ids, tensors.mask
            found = self.model(input_ids=ids, attention_mask=mask, use_cache=False)
            loss = self.loss(found.logits, tensors) / len(batch)
        if backward:
            loss.backward()
        mean = float(loss.detach())
        if not math.isfinite(mean):
            first = batch[0]
            place = f"{first.path}, line {first.line}"
            raise NotFinite(f"the loss is {mean} in a batch that begins with {place}")
        self.update(len(batch), f"loss {mean:.4g}")
        return mean

    def _step(self) -> None:
        schedule, variables = self.schedule, self.moving.variables
        gradients = [v.grad for v in variables if v.grad is not None]
        if schedule.mask:
            norms = [float(torch.linalg.vector_norm(g, dtype=torch.float64)) for g in gradients]
            size = math.hypot(*norms) / sum(g.numel() for g in gradients) ** 0.5
            for gradient in gradients:
                gradient.div_(size or 1.0)
        elif schedule.clip is not None:
            torch.nn.utils.clip_grad_norm_(variables, schedule.clip)
        self.optimizer.step()


def passing(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Compute the passes of a float32 model in `dtype`, if that is precise enough."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


class NotFinite(Exception):
    """A loss that is not finite."""
