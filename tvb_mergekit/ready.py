"""The recipes that a store is written with: add, ties, and forget each of its tasks."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tvb_mergekit.keys import VARYING_KEYS
from tvb_mergekit.writing import HASH, file_record

FOLDER = "recipes"
_HEAD = """\
# {what}
#   {command} {file} OUT
# The paths are those of the place where the store was written; change them if it has moved.
"""
FIRST = "basis-000"
ALPHA = 1.0  # forgets all of the reconstructed task vector; less forgets less


def write_recipes(folder: Path, store: Path, facts: Mapping[str, Any]) -> dict[str, str]:
    """Write STORE/recipes, from the settings that the store was built with.

    Returns:
        File name -> checksum, by which a recipe that was edited since can be told.

    Args:
        folder: where the store is being written.
        store: where it will lie.
        facts: its basis.json.
    """
    place = folder / FOLDER
    place.mkdir(exist_ok=True)
    written: dict[str, str] = {}
    bare = (
        facts["store"]["contents"] == "tensors" and not (folder / FIRST / "config.json").is_file()
    )
    command = "mergekit-pytorch" if bare else "mergekit-yaml"
    for name, (what, recipe) in ready(store, facts).items():
        if bare:
            for entry in recipe["models"]:
                entry["model"] += "/model.safetensors"
        text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
        head = _HEAD.format(what=what, command=command, file=store / FOLDER / name)
        (place / name).write_text(head + text, encoding="utf-8")
        written[name] = str(file_record(place / name)[HASH])
    return written


def keep_edited(old: Path, new: Path, written: Mapping[str, str]) -> dict[str, str]:
    """The recipes that the user has edited -> the names under which the successor has them.

    Args:
        old, new: the two folders of recipes.
        written: the checksums of `old` as it was written.

    What the successor has none of keeps its name; of the others the first is NAME.old, then
    NAME.old2, and so on.
    """
    renamed = {}
    files = sorted(old.iterdir()) if old.is_dir() else []
    for file in sorted(files, key=lambda file: (new / file.name).exists()):
        if file.is_file() and str(file_record(file)[HASH]) != written.get(file.name):
            places = (new / f"{file.name}{suffix}" for suffix in _suffixes())
            place = next(place for place in places if not place.exists())
            if place.name != file.name:
                renamed[file.name] = place.name
            shutil.copy2(file, place)
    return renamed


def _suffixes() -> Iterator[str]:
    yield from ("", ".old")
    yield from (f".old{number}" for number in itertools.count(2))


def ready(store: Path, facts: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """File name -> what it does, and the recipe."""
    made = {}
    parameters = facts["parameters"]
    if parameters["basis"] != "rand_proj":
        made["add.yml"] = (
            "One model that does all tasks: theta_0 + lambda * (B_1 + ... + B_M).",
            _recipe("basis_ta", store, facts),
        )
        made["ties.yml"] = (
            "The same with less interference: TIES over the bases.",
            _recipe("basis_ties", store, facts),
        )
    used: set[str] = set()
    for task in facts["tasks"]:
        name = slug = re.sub(r"[^\w.-]+", "-", task)[:60]
        number = 1
        while name.lower() in used:  # names that differ only in what a file name cannot hold
            number += 1
            name = f"{slug}-{number}"
        used.add(name.lower())
        made[f"forget-{name}.yml"] = (
            f"The base without {task!r}: theta_0 - alpha * its reconstructed task vector.",
            _recipe("basis_negate", store, facts, forget=task),
        )
    return made


def _recipe(
    method: str, store: Path, facts: Mapping[str, Any], forget: str | None = None
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
    base, place = facts["base_model"], facts["store"].get("base_path")
    recipe: dict[str, Any] = {
        "merge_method": method,
        "base_model": place or base,
        "models": [
            {"model": str(store / name)}
            for name in facts["store"]["folders"]
            if name.startswith("basis-")
        ],
        "parameters": parameters,
    }
    if facts["dtype"]:
        recipe["dtype"] = facts["dtype"]
    return recipe
