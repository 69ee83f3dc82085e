"""`tvb merge` and `tvb export`: models and LoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from click import argument, option

from tvb_mergekit.cli.options import (
    DTYPES,
    MODELS,
    PLACE,
    RECIPE_OR_STORE,
    base_of,
    command,
    device_of,
    document_of,
    dtype_of,
    engine_of,
    flag,
    folder,
    load_store,
    model_options,
    refuse_given,
)
from tvb_mergekit.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from tvb_mergekit.store.store import Bases


@command("base", "device", *MODELS, "quiet", writes="out", several=True)
@argument("recipe", metavar="RECIPE|STORE", type=RECIPE_OR_STORE)
@argument("out", type=PLACE)
@option("--method", metavar="NAME", help="For a STORE: add, ties, iso, tsvm, wudi, forget-TASK.")
@option("--out-shard-size", metavar="SIZE", default="5B", help="mergekit's: 500M, 5B ...")
@option("--copy-tokenizer/--no-copy-tokenizer", default=True, help="Copy the base's into OUT.")
@option("--write-model-card/--no-write-model-card", default=True, help="Write OUT/README.md.")
@flag("--lora", help="Merge adapters to an adapter, not a model.")
@option("--dtype", type=DTYPES, help="--lora: dtype of the factors, by default float32.")
def merge(
    recipe: str,
    out: str,
    method: str | None,
    base: str | None,
    **values: Any,
) -> None:
    """Merge the models of RECIPE into OUT, with the same bits as `mergekit-yaml`.

    RECIPE uses one of our methods, over models or over the bases of a store. A STORE needs no
    recipe: `tvb merge STORE OUT --method add`. Tensors are streamed, for models of any size.

    --lora writes a LoRA adapter, which PEFT and servers add to the base. All models of RECIPE are
    adapters, BASE+ADAPTER. Their merge has exact factors, except by basis_ties.

    \b
    Example:
      tvb merge recipe.yml ./merged
      torchrun --nproc-per-node 4 --no-python tvb merge recipe.yml ./merged
    """
    import torch

    from tvb_mergekit.tensors import ranks

    if values["lora"]:
        of_models = ("out_shard_size", "copy_tokenizer", "write_model_card")
        refuse_given(of_models, "--lora writes no model")
        ranks.one_only("tvb merge --lora")
        from tvb_mergekit.plugin.lora import merge_to_adapter

        document, dtype = document_of(recipe, method, base), dtype_of(values["dtype"])
        merge_to_adapter(document, out, dtype or torch.float32, model_options(values))
        click.echo(f"Written to {out}")
        return
    if values["dtype"]:
        raise UserError("--dtype is for adapters: add --lora")
    for name in ("lora", "dtype"):
        del values[name]
    values["device"] = str(device_of(values["device"]))
    values["quiet"] |= not ranks.world().leads
    document = document_of(recipe, method, base)

    from tvb_mergekit.plugin.run import merge_recipe

    merge_recipe(document, out, **values)


@command("base", "device", "quiet", writes="out")
@argument("store", type=PLACE)
@argument("out", type=PLACE, required=False)
@option("--task", help="The model of this task, theta_0 + its reconstructed task vector.")
@option("--basis", type=int, metavar="K", help="The model theta_0 + B_K.")
@flag("--all-bases", help="A model for each basis, OUT/basis-000 ...")
@folder("--all", "every", type=str, is_flag=False, flag_value="", help="All tasks' models, in DIR.")
@option("--dtype", type=DTYPES, help="Dtype: by default the base's.")
def export(store: str, out: str | None, base: str | None, **values: Any) -> None:
    """Write complete Hugging Face models from STORE into OUT, for any use and any merge method.

    \b
    Example:
      tvb export ./store ./math --task math
      tvb export ./store --all ./models           ./models/math, ./models/code ...
    """
    from tvb_mergekit.store.export import export as write

    every, kinds = values["every"], ("task", "basis", "every", "all_bases")
    if sum(values[key] is not None and values[key] is not False for key in kinds) != 1:
        raise UserError("give one of --task NAME, --basis K, --all-bases and --all DIR")
    if (out is None) != bool(every):
        raise UserError("name one output folder: OUT, or --all DIR")
    into = str(every or out)
    engine, bases = engine_of(values), load_store(store)
    folders, what, matrix = _chosen(bases, values)
    _, weights, folder = base_of(bases, base)
    dtype = dtype_of(values["dtype"])
    write(bases, weights, folder, matrix, folders, into, engine, what=what, dtype=dtype)
    click.echo(f"Written to {into}")


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
