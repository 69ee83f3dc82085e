"""Scores of base, specialists and merged models side by side, with means and ratios.

A category's score is the plain mean of its tasks'. Normalized accuracy is a ratio of sums: the sum
of a model's category means over the same sum for the specialists, each of which gives its own
category (MergeBench, https://arxiv.org/abs/2505.10833, Section 4; the paper's `tab:mergebench`).

Standard errors assume that tasks are independent: sqrt(sum se^2) / n for a mean of n, and by the
delta method sqrt(se_N^2 + (N / D)^2 se_D^2) / D for a ratio N / D, which is rather too large.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pydantic

from tvb_mergekit.errors import UserError, check_known, listed, read_described
from tvb_mergekit.figures import MADE, can_draw, radar, rendered
from tvb_mergekit.score.pairs import LEVEL, Difference, Pair, compare
from tvb_mergekit.score.results import Benchmark, Cell, ResultFile, find_benchmark, read_results
from tvb_mergekit.tables import Sheet, markdown, page

FILES = ("scores.md", "scores.json", "scores.html")
LAST = "Average normalized accuracy"
HOW = "Percent ± standard error. Normalized: the sum of the means over that of the specialists."
HOW_PAIRS = "p: sign-flip test (McNemar's mid-p), corrected by Holm's method; * is a p below 0.05."
NONE = Cell(math.nan)


@dataclass(frozen=True)
class Column:
    """A model's scores and means; None for a mean of which a task is missing."""

    label: str
    kind: Literal["specialists", "model", "reference"]
    tasks: Mapping[str, Cell]
    categories: Mapping[str, Cell | None] = field(default_factory=dict)
    normalized: Cell | None = None


class Reference(pydantic.BaseModel):
    """Columns of another table: of the paper, or of a `scores.json`."""

    format_version: Literal[1]
    benchmark: str
    columns: list[Column]
    note: str = ""  # a warning to print with the table


@dataclass(frozen=True)
class Table:
    """Columns, and their differences."""

    benchmark: Benchmark
    columns: list[Column]
    compared: list[str]  # the categories in normalized accuracies
    pairs: list[Pair]
    warnings: list[str]


def gather(
    paths: Sequence[str],
    *,
    base: str | None = None,
    specialists: Sequence[str] = (),
    reference: str | None = None,
    show_reference: bool = False,
    benchmark: str | None = None,
    metrics: Sequence[str] = (),
    partial: bool = False,
) -> Table:
    """Put all that the words of `tvb score` name side by side, the reference's columns last."""
    own = {name or "": read_results(path) for name, path in map(_named, specialists)}
    models = {name or path.resolve().name: read_results(path) for name, path in map(_named, paths)}
    models = ({"base": read_results(Path(base))} if base else {}) | models
    if len(own) + len(models) < len(specialists) + len(paths) + bool(base):
        raise UserError("two columns have one name: give each LABEL=PATH, or CATEGORY=PATH")
    present = sorted({task for results in (*models.values(), *own.values()) for task in results})
    saved = _read_reference(reference) if reference else None
    known = find_benchmark(benchmark or (saved.benchmark if saved else None), present)
    chosen = {task.name: task.metric for task in known.tasks}
    for task, _, metric in (text.partition(":") for text in metrics):
        check_known(task, chosen, f"--metric {task}: no such task in {known.name}")
        chosen[task] = metric
    for name in own.keys() - {""}:
        check_known(name, [c.name for c in known.categories], f"--specialist {name}: no category")

    def column(label: str, kind: Any, sources: Mapping[str, Mapping[str, ResultFile]]) -> Column:
        cells = {}
        for category in known.categories:
            results = sources.get(category.name, sources.get("", {}))
            for task in (task.name for task in category.tasks if task.name in results):
                cells[task] = results[task].cell(task, chosen[task])
        return Column(label, kind, cells)

    others = saved.columns if saved else []
    best = [column("specialists", "specialists", own)] if own else []
    best = best or [each for each in others if each.kind == "specialists"]
    columns = [*best, *(column(label, "model", {"": found}) for label, found in models.items())]
    if show_reference:
        columns += [replace(each, kind="reference") for each in others if each not in best]
    notes = [f"{reference}: {saved.note}"] if saved and saved.note else []
    if not best:
        notes.append("no specialists, so no normalized accuracy: give --specialist or --reference")
    return _computed(known, columns, partial, notes)


def _named(text: str) -> tuple[str, Path]:
    """Split NAME=PATH; the name may be missing, and the path of an existing file may hold `=`."""
    name, _, place = ("", "", text) if os.path.exists(text) else text.rpartition("=")
    return name, Path(place)


def _read_reference(name: str) -> Reference:
    path = Path(__file__).with_name("paper.yaml") if name == "paper" else Path(name)
    found = read_described(path, Reference, "a scores.json of `tvb score`, or `paper`")
    columns = [replace(each, label=f"{each.label} ({path.stem})") for each in found.columns]
    return found.model_copy(update={"columns": columns})


def _computed(benchmark: Benchmark, raw: list[Column], partial: bool, notes: list[str]) -> Table:
    """Add means, ratios, paired differences, and warnings."""
    groups = {c.name: [task.name for task in c.tasks] for c in benchmark.categories}
    columns = list[Column]()
    for column in raw:
        means = {name: _mean(list(map(column.tasks.get, own))) for name, own in groups.items()}
        columns.append(replace(column, categories=means))
    compared = [n for n in groups if not partial or all(c.categories[n] for c in columns)]
    wholes = [_mean([column.categories[name] for name in compared]) for column in columns]
    best = next((w for c, w in zip(columns, wholes, strict=True) if c.kind == "specialists"), None)
    ratios = [_ratio(whole, best) for whole in wholes]
    columns = [replace(c, normalized=ratio) for c, ratio in zip(columns, ratios, strict=True)]
    # Pairs differ in points of the normalized accuracy (the specialists are constants), or without
    # specialists in points of the mean of the categories.
    scale = 100 / ((best and best.value) or 100) / max(len(compared), 1)
    weights = {task: scale / len(groups[n]) for n in compared for task in groups[n]}
    pairs, refused = compare({c.label: c.tasks for c in columns if c.kind == "model"}, weights)
    return Table(benchmark, columns, compared, pairs, [*notes, *_warnings(columns), *refused])


def _mean(cells: Sequence[Cell | None]) -> Cell | None:
    """Return the mean with its standard error; None if a part is missing."""
    known = [cell for cell in cells if cell is not None]
    if not known or len(known) < len(cells):
        return None
    errors = [cell.stderr for cell in known if cell.stderr is not None]
    stderr = math.hypot(*errors) / len(known) if len(errors) == len(known) else None
    return Cell(math.fsum(cell.value for cell in known) / len(known), stderr)


def _ratio(own: Cell | None, whole: Cell | None) -> Cell | None:
    """Return a share of the specialists' mean in percent, with its standard error."""
    if own is None or whole is None or whole.value == 0:
        return None
    ratio = own.value / whole.value
    if own is whole or own.stderr is None or whole.stderr is None:  # 100 is a constant
        return Cell(100 * ratio)
    return Cell(100 * ratio, 100 * math.hypot(own.stderr, ratio * whole.stderr) / whole.value)


def _warnings(columns: Sequence[Column]) -> list[str]:
    """Describe scores of a part of the items, and settings that differ from the first column's."""
    found: dict[str, list[str]] = defaultdict(list)
    for task in dict.fromkeys(task for column in columns for task in column.tasks):
        cells = {column.label: column.tasks[task] for column in columns if task in column.tasks}
        first = next(iter(cells.values()))
        for label, cell in cells.items():
            if cell.limited:
                found[f"{label} was run on a part of the items"].append(f"{task} ({cell.limited})")
            for key, value in cell.settings.items():
                if (other := first.settings.get(key, value)) != value:
                    told = f"{task} ({other:.16} and {value:.16})"
                    found[f"{key} differs between {first.file} and {cell.file}"].append(told)
    return [f"{line}: {listed(tasks)}" for line, tasks in found.items()]


def sheets(table: Table) -> list[Sheet | str]:
    """Return the scores, and the differences of pairs."""
    title, parts = table.benchmark.title, table.benchmark.categories
    if len(table.compared) < len(parts):
        title += f" (partial: {', '.join(table.compared) or 'no category is complete'})"
    rows = list[tuple[str, ...]]()
    for category in parts:
        means = (column.categories[category.name] for column in table.columns)
        rows.append((category.label, *map(_text, means)))
        for task in category.tasks:
            cells = (column.tasks.get(task.name) for column in table.columns)
            rows.append((f"  {task.label}", *map(_text, cells)))
    rows.append((LAST, *(_text(column.normalized) for column in table.columns)))
    told: list[Sheet | str] = [Sheet(title, ("", *(c.label for c in table.columns)), rows), HOW]
    if table.pairs:
        whole = LAST if any(c.normalized for c in table.columns) else "Mean of the categories"
        rows = [(whole, *(_difference_text(pair.whole) for pair in table.pairs))]
        for task in table.benchmark.tasks:
            found = (pair.tasks.get(task.name) for pair in table.pairs)
            rows.append((f"  {task.label}", *map(_difference_text, found)))
        names = (f"{pair.other} − {pair.one}" for pair in table.pairs)
        told += [Sheet("Paired differences", ("", *names), rows), HOW_PAIRS]
    return told


def _text(cell: Cell | None) -> str:
    if cell is None:
        return "—"
    return f"{cell.value:.2f}" + ("" if cell.stderr is None else f" ± {cell.stderr:.2f}")


def _difference_text(found: Difference | None) -> str:
    if found is None:
        return "—"
    value = Cell(round(found.value, 2) + 0.0, found.stderr)  # no minus before a zero
    p = "p <0.001" if found.corrected < 0.001 else f"p {found.corrected:.3f}"
    return f"{'+' * (value.value >= 0)}{_text(value)} {p}{'*' * (found.corrected < LEVEL)}"


def written(table: Table) -> dict[str, str]:
    """Return the files of `FILES`; `--reference` reads `scores.json`."""
    content = {"format_version": 1, "generator": MADE, **asdict(table)}
    content["partial"] = len(table.compared) < len(table.benchmark.categories)
    content["benchmark"] = table.benchmark.name
    told = [*sheets(table), *table.warnings, f"{MADE}."]
    tasks = {task.name: task.label for task in table.benchmark.tasks}
    lines = {c.label: [c.tasks.get(t, NONE).value for t in tasks] for c in table.columns}
    picture = rendered(partial(radar, [*tasks.values()], lines), "png") if can_draw() else b""
    return {
        "scores.md": markdown(told),
        "scores.json": json.dumps(content, indent=1, allow_nan=False) + "\n",
        "scores.html": page(told, picture),
    }
