"""Three passes over the models.

`gram_pass` sums the inner products of task vectors. `count_pass` counts the magnitudes of bases,
for Trim. `combine_pass` computes bases, merged models and exported models. Both may sum the inner
products as well. Several processes (see `ranks`) share the reading in the first two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tvb_mergekit.core.gram import GramSums
from tvb_mergekit.core.merge import Linear, Step, check_output
from tvb_mergekit.core.trim import Histogram, table_bytes
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.engine import CPU, Engine
from tvb_mergekit.tensors.layout import FUSED, LONGEST, Layout, Needs, plan_layout, worker_count
from tvb_mergekit.tensors.stream import (
    Item,
    Piece,
    PieceBuffer,
    Sink,
    deliver,
    in_order,
)
from tvb_mergekit.tensors.summing import Chunks, RunningSums

LEAST = 2**24  # bytes of a pass if a histogram leaves less
COUNT_ROWS = 8  # float32 rows of a chunk for counting one basis: bins as int32 and int64
SPLIT = 4  # pieces for each thread, of a tensor alone
# Fills the outputs of a piece. Returns whether all are known as finite, and the sums of each chunk.
Combine = Callable[[Piece, Step, Tensor], tuple[bool, Sequence[GramSums]]]


def gram_pass(
    items: Sequence[Item],
    tasks: Sequence[str],
    engine: Engine = Engine(),
) -> GramSums:
    """G [T, T] of the inputs of all items, float64.

    Args:
        items: the tensors that count.
        tasks: names of the inputs, for messages.

    Raises:
        UserError: no tensor counts; NaN or infinity in an input.
    """
    summing = RunningSums(items, tasks)
    read = [item for item in items if item.numel]
    mine = read[share_of(read)]
    layout = gram_layout(mine, summing, engine)
    update = engine.progress("Gram matrix", sum(item.nbytes for item in mine))

    def work(device: torch.device) -> Callable[[Piece], Sequence[GramSums]]:
        return Chunks(layout, device, summing=summing, compiled=layout.needs.fused).add

    for piece, sums in in_order(mine, layout, work):
        summing.add(piece, sums)
        update(piece.nbytes)
    return summing.total()


def gram_layout(items: Sequence[Item], summing: RunningSums, engine: Engine) -> Layout:
    """The layout of `gram_pass`."""
    fast = fused(items, engine)
    needs = summing.within(Needs(len(summing.tasks), read_width(items, fast), fused=fast))
    return _planned(items, needs, engine, None)


def count_pass(
    encoder: Tensor,
    items: Sequence[Item],
    fresh: Callable[[], Histogram],
    engine: Engine = Engine(),
    summing: RunningSums | None = None,
) -> Histogram:
    """One histogram of the magnitudes of the bases B = T @ encoder in all items.

    Every thread fills a histogram of its own; all except one fit half of the budget.

    Args:
        fresh: makes an empty histogram.
        summing: of the Gram matrix, by the same pass.
    """
    rows = encoder.shape[1]
    threads = sum(worker_count(device) for device in engine.devices)
    rest, table = beside_tables(rows, engine.budget), table_bytes(rows)
    workers = min(threads, 1 + rest // 2 // table)
    fast = summing is not None and fused(items, engine)
    needs = Needs(len(encoder), read_width(items, fast), extra=rows + COUNT_ROWS)
    needs = summing.within(needs, fast) if summing else needs
    left = replace(engine, memory=rest - (workers - 1) * table)
    layout = _planned(items, needs, left, workers)
    update = engine.progress("Trim thresholds", sum(item.nbytes for item in items))
    made: list[Histogram] = []

    def work(device: torch.device) -> Callable[[Piece], Sequence[GramSums]]:
        weights, mine = encoder.T.to(device, torch.float32), fresh()
        chunks = Chunks(layout, device, summing=summing, compiled=fast)
        mine.counts = mine.counts.to(device)  # 9 MB a basis: no chunk copies them
        made.append(mine)

        def count(piece: Piece) -> Sequence[GramSums]:
            for _place, _base32, tau in chunks.walk(piece):
                mine.add(weights @ tau)
            return chunks.sums

        return count

    for piece, sums in in_order(items, layout, work):
        if summing is not None:
            summing.add(piece, sums)
        update(piece.nbytes)
    total, *others = made or [fresh()]
    total.counts = total.counts.cpu()
    for other in others:
        total.counts += other.counts.cpu()
    return total


def combine_pass(
    items: Sequence[Item],
    steps: Mapping[str, Step],
    sink: Sink,
    engine: Engine = Engine(),
    *,
    title: str = "Merged model",
    summing: RunningSums | None = None,
) -> None:
    """Combine theta_0 and the task vectors of each item by its step, in order.

    Task vectors are formed and combined in float32, and cast once to `item.out`.

    Args:
        steps: item -> step, all with the same number of outputs; an item without a step stays the
            base's.
        title: of the progress bar.
        summing: of the Gram matrix, by the same pass; every input counts.

    Raises:
        UserError: an output overflows its dtype or is not finite.
    """
    every = list(steps.values())
    outputs = every[0].count if every else 1
    rows = max((len(item.inputs) for item in items), default=0)
    extra = max((step.rows for step in every), default=1)
    outs = {item.out for item in items if item.name in steps}
    linear = all(isinstance(step, Linear) for step in every)
    fast = linear and fused(items, engine, *outs)
    compiled = summing is not None and fused(items, engine)
    written = outputs * max((item.width for item in items), default=0)
    needs = Needs(rows, read_width(items, fast or compiled), written, extra, fused=fast)
    needs = summing.within(needs, compiled) if summing else needs
    layout = _planned(items, needs, engine, None)

    def work(device: torch.device) -> Callable[[Piece, Tensor], Sequence[GramSums]]:
        buffer = PieceBuffer(layout.buffer_bytes, device)
        combine: Combine
        if fast:
            combine = _combining_fused(rows, buffer, 0 if summing is None else layout.chunk)
        else:
            combine = _combining(Chunks(layout, device, buffer, summing, compiled))

        def fill(piece: Piece, out: Tensor) -> Sequence[GramSums]:
            finite, step = False, steps.get(piece.item.name)
            sums: Sequence[GramSums] = ()
            if not piece.numel:
                return sums
            if step is None:
                finite = buffer.copy(piece, out)
            else:
                finite, sums = combine(piece, step, out)
            # `summing` has a better message for inputs that are not finite.
            if not finite and out.is_floating_point() and all(map(GramSums.finite, sums)):
                check_output(piece.item.name, out, out.dtype)
            return sums

        return fill

    def done(piece: Piece, sums: Sequence[GramSums]) -> None:
        if summing is not None:
            summing.add(piece, sums)
        update(piece.nbytes)

    update = engine.progress(title, sum(item.nbytes for item in items))
    deliver(items, layout, outputs, work, sink, done)


def _combining_fused(rows: int, buffer: PieceBuffer, chunk: int) -> Combine:
    """A function for `Linear` steps on a CPU."""
    from tvb_mergekit.tensors import kernels

    @functools.lru_cache(8)  # each has a buffer, and pieces of one step come together
    def computing(step: Linear) -> kernels.Compiled:
        return kernels.Compiled(rows, chunk, step)

    def combine(piece: Piece, step: Step, out: Tensor) -> tuple[bool, Sequence[GramSums]]:
        return computing(step)(buffer, piece, buffer.read(piece, copy=True), out)

    return combine


def _combining(chunks: Chunks) -> Combine:
    """As `_combining_fused`, on any device, for all steps and dtypes."""
    computing = functools.cache(lambda step: step.on(chunks.device))

    def combine(piece: Piece, step: Step, out: Tensor) -> tuple[bool, Sequence[GramSums]]:
        for place, base32, tau in chunks.walk(piece):
            values = computing(step)(base32, tau)
            # A copy from an accelerator would convert on the host, after the traffic of float32.
            out[:, place].copy_(values if chunks.device.type == "cpu" else values.to(out.dtype))
        return False, chunks.sums

    return combine


def share_of(items: Sequence[Item]) -> slice:
    """The items that this process reads, balanced by bytes."""
    world = ranks.world()
    world.agree([[item.name, list(item.shape), item.nbytes] for item in items])
    return ranks.shares([item.nbytes for item in items], world.size)[world.rank]


def beside_tables(bases: int, budget: int) -> int:
    """The budget without Trim's histogram of all bases, at least LEAST."""
    return max(budget - table_bytes(bases), min(budget, LEAST))


def fused(items: Sequence[Item], engine: Engine, *outputs: torch.dtype) -> bool:
    """Whether `kernels` can compute all items: on a CPU, from and to the dtypes of FUSED."""
    dtypes = {part.dtype for item in items if item.inputs for part in item.parts}
    return all(d.type == "cpu" for d in engine.devices) and dtypes.union(outputs) <= set(FUSED)


def read_width(items: Sequence[Item], held: bool = False) -> int:
    """Bytes read for one element of the widest item.

    `held` also counts parts that are in memory: fused passes copy them.
    """
    read = [[p.dtype.itemsize for p in item.parts if held or not p.held] for item in items]
    return max(map(sum, read), default=0)


def _planned(items: Sequence[Item], needs: Needs, engine: Engine, workers: int | None) -> Layout:
    """The layout of a pass. Pieces are a tensor at most; several threads share a single tensor."""
    most = max((item.numel for item in items), default=1)
    if len(items) == 1:
        most //= SPLIT * worker_count(CPU)
    grain = max((part.grain for item in items for part in item.parts), default=1)
    longest = min(LONGEST, most)
    return plan_layout(needs, engine, workers=workers, longest=longest, grain=grain)
