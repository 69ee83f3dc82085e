"""Stores of codes: `tvb build --bits` against a store in bf16, merges over it against the models'.

See README.md. Linux only; let nothing else run.
"""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import measure
import models
import yaml
from compare import prepared, script, tell

MERGE = {"basis": "balanced", "basis_ratio": 0.5, "lambda": 0.4, "lambda_scale": "tasks"}


def recipe(file: Path, base: Path, listed: Sequence[Path], parameters: dict[str, Any]) -> str:
    document = {
        "merge_method": "basis_ta",
        "base_model": str(base),
        "models": [{"model": str(path)} for path in listed],
        "parameters": parameters,
        "dtype": "bfloat16",
    }
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return str(file)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: medians, ratios with their least and largest."""
    head = "| | files | ours, s | theirs, s | ratio | peak RSS, MB | theirs, MB |"
    lines = [head, "|---|---|---:|---:|---:|---:|---:|"]
    for key in dict.fromkeys((row["what"], row["files"]) for row in rows):
        mine = [row for row in rows if (row["what"], row["files"]) == key]
        ratios = sorted(row["ours"].wall_s / row["theirs"].wall_s for row in mine)
        seconds = [statistics.median(row[side].wall_s for row in mine) for side in SIDES]
        memory = [statistics.median(row[side].peak_rss_mb for row in mine) for side in SIDES]
        ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        cells = [*key, *(f"{value:.1f}" for value in seconds), ratio]
        lines.append("| " + " | ".join([*cells, *(f"{value:.0f}" for value in memory)]) + " |")
    return "\n".join(lines)


SIDES = ("ours", "theirs")


@click.command(epilog="Example: python evals/speed/codes.py --bits 2 --rounds 3")
@click.option("--tasks", default=8, show_default=True)
@click.option("--megabytes", default=500, show_default=True, help="Size of each model, about.")
@click.option("--bits", default="2", show_default=True, help="Of the store of codes.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--work", default="speed-work", show_default=True, type=click.Path(path_type=Path))
@click.option("--keep", is_flag=True, help="Keep the generated models.")
def main(tasks: int, megabytes: int, bits: str, rounds: int, work: Path, keep: bool) -> None:
    """Whole commands in turn: builds, warm; merges with G known, warm and cold."""
    inputs = models.ensure(prepared(work), tasks, megabytes)
    work = work.resolve()
    base, listed = inputs / "base", [inputs / f"task-{index}" for index in range(tasks)]
    env = measure.environment(TVB_MERGEKIT_CACHE=str(work / "codes-cache"))
    off = measure.environment(TVB_MERGEKIT_CACHE="off")
    zoo, dense, out = (work / name for name in ("zoo", "dense", "merged"))
    task_vectors = recipe(work / "whole.yml", base, listed, {"basis": "none"})
    over = {
        "ours": recipe(work / "zoo.yml", base, [zoo / path.name for path in listed], MERGE),
        "theirs": recipe(work / "models.yml", base, listed, MERGE),
    }
    commands = {
        "ours": ["build", task_vectors, str(zoo), "--bits", bits],
        "theirs": ["build", task_vectors, str(dense), "--dtype", "bfloat16"],
    }
    files = {
        "ours": [zoo / path.name / "model.safetensors" for path in listed],
        "theirs": [path / "model.safetensors" for path in listed],
    }

    def run(words: Sequence[str], env: dict[str, str], folder: Path) -> measure.Usage:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
        return measure.run([script("tvb"), *words, "--quiet"], env, work / "codes.log")

    rows: list[dict[str, Any]] = []
    for number in range(rounds + 1):
        found = []
        row: dict[str, Any] = {"what": f"build at {bits} bits; in bf16", "files": "warm"}
        for side, place in (("ours", zoo), ("theirs", dense)):
            measure.warm([base / "model.safetensors", *files["theirs"]])
            row[side] = run(commands[side], off, place)
        found.append(row)
        shutil.rmtree(dense)
        for state in ("warm", "cold"):
            row = {"what": f"merge over {bits} bits; over the models", "files": state}
            for side in SIDES:
                read = [base / "model.safetensors", *files[side]]
                run(["merge", over[side], str(out)], env, out)  # G in the cache, files compared
                os.sync()
                (measure.evict if state == "cold" else measure.warm)(read)
                row[side] = run(["merge", over[side], str(out)], env, out)
            found.append(row)
        if number:  # the first round is not counted
            rows += found
            tell(f"round {number} of {rounds}")
    for folder in (zoo, out, work / "codes-cache", *([] if keep else [inputs])):
        shutil.rmtree(folder)
    click.echo(table(rows))


if __name__ == "__main__":
    main()
