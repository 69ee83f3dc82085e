"""Gradient descent on the base's model: epochs, a held-out loss, and the best epoch.

The model's weights stay theta_0. `moved` makes each weight a function of theta_0 and of a few
variables, by PyTorch's parametrizations; the rest is a plain training loop.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from tvb_mergekit.learn.data import Example, collate, entropy, held_out, response_loss
from tvb_mergekit.learn.job import WEIGHTS, Job, Parameters

LOG = logging.getLogger(__name__)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of `collate`'s tensors: a sum over examples


class Descent:
    """The base's model, each task's examples to learn from and held out, and the steps."""

    def __init__(self, job: Job) -> None:
        self.job, request = job, job.request
        self.model, self.parameters = job.load(None)
        config: Any = self.model.config
        self.width = config.get_text_config().hidden_size
        # A step of AdamW moves a router's coefficients by the rate times sum |inputs|.
        rates = {"localize": 3.0, "adamerging": 0.001, "atlas": 0.1, "wemoe": 1 / self.width}
        self.rate = request.learning_rate or rates[request.method]
        self.batch = request.batch_size or (8 if request.method == "localize" else 16)
        if request.checkpointing:  # transformers' own switch works in training mode alone
            for layer in self.model.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        seeds = {task: f"{request.seed} {task}" for task in job.examples}
        split = [held_out(job.examples[t], request.held_out, seed) for t, seed in seeds.items()]
        self.train, self.held = [each[0] for each in split], [each[1] for each in split]
        unlabeled = request.method == "adamerging" or request.unlabeled
        self.loss = entropy if unlabeled else response_loss
        steps = {"learning_rate": self.rate, "batch_size": self.batch}
        self.facts: dict[str, Any] = {**steps, "history": []}

    def loss_of(self, ids: Tensor, mask: Tensor, counted: Tensor) -> Tensor:
        """The sum of the loss over a batch."""
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return self.loss(logits, ids, counted)

    def run_on_all(self, variables: Sequence[nn.Parameter], loss_of: Loss) -> None:
        """Learn from the examples of all tasks, shuffled again for each epoch; see `run`."""
        every, held = list(chain(*self.train)), list(chain(*self.held))
        seed = self.job.request.seed
        self.run(
            variables, lambda n: Random(f"{seed} {n}").sample(every, len(every)), held, loss_of
        )

    def run(
        self,
        variables: Sequence[nn.Parameter],
        examples: Callable[[int], Sequence[Example]],
        held: Sequence[Example],
        loss_of: Loss,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """Learn the variables, and set them to those of the best epoch.

        AdamW, or for `localize` plain descent by the rate times gradients of size 1: a mask is an
        order of entries, and Adam would give all of them equal steps.

        Args:
            examples: of an epoch, by its number from 1 on.
            held: examples to choose the epoch by. Without any the last one is kept.
            settle: prepares passes without gradients, which measure the merged model.
        """
        request, accelerator = self.job.request, self.job.accelerator
        masks, atlas = request.method == "localize", request.method == "atlas"
        decay = {} if masks else {"weight_decay": 0.1 if atlas else 0.0}
        kind: Any = torch.optim.SGD if masks else torch.optim.AdamW
        optimizer = kind(variables, lr=self.rate, **decay)
        first, device = examples(1), next(self.model.parameters()).device
        steps = request.epochs * len(self._batches(first))
        scheduler = torch.optim.lr_scheduler.LambdaLR(  # aTLAS: down to 0 along a cosine
            optimizer, lambda n: (1 + math.cos(math.pi * n / steps)) / 2 if atlas else 1.0
        )
        # Mean losses of each epoch, with a penalty, and held-out ones, also at the start
        losses, held_losses, best_epoch, stopped = list[float](), list[float](), 0, ""
        best = [variable.detach().clone() for variable in variables]
        update = self.job.progress(request.epochs * (len(first) + len(held)) + len(held))

        def mean_loss(batch: Sequence[Example]) -> float:
            """The mean over all processes, with gradients of this one's part of the batch."""
            loss = torch.zeros((), device=device)
            if own := self.job.mine(batch):
                with accelerator.autocast():
                    loss = loss_of(*collate(own, device)) / len(batch)
                if torch.is_grad_enabled():
                    accelerator.backward(loss)
            mean = float(accelerator.reduce(loss.detach().to(device), "sum"))
            if not math.isfinite(mean):
                raise FloatingPointError(f"the loss is {mean} in a batch with {batch[0].place}")
            update(len(batch), f"loss {mean:.4g}")
            return mean

        def measure() -> None:
            settle()
            with torch.no_grad():
                own = [mean_loss(batch) * len(batch) for batch in self._batches(held)]
            held_losses.append(sum(own) / len(held))

        try:
            if held:
                measure()
            for epoch in range(1, request.epochs + 1):
                total, some = 0.0, examples(epoch)
                for batch in self._batches(some):
                    optimizer.zero_grad()
                    total += mean_loss(batch) * len(batch)
                    for variable in variables:  # the sum over all processes
                        own = torch.zeros_like(variable) if variable.grad is None else variable.grad
                        variable.grad = accelerator.reduce(own, "sum")
                    if masks:
                        _scale_to_one(variables)
                    elif atlas:  # as its authors
                        nn.utils.clip_grad_norm_(variables, 1.0)
                    optimizer.step()
                    scheduler.step()
                losses.append(total / len(some))
                if held:
                    optimizer.zero_grad()  # frees memory
                    measure()
                if not held or held_losses[epoch] < held_losses[best_epoch]:
                    best_epoch, best = epoch, [variable.detach().clone() for variable in variables]
                elif epoch - best_epoch >= request.patience and epoch < request.epochs:
                    stopped = f"no lower held-out loss in {request.patience} epochs"
                    break
        except FloatingPointError as error:
            if not held_losses:
                raise UserError(f"{error}; lower --learning-rate, or {WEIGHTS}") from error
            stopped = str(error)
            LOG.warning("%s; epoch %d is kept", error, best_epoch)
        for variable, value in zip(variables, best, strict=True):
            variable.data.copy_(value)
        settle()
        self.facts["history"].append(
            {"losses": losses, "held": held_losses, "best": best_epoch, "stopped": stopped}
        )

    def _batches(self, examples: Sequence[Example]) -> list[Sequence[Example]]:
        return [examples[k : k + self.batch] for k in range(0, len(examples), self.batch)]


class Added(nn.Module):
    """theta_0 + move() of one tensor, as a parametrization."""

    def __init__(self, move: Callable[[], Tensor]) -> None:
        super().__init__()
        self.move = move

    def forward(self, theta: Tensor) -> Tensor:
        with torch.autocast(theta.device.type, enabled=False):
            return theta + self.move().view_as(theta)


@contextmanager
def moved(
    model: nn.Module, parameters: Parameters, moves: Mapping[str, Callable[[], Tensor]]
) -> Iterator[None]:
    """Let each parameter be theta_0 + moves[name]() in all passes, also where it is tied.

    A pass computes the weights of a layer when it comes there.
    """
    own, found = {id(parameter): moves[name] for name, parameter in parameters.items()}, []
    for module in [*model.modules()]:
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if (move := own.get(id(parameter))) is not None:
                parametrize.register_parametrization(module, name, Added(move), unsafe=True)
                found.append((module, name))
    yield
    for module, name in found:
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)


def _scale_to_one(variables: Sequence[Tensor]) -> None:
    """Divide all gradients by their root mean square."""
    gradients = [v.grad for v in variables if v.grad is not None]
    norms = [float(torch.linalg.vector_norm(g, dtype=torch.float64)) for g in gradients]
    size = math.hypot(*norms) / sum(g.numel() for g in gradients) ** 0.5
    for gradient in gradients:
        gradient.div_(size or 1.0)
