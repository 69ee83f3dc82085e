"""Shared parts of the commands: options, completion, mistakes as one line, opening of inputs."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tvb_mergekit.errors import UserError, refusing, unwinding
from tvb_mergekit.progress import bars, logging_above_bars
from tvb_mergekit.store import STORE
from tvb_mergekit.tensors import ranks

if TYPE_CHECKING:
    import torch

    from tvb_mergekit.plugin.document import Document
    from tvb_mergekit.plugin.inputs import Options
    from tvb_mergekit.tensors.stream import Engine

Body = Callable[..., Any]


class Place(click.Path):
    """A path, or the name of a model. An empty one would be the current folder."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not value:
            self.fail("the path '' is empty (an unset variable?).", param, ctx)
        return super().convert(value, param, ctx)


class Commands(click.Group):
    """Commands that refuse wrong words like every other mistake: one line, exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            said = " ".join(error.format_message().split()).rstrip(".")
            command = error.ctx.command_path if error.ctx else "tvb"
            raise click.ClickException(f"{said} (see `{command} --help`)") from error


def of_store(ways: Sequence[str] = (), each: str = "{}") -> dict[str, Any]:
    """Complete an option by `ways`, and by `each` with the tasks of the store on the command line.

    Only `store.json` is read, since torch takes seconds to import.
    """

    def complete(ctx: click.Context, param: click.Parameter, begun: str) -> list[str]:
        try:
            # click puts no argument into `params` when the last option still lacks its value
            place = ctx.params.get("store") or ctx.params.get("recipe") or ctx.args[0]
            tasks = json.loads(Path(place, STORE).read_text(encoding="utf-8"))["tasks"]
        except (OSError, ValueError, LookupError, TypeError):
            return []
        words = [*ways, *(each.format(task) for task in tasks)]
        return [word for word in words if word.startswith(begun)]

    return {"shell_complete": complete}


PLACE, RECIPE, RECIPE_OR_STORE = Place(), Place(exists=True, dir_okay=False), Place(exists=True)
Range = click.FloatRange
POSITIVE, SHARE = Range(0, min_open=True), Range(0, 1, min_open=True)
COUNT, SEED = click.IntRange(1), click.IntRange(0, 2**32 - 1)
flag = functools.partial(click.option, is_flag=True)
repeatable = functools.partial(click.option, multiple=True)
place = functools.partial(click.option, type=PLACE, metavar="PATH")
folder = functools.partial(place, metavar="DIR")
OPTIONS = {
    "device": click.option("--device", default="auto", help="Device: cpu, cuda, cuda:1 ..."),
    "base": place("--base", help="The base model, if the store's path is old."),
    "trust_remote_code": flag("--trust-remote-code", help="Let models run their own code."),
    "allow_crimes": flag("--allow-crimes", help="mergekit's: architectures may differ."),
    "transformers_cache": folder("--transformers-cache", help="For downloaded models."),
    "quiet": flag("--quiet", help="No progress bars."),
    "verbose": flag("-v", "--verbose", help="Print the duration of each phase."),
}
MODELS = ("trust_remote_code", "allow_crimes", "transformers_cache")


def choice(name: str, words: str, **more: Any) -> Callable[[Body], Body]:
    """An option with one of these words."""
    return click.option(name, type=click.Choice(words.split()), **more)


dtype = functools.partial(choice, "--dtype", "float32 bfloat16 float16")


def command(
    *shared: str, name: str | None = None, writes: str = "", several: bool = False
) -> Callable[[Body], click.Command]:
    """Make a command with these OPTIONS after its own. A mistake is one line and exit code 1.

    Args:
        writes: the argument with the output path.
        several: the command supports several processes of a launcher.
    """

    def decorate(body: Body) -> click.Command:
        @functools.wraps(body)
        def run(verbose: bool, **values: Any) -> None:
            if verbose:
                logging.getLogger("tvb_mergekit").setLevel(logging.INFO)
            try:
                with logging_above_bars(), refusing(out=str(values.get(writes) or "")):
                    for key in (name for name, value in values.items() if value != value):
                        raise UserError(f"--{key.replace('_', '-')} is nan: give a number")
                    if not several:
                        ranks.one_only(click.get_current_context().command_path)
                    with unwinding(), ranks.joined():
                        body(**values)
            except KeyboardInterrupt:
                click.echo("Interrupted.", err=True)
                sys.exit(130)

        # click would cut the first sentence to the width of the list in `tvb --help`
        made = click.command(name, short_help=(body.__doc__ or "").partition("\n")[0])(run)
        for option in (*shared, "verbose"):
            OPTIONS[option](made)
        return made

    return decorate


def import_mergekit() -> None:
    """Import mergekit and the adapter. Exit if the hook has refused this mergekit."""
    from tvb_mergekit.plugin import ready

    if not ready():
        sys.exit(1)
    importlib.import_module("tvb_mergekit.plugin.inputs")


def model_options(values: dict[str, Any], quiet: bool = True, **more: Any) -> Options:
    """The options of MODELS, removed from `values`, and `more` of mergekit's."""
    from tvb_mergekit.plugin.inputs import Options

    return Options(quiet=quiet, **{n: values.pop(n) for n in MODELS if n in values}, **more)


def device_of(name: str) -> torch.device:
    from tvb_mergekit.tensors import stream

    return stream.device_of(auto_device() if name == "auto" else name)


def auto_device() -> str:
    """An accelerator, a different one for each process, or the CPU."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    one = ranks.launched("WORLD_SIZE", 1) == 1
    return "cuda" if one else f"cuda:{ranks.launched('LOCAL_RANK', 0) % torch.cuda.device_count()}"


def dtype_of(name: str | None) -> torch.dtype | None:
    import torch

    return getattr(torch, name) if name else None


def engine_of(values: dict[str, Any]) -> Engine:
    """The engine of a command's options. One of several processes shows progress."""
    from tvb_mergekit.tensors.stream import Engine

    return Engine(device_of(values["device"]), bars(values["quiet"] or not ranks.leads()))


def read_recipe(recipe: str) -> Document:
    import_mergekit()
    from tvb_mergekit.plugin.document import read_document

    return read_document(recipe)


def document_of(recipe: str, method: str | None, base: str | None) -> Document:
    """A recipe, or the recipe of a store for a method."""
    if not os.path.isdir(recipe):
        if method is not None or base is not None:
            raise UserError(f"{recipe} is a recipe: --method and --base belong to a STORE")
        return read_recipe(recipe)
    from tvb_mergekit.plugin.ways import recipe_of
    from tvb_mergekit.store.store import load

    bases = load(recipe)
    paths = os.path.abspath(recipe), base or bases.base_name
    document = recipe_of(bases.facts, method or "", *paths)
    import_mergekit()
    from tvb_mergekit.plugin.document import from_mapping

    return from_mapping(document)
