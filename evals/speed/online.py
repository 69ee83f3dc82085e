"""What one `tvb add` costs as the tasks go by: each step a command of its own, on generated models.

The models are those of models.py, written once; the store is made anew. Before each step all that
it may read is dropped from the page cache, so that the bytes read are those of the disk. A step
below the budget reads what is there and writes one vector; one at the budget writes them all.
`slope` is the mean of the last five steps at the budget over that of the first five: 1 where what a
step costs does not depend on how many tasks came before. Linux only; let nothing else run.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import click
import measure
import models

ENDS = 5  # steps at either end that `slope` compares


def step(store: Path, family: Path, index: int, options: list[str], log: Path) -> measure.Usage:
    """Add one task in a command of its own, from a cold disk."""
    task = family / f"task-{index}"
    os.sync()  # a dirty page cannot be dropped
    read = [family / "base", task, *(store.glob("basis-*") if store.exists() else [])]
    measure.evict(file for folder in read for file in folder.glob("*.safetensors"))
    env = measure.environment(TVB_MERGEKIT_CACHE=str(log.with_name("cache")))
    tvb = str(Path(sys.executable).with_name("tvb"))
    words = [tvb, "add", str(store), str(task), "--task", task.name, "--quiet"]
    first = [] if store.exists() else ["--base", str(family / "base"), *options]
    return measure.run([*words, *first], env, log)


def slope(rows: list[measure.Usage], value: Callable[[measure.Usage], float]) -> float:
    return mean(map(value, rows[-ENDS:])) / mean(map(value, rows[:ENDS]))


@click.command(epilog="Example: python online.py /tmp/online --tasks 20 --megabytes 100 --budget 4")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--tasks", default=20, show_default=True, help="How many are added.")
@click.option("--megabytes", default=100, show_default=True, help="Of each model, in bf16.")
@click.option("--budget", default=4, show_default=True, help="The most bases.")
@click.option("--compress", type=click.Choice(["ae", "balanced"]), default="balanced")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16")
@click.option("--seed", default=0, show_default=True)
def main(
    folder: Path, tasks: int, megabytes: int, budget: int, compress: str, dtype: str, seed: int
) -> None:
    """Add generated models to a store one after another, and print what each step cost."""
    family = models.ensure(folder, tasks, megabytes, seed)
    options = ["--budget", str(budget), "--compress", compress, "--dtype", dtype]
    run = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
    full = []
    click.echo("task  bases  seconds  CPU s  read MB  peak RssAnon MB  others' CPU s")
    try:
        for index in range(tasks):
            used = step(run / "store", family, index, options, run / "log")
            bases = min(index + 1, budget)
            click.echo(
                f"{index + 1:4}  {bases:5}  {used.wall_s:7.2f}  {used.cpu_s:5.2f}  "
                f"{used.read_mb:7.1f}  {used.peak_rss_anon_mb:15.1f}  {used.others_cpu_s:13.2f}"
            )
            if index >= budget:
                full.append(used)
    finally:
        shutil.rmtree(run)
    if len(full) >= 2 * ENDS:
        click.echo(
            f"slope         {slope(full, lambda u: u.wall_s):7.2f}  "
            f"{slope(full, lambda u: u.cpu_s):5.2f}  {slope(full, lambda u: u.read_mb):7.3f}  "
            f"{slope(full, lambda u: u.peak_rss_anon_mb):15.3f}"
        )


if __name__ == "__main__":
    main()
