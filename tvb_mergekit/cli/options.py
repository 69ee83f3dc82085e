"""What the commands share: options, devices, and how they refuse, log and are interrupted."""

from __future__ import annotations

import functools
import importlib
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

import tvb_mergekit_hook
from tvb_mergekit.errors import UserError, check_names
from tvb_mergekit.progress import bars, logging_above_bars, phase

if TYPE_CHECKING:
    import torch

    from tvb_mergekit.plugin.inputs import Options
    from tvb_mergekit.tensors.engine import Engine

Body = Callable[..., Any]


class Place(click.Path):
    """A path, or the name of a model, that `check_names` accepts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            check_names(value)
        except (UserError, OSError) as error:
            self.fail(str(error), param, ctx)
        return super().convert(value, param, ctx)


class Range(click.FloatRange):
    """Numbers, not NaN or infinity."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


PLACE = Place()
POSITIVE, SEED = Range(0, min_open=True), click.IntRange(0, 2**32 - 1)
flag = functools.partial(click.option, is_flag=True)
repeatable = functools.partial(click.option, multiple=True)


class Command(click.Command):
    """A command whose name is in every error of its parser; click leaves it out of some."""

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


def _option(name: str, text: str, **how: Any) -> click.Option:
    return click.Option([f"--{name}"], help=text, **how)


def _flag(name: str, text: str) -> click.Option:
    return _option(name, text, is_flag=True)


OPTIONS = {
    "device": _option("device", "Where to compute: cpu, cuda, cuda:1 ...", default="auto"),
    "multi_gpu": _flag("multi-gpu", "Compute on all accelerators."),
    "memory": _option(
        "memory",
        "The most that tensors may take in each process, such as 500MB; Python and its libraries "
        "take about 0.4 GB more.",
        metavar="SIZE",
        default="1GB",  # layout.MEMORY
    ),
    "base": _option("base", "The base model, where it is not where the store says.", type=PLACE),
    "trust_remote_code": _flag("trust-remote-code", "Let models run their own code."),
    "allow_crimes": _flag("allow-crimes", "mergekit's: architectures may differ."),
    "lora_merge_cache": _option(
        "lora-merge-cache", "For fused adapters.", metavar="DIR", type=PLACE
    ),
    "transformers_cache": _option(
        "transformers-cache", "For downloaded models.", metavar="DIR", type=PLACE
    ),
    "fuse": _flag("fuse", "Fuse adapters into models before anything else."),
    "quiet": _flag("quiet", "No progress bars."),
    "verbose": click.Option(["-v", "--verbose"], is_flag=True, help="Say where time goes."),
}
ACCESS = ("trust_remote_code", "allow_crimes", "lora_merge_cache", "transformers_cache")
MODELS = (*ACCESS, "fuse")
DTYPES = click.Choice(["float32", "bfloat16", "float16"])


def command(
    group: click.Group,
    *shared: str,
    name: str | None = None,
    writes: str = "",
    several: bool = False,
) -> Callable[[Body], click.Command]:
    """Register a command of `group`, with options of OPTIONS after its own; see `careful`."""

    def decorate(body: Body) -> click.Command:
        made = group.command(name)(careful(writes, several)(body))
        made.params += [OPTIONS[option] for option in (*shared, "verbose")]
        return made

    return decorate


def careful(writes: str = "", several: bool = False) -> Callable[[Body], Body]:
    """Turn what a user can mend into one line and exit code 1.

    Args:
        writes: the argument that is written to.
        several: the command works in the processes that a launcher started.
    """

    def decorate(body: Body) -> Body:
        @functools.wraps(body)
        def wrapped(**values: Any) -> Any:
            from tvb_mergekit.refusals import refusing, unwinding
            from tvb_mergekit.tensors import ranks

            if values.pop("verbose", False):
                logging.getLogger("tvb_mergekit").setLevel(logging.INFO)
            place, keeps = str(values.get(writes) or "the output"), ""
            if "resume" in values and not values.get("source"):  # learn --from keeps nothing
                keeps = f"{os.path.realpath(place)}.partial"
            try:
                with logging_above_bars(), refusing(out=place, keeps=keeps):
                    if "memory" in values:
                        from tvb_mergekit.tensors import layout

                        values["memory"] = layout.parse_memory(values["memory"])
                    if not several:
                        ranks.one_only(click.get_current_context().command_path)
                    with ranks.joined(), refusing(out=place, keeps=keeps), unwinding():
                        return body(**values)
            except KeyboardInterrupt:
                more = ""
                if os.path.isdir(keeps):
                    more = f" {keeps} is kept: --resume goes on."
                if os.path.isfile(os.path.join(place, "points.jsonl")):  # of `tvb tune`
                    more = " The same command goes on."
                click.echo(f"Interrupted.{more}", err=True)
                sys.exit(130)

        return wrapped

    return decorate


def import_mergekit() -> None:
    """Import mergekit and the adapter, which takes seconds: `-v` says how many.

    A mergekit with other names ends the command: the hook has printed the reason.
    """
    if "tvb_mergekit.plugin.inputs" not in sys.modules:
        with phase("Importing mergekit"):
            importlib.import_module("mergekit.merge")
            if tvb_mergekit_hook.problem_shown():
                sys.exit(1)
            importlib.import_module("tvb_mergekit.plugin.inputs")


def model_options(values: dict[str, Any]) -> Options:
    """The options of MODELS, taken out of `values`."""
    from tvb_mergekit.plugin.inputs import Options

    return Options(**{name: values.pop(name) for name in MODELS if name in values})


def device_of(name: str) -> torch.device:
    """What `--device` names."""
    from tvb_mergekit.tensors import layout

    return layout.device_of(auto_device() if name == "auto" else name)


def auto_device() -> str:
    """An accelerator, of several processes one for each, or the CPU."""
    import torch

    from tvb_mergekit.tensors import ranks

    if not torch.cuda.is_available():
        return "cpu"
    if ranks.launched("WORLD_SIZE", 1) == 1:
        return "cuda"
    return f"cuda:{ranks.launched('LOCAL_RANK', 0) % torch.cuda.device_count()}"


def engine_of(values: dict[str, Any]) -> Engine:
    """The engine of a command's options."""
    from tvb_mergekit.tensors.engine import Engine

    return Engine(devices_of(values), values.get("memory"), bars(values["quiet"]))


def devices_of(values: dict[str, Any]) -> list[torch.device]:
    """The devices of `--device` and `--multi-gpu`."""
    from tvb_mergekit.tensors import layout, ranks

    if not values.get("multi_gpu"):
        return [device_of(values["device"])]
    if ranks.launched("LOCAL_WORLD_SIZE", 1) > 1:
        raise UserError(
            "--multi-gpu is for one process on a machine, and several were started: leave it out, "
            "each takes an accelerator of its own"
        )
    return layout.accelerators()
