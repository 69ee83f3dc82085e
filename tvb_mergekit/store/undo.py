"""Files that outlive a change of a store: the user's, and the previous store for `tvb undo`.

The previous store lies in the folder `undo` of the new one until the next change.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tvb_mergekit.errors import UserError
from tvb_mergekit.store.facts import FACTS, TENSORS, FileRecord, StoreFacts
from tvb_mergekit.store.recipes import FOLDER, recipe_files, write_recipes
from tvb_mergekit.store.store import Bases, is_store, load, read_store_facts, staged

UNDO = "undo"


def undo_change(path: str | os.PathLike[str]) -> Bases:
    """Restore a store as it was before the last addition or removal of a task.

    Raises:
        UserError: no store, or nothing to undo.
    """
    store = Path(os.path.realpath(path))
    with staged(store) as work:
        facts = read_store_facts(store)
        if not (store / UNDO).is_dir():
            raise UserError(
                f"{path}: nothing to undo: no task was added or removed since, or that is undone"
            )
        check_free(store, facts, os.listdir(store / UNDO))
        link_store(load(store / UNDO), work)
        keep_others(store, facts, work)
    return load(store)


def check_free(store: Path, facts: StoreFacts, names: Iterable[str]) -> None:
    """Raise UserError if a change of a store would lose a user's file, or cannot keep it.

    Args:
        names: the top-level names that the change writes.
    """
    known, own = files_of(facts), {*_top(facts), *names}
    with suppress(UserError):  # a damaged basis.json
        if is_store(store / UNDO):
            own.add(UNDO)
            known |= {f"{UNDO}/{name}" for name in files_of(read_store_facts(store / UNDO))}
    for entry in store.rglob("*"):
        place = entry.relative_to(store)
        lost = place.parts[0] in own and place.as_posix() not in known
        if not entry.is_dir() and (lost or not entry.is_file()):
            raise UserError(
                f"{entry}: is not the store's, which cannot keep it there; move it out of {store}"
            )


def files_of(facts: StoreFacts) -> set[str]:
    """The files of a store, as paths below it."""
    return {FACTS, *facts.store.files, *recipe_files(facts)}


def _top(facts: StoreFacts) -> set[str]:
    """The names at the top of a store."""
    return {FACTS, TENSORS, FOLDER, *facts.store.folders}


def keep_previous(bases: Bases, work: Path) -> None:
    """Put the user's files of a store into the new one in `work`, and the store into its `undo`."""
    assert bases.path is not None
    (work / UNDO).mkdir()
    keep_others(bases.path, bases.facts, work)
    link_store(bases, work / UNDO)


def keep_others(old: Path, facts: StoreFacts, work: Path) -> None:
    """Copy the user's files and folders of an old store into the new one in `work`."""
    check_free(old, facts, os.listdir(work))
    for entry in old.iterdir():
        if entry.name in (UNDO, *_top(facts)):
            continue
        if entry.is_dir():  # an empty folder may have the name of a new vector
            shutil.copytree(entry, work / entry.name, dirs_exist_ok=True)
        else:
            shutil.copy2(entry, work / entry.name)


def link_store(bases: Bases, target: Path) -> None:
    """Give the files of a store a second name in `target`, and write its recipes there."""
    _link_files(bases, (FACTS, *bases.facts.store.files), target)
    write_recipes(target, bases.facts)


def link_vectors(bases: Bases, target: Path, without: str = "") -> dict[str, FileRecord]:
    """Give the files of all vectors a second name in `target`; returns their records.

    Args:
        without: the folder of a vector that is left out.
    """
    files = {
        name: record
        for name, record in bases.facts.store.files.items()
        if "/" in name and name.partition("/")[0] != without
    }
    _link_files(bases, files, target)
    return files


def _link_files(bases: Bases, names: Iterable[str], target: Path) -> None:
    assert bases.path is not None
    for name in names:
        if (bases.path / name).is_file():  # a damaged store may lack one
            (target / name).parent.mkdir(exist_ok=True)
            link(bases.path / name, target / name)


def link(file: Path, target: Path) -> None:
    """Give a file a second name; copy the file if the file system has no hard links."""
    try:
        os.link(file, target)
    except (AttributeError, OSError):
        shutil.copy2(file, target)
