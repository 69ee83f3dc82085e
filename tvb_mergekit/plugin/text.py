"""The text of a recipe: strict YAML, a known method, and whether the method is ours.

The stock commands read every recipe by this module, which imports no torch.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tvb_mergekit.errors import UserError, hint, one_line
from tvb_mergekit.store import is_store

MOST = 1_000_000  # values in a recipe: a few lines of nested aliases may stand for billions
OURS = "basis_"  # with which the names of our methods begin, and no other method's


def store_of(model: object) -> tuple[str, str] | None:
    """The store that a model names, and the vector in it ("" for all); None for other models."""
    path = Path(str(model))  # names of tasks may have `+`, `@` and `/`
    if is_store(path):
        return str(path), ""
    for folder in path.parents:  # but not USER/NAME in a store
        named = folder != Path() and not (path / "config.json").is_file()
        if named and is_store(folder):
            return str(folder), os.path.relpath(path, folder)
    return None


@dataclass(frozen=True)
class RecipeFile:
    """The YAML documents of a recipe, parsed once.

    Attributes:
        given: The documents as YAML reads them. The last value of a repeated key counts.
        repeated: The message about a key that stands twice in one mapping.
    """

    path: str
    text: str
    given: Sequence[Any]
    repeated: str | None

    def documents(self) -> list[Any]:
        """The documents. Raise UserError if a mapping has a key twice."""
        if self.repeated is not None:
            raise UserError(self.repeated)
        return list(self.given)

    def single(self) -> dict[str, Any]:
        """The one document. Raise UserError for several documents, or another value."""
        documents = self.documents()
        if len(documents) != 1 or not isinstance(documents[0], dict):
            raise UserError(
                f"{self.path}: expected one recipe, a mapping with `merge_method`; mergekit-multi "
                "runs several"
            )
        return documents[0]

    def uses_our_methods(self) -> bool:
        """Whether a document asks for one of our methods. Raise UserError if nobody knows it."""
        if not any(isinstance(each, dict | list) for each in self.given):
            raise UserError(f"{self.path}: no recipe, expected a mapping with `merge_method`")
        parts = [d[0] if isinstance(d, list) and d else d for d in self.given]
        methods = [part.get("merge_method") for part in parts if isinstance(part, dict)]
        named = [method for method in methods if isinstance(method, str)]
        known = importlib.import_module("mergekit.merge_methods.registry")._METHODS
        if unknown := [name for name in named if name not in known]:
            from tvb_mergekit.core.settings import METHODS

            for name in (name for name in unknown if name not in METHODS):
                every = *METHODS, *sorted(known.keys() - METHODS.keys())
                raise unknown_method(self.path, name, every)
        return any(name.startswith(OURS) for name in named)


def unknown_method(path: str, method: object, known: Sequence[str]) -> UserError:
    expected = f"expected one of {', '.join(known)}{hint(method, known)}"
    return UserError(f"{path}: `merge_method` is {method!r:.80}: {expected}")


class _Loader(yaml.SafeLoader):
    """SafeLoader that notes the first key that stands twice in one mapping."""

    repeated: str | None = None

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _value in node.value:
            if key.tag == "tag:yaml.org,2002:str":
                if key.value in seen and not self.repeated:
                    line = key.start_mark.line + 1
                    self.repeated = f", line {line}: `{key.value}` stands here a second time"
                seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def parse(path: str) -> RecipeFile:
    """Parse a recipe file. Raise UserError if its text is not YAML."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
        loader: Any = _Loader(text)
        documents = []
        while loader.check_data():
            documents.append(loader.get_data())
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not a YAML recipe: {one_line(error)}") from error
    if _count(documents, {}) > MOST:
        raise UserError(f"{path}: its aliases (`*`) repeat each other to over {MOST:,} values")
    return RecipeFile(path, text, documents, loader.repeated and f"{path}{loader.repeated}")


def _count(value: Any, known: dict[int, float]) -> float:
    """The number of values in a part of a recipe, with those that each alias repeats."""
    if not isinstance(value, list | dict):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf  # of a list that holds itself
        parts = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count(part, known) for part in parts)
    return known[id(value)]
