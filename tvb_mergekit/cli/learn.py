"""`tvb learn`: a subcommand for each method that merges by data."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

import click
from click import argument, option

from tvb_mergekit.cli.options import (
    COUNT,
    MODELS,
    PLACE,
    SEED,
    SHARE,
    Body,
    Commands,
    Range,
    choice,
    command,
    device_of,
    document_of,
    flag,
    folder,
    import_mergekit,
    refuse_given,
    repeatable,
)


@click.group(cls=Commands, subcommand_metavar="METHOD [OPTIONS]", options_metavar="")
@argument("recipe", metavar="RECIPE", type=PLACE)
def learn(recipe: str) -> None:
    """Merge the models of RECIPE by examples of their tasks.

    RECIPE is a recipe of `basis_ta`, or a store. wemoe also accepts iso, tsvm and wudi. adamerging
    and wemoe begin at the recipe's merge; the others do not use its lambda. A store is merged over
    its bases, or its tasks.

    A file of --data holds one example a line: {"prompt", "response"}, {"messages": [...]},
    {"text"}, or for adamerging and wemoe --unlabeled {"prompt"} alone.

    `tvb learn RECIPE METHOD --help` lists the options of a method.

    \b
    Example:
      tvb learn two.yml regmean --data math=m.jsonl --data code=c.jsonl --out two
      tvb learn ./store atlas --data law=m.jsonl --out law
    """


EVERY: tuple[Body, ...] = (
    repeatable("--data", metavar="TASK=FILE", help="A task's examples, in JSON lines. Repeatable."),
    folder("--out", required=True, help="The merged model."),
    option("--subsample/--no-subsample", default=True, help="Use M/T of the examples, or all."),
    choice("--precision", "float32 bfloat16", default="float32", help="Precision of the passes."),
    option("--seed", type=SEED, default=0, help="Seed of all random choices."),
)
MIXTURE = choice(
    *("--mixture", "encoder equal positive"),
    default="encoder",
    help="Weights of the tasks' data for a basis: W_e, 1/T, or for pca the softmax of its positive "
    "weights.",
)
NONNEGATIVE = flag("--nonnegative", help="Learn square roots of the coefficients.")
SHAPES_MASKS = (
    *("data", "mixture", "subsample", "seed", "precision", "penalty", "epochs", "learning_rate"),
    *("batch_size", "held_out", "patience", "checkpointing"),
)


def by_gradient(rate: str, batch: int) -> tuple[Body, ...]:
    """The options of all gradient methods. The methods know the first three defaults."""
    below_one, positive = Range(0, 1, max_open=True), Range(0, 1e6, min_open=True)
    return (
        option("--epochs", type=COUNT, show_default="10", help="Maximum epochs."),
        option("--learning-rate", type=positive, show_default=rate, help="Size of a step."),
        option("--batch-size", type=COUNT, show_default=str(batch), help="Examples a step."),
        option("--held-out", type=below_one, default=0.2, help="Fraction to choose the epoch by."),
        option("--patience", type=COUNT, default=3, help="Epochs without gain until the end."),
        flag("--checkpointing", help="Less memory for activations, a third more time."),
    )


def method(*options: Body) -> Body:
    """Make a subcommand with EVERY and these options; its name is the method's."""

    def decorate(described: Body) -> click.Command:
        @wraps(described)
        def run(**values: Any) -> None:
            _learn(described.__name__, **values)

        shared = ("base", "device", *MODELS, "quiet")
        for each in reversed((*EVERY, *options)):
            each(run)
        return command(*shared, group=learn, writes="out")(run)

    return decorate


@method(MIXTURE)
@option("--samples", type=click.IntRange(0), default=0, help="Labels drawn; 0: the data's own.")
@flag("--normalize", help="Give the information of all tasks the same sum.")
def fisher() -> None:
    """Weight entries by their Fisher information.

    \b
    Example:
      tvb learn two.yml fisher --data math=m.jsonl --data code=c.jsonl --out two
    """


@method(MIXTURE)
@option("--off-diagonal", type=Range(0, 1), default=0.9, help="Factor of X^T X off its diagonal.")
def regmean() -> None:
    """Fit linear layers to the outputs of all models.

    \b
    Example:
      tvb learn two.yml regmean --data math=m.jsonl --data code=c.jsonl --out two
    """


@method(MIXTURE, *by_gradient("3", 8))
@option("--density", type=SHARE, default=0.05, help="Fraction of a basis that its mask keeps.")
@flag("--dataless", help="Keep the largest entries, without data.")
@option("--penalty", type=Range(0), default=0.0, help="Factor of the masks' sum in the loss.")
def localize() -> None:
    """Keep a few entries of each basis, by a mask learned for its tasks.

    \b
    Example:
      tvb learn two.yml localize --data math=m.jsonl --data code=c.jsonl --out two
      tvb learn two.yml localize --dataless --out few
    """


@method(*by_gradient("0.001", 16), NONNEGATIVE)
def adamerging() -> None:
    """Learn coefficients per layer that make predictions certain.

    \b
    Example:
      tvb learn two.yml adamerging --data math=m.jsonl --data code=c.jsonl --out a
    """


@method(*by_gradient("0.1", 16), NONNEGATIVE)
@option("--blocks", type=click.IntRange(1, 1000), default=1, help="Coefficients in each tensor.")
def atlas() -> None:
    """Learn coefficients per tensor of least loss, for any tasks.

    \b
    Example:
      tvb learn two.yml atlas --data law=m.jsonl --out law
    """


@method(*by_gradient("1/n, n: the size of a hidden state", 16))
@flag("--unlabeled", help="Learn from prompts, by the entropy of the next token.")
@option("--depth", type=click.IntRange(1, 2), default=1, help="Layers of a router.")
def wemoe() -> None:
    """Learn routers that combine the bases in the MLPs for each sequence.

    OUT is the model merged by the recipe's lambda. In Python, attach(model, OUT).route() routes it.

    \b
    Example:
      tvb learn two.yml wemoe --data math=m.jsonl --data code=c.jsonl --out two
    """


def _learn(name: Any, base: str | None, **values: Any) -> None:
    context = click.get_current_context()
    if values.get("dataless"):
        refuse_given(SHAPES_MASKS, "--dataless uses no examples")
    import_mergekit()
    from tvb_mergekit.learn.running import learn as run
    from tvb_mergekit.learn.work import Request
    from tvb_mergekit.plugin.inputs import Options

    assert context.parent is not None
    recipe = context.parent.params["recipe"]
    values["device"] = str(device_of(values["device"]))
    document = document_of(recipe, "add" if os.path.isdir(recipe) else None, base)
    options = Options(**{k: values.pop(k) for k in (*MODELS, "device", "quiet")})
    run(Request(document=document, method=name, options=options, **values))
