"""Basis and merged model from a recipe's settings and its tensors, by `passes`."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tvb_mergekit.core.basis import Basis, Combination, before_gram, build, check_not_zero
from tvb_mergekit.core.gram import NO_TENSOR, GramSums, factor_gram
from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.progress import silent
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.matrices import count_matrices, merge_matrices
from tvb_mergekit.tensors.passes import (
    RunningSums,
    alone_of,
    combine_pass,
    count_pass,
    gram_pass,
)
from tvb_mergekit.tensors.stream import Engine, Item, Sink
from tvb_mergekit.tensors.taskset import TaskSet

LOG = logging.getLogger(__name__)


def build_basis(tasks: TaskSet, engine: Engine = Engine(), *, inner: bool = False) -> Basis:
    """The basis. G is computed by a pass if it decides the merge; see `Basis.waits`.

    Trim's thresholds need a pass in any case, which gives G as well unless it was needed before.

    Args:
        inner: Compute G in any case.

    Raises:
        UserError: no tensor counts, NaN or infinity, a zero task vector.
    """
    started = time.perf_counter()
    basis = before_gram(tasks.settings, tasks.tasks, tasks.weights)
    free = tasks.sums is not None or any(item.factored for item in tasks.items)
    if free or basis is None or (inner and not basis.trims):
        basis = encoded_by(tasks, sums_of(tasks, engine))
        basis.seconds["gram"] = time.perf_counter() - started - basis.seconds["encode"]
    summing = RunningSums(tasks.tasks) if basis.waits else None
    count_if_needed(basis, tasks.items, engine, summing, tasks.unchanged)
    if summing is not None and basis.trims:
        known = encoded_by(tasks, summing.total())
        known.histogram, known.seconds = basis.histogram, {**basis.seconds, **known.seconds}
        return known
    return basis


def encoded_by(tasks: TaskSet, sums: GramSums) -> Basis:
    """The basis of a task set with these unweighted sums; see `core.basis.build`."""
    started = time.perf_counter()
    # Solvers differ in the last bits between machines.
    basis = ranks.world().led(lambda: build(tasks.settings, tasks.tasks, tasks.weights, sums))
    basis.seconds = {"encode": time.perf_counter() - started}
    return basis


def sums_of(tasks: TaskSet, engine: Engine) -> GramSums:
    """The unweighted Gram matrix of a task set: known, of factors, and from a pass over the rest.

    Raises:
        UserError: no tensor counts, NaN or infinity.
    """
    if tasks.sums is not None:
        return tasks.sums
    factored = [item for item in tasks.items if item.factored]
    read = [item for item in tasks.items if not item.factored]
    if not factored:
        return gram_pass(read, tasks.tasks, engine)
    # Sorted: sums must not depend on the order of files.
    each = (
        item.updates(number)
        for item in sorted(factored, key=lambda item: item.name)
        for number in range(max(len(part.factors or ()) for part in item.inputs))
    )
    sums = factor_gram(each, len(tasks.tasks))
    if not read:
        return sums
    dense = gram_pass(read, tasks.tasks, engine)
    dense.base_norm_squared = 0.0  # the base was read in part
    return sums.plus(dense)


def count_if_needed(
    basis: Combination,
    items: Sequence[Item],
    engine: Engine = Engine(),
    sums: RunningSums | None = None,
    zeros: int = 0,
) -> None:
    """Count the magnitudes of the bases into `basis.histogram`, for TIES.

    Raises:
        UserError: no tensor takes part.
    """
    if not any(item.numel for item in items):
        raise UserError(NO_TENSOR)
    if not basis.trims:
        return
    started = time.perf_counter()
    counted = count_pass(basis.weighted_encoder, items[ranks.part_of(items)], engine, sums)
    ranks.world().add_up(counted.counts)
    counted.counts[:, 0] += zeros  # the bin of zero
    basis.histogram = counted
    basis.seconds["trim"] = time.perf_counter() - started


def merge_items(
    basis: Combination,
    items: Sequence[Item],
    sink: Sink,
    engine: Engine = Engine(),
    *,
    alone: bool = False,
    add_base: bool = True,
) -> None:
    """Write the merged tensors to `sink`; see `combine_pass`.

    A basis that waits gets the norms of the task vectors.

    Args:
        items: their inputs are those of `basis`, in order. An item without `tunables` stays the
            base's.
        alone, add_base: as in `Combination.step`; a merge of all terms adds fl(scale * direction)
            last.

    Raises:
        UserError: a result overflows its dtype; NaN, infinity or a zero task vector, if the basis
            waits.
    """
    items = [item if item.tunables else alone_of(item) for item in items]
    settings, moving = basis.settings, [item for item in items if item.tunables]
    waits = isinstance(basis, Basis) and basis.waits and (moving or ranks.world().size > 1)
    sums = RunningSums(basis.tasks, inner=False) if waits else None
    matrices = {i.name: count_matrices(settings, i, basis.num_bases) for i in moving}
    if total := sum(matrices.values()):  # they take nearly all of the time
        update = engine.progress("Merged model", total, "matrix")
        engine = replace(engine, progress=silent)
    else:
        update = engine.progress("Merged model", sum(item.nbytes for item in items))
        engine = engine.under(update)
    step_of = functools.lru_cache(partial(basis.step, add_base=add_base))  # most are alike

    pending, far = 0, list[str]()  # the bar ends with the last tensor, and not the last matrix
    for name, group in itertools.groupby(items, lambda i: i.name if matrices.get(i.name) else None):
        some = list(group)
        if name is None:
            steps = {each.name: step_of(each.tunables, alone) for each in some if each.tunables}
            combine_pass(some, steps, sink, engine, sums=sums)
            continue
        item, tunables = some[0].loaded(), some[0].tunables
        assert tunables is not None
        scale, added = (1.0 if alone else tunables.lambda_ * basis.scale), add_base and not alone
        for is_far in merge_matrices(basis, item, scale, sink, added, engine, sums):
            update(pending)
            pending = 1
            far += [item.name] * is_far
    if pending:
        update(pending)
    if sums is not None and isinstance(basis, Basis):
        basis.sums = check_not_zero(sums.total(), basis.tasks).scaled(basis.weights)
    if far:
        told = (
            "%s merges to far more than its bases together: %s; give it a shorter `flow_time` or "
            "a small lambda"
        )
        LOG.warning(told, settings.method, listed(far))
