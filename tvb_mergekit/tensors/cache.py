"""Gram matrices kept between merges, by their inputs.

Another lambda, M, temperature or method needs no new pass over the checkpoints. An entry is one
safetensors file of a few kB, named by the SHA-256 of its key. A key holds the fingerprints and file
stamps of the checkpoints in order, the tensors that counted, and changes by a tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from tvb_mergekit.atomic import write_file
from tvb_mergekit.core.gram import GramSums

VARIABLE = "TVB_MERGEKIT_CACHE"
FORMAT = "2"

_UNREADABLE = (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError)


def cache_folder() -> Path | None:
    """The folder of entries: $TVB_MERGEKIT_CACHE or the user's cache folder; None if it is off."""
    setting = os.environ.get(VARIABLE, "")
    if setting.lower() in ("off", "0", "none"):
        return None
    if setting:
        return Path(setting).expanduser()
    root = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(root) / "tvb-mergekit" / "gram" if os.path.isabs(root) else None  # no home


def key_of(parts: Mapping[str, object]) -> str:
    """The name of an entry: SHA-256 of `parts` as canonical JSON."""
    text = json.dumps({"format": FORMAT, **parts}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def load(key: str) -> GramSums | None:
    """The sums stored under `key`, or None."""
    folder = cache_folder()
    return None if folder is None else read_sums(folder / f"{key}.safetensors")


def store(key: str, sums: GramSums, tasks: Sequence[str], models: Sequence[str]) -> None:
    """Write an entry, if the cache can be written."""
    folder = cache_folder()
    if folder is not None:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_sums(folder / f"{key}.safetensors", sums, tasks, models)


def read_sums(path: Path) -> GramSums | None:
    """The sums in a file; None if it cannot be read."""
    try:
        note, tensors = _read(path)
        del note["tasks"], note["models"]
        return GramSums(**{**note, **tensors})
    except _UNREADABLE:
        return None


def write_sums(path: Path, sums: GramSums, tasks: Sequence[str], models: Sequence[str]) -> None:
    """Write a file for `read_sums`."""
    tensors = {n: v.contiguous() for n, v in vars(sums).items() if isinstance(v, Tensor)}
    note: dict[str, Any] = {n: v for n, v in vars(sums).items() if isinstance(v, int | float)}
    note |= {"tasks": list(tasks), "models": list(models)}
    write_file(path, safetensors.torch.save(tensors, {"tvb_mergekit": json.dumps(note)}))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safetensors.safe_open(path, framework="pt") as file:
        note: dict[str, Any] = json.loads(file.metadata()["tvb_mergekit"])
        return note, {name: file.get_tensor(name) for name in file.keys()}


@dataclass(frozen=True)
class Entry:
    """One stored Gram matrix, for listing."""

    path: Path
    nbytes: int
    modified: float  # seconds since the epoch
    tasks: list[str]
    models: list[str]
    num_parameters: int


def _files() -> list[Path]:
    """The files of the entries; users may keep other weights in the folder."""
    folder = cache_folder()
    every = folder.glob("*.safetensors") if folder is not None else ()
    return [path for path in every if re.fullmatch("[0-9a-f]{64}", path.stem)]


def entries() -> list[Entry]:
    """All readable entries, newest first."""
    found = []
    for path in _files():
        with suppress(*_UNREADABLE):
            note, _tensors = _read(path)
            stat, names = path.stat(), (note["tasks"], note["models"])
            found.append(Entry(path, stat.st_size, stat.st_mtime, *names, note["num_parameters"]))
    return sorted(found, key=lambda entry: -entry.modified)


def clear() -> int:
    """Delete every entry and return how many there were."""
    found = _files()
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)
