"""Factors of streamed task vectors, one matrix after the other, in the file of a LoRA adapter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tvb_mergekit.core.lora import (
    EXACT,
    Factors,
    factor_bytes,
    leading_values,
    share_ranks,
    truncate,
)
from tvb_mergekit.errors import UserError, megabytes
from tvb_mergekit.progress import silent
from tvb_mergekit.tensors.adapter import PREFIX
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.matrices import stacked_bases
from tvb_mergekit.tensors.output import check_disk
from tvb_mergekit.tensors.passes import LEAST, gram_pass
from tvb_mergekit.tensors.stream import Item
from tvb_mergekit.tensors.summing import RunningSums
from tvb_mergekit.tensors.writing import header_of

METADATA = {"format": "pt"}
ZERO, SMALL = "no change", "no direction is worth its bytes"
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class Truncation(NamedTuple):
    """The size of an adapter: a rank for all matrices, a share of energy, or bytes.

    None of the three: all directions of matrices whose factors are known.
    """

    rank: int | None = None
    energy: float | None = None
    nbytes: int | None = None


class Target(NamedTuple):
    """A matrix that an adapter changes.

    Attributes:
        module: PEFT's name.
        transposed: The base stores it as [in, out], as GPT-2's Conv1D does.
    """

    item: Item
    module: str
    transposed: bool

    def shapes(self, rank: int, dtype: torch.dtype) -> Shapes:
        """The names and shapes of B [out, r] and A [r, in]."""
        out, into = reversed(self.item.shape) if self.transposed else self.item.shape
        name = f"{PREFIX}{self.module}.lora_"
        return {f"{name}B.weight": (dtype, (out, rank)), f"{name}A.weight": (dtype, (rank, into))}


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

    @property
    def relative_error(self) -> float:
        return math.sqrt(self.error / (self.square or 1.0))

    def as_json(self) -> dict[str, object]:
        said = {"rank": self.rank, "bytes": self.nbytes, "norm": math.sqrt(self.square)}
        said |= {"relative_error": self.relative_error, "energy": 1 - self.relative_error**2}
        return {**said, **({"reason": self.reason} if self.reason else {})}


Known = Callable[[Target], Factors]


def joined(parts: Sequence[tuple[float, Checkpoint]], target: Target) -> Factors:
    """The factors of a sum of adapters in files, each with its scale."""
    (left, (_, tall)), (right, (_, wide)) = target.shapes(0, torch.float32).items()
    halves = [torch.empty(tall)], [torch.empty(wide)]
    for scale, part in parts:
        if left in part.tensors:
            halves[0].append(scale * part.tensor(left).float())
            halves[1].append(part.tensor(right).float())
    return Factors(torch.cat(halves[0], 1), torch.cat(halves[1]))


def added(name: str, tensors: Sequence[Factored]) -> Factored:
    """Several tensors as one, with their largest rank."""
    return Factored(
        name,
        max(each.rank for each in tensors),
        sum(each.nbytes for each in tensors),
        math.fsum(each.square for each in tensors),
        math.fsum(each.error for each in tensors),
    )


@dataclass(frozen=True)
class Change:
    """One task vector, inputs @ column, as an adapter changes the base.

    Attributes:
        column: [T].
        tasks: Names of the T inputs of each item, for messages.
        targets: The matrices that get factors.
        known: Gives the factors B and A of a matrix, which else is truncated.
        dtype: The dtype of the factors.
    """

    column: Tensor
    tasks: Sequence[str]
    targets: Sequence[Target]
    known: Known | None
    dtype: torch.dtype
    engine: Engine

    def ranks(self, size: Truncation) -> list[int]:
        """The rank of each matrix: as it is known, the same for all, or by energy or bytes.

        Raises:
            UserError: The bytes hold no direction, or the engine's memory does not hold a matrix.
        """
        if self.known is not None:
            return [self.known(target).rank for target in self.targets]
        sides = [min(target.item.shape) for target in self.targets]
        if size.rank is not None:
            return [min(size.rank, max(sides))] * len(sides)
        header = len(header_of(METADATA, self._shapes(sides)))
        costs = [sum(target.item.shape) * self.dtype.itemsize for target in self.targets]
        if size.nbytes is not None:
            room = max(0, size.nbytes - header)
            sides = [min(side, room // cost) for side, cost in zip(sides, costs, strict=True)]
        values = self.values(sides)
        if size.nbytes is None:
            return share_ranks(values, costs, energy=size.energy or 1.0)
        ranks = share_ranks(values, costs, budget=size.nbytes - header)
        if not any(ranks) and any(float(each.sum()) for each in values):
            raise UserError(
                f"--size: {megabytes(size.nbytes)} are too little for this adapter: its header "
                f"takes {megabytes(header)}, and a direction of a matrix up to "
                f"{megabytes(max(costs))}"
            )
        return ranks

    def values(self, counts: Sequence[int]) -> list[Tensor]:
        """The largest singular values of each matrix, as many as counted and perhaps more."""
        matrices = self._matrices(counts, "Singular values")
        return [leading_values(m, count) for m, count in zip(matrices, counts, strict=True)]

    def write(self, path: Path, ranks: Sequence[int]) -> list[Factored]:
        """Write the factors of all matrices, and return their errors, rounding included.

        Zero matrices are left out. The header comes last, and until then no reader accepts the
        file.
        """
        most, found = self._shapes(ranks), []
        check_disk(path, sum(math.prod(shape) * dtype.itemsize for dtype, shape in most.values()))
        room, written = len(header_of(METADATA, most)), Shapes()
        matrices = self._matrices(ranks, "Adapter")
        with path.open("wb") as file:
            file.seek(room)
            for target, rank, matrix in zip(self.targets, ranks, matrices, strict=True):
                square = float(torch.linalg.vector_norm(matrix, dtype=torch.float64)) ** 2
                if not rank or not square:
                    reason = SMALL if square else ZERO
                    found.append(Factored(target.item.name, 0, 0, square, square, reason))
                    continue
                both = self.known(target) if self.known else truncate(matrix, rank)
                halves = both.left.to(self.dtype), both.right.to(self.dtype)
                for half in halves:
                    file.write(half.view(-1).view(torch.uint8).numpy().data)
                written |= target.shapes(both.rank, self.dtype)
                rounded = (half.to(matrix.device).float() for half in halves)
                rest = torch.addmm(matrix, *rounded, alpha=-1)
                error = float(torch.linalg.vector_norm(rest, dtype=torch.float64)) ** 2
                nbytes = sum(half.nbytes for half in halves)
                found.append(Factored(target.item.name, both.rank, nbytes, square, error))
            file.seek(0)
            file.write(header_of(METADATA, written, room))
        return found

    def left_out(self, item: Item, reason: str) -> Factored:
        """The norm of a tensor without factors."""
        square = 0.0
        if item.numel:
            inputs = tuple(replace(part, share=1.0) for part in item.inputs)  # as they are stored
            quiet = replace(self.engine, progress=silent)
            gram = gram_pass([replace(item, inputs=inputs)], self.tasks, quiet).gram
            square = max(0.0, float(self.column @ gram @ self.column))
        return Factored(item.name, 0, 0, square, square, reason)

    def _shapes(self, ranks: Sequence[int]) -> Shapes:
        made = Shapes()
        for target, rank in zip(self.targets, ranks, strict=True):
            made |= target.shapes(rank, self.dtype) if rank else {}
        return made

    def _matrices(self, ranks: Sequence[int], title: str) -> Iterator[Tensor]:
        """Yield each matrix, [out, in] float32 on the first device."""
        items = [target.item for target in self.targets]
        needs = [factor_bytes(item.shape, rank) for item, rank in zip(items, ranks, strict=True)]
        most, name = max(zip(needs, (item.name for item in items), strict=True))
        memory = self.engine.memory
        if memory is not None and most + LEAST > memory:
            raise UserError(
                f"{megabytes(memory)} of memory are too little: the factors of tensor `{name}` "
                f"take {megabytes(most + LEAST)}; raise --memory"
            )
        update = self.engine.progress(title, sum(item.nbytes for item in items))
        threads = torch.get_num_threads()
        for (item, _, transposed), held in zip(self.targets, needs, strict=True):
            left = max(LEAST, self.engine.budget - held)
            reading = replace(self.engine, memory=left, progress=silent)
            sums = RunningSums([item], self.tasks)  # names a model with NaN
            with torch.no_grad():
                matrix = stacked_bases(item, self.column[:, None], reading, sums)[0]
                if min(item.shape) <= EXACT:  # two threads took three times as long
                    torch.set_num_threads(1)
                try:
                    yield matrix.T if transposed else matrix
                finally:
                    torch.set_num_threads(threads)
            update(item.nbytes)
