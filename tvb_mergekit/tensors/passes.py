"""One loop for every pass over the models: a few threads read pieces of tensors, and compute.

A thread has memory of its own. A piece has a known place in the output. So pieces are read,
computed and written in any order. Sums are added in the order of the pieces, whose length does not
depend on the threads: any number of them gives the same bits.

Memory is PIECE float32 numbers for each thread, and four times as many bytes pinned for a GPU. Trim
has a table of each basis too. Blocks of very many vectors (`grain`), and tensors that are loaded
complete, take more.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tvb_mergekit.core.basis import Step, check_output
from tvb_mergekit.core.gram import NO_TENSOR, GramSums, not_finite, products, squares, symmetric
from tvb_mergekit.core.methods.ties import BINS, count_magnitudes
from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.stream import Engine, Item, Part, Sink

PIECE = 2**22  # float32 numbers that a thread holds: 16 MB; 8 MB took a third longer
SHORTEST = 2**12  # elements of a piece, except the last of a tensor; a power of two, as all
THREADS = 8  # at most, on a CPU
DEVICE_THREADS = 4  # that read for an accelerator: one alone is slower than the copy to it
AHEAD = 2  # results that may wait for an earlier one
LOCK, OPEN = threading.Lock(), list[int]()  # PyTorch's threads before each open pass
Result = TypeVar("Result")
Found = tuple[Tensor, Tensor]  # of `RunningSums`, in a piece
Read = Callable[["Piece"], tuple[Tensor, Tensor]]  # see `reader`


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of an item: one task of one thread."""

    item: Item
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def stored(self, part: Part, memory: Tensor | None = None) -> Tensor:
        """Elements [n] of a part; see `Part.between`."""
        return part.between(self.start, self.stop, memory)


def reader(rows: int, length: int, device: torch.device) -> Read:
    """A function with memory for one thread: theta_0 [n] and the task vectors [T, n] of a piece.

    Both are float32 on the device, until the next call. theta_0 is 0 if the item has no base.
    """
    values, gpu = torch.empty(rows, length, device=device), device.type != "cpu"
    # A copy to an accelerator goes on while this thread fills the other buffer. Tensors of a CPU
    # are widened at once, so that one row is enough.
    shape, pinned = (rows if gpu else 1, 8 * length), device.type == "cuda"
    # Each with the event after the last copy from it.
    buffers = deque[tuple[Tensor, torch.Event | None]](
        (torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=pinned), None)
        for _ in range(1 + gpu)
    )

    def read(piece: Piece) -> tuple[Tensor, Tensor]:
        item, event = piece.item, None
        memory, copied = buffers.popleft()
        if copied is not None:
            copied.synchronize()
        found = values[: 1 + len(item.inputs), : piece.numel]
        if item.base is None:
            found[0].zero_()
        for place, part in enumerate(item.parts, item.base is None):
            row = found[place]
            own = not gpu and part.dtype == row.dtype  # read into its place
            room = row.view(torch.uint8) if own else memory[place % len(memory)]
            stored = piece.stored(part, room)
            if stored.data_ptr() != row.data_ptr():
                # Moved as it is stored, and widened there: half the traffic for 16 bits.
                row.copy_(stored.to(device, non_blocking=gpu))
            if place and part.holds == "weight":
                row.sub_(found[0])
        if gpu:
            event = torch.accelerator.current_stream(device).record_event()
        buffers.append((memory, event))
        return found[0], found[1:]

    return read


def share_of(items: Sequence[Item]) -> list[Item]:
    """The items that this process reads: a run of them, perhaps empty, balanced by bytes.

    The middle of an item decides its run, so that no run exceeds its part by more than one item.
    """
    ranks.agree([[item.name, list(item.shape), item.nbytes] for item in items])
    own, size = ranks.place()
    ends = [0, *itertools.accumulate(item.nbytes for item in items)]
    owners = [sum(pair) * size // (2 * ends[-1] or 1) for pair in itertools.pairwise(ends)]
    # The last one reads empty tensors at the end too.
    return [i for i, rank in zip(items, owners, strict=True) if min(rank, size - 1) == own]


def run(
    items: Sequence[Item],
    work: Callable[[Piece, Read], Result],
    engine: Engine,
    title: str,
    extra: int = 0,
    grain: int = 1,
) -> Iterator[tuple[Piece, Result]]:
    """Yield each piece of the items with `work(piece, read)`, in order.

    Args:
        extra: float32 rows that `work` needs beside theta_0 and the task vectors.
        grain: pieces begin at its multiples; a power of two.
    """
    update = engine.progress(title, sum(item.nbytes for item in items))
    rows = 1 + max((len(item.inputs) for item in items), default=0)
    grain = max([grain, *(part.grain for item in items for part in item.parts)])
    length = max(2 ** ((PIECE // (rows + extra)).bit_length() - 1), SHORTEST, grain)
    longest = min(length, max((item.numel for item in items), default=0))
    local, device = threading.local(), engine.device

    def act(piece: Piece) -> Result:
        if not hasattr(local, "read"):
            if device.type == "cpu":
                torch.set_num_threads(1)
            local.read = reader(rows, longest, device)
        with torch.no_grad():
            return work(piece, local.read)

    def pieces() -> Iterator[Piece]:
        for item in items:
            item = item.loaded()
            stop = item.first + item.numel
            # An empty tensor is one piece.
            for start in range(item.first, max(item.first + 1, stop), length):
                yield Piece(item, start, min(start + length, stop))

    with LOCK:  # a pass in another thread has set 1, which is not the process's number
        before = OPEN[0] if OPEN else torch.get_num_threads()
        OPEN.append(before)
    threads = min(before, THREADS) if device.type == "cpu" else DEVICE_THREADS
    waiting: deque[tuple[Piece, Future[Result]]] = deque()
    pool = ThreadPoolExecutor(threads, "tvb-pass")
    try:
        for piece in itertools.chain(pieces(), [None] * (threads + AHEAD)):
            if piece is not None:
                waiting.append((piece, pool.submit(act, piece)))
            if waiting and (piece is None or len(waiting) > threads + AHEAD):
                done, future = waiting.popleft()
                yield done, future.result()
                update(done.numel * sum(part.dtype.itemsize for part in done.item.parts))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        with LOCK:
            OPEN.pop()
            torch.set_num_threads(before)  # of the threads that begin later


class RunningSums:
    """Sums over the task vectors of a pass: ||tau_i||^2, ||theta_0||^2, and with `inner` all of G.

    Each tensor is summed on its own, and the tensors' sums in order, also over several processes.

    `tasks` are the names of the inputs, for messages.
    """

    def __init__(self, tasks: Sequence[str], inner: bool = True) -> None:
        self.tasks, self.inner = tasks, inner
        self._open = list[Found]()  # of the tensor that is read, on the device
        self._each: list[GramSums] = []  # of complete tensors

    def of(self, item: Item, base: Tensor, tau: Tensor) -> Found | None:
        """G (or its diagonal) of a piece [T, T] and ||theta_0||^2, float64 on the device.

        None of a tensor's second name.
        """
        if item.counted_as not in (None, item.name):
            return None
        own = products(tau) if self.inner else squares(tau).diag()
        return own, squares(base[None])[0]

    def add(self, piece: Piece, found: Found | None) -> None:
        """Add what `of` found in the next piece. Raise UserError if an input is not finite."""
        item = piece.item
        self._open += [found] if found else []
        if not found or piece.stop < item.first + item.numel:
            return
        own, base_squares = (torch.stack(each).sum(0) for each in zip(*self._open, strict=True))
        gram, square = symmetric(own), float(base_squares)
        self._open = []
        if not torch.isfinite(gram).all():
            raise UserError(_not_finite(item, self))
        # A random sample's squares are 1 / share times too large on average.
        gram.diagonal().mul_(gram.new_tensor([part.share for part in item.inputs]))
        self._each.append(GramSums(gram, square, item.numel, self.inner))

    def total(self) -> GramSums:
        """The sums of all processes, in the order of the tensors."""
        every = ranks.collect(self._each)
        zero = GramSums.zero(len(self.tasks), self.inner)
        return functools.reduce(GramSums.plus, [sums for each in every for sums in each], zero)


def gram_pass(items: Sequence[Item], tasks: Sequence[str], engine: Engine = Engine()) -> GramSums:
    """G [T, T] of the inputs of all items, float64; `tasks` are their names, for messages."""
    items, sums = [item for item in items if item.numel], RunningSums(tasks)
    if not items:
        raise UserError(NO_TENSOR)

    def work(piece: Piece, read: Read) -> Found | None:
        return sums.of(piece.item, *read(piece))

    for piece, found in run(share_of(items), work, engine, "Gram matrix"):
        sums.add(piece, found)
    return sums.total()


def count_pass(
    encoder: Tensor,
    items: Sequence[Item],
    engine: Engine = Engine(),
    sums: RunningSums | None = None,
) -> Tensor:
    """The histogram [M, BINS] of the bases B = T @ encoder in all items; `sums` of this pass."""
    weights, count = encoder.T.to(engine.device, torch.float32), encoder.shape[1]
    total = torch.zeros(count, BINS, dtype=torch.int64, device="cpu")
    tables = dict[int, Tensor]()  # of each thread, 9 MB a basis

    def work(piece: Piece, read: Read) -> Found | None:
        base, tau = read(piece)
        if (thread := threading.get_ident()) not in tables:
            tables[thread] = torch.zeros_like(total, device=engine.device)
        count_magnitudes(tables[thread], weights @ tau)
        return sums.of(piece.item, base, tau) if sums else None

    # extra: the bins of one basis are int32, their ones int64
    for piece, found in run(items, work, engine, "Trim thresholds", extra=count + 3):
        if sums is not None:
            sums.add(piece, found)
    for table in tables.values():
        total += table.cpu()
    return total


def combine_pass(
    items: Sequence[Item],
    steps: Mapping[str, Step],
    sink: Sink,
    engine: Engine = Engine(),
    *,
    title: str = "Merged model",
    sums: RunningSums | None = None,
) -> None:
    """Combine theta_0 and the task vectors of each item by its step.

    Task vectors are formed and combined in float32, and cast once to `item.out`.

    Args:
        steps: item -> step, all with the same number of outputs. An item without a step stays the
            base's: one output, for all.
        sums: of the task vectors, by the same pass; every input counts.
    """
    extra = max((step.rows for step in steps.values()), default=1)
    on_device = functools.cache(lambda step: step.on(engine.device))

    def work(piece: Piece, read: Read) -> Found | None:
        item, found = piece.item, None
        if (step := steps.get(item.name)) is None:
            stored = piece.stored(item.parts[0])  # nothing else is read
            values = stored.to(item.out)[None]
            if values.dtype != stored.dtype and values.is_floating_point():
                if (torch.isfinite(values) != torch.isfinite(stored.float())).any():
                    check_output(item.name, values, item.out)  # a finite value overflows
        else:
            base, tau = read(piece)
            found = sums.of(item, base, tau) if sums else None
            values = on_device(step)(base, tau).to(item.out).cpu()
            try:
                check_output(item.name, values, item.out)
            except UserError as error:
                if torch.isfinite(base).all() and torch.isfinite(tau).all():
                    raise
                raise UserError(_not_finite(item, sums)) from error
        sink(item, piece.start, piece.stop, values.cpu())  # a held base may be on a GPU
        return found

    for piece, found in run(items, work, engine, title, extra):
        if sums is not None:
            sums.add(piece, found)


def _not_finite(item: Item, sums: RunningSums | None) -> str:
    """A message that names the input with NaN or infinity."""
    tasks = map(str, range(1, 1 + len(item.inputs))) if sums is None else sums.tasks
    whose = ["the base"] * (item.base is not None) + [f"task `{task}`" for task in tasks]
    return not_finite(item.name, zip(whose, map(item.whole, item.parts), strict=True))
