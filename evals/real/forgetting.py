"""Negation: each task forgotten from a merge of all.

The paper forgets from the pretrained model, and asks a control task to keep 95 %. This base answers
wrong to begin with, so a task is forgotten from WUDI's merge of all tasks. The other tasks are the
control.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tvb_mergekit
from real.cells import Cell
from real.merges import direction
from real.run import Run, Weights, difference, mean, means, norm

KEPT = 0.95  # of the control score


def forget(run: Run, cell: Cell) -> dict[str, Any]:
    """Subtract alpha times each task's vector, as a way holds it, and score what is left."""
    merged = run.shifted(1.0, direction(run, run.built({"basis": "none"}), "wudi_30"))
    before = means(run.scores(merged, "test", run.tasks, cell["tested"]))
    found: dict[str, Any] = {"before": before, "tasks": {}}
    with tempfile.TemporaryDirectory() as folder:
        held = _held(run, cell, Path(folder) / "store")
        for task in run.tasks:
            vector, true = held(task), run.task_vector(task)
            alpha = _most_forgotten(run, cell, merged, vector, task)
            left = _without(merged, vector, alpha)
            after = means(run.scores(left, "test", run.tasks, cell["tested"]))
            others = [other for other in run.tasks if other != task]
            found["tasks"][task] = {
                "alpha": alpha,
                "after": after[task],
                "control": statistics.fmean(after[other] for other in others),
                "error": norm(difference(vector, true)) / norm(true),
            }
    return found


def _without(merged: Weights, vector: Weights, alpha: float) -> Weights:
    return {name: tensor - alpha * vector[name].to(tensor) for name, tensor in merged.items()}


def _most_forgotten(run: Run, cell: Cell, merged: Weights, vector: Weights, task: str) -> float:
    """The alpha of the least target score among those that keep 95 % of the control score."""
    others = [other for other in run.tasks if other != task]

    def scores(alpha: float) -> tuple[float, float]:
        left = _without(merged, vector, alpha)
        found = run.scores(left, "validation", run.tasks, cell["items"])
        return mean(found, [task]), mean(found, others)

    every = {alpha: scores(alpha) for alpha in cell["alphas"]}
    least = KEPT * every[0.0][1]
    kept: list[float] = [alpha for alpha, (_, control) in every.items() if control >= least]
    return min(kept, key=lambda alpha: every[alpha][0])


def _held(run: Run, cell: Cell, store: Path) -> Callable[[str], Weights]:
    """task -> its vector: itself, projected, from a sample, or from bases."""
    if cell["basis"] == "none":
        return run.task_vector
    if cell["basis"] == "rand_proj":
        return random_projection(run, cell["num_bases"], cell["seed"])
    if cell["basis"] == "sample":
        base: Any = run.own
        bases = tvb_mergekit.build(base, run.folders, store, keep=0.05, device=run.device)
    else:
        base, bases = run.base, run.built(cell)
    return lambda task: difference(
        tvb_mergekit.reconstruct(bases, base, task, dtype=torch.float32), run.base
    )


def random_projection(run: Run, count: int, seed: int) -> Callable[[str], Weights]:
    """task -> its vector in the span of M Gaussian directions: the paper's RandProj, dense.

    Omega [d, M] is standard normal, and Q its orthonormal columns; the vector becomes Q Q^T tau.
    """
    sizes = [tensor.numel() for tensor in run.base.values()]
    omega = torch.randn(sum(sizes), count, generator=torch.Generator().manual_seed(seed))
    q = torch.linalg.qr(omega).Q

    def project(task: str) -> Weights:
        tau = torch.cat([tensor.flatten().cpu() for tensor in run.task_vector(task).values()])
        parts = (q @ (q.T @ tau)).split(sizes)
        return {n: part.view(t.shape) for (n, t), part in zip(run.base.items(), parts, strict=True)}

    return project
