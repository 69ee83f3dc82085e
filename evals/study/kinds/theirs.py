"""Cells of mergekit's own methods, lambda searched along the way from the base."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from safetensors.torch import load_file

from study.cells import Cell
from study.kinds.addition import Direction, itemized, start_of
from study.run import Run, Weights, difference, norm

DENSE = {"density": 0.2}  # as our TIES
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the merge, and of each model
    "task_arithmetic": ({"normalize": False}, {"weight": 1.0}),
    "ties": ({"normalize": True}, {"weight": 1.0} | DENSE),
    "dare_ties": ({"normalize": True}, {"weight": 1.0} | DENSE),
    "breadcrumbs": ({"normalize": False}, {"weight": 1.0, "density": 0.9, "gamma": 0.01}),
    "model_stock": ({}, {}),
    "karcher": ({}, {}),
}


def theirs(run: Run, cell: Cell) -> dict[str, Any]:
    """One method over all models."""
    shared, each = METHODS[cell["how"]]
    recipe = {
        "merge_method": cell["how"],
        "models": [{"model": run.places[task], "parameters": each} for task in run.tasks],
        "parameters": shared,
        "dtype": "float32",
    }
    if cell["how"] != "karcher":  # it knows no base
        recipe["base_model"] = run.places["base"]
    with tempfile.TemporaryDirectory() as folder:
        config = MergeConfiguration.model_validate(recipe)
        options = MergeOptions(quiet=True, random_seed=0, copy_tokenizer=False, device=run.device)
        run_merge(config, folder, options)
        found: Weights = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            found |= load_file(file)
    moved = {name: found[name].float() for name in run.base}
    along = Direction(run, difference(moved, run.base))
    # An average of T models is much shorter than their sum, for which the lambdas are meant.
    longer = max(1.0, norm(run.total(run.tasks)) / norm(along.vector))
    lambdas = [by * longer for by in cell["lambdas"]]
    best, curve = along.search(lambdas, run.tasks, cell["items"], start_of(cell))
    asked = "test", run.tasks, cell["tested"]
    return {
        "lambda": best,
        "lambdas": lambdas,
        "curve": curve,
        "tuned": along.accuracy(best, *asked),
        "length": norm(along.vector),
        "items": itemized(cell, along.scores(best, *asked)),
    }


KINDS = {"theirs": theirs}
