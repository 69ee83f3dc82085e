"""The `tvb` command: each parses its words, calls what is below, and prints.

What a command needs is imported when it runs: `--help` imports no torch, and what works on a store
or on scores no mergekit.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from tvb_mergekit import __version__
from tvb_mergekit.cli.learn import learn
from tvb_mergekit.cli.options import (
    ACCESS,
    DTYPES,
    MODELS,
    PLACE,
    POSITIVE,
    SEED,
    Commands,
    Place,
    Range,
    command,
    device_of,
    devices_of,
    engine_of,
    flag,
    import_mergekit,
    model_options,
    repeatable,
)
from tvb_mergekit.errors import UserError, counted, listed
from tvb_mergekit.progress import phase

if TYPE_CHECKING:
    from tvb_mergekit.cli.inspect import Inspection
    from tvb_mergekit.plugin.document import Document
    from tvb_mergekit.store.bits import Quantize
    from tvb_mergekit.store.facts import DtypeName
    from tvb_mergekit.store.store import Bases
    from tvb_mergekit.tensors.checkpoint import Checkpoint
    from tvb_mergekit.tensors.taskset import TaskSet

OWN = "by default as wide as the models are stored (bfloat16 beside float16: float32)"
RECIPE, RECIPE_OR_STORE = Place(exists=True, dir_okay=False), Place(exists=True)


@click.group(cls=Commands, context_settings={"show_default": True})
@click.version_option(__version__, prog_name="tvb")
def main() -> None:
    """Task Vector Bases for mergekit: keep M vectors in the place of T fine-tuned models.

    Merging is mergekit's: `mergekit-yaml recipe.yml OUT` with `merge_method: basis_ta` or one of
    our others, over models or over the bases of a store. `tvb merge` does the
    same work faster and in bounded memory.

    \b
    Example:
      tvb check recipe.yml                    look before the work
      tvb build recipe.yml ./store            T models -> M bases
      tvb inspect ./store --plot store.png
      tvb merge ./store/recipes/add.yml ./merged
      tvb add ./store ./new-model --task new
      tvb export ./store ./math --task math
      tvb tune recipe.yml --tasks copa,rte --out tuned
      tvb learn two.yml fisher --data math=m.jsonl --data code=c.jsonl --out two

    Shell completion: `eval "$(_TVB_COMPLETE=bash_source tvb)"` (zsh_source, fish_source).
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    click.get_current_context().obj = _document  # for `tvb learn`, a module of its own
    for stream in (sys.stdout, sys.stderr):  # names that an ASCII terminal lacks are escaped
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")


@command(main, "device", "multi_gpu", "memory", *MODELS, "quiet", writes="store", several=True)
@click.argument("recipe", type=RECIPE)
@click.argument("store", type=PLACE)
@click.option("--dtype", type=DTYPES, help=f"Of the bases; {OWN}.")
@click.option("--bits", type=float, help="Store codes of so many bits: 8, 4, 3, 2, 1, or a mean.")
@click.option("--size", metavar="SIZE", help="Store codes, all in SIZE bytes, such as 2GB.")
@flag("--resume", help="Go on with an interrupted build.")
def build(
    recipe: str,
    store: str,
    dtype: DtypeName | None,
    bits: float | None,
    size: str | None,
    **values: Any,
) -> None:
    """Compress the models of RECIPE into the bases of a new folder STORE.

    RECIPE is what `mergekit-yaml` (or, for weight files, `mergekit-pytorch`) takes. The models may
    be deleted afterwards; the base may not.

    With --bits or --size every number is kept in a few bits. Unless RECIPE names a basis, STORE
    then holds all task vectors, and recipes over it list tasks: `- model: ./store/math`.

    \b
    Example:
      tvb build recipe.yml ./store --dtype bfloat16
      tvb build recipe.yml ./zoo --bits 2
      torchrun --nproc-per-node 4 --no-python tvb build recipe.yml ./store
    """
    from tvb_mergekit.tensors import ranks

    quantize = _quantize(bits, size)
    if quantize and dtype:
        raise UserError("--bits and --size do not go with --dtype")
    world = ranks.world()
    values["quiet"] |= not world.leads
    engine = engine_of(values)
    document = _read(recipe)
    if quantize:
        document.whole_tasks()

    from tvb_mergekit.cli.inspect import Inspection, error_line, size_line
    from tvb_mergekit.plugin.preflight import input_folders
    from tvb_mergekit.store.build import build_store
    from tvb_mergekit.tensors.output import check_new_folder

    check_new_folder(store, input_folders(document.recipe))  # before anything is downloaded
    inputs = world.first(lambda: _open(document, values))
    bases = build_store(
        inputs,
        store,
        engine,
        dtype=_dtype(dtype) or inputs.own_dtype,
        quantize=quantize,
        resume=values["resume"],
    )
    energy = bases.facts.retained_energy
    kept = "" if energy is None else f"; retained energy {100 * energy:.2f} %"
    if quantize:
        kept = f"; {error_line(bases.facts)}"
    click.echo(f"{bases.path}: {size_line(Inspection.of(bases))}{kept}")
    click.echo(f"Recipes: {bases.path}/recipes")


def _quantize(bits: float | None, size: str | None) -> Quantize | None:
    if bits is None and size is None:
        return None
    from tvb_mergekit.store.bits import Quantize
    from tvb_mergekit.tensors.layout import parse_memory

    return Quantize(bits, parse_memory(size) if size else None)


def _read(recipe: str) -> Document:
    import_mergekit()
    from tvb_mergekit.plugin.document import read_document

    with phase("Reading the recipe"):
        return read_document(recipe)


def _open(document: Document, values: dict[str, Any], names: list[str] | None = None) -> TaskSet:
    """The models of a recipe, opened; `names` as for `read_inputs`."""
    from tvb_mergekit.plugin.inputs import read_inputs

    with phase("Opening the models"):
        return read_inputs(document, model_options(values), names)


def _dtype(name: DtypeName | None) -> Any:
    from tvb_mergekit.store.store import DTYPES

    return DTYPES[name] if name else None


@command(main, "device", "memory", *MODELS, "quiet", writes="plot")
@click.argument("path", type=PLACE)
@flag("--json", "as_text", help="JSON on standard output.")
@click.option(
    "--plot", metavar="FILE", type=PLACE, help="Write a picture: .png, .svg, .pdf or .html."
)
def inspect(path: str, as_text: bool, plot: str | None, **values: Any) -> None:
    """Show tasks, cosines, bases and errors of PATH: a store, a merged model, or a recipe.

    \b
    Example: tvb inspect ./store --plot store.png
    """
    from rich.console import Console

    from tvb_mergekit.cli.inspect import as_json, print_inspection

    if plot is not None:
        from tvb_mergekit.cli import plot as plots

        plots.check_plot(plot)
    found = _inspection(path, values)
    if plot is not None:
        plots.plot(found, plot)
    if as_text:
        click.echo(json.dumps(as_json(found), indent=2))
    else:
        print_inspection(found, Console(highlight=False))


def _inspection(path: str, values: dict[str, Any]) -> Inspection:
    from tvb_mergekit.cli.inspect import Inspection
    from tvb_mergekit.store.store import is_output, read_output

    if os.path.isfile(path):
        document = _read(path)
        if document.recipe.store is None:
            from tvb_mergekit.store.build import inspect_inputs

            engine = engine_of(values)
            facts, tensors = inspect_inputs(_open(document, values), engine)
            return Inspection(facts, tensors, built=False)
        path = str(document.recipe.store.path)
    if is_output(path):
        return Inspection(*read_output(path))
    return Inspection.of(_load(path))


def _load(path: str, checksums: bool = False) -> Bases:
    """The bases of a store, after a comparison of all checksums if `checksums`."""
    from tvb_mergekit.store.store import check, is_basis, load

    if os.path.isfile(path):
        raise UserError(f"{path} is a file; expected the folder of a store")
    if is_basis(path):
        raise UserError(f"{path} is one basis of a store; name the store, the folder around it")
    with phase("Opening the store"):
        return (check if checksums else load)(path)


def _base_of(store: Bases, given: str | None) -> tuple[str, Checkpoint, Path | None]:
    """The base of a store: its name, its weights and its folder.

    Raises:
        UserError: it cannot be opened, or is not the one that the store belongs to.
    """
    import_mergekit()
    from tvb_mergekit.plugin.inputs import open_base

    name = given or store.base_name
    try:
        weights, folder = open_base(name)
    except (UserError, OSError, click.ClickException) as error:
        opened = isinstance(error.__cause__, UserError)  # it came from the Hub, and is damaged
        if opened or os.path.exists(name):
            raise
        raise UserError(
            f"base {name}: no such file or folder (from {os.getcwd()}); say with --base where the "
            f"base of {store.path} is"
        ) from error
    store.check_base(weights, name)
    return name, weights, folder


@command(main, "base", "device", "memory", *MODELS, "quiet", writes="store")
@click.argument("store", type=PLACE)
@click.argument("model", type=PLACE)
@click.option("--task", required=True, help="The new task's name.")
@click.option("--weight", type=float, default=1.0, help="Of its task vector.")
@click.option("--budget", type=int, metavar="M", help="The most bases that STORE may hold.")
@click.option(
    "--compress",
    type=click.Choice(["ae", "balanced"]),
    help="How a full store makes room: as in the paper, or keeping the sum of all tasks.",
)
@click.option("--dtype", type=DTYPES, help=f"Of a new STORE; {OWN}.")
@click.option("--bits", type=float, help="Of the new task in a store of all tasks; by default its.")
@flag("--force", help="Also a model unlike the others, or an end of the exact sum.")
def add(
    store: str,
    model: str,
    task: str,
    weight: float,
    base: str | None,
    force: bool,
    bits: float | None,
    **values: Any,
) -> None:
    """Add the task of a fine-tuned MODEL to STORE.

    If STORE keeps all tasks at a few bits (`tvb build --bits`), MODEL joins them. Otherwise, and
    with --budget, STORE holds at most M bases. Below the budget the new task vector becomes a
    basis. At the budget the bases are compressed by one first (Algorithm 1 of the paper).

    Needs the base and MODEL, but no earlier model. A STORE that does not exist is made: give
    --base, and --bits or --budget. `tvb undo STORE` takes the last addition back.

    \b
    Example:
      tvb add ./store ./new-model --task new --budget 4
      tvb add ./zoo ./new-model --task new
    """
    import_mergekit()
    from tvb_mergekit.cli.inspect import Inspection, size_line
    from tvb_mergekit.plugin.document import from_mapping
    from tvb_mergekit.store.add import add_to_store
    from tvb_mergekit.store.addition import Growth
    from tvb_mergekit.store.build import build_store

    engine, quantize = engine_of(values), _quantize(bits, None)
    if quantize and values["dtype"]:
        raise UserError("--bits goes with none of --budget, --compress, --dtype")
    new = not os.path.exists(store) or (os.path.isdir(store) and not os.listdir(store))
    if new:
        if base is None or (values["budget"] is None and quantize is None):
            raise UserError(
                f"{store}: no such store; a new one needs --base BASE, and --bits B or --budget M"
            )
        basis = {"basis": values["compress"]} if values["compress"] else {}
        parameters, names = {"basis": "none"} if quantize else {"num_bases": 1, **basis}, None
    else:
        base, parameters, names = _standing(store, base, values)
    listed_model = {"model": model, "parameters": {"task": task, "weight": weight}}
    recipe = {"merge_method": "basis_ta", "base_model": base, "models": [listed_model]}
    inputs = _open(from_mapping(recipe | {"parameters": parameters}), values, names)
    growth = Growth(
        values["budget"],
        values["compress"],
        _dtype(values["dtype"]) or inputs.own_dtype,
        quantize,
        logging.warning if force else _refuse,
        click.echo,
    )
    if new and quantize:
        grown = build_store(inputs, store, engine, quantize=quantize)
    else:
        grown = add_to_store(store, inputs, growth, engine)
    if grown.is_zoo:
        click.echo(
            f"{grown.path}: {size_line(Inspection(grown.facts, grown.tensors))}; relative error of "
            f"{task} {grown.facts.relative_error[task]:.3f}"
        )
        return
    most = {name: error.at_most for name, error in grown.facts.errors.items()}
    worst, error = max(most.items(), key=lambda pair: math.inf if pair[1] is None else pair[1])
    click.echo(
        f"{grown.path}: {counted(len(grown.tasks), 'task')} in {grown.num_bases} of at most "
        f"{grown.facts.store.budget} bases; largest relative error of a task at most "
        f"{math.inf if error is None else error:.3f} ({worst})"
    )


def _standing(
    store: str, base: str | None, values: dict[str, Any]
) -> tuple[str, dict[str, Any], list[str]]:
    """The base, the parameters and the tensors' names for an addition to a store that is there.

    Raises:
        UserError: no store, another base, or a dtype that does not fit.
    """
    bases, dtype = _load(store), values["dtype"]
    if bases.is_zoo and values["budget"] is None and dtype:
        raise UserError(
            f"--dtype: {store} keeps all tasks as codes; --budget M makes bases of them"
        )
    if dtype not in (None, own := bases.facts.store.dtype) and not bases.is_zoo:
        raise UserError(f"--dtype {dtype}: {store} is there, and holds {own}; leave --dtype out")
    exclude = bases.settings.exclude
    parameters = {"num_bases": 1, **({} if exclude is None else {"exclude": exclude})}
    return _base_of(bases, base)[0], parameters, bases.names


def _refuse(doubt: str) -> None:
    raise UserError(f"{doubt}; --force adds it all the same")


@command(main, writes="store")
@click.argument("store", type=PLACE)
def undo(store: str) -> None:
    """Take back the last `tvb add` or `tvb remove`: STORE is what it was before.

    One step can be undone.

    \b
    Example: tvb undo ./store
    """
    from tvb_mergekit.store.undo import undo_change

    bases = undo_change(store)
    tasks, count = counted(len(bases.tasks), "task"), counted(bases.num_bases, "basis")
    click.echo(f"{bases.path}: {tasks}{'' if bases.is_zoo else f' in {count}'}, as before")


@command(main, writes="store")
@click.argument("store", type=PLACE)
@click.option("--task", required=True, help="The task's name.")
def remove(store: str, task: str) -> None:
    """Take a task out of a STORE that keeps all of them (`tvb build --bits`).

    The previous store is kept until the next change: `tvb undo STORE` brings it back.

    \b
    Example: tvb remove ./zoo --task math
    """
    from tvb_mergekit.cli.inspect import Inspection, size_line
    from tvb_mergekit.store.zoo import remove_task

    bases = remove_task(store, task)
    click.echo(f"{bases.path}: {size_line(Inspection(bases.facts, bases.tensors))}")


@command(main, "base", "device", "memory", "quiet", writes="out")
@click.argument("store", type=PLACE)
@click.argument("out", type=PLACE, required=False)
@click.option("--task", help="The model of this task, theta_0 + its reconstructed task vector.")
@click.option("--basis", type=int, metavar="K", help="The model theta_0 + B_K.")
@flag("--all-bases", help="A model for each basis, OUT/basis-000 ...")
@click.option(
    "--all",
    "every",
    metavar="DIR",
    is_flag=False,
    flag_value="",
    help="A model for each task, in DIR.",
)
@click.option("--dtype", type=DTYPES, help="Of the model; the base's by default.")
def export(
    store: str,
    out: str | None,
    task: str | None,
    basis: int | None,
    all_bases: bool,
    every: str | None,
    **values: Any,
) -> None:
    """Write full Hugging Face models from STORE into OUT, for any use and any merge method.

    \b
    Example:
      tvb export ./store ./math --task math
      tvb export ./store --all ./models           ./models/math, ./models/code ...
    """
    import torch

    from tvb_mergekit.store import export as exporting
    from tvb_mergekit.store.bits import slugs

    if (task is not None) + (basis is not None) + all_bases + (every is not None) != 1:
        raise UserError("give one of --task NAME, --basis K, --all-bases and --all DIR")
    if (out is None) != bool(every):
        raise UserError("say once where to write: OUT, or --all DIR")
    out = every or str(out)
    engine = engine_of(values)
    bases = _load(store)
    folders = [""]
    if task is not None or every is not None:
        tasks = bases.tasks if task is None else [task]
        matrix = torch.cat([exporting.task_column(bases, each) for each in tasks], 1)
        weights = [float(bases.weights[bases.index(each)]) for each in tasks]
        what = [
            f"{each}, reconstructed" + f" (without its weight of {weight:g})" * (weight != 1)
            for each, weight in zip(tasks, weights, strict=True)
        ]
        if task is None:
            folders = bases.facts.store.folders if bases.is_zoo else slugs(tasks)
    else:
        indices = list(range(bases.num_bases)) if basis is None else [basis]
        matrix = exporting.basis_columns(bases, indices)
        what = [f"Base plus basis {m} of {bases.num_bases}" for m in indices]
        if all_bases:
            folders = [bases.facts.store.folders[m] for m in indices]
    _, base, folder = _base_of(bases, values["base"])
    exporting.export(
        bases,
        base,
        folder,
        matrix,
        folders,
        out,
        engine,
        what=what,
        dtype=_dtype(values["dtype"]),
    )
    click.echo(f"Written to {out}")


@command(
    main, "base", "device", "multi_gpu", "memory", *ACCESS, "quiet", writes="out", several=True
)
@click.argument("recipe", metavar="RECIPE|STORE", type=RECIPE_OR_STORE)
@click.argument("out", type=PLACE)
@click.option(
    "--method", metavar="NAME", help="Of a STORE: add, ties, iso, tsvm, wudi, forget-TASK."
)
@click.option("--out-shard-size", metavar="SIZE", default="5B", help="mergekit's: 500M, 5B ...")
@click.option("--copy-tokenizer/--no-copy-tokenizer", default=True, help="Of the base, into OUT.")
@click.option("--write-model-card/--no-write-model-card", default=True, help="OUT/README.md.")
def merge(
    recipe: str, out: str, method: str | None, base: str | None, memory: int, **values: Any
) -> None:
    """Merge the models of RECIPE into OUT: what `mergekit-yaml` writes, bit by bit, and sooner.

    RECIPE is one of our methods, over models or over the bases of a store. A STORE needs no recipe:
    `tvb merge STORE OUT --method add`, by what it was built with. Tensors are streamed: no more
    than --memory is held of them, whatever the size of a model and of the shards of OUT.

    \b
    Example:
      tvb merge recipe.yml ./merged --memory 2GB
      torchrun --nproc-per-node 4 --no-python tvb merge recipe.yml ./merged
    """
    from tvb_mergekit.tensors import ranks

    devices = devices_of(values)
    values["device"] = None if values["multi_gpu"] else str(devices[0])
    values["quiet"] |= not ranks.world().leads
    document = _document(recipe, method, base)

    from tvb_mergekit.plugin.run import merge_recipe

    merge_recipe(document, out, memory, **values)


def _document(recipe: str, method: str | None, base: str | None) -> Document:
    """A recipe, or a store's recipe for a method."""
    if os.path.isdir(recipe):
        made = _recipe_of(recipe, method, base)

        from tvb_mergekit.plugin.document import from_mapping

        return from_mapping(made)
    if method is not None or base is not None:
        raise UserError(f"{recipe} is a recipe: --method and --base belong to a STORE")
    return _read(recipe)


def _recipe_of(store: str, method: str | None, base: str | None) -> dict[str, Any]:
    """The recipe of a store for a method, where the store lies now."""
    from tvb_mergekit.settings import nearest
    from tvb_mergekit.store.recipes import templates

    bases = _load(store)
    known = templates(bases.facts, os.path.abspath(store), _base_of(bases, base)[0])
    if method in known:
        return known[method][1]
    if method is None:
        raise UserError(f"{store} is a store: name a --method, one of {', '.join(known)}")
    guess = nearest(method, known)
    hint = f"did you mean {guess}? " if guess else ""
    raise UserError(f"--method {method}: {hint}Expected one of {', '.join(known)}")


@command(main, "device", *MODELS, "quiet")
@click.argument("recipe", metavar="RECIPE|STORE", type=RECIPE_OR_STORE)
@flag("--deep", help="Read every tensor: NaN, zero task vectors, wrong base.")
@click.option("--out", type=PLACE, help="Where the output will lie, to look at its disk.")
def check(recipe: str, deep: bool, out: str | None, **values: Any) -> None:
    """Look for all that would stop a merge or a build of RECIPE, and estimate what they take.

    RECIPE may also be a store: then its files are compared with their checksums.

    \b
    Example: tvb check recipe.yml --deep
    """
    if os.path.isdir(recipe):
        bases = _load(recipe, checksums=True)
        click.echo(f"{recipe}: {len(bases.facts.store.files)} files as they were written")
        return
    from tvb_mergekit.tables import printable

    engine, document, options = engine_of(values), _read(recipe), model_options(values)

    from tvb_mergekit.cli.check import check_recipe

    for line in check_recipe(recipe, document, options, deep, out, engine):
        click.echo(printable(line))


@command(main, writes="out")
@click.argument("paths", nargs=-1, type=PLACE, metavar="[[LABEL=]PATH...]")
@click.option("--base", metavar="PATH", type=PLACE, help="Results of the base model.")
@repeatable(
    "--specialist",
    "specialists",
    metavar="[CATEGORY=]PATH",
    type=PLACE,
    help="Results of the model fine-tuned for CATEGORY, by default for all. Repeatable.",
)
@click.option(
    "--reference",
    metavar="paper|FILE",
    type=PLACE,
    help="A table whose specialists replace --specialist; FILE: an earlier scores.json.",
)
@flag("--show-reference", help="Show the reference's other columns too.")
@click.option(
    "--benchmark",
    metavar="mergebench|mergebench_keyword|mini|quickstart|FILE",
    type=PLACE,
    help="By default the benchmark of the tasks in the files. FILE lists tasks in YAML: "
    "docs/tune-and-score.md has an example.",
)
@repeatable(
    "--metric",
    "metrics",
    metavar="TASK:METRIC",
    help="Read another metric of a task, as METRIC,FILTER. Repeatable.",
)
@flag("--partial", help="Normalize over the categories that all models have completely.")
@click.option(
    "--radar",
    type=click.Choice(["tasks", "categories", "none"]),
    default="tasks",
    help="The axes of the plot in --out.",
)
@click.option(
    "--out",
    metavar="DIR",
    type=PLACE,
    help="Write scores.html, scores.md, scores.json, radar.svg, radar.png.",
)
def score(
    paths: tuple[str, ...],
    radar: Literal["tasks", "categories", "none"],
    out: str | None,
    **values: Any,
) -> None:
    """Table the results of lm_eval, with the normalized accuracy of MergeBench.

    Each PATH is a results_*.json of lm_eval, or a folder of them, for categories that were run one
    by one. Normalized accuracy is the sum of a model's category means over the same sum for the
    specialists. Missing tasks and settings that differ are reported.

    After lm_eval with --log_samples, models are compared item by item: the differences of each pair
    have p values, corrected by Holm's method. Scores that look like extraction, not ability, are
    shown with three answers. scores.html has all of it, and each model's recipe.

    \b
    Example:
      lm_eval ... --output_path out/ta --log_samples
      tvb score ta=out/ta ae=out/ae --specialist out/specialists --out scores
      tvb score ta=out/ta --base out/base --specialist math=out/math --partial
      tvb score ta=out/ta --reference paper --show-reference
      tvb score --reference paper --show-reference      the paper's own table
    """
    from rich.console import Console

    from tvb_mergekit.score.gathering import PICTURES, check_output, gather, write
    from tvb_mergekit.score.text import print_table
    from tvb_mergekit.tables import printable

    by = None if out is None or radar == "none" else radar
    if out is not None:
        check_output(out, by is not None)
    found = gather(paths, **values)
    for line in found.warnings:
        click.echo(f"Warning: {printable(line)}", err=True)
    if out is not None:
        pictures: dict[str, bytes] = {}
        if by is not None and found.specialists is not None and found.compared:
            from tvb_mergekit.score.radar import radar as draw

            pictures = {kind: draw(found, kind, by) for kind in PICTURES}
        elif by is not None:
            click.echo("Warning: nothing to normalize by, so no radar plot", err=True)
        write(found, out, pictures)
    print_table(found, Console(soft_wrap=True, highlight=False))
    if out is not None:
        click.echo(f"Written to {out}")


main.add_command(learn)


@command(main, "memory", "device", *ACCESS, "quiet", writes="out")
@click.argument("recipe", type=RECIPE_OR_STORE)
@click.option("--tasks", required=True, metavar="T1,T2", help="lm-eval's tasks or groups.")
@click.option(
    "--out", required=True, metavar="DIR", type=PLACE, help="Folder for the results; see below."
)
@click.option(
    "--write",
    metavar="DIR",
    type=PLACE,
    help="Also merge with the best coefficient, into this folder.",
)
@click.option(
    "--grid",
    show_default="0:1:0.05; of methods with lambda 1 by default 0:2:0.1",
    help="START:STOP:STEP, or numbers with commas.",
)
@click.option(
    "--search",
    type=click.Choice(["grid", "golden"]),
    default="grid",
    help="golden: golden section between the grid's ends, 9 points instead of 21.",
)
@click.option(
    "--tolerance", type=POSITIVE, help="Precision of golden; by default half the grid's step."
)
@repeatable("--metric", "metrics", metavar="TASK:METRIC", help="As METRIC,FILTER. Repeatable.")
@click.option(
    "--reference", metavar="PATH", type=PLACE, help="The specialists' results, to divide scores by."
)
@repeatable(
    "--control",
    "controls",
    metavar="TASK",
    help="basis_negate: a task that must not be forgotten. Repeatable.",
)
@click.option(
    "--keep",
    type=Range(0, 1, min_open=True),
    default=0.95,
    help="basis_negate: the share of the control score at alpha 0 to keep.",
)
@click.option("--limit", type=float, help="Items per task, drawn by --seed; below 1 a share.")
@flag("--subsample", help="Use M/T of these items for M bases of T tasks, as in the paper.")
@click.option(
    "--test-share",
    type=Range(0, 1, min_open=True),
    default=0.2,
    help="Share of items that choose, for tasks without a validation split; 1 for all.",
)
@click.option("--seed", type=SEED, default=0, help="Seed of the items, and of mergekit.")
@repeatable(
    "--include-path",
    metavar="DIR",
    type=PLACE,
    help="Folder of your own lm-eval tasks. Repeatable.",
)
@click.option("--metadata", metavar="JSON", help="lm-eval's, for tasks that need it.")
@click.option("--num-fewshot", type=click.IntRange(0), help="lm-eval's.")
@flag("--apply-chat-template", "chat_template", help="lm-eval's.")
@flag("--confirm-run-unsafe-code", "unsafe_code", help="lm-eval's.")
@click.option("--batch-size", default="1", help="lm-eval's; `auto` too.")
@click.option("--model-args", default="", metavar="K=V,...", show_default=False, help="lm-eval's.")
def tune(recipe: str, tasks: str, out: str, metadata: str | None, **values: Any) -> None:
    """Find the coefficient of RECIPE (or of a store's add.yml) by lm-eval's scores.

    The coefficient is lambda, or alpha of basis_negate. One model in memory moves along
    theta_0 + lambda * Delta and is scored at each point. Its weights are those that mergekit-yaml
    writes, to the last bit. mergekit's task_arithmetic, ties and breadcrumbs can be tuned as well.
    dare and della draw at random, so each point is merged to disk.

    DIR gets tuned.yml, tune.md, tune.json, curve.png and points.jsonl. After an interruption, the
    same command continues; after the end it shows the result again. Test items are not used: a task
    is scored on its validation split. If it has none, a seeded part of the scored items chooses,
    and test_samples.json names the rest, for `lm_eval --samples`.

    Memory: the loaded model, and --memory while models are merged, except by mergekit's own
    methods. Disk: up to five times the merged model, below DIR and deleted at the end.

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


@main.group("cache")
def cache_group() -> None:
    """The Gram matrices kept between merges.

    \b
    Example: tvb cache list

    They live in $TVB_MERGEKIT_CACHE, by default in ~/.cache/tvb-mergekit/gram, a few kB each;
    TVB_MERGEKIT_CACHE=off keeps none.
    """


@command(cache_group, name="list")
def list_entries() -> None:
    """Show the stored Gram matrices, newest first.

    \b
    Example: tvb cache list
    """
    from tvb_mergekit.tensors import cache

    folder = cache.cache_folder()
    if folder is None:
        click.echo(f"The cache is off ({cache.VARIABLE}).")
        return
    found = cache.entries()
    for entry in found:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.modified))
        click.echo(
            f"{written}  {entry.path.name[:12]}  {entry.nbytes:,} bytes  "
            f"{entry.num_parameters:,} parameters  {listed(entry.tasks)}"
        )
    click.echo(f"{len(found)} Gram matrices in {folder}")


@command(cache_group, name="clear")
def clear_entries() -> None:
    """Delete all stored Gram matrices.

    \b
    Example: tvb cache clear
    """
    from tvb_mergekit.tensors import cache

    click.echo(f"Deleted {cache.clear()} Gram matrices.")
