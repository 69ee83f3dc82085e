"""Changes of a store: new files under new names, then one rename of `store.json`.

The names of the new files (`docs/files.md`) end with a number that no file there has. The new
`store.json` holds the former state under `previous`. So a kill at any moment leaves the earlier
store or the new one. Files that only the replaced `previous` names are then deleted; no other file
is touched. A new store appears when it is complete.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock
from torch import Tensor

from tvb_mergekit.errors import UserError, check_known
from tvb_mergekit.store import STORE, is_store
from tvb_mergekit.store.facts import StoreFacts, check_files, record_of, write_facts, write_tensors
from tvb_mergekit.store.store import Bases, load, load_numbers, read_store

LOCK = ".lock"


class Change:
    """The next state of the store in a folder."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.facts = read_store(store) if is_store(store) else None  # of now; None: a new store
        every = store.rglob("*") if self.facts else ()  # another process may fill a new one by now
        found = [re.search(r"-(\d+)(\.safetensors)?$", path.name) for path in every]
        self._number = 1 + max((int(match[1]) for match in found if match), default=0)
        self.made = [f"numbers-{self._number}.safetensors"]  # the first of the new files

    def place(self, kind: str, slug: str) -> str:
        """A new place below the store: of a file for a vector, or of a folder of files."""
        (self.store / kind).mkdir(exist_ok=True)
        end = "" if kind == "files" else ".safetensors"
        self.made.append(f"{kind}/{slug}-{self._number}{end}")
        return self.made[-1]

    def commit(self, made: Mapping[str, Any], numbers: Mapping[str, Tensor]) -> None:
        """Write the numbers of the next state, whose other files are there, and publish it."""
        write_tensors(self.store / self.made[0], numbers, {"format": "pt"})
        own = {"numbers": record_of(self.store, self.made[0]), "previous": self.facts}
        facts = StoreFacts.model_validate({**made, **own})
        (self.store / LOCK).touch()  # that of a new store, so that a refused change adds no file
        write_facts(self.store / STORE, facts)
        if self.facts and self.facts.previous:
            for old in self.facts.previous.held.keys() - facts.held.keys() - self.facts.held.keys():
                file = self.store / old
                if file.parent.resolve().is_relative_to(self.store):  # else of a link's target
                    with suppress(OSError):
                        file.unlink()
                        file.parent.rmdir()  # the last of a folder of files


@contextmanager
def changing(path: str | os.PathLike[str]) -> Iterator[Change]:
    """A change of a store under its lock. Other changes wait for it.

    Raises:
        UserError: no store there, or a damaged one. After an error the store is as it was.
    """
    store = Path(os.path.realpath(path))
    read_store(store)  # raises: a lock would make the folder
    with filelock.FileLock(store / LOCK):
        change = Change(store)
        try:
            yield change
        finally:  # delete what was written for a state that is not published
            published = read_store(store).numbers.file == change.made[0]
            for path in () if published else (store / place for place in change.made):
                shutil.rmtree(path, ignore_errors=True)
                with suppress(OSError):
                    path.unlink()


def undo(path: str | os.PathLike[str]) -> Bases:
    """The store at `path` as before the last `add` or `remove`; a second call undoes that."""
    with changing(path) as change:
        facts = change.facts
        if facts is None or facts.previous is None:
            raise UserError(f"{path}: nothing to undo: it is as it was built")
        check_files(change.store, facts.previous.held.values())
        before = facts.previous.model_copy(update={"previous": facts})
        write_facts(change.store / STORE, before)
    return load(change.store)


def remove(path: str | os.PathLike[str], task: str) -> Bases:
    """Remove a task from the store of all tasks at `path`, which has others."""
    with changing(path) as change:
        facts, needed = change.facts, list[Any]()
        assert facts is not None
        if not facts.whole:
            said = "no task can be taken out of bases; `tvb undo` takes back the last addition"
            raise UserError(f"{path}: {said}")
        check_known(task, facts.tasks, f"no task {task!r} in {path}")
        if facts.tasks == [task]:
            raise UserError(f"{path}: {task!r} is its only task; delete the folder instead")
        count, gone, made = len(facts.tasks), facts.tasks.index(task), facts.model_dump()
        rest = [k for k in range(count) if k != gone]
        others = {file.file for k in rest for file in facts.vectors[k].held}
        own = facts.vectors[gone].held
        # Without this task the others would still lack such a file
        check_files(change.store, [file for file in own if file.file in others])
        with suppress(UserError):  # a damaged task can always go
            check_files(change.store, own)
            needed = [*facts.held.values()]  # a sound one only if `undo` can bring it back
        check_files(change.store, needed)
        for key in ("tasks", "models", "vectors", "basis_weights"):
            del made[key][gone]
        for values in (made["norms"], made["errors"], made["parameters"]["weights"]):
            values.pop(task, None)
        made |= {"num_bases": count - 1, "model_bytes": facts.model_bytes * (count - 1) // count}
        made["seconds"] = {"remove": 0.0}  # `Bases.sums` reads that G is a part of another
        numbers = load_numbers(change.store, facts)
        change.commit(made, {name: each[rest][:, rest] for name, each in numbers.items()})
    try:
        return load(change.store)
    except UserError as error:  # another task is damaged, too
        raise UserError(f"{task!r} is removed, but {error}") from error


def slugs(names: Sequence[str]) -> list[str]:
    """A name for a file or folder for each, which no two share even where case does not count."""
    short = [re.sub(r"[^\w.-]+", "-", name)[:60].strip(".") or "task" for name in names]
    alike = Counter(map(str.lower, short))
    return [s if alike[s.lower()] == 1 else f"{s}~{k}" for k, s in enumerate(short, 1)]
