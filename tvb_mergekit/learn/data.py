"""Examples: from lines of JSON to tokens, their choice and batches, and the losses."""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from tvb_mergekit.errors import UserError, counted, hint, listed, one_line
from tvb_mergekit.tensors.checkpoint import TOKENIZER_FILES

LOG = logging.getLogger(__name__)
FORMS = (("messages",), ("prompt", "response"), ("text",))


@dataclass(frozen=True)
class DataFile:
    """The examples of one task: line numbers from 1, and the objects in these lines."""

    task: str
    path: str
    records: Sequence[tuple[int, Mapping[str, Any]]]
    sha256: str

    def count(self, share: float) -> int:
        """The number of examples in a fraction of them, at least one."""
        return max(1, int(len(self.records) * share + 0.5))

    def drawn(self, share: float, seed: int) -> list[int]:
        """The indices, in order, of a fraction of the records."""
        every = range(len(self.records))
        return sorted(random.Random(f"{seed} {self.task}").sample(every, self.count(share)))


@dataclass(frozen=True)
class Example:
    """One example as tokens.

    Attributes:
        ids: of the prompt, then of the response.
        start: the first token of the response, at least 1: a first token is not predicted.
        line: its number in the file at `path`.
        unlabeled: a prompt alone; the token after it counts, too.
    """

    ids: Sequence[int]
    start: int
    line: int
    path: str = ""
    unlabeled: bool = False


def read_data(
    given: Sequence[str], tasks: Sequence[str] | None, unlabeled: bool = False, texts: bool = True
) -> list[DataFile]:
    """The files of `TASK=FILE` words, in the order of the tasks.

    Args:
        tasks: each needs one file. None accepts any names, in the given order.
        unlabeled: accept lines with a `prompt` alone.
        texts: accept lines with a `text`, which has no prompt.

    Raises:
        UserError: a task has no data, or data no task, or a line is not an example.
    """
    paths: dict[str, str] = {}
    for word in given:
        known = sorted((t for t in tasks or () if word.startswith(f"{t}=")), key=len)
        task = known[-1] if known else word.partition("=")[0]  # a task's name may contain =
        path = word[len(task) + 1 :]
        if not task or not path:
            raise UserError(f"--data {word}: expected TASK=FILE")
        if tasks is not None and task not in tasks:
            others = f"{hint(task, tasks)}; tasks: {', '.join(tasks)}"
            raise UserError(f"--data {word}: no task {task!r}{others}")
        if task in paths:
            raise UserError(f"--data {word}: task {task} has {paths[task]} already")
        paths[task] = path
    wanted = list(paths) if tasks is None else tasks
    if missing := [task for task in wanted if task not in paths]:
        raise UserError(f"no data for {listed(missing)}: give --data {missing[0]}=FILE")
    if not wanted:
        raise UserError("no data: give --data NAME=FILE")
    return [_read(task, paths[task], unlabeled, texts) for task in wanted]


def _read(task: str, path: str, unlabeled: bool, texts: bool) -> DataFile:
    try:
        data = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        why = f"{error.strerror}; expected a file of JSON lines"
        raise UserError(f"--data {task}={path}: {why}") from error
    records = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                record = json.loads(line.decode("utf-8"))
                json.dumps(record, ensure_ascii=False).encode()  # raises ValueError at surrogates
                form = _form_of(record, unlabeled, texts)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, line {number}: {error}") from error
            records.append((number, {key: record[key] for key in form}))
    if not records:
        raise UserError(f"{path}: no examples, and task {task} needs some")
    return DataFile(task, path, records, hashlib.sha256(data).hexdigest())


def _form_of(record: Any, unlabeled: bool, texts: bool) -> tuple[str, ...]:
    """The one of FORMS that a record has, or with `unlabeled` a prompt alone; else a ValueError."""
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, found {type(record).__name__}")
    forms = [keys for keys in FORMS[: 2 + texts] if all(key in record for key in keys)]
    expected = "`prompt` and `response`, " + ("`messages`, or `text`" if texts else "or `messages`")
    if unlabeled and not forms and "prompt" in record:
        forms, expected = [("prompt",)], f"`prompt`, {expected}"
    if len(forms) != 1:
        raise ValueError(f"expected {expected}; found {listed(list(record), 5) or 'nothing'}")
    for key in forms[0]:
        if key != "messages" and not isinstance(record[key], str):
            raise ValueError(f"`{key}` is {record[key]!r:.40}: expected text")
    if forms[0] == ("messages",):
        _check_messages(record["messages"])
    return forms[0]


def _check_messages(messages: Any) -> None:
    formed = isinstance(messages, list) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and "content" in each
        for each in messages
    )
    if not formed or not messages or messages[-1]["role"] != "assistant":
        raise ValueError("`messages`: expected a list of {role, content}, the assistant last")
    for n, each in enumerate(messages, 1):
        # A message that calls tools may have no text. Some templates read lists of parts.
        if not (isinstance(each["content"], str | list) or each.get("tool_calls")):
            found = f"{json.dumps(each['content']):.40}"
            raise ValueError(f"`messages`: the content of message {n} is {found}: expected text")


def open_tokenizer(folders: Sequence[Path], trust_remote_code: bool) -> Any:
    """The tokenizer in the first of the folders that has one.

    Raises:
        UserError: none has one, or it cannot be read.
    """
    from transformers import AutoTokenizer

    for folder in folders:
        if any((folder / name).is_file() for name in TOKENIZER_FILES):
            path = os.fspath(folder)
            try:
                return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
            except Exception as error:  # a tokenizer's code and files raise anything
                why = one_line(error)
                raise UserError(f"the tokenizer in {folder} cannot be read: {why}") from error
    places = " and ".join(map(str, dict.fromkeys(folders)))
    raise UserError(f"no tokenizer in {places}: put one next to the weights (tokenizer.json ...)")


def encode(file: DataFile, tokenizer: Any, context: int, vocabulary: int) -> list[Example]:
    """All records as tokens. A prompt that is too long loses its beginning, with a warning.

    Args:
        context: the most tokens that the model accepts.
        vocabulary: the number of tokens that it knows.

    Raises:
        UserError: a response is empty or longer than the context, there is no chat template, or
            the model does not know a token.
    """
    found, cut = [], 0
    for line, record in file.records:
        where = f"{file.path}, line {line}"
        ids, start = _tokens(record, tokenizer, where)
        unlabeled = record.keys() == {"prompt"}
        if len(ids) - start > context - (start > 0):  # a prompt keeps a token, to predict the first
            what = "text" if "text" in record else "response"
            raise UserError(
                f"{where}: a {what} of {len(ids) - start} tokens, and the model's context is "
                f"{context}; shorten or split it"
            )
        if ids and (largest := max(ids)) >= vocabulary:
            raise UserError(
                f"{where}: token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}), and the "
                f"model knows {vocabulary}; use the tokenizer that belongs to it"
            )
        over = max(0, len(ids) - context)
        cut += over > 0
        example = Example(ids[over:], max(1, start - over), line, file.path, unlabeled)
        if not example.ids:
            raise UserError(f"{where}: the prompt has no tokens")
        if not unlabeled and example.start >= len(example.ids):
            raise UserError(f"{where}: the response has no tokens to predict")
        found.append(example)
    if cut:
        told = "%s: %s longer than the context of %d tokens lost their beginning"
        LOG.warning(told, file.path, counted(cut, "prompt"), context)
    return found


def _tokens(record: Mapping[str, Any], tokenizer: Any, where: str) -> tuple[list[int], int]:
    """The tokens of an example, and the first one of the response."""
    if "text" in record:
        return list(tokenizer(record["text"])["input_ids"]), 0
    special = True
    if "messages" in record:
        special, messages = False, record["messages"]  # the template has its own
        if tokenizer.chat_template is None:
            raise UserError(f"{where}: `messages`, and the tokenizer has no chat template; add one")
        try:
            whole = tokenizer.apply_chat_template(messages, tokenize=False)
            prompt = "" if len(messages) == 1 else tokenizer.apply_chat_template(
                messages[:-1], tokenize=False, add_generation_prompt=True
            )  # fmt: skip
        except Exception as error:  # a template raises anything
            why = one_line(error)
            raise UserError(f"{where}: the chat template refuses `messages`: {why}") from error
    else:
        prompt, whole = record["prompt"], record["prompt"] + record.get("response", "")
    encoded = (tokenizer(text, add_special_tokens=special) for text in (prompt, whole))
    before, ids = (list(found["input_ids"]) for found in encoded)
    same = 0  # a token across the end of the prompt belongs to the response
    while same < min(len(before), len(ids)) and before[same] == ids[same]:
        same += 1
    return ids, same


LossFunction = Callable[[Tensor, "Batch"], Tensor]


class Split(NamedTuple):
    """The examples of one task to learn from, and those held out."""

    train: Sequence[Example]
    held: Sequence[Example]

    @classmethod
    def of(cls, examples: Sequence[Example], share: float, seed: str) -> Split:
        """Hold out a fraction of the examples, at least one if there are two."""
        shuffled = random.Random(seed).sample(list(examples), len(examples))
        held = held_out(len(shuffled), share)
        return cls(shuffled[held:], shuffled[:held])


def held_out(examples: int, share: float) -> int:
    return min(examples - 1, max(1, round(share * examples))) if share and examples > 1 else 0


def shuffled(tasks: Sequence[Sequence[Example]], seed: str) -> list[Example]:
    every = [example for examples in tasks for example in examples]
    return random.Random(seed).sample(every, len(every))


def amount(factor: float, sizes: Sequence[int]) -> int:
    """The number of examples of an average task, times `factor`."""
    return max(1, round(factor * sum(sizes) / len(sizes)))


def drawn(
    weights: Sequence[float], tasks: Sequence[Sequence[Example]], factor: float, seed: str
) -> list[Example]:
    """A shuffled mixture of the tasks' examples, of the size `amount`.

    Task i gets the fraction `weights[i]`, rounded at random. Its examples repeat only after all
    of them were drawn.

    Args:
        weights: not negative, with the sum 1.
    """
    chance = random.Random(seed)
    total = amount(factor, [len(examples) for examples in tasks])
    end = chance.random()
    found: list[Example] = []
    for weight, examples in zip(weights, tasks, strict=True):
        begin, end = end, end + weight * total
        count = math.floor(end + 1e-9) - math.floor(begin + 1e-9)
        while count > 0 and examples:
            some = chance.sample(list(examples), min(count, len(examples)))
            found += some
            count -= len(some)
    chance.shuffle(found)
    return found


@dataclass(frozen=True)
class Batch:
    """Examples side by side, padded at the end.

    Attributes:
        ids, mask: [n, length], tokens, and 1 for each token.
        counted: [n, length] bool, whether the distribution of the next token counts.
    """

    ids: Tensor
    mask: Tensor
    counted: Tensor

    @classmethod
    def of(cls, examples: Sequence[Example], device: torch.device) -> Batch:
        ids = pad_sequence([torch.tensor(example.ids) for example in examples], batch_first=True)
        mask, counted = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        for row, example in enumerate(examples):
            count = len(example.ids)
            mask[row, :count] = 1
            counted[row, example.start - 1 : count - (not example.unlabeled)] = True
        return cls(ids.to(device), mask.to(device), counted.to(device))


def runs(examples: Sequence[Example], size: int) -> list[Sequence[Example]]:
    """The examples in batches of `size`."""
    return [examples[start : start + size] for start in range(0, len(examples), size)]


def response_loss(logits: Tensor, batch: Batch) -> Tensor:
    """The sum over examples of the mean -log p of the response's tokens."""
    counted = batch.counted[:, :-1]
    labels = batch.ids[:, 1:].masked_fill(~counted, -100)
    each = cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels.flatten(), reduction="none", ignore_index=-100
    ).view(labels.shape)
    return (each.sum(1) / counted.sum(1)).sum()


def entropy(logits: Tensor, batch: Batch) -> Tensor:
    """The sum over examples of the mean entropy of the next token, in nats."""
    logs = torch.log_softmax(logits.float(), -1)
    each = -(logs.exp() * logs).sum(-1)
    counted = batch.counted
    return ((each * counted).sum(1) / counted.sum(1)).sum()
