"""Columns of a table: from result files, from the paper, or from an earlier `tvb score --out`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.score.benchmark import HERE, Benchmark, Task, check_known, read_described
from tvb_mergekit.score.results import Origin, Results, TaskResult

Kind = Literal["base", "specialists", "model", "reference"]


@dataclass(frozen=True)
class Cell:
    """A score or a mean in percent; what is not known of it, or is not of one task, is None.

    Attributes:
        others: the task's other metrics in the same file that are shares, in percent too.
    """

    value: float
    stderr: float | None = None
    metric: str | None = None
    origin: Origin | None = None
    others: Mapping[str, float] = field(default_factory=dict)


def _entries(found: Any) -> Any:
    """A number is a score of which no more is known, null a missing one."""
    if not isinstance(found, dict):
        return found
    return {
        name: {"value": entry} if isinstance(entry, (int, float)) else entry
        for name, entry in found.items()
        if entry is not None
    }


@dataclass(frozen=True)
class Column:
    """A model's scores by task name; what is missing is not in `tasks`."""

    label: str
    kind: Kind
    tasks: Annotated[Mapping[str, Cell], pydantic.BeforeValidator(_entries)]

    @property
    def head(self) -> str:
        """The label, marked where only a part of the items was run."""
        limited = any(cell.origin and cell.origin.limited for cell in self.tasks.values())
        return f"{self.label} (limited)" if limited else self.label


@dataclass(frozen=True)
class Reference:
    """A file of columns; `name` goes behind their labels, `note` says what to know about them."""

    format_version: Literal[1]
    benchmark: str
    columns: tuple[Column, ...] = field(repr=False)
    name: str = ""
    note: str | None = None


def read_reference(name: str, benchmark: Benchmark | None = None) -> Reference:
    """`paper`, or a `scores.json` that `tvb score --out` wrote.

    Raises:
        UserError: there is no such file, it is of another kind, or not of `benchmark`.
    """
    path = HERE / "paper.yaml" if name == "paper" else Path(name)
    what = "a reference (`paper`, or a scores.json of `tvb score`)"
    found = read_described(path, Reference, what)
    if benchmark is not None:
        if found.benchmark != benchmark.name:
            raise UserError(
                f"the reference {name} is of {found.benchmark}, and the table of {benchmark.name} "
                f"({benchmark.title}): leave --reference out, or name another"
            )
        known = [task.name for task in benchmark.tasks]
        for task in (task for column in found.columns for task in column.tasks):
            check_known(task, known, f"{path}: no task {task} in {benchmark.name}")
    return replace(found, name=found.name or path.stem)


def measured(
    label: str, kind: Kind, benchmark: Benchmark, sources: Mapping[str, Results]
) -> Column:
    """The column of results (category -> its results); categories may be left out.

    Raises:
        UserError: a task's metric is missing or no share, it is there of different models, or
            there is no task at all.
    """
    cells = {}
    for category in benchmark.categories:
        results = sources.get(category.name, Results({}))
        for task in (task for task in category.tasks if task.name in results.tasks):
            if rivals := results.rivals.get(task.name):
                models = [f"{model} ({file})" for model, file in rivals.items()]
                raise UserError(
                    f"{label}: {task.name} is there of different models, {listed(models)}: give "
                    "each model a PATH of its own, and each specialist a CATEGORY=PATH"
                )
            cells[task.name] = _cell(task, results.tasks[task.name])
    if not cells:
        every = {n: r for results in sources.values() for n, r in results.tasks.items()}
        files = sorted({result.origin.file for result in every.values()})
        raise UserError(
            f"{label}: expected {listed([task.name for task in benchmark.tasks])} in "
            f"{listed(files) or 'its files'}, found {listed(list(every)) or 'no scores'}"
        )
    return Column(label, kind, cells)


def _cell(task: Task, result: TaskResult) -> Cell:
    where, how = f"{result.origin.file}: {task.name} has", f"with --metric {task.name}:METRIC"
    value = result.metrics.get(task.metric)
    if value is None:
        known = ", ".join(f"`{key}`" for key in result.metrics)
        raise UserError(f"{where} no `{task.metric}`: it has {known}; choose one {how}")
    if not 0 <= value <= 1:
        raise UserError(
            f"{where} `{task.metric}` = {value:g}: expected a share in [0, 1]; choose another {how}"
        )
    if task.metric.partition(",")[0] in result.lower_is_better:
        raise UserError(f"{where} `{task.metric}`, of which less is better: choose another {how}")
    stderr = result.stderrs.get(task.metric)
    error = None if stderr is None else 100 * stderr
    shares = {
        key: 100 * x for key, x in result.metrics.items() if key != task.metric and 0 <= x <= 1
    }
    return Cell(100 * value, error, task.metric, result.origin, shares)
