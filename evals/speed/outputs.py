#!/usr/bin/env python
"""Do two versions of the package write the same models? Every recipe, codec, addition and method.

    python evals/speed/outputs.py write OUT           # by the version that is installed
    python evals/speed/outputs.py compare OUT OTHER   # relative to the change from the base
    python evals/speed/outputs.py pair WORK BEFORE/bin NOW/bin   # seconds of commands, in turns

All commands run on the quickstart models. Stores are compared by their exports, since the format
may change between versions.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import click
import models
import yaml
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
MODELS, EVAL = ROOT / "recipes/quickstart/models", ROOT / "recipes/quickstart/eval/data"
TASKS = ("copy", "reverse", "sort", "upper", "shift", "max", "double", "sum")
ADDED = (*TASKS, *(f"{task}-again" for task in TASKS[:2]))

METHODS = {
    "ta": "basis_ta", "ties": "basis_ties", "iso": "basis_iso", "tsvm": "basis_tsvm",
    "wudi": "basis_wudi",
}  # fmt: skip
BASES = ("ae", "balanced", "linear_ae", "pca", "rand_select", "none")
STORES = {
    "balanced": ("--dtype", "float32"), "half": ("--dtype", "bfloat16"), "codes": ("--bits", "2"),
    "mixed": ("--bits", "1.5"),
}  # fmt: skip
LEARNED = ("fisher", "regmean", "localize", "adamerging", "atlas")


def commands() -> Iterator[tuple[str, str]]:
    """Name of an output folder, or of a step in between, and the command that makes it."""
    for recipe in ("", "-ae", "-ties", "-iso", "-forget"):
        yield f"recipe{recipe}", f"mergekit-yaml {ROOT}/recipes/quickstart{recipe}.yml {{}}"
    for how in METHODS:
        for basis in BASES:
            yield f"{how}-{basis}", f"tvb merge {how}-{basis}.yml {{}} --quiet"
    yield "negate-rand_proj", "tvb merge negate-rand_proj.yml {} --quiet"
    for name, words in STORES.items():
        recipe = "plain" if "--bits" in words else "ta-balanced"
        yield f"store-{name}", f"tvb build {recipe}.yml {{}} {' '.join(words)} --quiet"
        yield f"exports-{name}", f"tvb export store-{name} --all {{}} --quiet"
        yield f"ties-over-{name}", f"tvb merge store-{name} {{}} --method ties --quiet"
    for task in ADDED:
        model, again = MODELS / task.removesuffix("-again"), f"--task {task} --budget 4"
        base = f"--base {MODELS}/base --compress ae" if task == ADDED[0] else ""
        yield f"add-{task}", f"tvb add grown {model} {again} {base} --quiet"
    yield "exports-grown", "tvb export grown --all {} --quiet"
    data = " ".join(f"--data {task}={task}.jsonl" for task in TASKS)
    for method in LEARNED:
        few = "" if method in ("fisher", "regmean") else "--epochs 1"
        words = f"ta-balanced.yml {method} {data} --out {{}} {few} --quiet"
        yield f"learn-{method}", f"tvb learn {words}"


def recipe(method: str, basis: str | None) -> str:
    parameters = {"basis": basis, "num_bases": 8 if basis == "none" else 4} if basis else {}
    if method == "basis_negate":
        parameters |= {"forget": "sum", "alpha": 1.0}
    models = [{"model": f"{MODELS}/{task}"} for task in TASKS]
    made = {"merge_method": method, "base_model": f"{MODELS}/base", "models": models}
    return yaml.safe_dump({**made, "dtype": "float32", "parameters": parameters})


@click.group()
def main() -> None:
    """Models of one version of the package, and how they differ from those of another."""


@main.command()
@click.argument("out", type=click.Path(path_type=Path))
def write(out: Path) -> None:
    """Run every command into OUT; what is there stays."""
    out.mkdir(parents=True, exist_ok=True)
    for how, method in METHODS.items():
        for basis in BASES:
            (out / f"{how}-{basis}.yml").write_text(recipe(method, basis))
    (out / "negate-rand_proj.yml").write_text(recipe("basis_negate", "rand_proj"))
    (out / "plain.yml").write_text(recipe("basis_ta", None))
    for task in TASKS:
        items = (EVAL / f"{task}.val.jsonl").read_text(encoding="utf-8")
        (out / f"{task}.jsonl").write_text(items.replace('"answer"', '"response"'))
    env = os.environ | {"TVB_MERGEKIT_CACHE": "off", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name, command in commands():
        done = out / f"{name}.done"
        if not done.exists():
            words = command.format(out.resolve() / name).split()
            cwd = ROOT if name.startswith("recipe") else out
            said = subprocess.run(words, cwd=cwd, env=env, stderr=subprocess.PIPE, text=True)
            if said.returncode:
                raise SystemExit(f"{command}\n{said.stderr}")
            done.touch()
            click.echo(name)


@main.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path))
def compare(out: Path, other: Path) -> None:
    """Print ||theta - theta'|| / ||theta - theta_0|| of each model that differs in OTHER."""
    base = load_file(MODELS / "base/model.safetensors")
    found = dict[Path, float]()
    for file in sorted(out.glob("**/model.safetensors")):
        place = file.relative_to(out)
        if place.parts[0].startswith("store-") or place.parts[0] == "grown":
            continue
        one, two = load_file(file), load_file(other / place)
        off = sum(float((t.double() - two[n].double()).square().sum()) for n, t in one.items())
        moved = sum(float((t.double() - base[n].double()).square().sum()) for n, t in one.items())
        found[place.parent] = (off / moved) ** 0.5
        if off:
            click.echo(f"{found[place.parent]:.1e}  {place.parent}")
    largest = max(found.values(), default=0.0)
    click.echo(f"{len(found)} models, the largest difference {largest:.1e}")


@main.command()
@click.argument("work", type=click.Path(path_type=Path))
@click.argument("before")
@click.argument("now")
def pair(work: Path, before: str, now: str) -> None:
    """Time commands of two installed versions in turns, on 6 models of 300 MB in WORK."""
    place = models.ensure(work.resolve(), 6, 300)
    listed = [{"model": f"{place}/task-{k}"} for k in range(6)]
    parameters = {"basis": "ae", "num_bases": 3, "solver": "exact"}
    made = {"base_model": f"{place}/base", "models": listed, "parameters": parameters}
    env = os.environ | {"TVB_MERGEKIT_CACHE": "off", "HF_HUB_OFFLINE": "1"}
    for words in ("tvb merge ta", "tvb merge ties", "mergekit-yaml ta", "tvb build ta"):
        *command, how = words.split()
        (work / "r.yml").write_text(yaml.safe_dump({"merge_method": METHODS[how], **made}))
        seconds: dict[str, list[float]] = {before: [], now: []}
        for turn in range(5):
            for version in (before, now) if turn % 2 else (now, before):
                shutil.rmtree(work / "out", ignore_errors=True)
                run = [f"{version}/{command[0]}", *command[1:], "r.yml", "out", "--quiet"]
                start = time.perf_counter()
                subprocess.run(run, cwd=work, env=env, check=True, capture_output=True)
                seconds[version].append(time.perf_counter() - start)
        ratios = [b / a for a, b in list(zip(*seconds.values(), strict=True))[1:]]  # one warms up
        click.echo(f"{words}: {statistics.median(ratios):.3f} of the time")


if __name__ == "__main__":
    main()
