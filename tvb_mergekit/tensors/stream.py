"""Tensors in bounded pieces: read and computed in threads, written in order by one thread.

Memory holds a few pieces of every input, whatever the sizes of tensors and models: see `layout`.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from tvb_mergekit.core.basis import Tunables
from tvb_mergekit.core.lora import Factors, no_factors
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.engine import CPU, host_memory
from tvb_mergekit.tensors.layout import ALIGN, WRITES, Layout
from tvb_mergekit.tensors.source import Holds, Weights

Result = TypeVar("Result")


@dataclass(frozen=True)
class Part:
    """One model's share in a tensor: read(start, stop, buffer) returns flattened elements.

    Attributes:
        held: The elements are in memory, on any device. `read` returns a view and needs no buffer.
        ahead: Called as ahead(start, stop); asks the disk for elements that will be read soon.
        holds: A weight or a delta, its difference from the base's weight.
        name: The name of the stored tensor. None: the tensor is made of others.
        shape: The shape of the stored tensor. None: unknown.
        share: The share of the elements in a random sample, see `Weights.share`.
        grain: Elements that are decoded together.
        factors: Those of each matrix, see `Weights.factors_of`.
    """

    dtype: torch.dtype
    read: Callable[[int, int, Tensor], Tensor]
    held: bool = False
    ahead: Callable[[int, int], None] = lambda start, stop: None
    holds: Holds = "weight"
    name: str | None = None
    shape: tuple[int, ...] | None = None
    share: float = 1.0
    grain: int = 1
    factors: Sequence[Factors] | None = None

    @classmethod
    def of(cls, weights: Weights, name: str, holds: Holds = "weight") -> Part:
        info, holds = weights.tensors[name], weights.holds or holds
        in_file = isinstance(weights, Checkpoint) and info.offset is None
        if in_file and not weights.tensor(name).is_contiguous():  # no piece of it can be read
            whole = whole_parts(lambda: [weights.tensor(name)], [info.dtype], info.numel)[0]
            return replace(whole, holds=holds, name=name, shape=info.shape)
        read, ahead = partial(weights.read, name), partial(weights.ahead, name)
        known = name, info.shape, weights.share(name), weights.grain, weights.factors_of(name)
        return cls(info.dtype, read, weights.in_memory, ahead, holds, *known)


@dataclass(frozen=True)
class Item:
    """One tensor of the stream.

    Attributes:
        base: theta_0; may be None if no input needs it.
        inputs: One part of each task vector. An item without inputs is the base's own.
        out: The dtype that a sink gets; uint8 for outputs that are coded.
        widths: The most bytes of an element of each output that is coded.
        counted_as: The name under which the tensor counts in the Gram matrix: its own, or the first
            name of a tensor that is stored once and has several. None: the base's own.
        tunables: The values of lambda, alpha and density; None: the base's own, in a merge.
    """

    name: str
    shape: tuple[int, ...]
    base: Part | None
    inputs: tuple[Part, ...]
    out: torch.dtype = torch.float32
    widths: tuple[int, ...] = ()
    counted_as: str | None = None
    tunables: Tunables | None = None

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def parts(self) -> tuple[Part, ...]:
        return (*(() if self.base is None else (self.base,)), *self.inputs)

    @property
    def factored(self) -> bool:
        """Whether the factors of all inputs are known."""
        return all(part.factors is not None for part in self.inputs)

    def updates(self, number: int = 0) -> list[Factors]:
        """The factors of one matrix of a tensor that is `factored`, of each input."""
        none = no_factors(*self.shape[-2:])
        return [part.factors[number] if part.factors else none for part in self.inputs]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of all parts, as they are stored."""
        return sum(part.dtype.itemsize for part in self.parts)

    @property
    def nbytes(self) -> int:
        return self.numel * self.element_bytes

    @property
    def width(self) -> int:
        """The most bytes of an element of any output."""
        return max(self.widths, default=self.out.itemsize)

    def whole(self, part: Part) -> Tensor:
        buffer = torch.empty(0 if part.held else self.numel, dtype=part.dtype, device="cpu")
        return part.read(0, self.numel, buffer)


def held_item(
    name: str, base: Tensor, models: Sequence[Tensor], out: torch.dtype = torch.float32
) -> Item:
    tensors = (base, *models)
    parts = whole_parts(lambda: tensors, [t.dtype for t in tensors], base.numel())
    return Item(name, tuple(base.shape), parts[0], tuple(parts[1:]), out)


def whole_parts(
    load: Callable[[], Sequence[Tensor]], dtypes: Sequence[torch.dtype], numel: int
) -> list[Part]:
    """The parts of a tensor whose inputs can only be loaded together and completely.

    The first read loads them. Each is dropped when `numel` of its elements have been read, or when
    its part is gone. Thread-safe.
    """
    lock = threading.Lock()
    cells = [_Cell() for _ in dtypes]
    references = [weakref.ref(cell) for cell in cells]  # only a cell's part keeps it alive

    def part(cell: _Cell, dtype: torch.dtype) -> Part:
        def read(start: int, stop: int, buffer: Tensor) -> Tensor:
            with lock:
                if cell.tensor is None:
                    for reference, tensor in zip(references, load(), strict=True):
                        if (other := reference()) is not None and other.tensor is None:
                            other.tensor, other.left = tensor.detach().reshape(-1), numel
                assert cell.tensor is not None
                piece = cell.tensor[start:stop]
                cell.left -= stop - start
                if cell.left <= 0:
                    cell.tensor = None
            return piece

        return Part(dtype, read, held=True)

    return [part(cell, dtype) for cell, dtype in zip(cells, dtypes, strict=True)]


class _Cell:
    tensor: Tensor | None = None
    left = 0  # elements to read


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of an item: one task of one thread."""

    item: Item
    start: int
    stop: int
    number: int  # in the order of the pass

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        return self.numel * self.item.element_bytes


class Sink(Protocol):
    """The receiver of outputs, which `deliver` calls in order and from one thread."""

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        """Accept `values` [outputs, stop - start] in `item.out`, on the CPU.

        A row that is coded begins with its bytes; the rest of it is unused.
        """


class Placing(Sink, Protocol):
    """A sink with memory for outputs, which are computed there and not copied."""

    def place(self, item: Item, start: int, stop: int) -> Tensor | None:
        """Memory for a piece, [outputs, stop - start] in `item.out` on the CPU; None: `write`."""


class PieceBuffer:
    """Memory for the stored elements of a piece, which go to `device`. One instance per thread."""

    def __init__(self, nbytes: int, device: torch.device = CPU) -> None:
        self.memory = host_memory(device, nbytes)

    def copy(self, piece: Piece, out: Tensor) -> bool:
        """Fill each row of `out` with the base; returns whether no value can have overflowed."""
        base = piece.item.parts[0]
        if base.dtype == out.dtype and len(out) == 1:
            values = base.read(piece.start, piece.stop, out[0])
        else:
            values = self.read(piece)[0]
        if values.data_ptr() != out.data_ptr():
            out.copy_(values.expand_as(out))
        if values.dtype == out.dtype:
            return True
        # An infinite value was so before. Comparisons need more than 8 bits.
        return bool((torch.isfinite(out) | torch.isinf(values.float())).all())

    def read(self, piece: Piece, copy: bool = False) -> list[Tensor]:
        """Base and inputs in their stored dtypes, overwritten by the next piece.

        Args:
            copy: copy inputs that are `held` into `memory` as well.
        """
        found, place = [], 0
        for part in piece.item.parts:
            size = piece.numel * part.dtype.itemsize if copy or not part.held else 0
            room = self.memory[place : place + size]
            place += size + -size % ALIGN
            own = room.view(part.dtype)
            values = part.read(piece.start, piece.stop, own)
            if copy and values.data_ptr() != own.data_ptr():
                values = own.copy_(values)
            found.append(values)
        return found


def in_order(
    items: Sequence[Item],
    layout: Layout,
    work: Callable[[torch.device], Callable[[Piece], Result]],
) -> Iterator[tuple[Piece, Result]]:
    """Yield the pieces of the items in order, each with its result.

    Each of the layout's workers is a thread that reads and computes. A thread calls `work(device)`
    once, and calls the returned function with each of its pieces. The caller uses a result before
    it asks for the result `layout.under_way` pieces later.
    """
    pieces = list(pieces_of(items, layout.piece))
    devices: SimpleQueue[torch.device] = SimpleQueue()
    for device in layout.workers:
        devices.put(device)
    local, threads = threading.local(), torch.get_num_threads()

    def compute(piece: Piece) -> Result:
        if not hasattr(local, "act"):
            device = devices.get_nowait()
            if device.type == "cpu":
                torch.set_num_threads(1)
            local.act = work(device)
        with torch.no_grad():
            result: Result = local.act(piece)
        return result

    waiting: deque[tuple[Piece, Future[Result]]] = deque()

    def oldest() -> tuple[Piece, Result]:
        piece, future = waiting.popleft()
        return piece, future.result()

    with ThreadPoolExecutor(len(layout.workers), "tvb-compute") as computers:
        try:
            if len(pieces) == 1:  # threads would take longer
                yield pieces[0], compute(pieces[0])
                return
            for piece in pieces:
                if len(waiting) == layout.under_way:
                    yield oldest()
                for part in piece.item.parts:
                    part.ahead(piece.start, piece.stop)
                waiting.append((piece, computers.submit(compute, piece)))
            while waiting:
                yield oldest()
        finally:
            computers.shutdown(wait=True, cancel_futures=True)
            torch.set_num_threads(threads)  # part of it is the whole process's


def pieces_of(items: Sequence[Item], length: int) -> Iterator[Piece]:
    """Cut items into pieces of at most `length` elements; an empty tensor is one piece."""
    number = itertools.count()
    for item in items:
        for start in range(0, max(1, item.numel), length):
            yield Piece(item, start, min(start + length, item.numel), next(number))


def deliver(
    items: Sequence[Item],
    layout: Layout,
    outputs: int,
    work: Callable[[torch.device], Callable[[Piece, Tensor], Result]],
    sink: Sink | Placing,
    done: Callable[[Piece, Result], object],
) -> None:
    """Compute the outputs of each piece, and give them to `sink` in order, in another thread.

    Each thread calls the function `work(device)` with a piece and the tensor to fill. `done` gets
    each piece with the result, in order.
    """
    row = layout.piece * max((item.width for item in items), default=0)
    count = min(layout.under_way + WRITES, len(list(pieces_of(items, layout.piece))))
    buffers = [host_memory(layout.workers[0], outputs, row) for _ in range(count)]
    place = getattr(sink, "place", lambda item, start, stop: None)

    def computing(device: torch.device) -> Callable[[Piece], tuple[Tensor | None, Result]]:
        act = work(device)

        def fill(piece: Piece) -> tuple[Tensor | None, Result]:
            buffer, item = buffers[piece.number % count], piece.item
            own = place(item, piece.start, piece.stop)
            out = buffer[:, : piece.numel * item.width].view(item.out) if own is None else own
            result = act(piece, out)
            return out if own is None else None, result

        return fill

    failed = False

    def write(piece: Piece, out: Tensor | None) -> None:
        nonlocal failed
        if failed or out is None:  # nothing may follow a write that failed
            return
        failed = True
        sink.write(piece.item, piece.start, piece.stop, out)
        failed = False

    writes: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, "tvb-write") as writer:
        for piece, (out, result) in in_order(items, layout, computing):
            if len(writes) == WRITES:
                writes.popleft().result()  # raises the error of a write
            # Each piece has its write, even without an `out`: buffers are used in turn.
            writes.append(writer.submit(write, piece, out))
            done(piece, result)
        while writes:
            writes.popleft().result()
