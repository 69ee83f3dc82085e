"""Settings and streams of tensors in, basis and merged tensors out: the order of the work.

Pass 1 sums the Gram matrix, pass 2 (TIES with `trim: model` only) the magnitudes of the bases,
and the last pass merges tensor by tensor (`merge_tensor`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit import cache, combine
from tvb_mergekit.basis import Basis, Combination, build
from tvb_mergekit.errors import UserError
from tvb_mergekit.gram import (
    DEFAULT_BUDGET,
    GramSums,
    Sketch,
    Slot,
    TaskVectorBlocks,
    block_budget,
    each_slot,
    gram_pass,
)
from tvb_mergekit.progress import Progress, Update, silent
from tvb_mergekit.recipe import Settings, ratio_to_bases
from tvb_mergekit.trim import MagnitudeHistogram


@dataclass(frozen=True)
class Tunables:
    """The keys that may vary from tensor to tensor, resolved for one tensor."""

    lambda_: float
    alpha: float = 0.0
    density: float = 1.0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Tunables:
        """From a mapping with `lambda` and, where the method has them, `alpha` and `density`."""
        return cls(values["lambda"], values.get("alpha") or 0.0, values.get("density") or 1.0)


def build_basis(
    settings: Settings,
    tasks: Sequence[str],
    weights: Sequence[float],
    slots: Sequence[Slot],
    *,
    devices: Sequence[torch.device] = (torch.device("cpu"),),
    budget: int = DEFAULT_BUDGET,
    key: Mapping[str, object] | None = None,
    models: Sequence[str] = (),
    progress: Progress = silent,
) -> Basis:
    """Everything that must be known before the first tensor is merged.

    Args:
        settings: from `resolve_settings`.
        tasks: names of the T tasks, unique.
        weights: scale of each task vector, [T], none zero.
        slots: the tensors that count; `load` gives their models in the order of `tasks`.
        devices: where to compute; each gets a worker thread and `budget` bytes of buffers.
        key: what identifies the input, for the Gram cache; None does not cache.
        models: the models' names, for the cache's listing.
        progress: called with a title and a total in bytes; returns what is told of each slot.

    Raises:
        UserError: no tensor counts, NaN or infinity, shapes that differ, a zero task vector.
    """
    if not slots:
        raise UserError(
            "no tensor takes part: every floating-point tensor is excluded or missing in a model"
        )
    total = sum(slot.nbytes for slot in slots)
    sketch = sketch_of(settings, len(tasks))
    started = time.perf_counter()
    entry = None
    if key is not None:
        entry = cache.key_of({**key, "sketch": [sketch.columns, sketch.seed] if sketch else None})
    raw: GramSums | None = cache.load(entry) if entry else None
    cached = raw is not None
    if raw is None:
        raw = gram_pass(
            slots,
            tasks,
            devices=devices,
            budget=budget,
            sketch=sketch,
            progress=progress("Gram matrix", total),
        )
        if entry:
            cache.store(entry, raw, list(tasks), list(models))
    summed = time.perf_counter()
    basis = build(settings, tasks, weights, raw, sketch)
    encoded = time.perf_counter()
    basis.cached = cached
    basis.seconds = {"gram": summed - started, "encode": encoded - summed}
    count_if_needed(basis, slots, devices=devices, budget=budget, progress=progress)
    return basis


def count_if_needed(
    basis: Combination,
    slots: Sequence[Slot],
    *,
    devices: Sequence[torch.device] = (torch.device("cpu"),),
    budget: int = DEFAULT_BUDGET,
    progress: Progress = silent,
) -> None:
    """Pass 2: the histogram of the bases' magnitudes, for TIES with `trim: model`."""
    if basis.settings.method != "basis_ties" or basis.settings.trim != "model":
        return
    started = time.perf_counter()
    total = sum(slot.nbytes for slot in slots)
    basis.histogram = _count(basis, slots, devices, budget, progress("Trim thresholds", total))
    basis.seconds["trim"] = time.perf_counter() - started


def merge_tensor(
    basis: Combination,
    name: str,
    base: Tensor,
    models: Sequence[Tensor],
    tunables: Tunables,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """One tensor of the merged model, in `dtype`, on the base tensor's device.

    Args:
        base: any floating dtype and device, never modified.
        models: likewise, the inputs that `basis` combines, in order, all of one shape.
        device: where to compute.

    Raises:
        UserError: the result overflows a 16-bit `dtype`.
    """
    settings = basis.settings
    out = torch.empty(base.shape, dtype=dtype, device=base.device)
    if base.numel() == 0:
        return out
    if isinstance(basis, Basis) and basis.sketch is not None:
        inner = basis.sketch_weights(tunables.lambda_, tunables.alpha)
        combine.add_sketch(name, base, basis.sketch, inner, device, out)
    elif settings.method == "basis_ties":
        blocks = _buffers(len(models), device, basis.num_bases, basis.deltas)
        encoder = basis.weighted_encoder
        if tunables.density >= 1:
            thresholds = torch.zeros(encoder.shape[1], device="cpu")
        elif settings.trim == "model":
            thresholds = basis.thresholds(tunables.density)
        else:
            thresholds = combine.tensor_thresholds(base, models, encoder, blocks, tunables.density)
        scale = tunables.lambda_ * basis.scale
        combine.trim_elect_merge(
            base, models, encoder, thresholds, settings.merge_func, scale, blocks, out
        )
    else:
        coefficients = basis.coefficients(tunables.lambda_, tunables.alpha)
        blocks = _buffers(len(models), device, deltas=basis.deltas)
        combine.add_task_vectors(base, models, coefficients, blocks, out)
    combine.check_output(name, out, dtype)
    return out


def sketch_of(settings: Settings, tasks: int) -> Sketch | None:
    """The random directions of rand_proj, which the Gram pass must know; None for the others."""
    if settings.basis != "rand_proj":
        return None
    columns = settings.num_bases or ratio_to_bases(settings.basis_ratio or 0.5, tasks)
    return Sketch(columns, settings.seed)


def _count(
    basis: Combination,
    slots: Sequence[Slot],
    devices: Sequence[torch.device],
    budget: int,
    progress: Update,
) -> MagnitudeHistogram:
    encoder = basis.weighted_encoder
    rows = encoder.shape[1]
    total = MagnitudeHistogram(rows)
    lock = threading.Lock()

    def work(device: torch.device) -> Callable[[Slot], None]:
        blocks = TaskVectorBlocks(basis.num_inputs, device, budget, 5 * rows, basis.deltas)

        def count(slot: Slot) -> None:
            base, models = slot.load()
            share = MagnitudeHistogram(rows) if len(devices) > 1 else total
            combine.count_magnitudes(base, models, encoder, blocks, share)
            if share is not total:
                with lock:
                    total.counts += share.counts

        return count

    each_slot(slots, devices, work, progress)
    return total


_local = threading.local()


def _buffers(
    inputs: int, device: torch.device, bases: int = 0, deltas: int = 0
) -> TaskVectorBlocks:
    """This thread's buffers for merging: allocated once, since fresh pages cost more than sums."""
    budget = block_budget()
    key = (inputs, device, bases, deltas, budget)
    if getattr(_local, "key", None) != key:
        _local.key = key
        _local.blocks = TaskVectorBlocks(inputs, device, budget, 4 * bases, deltas)
    blocks: TaskVectorBlocks = _local.blocks
    return blocks
