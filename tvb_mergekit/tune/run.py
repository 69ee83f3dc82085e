"""`tvb tune`: checks first, then the search, then its files."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tvb_mergekit.errors import UserError
from tvb_mergekit.figures import can_draw, rendered
from tvb_mergekit.plugin.document import from_mapping
from tvb_mergekit.plugin.inputs import Options
from tvb_mergekit.progress import bars
from tvb_mergekit.tensors.output import check_output_folder
from tvb_mergekit.tune import search
from tvb_mergekit.tune.line import TunedRecipe, moving_model, read_tuned
from tvb_mergekit.tune.search import Estimate
from tvb_mergekit.tune.tasks import EvalTask, Evaluation, load_model, load_tasks, score

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class Tuned:
    """The scores of each point by task, in the order of the search, and the best point."""

    recipe: TunedRecipe
    tasks: Sequence[EvalTask]
    points: dict[float, dict[str, Estimate]] = field(default_factory=dict)
    best: float = math.nan

    def mean(self, point: float, control: bool = False) -> Estimate:
        scores = self.points[point]
        return search.mean(scores[task.name] for task in self.tasks if task.control == control)

    def write(self, out: Path) -> None:
        """Write tune.json: after each point, so that a kill does not lose the scores."""
        points = {point: {n: vars(e) for n, e in of.items()} for point, of in self.points.items()}
        tasks = [{k: v for k, v in vars(each).items() if k != "loaded"} for each in self.tasks]
        best = self.best if self.best in points else None
        facts = {"coefficient": self.recipe.key, "best": best, "points": points, "tasks": tasks}
        (out / "tune.json").write_text(json.dumps(facts, indent=1) + "\n")


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
) -> Tuned:
    """Find the coefficient of a recipe; see `tvb tune --help`."""
    recipe = read_tuned(path, options)
    negation = recipe.key == "alpha"
    points = search.grid_points(grid or search.GRIDS.get(recipe.method, search.PAPER))
    if negation != bool(controls):
        raise UserError("--control TASK, a task to keep, goes with basis_negate, which needs one")
    if brent and (negation or len(points) < 2):
        raise UserError("--search brent needs a --grid with two ends, and cannot tune basis_negate")
    check_output_folder(out)
    points = sorted({0.0, *points}) if negation else points
    for point in points:
        from_mapping(recipe.at(point))
    tuned = Tuned(recipe, load_tasks(tasks, controls, evaluation, recipe.document["base_model"]))
    lower = {task.lower for task in tuned.tasks}
    if len(lower) > 1 or (negation and True in lower):
        raise UserError("scores that are better when lower go with no others, nor with forgetting")
    most = search.BRENT if brent else len(points)
    out.mkdir(parents=True, exist_ok=True)
    done = bars(quiet)("Tune", most, "point")
    with tempfile.TemporaryDirectory(prefix=".work-", dir=out) as work:
        model = moving_model(recipe, Path(work), partial(load_model, evaluation))

        def mean(point: float, control: bool = False) -> float:
            if point not in tuned.points:
                scores = score(model(point), tuned.tasks, evaluation.chat_template)
                tuned.points[point] = scores
                tuned.write(out)
                done(1, f"{recipe.key} {point:g}")
            return tuned.mean(point, control).value * (-1 if True in lower else 1)

        if brent:
            tuned.best = search.brent(points, mean)
            if len(tuned.points) < most:
                done(0, last=True)
        elif not negation:
            tuned.best = search.best({point: mean(point) for point in points})
        elif mean(0.0, control=True) <= 0:
            raise UserError("--control: the score is 0 at alpha 0 already: nothing to keep")
        else:
            targets, kept = ({p: mean(p, control) for p in points} for control in (False, True))
            tuned.best = search.most_forgotten(targets, kept, keep)
    tuned.write(out)
    return tuned


def report(tuned: Tuned, out: Path) -> list[str]:
    """Write tuned.yml, the items left to the test, and a picture; return lines to print."""
    lines, negation = list[str](), any(task.control for task in tuned.tasks)
    for point in sorted(tuned.points):
        control = f", control {tuned.mean(point, control=True)}" if negation else ""
        lines.append(f"{tuned.recipe.key} {point:<8g} score {tuned.mean(point)}{control}")
    lines.append(f"The best of {len(tuned.points)} points is {tuned.best:g}:")
    for task in tuned.tasks:
        items = f"{len(task.chosen)} of {task.items} {task.split} items"
        found = tuned.points[tuned.best][task.name]
        lines.append(f"{task.name} {found}, {task.metric} on {items}")
    comment = "".join(f"# {line}\n" for line in ("Found by tvb tune.", *lines))
    recipe = yaml.safe_dump(tuned.recipe.at(tuned.best), sort_keys=False, allow_unicode=True)
    (out / "tuned.yml").write_text(comment + recipe, encoding="utf-8")
    if rest := {task.name: task.left_to_test for task in tuned.tasks if task.left_to_test}:
        (out / "test_samples.json").write_text(json.dumps(rest) + "\n")
        lines.append("test_samples.json has the items that did not choose, for the test")
    if can_draw():
        (out / "curve.png").write_bytes(rendered(partial(_figure, tuned), "png"))
    return lines


def _figure(tuned: Tuned) -> Figure:
    """A line for each task with its name at its end, and the mean with its standard error."""
    from matplotlib.figure import Figure

    figure, points = Figure(figsize=(8, 5), layout="constrained"), sorted(tuned.points)
    title = f"best: {tuned.best:g}"
    axes = figure.add_subplot(xlabel=tuned.recipe.key, ylabel="score", title=title)
    means = [tuned.mean(point) for point in points]
    values, errors = [mean.value for mean in means], [mean.stderr or 0.0 for mean in means]
    axes.errorbar(points, values, errors, fmt="o-", color="black", linewidth=2, elinewidth=0.8)
    ends = [(values[-1], "mean", "black")]
    for number, task in enumerate(tuned.tasks):
        values = [tuned.points[point][task.name].value for point in points]
        axes.plot(points, values, "--" if task.control else "-", color=f"C{number}")
        ends.append((values[-1], task.name, f"C{number}"))
    (low, high), place = axes.get_ylim(), -math.inf
    for end, name, colour in sorted(ends):
        place = max(end, place + (high - low) / 30)  # a line of text above the one below
        axes.text(
            1.01, place, name, color=colour, transform=axes.get_yaxis_transform(), va="center"
        )
    axes.axvline(tuned.best, color="gray", linestyle=":")
    return figure
