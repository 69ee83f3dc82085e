#!/usr/bin/env python
r"""Measure merges, bases and stores on the small benchmark: train missing models, merge, report.

    python evals/mini/study.py --preset tiny --out mini-runs
    python evals/mini/study.py --preset small --seeds 0,1,2 --method full --method lora \
        --out mini-runs --report evals/mini/results --page evals/mini/RESULTS.md

Every cell of `plan.py` gets a file OUT/PRESET-seedSEED/cells/METHOD/NAME.json, so the same command
resumes after an interruption. `--bill` says what is missing, and how long it will take.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
from study.cells import Record
from study.command import Asked, study_options

from mini.plan import PLANS, parts, reference
from mini.runs import trained
from mini.sheets import write
from mini.train import METHODS

PARTS = tuple(parts(PLANS["micro"], 1.0, 0))


@click.command(epilog="Example: python evals/mini/study.py --preset tiny --seeds 0,1 --part merges")
@study_options(PLANS, "tiny", "mini-runs", METHODS, PARTS)
def main(asked: Asked) -> None:
    """Train, merge, score and report, from fixed seeds."""
    plan = PLANS[asked.preset]

    def records(method: str, seed: int) -> list[Record]:
        source = trained(asked.preset, method, seed, asked.out, asked.device, asked.as_is)
        return asked.measured(source, reference(plan), lambda shipped: parts(plan, shipped, seed))

    asked.finish(records, write)


if __name__ == "__main__":
    main()
