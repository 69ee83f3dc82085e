"""Basis and merged model from a recipe's settings and its tensors, by `passes`."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tvb_mergekit.core.basis import Basis, Combination, build
from tvb_mergekit.core.gram import GramSums, Sketch
from tvb_mergekit.core.merge import Step
from tvb_mergekit.core.trim import Histogram, MagnitudeHistogram, exact_thresholds, table_bytes
from tvb_mergekit.errors import UserError, listed, megabytes
from tvb_mergekit.progress import silent
from tvb_mergekit.settings import Settings
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
from tvb_mergekit.tensors.taskset import TaskSet

LOG = logging.getLogger(__name__)


def build_basis(tasks: TaskSet, engine: Engine = Engine()) -> Basis:
    """The basis, from a pass over the models unless its sums are known; see `gram_pass`.

    The sums of random directions for rand_proj are never known.

    Raises:
        UserError: no tensor counts, NaN or infinity, a zero task vector.
    """
    started = time.perf_counter()
    raw, cached = sums_of(tasks, engine)
    summed = time.perf_counter()
    sketch = sketch_of(tasks.settings, len(tasks.tasks))
    # Solvers differ in the last bits between machines.
    basis = ranks.world().share(
        lambda: build(tasks.settings, tasks.tasks, tasks.weights, raw, sketch)
    )
    basis.cached = cached
    basis.seconds = {"gram": summed - started, "encode": time.perf_counter() - summed}
    count_if_needed(basis, tasks.items, engine)
    return basis


def sums_of(tasks: TaskSet, engine: Engine) -> tuple[GramSums, bool]:
    """The unweighted Gram matrix of a task set, and whether it was known or came from the cache."""
    sketch = sketch_of(tasks.settings, len(tasks.tasks))
    if tasks.sums is not None and sketch is None:
        return tasks.sums, True
    return gram_pass(
        tasks.items, tasks.tasks, engine, sketch=sketch, key=tasks.key, models=tasks.models
    )


def count_if_needed(basis: Combination, items: Sequence[Item], engine: Engine = Engine()) -> None:
    """Set the histogram of the bases' magnitudes, for TIES with `trim: model`."""
    if not basis.trims or basis.settings.trim != "model":
        return
    started = time.perf_counter()
    mine = items[share_of(items)]
    counted = count_pass(
        basis.weighted_encoder,
        mine,
        lambda: MagnitudeHistogram(basis.num_bases),
        engine,
    )
    assert isinstance(counted, MagnitudeHistogram)
    ranks.world().add_up(counted.counts)
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
) -> None:
    """Write the merged tensors to `sink` in order; see `combine_pass`.

    Args:
        items: their inputs are those of `basis`, in order. An item without `tunables` stays the
            base's.
        alone: compute the direction that a tuned coefficient scales, without theta_0: the sum of
            the bases, TrimElectMerge(B_1 ... B_M), or with `forget` the reconstructed task vectors
            to forget. Merging adds fl(scale * direction) last.

    Raises:
        UserError: a result overflows its dtype.
    """
    trims, settings = basis.trims, basis.settings
    sketch = basis.sketch if isinstance(basis, Basis) else None
    if sketch is not None:  # Omega is drawn, not read
        items = [replace(item, inputs=()) for item in items]
    sweeps = trims and settings.trim == "tensor"
    count = basis.num_bases
    matrices = {i.name: count_matrices(settings, i, count) for i in items if i.tunables}
    total = 0
    for item in items:
        twice_more = sweeps and item.tunables and item.tunables.density < 1
        total += item.nbytes * (3 if twice_more else 1)
    told = silent("", 0)
    if total_of := sum(matrices.values()):  # they take nearly all of the time
        told = engine.progress("Merged model", total_of, "matrix")
        engine = replace(engine, progress=silent)
    else:
        engine = engine.under(engine.progress("Merged model", total))
    trimming = engine
    if trims:
        engine = replace(engine, memory=beside_tables(basis.num_bases, engine.budget))
    step = functools.lru_cache(basis.step)  # most tensors are merged alike
    counted_as = {item.name: item.counted_as or item.name for item in items}

    def apart(item: Item) -> str | None:
        return item.name if item.tunables and (sweeps or matrices[item.name]) else None

    whole = 0  # merged matrices that the bar does not count yet: it ends with the last tensor
    long = list[str]()
    for _, group in itertools.groupby(items, apart):
        steps: dict[str, Step] = {}
        some = list(group)
        for item in some:
            if (tunables := item.tunables) is None:
                continue
            if matrices[item.name]:
                scale = 1.0 if alone else tunables.lambda_ * basis.scale
                for far in merge_matrices(basis, item, scale, sink, not alone, engine):
                    told(whole)
                    whole = 1
                    long += [item.name] * far
            elif trims:
                # Thresholds of one tensor need two more reads, best just before the last.
                limits = _thresholds(basis, item, tunables.density, trimming)
                steps[item.name] = basis.step(tunables, alone, limits)
            else:
                steps[item.name] = step(tunables, alone)
        left = [item for item in some if not matrices.get(item.name)]
        if left:
            combine_pass(left, steps, sink, engine, sketch=sketch, counted_as=counted_as)
    if whole:
        told(whole)
    if long:
        LOG.warning(
            "%s merges to far more than its bases together: %s; give it a `ridge`, such as 0.1, or "
            "a small lambda",
            settings.method,
            listed(long),
        )


def _thresholds(basis: Combination, item: Item, density: float, engine: Engine) -> Tensor:
    """The threshold of each basis in one tensor, [M] float32."""
    if density >= 1:
        return torch.zeros(basis.num_bases, dtype=torch.float32, device="cpu")
    if basis.settings.trim == "model":
        return basis.thresholds(density)

    def sweep(fresh: Callable[[], Histogram]) -> Histogram:
        return count_pass(basis.weighted_encoder, [item], fresh, engine)

    return exact_thresholds(sweep, basis.num_bases, item.numel, density)


def most_bases(settings: Settings, tasks: int) -> int:
    """M, or its upper bound T if only the Gram matrix decides."""
    return settings.bases_of(tasks) or tasks


def sketch_of(settings: Settings, tasks: int) -> Sketch | None:
    """The random directions of rand_proj; None for other bases."""
    if settings.basis != "rand_proj":
        return None
    return Sketch(most_bases(settings, tasks), settings.seed)
