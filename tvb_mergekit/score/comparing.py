"""Whether scores side by side were measured in the same way, and completely."""

from __future__ import annotations

from collections.abc import Sequence

from tvb_mergekit.errors import listed
from tvb_mergekit.score.benchmark import Benchmark, Task
from tvb_mergekit.score.columns import Column

# Metrics that are shares of answers without a full verdict.
UNJUDGED = {
    "as_text": "answers compared as text only, for lack of time",
    "unchecked": "programs that timed out and were not run again",
    "parse_error": "verdicts of the judge that could not be read",
}


def in_part(columns: Sequence[Column]) -> list[str]:
    """A line for each file with tasks run on a part of their items, or not judged completely."""
    found: dict[str, list[str]] = {}
    for column in columns:
        for task, cell in column.tasks.items():
            file = cell.origin.file if cell.origin else column.label
            if cell.origin and cell.origin.limited:
                line = f"{column.label} (limited): {file} was run with --limit or --samples"
                found.setdefault(line, []).append(f"{task} ({cell.origin.limited})")
            for key, share in cell.others.items():
                name = key.partition(",")[0]
                if share and name in UNJUDGED:
                    line = f"{column.label}: {file}: {UNJUDGED[name]} (`{name}`)"
                    found.setdefault(line, []).append(f"{task} ({share:.2f} %)")
    return [f"{line}: {listed(tasks)}" for line, tasks in found.items()]


def differences(benchmark: Benchmark, columns: Sequence[Column]) -> list[str]:
    """Settings that differ from those of the first column that has the task, a line for each
    setting and pair of files; `benchmark` has the metrics that are usual."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for task in benchmark.tasks:
        measured = [_settings(column, task) for column in columns if task.name in column.tasks]
        for file, other in measured[1:]:
            first, one = measured[0]
            for key in one.keys() & other.keys():
                if one[key] != other[key]:
                    tasks = found.setdefault((key, first, file), [])
                    tasks.append(f"{task.name} ({one[key]} and {other[key]})")
    return [
        f"{what} differs between {one} and {other}: {listed(tasks)}"
        for (what, one, other), tasks in sorted(found.items())
    ]


def _settings(column: Column, task: Task) -> tuple[str, dict[str, str]]:
    """The file of a score, and what it depends on; one that names no metric holds the usual."""
    cell = column.tasks[task.name]
    metric = {"the metric": cell.metric or task.metric}
    if cell.origin is None:
        return column.label, metric
    return cell.origin.file, metric | dict(cell.origin.settings)
