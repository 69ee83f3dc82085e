"""The `tvb` command. Its subcommands parse their words, call the packages below, and print.

A command imports its libraries when it runs. So `--help` imports no torch, and commands on stores
or scores import no mergekit.
"""

from __future__ import annotations

import io
import logging
import os
import sys

import click

from tvb_mergekit import __version__
from tvb_mergekit.cli.learn import learn
from tvb_mergekit.cli.options import Commands
from tvb_mergekit.cli.score import score
from tvb_mergekit.cli.stores import add, build, export, inspect, merge, remove, undo
from tvb_mergekit.cli.tune import tune


@click.group(
    cls=Commands, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="tvb")
def main() -> None:
    """Task Vector Bases for mergekit: keep M vectors instead of T fine-tuned models.

    mergekit merges: `mergekit-yaml recipe.yml OUT` with `merge_method: basis_ta` or another of our
    methods, over models or over the vectors of a store.

    \b
    Example:
      tvb inspect recipe.yml                  find mistakes, and look at the tasks
      tvb build recipe.yml ./store            T models -> M bases
      tvb inspect ./store --plot store.png
      tvb merge ./store ./merged --method add

    Shell completion: `eval "$(_TVB_COMPLETE=bash_source tvb)"` (zsh_source, fish_source).
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for stream in (sys.stdout, sys.stderr):  # an ASCII terminal gets other names escaped
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")


for each in (build, inspect, add, undo, remove, export, merge, score, learn, tune):
    main.add_command(each)
