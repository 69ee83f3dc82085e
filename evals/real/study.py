#!/usr/bin/env python
r"""Measure merges, bases and stores of SmolLM2's specialists, and report it.

    python evals/real/train.py --data DATA --out real-runs      # first: the specialists
    python evals/real/study.py --data DATA --out real-runs --seeds 0 --part paper --part merges
    python evals/real/study.py --data DATA --out real-runs --seeds 0,1 --as-is \
        --report evals/real/results --page evals/real/RESULTS.md

Every cell of `plan.py` gets a file, so the same command resumes after an interruption. `--bill`
says what is missing, and how long it will take.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
from study.cells import Cell, Record, bill, measured, works
from study.command import FOLDER, Asked, study_options
from study.kinds import KINDS
from study.kinds.rivals import Missing

from real.plan import KEYS, PLANS, parts, reference
from real.run import trained
from real.sheets import write
from real.tasks import SHIPPED, TASKS

PARTS = tuple(parts(PLANS["small"], 1.0))
METHODS = {"full": ("full", TASKS), "lora16": ("lora16", TASKS), "full-8": ("full", SHIPPED)}


def records_of(
    asked: Asked, data: Path, method: str, seed: int, wanted: Sequence[str], bills: bool
) -> list[Record]:
    """The records of a seed and method, after the missing cells of some parts were measured."""
    kind, tasks = METHODS[method]
    plan = replace(PLANS[asked.preset], tasks=len(tasks))
    source = trained(asked.out, data, seed, kind, asked.device, tasks)

    def done(cells: list[Cell]) -> list[Record]:
        if bills:
            click.echo("\n".join(bill(works(source, cells, KINDS, KEYS))))
        as_is = asked.as_is or bills
        return measured(source, cells, KINDS, KEYS, as_is=as_is, skipped=Missing)

    first = done(reference(plan))
    if len(first) < 2:
        return first
    every = parts(plan, first[1]["result"]["merges"]["ta"]["lambda"])
    return first + done([cell for part in wanted for cell in every[part]])


@click.command(epilog="Example: python evals/real/study.py --data DATA --seeds 0 --part paper")
@study_options(list(PLANS), "full", "real-runs")
@click.option("--data", type=FOLDER, required=True, help="The folder that get_data.py made.")
@click.option("--method", "methods", type=click.Choice([*METHODS]), multiple=True,
              default=("full",), show_default=True, help="May be repeated.")  # fmt: skip
@click.option("--part", "wanted", type=click.Choice(PARTS), multiple=True, default=PARTS,
              help="Only this; may be repeated. By default all.")  # fmt: skip
@click.option("--bill", "bills", is_flag=True, help="Print the missing cells and their time alone.")
def main(
    asked: Asked, data: Path, methods: tuple[str, ...], wanted: tuple[str, ...], bills: bool
) -> None:
    """Measure merges, bases and stores of real specialists, and report it."""
    records = [
        record
        for method in dict.fromkeys(methods)
        for seed in asked.seeds
        for record in records_of(asked, data, method, seed, wanted, bills)
    ]
    if not bills:
        asked.finish(records, lambda found, folder: write(found, folder, asked.page))


if __name__ == "__main__":
    main()
