"""`tvb merge` and `tvb check`."""

from __future__ import annotations

import os
from typing import Any

import click
from click import argument, option

from tvb_mergekit.cli.options import (
    ACCESS,
    MODELS,
    PLACE,
    RECIPE_OR_STORE,
    command,
    devices_of,
    document_of,
    engine_of,
    flag,
    load_store,
    model_options,
    read_recipe,
)


@command("base", "device", "multi_gpu", "memory", *ACCESS, "quiet", writes="out", several=True)
@argument("recipe", metavar="RECIPE|STORE", type=RECIPE_OR_STORE)
@argument("out", type=PLACE)
@option("--method", metavar="NAME", help="For a STORE: add, ties, iso, tsvm, wudi, forget-TASK.")
@option("--out-shard-size", metavar="SIZE", default="5B", help="mergekit's: 500M, 5B ...")
@option("--copy-tokenizer/--no-copy-tokenizer", default=True, help="Copy the base's into OUT.")
@option("--write-model-card/--no-write-model-card", default=True, help="Write OUT/README.md.")
def merge(
    recipe: str, out: str, method: str | None, base: str | None, memory: int, **values: Any
) -> None:
    """Merge the models of RECIPE into OUT, with the same bits as `mergekit-yaml`, and faster.

    RECIPE uses one of our methods, over models or over the bases of a store. A STORE needs no
    recipe: `tvb merge STORE OUT --method add`. Tensors are streamed. They use at most --memory,
    for models and shards of any size.

    \b
    Example:
      tvb merge recipe.yml ./merged --memory 2GB
      torchrun --nproc-per-node 4 --no-python tvb merge recipe.yml ./merged
    """
    from tvb_mergekit.tensors import ranks

    devices = devices_of(values)
    values["device"] = None if values["multi_gpu"] else str(devices[0])
    values["quiet"] |= not ranks.world().leads
    document = document_of(recipe, method, base)

    from tvb_mergekit.plugin.run import merge_recipe

    merge_recipe(document, out, memory, **values)


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
        bases = load_store(recipe, checksums=True)
        click.echo(f"{recipe}: {len(bases.facts.store.files)} files as they were written")
        return
    from tvb_mergekit.tables import printable

    engine, document, options = engine_of(values), read_recipe(recipe), model_options(values)

    from tvb_mergekit.cli.check import check_recipe

    for line in check_recipe(recipe, document, options, deep, out, engine):
        click.echo(printable(line))
