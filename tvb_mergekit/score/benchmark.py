"""Benchmarks: categories of tasks, and the places of their scores in lm-eval's files.

A benchmark is a small YAML file, so that any group of tasks can be tabled: docs/tune-and-score.md.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
import yaml

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.settings import nearest

HERE = Path(__file__).parent
SHIPPED = ("mergebench", "mergebench_keyword", "mini", "quickstart")
FORMAT_VERSION = 1  # of benchmarks, references and scores.json
Described = TypeVar("Described")


@dataclass(frozen=True)
class Task:
    """`name` is lm-eval's name of a task or a group, `metric` its `metric,filter`.

    Attributes:
        lenient: another metric, by which the same answers are read more leniently.
    """

    name: str
    label: str
    metric: str = "score,none"
    lenient: str = "flexible,none"


@dataclass(frozen=True)
class Category:
    """Its score is the plain mean of its tasks'.

    Attributes:
        floors: whether a score near 0 is odd; that of a model which refuses nothing is not.
        options: those of lm_eval, for the commands that are suggested.
        programs: whether answers are programs, before which text is odd.
    """

    name: str
    label: str
    tasks: Annotated[tuple[Task, ...], pydantic.Field(min_length=1)]
    group: str | None = None
    options: str | None = None
    floors: bool = True
    programs: bool = False


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

    def reading(self, metrics: Mapping[str, str]) -> Benchmark:
        """The same benchmark, with other metrics of some tasks (task name -> `metric,filter`).

        Raises:
            UserError: there is no such task.
        """
        known = [task.name for task in self.tasks]
        for name in metrics:
            check_known(name, known, f"--metric {name}: no such task in {self.name}")

        def read(category: Category) -> Category:
            tasks = (replace(t, metric=metrics.get(t.name, t.metric)) for t in category.tasks)
            return replace(category, tasks=tuple(tasks))

        return replace(self, categories=tuple(map(read, self.categories)))

    def command(self, missing: Collection[str]) -> str:
        """How to run the missing tasks, by whole groups where all of a group is missing."""
        names: list[str] = []
        options: dict[str, None] = {}
        for category in self.categories:
            wanted = [task.name for task in category.tasks if task.name in missing]
            whole = category.group is not None and len(wanted) == len(category.tasks)
            names += [str(category.group)] if whole else wanted
            if wanted and category.options:
                options[f" {category.options}"] = None
        path = f"--include_path {shlex.quote(self.include_path)} " if self.include_path else ""
        model = "--model hf --model_args pretrained=MODEL --output_path OUT"
        return f"lm_eval {path}--tasks {','.join(names)}{''.join(options)} {model}"


def read_benchmark(name: str) -> Benchmark:
    """One of `SHIPPED`, or a file.

    Raises:
        UserError: there is no such file, or it does not describe a benchmark.
    """
    path = HERE / f"{name}.yaml" if name in SHIPPED else Path(name)
    if not path.is_file():
        raise UserError(
            f"benchmark {name}: expected {', '.join(SHIPPED)}, or a YAML file that describes one"
        )
    found = read_described(path, Benchmark, "a benchmark")
    for parts in (found.categories, found.tasks):
        if twice := repeated([part.name for part in parts]):
            raise UserError(f"{path} is not a benchmark: {twice} is in it twice")
    return found


def find_benchmark(names: Iterable[str]) -> Benchmark:
    """The shipped benchmark that tasks belong to; scores by keyword count where no others are.

    Raises:
        UserError: they belong to none, or to several.
    """
    present = list(dict.fromkeys(names))
    found = {
        benchmark.name: benchmark
        for benchmark in map(read_benchmark, SHIPPED)
        if any(task.name in present for task in benchmark.tasks)
    }
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
    """Raise UserError, with the nearest name, unless `name` is a known one."""
    if name not in known:
        guess = nearest(name, known)
        hint = f"did you mean {guess}?" if guess else f"expected one of {', '.join(known)}"
        raise UserError(f"{what}: {hint}")


def repeated(names: Sequence[str]) -> str | None:
    """The first name that is there twice, if any."""
    return next((name for place, name in enumerate(names) if name in names[:place]), None)


def read_described(path: Path, kind: type[Described], what: str) -> Described:
    """The content of a file (JSON by its suffix, else YAML) as a `kind`.

    Raises:
        UserError: it cannot be read, or does not hold what `kind` describes.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found: Any = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        return pydantic.TypeAdapter(kind).validate_python(found)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; expected {what}") from error
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = f"`{'.'.join(map(str, first['loc']))}`: " if first["loc"] else ""
        raise UserError(
            f"{path} is not {what}: {place}{first['msg']} (found {first['input']!r:.60})"
        ) from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} cannot be read as {what}: {reason}") from error
