"""`tvb score`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click import argument

from tvb_mergekit.cli.options import PLACE, command, flag, folder, place, repeatable
from tvb_mergekit.errors import UserError


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
@folder("--out", help="Write scores.md, scores.json and scores.html.")
def score(paths: tuple[str, ...], out: str | None, **values: Any) -> None:
    """Table the results of lm_eval, with normalized accuracy.

    Each PATH is a results_*.json of lm_eval, or a folder of them. MergeBench's normalized accuracy
    is the sum of a model's category means over the same sum for the specialists. Settings that
    differ are reported. With samples, every two models are compared item by item; the p values are
    corrected by Holm's method.

    \b
    Example:
      lm_eval ... pretrained=./merged ... --output_path out/ta --log_samples
      lm_eval ... pretrained=./math ... --output_path out/math --log_samples
      tvb score out/ta --specialist math=out/math --partial --out scores
      tvb score ta=out/ta ae=out/ae --base out/base --specialist out/specialists
      tvb score --reference paper --show-reference      the paper's own table
    """
    from rich.console import Console

    from tvb_mergekit.figures import MADE
    from tvb_mergekit.score.table import FILES, gather, sheets, written
    from tvb_mergekit.tables import printable, show

    for path in (Path(out or "", name) for name in FILES if out is not None):
        if path.exists() and MADE.encode() not in path.read_bytes():
            raise UserError(f"cannot write {path}: tvb score did not make it; name another --out")
    found = gather(paths, **values)
    for line in found.warnings:
        click.echo(f"Warning: {printable(line)}", err=True)
    for each in sheets(found):
        show([each, ""], Console(soft_wrap=True, highlight=False))
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        for name, text in written(found).items():
            partial = Path(out, f".{name}.partial")
            partial.write_bytes(text.encode(errors="backslashreplace"))
            partial.replace(Path(out, name))
        click.echo(f"Written to {out}")
