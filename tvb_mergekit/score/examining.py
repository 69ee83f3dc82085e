"""What lm-eval's samples add to a table: paired differences, and remarks on scores at the floor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.score.columns import Cell
from tvb_mergekit.score.floors import Signs, remark
from tvb_mergekit.score.pairs import Array, compare
from tvb_mergekit.score.samples import read_items, samples_file
from tvb_mergekit.score.table import Table


@dataclass(frozen=True)
class Answered:
    """What one model answered to one task.

    Attributes:
        signs: None without a file of samples.
        scores: doc_id -> hash of the document, score in percent.
        why: why the scores cannot be paired, if they cannot.
    """

    signs: Signs | None
    scores: Mapping[int, tuple[str, float]]
    why: str | None = None


def examine(table: Table) -> Table:
    """The same table with `pairs` and `remarks`; its warnings say what could not be paired.

    Samples lie beside the result files that the scores are from. One task is read at a time, and
    only the scores of its items are kept.
    """
    columns = [column for column in table.columns if column.kind != "reference"]
    labels = [column.label for column in columns if column.kind != "specialists"]
    values: dict[tuple[str, str], dict[str, Array]] = {p: {} for p in combinations(labels, 2)}
    remarks, told = [], dict[str, list[str]]()  # told: reason -> tasks
    for category in table.benchmark.categories:
        for task in category.tasks:
            having = [column for column in columns if task.name in column.tasks]
            read = {column.label: _read(column.tasks[task.name], task.name) for column in having}
            remarks += [remark(c, category, task, read[c.label].signs) for c in having]
            known = {label: read[label] for label in labels if label in read}
            if len(known) > 1 and any(answered.signs for answered in known.values()):
                for label, answered in known.items():
                    if answered.why:
                        told.setdefault(f"{label}, {answered.why}", []).append(task.name)
            for one, other in combinations([n for n in known if known[n].why is None], 2):
                found = _subtracted(known[one], known[other])
                if isinstance(found, str):
                    reason = f"{one} and {other}, which were not given the same items"
                    told.setdefault(reason, []).append(f"{task.name} ({found})")
                else:
                    values[one, other][task.name] = found
    warnings = [f"no paired differences of {why}: {listed(tasks)}" for why, tasks in told.items()]
    return replace(
        table,
        pairs=compare(values, _weights(table)),
        remarks=tuple(found for found in remarks if found),
        warnings=(*table.warnings, *warnings),
    )


def _read(cell: Cell, task: str) -> Answered:
    path = samples_file(cell.origin.file, task) if cell.origin else None
    if path is None or cell.metric is None:
        return Answered(None, {}, "which has no samples beside its results (`--log_samples`)")
    signs, scores = Signs(), dict[int, tuple[str, float]]()
    numbers = True
    try:
        for item in read_items(path, cell.metric):
            signs.add(item)
            if item.doc_id in scores:
                return Answered(signs, {}, f"whose {path} holds item {item.doc_id} twice")
            numbers = numbers and item.score is not None
            scores[item.doc_id] = item.document, 100 * (item.score or 0.0)
    except UserError as error:
        return Answered(None, {}, f"as {error}")
    mean = sum(score for _, score in scores.values()) / max(len(scores), 1)
    if not numbers or not abs(mean - cell.value) <= 0.01:  # it may be no number
        return Answered(
            signs, scores, f"whose `{cell.metric}` is no mean over the items in samples"
        )
    return Answered(signs, scores)


def _subtracted(one: Answered, other: Answered) -> Array | str:
    """The differences of all items, or why there are none, with the first item that differs.

    The same documents under other ids are paired by their hashes.
    """
    scores = other.scores
    if {i: h for i, (h, _) in one.scores.items()} != {i: h for i, (h, _) in scores.items()}:
        mine, theirs = (Counter(h for h, _ in found.scores.values()) for found in (one, other))
        if mine != theirs:
            return _first_other(one, other)
        if max(mine.values()) > 1:
            return "the same documents in another order, and some of them twice"
        ids = {document: i for i, (document, _) in one.scores.items()}
        scores = {ids[found[0]]: found for found in scores.values()}
    return np.array([scores[i][1] - score for i, (_, score) in one.scores.items()])


def _first_other(one: Answered, other: Answered) -> str:
    for doc_id in sorted(one.scores.keys() | other.scores.keys()):
        first, second = one.scores.get(doc_id), other.scores.get(doc_id)
        if first is None or second is None:
            return f"item {doc_id} is missing in one"
        if first[0] != second[0]:
            return f"item {doc_id} is another document"
    raise AssertionError("the items are the same")


def _weights(table: Table) -> dict[str, float]:
    """What a point of each task adds to the normalized accuracy, whose specialists are taken as
    they are; without specialists, to the mean of the categories."""
    scale = 1 / max(len(table.compared), 1)
    if (best := table.specialists) is not None:
        own = [table.score(best, category) for category in table.compared]
        total = sum(cell.value for cell in own if cell)
        if None in own or total <= 0:
            return {}
        scale = 100 / total
    return {t.name: scale / len(c.tasks) for c in table.compared for t in c.tasks}
