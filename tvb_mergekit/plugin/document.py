"""A recipe as text: strict YAML, known keys and a known method."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.tokenizer.config import TokenizerConfig
from pydantic import BaseModel

from tvb_mergekit.core.settings import ALL_KEYS, METHODS, MODEL_KEYS, VARYING_KEYS, unknown_key
from tvb_mergekit.errors import UserError, refusing
from tvb_mergekit.plugin.recipe import Recipe, read_recipe
from tvb_mergekit.plugin.stores import expand
from tvb_mergekit.plugin.text import RecipeFile, parse, store_of, unknown_method
from tvb_mergekit.tensors import ranks


def check_documents(file: RecipeFile, several: bool) -> None:
    """Raise UserError if a document is not a valid recipe, before mergekit works on the first.

    Args:
        several: mergekit-multi, which names documents. The recipe of a single one is read later.
    """
    ranks.one_only("mergekit-multi" if several else "mergekit-yaml")
    documents, path = file.documents(), file.path
    if len(documents) - documents.count(None) > 1 and not several:
        raise UserError(f"{path}: several recipes, expected one; mergekit-multi runs several")
    for document in documents:
        if not isinstance(document, dict):
            kind = type(document).__name__
            raise UserError(f"{path}: a {kind}, expected a mapping with `merge_method`")
        if document.get("merge_method") in METHODS:
            plain = {key: value for key, value in document.items() if key != "name" or not several}
            check_unknown_keys(plain)
            config = MergeConfiguration.model_validate(plain)
            if several:
                document_of(config)


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
        document = with_paths(document)
        config = MergeConfiguration.model_validate(document)
        parameters = document.get("parameters") or {}
        varying = {key: parameters[key] for key in VARYING_KEYS if key in parameters}
        text = text or yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True)
        return replace(document_of(config, text), varying=varying)


def with_paths(part: Any) -> Any:
    """A part of a recipe with names on this disk as mappings; mergekit splits text at `+`, `@`."""
    if isinstance(part, list):
        return [with_paths(each) for each in part]
    if not isinstance(part, Mapping):
        return part
    made = {key: with_paths(value) for key, value in part.items()}
    for key in made.keys() & {"model", "base_model"}:
        text = made[key]
        split = isinstance(text, str) and not {*"+@"}.isdisjoint(text)
        if split and (os.path.exists(text) or store_of(text)):
            made[key] = {"model": {"path": text}}
    return made


def document_of(config: MergeConfiguration, text: str = "") -> Document:
    """A recipe that mergekit has read. Raise UserError if it is wrong."""
    expanded, bases = expand(config)
    return Document(expanded, read_recipe(expanded, bases), text, config)
