"""Changes of a store: new files under new names, then one rename of `store.json`.

A change writes `numbers-<n>.safetensors`, `vectors/SLUG-<n>.safetensors` and the like in KINDS,
with an n that no file there has. The new `store.json` holds the former state under `previous`. So a
kill at any moment leaves the store of before or after. Files that only the replaced `previous`
names are then deleted; no other file is touched.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock
from torch import Tensor

from tvb_mergekit.errors import UserError, check_names
from tvb_mergekit.store import STORE, is_store
from tvb_mergekit.store.facts import StoreFacts, write_facts
from tvb_mergekit.store.files import check_files, record_of, write_tensors
from tvb_mergekit.store.store import Bases, load, read_store
from tvb_mergekit.tensors.output import check_output_folder

LOG = logging.getLogger(__name__)
LOCK = ".lock"
KINDS = ("vectors", "gates", "files")  # folders; of `files` each entry is a folder, too


class Change:
    """The next state of the store in a folder, which may be new.

    Attributes:
        facts: the present state; None of a new store.
        number: n of the new files.
    """

    def __init__(self, store: Path) -> None:
        self.store = store
        self.facts = read_store(store) if is_store(store) else None
        there = [store.glob("numbers-*"), *(store.glob(f"{kind}/*") for kind in KINDS)]
        found = [re.search(r"-(\d+)(\.safetensors)?$", p.name) for each in there for p in each]
        self.number = 1 + max((int(match[1]) for match in found if match), default=0)
        self._made: list[str] = []

    def place(self, kind: str, slug: str) -> str:
        """A new place below the store: of a file for a vector, or of a folder of files."""
        place = f"{kind}/{slug}-{self.number}{'' if kind == 'files' else '.safetensors'}"
        self._made.append(place)
        (self.store / kind).mkdir(parents=True, exist_ok=True)
        return place

    def commit(self, facts: StoreFacts, tensors: Mapping[str, Tensor]) -> Bases:
        """Write the numbers of the next state, whose other files are there, and publish it."""
        place = f"numbers-{self.number}.safetensors"
        self._made.append(place)
        write_tensors(self.store / place, tensors, {"format": "pt"})
        base = facts.base_path
        if facts.base_beside is None and base and os.path.exists(base):  # of a base that was read
            facts = facts.but(base_beside=os.path.relpath(os.path.realpath(base), self.store))
        before = self.facts and self.facts.but(previous=None)
        made = facts.but(numbers=record_of(self.store, place), previous=before)
        write_facts(self.store / STORE, made)
        if self.facts and self.facts.previous:
            for old in self.facts.previous.held.keys() - made.held.keys() - self.facts.held.keys():
                file = self.store / old
                if file.parent.resolve().is_relative_to(self.store):  # else of a link's target
                    with suppress(OSError):
                        file.unlink()
                        file.parent.rmdir()  # the last of a folder of files
        return load(self.store)

    def discard(self) -> None:
        """Delete the files that no state names, and the lock of a folder without a store."""
        held = read_store(self.store).held if is_store(self.store) else {}
        for place in self._made:
            if not any(each == place or each.startswith(f"{place}/") for each in held):
                shutil.rmtree(self.store / place, ignore_errors=True)
                with suppress(OSError):
                    (self.store / place).unlink()
        for folder in KINDS:
            with suppress(OSError):  # it holds something
                (self.store / folder).rmdir()
        if not held:
            (self.store / LOCK).unlink(missing_ok=True)


@contextmanager
def changing(path: str | os.PathLike[str], new: bool = False) -> Iterator[Change]:
    """A change of a store under its lock. Other changes wait for it. The store may be `new`.

    Raises:
        UserError: no store there, nor an empty folder for a new one. The store stays as it was.
    """
    check_names(path)
    store = Path(os.path.realpath(path))
    if not new:
        read_store(store)  # raises: a lock would make the folder
    elif not is_store(store):
        check_new_store(path)
    there, lock = store.is_dir(), filelock.FileLock(store / LOCK)
    store.mkdir(parents=True, exist_ok=True)
    try:
        with suppress(filelock.Timeout):
            lock.acquire(timeout=0)
        if not lock.is_locked:
            LOG.warning("another process writes to %s: waiting for it", path)
        with lock:
            if not is_store(store) and any(each.name[0] != "." for each in store.iterdir()):
                said = (
                    "a part of a store, whose build was killed: delete it, or name another folder"
                )
                raise UserError(f"{path} holds {said}")
            change = Change(store)
            try:
                yield change
            finally:
                change.discard()
    finally:
        lock.release(force=True)
        if not there:
            with suppress(OSError):  # it holds a store
                store.rmdir()


def check_new_store(out: str | os.PathLike[str]) -> None:
    """Check the folder of a new store: it is missing or empty, or another command builds there."""
    if is_store(out) or not Path(out, LOCK).exists():
        check_output_folder(out)


def undo(path: str | os.PathLike[str]) -> Bases:
    """The store at `path` as it was before the last `add` or `remove`; a second call undoes that.

    Raises:
        UserError: the store is as it was built, or a file of the state before is damaged.
    """
    with changing(path) as change:
        facts = change.facts
        if facts is None or facts.previous is None:
            raise UserError(f"{path}: nothing to undo: it is as it was built")
        check_files(change.store, facts.previous.held.values())
        write_facts(change.store / STORE, facts.previous.but(previous=facts.but(previous=None)))
    return load(change.store)


def slugs(names: Sequence[str]) -> list[str]:
    """A name for a file or folder for each, which no two share even where case does not count."""
    made: dict[str, str] = {}
    for name in names:
        short = slug = re.sub(r"[^\w.-]+", "-", name)[:60].strip(".") or "task"
        number = 1
        while slug.lower() in made:
            number += 1
            slug = f"{short}-{number}"
        made[slug.lower()] = slug
    return list(made.values())
