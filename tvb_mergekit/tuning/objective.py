"""From scores to the one number that is searched, with its standard error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvb_mergekit.errors import UserError
from tvb_mergekit.scoring.results import Results
from tvb_mergekit.tuning.harness import Entry, Scored


@dataclass(frozen=True)
class Estimate:
    """A mean score, and its standard error where those of all its scores are known."""

    value: float
    stderr: float | None


@dataclass(frozen=True)
class Objective:
    """The mean over entries of the mean over their metrics.

    Attributes:
        reference: (entry, metric) -> what the score is divided by; empty: nothing.
    """

    entries: tuple[Entry, ...]
    reference: Mapping[tuple[str, str], float]

    @property
    def lower(self) -> bool:
        """Whether less is better."""
        return self.entries[0].lower

    def of(self, entry: Entry, scored: Scored) -> Estimate:
        """The score of one entry; errors of its metrics, on the same items, are taken as equal
        in sign, which is the most that they can come to."""
        scales = [1 / self.reference.get((entry.name, metric), 1.0) for metric in entry.metrics]
        pairs = list(zip(entry.metrics, scales, strict=True))
        value = math.fsum(scored.values[m] * s for m, s in pairs) / len(pairs)
        if any(metric not in scored.stderrs for metric in entry.metrics):
            return Estimate(value, None)
        return Estimate(value, math.fsum(scored.stderrs[m] * s for m, s in pairs) / len(pairs))

    def mean(self, found: Mapping[str, Scored]) -> Estimate:
        """Over all entries, which are taken as independent for the error."""
        return mean([self.of(entry, found[entry.name]) for entry in self.entries])


def mean(estimates: Sequence[Estimate]) -> Estimate:
    count = len(estimates)
    value = math.fsum(each.value for each in estimates) / count
    errors = [each.stderr for each in estimates if each.stderr is not None]
    known = len(errors) == count
    return Estimate(value, math.sqrt(math.fsum(e * e for e in errors)) / count if known else None)


def objective(entries: Sequence[Entry], reference: Results | None, what: str) -> Objective:
    """The objective over entries, as shares of the reference's scores if there is one.

    Args:
        what: where the reference is, for messages.

    Raises:
        UserError: directions that differ; a reference that lacks a score, or whose score is 0.
    """
    if len({entry.lower for entry in entries}) > 1:
        low = next(entry for entry in entries if entry.lower)
        raise UserError(
            f"{low.metrics[0]} of {low.name} is better when it is lower, other metrics are not: "
            "they have no mean; tune by one kind"
        )
    shares: dict[tuple[str, str], float] = {}
    for entry in entries if reference is not None else ():
        assert reference is not None
        if entry.lower:
            raise UserError(
                f"--reference: {entry.metrics[0]} of {entry.name} is better when it is lower, and "
                "has no share of a specialist's"
            )
        known = reference.tasks.get(entry.name)
        for metric in entry.metrics:
            value = None if known is None else known.metrics.get(metric)
            if value is None:
                has = ", ".join(known.metrics) if known else ", ".join(reference.tasks)
                raise UserError(
                    f"--reference {what}: no {metric} of {entry.name} in it (it has {has})"
                )
            if value <= 0:
                raise UserError(
                    f"--reference {what}: {metric} of {entry.name} is {value:g}: a share of it "
                    "says nothing; leave the task out"
                )
            shares[entry.name, metric] = value
    return Objective(tuple(entries), shares)


def cannot_win(
    goal: Objective,
    found: Mapping[str, Scored],
    tops: Mapping[str, float],
    leader: Estimate,
    errors: float = 2.0,
) -> bool:
    """Whether a point that is scored in part lies so far behind that it is not worth the rest.

    Its missing scores are taken as the best that the task has had at any point, its known ones as
    they are; it is given up if the mean of these stays below the leader's by more than `errors`
    standard errors of the known part's difference. The points answer the same items, so that
    these errors are rather too large.

    Args:
        tops: entry -> the best score so far.
    """
    known = [goal.of(entry, found[entry.name]) for entry in goal.entries if entry.name in found]
    missing = [entry.name for entry in goal.entries if entry.name not in found]
    spread = [each.stderr for each in known]
    if leader.stderr is None or None in spread or any(name not in tops for name in missing):
        return False
    count = len(goal.entries)
    hoped = math.fsum([*(each.value for each in known), *(tops[name] for name in missing)]) / count
    own = math.sqrt(math.fsum(e * e for e in spread if e is not None)) / count
    return hoped + errors * math.hypot(own, leader.stderr) < leader.value
