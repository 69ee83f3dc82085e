"""A recipe as text: strict YAML, known keys and a known method."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from mergekit.config import MergeConfiguration
from mergekit.tokenizer.config import TokenizerConfig

from tvb_mergekit.core.settings import ALL_KEYS, METHODS, MODEL_KEYS, unknown_key
from tvb_mergekit.errors import UserError, refusing
from tvb_mergekit.plugin import parse, single, store_of, unknown_method
from tvb_mergekit.plugin.recipe import Recipe, expand, read_recipe
from tvb_mergekit.tensors import ranks


def check_documents(path: str, documents: Sequence[Any], several: bool) -> None:
    """Raise UserError if a document is not a valid recipe, before mergekit works on the first.

    Args:
        several: mergekit-multi, which names documents. The recipe of a single one is read later.
    """
    ranks.one_only("mergekit-multi" if several else "mergekit-yaml")
    for document in documents if several else [single(path, documents)]:
        if isinstance(document, dict) and document.get("merge_method") in METHODS:
            plain = {key: value for key, value in document.items() if key != "name" or not several}
            config = read_strictly(plain)
            if several:
                document_of(config)


def read_strictly(document: Mapping[str, Any]) -> MergeConfiguration:
    """A document as mergekit reads it. Raise UserError for keys that mergekit drops."""
    # First those at the top: mergekit would miss `models`, and not name `modells`.
    check_unknown_keys(document, dict.fromkeys(MergeConfiguration.model_fields))
    config = MergeConfiguration.model_validate(document)
    check_unknown_keys(document, config.model_dump())
    return config


def check_unknown_keys(given: object, kept: object, place: str = "") -> None:
    """Refuse keys anywhere in a recipe that mergekit has silently dropped.

    Args:
        given: a part of the YAML document as plain objects.
        kept: the same part, as mergekit has read it.
    """
    if isinstance(given, list) and isinstance(kept, list | tuple):
        for index, pair in enumerate(zip(given, kept, strict=False)):
            check_unknown_keys(*pair, f"{place}[{index}]")
    if not (isinstance(given, Mapping) and isinstance(kept, Mapping)):
        return
    where = f"`{place}`" if place else "the recipe"
    for key, value in given.items():
        if place.endswith("parameters") and key in MergeConfiguration.model_fields:
            raise UserError(f"`{key}` under {where} belongs at the recipe's top")
        if key in kept:
            check_unknown_keys(value, kept[key], f"{place}.{key}" if place else key)
        elif key in ALL_KEYS or key in TokenizerConfig.model_fields:
            fit = "the recipe's `parameters`" if key in ALL_KEYS else "`tokenizer`"
            fit = "the `parameters` of a model" if key in MODEL_KEYS else fit
            raise UserError(f"`{key}` under {where} is ignored: put it in {fit}")
        else:
            raise unknown_key(str(key), tuple(kept), where)


@dataclass
class Document:
    """One recipe, read and checked. No model is open, except a store."""

    config: MergeConfiguration
    recipe: Recipe
    text: str  # for the output folder
    given: MergeConfiguration  # with stores as they are listed


def read_document(path: str | os.PathLike[str]) -> Document:
    """The recipe in a file. Raise UserError for another method, several documents, or a mistake."""
    text, documents = parse(str(path))
    document = single(str(path), documents)
    method = document.get("merge_method")
    if method not in METHODS:
        raise unknown_method(str(path), method, list(METHODS))
    return from_mapping(document, text)


def from_mapping(document: Mapping[str, Any], text: str | None = None) -> Document:
    """A recipe given as plain objects, and as text if there is one; see `read_document`."""
    with refusing(planning=True):
        config = read_strictly(document := with_paths(document))
        text = text or yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True)
        return document_of(config, text)


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
