#!/usr/bin/env python
"""Measure the bits of a lossless store for several kinds of fine-tuning.

    python evals/real/rounding.py --data DATA --out real-runs

OUT/rounding.jsonl gets a line for each kind, rate and number of steps. The same command resumes
with the next kind and rate, and prints the table of all.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import click
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

import tvb_mergekit
from real.model import bucketed, drawn, encode, loss
from real.tasks import TASKS, read
from real.train import FOLDER, tokenizer
from tvb_mergekit.atomic import write_file

STEPS = (50, 200, 500)
PLAN = (("full", 5e-6), ("full", 2e-5), ("full", 1e-4), ("bfloat16", 2e-5), ("lora16", 1e-3))
BATCH = 4


def round_randomly(weights: Tensor) -> None:
    """Round float32 to bfloat16, up or down by chance, so that the mean stays."""
    bits = weights.view(torch.int32)
    bits += torch.randint_like(bits, 2**16)
    bits &= -(2**16)


def train(base: Path, data: Path, task: str, kind: str, rate: float) -> Iterator[tuple[int, Any]]:
    """Train by AdamW at a constant rate, and yield the model after each number of STEPS.

    `bfloat16` trains weights that are bfloat16 after each step, by stochastic rounding. `lora16`
    yields the model with its adapters fused.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).train()
    if kind == "lora16":
        config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, rate, weight_decay=0.0, fused=True)
    rng = random.Random(0)
    items = drawn(read(data, task)["train"], BATCH * STEPS[-1], rng)
    for step, batch in enumerate(bucketed(encode(tokenizer(base), items), BATCH, rng), 1):
        optimizer.zero_grad()
        loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if kind == "bfloat16":
            with torch.no_grad():
                for parameter in trained:
                    round_randomly(parameter)
        if step in STEPS and kind == "lora16":
            model.merge_adapter()
            yield step, model.get_base_model()
            model.unmerge_adapter()
        elif step in STEPS:
            yield step, model


def measure(base: Path, model: Any) -> dict[str, float]:
    """Relative norm, share of unchanged weights, and bits a parameter, of a model in bfloat16."""
    names = {n: n.replace(".base_layer", "") for n, _ in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "model"
        plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
        with torch.no_grad():
            for name, own in names.items():
                if ".lora_" not in name:
                    plain.get_parameter(own).copy_(model.get_parameter(name))
        plain.save_pretrained(place)
        built = tvb_mergekit.build(base, {"task": place}, Path(folder) / "store", lossless=True)
    before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict()
    length = total = same = count = 0.0
    for name, weight in plain.named_parameters():
        after = weight.detach()
        length += float((after - before[name]).square().sum())
        total += float(before[name].square().sum())
        same += int((after == before[name]).sum())
        count += after.numel()
    return {"norm": (length / total) ** 0.5, "same": same / count, "bits": built.facts["bits"]}


@click.command(epilog="Example: python evals/real/rounding.py --data DATA --out real-runs")
@click.option("--data", type=FOLDER, required=True, help="NAME/train.jsonl and NAME/test.jsonl.")
@click.option("--out", type=FOLDER, default="real-runs", show_default=True, help="Has base/.")
@click.option("--task", type=click.Choice(TASKS), default="sst2", show_default=True)
def main(data: Path, out: Path, task: str) -> None:
    """Measure the bits of a lossless store for several kinds of fine-tuning."""
    file = out / "rounding.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for kind, rate in PLAN:
        about = {"task": task, "kind": kind, "rate": rate}
        done = [f for f in found if about.items() <= f.items()]
        if len(done) == len(STEPS):
            continue
        found = [f for f in found if f not in done]  # of a run that was ended
        for steps, model in train(out / "base", data, task, kind, rate):
            found.append({**about, "steps": steps, **measure(out / "base", model)})
            write_file(file, "".join(json.dumps(f) + "\n" for f in found).encode())
    click.echo("| training | rate | steps | relative norm | unchanged | bits |")
    click.echo("|---|--:|--:|--:|--:|--:|")
    for f in (f for f in found if f.get("task") == task):
        click.echo(f"| {f['kind']} | {f['rate']:g} | {f['steps']} | {f['norm']:.2%} | "
                   f"{f['same']:.0%} | {f['bits']:.2f} |")  # fmt: skip


if __name__ == "__main__":
    main()
