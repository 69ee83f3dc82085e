"""The paper's theory: constants and bounds of Theorems 3.5 and 3.7, and the losses they bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import tvb_mergekit
from real.cells import Cell
from real.run import Run, Weights, difference, inner, norm

STEP = 4e-2  # of finite differences, as a length in weight space; task vectors are about 5 long
TOGETHER = 4  # examples whose activations are in memory


def theory(run: Run, cell: Cell) -> dict[str, Any]:
    """Constants, and for each task the losses of addition and of negation."""
    vectors = {task: run.task_vector(task) for task in run.tasks}
    gram = torch.tensor([[inner(a, b) for b in vectors.values()] for a in vectors.values()],
                        dtype=torch.float64)  # fmt: skip
    lengths = gram.diagonal().sqrt()
    cosines = (gram / torch.outer(lengths, lengths)).fill_diagonal_(0)
    even, tasks = run.shifted(1 / len(run.tasks), run.total(run.tasks)), {}
    for place, (task, vector) in enumerate(vectors.items()):
        own = run.shifted(1.0, vector)
        least, base = (run.test_loss(weights, task, cell["tested"]) for weights in (own, run.base))
        tasks[task] = {
            "norm": float(lengths[place]),
            "ratio": float(lengths[place]) / norm(run.base),
            "largest cosine": float(cosines[place].abs().max()),
            "smoothness": smoothness(run, own, task, cell["examples"], cell["steps"]),
            "base": base - least,
            "added": run.test_loss(even, task, cell["tested"]) - least,
        }
    return {
        "C": float(gram.diagonal().max()),
        "epsilon": float(cosines.abs().max()),
        "eigenvalues": torch.linalg.eigvalsh(gram).flip(0).tolist(),
        "tasks": tasks,
        "negated": _negated(run, cell, vectors),
    }


def _negated(run: Run, cell: Cell, vectors: Mapping[str, Weights]) -> dict[str, Any]:
    """The largest rise of another task's loss when a task is subtracted from the base.

    Once by its own vector, and once as the bases reconstruct it.
    """
    bases, tested = run.built(cell), cell["tested"]
    before = {task: run.test_loss(run.base, task, tested) for task in run.tasks}
    found: dict[str, dict[str, float]] = {}
    for task, vector in vectors.items():
        again = tvb_mergekit.reconstruct(bases, run.base, task, dtype=torch.float32)
        found[task] = {}
        for how, each in (("own", vector), ("rebuilt", difference(again, run.base))):
            moved = run.shifted(-1.0, each)
            found[task][how] = max(run.test_loss(moved, other, tested) - before[other]
                                   for other in run.tasks if other != task)  # fmt: skip
    return found


def smoothness(run: Run, weights: Weights, task: str, examples: int, steps: int) -> float:
    """The eigenvalue of largest size of the Hessian of a task's loss, by power iteration.

    A product with the Hessian is a difference of two gradients.
    """
    items = run.items(task, "validation")[:examples]
    generator = torch.Generator().manual_seed(0)
    direction: dict[str, Tensor]
    direction = {n: torch.randn(t.shape, generator=generator).to(t) for n, t in weights.items()}
    value = 0.0
    for _ in range(steps):
        size = norm(direction)
        direction = {name: tensor / size for name, tensor in direction.items()}
        ends = []
        for sign in (1, -1):
            at = {n: (t + sign * STEP * direction[n]).requires_grad_() for n, t in weights.items()}
            for some in (items[k : k + TOGETHER] for k in range(0, len(items), TOGETHER)):
                (run.loss(at, some) * len(some) / len(items)).backward()
            ends.append([tensor.grad for tensor in at.values()])
        product = {
            name: (one - other) / (2 * STEP)
            for name, one, other in zip(weights, *ends, strict=True)
        }
        value = inner(direction, product)
        direction = product
    return value


def bounds(found: dict[str, Any], count: int) -> dict[str, list[tuple[float, float]]]:
    """Each theorem's bounds and the losses that were seen, a pair for each task; M is `count`."""
    c, epsilon, tasks = found["C"], found["epsilon"], found["tasks"]
    smooth = {task: abs(each["smoothness"]) for task, each in tasks.items()}
    beyond = max(smooth.values()) * found["eigenvalues"][count]  # L lambda_{M+1}
    largest = max(smooth.values()) * c
    negated = found["negated"]
    return {
        # Theorem 3.5: L C (1 + epsilon)
        "addition": [(smooth[t] * c * (1 + epsilon), tasks[t]["added"]) for t in tasks],
        # Theorem 3.7: L C (3/2 + epsilon), and over bases L C (5/2 + 2 epsilon) + L lambda_{M+1}
        "negation": [(largest * (1.5 + epsilon), negated[t]["own"]) for t in tasks],
        "negation over bases": [(largest * (2.5 + 2 * epsilon) + beyond, negated[t]["rebuilt"])
                                for t in tasks],
    }  # fmt: skip
