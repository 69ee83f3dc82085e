"""Cells of stores: bytes and errors of task vectors as exact entries and as bases.

A cell has the bytes, the error and the reconstructed specialists of one way, and addition, TIES and
forgetting with them. Bytes are those of complete `.safetensors` files with their headers.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tvb_mergekit
from study.cells import Cell
from study.kinds.addition import merged
from study.kinds.negation import forget
from study.run import Run, Weights, difference, norm, settings
from tvb_mergekit.store.api import open_model


def basis_of(how: str) -> tuple[str, int] | None:
    """Label and M of ways such as `balanced_5`."""
    label, _, count = how.rpartition("_")
    return (label, int(count)) if label in ("balanced", "pca") else None


def measure(run: Run, cell: Cell) -> dict[str, Any]:
    how = cell["how"]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        kept = how == "lossless" or how.startswith("keep_")  # exact entries of the models' files
        base = run.places["base"] if kept else run.base
        bases, nbytes = _ours(run, how, place / "store")
        if kept:
            bases.check_base(open_model(base), "the base")
        decoded = partial(_decoded, run, bases, base)
        result = facts(run, decoded, nbytes)
        result["specialists"] = {
            task: run.accuracy(model, "test", [task], cell["tested"])[task]
            for task in run.tasks
            for model in [run.shifted((1.0, decoded(task)))]
        }
        result["merges"] = {m: merged(run, cell, bases, m, base) for m in cell["merges"]}
        return result | (forget(run, cell, decoded) if cell["alphas"] else {})


def _ours(run: Run, how: str, place: Path) -> tuple[tvb_mergekit.Bases, int]:
    if how == "all":
        bases = tvb_mergekit.build(run.base, run.models, basis="none", device=run.device)
        return bases, 4 * elements(run)
    if found := basis_of(how):
        label, count = found
        bases = tvb_mergekit.build(
            run.base, run.models, place, dtype=torch.bfloat16, num_bases=count, device=run.device,
            **settings(label),
        )  # fmt: skip
    else:
        share = float(how.removeprefix("keep_")) if how != "lossless" else None
        models = {task: run.places[task] for task in run.tasks}
        bases = tvb_mergekit.build(
            run.places["base"], models, place, keep=share, lossless=share is None, device=run.device
        )
    return bases, sum(file.stat().st_size for file in place.glob("*/*.safetensors"))


def _decoded(run: Run, bases: tvb_mergekit.Bases, base: Any, task: str) -> Weights:
    """The task vector as the bases, or the codes, give it; float32."""
    rebuilt = tvb_mergekit.reconstruct(bases, base, task, dtype=torch.float32)
    return difference(rebuilt, run.base)


def elements(run: Run) -> int:
    """The elements of all task vectors."""
    return len(run.tasks) * sum(tensor.numel() for tensor in run.base.values())


def facts(run: Run, decoded: Callable[[str], Weights], nbytes: int) -> dict[str, Any]:
    """Bytes and errors of a way, for each task vector and for all together."""
    errors, lost, whole = {}, 0.0, 0.0
    for task in run.tasks:
        true = run.task_vector(task)
        off, size = norm(difference(decoded(task), true)), norm(true)
        errors[task] = off / size
        lost, whole = lost + off**2, whole + size**2
    return {
        "bytes": nbytes,
        "share": nbytes / (2 * elements(run)),
        "bits": 8 * nbytes / elements(run),
        "errors": errors,
        "mean_error": statistics.fmean(errors.values()),
        "error": math.sqrt(lost / whole),
    }


KINDS = {"bits": measure}
