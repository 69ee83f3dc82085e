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

import click
from plan import HALF, KEYS, PLANS, Plan, T, reference
from runs import trained
from sheets import Runs, name, sized
from study.cells import Cell, Record, measured
from study.command import Asked, study_options
from study.kinds import KINDS
from study.kinds.learned import BY_MIXTURES, LEARNED, MAIN, SHOTS, WAYS, cell_of
from study.report import pairs, write_study
from study.tables import Column, Sheet, Value, dig, grid, sheet, value_of

COUNTS = (HALF, 3)  # M; T/4 is 2.5
BASES = ("ae_adam_5", "balanced", "rand_select", "pca")
CONVEX = ("ae_adam_5", "balanced")


# ------------------------------------------------------------------------------------------- cells


def method_cells(plan: Plan, shots: int, seed: int) -> list[Cell]:
    """All cells of a training seed, which is also the seed of rand_select."""

    def cell(how: str, label: str, count: int) -> Cell:
        return cell_of(how, label, count, shots, plan.tested, seed * (label == "rand_select"))

    main = [
        cell(how, label, m)
        for how in MAIN
        for label, m in (("none", T), *((b, m) for m in COUNTS for b in BASES))
    ]
    some = [
        cell(how, label, m)
        for how in ("localize_dense", "dataless_dense")
        for label, m in (("none", T), *((b, HALF) for b in CONVEX))
    ]
    half = {"localize_tasks": CONVEX, "localize_equal": CONVEX, "localize_positive": ("pca",)}
    half |= {f"{how}_all": CONVEX[:1] for how in ("ta", *LEARNED)}
    half |= {f"{how}_equal": CONVEX[:1] for how in BY_MIXTURES[:2]}
    return (
        main + some + [cell(how, label, HALF) for how, labels in half.items() for label in labels]
    )


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


def sheets(records: Sequence[Record], preset: str) -> dict[str, list[Sheet]]:
    runs = Runs(records, preset, "full")
    made = {"methods": methods, "kept": kept, "cost": cost, "sparse": sparse, "amounts": amounts,
            "mixtures": mixtures}  # fmt: skip
    return {title: make(runs) for title, make in made.items()}


def write(records: Sequence[Record], preset: str, folder: Path, page: Path | None) -> list[Path]:
    """Write learned.json into FOLDER, and the marked tables into PAGE."""
    every = [Runs(records, *pair) for pair in pairs(records)]
    return write_study("learned", every, sheets(records, preset), {}, folder, page)


# ----------------------------------------------------------------------------------------- command


@click.command(epilog="Example: python evals/mini/learned.py --preset tiny --seeds 0")
@study_options(list(PLANS), "tiny", "mini-runs")
@click.option("--shots", type=click.IntRange(2), default=SHOTS, show_default=True,
              help="Validation items of a task.")  # fmt: skip
def main(asked: Asked, shots: int) -> None:
    """Measure merges that learn from data, over all task vectors and over bases, and report it."""
    records, plan = list[Record](), PLANS[asked.preset]
    for seed in asked.seeds:
        wanted = [reference(plan)[0], *method_cells(plan, shots, seed)]
        source = trained(asked.preset, "full", seed, asked.out, asked.device, asked.as_is)
        records += measured(source, wanted, KINDS, KEYS, as_is=asked.as_is)
    asked.finish(records, lambda found, folder: write(found, asked.preset, folder, asked.page))


if __name__ == "__main__":
    main()
