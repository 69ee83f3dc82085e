"""Searches for the best coefficient, which ask for the scores that they need, and the objective.

Scores are compared up to 1e-9, so that equal counts of right answers are equal in any order of
summation. If scores are equal, the smallest coefficient wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvb_mergekit.errors import UserError
from tvb_mergekit.score.results import Results
from tvb_mergekit.settings import MATRIX_METHODS
from tvb_mergekit.tune.harness import EvalTask, Scored

DIGITS = 9  # of a score; the rest is rounding
MOST = 1000  # points of a grid
RATIO = (math.sqrt(5) - 1) / 2
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
    """Return the best point of a golden-section search for the maximum of a unimodal score.

    Each score after the first two narrows the interval to 0.618 of its length. The search ends
    when the interval is at most `tolerance` long, a ten-thousandth of its first length, or without
    a float inside. From 1 to 0.05 that is 8 scores. scipy's version needs a bracketing triple,
    which costs scores to find and may leave the interval.
    """
    tolerance = max(tolerance, FINEST * (high - low))
    decimals = 6 - math.floor(math.log10(high - low))  # nobody wants to read more

    def inner(end: float, other: float) -> float:
        return round(end + RATIO * (other - end), decimals)

    left, right = inner(high, low), inner(low, high)
    scores = {point: score(point) for point in (left, right)}
    while high - low > tolerance and low < left < right < high:
        if round(scores[left], DIGITS) >= round(scores[right], DIGITS):
            high, right = right, left
            left = new = inner(high, low)
        else:
            low, left = left, right
            right = new = inner(low, high)
        if high - low > tolerance and new not in scores:
            scores[new] = score(new)
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
    reference: Mapping[tuple[str, str], float]  # (task, metric) -> divisor; empty for none

    @property
    def lower(self) -> bool:
        return bool(self.tasks[0].lower)

    def of(self, task: EvalTask, scored: Scored) -> Estimate:
        """Return the score of one task.

        Its metrics share items. Their errors are added, which is the upper bound.
        """
        scales = {m: 1 / self.reference.get((task.name, m), 1.0) for m in task.metrics}
        value = math.fsum(scored.values[m] * scale for m, scale in scales.items()) / len(scales)
        if not scored.stderrs.keys() >= scales.keys():
            return Estimate(value, None)
        errors = (scored.stderrs[m] * scale for m, scale in scales.items())
        return Estimate(value, math.fsum(errors) / len(scales))

    def mean(self, found: Mapping[str, Scored]) -> Estimate:
        """Return the mean over all tasks; the error assumes that they are independent."""
        each = [self.of(task, found[task.name]) for task in self.tasks]
        value = math.fsum(estimate.value for estimate in each) / len(each)
        errors = [estimate.stderr for estimate in each if estimate.stderr is not None]
        known = len(errors) == len(each)
        return Estimate(value, math.hypot(*errors) / len(each) if known else None)


def objective(
    tasks: Sequence[EvalTask], reference: Results | None = None, what: str = "", rising: str = ""
) -> Objective:
    """Make the objective over tasks, with scores as shares of the reference's if there is one.

    Args:
        what: path of the reference, for messages.
        rising: option that needs metrics that are better when higher, for messages.
    """
    metrics = [(task, metric) for task in tasks for metric in task.metrics]
    low = [(metric, task.name) for task, metric in metrics if metric in task.lower]
    rising = rising or ("" if reference is None else "--reference")
    if low and (rising or len(low) < len(metrics)):
        raise UserError(
            f"{' of '.join(low[0])} is better when it is lower: "
            f"{rising or 'a mean with other metrics'} needs scores that rise"
        )
    if reference is None:
        return Objective(tuple(tasks), {})
    shares = {}
    for task, metric in metrics:
        reference.check_rivals(
            f"--reference {what}", task.name, "a folder with the files of each task's specialist"
        )
        known = reference.tasks.get(task.name)
        value = known.metrics.get(metric, 0.0) if known else 0.0
        if value <= 0:
            has = ", ".join(known.metrics if known else reference.tasks)
            raise UserError(f"--reference {what}: no {metric} of {task.name} above 0 (has {has})")
        shares[task.name, metric] = value
    return Objective(tuple(tasks), shares)
