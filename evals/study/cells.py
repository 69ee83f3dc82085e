"""Cells: one independent piece of work each, with a file for its result.

A cell is a plain dict that names everything its result depends on besides the models. A file gets
its name when it is complete, and the name hashes the cell, the models, the device and the versions
of torch and this package. The same command therefore resumes after an interruption, and never
takes results of other models. Edits of the code are not in the hash.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import xxhash
from tqdm import tqdm
from transformers.utils import logging

import tvb_mergekit
from tvb_mergekit.atomic import write_file

Cell = dict[str, Any]
Record = dict[str, Any]  # preset, method and train_seed; cell, seconds and result
Measure = Callable[[Any, Cell], dict[str, Any]]  # models and a cell -> what was measured

VERSION = 1  # of the meaning of cells: results of another version are not used


@dataclass(frozen=True)
class Source:
    """The models that cells measure: hashable, and cheap to send to another process.

    Attributes:
        make: loads the models from `arguments`.
        cells: the folder of the cells' files.
        models: the fingerprint of all weights.
        about: preset, method and training seed, which every record repeats.
    """

    make: Callable[..., Any]
    arguments: tuple[Any, ...]
    cells: Path
    models: str
    device: str
    about: tuple[str, str, int]

    @property
    def label(self) -> str:
        preset, method, seed = self.about
        return f"{preset} {method} seed {seed}"


@dataclass(frozen=True)
class Work:
    """A cell with the models and the function that measure it, and the file of its result."""

    source: Source
    measure: Measure
    cell: Cell
    file: Path

    def record(self) -> Record:
        preset, method, seed = self.source.about
        found: Record = json.loads(self.file.read_text())
        return {"preset": preset, "method": method, "train_seed": seed} | found


def fingerprint(folders: Iterable[Path]) -> str:
    """Hash all weights in some folders."""
    digest = xxhash.xxh3_128()
    for folder in folders:
        for file in sorted(folder.glob("*.safetensors")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def works(
    source: Source, cells: Iterable[Cell], kinds: Mapping[str, Measure], keys: Sequence[str]
) -> list[Work]:
    """The work that each cell asks for; see `measured`."""
    versions = [VERSION, tvb_mergekit.__version__, torch.__version__]
    found = []
    for cell in cells:
        facts = json.dumps([versions, source.device, source.models, cell], sort_keys=True)
        name = "-".join(str(cell[key]) for key in keys if cell.get(key) is not None)
        name += f"-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.json"
        found.append(Work(source, kinds[cell["kind"]], cell, source.cells / name))
    return found


_opened: tuple[Source, Any] | None = None  # the last models, which the next cell often needs


def compute(work: Work) -> None:
    """Measure a cell, and write its file."""
    global _opened
    if _opened is None or _opened[0] != work.source:
        _opened = work.source, work.source.make(*work.source.arguments)
    torch.manual_seed(0)
    start = time.perf_counter()
    result = work.measure(_opened[1], work.cell)
    record = {"cell": work.cell, "seconds": time.perf_counter() - start, "result": result}
    work.file.parent.mkdir(parents=True, exist_ok=True)
    write_file(work.file, json.dumps(record, indent=1).encode())


def measured(
    source: Source,
    cells: Iterable[Cell],
    kinds: Mapping[str, Measure],
    keys: Sequence[str],
    *,
    as_is: bool = False,
    pool: ProcessPoolExecutor | None = None,
    skipped: type[Exception] | tuple[()] = (),
) -> list[Record]:
    """The records of all cells that have a file, after the missing ones were computed.

    Args:
        kinds: a cell's `kind` -> the function that measures it.
        keys: the keys of a cell that name its file.
        as_is: compute nothing.
        pool: the processes that compute; None: this process, one cell after another.
        skipped: errors of a cell that are printed; the other cells are computed.
    """
    wanted, label = works(source, cells, kinds, keys), source.label
    missing = [] if as_is else [work for work in wanted if not work.file.exists()]
    if pool is not None:
        _compute_in(pool, missing, label)
    else:
        for work in tqdm(missing, desc=label, unit="cell", disable=as_is):
            try:
                compute(work)
            except skipped as error:
                click.echo(error, err=True)
    return [work.record() for work in wanted if work.file.exists()]


def _compute_in(pool: ProcessPoolExecutor, missing: Sequence[Work], label: str) -> None:
    futures = {pool.submit(compute, work): work for work in missing}
    try:
        with tqdm(total=len(futures), desc=label, unit="cell", smoothing=0.05) as bar:
            for future in as_completed(futures):
                work = futures[future]
                try:
                    future.result()
                except BrokenProcessPool as error:
                    raise click.ClickException(
                        f"a worker was killed at {work.file.stem}, perhaps for lack of memory; "
                        "the same command resumes, with fewer --workers"
                    ) from error
                except Exception as error:
                    raise RuntimeError(f"in the cell {work.cell}") from error
                bar.set_postfix_str(work.file.stem.rpartition("-")[0])
                bar.update()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def processes(count: int) -> ProcessPoolExecutor:
    """Workers with one thread each, which end with their parent."""
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _start)


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
