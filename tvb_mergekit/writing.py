"""Safetensors files written as their tensors come: header first, then bytes in order, hashed.

The format (https://huggingface.co/docs/safetensors) puts all shapes and offsets in front, so a
file of known tensors needs no tensor to be held. Files are the same byte for byte however the
tensors were cut into pieces, and whether or not the writing was interrupted and gone on with.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import torch
import xxhash
from torch import Tensor

from tvb_mergekit.checkpoints import DTYPES
from tvb_mergekit.errors import UserError
from tvb_mergekit.ranks import shares
from tvb_mergekit.stream import Item

SHARD_BYTES = 5_000_000_000  # mergekit's and transformers' default
HASH = "xxh3_128"

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Shard:
    """One file: its name, its tensors in the order in which they come, and which process of
    several writes it."""

    name: str
    items: tuple[Item, ...]
    rank: int = 0

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """The file's first bytes: length, JSON, blanks up to a multiple of 8."""
        entries: dict[str, object] = {"__metadata__": dict(metadata)}
        place = 0
        for item in self.items:
            size = item.numel * item.out.itemsize
            entries[item.name] = {
                "dtype": _NAMES[item.out],
                "shape": list(item.shape),
                "data_offsets": [place, place + size],
            }
            place += size
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def plan_shards(items: Sequence[Item], limit: int = SHARD_BYTES, ranks: int = 1) -> list[Shard]:
    """Cut the items, in order, into files of at most `limit` bytes (or one tensor).

    Each of several processes gets files of its own: a run of items, balanced by the bytes that
    are read and written. So there may be more files than one process makes.
    """
    sizes = [item.numel * item.out.itemsize for item in items]
    work = [item.nbytes + nbytes for item, nbytes in zip(items, sizes, strict=True)]
    groups: list[tuple[int, list[Item]]] = []
    for rank, run in enumerate(shares(work, ranks)):
        size = limit + 1  # no file of another process
        for item, nbytes in zip(items[run], sizes[run], strict=True):
            if size + nbytes > limit:
                groups.append((rank, []))
                size = 0
            groups[-1][1].append(item)
            size += nbytes
    groups = groups or [(0, [])]
    if len(groups) == 1:
        return [Shard("model.safetensors", tuple(groups[0][1]), groups[0][0])]
    total = len(groups)
    return [
        Shard(f"model-{number + 1:05d}-of-{total:05d}.safetensors", tuple(group), rank)
        for number, (rank, group) in enumerate(groups)
    ]


def run_of(plan: Sequence[Shard], rank: int) -> list[Item]:
    """The items that one process writes."""
    return [item for shard in plan if shard.rank == rank for item in shard.items]


@dataclass
class FolderWriter:
    """The tensors of one folder, written in order.

    Of several processes each writes the files of its `rank`, and one of them the index of all.

    Attributes:
        hashes: of the tensors that are there already, in order: the checksum of what the file that
            they are in held when each was whole. The bytes are read again and compared.

    Raises:
        UserError: what is there is not what `hashes` says.
    """

    folder: Path
    plan: Sequence[Shard]
    metadata: Mapping[str, str]
    hashes: Sequence[str] = ()
    rank: int = 0
    written: dict[str, dict[str, object]] = field(default_factory=dict)  # file -> bytes, hash
    _file: BinaryIO | None = None
    _shard: int = -1
    _left: int = 0  # items of the open shard that are still to come

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.shards = [shard for shard in self.plan if shard.rank == self.rank]
        self._digest = xxhash.xxh3_128()
        done = 0
        while done < len(self.hashes):
            shard = self.shards[self._shard + 1]
            here = min(len(self.hashes) - done, len(shard.items))
            done += here
            self._reopen(shard, here, self.hashes[done - 1])
            if not self._left:
                self._close()

    def _reopen(self, shard: Shard, done: int, digest: str) -> None:
        """Go on after `done` tensors of a file, the checksum of whose bytes so far is `digest`."""
        header = shard.header(self.metadata)
        size = len(header) + sum(i.numel * i.out.itemsize for i in shard.items[:done])
        path = self.folder / shard.name
        if not path.is_file() or path.stat().st_size < size:
            raise UserError(f"{path}: shorter than was written; start anew without --resume")
        self._shard += 1
        self._left = len(shard.items) - done
        self._digest.reset()
        self._file = cast(BinaryIO, path.open("r+b", buffering=0))
        self._file.truncate(size)
        while block := self._file.read(2**24):
            self._digest.update(block)
        if self.digest != digest:
            raise UserError(f"{path}: not what was written; start anew without --resume")

    def write(self, item: Item, last: bool, values: Tensor) -> None:
        """The next elements of the tensor whose turn it is; `last` ends it."""
        if self._file is None:
            self._shard += 1
            shard = self.shards[self._shard]
            self._left = len(shard.items)
            self._digest.reset()
            self._file = cast(BinaryIO, (self.folder / shard.name).open("wb", buffering=0))
            self._put(memoryview(shard.header(self.metadata)))
        data = values.contiguous().view(torch.uint8).numpy()
        self._put(memoryview(data))  # type: ignore[arg-type]
        if last:
            self._left -= 1
            if not self._left:
                self._close()

    @property
    def digest(self) -> str:
        """The checksum of the last file so far."""
        return self._digest.hexdigest()

    def _put(self, data: memoryview) -> None:
        assert self._file is not None
        self._digest.update(data)
        while data:
            data = data[self._file.write(data) :]

    def _close(self) -> None:
        assert self._file is not None
        name = self.shards[self._shard].name
        self.written[name] = {"bytes": self._file.tell(), HASH: self.digest}
        self._file.close()
        self._file = None

    def whole(self) -> dict[str, dict[str, object]]:
        """All files are written; returns file -> {bytes, xxh3_128}."""
        assert self._file is None and self._shard == len(self.shards) - 1
        return self.written

    def finish(
        self, records: Sequence[Mapping[str, dict[str, object]]] = ()
    ) -> dict[str, dict[str, object]]:
        """Write the shard index where there is one; returns file -> {bytes, xxh3_128}.

        Args:
            records: what `whole` returned in each process.
        """
        self.whole()
        for written in records:
            self.written |= written
        if len(self.plan) > 1:
            where = {item.name: shard.name for shard in self.plan for item in shard.items}
            total = sum(i.numel * i.out.itemsize for shard in self.plan for i in shard.items)
            index = {"metadata": {"total_size": total}, "weight_map": where}
            name = "model.safetensors.index.json"
            text = json.dumps(index, indent=2) + "\n"
            (self.folder / name).write_text(text, encoding="utf-8")
            self.written[name] = file_record(self.folder / name)
        return self.written


class FoldersSink:
    """A `stream.Sink`: output k goes to folder k.

    The journal gets a line for each tensor that is whole: how many there are by then, and the
    checksum of what each folder's last file holds.
    """

    def __init__(self, writers: Sequence[FolderWriter], journal: Path | None = None) -> None:
        self.writers = writers
        self.done = len(writers[0].hashes)
        self._journal = journal

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        last = stop == item.numel
        for writer, row in zip(self.writers, values, strict=True):
            writer.write(item, last, row)
        if last:
            self.done += 1
            if self._journal is not None:
                hashes = [writer.digest for writer in self.writers]
                line = json.dumps([self.done, hashes])
                with self._journal.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")


def read_journal(path: Path) -> list[list[str]]:
    """The checksums of a journal: for each tensor that is whole, one for each folder.

    A last line that a kill cut is taken out.

    Raises:
        UserError: another line is damaged.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
        path.write_bytes(b"".join(lines))
    hashes: list[list[str]] = []
    for number, line in enumerate(lines, 1):
        try:
            done, each = json.loads(line)
            whole = done == number and all(isinstance(text, str) for text in each)
        except (ValueError, TypeError):  # what is no JSON, or no pair
            whole = False
        if not whole or len(each) != len(hashes[0] if hashes else each):
            raise UserError(f"{path}: line {number} cannot be read; start anew without --resume")
        hashes.append(each)
    return hashes


class MemorySink:
    """A `stream.Sink` that holds output k as the state dict `states[k]`."""

    def __init__(self, outputs: int) -> None:
        self.states: list[dict[str, Tensor]] = [{} for _ in range(outputs)]

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        for state, row in zip(self.states, values, strict=True):
            if start == 0:
                state[item.name] = torch.empty(item.shape, dtype=item.out)
            state[item.name].view(-1)[start:stop] = row


def file_record(path: Path) -> dict[str, object]:
    """{bytes, xxh3_128} of a file as it is."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(2**24):
            digest.update(block)
    return {"bytes": path.stat().st_size, HASH: digest.hexdigest()}
