"""The vectors of a store that a recipe lists as its models: bases, or task vectors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mergekit.common import ModelReference

from tvb_mergekit.errors import UserError
from tvb_mergekit.store import store
from tvb_mergekit.store.facts import FACTS


@dataclass(frozen=True)
class StoreVectors:
    """Vectors of one store, which are differences from its base.

    A store that keeps all tasks holds task vectors: any of them may be listed, and bases are built
    over them. Else the vectors are bases: all are listed, and nothing is built.

    Attributes:
        order: The store's vector that each model of the recipe is.
    """

    bases: store.Bases
    order: tuple[int, ...]

    @property
    def path(self) -> Path:
        assert self.bases.path is not None
        return self.bases.path

    @property
    def keeps_tasks(self) -> bool:
        return self.bases.keeps_tasks


def find_store(models: Sequence[ModelReference]) -> StoreVectors | None:
    """The store whose vectors the models are; None if no model is a vector.

    Raises:
        UserError: Only some are vectors, they are of several stores, a basis is missing, or a task
            is no longer there.
    """
    folders = [folder_of(model.model.path) if model.lora is None else None for model in models]
    for model in models:
        _check_there(model)
    known = [folder for folder in folders if folder is not None]
    if not known:
        return None
    if None in folders:
        raise UserError(
            f"model {models[folders.index(None)]} is not a vector of a store, and {known[0]} is "
            "one: list those of one store, or models only (see `tvb export`)"
        )
    place = known[0].parent
    for folder in known:
        if os.path.realpath(folder.parent) != os.path.realpath(place):
            raise UserError(f"{known[0]} and {folder} are of two stores: list those of one")
    bases = store.load(place)
    names = [folder.name for folder in known]
    expected = bases.facts.store.folders[: bases.num_bases]
    if lost := next((name for name in names if name not in expected), None):
        kind = "task" if bases.keeps_tasks else "basis"
        raise UserError(f"{place / lost} is not a {kind} of {place}: {', '.join(expected)}")
    if not bases.keeps_tasks and sorted(names) != sorted(expected):
        raise UserError(
            f"the recipe lists {', '.join(names)} of {place}: list all of its bases and nothing "
            f"else, {', '.join(expected)}"
        )
    return StoreVectors(bases, tuple(expected.index(name) for name in names))


def _check_there(model: ModelReference) -> None:
    """Raise UserError if a model is a task that its store no longer has."""
    place = Path(model.model.path)
    if not place.exists() and store.is_store(place.parent):
        facts = store.read_store_facts(place.parent)
        if facts.keeps_tasks:
            raise UserError(
                f"model {model}: no such task in {place.parent} (removed?), which holds "
                f"{', '.join(facts.store.folders)}"
            )


def folder_of(path: str) -> Path | None:
    """The folder of the vector at `path` (the folder or its weight file); None for a model.

    Raises:
        UserError: the vector lies outside its store.
    """
    place = Path(path)
    folder = place.parent if place.is_file() else place
    if not store.is_basis(place):
        return None
    folder = Path(os.path.realpath(folder)) if folder.is_symlink() else folder
    if not (folder.parent / FACTS).is_file():
        raise UserError(
            f"{path} is a basis vector of a store (a difference from its base), and the store's "
            f"basis.json is not in {folder.parent}; keep a store together"
        )
    return folder


def refuse_bases(paths: Sequence[str], method: str) -> None:
    """Raise UserError if a model is a vector of a store. Other methods would use it as a model."""
    for path in filter(store.is_basis, paths):
        store_of = (Path(path).parent if os.path.isfile(path) else Path(path)).parent
        kind, export = "basis vector", "one with `tvb export STORE OUT --basis K` or `--all-bases`"
        if store.is_store(store_of) and store.read_store_facts(store_of).keeps_tasks:
            kind, export = "task vector", "all with `tvb export STORE --all DIR`, one with `--task`"
        raise UserError(
            f"model {path} is a {kind} of a store, a difference from its base, and {method} takes "
            f"models: make {export}"
        )
