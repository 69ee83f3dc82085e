"""What the comparison computes: a plan for each preset, and the cells that it asks for.

A cell is one independent piece of work, described by a plain dict that names everything it depends
on besides the trained models; `cells.py` computes it, `compare.py` keeps its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import data
from score import GRID

Cell = dict[str, Any]
T = len(data.TASKS)
HALF = T // 2

# Rows of the tables; `none` is the 100 % reference
BASES = ("ae_exact", "ae_adam_5", "ae_adam_1", "ae_annealed", "balanced", "linear_ae", "pca")
AT_T = ("ae_exact", "ae_adam_5", "balanced")  # at M = T; the others add nothing there
TEMPERATURES = (0.5, 2, 10, 20)  # besides 5 and 1
PRECISIONS = ("bfloat16", "float16")  # besides float32


@dataclass(frozen=True)
class Plan:
    """How much of it a preset computes."""

    num_bases: tuple[int, ...]
    items: int  # n_i, validation items per task that choose a coefficient
    tested: int  # test items per task
    select_seeds: int  # of rand_select
    temperatures: tuple[str, ...]
    dtypes: tuple[str, ...]
    mixtures: int
    negation: tuple[int, ...]  # M
    budgets: tuple[int, ...]
    orders: int
    shots: tuple[int, ...]


PLANS = {
    "micro": Plan((3,), 10, 10, 1, (), ("bfloat16",), 1, (3,), (3,), 1, (4,)),
    "tiny": Plan((2, 5), 40, 200, 5, (), ("bfloat16",), 3, (5,), (3, 6), 1, (64,)),
    "small": Plan(
        (2, 5, 8, 10),
        50,
        200,
        5,
        (*(f"ae_adam_{t:g}" for t in TEMPERATURES), "ae_annealed_0.9"),
        PRECISIONS,
        6,
        (2, 5, 8),
        tuple(range(2, T)),
        5,
        (16, 64, 256),
    ),
}


def settings(label: str) -> dict[str, Any]:
    """The recipe's keys behind a label of the tables."""
    name, _, rest = label.partition("_")
    match name, rest.split("_"):
        case "ae", ["exact"]:
            return {"basis": "ae", "solver": "exact"}
        case "ae", ["adam", temperature]:
            return {"basis": "ae", "temperature": float(temperature)}
        case "ae", ["annealed", *factor]:
            return {"basis": "ae", "anneal_every": 500, "anneal_factor": float(*factor or ["0.8"])}
    return {"basis": label}


def used(cell: Cell) -> int:
    """Validation items per task: of n_i, the share M/T that the paper gives M bases."""
    count: int = cell.get("num_bases") or cell.get("budget") or T
    items: int = cell["items"]
    return max(1, round(items * count / T))


def reference(plan: Plan) -> list[Cell]:
    """What the other cells start from: the scores to compare with, and the best lambda."""
    return [{"kind": "reference", "tested": plan.tested}, _addition("none", T, plan)]


def cells(plan: Plan, shipped: float) -> Iterator[Cell]:
    """All the others.

    Args:
        shipped: the lambda of the model that tasks are forgotten from, the sum of all of them.
    """
    for count in plan.num_bases:
        for label in BASES if count < T else AT_T:
            yield _addition(label, count, plan)
        for seed in range(plan.select_seeds if count < T else 0):
            yield _addition("rand_select", count, plan, seed=seed)
    half = HALF if HALF in plan.num_bases else plan.num_bases[0]
    for label in plan.temperatures:
        yield _addition(label, half, plan, merges=["ta"])
    for seed in range(plan.mixtures):
        yield _addition("ae_exact_mixed", half, plan, seed=seed, merges=["ta"])
    for dtype in plan.dtypes:
        for label in ("ae_exact", "ae_adam_5", "balanced", "pca", "rand_select"):
            yield _addition(label, half, plan, dtype=dtype, merges=["ta"], stored=True)

    counts = {"items": plan.items, "tested": plan.tested}
    negation = {"kind": "negation", "lambda": shipped, "seed": 0} | counts
    for label in ("plain", "ascent"):
        yield negation | {"basis": label, "num_bases": None}
    for count in plan.negation:
        for label in ("ae_exact", "ae_adam_5", "balanced", "pca", "rand_proj"):
            yield negation | {"basis": label, "num_bases": count}

    for order in range(plan.orders):
        online = {"kind": "online", "order": order} | counts
        for how in ("continual_ta", "magmax"):
            yield online | {"how": how, "budget": None, "curve": True}
        for budget in plan.budgets:
            for how in ("ae", "balanced", "rand_select"):
                curve = budget == (HALF if HALF in plan.budgets else plan.budgets[0])
                yield online | {"how": how, "budget": budget, "curve": curve}

    for shots in plan.shots:
        transfer = {"kind": "transfer", "shots": shots, "seed": 0, "num_bases": None} | counts
        for label in ("base", "finetune", "none"):
            yield transfer | {"basis": label}
        for label in ("none_subsample", "ae_exact", "ae_adam_5", "balanced", "pca"):
            yield transfer | {"basis": label, "num_bases": half}
        for seed in range(plan.select_seeds):
            yield transfer | {"basis": "rand_select", "num_bases": half, "seed": seed}


def _addition(label: str, count: int, plan: Plan, **others: Any) -> Cell:
    return {
        "kind": "addition",
        "basis": label,
        "num_bases": count,
        "seed": 0,
        "dtype": "float32",
        "items": plan.items,
        "tested": plan.tested,
        "grid": len(GRID),
        "merges": ["ta", "ties"],
        "stored": False,
    } | others
