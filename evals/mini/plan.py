"""The cells of the comparison: a plan for each preset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import data
from study.cells import Cell
from study.kinds.addition import GRID
from study.kinds.matrices import ALL, LAMBDAS, MERGES, SINGLE

T = len(data.TASKS)
HALF = T // 2

# The compared bases, next to `none`, the 100 % reference, and rand_select, which has seeds
BASES = ("ae_exact", "ae_adam_5", "ae_adam_1", "ae_annealed", "balanced", "linear_ae", "pca")
AT_T = ("ae_exact", "ae_adam_5", "balanced")  # at M = T; the others add nothing there
SPANS = ("ae_exact", "ae_adam_5", "balanced", "pca")  # turned, they span the same
TEMPERATURES = ("ae_adam_0.5", "ae_adam_2", "ae_adam_10", "ae_adam_20", "ae_annealed_0.9")
ANNEALED = 0.75  # of T: from this M on the paper anneals its encoder online
DTYPES = ("float32", "bfloat16", "float16")
KEYS = ("kind", "basis", "how", "num_bases", "budget", "order", "shots", "seed", "dtype")


@dataclass(frozen=True)
class Plan:
    """The size of a preset's comparison; parts with one M have T/2."""

    num_bases: tuple[int, ...]  # T/2 among them
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
    "micro": Plan((5,), 10, 10, 1, (), ("bfloat16",), 1, (5,), (5,), 1, (4,)),
    "tiny": Plan((2, 5), 20, 100, 5, (), ("bfloat16",), 1, (5,), (5,), 1, (64,)),
    "small": Plan(
        (2, 5, 8, 10), 50, 200, 5, TEMPERATURES, DTYPES, 6,
        (2, 5, 8), tuple(range(2, T)), 5, (16, 64, 256),
    ),
}  # fmt: skip
KINDS = ("reference", "addition", "negation", "online", "transfer")


def reference(plan: Plan) -> list[Cell]:
    """The cells that the others start from: the scores to compare with, and the best lambda."""
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
    for label in plan.temperatures:
        yield _addition(label, HALF, plan, merges=["ta"])
    for seed in range(plan.mixtures):
        yield _addition("ae_exact_mixed", HALF, plan, seed=seed, merges=["ta"])
    for dtype in plan.dtypes:
        for label in ("ae_exact", "ae_adam_5", "balanced", "pca", "rand_select"):
            yield _addition(label, HALF, plan, dtype=dtype, merges=["ta"], stored=True)

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
                yield online | {"how": how, "budget": budget, "curve": budget == HALF}

    for shots in plan.shots:
        transfer = {"kind": "transfer", "shots": shots, "seed": 0, "num_bases": None} | counts
        for label in ("base", "finetune", "none"):
            yield transfer | {"basis": label}
        for label in ("none_subsample", *SPANS, *(f"{label}_turned" for label in SPANS)):
            yield transfer | {"basis": label, "num_bases": HALF}
        for seed in range(plan.select_seeds):
            yield transfer | {"basis": "rand_select", "num_bases": HALF, "seed": seed}


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


def matrices(plan: Plan, bases: tuple[str, ...]) -> list[Cell]:
    every = [("none", T), *((label, m) for m in plan.num_bases if m < T for label in bases)]
    return [matrices_cell(label, count, plan.items, plan.tested) for label, count in every]


def matrices_cell(label: str, count: int, items: int, tested: int) -> Cell:
    merges = [*(ALL if label == "none" else MERGES)]
    return {"kind": "matrices", "basis": label, "num_bases": count, "seed": 0, "dtype": "float32",
            "items": items, "tested": tested, "lambdas": [*LAMBDAS], "merges": merges}  # fmt: skip


def matrices_online(plan: Plan) -> list[Cell]:
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
