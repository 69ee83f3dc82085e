"""One number to search by, from scores, with its standard error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvb_mergekit.errors import UserError
from tvb_mergekit.score.results import Results
from tvb_mergekit.tune.harness import EvalTask, Scored


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
        known = reference.tasks.get(task.name)
        value = known.metrics.get(metric, 0.0) if known else 0.0
        if value <= 0:
            has = ", ".join(known.metrics if known else reference.tasks)
            raise UserError(f"--reference {what}: no {metric} of {task.name} above 0 (has {has})")
        shares[task.name, metric] = value
    return Objective(tuple(tasks), shares)
