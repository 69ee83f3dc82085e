"""lm-eval's `--log_samples` files, `samples_TASK_DATE.jsonl`, read line by line.

Written by EvaluationTracker.save_results_samples of lm-eval 0.4.13 beside the results of the same
date, a line for each item and filter. `resps` holds a list for each request of an item: of texts,
one for each repeat, or of a pair (log-likelihood, whether greedy), all as strings.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from tvb_mergekit.errors import UserError
from tvb_mergekit.score.results import DATE

LETTER = re.compile(r"[\s*_`().:]*([A-Za-z])[\s*_`().:]*")  # B, b., (B), **B**


@dataclass(frozen=True)
class Item:
    """One item as a model answered it.

    Attributes:
        document: lm-eval's hash of the item.
        prompt: lm-eval's hash of the model's input; empty in files that have none.
        score: None where the metric is no number of one item.
        answers: the texts as generated; of scored choices, the likeliest.
        found: what the task's filter took from the texts; empty where that is no text.
        letter: the choice, where there are several.
        wanted: what the letter should be, in any spelling; None where that is no letter.
    """

    doc_id: int
    document: str
    prompt: str
    score: float | None
    answers: tuple[str, ...]
    found: tuple[str, ...]
    letter: str | None
    target: str
    wanted: str | None = None


class _Line(pydantic.BaseModel):
    """What is read of a line; the metrics are among the other keys."""

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
    """The file of a task's items that belongs to a result file, if it is there."""
    dated = DATE.search(Path(results).stem)
    path = Path(results).with_name(f"samples_{task}{dated[0] if dated else ''}.jsonl")
    return path if dated and path.is_file() else None


def read_items(path: Path, metric: str) -> Iterator[Item]:
    """The items with their scores by `metric,filter`, a line in memory at a time.

    Raises:
        UserError: the file cannot be read, or is not one of lm-eval's.
    """
    name, _, kept = metric.partition(",")
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    line = _parsed(text, f"{path} line {number}")
                    if line.filter in (None, kept):
                        yield _item(line, name)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


def _parsed(text: bytes, where: str) -> _Line:
    try:
        return _Line.model_validate_json(text)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f" `{part}`:" for part in first["loc"])
        raise UserError(
            f"{where} is no item of `lm_eval --log_samples`:{place} {first['msg']}"
        ) from error


def _item(line: _Line, metric: str) -> Item:
    first = line.resps[0] if line.resps else None
    scored = isinstance(first, list) and bool(first) and isinstance(first[0], list)
    found: tuple[str, ...] = ()
    target = str(line.target)
    if scored:
        letter, answers = _likeliest(line)
        wanted: str | None = target  # a number, a letter, or the choice itself
    else:
        answers, found = _texts(line.resps), _texts(line.filtered_resps)
        letter = _letter(found[0]) if len(found) == 1 else None
        wanted = _letter(target)
    score = _number((line.model_extra or {}).get(metric))
    return Item(
        line.doc_id, line.doc_hash, line.prompt_hash, score, answers, found, letter, target, wanted
    )  # fmt: skip


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
    except OverflowError:  # an integer that no float holds
        return None


def _letter(text: str) -> str | None:
    match = LETTER.fullmatch(text)
    return match[1].upper() if match else None


def _likeliest(line: _Line) -> tuple[str | None, tuple[str, ...]]:
    """Letter and text of the likeliest choice; no letter where there is no choice."""
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
    """The texts in a list, or in lists of repeats."""
    flat = [x for entry in nested for x in (entry if isinstance(entry, list) else [entry])]
    return tuple(text for text in flat if isinstance(text, str))
