#!/usr/bin/env python
"""`tvb tune` against as many runs of mergekit-yaml and lm_eval: whole commands, in seconds.

    python evals/mini/train.py --preset tiny --out mini-runs
    python evals/speed/tune.py mini-runs/tiny-seed0                       # the paper's 21 points
    python evals/speed/tune.py mini-runs/tiny-seed0 --grid 0:1:0.5 --limit 50

Both score the same validation items of the small benchmark's ten tasks; that their scores are the
same is checked. Merges of the separate runs share the Gram cache. Processor time is given too: on
a busy machine it says more than the clock.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import click
from compare import Merge

TASKS = Path(__file__).resolve().parents[1] / "mini" / "tasks"
BIN = Path(sys.executable).parent


class Took(NamedTuple):
    """Seconds, by the clock and of processors."""

    clock: float = 0.0
    processors: float = 0.0


def timed(env: dict[str, str], *command: object) -> Took:
    """The time of one command, which must succeed."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"{command[0]} failed: {done.stderr[-2000:]}")
    clock, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Took(clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def shown(took: Took) -> str:
    return f"{took.clock:.1f} s, {took.processors:.1f} s of processors"


def recipe(run: Path, bases: int, coefficient: float) -> str:
    merge = Merge("basis_ta", {"basis": "balanced", "num_bases": bases, "lambda": coefficient}, {})
    return merge.recipe(run / "base", sorted((run / "full").iterdir()), "float32")


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--grid", default="0:1:0.05", show_default=True)
@click.option("--limit", type=int, help="Validation items per task; all by default.")
@click.option("--bases", default=5, show_default=True, help="M; the line is the same for every M.")
@click.option("--device", default="cpu", show_default=True)
def main(run: Path, grid: str, limit: int | None, bases: int, device: str) -> None:
    """Time both on the models that evals/mini/train.py left in RUN."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        data = {"data": str((run / "data").resolve())}
        cache = str(work / "cache")
        env = os.environ | {"HF_HUB_OFFLINE": "1", "TVB_MERGEKIT_CACHE": cache}
        (work / "recipe.yml").write_text(recipe(run, bases, 0.4))
        tvb = [sys.executable, "-c", "from tvb_mergekit.cli.commands import main; main()"]
        limited = ["--limit", limit] if limit else []
        ours = timed(
            env, *tvb, "tune", work / "recipe.yml", "--tasks", "mini", "--include-path", TASKS,
            "--metadata", json.dumps(data), "--grid", grid, "--batch-size", 64, "--device", device,
            "--out", work / "out", "--quiet", *limited,
        )  # fmt: skip
        found = json.loads((work / "out" / "tune.json").read_text())
        points = found["points"]
        click.echo(f"tvb tune: {len(points)} points in {shown(ours)}")
        parts = [part for task in found["tasks"].values() for part in task["parts"]]
        samples = json.dumps({part["task"]: part["chosen"] for part in parts})
        theirs = Took()
        for point in points:
            took, scores = separate(run, work, bases, point["lambda"], data, samples, device, env)
            theirs = Took(*map(sum, zip(theirs, took, strict=True)))
            if scores != {n: task["values"]["score,none"] for n, task in point["tasks"].items()}:
                raise click.ClickException(f"other scores at {point['lambda']}: {scores}, {point}")
        click.echo(f"mergekit-yaml and lm_eval: {shown(theirs)}, with the same scores")
        clock, processors = theirs.clock / ours.clock, theirs.processors / ours.processors
        click.echo(f"{clock:.1f} times, {processors:.1f} times of processors")


def separate(
    run: Path, work: Path, bases: int, coefficient: float, data: dict[str, str], samples: str,
    device: str, env: dict[str, str],
) -> tuple[Took, dict[str, Any]]:  # fmt: skip
    """The time of one point's two commands, and task -> score."""
    place = work / f"point-{coefficient:g}"
    place.mkdir()
    (place / "recipe.yml").write_text(recipe(run, bases, coefficient))
    took = timed(env, BIN / "mergekit-yaml", place / "recipe.yml", place / "merged", "--quiet")
    scored = timed(
        env, BIN / "lm_eval", "run", "--model", "hf", "--model_args",
        f"pretrained={place / 'merged'},dtype=float32", "--tasks", "mini", "--include_path", TASKS,
        "--metadata", json.dumps({**data, "split": "validation"}), "--samples", samples,
        "--batch_size", 64, "--device", device, "--output_path", place / "out",
    )  # fmt: skip
    (file,) = (place / "out").rglob("results_*.json")
    results = json.loads(file.read_text())
    groups = results.get("groups", {})
    took = Took(*map(sum, zip(took, scored, strict=True)))
    return took, {n: v["score,none"] for n, v in results["results"].items() if n not in groups}


if __name__ == "__main__":
    main()
