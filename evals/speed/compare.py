#!/usr/bin/env python
"""Time whole commands in turn, ours and mergekit's own, and stores against models.

    python evals/speed/compare.py                      # 8 models of 0.5 GB, about 20 minutes
    python evals/speed/compare.py --work DIR --keep --megabytes 800 --only addition

See README.md. Linux only, on the CPU. Let nothing else run.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import models
import torch
import yaml
from transformers import AutoModelForCausalLM

import tvb_mergekit

BALANCED = {"basis": "balanced", "basis_ratio": 0.5, "lambda": 0.4, "lambda_scale": "tasks"}
AE, TIES = BALANCED | {"basis": "ae"}, BALANCED | {"lambda_scale": "bases", "density": 0.2}
THEIRS = {"lambda": 0.4, "normalize": False}
# Two merges each, ours first: method, parameters, and those of each model
PAIRS: dict[str, Sequence[tuple[str, Any, Any]]] = {
    "addition": [("basis_ta", BALANCED, {}), ("task_arithmetic", THEIRS, {"weight": 1.0})],
    "two passes": [("basis_ta", AE, {}), ("task_arithmetic", THEIRS, {"weight": 1.0})],
    "ties": [("basis_ties", TIES, {}), ("ties", THEIRS, {"weight": 1.0, "density": 0.2})],
}
MERGEKIT = str(Path(sys.executable).parent / "mergekit-yaml")
TVB = [sys.executable, "-m", "tvb_mergekit"]
HEAD = """\
| command | whole, s | net, s | RssAnon, MB | ratio, whole | ratio, net |
|---|---:|---:|---:|---:|---:|
"""


class Timed(NamedTuple):
    """A command, and another that is the same up to the end of its imports."""

    title: str
    command: Sequence[str | Path]
    start: Sequence[str | Path]
    ours: bool = True


def run(command: Sequence[str | Path], work: Path, ours: bool) -> tuple[float, float]:
    """Run a command, without this package unless it is ours: seconds, and MB that the kernel cannot
    reclaim (RssAnon) at the most."""
    env = os.environ | {"HF_HUB_OFFLINE": "1"} | ({} if ours else {"TVB_MERGEKIT_DISABLE": "1"})
    shutil.rmtree(work / "out", ignore_errors=True)
    os.sync()  # the last command's output must not be written during this one
    peak, log = 0, work / "log"
    with log.open("wb") as file:
        began = time.perf_counter()
        child = subprocess.Popen([*map(str, command)], env=env, stdout=file, stderr=file)
        while child.poll() is None:
            status = Path(f"/proc/{child.pid}/status").read_text()
            found = re.search(r"RssAnon:\s*(\d+) kB", status)
            peak = max(peak, int(found[1]) if found else 0)
            time.sleep(0.01)  # a shorter peak of memory may be missed
    if child.returncode:
        raise click.ClickException(f"{' '.join(map(str, command))}:\n{log.read_text()[-2000:]}")
    return time.perf_counter() - began, peak * 1024 / 1e6


def recipe(file: Path, folder: Path, tasks: int, merge: tuple[str, Any, Any]) -> Path:
    method, parameters, each = merge
    listed = [{"model": str(folder / f"task-{n}"), "parameters": each} for n in range(tasks)]
    document = {"merge_method": method, "base_model": str(folder / "base"), "models": listed}
    file.write_text(yaml.safe_dump(document | {"parameters": parameters, "dtype": "bfloat16"}))
    return file


def compared(pair: Sequence[Timed], rounds: int, work: Path) -> str:
    """Run two commands in turn: a row for each, and their ratios, taken round by round.

    Both and their starts run once before, which is not counted.
    """
    usages, nets = [list[tuple[float, float]]() for _ in pair], [list[float]() for _ in pair]
    for number in range(rounds + 1):
        for place, timed in enumerate(pair):
            start, _ = run(timed.start, work, timed.ours)
            whole, memory = run(timed.command, work, timed.ours)
            click.echo(f"  {timed.title}: {whole:.1f} s", err=True)
            if number:
                usages[place].append((whole, memory))
                nets[place].append(whole - start)
    text = ""
    for timed, found, net in zip(pair, usages, nets, strict=True):
        all_s, memory = (statistics.median(each) for each in zip(*found, strict=True))
        net_s = statistics.median(net)
        text += f"| {timed.title} | {all_s:.1f} | {net_s:.1f} | {memory:.0f} | | |\n"
    ratios = [a[0] / b[0] for a, b in zip(*usages, strict=True)]
    net_ratios = [a / b for a, b in zip(*nets, strict=True)]
    return text + f"| the first over the second | | | | {shown(ratios)} | {shown(net_ratios)} |\n"


def shown(values: Sequence[float], form: str = ".2f") -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def switching(store: Path, base: Path, rounds: int) -> str:
    """A change of tasks in a live model, next to a plain copy of all weights."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    other = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    numel = sum(tensor.numel() for tensor in other.values())
    live: Any = tvb_mergekit.attach(model, store)

    def seconds(work: Callable[..., object], *given: Any) -> float:
        began = time.perf_counter()
        work(*given)
        return time.perf_counter() - began

    text = ""
    for threads in (torch.get_num_threads(), 1):
        torch.set_num_threads(threads)
        for task in live.tasks:
            live.use(task)  # into the page cache
        times = [
            (seconds(live.use, task), seconds(live.reset), seconds(model.load_state_dict, other))
            for task in (rounds * live.tasks)[: max(rounds, 3)]
        ]
        use, reset, copy = zip(*times, strict=True)
        rate = [numel / 1e6 / max(u - r, 1e-3) for u, r in zip(use, reset, strict=True)]
        text += (
            f"A change of tasks, {threads} threads: {shown(use)} s; `reset` {shown(reset)} s; a "
            f"plain copy {shown(copy)} s; decoding, a change less a reset, {shown(rate, '.0f')} "
            "million parameters a second.\n"
        )
    return text


@click.command(epilog="Example: python evals/speed/compare.py --only addition --rounds 3 --keep")
@click.option("--work", type=click.Path(path_type=Path), default="speed-work", show_default=True,
              help="Folder of models, outputs and results.md.")  # fmt: skip
@click.option("--keep", is_flag=True, help="Keep the generated models for the next time.")
@click.option("--megabytes", default=500, show_default=True, help="Size of each model, about.")
@click.option("--tasks", default=8, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--only", multiple=True, type=click.Choice([*PAIRS, "store"]), help="Default: all.")
def main(
    work: Path, keep: bool, megabytes: int, tasks: int, rounds: int, only: tuple[str, ...]
) -> None:
    """Time whole commands, ours and mergekit's own in turn, and stores against models."""
    before = {path.name for path in work.glob("*")}
    folder = models.ensure(work.resolve(), tasks, megabytes)
    with tempfile.TemporaryDirectory(dir=work.resolve(), prefix="run-") as run_folder:
        place = Path(run_folder)
        for file in folder.glob("*/*.safetensors"):
            file.read_bytes()  # into the page cache
        text = f"{tasks} models of {megabytes} MB, in the page cache; {rounds} rounds.\n\n{HEAD}"
        after = ""
        for name in [name for name in PAIRS if not only or name in only]:
            pair = []
            for merge in PAIRS[name]:
                file, ours = place / f"{merge[0]}.yml", merge[0].startswith("basis_")
                given = recipe(file, folder, tasks, merge)
                words = [MERGEKIT, given, place / "out", "--no-copy-tokenizer"]
                pair.append(Timed(f"`{merge[0]}` ({name})", words, [MERGEKIT, "--help"], ours))
            text += compared(pair, rounds, place)
        if not only or "store" in only:
            every = recipe(place / "all.yml", folder, tasks, ("basis_ta", {"basis": "none"}, {}))
            store, imports = (
                place / "store",
                [sys.executable, "-c", "import tvb_mergekit.plugin.run"],
            )
            seconds, _ = run([*TVB, "build", every, store, "--lossless"], place, ours=True)
            commands = {"a lossless store": [store, place / "out", "--method", "add"],
                        "its models": [every, place / "out"]}  # fmt: skip
            pair = [Timed(f"`tvb merge` of {title}", [*TVB, "merge", *words], imports)
                    for title, words in commands.items()]  # fmt: skip
            text += compared(pair, rounds, place)
            size = sum(file.stat().st_size for file in store.rglob("*.safetensors")) / 1e6
            after = f"\n`tvb build --lossless` took {seconds:.1f} s; the store has {size:.0f} MB.\n"
            after += switching(store, folder / "base", rounds)
    (work / "results.md").write_text(text + after)
    click.echo(text + after)
    if not keep and folder.name not in before:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
