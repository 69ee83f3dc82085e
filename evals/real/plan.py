"""The cells of the study."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from real.cells import Cell
from real.forgetting import forget
from real.learned import WAYS, learned
from real.merges import MERGES, merge, reference
from real.online import online
from real.routed import routed
from real.run import Run
from real.stores import kept
from real.tasks import ALIKE, SHIPPED, SHORT, TASKS
from real.theory import theory

KINDS: dict[str, Callable[[Run, Cell], dict[str, Any]]] = {
    "reference": reference, "merge": merge, "learned": learned, "kept": kept, "forget": forget,
    "online": online, "theory": theory, "routed": routed,
}  # fmt: skip
MODELS = {"full": ("full", TASKS), "full-8": ("full", SHIPPED), "lora16": ("lora16", TASKS),
          "lora4-8": ("lora4", SHIPPED), "peft4-8": ("peft4", SHIPPED),
          "short-4": ("full", SHORT), "same4-4": ("same4", ALIKE)}  # fmt: skip
BASES = ("ae", "rand_select", "pca", "balanced")  # of the paper's tables, and ours
LAMBDAS = [0.14, 0.2, 0.3, 0.45, 0.65, 1.0, 1.4, 2.0, 2.8, 4.0]
# Smaller ones for sums, and for bases that are as long as task vectors; larger ones for Iso-C
SMALLER, LARGER = [0.025, 0.05, 0.1], [5.6, 8.0, 11.0, 16.0, 22.0, 32.0]
ALPHAS = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
SHARES = (0.25, 0.1, 0.05)  # of entries that are sampled
MATRIX = ("wudi_auto", "wudi_300", "wudi_30", "tsvm", "iso", "wudi", "iso_cts")
LEARNED = ("fisher", "normalized", "regmean", "adamerging", "atlas")
# Test items of a task; first what every set of models has
ROUTED = {"common": 100, "templates": 100, "stripped": 100}
APART = {"german": 25, "long": 12, "long_all": 12, "answers": 75, "speed": 0, "quickstart": 60,
         "quickstart_common": 60}  # fmt: skip
ORDERS = 3  # of tasks that arrive one by one


def merged(how: str, basis: str, count: int, seed: int = 0) -> Cell:
    """A merge, its lambda chosen on 20 validation items a task."""
    long = basis in ("rand_select", "pca")
    summed = how in ("ta", "ties")
    cell = {"kind": "merge", "how": how, "basis": basis, "num_bases": count, "seed": seed,
            "items": 20, "tested": 75}  # fmt: skip
    cell["lambdas"] = SMALLER * (summed or long) + LAMBDAS + LARGER * how.startswith("iso")
    # Sums over few bases have two maxima, so their whole grid is searched
    return cell if summed else cell | {"start": 0.3 if long else 1.4}


def learning(how: str, basis: str, count: int, seed: int = 0) -> Cell:
    """64 examples of a task, as the paper; routers, which take seconds for each, have 8."""
    shots = 8 if WAYS[how].method == "wemoe" else 64
    return {"kind": "learned", "how": how, "basis": basis, "num_bases": count, "seed": seed,
            "shots": shots, "tested": 75, "lambdas": LAMBDAS, "start": 0.65}  # fmt: skip


def parts(tasks: int) -> dict[str, list[Cell]]:
    """The cells of each part of the study, for a number of tasks."""
    half = tasks // 2
    paper = [("none", tasks, 0)]
    paper += [(basis, half, seed) for basis in BASES
              for seed in range(2 if basis == "rand_select" else 1)]  # fmt: skip
    few = [("balanced", half), ("groups", half)]
    over, flows = [("none", tasks), *few], ("wudi_auto", "wudi_300", "wudi_30")
    held: Cell = {"kind": "kept", "items": 20, "tested": 75, "lambdas": LAMBDAS, "start": 0.65}
    forgotten: Cell = {"kind": "forget", "seed": 0, "alphas": ALPHAS, "items": 10, "tested": 37}
    arriving: Cell = {"kind": "online", "tested": 37}
    routed: Cell = {"kind": "routed"}
    return {
        "reference": [{"kind": "reference", "tested": 75}],
        "merges": [merged(how, "none", tasks) for how in MERGES],
        "flows": [merged(how, *each) | {"lambdas": [1.0], "start": 1.0}
                  for each in over[::2] for how in flows],
        "times": [merged(how, *each) for each in over[::2] for how in flows],
        "few": [merged(how, *each) for each in few for how in MATRIX],
        "paper": [merged(how, *each) for how in ("ta", "ties") for each in paper],
        "learned": [learning(how, *each) for how in LEARNED for each in over],
        "routers": [learning(how, *each) for how in ("wemoe", "wemoe_wudi_30") for each in over],
        "kept": [held | {"how": how} for how in ("lossless", *(f"keep_{s}" for s in SHARES))]
        + [held | {"how": "bases", "basis": "balanced", "num_bases": half, "seed": 0}],
        "forgetting": [forgotten | {"basis": basis, "num_bases": count} for basis, count in (
            ("none", tasks), ("sample", tasks), ("balanced", half), ("ae", half), ("pca", half),
            ("rand_proj", half))],
        "online": [arriving | {"how": how, "budget": half, "order": order}
                   for order in range(ORDERS) for how in ("ae", "rand_select")],
        "theory": [{"kind": "theory", "basis": "ae", "num_bases": half, "seed": 0, "tested": 25,
                     "examples": 16, "steps": 12}],
        "routed": [routed | {"how": how, "tested": count} for how, count in ROUTED.items()],
        "routed_apart": [routed | {"how": how, "tested": count} for how, count in APART.items()],
    }  # fmt: skip
