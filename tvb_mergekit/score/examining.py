"""Paired differences, which lm-eval's samples add to a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.score.columns import Cell
from tvb_mergekit.score.pairs import Floats, compare
from tvb_mergekit.score.results import PROMPTS, read_samples, samples_file
from tvb_mergekit.score.table import Table


@dataclass(frozen=True)
class TaskAnswers:
    """A model's answers to one task."""

    there: bool  # whether there is a file of samples
    items: Mapping[int, tuple[str, str, float]]  # doc_id -> document and prompt (hashes), percent
    why: str | None = None  # why the scores cannot be paired; None if they can
    settings: Mapping[str, str] = field(default_factory=dict)


def examine(table: Table) -> Table:
    """Add `pairs` to a table, and warnings about tasks that cannot be paired.

    Samples lie next to the result files of the scores. One task is read at a time, and only the
    scores of its items are kept.
    """
    columns = [column for column in table.columns if column.kind != "reference"]
    labels = [column.label for column in columns if column.kind != "specialists"]
    values: dict[tuple[str, str], dict[str, Floats]] = {p: {} for p in combinations(labels, 2)}
    refused = dict[str, list[str]]()  # reason -> tasks
    for category in table.benchmark.categories:
        for task in category.tasks:
            known = {
                column.label: _read(column.tasks[task.name], task.name)
                for column in columns
                if column.label in labels and task.name in column.tasks
            }
            if len(known) > 1 and any(answers.there for answers in known.values()):
                for label, answers in known.items():
                    if answers.why:
                        refused.setdefault(f"{label}, {answers.why}", []).append(task.name)
            for one, other in combinations([n for n in known if known[n].why is None], 2):
                found = _subtracted(known[one], known[other])
                if isinstance(found, tuple):
                    reason = f"{one} and {other}, which were not given the same {found[0]}"
                    refused.setdefault(reason, []).append(f"{task.name} ({found[1]})")
                else:
                    values[one, other][task.name] = found
    said = (f"no paired differences of {why}: {listed(names)}" for why, names in refused.items())
    pairs = compare(values, _weights(table))
    return replace(table, pairs=pairs, warnings=(*table.warnings, *said))


def _read(cell: Cell, task: str) -> TaskAnswers:
    path = samples_file(cell.origin.file, task) if cell.origin else None
    if path is None or cell.metric is None or cell.origin is None:
        return TaskAnswers(False, {}, "which has no samples next to its results (`--log_samples`)")
    items, numbers = dict[int, tuple[str, str, float]](), True
    try:
        for sample in read_samples(path, cell.metric):
            if sample.doc_id in items:
                return TaskAnswers(True, {}, f"whose {path} holds item {sample.doc_id} twice")
            numbers = numbers and sample.score is not None
            items[sample.doc_id] = sample.document, sample.prompt, 100 * (sample.score or 0.0)
    except UserError as error:
        return TaskAnswers(False, {}, f"as {error}")
    mean = sum(score for *_, score in items.values()) / max(len(items), 1)
    if len(items) < (count := _counted(cell)):
        why = f"whose {path} holds {len(items)} of {count} items"
        if max(items, default=0) < count:  # else `lm_eval --samples` chose the items
            lost = next(doc_id for doc_id in range(count) if doc_id not in items)
            why += f" (item {lost} is missing)"
    elif not numbers or not abs(mean - cell.value) <= 0.01:  # the mean may be NaN
        why = f"whose `{cell.metric}` is not the mean over the items in samples"
    else:
        why = None
    return TaskAnswers(True, items, why, cell.origin.settings)


def _counted(cell: Cell) -> int:
    """The number of items of a score; 0 if unknown."""
    known = cell.origin.settings.get("the number of items", "") if cell.origin else ""
    return int(known) if known.isdecimal() else 0


def _subtracted(one: TaskAnswers, other: TaskAnswers) -> Floats | tuple[str, str]:
    """Return the differences of all items; or `items` or `prompts`, if those differ, and the place.

    Documents under other ids are paired by their hashes.
    """
    items = other.items
    mine, theirs = ({i: f[0] for i, f in answers.items.items()} for answers in (one, other))
    if mine != theirs:
        if Counter(mine.values()) != Counter(theirs.values()):
            first = min(i for i in mine.keys() | theirs if mine.get(i) != theirs.get(i))
            both = first in mine and first in theirs
            return "items", f"item {first} is {'another document' if both else 'missing in one'}"
        if len(set(mine.values())) < len(mine):
            return "items", "the same documents in another order, and some of them twice"
        ids = {document: i for i, document in mine.items()}
        items = {ids[found[0]]: found for found in items.values()}
    known = one.settings.keys() & other.settings.keys()
    causes = [k for k in PROMPTS if k in known and one.settings[k] != other.settings[k]]
    for doc_id, (_, prompt, _) in one.items.items():
        second = items[doc_id][1]
        if prompt != second if prompt and second else causes:
            return "prompts", ", ".join(causes) or f"item {doc_id}"
    return np.array([items[i][2] - score for i, (*_, score) in one.items.items()])


def _weights(table: Table) -> dict[str, float]:
    """Return each task's weight in the normalized accuracy; specialists' scores are constants.

    Without specialists the weights are those in the average of the categories.
    """
    scale = 1 / max(len(table.compared), 1)
    if (best := table.specialists) is not None:
        own = [table.score(best, category) for category in table.compared]
        total = sum(cell.value for cell in own if cell)
        if None in own or total <= 0:
            return {}
        scale = 100 / total
    return {t.name: scale / len(c.tasks) for c in table.compared for t in c.tasks}
