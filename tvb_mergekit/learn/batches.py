"""The choice of examples, their batches, and the losses."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from tvb_mergekit.learn.data import Example

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
