"""Whether scores side by side were measured in the same way; what was not is named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tvb_mergekit.errors import listed
from tvb_mergekit.score.benchmark import KEYWORD, Benchmark, Task
from tvb_mergekit.score.columns import Column
from tvb_mergekit.score.results import Results


def in_part(columns: Sequence[Column]) -> list[str]:
    """A line for each file of which some tasks were run with --limit or --samples."""
    found: dict[tuple[str, str], list[str]] = {}
    for column in columns:
        for task, cell in column.tasks.items():
            if cell.origin and cell.origin.limited:
                tasks = found.setdefault((column.label, cell.origin.file), [])
                tasks.append(f"{task} ({cell.origin.limited})")
    return [
        f"{label} (limited): {file} was run with --limit or --samples: {listed(tasks)}"
        for (label, file), tasks in found.items()
    ]


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


def by_keywords(benchmark: Benchmark, named: Iterable[tuple[str, Results]]) -> list[str]:
    """Answers that were judged by phrases where the benchmark has a judge, and mixtures of both."""
    lines = []
    for category in benchmark.categories:
        filters = {task.metric.partition(",")[2]: task.name for task in category.tasks}
        if KEYWORD in filters and len(filters) > 1:
            other = next(name for name in filters if name != KEYWORD)
            lines.append(
                f"{category.label} mixes scores by keyword ({filters[KEYWORD]}) with others "
                f"({filters[other]}): its mean is of neither kind"
            )
    for label, results in named:
        for name in (task.name for task in benchmark.tasks):
            by_phrase = results.tasks.get(f"{name}_{KEYWORD}")
            if by_phrase is not None and name not in results.tasks:
                lines.append(
                    f"{label}: {by_phrase.origin.file} holds {name}_{KEYWORD}, judged by "
                    f"keywords: not the score of {name}, and left out"
                )
    return lines
