"""Changes of a store: a lock, a new folder next to the store, two renames.

A change is written to STORE.new, where unchanged vectors are hard links. `StoreWriter.commit`
renames STORE to STORE.previous and STORE.new to STORE. `undo_change` swaps STORE and
STORE.previous.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock

from tvb_mergekit.atomic import MARK, check_interrupted, next_to
from tvb_mergekit.errors import UserError, check_names
from tvb_mergekit.store.facts import FACTS, TENSORS, FileRecord, StoreFacts, record_of, write_facts
from tvb_mergekit.store.report import write_tensors
from tvb_mergekit.store.store import Bases, is_store, load, numbers_of, read_store_facts
from tvb_mergekit.store.vectors import Vectors, facts_of

LOG = logging.getLogger(__name__)


class StoreWriter:
    """The next state of the store at `path`, in a `folder` next to it; STORE.new by default."""

    def __init__(self, path: str | os.PathLike[str], folder: Path | None = None) -> None:
        self.store = Path(os.path.realpath(path))
        self.folder = folder or next_to(self.store, "new")
        self._begun = False

    def begin(self) -> None:
        """Make the folder. A folder that an interrupted change has left is deleted.

        Raises:
            UserError: a folder of the user has this name.
        """
        mine = (self.folder / MARK).is_file()
        if os.path.lexists(self.folder) and not mine and os.listdir(self.folder):
            how, before = "move or delete it", next_to(self.store, "previous")
            stores = is_store(self.folder) and is_store(self.store) and not before.exists()
            if stores and _are_neighbours(*map(read_store_facts, (self.folder, self.store))):
                how = f"an undo was interrupted; complete it: mv {self.folder} {before}"
            raise UserError(f"{self.folder} is in the way: {how}")
        shutil.rmtree(self.folder, ignore_errors=True)
        self._begun = True
        self.folder.mkdir(parents=True)
        (self.folder / MARK).touch()

    def discard(self) -> None:
        """Delete the folder of a change that was begun here and not published."""
        if self._begun and (self.folder / MARK).is_file():
            shutil.rmtree(self.folder, ignore_errors=True)
        elif self._begun:
            with suppress(OSError):
                self.folder.rmdir()  # without its mark, which could not be made

    def keep(self, bases: Bases, without: str = "") -> dict[str, FileRecord]:
        """Link the present vectors, except one, into the next state; returns their records."""
        assert bases.path is not None
        store = bases.facts.store
        files = store.within([name for name in store.folders if name != without])
        files.pop(TENSORS, None)
        for name in files:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            link(bases.path / name, self.folder / name)
        return files

    def commit(self, vectors: Vectors, history: Mapping[str, Any]) -> Bases:
        """Write the rest of the next state, whose vectors are there, and publish it."""
        facts = facts_of(vectors, history)
        write_tensors(self.folder, {**numbers_of(facts), **vectors.tensors})
        files = {**vectors.files, TENSORS: record_of(self.folder / TENSORS)}
        store = facts.store.but(files=files)
        if store.base_path and store.base_beside is None:
            place, name = os.path.split(store.base_path)
            base = os.path.join(os.path.realpath(place), name)  # as `self.store`
            store = store.but(base_beside=os.path.relpath(base, self.store))
        there = (self.store / FACTS).is_file()
        before = read_store_facts(self.store).checksum if there else None
        facts = facts.but(store=store.but(previous=before))
        write_facts(self.folder, facts)
        if there:
            previous = next_to(self.store, "previous")
            old = self.store.with_name(f".{self.store.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            moves = [(previous, old)] * previous.is_dir()
            _rename(*moves, (self.store, previous), (self.folder, self.store))
            shutil.rmtree(old, ignore_errors=True)
        else:
            with suppress(FileNotFoundError):
                self.store.rmdir()  # an empty folder
            os.rename(self.folder, self.store)
        (self.store / MARK).unlink(missing_ok=True)
        return load(self.store)


@contextmanager
def changing(path: str | os.PathLike[str], new: bool = False) -> Iterator[StoreWriter]:
    """A writer of the next state of a store, or of a `new` one, under the lock of the store.

    Raises:
        UserError: an earlier change was interrupted, the store holds a user's file, or a file
            cannot be written. The store stays as it was.
    """
    writer = StoreWriter(path)
    check_movable(writer.store)
    if not new and not writer.store.parent.is_dir():
        read_store_facts(writer.store)  # raises: a lock would make the folder
    store, held = writer.store, lock(path)
    try:
        previous = next_to(store, "previous")
        if store.is_dir() and is_store(store):
            _check_own(store, read_store_facts(store))
        check_interrupted(store)
        if previous.exists() and not is_store(previous):
            raise UserError(f"{previous} is in the way; move or delete it")
        if not _is_state_of(store, previous):
            raise UserError(f"{previous} is of another store, and in the way; move or delete it")
        writer.begin()
        yield writer
    except OSError as error:
        raise UserError(f"cannot write {store}, which is as it was: {error}") from error
    finally:
        writer.discard()
        held.release()


def undo_change(path: str | os.PathLike[str]) -> Bases:
    """Swap a store and its previous state, which must be there. A second call swaps them back."""
    store = Path(os.path.realpath(path))
    with changing(path) as writer:
        read_store_facts(store)  # raises without a store
        previous, new = next_to(store, "previous"), writer.folder
        if not previous.is_dir():
            raise UserError(f"{path}: nothing to undo: {previous} does not exist")
        load(previous)  # raises if it is damaged
        writer.discard()
        for place in (store, previous):  # an interrupted change left it; it means an unfinished one
            (place / MARK).unlink(missing_ok=True)
        _rename((store, new), (previous, store), (new, previous))
    return load(store)


def _is_state_of(store: Path, previous: Path) -> bool:
    """Whether a store at `previous` is not another store of the user's."""
    try:
        facts = [read_store_facts(place) for place in (store, previous) if is_store(place)]
    except UserError:
        return True  # damaged: the change will say so
    return len({of.checksum for of in facts}) < 2 or _are_neighbours(*facts)


def _are_neighbours(one: StoreFacts, other: StoreFacts) -> bool:
    """Whether one state of a store was made of the other."""
    return one.store.previous == other.checksum or other.store.previous == one.checksum


def check_movable(store: Path) -> None:
    """Raise UserError if the folder of a store cannot be renamed."""
    if os.path.ismount(store):
        raise UserError(f"{store} is a mount point, which cannot be renamed: name a folder in it")
    for folder in (store, next_to(store, "previous")):
        if Path.cwd().is_relative_to(folder):
            raise UserError(
                f"the current folder lies in {folder}, which is renamed: change to another folder"
            )


def link(file: Path, target: Path) -> None:
    """Give a file a second name; copy the file if the file system has no hard links."""
    try:
        os.link(file, target)
    except (AttributeError, OSError):
        shutil.copy2(file, target)


def lock(path: str | os.PathLike[str]) -> filelock.FileLock:
    """Acquire the lock that every writer to a store holds: the file `.NAME.lock` next to it."""
    check_names(path)
    store = Path(os.path.realpath(path))
    file = store.with_name(f".{store.name}.lock")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # filelock waits forever if it cannot make the file; without flock, also if the file exists.
        tempfile.TemporaryFile(dir=file.parent).close()
        if file.exists():
            file.touch()
    except OSError as error:
        raise UserError(f"cannot write next to {store}: {error}") from error
    held = _Lock(file)
    try:
        held.acquire(timeout=0)
    except filelock.Timeout:
        LOG.warning("another process writes to %s: waiting for it (%s)", path, file)
        held.acquire()
    return held


class _Lock(filelock.FileLock):
    """A lock that deletes its file before its release. filelock tries again if a file is gone."""

    def release(self, force: bool = False) -> None:
        if self.is_locked:
            with suppress(OSError):  # Windows deletes no open file: filelock does it afterwards
                os.unlink(self.lock_file)
        super().release(force)


def _check_own(store: Path, facts: StoreFacts) -> None:
    """Raise UserError if the folder of a store holds another file, which a change would lose."""
    own = {MARK, FACTS, *facts.store.files}
    for entry in store.rglob("*"):
        place = entry.relative_to(store).as_posix()
        folder = entry.is_dir() and (
            not entry.is_symlink() or any(name.startswith(f"{place}/") for name in own)
        )
        if not folder and place not in own:
            raise UserError(
                f"{entry}: is not the store's, which cannot keep it there; move it out of {store}"
            )


def _rename(*moves: tuple[Path, Path]) -> None:
    """Rename several folders in order. If one fails, the earlier ones get their names back."""
    done: list[tuple[Path, Path]] = []
    try:
        for old, new in moves:
            done.append((old, new))
            os.rename(old, new)
    except BaseException:  # Ctrl-C too
        for old, new in reversed(done):
            if new.exists() and not old.exists():
                os.rename(new, old)
        raise
