"""Tensors streamed past in bounded pieces: read ahead in threads, computed, written in a thread.

Two passes are all that building, adding to and exporting a store need: `gram_of` sums the inner
products of the inputs, `combine` writes linear combinations of them. What is held at a time is a
few pieces of every input, whatever the sizes of tensors and models: about `budget` bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

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
from tvb_mergekit.weights import Weights

AHEAD = 2  # pieces that are being read while one is computed
LONGEST = 2**20  # elements: longer pieces gained nothing

Progress = Callable[[int], object]


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

    def write(self, item: Item, start: int, stop: int, values: Tensor, rounding: Tensor) -> None:
        """`values` [number of outputs, stop - start] in `item.out`, on the CPU; `rounding`
        [number of outputs] float64: the squared norm of what the cast to `item.out` lost."""


def piece_length(parts: int, width: int, budget: int) -> int:
    """Elements per piece so that all that is read ahead takes half of the budget."""
    length = budget // 2 // max(1, parts * width * (AHEAD + 1))
    return max(BLOCK, min(length, LONGEST) // BLOCK * BLOCK)


def read_ahead(items: Sequence[Item], length: int, device: torch.device) -> Iterator[Piece]:
    """The items' pieces of at most `length` elements in order, AHEAD of them read in threads."""
    parts = max((len(item.parts) for item in items), default=0)
    width = max((part.dtype.itemsize for item in items for part in item.parts), default=1)
    pinned = device.type == "cuda"  # from pinned memory the copy to the GPU overlaps
    rooms = [
        [torch.empty(length * width, dtype=torch.uint8, pin_memory=pinned) for _ in range(parts)]
        for _ in range(AHEAD + 1)
    ]

    def fill(item: Item, start: int, stop: int, room: list[Tensor]) -> Piece:
        read = [
            part.read(start, stop, buffer.view(part.dtype))
            for part, buffer in zip(item.parts, room, strict=False)
        ]
        base = read.pop(0) if item.base is not None else None
        return Piece(item, start, stop, base, read)

    waiting: deque[Future[Piece]] = deque()
    with ThreadPoolExecutor(AHEAD, "tvb-read") as pool:
        try:
            for number, (item, start, stop) in enumerate(_ranges(items, length)):
                waiting.append(pool.submit(fill, item, start, stop, rooms[number % len(rooms)]))
                if len(waiting) > AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


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
    progress: Progress = lambda nbytes: None,
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
    length = _length(items, rows, budget)
    extra = 2 * sketch.columns if sketch else 0
    blocks = TaskVectorBlocks(rows, device, budget // 4, extra, deltas)
    total = zero_sums(rows, sketch)
    generator = None
    for piece in read_ahead(items, length, device):
        item = piece.item
        if sketch is not None and piece.start == 0:
            generator = sketch.stream(item.name)
        share = tensor_sums(item.name, piece.base, piece.inputs, blocks, sketch, generator)
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
    progress: Progress = lambda nbytes: None,
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
    length = _length(items, rows + outputs, budget)
    blocks = TaskVectorBlocks(rows, device, budget // 4, outputs, deltas)
    weights = matrix.T.to(device, torch.float32)
    rooms = [torch.empty(outputs, length * 4, dtype=torch.uint8) for _ in range(2)]
    writes: deque[Future[None]] = deque()
    generator = None
    with ThreadPoolExecutor(1, "tvb-write") as writer:
        for number, piece in enumerate(read_ahead(items, length, device)):
            if len(writes) == len(rooms):  # also where an error of the writer surfaces
                writes.popleft().result()
            item, count = piece.item, piece.stop - piece.start
            room = rooms[number % len(rooms)]
            if item.out.itemsize > 4:
                room = torch.empty(outputs, count * item.out.itemsize, dtype=torch.uint8)
            out = room[:, : count * item.out.itemsize].view(item.out)
            lost = torch.zeros(outputs, dtype=torch.float64, device=device)

            def put(start: int, values: Tensor, out: Tensor = out, lost: Tensor = lost) -> None:
                rounded = values.to(out.dtype)
                out[:, start : start + values.shape[1]].copy_(rounded)
                if out.dtype.itemsize < 4:
                    lost += (values - rounded).square_().sum(1, dtype=torch.float64)

            if sketch is not None:
                if piece.start == 0:
                    generator = sketch.stream(item.name)
                assert generator is not None
                for start in range(0, count, blocks.chunk):
                    stop = min(start + blocks.chunk, count)
                    omega = sketch.rows(generator, stop - start, device)
                    put(start, weights @ omega)
            elif not item.inputs:
                assert piece.base is not None
                out.copy_(piece.base.expand(outputs, -1))
            else:
                for start, _, base32, tau in blocks.walk(piece.base, piece.inputs):
                    values = weights @ tau
                    put(start, values.add_(base32) if add_base else values)
            if item.out.is_floating_point:
                check_output(item.name, out, item.out)
            writes.append(writer.submit(sink.write, item, piece.start, piece.stop, out, lost.cpu()))
            progress(piece.nbytes)
        while writes:
            writes.popleft().result()


def _length(items: Sequence[Item], parts: int, budget: int) -> int:
    widths = [part.dtype.itemsize for item in items for part in item.parts]
    return piece_length(parts + 1, max(widths, default=4), budget)
