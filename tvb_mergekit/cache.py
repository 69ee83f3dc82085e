"""Gram matrices kept between merges, by what entered them; and which files were verified.

Another lambda, M, temperature or method needs no new pass over the checkpoints. An entry is one
safetensors file of a few kB named by the SHA-256 of its key: fingerprints and file stamps of the
checkpoints in order, the tensors that counted, and how a tokenizer changed them.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import safetensors
from safetensors.torch import save_file
from torch import Tensor

from tvb_mergekit.gram import GramSums

VARIABLE = "TVB_MERGEKIT_CACHE"
FORMAT = "2"


_off = ContextVar("tvb_mergekit_cache_off", default=False)


@contextmanager
def off() -> Iterator[None]:
    """No cache for what runs within."""
    token = _off.set(True)
    try:
        yield
    finally:
        _off.reset(token)


def cache_folder() -> Path | None:
    """Where entries live: $TVB_MERGEKIT_CACHE, else the user's cache folder; None if `off`."""
    if _off.get():
        return None
    setting = os.environ.get(VARIABLE, "")
    if setting.lower() in ("off", "0", "none"):
        return None
    if setting:
        return Path(setting).expanduser()
    return user_folder() / "gram"


def user_folder() -> Path:
    """Ours in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "tvb-mergekit"


def key_of(parts: Mapping[str, object]) -> str:
    """The name of an entry: SHA-256 of `parts` as canonical JSON."""
    text = json.dumps({"format": FORMAT, **parts}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def load(key: str) -> GramSums | None:
    """The sums stored under `key`, or None."""
    folder = cache_folder()
    return None if folder is None else read_sums(folder / f"{key}.safetensors")


def read_sums(path: Path) -> GramSums | None:
    """The sums in a file; one that cannot be read counts as absent."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
            note = json.loads(file.metadata()["tvb_mergekit"])
        return GramSums(
            tensors["gram"],
            note["base_norm_squared"],
            note["num_parameters"],
            tensors.get("sketch_gram"),
            tensors.get("sketch_tasks"),
            tensors.get("matrix_squares"),
        )
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError):
        return None


def store(key: str, sums: GramSums, tasks: Sequence[str], models: Sequence[str]) -> None:
    """Write an entry. A cache that cannot be written is no error."""
    folder = cache_folder()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_sums(folder / f"{key}.safetensors", sums, tasks, models)
    except (OSError, safetensors.SafetensorError):
        return


def write_sums(path: Path, sums: GramSums, tasks: Sequence[str], models: Sequence[str]) -> None:
    """Write an entry at `path`."""
    tensors = {"gram": sums.gram}
    if sums.sketch_gram is not None and sums.sketch_tasks is not None:
        tensors |= {"sketch_gram": sums.sketch_gram, "sketch_tasks": sums.sketch_tasks}
    if sums.matrix_squares is not None:
        tensors["matrix_squares"] = sums.matrix_squares
    note = {
        "base_norm_squared": sums.base_norm_squared,
        "num_parameters": sums.num_parameters,
        "tasks": list(tasks),
        "models": list(models),
    }
    _write(path, tensors, note)


def _write(path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, object]) -> None:
    """Write beside `path`, then rename."""
    handle, beside = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, beside, metadata={"tvb_mergekit": json.dumps(note)})
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


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
    """Delete every entry; returns how many there were."""
    folder = cache_folder()
    count = 0
    if folder is not None and folder.is_dir():
        for pattern in ("*.safetensors", "*.part"):
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)
                count += path.suffix == ".safetensors"
        for path in (folder / "verified").glob("*"):
            path.unlink(missing_ok=True)
    return count


def is_verified(path: Path, digest: str) -> bool:
    """Whether this file, unchanged since, has been seen to have this checksum.

    Since the last boot: what was seen need not have reached the disk before a power cut. Where
    none can be told from the next, nothing is remembered.
    """
    note = _note(path)
    try:
        return note is not None and note.read_text(encoding="utf-8") == _stamp(path, digest)
    except OSError:
        return False


def note_verified(path: Path, digest: str) -> None:
    """Remember that a file has this checksum; a cache that cannot be written is no error."""
    note = _note(path)
    if note is None:
        return
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        beside = note.with_suffix(f".{os.getpid()}.part")
        beside.write_text(_stamp(path, digest), encoding="utf-8")
        os.replace(beside, note)
    except OSError:
        return


def _note(path: Path) -> Path | None:
    folder = cache_folder()
    if folder is None or not _boot():
        return None
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()
    return folder / "verified" / name[:32]


def _stamp(path: Path, digest: str) -> str:
    stat = path.stat()
    times = f"{stat.st_mtime_ns} {stat.st_ctime_ns}"
    return f"{digest} {stat.st_size} {times} {stat.st_ino} {_boot()}"


def _boot() -> str:
    """What tells this boot of the machine from the one before; empty but on Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
