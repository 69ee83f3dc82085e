"""The files of a tuning: tables, tune.json, the curve, tuned.yml, and the items for the test.

Files depend on the scores only, not on the time of day or on interruptions.
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
from tvb_mergekit.tables import Sheet, escaped, markdown_table, printable, shortened, show
from tvb_mergekit.tune.harness import EvalTask
from tvb_mergekit.tune.running import Point, Tuned
from tvb_mergekit.tune.search import Estimate, Objective

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT_VERSION = 1  # of tune.json
LABEL = 24  # characters of a column's head
NAMES = {"target": "score", "control": "control"}  # of the means in tune.json
NO_PICTURE = "no curve.png without matplotlib: pip install 'tvb-mergekit[plot]'"


def write(tuned: Tuned) -> list[str]:
    """Write the files into OUT; return messages about files that could not be written."""
    out = tuned.request.out
    write_file(out / "tune.json", _json(summary(tuned)))
    write_file(out / "tune.md", markdown(tuned).encode())
    write_file(out / "tuned.yml", recipe_text(tuned).encode())
    parts = [part for _, _, task in _tasks(tuned) for part in task.parts]
    if rest := {part.task: part.left_to_test for part in parts if part.left_to_test}:
        write_file(out / "test_samples.json", _json(rest))
    if not can_draw():
        return [NO_PICTURE]
    write_file(out / "curve.png", rendered(lambda: _figure(tuned), "png"))
    return []


def _json(facts: Mapping[str, Any]) -> bytes:
    return (json.dumps(facts, indent=1) + "\n").encode()


def _tasks(tuned: Tuned) -> Iterator[tuple[str, Objective, EvalTask]]:
    """Yield every task with its role, "target" or "control", and its objective."""
    for role, goal in tuned.goals.items():
        for task in goal.tasks:
            yield role, goal, task


def summary(tuned: Tuned) -> dict[str, Any]:
    """Return `tune.json`."""
    request = tuned.request
    return {
        "format_version": FORMAT_VERSION,
        "coefficient": tuned.recipe.key,
        "factor": tuned.recipe.factor,
        "best": _point(tuned, tuned.best),
        "search": {
            "kind": request.search,
            "grid": request.grid,
            "keep": request.keep if "control" in tuned.goals else None,
        },
        "items": asdict(tuned.choice),
        "tasks": {
            task.name: {
                "metrics": list(task.metrics),
                "role": role,
                "parts": [asdict(part) for part in task.parts],
            }
            for role, _, task in _tasks(tuned)
        },
        "points": [_point(tuned, point) for point in tuned.points],
        "decided_by": dict(tuned.facts),
    }


def _point(tuned: Tuned, point: Point) -> dict[str, Any]:
    return {
        tuned.recipe.key: point.value,
        **{NAMES[role]: asdict(mean) for role, mean in point.means.items()},
        "tasks": {name: asdict(scored) for name, scored in point.scored.items()},
    }


def sheet(tuned: Tuned) -> Sheet:
    """Return a row for each point in the order of the coefficient; the best one has a star."""
    tasks = [] if len(tuned.points[0].scored) == 1 else list(_tasks(tuned))  # one is the mean
    control = ["control"] if "control" in tuned.goals else []
    head = [tuned.recipe.key, "mean score", *control, *(t.name for _, _, t in tasks)]
    rows = []
    for point in sorted(tuned.points, key=lambda point: point.value):
        star = " *" if point.value == tuned.best.value else ""
        each = [goal.of(task, point.scored[task.name]) for _, goal, task in tasks]
        rows.append((f"{point.value:g}{star}", *map(_number, [*point.means.values(), *each])))
    return Sheet(headline(tuned), tuple(head), rows)


def _number(estimate: Estimate) -> str:
    error = "" if estimate.stderr is None else f" ± {estimate.stderr:.4f}"
    return f"{estimate.value:.4f}{error}"


def headline(tuned: Tuned) -> str:
    means = ", control ".join(map(_number, tuned.best.means.values()))
    return f"{tuned.recipe.key} {tuned.best.value:g}: {means}"


def print_table(tuned: Tuned, console: Console) -> None:
    """Print the points, and the result below them."""
    table = sheet(tuned)
    head = tuple(shortened(printable(name), LABEL) for name in table.head)
    show([Sheet("", head, table.rows)], console)
    console.print()
    show([table.title], console, "bold")


def markdown(tuned: Tuned) -> str:
    """Return `tune.md`."""
    table = sheet(tuned)
    lines = [tuple(map(escaped, line)) for line in (table.head, *table.rows)]
    notes = "\n".join(f"* {line}" for line in how(tuned))
    return f"# {table.title}\n\n{markdown_table(lines)}\n\n{notes}\n"


def how(tuned: Tuned) -> list[str]:
    """Describe how the coefficient was found."""
    request, recipe = tuned.request, tuned.recipe
    kind = "golden-section search" if request.search == "golden" else "grid"
    lines = [f"{recipe.key}: {kind} over {request.grid}, {len(tuned.points)} points scored"]
    if recipe.factor:
        lines.append(f"{recipe.key} multiplies the recipe's own gradients and filters")
    if "control" in tuned.goals:
        keeps = f"keeps {request.keep:g} of the control score at 0"
        lines.append(f"the smallest target score that {keeps}")
    for role, _, task in _tasks(tuned):
        part = task.parts[0]
        items = f"{len(part.chosen)} of {part.items} {part.split} items"
        if len(task.parts) > 1:
            items += f" and {len(task.parts) - 1} parts more"
        name = f"control {task.name}" if role == "control" else task.name
        metrics = " and ".join(task.metrics)
        lines.append(f"{name}: {metrics} on {items}, seed {tuned.choice.seed}")
    return [*lines, *tuned.notes]


def recipe_text(tuned: Tuned) -> str:
    """Return `tuned.yml`: the recipe with the coefficient, and how it was found."""
    lines = ["Found by tvb tune.", headline(tuned), *how(tuned)]
    comment = "".join(f"# {printable(line)}\n" for line in lines)
    return f"{comment}\n{tuned.recipe.tuned(tuned.best.value)}"


def _figure(tuned: Tuned) -> Figure:
    from matplotlib.figure import Figure

    points = sorted(tuned.points, key=lambda point: point.value)
    values = [point.value for point in points]
    goal = tuned.goals["target"]
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(shortened(printable(headline(tuned)), 80))
    several = len(goal.tasks) > 1
    for task in goal.tasks if several else ():
        scores = [goal.of(task, point.scored[task.name]).value for point in points]
        axes.plot(values, scores, color=PALE, linewidth=0.8, zorder=1)

    def curve(label: str, colour: str, found: list[Estimate]) -> None:
        means = [estimate.value for estimate in found]
        errors = np.array([estimate.stderr for estimate in found], dtype=float)  # None is NaN
        how: dict[str, Any] = {"color": colour, "ecolor": PALE, "label": printable(label)}
        axes.errorbar(values, means, errors, fmt="o-", markersize=4, elinewidth=0.8, **how)

    label = "mean" if several else goal.tasks[0].name
    curve(label, BLUE, [point.means["target"] for point in points])
    if "control" in tuned.goals:
        controls = [point.means["control"] for point in points]
        names = [task.name for task in tuned.goals["control"].tasks]
        curve(f"control: {listed(names)}", ORANGE, controls)
        keep = tuned.request.keep
        least = keep * controls[values.index(0.0)].value
        label = f"{keep:g} of the control score at 0"
        axes.axhline(least, color=ORANGE, linewidth=0.8, linestyle="--", label=label)
    axes.axvline(tuned.best.value, color=DARK, linewidth=0.8, linestyle=":")
    axes.set_xlabel(tuned.recipe.key)
    axes.set_ylabel("score, ± 1 standard error")
    axes.legend(loc="best")
    return figure
