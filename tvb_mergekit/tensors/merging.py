"""Basis and merged model from a recipe's settings and its tensors, by `passes`."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.core.basis import Basis, Combination, Tunables, build
from tvb_mergekit.core.gram import DEFAULT_BUDGET, GramSums, Sketch
from tvb_mergekit.core.merge import Step
from tvb_mergekit.core.trim import Histogram, MagnitudeHistogram, exact_thresholds, table_bytes
from tvb_mergekit.errors import UserError, listed, megabytes
from tvb_mergekit.progress import Progress, Update, silent
from tvb_mergekit.settings import Settings
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.matrices import count_matrices, merge_matrices
from tvb_mergekit.tensors.passes import (
    CPU,
    LEAST,
    beside_tables,
    combine_pass,
    count_pass,
    gram_pass,
    share_of,
)
from tvb_mergekit.tensors.stream import Item, Sink

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """The merge of one tensor.

    Attributes:
        counted_as: its name in the Gram matrix.
        alone: compute the direction that a tuned coefficient scales, without theta_0: the sum of
            the bases, TrimElectMerge(B_1 ... B_M), or with `forget` the reconstructed task vectors
            to forget. Merging adds fl(scale * direction) last.
    """

    counted_as: str
    tunables: Tunables
    alone: bool = False


def build_basis(
    settings: Settings,
    tasks: Sequence[str],
    weights: Sequence[float],
    items: Callable[[], Sequence[Item]],
    *,
    devices: Sequence[torch.device] = (CPU,),
    budget: int = DEFAULT_BUDGET,
    known: GramSums | None = None,
    key: Mapping[str, object] | None = None,
    models: Sequence[str] = (),
    progress: Progress = silent,
) -> Basis:
    """The basis, from a pass over the models unless its sums are known; see `gram_pass`.

    Args:
        weights: scale of each task vector, [T], none zero.
        known: the sums of the inputs. Those of rand_proj's directions are never known.

    Raises:
        UserError: no tensor counts, NaN or infinity, a zero task vector.
    """
    sketch = sketch_of(settings, len(tasks))
    passed: dict[str, Any] = {"devices": devices, "budget": budget, "progress": progress}
    started = time.perf_counter()
    if known is not None and sketch is None:
        raw, cached = known, True
    else:
        raw, cached = gram_pass(items, tasks, sketch=sketch, key=key, models=models, **passed)
    summed = time.perf_counter()
    # Solvers differ in the last bits between machines.
    basis = ranks.world().share(lambda: build(settings, tasks, weights, raw, sketch))
    basis.cached = cached
    basis.seconds = {"gram": summed - started, "encode": time.perf_counter() - summed}
    count_if_needed(basis, items, **passed)
    return basis


def count_if_needed(
    basis: Combination,
    items: Callable[[], Sequence[Item]],
    *,
    devices: Sequence[torch.device] = (CPU,),
    budget: int = DEFAULT_BUDGET,
    progress: Progress = silent,
) -> None:
    """Set the histogram of the bases' magnitudes, for TIES with `trim: model`."""
    if not basis.trims or basis.settings.trim != "model":
        return
    started = time.perf_counter()
    read = items()
    mine = read[share_of(read)]
    counted = count_pass(
        basis.weighted_encoder,
        mine,
        lambda: MagnitudeHistogram(basis.num_bases),
        devices=devices,
        budget=budget,
        progress=progress("Trim thresholds", sum(item.nbytes for item in mine)),
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
    jobs: Mapping[str, Job],
    sink: Sink,
    *,
    devices: Sequence[torch.device] = (CPU,),
    budget: int = DEFAULT_BUDGET,
    progress: Progress = silent,
) -> None:
    """Write the merged tensors to `sink` in order; see `combine_pass`.

    Args:
        items: their inputs are those of `basis`, in order.
        jobs: item -> job; an item without a job stays the base's.

    Raises:
        UserError: a result overflows its dtype.
    """
    trims, settings = basis.trims, basis.settings
    sketch = basis.sketch if isinstance(basis, Basis) else None
    if sketch is not None:  # Omega is drawn, not read
        items = [replace(item, inputs=()) for item in items]
    sweeps = trims and settings.trim == "tensor"
    passed: dict[str, Any] = {"devices": devices, "budget": budget}
    if trims:
        passed["budget"] = beside_tables(basis.num_bases, budget)
    count = basis.num_bases
    matrices = {i.name: count_matrices(settings, i, count) for i in items if i.name in jobs}
    total = 0
    for item in items:
        job = jobs.get(item.name)
        total += item.nbytes * (3 if sweeps and job and job.tunables.density < 1 else 1)
    if total_of := sum(matrices.values()):  # they take nearly all of the time
        update, told = silent("", 0), progress("Merged model", total_of, "matrix")
    else:
        update = told = progress("Merged model", total)
    step = functools.lru_cache(basis.step)  # most tensors are merged alike
    counted_as = {name: job.counted_as for name, job in jobs.items()}

    def apart(item: Item) -> str | None:
        return item.name if item.name in jobs and (sweeps or matrices[item.name]) else None

    whole = 0  # merged matrices that the bar does not count yet: it ends with the last tensor
    long = list[str]()
    for _, group in itertools.groupby(items, apart):
        steps: dict[str, Step] = {}
        some = list(group)
        for item in some:
            if (job := jobs.get(item.name)) is None:
                continue
            if matrices[item.name]:
                scale = 1.0 if job.alone else job.tunables.lambda_ * basis.scale
                for far in merge_matrices(basis, item, scale, sink, not job.alone, **passed):
                    told(whole)
                    whole = 1
                    long += [item.name] * far
            elif trims:
                # Thresholds of one tensor need two more reads, best just before the last.
                limits = _thresholds(basis, item, job.tunables.density, devices, budget, update)
                steps[item.name] = basis.step(job.tunables, job.alone, limits)
            else:
                steps[item.name] = step(job.tunables, job.alone)
        left = [item for item in some if not matrices.get(item.name)]
        if left:
            combine_pass(
                left, steps, sink, **passed, sketch=sketch, counted_as=counted_as, progress=update
            )
    if whole:
        told(whole)
    if long:
        LOG.warning(
            "%s merges to far more than its bases together: %s; give it a `ridge`, such as 0.1, or "
            "a small lambda",
            settings.method,
            listed(long),
        )


def _thresholds(
    basis: Combination,
    item: Item,
    density: float,
    devices: Sequence[torch.device],
    budget: int,
    progress: Update,
) -> Tensor:
    """The threshold of each basis in one tensor, [M] float32."""
    if density >= 1:
        return torch.zeros(basis.num_bases, dtype=torch.float32, device="cpu")
    if basis.settings.trim == "model":
        return basis.thresholds(density)

    def sweep(fresh: Callable[[], Histogram]) -> Histogram:
        encoder = basis.weighted_encoder
        return count_pass(encoder, [item], fresh, devices=devices, budget=budget, progress=progress)

    return exact_thresholds(sweep, basis.num_bases, item.numel, density)


def most_bases(settings: Settings, tasks: int) -> int:
    """M, or its upper bound T if only the Gram matrix decides."""
    return settings.bases_of(tasks) or tasks


def sketch_of(settings: Settings, tasks: int) -> Sketch | None:
    """The random directions of rand_proj; None for other bases."""
    if settings.basis != "rand_proj":
        return None
    return Sketch(most_bases(settings, tasks), settings.seed)
