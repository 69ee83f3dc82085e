"""Tensors streamed past in bounded pieces: read ahead in threads, computed, written in a thread.

Two passes are all that building, adding to and exporting a store need: `gram_of` sums the inner
products of the inputs, `combine` writes linear combinations of them. What is held at a time is a
few pieces of every input, whatever the sizes of tensors and models: about `budget` bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from tvb_mergekit.combine import check_output
from tvb_mergekit.errors import UserError
from tvb_mergekit.gram import (
    BLOCK,
    DEFAULT_BUDGET,
    GramSums,
    Sketch,
    TaskVectorBlocks,
    not_finite,
    tensor_sums,
    zero_sums,
)
from tvb_mergekit.progress import Update
from tvb_mergekit.weights import Weights

AHEAD = 2  # pieces that are being read while others are computed
LONGEST = 2**20  # elements: longer pieces gained nothing
WRITES = 2  # pieces that wait to be written
MOST_WORKERS = 8  # threads that compute on a CPU; the memory is the limit before

Result = TypeVar("Result")


@dataclass(frozen=True)
class Part:
    """One input's share in a tensor: read(start, stop, room) gives its flattened elements."""

    dtype: torch.dtype
    read: Callable[[int, int, Tensor], Tensor]

    @classmethod
    def of(cls, weights: Weights, name: str) -> Part:
        def read(start: int, stop: int, room: Tensor) -> Tensor:
            return weights.read(name, start, stop, room)

        return cls(weights.tensors[name].dtype, read)


@dataclass(frozen=True)
class Item:
    """One tensor of the stream. `base` may be None where no input needs it.

    `out` is the dtype in which `combine` gives it. An item without `inputs` is the base's own.
    """

    name: str
    shape: tuple[int, ...]
    base: Part | None
    inputs: tuple[Part, ...]
    out: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def parts(self) -> tuple[Part, ...]:
        return (*(() if self.base is None else (self.base,)), *self.inputs)

    @property
    def nbytes(self) -> int:
        """Bytes that reading it takes."""
        return self.numel * sum(part.dtype.itemsize for part in self.parts)

    def whole(self, part: Part) -> Tensor:
        return part.read(0, self.numel, torch.empty(self.numel, dtype=part.dtype))


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of an item; the tensors are overwritten after the next piece."""

    item: Item
    start: int
    stop: int
    base: Tensor | None
    inputs: list[Tensor]

    @property
    def nbytes(self) -> int:
        tensors = self.inputs if self.base is None else [self.base, *self.inputs]
        return (self.stop - self.start) * sum(tensor.dtype.itemsize for tensor in tensors)


class Sink(Protocol):
    """Where `combine` delivers, in order and from one thread of its own."""

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        """`values` [number of outputs, stop - start] in `item.out`, on the CPU."""


def worker_count(device: torch.device) -> int:
    """Threads that compute: each its own piece, since PyTorch's threads within one operation cost
    more than they gain on pieces that fit a cache, and far more on a busy machine."""
    return min(torch.get_num_threads(), MOST_WORKERS) if device.type == "cpu" else 1


def piece_length(parts: int, width: int, workers: int, budget: int) -> int:
    """Elements per piece so that all pieces that are held take half of the budget."""
    length = budget // 2 // max(1, parts * width * (AHEAD + workers + 1))
    return max(BLOCK, min(length, LONGEST) // BLOCK * BLOCK)


def in_order(
    items: Sequence[Item],
    length: int,
    device: torch.device,
    work: Callable[[], Callable[[Piece, int], Result]],
    workers: int,
) -> Iterator[Result]:
    """What `work` makes of the items' pieces of at most `length` elements, in order.

    AHEAD threads read, `workers` compute. `work()` is called once in each computing thread;
    what it returns is called with a piece and the piece's number. A piece's tensors are overwritten
    once its result has been taken and the next is asked for.
    """
    parts = max((len(item.parts) for item in items), default=0)
    width = max((part.dtype.itemsize for item in items for part in item.parts), default=1)
    pinned = device.type == "cuda"  # from pinned memory the copy to the GPU overlaps
    rooms = [
        [torch.empty(length * width, dtype=torch.uint8, pin_memory=pinned) for _ in range(parts)]
        for _ in range(AHEAD + workers)
    ]
    local = threading.local()

    def fill(item: Item, start: int, stop: int, room: list[Tensor]) -> Piece:
        read = [
            part.read(start, stop, buffer.view(part.dtype))
            for part, buffer in zip(item.parts, room, strict=False)
        ]
        base = read.pop(0) if item.base is not None else None
        return Piece(item, start, stop, base, read)

    def compute(piece: Future[Piece], number: int) -> Result:
        if not hasattr(local, "act"):
            torch.set_num_threads(1)
            local.act = work()
        with torch.no_grad():
            result: Result = local.act(piece.result(), number)
        return result

    waiting: deque[Future[Result]] = deque()
    threads = torch.get_num_threads()
    with (
        ThreadPoolExecutor(AHEAD, "tvb-read") as readers,
        ThreadPoolExecutor(workers, "tvb-compute") as computers,
    ):
        try:
            for number, (item, start, stop) in enumerate(_ranges(items, length)):
                if len(waiting) == len(rooms):
                    yield waiting.popleft().result()
                read = readers.submit(fill, item, start, stop, rooms[number % len(rooms)])
                waiting.append(computers.submit(compute, read, number))
            while waiting:
                yield waiting.popleft().result()
        finally:
            readers.shutdown(wait=False, cancel_futures=True)
            for future in waiting:
                future.cancel()
            computers.shutdown(wait=True, cancel_futures=True)
            torch.set_num_threads(threads)  # part of the setting is the whole process's


def _ranges(items: Sequence[Item], length: int) -> Iterator[tuple[Item, int, int]]:
    for item in items:
        for start in range(0, max(1, item.numel), length):  # an empty tensor is a piece too
            yield item, start, min(start + length, item.numel)


def gram_of(
    items: Sequence[Item],
    tasks: Sequence[str],
    *,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - a constant
    budget: int = DEFAULT_BUDGET,
    deltas: int = 0,
    sketch: Sketch | None = None,
    progress: Update = lambda nbytes: None,
) -> GramSums:
    """G [T, T] of the inputs of all items, float64 (see `gram`): each read once.

    Args:
        tasks: names of the inputs, for messages.
        deltas: how many of them, at the start, are differences from the base already.
        progress: called with the bytes read.

    Raises:
        UserError: NaN or infinity in an input: which, in which tensor, how many.
    """
    rows = len(tasks)
    workers = worker_count(device)
    extra = 2 * sketch.columns if sketch else 0
    streams: dict[str, torch.Generator] = {}
    if sketch is not None:
        workers = 1

    def work() -> Callable[[Piece, int], tuple[Piece, GramSums]]:
        blocks = TaskVectorBlocks(rows, device, budget // 4 // workers, extra, deltas)

        def add(piece: Piece, number: int) -> tuple[Piece, GramSums]:
            name = piece.item.name
            drawn = None if sketch is None else streams.setdefault(name, sketch.stream(name))
            return piece, tensor_sums(name, piece.base, piece.inputs, blocks, sketch, drawn)

        return add

    total = zero_sums(rows, sketch)
    length = _length(items, rows, device, budget)
    for piece, share in in_order(items, length, device, work, workers):
        item = piece.item
        if not torch.isfinite(share.gram).all():
            base = torch.zeros(1) if item.base is None else item.whole(item.base)
            models = [item.whole(part) for part in item.inputs]
            raise UserError(not_finite(item.name, base, models, tasks))
        total.add(share)
        progress(piece.nbytes)
    return total


def combine(
    items: Sequence[Item],
    matrix: Tensor,
    sink: Sink,
    *,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - a constant
    budget: int = DEFAULT_BUDGET,
    deltas: int = 0,
    add_base: bool = False,
    sketch: Sketch | None = None,
    progress: Update = lambda nbytes: None,
) -> None:
    """Give `sink` the columns of [tau_1 ... tau_n] @ matrix, plus theta_0 with `add_base`.

    Task vectors are formed and combined in float32 and cast once, to `item.out`. With a `sketch`
    the rows of Omega stand in the place of task vectors. Items without inputs pass as the base's.

    Args:
        matrix: [n inputs, n outputs], any dtype.
        deltas: how many inputs, at the start, are differences from the base already.
        progress: called with the bytes read.

    Raises:
        UserError: an output overflows its dtype or is not finite.
    """
    rows, outputs = matrix.shape
    length = _length(items, rows + outputs, device, budget)
    weights = matrix.T.to(device, torch.float32)
    # Only one thread may draw Omega, which is one sequence in each tensor.
    workers = 1 if sketch is not None else worker_count(device)
    width = max((item.out.itemsize for item in items), default=4)
    rooms = [
        torch.empty(outputs, length * width, dtype=torch.uint8)
        for _ in range(AHEAD + workers + WRITES)
    ]
    streams: dict[str, torch.Generator] = {}

    def work() -> Callable[[Piece, int], _Done]:
        blocks = TaskVectorBlocks(rows, device, budget // 4 // workers, outputs, deltas)
        held = torch.empty(outputs, blocks.chunk, dtype=torch.float32, device=device)

        def act(piece: Piece, number: int) -> _Done:
            item, count = piece.item, piece.stop - piece.start
            room = rooms[number % len(rooms)]
            fits = not item.out.is_floating_point
            out = room[:, : count * item.out.itemsize].view(item.out)
            if sketch is not None:
                generator = streams.setdefault(item.name, sketch.stream(item.name))
                for start in range(0, count, blocks.chunk):
                    stop = min(start + blocks.chunk, count)
                    omega = sketch.rows(generator, stop - start, device)
                    out[:, start:stop].copy_(weights @ omega)
            elif not item.inputs:
                assert piece.base is not None
                out.copy_(piece.base.expand(outputs, -1))
            else:
                fits = True
                for start, stop, base32, tau in blocks.walk(piece.base, piece.inputs):
                    values = torch.mm(weights, tau, out=held[:, : stop - start])
                    if add_base:
                        values += base32
                    out[:, start:stop].copy_(values)
                    fits &= _fits(values, item.out)
            if not fits:
                check_output(item.name, out, item.out)
            return _Done(piece, out)

        return act

    whole = True

    def deliver(*write: Any) -> None:
        nonlocal whole
        if whole:  # after a write that failed, the next one must not follow what it left
            whole = False
            sink.write(*write)
            whole = True

    writes: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, "tvb-write") as writer:
        for done in in_order(items, length, device, work, workers):
            if len(writes) == WRITES:  # also where an error of the writer surfaces
                writes.popleft().result()
            piece = done.piece
            write = (piece.item, piece.start, piece.stop, done.out)
            writes.append(writer.submit(deliver, *write))
            progress(piece.nbytes)
        while writes:
            writes.popleft().result()


@dataclass(frozen=True)
class _Done:
    """A piece and its outputs."""

    piece: Piece
    out: Tensor


def _fits(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether a cast leaves all values finite; much cheaper than to look at the 16-bit result."""
    low, high = torch.aminmax(values) if values.numel() else (values.sum(), values.sum())
    largest = torch.finfo(dtype).max
    return bool((low >= -largest) & (high <= largest))  # NaN is neither


def _length(items: Sequence[Item], parts: int, device: torch.device, budget: int) -> int:
    widths = [part.dtype.itemsize for item in items for part in item.parts]
    return piece_length(parts + 1, max(widths, default=4), worker_count(device), budget)
