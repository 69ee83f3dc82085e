"""`tvb merge`, `tvb check` and `tvb export`: models, their checks, and LoRA adapters."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click
from click import argument, option

from tvb_mergekit.cli.options import (
    ACCESS,
    COUNT,
    DTYPES,
    MODELS,
    PLACE,
    RECIPE_OR_STORE,
    SHARE,
    Body,
    base_of,
    command,
    devices_of,
    document_of,
    dtype_of,
    engine_of,
    flag,
    folder,
    import_mergekit,
    load_store,
    model_options,
    place,
    read_recipe,
    refuse_given,
)
from tvb_mergekit.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from tvb_mergekit.plugin.document import Document
    from tvb_mergekit.store.store import Bases
    from tvb_mergekit.tensors.factoring import Truncation

SIZES = ("rank", "energy", "size")
ONE_OF = {
    False: "give one of --task NAME, --basis K, --all-bases and --all DIR",
    True: "--lora goes with one of --task NAME, --basis K, --all and --model FOLDER",
}


def lora_options(what: str) -> Callable[[Body], Body]:
    """--lora with this help, and the size of an adapter."""
    options = (
        flag("--lora", help=what),
        option("--rank", type=COUNT, metavar="R", help="--lora: one rank for all matrices."),
        option(
            "--energy", type=SHARE, help="--lora: a share of norm^2. Slow: all singular values."
        ),
        option("--size", metavar="SIZE", help="--lora: the best ranks in SIZE bytes, like 20MB."),
    )
    return lambda body: functools.reduce(lambda made, each: each(made), options[::-1], body)


def _truncation(values: dict[str, Any], least: int = 1) -> Truncation:
    """The size of an adapter by the options: one of three, or at most one."""
    from tvb_mergekit.tensors.factoring import Truncation
    from tvb_mergekit.tensors.layout import parse_memory

    rank, energy, size = (values[key] for key in SIZES)
    if not least <= sum(each is not None for each in (rank, energy, size)) <= 1:
        raise UserError("--lora goes with one of --rank R, --energy SHARE and --size SIZE")
    return Truncation(rank, energy, None if size is None else parse_memory(size))


def _check_lora(values: dict[str, Any], *options: str) -> None:
    """Raise UserError if an option of adapters was given without --lora."""
    if given := [key for key in (*SIZES, *options) if values[key]]:
        raise UserError(f"--{given[0]} is for adapters: add --lora")


@command("base", "device", "multi_gpu", "memory", *ACCESS, "quiet", writes="out", several=True)
@argument("recipe", metavar="RECIPE|STORE", type=RECIPE_OR_STORE)
@argument("out", type=PLACE)
@option("--method", metavar="NAME", help="For a STORE: add, ties, iso, tsvm, wudi, forget-TASK.")
@option("--out-shard-size", metavar="SIZE", default="5B", help="mergekit's: 500M, 5B ...")
@option("--copy-tokenizer/--no-copy-tokenizer", default=True, help="Copy the base's into OUT.")
@option("--write-model-card/--no-write-model-card", default=True, help="Write OUT/README.md.")
@lora_options("Write a LoRA adapter, not a model. A RECIPE of adapters needs no size.")
@option("--dtype", type=DTYPES, help="--lora: dtype of the factors, by default float32.")
def merge(
    recipe: str,
    out: str,
    method: str | None,
    base: str | None,
    memory: int,
    **values: Any,
) -> None:
    """Merge the models of RECIPE into OUT, with the same bits as `mergekit-yaml`.

    RECIPE uses one of our methods, over models or over the bases of a store. A STORE needs no
    recipe: `tvb merge STORE OUT --method add`. Tensors are streamed. They use at most --memory,
    for models and shards of any size.

    --lora writes a LoRA adapter, which PEFT and servers add to the base. If all models are
    adapters, BASE+ADAPTER, the merge has exact factors, except by basis_ties. Other merges are
    truncated to --rank, --energy or --size. The command prints and stores the error.

    \b
    Example:
      tvb merge recipe.yml ./merged --memory 2GB
      tvb merge recipe.yml ./merged-lora --lora --rank 16
      torchrun --nproc-per-node 4 --no-python tvb merge recipe.yml ./merged
    """
    from tvb_mergekit.tensors import ranks

    if values["lora"]:
        of_models = ("out_shard_size", "copy_tokenizer", "write_model_card")
        refuse_given(of_models, "--lora writes no model")
        ranks.one_only("tvb merge --lora")
        _merge_to_adapter(document_of(recipe, method, base), out, values | {"memory": memory})
        return
    _check_lora(values, "dtype")
    for name in ("lora", "dtype", *SIZES):
        del values[name]
    devices = devices_of(values)
    values["device"] = None if values["multi_gpu"] else str(devices[0])
    values["quiet"] |= not ranks.world().leads
    document = document_of(recipe, method, base)

    from tvb_mergekit.plugin.run import merge_recipe

    merge_recipe(document, out, memory, **values)


def _merge_to_adapter(document: Document, out: str, values: dict[str, Any]) -> None:
    import torch
    from rich.console import Console

    from tvb_mergekit.plugin.lora import merge_to_adapter
    from tvb_mergekit.tables import show

    size, dtype = _truncation(values, least=0), dtype_of(values["dtype"]) or torch.float32
    options = model_options(values | {"fuse": values["lora_merge_cache"] is not None})
    reports = merge_to_adapter(document, out, size, dtype, engine_of(values), options)
    show([report.sheet for report in reports], Console(highlight=False))
    click.echo(f"Written to {out}")


@command("device", *MODELS, "quiet")
@argument("recipe", metavar="RECIPE|STORE", type=RECIPE_OR_STORE)
@flag("--deep", help="Read every tensor: NaN, zero task vectors, wrong base.")
@option("--out", type=PLACE, help="Check the disk of this output folder.")
def check(recipe: str, deep: bool, out: str | None, **values: Any) -> None:
    """Find problems that would stop a merge or a build of RECIPE, and estimate the costs.

    RECIPE may also be a store: then its files are compared with their checksums.

    \b
    Example: tvb check recipe.yml --deep
    """
    if os.path.isdir(recipe):
        if deep or out is not None:
            raise UserError("--deep and --out are for a RECIPE: leave them out")
        bases = load_store(recipe, checksums=True)
        click.echo(f"{recipe}: {len(bases.facts.store.files)} files as they were written")
        return
    from tvb_mergekit.tables import printable

    engine, document, options = engine_of(values), read_recipe(recipe), model_options(values)

    from tvb_mergekit.cli.check import check_recipe

    for line in check_recipe(recipe, document, options, deep, out, engine):
        click.echo(printable(line))


@command("base", "device", "memory", "quiet", writes="out")
@argument("store", type=PLACE)
@argument("out", type=PLACE, required=False)
@option("--task", help="The model of this task, theta_0 + its reconstructed task vector.")
@option("--basis", type=int, metavar="K", help="The model theta_0 + B_K.")
@flag("--all-bases", help="A model for each basis, OUT/basis-000 ...")
@folder("--all", "every", type=str, is_flag=False, flag_value="", help="All tasks' models, in DIR.")
@option("--dtype", type=DTYPES, help="Dtype: by default a model has the base's, --lora float32.")
@lora_options("Write LoRA adapters, not models; with --all of all bases, or of all tasks.")
@flag("--sums", help="--lora --all: also each task as one adapter, the sum of those of the bases.")
@place("--model", help="--lora: the difference of this model from --base, without a STORE.")
def export(store: str, out: str | None, lora: bool, **values: Any) -> None:
    """Write complete Hugging Face models from STORE into OUT, for any use and any merge method.

    --lora writes LoRA adapters for PEFT and for servers instead. It prints and stores their errors.

    \b
    Example:
      tvb export ./store ./math --task math
      tvb export ./store --all ./models           ./models/math, ./models/code ...
      tvb export ./store ./math-lora --task math --lora --rank 16
      tvb export ./store ./adapters --lora --rank 16 --all
      tvb export --model ./math --base ./base ./small-lora --lora --size 20MB
    """
    model, every = values["model"], values["every"]
    if not lora:
        _check_lora(values, "sums", "model")
    kinds = ("task", "basis", "every", "model" if lora else "all_bases")
    given = [key for key in kinds if values[key] is not None and values[key] is not False]
    if len(given) != 1 or (lora and values["all_bases"]):
        raise UserError(ONE_OF[lora])
    if model is None and (out is None) != bool(every):
        raise UserError("name one output folder: OUT, or --all DIR")
    write = _write_adapters if lora else _write_models
    click.echo(f"Written to {write(store, every or out, **values)}")


def _write_models(store: str, out: Any, base: str | None, **values: Any) -> str:
    from tvb_mergekit.store.export import export

    engine, bases = engine_of(values), load_store(store, task=values["task"])
    folders, what, matrix = _chosen(bases, values)
    _, weights, folder = base_of(bases, base)
    dtype = dtype_of(values["dtype"])
    export(bases, weights, folder, matrix, folders, out, engine, what=what, dtype=dtype)
    return str(out)


def _chosen(bases: Bases, values: dict[str, Any]) -> tuple[Sequence[str], list[str], Tensor]:
    """Folders, titles, and combinations [len(bases.sources), n] of the models of the options."""
    import torch

    from tvb_mergekit.store.export import basis_columns, task_column
    from tvb_mergekit.store.forms import slugs

    held, task, basis = bases.facts.store.folders, values["task"], values["basis"]
    if values["all_bases"] or basis is not None:
        indices = [*range(bases.num_bases)] if basis is None else [basis]
        titles = [f"Base plus basis {m} of {bases.num_bases}" for m in indices]
        return held[: len(titles)] if basis is None else [""], titles, basis_columns(bases, indices)
    tasks, titles = bases.tasks if task is None else [task], []
    columns = torch.cat([task_column(bases, each) for each in tasks], 1)
    for each in tasks:
        weight = float(bases.weights[bases.index(each)])
        without = f" (without its weight of {weight:g})" if weight != 1 else ""
        titles.append(f"{each}, reconstructed{without}")
    if task is not None:
        return [""], titles, columns
    return held if bases.keeps_tasks else slugs(tasks), titles, columns


def _write_adapters(
    store: str, out: str | None, base: str | None, model: str | None, **values: Any
) -> str:
    import torch
    from rich.console import Console

    from tvb_mergekit.store import lora
    from tvb_mergekit.tables import show

    cut, every = _truncation(values), values["every"]
    if values["sums"] and every is None:
        raise UserError("--sums adds up the adapters of bases: it goes with --all")
    scales: lora.Scales = {}
    if model is not None:
        if base is None or out is not None:
            raise UserError("--model goes with --base BASE and one output folder, without a STORE")
        import_mergekit()
        from tvb_mergekit.plugin.inputs import open_base

        out, name, (weights, folder) = store, base, open_base(base)
        items, notes = lora.items_of_model(weights, model)
        for note in notes:
            logging.warning(note)
        one = torch.ones(1, dtype=torch.float64)
        inputs, adapters = [model], [lora.NewAdapter("", f"{model} minus {name}", one)]
    else:
        bases = load_store(store, task=values["task"])
        if values["sums"] and bases.keeps_tasks:
            raise UserError("--sums adds up the adapters of bases, and the store keeps all tasks")
        if every is not None:
            adapters, scales = lora.adapters_of(bases, values["sums"])
        else:
            _, (title,), column = _chosen(bases, values)
            adapters = [lora.NewAdapter("", title, column[:, 0])]
        name, weights, folder = base_of(bases, base)
        items, inputs = lora.items_of_store(bases, weights), bases.labels
    dtype, engine = dtype_of(values["dtype"]) or torch.float32, engine_of(values)
    exporter = lora.AdapterExport(items, inputs, weights, name, folder, cut, dtype, engine)
    sources = [str(each) for each in (model or store, folder) if each is not None]
    reports = exporter.write(adapters, str(out), sources, scales)
    sheets = [report.sheet for report in reports] if every is None else [lora.overview(reports)]
    show(sheets, Console(highlight=False))
    return str(out)
