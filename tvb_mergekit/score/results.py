"""lm-eval's files: scores and settings in `results_*.json`, answers in `samples_TASK_DATE.jsonl`.

Written by EvaluationTracker of lm-eval 0.4.13:
https://github.com/EleutherAI/lm-evaluation-harness/blob/main/lm_eval/loggers/evaluation_tracker.py
The samples, by `--log_samples`, are a line for each item and filter. `resps` holds a list for each
request of an item. That list holds texts, one for each repeat, or a pair (log-likelihood, whether
greedy), all as strings.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.score.benchmark import first_mistake, read_described

# File names by `--output_path FOLDER` and by `--output_path NAME.json`.
PATTERNS = ("results_*.json", "*_????-??-??T??-??-??*.json")
DATE = re.compile(r"_\d{4}-\d\d-\d\dT[\d.-]+$")  # added by lm-eval to names of files


@dataclass(frozen=True)
class Origin:
    """The run that a score comes from."""

    file: str
    settings: Mapping[str, str] = field(default_factory=dict)  # have to agree between models
    limited: str | None = None  # the part of the task that was run, if not all of it
    model: str | None = None  # path or name; None if lm-eval drew a random one
    date: float | None = None  # start of the run, in seconds since 1970, if known


@dataclass(frozen=True)
class TaskResult:
    """The results of one task or group in one file."""

    metrics: Mapping[str, float]  # `metric,filter` -> value
    stderrs: Mapping[str, float]  # the same keys, except those without a number ("N/A")
    lower_is_better: frozenset[str]  # metrics, without filter
    origin: Origin


@dataclass(frozen=True)
class Results:
    """All tasks of one model."""

    tasks: Mapping[str, TaskResult]
    notes: tuple[str, ...] = ()  # choices between files that overlap
    # task that different models have run -> model -> its file
    rivals: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def check_rivals(self, label: str, task: str, advice: str) -> None:
        """Raise UserError if different models have run the task; `advice`: what to give."""
        if rivals := self.rivals.get(task):
            models = [f"{model} ({file})" for model, file in rivals.items()]
            raise UserError(
                f"{label}: {task} was run by different models, {listed(models)}: give {advice}"
            )


class _ResultFile(pydantic.BaseModel):
    """The keys of a result file that are read."""

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
        if not self.model_name or self.model_name not in str(self.config.get("model_args")):
            return None
        return os.path.normpath(self.model_name)  # ./math and math/ are one


# Settings that prompts depend on, from a file and the name of a task.
PROMPTS: dict[str, Callable[[_ResultFile, str], object]] = {
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
    """Read a result file, or all result files of a folder.

    If two files share a task, the newer one counts, by lm-eval's own date.
    """
    place, paths = Path(path), [Path(path)]
    if place.is_dir():
        every = {found for pattern in PATTERNS for found in place.rglob(pattern)}
        paths = sorted(found for found in every if found.is_file())
    if not paths:
        raise UserError(f"{place}: no results of lm_eval in this folder: expected results_*.json")
    files = [(read_described(p, _ResultFile, "a result file of lm_eval"), str(p)) for p in paths]
    tasks: dict[str, TaskResult] = {}
    models: dict[str, dict[str, str]] = {}
    replaced: dict[tuple[str, str], list[str]] = {}
    for file, name in sorted(files, key=lambda item: item[0].date):
        for task in file.results:
            result = _task_result(file, task, name)
            if not result.metrics:
                continue
            if task in tasks:
                replaced.setdefault((tasks[task].origin.file, name), []).append(task)
            if file.model:
                models.setdefault(task, {})[file.model] = name
            tasks[task] = result
    notes = [
        f"{old} and {new} both hold {listed(names)}: the newer, {new}, counts"
        for (old, new), names in replaced.items()
    ]
    rivals = {task: found for task, found in models.items() if len(found) > 1}
    return Results(tasks, tuple(notes), rivals)


def _task_result(file: _ResultFile, task: str, path: str) -> TaskResult:
    metrics, stderrs = {}, {}
    for key, value in file.results[task].items():
        metric, comma, rest = key.partition(",")
        if not comma or not isinstance(value, (int, float)):
            continue
        if not metric.endswith("_stderr"):
            metrics[key] = float(value)
        elif math.isfinite(value):
            stderrs[f"{metric.removesuffix('_stderr')},{rest}"] = float(value)
    directions = file.higher_is_better.get(task, {})
    lower = frozenset(metric for metric, higher in directions.items() if higher is False)
    known = {key: str(value) for key, value in _settings(file, task).items() if value is not None}
    origin = Origin(path, known, _limited(file, task), file.model, file.date or None)
    return TaskResult(metrics, stderrs, lower, origin)


def _settings(file: _ResultFile, task: str) -> dict[str, object]:
    recorded = file.configs.get(task, {}).get("metadata") or {}
    generation = file.config.get("gen_kwargs") or {}
    return {
        **{setting: read(file, task) for setting, read in PROMPTS.items()},
        "the number of items": file.counts.get(task, {}).get("effective"),
        "the hash of items and prompts": file.task_hashes.get(task, "")[:8] or None,
        "--gen_kwargs": json.dumps(generation, sort_keys=True, default=str),
        "the version of lm-eval": file.lm_eval_version,
        "the version of transformers": file.transformers_version,
        "the dtype": file.config.get("model_dtype"),
        "the batch size": file.config.get("batch_size"),
        "max_length": file.max_length,
        **{key: value for key, value in recorded.items() if key.startswith("MERGEBENCH_")},
    }


def _limited(file: _ResultFile, task: str) -> str | None:
    counts, limit = file.counts.get(task, {}), file.config.get("limit")
    scored, every = counts.get("effective"), counts.get("original")
    if scored is not None and every is not None and scored < every:
        return f"{scored} of {every} items"
    # lm-eval does not count the items of a group
    return f"--limit {limit}" if limit is not None and not counts else None


@dataclass(frozen=True)
class Sample:
    """The score of an item; lm-eval's hashes stand for item and prompt."""

    doc_id: int
    document: str
    prompt: str  # empty in files that have none
    score: float | None  # None if the metric is not a number for each item


class _Line(pydantic.BaseModel):
    """The keys of a line that are read; metrics are extra keys."""

    model_config = pydantic.ConfigDict(extra="allow")
    doc_id: int
    doc_hash: str
    prompt_hash: str = ""
    filter: str | None = None


def samples_file(results: str, task: str) -> Path | None:
    """Return the file of a task's samples next to a result file, if there is one."""
    dated = DATE.search(Path(results).stem)
    path = Path(results).with_name(f"samples_{task}{dated[0] if dated else ''}.jsonl")
    return path if dated and path.is_file() else None


def read_samples(path: Path, metric: str) -> Iterator[Sample]:
    """Yield the samples with their scores by `metric,filter`; one line is in memory at a time."""
    name, _, kept = metric.partition(",")
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                place = f"{path} line {number}"
                if text.strip():
                    line = _Line.model_validate_json(text)
                    if line.filter in (None, kept):
                        score = _number((line.model_extra or {}).get(name))
                        yield Sample(line.doc_id, line.doc_hash, line.prompt_hash, score)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except pydantic.ValidationError as error:
        wrong = f"{place} is not an item of `lm_eval --log_samples`"
        raise UserError(f"{wrong}: {first_mistake(error)}") from error


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:  # an integer that no float holds
        return None
