"""Where to look for the best coefficient: functions of a score, which they ask for as they need it.

Scores are compared up to 1e-9, so that equal counts of right answers are equal however they were
summed; of equals the smallest coefficient wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import minimize

from tvb_mergekit.errors import UserError

DIGITS = 9  # of a score; what lies below is rounding
MOST = 1000  # points of a grid
RATIO = (math.sqrt(5) - 1) / 2
FINEST = 1e-4  # of an interval
LEAST_WEIGHT = 1e-6  # of a basis: a recipe's weight is not 0

Score = Callable[[float], float]


def grid_points(text: str) -> tuple[float, ...]:
    """`START:STOP:STEP` with both ends, or numbers with commas between them.

    Raises:
        UserError: no numbers, or no point.
    """
    wrong = f"--grid {text}: expected START:STOP:STEP, as in 0:1:0.05, or numbers with commas"
    try:
        if ":" not in text:
            points = sorted({float(part) for part in text.split(",") if part.strip()})
        else:
            start, stop, step = map(float, text.split(":"))
            if not (step > 0 and math.isfinite(stop - start)):
                raise UserError(f"{wrong}; the step must be positive")
            count = math.floor((stop - start) / step + 1e-9) + 1
            if count > MOST:
                raise UserError(f"--grid {text}: {count:,} points, the most are {MOST}")
            points = list(dict.fromkeys(round(start + step * i, 12) for i in range(count)))
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(wrong) from error
    if not points or not all(map(math.isfinite, points)):
        raise UserError(f"--grid {text}: holds no point" if not points else wrong)
    return tuple(point + 0.0 for point in points)


def best(points: Sequence[float], scores: Sequence[float]) -> float:
    """The point of the largest score, the smallest of equals."""
    pairs = zip(points, scores, strict=True)
    return max(pairs, key=lambda pair: (round(pair[1], DIGITS), -pair[0]))[0]


def grid(points: Sequence[float], score: Score) -> tuple[float, list[float]]:
    """The best point of a grid, and the scores of all."""
    found = [score(point) for point in points]
    return best(points, found), found


def most_forgotten(points: Sequence[float], target: Score, control: Score, keep: float) -> float:
    """The rule of negation: the smallest target score among the points that keep the control's.

    Asks for the control score only until a point keeps `keep` of the score at 0.

    Raises:
        UserError: no point does.
    """
    least = round(keep * control(0.0), DIGITS)
    targets = {point: round(target(point), DIGITS) for point in points}
    for point in sorted(targets, key=lambda point: (targets[point], point)):
        if round(control(point), DIGITS) >= least:
            return point
    raise UserError(
        f"at no point the control score stays at {keep:g} of what it is at 0 ({least / keep:.4g}): "
        "add smaller points to the grid, 0 among them"
    )


def golden(low: float, high: float, tolerance: float, score: Score) -> float:
    """Golden-section search for the maximum of a unimodal score between two ends, low < high.

    Each score after the first two narrows the interval to 0.618 of it, until it is at most
    `tolerance` long, a ten-thousandth of what it was, or without a float inside. From 1 to 0.05
    that is 8 scores. The best of them is returned. (scipy's version wants a bracketing triple,
    which costs scores to find and may leave the interval.)
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


class _Spent(Exception):
    """No more evaluations."""


def coordinates(
    count: int,
    most: float,
    evaluations: int,
    score: Callable[[tuple[float, ...]], float],
) -> tuple[float, ...]:
    """A factor for each of `count` bases by Powell's method (scipy), from 1 for all of them.

    Powell's method searches along one coordinate after the other, and then along their joint
    moves, without gradients. Factors stay within (0, most]. Returns the best of what was scored.
    """
    scored: dict[tuple[float, ...], float] = {}

    def negative(x: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
        point = tuple(round(max(value, LEAST_WEIGHT), 6) for value in x.tolist())
        if point not in scored:
            if len(scored) == evaluations:
                raise _Spent
            scored[point] = score(point)
        return -scored[point]

    try:
        minimize(
            negative,
            np.ones(count),
            method="Powell",
            bounds=[(LEAST_WEIGHT, most)] * count,
            options={"xtol": 1e-2, "ftol": 1e-4},
        )
    except _Spent:
        pass
    return max(scored, key=lambda point: round(scored[point], DIGITS))
