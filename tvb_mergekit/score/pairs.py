"""Differences of two models over the same items, and whether they are beyond chance.

The test is a sign-flip permutation test with the mid-p value. If two models are equally good, an
item's difference is as likely to be +d as -d. p is the share of all sign patterns with a larger sum
than the observed one, plus half the share of patterns with an equal sum. For scores of 0 and 1 this
is McNemar's mid-p test, which keeps its level and has more power than McNemar's exact test
(Fagerland, Lydersen and Laake 2013, https://doi.org/10.1186/1471-2288-13-91). For other scores it
is Fisher's randomization test of paired observations.

If all differences have one size, as for right-or-wrong items, the sum is binomial and p is exact.
Otherwise signs are drawn DRAWS times from a fixed seed. Draws do not reach below 1 / (DRAWS + 1),
but Hoeffding's bound does: P(|S| >= s) <= 2 exp(-s^2 / (2 sum d^2)).
`scipy.stats.permutation_test` draws a sign for each item, which takes minutes for the sum over a
benchmark. Here the number of plus signs is drawn for each size that several items share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Tested = TypeVar("Tested")
LEVEL = 0.05
DRAWS = 9999
AT_ONCE = 2**22  # numbers drawn at a time
SAME = 1e-6  # sums that differ by less are equal, in units of the largest difference


@dataclass(frozen=True)
class Difference:
    """A difference in percent, or in points of the normalized accuracy."""

    value: float
    stderr: float | None  # over paired items; None for a single item
    p: float  # of this test alone
    corrected: float  # by Holm's method: over all tasks of all pairs, or over the pairs' totals
    items: int

    @property
    def beyond_chance(self) -> bool:
        return self.corrected < LEVEL


@dataclass(frozen=True)
class Pair:
    """The differences `other` minus `one` of two columns, named by their labels.

    `whole` is the difference of the normalized accuracies, or without specialists of the means of
    the categories. It is None if a task has no difference.
    """

    one: str
    other: str
    tasks: Mapping[str, Difference]  # tasks whose items both columns have
    whole: Difference | None

    def ahead(self, sign: int) -> list[str]:
        """The tasks in which `other` is better (1) or worse (-1) beyond chance."""
        return [n for n, d in self.tasks.items() if d.beyond_chance and d.value * sign > 0]


def compare(
    values: Mapping[tuple[str, str], Mapping[str, Floats]], weights: Mapping[str, float]
) -> tuple[Pair, ...]:
    """Test the pairs that have a task in common.

    Args:
        values: pair -> task -> differences of items.
        weights: task -> weight in `Pair.whole`; empty for no `whole`.
    """
    having = {pair: parts for pair, parts in values.items() if parts}
    each = [(pair, name, found) for pair, parts in having.items() for name, found in parts.items()]
    tasks = _corrected({(pair, name): difference([found]) for pair, name, found in each})
    wholes = _corrected(
        {
            pair: difference([weight * parts[name] for name, weight in weights.items()])
            for pair, parts in having.items()
            if weights and weights.keys() <= parts.keys()
        }
    )
    own = {pair: {name: tasks[pair, name] for name in parts} for pair, parts in having.items()}
    return tuple(Pair(*pair, found, wholes.get(pair)) for pair, found in own.items())


def _corrected(found: Mapping[Tested, Difference]) -> dict[Tested, Difference]:
    corrected = holm([one.p for one in found.values()])
    return {key: replace(found[key], corrected=p) for key, p in zip(found, corrected, strict=True)}


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
    return min(_drawn(sizes, counts, total), bound)


def _drawn(sizes: Floats, counts: npt.NDArray[np.int_], total: float) -> float:
    """Return p by draws (Phipson and Smyth 2010, https://doi.org/10.2202/1544-6115.1585)."""
    generator = np.random.default_rng(0)
    single = counts == 1
    repeats = counts[~single]
    larger = equal = 0
    step = max(1, AT_ONCE // len(sizes))
    for rows in (min(step, DRAWS - start) for start in range(0, DRAWS, step)):
        signs = generator.integers(0, 2, (rows, np.count_nonzero(single)), dtype=np.int8)
        heads = generator.binomial(repeats, 0.5, (rows, len(repeats)))
        sums = np.abs((2 * signs - 1) @ sizes[single] + (2 * heads - repeats) @ sizes[~single])
        same = np.abs(sums - total) < SAME
        larger += int(np.sum((sums > total) & ~same))
        equal += int(np.sum(same))
    return min(1.0, (1 + larger + equal / 2) / (DRAWS + 1))


def holm(values: Sequence[float]) -> list[float]:
    """Correct p values for their number (Holm 1979), in the order given."""
    p = np.asarray(values, dtype=float)
    order = np.argsort(p)
    corrected = np.empty_like(p)
    corrected[order] = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    return [float(value) for value in np.minimum(corrected, 1.0)]
