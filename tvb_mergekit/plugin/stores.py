"""Where the vectors of a recipe come from: fine-tuned models, or the bases of a store."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from mergekit.common import ModelReference
from torch import Tensor

from tvb_mergekit.core.basis import Basis, Combination, StoredBases, warnings
from tvb_mergekit.core.gram import GramSums
from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.settings import Settings
from tvb_mergekit.store import report, store
from tvb_mergekit.store.bits import sums_of
from tvb_mergekit.store.facts import FACTS, Facts
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.merging import build_basis, count_if_needed
from tvb_mergekit.tensors.stream import Holds, Part

if TYPE_CHECKING:
    from tvb_mergekit.plugin.plan import Plan
    from tvb_mergekit.plugin.recipe import Recipe

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """One model's part in one tensor: where it is and how to get it (CPU, mapped if possible)."""

    name: str | None  # in the model's files; None where mergekit converts other tensors into it
    present: bool
    shape: tuple[int, ...] | None  # None: known only when loaded
    dtype: torch.dtype | None
    nbytes: int
    load: Callable[[], Tensor]
    part: Part | None = None  # of it as it is stored


def mapped(checkpoint: Checkpoint, name: str | None, holds: Holds = "weight") -> Source:
    """The tensor `name` of a checkpoint as a source; None: the checkpoint lacks it."""
    if name is None or name not in checkpoint.tensors:
        return Source(None, False, None, None, 0, _absent)
    stored = checkpoint.tensors[name]
    load = functools.partial(checkpoint.tensor, name)
    part = Part.of(checkpoint, name, holds)
    return Source(name, True, stored.shape, stored.dtype, stored.nbytes, load, part)


def _absent() -> Tensor:
    raise AssertionError("a tensor that a checkpoint lacks takes no part")


class FineTuned:
    """What a merge needs of a recipe's models where they are fine-tuned models."""

    holds: ClassVar[Holds] = "weight"

    @property
    def built(self) -> Sequence[float]:
        """The scales that the task vectors have already."""
        return ()

    def check(self, base: ModelReference, opened: Checkpoint) -> None:
        """Raise UserError where the base is not one for these models."""
        refuse_bases([base.model.path], "`base_model`")

    def sources(
        self, recipe: Recipe, checkpoints: Mapping[ModelReference, Checkpoint], base: Source
    ) -> dict[ModelReference, Source]:
        """Where a tensor lies in the models, if that is not where mergekit looks for it."""
        return {}

    def more(self, recipe: Recipe, name: str | None) -> Sequence[Source]:
        """Inputs of a tensor that the recipe does not list."""
        return ()

    def why_missing(self, missing: Sequence[str], stored: str | None, name: str) -> str:
        """Why a tensor that models lack stays the base's."""
        LOG.warning("tensor `%s` is not in %s: it stays the base's", name, listed(missing))
        return f"missing in {listed(missing)}"

    def known_sums(self, plan: Plan) -> GramSums | None:
        """The Gram matrix, where it need not be summed."""
        return None

    def combination(self, plan: Plan) -> Combination:
        """What the models are combined by, after the passes that it takes."""
        recipe = plan.recipe
        basis = build_basis(
            recipe.settings,
            recipe.tasks,
            recipe.weights,
            plan.items,
            known=self.known_sums(plan),
            key=plan.key(),
            models=[str(model) for model in recipe.models],
            **plan.means,
        )
        for line in warnings(basis, recipe.model_names):
            LOG.warning("%s", line)
        return basis

    def report(self, plan: Plan, **about: Any) -> tuple[Facts, dict[str, Tensor]]:
        """basis.json and basis.safetensors of the merge."""
        recipe, basis = plan.recipe, plan.basis
        assert isinstance(basis, Basis)
        facts = report.facts(
            basis,
            base_model=str(recipe.base),
            models=recipe.model_names,
            fingerprints=plan.fingerprints,
            built=self.built,
            **about,
        )
        return facts, report.tensors_of(basis)


FINE_TUNED = FineTuned()


@dataclass(frozen=True)
class Stored(FineTuned):
    """The same where they are vectors of a store, which are differences from the base.

    Attributes:
        order: the vector that each of the recipe's models is.
    """

    bases: store.Bases
    order: tuple[int, ...]
    holds: ClassVar[Holds] = "delta"

    @property
    def path(self) -> Path:
        assert self.bases.path is not None
        return self.bases.path

    def check(self, base: ModelReference, opened: Checkpoint) -> None:
        """Check the model and the base."""
        super().check(base, opened)
        self.bases.check_base(opened, str(base))

    def sources(
        self, recipe: Recipe, checkpoints: Mapping[ModelReference, Checkpoint], base: Source
    ) -> dict[ModelReference, Source]:
        name = self.bases.stored_name(base.name)
        return {model: mapped(checkpoints[model], name, "delta") for model in recipe.models}

    def why_missing(self, missing: Sequence[str], stored: str | None, name: str) -> str:
        left_out = self.bases.facts["left_out"]
        return str(left_out.get(stored, left_out.get(name, "not in the store")))


@dataclass(frozen=True)
class ZooRecipe(Stored):
    """The same where they are task vectors as codes: models but for how they are read."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Of the recipe's models."""
        return tuple(self.bases.tasks[index] for index in self.order)

    @property
    def built(self) -> Sequence[float]:
        scales: list[float] = self.bases.weights[list(self.order)].tolist()
        return scales

    def known_sums(self, plan: Plan) -> GramSums | None:
        """G of the listed tasks, which the store has where the same tensors count."""
        counted = list(plan.counted.values())
        same = {each.names[1] for each in counted} == set(self.bases.names)
        as_stored = all(each.whole is None for each in counted)
        return sums_of(self.bases, self.order) if same and as_stored else None

    def report(self, plan: Plan, **about: Any) -> tuple[Facts, dict[str, Tensor]]:
        facts, tensors = super().report(plan, **about)
        return facts.but(from_store=str(self.path)), tensors


@dataclass(frozen=True)
class StoreRecipe(Stored):
    """The same where they are the bases of a store: nothing is built, and M vectors are read."""

    def settings(self, method: str, given: Mapping[str, Any]) -> Settings:
        """The settings of the merge.

        Raises:
            UserError: a key that the store has fixed, or that does not fit its basis.
        """
        return self.bases.merge_settings(method, given)

    def more(self, recipe: Recipe, name: str | None) -> Sequence[Source]:
        mean = self._mean(recipe.settings)
        return () if mean is None or name is None else [mapped(mean, name, "delta")]

    def combination(self, plan: Plan) -> Combination:
        recipe, order = plan.recipe, list(self.order)
        shares = self.bases.shares[order]
        for position, weight in enumerate(recipe.weights):
            shares[position] *= weight
        rows = [*order, *([] if self._mean(recipe.settings) is None else [len(order)])]
        table = self.bases.reconstruction(self.bases.tasks)[rows]
        stored = StoredBases(recipe.settings, self.bases.tasks, shares, table)
        count_if_needed(stored, plan.items, **plan.means)
        return stored

    def report(self, plan: Plan, **about: Any) -> tuple[Facts, dict[str, Tensor]]:
        basis = plan.basis
        assert isinstance(basis, StoredBases)
        facts = report.facts_over_store(
            self.bases.facts,
            basis,
            store=str(self.path),
            basis_weights=basis.shares[torch.tensor(self.order).argsort()].tolist(),
            **about,
        )
        return facts, {n: t for n, t in self.bases.tensors.items() if n in report.MERGED}

    def _mean(self, settings: Settings) -> Any:
        """PCA's mean, which only the reconstruction of a task needs."""
        return self.bases.mean if settings.method == "basis_negate" else None


def find_store(models: Sequence[ModelReference]) -> Stored | None:
    """The store whose vectors the models are, or None if none is one.

    Raises:
        UserError: only some are, they are of several stores, or not all bases of one; a task that
            is no longer there.
    """
    folders = [folder_of(model.model.path) if model.lora is None else None for model in models]
    for model in models:
        _check_there(model)
    if not any(folders):
        return None
    for model, folder in zip(models, folders, strict=True):
        if folder is None:
            basis = next(path for path in folders if path)
            raise UserError(
                f"model {model} is no vector of a store, and {basis} is one: list those of one "
                "store, or models only (`tvb export` makes models of a store's vectors)"
            )
    known = [folder for folder in folders if folder is not None]
    place = known[0].parent
    for folder in known:
        if os.path.realpath(folder.parent) != os.path.realpath(place):
            raise UserError(
                f"{known[0]} and {folder} are bases of two stores: list those of one store"
            )
    bases = store.load(place)
    names = [folder.name for folder in known]
    expected = bases.facts.store.folders[: bases.num_bases]
    if bases.is_zoo:
        if lost := next((name for name in names if name not in expected), None):
            raise UserError(f"{place / lost} is no task of {place}: {', '.join(expected)}")
        return ZooRecipe(bases, tuple(expected.index(name) for name in names))
    if sorted(names) != sorted(expected):
        raise UserError(
            f"the recipe lists {', '.join(names)} of {place}: list all of its bases and nothing "
            f"else, {', '.join(expected)}"
        )
    return StoreRecipe(bases, tuple(expected.index(name) for name in names))


def _check_there(model: ModelReference) -> None:
    """Raise UserError where a model should be a task of a zoo, and is not there."""
    place = Path(model.model.path)
    if not place.exists() and store.is_store(place.parent):
        facts = store.read_store_facts(place.parent)
        if store.is_zoo(facts):
            raise UserError(
                f"model {model}: no such task in {place.parent} (removed?), which holds "
                f"{', '.join(facts.store.folders)}"
            )


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
    if not (folder.parent / FACTS).is_file():  # which is read once for all
        raise UserError(
            f"{path} is a basis vector of a store (a difference from its base), and the store's "
            f"basis.json is not in {folder.parent}; keep a store together"
        )
    return folder


def refuse_bases(paths: Sequence[str], method: str) -> None:
    """Raise UserError if one of the models is a basis: a difference, which all but our methods
    would take for a model."""
    for path in paths:
        if not store.is_basis(path):
            continue
        folder = Path(path).parent if os.path.isfile(path) else Path(path)
        if store.is_store(folder.parent) and store.is_zoo(store.read_store_facts(folder.parent)):
            raise UserError(
                f"model {path} is a task vector as codes, and {method} takes models: write them "
                "all with `tvb export STORE --all DIR`, or one with `--task`"
            )
        raise UserError(
            f"model {path} is a basis vector of a store, a difference from its base, and "
            f"{method} takes models: make one with `tvb export STORE OUT --basis K` or "
            "`--all-bases`"
        )
