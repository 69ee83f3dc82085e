"""Searches for the best coefficient, which ask for the scores that they need, and the objective.

Scores are compared up to 1e-9, so that equal counts of right answers are equal in any order of
summation. If scores are equal, the smallest coefficient wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scipy.optimize import minimize_scalar

from tvb_mergekit.core.settings import MATRIX_METHODS
from tvb_mergekit.errors import UserError
from tvb_mergekit.tune.harness import EvalTask, Scored

DIGITS = 9  # of a score; the rest is rounding
MOST = 1000  # points of a grid
FINEST = 1e-4  # of an interval

Score = Callable[[float], float]

# The best lambda of merges of matrices was 0.2 to 2.8 in our benchmarks; a step costs few percent.
WIDE = "0,0.1,0.14,0.2,0.3,0.45,0.65,1,1.4,2,2.8,4"
# Iso-C over adapters wanted 16: it spreads the mean of r values over the few directions they have.
WIDER = f"{WIDE},5.6,8,11,16,22"


def default_grid(method: str | None, search: str) -> str:
    """The grid of a merge method for `grid`, or limits and precision for `golden`."""
    if method not in MATRIX_METHODS:
        return "0:1:0.05"
    if search == "golden":
        return "0:4:0.2"
    return WIDER if method == "basis_iso" else WIDE


def grid_points(text: str) -> tuple[float, ...]:
    """Read `START:STOP:STEP`, both ends included, or numbers with commas; sorted."""
    wrong = f"--grid {text}: expected START:STOP:STEP, as in 0:1:0.05, or numbers with commas"
    separator = ":" if ":" in text else ","
    try:
        numbers = [float(part) for part in text.split(separator) if part.strip()]
    except ValueError as error:
        raise UserError(wrong) from error
    if not all(map(math.isfinite, numbers)) or (separator == ":" and len(numbers) != 3):
        raise UserError(wrong)
    if separator == ",":
        points = sorted(set(numbers))
    else:
        start, stop, step = numbers
        if step <= 0:
            raise UserError(f"{wrong}; the step must be positive")
        steps = (stop - start) / step + 1e-9
        if steps >= MOST:
            raise UserError(f"--grid {text}: {steps + 1:,.0f} points, at most {MOST} are allowed")
        places = range(math.floor(steps) + 1)
        points = list(dict.fromkeys(round(start + step * place, 12) for place in places))
    if not points:
        raise UserError(f"--grid {text}: holds no point")
    return tuple(point + 0.0 for point in points)  # no -0


def best(points: Sequence[float], scores: Sequence[float]) -> float:
    """Return the point of the largest score, the smallest point of equal ones."""
    pairs = zip(points, scores, strict=True)
    return max(pairs, key=lambda pair: (round(pair[1], DIGITS), -pair[0]))[0]


def grid(points: Sequence[float], score: Score) -> tuple[float, list[float]]:
    """Return the best point of a grid, and the scores of all."""
    found = [score(point) for point in points]
    return best(points, found), found


def most_forgotten(points: Sequence[float], target: Score, control: Score, keep: float) -> float:
    """Return the point with the smallest target score among those that keep the control score.

    The control score is asked for only until a point keeps the share `keep` of its value at 0.
    """
    least = round(keep * control(0.0), DIGITS)
    targets = {point: round(target(point), DIGITS) for point in points}
    for point in sorted(targets, key=lambda point: (targets[point], point)):
        if round(control(point), DIGITS) >= least:
            return point
    raise UserError(
        f"at no point the control score stays at {keep:g} of its value at 0 ({least / keep:.4g}): "
        "add smaller points to the grid, 0 among them"
    )


def golden(low: float, high: float, tolerance: float, score: Score) -> float:
    """Return the best point of Brent's bounded search for the maximum of a unimodal score.

    It is a golden section that takes steps along a parabola where these are shorter. Precision is
    at most a ten-thousandth of the interval: nobody wants to read more digits.
    """
    tolerance = max(tolerance, FINEST * (high - low))
    decimals = 6 - math.floor(math.log10(high - low))
    scores: dict[float, float] = {}

    def loss(point: float) -> float:
        point = round(float(point), decimals)
        if point not in scores:
            scores[point] = round(score(point), DIGITS)
        return -scores[point]

    minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": tolerance})
    return best(list(scores), list(scores.values()))


@dataclass(frozen=True)
class Estimate:
    """A mean score, and its standard error if those of all its scores are known."""

    value: float
    stderr: float | None


@dataclass(frozen=True)
class Objective:
    """The mean over tasks of the mean over their metrics."""

    tasks: tuple[EvalTask, ...]

    @property
    def lower(self) -> bool:
        return bool(self.tasks[0].lower)

    def of(self, task: EvalTask, scored: Scored) -> Estimate:
        """Return the score of one task.

        Its metrics share items. Their errors are added, which is the upper bound.
        """
        value = math.fsum(scored.values[m] for m in task.metrics) / len(task.metrics)
        if not scored.stderrs.keys() >= set(task.metrics):
            return Estimate(value, None)
        return Estimate(
            value, math.fsum(scored.stderrs[m] for m in task.metrics) / len(task.metrics)
        )

    def mean(self, found: Mapping[str, Scored]) -> Estimate:
        """Return the mean over all tasks; the error assumes that they are independent."""
        each = [self.of(task, found[task.name]) for task in self.tasks]
        value = math.fsum(estimate.value for estimate in each) / len(each)
        errors = [estimate.stderr for estimate in each if estimate.stderr is not None]
        known = len(errors) == len(each)
        return Estimate(value, math.hypot(*errors) / len(each) if known else None)


def objective(tasks: Sequence[EvalTask], rising: str = "") -> Objective:
    """Make the objective over tasks.

    Args:
        rising: option that needs metrics that are better when higher, for messages.
    """
    metrics = [(task, metric) for task in tasks for metric in task.metrics]
    low = [(metric, task.name) for task, metric in metrics if metric in task.lower]
    if low and (rising or len(low) < len(metrics)):
        raise UserError(
            f"{' of '.join(low[0])} is better when it is lower: "
            f"{rising or 'a mean with other metrics'} needs scores that rise"
        )
    return Objective(tuple(tasks))
