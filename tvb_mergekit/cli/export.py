"""`tvb export`: models and LoRA adapters."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import click
from click import argument, option

from tvb_mergekit.cli.opening import base_of, dtype_of, load_store
from tvb_mergekit.cli.options import (
    DTYPES,
    PLACE,
    SHARE,
    command,
    engine_of,
    flag,
    folder,
    import_mergekit,
    place,
)
from tvb_mergekit.errors import UserError

if TYPE_CHECKING:
    from tvb_mergekit.store.store import Bases

Chosen = tuple[str | None, int | None, str | None]  # --task, --basis and --all
OF_LORA = ("rank", "energy", "size", "sums", "model")


@command("base", "device", "memory", "quiet", writes="out")
@argument("store", type=PLACE)
@argument("out", type=PLACE, required=False)
@option("--task", help="The model of this task, theta_0 + its reconstructed task vector.")
@option("--basis", type=int, metavar="K", help="The model theta_0 + B_K.")
@flag("--all-bases", help="A model for each basis, OUT/basis-000 ...")
@folder("--all", "every", type=str, is_flag=False, flag_value="", help="All tasks' models, in DIR.")
@option("--dtype", type=DTYPES, help="Dtype: by default a model has the base's, --lora float32.")
@flag("--lora", help="Write LoRA adapters, not models; with --all of all bases, or of all tasks.")
@option("--rank", type=click.IntRange(1), metavar="R", help="--lora: one rank for all matrices.")
@option("--energy", type=SHARE, help="--lora: this share of norm^2. Slow: all singular values.")
@option("--size", metavar="SIZE", help="--lora: the best ranks in SIZE bytes, such as 20MB.")
@flag("--sums", help="--lora --all: also each task as one adapter, the sum of those of the bases.")
@place("--model", help="--lora: the difference of this model from --base, without a STORE.")
def export(
    store: str,
    out: str | None,
    task: str | None,
    basis: int | None,
    all_bases: bool,
    every: str | None,
    lora: bool,
    **values: Any,
) -> None:
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
    import torch

    from tvb_mergekit.store import export as exporting
    from tvb_mergekit.store.bits import slugs

    if lora:
        return _adapters(store, out, (task, basis, every), all_bases, values)
    if given := [key for key in OF_LORA if values[key]]:
        raise UserError(f"--{given[0]} is for adapters: add --lora")
    if (task is not None) + (basis is not None) + all_bases + (every is not None) != 1:
        raise UserError("give one of --task NAME, --basis K, --all-bases and --all DIR")
    if (out is None) != bool(every):
        raise UserError("name one output folder: OUT, or --all DIR")
    out = every or str(out)
    engine = engine_of(values)
    bases = load_store(store)
    folders = [""]
    if task is not None or every is not None:
        tasks = bases.tasks if task is None else [task]
        matrix = torch.cat([exporting.task_column(bases, each) for each in tasks], 1)
        what = [_reconstructed(bases, each) for each in tasks]
        if task is None:
            folders = bases.facts.store.folders if bases.keeps_tasks else slugs(tasks)
    else:
        indices = list(range(bases.num_bases)) if basis is None else [basis]
        matrix = exporting.basis_columns(bases, indices)
        what = [f"Base plus basis {m} of {bases.num_bases}" for m in indices]
        if all_bases:
            folders = [bases.facts.store.folders[m] for m in indices]
    _, base, folder = base_of(bases, values["base"])
    exporting.export(
        bases,
        base,
        folder,
        matrix,
        folders,
        out,
        engine,
        what=what,
        dtype=dtype_of(values["dtype"]),
    )
    click.echo(f"Written to {out}")


def _reconstructed(bases: Bases, task: str) -> str:
    weight = float(bases.weights[bases.index(task)])
    return f"{task}, reconstructed" + f" (without its weight of {weight:g})" * (weight != 1)


def _adapters(
    store: str, out: str | None, chosen: Chosen, all_bases: bool, values: dict[str, Any]
) -> None:
    import torch
    from rich.console import Console

    from tvb_mergekit.store import lora
    from tvb_mergekit.store.export import basis_columns, task_column
    from tvb_mergekit.tables import show
    from tvb_mergekit.tensors.factoring import Truncation
    from tvb_mergekit.tensors.layout import parse_memory

    (task, basis, every), model, given = chosen, values["model"], values["base"]
    rank, energy, size = values["rank"], values["energy"], values["size"]
    if all_bases or sum(each is not None for each in (*chosen, model)) != 1:
        raise UserError("--lora goes with one of --task NAME, --basis K, --all and --model FOLDER")
    if sum(each is not None for each in (rank, energy, size)) != 1:
        raise UserError("--lora goes with one of --rank R, --energy SHARE and --size SIZE")
    if values["sums"] and every is None:
        raise UserError("--sums adds up the adapters of bases: it goes with --all")
    if model is not None and (given is None or out is not None):
        raise UserError("--model goes with --base BASE and one output folder, without a STORE")
    if model is None and (out is None) != bool(every):
        raise UserError("name one output folder: OUT, or --all DIR")
    scales: lora.Scales = {}
    if model is not None:
        import_mergekit()
        from tvb_mergekit.plugin.inputs import open_base

        out, name, (base, folder) = store, given, open_base(given)
        items, notes = lora.items_of_model(base, model)
        for note in notes:
            logging.warning(note)
        one = torch.ones(1, dtype=torch.float64)
        inputs, adapters = [model], [lora.NewAdapter("", f"{model} minus {name}", one)]
    else:
        bases = load_store(store)
        if task is not None:
            title, column = _reconstructed(bases, task), task_column(bases, task)
            adapters = [lora.NewAdapter("", title, column[:, 0])]
        elif basis is not None:
            title, column = f"Basis {basis} of {bases.num_bases}", basis_columns(bases, [basis])
            adapters = [lora.NewAdapter("", title, column[:, 0])]
        else:
            adapters, scales = lora.adapters_of(bases, values["sums"])
        name, base, folder = base_of(bases, given)
        items, inputs = lora.items_of_store(bases, base), bases.labels
    exporter = lora.AdapterExport(
        items,
        inputs,
        base,
        name,
        folder,
        Truncation(rank, energy, parse_memory(size) if size else None),
        dtype_of(values["dtype"]) or torch.float32,
        engine_of(values),
    )
    out = every or str(out)
    sources = [str(each) for each in (model or store, folder) if each is not None]
    reports = exporter.write(adapters, out, sources, scales)
    sheets = [report.sheet for report in reports] if every is None else [lora.overview(reports)]
    show(sheets, Console(highlight=False))
    click.echo(f"Written to {out}")
