"""The recipes that a store is written with: add, ties, and forget each of its tasks.

Their paths are relative to the recipe's own folder, so that a store may be moved. mergekit takes
paths from the current folder; `located` gives it absolute ones.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tvb_mergekit.facts import HASH
from tvb_mergekit.keys import VARYING_KEYS
from tvb_mergekit.store import base_of, is_store, read_store_facts
from tvb_mergekit.writing import file_record

FOLDER = "recipes"
_HEAD = """\
# {what}
#   {command} STORE/recipes/{name}.yml OUT
# Paths that begin with ../ are relative to this folder: in a copy elsewhere write them anew.
"""
FIRST = "basis-000"
ALPHA = 1.0  # forgets all of the reconstructed task vector; less forgets less


def write_recipes(folder: Path, facts: Mapping[str, Any]) -> dict[str, str]:
    """Write STORE/recipes, from the settings that the store was built with.

    Returns:
        File name -> checksum, by which a recipe that was edited since can be told.

    Args:
        folder: where the store is being written.
        facts: its basis.json.
    """
    place = folder / FOLDER
    place.mkdir(exist_ok=True)
    written: dict[str, str] = {}
    bare = (
        facts["store"]["contents"] == "tensors" and not (folder / FIRST / "config.json").is_file()
    )
    command = "mergekit-pytorch" if bare else "mergekit-yaml"
    beside = facts["store"].get("base_beside")
    base = os.path.join("..", beside) if beside else facts["base_model"]
    for name, (what, recipe) in ready(facts, "..", base).items():
        if bare:
            for entry in recipe["models"]:
                entry["model"] += "/model.safetensors"
        text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
        head = _HEAD.format(what=what, command=command, name=name)
        file = place / f"{name}.yml"
        file.write_text(head + text, encoding="utf-8")
        written[file.name] = str(file_record(file)[HASH])
    return written


def located(recipe: Any, path: str | os.PathLike[str]) -> Any:
    """The recipe read from `path`: where that lies in a store's `recipes`, paths that begin with
    `../` are relative to it, and the store's own base is looked for (`store.base_of`)."""
    folder = Path(os.path.realpath(path)).parent
    if folder.name != FOLDER or not isinstance(recipe, dict) or not is_store(folder.parent):
        return recipe
    facts = read_store_facts(folder.parent)

    def place(model: object) -> object:
        if not isinstance(model, str) or not model.startswith("../"):
            return model
        return os.path.normpath(folder / model)

    base = recipe.get("base_model")
    own = base == os.path.join("..", facts["store"].get("base_beside", ""))
    models = recipe.get("models")
    if isinstance(models, list):
        models = [
            {**entry, "model": place(entry.get("model"))} if isinstance(entry, dict) else entry
            for entry in models
        ]
    base = base_of(facts, folder.parent) if own else place(base)
    return {**recipe, "base_model": base, "models": models}


def edited(store: Path, facts: Mapping[str, Any]) -> list[str]:
    """The ready recipes of a store, as paths below it, that are not as they were written."""
    written = facts["store"].get("recipes", {})
    files = [store / FOLDER / name for name in written]
    return [
        f"{FOLDER}/{file.name}"
        for file in files
        if not file.is_file() or file_record(file)[HASH] != written[file.name]
    ]


def keep_edited(old: Path, new: Path, written: Mapping[str, str]) -> dict[str, str]:
    """The recipes that the user has edited -> the names under which the successor has them.

    Args:
        old, new: the two folders of recipes.
        written: the checksums of `old` as it was written.

    What the successor has none of keeps its name; of the others the first is NAME.old, then
    NAME.old2, and so on. What it has already, under whatever name, is left.
    """
    renamed = {}
    files = sorted(old.iterdir()) if old.is_dir() else []
    held = {file_record(file)[HASH] for file in new.iterdir() if file.is_file()}
    for file in sorted(files, key=lambda file: (new / file.name).exists()):
        if file.is_dir() and not (new / file.name).exists():
            shutil.copytree(file, new / file.name)
        if not file.is_file() or (found := file_record(file)[HASH]) in held:
            continue
        if found != written.get(file.name):
            places = (new / f"{file.name}{suffix}" for suffix in _suffixes())
            place = next(place for place in places if not place.exists())
            if place.name != file.name:
                renamed[file.name] = place.name
            shutil.copy2(file, place)
    return renamed


def _suffixes() -> Iterator[str]:
    yield from ("", ".old")
    yield from (f".old{number}" for number in itertools.count(2))


def ready(facts: Mapping[str, Any], store: str, base: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> what it does, and the recipe; `store` and `base` are their paths in it."""

    def recipe(method: str, forget: str | None = None) -> dict[str, Any]:
        return _recipe(method, store, base, facts, forget)

    made = {}
    parameters = facts["parameters"]
    if parameters["basis"] != "rand_proj":
        made["add"] = (
            "One model that does all tasks: theta_0 + lambda * (B_1 + ... + B_M).",
            recipe("basis_ta"),
        )
        made["ties"] = (
            "The same with less interference: TIES over the bases.",
            recipe("basis_ties"),
        )
    used: set[str] = set()
    for task in facts["tasks"]:
        name = slug = re.sub(r"[^\w.-]+", "-", task)[:60]
        number = 1
        while name.lower() in used:  # names that differ only in what a file name cannot hold
            number += 1
            name = f"{slug}-{number}"
        used.add(name.lower())
        made[f"forget-{name}"] = (
            f"The base without {task!r}: theta_0 - alpha * its reconstructed task vector.",
            recipe("basis_negate", forget=task),
        )
    return made


def _recipe(
    method: str, store: str, base: str, facts: Mapping[str, Any], forget: str | None
) -> dict[str, Any]:
    built = facts["parameters"]
    same = method == facts["method"]
    parameters: dict[str, Any] = {}
    for key in ("lambda", "density", "alpha"):
        spec = VARYING_KEYS[key]
        if method in spec.methods:
            # What the recipe said of another method is no guide for this one.
            shared = same or {method, facts["method"]} <= {"basis_ta", "basis_ties"}
            default = spec.default_for(method)
            value = built.get(key, default) if shared else default
            parameters[key] = ALPHA if value is None else value
    parameters["lambda_scale"] = built["lambda_scale"]
    if method == "basis_ties":
        parameters |= {key: built[key] for key in ("trim", "merge_func") if key in built}
    if forget is not None:
        parameters["forget"] = forget
    recipe: dict[str, Any] = {
        "merge_method": method,
        "base_model": base,
        "models": [
            {"model": f"{store}/{name}"}
            for name in facts["store"]["folders"]
            if name.startswith("basis-")
        ],
        "parameters": parameters,
    }
    if facts["dtype"]:
        recipe["dtype"] = facts["dtype"]
    return recipe
