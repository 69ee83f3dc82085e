"""Scores of base, specialists and merged models side by side, with means and ratios.

A category's score is the plain mean of its tasks'. Normalized accuracy is a ratio of sums: the sum
of a model's category means over the same sum for the specialists, each of which gives its own
category (MergeBench, https://arxiv.org/abs/2505.10833, Section 4; the paper's `tab:mergebench`).

Standard errors assume that tasks are independent. The error of a mean of n is sqrt(sum se^2) / n;
the error of a ratio N / D, by the delta method, is sqrt(se_N^2 + (N / D)^2 se_D^2) / D. Model and
specialists answer the same items, and hard items are mostly hard for both. So a ratio varies less
than if they were independent, and its standard error is rather too large. If a part has no error,
the total has none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tvb_mergekit import __version__
from tvb_mergekit.errors import UserError
from tvb_mergekit.figures import MADE
from tvb_mergekit.score.benchmark import Benchmark, Category, Task, check_known, repeated
from tvb_mergekit.score.columns import Cell, Column, Reference, differing, incomplete, measured
from tvb_mergekit.score.pairs import Pair
from tvb_mergekit.score.results import Results

FORMAT_VERSION = 1  # of scores.json; readers accept no other
NO_SPECIALISTS = "No specialists, so no normalized accuracy: give --specialist or --reference"


@dataclass(frozen=True)
class TableRow:
    """A row of the table, with a cell for each column."""

    category: Category | None  # None in the row of normalized accuracies
    task: Task | None  # None in the row of a category's mean
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Table:
    """Scores by column, made by `table`."""

    benchmark: Benchmark
    columns: tuple[Column, ...]
    partial: bool = False  # normalized accuracies may be over fewer categories
    warnings: tuple[str, ...] = ()  # differences that make scores incomparable
    pairs: tuple[Pair, ...] = ()  # differences over the same items, from `examine`

    @property
    def specialists(self) -> Column | None:
        return next((column for column in self.columns if column.kind == "specialists"), None)

    def score(self, column: Column, part: Task | Category) -> Cell | None:
        """Return the cell of a task, or the mean of a category; None if a task is missing."""
        if isinstance(part, Task):
            return column.tasks.get(part.name)
        total, count = _sum([self.score(column, task) for task in part.tasks]), len(part.tasks)
        return total and Cell(total.value / count, total.stderr and total.stderr / count)

    @functools.cached_property
    def compared(self) -> tuple[Category, ...]:
        """The categories in normalized accuracies."""
        return tuple(
            category
            for category in self.benchmark.categories
            if not self.partial or all(self.score(column, category) for column in self.columns)
        )

    @property
    def is_partial(self) -> bool:
        """Whether normalized accuracies leave out categories."""
        return len(self.compared) < len(self.benchmark.categories)

    @property
    def title(self) -> str:
        names = ", ".join(category.label for category in self.compared)
        over = f" (partial: {names or 'no category is complete'})" if self.is_partial else ""
        return self.benchmark.title + over

    def normalized(self, column: Column) -> Cell | None:
        """Return the normalized accuracy; None without specialists or with missing tasks."""
        best = self.specialists
        if best is None:
            return None
        own, total = (_sum([self.score(c, part) for part in self.compared]) for c in (column, best))
        if own is None or total is None or total.value <= 0:
            return None
        ratio = own.value / total.value
        if column is best or own.stderr is None or total.stderr is None:  # 100 is a constant
            return Cell(100 * ratio)
        return Cell(100 * ratio, 100 * math.hypot(own.stderr, ratio * total.stderr) / total.value)

    def rows(self) -> list[TableRow]:
        """Return rows for tasks and their category's mean, and one for normalized accuracies."""
        found = []
        for category in self.benchmark.categories:
            for task in (*category.tasks, None):
                cells = tuple(self.score(column, task or category) for column in self.columns)
                found.append(TableRow(category, task, cells))
        return [*found, TableRow(None, None, tuple(map(self.normalized, self.columns)))]

    def gaps(self) -> list[str]:
        """Describe missing tasks, with commands that run them, and missing specialists."""
        lines = []
        every, categories = self.benchmark.tasks, self.benchmark.categories
        for column in self.columns:
            if missing := [task.name for task in every if task.name not in column.tasks]:
                lost = [c.label for c in categories if self.score(column, c) is None]
                lines.append(
                    f"{column.label}: {len(missing)} of {len(every)} tasks are missing, so no mean "
                    f"of {', '.join(lost)}: {', '.join(missing)}; to run them: "
                    f"{self.benchmark.command(missing)}"
                )
        return lines if self.specialists else [*lines, NO_SPECIALISTS]

    def json(self) -> dict[str, Any]:
        """Return `scores.json`, which `--reference` reads: percent, null for missing scores."""

        def mean(cell: Cell | None) -> dict[str, Any] | None:
            return None if cell is None else {"value": cell.value, "stderr": cell.stderr}

        tasks, categories = self.benchmark.tasks, self.benchmark.categories
        columns = [
            {
                "label": column.label,
                "kind": column.kind,
                "normalized": mean(self.normalized(column)),
                "categories": {c.name: mean(self.score(column, c)) for c in categories},
                "tasks": {
                    task.name: (cell := column.tasks.get(task.name)) and asdict(cell)
                    for task in tasks
                },
            }
            for column in self.columns
        ]
        return {
            "format_version": FORMAT_VERSION,
            "version": __version__,
            "generator": MADE,
            "benchmark": self.benchmark.name,
            "partial": self.is_partial,
            "compared": [category.name for category in self.compared],
            "columns": columns,
            "pairs": [asdict(pair) for pair in self.pairs],
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
    """Put results side by side: base, specialists, models, then the reference's columns.

    Args:
        models: label -> results.
        specialists: category -> results of its specialist. Categories may share results.
        reference: gives the specialists if `specialists` is empty.
        show_reference: show the reference's other columns, too.
        metrics: task -> another `metric,filter`.
        partial: normalize over the categories that all columns have completely.

    Raises:
        UserError: unknown names, results that lack the tasks, ambiguous or unsuitable scores.
    """
    specialists, metrics = specialists or {}, metrics or {}
    for name in metrics:
        known = [task.name for task in benchmark.tasks]
        check_known(name, known, f"--metric {name}: no such task in {benchmark.name}")
    known = [category.name for category in benchmark.categories]
    for name in specialists:
        check_known(name, known, f"--specialist {name}: no such category in {benchmark.name}")

    column = functools.partial(measured, benchmark=benchmark, metrics=metrics)
    columns = [] if base is None else [column("base", "base", dict.fromkeys(known, base))]
    if specialists:
        columns.append(column("specialists", "specialists", specialists))
    others: list[Column] = []
    if reference is not None:
        others = [replace(c, label=f"{c.label} ({reference.name})") for c in reference.columns]
    leading = [] if specialists else [c for c in others if c.kind == "specialists"]
    if reference is not None and not specialists and not leading:
        raise UserError(f"the reference {reference.name} has no specialists: give --specialist")
    columns += leading
    columns += [column(name, "model", dict.fromkeys(known, m)) for name, m in models.items()]
    shown = [c for c in others if show_reference and c not in leading]
    columns += [replace(c, kind="reference") for c in shown]
    if twice := repeated([column.label for column in columns]):
        raise UserError(f"two columns are called {twice}: give one another label, LABEL=PATH")
    every = [*models.values(), *([base] if base else []), *specialists.values()]
    warnings = [
        *(note for results in every for note in results.notes),
        *([f"{reference.name}: {reference.note}"] if reference and reference.note else []),
        *incomplete(columns),
        *differing(benchmark, columns),
    ]
    return Table(benchmark, tuple(columns), partial, tuple(dict.fromkeys(warnings)))


def _sum(cells: Sequence[Cell | None]) -> Cell | None:
    present = [cell for cell in cells if cell is not None]
    if len(present) < len(cells):
        return None
    errors = [cell.stderr for cell in present if cell.stderr is not None]
    stderr = math.hypot(*errors) if len(errors) == len(cells) else None
    return Cell(math.fsum(cell.value for cell in present), stderr)
