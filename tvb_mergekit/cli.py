"""The `tvb` command: thin; each command imports what it needs when it runs."""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
import yaml

from tvb_mergekit import __version__
from tvb_mergekit.errors import UserError, check_names

if TYPE_CHECKING:
    import torch

    from tvb_mergekit.checkpoints import Checkpoint
    from tvb_mergekit.inspection import Inspection
    from tvb_mergekit.plugin.inputs import Options
    from tvb_mergekit.store import Bases

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group()
@click.version_option(__version__, prog_name="tvb")
def main() -> None:
    """Task Vector Bases for mergekit: keep M vectors in the place of T fine-tuned models.

    Merging is mergekit's: `mergekit-yaml recipe.yml OUT` with `merge_method: basis_ta`,
    `basis_ties` or `basis_negate`, over models or over the bases of a store. `tvb merge` does the
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

    Shell completion: `eval "$(_TVB_COMPLETE=bash_source tvb)"` (zsh_source, fish_source).
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for stream in (sys.stdout, sys.stderr):  # names that an ASCII terminal lacks are escaped
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")


def _careful(out: str = "", *, several: bool = False) -> Callable[[Command], Command]:
    """Turn what a user can mend into one line and exit code 1.

    Args:
        out: the argument that is written to.
        several: the command works in the processes that a launcher started.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapped(**values: Any) -> Any:
            from tvb_mergekit import ranks
            from tvb_mergekit.progress import logging_above_bars
            from tvb_mergekit.refusals import refusing, unwinding

            place = str(values.get(out) or "the output")
            try:
                with logging_above_bars(), refusing(out=place):
                    if values.get(out):
                        names = ("recipe", "store", out)
                        check_names(*(values[name] for name in names if name in values))
                    if not several:
                        ranks.one_only(click.get_current_context().command_path)
                    with ranks.joined(place), refusing(out=place), unwinding():
                        return command(**values)
            except KeyboardInterrupt:
                kept = f"{place}.partial"
                more = f" {kept} is kept: --resume goes on." if os.path.isdir(kept) else ""
                if os.path.isfile(os.path.join(place, "points.jsonl")):  # of `tvb tune`
                    more = " The same command goes on."
                click.echo(f"Interrupted.{more}", err=True)
                sys.exit(130)

        return wrapped  # type: ignore[return-value]

    return decorate


def _options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_device = click.option(
    "--device", default="auto", show_default=True, help="Where to compute: cpu, cuda, cuda:1 ..."
)
_multi_gpu = click.option("--multi-gpu", is_flag=True, help="Compute on all accelerators.")
_quiet = click.option("--quiet", is_flag=True, help="No progress bars.")
_base = click.option(
    "--base", help="The base model, where it is no longer in the place that the store names."
)
_access = _options(
    click.option("--trust-remote-code", is_flag=True, help="Let models run their own code."),
    click.option("--allow-crimes", is_flag=True, help="mergekit's: architectures may differ."),
    click.option("--lora-merge-cache", metavar="DIR", help="Where fused adapters are kept."),
    click.option("--transformers-cache", metavar="DIR", help="Where models are downloaded to."),
)
_models = _options(
    _access,
    click.option("--fuse", is_flag=True, help="Fuse adapters into models before anything else."),
)


def _bytes(_context: click.Context, _option: click.Parameter, text: str) -> int:
    from tvb_mergekit.layout import parse_memory

    try:
        return parse_memory(text)
    except UserError as error:
        raise click.ClickException(str(error)) from error


_memory = click.option(
    "--memory",
    metavar="SIZE",
    callback=_bytes,
    default="1GB",  # layout.MEMORY
    show_default=True,
    help="The most that tensors may take in each process, such as 500MB; Python and its libraries "
    "take about 0.4 GB more.",
)
_dtypes = click.Choice(["float32", "bfloat16", "float16"])
_OWN = "by default as wide as the models are stored (bfloat16 beside float16: float32)"


def _device_of(name: str) -> torch.device:
    from tvb_mergekit.layout import device_of

    return device_of(_auto_device() if name == "auto" else name)


def _auto_device() -> str:
    import torch

    from tvb_mergekit import ranks

    if not torch.cuda.is_available():
        return "cpu"
    if ranks.size() == 1:
        return "cuda"
    return f"cuda:{ranks.local_rank() % torch.cuda.device_count()}"  # each process its own


def _check_multi_gpu(values: dict[str, Any]) -> None:
    from tvb_mergekit import ranks

    if values["multi_gpu"] and ranks.local_size() > 1:
        raise UserError(
            f"--multi-gpu is for one process on a machine, and {ranks.local_size()} were started: "
            "leave it out, each takes an accelerator of its own"
        )


def _devices_of(values: dict[str, Any]) -> list[torch.device]:
    """Of `--device` and `--multi-gpu`."""
    _check_multi_gpu(values)
    if not values["multi_gpu"]:
        return [_device_of(values["device"])]
    from tvb_mergekit.plugin.planning import accelerators

    return accelerators()


def _base_of(store: Bases, given: str | None) -> tuple[str, Checkpoint, Path | None]:
    """The base of a store: its name, its weights and its folder.

    Raises:
        UserError: it cannot be opened, or is not the one that the store belongs to.
    """
    name = given or store.base_name
    hint = "" if given else f"; it is the base that {store.path} names: say with --base where it is"
    weights, folder = _open_base(name, hint)
    store.check_base(weights, name)
    return name, weights, folder


def _open_base(name: str, hint: str = "") -> tuple[Checkpoint, Path | None]:
    from tvb_mergekit.plugin.inputs import open_base

    try:
        return open_base(name)
    except (UserError, OSError, click.ClickException) as error:
        opened = isinstance(error.__cause__, UserError)  # it came from the Hub, and is damaged
        if opened or os.path.exists(name):
            raise
        raise UserError(
            f"base {name}: no such file or folder (from {os.getcwd()}){hint}"
        ) from error


def _model_options(values: dict[str, Any]) -> Options:
    from tvb_mergekit.plugin.inputs import Options

    names = ("trust_remote_code", "allow_crimes", "lora_merge_cache", "transformers_cache", "fuse")
    return Options(**{name: values[name] for name in names if name in values})


@main.command()
@click.argument("recipe", type=click.Path(exists=True, dir_okay=False))
@click.argument("store", type=click.Path())
@click.option("--dtype", type=_dtypes, help=f"Of the bases; {_OWN}.")
@click.option("--resume", is_flag=True, help="Go on with an interrupted build.")
@click.option("--adapters", is_flag=True, help="Store the bases of LoRA adapters as adapters.")
@click.option("--rank", type=click.IntRange(1), help="With --adapters: truncate each to this rank.")
@_device
@_multi_gpu
@_memory
@_models
@_quiet
@_careful("store", several=True)
def build(recipe: str, store: str, **values: Any) -> None:
    """Compress the models of RECIPE into the bases of a new folder STORE.

    RECIPE is what `mergekit-yaml` (or, for weight files, `mergekit-pytorch`) takes. The models may
    be deleted afterwards; the base may not.

    \b
    Example:
      tvb build recipe.yml ./store --dtype bfloat16
      torchrun --nproc-per-node 4 --no-python tvb build recipe.yml ./store
    """
    from tvb_mergekit import ranks
    from tvb_mergekit.adapters import NOT_ADAPTERS, build_adapters
    from tvb_mergekit.building import build_store
    from tvb_mergekit.output import check_new_folder
    from tvb_mergekit.plugin.files import input_folders
    from tvb_mergekit.plugin.inputs import read_document, read_inputs
    from tvb_mergekit.progress import bars
    from tvb_mergekit.store import DTYPES

    if values["rank"] and not values["adapters"]:
        raise UserError("--rank belongs to --adapters")
    if values["adapters"] and (values["resume"] or values["fuse"]):
        raise UserError("--adapters goes with neither --resume nor --fuse")
    if values["adapters"]:
        ranks.one_only("tvb build --adapters")
    devices = _devices_of(values)
    world = ranks.world()
    document = read_document(recipe)
    if values["adapters"] and not all(model.lora for model in document.recipe.models):
        raise UserError(NOT_ADAPTERS)
    check_new_folder(store, input_folders(document.recipe))  # before anything is downloaded
    inputs = world.first(lambda: read_inputs(document, _model_options(values)))
    dtype = DTYPES[values["dtype"]] if values["dtype"] else inputs.own_dtype
    if values["adapters"]:
        bases = build_adapters(inputs, store, dtype=dtype, rank=values["rank"])
    else:
        bases = build_store(
            inputs,
            store,
            dtype=dtype,
            devices=devices,
            resume=values["resume"],
            budget=values["memory"],
            progress=bars(values["quiet"] or not world.leads),
        )
    _say_built(bases)


def _say_built(bases: Bases) -> None:
    from tvb_mergekit.inspection import Inspection
    from tvb_mergekit.output import megabytes

    sizes, energy = Inspection(bases.facts, bases.tensors).sizes, bases.facts["retained_energy"]
    assert sizes is not None
    size, saved = sizes.store, sizes.saved
    than = f", {megabytes(abs(saved))} {'less' if saved > 0 else 'more'} than the models"
    click.echo(
        f"{bases.path}: {_bases(bases.num_bases)} of {_tasks(len(bases.tasks))}, {megabytes(size)}"
        + (than if saved else "")
        + ("" if energy is None else f"; retained energy {100 * energy:.2f} %")
    )
    click.echo(f"Ready recipes: {bases.path}/recipes")


def _bases(count: int) -> str:
    return f"{count} basis" if count == 1 else f"{count} bases"


def _tasks(count: int) -> str:
    return f"{count} task" if count == 1 else f"{count} tasks"


@main.command()
@click.argument("path", type=click.Path())
@click.option("--json", "as_text", is_flag=True, help="JSON on standard output.")
@click.option("--plot", metavar="FILE", help="Write a picture: .png, .svg, .pdf or .html.")
@_device
@_memory
@_models
@_quiet
@_careful("plot")
def inspect(path: str, as_text: bool, plot: str | None, **values: Any) -> None:
    """Show tasks, cosines, bases and errors of PATH: a store, a merged model, or a recipe.

    \b
    Example: tvb inspect ./store --plot store.png
    """
    from rich.console import Console

    from tvb_mergekit.inspection import as_json, print_inspection
    from tvb_mergekit.plots import check_plot
    from tvb_mergekit.plots import plot as draw

    if plot is not None:
        check_plot(plot)
    found = _inspection(path, values)
    if plot is not None:
        draw(found, plot)
    if as_text:
        click.echo(json.dumps(as_json(found), indent=2))
    else:
        print_inspection(found, Console(highlight=False))


def _inspection(path: str, values: dict[str, Any]) -> Inspection:
    from tvb_mergekit.inspection import Inspection
    from tvb_mergekit.store import is_output, read_output

    if os.path.isfile(path):
        from tvb_mergekit.building import inspect_inputs
        from tvb_mergekit.plugin.inputs import read_document, read_inputs
        from tvb_mergekit.progress import bars

        document = read_document(path)
        if document.recipe.store is None:
            inputs = read_inputs(document, _model_options(values))
            device = _device_of(values["device"])
            show = bars(values["quiet"])
            facts, tensors = inspect_inputs(inputs, device, show, values["memory"])
            return Inspection({**facts, "built": False}, tensors)
        path = str(document.recipe.store.path)
    if is_output(path):
        return Inspection(*read_output(path))
    bases = _load(path)
    return Inspection(bases.facts, bases.tensors)


def _load(path: str) -> Bases:
    """Open a store for reading, all its files compared with their checksums."""
    from tvb_mergekit.store import is_basis, load

    if os.path.isfile(path):
        raise UserError(f"{path} is a file; expected the folder of a store")
    if is_basis(path):
        raise UserError(f"{path} is one basis of a store; name the store, the folder around it")
    return load(path)


@main.command()
@click.argument("store", type=click.Path())
@click.argument("model")
@click.option("--task", required=True, help="The new task's name.")
@click.option("--weight", type=float, default=1.0, show_default=True, help="Of its task vector.")
@click.option("--budget", type=int, metavar="M", help="The most bases that STORE may hold.")
@click.option(
    "--compress",
    type=click.Choice(["ae", "balanced"]),
    help="How a full store makes room: as in the paper, or keeping the sum of all tasks.",
)
@click.option("--dtype", type=_dtypes, help=f"Of a new STORE; {_OWN}.")
@click.option(
    "--force", is_flag=True, help="Also a model unlike the others, or an end of the exact sum."
)
@_base
@_device
@_memory
@_models
@_quiet
@_careful("store")
def add(store: str, model: str, task: str, **values: Any) -> None:
    """Add the task of a fine-tuned MODEL to STORE, within its budget of bases.

    Below the budget the new task vector becomes a basis; at the budget the bases are compressed by
    one first (Algorithm 1 of the paper). Needs the base and MODEL, and none of the models before.
    A STORE that does not exist is made: give --base and --budget. The store of before is kept until
    the next `tvb add`: `tvb undo STORE` brings it back.

    \b
    Example: tvb add ./store ./new-model --task new --budget 4
    """
    from tvb_mergekit.grow import Growth, add_to_store
    from tvb_mergekit.plugin.inputs import from_mapping, read_inputs
    from tvb_mergekit.progress import bars
    from tvb_mergekit.store import DTYPES

    device = _device_of(values["device"])
    new = not os.path.exists(store) or (os.path.isdir(store) and not os.listdir(store))
    if new and (values["base"] is None or values["budget"] is None):
        raise UserError(f"{store}: no such store; a new one needs --base BASE and --budget M")
    bases = None if new else _load(store)
    base = values["base"] if bases is None else _base_of(bases, values["base"])[0]
    if bases is not None and values["dtype"] not in (None, bases.facts["store"]["dtype"]):
        raise UserError(
            f"--dtype {values['dtype']}: {store} is there, and holds "
            f"{bases.facts['store']['dtype']}; leave --dtype out"
        )
    parameters: dict[str, Any] = {"num_bases": 1}
    if bases is not None:
        if bases.settings.exclude is not None:
            parameters["exclude"] = bases.settings.exclude
    elif values["compress"]:
        parameters["basis"] = values["compress"]
    listed = {"model": model, "parameters": {"task": task, "weight": values["weight"]}}
    recipe = {
        "merge_method": "basis_ta",
        "base_model": base,
        "models": [listed],
        "parameters": parameters,
    }
    names = None if bases is None else bases.names
    inputs = read_inputs(from_mapping(recipe), _model_options(values), names)
    dtype = DTYPES[values["dtype"]] if values["dtype"] else inputs.own_dtype
    doubt = logging.warning if values["force"] else _refuse
    growth = Growth(values["budget"], values["compress"], dtype, doubt)
    grown = add_to_store(
        store,
        inputs,
        growth,
        device=device,
        budget=values["memory"],
        progress=bars(values["quiet"]),
    )
    worst = max(grown.facts["errors"].items(), key=lambda entry: entry[1]["at_most"])
    click.echo(
        f"{grown.path}: {_tasks(len(grown.tasks))} in {grown.num_bases} of at most "
        f"{grown.facts['store']['budget']} bases; largest relative error of a task at most "
        f"{worst[1]['at_most']:.3f} ({worst[0]})"
    )


def _refuse(doubt: str) -> None:
    raise UserError(f"{doubt}; --force adds it all the same")


@main.command()
@click.argument("store", type=click.Path())
@_careful("store")
def undo(store: str) -> None:
    """Take back the last `tvb add`: STORE is what it was before. One step can be undone.

    \b
    Example: tvb undo ./store
    """
    from tvb_mergekit.grow import undo_addition

    bases = undo_addition(store)
    click.echo(f"{bases.path}: {_tasks(len(bases.tasks))} in {_bases(bases.num_bases)}, as before")


@main.command()
@click.argument("store", type=click.Path())
@click.argument("out", type=click.Path())
@click.option("--task", help="The model of this task, theta_0 + its reconstructed task vector.")
@click.option("--basis", type=int, metavar="K", help="The model theta_0 + B_K.")
@click.option("--all-bases", is_flag=True, help="A model for each basis, OUT/basis-000 ...")
@click.option("--dtype", type=_dtypes, help="Of the model; the base's by default.")
@_base
@_device
@_memory
@_quiet
@_careful("out")
def export(store: str, out: str, **values: Any) -> None:
    """Write full Hugging Face models from the bases in STORE, for any use and any merge method.

    \b
    Example: tvb export ./store ./math --task math
    """
    from tvb_mergekit import export as exporting
    from tvb_mergekit.progress import bars
    from tvb_mergekit.store import DTYPES, basis_folder

    task, basis, every = values["task"], values["basis"], values["all_bases"]
    if (task is not None) + (basis is not None) + every != 1:
        raise UserError("give one of --task NAME, --basis K and --all-bases")
    device = _device_of(values["device"])
    bases = _load(store)
    if task is not None:
        matrix, folders = exporting.task_column(bases, task), [""]
        weight = float(bases.weights[bases.index(task)])
        what = [f"{task}, reconstructed" + f" (without its weight of {weight:g})" * (weight != 1)]
    else:
        indices = list(range(bases.num_bases)) if every else [basis]
        matrix = exporting.basis_columns(bases, indices)
        folders = [basis_folder(m) for m in indices] if every else [""]
        what = [f"Base plus basis {m} of {bases.num_bases}" for m in indices]
    _, weights, folder = _base_of(bases, values["base"])
    exporting.export(
        bases,
        weights,
        folder,
        matrix,
        folders,
        out,
        what=what,
        dtype=DTYPES[values["dtype"]] if values["dtype"] else None,
        device=device,
        budget=values["memory"],
        progress=bars(values["quiet"]),
    )
    click.echo(f"Written to {out}")


@main.command()
@click.argument("recipe", metavar="RECIPE|STORE", type=click.Path(exists=True))
@click.argument("out", type=click.Path())
@click.option("--method", metavar="NAME", help="Of a STORE: add, ties or forget-TASK.")
@_base
@_device
@_multi_gpu
@_memory
@_access
@click.option("--out-shard-size", metavar="SIZE", default="5B", help="mergekit's: 500M, 5B ...")
@click.option("--copy-tokenizer/--no-copy-tokenizer", default=True, help="Of the base, into OUT.")
@click.option("--write-model-card/--no-write-model-card", default=True, help="OUT/README.md.")
@_quiet
@_careful("out", several=True)
def merge(recipe: str, out: str, **values: Any) -> None:
    """Merge the models of RECIPE into OUT: what `mergekit-yaml` writes, bit by bit, and sooner.

    RECIPE is one of `basis_ta`, `basis_ties` or `basis_negate`, over models or over the bases of a
    store. A STORE needs no recipe: `tvb merge STORE OUT --method add`, by what it was built with.
    Tensors are streamed: no more than --memory is held of them, whatever the size of a model and of
    the shards of OUT.

    \b
    Example:
      tvb merge recipe.yml ./merged --memory 2GB
      torchrun --nproc-per-node 4 --no-python tvb merge recipe.yml ./merged
    """
    from tvb_mergekit import ranks
    from tvb_mergekit.plugin.inputs import from_mapping, read_document
    from tvb_mergekit.plugin.running import recipe_text
    from tvb_mergekit.plugin.streaming import merge_recipe

    _check_multi_gpu(values)
    memory, method, base = values.pop("memory"), values.pop("method"), values.pop("base")
    values["quiet"] |= not ranks.world().leads
    values["device"] = None if values["multi_gpu"] else str(_device_of(values["device"]))
    if os.path.isdir(recipe):
        made = _ready_recipe(recipe, method, base)
        document, text = from_mapping(made), yaml.safe_dump(made, sort_keys=False)
    elif method is not None or base is not None:
        raise UserError(f"{recipe} is a recipe: --method and --base belong to a STORE")
    else:
        document, text = read_document(recipe), recipe_text(recipe)
    merge_recipe(document, text, out, memory, **values)


def _ready_recipe(store: str, method: str | None, base: str | None) -> dict[str, Any]:
    """A ready recipe of a store where it lies now."""
    from tvb_mergekit.keys import nearest
    from tvb_mergekit.ready import ready

    bases = _load(store)
    known = ready(bases.facts, os.path.abspath(store), _base_of(bases, base)[0])
    if method in known:
        return known[method][1]
    if method is None:
        raise UserError(f"{store} is a store: name a --method, one of {', '.join(known)}")
    guess = nearest(method, known)
    hint = f"did you mean {guess}? " if guess else ""
    raise UserError(f"--method {method}: {hint}Expected one of {', '.join(known)}")


@main.command()
@click.argument("recipe", type=click.Path())
@click.option("--deep", is_flag=True, help="Read every tensor: NaN, zero task vectors, wrong base.")
@click.option("--out", type=click.Path(), help="Where the output will lie, to look at its disk.")
@_device
@_models
@_quiet
@_careful()
def check(recipe: str, deep: bool, out: str | None, **values: Any) -> None:
    """Look for all that would stop a merge or a build of RECIPE, and estimate what they take.

    RECIPE may also be a store: then its files are compared with their checksums.

    \b
    Example: tvb check recipe.yml --deep
    """
    from tvb_mergekit import cache

    if os.path.isdir(recipe):
        from tvb_mergekit.ready import edited

        with cache.off():  # which knows files that were compared before
            bases = _load(recipe)
        click.echo(f"{recipe}: {len(bases.facts['store']['files'])} files as they were written")
        for name in edited(Path(recipe), bases.facts):
            click.echo(f"{recipe}/{name} was edited since")
        return
    from tvb_mergekit.inspection import printable
    from tvb_mergekit.plugin.checks import check_recipe
    from tvb_mergekit.progress import bars

    device = _device_of(values["device"])
    progress = bars(values["quiet"])
    for line in check_recipe(recipe, _model_options(values), deep, out, device, progress):
        click.echo(printable(line))


@main.command()
@click.argument("paths", nargs=-1, metavar="[[LABEL=]PATH...]")
@click.option("--base", metavar="PATH", help="Results of the base model.")
@click.option(
    "--specialist",
    "specialists",
    multiple=True,
    metavar="[CATEGORY=]PATH",
    help="Results of a category's own fine-tuned model; without CATEGORY, of all. Repeatable.",
)
@click.option(
    "--reference",
    metavar="paper|FILE",
    help="Its specialists stand in for --specialist; FILE: an earlier scores.json.",
)
@click.option("--show-reference", is_flag=True, help="Show the reference's other columns too.")
@click.option(
    "--benchmark",
    metavar="mergebench|mergebench_keyword|mini|FILE",
    help="By default the one that the tasks in the files belong to.",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="TASK:METRIC",
    help="Read another metric of a task, as METRIC,FILTER. Repeatable.",
)
@click.option("--partial", is_flag=True, help="Normalize over the categories that all have whole.")
@click.option(
    "--radar",
    type=click.Choice(["tasks", "categories", "none"]),
    default="tasks",
    show_default=True,
    help="The axes of the plot in --out.",
)
@click.option("--out", metavar="DIR", help="Write scores.md, scores.json, radar.svg, radar.png.")
@_careful("out")
def score(
    paths: tuple[str, ...],
    radar: Literal["tasks", "categories", "none"],
    out: str | None,
    **values: Any,
) -> None:
    """Table the results of lm_eval, with the normalized accuracy of MergeBench.

    Each PATH is a results_*.json of lm_eval, or a folder that holds some: categories that were run
    one by one join. Normalized accuracy is the sum of a model's category means over the same sum
    for the specialists. Whatever is missing, or not measured alike, is named.

    \b
    Example:
      tvb score ta=out/ta ae=out/ae --specialist out/specialists --out scores
      tvb score ta=out/ta --base out/base --specialist math=out/math --partial
      tvb score ta=out/ta --reference paper --show-reference
      tvb score --reference paper --show-reference      the paper's own table
    """
    from rich.console import Console

    from tvb_mergekit.inspection import printable
    from tvb_mergekit.scoring.gathering import check_output, gather, write
    from tvb_mergekit.scoring.text import print_table

    by = None if out is None or radar == "none" else radar
    if out is not None:
        check_output(out, by is not None)
    found = gather(paths, **values)
    for line in found.warnings:
        click.echo(f"Warning: {printable(line)}", err=True)
    if out is not None:
        pictures = []
        if by is not None and found.specialists is not None and found.compared:
            from tvb_mergekit.scoring.radar import radar as draw

            pictures = [(kind, draw(found, kind, by)) for kind in ("svg", "png")]
        elif by is not None:
            click.echo("Warning: nothing to normalize by, so no radar plot", err=True)
        write(found, out, pictures)
    print_table(found, Console(highlight=False))
    if out is not None:
        click.echo(f"Written to {out}")


@main.command()
@click.argument("recipe", type=click.Path(exists=True))
@click.option("--tasks", required=True, metavar="T1,T2", help="Of lm-eval: tasks or groups.")
@click.option("--out", required=True, metavar="DIR", help="For all that is found; see below.")
@click.option("--write", metavar="DIR", help="Also merge with what was found, into this folder.")
@click.option(
    "--grid", default="0:1:0.05", show_default=True, help="START:STOP:STEP, or numbers with commas."
)
@click.option(
    "--search",
    type=click.Choice(["grid", "golden"]),
    default="grid",
    show_default=True,
    help="golden: golden section between the grid's ends, 9 points where the grid has 21.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, min_open=True),
    help="Of golden; half the grid's step by default.",
)
@click.option(
    "--per-basis",
    type=click.IntRange(1),
    metavar="N",
    help="Then search a weight for each basis of a store, by Powell's method, in N points.",
)
@click.option(
    "--early-stop", is_flag=True, help="Give a point up once it is two standard errors behind."
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="TASK:METRIC",
    help="As lm-eval names it: METRIC,FILTER. Repeatable, also for one task.",
)
@click.option(
    "--reference",
    metavar="PATH",
    help="Results of lm_eval for the specialists: scores become shares of theirs.",
)
@click.option(
    "--control",
    "controls",
    multiple=True,
    metavar="TASK[:METRIC]",
    help="basis_negate: what must not be forgotten. Repeatable.",
)
@click.option(
    "--keep",
    type=float,
    default=0.95,
    show_default=True,
    help="basis_negate: the least share of the control score that alpha 0 has.",
)
@click.option("--limit", type=float, help="Items per task, or below 1 the share of them; seeded.")
@click.option(
    "--subsample", is_flag=True, help="Of these items, M/T for M bases of T tasks (the paper's)."
)
@click.option(
    "--test-share",
    type=float,
    default=0.2,
    show_default=True,
    help="Of a task without a validation split; 1: all, for tasks that are made to choose by.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Of the items, and of mergekit.",
)
@click.option(
    "--include-path", multiple=True, metavar="DIR", help="Folder of own lm-eval tasks. Repeatable."
)
@click.option("--metadata", metavar="JSON", help="lm-eval's, for tasks that take some.")
@click.option("--num-fewshot", type=click.IntRange(0), help="lm-eval's.")
@click.option("--apply-chat-template", "chat_template", is_flag=True, help="lm-eval's.")
@click.option("--confirm-run-unsafe-code", "unsafe_code", is_flag=True, help="lm-eval's.")
@click.option("--batch-size", default="1", show_default=True, help="lm-eval's; `auto` too.")
@click.option("--model-args", default="", metavar="K=V,...", help="lm-eval's: max_length=4096 ...")
@_memory
@_device
@_access
@_quiet
@_careful("out")
def tune(recipe: str, tasks: str, out: str, **values: Any) -> None:
    """Find the coefficient of RECIPE (or of a store's add.yml) by lm-eval's scores.

    One model in memory moves along theta_0 + lambda * Delta and is scored at each point; its
    weights are those that mergekit-yaml writes, to the last bit. For basis_ta, basis_ties,
    basis_negate (whose coefficient is alpha) and mergekit's task_arithmetic, ties, breadcrumbs;
    dare and della, which draw at random, are merged point by point.

    DIR gets tuned.yml, tune.md, tune.json, curve.png and points.jsonl. The same command goes on
    after an interruption, and shows the same again after its end. Test items are not used: a task
    is scored on its validation split. Of one without, a seeded part is, and test_samples.json names
    the rest, for `lm_eval --samples`.

    Memory: the loaded model, and --memory while models are merged (mergekit's own methods take what
    mergekit takes). Disk, below DIR and deleted at the end: up to five times the merged model, for
    the first merge, theta_0 and Delta.

    \b
    Example:
      tvb tune recipe.yml --tasks copa,rte --limit 200 --out tuned
      tvb tune ./store --tasks copa --search golden --out golden
      tvb tune forget.yml --tasks copa --control rte --out rest --write ./new
    """
    from rich.console import Console

    from tvb_mergekit.tuning.report import print_table, write
    from tvb_mergekit.tuning.running import Request, merge
    from tvb_mergekit.tuning.running import tune as search

    options = _model_options(values)
    for name in ("trust_remote_code", "allow_crimes", "lora_merge_cache", "transformers_cache"):
        del values[name]
    values["device"] = str(_device_of(values["device"]))
    values["metadata"] = _json(values["metadata"])
    request = Request(
        recipe,
        [name.strip() for name in tasks.split(",") if name.strip()],
        Path(out),
        options=options,
        **values,
    )
    found = search(request)
    missing = write(found)
    print_table(found, Console(highlight=False))
    for line in missing:
        click.echo(line, err=True)
    click.echo(f"Written to {out}")
    if request.write is not None:
        click.echo(merge(found))


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


@cache_group.command("list")
@_careful()
def list_entries() -> None:
    """Show the stored Gram matrices, newest first.

    \b
    Example: tvb cache list
    """
    from rich.console import Console
    from rich.table import Table

    from tvb_mergekit import cache

    folder = cache.cache_folder()
    if folder is None:
        click.echo(f"The cache is off ({cache.VARIABLE}).")
        return
    found = cache.entries()
    table = Table("written", "tasks", "parameters", "bytes", "file", box=None, pad_edge=False)
    for entry in found:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.modified))
        shown = ", ".join(entry.tasks)
        table.add_row(
            written, shown, f"{entry.num_parameters:,}", f"{entry.nbytes:,}", entry.path.name[:12]
        )
    if found:
        Console(soft_wrap=True, markup=False).print(table)
    click.echo(f"{len(found)} Gram matrices in {folder}")


@cache_group.command("clear")
@_careful()
def clear_entries() -> None:
    """Delete all stored Gram matrices.

    \b
    Example: tvb cache clear
    """
    from tvb_mergekit import cache

    click.echo(f"Deleted {cache.clear()} Gram matrices.")
