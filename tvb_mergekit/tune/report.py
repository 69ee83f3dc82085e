"""What a tuning leaves: tables, tune.json, the curve, tuned.yml, and the items for the test.

Nothing here depends on the time of day or on interruptions: the same scores give the same files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from tvb_mergekit.atomic import write_file
from tvb_mergekit.errors import listed
from tvb_mergekit.figures import BLUE, DARK, ORANGE, PALE, can_draw, rendered
from tvb_mergekit.tables import (
    Sheet,
    escaped,
    markdown_table,
    print_sheet,
    printable,
    say,
    shortened,
)
from tvb_mergekit.tune.harness import Entry
from tvb_mergekit.tune.objective import Estimate, Objective
from tvb_mergekit.tune.running import Row, Tuned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT_VERSION = 1  # of tune.json
LABEL = 24  # characters of a column's head
NO_PICTURE = "no curve.png without matplotlib: pip install 'tvb-mergekit[plot]'"


def write(tuned: Tuned) -> list[str]:
    """Write the files into OUT; returns what could not be written."""
    out = tuned.request.out
    write_file(out / "tune.json", _text(summary(tuned)))
    write_file(out / "tune.md", markdown(tuned).encode())
    write_file(out / "tuned.yml", recipe_text(tuned).encode())
    parts = [part for _, _, entry in _entries(tuned) for part in entry.parts]
    if rest := {part.task: part.left_to_test for part in parts if part.left_to_test}:
        write_file(out / "test_samples.json", _text(rest))
    if not can_draw():
        return [NO_PICTURE]
    write_file(out / "curve.png", rendered(lambda: _figure(tuned), "png"))
    return []


def _text(facts: Mapping[str, Any]) -> bytes:
    return (json.dumps(facts, indent=1) + "\n").encode()


def _entries(tuned: Tuned) -> Iterator[tuple[str, Objective, Entry]]:
    """Every entry with its role, "target" or "control", and its objective."""
    for role, goal in tuned.goals.items():
        for entry in goal.entries:
            yield role, goal, entry


def summary(tuned: Tuned) -> dict[str, Any]:
    """`tune.json`."""
    request = tuned.request
    return {
        "format_version": FORMAT_VERSION,
        "coefficient": tuned.recipe.key,
        "factor": tuned.recipe.factor,
        "best": _row(tuned, tuned.best),
        "search": {
            "kind": request.search,
            "grid": request.grid,
            "keep": request.keep if "control" in tuned.goals else None,
        },
        "items": asdict(tuned.choice),
        "tasks": {
            entry.name: {
                "metrics": list(entry.metrics),
                "role": role,
                "reference": {
                    m: goal.reference[entry.name, m] for m in entry.metrics if goal.reference
                },
                "parts": [asdict(part) for part in entry.parts],
            }
            for role, goal, entry in _entries(tuned)
        },
        "points": [_row(tuned, row) for row in tuned.rows],
        "decided_by": dict(tuned.facts),
    }


def _row(tuned: Tuned, row: Row) -> dict[str, Any]:
    return {
        tuned.recipe.key: row.point,
        "score": asdict(row.target),
        **({} if row.control is None else {"control": asdict(row.control)}),
        "tasks": {name: asdict(scored) for name, scored in row.scored.items()},
    }


def sheet(tuned: Tuned) -> Sheet:
    """A row for each point in the order of the coefficient; the chosen one has a star."""
    entries = list(_entries(tuned))
    if len(entries) == 1:
        entries = []  # the mean is its score
    control = ["control"] if "control" in tuned.goals else []
    head = [tuned.recipe.key, f"mean {_what(tuned)}", *control, *(e.name for _, _, e in entries)]
    rows = []
    for row in sorted(tuned.rows, key=lambda row: row.point):
        star = " *" if row.point == tuned.best.point else ""
        means = [row.target, *([row.control] if row.control else [])]
        each = [goal.of(entry, row.scored[entry.name]) for _, goal, entry in entries]
        rows.append((f"{row.point:g}{star}", *map(_number, [*means, *each])))
    return Sheet(headline(tuned), tuple(head), rows)


def _what(tuned: Tuned) -> str:
    return "share of the reference" if tuned.goals["target"].reference else "score"


def _number(estimate: Estimate) -> str:
    error = "" if estimate.stderr is None else f" ± {estimate.stderr:.4f}"
    return f"{estimate.value:.4f}{error}"


def headline(tuned: Tuned) -> str:
    """What was found, in one line."""
    best = tuned.best
    control = f", control {_number(best.control)}" if best.control else ""
    return f"{tuned.recipe.key} {best.point:g}: {_number(best.target)}{control}"


def print_table(tuned: Tuned, console: Console) -> None:
    """Print the points, and below them what was found."""
    table = sheet(tuned)
    head = tuple(shortened(printable(name), LABEL) for name in table.head)
    print_sheet(Sheet("", head, table.rows), console)
    console.print()
    say(table.title, console, "bold")


def markdown(tuned: Tuned) -> str:
    """`tune.md`."""
    table = sheet(tuned)
    lines = [tuple(map(escaped, line)) for line in (table.head, *table.rows)]
    notes = "\n".join(f"* {line}" for line in how(tuned))
    return f"# {table.title}\n\n{markdown_table(lines)}\n\n{notes}\n"


def how(tuned: Tuned) -> list[str]:
    """How the coefficient was found, in lines."""
    request, recipe = tuned.request, tuned.recipe
    kind = "golden-section search" if request.search == "golden" else "grid"
    lines = [f"{recipe.key}: {kind} over {request.grid}, {len(tuned.rows)} points scored"]
    if recipe.factor:
        lines.append(f"{recipe.key} multiplies the recipe's own gradients and filters")
    if not recipe.linear:
        lines.append(f"draws at random: merge it with mergekit-yaml --random-seed {recipe.seed}")
    if "control" in tuned.goals:
        lines.append(
            f"the smallest target score that keeps {request.keep:g} of the control score at 0"
        )
    for role, _, entry in _entries(tuned):
        part = entry.parts[0]
        items = f"{len(part.chosen)} of {part.items} {part.split} items"
        if len(entry.parts) > 1:
            items += f" and {len(entry.parts) - 1} parts more"
        name = f"control {entry.name}" if role == "control" else entry.name
        metrics = " and ".join(entry.metrics)
        lines.append(f"{name}: {metrics} on {items}, seed {tuned.choice.seed}")
    if request.reference is not None:
        lines.append(f"scores are shares of those in {request.reference}")
    return [*lines, *tuned.notes]


def recipe_text(tuned: Tuned) -> str:
    """`tuned.yml`: the recipe with the coefficient written in, and how it was found."""
    lines = ["Found by tvb tune.", headline(tuned), *how(tuned)]
    comment = "".join(f"# {printable(line)}\n" for line in lines)
    return f"{comment}\n{tuned.recipe.tuned(tuned.best.point)}"


def _figure(tuned: Tuned) -> Figure:
    from matplotlib.figure import Figure

    rows = sorted(tuned.rows, key=lambda row: row.point)
    points = [row.point for row in rows]
    goal = tuned.goals["target"]
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(shortened(printable(headline(tuned)), 80))
    several = len(goal.entries) > 1
    for entry in goal.entries if several else ():
        values = [goal.of(entry, row.scored[entry.name]).value for row in rows]
        axes.plot(points, values, color=PALE, linewidth=0.8, zorder=1)

    def curve(label: str, colour: str, found: list[Estimate]) -> None:
        values = [estimate.value for estimate in found]
        errors = np.array([estimate.stderr for estimate in found], dtype=float)  # None is NaN
        how: dict[str, Any] = {"color": colour, "ecolor": PALE, "label": printable(label)}
        axes.errorbar(points, values, errors, fmt="o-", markersize=4, elinewidth=0.8, **how)

    curve("mean" if several else goal.entries[0].name, BLUE, [row.target for row in rows])
    controls = [row.control for row in rows if row.control is not None]
    if controls:
        names = [entry.name for entry in tuned.goals["control"].entries]
        curve(f"control: {listed(names)}", ORANGE, controls)
        keep = tuned.request.keep
        least = keep * controls[points.index(0.0)].value
        label = f"{keep:g} of the control score at 0"
        axes.axhline(least, color=ORANGE, linewidth=0.8, linestyle="--", label=label)
    axes.axvline(tuned.best.point, color=DARK, linewidth=0.8, linestyle=":")
    axes.set_xlabel(tuned.recipe.key)
    axes.set_ylabel(_what(tuned) if goal.reference else "score, ± 1 standard error")
    axes.legend(loc="best")
    return figure
