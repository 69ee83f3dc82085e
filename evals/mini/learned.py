#!/usr/bin/env python
r"""Costs of merges that learn from data, and their losses over bases.

    python evals/mini/learned.py --preset small --seeds 0,1,2 --out mini-runs \
        --report evals/mini/results --page evals/mini/RESULTS.md

The five methods of `tvb learn` over all task vectors and over M bases, next to task arithmetic with
lambda tuned on the same examples; and controls that explain each method below addition. Cells are
computed in this process; missing models are trained.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cells
import click
import controls
from controls import FISHERS, MASKS, PATHS, control_cells
from learning import (
    BASES,
    BY_MIXTURES,
    CONVEX,
    COUNTS,
    LEARNED,
    MAIN,
    SHOTS,
    WAYS,
    defaults,
    measure,
    method_cells,
)
from merges import LAMBDAS
from plan import HALF, KEYS, PLANS, Cell, T, reference
from runs import quickstart, trained
from sheets import Runs, name, sized
from study.cells import Record, measured
from study.command import Asked, study_options
from study.report import pairs, write_study
from study.tables import Column, Sheet, Value, dig, grid, over, sheet, value_of

PARTS = ("methods", "controls", "quickstart")
KINDS = cells.KINDS | controls.KINDS | {"learned": measure}

# ------------------------------------------------------------------------------------------ tables


ROWS = {sized("none", T): {"basis": "none", "num_bases": T}}
ROWS |= {sized(b, m): {"basis": b, "num_bases": m} for m in COUNTS for b in BASES}


def by_bases(runs: Runs, caption: str, columns: Mapping[str, str]) -> list[Sheet]:
    """A row for each basis and M, a column (title -> way) for each method."""
    value = runs.normal("test")
    shown = {title: Column(value, wanted={"how": how}) for title, how in columns.items()}
    return grid(runs, caption, "learned", shown, ROWS, corner="bases")


def methods(runs: Runs) -> list[Sheet]:
    columns = {TITLES.get(how, WAYS[how].title): how for how in MAIN}
    caption = "Merges that learn, and addition, from M/T of the examples: normalized accuracy"
    return by_bases(runs, caption, columns)


TITLES = {"localize": "L&S, 5 %", "dataless": "L&S, 5 %, dataless", "localize_dense": "L&S, 20 %",
          "dataless_dense": "L&S, 20 %, dataless",
          "localize_tasks": "L&S, 5 %, bases times T/M"}  # fmt: skip


def over_all(runs: Runs, how: str, value: Value) -> Value:
    """A value over that of the same method over all task vectors."""
    every = {r["train_seed"]: value(r) for r in runs.find("learned", how=how, basis="none")}

    def of(record: Record) -> float | None:
        own, best = value(record), every.get(record["train_seed"])
        return own / best if own is not None and best else None

    return of


def kept(runs: Runs) -> list[Sheet]:
    """The share of a method's accuracy that bases keep."""
    columns = {
        TITLES.get(how, WAYS[how].title): Column(
            over_all(runs, how, runs.normal("test")), wanted={"how": how}
        )
        for how in MAIN
    }
    rows = {row: of for row, of in ROWS.items() if of["basis"] != "none"}
    caption = "Accuracy over that of the same method over all task vectors"
    return grid(runs, caption, "learned", columns, rows, corner="bases")


def cost(runs: Runs) -> list[Sheet]:
    """Passes and seconds of each method over all, and over bases with M/T of the data."""
    columns = {"forward": ".0f", "backward": ".0f", "seconds": ".0f"}
    values = [value_of("passes", "forward"), value_of("passes", "backward"), value_of("seconds")]
    sizes = {"all": ("none", T)} | {f"M = {m}": ("ae_adam_5", m) for m in COUNTS}
    shown = {f"{size}: {title}": Column(values[0], form, sd=False)
             for size in sizes for title, form in columns.items()}  # fmt: skip
    ratios = {m: f"passes, M = {m} over all" for m in COUNTS}
    shown |= {title: Column(values[0], ".2f") for title in ratios.values()}
    rows = {}
    for how in ("ta", *LEARNED):
        wanted = [(value, of) for of in sizes.values() for value in values]
        wanted += [(over_all(runs, how, passes), ("ae_adam_5", m)) for m in ratios]
        rows[WAYS[how].title] = [
            runs.spread("learned", value, how=how, basis=basis, num_bases=m)
            for value, (basis, m) in wanted
        ]
    caption = "Passes of one example and seconds of learning, over all and over `ae` at t = 5"
    return sheet(runs, caption, "learned", shown, rows)


def passes(record: Record) -> float | None:
    both = [dig(record, "result", "passes", kind) for kind in ("forward", "backward")]
    return sum(both) if None not in both else None


def sparse(runs: Runs) -> list[Sheet]:
    ways = ("localize", "dataless", "localize_dense", "dataless_dense", "localize_tasks")
    caption = "Localize-and-Stitch, by the share of entries that a basis keeps: normalized accuracy"
    return by_bases(runs, caption, {TITLES[how]: how for how in ways})


def amounts(runs: Runs) -> list[Sheet]:
    """M/T of the data against all of it, at M = T/2."""
    value = runs.normal("test")
    of = {"basis": CONVEX[0], "num_bases": HALF}
    rows = {}
    for how in ("ta", *LEARNED):
        rows[WAYS[how].title] = [
            runs.spread("learned", shown, how=way, **of)
            for shown in (value, passes)
            for way in (how, f"{how}_all")
        ]
    shown = {title: Column(value) for title in ("M/T of the data", "all")}
    shown |= {f"passes, {title}": Column(passes, ".0f", sd=False) for title in shown}
    caption = f"Over {HALF} bases of `ae` at t = 5, M/T of the data or all: normalized accuracy"
    return sheet(runs, caption, "learned", shown, rows)


def mixtures(runs: Runs) -> list[Sheet]:
    shown = {f"{name(b)}: {title}": Column(runs.normal("test"))
             for b in CONVEX for title in ("encoder", "equal")}  # fmt: skip
    shown |= {f"pca: {title}": Column(runs.normal("test")) for title in ("equal", "positive")}
    rows = {}
    for how in BY_MIXTURES:
        wanted = [(b, way) for b in CONVEX for way in (how, f"{how}_equal")]
        wanted += [("pca", how), ("pca", f"{how}_positive")]
        rows[WAYS[how].title] = [
            runs.spread("learned", runs.normal("test"), how=way, basis=b, num_bases=HALF)
            for b, way in wanted
        ]
    caption = f"Which tasks a basis learns from, at M = {HALF}: normalized accuracy"
    return sheet(runs, caption, "learned", shown, rows)


def fishers(runs: Runs, absolute: bool = False) -> list[Sheet]:
    """`absolute`: the accuracy itself, of tasks that are not the ten."""

    def score_of(key: str) -> Value:
        def value(record: Record) -> float | None:
            found = dig(record, "result", key)
            return over(found, found)

        return value if absolute else runs.normal(key)

    values = {
        "as it is": Column(score_of("plain")),
        "best factor": Column(value_of("factor"), ".1f"),
        "at that": Column(score_of("tuned")),
        "length": Column(value_of("length"), ".2f"),
        "models that count": Column(value_of("models"), ".1f"),
        "largest share of F": Column(value_of("largest"), ".2f"),
    }
    rows = {title: {"how": how} for how, title in FISHERS.items()}
    caption = "Weighted means of all models: "
    caption += "mean accuracy on eight tasks" if absolute else "normalized accuracy"
    return grid(runs, caption, "learned_fisher", values, rows, corner="weights")


def masks(runs: Runs) -> list[Sheet]:
    values = {
        "alone": Column(runs.normal("alone")),
        "entries in several masks": Column(value_of("shared")),
        "stitched": Column(runs.normal("mean", "plain")),
        "times the best factor": Column(runs.normal("mean", "tuned")),
        "factor": Column(value_of("mean", "factor"), ".2f"),
        "summed": Column(runs.normal("sum", "plain")),
        "sum times the best factor": Column(runs.normal("sum", "tuned")),
        "its factor": Column(value_of("sum", "factor"), ".2f"),
    }
    rows = {title: {"how": how} for how, title in MASKS.items()}
    caption = "Masked task vectors, alone on their own task and all together: normalized accuracy"
    return grid(runs, caption, "learned_masks", values, rows, corner="masks")


def paths(runs: Runs) -> list[Sheet]:
    """At the start, at the epoch that the held-out objective likes best, and after the last."""
    whens = ("start", "kept", "last")
    kinds = {"accuracy": ("accuracy", whens), "prompt": ("entropy behind the prompt", whens[::2]),
             "answer": ("entropy along the answer", whens[::2]),
             "loss": ("loss on the answer", whens[::2])}  # fmt: skip

    def at(key: str, when: str) -> Value:
        def value(record: Record) -> float | None:
            result = record["result"]
            place = {"start": 0, "kept": result["best"], "last": -1}[when]
            found: float = result["seen"][place][key]
            return found

        return value

    columns = {"from": Column(value_of("start"), ".2f", sd=False)}
    for key, (title, some) in kinds.items():
        columns |= {f"{title}, {when}": Column(at(key, when), sd=False) for when in some}
    rows = {path.title: {"how": how} for how, path in PATHS.items()}
    caption = "Coefficients of all task vectors, one for each layer, by what they fall along"
    return grid(runs, caption, "learned_path", columns, rows, corner="falls along")


def sheets(records: Sequence[Record], preset: str) -> dict[str, list[Sheet]]:
    runs = Runs(records, preset, "full")
    made = {"methods": methods, "kept": kept, "cost": cost, "sparse": sparse, "amounts": amounts,
            "mixtures": mixtures, "fishers": fishers, "masks": masks, "paths": paths}  # fmt: skip
    shipped = Runs(records, "quickstart", "full")
    others = {"quickstart": fishers(shipped, absolute=True) + paths(shipped)}
    return {title: make(runs) for title, make in made.items()} | others


def write(records: Sequence[Record], preset: str, folder: Path, page: Path | None) -> list[Path]:
    """Write learned.json into FOLDER, and the marked tables into PAGE."""
    every = [Runs(records, *pair) for pair in pairs(records)]
    return write_study("learned", every, sheets(records, preset), {}, folder, page)


# ----------------------------------------------------------------------------------------- command


def quickstart_cells(shots: int) -> list[Cell]:
    """The most telling controls of Fisher and of AdaMerging, over the eight shipped models."""
    every = {"basis": "none", "num_bases": 8, "seed": 0, "shots": shots, "tested": 200}
    wanted = [{"kind": "learned_fisher", "how": how} | every | {"lambdas": [*LAMBDAS]}
              for how in ("mean", "fisher", "each")]  # fmt: skip
    few = every | {"tested": 50} | defaults("adamerging")
    return wanted + [{"kind": "learned_path", "how": how} | few
                     for how in ("prompts", "answers", "labels")]  # fmt: skip


@click.command(epilog="Example: python evals/mini/learned.py --preset tiny --seeds 0")
@study_options(list(PLANS), "tiny", "mini-runs")
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, default=PARTS,
              help="Only this; may be repeated. By default all.")  # fmt: skip
@click.option("--shots", type=click.IntRange(2), default=SHOTS, show_default=True,
              help="Validation items of a task.")  # fmt: skip
def main(asked: Asked, parts: tuple[str, ...], shots: int) -> None:
    """Measure merges that learn from data, over all task vectors and over bases, and report it."""
    records, plan = list[Record](), PLANS[asked.preset]
    for seed in asked.seeds:
        wanted = [reference(plan)[0]]
        wanted += method_cells(plan, shots, seed) if "methods" in parts else []
        wanted += control_cells(plan, shots) if "controls" in parts else []
        source = trained(asked.preset, "full", seed, asked.out, asked.device, asked.as_is)
        records += measured(source, wanted, KINDS, KEYS, as_is=asked.as_is)
    if "quickstart" in parts:
        source = quickstart(asked.out, asked.device)
        records += measured(source, quickstart_cells(shots), KINDS, KEYS, as_is=asked.as_is)
    asked.finish(records, lambda found, folder: write(found, asked.preset, folder, asked.page))


if __name__ == "__main__":
    main()
