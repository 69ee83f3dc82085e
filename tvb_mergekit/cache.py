"""Gram matrices kept between merges, by what entered them.

Another lambda, M, temperature or method needs no new pass over the checkpoints. An entry is one
safetensors file of a few kB named by the SHA-256 of its key: fingerprints and file stamps of the
checkpoints in order, the tensors that counted, and how a tokenizer changed them.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
from safetensors.torch import save_file

from tvb_mergekit.gram import GramSums

VARIABLE = "TVB_MERGEKIT_CACHE"
FORMAT = "1"


def cache_folder() -> Path | None:
    """Where entries live: $TVB_MERGEKIT_CACHE, else the user's cache folder; None if `off`."""
    setting = os.environ.get(VARIABLE, "")
    if setting.lower() in ("off", "0", "none"):
        return None
    if setting:
        return Path(setting).expanduser()
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "tvb-mergekit" / "gram"


def key_of(parts: Mapping[str, object]) -> str:
    """The name of an entry: SHA-256 of `parts` as canonical JSON."""
    text = json.dumps({"format": FORMAT, **parts}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def load(key: str) -> GramSums | None:
    """The sums stored under `key`, or None; a file that cannot be read counts as absent."""
    folder = cache_folder()
    if folder is None:
        return None
    path = folder / f"{key}.safetensors"
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            note = json.loads(file.metadata()["tvb_mergekit"])
        return GramSums(
            tensors["gram"],
            note["base_norm_squared"],
            note["num_parameters"],
            tensors.get("sketch_gram"),
            tensors.get("sketch_tasks"),
        )
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError):
        return None


def store(key: str, sums: GramSums, tasks: list[str], models: list[str]) -> None:
    """Write an entry beside its place, then rename. A cache that cannot be written is no error."""
    folder = cache_folder()
    if folder is None:
        return
    tensors = {"gram": sums.gram}
    if sums.sketch_gram is not None and sums.sketch_tasks is not None:
        tensors |= {"sketch_gram": sums.sketch_gram, "sketch_tasks": sums.sketch_tasks}
    note = {
        "base_norm_squared": sums.base_norm_squared,
        "num_parameters": sums.num_parameters,
        "tasks": tasks,
        "models": models,
    }
    beside = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=folder, suffix=".part")
        os.close(handle)
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, beside, metadata={"tvb_mergekit": json.dumps(note)})
        os.replace(beside, folder / f"{key}.safetensors")
    except (OSError, safetensors.SafetensorError):
        if beside:
            Path(beside).unlink(missing_ok=True)


@dataclass(frozen=True)
class Entry:
    """One stored Gram matrix, for listing."""

    path: Path
    nbytes: int
    modified: float  # seconds since the epoch
    tasks: list[str]
    models: list[str]
    num_parameters: int


def entries() -> list[Entry]:
    """All readable entries, newest first."""
    folder = cache_folder()
    found = []
    for path in folder.glob("*.safetensors") if folder is not None else ():
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                note = json.loads(file.metadata()["tvb_mergekit"])
            stat = path.stat()
            found.append(
                Entry(
                    path,
                    stat.st_size,
                    stat.st_mtime,
                    note["tasks"],
                    note["models"],
                    note["num_parameters"],
                )
            )
        except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError):
            continue
    return sorted(found, key=lambda entry: -entry.modified)


def clear() -> int:
    """Delete every entry (and what an interrupted write left); returns how many were deleted."""
    folder = cache_folder()
    count = 0
    if folder is not None and folder.is_dir():
        for path in [*folder.glob("*.safetensors"), *folder.glob("*.part")]:
            path.unlink(missing_ok=True)
            count += path.suffix == ".safetensors"
    return count
