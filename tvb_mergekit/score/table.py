"""Scores of base, specialists and merged models side by side, and what follows from them.

A category's score is the plain mean of its tasks'. Normalized accuracy is a ratio of sums: the sum
of a model's category means over the same sum for the specialists, each of which gives its own
category (MergeBench, https://arxiv.org/abs/2505.10833, Section 4; the paper's `tab:mergebench`).

Standard errors take the tasks as independent: that of a mean of n is sqrt(sum se^2) / n, that of
a ratio N / D comes by the delta method, sqrt(se_N^2 + (N / D)^2 se_D^2) / D. Model and specialists
answer the same items, and what is hard for one is mostly hard for the other: such a ratio varies
less than if they were independent, so its standard error is rather too large. Where a part has
none, the whole has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from tvb_mergekit import __version__
from tvb_mergekit.errors import UserError
from tvb_mergekit.figures import MADE
from tvb_mergekit.score.benchmark import (
    FORMAT_VERSION,
    Benchmark,
    Category,
    Task,
    check_known,
    repeated,
)
from tvb_mergekit.score.columns import Cell, Column, Reference, measured
from tvb_mergekit.score.comparing import differences, in_part
from tvb_mergekit.score.floors import Remark
from tvb_mergekit.score.pairs import Pair
from tvb_mergekit.score.results import Results

BASE, SPECIALISTS = "base", "specialists"  # labels of their columns


@dataclass(frozen=True)
class Row:
    """A row of the table, with a cell for each column.

    `task` is None in the row of a category's mean, and both are None in that of the normalized
    accuracies.
    """

    category: Category | None
    task: Task | None
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Table:
    """See `table`, which makes it; `warnings` say what may not be comparable.

    Attributes:
        partial: whether the normalized accuracy may be over fewer categories.
        pairs: differences over the same items, and
        remarks: what is odd about single scores, both from `examine`.
    """

    benchmark: Benchmark
    columns: tuple[Column, ...]
    partial: bool = False
    warnings: tuple[str, ...] = ()
    pairs: tuple[Pair, ...] = ()
    remarks: tuple[Remark, ...] = ()

    @property
    def specialists(self) -> Column | None:
        return next((column for column in self.columns if column.kind == "specialists"), None)

    def score(self, column: Column, part: Task | Category) -> Cell | None:
        """The cell of a task, or the mean of a category's; None where a task is missing."""
        if isinstance(part, Task):
            return column.tasks.get(part.name)
        total, count = _sum([self.score(column, task) for task in part.tasks]), len(part.tasks)
        if total is None:
            return None
        return Cell(total.value / count, None if total.stderr is None else total.stderr / count)

    def relative(self, column: Column, part: Task | Category) -> float | None:
        """The score in percent of the specialist's."""
        own = self.score(column, part)
        best = self.score(self.specialists, part) if self.specialists else None
        return 100 * own.value / best.value if own and best and best.value > 0 else None

    @cached_property
    def compared(self) -> tuple[Category, ...]:
        """The categories that normalized accuracies are over."""
        return tuple(
            category
            for category in self.benchmark.categories
            if not self.partial or all(self.score(column, category) for column in self.columns)
        )

    @property
    def is_partial(self) -> bool:
        """Whether categories are left out of the normalized accuracy."""
        return len(self.compared) < len(self.benchmark.categories)

    @property
    def title(self) -> str:
        """The benchmark's, and which categories are compared where that is not all."""
        names = ", ".join(category.label for category in self.compared)
        over = f" (partial: {names or 'no category is complete'})" if self.is_partial else ""
        return self.benchmark.title + over

    def normalized(self, column: Column) -> Cell | None:
        """None without specialists, with tasks missing here or there, and over a sum of 0."""
        best = self.specialists
        if best is None:
            return None
        own, whole = (_sum([self.score(c, part) for part in self.compared]) for c in (column, best))
        if own is None or whole is None or whole.value <= 0:
            return None
        if column is best:
            return Cell(100.0)  # itself by itself: nothing varies
        ratio = own.value / whole.value
        if own.stderr is None or whole.stderr is None:
            return Cell(100 * ratio)
        return Cell(100 * ratio, 100 * math.hypot(own.stderr, ratio * whole.stderr) / whole.value)

    def rows(self) -> list[Row]:
        """A row for each task, one for each category's mean, and the normalized accuracies."""
        found = []
        for category in self.benchmark.categories:
            for task in (*category.tasks, None):
                cells = tuple(self.score(column, task or category) for column in self.columns)
                found.append(Row(category, task, cells))
        return [*found, Row(None, None, tuple(map(self.normalized, self.columns)))]

    def gaps(self) -> list[str]:
        """A line for each column with missing tasks, with the command that runs them; a line
        without specialists."""
        lines = []
        every, categories = self.benchmark.tasks, self.benchmark.categories
        for column in self.columns:
            missing = [task.name for task in every if task.name not in column.tasks]
            if missing:
                lost = [c.label for c in categories if self.score(column, c) is None]
                lines.append(
                    f"{column.label}: {len(missing)} of {len(every)} tasks are missing, so no mean "
                    f"of {', '.join(lost)}: {', '.join(missing)}; to run them: "
                    f"{self.benchmark.command(missing)}"
                )
        if self.specialists is None:
            lines.append(
                "No specialists, so no normalized accuracy: name them with --specialist, or "
                "--reference paper"
            )
        return lines

    def json(self) -> dict[str, Any]:
        """`scores.json`, which `--reference` reads; percent, null where something is missing."""

        def mean(cell: Cell | None) -> dict[str, Any] | None:
            return None if cell is None else {"value": cell.value, "stderr": cell.stderr}

        benchmark = self.benchmark
        columns = [
            {
                "label": column.label,
                "kind": column.kind,
                "normalized": mean(self.normalized(column)),
                "categories": {c.name: mean(self.score(column, c)) for c in benchmark.categories},
                "tasks": {
                    task.name: (cell := column.tasks.get(task.name)) and asdict(cell)
                    for task in benchmark.tasks
                },
            }
            for column in self.columns
        ]
        return {
            "format_version": FORMAT_VERSION,
            "version": __version__,
            "generator": MADE,
            "benchmark": benchmark.name,
            "partial": self.is_partial,
            "compared": [category.name for category in self.compared],
            "columns": columns,
            "pairs": [asdict(pair) for pair in self.pairs],
            "remarks": [asdict(remark) for remark in self.remarks],
            "missing": self.gaps(),
            "warnings": list(self.warnings),
        }


def table(
    benchmark: Benchmark,
    models: Mapping[str, Results],
    *,
    base: Results | None = None,
    specialists: Mapping[str, Results] | None = None,
    reference: Reference | None = None,
    show_reference: bool = False,
    metrics: Mapping[str, str] | None = None,
    partial: bool = False,
) -> Table:
    """The results side by side: base, specialists, models, then the reference's columns.

    Args:
        models: label -> results.
        specialists: category -> the results of its own specialist; the same ones for all where
            they were gathered in one file or folder.
        reference: its specialists stand in where `specialists` is empty.
        show_reference: show its other columns too.
        metrics: task -> another `metric,filter` of it.
        partial: take the normalized accuracy over the categories that every column has whole.

    Raises:
        UserError: no such category, task or metric, none of the tasks in some results, a task of
            different models in them, a score that is no share, two columns of one name.
    """
    specialists = specialists or {}
    usual, benchmark = benchmark, benchmark.reading(metrics or {})
    known = [category.name for category in benchmark.categories]
    for name in specialists:
        check_known(name, known, f"--specialist {name}: no such category in {benchmark.name}")
    columns, rest = [], []
    if base is not None:
        columns.append(measured(BASE, "base", benchmark, dict.fromkeys(known, base)))
    if specialists:
        columns.append(measured(SPECIALISTS, "specialists", benchmark, specialists))
    if reference is not None:
        named = [replace(c, label=f"{c.label} ({reference.name})") for c in reference.columns]
        leading = [c for c in named if c.kind == "specialists" and not specialists]
        if not leading and not specialists:
            raise UserError(
                f"the reference {reference.name} has no specialists: name them with --specialist"
            )
        columns += leading
        rest = [replace(c, kind="reference") for c in named if c not in leading]
    for label, results in models.items():
        columns.append(measured(label, "model", benchmark, dict.fromkeys(known, results)))
    columns += rest if show_reference else []
    if twice := repeated([column.label for column in columns]):
        raise UserError(f"two columns are called {twice}: give one another label, LABEL=PATH")
    every = [*models.values(), *([base] if base else []), *specialists.values()]
    warnings = [
        *(note for results in every for note in results.notes),
        *([f"{reference.name}: {reference.note}"] if reference and reference.note else []),
        *in_part(columns),
        *differences(usual, columns),
    ]
    return Table(benchmark, tuple(columns), partial, tuple(dict.fromkeys(warnings)))


def _sum(cells: Sequence[Cell | None]) -> Cell | None:
    """None where a cell is missing; without a standard error where one is not known."""
    present = [cell for cell in cells if cell is not None]
    if len(present) < len(cells):
        return None
    errors = [cell.stderr for cell in present if cell.stderr is not None]
    stderr = math.hypot(*errors) if len(errors) == len(cells) else None
    return Cell(math.fsum(cell.value for cell in present), stderr)
