"""Tensors streamed past in bounded pieces: read ahead in threads, computed, written in a thread.

What is held at a time is a few pieces of every input, whatever the sizes of tensors and models: see
`layout`. The passes themselves are in `passes`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from tvb_mergekit.core.gram import Sketch
from tvb_mergekit.progress import Update
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.layout import ALIGN, FUSED, WRITES, Layout
from tvb_mergekit.tensors.source import StateDict, Weights

CPU = torch.device("cpu")

Result = TypeVar("Result")
Holds = Literal["weight", "delta"]


@dataclass(frozen=True)
class Part:
    """One input's share in a tensor: read(start, stop, buffer) gives its flattened elements.

    `holds`: a weight, from which the base's is subtracted, or a delta, a difference already.
    `held`: they are in memory, on any device, and `read` gives a view of them and needs no buffer.
    ahead(start, stop) asks the disk for elements that will be read soon.
    """

    dtype: torch.dtype
    read: Callable[[int, int, Tensor], Tensor]
    held: bool = False
    ahead: Callable[[int, int], None] = lambda start, stop: None
    holds: Holds = "weight"

    @classmethod
    def of(cls, weights: Weights, name: str, holds: Holds = "weight") -> Part:
        info = weights.tensors[name]
        in_file = isinstance(weights, Checkpoint) and info.offset is None
        if in_file and not weights.tensor(name).is_contiguous():  # no piece of it can be read
            whole = whole_parts(lambda: [weights.tensor(name)], [info.dtype], info.numel)[0]
            return replace(whole, holds=holds)

        held = isinstance(weights, StateDict)
        return cls(
            info.dtype, partial(weights.read, name), held, partial(weights.ahead, name), holds
        )


@dataclass(frozen=True)
class Item:
    """One tensor of the stream. `base` may be None where no input needs it.

    `out` is the dtype in which it is given to a sink. An item without `inputs` is the base's own.
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

    def ahead(self, start: int, stop: int) -> None:
        """Elements `start` to `stop` will be read soon."""
        for part in self.parts:
            part.ahead(start, stop)

    def whole(self, part: Part) -> Tensor:
        buffer = torch.empty(0 if part.held else self.numel, dtype=part.dtype, device="cpu")
        return part.read(0, self.numel, buffer)


def held_item(
    name: str, base: Tensor, models: Sequence[Tensor], out: torch.dtype = torch.float32
) -> Item:
    """Tensors in memory, on any device and of any layout, as an item."""
    tensors = (base, *models)
    parts = whole_parts(lambda: tensors, [t.dtype for t in tensors], base.numel())
    return Item(name, tuple(base.shape), parts[0], tuple(parts[1:]), out)


def whole_parts(
    load: Callable[[], Sequence[Tensor]], dtypes: Sequence[torch.dtype], numel: int
) -> list[Part]:
    """The parts of a tensor whose inputs `load` gives only all at once and whole.

    Loaded when a part is first read; each is dropped when as much of it has been read as there is,
    and none is held for a part that nobody has any more. Thread-safe.
    """
    lock = threading.Lock()
    cells = [_Cell() for _ in dtypes]
    living = [weakref.ref(cell) for cell in cells]  # their parts hold them

    def part(cell: _Cell, dtype: torch.dtype) -> Part:
        def read(start: int, stop: int, buffer: Tensor) -> Tensor:
            with lock:
                if cell.tensor is None:
                    for there, tensor in zip(living, load(), strict=True):
                        if (other := there()) is not None and other.tensor is None:
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
    """What a part of `whole_parts` holds, and how many of its elements are still to be read."""

    tensor: Tensor | None = None
    left = 0


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of an item: one task of one thread."""

    item: Item
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        return self.numel * sum(part.dtype.itemsize for part in self.item.parts)


class Sink(Protocol):
    """Where `deliver` brings outputs, in order and from one thread of its own."""

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        """`values` [number of outputs, stop - start] in `item.out`, on the CPU."""


def allocate(
    *shape: int, dtype: torch.dtype, device: torch.device = CPU, pinned: bool = False
) -> Tensor:
    """An empty tensor of the engine's own: everything that `layout` counts is made here."""
    return torch.empty(*shape, dtype=dtype, device=device, pin_memory=pinned)


def deltas_of(items: Sequence[Item]) -> int:
    """How many inputs of each item hold deltas; they come before those that hold weights."""
    for item in items:
        if item.inputs:
            return [part.holds for part in item.inputs].count("delta")
    return 0


class Chunks:
    """Reads a piece and walks it in chunks of task vectors, in buffers that are allocated once.

    One instance per thread, for one layout: what is read stays in the cache of the processor that
    read it.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._chunk, self._length, self.device = layout.chunk, layout.piece, device
        self._rows = allocate(
            1 + layout.needs.rows, layout.chunk, dtype=torch.float32, device=device
        )
        pinned = device.type == "cuda"  # from there the copy to the GPU is fast
        self._buffer = allocate(layout.buffer_bytes, dtype=torch.uint8, pinned=pinned)

    def read(self, piece: Piece) -> Iterator[tuple[int, int, list[Tensor]]]:
        """Yield (start, stop, parts as they are stored), by places in the piece; overwritten by
        the next."""
        for start in range(0, max(1, piece.numel), self._length):
            stop = min(start + self._length, piece.numel)
            found, place = [], 0
            for part in piece.item.parts:
                size = 0 if part.held else (stop - start) * part.dtype.itemsize
                buffer = self._buffer[place : place + size].view(part.dtype)
                found.append(part.read(piece.start + start, piece.start + stop, buffer))
                place += size + -size % ALIGN
            yield start, stop, found
            if self.device.type != "cpu":  # what was read may still be on its way there
                torch.accelerator.current_stream(self.device).synchronize()

    def walk(self, piece: Piece) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Yield (start, stop, theta_0 [n], task vectors [T, n]) in float32 on the device, by places
        in the piece; both are views of buffers that the next step overwrites.

        Without a base, which only deltas can do without, theta_0 is zero.
        """
        item = piece.item
        for first, last, found in self.read(piece):
            for start in range(first, last, self._chunk):
                stop = min(start + self._chunk, last)
                rows, here = self._rows[:, : stop - start], slice(start - first, stop - first)
                values = [self._near(part[here]) for part in found]
                if item.base is None:
                    rows[0].zero_()
                else:
                    rows[0].copy_(values.pop(0))
                for row, part, value in zip(rows[1:], item.inputs, values, strict=False):
                    row.copy_(value)
                    if part.holds == "weight":
                        row.sub_(rows[0])
                yield start, stop, rows[0], rows[1:]

    def _near(self, stored: Tensor) -> Tensor:
        # Move in the stored dtype and widen on the device: half the traffic for 16-bit models.
        return stored if self.device == CPU else stored.to(self.device, non_blocking=True)


class Drawn:
    """The rows of Omega (rand_proj) in the place of task vectors, for one thread."""

    def __init__(
        self, sketch: Sketch, device: torch.device, counted_as: Mapping[str, str] | None = None
    ) -> None:
        """`counted_as`: a tensor's name -> the one under which it counted in the Gram matrix."""
        self._sketch, self._device, self._counted_as = sketch, device, counted_as or {}
        self._streams: dict[str, torch.Generator] = {}

    def next(self, name: str, count: int) -> Tensor:
        """The next rows of a tensor, transposed: [M, count] float32 on the device."""
        if name not in self._streams:
            self._streams[name] = self._sketch.stream(self._counted_as.get(name, name))
        return self._sketch.rows(self._streams[name], count, self._device)


class Operands:
    """What is stored of pieces, read for `kernels`. One instance per thread."""

    def __init__(self, layout: Layout) -> None:
        from tvb_mergekit.tensors.kernels import Buffer  # imports numba, which takes long

        self.buffer = Buffer(layout.buffer_bytes)

    def read(self, piece: Piece) -> list[Tensor]:
        """Fill the buffer with base and inputs of a piece; returns them as they are stored."""
        base = None if piece.item.base is None else piece.item.base.dtype
        dtypes = [base, *(part.dtype for part in piece.item.inputs)]
        rows = self.buffer.rows(dtypes, piece.numel)
        found = []
        for part, row in zip(piece.item.parts, rows if base else rows[1:], strict=True):
            here = row.view(part.dtype)
            if (there := part.read(piece.start, piece.stop, here)).data_ptr() != here.data_ptr():
                here.copy_(there)
            found.append(here)
        return found


def fused(items: Sequence[Item], devices: Sequence[torch.device], *outputs: torch.dtype) -> bool:
    """Whether `kernels` can do all of them: on a CPU, of the dtypes that they know."""
    dtypes = {part.dtype for item in items if item.inputs for part in item.parts}
    return all(d.type == "cpu" for d in devices) and dtypes.union(outputs) <= set(FUSED)


def read_width(items: Sequence[Item], held: bool = False) -> int:
    """Bytes of one element in all parts that are read, or `held` in memory, of the widest item."""
    return max(
        (sum(p.dtype.itemsize for p in item.parts if held or not p.held) for item in items),
        default=0,
    )


def in_order(
    items: Sequence[Item],
    layout: Layout,
    work: Callable[[torch.device], Callable[[Piece, int], Result]],
) -> Iterator[tuple[Piece, Result]]:
    """The items' pieces of at most `layout.piece` elements in order, and what `work` makes of each.

    Each of the layout's workers is a thread that reads and computes; the disk is asked for the
    pieces after theirs. `work(device)` is called once in each of them; what it returns is called
    with a piece and the piece's number. The result of a piece must be used before the one
    `layout.under_way` further is asked for.
    """
    pieces = list(pieces_of(items, layout.piece))
    devices: SimpleQueue[torch.device] = SimpleQueue()
    for device in layout.workers:
        devices.put(device)
    local = threading.local()

    def compute(number: int) -> Result:
        if not hasattr(local, "act"):
            device = devices.get_nowait()
            if device.type == "cpu":
                torch.set_num_threads(1)
            local.act = work(device)
        with torch.no_grad():
            result: Result = local.act(pieces[number], number)
        return result

    with _same_threads():
        if len(pieces) == 1:  # such as a small tensor on its own: threads would take longer
            yield pieces[0], compute(0)
            return
        waiting: deque[tuple[Piece, Future[Result]]] = deque()
        with ThreadPoolExecutor(len(layout.workers), "tvb-compute") as computers:
            try:
                for number, piece in enumerate(pieces):
                    if len(waiting) == layout.under_way:
                        done, result = waiting.popleft()
                        yield done, result.result()
                    piece.item.ahead(piece.start, piece.stop)
                    waiting.append((piece, computers.submit(compute, number)))
                while waiting:
                    done, result = waiting.popleft()
                    yield done, result.result()
            finally:
                computers.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _same_threads() -> Iterator[None]:
    """Part of `torch.set_num_threads` is the whole process's: leave it as it was."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def pieces_of(items: Sequence[Item], length: int) -> Iterator[Piece]:
    """The items in pieces of at most `length` elements; an empty tensor is a piece too."""
    for item in items:
        for start in range(0, max(1, item.numel), length):
            yield Piece(item, start, min(start + length, item.numel))


def deliver(
    items: Sequence[Item],
    layout: Layout,
    outputs: int,
    work: Callable[[torch.device], Callable[[Piece, Tensor], None]],
    sink: Sink,
    progress: Update,
) -> None:
    """Have `work(device)`'s function fill the outputs of each piece, [outputs, n] in `item.out` on
    the CPU, and give them to `sink` in order, while the next are computed."""
    width = max((item.out.itemsize for item in items), default=4)
    count = min(layout.under_way + WRITES, len(list(pieces_of(items, layout.piece))))
    buffers = [allocate(outputs, layout.piece * width, dtype=torch.uint8) for _ in range(count)]

    def computing(device: torch.device) -> Callable[[Piece, int], Tensor]:
        act = work(device)

        def fill(piece: Piece, number: int) -> Tensor:
            buffer, dtype = buffers[number % len(buffers)], piece.item.out
            out = buffer[:, : piece.numel * dtype.itemsize].view(dtype)
            act(piece, out)
            return out

        return fill

    whole = True

    def write(*what: Any) -> None:
        nonlocal whole
        if whole:  # after a write that failed, the next one must not follow what it left
            whole = False
            sink.write(*what)
            whole = True

    writes: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, "tvb-write") as writer:
        for piece, out in in_order(items, layout, computing):
            if len(writes) == WRITES:  # also where an error of the writer surfaces
                writes.popleft().result()
            writes.append(writer.submit(write, piece.item, piece.start, piece.stop, out))
            progress(piece.nbytes)
        while writes:
            writes.popleft().result()
