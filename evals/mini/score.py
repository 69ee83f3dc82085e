#!/usr/bin/env python
"""Score models in batches: the numbers of the stock `lm_eval --tasks mini`, in seconds.

    python evals/mini/score.py mini-runs/tiny-seed0 ./merged

`score` takes a model and `data` items, so that a sweep over merged state dicts needs one model
and `load_state_dict`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
import torch
from peft import PeftModel
from study.run import means
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from mini import data

IGNORED = -100  # no answer is expected here


def load(folder: Path, base: Path | None = None) -> Any:
    """A model in float32; an adapter is merged into `base`."""
    adapter = (folder / "adapter_config.json").exists()
    if adapter and base is None:
        raise click.ClickException(f"{folder} is an adapter: its base is missing")
    model: Any = LlamaForCausalLM.from_pretrained(base if adapter else folder, dtype=torch.float32)
    if adapter:
        model = PeftModel.from_pretrained(model, folder).merge_and_unload()
    return model.eval()


@torch.inference_mode()
def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]
) -> list[str]:
    """Greedy answers, in the order of the prompts.

    Prompts of one length go together, so nothing is padded. A sequence that has ended stays in its
    batch; what follows its end is cut off.
    """
    device = next(model.parameters()).device
    encoded = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    said = [""] * len(prompts)
    for length in sorted({len(ids) for ids in encoded}):
        rows = [i for i, ids in enumerate(encoded) if len(ids) == length]
        ids = torch.tensor([encoded[i] for i in rows], device=device)
        ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
        words, cache = [], None
        for _ in range(data.LONGEST_ANSWER):
            step = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, best = step.past_key_values, step.logits[:, -1].argmax(-1)
            ended |= best == tokenizer.eos_token_id
            words.append(best.masked_fill(ended, tokenizer.pad_token_id))
            if ended.all():
                break
            ids = best[:, None]
        texts = tokenizer.batch_decode(torch.stack(words, 1), skip_special_tokens=True)
        for i, text in zip(rows, texts, strict=True):
            said[i] = text
    return said


@dataclass(frozen=True)
class Questions:
    """Items packed once, to be put to many models; see `pack`."""

    docs: list[data.Doc]
    batches: list[tuple[list[int], Tensor, Tensor]]  # items, input ids, what is to follow each


def pack(
    tokenizer: PreTrainedTokenizerBase,
    docs: Sequence[data.Doc],
    device: str | torch.device = "cpu",
    size: int = 64,
) -> Questions:
    """Prompts with their right answers, padded on the right, in batches of like lengths."""
    rows = []
    for i, doc in enumerate(docs):
        prompt, answer = (tokenizer(doc[key])["input_ids"] for key in ("prompt", "answer"))
        answer = [*answer, tokenizer.eos_token_id]
        rows.append((i, [*prompt, *answer], [*[IGNORED] * (len(prompt) - 1), *answer, IGNORED]))
    rows.sort(key=lambda row: len(row[1]))
    batches = []
    for start in range(0, len(rows), size):
        chosen = rows[start : start + size]
        ids, follows = (
            pad_sequence([torch.tensor(row[k]) for row in chosen], True, IGNORED) for k in (1, 2)
        )
        batches.append(
            ([row[0] for row in chosen], ids.clamp(min=0).to(device), follows.to(device))
        )
    return Questions(list(docs), batches)


@torch.inference_mode()
def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Questions,
    begin: Callable[[Tensor | None], None] = lambda prompts: None,
) -> dict[str, list[float]]:
    """task -> 1 for each right answer, 0 for each other.

    A greedy answer is the expected one if each of its tokens is the likeliest after those before
    it, so one forward pass suffices. Only `coding_complete` has other right answers. They all leave
    the expected one with a comma; those are generated, and run. (A padding token in an answer is
    wrong here, and is dropped by lm_eval.)

    Args:
        begin: called before each pass with the tokens of the prompts, [n, tokens]; None: all are.
    """
    right = [False] * len(questions.docs)
    other = []
    comma = tokenizer.convert_tokens_to_ids(",")
    for rows, ids, follows in questions.batches:
        counted = follows != IGNORED
        begin(counted.cumsum(1) == counted.long())
        said = model(input_ids=ids, use_cache=False).logits.argmax(-1)
        wrong = (said != follows) & counted
        leaves = said.gather(1, wrong.int().argmax(1, keepdim=True)).squeeze(1) == comma
        for i, failed, left in zip(rows, wrong.any(1).tolist(), leaves.tolist(), strict=True):
            right[i] = not failed
            if failed and left and questions.docs[i]["task"] == "coding_complete":
                other.append(i)
    prompts = [questions.docs[i]["prompt"] for i in other]
    begin(None)
    for i, answer in zip(other, answers(model, tokenizer, prompts), strict=True):
        right[i] = data.correct(questions.docs[i], answer)
    found: dict[str, list[float]] = {}
    for doc, whole in zip(questions.docs, right, strict=True):
        found.setdefault(doc["task"], []).append(float(whole))
    return found


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    split: str,
    tasks: Iterable[str] = tuple(data.TASKS),
) -> dict[str, float]:
    """task -> share of right answers to `FOLDER/TASK.SPLIT.jsonl`."""
    docs = [doc for task in tasks for doc in data.read(folder, task, split)]
    device = next(model.parameters()).device
    return means(ask(model, tokenizer, pack(tokenizer, docs, device)))


@click.command(epilog="Example: python evals/mini/score.py mini-runs/tiny-seed0 ./merged")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--split", type=click.Choice(data.SPLITS), default="test", show_default=True)
@click.option("--device", default="cpu", show_default=True)
def main(run: Path, model: Path, split: str, device: str) -> None:
    """Score MODEL, or an adapter over the run's base, on all tasks of RUN."""
    logging.disable_progress_bar()
    loaded = load(model, run / "base").to(device)
    tokenizer = AutoTokenizer.from_pretrained(run / "base")
    found = score(loaded, tokenizer, run / "data", split, [*data.TASKS, *data.UNSEEN])
    for task, value in found.items():
        click.echo(f"{task:20s} {value:.3f}")


if __name__ == "__main__":
    main()
