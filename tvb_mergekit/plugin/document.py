"""A recipe as a text: its YAML read strictly, its keys checked, the method looked up."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from mergekit import merge_methods
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from pydantic import BaseModel

from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.recipe import Recipe, read_recipe
from tvb_mergekit.refusals import refusing
from tvb_mergekit.settings import (
    GLOBAL_KEYS,
    METHODS,
    MODEL_KEYS,
    VARYING_KEYS,
    nearest,
    unknown_key,
)
from tvb_mergekit.store.recipes import located


@dataclass
class Document:
    """One recipe, read and checked; nothing of its models has been opened."""

    config: Any
    recipe: Recipe
    raw: bool  # models are weight files, as for mergekit-pytorch
    varying: dict[str, Any] = field(default_factory=dict)

    def whole_tasks(self) -> None:
        """Take the task vectors themselves, unless the recipe says something of bases."""
        settings = self.recipe.settings
        if not settings.names_a_basis:
            whole = settings.model_copy(update={"basis": "none"})
            self.recipe = replace(self.recipe, settings=whole)


def read_document(path: str | os.PathLike[str]) -> Document:
    """The recipe in a file.

    Raises:
        UserError: no recipe of ours, several documents, or a mistake in it.
    """
    document = load_document(path)
    method = document.get("merge_method")
    if method not in METHODS:
        raise unknown_method(str(path), method, METHODS)
    return from_mapping(document)


def load_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The one recipe in a file, of any method, as plain objects.

    Raises:
        UserError: not YAML, several documents, or not a mapping.
    """
    documents = load_documents(str(path))
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise UserError(f"{path}: expected one recipe, a mapping with `merge_method`")
    return documents[0]


def from_mapping(document: Mapping[str, Any]) -> Document:
    """A recipe given as plain objects; see `read_document`."""
    # Not above: importing it calls our hook, which needs this module.
    from mergekit.scripts.merge_raw_pytorch import RawPyTorchMergeConfig

    with refusing(planning=True):
        base = document.get("base_model")
        raw = isinstance(base, str) and os.path.isfile(base)
        schema = RawPyTorchMergeConfig if raw else MergeConfiguration
        check_unknown_keys(document, schema)
        config = schema.model_validate(document)
        parameters = document.get("parameters") or {}
        varying = {key: parameters[key] for key in VARYING_KEYS if key in parameters}
        return Document(config, read_recipe(config), raw, varying)


def check_unknown_keys(raw: object, schema: type[BaseModel], where: str = "the recipe") -> None:
    """Refuse keys that mergekit would drop in silence, anywhere in the recipe's own text.

    Args:
        raw: the YAML document as plain objects.
        schema: the pydantic class that mergekit reads it into.
    """
    if not isinstance(raw, Mapping):
        return
    for key, value in raw.items():
        if key not in schema.model_fields:
            if key in GLOBAL_KEYS or key in VARYING_KEYS or key in MODEL_KEYS:
                raise UserError(
                    f"`{key}` under {where} would be ignored: it belongs under `parameters` there"
                )
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
        elif key != "parameters":
            check_unknown_keys(value, inner, f"`{key}`")


def _model_class(annotation: Any) -> type[BaseModel] | None:
    """The first pydantic class inside an annotation such as Optional[List[X]]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if (found := _model_class(inner)) is not None:
            return found
    return None


def uses_our_methods(path: str) -> bool:
    """Whether the recipe asks for one of our methods.

    Raises:
        UserError: the text is no YAML, or asks for a method that mergekit does not know either.
    """
    methods = []
    for document in load_documents(path, strict=False):
        part = document[0] if isinstance(document, list) and document else document
        methods.append(part.get("merge_method") if isinstance(part, dict) else None)
    for method in methods:
        if isinstance(method, str) and method not in registered():
            raise unknown_method(path, method, registered())
    return any(method in METHODS for method in methods)


def registered() -> Sequence[str]:
    """The methods that mergekit knows, ours first."""
    theirs = {method.spec.name for method in merge_methods.registered_methods()}
    return (*METHODS, *sorted(theirs - set(METHODS)))


def unknown_method(path: str, method: object, known: Sequence[str]) -> UserError:
    guess = nearest(method, known) if isinstance(method, str) else None
    hint = f" (did you mean `{guess}`?)" if guess else ""
    listed = ", ".join(known)
    return UserError(f"{path}: `merge_method` is {method!r:.80}: expected one of {listed}{hint}")


def load_documents(path: str, *, strict: bool = True) -> list[Any]:
    """The YAML documents of a recipe.

    Raises:
        UserError: the text is no YAML, or, where `strict`, a mapping has a key twice (YAML keeps
            the last).
    """
    data = Path(path).read_bytes()
    try:
        text = data.decode("utf-8")
        documents = list(yaml.load_all(text, Loader=_StrictLoader if strict else yaml.SafeLoader))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: no UTF-8 text ({error.reason})") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UserError(f"{path}{place}: no YAML recipe: {reason}") from error
    return [located(document, path) for document in documents] if strict else documents


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key twice in one mapping."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _value in node.value:
            key = (key_node.tag, key_node.value) if isinstance(key_node.value, str) else None
            if key is not None and key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"`{key_node.value}` stands here a second time", key_node.start_mark
                )
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def recipe_text(path: str) -> str:
    """A recipe as mergekit is to read it: as it was written, or a store's with absolute paths."""
    documents = load_documents(path)
    if documents == load_documents(path, strict=False):
        return Path(path).read_text(encoding="utf-8")
    return str(yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True))
