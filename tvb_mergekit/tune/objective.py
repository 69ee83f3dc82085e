"""From scores to the one number that is searched, with its standard error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvb_mergekit.errors import UserError
from tvb_mergekit.score.results import Results
from tvb_mergekit.tune.harness import Entry, Scored


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
        return bool(self.entries[0].lower)

    def of(self, entry: Entry, scored: Scored) -> Estimate:
        """The score of one entry. The errors of its metrics, on the same items, are taken as equal
        in sign, which is the most that they can come to."""
        scales = {m: 1 / self.reference.get((entry.name, m), 1.0) for m in entry.metrics}
        value = math.fsum(scored.values[m] * scale for m, scale in scales.items()) / len(scales)
        if not scored.stderrs.keys() >= scales.keys():
            return Estimate(value, None)
        errors = (scored.stderrs[m] * scale for m, scale in scales.items())
        return Estimate(value, math.fsum(errors) / len(scales))

    def mean(self, found: Mapping[str, Scored]) -> Estimate:
        """The mean over all entries, which are taken as independent for the error."""
        each = [self.of(entry, found[entry.name]) for entry in self.entries]
        value = math.fsum(estimate.value for estimate in each) / len(each)
        errors = [estimate.stderr for estimate in each if estimate.stderr is not None]
        known = len(errors) == len(each)
        return Estimate(value, math.hypot(*errors) / len(each) if known else None)


def objective(
    entries: Sequence[Entry], reference: Results | None = None, what: str = "", rising: str = ""
) -> Objective:
    """The objective over entries, as shares of the reference's scores if there is one.

    Args:
        what: where the reference is, for messages.
        rising: what needs scores of which more is better, if something does; for messages.

    Raises:
        UserError: directions that differ; a reference that lacks a score, or whose score is 0.
    """
    metrics = [(entry, metric) for entry in entries for metric in entry.metrics]
    low = [(metric, entry.name) for entry, metric in metrics if metric in entry.lower]
    rising = rising or ("" if reference is None else "--reference")
    if low and (rising or len(low) < len(metrics)):
        raise UserError(
            f"{' of '.join(low[0])} is better when it is lower: "
            f"{rising or 'a mean with other metrics'} needs scores that rise"
        )
    shares: dict[tuple[str, str], float] = {}
    if reference is None:
        return Objective(tuple(entries), shares)
    for entry, metric in metrics:
        known = reference.tasks.get(entry.name)
        value = None if known is None else known.metrics.get(metric)
        if value is None or value <= 0:
            has = ", ".join(known.metrics if known else reference.tasks)
            raise UserError(
                f"--reference {what}: no {metric} of {entry.name} above 0 in it (it has {has})"
            )
        shares[entry.name, metric] = value
    return Objective(tuple(entries), shares)
