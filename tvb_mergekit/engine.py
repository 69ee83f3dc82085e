"""Settings and streams of tensors in, basis and merged tensors out: the order of the work.

Pass 1 sums the Gram matrix, pass 2 (TIES with `trim: model` only) the magnitudes of the bases,
and the last pass merges (`merge_items`, or tensor by tensor `merge_item`). Of several processes
(see `ranks`) each reads its share in the first two.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit import cache, kernels, ranks
from tvb_mergekit.basis import Basis, Combination, build
from tvb_mergekit.combine import (
    ADDING_ROWS,
    MergeChunk,
    Step,
    adding,
    check_output,
    fits,
    trimming,
    trimming_rows,
)
from tvb_mergekit.errors import UserError
from tvb_mergekit.gram import DEFAULT_BUDGET, GramSums, Sketch, block_budget
from tvb_mergekit.layout import LONGEST, Layout, Needs, worker_count
from tvb_mergekit.output import megabytes
from tvb_mergekit.progress import Progress, Update, silent
from tvb_mergekit.recipe import DEFAULT_RATIO, Settings, ratio_to_bases
from tvb_mergekit.stream import (
    Fused,
    Item,
    Piece,
    Sink,
    TaskVectorBlocks,
    deliver,
    fused,
    gram_of,
    held_item,
    in_order,
    layout_for,
    read_width,
)
from tvb_mergekit.trim import Histogram, MagnitudeHistogram, exact_thresholds, table_bytes

CPU = torch.device("cpu")
LEAST = 2**24  # bytes: what a pass gets although a histogram leaves less
COUNT_ROWS = 8  # float32 rows of a chunk that counting one basis takes: bins as int32 and int64
SPLIT = 4  # pieces for each thread, of a tensor alone; one where pieces are mapped


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


@dataclass(frozen=True)
class Job:
    """How one tensor is merged, and the name under which it counted in the Gram matrix.

    `alone`: what is given is the direction that a tuned coefficient scales, without theta_0: the
    sum of the bases, TrimElectMerge(B_1 ... B_M), or with `forget` the reconstructed task vectors
    to forget. Merging adds fl(scale * this) last.
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
    key: Mapping[str, object] | None = None,
    models: Sequence[str] = (),
    progress: Progress = silent,
) -> Basis:
    """Everything that must be known before the first tensor is merged.

    Args:
        settings: from `resolve_settings`.
        tasks: names of the T tasks, unique.
        weights: scale of each task vector, [T], none zero.
        items: gives the tensors that count, their inputs in the order of the tasks; called only
            if they must be read.
        devices: where to compute.
        budget: bytes that may be allocated.
        key: what identifies the input, for the Gram cache; None does not cache.
        models: the models' names, for the cache's listing.
        progress: called with a title and a total in bytes; returns what is told of each piece.

    Raises:
        UserError: no tensor counts, NaN or infinity, a zero task vector.
    """
    sketch = sketch_of(settings, len(tasks))
    started = time.perf_counter()
    raw, cached = sums_of(
        items,
        tasks,
        devices=devices,
        budget=budget,
        sketch=sketch,
        key=key,
        models=models,
        progress=progress,
    )
    summed = time.perf_counter()
    # Solvers are not the same to the bit on any two machines.
    basis = ranks.world().share(lambda: build(settings, tasks, weights, raw, sketch))
    encoded = time.perf_counter()
    basis.cached = cached
    basis.seconds = {"gram": summed - started, "encode": encoded - summed}
    count_if_needed(basis, items, devices=devices, budget=budget, progress=progress)
    return basis


def sums_of(
    items: Callable[[], Sequence[Item]],
    tasks: Sequence[str],
    *,
    devices: Sequence[torch.device] = (CPU,),
    budget: int = DEFAULT_BUDGET,
    deltas: int = 0,
    sketch: Sketch | None = None,
    key: Mapping[str, object] | None = None,
    models: Sequence[str] = (),
    progress: Progress = silent,
) -> tuple[GramSums, bool]:
    """Pass 1: the Gram matrix, and whether it came from the cache; see `build_basis`.

    Args:
        deltas: how many inputs, at the start, are differences from the base already.
    """
    world = ranks.world()
    entry = None
    if key is not None:
        entry = cache.key_of({**key, "sketch": [sketch.columns, sketch.seed] if sketch else None})
        if (found := world.share(lambda: cache.load(entry))) is not None:
            return found, True
    read = items()
    if not read:
        raise UserError(
            "no tensor takes part: every floating-point tensor is excluded or missing in a model"
        )
    mine = read[_share_of(read)]
    each: list[GramSums] = []  # of several processes, to be added in the order of the tensors
    several = world.size > 1
    one = gram_of(
        mine,
        tasks,
        devices=devices,
        budget=budget,
        deltas=deltas,
        sketch=sketch,
        progress=progress("Gram matrix", sum(item.nbytes for item in mine)),
        finished=each.append if several else lambda sums: None,
        kept=len(mine) if several else 1,
    )

    def added_to(before: GramSums | None) -> GramSums:
        parts = each if several else [one]
        return functools.reduce(GramSums.plus, parts if before is None else [before, *parts])

    total = world.in_turn(added_to)
    sums = world.share(lambda: total)
    if entry is not None and world.leads:
        cache.store(entry, sums, list(tasks), list(models))
    return sums, False


def _share_of(items: Sequence[Item]) -> slice:
    """The items that this process reads in a pass, balanced by bytes."""
    world = ranks.world()
    world.agree([[item.name, list(item.shape), item.nbytes] for item in items], "tensors")
    return ranks.shares([item.nbytes for item in items], world.size)[world.rank]


def count_if_needed(
    basis: Combination,
    items: Callable[[], Sequence[Item]],
    *,
    devices: Sequence[torch.device] = (CPU,),
    budget: int = DEFAULT_BUDGET,
    progress: Progress = silent,
) -> None:
    """Pass 2: the histogram of the bases' magnitudes, for TIES with `trim: model`."""
    if basis.settings.method != "basis_ties" or basis.settings.trim != "model":
        return
    started = time.perf_counter()
    read = items()
    mine = read[_share_of(read)]
    update = progress("Trim thresholds", sum(item.nbytes for item in mine))
    fresh = lambda: MagnitudeHistogram(basis.num_bases)  # noqa: E731
    counted = _count(basis, mine, fresh, devices, budget, update)
    assert isinstance(counted, MagnitudeHistogram)
    ranks.world().add_up(counted.counts)
    basis.histogram = counted
    basis.seconds["trim"] = time.perf_counter() - started


def check_tables(bases: int, memory: int) -> None:
    """Trim's histogram of all bases lies beside the rooms of a pass.

    Raises:
        UserError: `memory` bytes do not hold both.
    """
    needed = table_bytes(bases) + LEAST
    if needed > memory:
        raise UserError(
            f"{megabytes(memory)} of memory are too little for basis_ties, which keeps a histogram "
            f"of {bases} bases: {megabytes(needed)} are needed; raise --memory"
        )


def most_bases(settings: Settings, tasks: int) -> int:
    """M, or where only the Gram matrix tells it, the most that it can be."""
    if settings.basis == "none" or settings.energy is not None:
        return tasks
    return settings.num_bases or ratio_to_bases(settings.basis_ratio or DEFAULT_RATIO, tasks)


def _beside_tables(basis: Combination, budget: int) -> int:
    """What is left of a budget beside Trim's histogram, or a little more."""
    return max(budget - table_bytes(basis.num_bases), min(budget, LEAST))


def _count(
    basis: Combination,
    items: Sequence[Item],
    fresh: Callable[[], Histogram],
    devices: Sequence[torch.device],
    budget: int,
    progress: Update,
) -> Histogram:
    """One histogram of the magnitudes of the bases B = T W_e in all items.

    Every thread fills one of its own: as many threads as have room for theirs in half the budget.
    """
    encoder = basis.weighted_encoder
    rows = encoder.shape[1]
    threads = sum(worker_count(device) for device in devices)
    rest, table = _beside_tables(basis, budget), table_bytes(rows)
    workers = min(threads, 1 + rest // 2 // table)
    needs = Needs(basis.num_inputs, read_width(items), extra=rows + COUNT_ROWS)
    rest -= (workers - 1) * table
    layout = layout_for(items, needs, devices, rest, workers=workers, longest=_longest(items))
    made: list[Histogram] = []

    def work(device: torch.device) -> Callable[[Piece, int], int]:
        weights = encoder.T.to(device, torch.float32)
        blocks = TaskVectorBlocks(layout, device, basis.deltas)
        mine = fresh()
        made.append(mine)

        def count(piece: Piece, number: int) -> int:
            for _start, _stop, _base32, tau in blocks.walk(piece):
                mine.add(weights @ tau)
            return piece.nbytes

        return count

    for nbytes in in_order(items, layout, work):
        progress(nbytes)
    total, *others = made or [fresh()]  # of no items
    for other in others:
        total.counts += other.counts
    return total


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
    """The last pass: give `sink` the merged tensors, each in its item's `out`, in order.

    Args:
        items: with the inputs that `basis` combines, in order, as their inputs.
        jobs: item -> how it is merged; an item without a job stays the base's.

    Raises:
        UserError: a result overflows its dtype.
    """
    sweeps = _swept(basis)
    if basis.settings.method != "basis_ties" and isinstance(basis, Basis) and basis.sketch:
        items = [replace(item, inputs=()) for item in items]  # Omega is drawn, not read
    total = 0
    for item in items:
        job = jobs.get(item.name)
        total += item.nbytes * (3 if sweeps and job and job.tunables.density < 1 else 1)
    update = progress("Merged model", total)
    # Thresholds of one tensor alone take two more readings of it, best just before the last.
    groups = [[item] for item in items] if sweeps else [list(items)]
    for group in groups:
        merging = _Merging(basis, jobs, group, devices, budget, update)
        deliver(group, merging.layout, 1, merging.into_row, sink, update)


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
        name: under which it counted in the Gram matrix.
        base: any floating dtype and device, never modified.
        models: likewise, the inputs that `basis` combines, in order, all of one shape.
        device: where to compute.

    Raises:
        UserError: the result overflows a 16-bit `dtype`.
    """
    item = held_item(name, base, models, dtype)
    return merge_item(basis, item, Job(name, tunables), device, base.device)


def merge_item(
    basis: Combination, item: Item, job: Job, device: torch.device, home: torch.device = CPU
) -> Tensor:
    """The same for an item: its merged tensor, in `item.out`, on the device `home`."""
    if isinstance(basis, Basis) and basis.sketch is not None:
        item = replace(item, inputs=())  # Omega is drawn
    merging = _Merging(basis, {item.name: job}, [item], [device], block_budget())
    out = torch.empty(item.shape, dtype=item.out, device=CPU if merging.fused else home)
    flat = out.view(-1)
    lent: list[TaskVectorBlocks] = []

    def work(device: torch.device) -> Callable[[Piece, int], None]:
        blocks = None
        if not merging.fused:
            blocks = _spare.take(merging.layout, device, basis.deltas)
            lent.append(blocks)
        merge = merging.work(device, blocks)
        return lambda piece, number: merge(piece, flat[piece.start : piece.stop])

    for _ in in_order([item], merging.layout, work):
        pass
    _spare.give(lent)
    return out.to(home)


class _Spare:
    """Buffers handed on from tensor to tensor: fresh pages cost more than sums. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[TaskVectorBlocks] = []

    def take(self, layout: Layout, device: torch.device, deltas: int) -> TaskVectorBlocks:
        """One of these sizes; any others are of an earlier merge, and dropped."""
        wanted = TaskVectorBlocks.sizes_of(layout, device, deltas)
        with self._lock:
            self._free = [blocks for blocks in self._free if blocks.sizes == wanted]
            if self._free:
                return self._free.pop()
        return TaskVectorBlocks(layout, device, deltas)

    def give(self, blocks: Sequence[TaskVectorBlocks]) -> None:
        with self._lock:
            self._free += blocks


_spare = _Spare()


class _Merging:
    """Merging some items: their sizes, and what each thread does with a piece."""

    def __init__(
        self,
        basis: Combination,
        jobs: Mapping[str, Job],
        items: Sequence[Item],
        devices: Sequence[torch.device],
        budget: int,
        progress: Update = lambda nbytes: None,
    ) -> None:
        self.basis, self.jobs = basis, jobs
        self.sketch = basis.sketch if isinstance(basis, Basis) else None
        self.streams: dict[str, torch.Generator] = {}
        rows, extra, workers, rest = basis.num_inputs, ADDING_ROWS, None, budget
        if basis.settings.method == "basis_ties":
            extra, rest = trimming_rows(basis.num_bases), _beside_tables(basis, budget)
        if self.sketch is not None:
            rows, workers = self.sketch.columns, 1
            extra = 2 * rows + ADDING_ROWS
        width = max((item.out.itemsize for item in items), default=4)
        adds = basis.settings.method != "basis_ties" and self.sketch is None
        outputs = [item.out for item in items if item.inputs]
        self.fused = adds and fused(items, devices, *outputs)
        needs = Needs(rows, read_width(items), width, extra, fused=self.fused)
        self.layout: Layout = layout_for(
            items, needs, devices, rest, workers=workers, longest=_longest(items, self.fused)
        )
        self.thresholds = {
            item.name: self._thresholds(item, devices, budget, progress)
            for item in items
            if item.name in jobs and basis.settings.method == "basis_ties"
        }

    def _thresholds(
        self, item: Item, devices: Sequence[torch.device], budget: int, progress: Update
    ) -> Tensor:
        """Of each basis in one tensor, [M] float32."""
        basis, density = self.basis, self.jobs[item.name].tunables.density
        if density >= 1:
            return torch.zeros(basis.num_bases, dtype=torch.float32, device="cpu")
        if not _swept(basis):
            return basis.thresholds(density)

        def sweep(fresh: Callable[[], Histogram]) -> Histogram:
            return _count(basis, [item], fresh, devices, budget, progress)

        return exact_thresholds(sweep, basis.num_bases, item.numel, density)

    def work(
        self, device: torch.device, blocks: TaskVectorBlocks | None = None
    ) -> Callable[[Piece, Tensor], None]:
        """What one thread does with a piece and the room [n] for its result."""
        if self.fused:
            merge_rows = Fused(self.layout, self._combining())
            return lambda piece, out: merge_rows(piece, out[None])
        sketch = self.sketch
        if blocks is None:
            blocks = TaskVectorBlocks(self.layout, device, self.basis.deltas)

        def merge(piece: Piece, out: Tensor) -> None:
            item = piece.item
            job = self.jobs.get(item.name)
            good = not item.out.is_floating_point
            if job is None:
                for start, stop, stored in blocks.read(piece):
                    assert stored.base is not None
                    out[start:stop].copy_(stored.base)
            else:
                chunk = self._chunk(item.name, job, device)
                good = True
                drawn = None
                if sketch is not None:
                    stream = self.streams.setdefault(item.name, sketch.stream(job.counted_as))
                    drawn = lambda count: sketch.rows(stream, count, device)  # noqa: E731
                for start, stop, base32, tau in blocks.walk(piece, drawn):
                    merged = chunk(base32.zero_() if job.alone else base32, tau)
                    out[start:stop].copy_(merged)
                    good &= fits(merged, item.out)
            if not good:
                check_output(item.name, out, item.out)

        return merge

    def into_row(self, device: torch.device) -> Callable[[Piece, Tensor], None]:
        """The same with room [1, n]."""
        merge = self.work(device)
        return lambda piece, out: merge(piece, out[0])

    def _chunk(self, name: str, job: Job, device: torch.device) -> MergeChunk:
        basis, given = self.basis, job.tunables
        if basis.settings.method == "basis_ties":
            scale = 1.0 if job.alone else given.lambda_ * basis.scale
            how, thresholds = basis.settings.merge_func, self.thresholds[name]
            return trimming(basis.weighted_encoder, thresholds, how, scale, device)
        return adding(self._steps(job), device)

    def _steps(self, job: Job) -> Sequence[Step]:
        if job.alone:
            return [(1.0, self.basis.direction)]
        return self.basis.steps(job.tunables.lambda_, job.tunables.alpha)

    def _combining(self) -> Callable[[Item], kernels.Combining | None]:
        """The same by `kernels`, for one thread: most tensors are merged alike."""
        basis = self.basis

        @functools.lru_cache(maxsize=1)
        def of(tunables: Tunables, alone: bool) -> kernels.Combining:
            steps = self._steps(Job("", tunables, alone))
            return kernels.Combining(basis.num_inputs, basis.deltas, [steps], not alone)

        def find(item: Item) -> kernels.Combining | None:
            job = self.jobs.get(item.name)
            return None if job is None else of(job.tunables, job.alone)

        return find


def _swept(basis: Combination) -> bool:
    """Whether each tensor's thresholds take two readings of it."""
    return basis.settings.method == "basis_ties" and basis.settings.trim == "tensor"


def _longest(items: Sequence[Item], mapped: bool = False) -> int:
    """Elements of a piece: fewer where one tensor is shared by the threads."""
    if len(items) != 1:
        return LONGEST
    pieces = (1 if mapped else SPLIT) * worker_count(CPU)
    return min(LONGEST, max(1, items[0].numel // pieces))


def sketch_of(settings: Settings, tasks: int) -> Sketch | None:
    """The random directions of rand_proj, which the Gram pass must know; None for the others."""
    if settings.basis != "rand_proj":
        return None
    return Sketch(most_bases(settings, tasks), settings.seed)
