"""The `tvb` command. Its subcommands parse their words, call the packages below, and print.

A command imports its libraries when it runs. So `--help` imports no torch, and commands on stores
or scores import no mergekit.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import time

import click

from tvb_mergekit import __version__
from tvb_mergekit.cli.learn import learn
from tvb_mergekit.cli.merging import check, export, merge
from tvb_mergekit.cli.options import Commands, command
from tvb_mergekit.cli.score import score, tune
from tvb_mergekit.cli.stores import add, build, inspect, push, remove, undo
from tvb_mergekit.errors import listed


@click.group(cls=Commands, context_settings={"show_default": True})
@click.version_option(__version__, prog_name="tvb")
def main() -> None:
    """Task Vector Bases for mergekit: keep M vectors instead of T fine-tuned models.

    mergekit merges: `mergekit-yaml recipe.yml OUT` with `merge_method: basis_ta` or another of our
    methods, over models or over the bases of a store. `tvb merge` makes the same model in bounded
    memory.

    \b
    Example:
      tvb check recipe.yml                    find mistakes before the work
      tvb build recipe.yml ./store            T models -> M bases
      tvb inspect ./store --plot store.png
      tvb merge ./store ./merged --method add
      tvb add ./store ./new-model --task new
      tvb export ./store ./math-again --task math
      tvb tune recipe.yml --tasks copa,rte --out tuned
      tvb learn two.yml fisher --data math=m.jsonl --data code=c.jsonl --out two

    Shell completion: `eval "$(_TVB_COMPLETE=bash_source tvb)"` (zsh_source, fish_source).
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for stream in (sys.stdout, sys.stderr):  # an ASCII terminal gets other names escaped
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")


@click.group(cls=Commands)
def cache() -> None:
    """The Gram matrices kept between merges.

    \b
    Example: tvb cache list

    They live in $TVB_MERGEKIT_CACHE, by default in ~/.cache/tvb-mergekit/gram, a few kB each.
    TVB_MERGEKIT_CACHE=off keeps none.
    """


@command(group=cache, name="list")
def list_entries() -> None:
    """Show the stored Gram matrices, newest first.

    \b
    Example: tvb cache list
    """
    from tvb_mergekit.tensors import cache

    folder = cache.cache_folder()
    if folder is None:
        click.echo(f"The cache is off ({cache.VARIABLE}, or no home folder).")
        return
    found = cache.entries()
    for entry in found:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.modified))
        size = f"{entry.nbytes:,} bytes  {entry.num_parameters:,} parameters"
        click.echo(f"{written}  {entry.path.name[:12]}  {size}  {listed(entry.tasks)}")
    click.echo(f"{len(found)} Gram matrices in {folder}")


@command(group=cache, name="clear")
def clear_entries() -> None:
    """Delete all stored Gram matrices.

    \b
    Example: tvb cache clear
    """
    from tvb_mergekit.tensors import cache

    click.echo(f"Deleted {cache.clear()} Gram matrices.")


for each in (
    build, inspect, add, undo, remove, export, push, merge, check, score, learn, tune, cache
):  # fmt: skip
    main.add_command(each)
