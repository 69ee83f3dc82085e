"""The cells of the small benchmark: a plan for each preset."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from study.cells import Cell
from study.kinds import learned
from study.kinds.addition import GRID
from study.kinds.matrices import ALL, LAMBDAS, MERGES, SINGLE
from study.kinds.stores import RIVALS, basis_of

from mini import data

T = len(data.TASKS)
HALF = T // 2

# The compared bases, next to `none`, the 100 % reference, and rand_select, which has seeds
BASES = ("ae_exact", "ae_adam_5", "ae_adam_1", "ae_annealed", "balanced", "linear_ae", "pca")
AT_T = ("ae_exact", "ae_adam_5", "balanced")  # at M = T; the others add nothing there
MATRICES = ("balanced", "ae_exact", "ae_adam_5", "pca", "rand_select")
LEARNED = ("ae_adam_5", "balanced", "rand_select", "pca")
SPANS = ("ae_exact", "ae_adam_5", "balanced", "pca")  # turned, they span the same
ANNEALED = 0.75  # of T: from this M on the paper anneals its encoder online
ZOOS = (8, 4, 3, 2)
STORED = tuple(f"{label}_{m}" for label in ("balanced", "pca", "ae_exact") for m in (2, 5, 8))
OTHERS = tuple(how for how in RIVALS if how.startswith(("tvq", "rtvq", "bitdelta", "deltatensors")))


@dataclass(frozen=True)
class Plan:
    """The size of a preset's study; parts with one M have T/2."""

    num_bases: tuple[int, ...]  # T/2 among them
    items: int  # n_i, validation items per task that choose a coefficient
    tested: int  # test items per task
    select_seeds: int  # of rand_select
    negation: tuple[int, ...]  # M
    budgets: tuple[int, ...]
    orders: int
    shots: tuple[int, ...]
    learned: int = learned.SHOTS


PLANS = {
    "micro": Plan((5,), 10, 10, 1, (5,), (5,), 1, (4,), 4),
    "tiny": Plan((2, 5), 20, 100, 5, (5,), (5,), 1, (64,)),
    "small": Plan((2, 5, 8, 10), 50, 200, 5, (2, 5, 8), tuple(range(2, T)), 5, (16, 64, 256)),
}


def reference(plan: Plan) -> list[Cell]:
    """The cells that others start from: single scores, and the sum of all task vectors."""
    return [{"kind": "reference", "tested": plan.tested}, addition(plan, "none", T)]


def addition(plan: Plan, label: str, count: int, seed: int = 0) -> Cell:
    """A cell with the constants of earlier ones, so that their files are found."""
    found: Cell = {"kind": "addition", "basis": label, "num_bases": count, "seed": seed}
    found |= {"dtype": "float32", "grid": len(GRID), "merges": ["ta", "ties"], "stored": False}
    return found | counts(plan)


def counts(plan: Plan) -> dict[str, Any]:
    return {"items": plan.items, "tested": plan.tested}


def merge(plan: Plan, label: str, count: int) -> Cell:
    merges = [*(ALL if label == "none" else MERGES)]
    return {"kind": "matrices", "basis": label, "num_bases": count, "seed": 0, "dtype": "float32",
            "lambdas": [*LAMBDAS], "merges": merges} | counts(plan)  # fmt: skip


def store(plan: Plan, how: str, shipped: float) -> Cell:
    merges = ["ta"] if how.startswith("merged_") else ["ta", "ties"]
    found = {"kind": "bits", "grid": len(GRID), "how": how, "merges": merges, "lambda": shipped}
    basis = basis_of(how)
    return found | counts(plan) | ({"num_bases": basis[1]} if basis else {})


def parts(plan: Plan, shipped: float, train_seed: int) -> dict[str, list[Cell]]:
    """The cells of each part of the study.

    Args:
        shipped: the lambda of the model that tasks are forgotten from, the sum of all of them.
        train_seed: also the seed of rand_select under merges that learn.
    """
    few = [m for m in plan.num_bases if m < T]
    negation: Cell = {"kind": "negation", "lambda": shipped, "seed": 0} | counts(plan)
    online: Cell = {"kind": "online"} | counts(plan)
    stream: Cell = {"kind": "matrices_online", "tested": plan.tested // 2}
    transfer: Cell = {"kind": "transfer", "seed": 0} | counts(plan)
    unseen: list[tuple[str, int | None, int]] = [
        (label, None, 0) for label in ("base", "finetune", "none")
    ]
    unseen += [
        (label, HALF, 0)
        for label in ("none_subsample", *SPANS, *(f"{label}_turned" for label in SPANS))
    ]
    unseen += [("rand_select", HALF, seed) for seed in range(plan.select_seeds)]
    return {
        "addition": [addition(plan, label, m) for m in few for label in BASES]
        + [addition(plan, "rand_select", m, s) for m in few for s in range(plan.select_seeds)]
        + [addition(plan, label, T) for label in AT_T if T in plan.num_bases],
        "merges": [merge(plan, label, m) for label, m in [("none", T), *product(MATRICES, few)]],
        "learned": [learned.cell_of(how, label, m, plan.learned, plan.tested,
                                    train_seed * (label == "rand_select"))
                    for how in learned.WAYS
                    for label, m in [("none", T), *product(LEARNED, (HALF, 3))]],
        "routers": [{"kind": "route", "shots": plan.learned, "tested": plan.tested, "seed": 0}],
        "bytes": [store(plan, how, shipped) for how in
                  ("all", *(f"zoo_{bits}" for bits in ZOOS), *STORED,
                   *(f"merged_{how}" for how in OTHERS))],
        "negation": [negation | {"basis": label, "num_bases": count} for label, count in
                     [("plain", None), ("ascent", None),
                      *product(("ae_exact", "ae_adam_5", "balanced", "pca", "rand_proj"),
                               plan.negation)]],
        "online": [online | {"order": order, "how": how, "budget": m, "curve": m in (None, HALF)}
                   for order in range(plan.orders)
                   for how, m in [("continual_ta", None), ("magmax", None),
                                  *product(("ae", "balanced", "rand_select"), plan.budgets)]]
        + [stream | {"order": order, "how": how, "budget": m}
           | ({"annealed": m >= ANNEALED * T} if m and how == "ae" else {})
           for order in range(plan.orders)
           for how, m in [*((how, None) for how in SINGLE),
                          *product(("ae", "rand_select"), plan.budgets)]],
        "transfer": [transfer | {"shots": shots, "basis": label, "num_bases": m, "seed": seed}
                     for shots in plan.shots for label, m, seed in unseen],
    }  # fmt: skip
