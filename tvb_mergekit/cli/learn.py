"""`tvb learn`: a subcommand for each method that merges by data."""

from __future__ import annotations

import os
from typing import Any

import click
from click import option

from tvb_mergekit.cli import options as cli
from tvb_mergekit.cli.options import COUNT, Range, choice, flag


@click.group(cls=cli.Commands, subcommand_metavar="METHOD [OPTIONS]", options_metavar="")
@click.argument("recipe", metavar="RECIPE", type=cli.PLACE)
def learn(recipe: str) -> None:
    """Merge the models of RECIPE by examples of their tasks.

    RECIPE is a recipe of `basis_ta`, or a store. wemoe also accepts iso, tsvm and wudi. adamerging
    and wemoe begin at the recipe's merge; the others do not use its lambda.

    A file of --data holds one example a line: {"prompt", "response"}, {"messages": [...]},
    {"text"}, or for adamerging and wemoe --unlabeled {"prompt"} alone.

    \b
    Example:
      tvb learn two.yml regmean --data math=m.jsonl --data code=c.jsonl --out two
      tvb learn ./store atlas --data law=m.jsonl --out law
    """


HELD_OUT, RATE = Range(0, 1, max_open=True), Range(0, 1e6, min_open=True)
TASK_FILE = "A task's examples, in JSON lines. Repeatable."
WEIGHTS = "Of the tasks' data: W_e, 1/T, or for pca the softmax of positive weights."
EVERY: list[cli.Body] = [
    cli.repeatable("--data", metavar="TASK=FILE", help=TASK_FILE),
    cli.folder("--out", required=True, help="The merged model."),
    option("--subsample/--no-subsample", default=True, help="Use M/T of the examples, or all."),
    choice("--precision", "float32 bfloat16", default="float32", help="Precision of the passes."),
    option("--seed", type=cli.SEED, default=0, help="Seed of all random choices."),
    flag("--spread", help="Spread the layers of a model over all GPUs."),
]
MIXTURE = [choice("--mixture", "encoder equal positive", default="encoder", help=WEIGHTS)]
STEPS = [
    option("--epochs", type=COUNT, default=10, help="Maximum epochs."),
    option("--learning-rate", type=RATE, show_default="docs/learn.md", help="Size of a step."),
    option("--batch-size", type=COUNT, show_default="16; localize 8", help="Examples a step."),
    option("--held-out", type=HELD_OUT, default=0.2, help="Fraction to choose the epoch by."),
    option("--patience", type=COUNT, default=3, help="Epochs without gain until the end."),
    flag("--checkpointing", help="Less memory for activations, a third more time."),
]
NONNEGATIVE = flag("--nonnegative", help="Learn square roots of the coefficients.")
BLOCKS = click.IntRange(1, 1000)
METHODS: dict[str, tuple[str, list[cli.Body]]] = {
    "fisher": ("Weight entries by their Fisher information.", [
        *MIXTURE,
        flag("--normalize", help="Give the information of all tasks the same sum."),
    ]),
    "regmean": ("Fit linear layers to the outputs of all models.", [
        *MIXTURE,
        option("--off-diagonal", type=Range(0, 1), default=0.9, help="Factor of X^T X."),
    ]),
    "localize": ("Keep a few entries of each basis, by a mask learned for its tasks.", [
        *MIXTURE, *STEPS,
        option("--density", type=cli.SHARE, default=0.05, help="Fraction that a mask keeps."),
        flag("--dataless", help="Keep the largest entries, without data."),
        option("--penalty", type=Range(0), default=0.0, help="Factor of the masks' sum."),
    ]),
    "adamerging": ("Learn coefficients per layer that make predictions certain.", [
        *STEPS, NONNEGATIVE,
    ]),
    "atlas": ("Learn coefficients per tensor of least loss, for any tasks.", [
        *STEPS, NONNEGATIVE,
        option("--blocks", type=BLOCKS, default=1, help="Coefficients in each tensor."),
    ]),
    "wemoe": ("Learn routers for MLPs; attach(model, OUT).route() in Python uses them.", [
        *STEPS,
        flag("--unlabeled", help="Learn by the entropy of the next token."),
    ]),
}  # fmt: skip


def _subcommand(name: Any, text: str, options: list[cli.Body]) -> None:
    def run(base: str | None, **values: Any) -> None:
        cli.import_mergekit()
        from tvb_mergekit.learn.job import Request
        from tvb_mergekit.learn.running import learn as learned

        parent = click.get_current_context().parent
        recipe = parent.params["recipe"] if parent else ""
        document = cli.document_of(recipe, "add" if os.path.isdir(recipe) else None, base)
        device, quiet = str(cli.device_of(values.pop("device"))), values.pop("quiet")
        shared = cli.model_options(values, device=device, quiet=quiet)
        learned(Request(document=document, method=name, options=shared, **values))

    example = f"tvb learn two.yml {name} --data math=m.jsonl --data code=c.jsonl --out o"
    run.__doc__ = f"{text}\n\n\b\nExample:\n  {example}"
    for each in reversed((*EVERY, *options)):
        run = each(run)
    shared = ("base", "device", *cli.MODELS, "quiet")
    learn.add_command(cli.command(*shared, name=name, writes="out", several=True)(run))


for name, (text, options) in METHODS.items():
    _subcommand(name, text, options)
