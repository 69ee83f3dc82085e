"""lm-eval's result files, `results_*.json`, read for their scores and how they came about.

Written by EvaluationTracker.save_results_aggregated of lm-eval 0.4.13:
https://github.com/EleutherAI/lm-evaluation-harness/blob/main/lm_eval/loggers/evaluation_tracker.py
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.score.benchmark import read_described

# What `--output_path FOLDER` and `--output_path NAME.json` lead to.
PATTERNS = ("results_*.json", "*_????-??-??T??-??-??*.json")
DATE = re.compile(r"_\d{4}-\d\d-\d\dT[\d.-]+$")  # which it adds to names of files


@dataclass(frozen=True)
class Origin:
    """Where a score comes from.

    Attributes:
        file: the result file.
        settings: what has to agree between models that are compared, in words.
        limited: how much of the task was run, where that was not all of it.
        model: its path or name; None where lm-eval drew a random one.
        date: when the run began, in seconds since 1970; None where the file does not say.
    """

    file: str
    settings: Mapping[str, str] = field(default_factory=dict)
    limited: str | None = None
    model: str | None = None
    date: float | None = None


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
        rivals: task that different models have run -> model -> its file.
    """

    tasks: Mapping[str, TaskResult]
    notes: tuple[str, ...] = ()
    rivals: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


class _File(pydantic.BaseModel):
    """What is read of a result file."""

    results: dict[str, dict[str, Any]]
    date: pydantic.FiniteFloat = 0.0
    model_name: str | None = None
    config: dict[str, Any] = {}
    configs: dict[str, dict[str, Any]] = {}
    versions: dict[str, Any] = {}
    shots: dict[str, Any] = pydantic.Field({}, alias="n-shot")
    counts: dict[str, dict[str, int]] = pydantic.Field({}, alias="n-samples")
    higher_is_better: dict[str, dict[str, Any]] = {}
    chat_template_sha: str | None = None
    system_instruction_sha: str | None = None
    fewshot_as_multiturn: bool | None = None
    lm_eval_version: str | None = None
    transformers_version: str | None = None
    max_length: int | None = None
    task_hashes: dict[str, str] = {}

    @property
    def model(self) -> str | None:
        """The model's path or name; None where lm-eval drew a random one."""
        if not self.model_name or self.model_name not in str(self.config.get("model_args")):
            return None
        return os.path.normpath(self.model_name)  # ./math and math/ are one


# The settings that prompts depend on, from a file and the name of a task.
PROMPTS: dict[str, Callable[[_File, str], object]] = {
    "the system instruction": lambda file, _: (file.system_instruction_sha or "none")[:8],
    "the chat template": lambda file, _: (file.chat_template_sha or "none")[:8],
    "--fewshot_as_multiturn": lambda file, _: file.fewshot_as_multiturn,
    "n-shot": lambda file, task: file.shots.get(task),
    "the few-shot seed": lambda file, task: (
        file.config.get("fewshot_seed") if file.shots.get(task) else None
    ),
    "the task's version": lambda file, task: file.versions.get(task),
}


def read_results(path: str | os.PathLike[str]) -> Results:
    """The results in a file, or in all files of a folder.

    Of two files that share a task the newer one counts, by lm-eval's own date.

    Raises:
        UserError: there is no result file there, or one that cannot be read.
    """
    place, paths = Path(path), [Path(path)]
    if place.is_dir():
        every = {found for pattern in PATTERNS for found in place.rglob(pattern)}
        paths = sorted(found for found in every if found.is_file())
    if not paths:
        raise UserError(
            f"{place}: no results of lm_eval in this folder: expected results_*.json, as "
            "`lm_eval --output_path` writes them"
        )
    files = [(found, read_described(found, _File, "a result file of lm_eval")) for found in paths]
    tasks: dict[str, TaskResult] = {}
    models: dict[str, dict[str, str]] = {}
    replaced: dict[tuple[str, str], list[str]] = {}
    for where, file in sorted(files, key=lambda item: (item[1].date, item[0])):
        for name, values in file.results.items():
            result = _task(file, name, values, str(where))
            if not result.metrics:
                continue
            if name in tasks:
                replaced.setdefault((tasks[name].origin.file, str(where)), []).append(name)
            if file.model:
                models.setdefault(name, {})[file.model] = str(where)
            tasks[name] = result
    notes = [
        f"{old} and {new} both hold {listed(names)}: the newer, {new}, counts"
        for (old, new), names in replaced.items()
    ]
    return Results(tasks, tuple(notes), {n: found for n, found in models.items() if len(found) > 1})


def _task(file: _File, name: str, values: Mapping[str, Any], path: str) -> TaskResult:
    metrics, stderrs = {}, {}
    for key, value in values.items():
        metric, comma, rest = key.partition(",")
        if not comma or not isinstance(value, (int, float)):
            continue
        if not metric.endswith("_stderr"):
            metrics[key] = float(value)
        elif math.isfinite(value):
            stderrs[f"{metric.removesuffix('_stderr')},{rest}"] = float(value)
    counts, limit = file.counts.get(name, {}), file.config.get("limit")
    scored, every = counts.get("effective"), counts.get("original")
    generation = file.config.get("gen_kwargs") or {}
    settings = {setting: read(file, name) for setting, read in PROMPTS.items()}
    settings |= {
        "the number of items": scored,
        "the hash of items and prompts": file.task_hashes.get(name, "")[:8] or None,
        "--gen_kwargs": json.dumps(generation, sort_keys=True, default=str),
        "the version of lm-eval": file.lm_eval_version,
        "the version of transformers": file.transformers_version,
        "the dtype": file.config.get("model_dtype"),
        "the batch size": file.config.get("batch_size"),
        "max_length": file.max_length,
    }
    recorded = file.configs.get(name, {}).get("metadata") or {}
    settings |= {key: value for key, value in recorded.items() if key.startswith("MERGEBENCH_")}
    limited = None
    if scored is not None and every is not None and scored < every:
        limited = f"{scored} of {every} items"
    elif limit is not None and not counts:  # a group, whose items are not counted
        limited = f"--limit {limit}"
    known = {key: str(value) for key, value in settings.items() if value is not None}
    directions = file.higher_is_better.get(name, {})
    lower = frozenset(metric for metric, higher in directions.items() if higher is False)
    origin = Origin(path, known, limited, file.model, file.date or None)
    return TaskResult(metrics, stderrs, lower, origin)
