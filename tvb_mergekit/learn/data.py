"""Examples: from lines of JSON to tokens, their choice and batches, and the losses."""

from __future__ import annotations

import codecs
import json
import logging
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from tvb_mergekit.errors import UserError, hint, listed, one_line
from tvb_mergekit.tensors.checkpoint import TOKENIZER_FILES

LOG = logging.getLogger(__name__)
JsonLine = tuple[str, Mapping[str, Any]]  # file and line, and the object there
FORMS = (("messages",), ("prompt", "response"), ("text",))


@dataclass(frozen=True)
class Example:
    """One example as tokens.

    Attributes:
        ids: of the prompt, then of the response.
        start: the first token of the response, at least 1: a first token is not predicted.
        place: its file and line.
        unlabeled: a prompt alone; the token after it counts, too.
    """

    ids: Sequence[int]
    start: int
    place: str = ""
    unlabeled: bool = False


def read_data(
    given: Sequence[str], tasks: Sequence[str] | None, unlabeled: bool = False, texts: bool = True
) -> dict[str, list[JsonLine]]:
    """The records of `TASK=FILE` words, by task in the order of the tasks.

    Args:
        tasks: each needs one file. None accepts any names, in the given order.
        unlabeled: accept lines with a `prompt` alone.
        texts: accept lines with a `text`, which has no prompt.
    """
    paths: dict[str, str] = {}
    for word in given:
        known = sorted((t for t in tasks or () if word.startswith(f"{t}=")), key=len)
        task = known[-1] if known else word.partition("=")[0]  # a task's name may contain =
        path = word[len(task) + 1 :]
        if not task or not path or task in paths or task not in (tasks or [task]):
            known_tasks = f" of {', '.join(tasks)}{hint(task, tasks)}" if tasks else ""
            raise UserError(f"--data {word}: expected TASK=FILE, once for each task{known_tasks}")
        paths[task] = path
    wanted = tasks or list(paths) or ["NAME"]
    if missing := [task for task in wanted if task not in paths]:
        raise UserError(f"no data for {listed(missing)}: give --data {missing[0]}=FILE")
    return {task: _records_in(paths[task], unlabeled, texts) for task in wanted}


def _records_in(path: str, unlabeled: bool, texts: bool) -> list[JsonLine]:
    data, found = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8), list[JsonLine]()
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                record = json.loads(line)
                form = _form_of(record, unlabeled, texts)
            except ValueError as error:
                raise UserError(f"{place}: {error}") from error
            found.append((place, {key: record[key] for key in form}))
    if not found:
        raise UserError(f"{path}: no examples")
    return found


def _form_of(record: Any, unlabeled: bool, texts: bool) -> tuple[str, ...]:
    """The one of FORMS that a record has, or with `unlabeled` a prompt alone; else a ValueError."""
    keys = record.keys() if isinstance(record, dict) else ()
    forms = [form for form in FORMS[: 2 + texts] if all(key in keys for key in form)]
    if unlabeled and not forms and "prompt" in keys:
        forms = [("prompt",)]
    if len(forms) != 1:
        expected = "`prompt` and `response`, or `messages`" + ", or `text`" * texts
        raise ValueError(f"expected {expected}; found {listed(list(keys), 5) or 'no object'}")
    if forms == [("messages",)]:
        found = record["messages"]
        every = isinstance(found, list) and all(isinstance(each, dict) for each in found)
        if not every or not found or found[-1].get("role") != "assistant":
            raise ValueError("`messages`: expected a list of {role, content}, the assistant last")
        # Templates print None. A message that calls tools may have no text.
        if any(each.get("content") is None and not each.get("tool_calls") for each in found):
            raise ValueError("`messages`: a message without `content`")
    elif wrong := [key for key in forms[0] if not isinstance(record[key], str)]:
        raise ValueError(f"`{wrong[0]}` is {record[wrong[0]]!r:.40}: expected text")
    return forms[0]


def open_tokenizer(folders: Sequence[Path], trust_remote_code: bool) -> Any:
    """The tokenizer in the first of the folders that has one."""
    from transformers import AutoTokenizer

    for folder in folders:  # without files transformers may make one up
        if any((folder / name).is_file() for name in TOKENIZER_FILES):
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    places = " and ".join(map(str, dict.fromkeys(folders)))
    raise UserError(f"no tokenizer in {places}: put one next to the weights (tokenizer.json ...)")


def encode(records: Sequence[JsonLine], tokenizer: Any, context: int) -> list[Example]:
    """All records as tokens, at most `context` of them: long prompts lose their beginning."""
    found, cut = [], 0
    for place, record in records:
        try:
            ids, start = _tokens(record, tokenizer)
        except Exception as error:  # a template raises anything
            raise UserError(f"{place}: the tokenizer refuses it: {one_line(error)}") from error
        unlabeled = record.keys() == {"prompt"}
        if len(ids) - start > context - (start > 0):  # a prompt keeps a token, to predict the first
            raise UserError(f"{place}: {len(ids) - start} tokens, the model's context is {context}")
        over = max(0, len(ids) - context)
        cut += over > 0
        example = Example(ids[over:], max(1, start - over), place, unlabeled)
        if len(example.ids) <= (0 if unlabeled else example.start):
            raise UserError(f"{place}: no token to predict")
        found.append(example)
    if cut:
        told = "%d prompts longer than the context of %d tokens lost their beginning, from %s on"
        LOG.warning(told, cut, context, records[0][0])
    return found


def _tokens(record: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], int]:
    """The tokens of an example, and the first one of the response."""
    if "text" in record:
        return list(tokenizer(record["text"])["input_ids"]), 0
    if messages := record.get("messages"):
        template = partial(tokenizer.apply_chat_template, tokenize=False)
        whole = template(messages)
        prompt = template(messages[:-1], add_generation_prompt=True) if messages[1:] else ""
    else:
        prompt, whole = record["prompt"], record["prompt"] + record.get("response", "")
    special = messages is None  # a template has its own
    encoded = (tokenizer(text, add_special_tokens=special) for text in (prompt, whole))
    before, ids = (list(found["input_ids"]) for found in encoded)
    same = 0  # a token across the end of the prompt belongs to the response
    while same < min(len(before), len(ids)) and before[same] == ids[same]:
        same += 1
    return ids, same


def held_out(
    examples: Sequence[Example], share: float, seed: str
) -> tuple[list[Example], list[Example]]:
    """The examples to learn from, and a fraction held out: at least one of two or more."""
    shuffled = random.Random(seed).sample(list(examples), len(examples))
    some = share and len(shuffled) > 1
    count = min(len(shuffled) - 1, max(1, round(share * len(shuffled)))) if some else 0
    return shuffled[count:], shuffled[:count]


def drawn(
    weights: Sequence[float], tasks: Sequence[Sequence[Example]], factor: float, seed: str
) -> list[Example]:
    """A shuffled mixture of the tasks' examples: those of an average task, times `factor`.

    Task i gets the fraction `weights[i]` (their sum is 1), rounded at random. Its examples repeat
    only after all of them were drawn.
    """
    chance = random.Random(seed)
    total = max(1, round(factor * sum(map(len, tasks)) / len(tasks)))
    start, found = chance.random(), list[Example]()
    ends = [math.floor(start + total * end + 1e-9) for end in accumulate(weights, initial=0.0)]
    for (begin, end), examples in zip(pairwise(ends), tasks, strict=True):
        whole, rest = divmod(end - begin, len(examples)) if examples else (0, 0)
        found += [*examples] * whole + chance.sample(list(examples), rest)
    chance.shuffle(found)
    return found


def collate(examples: Sequence[Example], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of examples, padded at the end [n, length], 1 for each token, and whether the
    distribution of the next token counts."""
    ids = pad_sequence([torch.tensor(example.ids) for example in examples], batch_first=True)
    mask, counted = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for row, example in enumerate(examples):
        count = len(example.ids)
        mask[row, :count] = 1
        counted[row, example.start - 1 : count - (not example.unlabeled)] = True
    return ids.to(device), mask.to(device), counted.to(device)


def response_loss(logits: Tensor, ids: Tensor, counted: Tensor) -> Tensor:
    """The sum over examples of the mean -log p of the response's tokens."""
    counted = counted[:, :-1]
    labels = ids[:, 1:].masked_fill(~counted, -100)  # which cross_entropy leaves out
    rows = logits[:, :-1].flatten(0, 1).float()
    each = cross_entropy(rows, labels.flatten(), reduction="none").view(labels.shape)
    return (each.sum(1) / counted.sum(1)).sum()


def entropy(logits: Tensor, ids: Tensor, counted: Tensor) -> Tensor:
    """The sum over examples of the mean entropy of the next token, in nats."""
    logs = torch.log_softmax(logits.float(), -1)
    each = -(logs.exp() * logs).sum(-1)
    return ((each * counted).sum(1) / counted.sum(1)).sum()
