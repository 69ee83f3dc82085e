"""lm-eval's `--log_samples` files, `samples_TASK_DATE.jsonl`, read line by line.

Written by EvaluationTracker.save_results_samples of lm-eval 0.4.13 next to the results of the same
date, a line for each item and filter. `resps` holds a list for each request of an item. That list
holds texts, one for each repeat, or a pair (log-likelihood, whether greedy), all as strings.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from tvb_mergekit.errors import UserError
from tvb_mergekit.score.benchmark import first_mistake
from tvb_mergekit.score.results import DATE

LETTER = re.compile(r"[\s*_`().:]*([A-Za-z])[\s*_`().:]*")  # B, b., (B), **B**


@dataclass(frozen=True)
class Sample:
    """An item and a model's answers to it; lm-eval's hashes stand for item and prompt."""

    doc_id: int
    document: str
    prompt: str  # empty in files that have none
    score: float | None  # None if the metric is not a number for each item
    answers: tuple[str, ...]  # as generated; of scored choices the likeliest
    found: tuple[str, ...]  # texts that the task's filter extracted
    letter: str | None  # the choice, if there are several
    target: str
    wanted: str | None = None  # the right choice in any spelling, if there are several

    @property
    def wrong(self) -> bool:
        return self.score is not None and self.score <= 0


class _Line(pydantic.BaseModel):
    """The keys of a line that are read; metrics are extra keys."""

    model_config = pydantic.ConfigDict(extra="allow")
    doc_id: int
    doc_hash: str
    prompt_hash: str = ""
    filter: str | None = None
    target: Any = ""
    arguments: dict[str, dict[str, Any]] = {}
    resps: list[Any] = []
    filtered_resps: list[Any] = []


def samples_file(results: str, task: str) -> Path | None:
    """Return the file of a task's samples next to a result file, if there is one."""
    dated = DATE.search(Path(results).stem)
    path = Path(results).with_name(f"samples_{task}{dated[0] if dated else ''}.jsonl")
    return path if dated and path.is_file() else None


def read_samples(path: Path, metric: str) -> Iterator[Sample]:
    """Yield the samples with their scores by `metric,filter`; one line is in memory at a time."""
    name, _, kept = metric.partition(",")
    place = str(path)
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                place = f"{path} line {number}"
                if text.strip():
                    line = _Line.model_validate_json(text)
                    if line.filter in (None, kept):
                        yield _sample(line, name)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except pydantic.ValidationError as error:
        wrong = f"{place} is not an item of `lm_eval --log_samples`"
        raise UserError(f"{wrong}: {first_mistake(error)}") from error


def _sample(line: _Line, metric: str) -> Sample:
    first = line.resps[0] if line.resps else None
    target = str(line.target)
    found: tuple[str, ...] = ()
    if isinstance(first, list) and first and isinstance(first[0], list):  # scored choices
        letter, answers = _likeliest(line)
        wanted: str | None = target  # a number, a letter, or the choice itself
    else:
        answers, found = _texts(line.resps), _texts(line.filtered_resps)
        letter = _letter(found[0]) if len(found) == 1 else None
        wanted = _letter(target)
    score = _number((line.model_extra or {}).get(metric))
    hashes = line.doc_hash, line.prompt_hash
    return Sample(line.doc_id, *hashes, score, answers, found, letter, target, wanted)


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:  # an integer that no float holds
        return None


def _letter(text: str) -> str | None:
    match = LETTER.fullmatch(text)
    return match[1].upper() if match else None


def _likeliest(line: _Line) -> tuple[str | None, tuple[str, ...]]:
    try:
        likelihoods = [float(pair[0]) for pair in line.filtered_resps]
    except (IndexError, KeyError, OverflowError, TypeError, ValueError):
        return None, ()
    if len(likelihoods) < 2:
        return None, ()
    best = max(range(len(likelihoods)), key=likelihoods.__getitem__)
    letter = string.ascii_uppercase[best] if best < 26 else str(best + 1)
    text = line.arguments.get(f"gen_args_{best}", {}).get("arg_1", "")
    return letter, (f"{letter}: {str(text).strip()}",)


def _texts(nested: list[Any]) -> tuple[str, ...]:
    flat = [x for entry in nested for x in (entry if isinstance(entry, list) else [entry])]
    return tuple(text for text in flat if isinstance(text, str))
