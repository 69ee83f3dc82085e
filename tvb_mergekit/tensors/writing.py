"""Safetensors files in which every tensor has its place before it is computed.

The format (https://huggingface.co/docs/safetensors) puts all shapes and offsets in front. So pieces
of tensors are written in any order and by any thread, and no complete tensor is in memory.
"""

from __future__ import annotations

import json
import math
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import xxhash
from torch import Tensor

from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.checkpoint import NAMES, OwnFile
from tvb_mergekit.tensors.stream import Item, written_bytes

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # mergekit's and transformers' default
MARKER = "tvb_basis"  # in the metadata of a vector of a store: a difference, not a model


@dataclass(frozen=True)
class Shard:
    """One file: its name, and its tensors in order."""

    name: str
    items: tuple[Item, ...]


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


def plan_shards(items: Sequence[Item], limit: int = SHARD_BYTES) -> list[Shard]:
    """Cut the items, in order, into files of at most `limit` bytes (or one tensor)."""
    groups, size = [list[Item]()], 0
    for item in items:
        if groups[-1] and size + item.written > limit:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.written
    names = [f"model-{k:05d}-of-{len(groups):05d}.safetensors" for k in range(1, len(groups) + 1)]
    if len(groups) == 1:
        names = ["model.safetensors"]
    return [Shard(name, tuple(group)) for name, group in zip(names, groups, strict=True)]


class FolderWriter:
    """The weight files of one folder. Of several processes, the leader makes them, before all."""

    def __init__(self, folder: Path, plan: Sequence[Shard], metadata: Mapping[str, str]) -> None:
        self.folder, self.plan, self._local = folder, plan, threading.local()
        self._places: dict[str, tuple[Path, int]] = {}  # file and first byte of each tensor
        for shard in plan:
            header = header_of(metadata, {i.name: (i.out, i.shape) for i in shard.items})
            place, path = len(header), folder / shard.name
            for item in shard.items:
                self._places[item.name] = path, place
                place += item.written
            if ranks.world().leads:
                folder.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    file.write(header)
                    file.truncate(place)
        ranks.world().led(lambda: None)

    def write(self, item: Item, start: int, values: Tensor) -> None:
        """Write elements of a tensor, from `start` on, at their place; in any thread."""
        path, place = self._places[item.name]
        if getattr(self._local, "path", None) != path:  # a thread holds one file open
            self._local.path, self._local.file = path, OwnFile(path, "r+b")
        file: OwnFile = self._local.file
        file.seek(place + start * item.out.itemsize)
        data = cast(memoryview, values.contiguous().view(torch.uint8).numpy())
        done = 0
        while done < len(data):  # Linux writes 2 GB at most
            done += file.write(data[done:])

    def finish(self) -> None:
        """Write the index, if there are several files."""
        self._local = threading.local()  # closes this thread's file
        if ranks.world().leads and len(self.plan) > 1:
            where = {item.name: shard.name for shard in self.plan for item in shard.items}
            total = written_bytes(item for shard in self.plan for item in shard.items)
            index = {"metadata": {"total_size": total}, "weight_map": where}
            text = json.dumps(index, indent=2) + "\n"
            (self.folder / INDEX).write_text(text, encoding="utf-8")


class FoldersSink:
    """A `stream.Sink` that writes output k to folder k."""

    def __init__(self, writers: Sequence[FolderWriter]) -> None:
        self._writers = writers

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        for writer, row in zip(self._writers, values.expand(len(self._writers), -1), strict=True):
            writer.write(item, start, row)


class MemorySink:
    """A `stream.Sink` that keeps output k as the state dict `states[k]`, in the items' order."""

    def __init__(self, items: Sequence[Item], outputs: int = 1) -> None:
        self.states: list[dict[str, Tensor]] = [
            {i.name: torch.empty(i.shape, dtype=i.out, device="cpu") for i in items}
            for _ in range(outputs)
        ]

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        for state, row in zip(self.states, values.expand(len(self.states), -1), strict=True):
            state[item.name].view(-1)[start:stop] = row


class Stacked:
    """A `stream.Sink` that holds all outputs of each item, [K, numel]."""

    def __init__(self, items: Sequence[Item], outputs: int) -> None:
        self.held = {
            item.name: torch.empty(outputs, item.numel, dtype=item.out, device="cpu")
            for item in items
        }

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        self.held[item.name][:, start:stop] = values


def checksum_of(path: Path) -> str:
    """xxh3_128 of a file."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(2**24):
            digest.update(block)
    return digest.hexdigest()
