"""`tvb build` against a plain read of the same bytes twice and a plain write of M models once.

See README.md. Linux only; let nothing else run.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import click
import measure
import models
import yaml

HERE = Path(__file__).parent
PARTS = ("gram", "encode", "write")  # of `seconds` in the store's basis.json


def recipe(inputs: Path, tasks: int, bases: int) -> str:
    document = {
        "merge_method": "basis_ta",
        "base_model": str(inputs / "base"),
        "models": [{"model": str(inputs / f"task-{index}")} for index in range(tasks)],
        "parameters": {"basis": "balanced", "num_bases": bases},
    }
    return yaml.safe_dump(document, sort_keys=False)


def one_round(work: Path, inputs: Path, tasks: int, bases: int, state: str) -> dict[str, Any]:
    """Both commands once, each from a warm or a cold page cache, and what they cost."""
    files = [inputs / name / "model.safetensors" for name in ("base", *_names(tasks))]
    env = measure.environment(TVB_MERGEKIT_CACHE="off")
    (work / "recipe.yml").write_text(recipe(inputs, tasks, bases))
    built = [str(Path(sys.executable).with_name("tvb")), "build", str(work / "recipe.yml")]
    built += [str(work / "store"), "--dtype", "bfloat16", "--quiet"]
    plain = [sys.executable, str(HERE / "plain_store.py"), str(bases), str(work / "plain")]
    row: dict[str, Any] = {"tasks": tasks, "bases": bases, "cache": state}
    for name, command in (("plain", [*plain, *map(str, files)]), ("build", built)):
        for folder in ("store", "plain"):
            shutil.rmtree(work / folder, ignore_errors=True)
        os.sync()
        if state == "cold":
            measure.evict(files)
        else:
            measure.warm(files)
        usage = measure.run(command, env, work / "log")
        row |= {f"{name}_wall": usage.wall_s, f"{name}_rss": usage.peak_rss_mb}
        row |= {f"{name}_anon": usage.peak_rss_anon_mb, f"{name}_others": usage.others_cpu_s}
        if name == "plain":
            row |= json.loads((work / "log").read_text().splitlines()[-1])
        else:
            facts = json.loads((work / "store" / "basis.json").read_text())
            row["seconds"] = facts["seconds"]
            row["net"] = sum(facts["seconds"][part] for part in PARTS)
    row["ratio"] = row["net"] / (row["read"] + row["write"])
    row["ratio_synced"] = row["net"] / (row["read"] + row["write"] + row["sync"])
    row["ratio_whole"] = row["build_wall"] / row["plain_wall"]
    return row


def _names(tasks: int) -> list[str]:
    return [f"task-{index}" for index in range(tasks)]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: medians over the rounds, ratios with their least and largest."""
    head = "| T | M | files | build, s | plain, s | ratio | ratio with the plain files on disk |"
    head += " whole command | peak RSS, MB | RssAnon, MB |"
    lines = [head, "|" + "---|" * 10]
    for key in dict.fromkeys((row["tasks"], row["bases"], row["cache"]) for row in rows):
        mine = [row for row in rows if (row["tasks"], row["bases"], row["cache"]) == key]

        def median(name: str, mine: list[dict[str, Any]] = mine) -> float:
            return statistics.median(row[name] for row in mine)

        def ratio(name: str, mine: list[dict[str, Any]] = mine) -> str:
            values = sorted(row[name] for row in mine)
            return f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"

        plain = statistics.median(row["read"] + row["write"] for row in mine)
        cells = [*map(str, key), f"{median('net'):.2f}", f"{plain:.2f}", ratio("ratio")]
        cells += [ratio("ratio_synced"), ratio("ratio_whole")]
        cells += [f"{median('build_rss'):.0f}", f"{median('build_anon'):.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


@click.command(epilog="Example: python evals/speed/store.py --tasks 8 --tasks 16 --tasks 32")
@click.option("--tasks", multiple=True, type=int, default=(8,), show_default=True)
@click.option("--bases", default=4, show_default=True)
@click.option("--megabytes", default=500, show_default=True, help="Size of each model, about.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--cold", is_flag=True, help="Drop the models from the page cache before each run.")
@click.option("--work", default="speed-work", show_default=True, type=click.Path(path_type=Path))
@click.option("--keep", is_flag=True, help="Keep the generated models.")
def main(
    tasks: tuple[int, ...],
    bases: int,
    megabytes: int,
    rounds: int,
    cold: bool,
    work: Path,
    keep: bool,
) -> None:
    """Time `tvb build` of T generated bf16 models into M bf16 bases.

    The yardstick reads the same files twice and writes M of them once, with plain safetensors
    calls; both sides without Python's imports, except in "whole command".
    """
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for count in tasks:
        inputs = models.ensure(work, count, megabytes)
        state = "cold" if cold else "warm"
        for number in range(rounds + 1):
            row = one_round(work, inputs, count, bases, state)
            if number:  # the first round is not counted
                rows.append(row)
                (work / "store.json").write_text(json.dumps(rows, indent=2) + "\n")
        if not keep:
            shutil.rmtree(inputs)
    for folder in ("store", "plain"):
        shutil.rmtree(work / folder, ignore_errors=True)
    click.echo(table(rows))


if __name__ == "__main__":
    main()
