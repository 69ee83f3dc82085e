"""The Gram pass against a plain read of the same bytes, in turn in one process: see README.md.

In the commands that `compare.py` times, the pass also loads the compiled loops, 0.4 s whatever the
models' size. Here they are loaded before. Let nothing else run.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import click
import models
import read
import torch
from compare import prepared, shared, tell
from tables import between, spread, table

from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.layout import parse_memory
from tvb_mergekit.tensors.passes import gram_pass
from tvb_mergekit.tensors.stream import Item, Part

HEAD = ("read, GB/s", "Gram, GB/s", "read again, GB/s", "ratio")


def items_of(folders: list[Path]) -> list[Item]:
    """Every tensor of base and models."""
    base, *others = [Checkpoint.open(folder) for folder in folders]
    items = []
    for name, info in base.tensors.items():
        parts = tuple(Part.of(model, name) for model in others)
        items.append(Item(name, info.shape, Part.of(base, name), parts))
    return items


@click.command(epilog="Example: python evals/speed/gram.py --tasks 4 --megabytes 8 --rounds 2")
@click.option("--tasks", type=click.IntRange(1), default=8, show_default=True)
@click.option("--megabytes", type=click.IntRange(1), default=500, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True, help="Of the models.")
@click.option("--memory", default="1GB", show_default=True, help="As of `tvb build`.")
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True)
@shared
def main(
    tasks: int,
    megabytes: int,
    dtype: str,
    memory: str,
    rounds: int,
    threads: int | None,
    work: Path,
    keep: bool,
) -> None:
    """Bytes a second of both, files in the page cache: a read, the pass, and a read again."""
    folder = models.ensure(prepared(work), tasks, megabytes, dtype=dtype)
    folders = [folder / name for name in ("base", *(f"task-{i}" for i in range(tasks)))]
    paths = sorted(str(path) for each in folders for path in each.glob("*.safetensors"))
    items, names = items_of(folders), [f"task-{i}" for i in range(tasks)]
    total = sum(item.nbytes for item in items) / 1e9
    working = threads or torch.get_num_threads()

    def plain() -> float:
        return total / read.timed(paths)["seconds"]

    def ours() -> float:
        torch.set_num_threads(working)
        started = time.perf_counter()
        gram_pass(items, names, Engine(memory=parse_memory(memory)))
        return total / (time.perf_counter() - started)

    columns: dict[str, list[float]] = {key: [] for key in HEAD}
    try:
        plain(), ours()  # into the cache, and compiled
        for number in range(rounds):
            before, speed, after = plain(), ours(), plain()
            found = (before, speed, after, 2 * speed / (before + after))
            for key, value in zip(HEAD, found, strict=True):
                columns[key].append(value)
            tell(f"round {number + 1} of {rounds}: {found[-1]:.2f}")
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    click.echo(
        f"{tasks} models and a base, {total:.2f} GB in {dtype}, {working} threads; medians.\n"
    )
    click.echo(table(HEAD, [[between(spread(columns[key])) for key in HEAD]], 0))


if __name__ == "__main__":
    main()
