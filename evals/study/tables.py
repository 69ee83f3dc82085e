"""Numbers of a table before they are text: means and spreads in rows and columns.

A mean over tasks is missing if a task is missing. A mean over fewer runs than the rest of its row
says so. A run is a training seed, times the seeds of a random basis or the orders of a stream. If a
cell was computed twice, only the last record counts.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from study.cells import KEYS, Record

Wanted = dict[str, Any]  # keys and values that a record's cell has
Value = Callable[[Record], float | None]


def dig(found: Any, *path: str) -> Any:
    """The end of a path of keys; None if one of them is missing."""
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def known(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def over(scores: Any, tasks: Iterable[str]) -> float | None:
    """The mean; None if a task is missing, since a mean over fewer is another quantity."""
    values = [dig(scores, task) for task in tasks]
    return statistics.fmean(values) if values and all(map(known, values)) else None


def value_of(*path: str, per: float = 1) -> Value:
    def value(record: Record) -> float | None:
        found = dig(record, "result", *path)
        return found / per if known(found) else None

    return value


class Spread(NamedTuple):
    mean: float
    sd: float | None  # of the sample; None for a single run
    n: int


def spread(values: Iterable[float | None]) -> Spread | None:
    found = [value for value in values if value is not None and known(value)]
    if not found:
        return None
    sd = statistics.stdev(found) if len(found) > 1 else None
    return Spread(statistics.fmean(found), sd, len(found))


class Runs:
    """The records of one preset and method, in an order that does not depend on the caller's.

    Attributes:
        tasks: normalized accuracies are means over them.
        unseen: tasks without a specialist.
        records: as they were measured.
        each: kind -> the same, but one record for each merge of a cell of several.
        reference: training seed -> the result of its `reference` cell.
    """

    def __init__(
        self, records: Iterable[Record], preset: str, method: str,
        tasks: Sequence[str], unseen: Sequence[str] = (),
    ) -> None:  # fmt: skip
        here = (r for r in records if (r["preset"], r["method"]) == (preset, method))
        last = {(_identity(r), r["train_seed"]): r for r in here}
        self.records = [last[key] for key in sorted(last)]
        self.each: dict[str, list[Record]] = {}
        for part in (part for record in self.records for part in _split(record)):
            self.each.setdefault(part["cell"]["kind"], []).append(part)
        self.preset, self.method, self.what = preset, method, f"{preset}, {method}"
        self.tasks, self.unseen = tuple(tasks), tuple(unseen)
        self.reference = {r["train_seed"]: r["result"] for r in self.find("reference")}

    def find(self, kind: str, **wanted: Any) -> list[Record]:
        """The records whose cells have all wanted values."""
        return having(self.each.get(kind, []), **wanted)

    def having(self, kind: str, key: str, **wanted: Any) -> list[Any]:
        """The different values of a cell's key; None, for cells without one, comes last."""
        values = {r["cell"].get(key) for r in self.find(kind, **wanted)}
        return sorted(values, key=lambda value: (value is None, value or 0))

    def share(self, record: Record, *path: str) -> dict[str, float]:
        return self.shares(record, dig(record, "result", *path) or {})

    def shares(self, record: Record, scores: Mapping[str, Any]) -> dict[str, float]:
        """Accuracies over those of this run's specialists; 0 if a specialist has 0."""
        reference = self.reference.get(record["train_seed"])
        own = dig(reference, "specialists") or {}
        if each := dig(reference, "items", "specialists"):  # of the same items
            count = record["cell"].get("tested")
            own = {task: statistics.fmean(scores[:count]) for task, scores in each.items()}
        both = [(t, scores[t], own[t]) for t in scores if known(scores[t]) and known(own.get(t))]
        return {task: value / best if best else 0.0 for task, value, best in both}

    def normal(self, *path: str) -> Value:
        return lambda record: over(self.share(record, *path), self.tasks)

    def mean_of(self, *path: str) -> Value:
        return lambda record: over(dig(record, "result", *path), self.tasks)


def _identity(record: Record) -> str:
    return json.dumps([record["cell"].get(key) for key in KEYS])


def _split(record: Record) -> list[Record]:
    cell = record["cell"]
    if cell["kind"] != "matrices":
        return [record]
    merges = record["result"]["merges"].items()
    return [record | {"cell": cell | {"how": how}, "result": found} for how, found in merges]


def having(records: Iterable[Record], **wanted: Any) -> list[Record]:
    return [r for r in records if all(r["cell"].get(key) == v for key, v in wanted.items())]


class Column(NamedTuple):
    """A column of spreads of a value over the records of a row.

    Attributes:
        sd: whether it is shown; the JSON always has it.
        wanted: keys and values of the column's records.
        of: makes the cell of a row's records, in place of `value`.
    """

    value: Value = lambda record: None
    form: str = ".3f"
    sd: bool = True
    wanted: Wanted = {}  # noqa: RUF012  # nobody changes it
    of: Callable[[list[Record]], Spread | None] | None = None


@dataclass(frozen=True)
class Sheet:
    """One table."""

    caption: str
    columns: Mapping[str, Column]
    rows: dict[str, list[Spread | None]]
    corner: str = "method"
    facts: dict[str, float | int | None] = field(default_factory=dict)
    note: str = ""

    def markdown(self) -> str:
        counts = {row: max(cell.n for cell in cells if cell) for row, cells in self.rows.items()}
        usual = Counter(counts.values()).most_common(1)[0][0]
        rest = "".join(f"; {row}: {n}" for row, n in counts.items() if n != usual)
        lines = [
            f"{self.caption}; mean ± standard deviation, n = {usual} run{'s' * (usual > 1)}{rest}.",
            "",
            f"| {self.corner} | {' | '.join(self.columns)} |",
            "|---" + "|---:" * len(self.columns) + "|",
        ]
        for row, cells in self.rows.items():
            texts = []
            for cell, column in zip(cells, self.columns.values(), strict=True):
                text = format(cell.mean, column.form) if cell else "-"
                if cell and cell.sd is not None and column.sd:
                    text += f" ± {cell.sd:{column.form}}"
                texts.append(text + (f" (n={cell.n})" if cell and cell.n != counts[row] else ""))
            lines.append(f"| {row} | {' | '.join(texts)} |")
        return "\n".join([*lines, *(["", self.note] if self.note else []), ""])

    def plain(self) -> dict[str, Any]:
        rows = {
            row: dict(zip(self.columns, (cell and cell._asdict() for cell in cells), strict=True))
            for row, cells in self.rows.items()
        }
        return {"caption": self.caption, "rows": rows, "facts": self.facts}


def sheet(
    runs: Runs, caption: str, kind: str, columns: Mapping[str, Column],
    rows: Mapping[str, list[Spread | None]], **more: Any,
) -> list[Sheet]:  # fmt: skip
    """A sheet of the rows and columns with a known number; an empty list if there is none."""
    places = [k for k in range(len(columns)) if any(cells[k] for cells in rows.values())]
    titles = list(columns)
    shown = {titles[k]: columns[titles[k]] for k in places}
    found = {label: [cells[k] for k in places] for label, cells in rows.items() if any(cells)}
    seeds = len({r["train_seed"] for r in runs.find(kind) or runs.records})
    caption += f" ({runs.what}, {seeds} training seed{'s' * (seeds > 1)})"
    return [Sheet(caption, shown, found, **more)] if found else []


def grid(
    runs: Runs, caption: str, kind: str, columns: Mapping[str, Column],
    rows: Mapping[str, list[Record]], **more: Any,
) -> list[Sheet]:  # fmt: skip
    """A sheet of rows of records."""

    def cell(column: Column, records: list[Record]) -> Spread | None:
        found = having(records, **column.wanted)
        return column.of(found) if column.of else spread(map(column.value, found))

    cells = {
        label: [cell(column, records) for column in columns.values()]
        for label, records in rows.items()
    }
    return sheet(runs, caption, kind, columns, cells, **more)
