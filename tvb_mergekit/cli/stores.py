"""Commands that make, change and show stores: build, inspect, add, undo and remove."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import argument, option

from tvb_mergekit.cli.options import (
    DTYPES,
    MODELS,
    PLACE,
    RECIPE,
    base_of,
    choice,
    command,
    dtype_of,
    engine_of,
    flag,
    import_mergekit,
    load_store,
    model_options,
    open_models,
    place,
    read_recipe,
)
from tvb_mergekit.errors import UserError, counted

if TYPE_CHECKING:
    from tvb_mergekit.store.facts import DtypeName
    from tvb_mergekit.store.inspection import Inspection

OWN = "as wide as the models by default (bfloat16 next to float16: float32)"


@command("device", *MODELS, "quiet", writes="store", several=True)
@argument("recipe", type=RECIPE)
@argument("store", type=PLACE)
@option("--dtype", type=DTYPES, help=f"Dtype of the bases; {OWN}.")
@flag("--lossless", help="Keep all models to the bit, as differences from the base.")
@option("--keep", type=float, metavar="SHARE",
        help="Keep a random share of all entries, exact: 0.05, 0.02.")  # fmt: skip
def build(recipe: str, store: str, dtype: DtypeName | None, **values: Any) -> None:
    """Compress the models of RECIPE into the bases of a new folder STORE.

    RECIPE is a recipe for `mergekit-yaml`. Afterwards
    you may delete the models, but not the base.

    The next options keep all task vectors. RECIPE then names no basis, and recipes over STORE list
    tasks: `- model: ./store/math`.

    --lossless keeps models in bfloat16 or float16 to the bit. It is the default of a recipe with
    `basis: none`. --keep keeps a random sample of the entries of each task vector, scaled up:
    unbiased, in few bytes.

    \b
    Example:
      tvb build recipe.yml ./store --dtype bfloat16
      tvb build models.yml ./small --keep 0.05
      torchrun --nproc-per-node 4 --no-python tvb build recipe.yml ./store
    """
    from tvb_mergekit.store.forms import default_share, kept_share
    from tvb_mergekit.tensors import ranks

    share = kept_share(values["lossless"], values["keep"], dtype)
    world = ranks.world()
    values["quiet"] |= not world.leads
    engine = engine_of(values)
    document = read_recipe(recipe)
    if share:
        document.whole_tasks()

    from tvb_mergekit.cli.inspect import error_line, store_line
    from tvb_mergekit.plugin.planner import input_folders
    from tvb_mergekit.store.build import build_store
    from tvb_mergekit.tensors.output import check_new_folder

    check_new_folder(store, input_folders(document.recipe))  # before anything is downloaded
    inputs = open_models(document, values)
    if not (dtype or share):
        share = default_share(inputs)
    own = dtype_of(dtype) or inputs.own_dtype
    bases = build_store(inputs, store, engine, dtype=own, keep=share)
    energy = bases.facts.retained_energy
    kept = "" if energy is None else f"; retained energy {100 * energy:.2f} %"
    if share == 1:
        kept = "; every bit comes back"
    if 0 < share < 1:
        kept = f"; {error_line(bases.facts)}"
    click.echo(f"{store_line(bases)}{kept}")


@command("device", *MODELS, "quiet", writes="plot")
@argument("path", type=PLACE)
@flag("--json", "as_text", help="JSON on standard output.")
@place("--plot", metavar="FILE", help="Write a picture: .png, .svg or .pdf.")
def inspect(path: str, as_text: bool, plot: str | None, **values: Any) -> None:
    """Show tasks, cosines, bases and errors of PATH: a store, a merged model, or a recipe.

    The models of a recipe are read, and refused where a merge would refuse them. The files of a
    store are compared with their checksums.

    \b
    Example:
      tvb inspect recipe.yml
      tvb inspect ./store --plot store.png
    """
    from rich.console import Console

    from tvb_mergekit.cli.inspect import print_inspection
    from tvb_mergekit.store.inspection import as_json

    if plot is not None:
        from tvb_mergekit.atomic import check_outside
        from tvb_mergekit.cli import plot as plots

        plots.check_plot(plot)
        check_outside(plot)
    found = _inspection(path, values)
    if plot is not None:
        plots.plot(found, plot)
    if as_text:
        click.echo(json.dumps(as_json(found), indent=2))
    else:
        print_inspection(found, Console(highlight=False))


def _inspection(path: str, values: dict[str, Any]) -> Inspection:
    from tvb_mergekit.store.facts import FOLDER, is_output, read_output
    from tvb_mergekit.store.inspection import Inspection

    if os.path.isfile(path):
        engine, document, options = engine_of(values), read_recipe(path), model_options(values)
        from tvb_mergekit.plugin.inputs import inputs_of_merge
        from tvb_mergekit.plugin.planner import plan_only
        from tvb_mergekit.store.build import inspect_inputs

        if document.recipe.store is None:
            inputs = inputs_of_merge(document, options)
            return Inspection(*inspect_inputs(inputs, engine), built=False)
        plan_only(document, options)  # compares the base
        path = document.recipe.store.place
    if is_output(Path(path)):
        return Inspection(*read_output(Path(path) / FOLDER))
    return Inspection.of(load_store(path, checksums=True))


@command("base", "device", *MODELS, "quiet", writes="store")
@argument("store", type=PLACE)
@argument("model", type=PLACE)
@option("--task", required=True, help="The new task's name.")
@option("--weight", type=float, default=1.0, help="Weight of its task vector.")
@option("--budget", type=int, metavar="M", help="Maximum number of bases in STORE.")
@choice("--compress", "ae balanced", help="Make room as in the paper, or keep the sum of tasks.")
@option("--dtype", type=DTYPES, help=f"Dtype of a new STORE; {OWN}.")
@flag("--force", help="Also add a model unlike the others, or give up the exact sum.")
def add(store: str, model: str, task: str, base: str | None, **values: Any) -> None:
    """Add the task of a fine-tuned MODEL to STORE.

    If STORE keeps all task vectors (`tvb build --lossless` or --keep), MODEL joins them.
    Otherwise, and with --budget, STORE holds at most M bases. Below the budget the new task vector
    becomes a basis. At the budget the bases are compressed by one first (Algorithm 1 of the paper).

    An addition needs the base and MODEL, but no earlier model. If STORE does not exist, give --base
    and --budget. `tvb undo STORE` undoes the last addition.

    \b
    Example:
      tvb add ./store ./new-model --task new --budget 4
      tvb add ./vectors ./new-model --task new
    """
    import_mergekit()
    from tvb_mergekit.cli.inspect import store_line
    from tvb_mergekit.plugin.document import from_mapping
    from tvb_mergekit.store.add import add_to_store
    from tvb_mergekit.store.addition import Growth
    from tvb_mergekit.store.recipes import with_paths

    engine = engine_of(values)
    budget, compress, dtype = (values[key] for key in ("budget", "compress", "dtype"))
    new = not os.path.exists(store) or (os.path.isdir(store) and not os.listdir(store))
    if new:
        if base is None or budget is None:
            raise UserError(f"{store}: no such store; a new one needs --base BASE and --budget M")
        basis = {"basis": compress} if compress else {}
        parameters: Any = {"num_bases": 1, **basis}
        names = list[str]()
    else:
        base, parameters, names = _standing(store, base, dtype, budget)
    listed_model = {"model": model, "parameters": {"task": task, "weight": values["weight"]}}
    recipe = {"merge_method": "basis_ta", "base_model": base, "models": [listed_model]}
    document = from_mapping(with_paths(recipe | {"parameters": parameters}))
    inputs = open_models(document, values, names)
    own = dtype_of(dtype) or inputs.own_dtype
    doubt = logging.warning if values["force"] else _refuse
    growth = Growth(budget, compress, own, doubt, click.echo)
    grown = add_to_store(store, inputs, growth, engine)
    if grown.keeps_tasks:
        error = grown.facts.relative_error[task]
        click.echo(f"{store_line(grown)}; relative error of {task} {error:.3f}")
        return
    errors = [(error, name) for name, error in grown.facts.errors.items() if error is not None]
    told = "the errors of the tasks are not known"
    if errors:
        told = "largest relative error of a task {:.3f} ({})".format(*max(errors))
    click.echo(
        f"{grown.path}: {counted(len(grown.tasks), 'task')} in {grown.num_bases} of at most "
        f"{grown.facts.store.budget} bases; {told}"
    )


def _standing(
    store: str, base: str | None, dtype: str | None, budget: int | None
) -> tuple[str, dict[str, Any], list[str]]:
    """The base, the parameters and the tensors' names for an addition to an existing store.

    Raises:
        UserError: no store, another base, or another dtype.
    """
    bases = load_store(store)
    if bases.keeps_tasks and budget is None and dtype:
        raise UserError(f"--dtype: {store} keeps all tasks; --budget M makes bases")
    if dtype not in (None, own := bases.facts.store.dtype) and not bases.keeps_tasks:
        raise UserError(f"--dtype {dtype}: {store} exists and holds {own}; leave --dtype out")
    exclude = bases.settings.exclude
    parameters = {"num_bases": 1, **({} if exclude is None else {"exclude": exclude})}
    return base_of(bases, base)[0], parameters, bases.names


def _refuse(doubt: str) -> None:
    raise UserError(f"{doubt}; --force adds it anyway")


@command(writes="store")
@argument("store", type=PLACE)
def undo(store: str) -> None:
    """Undo the last `tvb add` or `tvb remove` of STORE. A second `tvb undo` restores it.

    \b
    Example: tvb undo ./store
    """
    from tvb_mergekit.store.writer import undo_change

    bases = undo_change(store)
    tasks, count = counted(len(bases.tasks), "task"), counted(bases.num_bases, "basis")
    click.echo(f"{bases.path}: {tasks}{'' if bases.keeps_tasks else f' in {count}'}, as before")


@command(writes="store")
@argument("store", type=PLACE)
@option("--task", required=True, help="The task's name.")
def remove(store: str, task: str) -> None:
    """Remove a task from a STORE that keeps all task vectors, as of `tvb build --lossless`.

    The previous store is kept until the next change: `tvb undo STORE` restores it.

    \b
    Example: tvb remove ./vectors --task math
    """
    from tvb_mergekit.cli.inspect import store_line
    from tvb_mergekit.store.addition import remove_task

    click.echo(store_line(remove_task(store, task)))
