"""Fisher merging and RegMean: statistics of each task's model, and the merge by them.

Both are weighted means of theta_0 + B_m. A basis mixes the tasks' statistics as it mixes their task
vectors: sum_i W[i, m] of task i, with W = W_e >= 0. Examples pass one at a time, so no sum contains
padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tvb_mergekit.errors import UserError
from tvb_mergekit.learn.data import Example
from tvb_mergekit.learn.job import WEIGHTS, Job, LearnedMerge, Parameters
from tvb_mergekit.progress import Update
from tvb_mergekit.store.routing import linear_layers

Sums = dict[str, Tensor]
SINGULAR = 1e-13  # of a pivot of a matrix whose diagonal is 1


def fisher_information(
    model: nn.Module, parameters: Parameters, examples: Sequence[Example], update: Update
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
    model: nn.Module, layers: Mapping[str, nn.Module], examples: Sequence[Example], update: Update
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


def fitted_layers(model: nn.Module, parameters: Parameters) -> dict[str, nn.Module]:
    """The linear layer of each weight, except of weights tied to an embedding."""
    embedded = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    found = {id(each.weight): each for each in linear_layers(model).values()}
    return {n: found[id(p)] for n, p in parameters.items() if id(p) in found.keys() - embedded}


def task_factors(mixture: Tensor, encoder: Tensor) -> Tensor:
    """The factors s [T] of `lambda_scale: tasks`, for statistics mixed by W and B = T W_e.

    The mean over bases is sum_j (k_ij / w_i) tau_j where task i alone has information, with
    k = W W_e^T and w = W 1. That is shorter than tau_i, the published merge. For task vectors that
    are orthogonal and equally long, s_i = w_i / ||k_i|| gives it the length of tau_i. It is T/M at
    least, where tau_i then counts once at most (s_i k_ii <= w_i): so `groups` keep all of tau_i.

    Args:
        mixture: W [T, M], not negative.
        encoder: W_e [T, M].
    """
    tasks, count = encoder.shape
    sums, shares = mixture.sum(1), mixture @ encoder.T
    lengths = sums / torch.linalg.vector_norm(shares, dim=1)
    once = (sums / shares.diagonal()).clamp(max=tasks / count)
    return torch.where(sums > 0, torch.maximum(lengths, once), 1.0)


def fisher_mean(
    bases: Tensor, informations: Iterable[Tensor], mixture: Tensor, factors: Tensor, unseen: float
) -> Tensor:
    """sum_i F_i s_i sum_m W[i, m] B_m / sum_i F_i sum_m W[i, m], entry by entry.

    With all s_i = 1 it is the paper's sum_m F~_m B_m / sum_m F~_m, F~_m = sum_i W[i, m] F_i.

    Args:
        bases: B [M, ...] float32.
        informations: F_i of each task; one is held at a time.
        mixture, factors: W [T, M] and s [T].
        unseen: factor of the mean of the bases, which an entry without information gets.
    """
    mixed, total = torch.zeros_like(bases), torch.zeros_like(bases[0])
    every = zip(informations, mixture.tolist(), factors.tolist(), strict=True)
    for own, weights, factor in every:
        own = own.to(bases.device)
        total.add_(own, alpha=sum(weights))
        for place, weight in zip(mixed, weights, strict=True):
            place.add_(own, alpha=factor * weight)
    merged = mixed.div_(total).mul_(bases).sum(0)
    return torch.where(total > 0, merged, unseen * bases.mean(0))


def regression_mean(
    name: str,
    bases: Tensor,
    grams: Iterable[Tensor],
    mixture: Tensor,
    factors: Tensor,
    unseen: float,
    off_diagonal: float,
) -> Tensor:
    """D [m, n] with theta_0 + D = (sum_m G~_m)^-1 sum_m G~_m (theta_0 + B_m), transposed.

    RegMean (Jin et al., ICLR 2023): G~_m = sum_i W[i, m] X_i^T X_i; task i's part on the right
    side has the factor s_i. In float64, by Cholesky.

    Args:
        bases: [M, m, n] float32, m outputs and n inputs of a linear layer; not changed.
        grams: X_i^T X_i [n, n] of each of the T tasks; one is held at a time.
        mixture, factors: as in `fisher_mean`.
        unseen: the factor for inputs that are 0 in all data.
        off_diagonal: a factor for all entries of X_i^T X_i except the diagonal.
    """
    _, outputs, inputs = bases.shape
    normal = bases.new_zeros(inputs, inputs, dtype=torch.float64)
    right = bases.new_zeros(outputs, inputs, dtype=torch.float64)
    every = zip(grams, mixture.tolist(), factors.tolist(), strict=True)
    for gram, weights, factor in every:
        one = gram.to(bases.device).double()  # widened on the device
        one = one.mul(off_diagonal).diagonal_scatter(one.diagonal())
        normal.add_(one, alpha=sum(weights))
        # sum_m B_m G~_m = sum_i (sum_m W[i, m] B_m) X_i^T X_i
        mixed = sum(w * base.double() for w, base in zip(weights, bases, strict=True))
        right.addmm_(mixed * factor, one)
    dead = normal.diagonal() == 0
    normal.diagonal()[dead] = 1
    right[:, dead] = unseen * bases[:, :, dead].mean(0, dtype=torch.float64)
    # With a diagonal of ones the pivots of Cholesky show whether the sum is singular.
    scales = normal.diagonal().rsqrt()
    root, failed = torch.linalg.cholesky_ex(normal * scales * scales[:, None])
    if failed or float(root.diagonal().min()) ** 2 < SINGULAR:
        raise UserError(
            f"tensor `{name}`: the sum of X^T X over its {inputs} inputs is singular; take more "
            "data, or --off-diagonal below 1"
        )
    return torch.cholesky_solve(right.mul_(scales).T, root).T.mul(scales).float()


def weighted_mean(job: Job) -> LearnedMerge:
    """The mean of theta_0 + B_m, weighted by statistics of the tasks' models."""
    request, fisher = job.request, job.request.method == "fisher"
    mixture, scale = job.mixture, job.plan.basis.scale
    factors = torch.full((len(mixture),), scale, dtype=torch.float64)
    if scale != 1 and request.mixture == "encoder":
        factors = task_factors(mixture, job.encoder)
    files, totals, turned = list[Path](), list[float](), set[str]()
    job.place.mkdir(exist_ok=True)
    update = job.progress(sum(map(len, job.examples.values())))
    for number, task in enumerate(job.tasks):
        model, parameters = job.load(task)
        layers = fitted_layers(model, parameters)
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
