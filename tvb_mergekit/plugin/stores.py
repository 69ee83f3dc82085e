"""Recipes whose models are the bases of a store: nothing is built, and M vectors are read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergekit.common import ModelReference

from tvb_mergekit import store
from tvb_mergekit.basis import StoredBases
from tvb_mergekit.errors import UserError
from tvb_mergekit.recipe import GLOBAL_KEYS, Settings, resolve_settings


@dataclass(frozen=True)
class StoreRecipe:
    """The store of a recipe, and the basis that each of its models is, in the recipe's order."""

    bases: store.Bases
    order: tuple[int, ...]

    @property
    def path(self) -> Path:
        assert self.bases.path is not None
        return self.bases.path

    def settings(self, method: str, given: Mapping[str, Any]) -> Settings:
        """The settings of the merge.

        Raises:
            UserError: a key that the store has fixed, or that does not fit its basis.
        """
        for key in given:
            if key in GLOBAL_KEYS and key not in store.OPEN_KEYS:
                raise UserError(
                    f"`{key}`: the models are bases of {self.path}, which is built; leave the key "
                    "out, or list the fine-tuned models"
                )
        if self.bases.basis == "rand_proj" and method != "basis_negate":
            raise UserError(
                f"the bases in {self.path} are rand_proj, random directions: only basis_negate "
                f"takes them, not {method}"
            )
        return resolve_settings(method, given, self.bases.tasks)

    def combination(self, settings: Settings, weights: Sequence[float]) -> StoredBases:
        """What merging needs to know; `weights` are the recipe's, one for each listed basis."""
        order = list(self.order)
        shares = self.bases.shares[order]
        for position, weight in enumerate(weights):
            shares[position] *= weight
        mean = self.mean(settings)
        table = self.bases.reconstruction(self.bases.tasks)
        table = table[[*order, *([len(order)] if mean is not None else [])]]
        return StoredBases(settings, self.bases.tasks, shares, table)

    def names(self, base: Iterable[str]) -> dict[str, str | None]:
        """The base's tensors -> their names in the bases, None for one that stays the base's."""
        return {name: self.bases.stored_name(name) for name in base}

    def mean(self, settings: Settings) -> Any:
        """PCA's mean, which only the reconstruction of a task needs."""
        return self.bases.mean if settings.method == "basis_negate" else None


def find_store(models: Sequence[ModelReference]) -> StoreRecipe | None:
    """The store whose bases the models are, or None if none is a basis.

    Raises:
        UserError: only some are, they are of several stores, or not all of one.
    """
    folders = [folder_of(model.model.path) if model.lora is None else None for model in models]
    if not any(folders):
        return None
    for model, folder in zip(models, folders, strict=True):
        if folder is None:
            basis = next(path for path in folders if path)
            raise UserError(
                f"model {model} is no basis of a store, and {basis} is one: list all bases of one "
                "store, or models only (`tvb export` makes a model of a basis)"
            )
    known = [folder for folder in folders if folder is not None]
    place = os.path.realpath(known[0].parent)
    for folder in known:
        if os.path.realpath(folder.parent) != place:
            raise UserError(
                f"{known[0]} and {folder} are bases of two stores: list those of one store"
            )
    bases = store.load(known[0].parent, verify=False)
    names = [folder.name for folder in known if folder.name != store.MEAN]
    if store.MEAN in [folder.name for folder in known]:
        raise UserError(
            f"{known[0].parent / store.MEAN} is no basis: leave it out (basis_negate finds it)"
        )
    expected = [store.basis_folder(m) for m in range(bases.num_bases)]
    if sorted(names) != expected:
        missing = sorted(set(expected) - set(names))
        raise UserError(
            f"{known[0].parent} has {len(expected)} bases, the recipe lists {len(names)}: list "
            f"all of them ({', '.join(missing)} missing)"
        )
    return StoreRecipe(bases, tuple(expected.index(name) for name in names))


def folder_of(path: str) -> Path | None:
    """The folder of the basis at `path` (the folder or its weight file); None if it is none.

    Raises:
        UserError: it is a basis, and its store is not around it.
    """
    place = Path(path)
    folder = place.parent if place.is_file() else place
    if not store.is_basis(place):
        return None
    folder = Path(os.path.realpath(folder)) if folder.is_symlink() else folder
    if not store.is_store(folder.parent):
        raise UserError(
            f"{path} is a basis vector of a store (a difference from its base), and the store's "
            f"basis.json is not in {folder.parent}; keep a store together"
        )
    return folder


def refuse_bases(models: Sequence[ModelReference], method: str) -> None:
    """mergekit's other methods would take a basis, a difference, for a model.

    Raises:
        UserError: one of the models is a basis.
    """
    for model in models:
        if store.is_basis(model.model.path):
            raise UserError(
                f"model {model} is a basis vector of a store, a difference from its base, and "
                f"{method} takes models: make one with `tvb export STORE OUT --basis K` or "
                "`--all-bases`"
            )
