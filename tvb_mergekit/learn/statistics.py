"""Fisher merging and RegMean: statistics of each task's model, and the merge by them.

Examples pass one at a time, so no sum contains padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tvb_mergekit.core.learned import fisher_mean, regression_mean, task_factors
from tvb_mergekit.errors import UserError
from tvb_mergekit.learn.data import Example
from tvb_mergekit.learn.job import WEIGHTS, Job, LearnedMerge, Parameters, linear_layers
from tvb_mergekit.progress import Update

Sums = dict[str, Tensor]


def fisher_information(
    model: nn.Module,
    parameters: Parameters,
    examples: Sequence[Example],
    update: Update = lambda done: None,
) -> Sums:
    """The sum over examples of the squared gradient of log p(response | prompt), in float32."""
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
    model.requires_grad_(False)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    for example in examples:
        cross_entropy(*_predicted(model, example), reduction="sum").backward()
        for name, parameter in parameters.items():
            if (gradient := parameter.grad) is not None:
                sums[name].addcmul_(gradient, gradient)
                parameter.grad = None
        update(1)
    return sums


def input_grams(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    examples: Sequence[Example],
    update: Update = lambda done: None,
) -> Sums:
    """X^T X of the inputs X [tokens, n] of each linear layer, [n, n] float32.

    Products of one example are float32, their sum is float64: RegMean's solution can multiply its
    error by the condition number. All tokens count, also those of the prompt.
    """
    sums: Sums = {}
    for name, layer in layers.items():
        weight: Any = layer.weight
        size = weight.shape[1 if isinstance(layer, nn.Linear) else 0]
        sums[name] = torch.zeros(size, size, dtype=torch.float64, device=weight.device)

    def add(name: str, layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        rows = given[0].flatten(0, -2).float()
        with torch.autocast(rows.device.type, enabled=False):
            sums[name].add_(rows.T @ rows)

    with ExitStack() as stack, torch.no_grad():
        for name, layer in layers.items():
            stack.callback(layer.register_forward_pre_hook(partial(add, name)).remove)
        for example in examples:
            _predicted(model, example)
            update(1)
    return {name: total.float() for name, total in sums.items()}


def _predicted(model: Any, example: Example) -> tuple[Tensor, Tensor]:
    """Logits [n, vocabulary] float32 for the n tokens of the response, and these tokens [n]."""
    ids = torch.tensor([list(example.ids)], device=next(model.parameters()).device)
    logits = model(input_ids=ids, use_cache=False).logits[0]
    return logits[example.start - 1 : -1].float(), ids[0, example.start :].to(logits.device)


def weighted_mean(job: Job) -> LearnedMerge:
    """The mean of theta_0 + B_m, weighted by statistics of the tasks' models."""
    request, bases, fisher = job.request, job.bases, job.request.method == "fisher"
    mixture, scale = bases.mixture(request.mixture), job.plan.basis.scale
    factors = torch.full((len(mixture),), scale, dtype=torch.float64)
    if scale != 1 and request.mixture == "encoder":
        factors = task_factors(mixture, bases.encoder)
    files, totals, turned = list[Path](), list[float](), set[str]()
    update = job.progress(sum(map(len, job.examples.values())))
    for number, task in enumerate(bases.tasks):
        model, parameters = bases.load(task, request.spread)
        layers = linear_layers(model, parameters)
        turned |= {name for name, layer in layers.items() if not isinstance(layer, nn.Linear)}
        examples = job.mine(job.examples[task])
        with job.accelerator.autocast():
            if fisher:
                own = fisher_information(model, parameters, examples, update)
            else:
                own = input_grams(model, layers, examples, update)
        sums = {name: job.accelerator.reduce(total, "sum").cpu() for name, total in own.items()}
        for name, total in sums.items():
            if not torch.isfinite(total).all():
                where = f"the statistics of task `{task}` are not finite in tensor `{name}`"
                raise UserError(f"{where}; {WEIGHTS}")
            if fisher:
                total /= len(job.examples[task])
        totals.append(sum(float(total.double().sum()) for total in sums.values()))
        files.append(job.place / f"{number}.safetensors")  # T of them do not fit into memory
        if job.accelerator.is_main_process:
            save_file(sums, files[-1])
        del model, parameters, layers, own, sums  # before the next model is loaded
    job.accelerator.wait_for_everyone()
    if request.normalize:
        mixture = mixture * torch.tensor([t and 1 / t for t in totals]).double()[:, None]
    stored = [safe_open(file, "pt") for file in files]
    known = set.intersection(*(set(file.keys()) for file in stored))

    def direction(name: str, bases: Tensor) -> Tensor:
        if name not in known:
            return bases.mean(0)
        own = (file.get_tensor(name) for file in stored)
        if fisher:
            return fisher_mean(bases, own, mixture, factors, scale)
        how = mixture, factors, scale, request.off_diagonal
        if name in turned:
            return regression_mean(name, bases.mT, own, *how).mT
        return regression_mean(name, bases, own, *how)

    return LearnedMerge(job, direction, {"factors": factors.tolist()})
