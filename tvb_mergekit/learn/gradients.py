"""The methods by gradients: AdaMerging, aTLAS, Localize-and-Stitch and WEMoE over bases.

AdaMerging (Yang et al., ICLR 2024) and aTLAS (Zhang et al., NeurIPS 2024) learn coefficients of
each layer, tensor or block of a tensor. Localize-and-Stitch (He et al., 2024) learns masks. WEMoE
(Tang et al., ICML 2024) learns routers, which combine the bases of the MLPs for each sequence. Its
authors' routers see the mean over tokens of their output, ours that of their input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from tvb_mergekit.errors import UserError
from tvb_mergekit.learn.data import drawn
from tvb_mergekit.learn.job import Job, LearnedMerge
from tvb_mergekit.learn.training import Descent, moved
from tvb_mergekit.names import LAYER, MLP
from tvb_mergekit.store.attach import writing
from tvb_mergekit.store.routing import ROUTERS, Routed, linear_layers
from tvb_mergekit.tensors.merging import merge_items

COEFFICIENTS = "coefficients.safetensors"
BIAS = 5.0  # the first S of a mask: sigma(5) = 0.993 inside, sigma(-5) = 0.007 outside


def combined(values: Tensor, bases: Tensor) -> Tensor:
    """sum_m c_m B_m of c [blocks, M] and B [M, n], cut into blocks by `torch.tensor_split`."""
    pieces = bases.tensor_split(len(values), dim=1)
    return torch.cat([row @ piece for row, piece in zip(values, pieces, strict=True)])


def rows_of(names: list[str], by_layer: bool) -> dict[str, str]:
    """The row of coefficients of each tensor: its layer, or itself."""
    found = {name: LAYER.match(name) if by_layer else None for name in names}
    return {name: layer[1] if layer else name for name, layer in found.items()}


def coefficients(job: Job) -> LearnedMerge:
    """Learn c for the merge theta_0 + sum_m c_m B_m."""
    request, nonnegative = job.request, job.request.nonnegative
    rows = rows_of(job.plan.tasks.names, by_layer=request.method == "adamerging")
    # Coefficients of few bases would stay too small: AdamW moves them by the rate at most, means of
    # tasks are shorter than task vectors, and M/T of the examples make fewer steps.
    scale = job.plan.basis.scale if request.method == "atlas" else 1.0
    starts = _starts(job, rows, scale)
    if nonnegative and min(float(start.min()) for start in starts.values()) <= 0:
        raise UserError("--nonnegative begins at the recipe's `lambda`: make it larger than 0")
    # Coefficients [blocks, M], or their square roots, which have no gradient at 0
    roots = {row: start.sqrt() if nonnegative else start for row, start in starts.items()}
    values = {
        row: nn.Parameter(root.float().expand(request.blocks, -1).clone())
        for row, root in roots.items()
    }

    def move(name: str, bases: Tensor) -> Tensor:
        own = values[rows[name]].to(bases.device)
        return combined(own.square() if nonnegative else own, bases)

    descent = Descent(job)
    stacked = job.bases(descent.parameters, scale)
    moves = {name: partial(move, name, bases) for name, bases in stacked.items()}
    with moved(descent.model, descent.parameters, moves):
        descent.run_on_all([*values.values()], descent.loss_of)
    power = 2 if nonnegative else 1
    found = {row: scale * each.detach().cpu() ** power for row, each in values.items()}

    def direction(name: str, bases: Tensor) -> Tensor:
        own = found[rows[name]].to(bases.device)
        return combined(own, bases.flatten(1)).view_as(bases[0])

    return LearnedMerge(job, direction, descent.facts, {COEFFICIENTS: found})


def _starts(job: Job, rows: dict[str, str], scale: float) -> dict[str, Tensor]:
    """The first coefficients [M] of each row: 0 or the recipe's addition."""
    sizes = job.sizes
    if job.request.method == "atlas":
        start = 0.1 / scale if job.request.nonnegative else 0.0
        return {row: torch.full_like(sizes, start) for row in rows.values()}
    lambdas: dict[str, list[float]] = {row: [] for row in rows.values()}
    for item in job.plan.tensors.items:  # a row gets the mean lambda of its tensors
        if item.tunables is not None:
            lambdas[rows[str(item.counted_as)]].append(item.tunables.lambda_)
    return {row: job.plan.basis.scale * sum(own) / len(own) * sizes for row, own in lambdas.items()}


def localize(job: Job) -> LearnedMerge:
    """Learn masks one after another. The merge is theta_0 and their mean where masks overlap."""
    request, scale = job.request, job.plan.basis.scale
    descent = None if request.dataless else Descent(job)
    every = list[dict[str, Tensor]]()
    for number in range(job.count):
        own = slice(number, number + 1)
        stacked = job.bases(descent.parameters if descent else None, scale, own)
        basis = {name: b[0] for name, b in stacked.items()}
        kept = largest({n: _sizes(b.abs(), b) for n, b in basis.items()}, request.density)
        if descent is not None:
            kept = _learned_mask(descent, basis, kept, number)
        every.append({name: mask.cpu() for name, mask in kept.items()})

    def direction(name: str, bases: Tensor) -> Tensor:
        none = torch.zeros(bases[0].shape)  # of a tensor that no model has in memory
        masks = torch.stack([each[name].view_as(none) if name in each else none for each in every])
        return stitch(scale * bases, masks.to(bases))

    return LearnedMerge(job, direction, descent.facts if descent else {})


def _learned_mask(
    descent: Descent, basis: dict[str, Tensor], first: dict[str, Tensor], number: int
) -> dict[str, Tensor]:
    """The mask of a basis by the loss of its tasks, W_e[:, m] of each, from the first one on.

    Learns theta_0 + sigma(S) * B, and keeps the largest S where B is not 0, by the density.
    """
    job, request, kept = descent.job, descent.job.request, dict(first)
    mixture = job.mixture[:, number]
    weights, seed = (mixture / mixture.sum()).tolist(), f"{request.seed} {number}"
    scores = {n: nn.Parameter(torch.where(mask, BIAS, -BIAS)) for n, mask in first.items()}

    def move(name: str) -> Tensor:
        learning = torch.is_grad_enabled()
        return (scores[name].sigmoid() if learning else kept[name]) * basis[name]

    def settle() -> None:
        kept.update(largest({n: _sizes(s, basis[n]) for n, s in scores.items()}, request.density))

    def loss_of(ids: Tensor, mask: Tensor, counted: Tensor) -> Tensor:
        """The loss, with the penalty lambda ||sigma(S)||_1 for each example."""
        loss = descent.loss_of(ids, mask, counted)
        if request.penalty and torch.is_grad_enabled():
            masses = [each.sigmoid().sum() for each in scores.values()]
            loss = loss + request.penalty * len(ids) * torch.stack(masses).sum()
        return loss

    factor = len(job.tasks) / job.count
    held = drawn(weights, descent.held, factor, seed) if any(descent.held) else []
    with moved(descent.model, descent.parameters, {name: partial(move, name) for name in basis}):
        descent.run(
            [*scores.values()],
            lambda epoch: drawn(weights, descent.train, factor, f"{seed} {epoch}"),
            held, loss_of, settle,
        )  # fmt: skip
    return kept


def _sizes(values: Tensor, basis: Tensor) -> Tensor:
    """Values to compare; -inf where the basis is 0, which no mask needs."""
    return torch.where(basis != 0, values.detach(), -torch.inf)


def largest(sizes: Mapping[str, Tensor], density: float) -> dict[str, Tensor]:
    """Masks of the largest entries, a fraction `density` over all tensors.

    Compares in float32, and leaves out -inf. Takes every k-th of equal entries at the threshold,
    from all tensors alike: 16-bit models have thousands. Bisection finds the threshold without a
    copy of all entries.
    """
    wanted = max(1, round(density * sum(size.numel() for size in sizes.values())))
    low, high = -(2**31), 2**31 - 1
    while low < high:  # the largest threshold that lets enough pass
        middle = (low + high + 1) // 2
        if sum(int((_ordered(size) >= middle).sum()) for size in sizes.values()) >= wanted:
            low = middle
        else:
            high = middle - 1
    found = {name: _ordered(size) > low for name, size in sizes.items()}
    left = wanted - sum(int(mask.sum()) for mask in found.values())
    equal = {n: (_ordered(size) == low) & (size > -torch.inf) for n, size in sizes.items()}
    total, before = sum(int(ties.sum()) for ties in equal.values()), 0
    left = min(left, total)
    for name, ties in equal.items():
        places = ties.nonzero()[:, 0]
        numbers = torch.arange(before, before + len(places), device=places.device)
        # Tie k is taken if k left / total passes a whole number.
        taken = (numbers + 1) * left // max(1, total) > numbers * left // max(1, total)
        found[name][places[taken]] = True
        before += len(places)
    return found


def stitch(bases: Tensor, masks: Tensor) -> Tensor:
    """sum_m mask_m B_m / max(1, sum_m mask_m), entry by entry: overlapping bases are averaged.

    Localize-and-Stitch (He et al., 2024); `bases` and `masks`, of zeros and ones, are [M, ...].
    """
    return (bases * masks).sum(0).div_(masks.sum(0).clamp(min=1))


def _ordered(values: Tensor) -> Tensor:
    """Integers in the order of float32 values."""
    bits = values.detach().float().view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def wemoe(job: Job) -> LearnedMerge:
    """Learn R_l for the linear layers in MLPs. All tensors are merged by the recipe."""
    plan, descent = job.plan, Descent(job)
    model, parameters = descent.model, descent.parameters
    every = ((name, MLP.match(name)) for name in linear_layers(model) if name in parameters)
    mlps = {name: found[0] for name, found in every if found}
    if not mlps:
        said = "wemoe routes the linear layers in modules named mlp, ffn or feed_forward"
        raise UserError(f"{said}, and the merge moves none of them; choose another method")
    stacked = job.bases({name: parameters[name] for name in mlps})
    held = {name: parameter.detach() for name, parameter in parameters.items()}
    items = [item for item in plan.tensors.items if item.name in held]
    live = [replace(item, out=torch.float32) for item in items]
    merge_items(plan.basis, live, writing(held), plan.engine)
    moved = {name: each.view(-1, *held[name].shape) for name, each in stacked.items()}
    # Weight and bias of R_l. Outputs of 0: the first model is the one merged by the recipe
    shapes = (job.count, descent.width), (job.count,)
    routers = {
        mlp: [nn.Parameter(torch.zeros(shape, device=plan.engine.device)) for shape in shapes]
        for mlp in mlps.values()
    }
    routed = Routed(model, routers, moved)

    def loss_of(ids: Tensor, mask: Tensor, counted: Tensor) -> Tensor:
        # The tokens of the prompts are those up to the first one whose successor counts.
        routed.prompts = (counted.cumsum(1) == counted.long()) & mask.bool()
        return descent.loss_of(ids, mask, counted)

    routed.route()
    descent.run_on_all([*chain(*routers.values())], loss_of)
    out = {item.name: item.out for item in items}
    found = {name: each.to(out[name]) for name, each in moved.items()}
    for mlp, router in routers.items():
        found |= {f"{mlp}.router.0.weight": router[0].data, f"{mlp}.router.0.bias": router[1].data}
    return LearnedMerge(job, None, descent.facts, {ROUTERS: found})
