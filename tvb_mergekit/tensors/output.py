"""Outputs: folders that are checked before the work, and appear when they are complete.

In a safetensors file (https://huggingface.co/docs/safetensors) all shapes and offsets stand in
front. So every tensor has its place before it is computed: pieces are written in any order and by
any thread, and no complete tensor is in memory.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from tvb_mergekit.errors import UserError, check_path, listed, megabytes
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.checkpoint import NAMES, OwnFile
from tvb_mergekit.tensors.stream import Item, Sink

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # mergekit's and transformers' default
MARKER = "tvb_basis"  # in the metadata of a vector of a store: a difference, not a model
Shards = Mapping[str, Sequence[Item]]  # file -> its tensors in order


def check_output_folder(out: str | os.PathLike[str]) -> None:
    """Refuse an output folder that holds anything except hidden files, or what a new disk holds.

    Loaders would mix old shards with new ones, and a user's files would be lost.
    """
    check_path(out)
    place = _existing(out)
    if not place.is_dir() or not os.access(place, os.W_OK):
        why = "not writable" if place.is_dir() else "a file"
        raise UserError(f"the output {out}: {place} is {why}; name another folder")
    names = sorted(os.listdir(out)) if os.path.isdir(out) else []
    if found := [name for name in names if name[0] != "." and name != "lost+found"]:
        raise UserError(
            f"the output folder {out} already holds {listed(found, 4)}; delete what it holds, or "
            "name another folder"
        )


def check_disk(out: str | os.PathLike[str], nbytes: int) -> None:
    """Raise UserError unless the disk of `out` has room for `nbytes` and 1 % of file overhead."""
    free = shutil.disk_usage(_existing(out)).free
    if free < (needed := nbytes + nbytes // 100 + 2**20):
        raise UserError(
            f"too little disk for {out}: what will be written takes {megabytes(needed)}, "
            f"{megabytes(free)} are free; free some, or write elsewhere"
        )


def _existing(out: str | os.PathLike[str]) -> Path:
    path = Path(os.path.realpath(out))
    return next(place for place in (path, *path.parents) if place.exists())


@contextmanager
def staged(out: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a folder that appears as OUT when the block ends, and is deleted after an error.

    It lies in `OUT.partial-XXXX` next to OUT, or in `OUT/.partial-XXXX` if OUT exists, perhaps as a
    mount point. After a kill the partial folder may be deleted. The leader makes it.
    """
    target = Path(os.path.realpath(out))
    beside, start = target.parent, f"{target.name}.partial-"
    if target.is_dir():
        beside, start = target, ".partial-"
    outer: Path | None = None
    try:
        if ranks.leads():
            beside.mkdir(parents=True, exist_ok=True)
            outer = Path(tempfile.mkdtemp(prefix=start, dir=beside))
            (outer / target.name).mkdir()
        folder = ranks.led(lambda: Path(str(outer), target.name))
        yield folder
        if not target.exists():
            os.rename(folder, target)
        else:  # config.json last: a loader finds all or nothing
            files = sorted(folder.iterdir(), key=lambda f: (f.name == "config.json", f.name))
            # A log that began there does not cost hours of work; another merge does.
            if held := [file.name for file in files if (target / file.name).exists()]:
                raise UserError(f"{out} already holds {listed(held)} by now; name another folder")
            for file in files:
                shutil.move(str(file), str(target / file.name))
    finally:
        if outer:
            shutil.rmtree(outer, ignore_errors=True)


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
        stop = place + math.prod(shape) * dtype.itemsize
        told = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [place, stop]}
        entries[name], place = told, stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * max(-len(text) % 8, length - 8 - len(text))
    return struct.pack("<Q", len(text)) + text


def plan_shards(items: Sequence[Item], limit: int = SHARD_BYTES) -> Shards:
    """Cut the items, in order, into files of at most `limit` bytes (or one tensor)."""
    groups, size = [list[Item]()], 0
    for item in items:
        if groups[-1] and size + item.written > limit:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.written
    if len(groups) == 1:
        return {"model.safetensors": items}
    ends = f"of-{len(groups):05d}.safetensors"
    return {f"model-{k:05d}-{ends}": group for k, group in enumerate(groups, 1)}


def to_files(folder: Path, plan: Shards, metadata: Mapping[str, str]) -> Sink:
    """A sink that fills the weight files of one folder, with an index if there are several.

    The leader of several processes makes them.
    """
    places = dict[str, tuple[Path, int]]()  # file and first byte of each tensor
    local = threading.local()
    for name, items in plan.items():
        header = header_of(metadata, {item.name: (item.out, item.shape) for item in items})
        place, path = len(header), folder / name
        for item in items:
            places[item.name] = path, place
            place += item.written
        if ranks.leads():
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.write(header)
                file.truncate(place)
    if ranks.leads() and len(plan) > 1:
        total = sum(item.written for items in plan.values() for item in items)
        where = {name: path.name for name, (path, _) in places.items()}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    ranks.collect(None)

    def write(item: Item, start: int, stop: int, values: Tensor) -> None:
        path, place = places[item.name]
        if getattr(local, "path", None) != path:  # a thread holds one file open
            local.path, local.file = path, OwnFile(path, "r+b")
        local.file.seek(place + start * item.out.itemsize)
        data = values.contiguous().view(-1).view(torch.uint8).numpy()
        while len(data):  # Linux writes 2 GB at most
            data = data[local.file.write(data) :]

    return write


def each_into(*sinks: Sink) -> Sink:
    """A sink that gives output k to sink k."""

    def write(item: Item, start: int, stop: int, values: Tensor) -> None:
        for sink, row in zip(sinks, values.expand(len(sinks), -1), strict=True):
            sink(item, start, stop, row)

    return write


def in_memory(items: Sequence[Item], outputs: int = 1) -> tuple[dict[str, Tensor], Sink]:
    """All outputs of each item, [K, *shape], and a sink that fills them."""
    flat = {i.name: torch.empty(outputs, i.numel, dtype=i.out, device="cpu") for i in items}
    first = {i.name: i.first for i in items}  # those that are written may be experts of these

    def write(item: Item, start: int, stop: int, values: Tensor) -> None:
        flat[item.name][:, start - first[item.name] : stop - first[item.name]] = values

    return {i.name: flat[i.name].view(outputs, *i.shape) for i in items}, write


def checksum_of(path: Path) -> str:
    """xxh3_128 of a file."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(2**24):
            digest.update(block)
    return digest.hexdigest()


def write_file(target: Path, data: bytes) -> None:
    """Write a file completely or not at all: a new one next to `target`, which replaces it."""
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as folder:
        path = Path(folder, target.name)
        path.write_bytes(data)
        os.replace(path, target)
