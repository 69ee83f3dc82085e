"""`tvb tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from click import argument, option

from tvb_mergekit.cli.options import (
    MODELS,
    POSITIVE,
    RECIPE_OR_STORE,
    SEED,
    SHARE,
    choice,
    command,
    device_of,
    flag,
    folder,
    import_mergekit,
    model_options,
    repeatable,
)
from tvb_mergekit.errors import UserError


@command("device", *MODELS, "quiet", writes="out")
@argument("recipe", type=RECIPE_OR_STORE)
@option("--tasks", required=True, metavar="T1,T2", help="lm-eval's tasks or groups.")
@folder("--out", required=True, help="Folder for the results; see below.")
@folder("--write", help="Also merge with the best coefficient, into this folder.")
@option(
    "--grid",
    show_default="0:1:0.05; of basis_tsvm and basis_wudi 0 and 0.1 to 4, of basis_iso to 22",
    help="START:STOP:STEP, or numbers with commas.",
)
@choice("--search", "grid golden", default="grid", help="golden: about 9 points.")
@option("--tolerance", type=POSITIVE, help="Precision of golden; by default half a grid step.")
@repeatable("--metric", "metrics", metavar="TASK:METRIC", help="As METRIC,FILTER. Repeatable.")
@repeatable("--control", "controls", metavar="TASK", help="basis_negate: keep it. Repeatable.")
@option("--keep", type=SHARE, default=0.95, help="basis_negate: share of control score to keep.")
@option("--limit", type=float, help="Items per task, drawn by --seed; below 1 a fraction.")
@flag("--subsample", help="Use M/T of these items for M bases of T tasks, as in the paper.")
@option("--test-share", type=SHARE, default=0.2, help="Share that chooses, if no validation split.")
@option("--seed", type=SEED, default=0, help="Seed of the items.")
@folder("--include-path", multiple=True, help="Folder of your own lm-eval tasks. Repeatable.")
@option("--metadata", metavar="JSON", help="lm-eval's, for tasks that need it.")
@option("--num-fewshot", type=click.IntRange(0), help="lm-eval's.")
@flag("--apply-chat-template", "chat_template", help="lm-eval's.")
@flag("--confirm-run-unsafe-code", "unsafe_code", help="lm-eval's.")
@option("--batch-size", default="1", help="lm-eval's; `auto` too.")
@option("--model-args", default="", metavar="K=V,...", show_default=False, help="lm-eval's.")
def tune(recipe: str, tasks: str, out: str, metadata: str | None, **values: Any) -> None:
    """Find the coefficient of RECIPE (or of a store) by lm-eval's scores.

    The coefficient is lambda, or alpha of basis_negate. One model in memory moves along
    theta_0 + lambda * Delta and is scored at each point. Its weights equal those of mergekit-yaml,
    to the last bit.

    DIR gets tuned.yml, tune.md, tune.json, curve.png and points.jsonl. After an interruption, the
    same command continues; after the end it shows the result again. Test items are not used: a task
    is scored on its validation split. If it has none, a seeded part of the scored items chooses,
    and test_samples.json names the rest, for `lm_eval --samples`.

    Memory: the loaded model. Disk: up to five times the
    merged model, below DIR and deleted at the end.

    \b
    Example:
      tvb tune recipe.yml --tasks copa,rte --limit 200 --out tuned
      tvb tune ./store --tasks copa --search golden --out golden
      tvb tune forget.yml --tasks copa --control rte --out rest --write ./new
    """
    from rich.console import Console

    import_mergekit()
    from tvb_mergekit.tune import report, running

    request = running.TuneRequest(
        recipe=recipe,
        tasks=[name.strip() for name in tasks.split(",") if name.strip()],
        out=Path(out),
        options=model_options(values),
        metadata=_json(metadata),
        **{**values, "device": str(device_of(values["device"]))},
    )
    found = running.tune(request)
    missing = report.write(found)
    report.print_table(found, Console(soft_wrap=True, highlight=False))
    for line in missing:
        click.echo(line, err=True)
    click.echo(f"Written to {out}")
    if request.write is not None:
        found.recipe.write(found.best.value, request.write, request.quiet)
        click.echo(f"Merged into {request.write}")


def _json(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except ValueError as error:
        raise UserError(f"--metadata {text}: no JSON ({error})") from error
    if not isinstance(found, dict):
        raise UserError(f"--metadata {text}: expected a JSON object")
    return found
