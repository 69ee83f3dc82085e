"""Cells of negation: each task forgotten from a model that does all of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

import tvb_mergekit
from study.cells import Cell
from study.kinds.addition import mean_score
from study.kinds.matrices import direction
from study.run import Run, Weights, built, difference, norm
from tvb_mergekit.tune import search

KEPT = 0.95  # of the control score


def negation(run: Run, cell: Cell) -> dict[str, Any]:
    return forget(run, cell, _forgetting(run, cell))


def forget(run: Run, cell: Cell, vector_of: Callable[[str], Weights]) -> dict[str, Any]:
    """Forget each task, by a vector to subtract.

    The paper forgets from the pretrained model, and asks a control task to keep 95 %. This base
    answers wrong to begin with, so a task is forgotten from the base and all task vectors, summed
    or merged as `from` says. The other tasks are the control.
    """
    if how := cell.get("from"):
        all_vectors = tvb_mergekit.build(run.base, run.models, basis="none", device=run.device)
        merged = direction(run, all_vectors, how)
        del all_vectors
    else:
        merged = run.total(run.tasks)
    shipped = run.shifted((cell["lambda"], merged))
    start = run.accuracy(shipped, "test", run.tasks, cell["tested"])
    tasks = {}
    for task in run.tasks:
        others = [other for other in run.tasks if other != task]
        vector, true = vector_of(task), run.task_vector(task)
        error = norm(difference(vector, true)) / norm(true)
        states: dict[float, Callable[[], Weights]]
        states = {alpha: partial(_without, shipped, vector, alpha) for alpha in cell["alphas"]}
        alpha = _most_forgotten(run, states, task, cell["items"])
        after = run.accuracy(states[alpha](), "test", run.tasks, cell["tested"])
        tasks[task] = {
            "alpha": alpha,
            "target": after[task],
            "control": statistics.fmean(after[other] for other in others),
            "control_before": statistics.fmean(start[other] for other in others),
            "relative_error": error,
            "own": run.own(states[alpha]()),
        }
    own = {"base": run.own(run.base), "start": run.own(shipped)}
    return {"lambda": cell["lambda"], "start": start, "tasks": tasks, "own": own}


def _without(start: Weights, vector: Weights, alpha: float) -> Weights:
    return {name: tensor - alpha * vector[name].to(tensor.device) for name, tensor in start.items()}


def _most_forgotten(
    run: Run, states: Mapping[float, Callable[[], Weights]], task: str, items: int
) -> float:
    """The alpha with the least target score among those that keep 95 % of the control score."""
    others = [other for other in run.tasks if other != task]

    def target(alpha: float) -> float:
        return run.accuracy(states[alpha](), "validation", [task], items)[task]

    def control(alpha: float) -> float:
        return mean_score(run.accuracy(states[alpha](), "validation", others, items), others)

    return search.most_forgotten(list(states), target, control, KEPT)


def _forgetting(run: Run, cell: Cell) -> Callable[[str], Weights]:
    """task -> the vector to subtract."""
    if cell["basis"] == "plain":
        return run.task_vector
    if cell["basis"] == "rand_proj":
        return _projecting(run, cell["num_bases"], cell["seed"])
    bases = built(run, cell)
    return lambda task: difference(tvb_mergekit.reconstruct(bases, run.base, task), run.base)


def _projecting(run: Run, count: int, seed: int) -> Callable[[str], Weights]:
    """task -> its vector in the span of M Gaussian directions, the paper's RandProj; all dense."""
    names = list(run.base)
    shapes = [run.base[name].shape for name in names]
    generator = torch.Generator().manual_seed(seed)
    omega = torch.randn(sum(s.numel() for s in shapes), count, generator=generator)
    span = torch.linalg.qr(omega).Q

    def project(task: str) -> Weights:
        vector = run.task_vector(task)
        flat = torch.cat([vector[name].flatten().cpu() for name in names])
        parts = (span @ (span.T @ flat)).split([s.numel() for s in shapes])
        return {n: p.view(s) for n, p, s in zip(names, parts, shapes, strict=True)}

    return project


KINDS = {"negation": negation}
