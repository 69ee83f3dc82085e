"""Shared parts of the commands: options, devices, refusals, and the opening of what they name."""

from __future__ import annotations

import functools
import importlib
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

import tvb_mergekit_hook
from tvb_mergekit.atomic import check_interrupted
from tvb_mergekit.errors import UserError, check_names, hint, refusing, unwinding
from tvb_mergekit.progress import bars, logging_above_bars, phase

if TYPE_CHECKING:
    import torch

    from tvb_mergekit.plugin.document import Document
    from tvb_mergekit.plugin.inputs import Options
    from tvb_mergekit.store.facts import DtypeName
    from tvb_mergekit.store.store import Bases
    from tvb_mergekit.tensors.checkpoint import Checkpoint
    from tvb_mergekit.tensors.stream import Engine
    from tvb_mergekit.tensors.taskset import TaskSet

Body = Callable[..., Any]


class Place(click.Path):
    """A path, or the name of a model, that `check_names` accepts."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            check_names(value)
            check_interrupted(value)
        except (UserError, OSError) as error:
            self.fail(str(error), param, ctx)
        return super().convert(value, param, ctx)


class Range(click.FloatRange):
    """Numbers, not NaN or infinity."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


PLACE, RECIPE, RECIPE_OR_STORE = Place(), Place(exists=True, dir_okay=False), Place(exists=True)
POSITIVE, SHARE = Range(0, min_open=True), Range(0, 1, min_open=True)
COUNT, SEED = click.IntRange(1), click.IntRange(0, 2**32 - 1)
flag = functools.partial(click.option, is_flag=True)
repeatable = functools.partial(click.option, multiple=True)
place = functools.partial(click.option, type=PLACE, metavar="PATH")
folder = functools.partial(place, metavar="DIR")


def choice(name: str, words: str, **more: Any) -> Callable[[Body], Body]:
    """An option with one of these words."""
    return click.option(name, type=click.Choice(words.split()), **more)


class Command(click.Command):
    """A command that is named in every error of its parser, unlike click's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with click.core.augment_usage_errors(ctx):
            return super().parse_args(ctx, args)


class Commands(Command, click.Group):
    """Commands that refuse wrong words like every other mistake: one line, exit code 1."""

    command_class = Command
    group_class = type  # this class

    def make_context(self, *args: Any, **values: Any) -> click.Context:
        with _one_line():
            return super().make_context(*args, **values)

    def invoke(self, ctx: click.Context) -> Any:
        with _one_line():
            return super().invoke(ctx)


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()  # the help
        raise click.exceptions.Exit(1) from error
    except click.UsageError as error:
        said = " ".join(error.format_message().split()).rstrip(".")
        command = error.ctx.command_path if error.ctx else "tvb"
        raise click.ClickException(f"{said} (see `{command} --help`)") from error


DTYPES = click.Choice(["float32", "bfloat16", "float16"])
OPTIONS = {
    "device": click.option("--device", default="auto", help="Device: cpu, cuda, cuda:1 ..."),
    "base": click.option("--base", type=PLACE, help="The base model, if the store's path is old."),
    "trust_remote_code": flag("--trust-remote-code", help="Let models run their own code."),
    "allow_crimes": flag("--allow-crimes", help="mergekit's: architectures may differ."),
    "transformers_cache": folder("--transformers-cache", help="For downloaded models."),
    "quiet": flag("--quiet", help="No progress bars."),
    "verbose": flag("-v", "--verbose", help="Print the duration of each phase."),
}
MODELS = ("trust_remote_code", "allow_crimes", "transformers_cache")


def command(
    *shared: str,
    group: click.Group | None = None,
    name: str | None = None,
    writes: str = "",
    several: bool = False,
) -> Callable[[Body], click.Command]:
    """Make a command of `group` with these OPTIONS after its own.

    Args:
        writes: the argument with the output path.
        several: the command supports several processes of a launcher.
    """

    def decorate(body: Body) -> click.Command:
        @functools.wraps(body)
        def run(**values: Any) -> Any:
            with careful(values, writes, several):
                return body(**values)

        made = click.command(name, cls=Command)(run)
        for option in (*shared, "verbose"):
            OPTIONS[option](made)
        if group is not None:
            group.add_command(made)
        return made

    return decorate


@contextmanager
def careful(values: dict[str, Any], writes: str = "", several: bool = False) -> Iterator[None]:
    """Turn mistakes of a user in a command with these values into one line and exit code 1."""
    from tvb_mergekit.tensors import ranks

    if values.pop("verbose", False):
        logging.getLogger("tvb_mergekit").setLevel(logging.INFO)
    place = str(values.get(writes) or "")
    try:
        with logging_above_bars(), refusing(out=place):
            if not several:
                ranks.one_only(click.get_current_context().command_path)
            with ranks.joined(), refusing(out=place), unwinding():
                yield
    except KeyboardInterrupt:
        click.echo("Interrupted.", err=True)
        sys.exit(130)


def refuse_given(names: Sequence[str], why: str) -> None:
    """Raise UserError if the user gave one of these options of the current command."""
    for name in names:
        if click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UserError(f"--{name.replace('_', '-')}: {why}; leave it out")


def import_mergekit() -> None:
    """Import mergekit and the adapter. Exit if the hook has refused this mergekit."""
    if "tvb_mergekit.plugin.inputs" not in sys.modules:
        with phase("Importing mergekit"):
            importlib.import_module("mergekit.merge")
            if tvb_mergekit_hook.problem_shown():
                sys.exit(1)
            importlib.import_module("tvb_mergekit.plugin.inputs")


def model_options(values: dict[str, Any]) -> Options:
    """The options of MODELS, removed from `values`."""
    from tvb_mergekit.plugin.inputs import Options

    return Options(**{name: values.pop(name) for name in MODELS if name in values})


def device_of(name: str) -> torch.device:
    from tvb_mergekit.tensors import stream

    return stream.device_of(auto_device() if name == "auto" else name)


def auto_device() -> str:
    """An accelerator, a different one for each process, or the CPU."""
    import torch

    from tvb_mergekit.tensors import ranks

    if not torch.cuda.is_available():
        return "cpu"
    if ranks.launched("WORLD_SIZE", 1) == 1:
        return "cuda"
    return f"cuda:{ranks.launched('LOCAL_RANK', 0) % torch.cuda.device_count()}"


def engine_of(values: dict[str, Any]) -> Engine:
    """The engine of a command's options."""
    from tvb_mergekit.tensors.stream import Engine

    return Engine(device_of(values["device"]), bars(values["quiet"]))


def read_recipe(recipe: str) -> Document:
    import_mergekit()
    from tvb_mergekit.plugin.document import read_document

    with phase("Reading the recipe"):
        return read_document(recipe)


def open_models(document: Document, values: dict[str, Any], names: Sequence[str] = ()) -> TaskSet:
    """The opened models of a recipe; `names` as for `read_inputs`."""
    from tvb_mergekit.plugin.inputs import read_inputs

    with phase("Opening the models"):
        return read_inputs(document, model_options(values), names)


def load_store(path: str, checksums: bool = False) -> Bases:
    """The bases of a store; `checksums` compares those of all files."""
    from tvb_mergekit.store.store import check, is_basis, load

    if os.path.isfile(path):
        raise UserError(f"{path} is a file; expected the folder of a store")
    if is_basis(path):
        raise UserError(f"{path} is one basis of a store; name the store, the folder around it")
    with phase("Opening the store"):
        return check(path) if checksums else load(path)


def base_of(store: Bases, given: str | None) -> tuple[str, Checkpoint, Path | None]:
    """The base of a store: its name, its weights and its folder.

    Raises:
        UserError: it cannot be opened, or belongs to another store.
    """
    import_mergekit()
    from tvb_mergekit.plugin.inputs import open_base

    name = given or store.base_name
    try:
        weights, folder = open_base(name)
    except (UserError, OSError, click.ClickException) as error:
        if os.path.exists(name) or isinstance(error.__cause__, UserError):  # a damaged download
            raise
        raise UserError(
            f"base {name}: no such file or folder (from {os.getcwd()}); name the base of "
            f"{store.path} with --base"
        ) from error
    store.check_base(weights, name)
    return name, weights, folder


def document_of(recipe: str, method: str | None, base: str | None) -> Document:
    """A recipe, or the recipe of a store for a method."""
    if not os.path.isdir(recipe):
        if method is not None or base is not None:
            raise UserError(f"{recipe} is a recipe: --method and --base belong to a STORE")
        return read_recipe(recipe)
    from tvb_mergekit.store.recipes import templates, with_paths

    bases = load_store(recipe)
    known = templates(bases.facts, os.path.abspath(recipe), base_of(bases, base)[0])
    if method in known:
        from tvb_mergekit.plugin.document import from_mapping  # `base_of` has checked mergekit

        return from_mapping(with_paths(known[method]))
    if method is None:
        raise UserError(f"{recipe} is a store: name a --method, one of {', '.join(known)}")
    known_words = f"expected one of {', '.join(known)}"
    raise UserError(f"--method {method}: {known_words}{hint(method, known)}")


def dtype_of(name: DtypeName | None) -> torch.dtype | None:
    from tvb_mergekit.store.store import DTYPES

    return DTYPES[name] if name else None
