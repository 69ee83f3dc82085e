"""Grids, searches for the best coefficient, and means of scores.

Scores are compared up to 1e-9, so that equal counts of right answers are equal in any order of
summation. If scores are equal, the smallest coefficient wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from scipy.optimize import minimize_scalar

from tvb_mergekit.core.settings import MATRIX_METHODS
from tvb_mergekit.errors import UserError

DIGITS = 9  # of a score; the rest is rounding
MOST = 1000  # points of a grid
BRENT = 20  # points at most of Brent's search: about 9 for a fortieth of the interval

# The best lambda of merges of matrices was 0.2 to 2.8 in our benchmarks; a step costs few percent.
WIDE = "0,0.1,0.14,0.2,0.3,0.45,0.65,1,1.4,2,2.8,4"
# Iso-C over adapters wanted 16: it spreads the mean of r values over the few directions they have.
FURTHER = ",5.6,8,11,16,22"
Score = Callable[[float], float]


@dataclass(frozen=True)
class Estimate:
    """A score, and its standard error if that is known."""

    value: float
    stderr: float | None

    def __str__(self) -> str:
        return f"{self.value:.4f}" + ("" if self.stderr is None else f" ± {self.stderr:.4f}")


def mean(estimates: Iterable[Estimate]) -> Estimate:
    """The mean of scores; its error assumes that they are independent."""
    every = list(estimates)
    errors = [each.stderr for each in every if each.stderr is not None]
    known = len(errors) == len(every)
    value = math.fsum(each.value for each in every) / len(every)
    return Estimate(value, math.hypot(*errors) / len(every) if known else None)


def default_grid(method: str, ends: bool = False) -> str:
    """The grid of a merge method, or only its limits and its precision, for `brent`."""
    if method not in MATRIX_METHODS:
        return "0:1:0.05"  # the paper's
    if ends:
        return "0:4:0.2"
    return WIDE + (FURTHER if method == "basis_iso" else "")


def grid_points(text: str) -> list[float]:
    """Read `START:STOP:STEP`, both ends included, or numbers with commas; sorted."""
    try:
        points = [float(part) for part in text.split(":" if ":" in text else ",")]
        if ":" in text:
            start, stop, step = points
            count = min(math.floor((stop - start) / step + 1 + 1e-9), MOST + 1)
            points = [round(start + step * place, 12) for place in range(count)]
        if not (0 < len(points) <= MOST and all(map(math.isfinite, points))):
            raise ValueError(f"1 to {MOST} finite points")
    except (ValueError, ArithmeticError) as error:
        expected = "expected START:STOP:STEP, as in 0:1:0.05, or numbers with commas"
        raise UserError(f"--grid {text}: {expected} ({error})") from error
    return sorted({point + 0.0 for point in points})  # + 0.0: no -0


def best(scores: Mapping[float, float]) -> float:
    """The point of the largest score, the smallest point of equal ones."""
    return max(scores, key=lambda point: (round(scores[point], DIGITS), -point))


def grid(points: Sequence[float], score: Score) -> tuple[float, list[float]]:
    """The best point of a grid, and the scores of all."""
    found = {point: score(point) for point in points}
    return best(found), [*found.values()]


def most_forgotten(points: Sequence[float], target: Score, control: Score, keep: float) -> float:
    """The point with the smallest target score among those that keep the control score.

    The paper's rule (appendix, "Hyperparameters and Metrics"), there with 0.95 and 21 points.
    The control score is asked for only until a point keeps the share `keep` of its value at 0.
    """
    if control(0.0) <= 0:
        raise UserError("--control: the score is 0 at alpha 0 already: nothing to keep")
    least = round(keep * control(0.0), DIGITS)
    targets = {point: round(target(point), DIGITS) for point in points}
    for point in sorted(targets, key=lambda point: (targets[point], point)):
        if round(control(point), DIGITS) >= least:
            return point
    raise UserError(f"no point keeps {keep:g} of the control score at 0: add smaller points")


def brent(low: float, high: float, tolerance: float, score: Score) -> float:
    """The best point of Brent's bounded search for the maximum of a score with one peak."""
    decimals = 3 - math.floor(math.log10(tolerance))  # nobody wants to read more
    scores: dict[float, float] = {}

    def loss(point: float) -> float:
        point = round(float(point), decimals)
        if point not in scores:
            scores[point] = round(score(point), DIGITS)
        return -scores[point]

    options = {"xatol": tolerance, "maxiter": BRENT}
    minimize_scalar(loss, bounds=(low, high), method="bounded", options=options)
    return best(scores)
