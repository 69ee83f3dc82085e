"""Whole merge commands, ours against mergekit's own, in pairs: see README.md."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import measure
import models
import yaml
from tables import Row, render, summarize

PACKAGES = ("tvb-mergekit", "mergekit", "torch", "transformers", "safetensors", "numpy")


# `tvb --help` imports nothing that takes time.
TVB_IMPORTS = [sys.executable, "-c", "import tvb_mergekit.__main__, tvb_mergekit.plugin.run"]


@dataclass(frozen=True)
class Merge:
    """One merge method with its settings."""

    method: str
    parameters: dict[str, Any]
    per_model: dict[str, Any]
    engine: bool = False  # by `tvb merge` instead of `mergekit-yaml`

    @property
    def ours(self) -> bool:
        return self.method.startswith("basis_")

    @property
    def kind(self) -> str:
        """The command that is started."""
        return "tvb" if self.engine else "ours" if self.ours else "mergekit"

    def recipe(self, base: Path, tasks: Sequence[Path], dtype: str = "bfloat16") -> str:
        more = {"parameters": self.per_model} if self.per_model else {}
        models = [{"model": str(path), **more} for path in tasks]
        document = {"merge_method": self.method, "base_model": str(base), "models": models}
        document |= {"parameters": self.parameters, "dtype": dtype}
        return yaml.safe_dump(document, sort_keys=False)


def ours(method: str, engine: bool = False, **more: Any) -> Merge:
    balanced = {"basis": "balanced", "basis_ratio": 0.5, "lambda": 0.4}
    return Merge(method, {**balanced, **more}, {}, engine)


ADD = {"lambda_scale": "tasks"}  # then a balanced basis gives task arithmetic's own result
TASK_ARITHMETIC = Merge("task_arithmetic", {"lambda": 0.4, "normalize": False}, {"weight": 1.0})
TIES = Merge("ties", {"lambda": 0.4, "normalize": False}, {"weight": 1.0, "density": 0.2})
PAIRS = {
    "addition": (ours("basis_ta", **ADD), TASK_ARITHMETIC),
    "tvb": (ours("basis_ta", engine=True, **ADD), TASK_ARITHMETIC),
    "two passes": (ours("basis_ta", basis="ae"), TASK_ARITHMETIC),
    "ties": (ours("basis_ties", density=0.2), TIES),
}


def shared(megabytes: int, rounds: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of all benchmarks; their defaults."""
    options = (
        click.option("--keep", is_flag=True, help="Keep the generated models for the next time."),
        click.option("--work", type=click.Path(path_type=Path), default="speed-work",
                     show_default=True, help="Folder for models, outputs and results."),
        click.option("--threads", type=click.IntRange(1), help="Threads; PyTorch's by default."),
        click.option("--rounds", type=click.IntRange(1), default=rounds, show_default=True),
        click.option("--megabytes", type=click.IntRange(1), default=megabytes, show_default=True,
                     help="Size of each model, about."),
        click.option("--tasks", type=click.IntRange(2), default=8, show_default=True),
    )  # fmt: skip

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in options:
            command = option(command)
        return command

    return decorate


def prepared(work: Path) -> Path:
    """The folder of --work, made, and never to be committed."""
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    (work / ".gitignore").write_text("*\n")
    return work


class Bench:
    """The inputs, the environment of the children, and the rows measured so far."""

    def __init__(self, inputs: Path, run: Path, tasks: int, threads: int | None) -> None:
        self.base = inputs / "base"
        self.tasks = [inputs / f"task-{index}" for index in range(tasks)]
        folders = (self.base, *self.tasks)
        self.files = [file for path in folders for file in path.glob("*.safetensors")]
        self.input_bytes = sum(file.stat().st_size for file in self.files)
        imports = [script("mergekit-yaml"), "--help"]
        self.about_to_start = {"ours": imports, "tvb": TVB_IMPORTS, "mergekit": imports}
        self.run_folder = run
        self.rows: list[Row] = []
        self.start_up = dict.fromkeys(self.about_to_start, 0.0)  # of this round
        self.env = measure.environment()
        if threads:
            self.env["OMP_NUM_THREADS"] = str(threads)

    def environment(self, ours: bool) -> dict[str, str]:
        # mergekit without this package, its imports included
        return self.env if ours else {**self.env, "TVB_MERGEKIT_DISABLE": "1"}

    def measured(self, command: Sequence[str], env: dict[str, str], state: str | None) -> Row:
        """Run one command with its inputs in the page cache, out of it, or (None) as they are."""
        if state == "cold":
            os.sync()  # a dirty page cannot be dropped
            measure.evict(self.files)
        elif state == "warm" and measure.resident(self.files) < 1:
            measure.warm(self.files)
        os.sync()  # nor may the last command's output be written during this one
        held = measure.resident(self.files) if state else None
        usage = measure.run(command, env, self.run_folder / "log")
        return {"cache": state, "resident_before": held, **asdict(usage)}

    def note_start_up(self, about: Row) -> None:
        """Each kind of command up to the end of its imports."""
        for kind, command in self.about_to_start.items():
            row = self.measured(command, self.environment(kind != "mergekit"), None)
            self.start_up[kind] = row["wall_s"]
            self.rows.append({**about, "what": "start-up", "kind": kind, **row})

    def merge(self, about: Row, merge: Merge, state: str | None) -> Row:
        recipe, out = self.run_folder / "recipe.yml", self.run_folder / "out"
        recipe.write_text(merge.recipe(self.base, self.tasks))
        command = [script("tvb"), "merge"] if merge.engine else [script("mergekit-yaml")]
        command += [str(recipe), str(out), "--no-copy-tokenizer"]
        env = self.environment(merge.ours)
        try:
            row = {**about, "what": "merge", "method": merge.method, "ours": merge.ours}
            row |= self.measured(command, env, state)
            row["net_s"] = row["wall_s"] - self.start_up[merge.kind]
            row["output_mb"] = size_of(out.glob("*.safetensors"))
            if merge.ours:
                facts = json.loads((out / "basis" / "basis.json").read_text())
                row["phases"] = facts["seconds"]
        finally:
            shutil.rmtree(out, ignore_errors=True)
        return row

    def pair(self, about: Row, name: str, state: str) -> None:
        pair = [self.merge({**about, "pair": name}, merge, state) for merge in PAIRS[name]]
        a, b = pair
        if abs(a["output_mb"] - b["output_mb"]) > 0.01 * b["output_mb"] + 0.1:
            raise click.ClickException(f"{name}: the two commands wrote models of different sizes")
        self.rows += pair
        tell(f"  {name}, {state}: ours {a['wall_s']:.1f} s, mergekit's {b['wall_s']:.1f} s")


def size_of(files: Iterable[Path]) -> float:
    return sum(file.stat().st_size for file in files) / measure.MB


def script(name: str) -> str:
    """A command of the environment that runs this."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise click.ClickException(f"no {name} beside {sys.executable}: install tvb-mergekit there")
    return str(path)


def tell(text: str) -> None:
    click.echo(text, err=True)


def machine() -> Row:
    names = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in names if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu or platform.machine(), "cores": len(os.sched_getaffinity(0)),
        "ram_gb": round(memory / 1e9, 1), "kernel": platform.release(),
        "python": platform.python_version(), "load_before": os.getloadavg()[0],
        "packages": {name: version(name) for name in PACKAGES}, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def save(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".part")
    beside.write_text(text)
    os.replace(beside, path)


def benchmark(
    name: str, settings: Row, work: Path, keep: bool, each: Callable[[Bench, Row], None]
) -> None:
    """Run `each` once a round, and rewrite NAME.json and NAME.md in `work` after each round."""
    if sys.platform != "linux":
        raise click.ClickException("this needs Linux: /proc, posix_fadvise and mincore")
    facts = machine()
    if (load := facts["load_before"]) > 0.3:
        tell(f"warning: other work is running (load {load:.1f}); times will mislead")
    work, tasks, megabytes = prepared(work), settings["tasks"], settings["megabytes"]
    inputs = work / models.folder_name(tasks, megabytes, settings["seed"])
    found = models.whole(inputs)
    if (tasks + 3) * megabytes > shutil.disk_usage(work).free / measure.MB and not found:
        raise click.ClickException(f"{work} has no room for {tasks + 3} x {megabytes} MB")
    try:
        models.ensure(work, tasks, megabytes, settings["seed"])
        with tempfile.TemporaryDirectory(dir=work, prefix="run-") as run:
            bench = Bench(inputs, Path(run), tasks, settings["threads"])
            settings["input_bytes"] = bench.input_bytes
            if 2 * bench.input_bytes > facts["ram_gb"] * 1e9:
                tell("warning: the models fill half of the memory; they may not stay cached")
            for number in range(-settings["warm_up"], settings["rounds"]):
                tell(f"round {number + 1} of {settings['rounds']}" if number >= 0 else "warm-up")
                about = {"round": number, "counted": number >= 0}
                bench.note_start_up(about)
                each(bench, about)
                if number >= 0:
                    summary = summarize(bench.rows)
                    result = {"format_version": 1, "machine": facts, "settings": settings}
                    result |= {**summary, "runs": bench.rows}
                    text = json.dumps(result, indent=1, allow_nan=False)
                    save(work / f"{name}.json", text)
                    save(work / f"{name}.md", render(summary, settings))
        click.echo((work / f"{name}.md").read_text())
        doubts(bench.rows)
    except measure.CommandFailed as error:
        raise click.ClickException(str(error)) from error
    finally:
        if not keep and not found:
            shutil.rmtree(inputs, ignore_errors=True)


@click.command(epilog="Example: python evals/speed/compare.py --only addition --rounds 3 --keep")
@click.option("--only", multiple=True, type=click.Choice([*PAIRS]), help="Pairs; default: all.")
@click.option("--cache", type=click.Choice(["both", "warm", "cold"]), default="both",
              show_default=True, help="State of the inputs in the page cache.")  # fmt: skip
@click.option("--seed", default=0, show_default=True)
@click.option("--warm-up", type=click.IntRange(0), default=1, show_default=True,
              help="Rounds before the others, not counted.")  # fmt: skip
@shared(megabytes=500, rounds=5)
def main(only: tuple[str, ...], cache: str, work: Path, keep: bool, **settings: Any) -> None:
    """Time whole mergekit-yaml commands, ours and mergekit's own in turn, and print the ratios."""
    script("mergekit-yaml")
    names = only or tuple(PAIRS)

    def each(bench: Bench, about: Row) -> None:
        for state in ["warm", "cold"] if cache == "both" else [cache]:
            for name in names:
                bench.pair(about, name, state)

    benchmark("results", settings, work, keep, each)


def doubts(rows: Sequence[Row]) -> None:
    """Say which runs were not what they were meant to be."""
    counted = [row for row in rows if row["counted"]]
    cold = [row for row in counted if row["cache"] == "cold" and row["resident_before"] > 0.01]
    warm = [row for row in counted if row["cache"] == "warm" and row["resident_before"] < 0.99]
    busy = [row for row in counted if row["others_cpu_s"] > 0.1 * row["wall_s"]]
    for found, what in (
        (cold, "began with inputs in the page cache though they should be cold"),
        (warm, "began without all inputs in the page cache though they should be warm"),
        (busy, "shared the processors with other work (more than 0.1 CPUs)"),
    ):
        if found:
            tell(f"warning: {len(found)} of {len(counted)} counted runs {what}")


if __name__ == "__main__":
    main()
