"""Merges with the best coefficient on validation items, and controls.

A coefficient only multiplies what a merge adds to the base. So one merge with coefficient 1 gives
the direction of the search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

import tvb_mergekit
from real.cells import Cell
from real.run import Run, Weights, difference, mean


@dataclass(frozen=True)
class Merge:
    """A merge method, its keys, and the lambda that it has where none is searched."""

    title: str
    method: str
    default: float = 1.0
    keys: dict[str, Any] = field(default_factory=dict)


MERGES = {
    "ta": Merge("task arithmetic", "basis_ta", 0.3),
    "ties": Merge("TIES", "basis_ties", 0.3),
    "iso": Merge("Iso-C", "basis_iso"),
    "iso_cts": Merge("Iso-CTS, common 0.8", "basis_iso", keys={"common": 0.8}),
    "tsvm": Merge("TSV-M", "basis_tsvm"),
    "wudi": Merge("WUDI, exact", "basis_wudi", keys={"flow_time": "exact"}),
    "wudi_300": Merge("WUDI, t = 300", "basis_wudi", keys={"flow_time": 300}),
    "wudi_30": Merge("WUDI, t = 30", "basis_wudi", keys={"flow_time": 30}),
    "wudi_auto": Merge("WUDI, t = auto", "basis_wudi", keys={"flow_time": "auto"}),
    "wudi_30_embedded": Merge(
        "WUDI, t = 30, embeddings as matrices", "basis_wudi",
        keys={"flow_time": 30, "matrices": "."}),
    # Matrix methods average embeddings and norms. Here these have another merge, or stay the base's
    "wudi_30_summed": Merge("WUDI, t = 30, others summed", "basis_wudi"),
    "wudi_30_left_out": Merge("WUDI, t = 30, others left out", "basis_wudi"),
}  # fmt: skip


def reference(run: Run, cell: Cell) -> dict[str, Any]:
    """The scores of the base and of each specialist."""
    own = {
        task: run.scores(run.shifted(1.0, run.task_vector(task)), "test", [task], cell["tested"])
        for task in run.tasks
    }
    return {"base": {"items": run.scores(run.base, "test", run.tasks, cell["tested"])},
            "items": {task: scores[task] for task, scores in own.items()}}  # fmt: skip


def merge(run: Run, cell: Cell) -> dict[str, Any]:
    """A merge of some bases."""
    return searched(run, cell, direction(run, run.built(cell), cell["how"]))


def direction(run: Run, bases: Any, how: str, scale: str = "tasks", base: Any = None) -> Weights:
    """The vector that a merge adds to the base at lambda = 1."""
    if how in ("wudi_30_summed", "wudi_30_left_out"):
        found, summed = direction(run, bases, "wudi_30"), direction(run, bases, "ta")
        others = [n for n, t in found.items() if t.dim() != 2 or "embed" in n]
        part = 1.0 if how == "wudi_30_summed" else 0.0
        return found | {name: part * summed[name] for name in others}
    method = MERGES[how]
    moved = tvb_mergekit.merge(
        bases, run.base if base is None else base, method.method, lambda_=1.0, lambda_scale=scale,
        dtype=torch.float32, device=run.device, **method.keys,
    )  # fmt: skip
    return difference(moved, run.base)


def searched(run: Run, cell: Cell, vector: Weights) -> dict[str, Any]:
    """The best lambda, its test scores, and the default's share of its validation score."""
    by, found = best(run, cell, vector)
    told = {"lambda": by, "validation": found}
    if cell["how"] in MERGES and cell["kind"] == "merge":
        fixed = validated(run, cell, vector, MERGES[cell["how"]].default)
        told["default"] = fixed / found if found else 0.0
    for at in (1.0, 2.0) if cell["lambdas"] == [1.0] else ():  # of specialists with weak scores
        moved = run.shifted(at, vector)
        losses = (run.test_loss(moved, task, cell["tested"]) for task in run.tasks)
        told[f"loss at {at:g}"] = sum(losses) / len(run.tasks)
    scores = run.scores(run.shifted(by, vector), "test", run.tasks, cell["tested"])
    return told | {"items": scores}


def validated(run: Run, cell: Cell, vector: Weights, by: float) -> float:
    scores = run.scores(run.shifted(by, vector), "validation", run.tasks, cell["items"])
    return mean(scores, run.tasks)


def best(run: Run, cell: Cell, vector: Weights) -> tuple[float, float]:
    """The lambda of the best validation score, and this score.

    A cell with a `start` climbs from there until no neighbour is better. Others, of merges that can
    have two maxima, ask for the whole grid.
    """
    grid = cell["lambdas"]
    score = cache(lambda by: validated(run, cell, vector, by))
    by = climbed(grid, score, cell["start"]) if "start" in cell else max(grid, key=score)
    return by, score(by)


def climbed(grid: Sequence[float], score: Callable[[float], float], point: float) -> float:
    """The point of an increasing grid from which no neighbour is better; the smallest of equals."""
    place = grid.index(point)
    while True:
        near = range(max(0, place - 1), min(len(grid), place + 2))
        found = max(near, key=lambda i: score(grid[i]))
        if found == place:
            return grid[place]
        place = found
