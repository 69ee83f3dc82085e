"""Gradient descent on the base's model: epochs, a held-out loss, and the best epoch.

The model's weights stay theta_0. `moved` makes each weight a function of theta_0 and of a few
variables, by PyTorch's parametrizations; the rest is a plain training loop.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from tvb_mergekit.errors import UserError
from tvb_mergekit.learn.data import Batch, Example, Loss, entropy, held_out, response_loss
from tvb_mergekit.learn.job import WEIGHTS, Job, Parameters

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The steps of AdamW, or of a `mask`: plain descent by `rate` times gradients of size 1.

    A mask is an order of entries, and Adam would give all of them equal steps.
    """

    rate: float
    epochs: int = 10
    batch: int = 16
    decay: float = 0.0
    clip: float | None = None
    mask: bool = False
    cosine: bool = False  # the rate falls to 0 along a cosine
    patience: int = 3  # epochs without a lower held-out loss


SCHEDULES = {
    "localize": Schedule(rate=3.0, batch=8, mask=True),
    "adamerging": Schedule(rate=0.001),
    "wemoe": Schedule(rate=1.0),  # over the size of a hidden state
    "atlas": Schedule(rate=0.1, decay=0.1, clip=1.0, cosine=True),
}


class Descent:
    """The base's model, each task's examples to learn from and held out, and the steps."""

    def __init__(self, job: Job) -> None:
        self.job, self.accelerator, request = job, job.accelerator, job.request
        seed = f"{request.seed} "
        self.model, self.parameters = job.bases.load(None, request.spread)
        config: Any = self.model.config
        self.width = config.get_text_config().hidden_size
        default = SCHEDULES[request.method]
        if request.method == "wemoe":  # a step moves coefficients by the rate times sum |inputs|
            default = replace(default, rate=default.rate / self.width)
        rate, epochs = request.learning_rate or default.rate, request.epochs or default.epochs
        batch, patience = request.batch_size or default.batch, request.patience
        self.schedule = replace(default, rate=rate, epochs=epochs, batch=batch, patience=patience)
        if request.checkpointing:  # transformers' own switch works in training mode alone
            for layer in self.model.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        split = [held_out(some, request.held_out, seed + t) for t, some in job.examples.items()]
        self.train, self.held = [each[0] for each in split], [each[1] for each in split]
        unlabeled = request.method == "adamerging" or request.unlabeled
        self.loss: Loss = entropy if unlabeled else response_loss
        self.facts: dict[str, Any] = {"schedule": asdict(self.schedule), "history": []}

    def loss_of(self, batch: Batch) -> Tensor:
        """The sum of the loss over a batch."""
        ids, mask = batch.ids, batch.mask
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return self.loss(logits, batch)

    def run_on_all(self, moving: nn.Module, loss_of: Callable[[Batch], Tensor]) -> None:
        """Learn from the examples of all tasks, shuffled again for each epoch; see `run`."""
        every, held = list(chain(*self.train)), list(chain(*self.held))
        seed = self.job.request.seed

        def shuffled(epoch: int) -> list[Example]:
            return Random(f"{seed} {epoch}").sample(every, len(every))

        self.run(moving, shuffled, held, loss_of)

    def run(
        self,
        moving: nn.Module,
        examples: Callable[[int], Sequence[Example]],
        held: Sequence[Example],
        loss_of: Callable[[Batch], Tensor],
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """Learn the parameters of `moving`, and set them to those of the best epoch.

        Args:
            examples: of an epoch, by its number from 1 on.
            held: examples to choose the epoch by. Without any the last one is kept.
            loss_of: the sum over a batch.
            settle: prepares `moving.eval()`, as which the merged model is measured.
        """
        schedule, variables, accelerator = self.schedule, [*moving.parameters()], self.accelerator
        kind = torch.optim.SGD if schedule.mask else torch.optim.AdamW
        optimizer = kind(variables, lr=schedule.rate, weight_decay=schedule.decay)
        first, device = examples(1), next(self.model.parameters()).device
        steps = schedule.epochs * len(_batches(first, schedule.batch))
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: (1 + math.cos(math.pi * n / steps)) / 2 if schedule.cosine else 1.0
        )
        # Mean losses of each epoch, with a penalty, and held-out ones, also at the start
        losses, held_losses, best_epoch, stopped = list[float](), list[float](), 0, ""
        best = [variable.detach().clone() for variable in variables]
        update = self.job.progress(schedule.epochs * (len(first) + len(held)) + len(held))

        def mean_loss(batch: Sequence[Example]) -> float:
            """The mean over all processes, with gradients of this one's part of the batch."""
            loss = torch.zeros((), device=device)
            if own := self.job.mine(batch):
                with accelerator.autocast():
                    loss = loss_of(Batch.of(own, device)) / len(batch)
                if torch.is_grad_enabled():
                    accelerator.backward(loss)
            mean = float(accelerator.reduce(loss.detach().to(device), "sum"))
            if not math.isfinite(mean):
                raise FloatingPointError(f"the loss is {mean} in a batch with {batch[0].place}")
            update(len(batch), f"loss {mean:.4g}")
            return mean

        def measure() -> None:
            optimizer.zero_grad()
            settle()
            moving.eval()
            with torch.no_grad():
                own = [mean_loss(b) * len(b) for b in _batches(held, schedule.batch)]
            held_losses.append(sum(own) / len(held))
            moving.train()

        moving.train()  # a parametrization has the mode of its module, `eval`
        try:
            if held:
                measure()
            for epoch in range(1, schedule.epochs + 1):
                total, some = 0.0, examples(epoch)
                for batch in _batches(some, schedule.batch):
                    optimizer.zero_grad()
                    total += mean_loss(batch) * len(batch)
                    for variable in variables:  # the sum over all processes
                        own = torch.zeros_like(variable) if variable.grad is None else variable.grad
                        variable.grad = accelerator.reduce(own, "sum")
                    if schedule.mask:
                        _scale_to_one(variables)
                    elif schedule.clip is not None:
                        nn.utils.clip_grad_norm_(variables, schedule.clip)
                    optimizer.step()
                    scheduler.step()
                losses.append(total / len(some))
                if held:
                    measure()
                if not held or held_losses[epoch] < held_losses[best_epoch]:
                    best_epoch = epoch
                    _copy(variables, best)
                elif epoch - best_epoch >= schedule.patience and epoch < schedule.epochs:
                    stopped = f"no lower held-out loss in {schedule.patience} epochs"
                    break
        except FloatingPointError as error:
            if not held_losses:
                raise UserError(f"{error}; lower --learning-rate, or {WEIGHTS}") from error
            stopped = str(error)
            LOG.warning("%s; epoch %d is kept", error, best_epoch)
        _copy(best, variables)
        settle()
        self.facts["history"].append(
            {"losses": losses, "held": held_losses, "best": best_epoch, "stopped": stopped}
        )


@contextmanager
def moved(
    model: nn.Module, parameters: Parameters, moves: Mapping[str, nn.Module]
) -> Iterator[None]:
    """Let each parameter be moves[name](theta_0) in all passes of the model, also where it is tied.

    A pass computes the weights of a layer when it comes there.
    """
    own, found = {id(parameter): moves[name] for name, parameter in parameters.items()}, []
    for module in [*model.modules()]:
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if (move := own.get(id(parameter))) is not None:
                parametrize.register_parametrization(module, name, move, unsafe=True)
                found.append((module, name))
    yield
    for module, name in found:
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)


def _batches(examples: Sequence[Example], size: int) -> list[Sequence[Example]]:
    return [examples[start : start + size] for start in range(0, len(examples), size)]


def _scale_to_one(variables: Sequence[Tensor]) -> None:
    """Divide all gradients by their root mean square."""
    gradients = [v.grad for v in variables if v.grad is not None]
    norms = [float(torch.linalg.vector_norm(g, dtype=torch.float64)) for g in gradients]
    size = math.hypot(*norms) / sum(g.numel() for g in gradients) ** 0.5
    for gradient in gradients:
        gradient.div_(size or 1.0)
