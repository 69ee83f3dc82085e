"""Columns of a table, from result files or references, and whether they were measured alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.score.benchmark import HERE, Benchmark, check_known, read_described
from tvb_mergekit.score.results import Origin, Results, TaskResult

Kind = Literal["base", "specialists", "model", "reference"]
# Metrics that are shares of answers without a complete verdict.
UNJUDGED = {
    "as_text": "answers compared as text only, for lack of time",
    "unchecked": "programs that timed out and were not run again",
    "parse_error": "verdicts of the judge that could not be read",
}


@dataclass(frozen=True)
class Cell:
    """A score or a mean in percent; unknown facts are None."""

    value: Annotated[float, pydantic.Field(allow_inf_nan=False)]
    stderr: float | None = None
    metric: str | None = None
    origin: Origin | None = None
    others: Mapping[str, float] = field(default_factory=dict)  # the file's other shares, in percent


def _cells(found: Any) -> Any:
    """Accept numbers for cells, and null for missing ones."""
    if not isinstance(found, dict):
        return found
    given = {name: entry for name, entry in found.items() if entry is not None}
    return {n: {"value": e} if isinstance(e, (int, float)) else e for n, e in given.items()}


@dataclass(frozen=True)
class Column:
    """A model's scores by task; missing tasks are not in `tasks`."""

    label: str
    kind: Kind
    tasks: Annotated[Mapping[str, Cell], pydantic.BeforeValidator(_cells)]

    @property
    def head(self) -> str:
        """The label, marked if only a part of the items was run."""
        limited = any(cell.origin and cell.origin.limited for cell in self.tasks.values())
        return f"{self.label} (limited)" if limited else self.label


@dataclass(frozen=True)
class Reference:
    """A file of columns."""

    format_version: Literal[1]
    benchmark: str
    columns: tuple[Column, ...] = field(repr=False)
    name: str = ""  # stands after the labels; by default the file's name
    note: str | None = None  # a warning to print with the table


def read_reference(name: str, benchmark: Benchmark | None = None) -> Reference:
    """Read `paper`, or a `scores.json` of `tvb score --out`; it has to be for `benchmark`."""
    path = HERE / "paper.yaml" if name == "paper" else Path(name)
    what = "a reference (`paper`, or a scores.json of `tvb score`)"
    found = read_described(path, Reference, what)
    if benchmark is not None:
        if found.benchmark != benchmark.name:
            raise UserError(
                f"the reference {name} is for {found.benchmark}, and the table for "
                f"{benchmark.name} ({benchmark.title}): leave --reference out, or name another"
            )
        known = [task.name for task in benchmark.tasks]
        for task in (task for column in found.columns for task in column.tasks):
            check_known(task, known, f"{path}: no task {task} in {benchmark.name}")
    return replace(found, name=found.name or path.stem)


def measured(
    label: str,
    kind: Kind,
    sources: Mapping[str, Results],
    benchmark: Benchmark,
    metrics: Mapping[str, str],
) -> Column:
    """Make the column of results (category -> its results); categories may be missing."""
    cells = {}
    for category in benchmark.categories:
        results = sources.get(category.name, Results({}))
        for task in (task for task in category.tasks if task.name in results.tasks):
            results.check_rivals(
                label, task.name, "each model a PATH of its own, and each specialist CATEGORY=PATH"
            )
            metric = metrics.get(task.name, task.metric)
            cells[task.name] = _cell(task.name, metric, results.tasks[task.name])
    if not cells:
        every = {n: r for results in sources.values() for n, r in results.tasks.items()}
        files = sorted({result.origin.file for result in every.values()})
        raise UserError(
            f"{label}: expected {listed([task.name for task in benchmark.tasks])} in "
            f"{listed(files) or 'its files'}, found {listed(list(every)) or 'no scores'}"
        )
    return Column(label, kind, cells)


def _cell(task: str, metric: str, result: TaskResult) -> Cell:
    where, how = f"{result.origin.file}: {task} has", f"with --metric {task}:METRIC"
    value, stderr = result.metrics.get(metric), result.stderrs.get(metric)
    if value is None:
        known = ", ".join(f"`{key}`" for key in result.metrics)
        raise UserError(f"{where} no `{metric}`: it has {known}; choose one {how}")
    where += f" `{metric}`"
    if not 0 <= value <= 1:
        raise UserError(f"{where} = {value:g}: expected a share in [0, 1]; choose another {how}")
    if metric.partition(",")[0] in result.lower_is_better:
        raise UserError(f"{where}, which is better when it is lower: choose another {how}")
    shares = {k: 100 * x for k, x in result.metrics.items() if 0 <= x <= 1 and k != metric}
    return Cell(100 * value, stderr and 100 * stderr, metric, result.origin, shares)


def incomplete(columns: Sequence[Column]) -> list[str]:
    """Describe files with tasks that were run on a part of their items, or judged in part."""
    found: dict[str, list[str]] = {}
    for column in columns:
        for task, cell in column.tasks.items():
            origin = cell.origin or Origin(column.label)
            if origin.limited:
                line = f"{column.label} (limited): {origin.file} was run with --limit or --samples"
                found.setdefault(line, []).append(f"{task} ({origin.limited})")
            for key, share in cell.others.items():
                name = key.partition(",")[0]
                if share and name in UNJUDGED:
                    line = f"{column.label}: {origin.file}: {UNJUDGED[name]} (`{name}`)"
                    found.setdefault(line, []).append(f"{task} ({share:.2f} %)")
    return [f"{line}: {listed(tasks)}" for line, tasks in found.items()]


def differing(benchmark: Benchmark, columns: Sequence[Column]) -> list[str]:
    """Describe settings that differ from those of the first column that has the task.

    Columns that name no metric hold the usual one, which `benchmark` has.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    for task in benchmark.tasks:
        runs = list[tuple[str, dict[str, str]]]()
        for column in columns:
            if cell := column.tasks.get(task.name):
                origin, metric = cell.origin or Origin(column.label), cell.metric or task.metric
                runs.append((origin.file, {"the metric": metric, **origin.settings}))
        for file, other in runs[1:]:
            first, one = runs[0]
            for key in (key for key in one.keys() & other.keys() if one[key] != other[key]):
                values = f"{task.name} ({one[key]} and {other[key]})"
                found.setdefault((key, first, file), []).append(values)
    return [
        f"{what} differs between {one} and {other}: {listed(tasks)}"
        for (what, one, other), tasks in sorted(found.items())
    ]
