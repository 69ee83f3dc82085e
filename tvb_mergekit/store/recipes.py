"""The recipes that a store is written with: ways to merge all tasks, and to forget each.

Their paths are relative to the recipe's own folder, so that a store may be moved. mergekit takes
paths from the current folder; `located` gives it absolute ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tvb_mergekit.settings import GLOBAL_KEYS, MATRIX_METHODS, VARYING_KEYS, Method
from tvb_mergekit.store.bits import slugs
from tvb_mergekit.store.facts import StoreFacts
from tvb_mergekit.store.store import base_of, is_store, is_zoo, read_store_facts

FOLDER = "recipes"
_HEAD = """\
# {what}
#   {command} STORE/recipes/{name}.yml OUT
# Copy this file out of the store to edit it: `tvb add`, `tvb remove` and `tvb undo` write it again.
# Paths that begin with ../ are relative to this folder: change them in the copy.
"""
# Name -> method, and what it does, of the recipes for all tasks
ALL_TASKS: dict[str, tuple[Method, str]] = {
    "add": ("basis_ta", "One model that does all tasks: theta_0 + lambda * (B_1 + ... + B_M)."),
    "ties": ("basis_ties", "One model that does all tasks: TIES over the bases."),
    "iso": ("basis_iso", "One model that does all tasks: Iso-C, the sum of the bases made even."),
    "tsvm": ("basis_tsvm", "One model that does all tasks: TSV-M, of the first singular vectors."),
    "wudi": ("basis_wudi", "One model that does all tasks: WUDI, with the least interference."),
}
ALPHA = 1.0  # forgets all of the reconstructed task vector; less forgets less


def write_recipes(folder: Path, facts: StoreFacts) -> None:
    """Write the recipes of a store into `folder`/recipes.

    Args:
        folder: the new folder of the store, with its vectors.
        facts: its basis.json.
    """
    place = folder / FOLDER
    place.mkdir(exist_ok=True)
    config = folder / facts.store.folders[0] / "config.json"
    bare = not config.is_file()
    command = "mergekit-pytorch" if bare else "mergekit-yaml"
    beside = facts.store.base_beside
    base = os.path.join("..", beside) if beside else facts.base_model
    for name, (what, recipe) in templates(facts, "..", base).items():
        if bare:
            for entry in recipe["models"]:
                entry["model"] += "/model.safetensors"
        text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
        head = _HEAD.format(what=what, command=command, name=name)
        (place / f"{name}.yml").write_text(head + text, encoding="utf-8")


def located(recipe: Any, path: str | os.PathLike[str]) -> Any:
    """The recipe read from `path`: where that lies in a store's `recipes`, paths that begin with
    `../` are relative to it, and the store's own base is looked for (`store.base_of`)."""
    folder = Path(os.path.realpath(path)).parent
    if folder.name != FOLDER or not isinstance(recipe, dict) or not is_store(folder.parent):
        return recipe
    facts = read_store_facts(folder.parent)

    def place(model: object) -> object:
        relative = isinstance(model, str) and model.startswith("../")
        return os.path.normpath(folder / str(model)) if relative else model

    base, models = recipe.get("base_model"), recipe.get("models")
    if isinstance(models, list):
        models = [
            {**entry, "model": place(entry.get("model"))} if isinstance(entry, dict) else entry
            for entry in models
        ]
    own = base == os.path.join("..", facts.store.base_beside or "")
    base = base_of(facts, folder.parent) if own else place(base)
    return {**recipe, "base_model": base, "models": models}


def recipe_files(facts: StoreFacts) -> list[str]:
    """The paths below a store of its recipes."""
    return [f"{FOLDER}/{name}.yml" for name in templates(facts, "", "")]


def templates(facts: StoreFacts, store: str, base: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> what the recipe does, and the recipe; `store` and `base` are their paths in it."""
    made = {}
    if facts.parameters["basis"] != "rand_proj":
        for name, (method, what) in ALL_TASKS.items():
            made[name] = what, _recipe(method, facts, store, base)
    for task, name in zip(facts.tasks, slugs(facts.tasks), strict=True):
        made[f"forget-{name}"] = (
            f"The base without {task!r}: theta_0 - alpha * its reconstructed task vector.",
            _recipe("basis_negate", facts, store, base, {"forget": task}),
        )
    return made


def _recipe(
    method: str,
    facts: StoreFacts,
    store: str,
    base: str,
    more: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    built = facts.parameters
    same = method == facts.method
    parameters: dict[str, Any] = {}
    for key in ("lambda", "density", "alpha"):
        spec = VARYING_KEYS[key]
        if method in spec.methods:
            # What the recipe said of another method is no guide for this one.
            shared = same or {method, facts.method} <= {"basis_ta", "basis_ties"}
            default = spec.default_for(method)
            value = built.get(key, default) if shared else default
            parameters[key] = ALPHA if value is None else value
    if is_zoo(facts):
        parameters["basis"] = "none"
    parameters["lambda_scale"] = built["lambda_scale"]
    if method in MATRIX_METHODS and not same and built["basis"] == "balanced":
        parameters["lambda_scale"] = "tasks"  # lambda 1 means what it does for all task vectors
    for key in ("trim", "merge_func", "common", "ridge", "matrices"):
        if built.get(key) is not None and method in GLOBAL_KEYS[key].methods:
            parameters[key] = built[key]
    parameters |= more or {}
    vectors = facts.store.folders[: facts.num_bases]
    if is_zoo(facts) and more and not parameters.get("lambda"):  # it needs no other
        vectors = [vectors[facts.tasks.index(more["forget"])]]
    recipe: dict[str, Any] = {
        "merge_method": method,
        "base_model": base,
        "models": [{"model": f"{store}/{name}"} for name in vectors],
        "parameters": parameters,
    }
    if facts.dtype:
        recipe["dtype"] = facts.dtype
    return recipe
