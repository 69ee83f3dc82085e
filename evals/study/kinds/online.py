"""Cells of tasks that arrive one by one (Algorithm 1), and what others hold of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import tvb_mergekit
from study.cells import Cell
from study.kinds.addition import GRID, Direction
from study.run import Run, Weights, difference, used

PAPERS_LAMBDA = 0.3  # where the paper does not search


def order_of(run: Run, cell: Cell) -> list[str]:
    return random.Random(cell["order"]).sample(run.tasks, len(run.tasks))


def online(run: Run, cell: Cell) -> dict[str, Any]:
    """Tasks arrive one by one; the held vectors are added up at the end, and along the way."""
    order = order_of(run, cell)
    tested, curve = cell["tested"], []
    for seen, (vector, count) in enumerate(BUFFERS[cell["how"]](run, cell, order), 1):
        if seen < len(order) and not (cell["curve"] and seen % 2 == 0):
            continue
        held, known = Direction(run, vector), order[:seen]
        # the paper's grid times tasks per vector held
        best, _ = held.search(
            [by * seen / count for by in cell.get("lambdas", GRID)], known, used(run, cell)
        )
        test = held.accuracy(best, "test", known, tested)
        curve.append({"seen": seen, "lambda": best, "test": test})
    fixed = held.accuracy(PAPERS_LAMBDA, "test", order, tested)
    return {
        "order": order,
        "fixed": {"lambda": PAPERS_LAMBDA, "test": fixed},
        "tuned": {"lambda": best, "test": test},
        "curve": curve if cell["curve"] else None,
    }


def algorithm_1(
    run: Run, cell: Cell, order: Sequence[str], **first: Any
) -> Iterator[tvb_mergekit.Bases]:
    """The bases after each task, as `tvb add` makes them; `first`: settings of the encoder."""
    bases: tvb_mergekit.Bases | None = None
    for task in order:
        bases = tvb_mergekit.add(
            bases, run.base, run.models[task], task, budget=cell["budget"], compress=cell["how"],
            device=run.device,
            **({} if bases else first),
        )  # fmt: skip
        yield bases


def _bases_buffer(run: Run, cell: Cell, order: Sequence[str]) -> Iterator[tuple[Weights, int]]:
    for bases in algorithm_1(run, cell, order):
        moved = tvb_mergekit.merge(bases, run.base, "basis_ta", lambda_=1.0, device=run.device)
        yield difference(moved, run.base), bases.num_bases


def kept_tasks(cell: Cell, order: Sequence[str]) -> Iterator[list[str]]:
    """After each task those in a random buffer: at the budget, one of them is thrown away."""
    rng, kept = random.Random(f"{cell['order']}/{cell['budget']}"), list[str]()
    for task in order:
        if len(kept) == cell["budget"]:
            kept.remove(rng.choice(kept))
        kept.append(task)
        yield [*kept]


def _random_buffer(run: Run, cell: Cell, order: Sequence[str]) -> Iterator[tuple[Weights, int]]:
    for kept in kept_tasks(cell, order):
        yield run.total(kept), len(kept)


def _continual(run: Run, cell: Cell, order: Sequence[str]) -> Iterator[tuple[Weights, int]]:
    """One running sum of all tasks; no task can be removed from it."""
    for seen in range(1, len(order) + 1):
        yield run.total(order[:seen]), seen


def magmax(run: Run, cell: Cell, order: Sequence[str]) -> Iterator[tuple[Weights, int]]:
    """In each entry the task vector of the largest magnitude (Marczak et al., 2024)."""
    largest: Weights = {}
    for seen, task in enumerate(order, 1):
        vector = run.task_vector(task)
        largest = {
            name: torch.where(tensor.abs() > largest[name].abs(), tensor, largest[name])
            if largest else tensor
            for name, tensor in vector.items()
        }  # fmt: skip
        yield largest, seen


BUFFERS: dict[str, Callable[[Run, Cell, Sequence[str]], Iterator[tuple[Weights, int]]]]
BUFFERS = {"ae": _bases_buffer, "balanced": _bases_buffer, "rand_select": _random_buffer}
BUFFERS |= {"continual_ta": _continual, "magmax": magmax}

KINDS = {"online": online}
