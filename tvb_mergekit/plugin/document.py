"""A recipe as text: strict YAML, known keys and a known method."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from mergekit import merge_methods
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.tokenizer.config import TokenizerConfig
from pydantic import BaseModel

from tvb_mergekit.core.settings import ALL_KEYS, METHODS, MODEL_KEYS, VARYING_KEYS, unknown_key
from tvb_mergekit.errors import UserError, hint, one_line, refusing
from tvb_mergekit.plugin.recipe import Recipe, read_recipe
from tvb_mergekit.plugin.stores import expand

MOST = 1_000_000  # values in a recipe: a few lines of nested aliases may stand for billions


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
        """The documents.

        Raises:
            UserError: a mapping has a key twice.
        """
        if self.repeated is not None:
            raise UserError(self.repeated)
        return list(self.given)

    def single(self) -> dict[str, Any]:
        """The one document.

        Raises:
            UserError: several documents, or not a mapping.
        """
        documents = self.documents()
        if len(documents) != 1 or not isinstance(documents[0], dict):
            raise UserError(f"{self.path}: expected one recipe, a mapping with `merge_method`")
        return documents[0]

    def uses_our_methods(self) -> bool:
        """Whether a document asks for one of our methods.

        Raises:
            UserError: mergekit does not know the method either.
        """
        if not any(isinstance(each, dict | list) for each in self.given):
            raise UserError(f"{self.path}: no recipe, expected a mapping with `merge_method`")
        theirs = {method.spec.name for method in merge_methods.registered_methods()}
        parts = [d[0] if isinstance(d, list) and d else d for d in self.given]
        methods = [part.get("merge_method") for part in parts if isinstance(part, dict)]
        for method in methods:
            if isinstance(method, str) and method not in theirs:
                raise unknown_method(self.path, method, (*METHODS, *sorted(theirs - {*METHODS})))
        return any(method in METHODS for method in methods)


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


def check_unknown_keys(
    given: object, schema: type[BaseModel] = MergeConfiguration, where: str = "the recipe"
) -> None:
    """Refuse keys anywhere in a recipe that mergekit would silently drop.

    Args:
        given: the YAML document as plain objects.
        schema: the pydantic class that mergekit reads it into.
    """
    if not isinstance(given, Mapping):
        return
    for key, value in given.items():
        if key not in schema.model_fields:
            if key in ALL_KEYS or key in TokenizerConfig.model_fields:
                place = "the recipe's `parameters`" if key in ALL_KEYS else "`tokenizer`"
                place = "the `parameters` of a model" if key in MODEL_KEYS else place
                raise UserError(f"`{key}` under {where} is ignored: put it in {place}")
            raise unknown_key(str(key), tuple(schema.model_fields), where)
        inner = _model_class(schema.model_fields[key].annotation)
        if inner is None or inner is ModelReference:
            continue
        if isinstance(value, list):
            for index, item in enumerate(value):
                check_unknown_keys(item, inner, f"`{key}`[{index}]")
        elif isinstance(value, Mapping) and key in ("modules", "tokens"):
            for name, item in value.items():
                check_unknown_keys(item, inner, f"`{key}.{name}`")
        elif isinstance(value, Mapping) and key == "parameters":
            for name, setting in value.items():
                if name in MergeConfiguration.model_fields:
                    raise UserError(f"`{name}` under `parameters` belongs at the recipe's top")
                for entry in setting if isinstance(setting, list) else [setting]:  # a filter's
                    check_unknown_keys(entry, inner, f"`{name}`")
        else:
            check_unknown_keys(value, inner, f"`{key}`")


def _model_class(annotation: Any) -> type[BaseModel] | None:
    """The first pydantic class inside an annotation such as Optional[List[X]]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = map(_model_class, getattr(annotation, "__args__", ()))
    return next(filter(None, found), None)


@dataclass
class Document:
    """One recipe, read and checked. No model is open, except a store."""

    config: MergeConfiguration
    recipe: Recipe
    text: str  # for the output folder
    given: MergeConfiguration  # with stores as they are listed
    varying: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str | None:
        dtype: str | None = self.config.out_dtype or self.config.dtype
        return dtype

    def whole_tasks(self) -> None:
        """Use the task vectors themselves, unless the recipe has a key of bases."""
        settings = self.recipe.settings
        if not settings.names_a_basis:
            whole = settings.but(basis="none")
            self.recipe = replace(self.recipe, settings=whole)


def read_document(path: str | os.PathLike[str]) -> Document:
    """The recipe in a file. Raise UserError for another method, several documents, or a mistake."""
    file = parse(str(path))
    document = file.single()
    method = document.get("merge_method")
    if method not in METHODS:
        raise unknown_method(str(path), method, list(METHODS))
    return from_mapping(document, file.text)


def from_mapping(document: Mapping[str, Any], text: str | None = None) -> Document:
    """A recipe given as plain objects, and as text if there is one; see `read_document`."""
    with refusing(planning=True):
        check_unknown_keys(document)
        config = MergeConfiguration.model_validate(document)
        parameters = document.get("parameters") or {}
        varying = {key: parameters[key] for key in VARYING_KEYS if key in parameters}
        text = text or yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True)
        return replace(document_of(config, text), varying=varying)


def document_of(config: MergeConfiguration, text: str = "") -> Document:
    """A recipe that mergekit has read. Raise UserError if it is wrong."""
    expanded, listed = expand(config)
    return Document(expanded, read_recipe(expanded, listed), text, config)
