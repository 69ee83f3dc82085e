"""Basis and merged model from a recipe's settings and its tensors, by `passes`."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tvb_mergekit.core.basis import Basis, Combination, before_gram, build
from tvb_mergekit.core.gram import NO_TENSOR, GramSums
from tvb_mergekit.core.lora import Factors, factor_gram
from tvb_mergekit.core.settings import MATRIX_METHODS
from tvb_mergekit.core.trim import Histogram, table_bytes
from tvb_mergekit.errors import UserError, listed, megabytes
from tvb_mergekit.progress import silent
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.matrices import count_matrices, merge_matrices
from tvb_mergekit.tensors.passes import (
    LEAST,
    beside_tables,
    combine_pass,
    count_pass,
    gram_pass,
    share_of,
)
from tvb_mergekit.tensors.stream import Item, Sink
from tvb_mergekit.tensors.summing import RunningSums
from tvb_mergekit.tensors.taskset import TaskSet

LOG = logging.getLogger(__name__)


def build_basis(tasks: TaskSet, engine: Engine = Engine()) -> Basis:
    """The basis, from a pass over the models unless its sums are known; see `gram_pass`.

    The pass for Trim's thresholds sums as well if the Gram matrix does not change the bases.

    Raises:
        UserError: no tensor counts, NaN or infinity, a zero task vector.
    """
    started, sums = time.perf_counter(), tasks.sums
    found = _on_the_way(tasks, engine) if sums is None else None
    if found is not None and found[0].trims:
        before, summing = found
        count_if_needed(before, tasks.items, engine, summing, tasks.unchanged)
        basis = basis_of(tasks, summing)
        basis.histogram, basis.seconds["trim"] = before.histogram, before.seconds["trim"]
        return basis
    basis = _encoded(tasks, sums_of(tasks, engine))
    basis.seconds["gram"] = time.perf_counter() - started - basis.seconds["encode"]
    count_if_needed(basis, tasks.items, engine, zeros=tasks.unchanged)
    return basis


def basis_of(tasks: TaskSet, summing: RunningSums) -> Basis:
    """The basis after another pass that summed as well.

    Raises:
        UserError: a zero task vector.
    """
    return _encoded(tasks, summing.total())


def _encoded(tasks: TaskSet, sums: GramSums) -> Basis:
    started = time.perf_counter()
    # Solvers differ in the last bits between machines.
    basis = ranks.world().share(lambda: encoded_by(tasks, sums))
    basis.seconds = {"encode": time.perf_counter() - started}
    return basis


def encoded_by(tasks: TaskSet, sums: GramSums) -> Basis:
    """The basis of a task set with these unweighted sums; see `core.basis.build`."""
    return build(tasks.settings, tasks.tasks, tasks.weights, sums)


def one_pass(tasks: TaskSet, engine: Engine) -> tuple[Basis, RunningSums] | None:
    """A basis for a merge that sums the Gram matrix on its way, for `basis_of` at the end.

    None if the Gram matrix is known, or needed before.

    Raises:
        UserError: no tensor counts.
    """
    found = _on_the_way(tasks, engine)
    if found is None or found[0].trims or tasks.sums is not None:
        return None
    return found


def _on_the_way(tasks: TaskSet, engine: Engine) -> tuple[Basis, RunningSums] | None:
    """The basis that any Gram matrix gives, and its sums for the pass that uses this basis.

    None if the Gram matrix decides, or if the sums of very many tasks need a pass of their own.
    """
    before = before_gram(tasks.settings, tasks.tasks, tasks.weights)
    if before is None or any(item.factored for item in tasks.items):
        return None
    summing = RunningSums(tasks.items, tasks.tasks)
    large = before.trims or before.settings.method in MATRIX_METHODS  # they may leave LEAST alone
    fits = 2 * summing.nbytes <= (LEAST if large else engine.budget)
    return (before, summing) if fits else None


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
    sums = factor_gram([_factors(factored, task) for task in range(len(tasks.tasks))])
    return sums.plus(gram_pass(read, tasks.tasks, engine)) if read else sums


def _factors(items: Sequence[Item], task: int) -> dict[str, Factors]:
    """The factors of one task by tensor and number of the matrix."""
    found = ((item.name, enumerate(item.inputs[task].factors or ())) for item in items)
    return {f"{name}.{number}": each for name, of in found for number, each in of}


def count_if_needed(
    basis: Combination,
    items: Sequence[Item],
    engine: Engine = Engine(),
    summing: RunningSums | None = None,
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
    mine = items[share_of(items)]
    counted = count_pass(
        basis.weighted_encoder,
        mine,
        lambda: Histogram(basis.num_bases),
        engine,
        summing,
    )
    ranks.world().add_up(counted.counts)
    counted.counts[:, 0] += zeros  # the bin of zero
    basis.histogram = counted
    basis.seconds["trim"] = time.perf_counter() - started


def check_tables(bases: int, memory: int) -> None:
    """Raise UserError unless `memory` bytes hold a pass and Trim's histogram of all bases."""
    needed = table_bytes(bases) + LEAST
    if needed > memory:
        raise UserError(
            f"{megabytes(memory)} of memory are too little for basis_ties, which keeps a histogram "
            f"of {bases} bases: {megabytes(needed)} are needed; raise --memory"
        )


def merge_items(
    basis: Combination,
    items: Sequence[Item],
    sink: Sink,
    engine: Engine = Engine(),
    *,
    alone: bool = False,
    add_base: bool = True,
    summing: RunningSums | None = None,
) -> None:
    """Write the merged tensors to `sink` in order; see `combine_pass`.

    Args:
        items: their inputs are those of `basis`, in order. An item without `tunables` stays the
            base's.
        alone, add_base: as in `Combination.step`; a merge of all terms adds fl(scale * direction)
            last.
        summing: of the Gram matrix, on the way.

    Raises:
        UserError: a result overflows its dtype.
    """
    settings = basis.settings
    bases = basis.num_bases
    matrices = {i.name: count_matrices(settings, i, bases) for i in items if i.tunables}
    update = silent("", 0)
    if total := sum(matrices.values()):  # they take nearly all of the time
        update = engine.progress("Merged model", total, "matrix")
        engine = replace(engine, progress=silent)
    else:
        read = sum(i.nbytes for i in items)
        engine = engine.under(engine.progress("Merged model", read))
    beside = beside_tables(bases, engine.budget) if basis.trims else engine.memory
    combining = replace(engine, memory=beside)
    cached_step = functools.lru_cache(partial(basis.step, add_base=add_base))  # most are alike

    def apart(item: Item) -> str | None:
        """The name of a tensor that is merged alone."""
        return item.name if item.tunables and matrices[item.name] else None

    pending = 0  # a merged matrix that the bar does not count yet: it ends with the last tensor
    far = list[str]()
    for _, group in itertools.groupby(items, apart):
        some = list(group)
        item, tunables = some[0], some[0].tunables
        if tunables is None or not matrices[item.name]:
            steps = {i.name: cached_step(i.tunables, alone) for i in some if i.tunables}
            combine_pass(some, steps, sink, combining, summing=summing)
            continue
        scale = 1.0 if alone else tunables.lambda_ * basis.scale
        add = add_base and not alone
        for is_far in merge_matrices(basis, item, scale, sink, add, combining, summing):
            update(pending)
            pending = 1
            far += [item.name] * is_far
    if pending:
        update(pending)
    if far:
        LOG.warning(
            "%s merges to far more than its bases together: %s; give it a shorter `flow_time` or "
            "a small lambda",
            settings.method,
            listed(far),
        )
