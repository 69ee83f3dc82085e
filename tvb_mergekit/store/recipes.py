"""The recipes that a store is written with: ways to merge all tasks, and to forget each.

Their paths are relative to the recipe's own folder, so that a store may be moved. mergekit takes
paths from the current folder; `located` gives it absolute ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tvb_mergekit.core.encoders import EVEN
from tvb_mergekit.core.settings import GLOBAL_KEYS, MATRIX_METHODS, VARYING_KEYS
from tvb_mergekit.store.facts import StoreFacts
from tvb_mergekit.store.forms import slugs
from tvb_mergekit.store.store import base_of, is_store, read_store_facts

FOLDER = "recipes"
_HEAD = """\
# {sentence}
#   mergekit-yaml STORE/recipes/{name}.yml OUT
# Copy this file out of the store to edit it: `tvb add`, `tvb remove` and `tvb undo` write it again.
# Paths that begin with ../ are relative to this folder: change them in the copy.
"""
# Recipes for all tasks: name -> method, and a sentence for the recipe's header
ALL_TASKS: dict[str, tuple[str, str]] = {
    "add": ("basis_ta", "One model that does all tasks: theta_0 + lambda * (B_1 + ... + B_M)."),
    "ties": ("basis_ties", "One model that does all tasks: TIES over the bases."),
    "iso": ("basis_iso", "One model that does all tasks: Iso-C, the sum of the bases made even."),
    "tsvm": ("basis_tsvm", "One model that does all tasks: TSV-M, of the first singular vectors."),
    "wudi": ("basis_wudi", "One model that does all tasks: WUDI, with little interference."),
}
ALPHA = 1.0  # forgets all of the reconstructed task vector; less forgets less


def write_recipes(folder: Path, facts: StoreFacts) -> None:
    """Write the recipes of a store into the new folder of the store, which has its vectors."""
    place = folder / FOLDER
    place.mkdir(exist_ok=True)
    beside = facts.store.base_beside
    base = os.path.join("..", beside) if beside else facts.base_model
    for name, (sentence, recipe) in templates(facts, "..", base).items():
        text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
        head = _HEAD.format(sentence=sentence, name=name)
        (place / f"{name}.yml").write_text(head + text, encoding="utf-8")


def located(recipe: Any, path: str | os.PathLike[str]) -> Any:
    """The recipe read from `path`, with absolute paths if `path` lies in a store's `recipes`.

    Paths that begin with `../` are relative to that folder. `store.base_of` finds the store's base.
    """
    folder = Path(os.path.realpath(path)).parent
    if folder.name != FOLDER or not isinstance(recipe, dict) or not is_store(folder.parent):
        return recipe
    facts = read_store_facts(folder.parent)

    def place(model: object) -> object:
        relative = isinstance(model, str) and model.startswith("../")
        return os.path.normpath(folder / str(model)) if relative else model

    own = recipe.get("base_model") == os.path.join("..", facts.store.base_beside or "")
    found = _renamed(recipe, place)
    return with_paths({**found, "base_model": base_of(facts, folder.parent)} if own else found)


def with_paths(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with paths as mappings if mergekit would split their text, at `+` or `@`."""

    def model(name: object) -> object:
        path = isinstance(name, str) and re.search("[+@]", name) and os.path.exists(name)
        return {"model": {"path": name}} if path else name

    return _renamed(recipe, model)


def _renamed(recipe: Mapping[str, Any], rename: Callable[[object], object]) -> dict[str, Any]:
    """The recipe with other names of the base and of the models."""
    models = recipe.get("models")
    if isinstance(models, list):
        models = [
            {**entry, "model": rename(entry.get("model"))} if isinstance(entry, dict) else entry
            for entry in models
        ]
    return {**recipe, "base_model": rename(recipe.get("base_model")), "models": models}


def times(setting: Any, factor: float) -> Any:
    """A coefficient as a recipe gives it (number, text, layer gradient or filters), multiplied."""
    if isinstance(setting, Mapping):
        return {**setting, "value": times(setting["value"], factor)}
    if isinstance(setting, list):
        return [times(each, factor) for each in setting]
    return float(setting) * factor


def templates(facts: StoreFacts, store: str, base: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> a sentence, and the recipe; `store` and `base` are their paths in it."""
    made = {}
    for name, (method, sentence) in ALL_TASKS.items():
        made[name] = sentence, _recipe(method, facts, store, base)
    for task, name in zip(facts.tasks, slugs(facts.tasks), strict=True):
        made[f"forget-{name}"] = (
            f"The base without {task!r}: theta_0 - alpha * its reconstructed task vector.",
            _recipe("basis_negate", facts, store, base, task),
        )
    return made


def _recipe(
    method: str, facts: StoreFacts, store: str, base: str, forget: str | None = None
) -> dict[str, Any]:
    parameters, vectors = _parameters(method, facts), facts.store.folders[: facts.num_bases]
    if forget is not None:
        parameters["forget"] = forget
        if facts.keeps_tasks and not parameters["lambda"]:  # the other vectors are not needed
            vectors = [vectors[facts.tasks.index(forget)]]
    recipe = {
        "merge_method": method,
        "base_model": base,
        "models": [{"model": f"{store}/{name}"} for name in vectors],
        "parameters": parameters,
    }
    return {**recipe, "dtype": facts.dtype} if facts.dtype else recipe


def _parameters(method: str, facts: StoreFacts) -> dict[str, Any]:
    """A method's parameters, from the recipe that the store was built by."""
    built, parameters = facts.parameters, dict[str, Any]()
    same = method == facts.method
    # The built recipe's numbers hold for its own method, or for the other of these two.
    shared = same or {method, facts.method} <= {"basis_ta", "basis_ties"}
    for key in ("lambda", "density", "alpha"):
        spec = VARYING_KEYS[key]
        if method in spec.methods:
            default = spec.default_for(method)
            value = built.get(key, default) if shared else default
            parameters[key] = ALPHA if value is None else value
    if facts.keeps_tasks:
        parameters["basis"] = "none"
    parameters["lambda_scale"] = built["lambda_scale"]
    if method in MATRIX_METHODS and not same and built["basis"] in EVEN:
        parameters["lambda_scale"] = "tasks"  # so that lambda 1 counts all task vectors
    kept = ("merge_func", "common", "flow_time", "matrices", "transposed")
    for key in kept:
        if built.get(key) is not None and method in GLOBAL_KEYS[key].methods:
            parameters[key] = built[key]
    return parameters
