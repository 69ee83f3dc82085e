"""Factors of streamed task vectors, one matrix after the other, in the file of a LoRA adapter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from tvb_mergekit.core.gram import PIECE
from tvb_mergekit.core.lora import EXACT, Factors, factor_bytes, share_ranks, truncate
from tvb_mergekit.core.matrices import singular_values
from tvb_mergekit.core.merge import Linear
from tvb_mergekit.errors import UserError, megabytes
from tvb_mergekit.progress import silent
from tvb_mergekit.tensors.adapter import PREFIX
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.matrices import stacked_bases
from tvb_mergekit.tensors.passes import LEAST, combine_pass
from tvb_mergekit.tensors.source import Weights
from tvb_mergekit.tensors.stream import Item
from tvb_mergekit.tensors.writing import header_of

METADATA = {"format": "pt"}
_WIDE = torch.float64
ZERO, SMALL = "no change", "no direction is worth its bytes"
Shapes = dict[str, tuple[torch.dtype, Sequence[int]]]
Parts = Sequence[tuple[float, Weights]]  # scales and adapters of a sum


@dataclass(frozen=True)
class Truncation:
    """The size of an adapter, one of three: a rank for all matrices, a share of energy, bytes."""

    rank: int | None = None
    energy: float | None = None
    nbytes: int | None = None


@dataclass(frozen=True, eq=False)
class Target:
    """A matrix that an adapter changes.

    Attributes:
        module: PEFT's name.
        transposed: The base stores it as [in, out], as GPT-2's Conv1D does.
    """

    item: Item
    module: str
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        rows, columns = self.item.shape
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def keys(self) -> tuple[str, str]:
        """The names of B [out, r] and A [r, in]."""
        return f"{PREFIX}{self.module}.lora_B.weight", f"{PREFIX}{self.module}.lora_A.weight"


@dataclass(frozen=True)
class Factored:
    """A tensor of a task vector in an adapter.

    Attributes:
        rank: 0 without factors.
        nbytes: Its bytes in the adapter.
        square, error: Squared norms, of the tensor and of its difference from the adapter's.
        reason: Why it has no factors.
    """

    name: str
    rank: int
    nbytes: int
    square: float
    error: float
    reason: str = ""

    def as_json(self) -> dict[str, object]:
        error = math.sqrt(self.error / (self.square or 1.0))
        said = {"rank": self.rank, "bytes": self.nbytes, "norm": math.sqrt(self.square)}
        return {**said, "relative_error": error, **({"reason": self.reason} if self.reason else {})}


class AdapterFile:
    """A safetensors file, written tensor by tensor, also as a `stream.Sink`. Its header comes last.

    Args:
        most: The tensors, or more, in their largest shapes: they decide the room for the header.
    """

    def __init__(self, path: Path, most: Shapes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.room, self.tensors = len(header_of(METADATA, most)), Shapes()
        self._file = cast(BinaryIO, path.open("wb"))
        self._file.seek(self.room)

    def add(self, name: str, values: Tensor) -> None:
        self.tensors[name] = values.dtype, tuple(values.shape)
        self._put(values)

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        self.tensors[item.name] = item.out, item.shape
        self._put(values[0])

    def _put(self, values: Tensor) -> None:
        flat = values.reshape(-1).contiguous()
        self._file.write(cast(bytes, flat.view(torch.uint8).numpy().data))

    def close(self) -> None:
        """Write the header. Without it no reader accepts the file."""
        self._file.seek(0)
        self._file.write(header_of(METADATA, self.tensors, self.room))
        self._file.close()


def shapes_of(targets: Sequence[Target], ranks: Sequence[int], dtype: torch.dtype) -> Shapes:
    """The tensors of an adapter with these ranks."""
    shapes: Shapes = {}
    for target, rank in zip(targets, ranks, strict=True):
        if rank:
            (left, right), (out, into) = target.keys, target.shape
            shapes |= {left: (dtype, (out, rank)), right: (dtype, (rank, into))}
    return shapes


def choose_ranks(
    targets: Sequence[Target],
    column: Tensor,
    size: Truncation,
    dtype: torch.dtype,
    parts: Parts,
    engine: Engine,
) -> list[int]:
    """The rank of each matrix: the same for all, the sum of its parts, or by energy or bytes.

    Raises:
        UserError: The bytes hold no direction, or the engine's memory does not hold a matrix.
    """
    sides = [min(target.shape) for target in targets]
    ranks = [min(size.rank or max(sides), max(sides))] * len(targets)
    for target, rank in zip(targets, ranks, strict=True):
        needed = factor_bytes(target.shape, rank) + LEAST
        if engine.memory is not None and needed > engine.memory:
            raise UserError(
                f"{megabytes(engine.memory)} of memory are too little: the factors of tensor "
                f"`{target.item.name}`, {list(target.shape)}, take {megabytes(needed)}; raise "
                "--memory"
            )
    if parts:
        held = [[_rank_in(part, target) for _, part in parts] for target in targets]
        if size.rank is not None:  # one rank in all matrices
            held = [
                [rank * any(each) for _ in parts] for each, rank in zip(held, ranks, strict=True)
            ]
        return [sum(each) for each in held]
    if size.rank is not None:
        return ranks
    made = _matrices(targets, column, ranks, engine, "Singular values")
    values = [singular_values(matrix).cpu() for _, matrix in made]
    costs = [sum(target.shape) * dtype.itemsize for target in targets]
    if size.nbytes is None:
        return share_ranks(values, costs, energy=size.energy or 1.0)
    header = len(header_of(METADATA, shapes_of(targets, sides, dtype)))
    ranks = share_ranks(values, costs, budget=size.nbytes - header)
    if not any(ranks) and any(float(each.sum()) for each in values):
        raise UserError(
            f"--size: {megabytes(size.nbytes)} are too little for this adapter: its header takes "
            f"{megabytes(header)}, and one direction of a matrix up to {megabytes(max(costs))}"
        )
    return ranks


def write_factors(
    file: AdapterFile,
    targets: Sequence[Target],
    column: Tensor,
    ranks: Sequence[int],
    dtype: torch.dtype,
    parts: Parts,
    engine: Engine,
) -> Iterator[Factored]:
    """Append the factors of inputs @ column to a file, and yield the errors of each matrix.

    Errors include the rounding to `dtype`. Zero matrices are left out. Factors of fewer directions
    are padded with zeros: some servers need one rank in all matrices.

    Args:
        parts: Join their factors, instead of truncating the matrices.
    """
    made = _matrices(targets, column, ranks, engine, "Adapter")
    for rank, (target, matrix) in zip(ranks, made, strict=True):
        name, square = target.item.name, float(torch.linalg.vector_norm(matrix, dtype=_WIDE)) ** 2
        if not rank or not square:
            yield Factored(name, 0, 0, square, square, SMALL if square else ZERO)
            continue
        found = _joined(target, parts) if parts else truncate(matrix, rank)
        short = rank - found.rank
        left = pad(found.left, (0, short)).to(dtype)
        right = pad(found.right, (0, 0, 0, short)).to(dtype)
        for key, half in zip(target.keys, (left, right), strict=True):
            file.add(key, half)
        nbytes = left.nbytes + right.nbytes
        yield Factored(name, rank, nbytes, square, _squared_error(matrix, left, right))


def _rank_in(part: Weights, target: Target) -> int:
    info = part.tensors.get(target.keys[0])
    return 0 if info is None else info.shape[1]


def _joined(target: Target, parts: Parts) -> Factors:
    """The factors of the sum of scaled adapters."""
    held = [(scale, part) for scale, part in parts if _rank_in(part, target)]
    left, right = target.keys
    return Factors(
        torch.cat([scale * part.tensor(left).float() for scale, part in held], 1),
        torch.cat([part.tensor(right).float() for _, part in held]),
    )


def _matrices(
    targets: Sequence[Target], column: Tensor, ranks: Sequence[int], engine: Engine, title: str
) -> Iterator[tuple[Target, Tensor]]:
    """Yield each matrix of inputs @ column, [out, in] float32 on the first device."""
    update = engine.progress(title, sum(target.item.nbytes for target in targets))
    threads = torch.get_num_threads()
    try:
        for target, rank in zip(targets, ranks, strict=True):
            left = max(LEAST, engine.budget - factor_bytes(target.shape, rank))
            reading = replace(engine, memory=left, progress=silent)
            with torch.no_grad():
                matrix = stacked_bases(target.item, column[:, None], reading)[0]
                if min(target.shape) <= EXACT:  # two threads took three times as long
                    torch.set_num_threads(1)
                yield target, matrix.T if target.transposed else matrix
            torch.set_num_threads(threads)
            update(target.item.nbytes)
    finally:
        torch.set_num_threads(threads)


def _squared_error(matrix: Tensor, left: Tensor, right: Tensor) -> float:
    left, right = (half.to(matrix.device).float() for half in (left, right))
    step, total = max(1, PIECE // matrix.shape[1]), 0.0
    for rows, part in zip(matrix.split(step), left.split(step), strict=True):
        total += float((rows - part @ right).square().sum(dtype=_WIDE))
    return total


def norms_pass(items: Sequence[Item], column: Tensor, engine: Engine) -> list[float]:
    """The squared norm of inputs @ column in each item."""
    found = dict.fromkeys((item.name for item in items), 0.0)

    class Norms:
        def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
            found[item.name] += float(values.square().sum(dtype=_WIDE))

    plain, step = [replace(item, out=torch.float32) for item in items], Linear.of(column[:, None])
    combine_pass(plain, dict.fromkeys(found, step), Norms(), engine, title="Tensors left out")
    return list(found.values())
