"""The Gram matrix G = T^T T of the task vectors, tensor by tensor, in bounded blocks.

Task vectors are formed in float32 from the stored dtypes; products of 2048 columns are summed in
float32 inside one matrix product and in float64 from there on (relative error of the trace about
3e-7, against 3e-4 for whole tensors in float32).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event

import torch
from torch import Tensor

from tvb_mergekit.errors import UserError
from tvb_mergekit.progress import Update

BLOCK = 2048  # columns that one float32 matrix product sums over
CPU_CHUNK = 2**17  # elements: chunks of T x 0.5 MB stay in the processor's cache
BUDGET_VARIABLE = "TVB_MERGEKIT_BLOCK_MB"
DEFAULT_BUDGET = 256 * 2**20  # bytes


@dataclass(frozen=True)
class Slot:
    """One tensor of the merge that counts in the Gram matrix.

    `load()` gives the base's tensor and the T models' tensors, one shape, any floating dtype,
    mapped or in memory, in the order of the tasks.
    """

    name: str
    numel: int
    nbytes: int  # of base and models together, as stored
    load: Callable[[], tuple[Tensor, Sequence[Tensor]]]


@dataclass
class GramSums:
    """Sums over tensors: `gram` [T, T] and, for random projections, `sketch_gram` [M, M] =
    Omega^T Omega and `sketch_tasks` [M, T] = Omega^T T; all float64 on the CPU."""

    gram: Tensor
    base_norm_squared: float = 0.0
    num_parameters: int = 0
    sketch_gram: Tensor | None = None
    sketch_tasks: Tensor | None = None

    def add(self, other: GramSums) -> None:
        self.gram += other.gram
        self.base_norm_squared += other.base_norm_squared
        self.num_parameters += other.num_parameters
        if other.sketch_gram is not None and other.sketch_tasks is not None:
            assert self.sketch_gram is not None and self.sketch_tasks is not None
            self.sketch_gram += other.sketch_gram
            self.sketch_tasks += other.sketch_tasks

    def scaled(self, weights: Sequence[float]) -> GramSums:
        """The same sums for task vectors scaled by `weights` [T]: exact, since G is bilinear."""
        w = torch.tensor(weights, dtype=torch.float64, device="cpu")
        tasks = None if self.sketch_tasks is None else self.sketch_tasks * w
        gram = self.gram * torch.outer(w, w)
        return GramSums(gram, self.base_norm_squared, self.num_parameters, self.sketch_gram, tasks)


@dataclass(frozen=True)
class Sketch:
    """A d x M Gaussian matrix Omega that is never held: rows come from (seed, tensor name)."""

    columns: int
    seed: int

    def stream(self, tensor_name: str) -> torch.Generator:
        """A generator for one tensor's rows; draw them with `rows` in order, BLOCK at a time."""
        text = hashlib.sha256(f"{self.seed}:{tensor_name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(text[:8], "little") >> 1)

    def rows(self, generator: torch.Generator, count: int, device: torch.device) -> Tensor:
        """The next `count` rows, transposed: [M, count] float32 on `device`.

        Always drawn on the CPU and in blocks of BLOCK rows, so that Omega does not depend on the
        device or on the block budget.
        """
        blocks = [
            torch.randn(self.columns, BLOCK, generator=generator, device="cpu")
            for _ in range(-(-count // BLOCK))
        ]
        return torch.cat(blocks, dim=1)[:, :count].to(device)


def block_budget() -> int:
    """Bytes that the working buffers of one device may take: TVB_MERGEKIT_BLOCK_MB, or 256 MB.

    Raises:
        UserError: the variable is not a number of at least 1.
    """
    text = os.environ.get(BUDGET_VARIABLE, "")
    if not text:
        return DEFAULT_BUDGET
    try:
        megabytes = float(text)
    except ValueError:
        megabytes = 0.0
    if not 1 <= megabytes < float("inf"):
        raise UserError(f"{BUDGET_VARIABLE} is `{text}`; expected megabytes, 1 or more")
    return int(megabytes * 2**20)


def chunk_length(rows: int, device: torch.device, budget: int) -> int:
    """Elements per chunk so that `rows` float32 buffers of it fit the budget; a multiple of BLOCK.

    On a CPU not more than CPU_CHUNK: sixteen times larger or smaller chunks were measured to be
    two to ten times slower.
    """
    length = budget // (4 * rows)
    if device.type == "cpu":
        length = min(length, CPU_CHUNK)
    return max(BLOCK, length // BLOCK * BLOCK)


class TaskVectorBlocks:
    """Walks one tensor in chunks of task vectors, in buffers that are allocated once.

    Each step yields (start, stop, base32 [n], tau [T, n]) in float32 on `device`; both are views
    of buffers that the next step overwrites. One instance per thread. The first `deltas` models
    are differences from the base already, as the bases of a store are.
    """

    def __init__(
        self,
        tasks: int,
        device: torch.device,
        budget: int,
        extra_rows: int = 0,
        deltas: int = 0,
    ) -> None:
        self.device = device
        self.deltas = deltas
        self.chunk = chunk_length(tasks + 2 + extra_rows, device, budget)
        self._tau = torch.empty(tasks, self.chunk, dtype=torch.float32, device=device)
        self._base = torch.empty(self.chunk, dtype=torch.float32, device=device)

    def walk(
        self, base: Tensor | None, models: Sequence[Tensor]
    ) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Yield the chunks of one tensor; see the class. Without a base, which only deltas can do
        without, base32 is zero."""
        flat = [model.reshape(-1) for model in models]
        whole = flat[0] if base is None else base.reshape(-1)
        for start in range(0, whole.numel(), self.chunk):
            stop = min(start + self.chunk, whole.numel())
            base32 = self._base[: stop - start]
            if base is None:
                base32.zero_()
            else:
                base32.copy_(self._near(whole[start:stop]))
            tau = self._tau[:, : stop - start]
            for index, (row, model) in enumerate(zip(tau, flat, strict=True)):
                row.copy_(self._near(model[start:stop]))
                if index >= self.deltas:
                    row.sub_(base32)
            yield start, stop, base32, tau

    def _near(self, piece: Tensor) -> Tensor:
        # Move in the stored dtype and widen on the device: half the traffic for 16-bit models.
        return piece.to(self.device, non_blocking=True)


def tensor_sums(
    name: str,
    base: Tensor | None,
    models: Sequence[Tensor],
    blocks: TaskVectorBlocks,
    sketch: Sketch | None = None,
    generator: torch.Generator | None = None,
) -> GramSums:
    """The share of one tensor in the sums, unweighted. Not finite where an input is not finite.

    A tensor may come in pieces of whole BLOCKs, with one `generator` (`sketch.stream`) for all.
    """
    tasks, device = len(models), blocks.device
    sums = GramSums(torch.zeros(tasks, tasks, dtype=torch.float64, device=device))
    norm = torch.zeros((), dtype=torch.float64, device=device)
    if sketch is not None:
        generator = generator or sketch.stream(name)
        rank = sketch.columns
        sums.sketch_gram = torch.zeros(rank, rank, dtype=torch.float64, device=device)
        sums.sketch_tasks = torch.zeros(rank, tasks, dtype=torch.float64, device=device)
    for start, stop, base32, tau in blocks.walk(base, models):
        sums.gram += _block_products(tau, tau)
        norm += torch.dot(base32, base32).double()
        if sketch is not None and generator is not None:
            omega = sketch.rows(generator, stop - start, device)
            assert sums.sketch_gram is not None and sums.sketch_tasks is not None
            sums.sketch_gram += _block_products(omega, omega)
            sums.sketch_tasks += _block_products(omega, tau)
    sums.gram = _symmetric(sums.gram)
    if sums.sketch_gram is not None and sums.sketch_tasks is not None:
        sums.sketch_gram = _symmetric(sums.sketch_gram)
        sums.sketch_tasks = sums.sketch_tasks.cpu()
    sums.base_norm_squared = float(norm)
    sums.num_parameters = (models[0] if base is None else base).numel()
    return sums


def _symmetric(square: Tensor) -> Tensor:
    # Not every matrix product gives X X^T symmetric to the bit (AVX2 and cuBLAS do not).
    return ((square + square.T) / 2).cpu()


def _block_products(left: Tensor, right: Tensor) -> Tensor:
    """left @ right^T in float64: whole BLOCKs by one batched product, and the rest."""
    whole = left.shape[1] // BLOCK * BLOCK
    total = torch.zeros(left.shape[0], right.shape[0], dtype=torch.float64, device=left.device)
    if whole:
        batch = left[:, :whole].unflatten(1, (-1, BLOCK)).transpose(0, 1)
        other = right[:, :whole].unflatten(1, (-1, BLOCK)).permute(1, 2, 0)
        total += torch.bmm(batch, other).sum(0, dtype=torch.float64)
    if whole < left.shape[1]:
        total += (left[:, whole:] @ right[:, whole:].T).double()
    return total


def gram_pass(
    slots: Sequence[Slot],
    tasks: Sequence[str],
    *,
    devices: Sequence[torch.device] = (torch.device("cpu"),),
    budget: int = DEFAULT_BUDGET,
    sketch: Sketch | None = None,
    progress: Update = lambda nbytes: None,
) -> GramSums:
    """Sum over all slots, each read once; one worker thread per device.

    Args:
        slots: the tensors that count; at most one is loaded per device at a time.
        tasks: names of the T tasks, for messages.
        budget: bytes of working buffers per device.
        progress: called with the stored bytes of each finished slot.

    Raises:
        UserError: NaN or infinity in a tensor (which model, which tensor, how many), or shapes
            that differ.
    """
    shares: dict[str, GramSums] = {}
    extra = 0 if sketch is None else 2 * sketch.columns

    def work(device: torch.device) -> Callable[[Slot], None]:
        blocks = TaskVectorBlocks(len(tasks), device, budget, extra)

        def add(slot: Slot) -> None:
            base, models = slot.load()
            check_shapes(slot.name, base, models, tasks)
            share = tensor_sums(slot.name, base, models, blocks, sketch)
            if not torch.isfinite(share.gram).all():
                raise UserError(not_finite(slot.name, base, models, tasks))
            shares[slot.name] = share

        return add

    each_slot(slots, devices, work, progress)
    total = zero_sums(len(tasks), sketch)
    for slot in slots:  # in the order of the slots: the same sum however the work was shared
        total.add(shares[slot.name])
    return total


def each_slot(
    slots: Sequence[Slot],
    devices: Sequence[torch.device],
    work: Callable[[torch.device], Callable[[Slot], None]],
    progress: Update,
) -> None:
    """Give every slot to `work(device)`, one thread per device, and tell `progress` its bytes.

    The first error stops all threads after their current slot and is raised.
    """
    todo: SimpleQueue[Slot] = SimpleQueue()
    for slot in slots:
        todo.put(slot)
    failed = Event()

    def run(device: torch.device) -> None:
        try:
            act = work(device)
            while not failed.is_set():
                slot = todo.get_nowait()
                act(slot)
                progress(slot.nbytes)
        except Empty:
            return
        except BaseException:
            failed.set()
            raise

    if len(devices) == 1:
        return run(devices[0])
    with ThreadPoolExecutor(len(devices)) as pool:
        try:
            for done in [pool.submit(run, device) for device in devices]:
                done.result()
        except BaseException:  # Ctrl-C too: the pool waits for its threads
            failed.set()
            raise


def zero_sums(tasks: int, sketch: Sketch | None) -> GramSums:
    sums = GramSums(torch.zeros(tasks, tasks, dtype=torch.float64, device="cpu"))
    if sketch is not None:
        sums.sketch_gram = torch.zeros(
            sketch.columns, sketch.columns, dtype=torch.float64, device="cpu"
        )
        sums.sketch_tasks = torch.zeros(sketch.columns, tasks, dtype=torch.float64, device="cpu")
    return sums


def check_shapes(name: str, base: Tensor, models: Sequence[Tensor], tasks: Sequence[str]) -> None:
    """Raise UserError where a model's tensor has another shape than the base's."""
    for task, model in zip(tasks, models, strict=True):
        if model.shape != base.shape:
            raise UserError(shapes_differ(name, task, tuple(model.shape), tuple(base.shape)))


def shapes_differ(name: str, task: str, found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """The message for a tensor whose shape is not the base's."""
    return (
        f"tensor `{name}`: task `{task}` has shape {list(found)}, the base {list(expected)}; "
        f"leave it to the base with `exclude: {name.split('.')[-2] if '.' in name else name}`, or "
        "for a changed vocabulary align it with `tokenizer_source: base`"
    )


def not_finite(
    name: str, base: Tensor, models: Sequence[Tensor] = (), tasks: Sequence[str] = ()
) -> str:
    """The message that says which of the inputs of one tensor holds NaN or infinity.

    Without `models` the tensor is one that stays the base's.
    """
    remedy = "take another, or leave the tensor out with `exclude`" if models else "take another"
    for who, tensor in [
        ("the base", base),
        *((f"task `{t}`", m) for t, m in zip(tasks, models, strict=True)),
    ]:
        nan, inf = count_not_finite(tensor)
        if nan or inf:
            return (
                f"tensor `{name}` of {who} holds {nan:,} NaN and {inf:,} infinite values of "
                f"{tensor.numel():,}; this checkpoint is damaged or its training diverged: "
                f"{remedy}"
            )
    return (
        f"tensor `{name}`: the products of its task vectors overflow float32; the models are "
        "not fine-tuned from this base"
    )


def count_not_finite(tensor: Tensor) -> tuple[int, int]:
    """Numbers of NaN and of infinite entries, counted in chunks of bounded size."""
    nan = inf = 0
    for piece in tensor.reshape(-1).split(CPU_CHUNK):
        if piece.dtype.itemsize == 1:  # no comparisons are defined for 8-bit floats
            piece = piece.float()
        if not torch.isfinite(piece).all():
            nan += int(torch.isnan(piece).sum())
            inf += int(torch.isinf(piece).sum())
    return nan, inf
