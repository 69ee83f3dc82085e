"""The files of the comparison: all tables, their numbers and cells, pictures, and a page.

<!-- table: small full addition -->     the mark of a table in a page: preset, method, name
<!-- end -->
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pictures
from compare_tables import SHEETS
from sheets import Runs
from study.cells import Record
from study.pictures import svg
from study.report import filled, listing, markdown, pairs, save

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
