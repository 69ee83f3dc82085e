"""Cells of the paper's theory: its constants, its bounds, and the losses that they bound.

A run must know `losses`: the loss of weights on a task's test items.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import tvb_mergekit
from study.cells import Cell
from study.run import Run, Weights, built, difference, norm

STEP = 4e-2  # of finite differences, as a length in weight space; task vectors are about 5 long
TOGETHER = 4  # examples whose activations are in memory


def theory(run: Any, cell: Cell) -> dict[str, Any]:
    """Constants, and for each task the losses of addition, of an unseen task and of negation."""
    found = tvb_mergekit.build(run.base, run.models, basis="none", device=run.device)
    every = found.tensors  # without the vectors
    gram = every["gram"]
    lengths = gram.diagonal().sqrt()
    cosines = (gram / torch.outer(lengths, lengths)).fill_diagonal_(0)
    total, count = run.total(run.tasks), len(run.tasks)
    tested, tasks = cell["tested"], {}
    for place, task in enumerate(run.tasks):
        own = run.shifted((1.0, run.task_vector(task)))
        least, base = (run.losses(weights, task, tested) for weights in (own, run.base))
        smooth = smoothness(run, own, task, cell["examples"], cell["steps"])
        added = {
            str(by): run.losses(run.shifted((by, total)), task, tested) - least
            for by in (1 / count, cell["lambda"])
        }
        tasks[task] = {
            "norm": float(lengths[place]),
            "ratio": float(lengths[place]) / norm(run.base),
            "largest cosine": float(cosines[place].abs().max()),
            "smoothness": smooth,
            "base": base - least,
            "added": added,
        }
        tasks[task] |= {"unseen": _unseen(run, cell, task, least), "row": place}
    bases = built(run, cell)
    return {
        "C": float(gram.diagonal().max()),
        "epsilon": float(cosines.abs().max()),
        "eigenvalues": every["eigenvalues"].tolist(),
        "loss": bases.facts["loss"],
        "tasks": tasks,
        "negated": _negated(run, cell, bases),
    }


def _unseen(run: Any, cell: Cell, target: str, least: float) -> dict[str, float]:
    """A task through the bases of the others: the basis with most of its nearest neighbour."""
    others = {task: model for task, model in run.models.items() if task != target}
    bases = tvb_mergekit.build(
        run.base, others, basis="ae", num_bases=cell["num_bases"], device=run.device
    )
    true = run.task_vector(target)
    products = {task: _inner(true, run.task_vector(task)) for task in others}
    nearest = max(products, key=lambda task: products[task])
    assert bases.encoder is not None
    row = bases.encoder[[*others].index(nearest)]
    best = int(row.argmax())
    vector = bases.vectors[best]
    moved = run.shifted((1.0, {name: vector.tensor(name) for name in vector.tensors}))
    return {
        "rho": float(row[best]),
        "inner": products[nearest],  # gamma C
        "least inner": min(products.values()),
        "seen": run.losses(moved, target, cell["tested"]) - least,
    }


def _negated(run: Any, cell: Cell, bases: tvb_mergekit.Bases) -> dict[str, Any]:
    """The largest rise of another task's loss when a task is subtracted from the base.

    Once by its own vector, and once as the bases reconstruct it.
    """
    before = {task: run.losses(run.base, task, cell["tested"]) for task in run.tasks}
    found = {}
    for task in run.tasks:
        rebuilt = tvb_mergekit.reconstruct(bases, run.base, task, dtype=torch.float32)
        vectors: dict[str, Weights] = {"own": run.task_vector(task)}
        vectors["rebuilt"] = difference(rebuilt, run.base)
        found[task] = {
            how: max(
                run.losses(run.shifted((-1.0, vector)), other, cell["tested"]) - before[other]
                for other in run.tasks if other != task
            )
            for how, vector in vectors.items()
        }  # fmt: skip
    return found


def smoothness(run: Run, weights: Weights, task: str, examples: int, steps: int) -> float:
    """The eigenvalue of largest size of the Hessian of a task's loss, by power iteration.

    A product with the Hessian is a difference of two gradients.
    """
    docs = run.items(task, "validation")[:examples]
    generator = torch.Generator().manual_seed(0)
    direction = {
        name: torch.randn(tensor.shape, generator=generator).to(tensor.device)
        for name, tensor in weights.items()
    }
    value = 0.0
    for _ in range(steps):
        size = norm(direction)
        direction = {name: tensor / size for name, tensor in direction.items()}
        ends = []
        for sign in (1, -1):
            at = {n: (t + sign * STEP * direction[n]).requires_grad_() for n, t in weights.items()}
            for some in (docs[k : k + TOGETHER] for k in range(0, len(docs), TOGETHER)):
                (run.loss(at, some, exact=True) * len(some) / len(docs)).backward()
            ends.append([tensor.grad for tensor in at.values()])
        product = {
            name: (one - other) / (2 * STEP)
            for name, one, other in zip(weights, *ends, strict=True)
        }
        value = _inner(direction, product)
        direction = product
    return value


def _inner(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return sum(float((one[name].double() * other[name].double()).sum()) for name in one)


KINDS = {"theory": theory}
