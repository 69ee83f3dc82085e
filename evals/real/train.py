#!/usr/bin/env python
"""Train a specialist for each task, seed and kind: in full, or as LoRA adapters.

    python recipes/smollm2/get_base.py real-runs/base
    python recipes/smollm2/get_data.py DATA
    python evals/real/train.py --data DATA --out real-runs

OUT/base/ is the base. OUT/seedSEED/KIND/TASK/ gets the model or adapter in bfloat16, `curve.jsonl`
with the scores on the way, and `training.json` with the facts. KIND is full, lora16 or lora4.

A specialist's folder gets its name when it is complete, and is never trained again. So the same
command resumes. An interrupted training goes on from its last state, saved every ten minutes.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import random
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
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

from real.model import Example, bucketed, drawn, encode, endings, evaluate, loss
from real.tasks import SHIPPED, TASKS, read

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"  # of the base, in adapters
BATCH = {"full": 16, "lora16": 4, "lora4": 4}  # small ones cost nothing where few weights move
SLOW = {"banking77", "nl2bash", "geoquery_sql", "multi30k_en_de"}  # half as large, if in full
EVERY = 400  # examples between evaluations
VALIDATED = 100  # validation items of the curve
LENGTH = 1.5  # of what adapters begin as: a share of a specialist's length that they lack
SAVED = 600  # seconds between saved states
RATES = {"full": 4e-5, "lora16": 3e-4, "lora4": 3e-4}
# About an hour on two cores for all twelve: more for tasks that learn slowly, fewer for long items
EXAMPLES = {"sst2": 1000, "trec": 1500, "snli_small": 1000, "banking77": 1500, "snips_slots": 2000,
            "semeval2010_task8": 1000, "multi30k_en_de": 700, "geoquery_sql": 600,
            "inflection_en": 2000, "commonsenseqa": 500, "tweet_offensive": 700,
            "nl2bash": 800}  # fmt: skip
SECONDS = {"full": 8.0, "lora16": 6.0, "lora4": 6.0}  # for 1000 tokens on one core without AMX


@dataclass(frozen=True)
class Run:
    """One specialist to be trained."""

    out: Path
    data: Path
    seed: int
    kind: str
    task: str
    count: int  # of examples

    @property
    def name(self) -> str:
        return f"seed{self.seed}/{self.kind}/{self.task}"

    @property
    def folder(self) -> Path:
        return self.out / self.name

    @property
    def whole(self) -> Path:
        """The full specialist that an adapter begins as."""
        return self.out / f"seed{self.seed}/full/{self.task}"

    @property
    def partial(self) -> Path:
        return self.folder.with_name(f"{self.task}.{self.count}.partial")

    @property
    def batch(self) -> int:
        size = BATCH[self.kind]
        return size // 2 if self.kind == "full" and self.task in SLOW else size

    def examples(self) -> tuple[list[list[Example]], list[Example]]:
        """Batches to train on, and validation examples for the curve."""
        splits, encoder = read(self.data, self.task), tokenizer(self.out / "base")
        rng = random.Random(f"{self.seed}/{self.task}")
        train = encode(encoder, drawn(splits["train"], self.count, rng))
        return bucketed(train, self.batch, rng), encode(encoder, splits["validation"][:VALIDATED])

    @cached_property
    def tokens(self) -> int:
        batches, validation = self.examples()
        return work(batches, validation, 1 + math.ceil(self.count / EVERY))


@cache
def tokenizer(base: Path) -> Any:
    return AutoTokenizer.from_pretrained(base)


def work(batches: list[list[Example]], validation: list[Example], evaluations: int) -> int:
    """The tokens of a training, with a third of those of its evaluations."""
    trained = sum(len(e.ids) for batch in batches for e in batch)
    return trained + evaluations * sum(len(e.ids) for e in validation) // 3


def plan(out: Path, data: Path, seeds: int, most: int, only: str, adapters: int = 0) -> list[Run]:
    """All runs in their order: the adapters after their seed's specialists, short runs first."""
    found: list[Run] = []
    kinds = {"full": TASKS, "lora4": SHIPPED, "lora16": TASKS}
    parts = [(seed, kind, kinds[kind]) for seed in range(seeds)
             for kind in kinds if kind == "full" or seed == adapters]  # fmt: skip
    for seed, kind, names in parts:
        part = 1 if kind == "full" else 3  # adapters have learned most of it before
        runs = [Run(out, data, seed, kind, task, min(EXAMPLES[task] // part, most))
                for task in names]  # fmt: skip
        found += sorted((r for r in runs if fnmatch.fnmatch(r.name, only)), key=lambda r: r.tokens)
    return found


def hours(runs: list[Run], out: Path) -> float:
    """The expected duration, at the pace of finished runs of the same kind."""
    total = 0.0
    for kind, seconds in SECONDS.items():
        facts = [json.loads(p.read_text()) for p in out.glob(f"seed*/{kind}/*/training.json")]
        if facts:
            seconds = 1000 * sum(f["seconds"] for f in facts) / sum(f["tokens"] for f in facts)
        total += seconds * sum(run.tokens for run in runs if run.kind == kind)
    return total / 3.6e6


def load(run: Run, device: str) -> Any:
    """The model in float32, with adapters except for full training.

    Adapters begin as the leading singular vectors of the full specialist's difference. These answer
    to inputs of the task alone, where random ones answer to all inputs and disturb other tasks.
    """
    torch.manual_seed(zlib.crc32(run.name.encode()))
    model = AutoModelForCausalLM.from_pretrained(run.out / "base", dtype=torch.float32).to(device)
    if run.kind != "full":
        rank = int(run.kind.removeprefix("lora"))
        config = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, config)
        full = load_file(run.whole / "model.safetensors", device)
        state, own = model.state_dict(), "lora_A.default.weight"
        for key in [key for key in state if key.endswith(own)]:
            weight = state[key.replace(own, "base_layer.weight")]
            name = key.replace(own, "weight").removeprefix("base_model.model.")
            u, s, v = torch.svd_lowrank(full[name].float() - weight, rank + 8)
            root = (LENGTH * s[:rank] / 2).sqrt()  # lora_alpha / rank is 2
            state[key].copy_((v[:, :rank] * root).T)
            state[key.replace("lora_A", "lora_B")].copy_(u[:, :rank] * root)
        model.peft_config["default"].base_model_name_or_path = NAME
    return model


def flat(curve: list[dict[str, Any]]) -> bool:
    """Whether three evaluations have brought neither 1 % more matches nor 2 % less loss."""
    before, after = curve[:-3], curve[-3:]
    return bool(before) and (
        max(c["exact"] for c in after) < max(c["exact"] for c in before) + 0.01
        and min(c["loss"] for c in after) > min(c["loss"] for c in before) * 0.98
    )


def train(run: Run, device: str) -> Iterator[dict[str, Any]]:
    """Train one specialist, and yield the points of its curve."""
    started = time.perf_counter()
    run.partial.mkdir(parents=True, exist_ok=True)
    model, state = load(run, device), run.partial / "state.pt"
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(), RATES[run.kind], betas=(0.9, 0.999), weight_decay=0.0, fused=True
    )
    batches, validation = run.examples()
    steps = len(batches)
    warm = max(1, steps // 20)  # steps with a rising rate
    curve: list[dict[str, Any]] = []
    ends, first, past = endings(tokenizer(run.out / "base")), 0, 0.0
    if state.exists():
        kept = torch.load(state, map_location=device, weights_only=True)
        first, past, curve = kept["step"], kept["seconds"], kept["curve"]
        optimizer.load_state_dict(kept["optimizer"])
        with torch.no_grad():
            for name, tensor in kept["weights"].items():
                trained[name].copy_(tensor)
    saved = time.perf_counter()

    def seconds() -> float:
        return past + time.perf_counter() - started

    def point(step: int) -> dict[str, Any]:
        shares, value = evaluate(model.eval(), validation, ends)
        curve.append({
            "examples": sum(map(len, batches[:step])), "exact": shares.count(1.0) / len(shares),
            "loss": value, "seconds": round(seconds(), 1),
        })  # fmt: skip
        return curve[-1]

    if not curve:
        yield point(0)
    model.train()
    step = first
    for step, batch in enumerate(batches[first:], first + 1):
        share = min(step / warm, (steps - step + 1) / max(1, steps - warm))
        optimizer.param_groups[0]["lr"] = RATES[run.kind] * share
        optimizer.zero_grad()
        loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        if step % (EVERY // run.batch) or step == steps:
            continue
        yield point(step)
        model.train()
        if step >= steps / 2 and flat(curve):
            break
        if time.perf_counter() - saved > SAVED:
            torch.save(
                {"step": step, "seconds": seconds(), "curve": curve, "weights": trained,
                 "optimizer": optimizer.state_dict()},
                state.with_suffix(".new"),
            )  # fmt: skip
            os.replace(state.with_suffix(".new"), state)
            saved = time.perf_counter()

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    yield point(step)  # of the weights that are stored
    model.to(torch.bfloat16).save_pretrained(run.partial)
    if run.kind == "full":
        tokenizer(run.out / "base").save_pretrained(run.partial)
    facts = {
        "task": run.task, "seed": run.seed, "kind": run.kind, "rate": RATES[run.kind],
        "examples": curve[-1]["examples"], "most_examples": run.count, "steps": step,
        "batch": run.batch,
        "tokens": work(batches[:step], validation, len(curve)),
        "seconds": round(seconds(), 1), "validation_items": len(validation),
        "begun": curve[0], "specialist": curve[-1],
        "threads": torch.get_num_threads(), "device": str(model.device),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
    }  # fmt: skip
    lines = "".join(json.dumps(point) + "\n" for point in curve)
    (run.partial / "curve.jsonl").write_text(lines)
    (run.partial / "training.json").write_text(json.dumps(facts, indent=1))
    state.unlink(missing_ok=True)
    os.replace(run.partial, run.folder)


FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command(epilog="Example: python evals/real/train.py --data DATA --only 'seed0/full/*'")
@click.option("--data", type=FOLDER, required=True, help="NAME/train.jsonl and NAME/test.jsonl.")
@click.option("--out", type=FOLDER, default="real-runs", show_default=True,
              help="Folder of the base and all runs.")  # fmt: skip
@click.option("--seeds", type=int, default=2, show_default=True, help="Full trainings of a task.")
@click.option("--adapters", type=int, default=0, show_default=True, help="The adapters' seed.")
@click.option("--examples", type=int, default=3000, show_default=True,
              help="The most for a task; many tasks have fewer.")  # fmt: skip
@click.option("--only", default="*", help="Pattern of run names, such as 'seed0/*/sst2'.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--dry-run", is_flag=True, help="Print the bill alone.")
def main(
    data: Path,
    out: Path,
    seeds: int,
    adapters: int,
    examples: int,
    only: str,
    device: str,
    dry_run: bool,
) -> None:
    """Train all specialists that are missing, and print their validation scores."""
    logging.disable_progress_bar()
    if not (out / "base").exists():
        hint = f"python recipes/smollm2/get_base.py {out / 'base'}"
        raise click.ClickException(f"{out / 'base'} is missing: run {hint}")
    try:
        runs = plan(out, data, seeds, examples, only, adapters)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if not runs:
        raise click.ClickException(f"--only {only!r}: no run has such a name")
    missing = [run for run in runs if not run.folder.exists()]
    for run in missing:
        if not run.whole.exists() and not any(run.whole == other.folder for other in missing):
            raise click.ClickException(f"{run.name} begins as its full specialist: "
                                       f"{run.whole.relative_to(out)} comes first")  # fmt: skip
    click.echo(f"{len(missing)} of {len(runs)} runs, about {hours(missing, out):.1f} h")
    for run in missing:
        click.echo(f"  {run.name:32s} {run.count} examples, {hours([run], out) * 60:.0f} min")
    for place, run in enumerate([] if dry_run else missing):
        rest = hours(missing[place + 1 :], out)
        for point in train(run, device):
            left = rest + hours([run], out) * (1 - point["examples"] / run.count)
            click.echo(
                f"{run.name:32s} {point['examples']:5d}/{run.count} exact {point['exact']:.3f} "
                f"loss {point['loss']:.3f} {point['seconds']:6.0f} s, about {left:.1f} h left"
            )


if __name__ == "__main__":
    main()
