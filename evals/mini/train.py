#!/usr/bin/env python
"""Train the small benchmark's models: a base, and a specialist for each of ten tasks.

    python evals/mini/train.py --preset tiny --out mini-runs

OUT/PRESET-seedSEED/ gets `run.json` (preset, fingerprint of the tasks), `data/TASK.SPLIT.jsonl`,
`base/`, and `full/TASK/` (models) or `lora/TASK/` (PEFT adapters over base/), all float32.

A model's folder gets its name when it is complete, and is never trained again. So the same command
resumes, and `--method lora` uses the base that `--method full` has trained. The same seed gives
other weights on another machine.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
from accelerate.utils import set_seed
from study.command import FOLDER, device_option
from tqdm import tqdm
from transformers.utils import logging

from mini import data, score
from mini.model import PRESETS, Preset, add_lora, make_model, make_tokenizer, train
from tvb_mergekit.atomic import write_file

METHODS = ("full", "lora")


def run_folder(out: Path, preset: str, seed: int) -> Path:
    return out / f"{preset}-seed{seed}"


def write_whole(folder: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill another folder, which gets its name when it is complete."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    os.replace(partial, folder)


def open_run(folder: Path, preset: Preset) -> None:
    """Begin a run, or make sure that the one that is there is of the same definition."""
    facts = {"preset": asdict(preset), "tasks": data.fingerprint()}
    file = folder / "run.json"
    if file.exists():
        found = json.loads(file.read_text())
        if found != facts:
            raise click.ClickException(
                f"{folder} was made with another definition of the preset or of the tasks: "
                f"{found} there, {facts} here. Choose another --out, or delete it."
            )
        return
    if not (folder / "data").exists():
        counts = dict.fromkeys(data.SPLITS, preset.items)
        write_whole(folder / "data", lambda partial: data.write(partial, counts))
    write_file(file, json.dumps(facts, indent=1).encode())


def train_run(
    name: str, method: str, seed: int, out: Path, device: str
) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Train what is missing; the run's folder, and model -> what its training.json says."""
    preset, folder = PRESETS[name], run_folder(out, name, seed)
    folder.mkdir(parents=True, exist_ok=True)
    open_run(folder, preset)
    tokenizer = make_tokenizer()
    paths = {"base": folder / "base"} | {task: folder / method / task for task in data.TASKS}
    plans = {path: getattr(preset, "base" if which == "base" else method)
             for which, path in paths.items()}  # fmt: skip
    missing = [path for path in paths.values() if not path.exists()]
    total = sum(plans[path].steps * plans[path].batch for path in missing)
    with tqdm(total=total, unit="item", unit_scale=True, smoothing=0.05) as bar:
        for which, path in paths.items():
            if path not in missing:
                continue
            bar.set_description(which)
            start = time.perf_counter()
            set_seed(zlib.crc32(f"{seed}/{which}".encode()))
            if which == "base":
                model: Any = make_model(preset, tokenizer)
            else:
                model = score.load(paths["base"])
                model.name_or_path = str(paths["base"].resolve())  # for the adapter's config
                if method == "lora":
                    model = add_lora(model, preset.rank)
            loss = train(
                model, tokenizer, list(data.ALL) if which == "base" else [which], plans[path],
                wrong_share=preset.wrong_share if which == "base" else 0.0,
                seed=f"{seed}/{which}", device=device, bar=bar,
            )  # fmt: skip
            facts = {
                "loss": loss,
                "seconds": round(time.perf_counter() - start, 1),
                "device": str(model.device),
                "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
            }

            def write(partial: Path, model: Any = model, facts: Any = facts) -> None:
                model.cpu().save_pretrained(partial)
                tokenizer.save_pretrained(partial)
                (partial / "training.json").write_text(json.dumps(facts, indent=1))

            write_whole(path, write)
    return folder, {
        which: json.loads((path / "training.json").read_text()) for which, path in paths.items()
    }


@click.command(epilog="Example: python evals/mini/train.py --preset tiny --method lora")
@click.option("--preset", type=click.Choice(list(PRESETS)), default="tiny", show_default=True)
@click.option("--method", type=click.Choice(METHODS), default="full", show_default=True,
              help="Training of the specialists; the base is trained in full.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights, training.")
@click.option("--out", type=FOLDER, default="mini-runs", show_default=True,
              help="The run goes to OUT/PRESET-seedSEED.")  # fmt: skip
@device_option
def main(preset: str, method: str, seed: int, out: Path, device: str) -> None:
    """Train a base and ten specialists, and print their validation scores."""
    logging.disable_progress_bar()
    folder, trained = train_run(preset, method, seed, out, device)
    tokenizer = make_tokenizer()
    base = score.score(score.load(folder / "base"), tokenizer, folder / "data", "validation")
    click.echo(f"{folder}: validation scores; the base took {trained['base']['seconds']:.0f} s")
    for task in data.TASKS:
        model = score.load(folder / method / task, folder / "base")
        own = score.score(model, tokenizer, folder / "data", "validation", [task])[task]
        seconds = trained[task]["seconds"]
        click.echo(f"{task:20s} base {base[task]:.3f}  specialist {own:.3f}  ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
