"""The `tvb` command."""

from __future__ import annotations

import time

import click
from rich.console import Console
from rich.table import Table

from tvb_mergekit import __version__, cache


@click.group()
@click.version_option(__version__, prog_name="tvb")
def main() -> None:
    """Task Vector Bases for mergekit.

    Merging itself is mergekit's: `mergekit-yaml recipe.yml OUT` with `merge_method: basis_ta`,
    `basis_ties` or `basis_negate`.
    """


@main.group("cache")
def cache_group() -> None:
    """The Gram matrices kept between merges.

    \b
    Example: tvb cache list

    They live in $TVB_MERGEKIT_CACHE, by default in ~/.cache/tvb-mergekit/gram, a few kB each;
    TVB_MERGEKIT_CACHE=off keeps none.
    """


@cache_group.command("list")
def list_entries() -> None:
    """Show the stored Gram matrices, newest first.

    \b
    Example: tvb cache list
    """
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
def clear_entries() -> None:
    """Delete all stored Gram matrices.

    \b
    Example: tvb cache clear
    """
    click.echo(f"Deleted {cache.clear()} Gram matrices.")
