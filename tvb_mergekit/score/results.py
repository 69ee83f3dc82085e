"""lm-eval's result files, `results_*.json`, read for their scores and how they came about.

Written by EvaluationTracker.save_results_aggregated of lm-eval 0.4.13:
https://github.com/EleutherAI/lm-evaluation-harness/blob/main/lm_eval/loggers/evaluation_tracker.py
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tvb_mergekit.errors import UserError, listed

# What `--output_path FOLDER` and `--output_path NAME.json` lead to, and a user's own name.
PATTERNS = ("results*.json", "*_????-??-??T??-??-??*.json")


@dataclass(frozen=True)
class Origin:
    """Where a score comes from.

    Attributes:
        file: the result file.
        settings: what has to agree between models that are compared, in words.
        limited: how much of the task was run, where that was not all of it.
    """

    file: str
    settings: Mapping[str, str] = field(default_factory=dict)
    limited: str | None = None


@dataclass(frozen=True)
class TaskResult:
    """What one file says of one task or group.

    Attributes:
        metrics: `metric,filter` -> value, as lm-eval has it.
        stderrs: the same keys; one is missing where lm-eval has no number ("N/A").
        lower_is_better: metrics (without filter) that lm-eval says this of.
    """

    metrics: Mapping[str, float]
    stderrs: Mapping[str, float]
    lower_is_better: frozenset[str]
    origin: Origin


@dataclass(frozen=True)
class Results:
    """All tasks of one model; `notes` say what was chosen where files overlap.

    Attributes:
        rivals: task that different models have run -> model -> its file. Which of them is meant
            is not known.
    """

    tasks: Mapping[str, TaskResult]
    notes: tuple[str, ...] = ()
    rivals: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


class _OtherFile(UserError):
    """Not of lm-eval, whatever its name."""


@dataclass(frozen=True)
class _ResultFile:
    path: str
    date: float
    model: str | None
    tasks: Mapping[str, TaskResult]


def read_results(path: str | os.PathLike[str]) -> Results:
    """The results in a file, or in all files of a folder.

    Of two files that share a task the newer one counts, by lm-eval's own date. What in a folder
    only looks like a result file by its name is noted.

    Raises:
        UserError: there is no result file there, or one that cannot be read.
    """
    place = Path(path)
    files, notes = _read_folder(place) if place.is_dir() else ([_read_file(place)], [])
    files.sort(key=lambda file: (file.date, file.path))
    tasks: dict[str, TaskResult] = {}
    models_of: dict[str, dict[str, str]] = {}
    replaced: dict[tuple[str, str], list[str]] = {}
    for file in files:
        for name, result in file.tasks.items():
            if name in tasks:
                replaced.setdefault((tasks[name].origin.file, file.path), []).append(name)
            tasks[name] = result
            if file.model:
                models_of.setdefault(name, {})[file.model] = file.path
    for (old, new), names in replaced.items():
        notes.append(f"{old} and {new} both hold {listed(names)}: the newer, {new}, counts")
    used = {result.origin.file for result in tasks.values()}
    models = {file.model: file.path for file in files if file.model and file.path in used}
    if len(models) > 1:
        named = [f"{model} ({file})" for model, file in models.items()]
        notes.append(f"{place} joins the results of different models: {listed(named)}")
    rivals = {name: models for name, models in models_of.items() if len(models) > 1}
    return Results(tasks, tuple(notes), rivals)


def _read_folder(place: Path) -> tuple[list[_ResultFile], list[str]]:
    """The files, and a line for each path that is none; one that was cut off is a mistake."""
    files, skipped = [], {}
    for path in sorted({found for pattern in PATTERNS for found in place.rglob(pattern)}):
        if not path.is_file():
            skipped[str(path)] = f"{path} is not a file; skipped"
            continue
        try:
            files.append(_read_file(path))
        except _OtherFile:
            skipped[str(path)] = f"{path} is not a result file of lm_eval; skipped"
    if not files:
        none = f"; {listed(list(skipped))} are none" if skipped else ""
        raise UserError(
            f"{place}: no results of lm_eval in this folder: expected results_*.json, as "
            f"`lm_eval --output_path` writes them{none}"
        )
    return files, list(skipped.values())


def _read_file(path: Path) -> _ResultFile:
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_int=_integer)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; expected a result file of lm_eval") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(
            f"{path} is not a whole JSON file ({reason}): expected a result file of lm_eval; if it "
            "was cut off, run lm_eval again"
        ) from error
    results = found.get("results") if isinstance(found, dict) else None
    if not isinstance(results, dict) or not all(isinstance(v, dict) for v in results.values()):
        raise _OtherFile(
            f"{path} is not a result file of lm_eval: it has no `results`; expected what "
            "`lm_eval --output_path` writes"
        )
    date = found.get("date", 0.0)
    if not isinstance(date, (int, float)) or not math.isfinite(date):
        raise UserError(f"{path}: `date` is {date!r:.40}: expected seconds")
    tasks = {name: _task(found, name, values, path) for name, values in results.items()}
    name = found.get("model_name")
    arguments = str(_part(found, "config").get("model_args"))
    named = isinstance(name, str) and name and name in arguments  # else lm-eval drew a random one
    return _ResultFile(
        str(path),
        date,
        model=os.path.normpath(name) if named else None,  # ./math and math/ are one
        tasks={name: task for name, task in tasks.items() if task.metrics},
    )


def _task(found: Mapping[str, Any], name: str, values: Mapping[str, Any], path: Path) -> TaskResult:
    metrics, stderrs = {}, {}
    for key, value in values.items():
        metric, comma, rest = key.partition(",")
        if not comma or not isinstance(value, (int, float)):
            continue
        if not metric.endswith("_stderr"):
            metrics[key] = float(value)
        elif math.isfinite(value):
            stderrs[f"{metric.removesuffix('_stderr')},{rest}"] = float(value)
    config = _part(found, "config")
    counts = _part(found, "n-samples", name)
    scored, every = counts.get("effective"), counts.get("original")
    settings = {
        "n-shot": _part(found, "n-shot").get(name),
        "the task's version": _part(found, "versions").get(name),
        "the number of items": scored,
        "the use of a chat template": "yes" if found.get("chat_template_sha") else "no",
        "--gen_kwargs": json.dumps(config.get("gen_kwargs") or {}, sort_keys=True, default=str),
    }
    recorded = _part(found, "configs", name, "metadata")
    settings |= {key: value for key, value in recorded.items() if key.startswith("MERGEBENCH_")}
    limited, limit = None, config.get("limit")
    if isinstance(scored, int) and isinstance(every, int) and scored < every:
        limited = f"{scored} of {every} items"
    elif limit is not None and not counts:  # a group, whose items are not counted
        limited = f"--limit {f'{limit:g}' if isinstance(limit, (int, float)) else limit}"
    known = {key: str(value) for key, value in settings.items() if value is not None}
    directions = _part(found, "higher_is_better", name)
    lower = frozenset(metric for metric, higher in directions.items() if higher is False)
    return TaskResult(metrics, stderrs, lower, Origin(str(path), known, limited))


def _part(found: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    for key in keys:
        inner = found.get(key)
        found = inner if isinstance(inner, dict) else {}
    return found


def _integer(digits: str) -> int | float:
    """One that no float can hold as infinity: JSON's integers have no end."""
    return int(digits) if len(digits) < 300 else float(digits)
