"""`tvb build`, and the library, against the paper's own procedure: see README.md and SCALING.md.

The procedure is `authors_procedure.py`, plain PyTorch. Both read the same files and write the same
artifacts, M vectors in float32. With the default encoder they are the same vectors up to rounding,
which is checked. Let nothing else run.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from compare import HERE, TVB_IMPORTS, Bench, benchmark, shared, size_of, tell, warm_up_option
from tables import Row

SAME = 1e-3  # ||a - b|| / ||b|| of a vector: 4000 steps in float32 enlarge the Gram's rounding
PAIRS = {  # our parameters, and how the procedure holds the task vectors
    "ae": ({"basis": "ae"}, "dicts"),
    "ae, matrix": ({"basis": "ae"}, "matrix"),
    "exact": ({"basis": "ae", "solver": "exact"}, "dicts"),
    "balanced": ({"basis": "balanced"}, "dicts"),
    "library, ae": ({"basis": "ae"}, "dicts"),
    "library, balanced": ({"basis": "balanced"}, "dicts"),
}


def procedure(bench: Bench, about: Row, form: str, bases: int) -> Row:
    """One run of the authors' procedure, which leaves its files in the run's folder."""
    out = bench.run_folder / "plain"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, str(HERE / "authors_procedure.py"), form, str(bases), str(out)]
    command += map(str, (bench.base, *bench.tasks))
    row = {**about, "what": "merge", "method": f"procedure, {form}", "ours": False}
    row |= bench.measured(command, bench.environment(False), "warm")
    row["net_s"] = row["wall_s"] - bench.start_up["mergekit"]
    row["phases"] = json.loads((bench.run_folder / "log").read_text().splitlines()[-1])
    row["output_mb"] = size_of(out.glob("basis-*.safetensors"))
    return row


def by_library(bench: Bench, about: Row, basis: str, bases: int) -> Row:
    """One run of a script that calls the library."""
    command = [sys.executable, str(HERE / "library_build.py"), basis, str(bases)]
    command += map(str, (bench.store, bench.base, *bench.tasks))
    return bench.built({**about, "method": "tvb_mergekit.build"}, command, "library", "warm")


def pair(bench: Bench, about: Row, name: str, memory: str | None, bases: int) -> None:
    """Ours, then the procedure; and that what they wrote is the same where it should be.

    Args:
        memory: of `tvb build`; None: a script of the library, which takes its default.
    """
    parameters, form = PAIRS[name]
    if memory is None:
        about = {**about, "pair": name}
        ours = by_library(bench, about, parameters["basis"], bases)
    else:
        about = {**about, "pair": f"{name}, {memory}"}
        ours = bench.build(about, {**parameters, "num_bases": bases}, "float32", memory, "warm")
    theirs = procedure(bench, about, form, bases)
    if abs(ours["output_mb"] - theirs["output_mb"]) > 0.01 * theirs["output_mb"] + 0.1:
        raise click.ClickException(f"{name}: the two wrote vectors of different sizes")
    if parameters == {"basis": "ae"} and about["round"] <= 0:
        words = [sys.executable, str(HERE / "authors_procedure.py"), "same"]
        words += [str(bench.store), str(bench.run_folder / "plain")]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        ours["distance"] = float(done.stdout)
        tell(f"  the vectors differ by {ours['distance']:.1e} of their norms at most")
        if not ours["distance"] < SAME:
            raise click.ClickException(f"{name}: the two wrote other vectors")
    bench.rows += [ours, theirs]
    tell(f"  {about['pair']}: ours {ours['wall_s']:.1f} s, theirs {theirs['wall_s']:.1f} s")


@click.command(epilog="Example: python evals/speed/authors.py --tasks 4 --megabytes 8 --only ae")
@click.option("--only", multiple=True, type=click.Choice([*PAIRS]), help="Pairs; default: all.")
@click.option("--memory", multiple=True, default=("1GB", "250MB"), show_default=True)
@click.option("--bases", type=click.IntRange(1), default=4, show_default=True)
@warm_up_option
@shared(megabytes=352, rounds=3)
def main(
    only: tuple[str, ...], memory: tuple[str, ...], work: Path, keep: bool, **settings: Any
) -> None:
    """Time and memory of ours and of the paper's procedure, in turn, files in the page cache.

    The models are float32: 352 MB are 88 million parameters. --memory is for `tvb build`; the
    library's pairs use its default.
    """

    def each(bench: Bench, about: Row) -> None:
        for name in only or PAIRS:
            for budget in [None] if name.startswith("library") else memory:
                pair(bench, about, name, budget, settings["bases"])

    starts = {
        "tvb": TVB_IMPORTS,
        "library": [sys.executable, str(HERE / "library_build.py"), "start-up"],
        "mergekit": [sys.executable, str(HERE / "authors_procedure.py"), "start-up"],
    }
    settings |= {"dtype": "float32", "theirs": "the procedure's"}
    benchmark("authors", settings, work, keep, each, starts)


if __name__ == "__main__":
    main()
