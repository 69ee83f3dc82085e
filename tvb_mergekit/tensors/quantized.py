"""Vectors in a code: the interfaces of their readers and writers, and codes of `core.quantize`."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tvb_mergekit.core.quantize import BITS, Width, block_bytes
from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors.checkpoint import RESTORE, Checkpoint, metadata_of
from tvb_mergekit.tensors.source import Packed, TensorInfo, Weights
from tvb_mergekit.tensors.stream import Item

if TYPE_CHECKING:
    from typing_extensions import Self

VERSION = 1  # of the formats of encoded tensors
Parsed = Iterable[tuple[str, torch.dtype, Sequence[int]]]  # tensors, their dtypes when read, shapes
_MALFORMED = (LookupError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError)
SLICE = 2**14  # elements that are widened together


class Decoded(Weights):
    """A vector whose files hold encoded tensors. Thread-safe.

    The metadata of a file has JSON under `key`, with a version and the shape of each tensor. The
    file holds tensor NAME as NAME + each of `parts`. Messages call its content `what`.

    Raises:
        UserError: a newer version, or files that do not hold what their headers say.
    """

    key = what = ""
    parts: tuple[str, ...] = ("",)

    def __init__(self, stored: Checkpoint) -> None:
        self.stored, self.folder, self.shards = stored, stored.folder, stored.shards
        self.tensors = {}
        for shard in self.shards:
            file = self.folder / shard
            try:
                said = json.loads(metadata_of(file)[self.key])
                newer = int(said["version"]) > VERSION
                for name, dtype, shape in () if newer else self._parse(said):
                    if any(not 0 <= size < 2**48 for size in shape):
                        raise ValueError(f"`{name}` has shape {shape}")
                    self.tensors[name] = TensorInfo(tuple(shape), dtype, shard)
            except _MALFORMED as error:
                raise UserError(
                    f"{file}: its header does not describe {self.what} ({error}); {RESTORE}"
                ) from error
            if newer:
                raise UserError(
                    f"{file}: {self.what} of version {said['version']}, this tvb-mergekit reads "
                    f"up to {VERSION}; upgrade it: pip install -U tvb-mergekit"
                )
        known = {name + part for name in self.tensors for part in self.parts}
        if strange := sorted(known ^ set(stored.tensors)):
            raise UserError(
                f"{self.folder}: tensor `{strange[0]}` does not fit what the headers there say; "
                f"{RESTORE}"
            )
        for name in self.tensors:
            if not self._fits(name):
                raise self.damaged(name)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Read the headers of the vector at `path`, a folder or one file."""
        return cls(Checkpoint.open(path))

    def _parse(self, said: Any) -> Parsed:
        return ((name, torch.float32, shape) for name, shape in said["tensors"].items())

    def _fits(self, name: str) -> bool:
        """Whether the stored parts can be those of a tensor of this shape."""
        raise NotImplementedError

    def bytes_of(self, name: str) -> int:
        """The stored bytes of a tensor."""
        return sum(self.stored.tensors[name + part].nbytes for part in self.parts)

    def bits_of(self, name: str) -> int:
        """The bits of all elements of a tensor."""
        return 8 * self.bytes_of(name)

    def damaged(self, name: str) -> UserError:
        file = self.folder / self.tensors[name].shard
        return UserError(f"{file}: tensor `{name}` is not what was stored; {RESTORE}")

    def stamp(self) -> list[list[int | str]]:
        return self.stored.stamp()

    def check_unchanged(self) -> None:
        self.stored.check_unchanged()

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes


class Codes(Decoded):
    """One vector of a store as codes, read as float32. Thread-safe.

    Attributes:
        unit: of the vector, see `core.quantize`.
        widths: of each tensor.
    """

    key, what = "tvb_codes", "codes"

    def __init__(self, stored: Checkpoint) -> None:
        self.unit, self.widths = 0.0, dict[str, Width]()
        super().__init__(stored)

    def _parse(self, said: Any) -> Parsed:
        if self.unit not in (0.0, unit := float(said["unit"])):
            raise ValueError("its unit is another one")
        self.unit = unit
        for name, (bits, shape) in said["tensors"].items():
            self.widths[name] = Width(BITS[BITS.index(bits)])
            yield name, torch.float32, shape

    def _fits(self, name: str) -> bool:
        return block_bytes(self.tensors[name].numel, self.widths[name]) == self.bytes_of(name)

    def bits_of(self, name: str) -> int:
        return self.widths[name].bits * self.tensors[name].numel  # without scales

    def read(self, name: str, start: int, stop: int, out: Tensor) -> Tensor:
        chunk, width = out[: stop - start], self.widths[name]
        if start == stop:
            return chunk
        from tvb_mergekit.tensors import codes  # imports numba, which takes long

        low, high = self.blocks_of(name, start, stop)
        blocks = self.stored.read(name, low, high, torch.empty(high - low, dtype=torch.uint8))
        skipped = start % width.group
        codes.decode(blocks, width, self.unit, skipped, skipped + len(chunk), chunk)
        return chunk

    def packed(self, name: str) -> Packed:
        return Packed(partial(self._blocks, name), self.unit, self.widths[name])

    def _blocks(self, name: str, start: int, stop: int, out: Tensor) -> Tensor:
        return self.stored.read(name, *self.blocks_of(name, start, stop), out)

    def blocks_of(self, name: str, start: int, stop: int) -> tuple[int, int]:
        """The range of bytes of these elements, from the beginning of their first group."""
        width = self.widths[name]
        return block_bytes(start // width.group * width.group, width), block_bytes(stop, width)

    def ahead(self, name: str, start: int, stop: int) -> None:
        if start < stop:
            self.stored.ahead(name, *self.blocks_of(name, start, stop))


class Coding(ABC):
    """The code in which a pass writes its outputs, and measurements of the pieces.

    Attributes:
        key: of the metadata of its files.
        fixed: whether the bytes of a tensor are known before they are written.
    """

    key: str
    fixed = True

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], list[float]] = {}  # each is set once and read once

    def measured(self, name: str, start: int) -> Tensor:
        """The measurements of the piece that begins at element `start`, float64."""
        return torch.tensor(self._found.pop((name, start)), dtype=torch.float64)

    def coded(self, items: Sequence[Item]) -> list[Item]:
        """The items, which a pass gives to a sink as bytes."""
        return [replace(i, out=torch.uint8, widths=self.widths(i.name)) for i in items]

    @abstractmethod
    def widths(self, name: str) -> tuple[Width, ...]:
        """The width of each output in one tensor: the most bytes that it takes."""

    @abstractmethod
    def encode(self, item: Item, start: int, values: Any, out: Tensor) -> None:
        """Code a piece of a tensor, which begins at element `start`, into `out` [K, bytes] uint8.

        A row ends in unused bytes if it is not the longest.
        """

    @abstractmethod
    def described(self, output: int, items: Sequence[Item]) -> dict[str, Any]:
        """The metadata of a file of these tensors, without its version."""

    def rows(self, item: Item, start: int, stop: int, values: Tensor) -> list[Tensor]:
        """The bytes of a piece that are written."""
        sizes = (item.written(stop - start, output) for output in range(len(values)))
        return [row[:size] for row, size in zip(values, sizes, strict=True)]


class Quantizing(Coding):
    """Codes of the outputs of `combine_pass`, float32 [K, n] on the CPU, which are overwritten.

    `measured` returns 2 K + 2 squared norms: of each output and of their sum, then of the errors of
    each output and of the sum.

    Args:
        units: of each output, see `core.quantize`.
        width: of all tensors.
        shares: the factor of each output in the sum that a merge adds, [K].
    """

    key = Codes.key

    def __init__(self, units: Sequence[float], width: Width, shares: Tensor) -> None:
        super().__init__()
        self.units, self.width, self.shares = units, width, shares

    def widths(self, name: str) -> tuple[Width, ...]:
        return (self.width,) * len(self.units)

    def described(self, output: int, items: Sequence[Item]) -> dict[str, Any]:
        tensors = {item.name: [self.width.bits, list(item.shape)] for item in items}
        return {"unit": self.units[output], "tensors": tensors}

    def encode(self, item: Item, start: int, values: Tensor, out: Tensor) -> None:
        from tvb_mergekit.tensors import codes

        size, shares = block_bytes(values.shape[1], self.width), self.shares.to(torch.float32)
        units = torch.tensor(self.units, dtype=torch.float32)
        total = _square(shares @ values)
        values /= units[:, None]  # powers of two
        squares, errors = list[float](), list[float]()
        for row, unit, blocks in zip(values, self.units, out, strict=True):
            square, error = codes.encode(row, self.width, row, blocks[:size])
            squares.append(square * unit**2)
            errors.append(error * unit**2)
        error_of_sum = _square((shares * units) @ values)
        self._found[item.name, start] = [*squares, total, *errors, error_of_sum]


def _square(values: Tensor) -> float:
    """The squared norm in float64, in little memory."""
    parts = values.split(SLICE)
    return sum(float(torch.linalg.vector_norm(part, dtype=torch.float64) ** 2) for part in parts)
