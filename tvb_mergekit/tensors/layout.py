"""Sizes of all that a pass over tensors allocates, from a budget of memory.

One thread reads a *piece* of a tensor and computes float32 task vectors of a *chunk* of it at a
time; `kernels` (*fused* passes) hold a few hundred columns of those. The length of a chunk changes
the last digits of float64 sums; the length of a piece does not.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

import torch

from tvb_mergekit.core.gram import BLOCK
from tvb_mergekit.errors import UserError, megabytes
from tvb_mergekit.tensors.engine import Engine

CPU_TAU = 2**20  # float32 elements of a chunk of all task vectors; 2**18 was a quarter slower
CPU_ROW = 2**17  # and of a chunk of one task vector, at most
DEVICE_TAU = 2**22  # CPU_TAU of an accelerator
READ = 8 * 2**20  # bytes of the inputs of a piece, about: they stay in the last cache
WRITTEN = 8 * 2**20  # bytes of its outputs; six pieces wait, and 16 MB gained a tenth at best
LONGEST = 16 * CPU_ROW  # elements of a piece
FUSED = (torch.bfloat16, torch.float16, torch.float32)  # dtypes that `kernels` know
COLUMNS = 1024  # columns that `kernels` hold at a time: 42 KB for 8 models fit the first cache
PADDING = 16  # columns between their rows, since rows at powers of two compete for the same places
AHEAD = 2  # pieces that wait for a thread, and that the disk is asked for
WRITES = 2  # pieces that wait to be written
MOST_WORKERS = 8  # threads that read and compute on a CPU
DEVICE_WORKERS = 4  # threads that read for an accelerator: one alone is slower than the copy to it
MEMORY = 10**9  # bytes: the default of --memory
ALIGN = 64  # bytes: each input begins at a multiple of it in a buffer


def parse_memory(text: str) -> int:
    """Bytes in `500MB`, `2GB`, `1.5GiB` or `500000000`.

    Raises:
        UserError: it is another text.
    """
    if re.fullmatch(r"\d{5,18}", text.strip()):
        return int(text)
    found = re.fullmatch(r"(\d{1,9}(?:\.\d+)?) ?([KMGT])(i?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise UserError(f"a size of `{text}`: expected a number and a unit, such as 500MB or 2GB")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(unit.upper()) + 1))


@dataclass(frozen=True)
class Needs:
    """Memory of a pass.

    Attributes:
        rows: number of inputs, each a float32 row of a chunk in every thread.
        inputs: bytes of one element of base and inputs together, as they are read.
        outputs: bytes of one element of all outputs, as they are written.
        extra: more float32 rows of a chunk in every thread, for results.
        sums: bytes of the sums of a chunk.
        kept: bytes that do not depend on pieces.
        fused: whether `kernels` work on the pieces, a few hundred columns at a time.
    """

    rows: int
    inputs: int
    outputs: int = 0
    extra: int = 0
    sums: int = 0
    kept: int = 0
    fused: bool = False


@dataclass(frozen=True)
class Layout:
    """The sizes of one pass in elements, and the device of each thread that computes."""

    needs: Needs
    chunk: int
    piece: int  # a multiple of `chunk`
    workers: tuple[torch.device, ...]

    @property
    def under_way(self) -> int:
        """Pieces that are computed or wait, at a time."""
        return AHEAD + len(self.workers)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of base and inputs of a piece, each aligned."""
        needs = self.needs
        return self.piece * needs.inputs + ALIGN * (needs.rows + 1) if needs.inputs else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the pass."""
        needs, pieces, workers = self.needs, self.under_way, len(self.workers)
        read = workers * self.buffer_bytes
        written = (pieces + WRITES) * self.piece * needs.outputs if needs.outputs else 0
        rows = needs.rows + 1 + needs.extra
        held = (COLUMNS + PADDING) * (rows + 6) if needs.fused else self.chunk * rows
        computed = workers * 4 * held
        # Sums of a piece: a kept one, one that is added up, and three to compute one.
        summed = (pieces + 1 + 3 * workers) * (self.piece // self.chunk) * needs.sums
        return read + written + computed + summed + needs.kept


def chunk_length(rows: int, kind: str) -> int:
    """Elements of a chunk of `rows` task vectors on a device of this kind; a power of two."""
    if kind == "cpu":
        return _blocks(min(CPU_ROW, CPU_TAU // max(1, rows)))
    return _blocks(DEVICE_TAU // max(1, rows))


def device_of(name: torch.device | str) -> torch.device:
    """The device of this name.

    Raises:
        UserError: the device is missing here, or lacks float64.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, dtype=torch.float64, device=device).item()
    except (RuntimeError, AssertionError, TypeError, ImportError) as error:
        reason = textwrap.shorten(str(error).partition("\n")[0].partition(". ")[0], 100)
        raise UserError(
            f"device `{name}` cannot be used here: {reason}; name another, such as cpu"
        ) from error
    return device


def accelerators() -> list[torch.device]:
    """All accelerators of this machine.

    Raises:
        UserError: there is none.
    """
    if not torch.accelerator.is_available():
        raise UserError("--multi-gpu: PyTorch sees no accelerator on this machine; leave it out")
    kind = torch.accelerator.current_accelerator()
    return [torch.device(f"{kind}:{i}") for i in range(torch.accelerator.device_count())]


def worker_count(device: torch.device) -> int:
    """Threads that read and compute, each a piece of its own.

    Threads within one PyTorch operation cost more than they gain on chunks that fit a cache.
    """
    if device.type == "cpu":
        return min(torch.get_num_threads(), MOST_WORKERS)
    return DEVICE_WORKERS


def plan_layout(
    needs: Needs,
    engine: Engine,
    *,
    workers: int | None = None,
    longest: int = LONGEST,
    block: int = 0,
    grain: int = 1,
) -> Layout:
    """The longest pieces and the most threads that the engine's memory holds.

    Shorter pieces and fewer threads come before smaller chunks, so that the result does not depend
    on the budget unless it is very small.

    Args:
        workers: the most threads; None: as many as the devices can use.
        longest: the longest piece, in elements.
        block: the elements that every chunk must have; 0: as many as are useful.
        grain: elements that are decoded together, a power of two. Pieces begin at its multiples,
            if memory holds such pieces.

    Raises:
        UserError: the budget does not hold the smallest pieces.
    """
    devices, budget = engine.devices, engine.budget
    groups = [[device] * worker_count(device) for device in devices]
    # The devices in turn: fewer threads still use all of them.
    threads = [d for d in chain.from_iterable(zip_longest(*groups)) if d is not None][:workers]
    chunk = block or chunk_length(needs.rows, devices[0].type)
    if devices[0].type != "cpu":  # a piece is copied there at once
        longest = max(chunk, grain)
    least = Layout(needs, chunk, chunk, tuple(threads))
    while least.nbytes > budget:
        if len(least.workers) > 1:
            least = replace(least, workers=least.workers[:-1])
        elif chunk > BLOCK and not block:
            chunk = _blocks(chunk // 2)
            least = replace(least, chunk=chunk, piece=chunk)
        else:
            raise UserError(
                f"{megabytes(budget)} of memory are too little for {needs.rows} models at a time: "
                f"{megabytes(least.nbytes + 10**5)} are needed; raise --memory (mergekit's "
                "commands: TVB_MERGEKIT_BLOCK_MB)"
            )
    # Memory grows linearly with a piece. Pieces longer than READ and WRITTEN save time only if an
    # input is decoded in blocks. So memory is else the same for few models and for many.
    more = replace(least, piece=2 * chunk).nbytes - least.nbytes
    fitting = least.piece + (budget - least.nbytes) // max(1, more) * chunk
    useful = min(READ // max(1, needs.inputs), WRITTEN // max(1, needs.outputs))
    most = min(longest, fitting, max(useful, grain))
    step = chunk if most < grain else max(chunk, grain)
    return replace(least, piece=max(1, most // step) * step)


def _blocks(length: int) -> int:
    """The largest power of two up to `length`, at least BLOCK."""
    return int(max(BLOCK, 2 ** (length.bit_length() - 1)))
