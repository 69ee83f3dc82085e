"""Recipes that list a store: each vector becomes a model of its own for mergekit's planner.

mergekit asks each model for a configuration, a tokenizer and tensors. A vector has those of the
base. So the vector is planned as the base's folder with a revision, which folders do not have; the
revision is the vector's name in the recipe.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mergekit.common import ModelPath, ModelReference
from mergekit.config import MergeConfiguration

from tvb_mergekit import hub
from tvb_mergekit.errors import UserError, hint
from tvb_mergekit.plugin.text import store_of
from tvb_mergekit.store.store import Bases, load


def expand(config: MergeConfiguration) -> tuple[MergeConfiguration, Bases | None]:
    """The configuration with a model for each listed vector of a store, and the store, if any.

    Raise UserError for models beside vectors, two stores, or a name that the store lacks.
    """
    base = config.base_model
    if base is None:  # which `read_recipe` refuses
        return config, None
    if store_of(base):
        raise UserError(f"`base_model` is {base}, a store: name the base that it was built from")
    models = sorted((m for m in config.referenced_models() if m != base), key=str)
    found = {model: store_of(model) for model in models}
    folders = {os.path.realpath(place[0]): place[0] for place in found.values() if place}
    if not folders:
        return config, None
    place, *others = folders.values()
    if others:
        raise UserError(f"{place} and {others[0]} are two stores: list the vectors of one")
    bases = load(place)
    for model in (model for model in models if found[model] is None):
        raise UserError(
            f"model {model} is not a vector of {bases.place}, and others are: list those of one "
            "store, or models only"
        )
    return _expand(config, config, bases), bases


def _expand(part: Any, config: MergeConfiguration, bases: Bases) -> Any:
    """A part of the configuration with each vector in place of a store."""
    changes: dict[str, Any] = {}
    for key in ("models", "sources"):
        if entries := getattr(part, key, None):
            made = [_vectors(entry, config, bases) for entry in entries]
            changes[key] = [each for several in made for each in several]
    if slices := getattr(part, "slices", None):
        changes["slices"] = [_expand(each, config, bases) for each in slices]
    if modules := getattr(part, "modules", None):
        changes["modules"] = {n: _expand(each, config, bases) for n, each in modules.items()}
    return part.model_copy(update=changes)


def _vectors(entry: Any, config: MergeConfiguration, bases: Bases) -> list[Any]:
    """An entry of a list of models, or one for each vector of a store that the entry names."""
    if (found := store_of(entry.model)) is None:
        return [entry]
    path, name = found
    vectors = bases.facts.vectors
    names = [vector.name for vector in vectors]
    if name and name not in names:
        raise UserError(f"{path} has no vector {name!r}{hint(name, names)}; {', '.join(names)}")
    parameters: Mapping[str, Any] = entry.model_dump().get("parameters") or {}
    if not name and "task" in parameters:
        raise UserError(f"`task` of {entry.model}: a store names its tasks itself; leave it out")
    base, made = hub.local(str(config.base_model)), []
    for each in [name] if name else [vectors[k].name for k in used(bases, config.merge_method)]:
        # One spelling for each vector, so that one which is listed twice is found.
        given = ModelPath(path=base, revision=f"{bases.place}/{each}")
        made.append(entry.model_copy(update={"model": ModelReference(model=given)}))
    return made


def used(bases: Bases, method: str) -> list[int]:
    """The places of the vectors that a merge of all of a store needs."""
    means = method == "basis_negate"  # each reconstruction has the mean
    return [k for k, vector in enumerate(bases.facts.vectors) if means or not vector.mean]
