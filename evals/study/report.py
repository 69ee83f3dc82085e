"""Files of a study: numbers, the cells they come from, pictures, and the marked tables of a page.

    <!-- TAG: METHOD_NAME -->     the table NAME is put between these lines of a page
    <!-- end -->

A table without records, for example one of another method, stays as it is in the page.
The same records give the same bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from study.cells import Record
from study.tables import Runs, Sheet
from tvb_mergekit.atomic import write_file

END = "<!-- end -->"


def pairs(records: Iterable[Record]) -> list[tuple[str, str]]:
    """Each preset and method that has records."""
    return sorted({(record["preset"], record["method"]) for record in records})


def listing(every: Iterable[Runs]) -> list[str]:
    """The cells of the tables, one a line."""
    return [
        json.dumps(as_written({key: value for key, value in record.items() if key != "seconds"}))
        for runs in every
        for record in runs.records
    ]


def as_written(found: Any) -> Any:
    """Records as a report holds them: six digits, keys in order, null instead of infinity and NaN.

    Of a search only the best score stays.
    """
    if isinstance(found, dict):
        if isinstance(found.get("validation"), list):
            known = [score for score in found["validation"] if score is not None]
            found = {**found, "validation": max(known)}
        return {key: as_written(value) for key, value in sorted(found.items()) if key != "grid"}
    if isinstance(found, (list, tuple)):
        return [as_written(value) for value in found]
    if isinstance(found, float):
        return float(f"{found:.6g}") if math.isfinite(found) else None
    return found


def reported(folder: Path) -> list[Record]:
    """The records in the JSON files of a report, rounded as they were written."""
    return [record for file in sorted(folder.glob("*.json"))
            for record in json.loads(file.read_text())["cells"]]  # fmt: skip


def markdown(sheets: Iterable[Sheet]) -> str:
    return "\n".join(sheet.markdown() for sheet in sheets)


def write_study(
    study: str,
    every: Iterable[Runs],
    sheets: Mapping[str, Sequence[Sheet]],
    drawn: Mapping[str, bytes],
    folder: Path,
    page: Path | None = None,
) -> list[Path]:
    """Write STUDY.json and the pictures into FOLDER, and the tables marked STUDY into PAGE.

    Without PAGE all tables are in FOLDER/STUDY.md. Nothing is written before everything is known.
    """
    tables = {name: [each.plain() for each in some] for name, some in sheets.items() if some}
    numbers = json.dumps({"tables": tables}, indent=1, sort_keys=True).removesuffix("\n}")
    numbers += ',\n "cells": [\n' + ",\n".join(listing(every)) + "\n ]\n}\n"
    files = {folder / f"{study}.json": numbers.encode()}
    files |= {folder / f"{title}.svg": picture for title, picture in drawn.items()}
    made = {name: markdown(some) for name, some in sheets.items()}
    text = "\n".join(filter(None, made.values())) if page is None else filled(page, study, made)
    files[page or folder / f"{study}.md"] = text.encode()
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        write_file(path, content)
    return list(files)


def filled(page: Path, tag: str, tables: Mapping[str, str]) -> str:
    """The text of a page with the tables of a tag between their marks."""
    lines, inside, kept, titles = list[str](), 0, False, {name.partition("_")[2] for name in tables}
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if line.lstrip().startswith(f"<!-- {tag}:"):
            if inside:
                break
            mark = re.fullmatch(rf"\s*<!-- {tag}: (.+) -->\s*", line)
            if mark is None or mark[1].partition("_")[2] not in titles:
                raise click.ClickException(
                    f"{page}, line {number}: {line.strip()} names no table; "
                    f"expected METHOD_NAME with one of {', '.join(sorted(titles))}"
                )
            found = tables.get(mark[1])
            inside, kept = number, not found
            lines += [line, "\n", found, "\n"] if found else [line]
        elif line.strip() == END or not inside or kept:
            inside = 0 if line.strip() == END else inside
            lines.append(line)
    if inside:
        raise click.ClickException(f"{page}, line {inside}: no {END} after this table")
    return "".join(lines)
