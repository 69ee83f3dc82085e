"""Changes of a store: new files under new names, then one rename of `store.json`.

A change writes `numbers-<n>.safetensors`, `vectors/SLUG-<n>.safetensors` and the like in KINDS,
with an n that no file there has. The new `store.json` holds the former state under `previous`. So a
kill at any moment leaves the earlier store or the new one. Files that only the replaced `previous`
names are then deleted; no other file is touched. A new store appears when it is complete.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock
from torch import Tensor

from tvb_mergekit.errors import UserError
from tvb_mergekit.store import STORE, is_store
from tvb_mergekit.store.facts import StoreFacts, check_files, record_of, write_facts, write_tensors
from tvb_mergekit.store.store import Bases, load, read_store
from tvb_mergekit.tensors import ranks

LOG = logging.getLogger(__name__)
LOCK = ".lock"
KINDS = ("vectors", "gates", "files")  # folders; of `files` each entry is a folder, too


class Change:
    """The next state of the store in a folder.

    Attributes:
        home: where the folder will be.
        facts: the present state; None of a new store.
    """

    def __init__(self, store: Path, home: Path) -> None:
        self.store, self.home = store, home
        self.facts = read_store(store) if is_store(store) else None
        there = [store.glob("numbers-*"), *(store.glob(f"{kind}/*") for kind in KINDS)]
        found = [re.search(r"-(\d+)(\.safetensors)?$", p.name) for each in there for p in each]
        number = 1 + max((int(match[1]) for match in found if match), default=0)
        self._number = ranks.led(lambda: number)
        self._numbers = f"numbers-{self._number}.safetensors"
        self._made = [self._numbers]

    def place(self, kind: str, slug: str) -> str:
        """A new place below the store: of a file for a vector, or of a folder of files."""
        place = f"{kind}/{slug}-{self._number}{'' if kind == 'files' else '.safetensors'}"
        self._made.append(place)
        (self.store / kind).mkdir(exist_ok=True)
        return place

    def commit(self, made: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write the numbers of the next state, whose other files are there, and publish it."""
        write_tensors(self.store / self._numbers, tensors, {"format": "pt"})
        new = {**made, "previous": self.facts}
        if (base := made["base_path"]) and os.path.exists(base):
            new["base_beside"] = os.path.relpath(os.path.realpath(base), self.home)
        new["numbers"] = record_of(self.store, self._numbers)
        facts = StoreFacts.model_validate(new)
        (self.store / LOCK).touch()  # that of a new store, so that a refused change adds no file
        write_facts(self.store / STORE, facts)
        if self.facts and self.facts.previous:
            for old in self.facts.previous.held.keys() - facts.held.keys() - self.facts.held.keys():
                file = self.store / old
                if file.parent.resolve().is_relative_to(self.store):  # else of a link's target
                    with suppress(OSError):
                        file.unlink()
                        file.parent.rmdir()  # the last of a folder of files

    def discard(self) -> None:
        """Delete what was written for a state that is not published."""
        if read_store(self.store).numbers.file != self._numbers:
            for path in (self.store / place for place in self._made):
                shutil.rmtree(path, ignore_errors=True)
                with suppress(OSError):
                    path.unlink()


@contextmanager
def changing(path: str | os.PathLike[str]) -> Iterator[Change]:
    """A change of a store under its lock. Other changes wait for it.

    Raises:
        UserError: no store there, or a damaged one. After an error the store is as it was.
    """
    store = Path(os.path.realpath(path))
    read_store(store)  # raises: a lock would make the folder
    lock = filelock.FileLock(store / LOCK)
    try:
        held = lock.acquire(timeout=0)
    except filelock.Timeout:
        LOG.warning("another process writes to %s: waiting for it", path)
        held = lock.acquire()
    with held:
        change = Change(store, store)
        try:
            yield change
        finally:
            change.discard()


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
        before = facts.previous.model_copy(update={"previous": facts})
        write_facts(change.store / STORE, before)
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
