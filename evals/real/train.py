#!/usr/bin/env python
"""Train a specialist for each task, in full or as a LoRA adapter.

OUT/base/ is the base. OUT/seedSEED/KIND/TASK/ gets the model or adapter in bfloat16, and
`training.json` with the facts and the scores on the way. A specialist's folder gets its name when
it is complete, and is never trained again: the same command goes on after an interruption.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import zlib
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import click
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from real.model import bucketed, drawn, encode, endings, evaluate, loss
from real.tasks import ALIKE, SHIPPED, TASKS, common, read

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"  # of the base, in adapters
BATCH = {"full": 16, "lora16": 4, "lora4": 4, "peft4": 4, "same4": 4}  # small ones where few move
SLOW = {"banking77", "nl2bash", "geoquery_sql", "multi30k_en_de"}  # half as large, if in full
EVERY = 400  # examples between evaluations
VALIDATED = 100  # validation items of an evaluation
LENGTH = 1.5  # of adapters at the start: a low rank has a part of the specialist's length
RATES = {"full": 4e-5, "lora16": 3e-4, "lora4": 3e-4, "peft4": 1e-3, "same4": 1e-3}
# About an hour on two cores for all twelve: more for tasks that learn slowly, fewer for long items.
# Adapters see a third.
EXAMPLES = {"sst2": 1000, "trec": 1500, "snli_small": 1000, "banking77": 1500, "snips_slots": 2000,
            "semeval2010_task8": 1000, "multi30k_en_de": 700, "geoquery_sql": 600,
            "inflection_en": 2000, "commonsenseqa": 500, "tweet_offensive": 700,
            "nl2bash": 800}  # fmt: skip


@dataclass(frozen=True)
class Training:
    """One specialist to be trained."""

    seed: int
    kind: str
    task: str
    examples: int

    @property
    def name(self) -> str:
        return f"seed{self.seed}/{self.kind}/{self.task}"

    @property
    def batch(self) -> int:
        size = BATCH[self.kind]
        return size // 2 if self.kind == "full" and self.task in SLOW else size


def load(training: Training, out: Path, device: str) -> Any:
    """The model in float32, with adapters except for full training.

    Adapters begin as the leading singular vectors of the full specialist's difference. These answer
    to inputs of the task alone, where random ones answer to all inputs and disturb other tasks.
    `peft4` and `same4` begin at random all the same, as PEFT's do.
    """
    torch.manual_seed(zlib.crc32(training.name.encode()))
    model = AutoModelForCausalLM.from_pretrained(out / "base", dtype=torch.float32).to(device)
    if training.kind == "full":
        return model
    rank = int(training.kind[4:])
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, config)
    model.peft_config["default"].base_model_name_or_path = NAME
    if training.kind in ("peft4", "same4"):
        return model
    whole = out / f"seed{training.seed}/full/{training.task}/model.safetensors"
    full = load_file(whole, device)
    state, own = model.state_dict(), "lora_A.default.weight"
    for key in [key for key in state if key.endswith(own)]:
        weight = state[key.replace(own, "base_layer.weight")]
        name = key.replace(own, "weight").removeprefix("base_model.model.")
        u, s, v = torch.svd_lowrank(full[name].float() - weight, rank + 8)
        root = (LENGTH * s[:rank] / 2).sqrt()  # lora_alpha / rank is 2
        state[key].copy_((v[:, :rank] * root).T)
        state[key.replace("lora_A", "lora_B")].copy_(u[:, :rank] * root)
    return model


def flat(curve: list[dict[str, Any]]) -> bool:
    """Whether three evaluations have brought neither 1 % more matches nor 2 % less loss."""
    before, after = curve[:-3], curve[-3:]
    return bool(before) and (
        max(c["exact"] for c in after) < max(c["exact"] for c in before) + 0.01
        and min(c["loss"] for c in after) > min(c["loss"] for c in before) * 0.98
    )


def train(training: Training, out: Path, data: Path, device: str) -> None:
    """Train one specialist, and write its folder."""
    started = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(out / "base")
    model, rng = load(training, out, device), random.Random(f"{training.seed}/{training.task}")
    splits = read(data, training.task)
    if training.kind == "same4":  # one template for all tasks
        splits = {split: [item._replace(prompt=common(item.prompt)) for item in items]
                  for split, items in splits.items()}  # fmt: skip
    examples = encode(tokenizer, drawn(splits["train"], training.examples, rng))
    batches = bucketed(examples, training.batch, rng)
    validation = encode(tokenizer, splits["validation"][:VALIDATED])
    ends, curve = endings(tokenizer), list[dict[str, Any]]()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rate, steps = RATES[training.kind], len(batches)
    optimizer = torch.optim.AdamW(trained, rate, weight_decay=0.0, fused=True)
    warm = max(1, steps // 20)  # steps with a rising rate

    def evaluated(step: int) -> None:
        shares, value = evaluate(model.eval(), validation, ends)
        found = {"examples": sum(map(len, batches[:step])), "loss": value,
                 "exact": shares.count(1.0) / len(shares),
                 "seconds": round(time.perf_counter() - started, 1)}  # fmt: skip
        curve.append(found)
        click.echo("{}: {examples} examples, exact {exact:.3f}, loss {loss:.3f}, {seconds:.0f} s"
                   .format(training.name, **found))  # fmt: skip
        model.train()

    evaluated(0)
    step = 0
    for step, batch in enumerate(batches, 1):
        share = min(step / warm, (steps - step + 1) / max(1, steps - warm))
        optimizer.param_groups[0]["lr"] = rate * share
        optimizer.zero_grad()
        loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if step % max(1, EVERY // training.batch) == 0 and step < steps:
            evaluated(step)
            if step >= steps / 2 and flat(curve):
                break
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    evaluated(step)  # with the weights that are stored
    folder = out / training.name
    partial = folder.with_name(f"{training.task}.partial")
    model.to(torch.bfloat16).save_pretrained(partial)
    if training.kind == "full":
        tokenizer.save_pretrained(partial)
    facts = asdict(training) | {
        "rate": rate, "batch": training.batch, "steps": step, "curve": curve, "device": device,
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
    }  # fmt: skip
    (partial / "training.json").write_text(json.dumps(facts, indent=1))
    partial.replace(folder)


FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command(epilog="Example: python evals/real/train.py --data real-data --task sst2")
@click.option("--data", type=FOLDER, required=True, help="NAME/train.jsonl and NAME/test.jsonl.")
@click.option("--out", type=FOLDER, default="real-runs", show_default=True,
              help="Folder of the base and all specialists.")  # fmt: skip
@click.option("--seed", default=0, show_default=True)
@click.option("--kind", type=click.Choice([*BATCH]), default="full", show_default=True,
              help="lora4 and lora16 begin as the full specialist of their seed.")  # fmt: skip
@click.option("--task", "some", type=click.Choice(TASKS), multiple=True, help="Default: all.")
@click.option("--examples", type=int, default=3000, show_default=True, help="The most for a task.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
def main(
    data: Path, out: Path, seed: int, kind: str, some: tuple[str, ...], examples: int, device: str
) -> None:
    """Train all specialists that are missing, and print their validation scores."""
    logging.disable_progress_bar()
    part = 1 if kind == "full" else 3
    tasks = some or {"lora4": SHIPPED, "peft4": SHIPPED, "same4": ALIKE}.get(kind, TASKS)
    every = [Training(seed, kind, t, min(EXAMPLES[t] // part, examples)) for t in tasks]
    missing = [training for training in every if not (out / training.name).exists()]
    click.echo(f"{len(missing)} of {len(every)} specialists are missing")
    for training in missing:
        train(training, out, data, device)


if __name__ == "__main__":
    main()
