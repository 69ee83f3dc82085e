"""Numbers of a table before they are text: from records, means and spreads in rows and columns.

A mean over tasks of which one is missing is missing, and a mean over fewer runs than the rest of
its row says so. A run is a training seed, times the seeds of a random basis or the orders of a
stream; a cell that was computed twice counts once, as the last time.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import data
from plan import BASES, HALF, KEYS, SPANS, T

Record = dict[str, Any]
Wanted = dict[str, Any]  # what a record's cell is to hold
Value = Callable[[Record], float | None]

MAIN = ["none", *BASES, "rand_select"]
COOLEST_FIRST = [f"ae_adam_{t}" for t in ("0.5", 1, 2, 5, 10, 20)]
COOLEST_FIRST += ["ae_annealed", "ae_annealed_0.9", "ae_exact"]
NEGATION = "plain ascent rand_proj pca ae_adam_5 ae_exact balanced".split()
ONLINE = "continual_ta magmax rand_select ae balanced".split()
TRANSFER = ["base", "finetune", "none", "none_subsample", "rand_select", *SPANS]
TRANSFER += [f"{label}_turned" for label in SPANS]
OTHER_SIGNS = ("pca", "linear_ae")  # row sums of another sign or scale than a mixture's
MERGES = {"ta": "task arithmetic", "ties": "TIES"}
SCALES = {
    "bases": "lambda_scale: bases",
    "tasks": "lambda_scale: tasks",
    "decoder": "sum of reconstructions",  # under task arithmetic alone
}
NAMES = {  # of labels that do not speak for themselves; the others are names of bases in recipes
    "none": "all task vectors",
    "none_subsample": "all task vectors, M/T of the shots",
    "ae_exact": "ae, exact",
    "ae_exact_mixed": "ae, exact, mixed",
    "ae_annealed": "ae, Adam, annealed x0.8",
    "ae_annealed_0.9": "ae, Adam, annealed x0.9",
    "plain": "the task vector itself",
    "ascent": "gradient ascent",
    "base": "base, zero-shot",
    "finetune": "fine-tuned on the shots",
}


def name(label: str) -> str:
    if label.endswith("_turned"):
        return f"{name(label.removesuffix('_turned'))}, made orthogonal"
    temperature = label.removeprefix("ae_adam_")
    return NAMES.get(label, label if temperature == label else f"ae, Adam, t = {temperature}")


def dig(found: Any, *path: str) -> Any:
    """What lies at the end of a path of keys; None where one of them is missing."""
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def known(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def over(scores: Any, tasks: Iterable[str] = tuple(data.TASKS)) -> float | None:
    """The mean; None where a task is missing: over fewer it would be another quantity."""
    values = [dig(scores, task) for task in tasks]
    return statistics.fmean(values) if values and all(map(known, values)) else None


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


def pearson(pairs: Sequence[tuple[float, float]]) -> float | None:
    """None for fewer than three pairs, and where one side does not vary."""
    try:
        return statistics.correlation(*zip(*pairs, strict=True)) if len(pairs) > 2 else None
    except statistics.StatisticsError:
        return None


# ------------------------------------------------------------------------------------------ records


def in_store(record: Record) -> bool:
    """Bases on disk, in some precision: a study of its own, which no other table may show."""
    cell = record["cell"]
    return bool(cell.get("stored")) or cell.get("dtype", "float32") != "float32"


def identity(record: Record) -> list[Any]:
    return [in_store(record), *(record["cell"].get(key) for key in KEYS)]


class Runs:
    """The records of one preset and method, in an order that is not the caller's."""

    def __init__(self, records: Iterable[Record], preset: str, method: str):
        here = (r for r in records if (r["preset"], r["method"]) == (preset, method))
        last = {(json.dumps(identity(r)), r["train_seed"]): r for r in here}
        self.records = [last[key] for key in sorted(last)]
        self.what = f"{preset}, {method}"
        self.reference = {r["train_seed"]: r["result"] for r in self.find("reference")}

    def find(self, kind: str, stored: bool = False, **wanted: Any) -> list[Record]:
        """Not those of the study of precisions, unless what is `stored` is asked for."""
        wanted |= {"kind": kind}
        return [
            record
            for record in self.records
            if in_store(record) == stored
            and all(record["cell"].get(key) == value for key, value in wanted.items())
        ]

    def having(self, kind: str, key: str, **wanted: Any) -> list[Any]:
        """The different values of a cell's key; None, for cells without one, comes last."""
        values = {r["cell"].get(key) for r in self.find(kind, **wanted)}
        return sorted(values, key=lambda value: (value is None, value or 0))

    def share(self, record: Record, *path: str) -> dict[str, float]:
        return self.shares(record, dig(record, "result", *path) or {})

    def shares(self, record: Record, scores: Mapping[str, Any]) -> dict[str, float]:
        """Accuracies over those of this run's specialists; 0 where a specialist has 0."""
        own = dig(self.reference.get(record["train_seed"]), "specialists") or {}
        both = [(t, scores[t], own[t]) for t in scores if known(scores[t]) and known(own.get(t))]
        return {task: value / best if best else 0.0 for task, value, best in both}

    def normal(self, *path: str) -> Value:
        return lambda record: over(self.share(record, *path))

    def stored(self, record: Record) -> float | None:
        """The bytes of the bases over those of the specialists' files."""
        every = dig(self.reference.get(record["train_seed"]), "bytes")
        return value_of("bytes", per=every)(record) if every else None


def value_of(*path: str, per: float = 1) -> Value:
    def value(record: Record) -> float | None:
        found = dig(record, "result", *path)
        return found / per if known(found) else None

    return value


def mean_of(*path: str) -> Value:
    return lambda record: over(dig(record, "result", *path))


def forgotten(key: str) -> Value:
    """The mean over the ten tasks, each forgotten by a model of its own."""

    def value(record: Record) -> float | None:
        return over({task: dig(record, "result", "tasks", task, key) for task in data.TASKS})

    return value


def tested(merge: str, scale: str) -> tuple[str, ...]:
    return ("merges", merge, "scales", scale, "test")


TA = tested("ta", "tasks")  # what most tables show


def gap(record: Record) -> float | None:
    """The loss over the least that any bases can have; unknown where that is 0."""
    found = dig(record, "result", "facts", "relative_gap")
    return 1 + found if known(found) else None


def row_sums(record: Record) -> list[float]:
    found = dig(record, "result", "row_sums") or []
    return found if len(found) == T and all(map(known, found)) else []


def variation(record: Record) -> float | None:
    """The coefficient of variation of the row sums, which are all there are, not a sample.

    None where their mean is 0 up to the rounding of cells.jsonl, as PCA's is.
    """
    sums = row_sums(record)
    middle = abs(statistics.fmean(sums)) if sums else 0.0
    return (
        statistics.pstdev(sums) / middle if middle > 1e-5 * max(map(abs, sums), default=0) else None
    )


# ------------------------------------------------------------------------------------------- sheets


class Column(NamedTuple):
    value: Value
    form: str = ".3f"
    sd: bool = True  # shown; the JSON has it anyway
    wanted: Wanted = {}  # noqa: RUF012  # nobody changes it


@dataclass(frozen=True)
class Sheet:
    caption: str
    columns: Mapping[str, Column]
    rows: dict[str, list[Spread | None]]
    corner: str = "method"
    ranked: bool = False  # the best compressed basis of each column is bold
    facts: dict[str, float | int | None] = field(default_factory=dict)
    note: str = ""

    def markdown(self) -> str:
        counts = {row: max(cell.n for cell in cells if cell) for row, cells in self.rows.items()}
        usual = Counter(counts.values()).most_common(1)[0][0]
        rest = "".join(f"; {row}: {n}" for row, n in counts.items() if n != usual)
        lines = [
            f"{self.caption}; mean ± standard deviation, n = {usual} run{'s' * (usual > 1)}{rest}.",
            "",
        ]
        lines += [f"| {self.corner} | {' | '.join(self.columns)} |"]
        lines += ["|---" + "|---:" * len(self.columns) + "|"]
        for row, cells in self.rows.items():
            texts = []
            for place, (cell, column) in enumerate(zip(cells, self.columns.values(), strict=True)):
                text = format(cell.mean, column.form) if cell else "-"
                if row != name("none") and text == self._best(place, column.form):
                    text = f"**{text}**"
                if cell and cell.sd is not None and column.sd:
                    text += f" ± {cell.sd:{column.form}}"
                texts.append(text + (f" (n={cell.n})" if cell and cell.n != counts[row] else ""))
            lines.append(f"| {row} | {' | '.join(texts)} |")
        return "\n".join([*lines, *(["", self.note] if self.note else []), ""])

    def _best(self, place: int, form: str) -> str | None:
        """As it is written: what looks the same is as good. None where nothing is compared."""
        cells = [cells[place] for row, cells in self.rows.items() if row != name("none")]
        means = [cell.mean for cell in cells if cell]
        return format(max(means), form) if self.ranked and len(means) > 1 else None

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
    """A sheet of the rows of which something is known; none where that is no row."""
    found = {label: cells for label, cells in rows.items() if any(cells)}
    seeds = len({r["train_seed"] for r in runs.records if r["cell"]["kind"] == kind})
    caption += f" ({runs.what}, {seeds} training seed{'s' * (seeds > 1)})"
    return [Sheet(caption, columns, found, **more)] if found else []


def grid(
    runs: Runs, caption: str, kind: str, columns: Mapping[str, Column], rows: Mapping[str, Wanted],
    **more: Any,
) -> list[Sheet]:  # fmt: skip
    """In each cell the spread of the column's value over the records of row and column."""
    cells = {
        label: [
            spread(map(column.value, runs.find(kind, **wanted, **column.wanted)))
            for column in columns.values()
        ]
        for label, wanted in rows.items()
    }
    return sheet(runs, caption, kind, columns, cells, **more)


def at_half(labels: Iterable[str]) -> dict[str, Wanted]:
    """Rows of M = T/2, but for what has no bases or all."""
    sizes = {"none": T, "plain": None, "ascent": None}
    return {name(b): {"basis": b, "num_bases": sizes.get(b, HALF)} for b in labels}


def by_size(
    runs: Runs, kind: str, value: Value, key: str = "num_bases", none: str = "no bases"
) -> dict[str, Column]:
    sizes = runs.having(kind, key)
    titles = [none if size is None else f"M = {size}" for size in sizes]
    return {t: Column(value, wanted={key: m}) for t, m in zip(titles, sizes, strict=True)}
