"""Cells of matrix merges, and of methods that hold one vector online.

Ratios of the searched lambdas are equal, so merges with large and with small coefficients are
searched alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

import tvb_mergekit
from study.cells import Cell
from study.kinds.addition import Direction, itemized, mean_score, start_of
from study.kinds.online import (
    PAPERS_LAMBDA,
    algorithm_1,
    kept_tasks,
    magmax,
    order_of,
)
from study.run import Run, Weights, built, difference, norm, used
from tvb_mergekit.core.settings import resolve_settings

LAMBDAS = tuple(float(f"{10 ** (i / 10):.2g}") for i in range(-14, 5))  # 0.04, 0.05 ... 2, 2.5


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
    "wudi": Merge("WUDI, exact", "basis_wudi", 1.0, {"flow_time": "exact"}),
    "wudi_300": Merge("WUDI, t = 300", "basis_wudi", 1.0, {"flow_time": 300}),
    "wudi_30": Merge("WUDI, t = 30", "basis_wudi", 1.0, {"flow_time": 30}),
}
EMBEDDED = {
    "wudi_30_embedded": Merge(
        "WUDI, t = 30, embeddings as matrices", "basis_wudi", 1.0,
        {"flow_time": 30, "matrices": "."}),
}  # fmt: skip
# The matrices of one merge, and all other tensors of another. Matrix methods average these.
CONTROLS = {
    "ta_matrices": Merge("task arithmetic, others averaged", "basis_ta", 0.3),
    "ta_left_out": Merge("task arithmetic, others left out", "basis_ta", 0.3),
    "ta_lengths": Merge("others averaged, matrices as long as Iso-C's", "basis_ta", 1.0),
    "wudi_30_summed": Merge("WUDI, t = 30, others summed", "basis_wudi", 1.0),
    "wudi_30_left_out": Merge("WUDI, t = 30, others left out", "basis_wudi", 1.0),
}
MADE_OF = {
    "ta_matrices": ("ta", "iso"), "ta_left_out": ("ta", None), "ta_lengths": ("ta", "iso"),
    "wudi_30_summed": ("wudi_30", "ta"), "wudi_30_left_out": ("wudi_30", None),
}  # fmt: skip
CALIBRATED = {f"{how}+svc": replace(MERGES[how], title=f"{MERGES[how].title}, SVC")
              for how in ("ta", "tsvm", "wudi_30")}  # fmt: skip
ALL = MERGES | EMBEDDED | CONTROLS | CALIBRATED
ONLINE = ("ta", "tsvm", "iso", "wudi", "wudi_300")


def direction(run: Run, bases: tvb_mergekit.Bases, how: str, scale: str = "tasks") -> Weights:
    """The vector that the merge adds to the base at lambda = 1."""
    if how in CONTROLS:
        return _control(run, bases, how)
    if how in CALIBRATED:
        return _calibrated(run, direction(run, bases, how.removesuffix("+svc"), scale))
    merge = ALL[how]
    moved = tvb_mergekit.merge(
        bases, run.base, merge.method, lambda_=1.0, lambda_scale=scale, dtype=torch.float32,
        device=run.device, **merge.settings,
    )  # fmt: skip
    return difference(moved, run.base)


def _control(run: Run, bases: tvb_mergekit.Bases, how: str) -> Weights:
    of, others = MADE_OF[how]
    found = direction(run, bases, of)
    rest = direction(run, bases, others) if others else {n: 0 * v for n, v in found.items()}
    for name, vector in found.items():
        if not is_matrix(name, vector.shape):
            found[name] = rest[name]
        elif how == "ta_lengths":
            found[name] *= torch.linalg.norm(rest[name]) / torch.linalg.norm(vector)
    return found


def _calibrated(run: Run, vector: Weights) -> Weights:
    """SVC (Li et al., ICML 2026, arXiv 2602.05536): singular values over how far tasks add up.

    For D = U S V^T it divides S_r by the mean over tasks of max(1, <u_r^T D, u_r^T tau_i> /
    ||u_r^T tau_i||^2).
    """
    found = {n: torch.linalg.svd(each, full_matrices=False) for n, each in vector.items()
             if is_matrix(n, each.shape)}  # fmt: skip
    excess = {n: torch.zeros_like(sizes) for n, (_, sizes, _) in found.items()}
    for task in run.tasks:
        own = run.task_vector(task)
        for n, (left, sizes, right) in found.items():
            part = left.T @ own[n]
            ratio = (sizes * (part * right).sum(1)) / part.square().sum(1).clamp(min=1e-12)
            excess[n] += ratio.clamp(min=1) / len(run.tasks)
    return vector | {n: left * (sizes / excess[n]) @ right
                     for n, (left, sizes, right) in found.items()}  # fmt: skip


# which tensors the new methods merge as matrices
is_matrix: Callable[[str, Sequence[int]], bool]
is_matrix = resolve_settings("basis_iso", {}, ("any",)).is_matrix


def matrices(run: Run, cell: Cell) -> dict[str, Any]:
    """Merges of some bases, lambda searched and not."""
    bases = built(run, cell)
    found = {how: direction(run, bases, how) for how in cell["merges"]}
    del bases  # T models in memory, where M = T
    items, merges = used(run, cell), {}
    for how, vector in found.items():
        along = Direction(run, vector)
        fixed = ALL[how].fixed
        best, curve = along.search(cell["lambdas"], run.tasks, items, start_of(cell))
        asked = "test", run.tasks, cell["tested"]
        each = itemized(cell, along.scores(best, *asked))
        merges[how] = {"lambda": best, "curve": curve, "tuned": along.accuracy(best, *asked)}
        # The default's share of the best, on validation items, which are cheaper
        scores = [mean_score(along.accuracy(by, "validation", run.tasks, items), run.tasks)
                  for by in (fixed, best)]  # fmt: skip
        merges[how]["fixed_share"] = scores[0] / scores[1] if scores[1] else 0.0
        if each:
            merges[how] |= {"items": each, "length": norm(along.vector)}
    return {"items": items, "merges": merges}


def matrices_online(run: Run, cell: Cell) -> dict[str, Any]:
    """Tasks arrive one by one; what is held after the last, merged without a search."""
    order = order_of(run, cell)
    if cell["how"] in SINGLE:
        vector, lambdas = SINGLE[cell["how"]](run, order)
        merged = {str(by): (by, vector) for by in lambdas}
    else:
        bases = held(run, cell, order)
        merged = {how: (ALL[how].fixed, direction(run, bases, how, "bases")) for how in ONLINE}
    return {
        "order": order,
        "merges": {
            how: {"lambda": by, "test": run.accuracy(run.shifted((by, vector)), "test", run.tasks,
                                                     cell["tested"])}
            for how, (by, vector) in merged.items()
        },
    }  # fmt: skip


def held(run: Run, cell: Cell, order: Sequence[str]) -> tvb_mergekit.Bases:
    """The bases, or the task vectors, that a buffer holds in the end."""
    if cell["how"] == "rand_select":
        models = {task: run.models[task] for task in kept_tasks(cell, order)}
        return tvb_mergekit.build(run.base, models, basis="none", device=run.device)
    annealed = {"anneal_every": 500, "anneal_factor": 0.8} if cell["annealed"] else {}
    *_, bases = algorithm_1(run, cell, order, **annealed)
    return bases


# ------------------------------------------------------ online, one vector: with its lambdas, fixed


def _sum(run: Run, order: Sequence[str]) -> tuple[Weights, Sequence[float]]:
    return run.total(order), (PAPERS_LAMBDA,)


def _magmax(run: Run, order: Sequence[str]) -> tuple[Weights, Sequence[float]]:
    return magmax(run, order), (0.3, 0.5, 1.0)


def _ties(run: Run, order: Sequence[str], added: bool) -> tuple[Weights, Sequence[float]]:
    """Continual TIES: of the merged vector and the new one.

    Published code (fusion_bench, by OPCM's authors) adds lambda times the result to the old vector;
    otherwise the result replaces it.
    """
    by = PAPERS_LAMBDA if added else 1.0
    vector = {n: by * tensor for n, tensor in run.task_vector(order[0]).items()}
    for task in order[1:]:
        pair = {"before": run.shifted((1.0, vector)), "new": run.models[task]}
        bases = tvb_mergekit.build(run.base, pair, basis="none", device=run.device)
        both = direction(run, bases, "ties")
        vector = {n: by * both[n] + (vector[n] if added else 0) for n in both}
    return vector, (1.0 if added else PAPERS_LAMBDA,)


def _opcm(run: Run, order: Sequence[str], alpha: float = 0.5) -> tuple[Weights, Sequence[float]]:
    """OPCM (Tang et al., 2025, arXiv 2501.09522): add a task's part that the merged vector lacks.

    In the singular vectors of the merged matrix, a new matrix loses its diagonal and the block of
    the directions that hold a share `alpha` of the singular values. The sum is then made as long as
    a task vector is on average.
    """
    merged, factor, lengths = run.task_vector(order[0]), 1.0, list[float]()
    lengths.append(norm(merged))
    for task in order[1:]:
        new = run.task_vector(task)
        lengths.append(norm(new))
        for tensor in new:
            if is_matrix(tensor, new[tensor].shape):
                new[tensor] = _outside(new[tensor], merged[tensor], alpha)
        both = {n: factor * merged[n] + new[n] for n in new}
        factor = norm(both) / statistics.fmean(lengths)
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


def _nufilt(
    run: Run, order: Sequence[str], share: float = 1 / 6
) -> tuple[Weights, Sequence[float]]:
    """NUFILT's null-space step (Qiu et al., 2025, arXiv 2509.21413), without its adapter.

    A new matrix loses its part in the leading right singular vectors of the merged matrix: 128 of
    768 in the authors' configuration for T5. Other tensors stay the base's, as in their code.
    """
    merged = {n: torch.zeros_like(tensor) for n, tensor in run.base.items()}
    for task in order:
        for n, new in run.task_vector(task).items():
            if is_matrix(n, new.shape):
                if merged[n].any():
                    right = torch.linalg.svd(merged[n], full_matrices=False).Vh
                    right = right[: round(share * new.shape[1])]
                    new = new - new @ right.T @ right
                merged[n] += new
    return merged, (1.0,)


SINGLE: dict[str, Callable[[Run, Sequence[str]], tuple[Weights, Sequence[float]]]] = {
    "continual_ta": _sum,
    "magmax": _magmax,
    "continual_ties": partial(_ties, added=True),
    "continual_ties_in_place": partial(_ties, added=False),
    "opcm": _opcm,
    "nufilt": _nufilt,
}
SINGLE_TITLES = {
    ("continual_ta", "0.3"): "continual TA at 0.3",
    ("magmax", "0.3"): "MagMax at 0.3",
    ("magmax", "0.5"): "MagMax at 0.5",
    ("magmax", "1.0"): "MagMax at 1",
    ("continual_ties", "1.0"): "continual TIES, added at 0.3",
    ("continual_ties_in_place", "0.3"): "continual TIES in place, at 0.3",
    ("opcm", "1.0"): "OPCM",
    ("nufilt", "1.0"): "NUFILT, its null-space step",
}

KINDS = {"matrices": matrices, "matrices_online": matrices_online}
