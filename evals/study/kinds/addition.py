"""References, and the best coefficient of merges on validation items.

The library builds and merges, as a user would. A coefficient only multiplies what a merge adds to
the base. So one merge with coefficient 1 gives the direction of the search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import tvb_mergekit
from study.cells import Cell
from study.run import Run, difference, means, used
from tvb_mergekit.tune import search
from tvb_mergekit.tune.search import DIGITS


def reference(run: Run, cell: Cell) -> dict[str, Any]:
    """The scores of the base and of each specialist."""
    tested, own = cell["tested"], dict[str, float]()
    each = dict[str, list[float]]()
    for task in run.tasks:
        scores = run.scores(run.shifted((1.0, run.task_vector(task))), "test", [task], tested)
        own |= means(scores)
        each |= itemized(cell, scores)
    base = run.scores(run.base, "test", (*run.tasks, *run.unseen), tested)
    found = {
        "base": means(base),
        "specialists": own,
        "bytes": run.held,
        "parameters": sum(tensor.numel() for tensor in run.base.values()),
    }
    return found | ({"items": {"base": itemized(cell, base), "specialists": each}} if each else {})


def itemized(cell: Cell, scores: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """The score of each item, for paired tests of a study that asks for them."""
    if not cell.get("itemized"):
        return {}
    return {task: [round(score, 4) for score in each] for task, each in scores.items()}


def mean_score(scores: Mapping[str, float], tasks: Iterable[str]) -> float:
    """Equal counts of right answers, task by task in any order, give equal means."""
    found = [scores[task] for task in tasks]
    return round(sum(found) / len(found), DIGITS)


class Direction:
    """theta_0 + lambda * vector, for any lambda; a score is computed once."""

    def __init__(self, run: Run, vector: Mapping[str, Tensor]) -> None:
        self.run, self.vector = run, vector
        self.found: dict[tuple[Any, ...], dict[str, list[float]]] = {}

    def scores(
        self, scale: float, split: str, tasks: Sequence[str], items: int
    ) -> dict[str, list[float]]:
        asked = round(scale, 9), split, tuple(tasks), items
        if asked not in self.found:
            weights = self.run.shifted((scale, self.vector))
            self.found[asked] = self.run.scores(weights, split, tasks, items)
        return self.found[asked]

    def accuracy(
        self, scale: float, split: str, tasks: Sequence[str], items: int
    ) -> dict[str, float]:
        return means(self.scores(scale, split, tasks, items))

    def search(
        self, grid: Sequence[float], tasks: Sequence[str], items: int, start: int | None = None
    ) -> tuple[float, list[float | None]]:
        """The lambda with the best mean validation accuracy, the smallest of equals; all means.

        Args:
            start: climb from this place of the grid, instead of asking for all means.
        """

        def score(scale: float) -> float:
            return mean_score(self.accuracy(scale, "validation", tasks, items), tasks)

        if start is not None:
            return climbed(grid, score, start)
        best, means = search.grid(grid, score)
        return best, [*means]


def climbed(
    grid: Sequence[float], score: Callable[[float], float], place: int
) -> tuple[float, list[float | None]]:
    """The point from which no neighbour is better, and the scores that were asked for.

    Of a score with one maximum this is the best point of the grid.
    """
    found: dict[int, float] = {}
    while True:
        near = [i for i in (place - 1, place, place + 1) if 0 <= i < len(grid)]
        found |= {i: score(grid[i]) for i in near if i not in found}
        best = max(near, key=lambda i: (found[i], -i))
        if best == place:
            return grid[place], [found.get(i) for i in range(len(grid))]
        place = best


def start_of(cell: Cell) -> int | None:
    """Where a search climbs from: the place of the cell's `start` among its `lambdas`.

    None for a search of the whole grid.
    """
    if cell.get("whole") or "start" not in cell:
        return None
    return int(cell["lambdas"].index(cell["start"]))


def merged(
    run: Run, cell: Cell, bases: tvb_mergekit.Bases, merge: str, base: Any = None
) -> dict[str, Any]:
    """One merge, such as `ta` or `wudi_30`, with its coefficient searched on two scales.

    `bases` and `tasks` are the recipe's `lambda_scale`.
    """
    method, _, time = merge.partition("_")
    keys: dict[str, Any] = {"flow_time": float(time)} if time else {}
    if bases.keeps_tasks:
        keys["basis"] = "none"
    moved = tvb_mergekit.merge(
        bases, run.base if base is None else base, f"basis_{method}", lambda_=1.0,
        dtype=torch.float32, device=run.device, **keys,
    )  # fmt: skip
    moving = Direction(run, difference(moved, run.base))
    directions = {"bases": (1.0, moving), "tasks": (len(run.tasks) / bases.num_bases, moving)}
    scales = {}
    for scale in cell.get("scales", directions):
        factor, direction = directions[scale]
        grid = [by * factor for by in cell["lambdas"]]
        best, found = direction.search(grid, run.tasks, used(run, cell), start_of(cell))
        test = direction.scores(best, "test", run.tasks, cell["tested"])
        items = {"items": itemized(cell, test)} if cell.get("itemized") else {}
        scales[scale] = {"lambda": best, "grid": grid, "validation": found, "test": means(test)}
        scales[scale] |= items
    return {"items": used(run, cell), "scales": scales}


KINDS = {"reference": reference}
