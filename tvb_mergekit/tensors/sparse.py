"""Vectors most of whose entries are zero, as places and values: `docs/files.md` has the format.

A flattened tensor is cut into blocks of 256 entries, so that a place takes one byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from tvb_mergekit.atomic import beside
from tvb_mergekit.core.merge import check_output
from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors.checkpoint import RESTORE, Checkpoint
from tvb_mergekit.tensors.quantized import VERSION, Decoded
from tvb_mergekit.tensors.writing import HASH, MARKER, content_hash, header_of

KEY = "tvb_sparse"  # in the metadata of a file of sparse vectors
BLOCK = 256  # entries, whose places fit a byte
SPAN_BLOCKS = 512  # blocks that are decoded together
SPAN = SPAN_BLOCKS * BLOCK  # their entries
COUNTS, OFFSETS, VALUES = ".counts", ".offsets", ".values"  # the three parts of a tensor
DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of the values


class Sparse(Decoded):
    """One vector of a store as places and values of `dtype`, read as float32. Thread-safe."""

    key, what, parts = KEY, "sparse vectors", (COUNTS, OFFSETS, VALUES)

    def __init__(self, stored: Checkpoint) -> None:
        self._before = dict[str, Tensor]()  # the number of values before each span and in all
        super().__init__(stored)
        dtypes = {stored.tensors[name + VALUES].dtype for name in self.tensors}
        if len(dtypes) > 1 or not dtypes <= {*DTYPES}:
            found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise UserError(
                f"{stored.folder}: values in {found}, expected one of float16, bfloat16 and "
                f"float32; {RESTORE}"
            )
        self.dtype = dtypes.pop() if dtypes else torch.float32

    def _fits(self, name: str) -> bool:
        counts, offsets, values = (self.stored.tensors[name + part] for part in self.parts)
        blocks = -(-self.tensors[name].numel // BLOCK)
        if (counts.dtype, offsets.dtype) != (torch.uint16, torch.uint8):
            return False
        if (counts.shape, offsets.shape) != ((blocks,), values.shape):
            return False
        sums, most = [torch.zeros(1, dtype=torch.int64, device="cpu")], SPAN_BLOCKS * 2**11
        for first in range(0, blocks, most):
            some = self._counts(name, first, min(first + most, blocks))
            if int(some.min()) < 0 or int(some.max()) > BLOCK:
                return False
            padded = torch.nn.functional.pad(some, (0, -len(some) % SPAN_BLOCKS))
            sums.append(padded.view(-1, SPAN_BLOCKS).sum(1))
        self._before[name] = torch.cat(sums).cumsum(0)
        return values.shape == (int(self._before[name][-1]),)

    @property
    def count(self) -> int:
        """The number of entries that are not zero."""
        return sum(int(before[-1]) for before in self._before.values())

    def read(self, name: str, start: int, stop: int, out: Tensor) -> Tensor:
        chunk = out[: stop - start].zero_()
        for first in range(start // SPAN * SPAN, stop, SPAN):
            low, high = max(first, start), min(first + SPAN, stop)
            places, values = self._entries(name, low, high)
            chunk[places - start] = values.float()
        return chunk

    def ahead(self, name: str, start: int, stop: int) -> None:
        if start >= stop:
            return
        before = self._before[name]
        first, last = before[start // SPAN], before[-(-stop // SPAN)]
        self.stored.ahead(name + COUNTS, start // BLOCK, -(-stop // BLOCK))
        for part in (OFFSETS, VALUES) if first < last else ():
            self.stored.ahead(name + part, int(first), int(last))

    def _entries(self, name: str, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Places (int64) and values of the nonzero entries in a range within one span."""
        span, first, last = start // SPAN, start // BLOCK, -(-stop // BLOCK)
        counts = self._counts(name, span * SPAN_BLOCKS, last)
        skipped, counts = counts.split([first - span * SPAN_BLOCKS, last - first])
        low = int(self._before[name][span] + skipped.sum())
        high = low + int(counts.sum())
        offsets = self._stored(name + OFFSETS, low, high)
        values = self._stored(name + VALUES, low, high)
        blocks = torch.arange(first, last, device="cpu") * BLOCK
        places = torch.repeat_interleave(blocks, counts, output_size=high - low) + offsets
        if (places.diff() <= 0).any() or places[-1:].gt(self.tensors[name].numel - 1).any():
            raise self.damaged(name)
        ends = torch.tensor([start, stop], device="cpu")
        inside = slice(*torch.searchsorted(places, ends).tolist())
        return places[inside], values[inside]

    def _counts(self, name: str, start: int, stop: int) -> Tensor:
        """The counts of these blocks, int64; counts above 32,767 are negative."""
        return self._stored(name + COUNTS, start, stop).view(torch.int16).long()

    def _stored(self, name: str, start: int, stop: int) -> Tensor:
        buffer = torch.empty(stop - start, dtype=self.stored.tensors[name].dtype, device="cpu")
        return self.stored.read(name, start, stop, buffer)


def write_sparse(
    file: Path,
    vectors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype = torch.float16,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the tensors of one vector, marked as a difference from a base (`tvb_basis`).

    Entries that are zero in `dtype` are left out. Memory holds one tensor and the content of the
    file, which appears under its name when it is complete.

    Args:
        vectors: name and tensor, of any floating dtype and device, read one by one.
        dtype: float16, bfloat16 or float32, of the values.
        metadata: further entries of the header.

    Raises:
        UserError: another dtype; a tensor that comes twice, overflows or is not finite.
    """
    if dtype not in DTYPES:
        raise UserError(f"`dtype` is {dtype}: expected torch.float16, .bfloat16 or .float32")
    shapes, held = dict[str, list[int]](), dict[str, Tensor]()
    for name, tensor in vectors:
        if name in shapes:
            raise UserError(f"{file}: tensor `{name}` is given twice")
        shapes[name] = list(tensor.shape)
        held |= _compressed(name, tensor, dtype)
    # Wide ones first: then all are aligned.
    held = dict(sorted(held.items(), key=lambda each: -each[1].dtype.itemsize))
    said = {"format": "pt", MARKER: file.stem, **(metadata or {})}
    said[KEY] = json.dumps({"version": VERSION, "tensors": shapes})
    said[HASH] = content_hash(said, held.items())
    header = header_of(said, {name: (each.dtype, each.shape) for name, each in held.items()})
    with beside(file) as path, path.open("wb") as stream:
        stream.write(header)
        for each in held.values():
            stream.write(cast(memoryview, each.view(torch.uint8).numpy()))


def _compressed(name: str, tensor: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    counts, offsets, values = list[Tensor](), list[Tensor](), list[Tensor]()
    for part in tensor.detach().reshape(-1).split(SPAN):
        cast_part = part.to("cpu", dtype)
        check_output(name, cast_part, dtype)
        places = cast_part.nonzero()[:, 0]
        blocks = -(-len(part) // BLOCK)
        counts.append(torch.bincount(places // BLOCK, minlength=blocks).to(torch.int16))
        offsets.append((places % BLOCK).to(torch.uint8))
        values.append(cast_part[places])
    return {
        name + COUNTS: torch.cat(counts).view(torch.uint16),
        name + OFFSETS: torch.cat(offsets),
        name + VALUES: torch.cat(values),
    }
