"""Stores: bytes and errors of kept task vectors, and the scores of the tasks and their merges."""

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import tvb_mergekit
from real.cells import Cell
from real.merges import best, direction
from real.run import Run, difference, means, norm


def kept(run: Run, cell: Cell) -> dict[str, Any]:
    """One way to keep all tasks: `lossless`, `keep_SHARE`, or bases in bfloat16."""
    how, errors, alone = cell["how"], dict[str, float](), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        base: Any = run.own  # samples and lossless codes are of the files' own entries
        if how == "bases":
            base = run.base
            bases = run.built(cell, store, dtype=torch.bfloat16)
        else:
            form = {"lossless": True} if how == "lossless" else {"keep": float(how[5:])}
            bases = tvb_mergekit.build(base, run.folders, store, device=run.device, **form)
        size = sum(file.stat().st_size for file in store.glob("*/**/*.safetensors"))
        for task in run.tasks:
            again = tvb_mergekit.reconstruct(bases, base, task, dtype=torch.float32)
            vector, true = difference(again, run.base), run.task_vector(task)
            errors[task] = norm(difference(vector, true)) / norm(true)
            shifted = run.shifted(1.0, vector)
            alone |= means(run.scores(shifted, "test", [task], cell["tested"]))
        merged = {}
        for merge in ("ta", "wudi_30"):
            vector = direction(run, bases, merge, base=base)
            moved = run.shifted(best(run, cell, vector)[0], vector)
            merged[merge] = means(run.scores(moved, "test", run.tasks, cell["tested"]))
    elements = len(run.tasks) * sum(tensor.numel() for tensor in run.base.values())
    return {"bytes": size, "bits": 8 * size / elements, "error": statistics.fmean(errors.values()),
            "specialists": alone, "merges": merged}  # fmt: skip
