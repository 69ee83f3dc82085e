#!/usr/bin/env python
"""Time whole commands in turn, ours and mergekit's own, and each stage of a pass alone.

    python evals/speed/device.py                       # on a GPU: 8 models of 1.3 GB, 9 minutes
    python evals/speed/device.py --device cpu --megabytes 800 --minutes 60 --only addition

Writes WORK/device.json after each measurement, and prints two tables. See README.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import models
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import tvb_mergekit
from tvb_mergekit.core.settings import resolve_settings
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.passes import PIECE, gram_pass
from tvb_mergekit.tensors.stream import Engine
from tvb_mergekit.tensors.taskset import match

Merge = tuple[str, dict[str, Any], dict[str, Any]]  # method, its keys, and those of each model
NONE, WUDI = {"basis": "none"}, {"basis": "none", "flow_time": 30}
BALANCED = {"basis": "balanced", "basis_ratio": 0.5, "lambda": 0.4, "lambda_scale": "tasks"}
THEIRS = {"lambda": 0.4, "normalize": False}
MERGES: dict[str, Merge] = {
    "addition": ("basis_ta", BALANCED, {}),
    "two passes": ("basis_ta", BALANCED | {"basis": "ae"}, {}),
    "TIES": ("basis_ties", BALANCED | {"lambda_scale": "bases", "density": 0.2}, {}),
    "Iso-C": ("basis_iso", BALANCED | {"lambda": 1.0}, {}),
    "WUDI": ("basis_wudi", WUDI, {}),
    "mergekit's task_arithmetic": ("task_arithmetic", THEIRS, {"weight": 1.0}),
    "mergekit's ties": ("ties", THEIRS, {"weight": 1.0, "density": 0.2}),
}
# Row -> the row that it is compared with, round by round
BESIDE = dict.fromkeys(("addition", "two passes"), "mergekit's task_arithmetic")
BESIDE |= {"TIES": "mergekit's ties", "merge of a lossless store": "merge of its models"}
ROWS = (*MERGES, "build of bases", "build, lossless", "merge of a lossless store",
        "merge of its models", "merge of adapters")  # fmt: skip
STARTS = ("start", "start of mergekit alone")
MERGEKIT = str(Path(sys.executable).parent / "mergekit-yaml")
TVB = [sys.executable, "-m", "tvb_mergekit"]
RANK = 16  # of adapters


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


def recipe(file: Path, base: Path, listed: Sequence[str], merge: Merge) -> Path:
    method, parameters, each = merge
    every = [{"model": name, "parameters": each} for name in listed]
    document = {"merge_method": method, "base_model": str(base), "models": every}
    file.write_text(yaml.safe_dump(document | {"parameters": parameters, "dtype": "bfloat16"}))
    return file


def commands(folder: Path, tasks: int, place: Path) -> Iterator[tuple[str, list[Any]]]:
    """Each row's title and its command without a device."""
    base, every = folder / "base", [str(folder / f"task-{number}") for number in range(tasks)]
    yield from ((title, [MERGEKIT, "--help"]) for title in STARTS)
    for title, merge in MERGES.items():
        file = recipe(place / f"{len(title)}.yml", base, every, merge)
        yield title, [MERGEKIT, file, place / "out", "--no-copy-tokenizer"]
    whole = recipe(place / "all.yml", base, every, ("basis_ta", NONE, {}))
    bases = recipe(place / "bases.yml", base, every, ("basis_ta", BALANCED, {}))
    yield "build of bases", [*TVB, "build", bases, place / "out"]
    yield "build, lossless", [*TVB, "build", whole, place / "out", "--lossless"]
    store = [place / "store", place / "out", "--method", "add"]
    yield "merge of a lossless store", [*TVB, "merge", *store]
    yield "merge of its models", [*TVB, "merge", whole, place / "out"]
    listed = adapters(base, place, tasks)
    lora = recipe(place / "lora.yml", base, listed, ("basis_wudi", WUDI, {}))
    yield "merge of adapters", [*TVB, "merge", lora, place / "out", "--lora"]


def adapters(base: Path, place: Path, tasks: int) -> list[str]:
    """Adapters of rank RANK on all matrices of the layers, of seeded noise."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    config = LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False)
    for number in range(tasks):
        torch.manual_seed(number)
        adapted = get_peft_model(model, config)
        adapted.save_pretrained(place / f"lora-{number}")
        model = adapted.unload()
    return [f"{base}+{place / f'lora-{number}'}" for number in range(tasks)]


def seconds(work: Callable[[], object], device: torch.device, rounds: int = 3) -> float:
    """The median time of some calls, after one that is not counted."""
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def stages(folder: Path, tasks: int, device: torch.device, place: Path) -> dict[str, float]:
    """GB/s of the stages of a pass in this process, memory, and differences from the CPU."""
    names = [f"task-{number}" for number in range(tasks)]
    base, *sources = (Checkpoint.open(folder / name) for name in ("base", *names))
    read, gpu = sum(each.nbytes for each in (base, *sources)) / 1e9, device.type == "cuda"
    settings = resolve_settings("basis_ta", NONE, names)
    items = match(base, sources, names, settings)[0].items
    buffer = torch.empty(4 * PIECE, dtype=torch.uint8, pin_memory=gpu)
    there, one = buffer.to(device), base.nbytes / 1e9

    def reading() -> None:
        for weights in (base, *sources):
            for name, info in weights.tensors.items():
                step = buffer.numel() // info.dtype.itemsize
                for start in range(0, info.numel, step):
                    stop = min(start + step, info.numel)
                    weights.read(name, start, stop, buffer.view(info.dtype)[: stop - start])

    def moved(source: Tensor, target: Tensor) -> float:
        gigabytes, count = buffer.numel() / 1e9, 64

        def work() -> None:
            for _ in range(count):
                target.copy_(source, non_blocking=True)

        return count * gigabytes / seconds(work, device)

    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    found = {
        "read, one thread": read / seconds(reading, device),
        "to device": moved(buffer, there),
        "from device": moved(there, buffer),
        "Gram pass": read / seconds(lambda: gram_pass(items, names, Engine(device)), device),
    }
    found["device memory, GB"] = torch.cuda.max_memory_allocated(device) / 1e9 if gpu else 0.0
    state = load_file(folder / "base/model.safetensors")
    found["write"] = one / seconds(lambda: save_file(state, place / "written"), device)
    mine, cpu = gram_pass(items, names, Engine(device)).gram, gram_pass(items, names).gram
    found["G, relative difference from the CPU"] = float((mine - cpu).norm() / cpu.norm())
    return found


def live(folder: Path, store: Path, device: torch.device) -> dict[str, float]:
    """Seconds of a change of tasks in a model on the device, and of the choice of a prompt's."""
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16).to(device)
    attached: Any = tvb_mergekit.attach(model, store)
    tasks, other = iter(4 * attached.tasks), {k: v.clone() for k, v in model.state_dict().items()}
    prompt = torch.randint(model.config.vocab_size, (1, 100), device=device)
    found = {
        "attach().use(), s": seconds(lambda: attached.use(next(tasks)), device),
        "attach().reset(), s": seconds(attached.reset, device),
        "a plain copy, s": seconds(lambda: model.load_state_dict(other), device),
        "a pass over 100 tokens, s": seconds(lambda: model(prompt), device),
    }
    attached.route()
    choose = attached.choose
    return found | {"choosing their task, s": seconds(lambda: choose(input_ids=prompt), device)}


def different(first: Path, second: Path) -> float:
    """The share of elements of two models that are not the same bits."""
    a, b = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    same = [int((a[name] == b[name]).sum()) for name in a]
    return 1 - sum(same) / sum(tensor.numel() for tensor in a.values())


@click.command(epilog="Example: python evals/speed/device.py --device cpu --megabytes 20")
@click.option("--device", default="cuda", show_default=True, help="On a GPU the CPU follows.")
@click.option("--work", type=click.Path(path_type=Path), default="speed-work", show_default=True,
              help="Folder of models, outputs and device.json.")  # fmt: skip
@click.option("--megabytes", default=1300, show_default=True, help="Size of each model, about.")
@click.option("--tasks", default=8, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--minutes", default=9.0, show_default=True, help="After these no command begins.")
@click.option("--only", multiple=True, type=click.Choice(ROWS), help="Rows; default: all.")
def main(
    device: str, work: Path, megabytes: int, tasks: int, rounds: int, minutes: float,
    only: tuple[str, ...],
) -> None:  # fmt: skip
    """Time merges on a device beside the CPU and beside mergekit's own methods there."""
    end, gpu = time.monotonic() + 60 * minutes, torch.device(device)
    wanted = {*STARTS, *only, *(BESIDE.get(row, row) for row in only)} if only else {*STARTS, *ROWS}
    folder = models.ensure(work.resolve(), tasks, megabytes)
    card = torch.cuda.get_device_name(gpu) if gpu.type == "cuda" else "CPU"
    result: dict[str, Any] = {"device": card, "megabytes": megabytes, "tasks": tasks, "seconds": {}}
    file = work / "device.json"
    with tempfile.TemporaryDirectory(dir=work.resolve(), prefix="run-") as run_folder:
        place = Path(run_folder)
        for weights in folder.glob("*/*.safetensors"):
            weights.read_bytes()  # into the page cache
        result["stages"] = {} if only else stages(folder, tasks, gpu, place)
        every = dict(commands(folder, tasks, place))
        if "merge of a lossless store" in wanted:
            run(every["build, lossless"], place, ours=True)
            (place / "out").rename(place / "store")
        if not only:
            result["live"] = live(folder, place / "store", gpu)
        kinds = dict.fromkeys((device, "cpu"))  # all rows on the device first
        for number, kind in ((n, k) for k in kinds for n in range(rounds + (k == device))):
            for title in (title for title in every if title in wanted):
                theirs = "mergekit" in title
                if time.monotonic() > end or (theirs and kind != device):
                    continue
                words = [] if title in STARTS else ["--device", kind]
                took, memory = run([*every[title], *words], place, not theirs)
                if number or kind != device:  # the first round is not counted
                    row = result["seconds"].setdefault(f"{title}, {kind}", [])
                    row.append([round(took, 2), round(memory)])
                if title == "addition" and not (place / kind).exists():
                    (place / "out").rename(place / kind)
                file.write_text(json.dumps(result, indent=1))
        if len(kinds) > 1 and all((place / kind).exists() for kind in kinds):
            result["weights unlike the CPU's"] = different(place / device, place / "cpu")
    file.write_text(json.dumps(result, indent=1))
    click.echo(table(result))


def table(result: dict[str, Any]) -> str:
    """Whole commands with the time net of the start, and the stages."""
    whole = {row: [took for took, _ in runs] for row, runs in result["seconds"].items()}
    lines = [
        f"{result['device']}, {result['tasks']} models of {result['megabytes']} MB", "",
        "| command | s | net of the start | RssAnon, MB | runs | over mergekit's, or the models | "
        "net |", "|---|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip

    def net(row: str) -> list[float]:
        title, _, kind = row.rpartition(", ")
        start = whole.get(f"{STARTS['mergekit' in title]}, {kind}", [])
        return [took - begun for took, begun in zip(whole[row], start, strict=False)]

    def ratio(ours: list[float], theirs: list[float]) -> str:
        found = [one / other for one, other in zip(ours, theirs, strict=False)]
        if not found:
            return ""
        return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"

    for row, runs in result["seconds"].items():
        title, _, kind = row.rpartition(", ")
        other, ratios = f"{BESIDE.get(title)}, {kind}", ["", ""]
        if other in whole:
            ratios = [ratio(whole[row], whole[other]), ratio(net(row), net(other))]
        middle, memory = statistics.median(whole[row]), max(memory for _, memory in runs)
        beyond = f"{statistics.median(net(row)):.1f}" if net(row) else ""
        lines.append(f"| {row} | {middle:.1f} | {beyond} | {memory} | {len(runs)} | "
                     f"{' | '.join(ratios)} |")  # fmt: skip
    rest = {**result["stages"], **result.get("live", {})}
    lines += ["", "| stage | GB/s, or as named |", "|---|--:|"] if rest else []
    return "\n".join([*lines, *(f"| {name} | {value:.3g} |" for name, value in rest.items())])


if __name__ == "__main__":
    sys.exit(main())
