"""`tvb tune`: checks first, then the search, then its files."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tvb_mergekit.errors import UserError
from tvb_mergekit.figures import can_draw, rendered
from tvb_mergekit.plugin.document import from_mapping
from tvb_mergekit.plugin.inputs import Options
from tvb_mergekit.progress import bars
from tvb_mergekit.tensors.output import check_output_folder, write_file
from tvb_mergekit.tune import search
from tvb_mergekit.tune.line import Tuning, moving_model, read_tuning
from tvb_mergekit.tune.tasks import Evaluation, load_model, load_tasks, score

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def tune(
    path: str,
    tasks: Sequence[str],
    out: Path,
    evaluation: Evaluation,
    options: Options,
    *,
    controls: Sequence[str] = (),
    grid: str | None = None,
    brent: bool = False,
    keep: float = 0.95,
    quiet: bool = False,
) -> Tuning:
    """Find the coefficient of a recipe; see `tvb tune --help`."""
    tuning = read_tuning(path, options)
    key, negation = tuning.key, tuning.key == "alpha"
    usual = search.GRIDS.get(tuning.document["merge_method"], search.PAPER)
    points = search.grid_points(grid or usual)
    if negation != bool(controls):
        raise UserError("--control TASK, a task to keep, goes with basis_negate, which needs one")
    if brent and (negation or len(points) < 2):
        raise UserError("--search brent needs a --grid with two ends, and cannot tune basis_negate")
    check_output_folder(out)
    points = sorted({0.0, *points}) if negation else points
    for point in points:
        from_mapping(tuning.at(point))
    tuning.tasks = load_tasks(tasks, controls, evaluation, tuning.document["base_model"])
    lower = {task.lower for task in tuning.tasks}
    if len(lower) > 1 or (negation and True in lower):
        raise UserError("scores that are better when lower go with no others, nor with forgetting")
    most = search.BRENT if brent else len(points)
    out.mkdir(parents=True, exist_ok=True)
    done = bars(quiet)("Tune", most, "point")
    with tempfile.TemporaryDirectory(prefix=".work-", dir=out) as work:
        model = moving_model(tuning, Path(work), partial(load_model, evaluation))

        def mean(point: float, control: bool = False) -> float:
            if point not in tuning.points:
                scores = score(model(point), tuning.tasks, evaluation.chat_template)
                tuning.points[point] = scores
                write_facts(tuning, out)
                done(1, f"{key} {point:g}")
            return tuning.mean(point, control).value * (-1 if True in lower else 1)

        if brent:
            tuning.best = search.brent(points, mean)
            if len(tuning.points) < most:
                done(0, last=True)
        elif not negation:
            tuning.best = search.best({point: mean(point) for point in points})
        elif mean(0.0, control=True) <= 0:
            raise UserError("--control: the score is 0 at alpha 0 already: nothing to keep")
        else:
            targets, kept = ({p: mean(p, control) for p in points} for control in (False, True))
            tuning.best = search.most_forgotten(targets, kept, keep)
    write_facts(tuning, out)
    return tuning


def write_facts(tuning: Tuning, out: Path) -> None:
    """Write tune.json: after each point, so that a kill does not lose the scores."""
    points = {point: {n: vars(e) for n, e in of.items()} for point, of in tuning.points.items()}
    tasks = [{k: v for k, v in vars(each).items() if k != "loaded"} for each in tuning.tasks]
    best = tuning.best if tuning.best in points else None
    facts = {"coefficient": tuning.key, "best": best, "points": points, "tasks": tasks}
    write_file(out / "tune.json", f"{json.dumps(facts, indent=1)}\n".encode())


def report(tuning: Tuning, out: Path) -> list[str]:
    """Write tuned.yml, the items left to the test, and a picture; return lines to print."""
    lines, negation = list[str](), any(task.control for task in tuning.tasks)
    for point in sorted(tuning.points):
        control = f", control {tuning.mean(point, control=True)}" if negation else ""
        lines.append(f"{tuning.key} {point:<8g} score {tuning.mean(point)}{control}")
    lines.append(f"The best of {len(tuning.points)} points is {tuning.best:g}:")
    for task in tuning.tasks:
        items = f"{len(task.chosen)} of {task.items} {task.split} items"
        found = tuning.points[tuning.best][task.name]
        lines.append(f"{task.name} {found}, {task.metric} on {items}")
    comment = "".join(f"# {line}\n" for line in ("Found by tvb tune.", *lines))
    recipe = yaml.safe_dump(tuning.at(tuning.best), sort_keys=False, allow_unicode=True)
    (out / "tuned.yml").write_text(comment + recipe, encoding="utf-8")
    if rest := {task.name: task.left_to_test for task in tuning.tasks if task.left_to_test}:
        (out / "test_samples.json").write_text(json.dumps(rest) + "\n")
        lines.append("test_samples.json has the items that did not choose, for the test")
    if can_draw():
        (out / "curve.png").write_bytes(rendered(partial(_figure, tuning), "png"))
    return lines


def _figure(tuning: Tuning) -> Figure:
    """A line for each task with its name at its end, and the mean with its standard error."""
    from matplotlib.figure import Figure

    figure, points = Figure(figsize=(8, 5), layout="constrained"), sorted(tuning.points)
    axes = figure.add_subplot(xlabel=tuning.key, ylabel="score", title=f"best: {tuning.best:g}")
    means = [tuning.mean(point) for point in points]
    values, errors = [mean.value for mean in means], [mean.stderr or 0.0 for mean in means]
    axes.errorbar(points, values, errors, fmt="o-", color="black", linewidth=2, elinewidth=0.8)
    ends = [(values[-1], "mean", "black")]
    for number, task in enumerate(tuning.tasks):
        values = [tuning.points[point][task.name].value for point in points]
        axes.plot(points, values, "--" if task.control else "-", color=f"C{number}")
        ends.append((values[-1], task.name, f"C{number}"))
    (low, high), place = axes.get_ylim(), -math.inf
    for end, name, colour in sorted(ends):
        place = max(end, place + (high - low) / 30)  # a line of text above the one below
        axes.text(
            1.01, place, name, color=colour, transform=axes.get_yaxis_transform(), va="center"
        )
    axes.axvline(tuning.best, color="gray", linestyle=":")
    return figure
