#!/usr/bin/env python
"""Compare the bases on the small benchmark: train what is missing, merge, score, report.

    python evals/mini/compare.py --preset tiny --out mini-runs
    python evals/mini/compare.py --preset small --seeds 0,1,2 --out mini-runs

Every cell of `plan.py` gets a file OUT/PRESET-seedSEED/cells/METHOD/NAME.json, which has its name
only once it is whole: the same command goes on after an interruption. A file's name hashes the
cell, the weights of all models and the package's version, so what was measured of other models or
in another way is never taken for it. Tables and pictures go to OUT/report, or to `--report`.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import cells as computing
import click
import data
import torch
import train
import xxhash
from plan import PLANS, Cell, cells, reference
from report import check_page, write
from runs import Run
from tqdm import tqdm
from transformers.utils import logging

import tvb_mergekit

VERSION = 1  # of what cells mean: another one, and none of before is taken

_runs: dict[tuple[Path, str, str], Run] = {}


@dataclass(frozen=True)
class Work:
    """A cell of a run, and the file of its result."""

    folder: Path
    method: str
    device: str
    cell: Cell
    file: Path


def fingerprint(folder: Path, method: str) -> str:
    """Of all weights of a run."""
    digest = xxhash.xxh3_128()
    for path in [folder / "base", *(folder / method / task for task in data.TASKS)]:
        for file in sorted(path.glob("*.safetensors")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def work_of(folder: Path, method: str, device: str, models: str, cell: Cell) -> Work:
    facts = json.dumps([VERSION, tvb_mergekit.__version__, models, cell], sort_keys=True)
    told = [
        cell.get(key)
        for key in (
            "kind",
            "basis",
            "how",
            "num_bases",
            "budget",
            "order",
            "shots",
            "seed",
            "dtype",
        )
    ]
    name = "-".join(str(part) for part in told if part is not None)
    name += f"-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.json"
    return Work(folder, method, device, cell, folder / "cells" / method / name)


def compute(work: Work) -> Path:
    """Measure a cell, and write its file beside and rename it."""
    key = work.folder, work.method, work.device
    if key not in _runs:
        _runs.clear()
        _runs[key] = Run(*key)
    torch.manual_seed(0)
    start = time.perf_counter()
    result = computing.compute(_runs[key], work.cell)
    seconds = time.perf_counter() - start
    record = {"cell": work.cell, "seconds": seconds, "result": result}
    work.file.parent.mkdir(parents=True, exist_ok=True)
    partial = work.file.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(record, indent=1))
    os.replace(partial, work.file)
    return work.file


def compute_all(pool: ProcessPoolExecutor, wanted: Iterable[Work], label: str) -> None:
    missing = [work for work in wanted if not work.file.exists()]
    futures = [pool.submit(compute, work) for work in missing]
    try:
        with tqdm(total=len(missing), desc=label, unit="cell", smoothing=0.05) as bar:
            for future in as_completed(futures):
                bar.set_postfix_str(future.result().name.rsplit("-", 1)[0])
                bar.update()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _start() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()


def _numbers(context: click.Context, option: click.Parameter, value: str) -> list[int]:
    try:
        return [int(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r}: expected whole numbers, such as 0,1,2") from None


@click.command(epilog="Example: python evals/mini/compare.py --preset tiny --seeds 0,1")
@click.option("--preset", type=click.Choice(list(PLANS)), default="tiny", show_default=True)
@click.option("--method", "methods", type=click.Choice(train.METHODS), multiple=True,
              default=("full",), show_default=True, help="May be repeated.")  # fmt: skip
@click.option("--seeds", callback=_numbers, default="0", show_default=True,
              help="Of the trainings, comma-separated.")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default="mini-runs",
              show_default=True, help="Runs go to OUT/PRESET-seedSEED.")  # fmt: skip
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto",
              show_default=True, help="auto: a GPU where there is one.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1), help="Processes; by default one for each core, "
              "and one on a GPU.")  # fmt: skip
@click.option("--report", "folder", type=click.Path(file_okay=False, path_type=Path),
              help="Where tables and pictures go; OUT/report by default.")  # fmt: skip
@click.option("--page", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="A Markdown page whose marked tables are renewed.")  # fmt: skip
def main(
    preset: str,
    methods: tuple[str, ...],
    seeds: list[int],
    out: Path,
    device: str,
    workers: int | None,
    folder: Path | None,
    page: Path | None,
) -> None:
    """Train, merge, score and report, from fixed seeds."""
    logging.disable_progress_bar()
    if page is not None:
        check_page(page, [(preset, method) for method in methods])
    on = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    count = workers or (1 if on == "cuda" else len(os.sched_getaffinity(0)))
    plan = PLANS[preset]
    records: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, _start) as pool:
        for method in methods:
            for seed in seeds:
                run, _ = train.train_run(preset, method, seed, out, on)
                models = fingerprint(run, method)
                label = f"{run.name} {method}"

                def works(
                    wanted: Iterable[Cell], run: Path = run, method: str = method,
                    models: str = models,
                ) -> list[Work]:  # fmt: skip
                    return [work_of(run, method, on, models, cell) for cell in wanted]

                first = works(reference(plan))
                compute_all(pool, first, label)
                added = json.loads(first[-1].file.read_text())["result"]["merges"]["ta"]
                rest = works(cells(plan, added["scales"]["bases"]["lambda"]))
                compute_all(pool, rest, label)
                about = {"preset": preset, "method": method, "train_seed": seed}
                for work in [*first, *rest]:
                    records.append(about | json.loads(work.file.read_text()))
    for path in write(records, folder or out / "report", page):
        click.echo(path)


if __name__ == "__main__":
    main()
