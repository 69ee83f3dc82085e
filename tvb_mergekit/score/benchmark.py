"""Benchmarks: categories of tasks, and the names of their scores in lm-eval's files.

A benchmark is a small YAML file, so `tvb score` can table any tasks: docs/tune-and-score.md.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
import yaml

from tvb_mergekit.errors import UserError, hint, listed, one_line

HERE = Path(__file__).parent
SHIPPED = ("mergebench", "mergebench_keyword", "quickstart")
RUN = "--model hf --model_args pretrained=MODEL --output_path OUT"
Described = TypeVar("Described")


@dataclass(frozen=True)
class Task:
    """A task or a group of lm-eval; metrics are named `metric,filter`."""

    name: str
    label: str
    metric: str = "score,none"


@dataclass(frozen=True)
class Category:
    """Tasks whose plain mean is the category's score."""

    name: str
    label: str
    tasks: Annotated[tuple[Task, ...], pydantic.Field(min_length=1)]
    group: str | None = None  # lm-eval's group of all its tasks
    options: str | None = None  # lm_eval's options, for commands that are suggested


@dataclass(frozen=True)
class Benchmark:
    """Categories in the order of the table."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = pydantic.ConfigDict(extra="forbid")
    format_version: Literal[1]
    name: str
    title: str
    categories: Annotated[tuple[Category, ...], pydantic.Field(min_length=1)]
    include_path: str | None = None

    @property
    def tasks(self) -> tuple[Task, ...]:
        return tuple(task for category in self.categories for task in category.tasks)

    def command(self, missing: Collection[str]) -> str:
        """Return the command that runs the missing tasks, by group if all of a group is missing."""
        names, options = list[str](), list[str]()
        for category in self.categories:
            wanted = [task.name for task in category.tasks if task.name in missing]
            complete = category.group and len(wanted) == len(category.tasks)
            names += [str(category.group)] if complete else wanted
            options += [category.options] if wanted and category.options else []
        path = ["--include_path", shlex.quote(self.include_path)] if self.include_path else []
        tasks = ["--tasks", ",".join(names)]
        return " ".join(["lm_eval", *path, *tasks, *dict.fromkeys(options), RUN])


def read_benchmark(name: str) -> Benchmark:
    """Read one of `SHIPPED`, or a file."""
    path = HERE / f"{name}.yaml" if name in SHIPPED else Path(name)
    if not path.is_file():
        raise UserError(f"benchmark {name}: expected {', '.join(SHIPPED)}, or a YAML file")
    found = read_described(path, Benchmark, "a benchmark")
    for parts in (found.categories, found.tasks):
        if twice := repeated([part.name for part in parts]):
            raise UserError(f"{path} is not a benchmark: {twice} is in it twice")
    return found


def find_benchmark(names: Iterable[str]) -> Benchmark:
    """Find the shipped benchmark of tasks; scores by keyword count only if no others are there."""
    present = list(dict.fromkeys(names))
    shipped = [read_benchmark(name) for name in SHIPPED]
    found = {b.name: b for b in shipped if any(task.name in present for task in b.tasks)}
    if "mergebench" in found:
        found.pop("mergebench_keyword", None)
    if len(found) == 1:
        return next(iter(found.values()))
    what = "more than one benchmark" if found else "no known benchmark"
    raise UserError(
        f"the tasks in these files belong to {what} ({listed(present)}): say which with "
        f"--benchmark {'|'.join(SHIPPED)}|FILE"
    )


def check_known(name: str, known: Collection[str], what: str) -> None:
    """Raise UserError with the nearest known name unless `name` is known."""
    if name not in known:
        expected = hint(name, known) or f": expected one of {', '.join(known)}"
        raise UserError(f"{what}{expected}")


def repeated(names: Sequence[str]) -> str | None:
    """Return the first name that stands twice in a list."""
    return next((name for name in names if names.count(name) > 1), None)


def read_described(path: Path, kind: type[Described], what: str) -> Described:
    """Read a file (JSON by its suffix, else YAML) as a `kind`, which messages call `what`."""
    try:
        text = path.read_text(encoding="utf-8")
        found: Any = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        return pydantic.TypeAdapter(kind).validate_python(found)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; expected {what}") from error
    except pydantic.ValidationError as error:
        raise UserError(f"{path} is not {what}: {first_mistake(error)}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as {what}: {one_line(error)}") from error


def first_mistake(error: pydantic.ValidationError) -> str:
    """Describe the first mistake that pydantic found: place, reason and value."""
    first = error.errors(include_url=False)[0]
    place = f"`{'.'.join(map(str, first['loc']))}`: " if first["loc"] else ""
    return f"{place}{first['msg']} (found {first['input']!r:.60})"
