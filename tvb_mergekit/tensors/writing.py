"""Safetensors files written piece by piece: header first, then bytes in order, hashed.

The format (https://huggingface.co/docs/safetensors) puts all shapes and offsets in front, so that
no complete tensor is in memory. Pieces do not change the bytes of a file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import torch
import xxhash
from torch import Tensor

from tvb_mergekit.tensors.checkpoint import NAMES
from tvb_mergekit.tensors.quantized import VERSION, Coding
from tvb_mergekit.tensors.ranks import shares
from tvb_mergekit.tensors.stream import Item

SHARD_BYTES = 5_000_000_000  # mergekit's and transformers' default
HASH = "xxh3_128"
MARKER = "tvb_basis"  # in the metadata of a vector of a store: a difference, not a model
BLOCK_BYTES = 2**24  # read at a time for a checksum


@dataclass(frozen=True)
class Shard:
    """One file: its name, its tensors in order, and the process that writes it."""

    name: str
    items: tuple[Item, ...]
    rank: int = 0


def header_of(
    metadata: Mapping[str, str],
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    length: int = 0,
) -> bytes:
    """The first bytes of a file with these tensors in this order.

    They are the length, JSON, and blanks to a multiple of 8 or to `length`.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    place = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        offsets = [place, place + size]
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
        place += size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * max(-len(text) % 8, length - 8 - len(text))
    return struct.pack("<Q", len(text)) + text


def plan_shards(items: Sequence[Item], limit: int = SHARD_BYTES, ranks: int = 1) -> list[Shard]:
    """Cut the items, in order, into files of at most `limit` bytes (or one tensor).

    Each process gets files of its own, balanced by the bytes that are read and written.
    """
    groups: list[tuple[int, list[Item]]] = []
    work = [item.nbytes + item.numel * item.width for item in items]
    for rank, run in enumerate(shares(work, ranks)):
        size = limit + 1  # begin a new file
        for item in items[run]:
            if size + item.numel * item.width > limit:  # all outputs' files hold the same tensors
                groups.append((rank, []))
                size = 0
            groups[-1][1].append(item)
            size += item.numel * item.width
    groups = groups or [(0, [])]
    total = len(groups)
    names = [f"model-{number + 1:05d}-of-{total:05d}.safetensors" for number in range(total)]
    if total == 1:
        names = ["model.safetensors"]
    return [
        Shard(name, tuple(group), rank) for name, (rank, group) in zip(names, groups, strict=True)
    ]


def run_of(plan: Sequence[Shard], rank: int) -> list[Item]:
    return [item for shard in plan if shard.rank == rank for item in shard.items]


class FolderWriter:
    """The tensors of one folder, written in order.

    Each process writes the files of its `rank`, and rank 0 the index.

    Args:
        output: the number of this vector in a pass.
        coding: of the pass, if there is one.
    """

    def __init__(
        self,
        folder: Path,
        plan: Sequence[Shard],
        metadata: Mapping[str, str],
        rank: int = 0,
        output: int = 0,
        coding: Coding | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.plan = folder, plan
        self._metadata, self._output, self._coding = metadata, output, coding
        self._records: dict[str, dict[str, object]] = {}  # of finished files
        self._shards = [shard for shard in plan if shard.rank == rank]
        self._file: BinaryIO | None = None
        self._sizes, self._size = list[int](), 0  # of the tensors in the open file, and of the last
        self._digest = xxhash.xxh3_128()

    def _most(self, items: Sequence[Item]) -> list[int]:
        """The bytes of each item; if they are coded, more than with an index of blocks."""
        if self._coding is None:
            return [item.numel * item.out.itemsize for item in items]
        return [2 * item.numel * item.widths[self._output] + 64 for item in items]

    def _header(self, sizes: Sequence[int] = (), length: int = 0) -> bytes:
        """The header of the open file; without `sizes` of the tensors, for the most."""
        items, metadata = self._shard.items, self._metadata
        if self._coding is not None:
            said = {"version": VERSION, **self._coding.described(self._output, items)}
            metadata = {**metadata, self._coding.key: json.dumps(said)}
        tensors = {
            item.name: (item.out, [size] if item.widths else item.shape)
            for item, size in zip(items, sizes or self._most(items), strict=True)
        }
        return header_of(metadata, tensors, length)

    def write(self, last: bool, values: Tensor) -> None:
        """Append elements to the current tensor; `last` ends it."""
        if self._file is None:
            self._shard, self._sizes = self._shards.pop(0), []
            path = self.folder / self._shard.name
            self._file = cast(BinaryIO, path.open("wb", buffering=0))
            self._digest.reset()
            self._put(memoryview(self._header()))
        self._put(memoryview(values.contiguous().view(torch.uint8).numpy()))  # type: ignore[arg-type]
        self._size += values.nbytes
        if last:
            self._sizes.append(self._size)
            self._size = 0
            if len(self._sizes) == len(self._shard.items):
                self._close()

    def _put(self, data: memoryview) -> None:
        assert self._file is not None
        self._digest.update(data)
        while data:
            data = data[self._file.write(data) :]

    def _close(self) -> None:
        assert self._file is not None
        record: dict[str, object] = {"bytes": self._file.tell(), HASH: self._digest.hexdigest()}
        if self._coding is not None:  # now the header can say where the tensors are
            self._file.seek(0)
            self._file.write(self._header(self._sizes, len(self._header())))
            record = file_record(self.folder / self._shard.name)
        self._records[self._shard.name] = record
        self._file.close()
        self._file = None

    def whole(self) -> dict[str, dict[str, object]]:
        """file -> {bytes, xxh3_128} of all files, which must be complete."""
        assert self._file is None and not self._shards
        return self._records

    def finish(
        self, others: Sequence[Mapping[str, dict[str, object]]] = ()
    ) -> dict[str, dict[str, object]]:
        """Write the index of several shards, and return file -> {bytes, xxh3_128}.

        Args:
            others: the result of `whole` in each process.
        """
        self.whole()
        for records in others:
            self._records |= records
        if len(self.plan) > 1:
            where = {item.name: shard.name for shard in self.plan for item in shard.items}
            total = sum(sum(self._most(shard.items)) for shard in self.plan)
            if self._coding is not None:
                total = sum(cast(int, record["bytes"]) for record in self._records.values())
            index = {"metadata": {"total_size": total}, "weight_map": where}
            path = self.folder / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            self._records[path.name] = file_record(path)
        return self._records


class FoldersSink:
    """A `stream.Sink` that writes output k to folder k.

    Attributes:
        measured: the sums of `Coding.measured` for each finished tensor.
    """

    def __init__(self, writers: Sequence[FolderWriter], coding: Coding | None = None) -> None:
        self.writers, self.coding = writers, coding
        self.measured: list[list[float]] = []
        self._sums: Tensor | None = None

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        last = stop == item.numel
        rows = values if self.coding is None else self.coding.rows(item, start, stop, values)
        for writer, row in zip(self.writers, rows, strict=True):
            writer.write(last, row)
        if self.coding is not None:
            sums = self.coding.measured(item.name, start)
            self._sums = sums if self._sums is None else self._sums + sums
            if last:
                self.measured.append(self._sums.tolist())
                self._sums = None


class MemorySink:
    """A `stream.Sink` that keeps output k as the state dict `states[k]`."""

    def __init__(self, outputs: int) -> None:
        self.states: list[dict[str, Tensor]] = [{} for _ in range(outputs)]

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        for state, row in zip(self.states, values, strict=True):
            if start == 0:
                state[item.name] = torch.empty(item.shape, dtype=item.out, device="cpu")
            state[item.name].view(-1)[start:stop] = row


class Stacked:
    """A `stream.Placing` that holds all outputs of each item, [K, numel]."""

    def __init__(self, items: Sequence[Item], outputs: int) -> None:
        self.held = {
            item.name: torch.empty(outputs, item.numel, dtype=item.out, device="cpu")
            for item in items
        }

    def place(self, item: Item, start: int, stop: int) -> Tensor:
        return self.held[item.name][:, start:stop]

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        raise AssertionError("every piece has a place")


def content_hash(metadata: Mapping[str, str], tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A checksum of tensors and metadata."""
    digest = xxhash.xxh3_128(json.dumps(sorted(metadata.items())).encode())
    for name, tensor in sorted(tensors, key=lambda each: each[0]):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(cast(memoryview, tensor.reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def file_record(path: Path) -> dict[str, object]:
    """{bytes, xxh3_128} of a file."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return {"bytes": path.stat().st_size, HASH: digest.hexdigest()}
