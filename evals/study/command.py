"""The options that all studies share, and the end of their commands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from transformers.utils import logging

from study.cells import Record

Command = Callable[..., None]


@dataclass(frozen=True)
class Asked:
    """The shared options of a command."""

    preset: str
    seeds: list[int]
    out: Path
    device: str
    as_is: bool
    page: Path | None
    report: Path | None

    def finish(
        self, records: Iterable[Record], write: Callable[[list[Record], Path], list[Path]]
    ) -> None:
        """Write the report, and print its files."""
        found = list(records)
        if not found:
            raise click.ClickException(
                f"{self.out} has no results of {self.preset}: leave out --as-is"
            )
        for path in write(found, self.report or self.out / f"report-{self.preset}"):
            click.echo(path)


def _device(context: click.Context, option: click.Parameter, value: str) -> str:
    if value == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("PyTorch finds no GPU; use cpu or auto")
    return ("cuda" if torch.cuda.is_available() else "cpu") if value == "auto" else value


def _numbers(context: click.Context, option: click.Parameter, value: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(part) for part in value.split(",")))
    except ValueError:
        raise click.BadParameter(f"{value!r}: expected whole numbers, such as 0,1,2") from None


FOLDER = click.Path(file_okay=False, path_type=Path)
device_option = click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
    callback=_device, help="auto: a GPU if there is one.",
)  # fmt: skip


def study_options(presets: Sequence[str], preset: str, out: str) -> Callable[[Command], Command]:
    """Give a command the shared options, as one `Asked`; `preset` and `out` are defaults."""
    page = click.Path(exists=True, dir_okay=False, path_type=Path)
    options = (
        click.option("--page", type=page, help="A Markdown page whose marked tables are renewed."),
        click.option("--as-is", is_flag=True, help="Compute nothing: report existing results."),
        click.option("--report", type=FOLDER,
                     help="Folder of tables and pictures; OUT/report-PRESET by default."),
        device_option,
        click.option("--out", type=FOLDER, default=out, show_default=True,
                     help="Runs are in OUT/PRESET-seedSEED."),
        click.option("--seeds", callback=_numbers, default="0", show_default=True,
                     help="Seeds of the trainings, comma-separated."),
        click.option("--preset", type=click.Choice(presets), default=preset, show_default=True),
    )  # fmt: skip

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            logging.disable_progress_bar()
            shared = {name: given.pop(name) for name in Asked.__dataclass_fields__}
            command(Asked(**shared), **given)

        found: Command = run
        for option in options:
            found = option(found)
        return found

    return decorate
