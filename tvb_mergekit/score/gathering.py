"""The work of `tvb score`: from its words to a table, and to files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from tvb_mergekit.atomic import check_outside, write_file
from tvb_mergekit.errors import UserError
from tvb_mergekit.figures import MADE
from tvb_mergekit.score.benchmark import find_benchmark, read_benchmark, repeated
from tvb_mergekit.score.columns import read_reference
from tvb_mergekit.score.examining import examine
from tvb_mergekit.score.results import DATE, Results, read_results
from tvb_mergekit.score.table import Table, table
from tvb_mergekit.score.text import markdown

FILES = ("scores.md", "scores.json")


def gather(
    paths: Sequence[str],
    *,
    base: str | None = None,
    specialists: Sequence[str] = (),
    reference: str | None = None,
    show_reference: bool = False,
    benchmark: str | None = None,
    metrics: Sequence[str] = (),
    partial: bool = False,
) -> Table:
    """Read all that is named into a table, and compare samples.

    Args:
        paths: `PATH` or `LABEL=PATH` of each model.
        specialists: `CATEGORY=PATH`, or a `PATH` for all other categories.
        metrics: `TASK:METRIC`.
    """
    own_results = bool(paths or base or specialists)
    if show_reference and reference is None:
        raise UserError("--show-reference needs --reference paper, or a file")
    if not own_results and not show_reference:
        raise UserError("nothing to score: name result files of lm_eval, or folders of them")
    named = [(label or _label(place), place) for label, place in map(_named, paths)]
    models = _read_all(named, "two columns are called {}: give one another label, LABEL=PATH")
    own = _read_all(  # "" for all other categories
        [*map(_named, specialists)],
        "--specialist names {} twice: give each category one, CATEGORY=PATH",
    )
    base_results = None if base is None else read_results(base)
    if benchmark is None and reference is not None and not own_results:
        benchmark = read_reference(reference).benchmark
    every = [*models.values(), *own.values(), *([base_results] if base_results else [])]
    names = [name for results in every for name in results.tasks]
    described = read_benchmark(benchmark) if benchmark else find_benchmark(names)
    if (rest := own.pop("", None)) is not None:
        own = {category.name: rest for category in described.categories} | own
    found = table(
        described,
        models,
        base=base_results,
        specialists=own,
        reference=None if reference is None else read_reference(reference, described),
        show_reference=show_reference,
        metrics=_metrics(metrics),
        partial=partial,
    )
    return examine(found)


def _named(text: str) -> tuple[str, Path]:
    """Split NAME=PATH; the name may be missing, and the path of an existing file may hold `=`."""
    if text and ("=" not in text or os.path.exists(text)):
        return "", Path(text)
    name, _, place = text.partition("=")
    if not name or not place:
        raise UserError(f"`{text}`: expected NAME=PATH, or a path")
    return name, Path(place)


def _read_all(named: Sequence[tuple[str, Path]], twice: str) -> dict[str, Results]:
    if (name := repeated([name for name, _ in named])) is not None:
        raise UserError(twice.format(name or "all categories"))
    return {name: read_results(place) for name, place in named}


def _label(place: Path) -> str:
    """Name a model after its folder, or after a result file with a name of its own."""
    path = place.resolve()
    if path.is_dir():
        return path.name or str(path)
    own = DATE.sub("", path.stem)
    return path.parent.name if own == "results" else own


def _metrics(given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        task, _, metric = text.partition(":")
        if not task or "," not in metric:
            raise UserError(
                f"--metric {text}: expected TASK:METRIC,FILTER, as gsm8k:exact_match,none"
            )
        if found.setdefault(task, metric) != metric:
            raise UserError(f"--metric names {found[task]} and {metric} of {task}: give one")
    return found


def check_output(out: str | os.PathLike[str]) -> None:
    """Raise UserError if `write` would fail, or replace files that `tvb score` did not make."""
    if Path(out).exists() and not Path(out).is_dir():
        raise UserError(f"cannot write {out}: it is a file; name a folder")
    check_outside(Path(out, FILES[0]))
    for name in FILES:
        path = Path(out, name)
        if os.path.lexists(path) and not _is_ours(path):
            raise UserError(f"cannot write {path}: tvb score did not make it; name another --out")


def write(found: Table, out: str | os.PathLike[str]) -> None:
    """Write `scores.md` and `scores.json`."""
    text = json.dumps(found.json(), indent=1, allow_nan=False, ensure_ascii=False)
    Path(out).mkdir(parents=True, exist_ok=True)
    for name, content in zip(FILES, (markdown(found), f"{text}\n"), strict=True):
        # file names may hold bytes that are not UTF-8
        write_file(Path(out, name), content.encode(errors="backslashreplace"))


def _is_ours(path: Path) -> bool:
    return os.access(path, os.R_OK) and path.is_file() and MADE.encode() in path.read_bytes()
