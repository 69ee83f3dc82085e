#!/usr/bin/env python
"""Time merges on a GPU: whole commands, and each stage of a pass alone.

    python evals/speed/device.py                                     # 8 models of 1.3 GB, 9 minutes
    python evals/speed/device.py --device cpu --megabytes 20 --minutes 3

Writes OUT/device.json after each measurement, and prints one table. See README.md.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import models
import torch
from compare import AE, BALANCED, MERGEKIT, THEIRS, TIES, TVB, recipe, run
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import tvb_mergekit
from tvb_mergekit.core.settings import resolve_settings
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.passes import PIECE, gram_pass
from tvb_mergekit.tensors.stream import Engine
from tvb_mergekit.tensors.taskset import match

NONE = {"basis": "none"}
# Row -> method, parameters of the merge, those of each model. mergekit's own stand last.
MERGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "addition": ("basis_ta", BALANCED, {}),
    "two passes": ("basis_ta", AE, {}),
    "TIES": ("basis_ties", TIES, {}),
    "Iso-C": ("basis_iso", BALANCED | {"lambda": 1.0}, {}),
    "WUDI": ("basis_wudi", NONE | {"flow_time": 30}, {}),
    "mergekit's task_arithmetic": ("task_arithmetic", THEIRS, {"weight": 1.0}),
    "mergekit's ties": ("ties", THEIRS, {"weight": 1.0, "density": 0.2}),
}
RANK = 16


def commands(folder: Path, tasks: int, place: Path) -> Iterator[tuple[str, list[Any], bool]]:
    """Each row's title, its command without a device, and whether the package is on."""
    yield "start", [MERGEKIT, "--help"], True
    yield "start of mergekit alone", [MERGEKIT, "--help"], False
    for title, merge in MERGES.items():
        file, ours = recipe(place / f"{len(title)}.yml", folder, tasks, merge), merge in OURS
        yield title, [MERGEKIT, file, place / "out", "--no-copy-tokenizer"], ours
    every = recipe(place / "all.yml", folder, tasks, ("basis_ta", NONE, {}))
    bases = recipe(place / "bases.yml", folder, tasks, ("basis_ta", BALANCED, {}))
    yield "build of bases", [*TVB, "build", bases, place / "out"], True
    yield "build, lossless", [*TVB, "build", every, place / "out", "--lossless"], True
    for number in range(tasks):
        adapter(folder / "base", place / f"lora-{number}", number)
    listed = [f"{folder / 'base'}+{place / f'lora-{number}'}" for number in range(tasks)]
    words = "\n".join(f"  - model: {name}" for name in listed)
    (place / "lora.yml").write_text(
        f"merge_method: basis_wudi\nbase_model: {folder / 'base'}\nmodels:\n{words}\n"
        "parameters: {basis: none, flow_time: 30}\ndtype: bfloat16\n"
    )
    yield "merge of adapters", [*TVB, "merge", place / "lora.yml", place / "out", "--lora"], True


OURS = [merge for merge in MERGES.values() if merge[0].startswith("basis_")]


def adapter(base: Path, folder: Path, seed: int) -> None:
    """An adapter of rank RANK on all matrices of the layers, of seeded noise."""
    random, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, info in Checkpoint.open(base).tensors.items():
        if len(info.shape) == 2 and ".layers." in name:
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            for part, shape in (("A", (RANK, info.shape[1])), ("B", (info.shape[0], RANK))):
                tensors[f"{stem}.lora_{part}.weight"] = 1e-2 * torch.randn(shape, generator=random)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    given = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    given["target_modules"] = sorted({name.split(".")[-3] for name in tensors})
    (folder / "adapter_config.json").write_text(json.dumps(given))


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
        "a plain copy, s": seconds(lambda: model.load_state_dict(other), device),
        "a pass over 100 tokens, s": seconds(lambda: model(prompt), device),
    }
    attached.reset()
    attached.route()
    choose = attached.router.choose
    return found | {"choosing their task, s": seconds(lambda: choose(input_ids=prompt), device)}


def different(first: Path, second: Path) -> float:
    """The share of elements of two models that are not the same bits."""
    a, b = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    same = [int((a[name] == b[name]).sum()) for name in a]
    return 1 - sum(same) / sum(tensor.numel() for tensor in a.values())


@click.command(epilog="Example: python evals/speed/device.py --device cpu --megabytes 20")
@click.option("--device", default="cuda", show_default=True)
@click.option("--work", type=click.Path(path_type=Path), default="speed-work", show_default=True,
              help="Folder of models, outputs and device.json.")  # fmt: skip
@click.option("--megabytes", default=1300, show_default=True, help="Size of each model, about.")
@click.option("--tasks", default=8, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--minutes", default=9.0, show_default=True, help="After these no command begins.")
def main(device: str, work: Path, megabytes: int, tasks: int, rounds: int, minutes: float) -> None:
    """Time merges on a device beside the CPU and beside mergekit's own methods there."""
    end, gpu = time.monotonic() + 60 * minutes, torch.device(device)
    folder = models.ensure(work.resolve(), tasks, megabytes)
    card = torch.cuda.get_device_name(gpu) if gpu.type == "cuda" else "CPU"
    result: dict[str, Any] = {"device": card, "megabytes": megabytes, "tasks": tasks, "seconds": {}}
    file = work / "device.json"
    with tempfile.TemporaryDirectory(dir=work.resolve(), prefix="run-") as run_folder:
        place = Path(run_folder)
        for weights in folder.glob("*/*.safetensors"):
            weights.read_bytes()  # into the page cache
        result["stages"] = stages(folder, tasks, gpu, place)
        every = list(commands(folder, tasks, place))
        kinds = dict.fromkeys((device, "cpu"))  # all rows on the device first
        for number, kind in ((n, k) for k in kinds for n in range(rounds + (k == device))):
            for title, command, ours in every:
                if time.monotonic() > end or (title.startswith("mergekit's") and kind != device):
                    continue
                words = [] if "start" in title else ["--device", kind]
                took, memory = run([*command, *words], place, ours)
                if number or kind != device:  # the first round is not counted
                    row = result["seconds"].setdefault(f"{title}, {kind}", [])
                    row.append([round(took, 2), round(memory)])
                if title == "addition" and not (place / kind).exists():
                    (place / "out").rename(place / kind)
                if title == "build, lossless" and "live" not in result:
                    result["live"] = live(folder, place / "out", gpu)
                file.write_text(json.dumps(result, indent=1))
        if len(kinds) > 1 and all((place / kind).exists() for kind in kinds):
            result["weights unlike the CPU's"] = different(place / device, place / "cpu")
    file.write_text(json.dumps(result, indent=1))
    click.echo(table(result))


def table(result: dict[str, Any]) -> str:
    """Whole commands with the time net of the start, and the stages."""
    middle = {
        title: statistics.median(t for t, _ in runs) for title, runs in result["seconds"].items()
    }
    lines = [
        f"{result['device']}, {result['tasks']} models of {result['megabytes']} MB", "",
        "| command | s | net of the start | RssAnon, MB | runs |", "|---|--:|--:|--:|--:|",
    ]  # fmt: skip
    for title, took in middle.items():
        kind, runs = title.rpartition(", ")[2], result["seconds"][title]
        begin = "start of mergekit alone" if title.startswith("mergekit's") else "start"
        net = took - middle.get(f"{begin}, {kind}", took)
        lines.append(
            f"| {title} | {took:.1f} | {net:.1f} | {max(m for _, m in runs)} | {len(runs)} |"
        )
    rest = {**result["stages"], **result.get("live", {})}
    lines += ["", "| stage | GB/s, or as named |", "|---|--:|"]
    return "\n".join([*lines, *(f"| {name} | {value:.3g} |" for name, value in rest.items())])


if __name__ == "__main__":
    sys.exit(main())
