#!/usr/bin/env python
"""Compare the bases on the small benchmark: train missing models, merge, score, report.

    python evals/mini/compare.py --preset tiny --out mini-runs
    python evals/mini/compare.py --preset small --seeds 0,1,2 --out mini-runs

Every cell of `plan.py` gets a file OUT/PRESET-seedSEED/cells/METHOD/NAME.json, so the same command
resumes after an interruption. Tables and pictures go to OUT/report-PRESET, or to `--report`.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cells
import click
import torch
import train
from plan import KEYS, KINDS, PLANS, Cell, reference
from plan import cells as planned
from report import check_page, write
from runs import trained
from study.cells import Record, measured, processes
from study.command import Asked, study_options
from transfer import transfer

MEASURES = cells.KINDS | {"transfer": transfer}


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
