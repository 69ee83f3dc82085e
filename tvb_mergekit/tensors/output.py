"""Outputs: folders that are checked before the work, and appear when they are complete.

In a safetensors file (https://huggingface.co/docs/safetensors) all shapes and offsets stand in
front. So every tensor has its place before it is computed: pieces are written in any order and by
any thread, and no complete tensor is in memory.
"""

from __future__ import annotations

import atexit
import glob
import json
import logging
import math
import os
import shutil
import struct
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
import xxhash
from torch import Tensor

from tvb_mergekit.errors import UserError, check_names, listed, megabytes
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.checkpoint import NAMES, OwnFile, weight_files
from tvb_mergekit.tensors.stream import Item, Sink

LOG = logging.getLogger(__name__)
# Files of a merge besides weights, which an existing output folder must not have.
WRITTEN = tuple(
    "store.json config.json README.md mergekit_config.yml basis generation_config.json "
    "tokenizer.json tokenizer_config.json special_tokens_map.json tokenizer.model vocab.json "
    "merges.txt chat_template.jinja".split()
)
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # mergekit's and transformers' default
MARKER = "tvb_basis"  # in the metadata of a vector of a store: a difference, not a model
Shards = Mapping[str, Sequence[Item]]  # file -> its tensors in order


def check_output_folder(out: str | os.PathLike[str], inputs: Iterable[str] = ()) -> None:
    """Refuse an output folder in which two models would mix or a user's files would be lost."""
    check_names(out)
    target = os.path.realpath(out)
    for path in inputs:
        source = os.path.realpath(path)
        how = "is" if target == source else ""
        if os.path.isfile(source) and os.path.dirname(source) == target:
            how = "holds"
        elif target.startswith(source + os.sep):
            how = "lies in"
        if how:
            raise UserError(f"the output folder {out} {how} the input {path}; name another folder")
    place = _existing(target)
    if not place.is_dir() or not os.access(place, os.W_OK):
        why = "not writable" if place.is_dir() else "a file"
        raise UserError(f"the output {out}: {place} is {why}; name another folder")
    if found := weight_files(target):
        raise UserError(
            f"the output folder {out} already holds weight files ({listed(found, 4)}); delete them "
            "or name another folder: loaders would mix old shards with new ones"
        )
    _refuse_existing(out, WRITTEN)


def _refuse_existing(out: str | os.PathLike[str], names: Iterable[str]) -> None:
    if found := [name for name in names if Path(out, name).exists()]:
        raise UserError(
            f"the output folder {out} already holds {listed(found, 4)}, which the merge would "
            "overwrite; name another folder"
        )


def check_new_folder(out: str | os.PathLike[str], inputs: Iterable[str] = ()) -> None:
    """Check an output folder that one rename will create: it must be missing or empty."""
    check_output_folder(out, inputs)
    if os.path.isdir(out) and (found := sorted(os.listdir(out))):
        raise UserError(f"the folder {out} already holds {listed(found, 4)}; name another folder")


def check_disk(out: str | os.PathLike[str], nbytes: int) -> None:
    """Raise UserError unless the disk of `out` has room for `nbytes` and 1 % of file overhead."""
    free = shutil.disk_usage(_existing(os.path.realpath(out))).free
    if free < (needed := nbytes + nbytes // 100 + 2**20):
        raise UserError(
            f"too little disk for {out}: what will be written takes {megabytes(needed)}, "
            f"{megabytes(free)} are free; free some, or write elsewhere"
        )


def _existing(path: str) -> Path:
    return next(place for place in (Path(path), *Path(path).parents) if place.exists())


class StagedFolder:
    """A folder that appears under its name when it is complete.

    `path` lies in `OUT.partial-XXXX` next to OUT, or in `OUT/.partial-XXXX` if OUT exists, perhaps
    as a mount point. An exception deletes it; after a kill the partial folder may be deleted.
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.out = Path(os.path.realpath(out))
        inside = self.out.is_dir()
        parent = self.out if inside else self.out.parent
        prefix = ".partial-" if inside else f"{self.out.name}.partial-"
        parent.mkdir(parents=True, exist_ok=True)
        self._outer = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        atexit.register(self.discard)
        self.path = self._outer / self.out.name
        self.path.mkdir()

    def publish(self) -> None:
        """Rename the folder, or its files with config.json last if OUT exists."""
        check_output_folder(self.out)
        if not self.out.exists():
            os.rename(self.path, self.out)
        else:
            files = sorted(self.path.iterdir(), key=lambda f: (f.name == "config.json", f.name))
            _refuse_existing(self.out, [file.name for file in files])
            for file in files:
                shutil.move(str(file), str(self.out / file.name))
        self.discard()

    def discard(self) -> None:
        """Delete all that was not published."""
        shutil.rmtree(self._outer, ignore_errors=True)
        atexit.unregister(self.discard)


def warn_of_stale_parts(out: str | os.PathLike[str]) -> None:
    """Name the folders that killed merges left next to `out` or in it."""
    target = Path(os.path.realpath(out))
    beside = target.parent.glob(f"{glob.escape(target.name)}.partial-*")
    for path in sorted(map(str, [*beside, *target.glob(".partial-*")])):
        LOG.warning("%s was left by a merge that was killed or still runs; delete it if not", path)


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


class FolderWriter:
    """The weight files of one folder. Of several processes, the leader makes them, before all."""

    def __init__(self, folder: Path, plan: Shards, metadata: Mapping[str, str]) -> None:
        self.folder, self.plan, self._local = folder, plan, threading.local()
        self._places: dict[str, tuple[Path, int]] = {}  # file and first byte of each tensor
        for name, items in plan.items():
            header = header_of(metadata, {item.name: (item.out, item.shape) for item in items})
            place, path = len(header), folder / name
            for item in items:
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
            where = {item.name: name for name, items in self.plan.items() for item in items}
            total = sum(item.written for items in self.plan.values() for item in items)
            index = {"metadata": {"total_size": total}, "weight_map": where}
            text = json.dumps(index, indent=2) + "\n"
            (self.folder / INDEX).write_text(text, encoding="utf-8")


def into(*writers: FolderWriter) -> Sink:
    """A sink that writes output k to folder k."""

    def write(item: Item, start: int, stop: int, values: Tensor) -> None:
        for writer, row in zip(writers, values.expand(len(writers), -1), strict=True):
            writer.write(item, start, row)

    return write


class MemorySink:
    """A sink that keeps all outputs of each item, `held` [K, numel], and so K state dicts."""

    def __init__(self, items: Sequence[Item], outputs: int = 1) -> None:
        self.held = {
            i.name: torch.empty(outputs, i.numel, dtype=i.out, device="cpu") for i in items
        }
        self.states = [
            {item.name: self.held[item.name][k].view(item.shape) for item in items}
            for k in range(outputs)
        ]

    def __call__(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        self.held[item.name][:, start:stop] = values


def checksum_of(path: Path) -> str:
    """xxh3_128 of a file."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(2**24):
            digest.update(block)
    return digest.hexdigest()
