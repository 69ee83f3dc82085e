"""Tensors as passes see them: the base's and each model's part, cut into pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from tvb_mergekit.core.basis import Tunables
from tvb_mergekit.core.lora import Factors
from tvb_mergekit.tensors.source import Holds, Weights


@dataclass(frozen=True)
class Part:
    """One model's part of a tensor: read(start, stop, buffer) returns flattened elements.

    Attributes:
        held: The elements are in memory, on any device. `read` returns a view and needs no buffer.
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
    holds: Holds = "weight"
    name: str | None = None
    shape: tuple[int, ...] | None = None
    share: float = 1.0
    grain: int = 1
    factors: Sequence[Factors] | None = None

    @classmethod
    def of(cls, weights: Weights, name: str, holds: Holds = "weight") -> Part:
        info, holds = weights.tensors[name], weights.holds or holds
        read, held, share = partial(weights.read, name), weights.in_memory, weights.share(name)
        known = name, info.shape, share, weights.grain, weights.factors_of(name)
        return cls(info.dtype, read, held, holds, *known)

    @classmethod
    def in_memory(cls, tensor: Tensor) -> Part:
        flat = tensor.detach().reshape(-1)
        return cls(tensor.dtype, lambda start, stop, _: flat[start:stop], held=True)


@dataclass(frozen=True)
class Item:
    """One tensor of a pass.

    Attributes:
        base: theta_0; may be None if no input needs it.
        inputs: One part of each task vector. An item without inputs is the base's own.
        out: The dtype of its outputs.
        counted_as: The name under which the tensor counts in the Gram matrix: its own, or the first
            name of a tensor that is stored once and has several. None: the base's own.
        tunables: The values of lambda, alpha and density; None: the base's own, in a merge.
        load: Gives the tensors of `parts` complete, if they cannot be read in pieces. A pass calls
            it just before it reads them, and drops them afterwards.
    """

    name: str
    shape: tuple[int, ...]
    base: Part | None
    inputs: tuple[Part, ...]
    out: torch.dtype = torch.float32
    counted_as: str | None = None
    tunables: Tunables | None = None
    load: Callable[[], Sequence[Tensor]] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.inputs if self.base is None else (self.base, *self.inputs)

    @property
    def factored(self) -> bool:
        """Whether the factors of all inputs are known."""
        return all(part.factors is not None for part in self.inputs)

    def updates(self, number: int = 0) -> list[Factors]:
        """The factors of one matrix of a tensor that is `factored`, of each input."""
        none = Factors(torch.empty(self.shape[-2], 0), torch.empty(0, self.shape[-1]))
        return [part.factors[number] if part.factors else none for part in self.inputs]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of all parts, as they are stored."""
        return sum(part.dtype.itemsize for part in self.parts)

    @property
    def nbytes(self) -> int:
        return self.numel * self.element_bytes

    @property
    def written(self) -> int:
        """Bytes of an output."""
        return self.numel * self.out.itemsize

    def loaded(self) -> Item:
        """The item with its parts in memory, if they cannot be read in pieces."""
        if self.load is None:
            return self
        found = [
            replace(part, read=Part.in_memory(tensor).read, held=True)
            for part, tensor in zip(self.parts, self.load(), strict=False)
        ]
        found += self.parts[len(found) :]  # such as the mean of a store, which is read in pieces
        base, inputs = (None, found) if self.base is None else (found[0], found[1:])
        return replace(self, base=base, inputs=tuple(inputs), load=None)

    def whole(self, part: Part) -> Tensor:
        buffer = torch.empty(0 if part.held else self.numel, dtype=part.dtype, device="cpu")
        return part.read(0, self.numel, buffer)


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
        return self.numel * self.item.element_bytes


def pieces_of(items: Sequence[Item], length: int) -> Iterator[Piece]:
    """Cut items into pieces of at most `length` elements; an empty tensor is one piece."""
    for item in items:
        item = item.loaded()
        for start in range(0, max(1, item.numel), length):
            yield Piece(item, start, min(start + length, item.numel))


class Sink(Protocol):
    """A receiver of outputs.

    Several threads call `write` with the pieces of a pass, in any order. `values` [outputs, stop -
    start] are in `item.out`, on the CPU; [1, stop - start] are those of all outputs.
    """

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None: ...
