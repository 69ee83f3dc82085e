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
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
from study.cells import Record
from study.command import FOLDER, Asked, study_options

from real.plan import PLANS, parts, reference
from real.run import trained
from real.sheets import write
from real.tasks import SHIPPED, TASKS

PARTS = tuple(parts(PLANS["small"], 1.0))
METHODS = {"full": ("full", TASKS), "full-8": ("full", SHIPPED), "lora16": ("lora16", TASKS),
           "lora4": ("lora4", SHIPPED)}  # fmt: skip


@click.command(epilog="Example: python evals/real/study.py --data DATA --seeds 0 --part paper")
@study_options(PLANS, "full", "real-runs", METHODS, PARTS)
@click.option("--data", type=FOLDER, required=True, help="The folder that get_data.py made.")
@click.option("--tasks", metavar="TASK,...", help="Only these of the method's tasks.")
def main(asked: Asked, data: Path, tasks: str | None) -> None:
    """Measure merges, bases and stores of real specialists, and report it."""

    def records(method: str, seed: int) -> list[Record]:
        kind, every = METHODS[method]
        some = tuple(task for task in every if tasks is None or task in tasks.split(","))
        if unknown := {*(tasks or "").split(",")} - {"", *every}:
            raise click.ClickException(f"--tasks: {method} has no {', '.join(sorted(unknown))}")
        plan = replace(PLANS[asked.preset], tasks=len(some), adapters=kind != "full")
        source = trained(asked.out, data, seed, kind, asked.device, some)
        return asked.measured(source, reference(plan), lambda shipped: parts(plan, shipped))

    asked.finish(records, write)


if __name__ == "__main__":
    main()
