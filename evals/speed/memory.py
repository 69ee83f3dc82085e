"""Time and memory of `tvb build` over the number of tasks, under a budget: see SCALING.md.

The models are put together from a few versions of files (hard links: `models.py --versions`), so
that 72 of them take the disk of a few, and the page cache holds them all. Runs that are in
`memory.json` already are not repeated. Let nothing else run.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import click
import measure
import models
from compare import Bench, machine, prepared, save, shared, tell
from tables import Row, table

KEY = ("models", "memory", "bases", "threads", "tasks")  # of a group of rounds; one of runs: round


def held(row: Row, form: str) -> float:
    """MB of float32 that the paper's procedure holds: `authors_procedure.py` says how."""
    vectors = {"dicts": row["tasks"] + row["bases"] + 1, "matrix": 2 * row["tasks"] + 1}[form]
    return 4.0 * row["num_parameters"] * vectors / measure.MB


def measured(rows: list[Row]) -> str:
    """Markdown: medians over the rounds."""
    lines = []
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["tasks"]):
        groups.setdefault(tuple(row[name] for name in KEY), []).append(row)
    for (name, memory, bases, _, tasks), mine in groups.items():

        def median(of: str, mine: list[Row] = mine) -> float:
            return statistics.median(row[of] for row in mine)

        phases = [statistics.median(row["phases"][p] for row in mine) for p in ("gram", "write")]
        cells = [name, memory, str(tasks), str(bases), f"{median('wall_s'):.2f}"]
        cells += [f"{seconds:.2f}" for seconds in phases]
        cells += [f"{median(of):.0f}" for of in ("peak_rss_mb", "peak_rss_anon_mb")]
        cells += [f"{held(mine[0], form):.0f}" for form in ("dicts", "matrix")]
        lines.append(cells)
    head = ["models", "--memory", "T", "M", "whole, s", "Gram, s", "write, s", "peak RSS, MB"]
    head += ["peak RssAnon, MB", "the paper's way, dicts, MB", "matrix, MB"]
    return table(head, lines, 2)


@click.command(epilog="Example: python evals/speed/memory.py --tasks 4 --tasks 5 --megabytes 4")
@click.option("--tasks", multiple=True, type=int, default=(8, 16, 32, 72), show_default=True)
@click.option("--memory", multiple=True, default=("1GB", "250MB"), show_default=True)
@click.option("--bases", default=4, show_default=True)
@click.option("--megabytes", default=176, show_default=True, help="Size of each model, about.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16")
@click.option("--shape", nargs=3, type=int, help="Hidden size, vocabulary, layers; tied.")
@click.option("--versions", default=3, show_default=True, help="Of each file of a model.")
@click.option("--rounds", default=1, show_default=True)
@click.option("--cache", type=click.Choice(["warm", "cold"]), default="warm", show_default=True)
@shared
def main(
    tasks: tuple[int, ...], memory: tuple[str, ...], bases: int, megabytes: int, dtype: str,
    shape: tuple[int, int, int] | None, versions: int, rounds: int, cache: str,
    threads: int | None, work: Path, keep: bool,
) -> None:  # fmt: skip
    """Build stores of T models, and print time and memory over T."""
    work = prepared(work)
    path = work / "memory.json"
    rows: list[Row] = json.loads(path.read_text())["runs"] if path.exists() else []
    spec: Row = {"dtype": dtype, "versions": versions, "shape": shape}
    inputs = models.ensure(work, max(tasks), megabytes, **spec)
    name = f"{'x'.join(map(str, shape)) if shape else f'{megabytes} MB'} {dtype}, {cache}"
    try:
        for number in range(rounds):
            for count in tasks:
                for budget in memory:
                    about = {"models": name, "memory": budget, "bases": bases, "tasks": count}
                    about |= {"threads": threads, "round": number, "counted": True}
                    if any(about.items() <= row.items() for row in rows):
                        continue
                    with tempfile.TemporaryDirectory(dir=work, prefix="run-") as run:
                        bench = Bench(inputs, Path(run), count, threads)
                        parameters = {"basis": "balanced", "num_bases": bases}
                        row = bench.build(about, parameters, dtype, budget, cache)
                    row |= {"cores": threads or machine()["cores"]}
                    rows.append(row)
                    result = {"format_version": 1, "machine": machine(), "runs": rows}
                    save(path, json.dumps(result, indent=1, allow_nan=False))
                    tell(f"{name}, T = {count}, {budget}: {row['wall_s']:.1f} s")
    except measure.CommandFailed as error:
        raise click.ClickException(str(error)) from error
    finally:
        if not keep:
            shutil.rmtree(inputs, ignore_errors=True)
    save(work / "memory.md", measured(rows))
    click.echo(measured(rows))


if __name__ == "__main__":
    main()
