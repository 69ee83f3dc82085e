#!/usr/bin/env python
"""Compare the bases on the small benchmark: train missing models, merge, score, report.

    python evals/mini/compare.py --preset tiny --out mini-runs
    python evals/mini/compare.py --preset small --seeds 0,1,2 --out mini-runs

Every cell of `plan.py` gets a file OUT/PRESET-seedSEED/cells/METHOD/NAME.json, so the same command
resumes after an interruption. Tables and pictures go to OUT/report-PRESET, or to `--report`. A page
marks the place of a table by its preset, method and name:

    <!-- table: small full addition -->
    <!-- end -->
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cells
import click
import pictures
import torch
import train
from plan import KEYS, KINDS, PLANS, Cell, reference
from plan import cells as planned
from runs import trained
from sheets import SHEETS, Runs
from study.cells import Record, measured, processes
from study.command import Asked, study_options
from study.pictures import svg
from study.report import filled, listing, markdown, pairs, save
from transfer import transfer

MEASURES = cells.KINDS | {"transfer": transfer}


RUNS = (
    "A run is a training seed, times the seeds of a random basis or the orders of a stream. All "
    "runs share the held-out items, the few-shot examples and the orders. Seconds are of the "
    "clock, with as many other cells computed at once as there were workers."
)


def tables(runs: Runs) -> dict[str, str]:
    """name -> Markdown with a caption above each table; an empty table is left out."""
    made = {name: markdown(make(runs)) for name, make in SHEETS.items()}
    return {name: text for name, text in made.items() if text}


def summary(every: Sequence[Runs]) -> dict[str, Any]:
    """preset -> method -> table -> its numbers."""
    found: dict[str, Any] = {}
    for runs in every:
        sheets = {name: [s.plain() for s in make(runs)] for name, make in SHEETS.items()}
        kept = {name: some for name, some in sheets.items() if some}
        found.setdefault(runs.preset, {})[runs.method] = kept
    return found


def check_page(page: Path) -> None:
    """Raise, before hours of work, if a mark of a page is not closed or names no table."""
    filled(page, "table", SHEETS, lambda mark: None, words=3)


def write(records: Sequence[Record], folder: Path, page: Path | None = None) -> list[Path]:
    """Write tables, numbers and pictures into FOLDER, and the marked tables into PAGE.

    Nothing is written before everything is known.
    """
    every = [Runs(records, *pair) for pair in pairs(records)]
    made = {(runs.preset, runs.method): tables(runs) for runs in every}
    files: dict[Path, bytes] = {}

    def table(mark: str) -> str | None:
        preset, method, name = mark.split()
        here = made.get((preset, method))
        return None if here is None else here.get(name, "(nothing was measured)\n")

    if page is not None:
        files[page] = filled(page, "table", SHEETS, table, words=3).encode()
    lines = ["# MergeBench in miniature: all tables", "", RUNS, ""]
    for runs in every:
        lines += [f"## {runs.what}", ""]
        for title, text in made[runs.preset, runs.method].items():
            lines += [f"### {title}", "", text]
        for title, figure in pictures.draw(runs).items():
            picture = folder / f"{runs.preset}-{runs.method}-{title}.svg"
            files[picture] = svg(figure)
            lines += [f"![{runs.what}: {title}]({picture.name})", ""]
    files[folder / "tables.md"] = "\n".join(lines).encode()
    numbers = json.dumps(summary(every), indent=1, sort_keys=True, allow_nan=False)
    files[folder / "results.json"] = f"{numbers}\n".encode()
    files[folder / "cells.jsonl"] = "".join(f"{line}\n" for line in listing(every)).encode()
    return save(folder, files)


def records_of(
    asked: Asked, pool: ProcessPoolExecutor | None, method: str, seed: int, kinds: tuple[str, ...]
) -> list[Record]:
    """The records of a run, after missing cells of some kinds were computed."""
    source = trained(asked.preset, method, seed, asked.out, asked.device, asked.as_is)
    plan = PLANS[asked.preset]

    def done(wanted: list[Cell]) -> list[Record]:
        return measured(source, wanted, MEASURES, KEYS, as_is=asked.as_is, pool=pool)

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
@click.option("--workers", type=click.IntRange(1), help="Processes; by default as many as "
              "PyTorch would use threads, and one on a GPU.")  # fmt: skip
def main(
    asked: Asked, methods: tuple[str, ...], kinds: tuple[str, ...], workers: int | None
) -> None:
    """Train, merge, score and report, from fixed seeds."""
    if asked.page is not None:
        check_page(asked.page)
    count = workers or (1 if asked.device == "cuda" else torch.get_num_threads())
    records = []
    with nullcontext() if asked.as_is else processes(count) as pool:
        for method in dict.fromkeys(methods):
            for seed in asked.seeds:
                records += records_of(asked, pool, method, seed, kinds)
    asked.finish(records, lambda found, folder: write(found, folder, asked.page))


if __name__ == "__main__":
    main()
