"""Tasks that arrive one by one: Algorithm 1 against a buffer of task vectors drawn at random.

The vectors that are held after the last task are merged at the default lambda.
"""

from __future__ import annotations

import random
from typing import Any

import tvb_mergekit
from real.cells import Cell
from real.merges import MERGES, direction
from real.run import Run, means

ONLINE = ("ta", "tsvm", "wudi_300")


def online(run: Run, cell: Cell) -> dict[str, Any]:
    order = random.Random(cell["order"]).sample(run.tasks, len(run.tasks))
    bases = _algorithm_1(run, cell, order) if cell["how"] == "ae" else _buffer(run, cell, order)
    found = {}
    for how in ONLINE:
        moved = run.shifted(MERGES[how].default, direction(run, bases, how, "bases"))
        found[how] = means(run.scores(moved, "test", run.tasks, cell["tested"]))
    return {"merges": found}


def _algorithm_1(run: Run, cell: Cell, order: list[str]) -> Any:
    """The bases after the last task, as `tvb add` makes them."""
    bases = None
    for task in order:
        bases = tvb_mergekit.add(
            bases, run.base, run.folders[task], task, budget=cell["budget"], compress="ae",
            device=run.device,
        )  # fmt: skip
    return bases


def _buffer(run: Run, cell: Cell, order: list[str]) -> Any:
    """At the budget one task vector is thrown away for each new one."""
    rng, kept = random.Random(f"{cell['order']}/{cell['budget']}"), list[str]()
    for task in order:
        if len(kept) == cell["budget"]:
            kept.remove(rng.choice(kept))
        kept.append(task)
    models = {task: run.folders[task] for task in kept}
    return tvb_mergekit.build(run.base, models, basis="none", device=run.device)
