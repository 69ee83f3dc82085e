"""`tvb cache`: the Gram matrices kept between merges."""

from __future__ import annotations

import time

import click

from tvb_mergekit.cli.options import Commands, command
from tvb_mergekit.errors import listed


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


@command(group=cache, name="clear")
def clear_entries() -> None:
    """Delete all stored Gram matrices.

    \b
    Example: tvb cache clear
    """
    from tvb_mergekit.tensors import cache

    click.echo(f"Deleted {cache.clear()} Gram matrices.")
