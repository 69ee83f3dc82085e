#!/usr/bin/env python
"""Compare the bases on the small benchmark: train what is missing, merge, score, report.

    python evals/mini/compare.py --preset tiny --out mini-runs
    python evals/mini/compare.py --preset small --seeds 0,1,2 --out mini-runs

Every cell of `plan.py` gets a file OUT/PRESET-seedSEED/cells/METHOD/NAME.json, which has its name
only once it is whole: the same command goes on after an interruption. A file's name hashes the
cell, all weights of the run, the device and the versions of torch and of this package, so what was
measured of other models is never taken for it. (Edits of the code are not in the hash.) Tables and
pictures go to OUT/report-PRESET, or to `--report`.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import cells as computing
import click
import data
import pictures  # noqa: F401  # should matplotlib be missing, it is told now
import torch
import train
import xxhash
from plan import KEYS, KINDS, PLANS, Cell, cells, reference
from report import check_page, write
from runs import Run
from tqdm import tqdm
from transformers.utils import logging

import tvb_mergekit
from tvb_mergekit.atomic import write_file

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


def fingerprint(folder: Path, method: str, tasks: Iterable[str] = tuple(data.TASKS)) -> str:
    """Of all weights of a run."""
    digest = xxhash.xxh3_128()
    for path in [folder / "base", *(folder / method / task for task in tasks)]:
        for file in sorted(path.glob("*.safetensors")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def work_of(folder: Path, method: str, device: str, models: str, cell: Cell) -> Work:
    versions = [VERSION, tvb_mergekit.__version__, torch.__version__]
    facts = json.dumps([versions, device, models, cell], sort_keys=True)
    name = "-".join(str(cell[key]) for key in KEYS if cell.get(key) is not None)
    name += f"-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.json"
    return Work(folder, method, device, cell, folder / "cells" / method / name)


def take(run: Run, method: str) -> None:
    """The run that `compute` has at hand, and needs not read."""
    _runs.clear()
    _runs[run.folder, method, run.device] = run


def compute(work: Work) -> Path:
    """Measure a cell, and write its file beside and rename it."""
    key = work.folder, work.method, work.device
    if key not in _runs:
        take(Run(*key), work.method)
    torch.manual_seed(0)
    start = time.perf_counter()
    result = computing.compute(_runs[key], work.cell)
    seconds = time.perf_counter() - start
    record = {"cell": work.cell, "seconds": seconds, "result": result}
    work.file.parent.mkdir(parents=True, exist_ok=True)
    write_file(work.file, json.dumps(record, indent=1).encode())
    return work.file


def compute_all(pool: ProcessPoolExecutor, wanted: Iterable[Work], label: str) -> None:
    futures = {pool.submit(compute, work): work for work in wanted if not work.file.exists()}
    try:
        with tqdm(total=len(futures), desc=label, unit="cell", smoothing=0.05) as bar:
            for future in as_completed(futures):
                file = futures[future].file
                try:
                    future.result()
                except BrokenProcessPool as error:
                    raise click.ClickException(
                        f"a worker was killed, for want of memory perhaps, at {file.stem}; the "
                        "same command goes on, with fewer --workers"
                    ) from error
                except Exception as error:
                    raise RuntimeError(f"in the cell {futures[future].cell}") from error
                bar.set_postfix_str(file.stem.rpartition("-")[0])
                bar.update()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def serially(
    works: Sequence[Work], label: str, as_is: bool = False,
    passed: type[Exception] | tuple[()] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """What is there of some cells, after what is missing was computed in this process.

    Args:
        as_is: compute nothing.
        passed: what may be raised by a cell; it is told, and the others go on.
    """
    for work in tqdm(works, desc=label, unit="cell", disable=as_is):
        if not (as_is or work.file.exists()):
            try:
                compute(work)
            except passed as error:
                click.echo(error, err=True)
    return [json.loads(work.file.read_text()) for work in works if work.file.exists()]


def compute_run(
    pool: ProcessPoolExecutor | None, preset: str, method: str, seed: int, out: Path, device: str,
    kinds: Sequence[str],
) -> list[dict[str, Any]]:  # fmt: skip
    """Train and compute what is missing of one run; its records. Without a pool: what is there."""
    folder = train.run_folder(out, preset, seed)
    if pool is not None:
        train.train_run(preset, method, seed, out, device)
    models = fingerprint(folder, method)

    def works(wanted: Iterable[Cell]) -> list[Work]:
        return [work_of(folder, method, device, models, cell) for cell in wanted]

    base, added = works(reference(PLANS[preset]))
    if pool is not None:
        compute_all(pool, [base, added], f"{folder.name} {method}")
    elif not (base.file.exists() and added.file.exists()):
        return []
    sums = json.loads(added.file.read_text())["result"]["merges"]["ta"]["scales"]
    others = works(
        cell for cell in cells(PLANS[preset], sums["bases"]["lambda"]) if cell["kind"] in kinds
    )
    if pool is not None:
        compute_all(pool, others, f"{folder.name} {method}")
    about = {"preset": preset, "method": method, "train_seed": seed}
    found = [work.file for work in (base, added, *others) if work.file.exists()]
    return [about | json.loads(file.read_text()) for file in found]


def _start() -> None:
    """A worker: one thread, no word on Ctrl-C, and not longer than its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _numbers(context: click.Context, option: click.Parameter, value: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(part) for part in value.split(",")))
    except ValueError:
        raise click.BadParameter(f"{value!r}: expected whole numbers, such as 0,1,2") from None


def study_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that all studies have."""
    folder = click.Path(file_okay=False, path_type=Path)
    devices = click.Choice(["auto", "cpu", "cuda"])
    page = click.Path(exists=True, dir_okay=False, path_type=Path)
    for option in (
        click.option("--page", type=page, help="A Markdown page whose marked tables are renewed."),
        click.option("--as-is", is_flag=True, help="Compute nothing: report what is there."),
        click.option("--report", "folder", type=folder,
                     help="Where tables and pictures go; OUT/report-PRESET by default."),
        click.option("--device", type=devices, default="auto", show_default=True,
                     help="auto: a GPU where there is one."),
        click.option("--out", type=folder, default="mini-runs", show_default=True,
                     help="Runs of evals/mini are in OUT/PRESET-seedSEED."),
        click.option("--seeds", callback=_numbers, default="0", show_default=True,
                     help="Of the trainings, comma-separated."),
        click.option("--preset", type=click.Choice(list(PLANS)), default="tiny",
                     show_default=True),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command(epilog="Example: python evals/mini/compare.py --preset tiny --seeds 0,1")
@study_options
@click.option("--method", "methods", type=click.Choice(train.METHODS), multiple=True,
              default=("full",), show_default=True, help="May be repeated.")  # fmt: skip
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, default=KINDS,
              help="Only this kind of cells; may be repeated. By default all.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1), help="Processes; by default as many as "
              "PyTorch would take threads, and one on a GPU.")  # fmt: skip
def main(
    preset: str,
    methods: tuple[str, ...],
    seeds: list[int],
    kinds: tuple[str, ...],
    out: Path,
    device: str,
    workers: int | None,
    folder: Path | None,
    as_is: bool,
    page: Path | None,
) -> None:
    """Train, merge, score and report, from fixed seeds."""
    logging.disable_progress_bar()
    if page is not None:
        check_page(page)
    on = train.chosen_device(device)
    count = workers or (1 if on == "cuda" else torch.get_num_threads())
    runs = [(method, seed) for method in dict.fromkeys(methods) for seed in seeds]
    spawn = multiprocessing.get_context("spawn")
    workers_of = nullcontext() if as_is else ProcessPoolExecutor(count, spawn, _start)
    records = []
    with workers_of as pool:
        for method, seed in runs:
            records += compute_run(pool, preset, method, seed, out, on, kinds)
    if not records:
        wanted = ", ".join(f"{preset} {method} seed {seed}" for method, seed in runs)
        raise click.ClickException(f"{out} has no results of {wanted}: leave out --as-is")
    for path in write(records, folder or out / f"report-{preset}", page):
        click.echo(path)


if __name__ == "__main__":
    main()
