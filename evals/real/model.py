"""Examples as tokens, batches, loss and exact match."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from real.tasks import Item

LONGEST = 128  # tokens of an answer; a twentieth of the expected queries is longer
BATCH = 50  # of answers


class Example(NamedTuple):
    ids: list[int]  # of prompt, response and end
    start: int  # of the response


def encode(tokenizer: Any, items: Iterable[Item]) -> list[Example]:
    found = []
    for item in items:
        prompt = tokenizer(item.prompt)["input_ids"]
        response = tokenizer(item.response, add_special_tokens=False)["input_ids"]
        found.append(Example([*prompt, *response, tokenizer.eos_token_id], len(prompt)))
    return found


def drawn(items: Sequence[Item], count: int, rng: random.Random) -> list[Item]:
    """Items in random order, as often as `count` needs, and each as often as the others."""
    order: list[Item] = []
    while len(order) < count:
        order += rng.sample(items, len(items))
    return order[:count]


def bucketed(examples: Sequence[Example], size: int, rng: random.Random) -> list[list[Example]]:
    """Batches of similar lengths, in random order among sixteen neighbours."""
    found: list[list[Example]] = []
    for window in cut(examples, 16 * size):
        batches = cut(sorted(window, key=lambda example: len(example.ids)), size)
        found += rng.sample(batches, len(batches))
    return found


def cut(values: Sequence[Any], size: int) -> list[list[Any]]:
    return [list(values[i : i + size]) for i in range(0, len(values), size)]


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Computation in bfloat16 if it is faster: on GPUs, and on CPUs with AMX."""
    fast = device.type == "cuda" or torch.cpu.get_capabilities().get("amx_bf16", False)
    return torch.autocast(device.type, torch.bfloat16, fast)


def predict(
    model: Any, batch: Sequence[Example], device: Any, begin: Callable[[Tensor], None] | None = None
) -> tuple[Tensor, Tensor]:
    """Logits of the tokens of all responses [n, vocabulary], and the tokens [n].

    Examples are padded on the right. Causal attention never sees padding and needs no mask.

    Args:
        begin: called before the pass with the tokens of the prompts, [n, tokens] of 0 and 1.
    """
    length, first = max(len(e.ids) for e in batch), min(e.start for e in batch)
    ids = torch.tensor([e.ids + [0] * (length - len(e.ids)) for e in batch])
    places = torch.arange(first, length)
    said = torch.stack([(places >= e.start) & (places < len(e.ids)) for e in batch])
    ids, said = ids.to(device), said.to(device)
    if begin is not None:
        begin((torch.arange(length) < torch.tensor([[e.start] for e in batch])).to(device))
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=length - first + 1).logits
    return logits[:, :-1][said], ids[:, first:][said]


def loss(model: Any, batch: Sequence[Example]) -> Tensor:
    """The mean cross-entropy of a token of a response, the end included."""
    with autocast(model.device):
        logits, tokens = predict(model, batch, model.device)
    return cross_entropy(logits.float(), tokens)


def endings(tokenizer: Any) -> Tensor:
    """The tokens that end an answer: the end of a text, and tokens that begin with a new line."""
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    ends = {i for i, word in enumerate(words) if word.startswith(("\n", "Ċ"))}
    return torch.tensor(sorted(ends | {tokenizer.eos_token_id}))


@torch.inference_mode()
def answers(
    model: Any, tokenizer: Any, prompts: Sequence[str], ends: Tensor, most: int
) -> list[str]:
    """Greedy answers of at most `most` tokens, without what follows a new line."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    said = [""] * len(prompts)
    for places in cut(order, BATCH):
        batch = tokenizer([prompts[i] for i in places], padding=True, padding_side="left",
                          return_tensors="pt").to(model.device)  # fmt: skip
        found = model.generate(
            **batch, max_new_tokens=most, do_sample=False, eos_token_id=ends.tolist(),
            pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        texts = tokenizer.batch_decode(found[:, batch["input_ids"].shape[1] :], True)
        for i, text in zip(places, texts, strict=True):
            said[i] = text.split("\n")[0]
    return said


@torch.inference_mode()
def evaluate(
    model: Any,
    examples: Sequence[Example],
    ends: Tensor,
    begin: Callable[[Tensor], None] | None = None,
) -> tuple[list[float], float]:
    """The share of right tokens of each response, and the mean loss of a token.

    The computation is in float32 on every device: bfloat16 would round adapters away.

    A token is right if it is the most probable one after the expected tokens before it. The end of
    a response is right if the answer ends there or begins a new line. A share of 1 means that
    greedy decoding gives these tokens, in one pass: decoded and expected tokens are equal up to the
    first difference. A smaller share may still give the same text, cut into other tokens.
    """
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].ids))
    shares, total, count = [0.0] * len(examples), 0.0, 0
    for places in cut(order, 32):
        batch = [examples[i] for i in places]
        logits, tokens = predict(model, batch, model.device, begin)
        total += cross_entropy(logits.float(), tokens, reduction="sum").item()
        count += len(tokens)
        best = logits.argmax(-1).cpu()
        sizes = [len(e.ids) - e.start for e in batch]
        pairs = zip(best.split(sizes), tokens.cpu().split(sizes), strict=True)
        for i, (own, expected) in zip(places, pairs, strict=True):
            right = int((own[:-1] == expected[:-1]).sum()) + int(torch.isin(own[-1], ends))
            shares[i] = right / len(own)
    return shares, total / max(1, count)
