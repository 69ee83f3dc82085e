"""Benchmarks, and lm-eval's files of their tasks.

lm-eval 0.4.13 (EvaluationTracker) writes scores and settings into `results_DATE.json`, and by
`--log_samples` a line for each item and filter into `samples_TASK_DATE.jsonl`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from tvb_mergekit.errors import UserError, listed, one_line, read_described

SHIPPED = ("mergebench", "mergebench_keyword", "quickstart")
# Keys of a file and of its `config` that have to agree between models. Runs that differ in a
# decisive one, which changes prompts or scores of items, are not paired.
OF_FILE = ("system_instruction_sha", "chat_template_sha", "fewshot_as_multiturn",
           "lm_eval_version", "transformers_version", "max_length")  # fmt: skip
OF_CONFIG = ("limit", "gen_kwargs", "model_dtype", "batch_size")
DECISIVE = (*OF_FILE[:3], "metric", "n-shot", "fewshot_seed", "the task's version")
# Metrics of evals/mergebench that are shares of answers without a complete verdict.
UNJUDGED = ("as_text", "unchecked", "parse_error")
Percent = Annotated[float, pydantic.Field(strict=True, ge=0, le=100)]
Sample = tuple[str, str, float]  # document and prompt, as hashes, and score in percent


class Task(pydantic.BaseModel, extra="forbid"):
    """A task or a group of lm-eval; its metric is named `metric,filter`."""

    name: str
    label: str
    metric: str = "score,none"


class Category(pydantic.BaseModel, extra="forbid"):
    """Tasks whose plain mean is the category's score."""

    name: str
    label: str
    tasks: list[Task] = pydantic.Field(min_length=1)


class Benchmark(pydantic.BaseModel, extra="forbid"):
    """Categories in the order of the table: a YAML file (docs/tune-and-score.md)."""

    format_version: Literal[1]
    name: str
    title: str
    categories: list[Category]

    @property
    def tasks(self) -> list[Task]:
        return [task for category in self.categories for task in category.tasks]


def find_benchmark(name: str | None, present: Collection[str] = ()) -> Benchmark:
    """Read one of `SHIPPED`, or a file; without a name, find the shipped one of these tasks."""
    if name is not None:
        path = Path(__file__).with_name(f"{name}.yaml") if name in SHIPPED else Path(name)
        return read_described(path, Benchmark, f"a benchmark ({', '.join(SHIPPED)}, or a file)")
    for each in map(find_benchmark, SHIPPED):
        if any(task.name in present for task in each.tasks):
            return each  # scores by keyword count only if no others are there
    found = listed([*present]) or "nothing"
    raise UserError(f"found {found}, no task of a known benchmark: name results, or --benchmark")


@dataclass(frozen=True)
class Cell:
    """A score or a mean in percent. Scores of lm-eval say where they come from."""

    value: Percent
    stderr: Percent | None = None
    file: str = ""
    limited: str = ""  # the part of the items that was run
    settings: dict[str, str] = field(default_factory=dict)


class ResultFile(pydantic.BaseModel, extra="allow"):
    """The keys of a result file that are read; those of OF_FILE are extra."""

    path: str = ""
    results: dict[str, dict[str, Any]]
    date: pydantic.FiniteFloat = 0.0
    config: dict[str, Any] = {}
    configs: dict[str, dict[str, Any]] = {}
    versions: dict[str, Any] = {}
    shots: dict[str, Any] = pydantic.Field({}, alias="n-shot")
    counts: dict[str, dict[str, int]] = pydantic.Field({}, alias="n-samples")
    higher_is_better: dict[str, dict[str, Any]] = {}
    task_hashes: dict[str, Any] = {}

    def cell(self, task: str, metric: str) -> Cell:
        """Return the score of a task that the file has."""
        numbers, (name, _, kept) = self.results[task], metric.partition(",")
        where, other = f"{self.path}: {task}", f"choose another with --metric {task}:METRIC"
        if (value := percent(numbers, metric, where)) is None:
            known = [key for key in numbers if "," in key and "_stderr," not in key]
            raise UserError(f"{where} has no `{metric}` (known: {', '.join(known)}); {other}")
        if self.higher_is_better.get(task, {}).get(name) is False:
            raise UserError(f"{where}: `{metric}` is better when it is lower; {other}")
        shots, metadata = self.shots.get(task), self.configs.get(task, {}).get("metadata") or {}
        scored, every = map(self.counts.get(task, {}).get, ("effective", "original"))
        settings = {
            "metric": metric,
            **{key: (self.model_extra or {}).get(key) for key in OF_FILE},
            **{key: self.config.get(key) for key in OF_CONFIG},
            **{key: value for key, value in metadata.items() if key.startswith("MERGEBENCH_")},
            **{key: numbers.get(f"{key},{kept}") for key in UNJUDGED},
            "n-shot": shots,
            "fewshot_seed": self.config.get("fewshot_seed") if shots else None,
            "the task's version": self.versions.get(task),
            "the number of items": scored,
            "the hash of items and prompts": self.task_hashes.get(task),
        }
        stderr = percent(numbers, f"{name}_stderr,{kept}", where)
        limited = f"{scored} of {every} items" if (scored or 0) < (every or 0) else ""
        told = {key: str(setting) for key, setting in settings.items()}
        return Cell(value, stderr, self.path, limited, told)


def percent(numbers: Mapping[str, Any], key: str, where: str) -> float | None:
    """Return a share in percent; None if lm-eval writes N/A, or NaN as the error of one item."""
    share = numbers.get(key, "N/A")
    if share == "N/A" or share != share:
        return None
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise UserError(f"{where} has `{key}` = {share!r:.40}: expected a number in [0, 1]")
    return 100.0 * share


def read_results(path: Path) -> dict[str, ResultFile]:
    """Return the newest file of each task, by lm-eval's date, from one file or from a folder."""
    paths = sorted(path.rglob("results_*.json")) if path.is_dir() else [path]
    files = [read_described(each, ResultFile, "a result file of lm_eval") for each in paths]
    for file, each in zip(files, paths, strict=True):
        file.path = str(each)
    tasks: dict[str, ResultFile] = {}
    for file in sorted(files, key=lambda file: file.date):
        for task in (name for name, own in file.results.items() if any("," in key for key in own)):
            old = tasks.setdefault(task, file)
            if old.config.get("model_args") != file.config.get("model_args"):
                raise UserError(
                    f"{old.path} and {file.path} hold {task} of different models: give each a "
                    "PATH, and each specialist CATEGORY=PATH"
                )
            tasks[task] = file
    if not tasks:
        raise UserError(f"{path} has no results of lm_eval: expected results_*.json")
    return tasks


def read_samples(cell: Cell, task: str) -> dict[int, Sample]:
    """Return the samples of a score by item: none without files, or if it is not a mean."""
    date = Path(cell.file).stem.rpartition("_")[2]
    path = Path(cell.file).with_name(f"samples_{task}_{date}.jsonl")
    name, _, kept = cell.settings["metric"].partition(",")
    items: dict[int, Sample] = {}
    if not path.is_file():
        return items
    try:
        with path.open("rb") as file:
            for line in map(json.loads, file):
                if line.get("filter", kept) == kept:
                    share = percent(line, name, f"{path}: an item") or 0.0
                    items[line["doc_id"]] = line["doc_hash"], line.get("prompt_hash"), share
    except UserError:  # no numbers, such as the texts of BLEU
        return {}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{path} is not a file of samples: {one_line(error)}") from error
    if str(len(items)) != (count := cell.settings["the number of items"]):
        raise UserError(f"{path} holds {len(items)} of {count} items: run lm_eval again")
    whole = sum(share for *_, share in items.values())
    return items if abs(whole / len(items) - cell.value) < 0.01 else {}
