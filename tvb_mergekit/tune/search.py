"""Searches for the best coefficient; each asks for the scores that it needs.

Scores are compared up to 1e-9, so that equal counts of right answers are equal in any order of
summation. If scores are equal, the smallest coefficient wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvb_mergekit.errors import UserError

DIGITS = 9  # of a score; the rest is rounding
MOST = 1000  # points of a grid
RATIO = (math.sqrt(5) - 1) / 2
FINEST = 1e-4  # of an interval

Score = Callable[[float], float]


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
