"""A change of tasks in a live model, against a plain copy of its weights: see README.md.

The copy has every specialist in memory: `copy_` from a second state dict, tensor by tensor. Ours
reads the base and one task of the store from the page cache, in turn with it in one process.
Compiled loops are loaded before. Let nothing else run: PyTorch's threads share a copy and wait for
each other, so next to other processes a copy takes much longer.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import measure
import models
import torch
from compare import Merge, prepared, shared, tell
from tables import between, spread, table
from transformers import AutoModelForCausalLM

import tvb_mergekit as tvb

HEAD = ["copy, s", "use, s", "ratio", "copy, CPU s", "use, CPU s", "ratio, CPU",
        "reset, s", "attach, s"]  # fmt: skip


def zoo(folder: Path, tasks: int, form: str) -> Path:
    """The store of all task vectors, built unless it is there."""
    store = folder.with_name(folder.name + form.replace(" ", ""))
    if not store.is_dir():
        recipe = folder.with_name(f"{store.name}.yml")
        listed = [folder / f"task-{index}" for index in range(tasks)]
        recipe.write_text(Merge("basis_ta", {"basis": "none"}, {}).recipe(folder / "base", listed))
        command = [sys.executable, "-m", "tvb_mergekit", "build", recipe, store, *form.split()]
        log = folder.with_name(f"{store.name}.log")
        measure.run([*map(str, command), "--quiet"], measure.environment(), log)
    return store


@click.command(epilog="Example: python evals/speed/attach.py --tasks 2 --megabytes 8 --rounds 2")
@click.option("--dtype", default="bfloat16", show_default=True, help="Dtype of the models.")
@click.option("--form", default="--lossless", show_default=True, help="Options of `tvb build`.")
@shared(megabytes=500, rounds=9)
def main(
    tasks: int, megabytes: int, dtype: str, form: str, rounds: int, threads: int | None,
    work: Path, keep: bool,
) -> None:  # fmt: skip
    """Seconds of both, files in the page cache: a copy, a change of tasks, and a copy again."""
    place = prepared(work)
    whole = models.whole(place / models.folder_name(tasks, megabytes, 0, dtype))
    folder = models.ensure(place, tasks, megabytes, dtype=dtype)
    store = zoo(folder, tasks, form)
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=getattr(torch, dtype))
    state = model.state_dict()
    other = {name: tensor.clone() for name, tensor in state.items()}
    torch.set_num_threads(threads or torch.get_num_threads())

    def copy() -> None:
        for name, tensor in state.items():
            tensor.copy_(other[name])

    def timed(action: Callable[..., object], *given: object) -> tuple[float, float]:
        """Seconds by the clock, and of processors."""
        clock, processors = time.perf_counter(), time.process_time()
        action(*given)
        return time.perf_counter() - clock, time.process_time() - processors

    columns: dict[str, list[float]] = {key: [] for key in HEAD}
    try:
        live = tvb.attach(model, store)
        for name in live.tasks:  # into the cache, and compiled
            live.use(name)
        for number in range(rounds):
            before = timed(copy)
            ours = timed(live.use, live.tasks[number % tasks])
            after = timed(copy)
            found: list[float] = []
            for first, middle, last in zip(before, ours, after, strict=True):
                found += [(first + last) / 2, middle, 2 * middle / (first + last)]
            found += [timed(live.reset)[0], timed(tvb.attach, model, store)[0]]
            for key, value in zip(HEAD, found, strict=True):
                columns[key].append(value)
            tell(f"round {number + 1} of {rounds}: {found[2]:.2f}")
    finally:
        if not keep and not whole:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(store, ignore_errors=True)
    size = sum(tensor.nbytes for tensor in other.values()) / 1e9
    click.echo(
        f"A model of {size:.2f} GB in {dtype}, {tasks} tasks ({form}), "
        f"{torch.get_num_threads()} threads; medians.\n"
    )
    click.echo(table(HEAD, [[between(spread(columns[key])) for key in HEAD]], 0))


if __name__ == "__main__":
    main()
