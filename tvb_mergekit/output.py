"""The output folder: checked before the work, made beside its place, renamed when it is whole."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tvb_mergekit.checkpoints import weight_files
from tvb_mergekit.errors import UserError


def check_output_folder(out: str | os.PathLike[str], inputs: Iterable[str]) -> None:
    """Refuse an output folder in which two models would mix.

    Raises:
        UserError: it is (or lies in, or holds) one of the inputs, holds weight files, or is a file.
    """
    target = os.path.realpath(out)
    for path in inputs:
        source = os.path.realpath(path)
        if target == source:
            raise UserError(f"the output folder {out} is the input {path}; name another folder")
        if os.path.isfile(source) and os.path.dirname(source) == target:
            raise UserError(f"the output folder {out} holds the input {path}; name another folder")
    if os.path.exists(target) and not os.path.isdir(target):
        raise UserError(f"the output {out} is a file; name a folder")
    found = weight_files(target)
    if found:
        shown = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
        raise UserError(
            f"the output folder {out} holds weight files of another model ({shown}); delete them "
            "or name another folder: loaders would mix old shards with new ones"
        )


def check_disk(out: str | os.PathLike[str], nbytes: int) -> None:
    """Raise UserError unless the disk of `out` has room for `nbytes` and 1 % of file overhead."""
    parent = Path(os.path.realpath(out))
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    needed = nbytes + nbytes // 100 + 2**20
    if free < needed:
        raise UserError(
            f"too little disk for {out}: the merged model takes {needed / 1e9:.3g} GB, "
            f"{free / 1e9:.3g} GB are free; free some, or write elsewhere"
        )


class StagedFolder:
    """A folder that appears under its name only when it is whole.

    `path` is `OUT.partial-XXXX/<last part of OUT>`, on the same disk; `publish()` moves what is in
    it to OUT. Whatever ends the process by an exception or a signal that Python sees leaves
    nothing; a kill leaves `OUT.partial-XXXX`, which may be deleted.
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.out = Path(os.path.abspath(out))
        self.out.parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(prefix=f"{self.out.name}.partial-", dir=self.out.parent)
        self._outer = Path(made)
        atexit.register(self.discard)
        self.path = self._outer / self.out.name
        self.path.mkdir()

    def publish(self) -> None:
        """Rename into place: whole if OUT does not exist or is empty, else file by file, with
        the weights' index and config.json last."""
        if self.out.is_dir() and not any(self.out.iterdir()):
            self.out.rmdir()
        for entry in self._outer.iterdir():  # mergekit may have put a second folder beside it
            target = self.out.parent / entry.name
            if not target.exists():
                os.rename(entry, target)
                continue
            files = sorted(entry.iterdir(), key=lambda f: (f.name == "config.json", f.name))
            for file in files:
                os.replace(file, target / file.name)
        self.discard()

    def discard(self) -> None:
        """Delete what was not published."""
        shutil.rmtree(self._outer, ignore_errors=True)
        atexit.unregister(self.discard)


def stale_parts(out: str | os.PathLike[str]) -> list[str]:
    """Folders that killed merges into `out` left behind."""
    target = Path(os.path.abspath(out))
    if not target.parent.is_dir():
        return []
    prefix = f"{target.name}.partial-"
    return sorted(str(p) for p in target.parent.iterdir() if p.name.startswith(prefix))
