"""Merges of matrices beside sums: their cells, and the methods that hold one vector online.

lambda is the best of LAMBDAS on validation items (of n_i a task, M bases get n_i M/T). Equal ratios
search merges with large and with small coefficients alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cells
import data
import torch
from plan import Cell, Plan, T
from runs import Run, Weights, difference

import tvb_mergekit
from tvb_mergekit.settings import resolve_settings

TASKS = tuple(data.TASKS)
LAMBDAS = tuple(float(f"{10 ** (i / 10):.2g}") for i in range(-14, 5))  # 0.04, 0.05 ... 2, 2.5
ANNEALED = 0.75  # of T: from this M on the paper anneals its encoder online


@dataclass(frozen=True)
class Merge:
    """A merge method, and the lambda that it has where none is searched."""

    title: str
    method: str
    fixed: float
    settings: dict[str, Any] = field(default_factory=dict)


MERGES = {
    "ta": Merge("task arithmetic", "basis_ta", 0.3),
    "ties": Merge("TIES", "basis_ties", 0.3),
    "iso": Merge("Iso-C", "basis_iso", 1.0),
    "iso_cts": Merge("Iso-CTS, common 0.8", "basis_iso", 1.0, {"common": 0.8}),
    "tsvm": Merge("TSV-M", "basis_tsvm", 1.0),
    "wudi": Merge("WUDI", "basis_wudi", 1.0),
}
# What is it of Iso-C that helps? The sum's matrices as they are, or as long as Iso-C's; and of all
# other tensors the mean, as there.
CONTROLS = {
    "ta_matrices": Merge("task arithmetic, others averaged", "basis_ta", 0.3),
    "ta_lengths": Merge("the same, matrices as long as Iso-C's", "basis_ta", 1.0),
}
ALL = MERGES | CONTROLS
ONLINE = ("ta", "tsvm", "iso", "wudi")
BASES = ("balanced", "ae_exact", "ae_adam_5", "pca", "rand_select")
BUFFERS = {"ae": "ae", "rand_select": "random buffer"}


# ------------------------------------------------------------------------------------------- cells


def addition_cells(plan: Plan) -> list[Cell]:
    every = [("none", T), *((label, m) for m in plan.num_bases if m < T for label in BASES)]
    return [cell_of(label, count, plan.items, plan.tested) for label, count in every]


def cell_of(label: str, count: int, items: int, tested: int) -> Cell:
    merges = [*(ALL if label == "none" else MERGES)]
    return {"kind": "matrices", "basis": label, "num_bases": count, "seed": 0, "dtype": "float32",
            "items": items, "tested": tested, "lambdas": [*LAMBDAS], "merges": merges}  # fmt: skip


def online_cells(plan: Plan) -> list[Cell]:
    """On half of the test items, as there are many cells."""
    found: list[Cell] = []
    for order in range(plan.orders):
        cell = {"kind": "matrices_online", "order": order, "tested": plan.tested // 2}
        found += [cell | {"how": how, "budget": None} for how in SINGLE]
        for budget in plan.budgets:
            annealed = {"annealed": budget >= ANNEALED * T}
            found.append(cell | {"how": "ae", "budget": budget} | annealed)
            found.append(cell | {"how": "rand_select", "budget": budget})
    return found


def direction(run: Run, bases: tvb_mergekit.Bases, how: str, scale: str = "tasks") -> Weights:
    """The vector that the merge adds to the base at lambda = 1."""
    if how in CONTROLS:
        return _control(run, bases, how)
    merge = ALL[how]
    moved = tvb_mergekit.merge(
        bases, run.base, merge.method, lambda_=1.0, lambda_scale=scale, dtype=torch.float32,
        **merge.settings,
    )  # fmt: skip
    return difference(moved, run.base)


def _control(run: Run, bases: tvb_mergekit.Bases, how: str) -> Weights:
    found, total = direction(run, bases, "iso"), direction(run, bases, "ta")
    for tensor in found:
        if is_matrix(tensor, run.base[tensor].shape):
            ratio = torch.linalg.norm(found[tensor]) / torch.linalg.norm(total[tensor])
            found[tensor] = total[tensor] * (ratio if how == "ta_lengths" else 1)
    return found


# which tensors the new methods merge as matrices
is_matrix: Callable[[str, Sequence[int]], bool]
is_matrix = resolve_settings("basis_iso", {}, TASKS).is_matrix


def measure(run: Run, cell: Cell) -> dict[str, Any]:
    """Merges of some bases, lambda searched and not."""
    bases = cells.built(run, cell)
    items = max(1, round(cell["items"] * bases.num_bases / len(run.tasks)))
    merges = {}
    for how in cell["merges"]:
        along = cells.Direction(run, direction(run, bases, how))
        best, curve = along.search(cell["lambdas"], run.tasks, items)
        fixed = ALL[how].fixed
        merges[how] = {
            "lambda": best,
            "curve": curve,
            "tuned": along.accuracy(best, "test", run.tasks, cell["tested"]),
            "fixed": along.accuracy(fixed, "test", run.tasks, cell["tested"]),
        }
    return {"items": items, "merges": merges}


def measure_online(run: Run, cell: Cell) -> dict[str, Any]:
    """Tasks arrive one by one; what is held after the last, merged without a search."""
    order = cells.order_of(cell)
    if cell["how"] in SINGLE:
        vector, lambdas = SINGLE[cell["how"]](run, order)
        merged = {str(by): (by, vector) for by in lambdas}
    else:
        bases = held(run, cell, order)
        merged = {how: (ALL[how].fixed, direction(run, bases, how, "bases")) for how in ONLINE}
    return {
        "order": order,
        "merges": {
            how: {"lambda": by, "test": run.accuracy(run.shifted((by, vector)), "test", TASKS,
                                                     cell["tested"])}
            for how, (by, vector) in merged.items()
        },
    }  # fmt: skip


def held(run: Run, cell: Cell, order: Sequence[str]) -> tvb_mergekit.Bases:
    """The bases, or the task vectors, that a buffer holds in the end."""
    if cell["how"] == "rand_select":
        *_, kept = cells.kept_tasks(cell, order)
        return tvb_mergekit.build(run.base, {t: run.models[t] for t in kept}, basis="none")
    annealed = {"anneal_every": 500, "anneal_factor": 0.8} if cell["annealed"] else {}
    *_, bases = cells.algorithm_1(run, cell, order, **annealed)
    return bases


# ------------------------------------------------------ online, one vector: with its lambdas, fixed


def _sum(run: Run, order: Sequence[str]) -> tuple[Weights, Sequence[float]]:
    return cells.total(run, order), (cells.PAPERS_LAMBDA,)


def _magmax(run: Run, order: Sequence[str]) -> tuple[Weights, Sequence[float]]:
    *_, (vector, _) = cells.magmax(run, {}, order)
    return vector, (0.3, 0.5, 1.0)


def _ties(run: Run, order: Sequence[str], added: bool) -> tuple[Weights, Sequence[float]]:
    """Continual TIES: of the merged vector and the new one.

    Published code (fusion_bench, by OPCM's authors) adds lambda times the result to the old vector;
    otherwise the result replaces it.
    """
    by = cells.PAPERS_LAMBDA if added else 1.0
    vector = {n: by * tensor for n, tensor in run.task_vector(order[0]).items()}
    for task in order[1:]:
        pair = {"before": run.shifted((1.0, vector)), "new": run.models[task]}
        both = direction(run, tvb_mergekit.build(run.base, pair, basis="none"), "ties")
        vector = {n: by * both[n] + (vector[n] if added else 0) for n in both}
    return vector, (1.0 if added else cells.PAPERS_LAMBDA,)


def _opcm(run: Run, order: Sequence[str], alpha: float = 0.5) -> tuple[Weights, Sequence[float]]:
    """OPCM (Tang et al., 2025, arXiv 2501.09522): add a task's part that the merged vector lacks.

    In the singular vectors of the merged matrix, a new matrix loses its diagonal and the block of
    the directions that hold a share `alpha` of the singular values. The sum is then made as long as
    a task vector is on average.
    """
    merged, factor, lengths = run.task_vector(order[0]), 1.0, list[float]()
    lengths.append(cells.norm(merged))
    for task in order[1:]:
        new = run.task_vector(task)
        lengths.append(cells.norm(new))
        for tensor in new:
            if is_matrix(tensor, new[tensor].shape):
                new[tensor] = _outside(new[tensor], merged[tensor], alpha)
        both = {n: factor * merged[n] + new[n] for n in new}
        factor = cells.norm(both) / statistics.fmean(lengths)
        merged = {n: tensor / factor for n, tensor in both.items()}
    return merged, (1.0,)


def _outside(new: torch.Tensor, merged: torch.Tensor, alpha: float) -> torch.Tensor:
    left, sizes, right = torch.linalg.svd(merged.double())
    first = int((sizes.cumsum(0) / sizes.sum() > alpha).int().argmax())
    inner = left.T @ new.double() @ right.T
    inner.diagonal().zero_()
    inner[:first, :first] = 0
    outside: torch.Tensor = left @ inner @ right
    return outside.float()


SINGLE: dict[str, Callable[[Run, Sequence[str]], tuple[Weights, Sequence[float]]]] = {
    "continual_ta": _sum,
    "magmax": _magmax,
    "continual_ties": partial(_ties, added=True),
    "continual_ties_in_place": partial(_ties, added=False),
    "opcm": _opcm,
}
SINGLE_TITLES = {
    ("continual_ta", "0.3"): "continual TA at 0.3",
    ("magmax", "0.3"): "MagMax at 0.3",
    ("magmax", "0.5"): "MagMax at 0.5",
    ("magmax", "1.0"): "MagMax at 1",
    ("continual_ties", "1.0"): "continual TIES, added at 0.3",
    ("continual_ties_in_place", "0.3"): "continual TIES in place, at 0.3",
    ("opcm", "1.0"): "OPCM",
}

KINDS = cells.KINDS | {"matrices": measure, "matrices_online": measure_online}
