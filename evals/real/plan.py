"""The cells of the benchmark on a real model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from study.cells import Cell
from study.kinds import learned
from study.kinds.matrices import ALL, SINGLE
from study.kinds.theirs import METHODS

from real.tasks import TASKS

BASES = ("ae_adam_5", "rand_select", "pca", "balanced")  # of the paper's table, and ours
LAMBDAS = (0.14, 0.2, 0.3, 0.45, 0.65, 1.0, 1.4, 2.0, 2.8, 4.0)
START = 0.65  # of these, where the search begins
LONGER = 1.4  # the same, of matrix merges, whose bases are not summed up
LARGER = (5.6, 8.0, 11.0, 16.0, 22.0, 32.0)  # and of Iso-C, which is short over adapters
# Of sums, and of bases that are as long as task vectors; others are shorter, as means of several.
SMALLER = (0.025, 0.05, 0.1)
SHORTER = 0.3
ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
SHARES = (0.5, 0.25, 0.1, 0.05, 0.02)  # of entries that are sampled
STITCHED = ("localize", "dataless")
SLOW = ("adamerging", "atlas")  # hours on two cores
MATRIX = ("wudi_300", "wudi_30", "tsvm", "iso", "wudi", "iso_cts")  # the most telling first
LEARNED = ("fisher", "normalized", "regmean", "adamerging", "atlas")
ROUTED = 8  # examples of a task for routers, which take a second or two each in an epoch


@dataclass(frozen=True)
class Plan:
    """Items of a task, and how much is repeated."""

    items: int = 20  # of validation, which choose a coefficient
    tested: int = 75
    seeds: int = 2  # of rand_select
    orders: int = 3
    shots: int = learned.SHOTS
    tasks: int = len(TASKS)
    adapters: bool = False  # merged into models of float32, which no lossless store takes

    @property
    def half(self) -> int:
        return self.tasks // 2

    @property
    def quarter(self) -> int:
        return self.tasks // 4


PLANS = {"full": Plan(), "small": Plan(4, 4, 1, 1, 4)}  # small: for tests


def reference(plan: Plan) -> list[Cell]:
    """The cells that others start from: single scores, and the sum of all task vectors."""
    return [{"kind": "reference", "tested": plan.tested, "itemized": True},
            merge(plan, "ta", "none", plan.tasks)]  # fmt: skip


def merge(plan: Plan, how: str, label: str, count: int, seed: int = 0) -> Cell:
    long = label in ("rand_select", "pca")
    summed = how in ("ta", "ties")
    start = SHORTER if long else LONGER if how in MATRIX else START
    lambdas = (SMALLER if summed or long else ()) + LAMBDAS + LARGER * how.startswith("iso")
    # Addition over few bases has two maxima: with small lambdas, and where one task alone is left.
    whole = {"whole": True} if summed else {}
    return {"kind": "matrices", "basis": label, "num_bases": count, "seed": seed, "how": how,
            "items": plan.items, "tested": plan.tested, "start": start,
            "lambdas": [*lambdas], **whole,
            "merges": [how], "equal": True, "itemized": True}  # fmt: skip


def learn(plan: Plan, how: str, label: str, count: int, seed: int = 0) -> Cell:
    found = learned.cell_of(how, label, count, plan.shots, plan.tested, seed)
    if "lambdas" in found:
        found |= {"lambdas": [*LAMBDAS], "start": START}
    return found | {"itemized": True}


def parts(plan: Plan, shipped: float) -> dict[str, list[Cell]]:
    """The cells of each part of the study.

    Args:
        shipped: the best lambda of the sum of all task vectors.
    """
    every, half, quarter = plan.tasks, plan.half, plan.quarter
    over = [("none", every, 0)]
    over += [(label, count, seed) for count in (quarter, half) for label in BASES
             for seed in range(plan.seeds if label == "rand_select" else 1)]  # fmt: skip
    few = [
        ("none", every),
        ("balanced", half),
        ("balanced", quarter),
        ("ae_adam_5", half),
        ("groups", half),
        ("groups", quarter),
    ]
    routed = [*few, ("ae_adam_5", quarter), ("pca", half), ("pca", quarter)]
    counts = {"items": plan.items // 2, "tested": plan.tested // 2}
    # The sum of all does four of eight tasks not at all, and nothing can be forgotten of them.
    forgotten: Cell = {"lambda": 1.0, "from": "wudi_30", "alphas": [*ALPHAS], "seed": 0} | counts
    stored: Cell = {"kind": "bits", "items": plan.items, "tested": plan.tested, "alphas": [],
                    "lambdas": [*LAMBDAS], "start": START, "scales": ["tasks"],
                    "merges": ["wudi_30", "ta"], "equal": True, "itemized": True}  # fmt: skip
    forgotten_by = ("all", "keep_0.05")  # without merges
    online: Cell = {"kind": "matrices_online", "tested": plan.tested // 2, "annealed": False}
    unseen: Cell = {"kind": "transfer", "shots": plan.shots, "seed": 0, "tested": plan.tested,
                    "rate": 4e-5}  # fmt: skip
    found = {
        "paper": [merge(plan, how, *each) for how in ("ta", "ties") for each in over],
        "stitched": [learn(plan, how, *each) for how in STITCHED for each in over],
        "merges": [merge(plan, how, "none", every) for how in
                   dict.fromkeys(("ties", *MATRIX, *ALL)) if how != "ta"],
        "few": [merge(plan, how, *each) for each in few[1:] for how in MATRIX]
        + [merge(plan, how, "ae_adam_5", half) for how in ("ta", "ties")],
        "theirs": [merge(plan, how, "none", every) | {"kind": "theirs"} for how in METHODS],
        "learned": [learn(plan, how, *each) for how in LEARNED
                    for each in few
                    if each[0] != "ae_adam_5" and (how not in SLOW or each[1] != quarter)],
        "routers": [learn(replace(plan, shots=ROUTED), how, *each)
           for how, each in (*((how, ("none", every)) for how in ("oracle", "oracle_wudi_30")),
                             *((how, each) for how in ("wemoe", "wemoe_wudi_30")
                               for each in routed))],
        "bytes": [stored | {"how": how} for how in
                  ("all", *["lossless"][plan.adapters :], *(f"keep_{share}" for share in SHARES),
                   f"balanced_{half}")],
        "negation": [forgotten | {"kind": "negation", "basis": label, "num_bases": count}
                     for label, count in (("plain", None), ("ae_adam_5", half), ("balanced", half),
                                          ("pca", half), ("rand_proj", half))]
        + [stored | forgotten | {"how": how, "merges": []} for how in forgotten_by],
        "online": [online | {"order": order, "how": how, "budget": budget}
                   for order in range(plan.orders)
                   for how, budget in (*((how, None) for how in SINGLE),
                                       *((how, m) for m in (quarter, half)
                                         for how in ("ae", "rand_select")))],
        "transfer": [unseen | {"basis": label, "num_bases": count}
                     for label, count in (("base", None), ("finetune", None), ("none", None),
                                          ("none_subsample", half),
                                          *((label, half) for label in BASES))],
        "theory": [{"kind": "theory", "basis": "ae_adam_5", "num_bases": half, "seed": 0,
                    "lambda": shipped, "tested": plan.tested // 3, "examples": 16, "steps": 12}],
    }  # fmt: skip
    return found
