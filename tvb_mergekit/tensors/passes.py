"""Three passes over the models.

`gram_pass` sums the inner products of task vectors. `count_pass` counts the magnitudes of bases,
for Trim. `combine_pass` computes bases, merged models and exported models. Several processes (see
`ranks`) share the reading in the first two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from tvb_mergekit.core.gram import (
    BLOCK,
    NO_TENSOR,
    GramSums,
    Sketch,
    not_finite,
    products,
    symmetric,
)
from tvb_mergekit.core.merge import Linear, Step, check_output
from tvb_mergekit.core.trim import Histogram, table_bytes
from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors import cache, ranks
from tvb_mergekit.tensors.engine import CPU, Engine
from tvb_mergekit.tensors.layout import FUSED, LONGEST, Layout, Needs, plan_layout, worker_count
from tvb_mergekit.tensors.quantized import Coding
from tvb_mergekit.tensors.stream import (
    Chunks,
    Item,
    Piece,
    PieceBuffer,
    Sink,
    deliver,
    in_order,
)

LEAST = 2**24  # bytes of a pass if a histogram leaves less
COUNT_ROWS = 8  # float32 rows of a chunk for counting one basis: bins as int32 and int64
SPLIT = 4  # pieces for each thread, of a tensor alone


def gram_pass(
    items: Sequence[Item],
    tasks: Sequence[str],
    engine: Engine = Engine(),
    *,
    sketch: Sketch | None = None,
    key: Mapping[str, object] | None = None,
    models: Sequence[str] = (),
) -> tuple[GramSums, bool]:
    """G [T, T] of the inputs of all items, float64, and whether it came from the cache.

    Each item is summed on its own, and their sums in order. So the result does not depend on the
    number of devices, threads and processes, nor on the budget unless it is very small.

    Args:
        items: the tensors that count.
        tasks: names of the inputs, for messages.
        sketch: sums of Omega as well.
        key: identifies the inputs in the cache; None does not cache.
        models: the models' names, for the cache's listing.

    Raises:
        UserError: no tensor counts; NaN or infinity in an input.
    """
    world = ranks.world()
    entry = None
    if key is not None:
        entry = cache.key_of({**key, "sketch": [sketch.columns, sketch.seed] if sketch else None})
        if (found := world.share(lambda: cache.load(entry))) is not None:
            return found, True
    read = [item for item in items if item.numel]
    if not read:
        raise UserError(NO_TENSOR)
    mine = read[share_of(read)]
    each = _item_sums(mine, tasks, engine, sketch)
    # Every process gets all sums, in the order of the tensors.
    parts = each if world.size == 1 else chain.from_iterable(world.collect(list(each)))
    sums = functools.reduce(GramSums.plus, parts, GramSums.zero(len(tasks), sketch))
    if entry is not None and world.leads:
        cache.store(entry, sums, tasks, models)
    return sums, False


def gram_layout(items: Sequence[Item], tasks: int, engine: Engine, sketch: Sketch | None) -> Layout:
    """The layout of `gram_pass`."""
    columns = 0 if sketch is None else sketch.columns
    squares = tasks**2 + columns * (columns + tasks)
    # The batched products of a chunk: float32, and float64 while they are summed.
    extra = -(-12 * squares // (4 * BLOCK)) + 2 * columns
    sums = 8 * (squares + 1)
    # One process adds up the sums of items at once; several hold them until they meet.
    held = len(items) if ranks.world().size > 1 else 1
    fast = sketch is None and fused(items, engine)
    width, kept = read_width(items, fast), (held + 4) * sums
    needs = Needs(tasks, width, extra=extra, sums=sums, kept=kept, fused=fast)
    # Only one thread may draw Omega, which is one sequence in each tensor.
    longest = _longest_piece(items)
    return plan_layout(needs, engine, workers=1 if sketch else None, longest=longest)


def _item_sums(
    items: Sequence[Item], tasks: Sequence[str], engine: Engine, sketch: Sketch | None
) -> Iterator[GramSums]:
    """Yield the sums of each item, in order."""
    layout = gram_layout(items, len(tasks), engine, sketch)
    update = engine.progress("Gram matrix", sum(item.nbytes for item in items))

    def fused_work(device: torch.device) -> Callable[[Piece], list[GramSums]]:
        from tvb_mergekit.tensors import kernels  # imports numba, which takes long

        buffer, add = PieceBuffer(layout.buffer_bytes), kernels.Summing(len(tasks), _deltas(items))
        return lambda piece: add(kernels.read_piece(buffer, piece), piece.numel, layout.chunk)

    def work(device: torch.device) -> Callable[[Piece], list[GramSums]]:
        chunks = Chunks(layout, device)
        drawn = None if sketch is None else _Drawn(sketch, device)
        return lambda piece: _chunk_sums(piece, chunks, drawn)

    zero = GramSums.zero(len(tasks), sketch)
    sums = zero
    for piece, parts in in_order(items, layout, fused_work if layout.needs.fused else work):
        sums = functools.reduce(GramSums.plus, parts, sums)
        update(piece.nbytes)
        if piece.stop == piece.item.numel:
            if not torch.isfinite(sums.gram).all():
                raise UserError(_not_finite(piece.item, tasks))
            shares = [part.share for part in piece.item.inputs]
            yield sums.of_tensor(piece.item.shape, shares)
            sums = zero


def _chunk_sums(piece: Piece, chunks: Chunks, drawn: _Drawn | None) -> list[GramSums]:
    made = []
    for _place, base32, tau in chunks.walk(piece):
        norm = float(products(base32[None], base32[None]))
        sums = GramSums(symmetric(products(tau, tau)), norm)
        if drawn is not None:
            omega = drawn.next(piece.item.name, tau.shape[1])
            sums.sketch_gram = symmetric(products(omega, omega))
            sums.sketch_tasks = products(omega, tau).cpu()
        made.append(sums)
    return made


def _not_finite(item: Item, tasks: Sequence[str]) -> str:
    base = torch.zeros(1, device="cpu") if item.base is None else item.whole(item.base)
    return not_finite(item.name, base, (item.whole(part) for part in item.inputs), tasks)


def count_pass(
    encoder: Tensor,
    items: Sequence[Item],
    fresh: Callable[[], Histogram],
    engine: Engine = Engine(),
) -> Histogram:
    """One histogram of the magnitudes of the bases B = T @ encoder in all items.

    Every thread fills a histogram of its own; all except one fit half of the budget.

    Args:
        fresh: makes an empty histogram.
    """
    rows = encoder.shape[1]
    threads = sum(worker_count(device) for device in engine.devices)
    rest, table = beside_tables(rows, engine.budget), table_bytes(rows)
    workers = min(threads, 1 + rest // 2 // table)
    needs = Needs(len(encoder), read_width(items), extra=rows + COUNT_ROWS)
    left = replace(engine, memory=rest - (workers - 1) * table)
    layout = plan_layout(needs, left, workers=workers, longest=_longest_piece(items))
    update = engine.progress("Trim thresholds", sum(item.nbytes for item in items))
    made: list[Histogram] = []

    def work(device: torch.device) -> Callable[[Piece], None]:
        weights, chunks, mine = encoder.T.to(device, torch.float32), Chunks(layout, device), fresh()
        made.append(mine)

        def count(piece: Piece) -> None:
            for _place, _base32, tau in chunks.walk(piece):
                mine.add(weights @ tau)

        return count

    for piece, _ in in_order(items, layout, work):
        update(piece.nbytes)
    total, *others = made or [fresh()]
    for other in others:
        total.counts += other.counts
    return total


def combine_pass(
    items: Sequence[Item],
    steps: Mapping[str, Step],
    sink: Sink,
    engine: Engine = Engine(),
    *,
    title: str = "Merged model",
    sketch: Sketch | None = None,
    counted_as: Mapping[str, str] | None = None,
    coding: Coding | None = None,
) -> None:
    """Combine theta_0 and the task vectors of each item by its step, in order.

    Task vectors are formed and combined in float32, and cast once to `item.out`, or coded.

    Args:
        steps: item -> step, all with the same number of outputs; an item without a step stays the
            base's.
        title: of the progress bar.
        sketch: use the rows of Omega instead of task vectors: items have no inputs.
        counted_as: tensor -> the name under which Omega was drawn, if it is another.
        coding: of the outputs, if the items are written as codes.

    Raises:
        UserError: an output overflows its dtype or is not finite.
    """
    every = list(steps.values())
    outputs = every[0].count if every else 1
    rows = max((len(item.inputs) for item in items), default=0)
    extra = max((step.rows for step in every), default=1)
    if sketch is not None:
        rows, extra = sketch.columns, extra + 2 * sketch.columns
    outs = {item.out for item in items if item.name in steps} if coding is None else {torch.float32}
    linear = sketch is None and all(isinstance(step, Linear) for step in every)
    fast = linear and fused(items, engine, *outs)
    written = max((-(-outputs * item.widest(BLOCK) // BLOCK) for item in items), default=0)
    # Coded outputs are float32 first, and need two more rows while they are measured.
    uncoded = 0 if coding is None else 4 * (outputs + 2)
    needs = Needs(rows, read_width(items, fast) + uncoded, written, extra, fused=fast)
    longest = _longest_piece(items)
    layout = plan_layout(needs, engine, workers=1 if sketch else None, longest=longest)

    def work(device: torch.device) -> Callable[[Piece, Tensor], None]:
        buffer = PieceBuffer(layout.buffer_bytes - layout.piece * uncoded, device)
        combine: Callable[[Piece, Step, Tensor], bool]
        if fast:
            combine = _combining_fused(rows, _deltas(items), buffer)
        else:
            drawn = None if sketch is None else _Drawn(sketch, device, counted_as)
            combine = _combining(Chunks(layout, device, buffer), drawn)

        def fill(piece: Piece, out: Tensor) -> None:
            finite, step = False, steps.get(piece.item.name)
            if not piece.numel:
                return
            if step is None:
                stored = buffer.read(piece)[0]
                out.copy_(stored.expand_as(out))
                finite = stored.dtype == out.dtype  # or as it was: nothing can overflow
            else:
                finite = combine(piece, step, out)
            if not finite and out.is_floating_point():
                check_output(piece.item.name, out, out.dtype)

        if coding is None:
            return fill
        values = torch.empty(outputs, layout.piece, dtype=torch.float32, device="cpu")

        def encode(piece: Piece, out: Tensor) -> None:
            made = values[:, : piece.numel]
            fill(piece, made)
            coding.encode(piece.item.name, piece.start, made, out)

        return encode

    update = engine.progress(title, sum(item.nbytes for item in items))
    deliver(items, layout, outputs, work, sink, update)


def _combining_fused(
    rows: int, deltas: int, buffer: PieceBuffer
) -> Callable[[Piece, Step, Tensor], bool]:
    """A function that fills the outputs of a piece, and returns whether all are known as finite."""
    from tvb_mergekit.tensors import kernels

    computing = functools.cache(functools.partial(kernels.Combining, rows, deltas))

    def combine(piece: Piece, step: Step, out: Tensor) -> bool:
        return bool(computing(step)(kernels.read_piece(buffer, piece), out))

    return combine


def _combining(chunks: Chunks, drawn: _Drawn | None) -> Callable[[Piece, Step, Tensor], bool]:
    """As `_combining_fused`, on any device, for all steps and dtypes."""
    computing = functools.cache(lambda step: step.on(chunks.device))

    def combine(piece: Piece, step: Step, out: Tensor) -> bool:
        for place, base32, tau in chunks.walk(piece):
            if drawn is not None:
                tau = drawn.next(piece.item.name, tau.shape[1])
            out[:, place].copy_(computing(step)(base32, tau))
        return False

    return combine


def share_of(items: Sequence[Item]) -> slice:
    """The items that this process reads, balanced by bytes."""
    world = ranks.world()
    world.agree([[item.name, list(item.shape), item.nbytes] for item in items], "tensors")
    return ranks.shares([item.nbytes for item in items], world.size)[world.rank]


def beside_tables(bases: int, budget: int) -> int:
    """The budget without Trim's histogram of all bases, at least LEAST."""
    return max(budget - table_bytes(bases), min(budget, LEAST))


def fused(items: Sequence[Item], engine: Engine, *outputs: torch.dtype) -> bool:
    """Whether `kernels` can compute all items: on a CPU, from and to the dtypes of FUSED."""
    dtypes = {part.dtype for item in items if item.inputs for part in item.parts}
    return all(d.type == "cpu" for d in engine.devices) and dtypes.union(outputs) <= set(FUSED)


def read_width(items: Sequence[Item], held: bool = False) -> int:
    """Bytes read for one element of the widest item, codes included.

    `held` also counts parts that are in memory: fused passes copy them.
    """
    read = [[p.dtype.itemsize for p in item.parts if held or not p.held] for item in items]
    coded = any(part.packed is not None for item in items for part in item.inputs)
    return max(map(sum, read), default=0) + 2 * coded


def _longest_piece(items: Sequence[Item]) -> int:
    """The most elements of a piece: a tensor's, or fewer if the threads share one tensor."""
    most = max((item.numel for item in items), default=1)
    if len(items) == 1:
        most //= SPLIT * worker_count(CPU)
    return min(LONGEST, most)


def _deltas(items: Sequence[Item]) -> int:
    """The number of inputs of each item that hold deltas; they come first."""
    inputs = next((item.inputs for item in items if item.inputs), ())
    return [part.holds for part in inputs].count("delta")


class _Drawn:
    """Rows of Omega, drawn in order for each tensor (rand_proj). One instance per thread.

    Args:
        counted_as: a tensor's name -> its name in the Gram matrix.
    """

    def __init__(
        self, sketch: Sketch, device: torch.device, counted_as: Mapping[str, str] | None = None
    ) -> None:
        self._sketch, self._device, self._counted_as = sketch, device, counted_as or {}
        self._streams: dict[str, torch.Generator] = {}

    def next(self, name: str, count: int) -> Tensor:
        """The next rows of a tensor, transposed: [M, count] float32 on the device."""
        if name not in self._streams:
            self._streams[name] = self._sketch.stream(self._counted_as.get(name, name))
        return self._sketch.rows(self._streams[name], count, self._device)
