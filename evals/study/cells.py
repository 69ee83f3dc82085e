"""Cells: one independent piece of work each, with a file for its result.

A cell is a plain dict that names everything its result depends on besides the models. A file gets
its name when it is complete, and the name hashes the cell, the models, the device and the versions
of torch and this package. The same command therefore resumes after an interruption, and never
takes results of other weights. Edits of code and configurations are not in the hash.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import xxhash
from tqdm import tqdm

import tvb_mergekit
from tvb_mergekit.atomic import write_file

Cell = dict[str, Any]
Record = dict[str, Any]  # preset, method and train_seed; cell, seconds and result
Measure = Callable[[Any, Cell], dict[str, Any]]  # models and a cell -> what was measured

VERSION = 1  # of the meaning of cells: results of another version are not used
# The keys that identify a cell, and that its file is named by
KEYS = ("kind", "basis", "how", "num_bases", "budget", "order", "shots", "seed", "dtype", "scale")


@dataclass(frozen=True)
class Source:
    """The models that cells measure, loaded when a cell is missing.

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


def fingerprint(folders: Iterable[Path], patterns: Sequence[str] = ("*.safetensors",)) -> str:
    """Hash all weights, or other files, in some folders."""
    digest = xxhash.xxh3_128()
    for folder in folders:
        for file in sorted(file for pattern in patterns for file in folder.glob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def works(source: Source, cells: Iterable[Cell], kinds: Mapping[str, Measure]) -> list[Work]:
    """The work that each cell asks for; see `measured`."""
    versions = [VERSION, tvb_mergekit.__version__, torch.__version__]
    found = []
    for cell in cells:
        facts = json.dumps([versions, source.device, source.models, cell], sort_keys=True)
        name = "-".join(str(cell[key]) for key in KEYS if cell.get(key) is not None)
        name += f"-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.json"
        found.append(Work(source, kinds[cell["kind"]], cell, source.cells / name))
    return found


def bill(every: Iterable[Work]) -> list[str]:
    """The missing cells of each kind, and their time by the finished ones of the kind."""
    groups: dict[str, list[Work]] = {}
    for work in every:
        groups.setdefault(work.cell["kind"], []).append(work)
    lines = []
    for kind, some in groups.items():
        done = [work.record()["seconds"] for work in some if work.file.exists()]
        missing = len(some) - len(done)
        hours = f"{missing * statistics.fmean(done) / 3600:.1f} h" if done else "unknown time"
        lines.append(f"{kind:16s} {missing:3d} of {len(some):3d} cells, {hours if missing else ''}")
    return lines


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
    *,
    as_is: bool = False,
    only: str = "*",
) -> list[Record]:
    """The records of all cells that have a file, after the missing ones were computed.

    Processes that compute different cells of the same models do not disturb each other.

    Args:
        kinds: a cell's `kind` -> the function that measures it.
        as_is: compute nothing.
        only: a pattern as of file names; cells whose file it does not match are not computed.
    """
    wanted = works(source, cells, kinds)
    named = [work for work in wanted if fnmatchcase(work.file.name, only)]
    missing = [] if as_is else [work for work in named if not work.file.exists()]
    for work in tqdm(missing, desc=source.label, unit="cell", disable=as_is):
        compute(work)
    return [work.record() for work in wanted if work.file.exists()]
