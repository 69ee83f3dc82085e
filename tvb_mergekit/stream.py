"""Tensors streamed past in bounded pieces: read ahead in threads, computed, written in a thread.

Every pass over models is one of these: `gram_of` sums the inner products of the inputs, `combine`
writes linear combinations of them, and `engine` counts and merges. What is held at a time is a few
pieces of every input, whatever the sizes of tensors and models: see `layout`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from tvb_mergekit import kernels
from tvb_mergekit.checkpoints import Checkpoint
from tvb_mergekit.combine import check_output, fits
from tvb_mergekit.errors import UserError
from tvb_mergekit.gram import (
    DEFAULT_BUDGET,
    ChunkSums,
    GramSums,
    Products,
    Sketch,
    not_finite,
    products,
    symmetric,
)
from tvb_mergekit.layout import ALIGN, BLOCK, LONGEST, WRITES, Layout, Needs, plan_layout
from tvb_mergekit.progress import Update
from tvb_mergekit.weights import StateDict, Weights
from tvb_mergekit.window import Window

CPU = torch.device("cpu")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Part:
    """One input's share in a tensor: read(start, stop, room) gives its flattened elements.

    `held`: they are in memory, on any device, and `read` gives a view of them and takes no room.
    fill(start, stop, room), where they lie in a file, reads their bytes: between calls of PyTorch
    threads pass the interpreter's lock to each other, which takes longer than to read them.
    view(start, stop, window), likewise, maps them.
    ahead(start, stop) asks the disk for elements that will be read soon.
    """

    dtype: torch.dtype
    read: Callable[[int, int, Tensor], Tensor]
    held: bool = False
    fill: Callable[[int, int, memoryview], None] | None = None
    view: Callable[[int, int, Window], Tensor] | None = None
    ahead: Callable[[int, int], None] = lambda start, stop: None

    @classmethod
    def of(cls, weights: Weights, name: str) -> Part:
        info = weights.tensors[name]
        in_file = isinstance(weights, Checkpoint) and info.offset is None
        if in_file and not weights.tensor(name).is_contiguous():  # no piece of it can be read
            return whole_parts(lambda: [weights.tensor(name)], [info.dtype], info.numel)[0]

        def read(start: int, stop: int, room: Tensor) -> Tensor:
            return weights.read(name, start, stop, room)

        if isinstance(weights, Checkpoint) and info.offset is not None:
            # A header of an odd length puts numbers at odd places: those are copied.
            view = None if info.offset % info.dtype.itemsize else partial(weights.view, name)
            ahead = partial(weights.ahead, name)
            return cls(info.dtype, read, False, partial(weights.fill, name), view, ahead)
        return cls(info.dtype, read, isinstance(weights, StateDict))


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

    @cached_property
    def in_files_alike(self) -> int | None:
        """Bytes of an element, where base and inputs have one dtype and lie in files."""
        parts = self.parts
        if self.base is None or any(p.fill is None or p.dtype != parts[0].dtype for p in parts):
            return None
        return parts[0].dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that reading it takes."""
        return self.numel * sum(part.dtype.itemsize for part in self.parts)

    def ahead(self, start: int, stop: int) -> None:
        """Elements `start` to `stop` will be read soon."""
        for part in self.parts:
            part.ahead(start, stop)

    def whole(self, part: Part) -> Tensor:
        room = torch.empty(0 if part.held else self.numel, dtype=part.dtype, device="cpu")
        return part.read(0, self.numel, room)


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

    Loaded on the first read, and dropped when as much has been read as there is. Thread-safe.
    """
    held: list[Tensor] = []
    left = 0
    lock = threading.Lock()

    def part(index: int, dtype: torch.dtype) -> Part:
        def read(start: int, stop: int, room: Tensor) -> Tensor:
            nonlocal left
            with lock:
                if not held:
                    held.extend(tensor.detach().reshape(-1) for tensor in load())
                    left = len(dtypes) * numel
                piece = held[index][start:stop]
                left -= stop - start
                if left <= 0:
                    held.clear()
            return piece

        return Part(dtype, read, held=True)

    return [part(index, dtype) for index, dtype in enumerate(dtypes)]


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


@dataclass(frozen=True)
class Stored:
    """Elements of the parts of an item, as they are stored.

    `rows` are chunks [1 + number of inputs, n] of base and inputs as one tensor, where they are
    that; then `inputs` is empty.
    """

    base: Tensor | None
    inputs: Sequence[Tensor] = ()
    rows: Sequence[Tensor] = ()


class Sink(Protocol):
    """Where `deliver` brings outputs, in order and from one thread of its own."""

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        """`values` [number of outputs, stop - start] in `item.out`, on the CPU."""


def allocate(
    *shape: int, dtype: torch.dtype, device: torch.device = CPU, pinned: bool = False
) -> Tensor:
    """Room of the engine's own: everything that `layout` counts is made here."""
    return torch.empty(*shape, dtype=dtype, device=device, pin_memory=pinned)


class TaskVectorBlocks:
    """Reads a piece and walks it in chunks of task vectors, in buffers that are allocated once.

    One instance per thread, for one layout. What is read stays in the cache of the processor that
    read it. The first `deltas` inputs are differences from the base already, as the bases of a
    store are.

    Threads pass the interpreter's lock on at every call of PyTorch, the making of a view too, and
    that takes longer than a small chunk: so the views of whole chunks are made once.
    """

    def __init__(self, layout: Layout, device: torch.device, deltas: int = 0) -> None:
        rows, self.chunk, self.room = layout.needs.rows, layout.chunk, layout.room
        self.device, self.deltas = device, deltas
        self.sizes = self.sizes_of(layout, device, deltas)
        buffer = allocate(1 + rows, self.chunk, dtype=torch.float32, device=device)
        self._whole = _Chunk(buffer, deltas)
        pinned = device.type == "cuda"  # from there the copy to the GPU is fast
        self._room = allocate(layout.room_bytes, dtype=torch.uint8, pinned=pinned)
        self._bytes = memoryview(self._room.numpy())  # type: ignore[arg-type]
        self._rooms: dict[tuple[int, torch.dtype], Stored] = {}

    @staticmethod
    def sizes_of(layout: Layout, device: torch.device, deltas: int) -> tuple[object, ...]:
        """What two instances agree in that can stand for each other."""
        return layout.needs.rows, layout.chunk, layout.room, layout.room_bytes, device, deltas

    def read(self, piece: Piece) -> Iterator[tuple[int, int, Stored]]:
        """Yield (start, stop, what is stored), by places in the piece; overwritten by the next."""
        for start in range(0, max(1, piece.numel), self.room):
            stop = min(start + self.room, piece.numel)
            yield start, stop, self._stored(piece.item, piece.start + start, piece.start + stop)
            if self.device.type != "cpu":  # what was read may still be on its way there
                torch.accelerator.current_stream(self.device).synchronize()

    def walk(
        self, piece: Piece, drawn: Callable[[int], Tensor] | None = None
    ) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Yield (start, stop, base32 [n], tau [T, n]) in float32 on the device, by places in the
        piece; both are views of buffers that the next step overwrites.

        Without a base, which only deltas can do without, base32 is zero. With `drawn`, the piece is
        of the base alone, and the next `drawn(n)` [T, n] are the task vectors.
        """
        for first, last, stored in self.read(piece):
            for number, start in enumerate(range(first, last, self.chunk)):
                stop = min(start + self.chunk, last)
                into = self._whole if stop - start == self.chunk else self._whole.part(stop - start)
                self._widen(stored, number, into)
                if drawn is not None:
                    yield start, stop, into.base, drawn(stop - start)
                    continue
                if self.deltas < len(into.tau):
                    into.models.sub_(into.base)
                yield start, stop, into.base, into.tau

    def _stored(self, item: Item, start: int, stop: int) -> Stored:
        """Every part in its own place in the room, side by side if they have one dtype."""
        parts, count, place = item.parts, stop - start, 0
        width = item.in_files_alike
        if width is None:
            read: list[Tensor] = []
            for part in parts:
                place += -place % ALIGN
                size = 0 if part.held else count * part.dtype.itemsize
                room = self._room[place : place + size].view(part.dtype)
                read.append(part.read(start, stop, room))
                place += size
            return Stored(None, read) if item.base is None else Stored(read[0], read[1:])
        for part in parts:
            assert part.fill is not None
            part.fill(start, stop, self._bytes[place : place + count * width])
            place += count * width
        kind = len(parts), parts[0].dtype
        if count == self.room and kind in self._rooms:
            return self._rooms[kind]
        rows = self._room[:place].view(parts[0].dtype).view(len(parts), count)
        stored = Stored(rows[0], rows=rows.split(self.chunk, dim=1))
        if count == self.room:
            self._rooms[kind] = stored
        return stored

    def _widen(self, stored: Stored, number: int, into: _Chunk) -> None:
        """Base and inputs of a chunk, in float32."""
        if stored.rows:
            rows = stored.rows[number]
            both = into.both if len(rows) == len(into.both) else into.both[: len(rows)]
            both.copy_(self._near(rows))
            return
        start = number * self.chunk
        chunk = slice(start, start + len(into.base))
        if stored.base is None:
            into.base.zero_()
        else:
            into.base.copy_(self._near(stored.base[chunk]))
        for row, model in zip(into.rows, stored.inputs, strict=False):
            row.copy_(self._near(model[chunk]))

    def _near(self, stored: Tensor) -> Tensor:
        # Move in the stored dtype and widen on the device: half the traffic for 16-bit models.
        return stored if self.device == CPU else stored.to(self.device, non_blocking=True)


class _Chunk:
    """Views of a float32 buffer [1 + T, n]: theta_0 and the task vectors."""

    def __init__(self, both: Tensor, deltas: int) -> None:
        self._deltas = deltas
        self.both, self.base, self.tau = both, both[0], both[1:]
        self.rows = tuple(self.tau)
        self.models = self.tau[deltas:]  # what are no differences yet

    def part(self, count: int) -> _Chunk:
        """Of the first `count` elements."""
        return _Chunk(self.both[:, :count], self._deltas)


class Operands:
    """The inputs of pieces where they are, for `kernels`. One instance per thread."""

    def __init__(self, layout: Layout) -> None:
        self._size = layout.room_bytes
        self._room: Tensor | None = None  # for what is neither in memory nor mapped
        self._mapping = Window.usable
        self._window = Window()

    def of(self, piece: Piece) -> list[Tensor]:
        """The elements of base and inputs of a piece that is not empty, on the CPU, until the next
        one is asked for."""
        parts = piece.item.parts
        try:
            self._window.clear([piece.numel * p.dtype.itemsize for p in parts if p.view])
        except OSError:
            self._mapping = False
        found = []
        place = 0
        for part in parts:
            here = self._mapped(part, piece)
            if here is None:
                size = 0 if part.held else piece.numel * part.dtype.itemsize
                here = part.read(piece.start, piece.stop, self._part(place, size, part.dtype))
                place += size + -size % ALIGN
            found.append(here.to(CPU).contiguous())
        return found

    def _mapped(self, part: Part, piece: Piece) -> Tensor | None:
        if not self._mapping or part.view is None:
            return None
        try:
            return part.view(piece.start, piece.stop, self._window)
        except OSError:  # some file systems map no files; of a bad disk, reading tells more
            return None

    def _part(self, place: int, size: int, dtype: torch.dtype) -> Tensor:
        if self._room is None and size:
            self._room = allocate(self._size, dtype=torch.uint8)
        room = allocate(0, dtype=torch.uint8) if self._room is None else self._room
        return room[place : place + size].view(dtype)


def fused(items: Sequence[Item], devices: Sequence[torch.device], *outputs: torch.dtype) -> bool:
    """Whether `kernels` can do all of them: on a CPU that has what they are compiled to, of the
    dtypes that they know."""
    if not kernels.usable():
        return False
    dtypes = {part.dtype for item in items if item.inputs for part in item.parts}
    return all(d.type == "cpu" for d in devices) and dtypes.union(outputs) <= set(kernels.KINDS)


def layout_for(
    items: Sequence[Item],
    needs: Needs,
    devices: Sequence[torch.device],
    budget: int,
    *,
    workers: int | None = None,
    longest: int = LONGEST,
) -> Layout:
    """`plan_layout`, with pieces not longer than the longest tensor."""
    most = max((item.numel for item in items), default=1)
    return plan_layout(needs, devices, budget, workers=workers, longest=min(longest, most))


def read_width(items: Sequence[Item]) -> int:
    """Bytes of one element in all parts that are read, of the widest item."""
    return max(
        (sum(p.dtype.itemsize for p in item.parts if not p.held) for item in items), default=0
    )


def in_order(
    items: Sequence[Item],
    layout: Layout,
    work: Callable[[torch.device], Callable[[Piece, int], Result]],
) -> Iterator[Result]:
    """What `work` makes of the items' pieces of at most `layout.piece` elements, in order.

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
            yield compute(0)
            return
        waiting: deque[Future[Result]] = deque()
        with ThreadPoolExecutor(len(layout.workers), "tvb-compute") as computers:
            try:
                for number, piece in enumerate(pieces):
                    if len(waiting) == layout.under_way:
                        yield waiting.popleft().result()
                    piece.item.ahead(piece.start, piece.stop)
                    waiting.append(computers.submit(compute, number))
                while waiting:
                    yield waiting.popleft().result()
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


def gram_of(
    items: Sequence[Item],
    tasks: Sequence[str],
    *,
    devices: Sequence[torch.device] = (CPU,),
    budget: int = DEFAULT_BUDGET,
    deltas: int = 0,
    sketch: Sketch | None = None,
    progress: Update = lambda nbytes: None,
    sums: GramSums | None = None,
    finished: Callable[[GramSums], object] = lambda sums: None,
    kept: int = 1,
) -> GramSums:
    """G [T, T] of the inputs of all items, float64 (see `gram`): each read once.

    Each item is summed on its own, and the sums of the items in their order: the same to the bit
    whatever the number of devices, threads and processes, and the budget unless it is very small.

    Args:
        tasks: names of the inputs, for messages.
        deltas: how many of them, at the start, are differences from the base already.
        progress: called with the bytes read.
        sums: to add to.
        finished: called with the sums of each item.
        kept: how many of them the caller keeps.

    Raises:
        UserError: NaN or infinity in an input: which, in which tensor, how many.
    """
    layout = gram_layout(items, len(tasks), devices, budget, sketch, kept)
    streams: dict[str, torch.Generator] = {}

    def fused_work(device: torch.device) -> Callable[[Piece, int], tuple[Piece, ChunkSums | None]]:
        operands, gram = Operands(layout), kernels.Gram(len(tasks), deltas)

        def add(piece: Piece, number: int) -> tuple[Piece, ChunkSums | None]:
            if not piece.numel:
                return piece, None
            found = operands.of(piece)
            inputs = kernels.Inputs.of(found, piece.item.base is not None)
            return piece, gram(inputs, piece.numel, layout.chunk)

        return add

    def work(device: torch.device) -> Callable[[Piece, int], tuple[Piece, ChunkSums | None]]:
        blocks = TaskVectorBlocks(layout, device, deltas)
        square = Products()

        def add(piece: Piece, number: int) -> tuple[Piece, ChunkSums | None]:
            name = piece.item.name
            drawn = None if sketch is None else streams.setdefault(name, sketch.stream(name))
            return piece, _chunk_sums(piece, blocks, square, sketch, drawn)

        return add

    total = GramSums.zero(len(tasks), sketch) if sums is None else sums
    one = GramSums.zero(len(tasks), sketch)
    for piece, share in in_order(items, layout, fused_work if layout.needs.fused else work):
        if share is not None:
            if not torch.isfinite(share.gram).all():
                raise UserError(_not_finite(piece.item, tasks))
            one.add(share)
            one.num_parameters += piece.numel
        progress(piece.nbytes)
        if piece.stop == piece.item.numel:
            one.end(piece.item.shape)
            total = total.plus(one)
            finished(one)
            one = GramSums.zero(len(tasks), sketch)
    return total


def gram_layout(
    items: Sequence[Item],
    tasks: int,
    devices: Sequence[torch.device],
    budget: int,
    sketch: Sketch | None,
    kept: int = 1,
) -> Layout:
    """The layout of `gram_of`."""
    columns = 0 if sketch is None else sketch.columns
    squares = tasks**2 + columns * (columns + tasks)
    # The batched products of a chunk: float32, and float64 while they are summed.
    extra = -(-12 * squares // (4 * BLOCK)) + 2 * columns
    sums = 8 * (squares + 1)
    kept = (kept + 4) * sums  # of an item, of all so far, and what adding them makes
    alike = sketch is None and fused(items, devices)
    needs = Needs(tasks, read_width(items), extra=extra, sums=sums, kept=kept, fused=alike)
    # Only one thread may draw Omega, which is one sequence in each tensor.
    return layout_for(items, needs, devices, budget, workers=1 if sketch else None)


def _chunk_sums(
    piece: Piece,
    blocks: TaskVectorBlocks,
    square: Products,
    sketch: Sketch | None,
    drawn: torch.Generator | None,
) -> ChunkSums | None:
    grams, norms, omegas, tasks = [], [], [], []
    for start, stop, base32, tau in blocks.walk(piece):
        grams.append(square(tau))
        norms.append(products(base32[None], base32[None])[0, 0])
        if sketch is not None and drawn is not None:
            omega = sketch.rows(drawn, stop - start, blocks.device)
            omegas.append(products(omega, omega))
            tasks.append(products(omega, tau))
    if not grams:
        return None
    gram, norm = symmetric(torch.stack(grams)), torch.stack(norms).cpu()
    if not omegas:
        return ChunkSums(gram, norm)
    return ChunkSums(gram, norm, symmetric(torch.stack(omegas)), torch.stack(tasks).cpu())


def _not_finite(item: Item, tasks: Sequence[str]) -> str:
    base = torch.zeros(1, device="cpu") if item.base is None else item.whole(item.base)
    return not_finite(item.name, base, (item.whole(part) for part in item.inputs), tasks)


def combine(
    items: Sequence[Item],
    matrix: Tensor,
    sink: Sink,
    *,
    devices: Sequence[torch.device] = (CPU,),
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
    widest = max((item.out.itemsize for item in items), default=4)
    drawn = 0 if sketch is None else 2 * rows
    alike = sketch is None and fused(items, devices, *(i.out for i in items if i.inputs))
    needs = Needs(rows, read_width(items), outputs * widest, extra=outputs + drawn, fused=alike)
    layout = layout_for(items, needs, devices, budget, workers=1 if sketch else None)
    streams: dict[str, torch.Generator] = {}

    def fused_work(device: torch.device) -> Callable[[Piece, Tensor], None]:
        steps = [[(1.0, column)] for column in matrix.T.cpu()]
        combining = kernels.Combining(rows, deltas, steps, add_base)
        return Fused(layout, lambda item: combining if item.inputs else None)

    def work(device: torch.device) -> Callable[[Piece, Tensor], None]:
        blocks = TaskVectorBlocks(layout, device, deltas)
        held = allocate(outputs, layout.chunk, dtype=torch.float32, device=device)
        weights = matrix.T.to(device, torch.float32)

        def act(piece: Piece, out: Tensor) -> None:
            item = piece.item
            good = not item.out.is_floating_point
            if sketch is not None:
                generator = streams.setdefault(item.name, sketch.stream(item.name))
                for start in range(0, piece.numel, layout.chunk):
                    stop = min(start + layout.chunk, piece.numel)
                    omega = sketch.rows(generator, stop - start, device)
                    out[:, start:stop].copy_(torch.mm(weights, omega, out=held[:, : stop - start]))
            elif not item.inputs:
                for start, stop, stored in blocks.read(piece):
                    assert stored.base is not None
                    out[:, start:stop].copy_(stored.base.expand(outputs, -1))
            else:
                good = True
                for start, stop, base32, tau in blocks.walk(piece):
                    values = torch.mm(weights, tau, out=held[:, : stop - start])
                    if add_base:
                        values += base32
                    out[:, start:stop].copy_(values)
                    good &= fits(values, item.out)
            if not good:
                check_output(item.name, out, item.out)

        return act

    deliver(items, layout, outputs, fused_work if alike else work, sink, progress)


class Fused:
    """What a thread does with a piece and the room [outputs, n] for its results, by `kernels`."""

    def __init__(
        self, layout: Layout, combining: Callable[[Item], kernels.Combining | None]
    ) -> None:
        self._operands, self._combining = Operands(layout), combining

    def __call__(self, piece: Piece, out: Tensor) -> None:
        """
        Raises:
            UserError: an output overflows its dtype or is not finite.
        """
        if not piece.numel:
            return
        item = piece.item
        found = self._operands.of(piece)
        combining = self._combining(item)
        if combining is None:  # it stays the base's
            out.copy_(found[0].expand_as(out))
            good = not item.out.is_floating_point
        else:
            good = combining(kernels.Inputs.of(found, item.base is not None), out)
        if not good:
            check_output(item.name, out, item.out)


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
    rooms = [allocate(outputs, layout.piece * width, dtype=torch.uint8) for _ in range(count)]

    def computing(device: torch.device) -> Callable[[Piece, int], tuple[Piece, Tensor]]:
        act = work(device)

        def fill(piece: Piece, number: int) -> tuple[Piece, Tensor]:
            room, dtype = rooms[number % len(rooms)], piece.item.out
            out = room[:, : piece.numel * dtype.itemsize].view(dtype)
            act(piece, out)
            return piece, out

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
