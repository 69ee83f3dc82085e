"""Files that are written completely or not at all, and folders that hold no other files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tvb_mergekit.errors import UserError

MARK = ".unfinished"  # in STORE.new: the folder is ours
REPORT = ("basis.json", "basis.safetensors")  # files of a store, and of a merged model's basis/


def check_outside(out: str | os.PathLike[str]) -> None:
    """Raise UserError if `out` lies in a store or in a report, which hold no other files."""
    for folder in Path(os.path.realpath(out)).parents:
        if all((folder / name).is_file() for name in REPORT):
            raise UserError(f"{out} lies in {folder}, a store or a report; name another place")


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """A path for a file that replaces `target` at the end, and is deleted after an error."""
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as folder:
        path = Path(folder) / target.name
        yield path
        os.replace(path, target)


def write_file(target: Path, data: bytes) -> None:
    """Write next to `target`, then rename."""
    with beside(target) as path:
        path.write_bytes(data)


def next_to(store: str | os.PathLike[str], kind: str) -> Path:
    """The folder STORE.new, STORE.previous or STORE.partial."""
    place = Path(os.path.realpath(store))
    return place.with_name(f"{place.name}.{kind}")


def inode(folder: Path) -> int | None:
    """The number of a folder in its file system, which a rename keeps; None if it is not there."""
    try:
        return folder.stat().st_ino
    except OSError:
        return None


def check_interrupted(store: str | os.PathLike[str]) -> None:
    """Raise UserError if a change of a store was interrupted between its two renames."""
    new = next_to(store, "new")
    if not os.path.exists(store) and new.is_dir() and next_to(store, "previous").is_dir():
        raise UserError(
            f"{store}: a change was interrupted; complete it: mv {new} {os.path.realpath(store)}"
        )
