"""The output folder: checked before the work, written next to its place, renamed when complete."""

from __future__ import annotations

import atexit
import glob
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tvb_mergekit.errors import UserError, check_names, listed, megabytes
from tvb_mergekit.tensors.checkpoint import weight_files

LOG = logging.getLogger(__name__)
# Files of a merge besides weights, which an existing output folder must not have.
WRITTEN = tuple(
    "store.json config.json README.md mergekit_config.yml basis generation_config.json "
    "tokenizer.json tokenizer_config.json special_tokens_map.json tokenizer.model vocab.json "
    "merges.txt chat_template.jinja".split()
)


def check_output_folder(out: str | os.PathLike[str], inputs: Iterable[str] = ()) -> None:
    """Refuse an output folder in which two models would mix or a user's files would be lost.

    Raises:
        UserError: it is, lies in or holds an input, or is a file. It holds weights
            or a file that the merge writes. Its name is not a line of text.
    """
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
    place = existing(Path(target))
    if not place.is_dir():
        raise UserError(f"the output {out}: {place} is a file; name a folder")
    if not os.access(place, os.W_OK):
        raise UserError(f"the output {out}: {place} is not writable; name another folder")
    if found := weight_files(target):
        raise UserError(
            f"the output folder {out} already holds weight files ({listed(found, 4)}); delete them "
            "or name another folder: loaders would mix old shards with new ones"
        )
    _refuse_existing(Path(target), WRITTEN)


def _refuse_existing(out: Path, names: Iterable[str]) -> None:
    if found := [name for name in names if (out / name).exists()]:
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
    free = shutil.disk_usage(existing(Path(os.path.realpath(out)))).free
    needed = nbytes + nbytes // 100 + 2**20
    if free < needed:
        raise UserError(
            f"too little disk for {out}: what will be written takes {megabytes(needed)}, "
            f"{megabytes(free)} are free; free some, or write elsewhere"
        )


def existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.exists())


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
        """Rename the folder, or its files with config.json last if OUT exists.

        Raises:
            UserError: another run has written a model there.
        """
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
