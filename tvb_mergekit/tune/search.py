"""Grids, searches for the best coefficient, and means of scores.

Scores are compared up to 1e-9, so that equal counts of right answers are equal in any order of
summation. If scores are equal, the smallest coefficient wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scipy.optimize import minimize_scalar

from tvb_mergekit.errors import UserError

DIGITS = 9  # of a score; the rest is rounding
MOST = 1000  # points of a grid
BRENT = 20  # points at most of Brent's search: about 9 for a fortieth of the interval
PAPER = "0:1:0.05"
# The best lambda of merges of matrices was 0.2 to 2.8 in our benchmarks; a step costs few percent.
# Iso-C over adapters wanted 16: it spreads the mean of r values over the few directions they have.
WIDE = "0,0.1,0.14,0.2,0.3,0.45,0.65,1,1.4,2,2.8,4"
GRIDS = {"basis_iso": f"{WIDE},5.6,8,11,16,22", "basis_tsvm": WIDE, "basis_wudi": WIDE}


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
    value = math.fsum(each.value for each in every) / len(every)
    return Estimate(value, math.hypot(*errors) / len(every) if len(errors) == len(every) else None)


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


def most_forgotten(
    targets: Mapping[float, float], controls: Mapping[float, float], keep: float
) -> float:
    """The point with the smallest target score among those that keep the control score.

    The paper's rule (appendix, "Hyperparameters and Metrics"), there with 0.95 and 21 points: to
    keep is to have the share `keep` of the control score at 0.
    """
    least = round(keep * controls[0.0], DIGITS)
    keeping = [point for point in targets if round(controls[point], DIGITS) >= least]
    return min(keeping, key=lambda point: (round(targets[point], DIGITS), point))


def brent(points: Sequence[float], score: Callable[[float], float]) -> float:
    """The best point of Brent's bounded search for the maximum of a score with one peak.

    From the first to the last of the points, to half of their smallest step.
    """
    scores: dict[float, float] = {}

    def loss(point: float) -> float:
        point = float(f"{point:.4g}")  # nobody wants to read more
        scores[point] = round(score(point), DIGITS)
        return -scores[point]

    step = min(after - before for before, after in pairwise(points))
    options = {"xatol": step / 2, "maxiter": BRENT}
    minimize_scalar(loss, bounds=(points[0], points[-1]), method="bounded", options=options)
    return best(scores)
