"""Commands that make, change, show, merge and export stores."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import argument, option

from tvb_mergekit.cli import options as cli
from tvb_mergekit.cli.options import MODELS, PLACE, command, flag
from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors import ranks

if TYPE_CHECKING:
    from torch import Tensor

    from tvb_mergekit.store.facts import Facts
    from tvb_mergekit.store.store import Bases
    from tvb_mergekit.tensors.taskset import TaskSet

WAYS = ("add", "ties", "iso", "tsvm", "wudi")  # the names of `plugin.ways`, which imports torch


@command("device", *MODELS, "quiet", writes="store", several=True)
@argument("recipe", type=cli.RECIPE)
@argument("store", type=PLACE)
@cli.dtype(help="Plain numbers of this dtype; bases: as wide as the models.")
@flag("--lossless", help="Keep all models to the bit, as differences from the base.")
@option("--keep", type=float, metavar="SHARE", help="A random share of all entries: 0.05, 0.02.")
def build(recipe: str, store: str, dtype: str | None, **values: Any) -> None:
    """Keep the models of RECIPE in a new folder STORE.

    With `basis` or `num_bases` in RECIPE the task vectors are compressed into M bases, for merges.
    Without them STORE keeps every task: adapters as their factors, models in bfloat16 or float16 to
    the bit, others as float32. --keep stores a random sample of the entries of each task vector.

    \b
    Example:
      tvb build models.yml ./store
      tvb build models.yml ./small --keep 0.05
      tvb build recipe.yml ./bases --dtype bfloat16
      torchrun --nproc-per-node 4 --no-python tvb build recipe.yml ./bases
    """
    from tvb_mergekit.store.build import build_store, kept_share

    share = kept_share(values["lossless"], values["keep"], dtype)
    engine, document = cli.engine_of(values), cli.read_recipe(recipe)
    settings = document.recipe.settings.or_all_tasks()
    document.recipe = replace(document.recipe, settings=settings)
    from tvb_mergekit.plugin.inputs import read_inputs
    from tvb_mergekit.tensors.output import check_output_folder

    check_output_folder(store)  # before anything is downloaded
    inputs = read_inputs(document, cli.model_options(values))
    _tell(build_store(inputs, store, engine, dtype=cli.dtype_of(dtype), share=share))


@command("device", *MODELS, "quiet", writes="plot")
@argument("path", type=PLACE)
@flag("--json", "as_text", help="JSON on standard output.")
@cli.place("--plot", metavar="FILE", help="Write a picture: .png, .svg or .pdf.")
def inspect(path: str, as_text: bool, plot: str | None, **values: Any) -> None:
    """Show tasks, cosines, bases, errors and bytes.

    PATH is a store, a merged model, or a recipe. The models of a recipe are read, and refused where
    a merge would refuse them. The files of a store are compared with their checksums.

    \b
    Example:
      tvb inspect recipe.yml
      tvb inspect ./store --plot store.png
    """
    from rich.console import Console

    from tvb_mergekit.cli.inspect import plot as draw
    from tvb_mergekit.cli.inspect import print_inspection
    from tvb_mergekit.figures import METADATA, can_draw
    from tvb_mergekit.store.report import inspected

    target = Path(plot or "picture.png")  # checked before anything is read
    if target.suffix.lower()[1:] not in METADATA or not os.access(f"{target.parent}/.", os.W_OK):
        raise UserError(f"--plot {target}: name a .png, .svg or .pdf file in a folder to write in")
    if plot and not can_draw():
        raise UserError("--plot needs matplotlib: pip install 'tvb-mergekit[plot]'")
    facts, tensors = _facts_of(path, values)
    found = inspected(facts, tensors, built=not os.path.isfile(path))
    if plot:
        draw(facts, found, target)
    if as_text:
        click.echo(json.dumps(found, indent=2))
    else:
        print_inspection(facts, found, Console(highlight=False))


def _facts_of(path: str, values: dict[str, Any]) -> tuple[Facts, Mapping[str, Tensor]]:
    """The facts and numbers of a store, a merge or a recipe."""
    from tvb_mergekit.store.facts import FACTS, FOLDER, TENSORS, Facts, read_facts
    from tvb_mergekit.store.store import load
    from tvb_mergekit.tensors.checkpoint import Checkpoint

    if os.path.isfile(path):
        device, document = str(cli.device_of(values["device"])), cli.read_recipe(path)
        from tvb_mergekit.plugin.planner import planned

        options = cli.model_options(values, device=device, quiet=values["quiet"])
        with planned(document, options) as plan:  # compares the base of a store
            if document.recipe.store is None:
                plan.build(inner=True)
                plan.warn()
                return plan.report()
        path = str(document.recipe.store.path)
    if (Path(path) / FOLDER / FACTS).is_file():
        facts = read_facts(Path(path, FOLDER, FACTS), Facts)
        held = Checkpoint.open(Path(path, FOLDER, TENSORS))
        return facts, {name: held.tensor(name) for name in held.tensors}
    bases = load(path, checksums=True)
    return bases.facts, bases.tensors


@command("base", "device", *MODELS, "quiet", writes="store")
@argument("store", type=PLACE)
@argument("model", type=PLACE)
@option("--task", required=True, help="The new task's name.")
@option("--weight", type=float, default=1.0, help="Weight of its task vector.")
@option("--budget", type=int, metavar="M", help="Maximum number of vectors in STORE.")
@cli.choice("--compress", "ae balanced", help="Make room as the paper, or keep the sum of tasks.")
@cli.dtype(help="Plain numbers of this dtype, for a new STORE or new bases.")
@flag("--force", help="Also add a model unlike the base or the others.")
def add(store: str, model: str, task: str, base: str | None, **values: Any) -> None:
    """Add the task of a fine-tuned MODEL to STORE.

    MODEL, or an adapter of the base, becomes one more vector; no earlier model is read. If STORE
    would then hold more than --budget vectors, they are compressed by one first (Algorithm 1 of the
    paper); the budget is kept for later additions. If STORE does not exist, give --base.

    \b
    Example:
      tvb add ./store ./new-model --task new
      tvb add ./bases ./new-model --task new --budget 4
      tvb add ./new-store ./first-model --task first --base ./base
    """
    cli.import_mergekit()
    from tvb_mergekit.plugin.document import from_mapping
    from tvb_mergekit.plugin.inputs import read_inputs
    from tvb_mergekit.store.build import add_task

    engine, options, own = cli.engine_of(values), cli.model_options(values), {"task": task}

    def inputs_for(bases: Bases | None) -> TaskSet:
        name, names, parameters = base, list[str](), {"basis": "none"}
        if bases is not None:
            name, names = base or bases.base_name, bases.facts.tensors
            parameters |= {"exclude": bases.settings.exclude} if bases.settings.exclude else {}
        elif name is None:
            raise UserError(f"{store}: no such store; a new one needs --base BASE")
        new: object = model
        if Path(model, "adapter_config.json").is_file():
            new = {"model": {"path": name}, "lora": {"path": model}}
        listed = [{"model": new, "parameters": {**own, "weight": values["weight"]}}]
        recipe = {"merge_method": "basis_ta", "base_model": name, "models": listed}
        document = from_mapping({**recipe, "parameters": parameters})
        return read_inputs(document, options, names)

    size, dtype = (values["budget"], values["compress"]), cli.dtype_of(values["dtype"])
    doubt = logging.warning if values["force"] else _refuse
    _tell(add_task(store, inputs_for, engine, *size, dtype, doubt))


def _refuse(doubt: str) -> None:
    raise UserError(f"{doubt}; --force adds it anyway")


@command(writes="store")
@argument("store", type=PLACE)
def undo(store: str) -> None:
    """Undo the last `tvb add` or `tvb remove` of STORE.

    A second `tvb undo` restores it.

    \b
    Example: tvb undo ./store
    """
    from tvb_mergekit.store.change import undo as undo_change

    _tell(undo_change(store))


@command(writes="store")
@argument("store", type=PLACE)
@option("--task", required=True, help="The task's name.", **cli.of_store())
def remove(store: str, task: str) -> None:
    """Remove a task from a STORE that keeps all task vectors.

    `tvb undo STORE` restores it, until the next change.

    \b
    Example: tvb remove ./vectors --task math
    """
    from tvb_mergekit.store.change import remove as remove_task

    _tell(remove_task(store, task))


def _tell(bases: Bases) -> None:
    """Print vectors, bytes and errors of a store after a change, and how to get tasks back."""
    from tvb_mergekit.cli.inspect import forms, size_line
    from tvb_mergekit.store.report import vectors

    held = f"{vectors(bases.facts)} ({forms(bases.facts)})"
    click.echo(f"{bases.path}: {held}, {size_line(bases.facts)}")
    if {vector.codec for vector in bases.facts.vectors} == {"lossless"}:
        click.echo("Every bit comes back: you may delete the models, but not the base.")
    elif known := [(e, task) for task, e in bases.facts.errors.items() if e is not None]:
        mend = "Keep the models; to get tasks back, build without `basis` and `num_bases`."
        error, task = max(known)
        line = f"Largest relative error of a task: {error:.3g} ({task})."
        click.echo(line if bases.facts.whole else f"{line} {mend}")
    else:
        click.echo("The errors of the tasks are not known.")


@command("base", "device", *MODELS, "quiet", writes="out", several=True)
@argument("recipe", metavar="RECIPE|STORE", type=cli.RECIPE_OR_STORE)
@argument("out", type=PLACE)
@option("--method", metavar="NAME", help=f"For a STORE: {', '.join(WAYS)}, forget-TASK.",
        **cli.of_store(WAYS, "forget-{}"))  # fmt: skip
@flag("--lora", help="Merge adapters to an adapter, not a model.")
@cli.dtype(help="--lora: dtype of the factors, by default float32.")
def merge(
    recipe: str, out: str, method: str | None, base: str | None, lora: bool, **values: Any
) -> None:
    """Merge the models of RECIPE, or the vectors of STORE, into OUT.

    RECIPE uses one of our methods, over models or over the vectors of a store; `mergekit-yaml`
    writes the same bits. A STORE needs no recipe. Tensors are streamed, for models of any size.

    --lora writes a LoRA adapter, which PEFT and servers add to the base. All models of RECIPE are
    adapters, BASE+ADAPTER. Their merge has exact factors, except by basis_ties.

    \b
    Example:
      tvb merge recipe.yml ./merged
      tvb merge ./store ./merged --method add
      torchrun --nproc-per-node 4 --no-python tvb merge recipe.yml ./merged
    """
    dtype = cli.dtype_of(values.pop("dtype"))
    if lora:
        ranks.one_only("tvb merge --lora")
    elif dtype:
        raise UserError("--dtype is for adapters: add --lora, or give `dtype` in the recipe")
    device, quiet = str(cli.device_of(values["device"])), values["quiet"] or not ranks.leads()
    document = cli.document_of(recipe, method, base)
    if lora:
        import torch

        from tvb_mergekit.plugin.inputs import merge_to_adapter

        merge_to_adapter(document, out, dtype or torch.float32, cli.model_options(values))
        click.echo(f"Written to {out}")
        return
    from tvb_mergekit.plugin.run import merge as write

    write(document, out, cli.model_options(values, device=device, quiet=quiet))


@command("base", "device", "quiet", writes="out")
@argument("store", type=PLACE)
@argument("out", type=PLACE)
@option("--task", help="This task's model: theta_0 + its task vector.", **cli.of_store())
@flag("--all", "every", help="All tasks' models, each in a folder of OUT.")
def export(store: str, out: str, base: str | None, task: str | None, **values: Any) -> None:
    """Write the models of tasks from STORE into OUT.

    They are complete Hugging Face models, for any use and any merge method.

    \b
    Example:
      tvb export ./store ./math --task math
      tvb export ./store ./models --all           ./models/math, ./models/code ...
    """
    from tvb_mergekit.store.api import base_of
    from tvb_mergekit.store.export import export as write
    from tvb_mergekit.store.store import load

    if (task is None) != values["every"]:
        raise UserError("give one of --task NAME and --all")
    engine, bases = cli.engine_of(values), load(store)
    tasks, weights = [task] if task else bases.tasks, base_of(bases, base)
    write(bases, weights, tasks, out, values["every"], engine)
    click.echo(f"Written to {out}")
