"""Cells: one measurement each, which is made once.

A cell is a dict that names everything its result depends on besides the models. It has a file,
whose name hashes the cell, the weights and the versions of torch and this package. So the same
command resumes after an interruption, and never takes results of other weights.

`cells.jsonl` next to this module has a line for each cell that was ever measured, on any machine:
{"models": "full", "seed": 0, "cell": {...}, "result": {...}}. Scores of items are short there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import tvb_mergekit

Cell = dict[str, Any]
Record = dict[str, Any]
Scores = dict[str, list[float]]  # task -> the score of each item

# The keys that name a cell of a run; all others are settings of the search
KEYS = ("kind", "how", "basis", "num_bases", "budget", "order", "seed")
KEPT = (*KEYS, "tested")  # in cells.jsonl


def identity(record: Record) -> str:
    """A text that sorts cells by models, kind, way and seed."""
    cell = record["cell"]
    found = [record["models"], *(cell.get(key) for key in KEYS), record["seed"]]
    return json.dumps(found)


def fingerprint(folders: Iterable[Path]) -> str:
    """Hash all weights in some folders."""
    digest = hashlib.blake2b(digest_size=16)
    for file in (file for folder in folders for file in sorted(folder.glob("*.safetensors"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def place(folder: Path, cell: Cell, weights: str) -> Path:
    """The file of a cell's result."""
    facts = json.dumps([tvb_mergekit.__version__, torch.__version__, weights, cell], sort_keys=True)
    name = "-".join(str(cell[key]) for key in KEYS if cell.get(key) is not None)
    return folder / f"{name}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}.json"


def measured(file: Path, cell: Cell, measure: Callable[[Cell], dict[str, Any]]) -> dict[str, Any]:
    """The result of a cell, read from its file or measured now."""
    if not file.exists():
        torch.manual_seed(0)
        found = json.dumps(rounded(measure(cell)))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".part").write_text(found)
        file.with_suffix(".part").replace(file)
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def rounded(found: Any) -> Any:
    """Six digits of each number, and the scores of items as short text."""
    if isinstance(found, dict):
        return {k: {t: packed(v) for t, v in value.items()} if k == "items" else rounded(value)
                for k, value in found.items()}  # fmt: skip
    if isinstance(found, (list, tuple)):
        return [rounded(value) for value in found]
    return float(f"{found:.6g}") if isinstance(found, float) else found


def packed(scores: list[float]) -> str | list[int]:
    """Scores of items: right or wrong as `COUNT:HEX`, a bit each; others in units of 1e-4."""
    if not {*scores} <= {0.0, 1.0}:
        return [round(10000 * score) for score in scores]
    return f"{len(scores)}:{int('0' + ''.join(str(int(s)) for s in scores), 2):x}"


def unpacked(items: str | list[int]) -> list[float]:
    if isinstance(items, list):
        return [value / 10000 for value in items]
    count, bits = items.split(":")
    return [float(bit) for bit in f"{int(bits, 16):0{count}b}"]


def read(file: Path) -> list[Record]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def write(file: Path, records: Iterable[Record]) -> list[Record]:
    """Write the records in order; of two with one identity the later stays."""
    last = {identity(record): record for record in records}
    found = [last[key] | {"cell": {k: v for k, v in last[key]["cell"].items() if k in KEPT}}
             for key in sorted(last)]  # fmt: skip
    lines = (json.dumps(record, separators=(",", ":"), sort_keys=True) for record in found)
    file.write_text("".join(line + "\n" for line in lines))
    return found
