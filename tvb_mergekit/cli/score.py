"""`tvb score`."""

from __future__ import annotations

from typing import Any

import click
from click import argument

from tvb_mergekit.cli.options import (
    PLACE,
    command,
    flag,
    folder,
    place,
    repeatable,
)


@command(writes="out")
@argument("paths", nargs=-1, type=PLACE, metavar="[[LABEL=]PATH...]")
@place("--base", help="Results of the base model.")
@place(
    *("--specialist", "specialists"),
    multiple=True,
    metavar="[CATEGORY=]PATH",
    help="Results of the model fine-tuned for CATEGORY, by default for all. Repeatable.",
)
@place("--reference", metavar="paper|FILE", help="Specialists of another table, or scores.json.")
@flag("--show-reference", help="Show the reference's other columns too.")
@place(
    "--benchmark",
    metavar="mergebench|mergebench_keyword|quickstart|FILE",
    help="By default that of the tasks in the files. FILE lists tasks: docs/tune-and-score.md.",
)
@repeatable("--metric", "metrics", metavar="TASK:METRIC", help="As METRIC,FILTER. Repeatable.")
@flag("--partial", help="Normalize over the categories that all models have completely.")
@folder("--out", help="Write scores.md and scores.json.")
def score(paths: tuple[str, ...], out: str | None, **values: Any) -> None:
    """Table the results of lm_eval, with the normalized accuracy of MergeBench.

    Each PATH is a results_*.json of lm_eval, or a folder of them if categories were run one by
    one. Normalized accuracy is the sum of a model's category means over the same sum for the
    specialists. Missing tasks and settings that differ are reported.

    After lm_eval with --log_samples, models are compared item by item: the differences of each pair
    have p values, corrected by Holm's method.

    \b
    Example:
      lm_eval ... --output_path out/ta --log_samples
      tvb score ta=out/ta ae=out/ae --specialist out/specialists --out scores
      tvb score ta=out/ta --base out/base --specialist math=out/math --partial
      tvb score ta=out/ta --reference paper --show-reference
      tvb score --reference paper --show-reference      the paper's own table
    """
    from rich.console import Console

    from tvb_mergekit.score.gathering import check_output, gather, write
    from tvb_mergekit.score.text import print_table
    from tvb_mergekit.tables import printable

    if out is not None:
        check_output(out)
    found = gather(paths, **values)
    for line in found.warnings:
        click.echo(f"Warning: {printable(line)}", err=True)
    if out is not None:
        write(found, out)
    print_table(found, Console(soft_wrap=True, highlight=False))
    if out is not None:
        click.echo(f"Written to {out}")
