"""Recipes that list a store: each vector becomes a model of its own for mergekit's planner.

mergekit asks each model for a configuration, a tokenizer and tensors. A vector has those of the
base. So the vector is planned as the base's folder with a revision, which folders do not have; the
revision is the vector's name in the recipe.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mergekit.common import ModelPath, ModelReference
from mergekit.config import MergeConfiguration

from tvb_mergekit import hub
from tvb_mergekit.errors import UserError, hint
from tvb_mergekit.plugin.text import store_of
from tvb_mergekit.store.store import Bases, load


@dataclass
class Listed:
    """The vectors of one store in a recipe: what stands for each, and its place in the store."""

    bases: Bases
    places: dict[ModelReference, int] = field(default_factory=dict)


def expand(config: MergeConfiguration) -> tuple[MergeConfiguration, Listed | None]:
    """The configuration with a model for each listed vector of a store; None if it lists none.

    Raise UserError for models beside vectors, two stores, or a name that the store lacks.
    """
    if config.base_model is not None and store_of(config.base_model):
        raise UserError(
            f"`base_model` is {config.base_model}, a store: name the base that it was built from"
        )
    listed: list[Listed] = []
    expanded = _expand(config, config, listed)
    if not listed:
        return config, None
    (found,) = listed
    mixed = [m for m in expanded.referenced_models() if m not in found.places]
    for model in mixed:
        if model != config.base_model:
            raise UserError(
                f"model {model} is not a vector of {found.bases.place}, and others are: list those "
                "of one store, or models only"
            )
    return expanded, found


def _expand(part: Any, config: MergeConfiguration, listed: list[Listed]) -> Any:
    """A part of the configuration; the store that it lists is appended to `listed`."""
    changes: dict[str, Any] = {}
    for key in ("models", "sources"):
        if entries := getattr(part, key, None):
            made = [_vectors(entry, config, listed) for entry in entries]
            changes[key] = [each for several in made for each in several]
            _check_once([each.model for each in changes[key]], listed)
    if slices := getattr(part, "slices", None):
        changes["slices"] = [_expand(each, config, listed) for each in slices]
    if modules := getattr(part, "modules", None):
        changes["modules"] = {n: _expand(each, config, listed) for n, each in modules.items()}
    return part.model_copy(update=changes)


def _check_once(models: Sequence[ModelReference], listed: Sequence[Listed]) -> None:
    """Raise UserError if a list has a vector twice, perhaps as one of all."""
    seen = set[ModelReference]()
    for model in models if listed else ():
        if model in seen and model in listed[0].places:
            raise UserError(f"{model.model.revision} is listed twice: list it once")
        seen.add(model)


def _vectors(entry: Any, config: MergeConfiguration, listed: list[Listed]) -> list[Any]:
    """An entry of a list of models, or one for each vector of a store that the entry names."""
    if (found := store_of(entry.model)) is None:
        return [entry]
    path, name = found
    if not listed:
        listed.append(Listed(load(path)))
    bases = listed[0].bases
    if os.path.realpath(path) != os.path.realpath(bases.place):
        raise UserError(f"{bases.place} and {path} are two stores: list the vectors of one")
    vectors = bases.facts.vectors
    names = [vector.name for vector in vectors]
    if name and name not in names:
        raise UserError(f"{path} has no vector {name!r}{hint(name, names)}; {', '.join(names)}")
    means = config.merge_method == "basis_negate"  # each reconstruction has the mean
    every = [k for k, vector in enumerate(vectors) if means or not vector.mean]
    chosen = [names.index(name)] if name else every
    parameters: Mapping[str, Any] = entry.model_dump().get("parameters") or {}
    if not name and "task" in parameters:
        raise UserError(f"`task` of {entry.model}: a store names its tasks itself; leave it out")
    base = _local(config.base_model)
    made = []
    for k in chosen:
        # One spelling for each vector, so that one which is listed twice is found.
        revision = f"{bases.place}/{names[k]}"
        stand_in = ModelReference(model=ModelPath(path=base, revision=revision))
        listed[0].places[stand_in] = k
        made.append(entry.model_copy(update={"model": stand_in}))
    return made


def _local(base: ModelReference | None) -> str:
    """The folder of the base."""
    if base is None:
        raise UserError("`base_model` is missing: name the base that the store was built from")
    path: str = base.model.path
    return path if os.path.exists(path) else hub.local(str(base.model))
