"""Merges that learn from examples, by the command `tvb learn`; M bases get M/T of the examples."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import tvb_mergekit
from real.cells import Cell
from real.merges import MERGES, best, direction
from real.run import Run, keys_of


@dataclass(frozen=True)
class Way:
    """A method of `tvb learn` with its options."""

    title: str
    method: str
    options: tuple[str, ...] = ()
    merge: str = ""  # of the recipe, if the method begins there: its lambda is tuned before


WAYS = {
    "fisher": Way("Fisher", "fisher"),
    "normalized": Way("Fisher, normalized", "fisher", ("--normalize",)),
    "regmean": Way("RegMean", "regmean"),
    "adamerging": Way("AdaMerging", "adamerging", merge="ta"),
    "atlas": Way("aTLAS", "atlas"),
    "wemoe": Way("WEMoE", "wemoe", merge="ta"),
    "wemoe_wudi_30": Way("WEMoE on WUDI, t = 30", "wemoe", merge="wudi_30"),
}


def learned(run: Run, cell: Cell) -> dict[str, Any]:
    """One method over some bases."""
    way = WAYS[cell["how"]]
    count = max(1, round(cell["shots"] * cell["num_bases"] / len(run.tasks)))
    with tempfile.TemporaryDirectory() as folder:
        place, by = Path(folder), 0.3  # for methods that do not use lambda
        if way.merge:
            vector = direction(run, run.built(cell), way.merge)
            by = best(run, cell | {"items": count}, vector)[0]
        merge = MERGES[way.merge or "ta"]
        scale = "bases" if way.method == "atlas" else "tasks"
        keys = {**keys_of(cell), "lambda": by, "lambda_scale": scale, **merge.keys}
        recipe = run.recipe(place / "recipe.yml", merge.method, keys)
        command = [sys.executable, "-m", "tvb_mergekit", "learn", recipe, way.method,
                   *way.options, "--out", str(place / "out"), "--device", run.device,
                   "--quiet"]  # fmt: skip
        for task in run.tasks:
            given = examples(run, task, cell["shots"], way.method != "adamerging", place)
            command += ["--data", f"{task}={given}"]
        subprocess.run(command, check=True)
        loaded = AutoModelForCausalLM.from_pretrained(place / "out", dtype=torch.float32)
        model: Any = loaded.eval().to(run.device)
        if way.method != "wemoe":
            return {"items": run.ask(model, "test", run.tasks, cell["tested"]), "lambda": by}
        live: Any = tvb_mergekit.attach(model, place / "out")
        live.route()

        def begin(prompts: torch.Tensor | None) -> None:
            live.prompts = prompts

        scores = run.ask(model, "test", run.tasks, cell["tested"], begin)
        return {"items": scores, "lambda": by}


def examples(run: Run, task: str, count: int, answered: bool, folder: Path) -> Path:
    """A file of validation items for `tvb learn`."""
    file = folder / f"{task}.jsonl"
    lines = [item._asdict() if answered else {"prompt": item.prompt}
             for item in run.items(task, "validation")[:count]]  # fmt: skip
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
