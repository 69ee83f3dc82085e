"""`tvb tune`."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from click import argument, option

from tvb_mergekit.cli import options as cli
from tvb_mergekit.cli.options import MODELS, command, flag, folder, repeatable
from tvb_mergekit.errors import UserError

GRID = "0:1:0.05; of basis_tsvm and basis_wudi 0 and 0.1 to 4, of basis_iso to 22"


@command("device", *MODELS, "quiet", writes="out")
@argument("recipe", type=cli.RECIPE)
@option("--tasks", required=True, metavar="T1,T2", help="lm-eval's tasks or groups.")
@folder("--out", required=True, help="New folder for the results; see below.")
@option("--grid", show_default=GRID, help="START:STOP:STEP, or numbers with commas.")
@cli.choice("--search", "grid brent", default="grid", help="brent: 9 to 12 points of its range.")
@repeatable("--metric", "metrics", metavar="TASK:METRIC", help="As METRIC,FILTER. Repeatable.")
@repeatable("--control", "controls", metavar="TASK", help="basis_negate: keep it. Repeatable.")
@option("--keep", type=cli.SHARE, default=0.95, help="basis_negate: of the control score.")
@option("--limit", type=cli.POSITIVE, help="Items per task, drawn by --seed; below 1 a fraction.")
@option("--seed", type=cli.SEED, default=0, help="Seed of the items.")
@folder("--include-path", multiple=True, help="Folder of your own lm-eval tasks. Repeatable.")
@option("--num-fewshot", type=click.IntRange(0), help="lm-eval's.")
@flag("--apply-chat-template", "chat_template", help="lm-eval's.")
@flag("--confirm-run-unsafe-code", "unsafe_code", help="lm-eval's.")
@option("--batch-size", default="1", help="lm-eval's; `auto` too.")
@option("--model-args", default="", metavar="K=V,...", show_default=False, help="lm-eval's.")
def tune(recipe: str, tasks: str, out: str, **values: Any) -> None:
    """Find the coefficient of RECIPE by lm-eval's scores.

    The coefficient is lambda, or alpha of basis_negate. One model in memory moves along
    theta_0 + lambda * Delta and is scored at each point. Its weights equal those of mergekit-yaml,
    to the last bit. A model too large for one GPU: --model-args parallelize=True.

    DIR gets tuned.yml, tune.json and curve.png. Test items are not used: a task is scored on its
    validation split. If it has none, a seeded fifth of the scored items chooses, and
    test_samples.json names the rest, for `lm_eval --samples`. While it runs, DIR holds up to five
    times the merged model.

    \b
    Example:
      tvb tune recipe.yml --tasks copa,rte --out tuned
      tvb tune forget.yml --tasks copa --control rte --out rest
    """
    if not re.fullmatch(r"auto(:\d+)?|[1-9]\d*", values["batch_size"]):
        raise UserError(f"--batch-size {values['batch_size']}: expected 1 or more, or auto")
    if find_spec("lm_eval") is None:
        raise UserError("tvb tune needs lm-eval: pip install 'tvb-mergekit[eval]'")
    from lm_eval.utils import simple_parse_args_string

    cli.import_mergekit()
    from tvb_mergekit.tune import run
    from tvb_mergekit.tune.tasks import Evaluation

    options = cli.model_options(values, quiet=values["quiet"])
    model = {
        "device": str(cli.device_of(values.pop("device"))),
        "batch_size": values.pop("batch_size"),
        "trust_remote_code": options.trust_remote_code,
        **simple_parse_args_string(values.pop("model_args")),
    }
    own = {name: values.pop(name) for name in Evaluation.__dataclass_fields__ if name in values}
    own["metrics"] = dict(text.partition(":")[::2] for text in own["metrics"])
    names, brent = [name.strip() for name in tasks.split(",")], values.pop("search") == "brent"
    evaluation, place = Evaluation(model, **own), Path(out)
    found = run.tune(recipe, names, place, evaluation, options, brent=brent, **values)
    for line in [*run.report(found, place), f"Written to {out}"]:
        click.echo(line)
