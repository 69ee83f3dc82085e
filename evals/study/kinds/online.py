"""Tasks that arrive one by one: Algorithm 1, a buffer of task vectors, and one vector (MagMax)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import tvb_mergekit
from study.cells import Cell
from study.run import Run, Weights

PAPERS_LAMBDA = 0.3  # where the paper does not search


def order_of(run: Run, cell: Cell) -> list[str]:
    return random.Random(cell["order"]).sample(run.tasks, len(run.tasks))


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


def kept_tasks(cell: Cell, order: Sequence[str]) -> list[str]:
    """Those in a random buffer after the last task: at the budget, one of them is thrown away."""
    rng, kept = random.Random(f"{cell['order']}/{cell['budget']}"), list[str]()
    for task in order:
        if len(kept) == cell["budget"]:
            kept.remove(rng.choice(kept))
        kept.append(task)
    return kept


def magmax(run: Run, order: Sequence[str]) -> Weights:
    """In each entry the task vector of the largest magnitude (Marczak et al., 2024)."""
    largest: Weights = {}
    for task in order:
        vector = run.task_vector(task)
        largest = {
            name: torch.where(tensor.abs() > largest[name].abs(), tensor, largest[name])
            if largest else tensor
            for name, tensor in vector.items()
        }  # fmt: skip
    return largest
