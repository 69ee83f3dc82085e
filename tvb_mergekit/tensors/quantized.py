"""Vectors stored as codes (see `core.quantize`), read as float32 and written by `combine_pass`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tvb_mergekit.core.quantize import BITS, Width, block_bytes, decode
from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors.checkpoint import RESTORE, Checkpoint, Decoded, parse_headers

KEY = "tvb_codes"  # in the metadata of a file of codes
VERSION = 1
SLICE = 2**14  # elements that are widened together


@dataclass(frozen=True)
class Coded:
    """The code of one vector: a unit (see `core.quantize`) and the width of each tensor."""

    unit: float
    widths: Mapping[str, Width]
    key = KEY

    def metadata(self, shapes: Mapping[str, Sequence[int]]) -> str:
        """The metadata of a file with these tensors."""
        tensors = {name: [self.widths[name].bits, list(shape)] for name, shape in shapes.items()}
        return json.dumps({"version": VERSION, "unit": self.unit, "tensors": tensors})


class Codes(Decoded):
    """One vector of a store as codes, read as float32. Thread-safe."""

    def __init__(
        self, stored: Checkpoint, coded: Coded, shapes: Mapping[str, Sequence[int]]
    ) -> None:
        super().__init__(stored, {name: shapes[name] for name in stored.tensors}, "")
        self.coded = coded

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Codes:
        """Read the headers of the codes at `path`, a folder or one file.

        Raises:
            UserError: no such files, or their headers do not say what a reader needs.
        """
        stored = Checkpoint.open(path)
        units, widths, shapes = set[float](), dict[str, Width](), dict[str, torch.Size]()

        def parse(said: dict[str, Any]) -> None:
            units.add(float(said["unit"]))
            for name, (bits, shape) in said["tensors"].items():
                widths[name] = Width(BITS[BITS.index(bits)])
                shapes[name] = torch.Size(shape)

        parse_headers(stored, KEY, VERSION, "codes", parse)
        for name, info in stored.tensors.items():
            held = name in widths and block_bytes(shapes[name].numel(), widths[name])
            if len(units) > 1 or held is False or info.nbytes != held:
                raise UserError(
                    f"{stored.folder / info.shard}: the codes of tensor `{name}` do not fit what "
                    f"its header says; {RESTORE}"
                )
        return cls(stored, Coded(units.pop(), widths), shapes)

    def read(self, name: str, start: int, stop: int, out: Tensor) -> Tensor:
        chunk, width = out[: stop - start], self.coded.widths[name]
        if start == stop:
            return chunk
        from tvb_mergekit.tensors import codes  # imports numba, which takes long

        low, high = self.blocks_of(name, start, stop)
        blocks = self.stored.read(name, low, high, torch.empty(high - low, dtype=torch.uint8))
        skipped = start % width.group
        codes.decode(blocks, width, self.coded.unit, skipped, skipped + len(chunk), chunk)
        return chunk

    def packed(self, name: str) -> Packed:
        return Packed(self, name, self.coded.widths[name])

    def blocks_of(self, name: str, start: int, stop: int) -> tuple[int, int]:
        """The range of bytes of these elements, from the beginning of their first group."""
        width = self.coded.widths[name]
        return block_bytes(start // width.group * width.group, width), block_bytes(stop, width)

    def ahead(self, name: str, start: int, stop: int) -> None:
        if start < stop:
            self.stored.ahead(name, *self.blocks_of(name, start, stop))


@dataclass(frozen=True)
class Packed:
    """The codes of one tensor, which an accelerator decodes itself."""

    codes: Codes
    name: str
    width: Width

    def read(self, start: int, stop: int, out: Tensor) -> Tensor:
        """The blocks of these elements, in `out` (uint8); `start` is the first of a group."""
        return self.codes.stored.read(self.name, *self.codes.blocks_of(self.name, start, stop), out)

    def decode(self, blocks: Tensor, numel: int) -> Tensor:
        """The elements [numel] float32, on the device of the blocks."""
        return decode(blocks, self.width, self.codes.coded.unit, numel)


class Sized(Protocol):
    def written(self, numel: int, output: int = 0) -> int: ...


class Measured:
    """Measurements of pieces in many threads, read in the order of the pieces."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], list[float]] = {}  # each is set once and read once

    def measured(self, name: str, start: int) -> Tensor:
        """The measurements of the piece that begins at element `start`, float64."""
        return torch.tensor(self._found.pop((name, start)), dtype=torch.float64)


class Coding(Measured):
    """The codes of the outputs of a pass.

    `measured` returns 2 K + 2 squared norms: of each output and of their sum, then of the errors of
    each output and of the sum.

    Attributes:
        coded: the code of each output.
        shares: the factor of each output in the sum that a merge adds, [K].
    """

    def __init__(self, coded: Sequence[Coded], shares: Tensor) -> None:
        super().__init__()
        self.coded, self.shares = coded, shares

    def widths(self, name: str) -> tuple[Width, ...]:
        """The width of each output in one tensor."""
        return tuple(each.widths[name] for each in self.coded)

    def rows(self, item: Sized, start: int, stop: int, values: Tensor) -> list[Tensor]:
        """The bytes of a piece that are written: a row ends in unused ones."""
        sizes = (item.written(stop - start, output) for output in range(len(values)))
        return [row[:size] for row, size in zip(values, sizes, strict=True)]

    def encode(self, name: str, start: int, values: Tensor, out: Tensor) -> None:
        """Code a piece of a tensor, which begins at element `start`.

        Args:
            values: [K, n] float32 on the CPU; overwritten.
            out: [K, bytes] uint8; a row ends in unused bytes if its width is not the largest.
        """
        from tvb_mergekit.tensors import codes

        count, shares = values.shape[1], self.shares.to(torch.float32)
        units = torch.tensor([coded.unit for coded in self.coded], dtype=torch.float32)
        total = _square(shares @ values)
        values /= units[:, None]  # powers of two
        squares, errors = list[float](), list[float]()
        for row, coded, blocks in zip(values, self.coded, out, strict=True):
            width = coded.widths[name]
            square, error = codes.encode(row, width, row, blocks[: block_bytes(count, width)])
            squares.append(square * coded.unit**2)
            errors.append(error * coded.unit**2)
        error_of_sum = _square((shares * units) @ values)
        self._found[name, start] = [*squares, total, *errors, error_of_sum]


def _square(values: Tensor) -> float:
    """The squared norm in float64, in little memory."""
    parts = values.split(SLICE)
    return sum(float(torch.linalg.vector_norm(part, dtype=torch.float64) ** 2) for part in parts)
