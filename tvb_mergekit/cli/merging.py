"""`tvb merge` and `tvb export`: models and LoRA adapters."""

from __future__ import annotations

import logging
from typing import Any

import click
from click import argument, option

from tvb_mergekit.cli import options as cli
from tvb_mergekit.cli.options import DTYPES, MODELS, PLACE, command, flag
from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors import ranks

WAYS = ("add", "ties", "iso", "tsvm", "wudi")  # the names of `store.recipes`, which imports torch


@command("base", "device", *MODELS, "quiet", writes="out", several=True)
@argument("recipe", metavar="RECIPE|STORE", type=cli.RECIPE_OR_STORE)
@argument("out", type=PLACE)
@option("--method", metavar="NAME", help=f"For a STORE: {', '.join(WAYS)}, forget-TASK.",
        **cli.of_store(WAYS, "forget-{}"))  # fmt: skip
@option("--out-shard-size", metavar="SIZE", default="5B", help="mergekit's: 500M, 5B ...")
@option("--copy-tokenizer/--no-copy-tokenizer", default=True, help="Copy the base's into OUT.")
@option("--write-model-card/--no-write-model-card", default=True, help="Write OUT/README.md.")
@flag("--lora", help="Merge adapters to an adapter, not a model.")
@option("--dtype", type=DTYPES, help="--lora: dtype of the factors, by default float32.")
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
        import torch

        ranks.one_only("tvb merge --lora")
        document = cli.document_of(recipe, method, base)
        from tvb_mergekit.plugin.lora import merge_to_adapter

        merge_to_adapter(document, out, dtype or torch.float32, cli.model_options(values))
        click.echo(f"Written to {out}")
        return
    if dtype:
        raise UserError("--dtype is for adapters: add --lora, or give `dtype` in the recipe")
    values["device"] = str(cli.device_of(values["device"]))
    values["quiet"] |= not ranks.world().leads
    document = cli.document_of(recipe, method, base)
    from tvb_mergekit.plugin.run import merge_recipe

    merge_recipe(document, out, **values)


@command("base", "device", "quiet", writes="out")
@argument("store", type=PLACE)
@argument("out", type=PLACE)
@option("--task", help="This task's model: theta_0 + its task vector.", **cli.of_store())
@flag("--all", "every", help="All tasks' models, each in a folder of OUT.")
@option("--dtype", type=DTYPES, help="Dtype: by default the base's.")
def export(store: str, out: str, base: str | None, task: str | None, **values: Any) -> None:
    """Write the models of tasks from STORE into OUT.

    They are complete Hugging Face models, for any use and any merge method.

    \b
    Example:
      tvb export ./store ./math --task math
      tvb export ./store ./models --all           ./models/math, ./models/code ...
    """
    from tvb_mergekit.store.export import export as write
    from tvb_mergekit.store.store import load

    every = values["every"]
    if (task is None) != every:
        raise UserError("give one of --task NAME and --all")
    engine, bases, more = cli.engine_of(values), load(store), logging.warning
    tasks, (_, weights, folder) = [task] if task else bases.tasks, cli.base_of(bases, base)
    how = {"every": every, "dtype": cli.dtype_of(values["dtype"]), "warn": more}
    write(bases, weights, folder, tasks, out, engine, **how)
    click.echo(f"Written to {out}")
