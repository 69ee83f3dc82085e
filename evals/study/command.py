"""The options that all studies share, and the end of their commands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click
import torch
from transformers.utils import logging

from study.cells import Cell, Record, Source, bill, measured, works
from study.kinds import KINDS
from study.report import as_written, reported

Command = Callable[..., None]


@dataclass(frozen=True)
class Asked:
    """The shared options of a command."""

    preset: str
    seeds: list[int]
    out: Path
    device: str
    as_is: bool
    only: str
    keep: bool
    page: Path | None
    report: Path | None
    methods: tuple[str, ...]
    wanted: tuple[str, ...]
    bills: bool

    def measured(
        self, source: Source, first: list[Cell], parts: Callable[[float], dict[str, list[Cell]]]
    ) -> list[Record]:
        """The records of a run, after missing cells of the wanted parts were measured.

        Args:
            first: the cells that others start from. The last is the sum of all task vectors.
            parts: makes the cells of each part from the best lambda of this sum.
        """

        def done(cells: list[Cell], only: str = "*") -> list[Record]:
            if self.bills:
                named = [w for w in works(source, cells, KINDS) if fnmatchcase(w.file.name, only)]
                click.echo("\n".join(bill(named)))
            return measured(source, cells, KINDS, as_is=self.as_is, only=only)

        found = done(first)
        if len(found) < len(first) and not self.bills:
            return found
        shipped = 1.0  # as good as any for a bill
        if len(found) == len(first):
            summed = found[-1]["result"]["merges"]["ta"]
            shipped = summed.get("scales", {"bases": summed})["bases"]["lambda"]
        every = parts(shipped)
        wanted = [cell for part in self.wanted for cell in every[part]]
        return found + done(wanted, self.only)

    def finish(
        self, records_of: Callable[[str, int], list[Record]],
        write: Callable[[list[Record], Path, Path | None], list[Path]],
    ) -> None:  # fmt: skip
        """Write the report of all methods and seeds, and print its files."""
        methods = dict.fromkeys(self.methods)
        found = [r for method in methods for seed in self.seeds for r in records_of(method, seed)]
        if self.bills:
            return
        if not found:
            raise click.ClickException(
                f"{self.out} has no results of {self.preset}: leave out --as-is"
            )
        report = self.report or self.out / f"report-{self.preset}"
        before = reported(report) if self.keep else []
        for path in write([*before, *as_written(found)], report, self.page):
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


def study_options(
    presets: Iterable[str], preset: str, out: str, methods: Iterable[str], parts: Iterable[str]
) -> Callable[[Command], Command]:
    """Give a command the shared options, as one `Asked`; `preset` and `out` are defaults."""
    parts = tuple(parts)
    page = click.Path(exists=True, dir_okay=False, path_type=Path)
    options = (
        click.option("--bill", "bills", is_flag=True,
                     help="Print the missing cells and their time alone."),
        click.option("--part", "wanted", type=click.Choice(parts), multiple=True, default=parts,
                     help="Only this; may be repeated. By default all."),
        click.option("--method", "methods", type=click.Choice([*methods]), multiple=True,
                     default=("full",), show_default=True, help="May be repeated."),
        click.option("--page", type=page, help="A Markdown page whose marked tables are renewed."),
        click.option("--as-is", is_flag=True, help="Compute nothing: report existing results."),
        click.option("--only", metavar="PATTERN", default="*",
                     help="Compute, after the sums, only cells of such names: '*-ties-4-*'."),
        click.option("--report", type=FOLDER,
                     help="Folder of tables and pictures; OUT/report-PRESET by default."),
        click.option("--keep", is_flag=True,
                     help="Keep the cells that the report has from other machines and seeds."),
        device_option,
        click.option("--out", type=FOLDER, default=out, show_default=True,
                     help="Runs are in OUT/PRESET-seedSEED."),
        click.option("--seeds", callback=_numbers, default="0", show_default=True,
                     help="Seeds of the trainings, comma-separated."),
        click.option("--preset", type=click.Choice([*presets]), default=preset, show_default=True),
    )  # fmt: skip

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            logging.disable_progress_bar()
            shared = {name: given.pop(name) for name in Asked.__dataclass_fields__}
            shared["as_is"] |= shared["bills"]
            command(Asked(**shared), **given)

        found: Command = run
        for option in options:
            found = option(found)
        return found

    return decorate
