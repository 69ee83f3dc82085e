"""Differences of two models over the same items, and whether they are beyond chance.

A sign-flip permutation test with the mid-p value: if two models are equally good, an item's
difference is as likely to be +d as -d. p is the share of all sign patterns with a larger sum than
the observed one, plus half the share with an equal sum. For scores of 0 and 1 this is McNemar's
mid-p test (Fagerland, Lydersen and Laake 2013, https://doi.org/10.1186/1471-2288-13-91).

If all differences have one size, the sum is binomial and p is exact. Otherwise signs are drawn
from a fixed seed, and below 1 / (DRAWS + 1) Hoeffding's bound 2 exp(-s^2 / (2 sum d^2)) is used.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import numpy.typing as npt

from tvb_mergekit.errors import listed
from tvb_mergekit.score.results import DECISIVE, Cell, Sample, read_samples

Floats = npt.NDArray[np.float64]
LEVEL = 0.05
DRAWS = 9999
AT_ONCE = 2**22  # numbers drawn at a time
SAME = 1e-6  # sums that differ by less are equal, in units of the largest difference


@dataclass
class Difference:
    """A difference in percent, or in points of the normalized accuracy."""

    value: float
    stderr: float | None  # over paired items; None for a single item
    p: float  # of this test alone
    corrected: float  # by Holm's method: over all tasks of all pairs, or over the pairs' totals
    items: int


@dataclass
class Pair:
    """The differences `other` minus `one` of two columns, named by their labels."""

    one: str
    other: str
    tasks: dict[str, Difference] = field(default_factory=dict)  # without those that are refused
    whole: Difference | None = None  # of the weighted sum, if no task is refused


def compare(
    columns: Mapping[str, Mapping[str, Cell]], weights: Mapping[str, float]
) -> tuple[list[Pair], list[str]]:
    """Compare columns (label -> task -> cell), with weights of tasks; say what is refused."""
    parts: dict[tuple[str, str], dict[str, Floats]] = defaultdict(dict)
    refused: dict[str, list[str]] = defaultdict(list)
    for task in dict.fromkeys(task for cells in columns.values() for task in cells):
        cells = {label: own[task] for label, own in columns.items() if task in own}
        items = {label: read_samples(cell, task) for label, cell in cells.items()}
        # nothing is said where no model has samples
        for one, other in combinations(cells, 2) if any(items.values()) else ():
            mine, theirs = items[one], items[other]
            if why := _unlike(cells[one], cells[other], mine, theirs):
                refused[f"{one} and {other} ({why})"].append(task)
            else:
                found = [theirs[i][2] - share for i, (*_, share) in mine.items()]
                parts[one, other][task] = np.array(found)
    pairs = []
    for names, own in parts.items():
        pairs.append(Pair(*names, {task: difference([found]) for task, found in own.items()}))
        if weights and weights.keys() <= own.keys():
            pairs[-1].whole = difference([weight * own[t] for t, weight in weights.items()])
    correct([each for pair in pairs for each in pair.tasks.values()])
    correct([pair.whole for pair in pairs if pair.whole])
    return pairs, [f"no paired differences of {w}: {listed(each)}" for w, each in refused.items()]


def _unlike(one: Cell, other: Cell, mine: dict[int, Sample], theirs: dict[int, Sample]) -> str:
    """Say why the items of two runs of a task cannot be compared."""
    for key in DECISIVE:
        if one.settings[key] != other.settings[key]:
            return f"{key} differs"
    if not (mine and theirs):
        return "no samples of its items"
    differ = [i for i in mine.keys() | theirs if mine.get(i, ())[:2] != theirs.get(i, ())[:2]]
    return f"item {min(differ)} differs" if differ else ""


def difference(parts: Sequence[Floats]) -> Difference:
    """Test the sum of the parts' means; the parts hold weighted differences of items."""
    errors = [part.std(ddof=1) / math.sqrt(len(part)) for part in parts if len(part) > 1]
    stderr = float(math.hypot(*errors)) if len(errors) == len(parts) else None
    p = sign_flip(np.concatenate([part / len(part) for part in parts]))
    value = math.fsum(float(part.mean()) for part in parts)
    return Difference(value, stderr, p, p, sum(map(len, parts)))


def sign_flip(values: Floats) -> float:
    """Return the two-sided mid-p value of the sign-flip test of a sum of 0."""
    largest = np.abs(values).max(initial=0.0)
    if largest == 0:
        return 1.0
    rounded = np.round(values / largest, 9)  # 0.3 - 0.2 is 0.2 - 0.1
    sizes, counts = np.unique(np.abs(rounded[rounded != 0]), return_counts=True)
    total = abs(float(rounded.sum()))
    if len(sizes) == 1:
        from scipy.stats import binom

        count = int(counts[0])
        fewer = (count - round(total / float(sizes[0]))) // 2
        return float(2 * binom.cdf(fewer, count, 0.5) - binom.pmf(fewer, count, 0.5))
    bound = 2 * math.exp(-(total**2) / (2 * float(counts @ sizes**2)))
    # p by draws: Phipson and Smyth 2010, https://doi.org/10.2202/1544-6115.1585
    generator, beyond = np.random.default_rng(0), 0.0
    single, repeats = counts == 1, counts[counts > 1]
    step = max(1, AT_ONCE // len(sizes))
    for rows in (min(step, DRAWS - start) for start in range(0, DRAWS, step)):
        signs = generator.integers(0, 2, (rows, np.count_nonzero(single)), dtype=np.int8)
        plus = generator.binomial(repeats, 0.5, (rows, len(repeats)))  # of items of one size
        sums = np.abs((2 * signs - 1) @ sizes[single] + (2 * plus - repeats) @ sizes[~single])
        same = np.abs(sums - total) < SAME
        beyond += float(np.sum((sums > total) & ~same) + np.sum(same) / 2)
    return min((1 + beyond) / (DRAWS + 1), bound, 1.0)


def correct(tests: Sequence[Difference]) -> None:
    """Correct p values for their number (Holm 1979)."""
    least = 0.0
    for rank, test in enumerate(sorted(tests, key=lambda test: test.p)):
        test.corrected = least = min(1.0, max(least, test.p * (len(tests) - rank)))
