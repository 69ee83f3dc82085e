#!/usr/bin/env python
"""Compare the bases on the small benchmark: train missing models, merge, score, report.

    python evals/mini/compare.py --preset tiny --out mini-runs
    python evals/mini/compare.py --preset small --seeds 0,1,2 --out mini-runs

Every cell of `plan.py` gets a file OUT/PRESET-seedSEED/cells/METHOD/NAME.json, so the same command
resumes after an interruption. Tables and pictures go to OUT/report-PRESET, or to `--report`. A page
marks the place of a table by its method and name:

    <!-- compare: full_addition -->
    <!-- end -->
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
import pictures
import train
from plan import KEYS, KINDS, PLANS, reference
from plan import cells as planned
from runs import trained
from sheets import SHEETS, Runs
from study import kinds as measures
from study.cells import Cell, Record, measured
from study.command import Asked, study_options
from study.pictures import svg
from study.report import pairs, write_study
from study.tables import Sheet


def sheets(records: Sequence[Record], preset: str) -> dict[str, list[Sheet]]:
    every = [Runs(records, preset, method) for method in train.METHODS]
    return {f"{r.method}_{name}": make(r) for r in every for name, make in SHEETS.items()}


def write(records: Sequence[Record], preset: str, folder: Path, page: Path | None) -> list[Path]:
    """Write compare.json and the pictures into FOLDER, and the marked tables into PAGE."""
    every = [Runs(records, *pair) for pair in pairs(records)]
    drawn = {
        f"{runs.preset}-{runs.method}-{title}": svg(figure)
        for runs in every
        for title, figure in pictures.draw(runs).items()
    }
    return write_study("compare", every, sheets(records, preset), drawn, folder, page)


def records_of(asked: Asked, method: str, seed: int, kinds: Sequence[str]) -> list[Record]:
    """The records of a run, after missing cells of some kinds were computed."""
    source = trained(asked.preset, method, seed, asked.out, asked.device, asked.as_is)
    plan = PLANS[asked.preset]

    def done(wanted: list[Cell]) -> list[Record]:
        return measured(source, wanted, measures.KINDS, KEYS, as_is=asked.as_is)

    first = done(reference(plan))
    if len(first) < 2:
        return []
    shipped = first[1]["result"]["merges"]["ta"]["scales"]["bases"]["lambda"]
    others = [cell for cell in planned(plan, shipped) if cell["kind"] in kinds]
    return first + done(others)


@click.command(epilog="Example: python evals/mini/compare.py --preset tiny --seeds 0,1")
@study_options(list(PLANS), "tiny", "mini-runs")
@click.option("--method", "methods", type=click.Choice(train.METHODS), multiple=True,
              default=("full",), show_default=True, help="May be repeated.")  # fmt: skip
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, default=KINDS,
              help="Only this kind of cells; may be repeated. By default all.")  # fmt: skip
def main(asked: Asked, methods: tuple[str, ...], kinds: tuple[str, ...]) -> None:
    """Train, merge, score and report, from fixed seeds."""
    records = []
    for method in dict.fromkeys(methods):
        for seed in asked.seeds:
            records += records_of(asked, method, seed, kinds)
    asked.finish(records, lambda found, folder: write(found, asked.preset, folder, asked.page))


if __name__ == "__main__":
    main()
