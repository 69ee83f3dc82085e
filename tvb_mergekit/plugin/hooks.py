"""The replacements for functions of mergekit: `names` says which function replaces which name.

Each function gets the original and returns the replacement. Recipes without our methods reach the
original untouched.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from tvb_mergekit.errors import UserError, check_names, refusing, unwinding
from tvb_mergekit.plugin.document import Document, RecipeFile, check_unknown_keys, parse
from tvb_mergekit.plugin.recipe import read_recipe, refuse_bases
from tvb_mergekit.plugin.run import merge
from tvb_mergekit.settings import METHODS
from tvb_mergekit.tensors import ranks


def run_merge(original: Callable[..., None]) -> Callable[..., None]:
    """A `run_merge` that merges our methods by `merge`."""

    def replacement(
        merge_config: MergeConfiguration,
        out_path: str,
        options: MergeOptions,
        config_source: str | None = None,
    ) -> None:
        if merge_config.merge_method in METHODS:
            with refusing(planning=True):
                text = config_source or merge_config.to_yaml()
                document = Document(merge_config, read_recipe(merge_config), text)
            merge(document, out_path, options)
            return
        with refusing():
            models = [model.model.path for model in merge_config.referenced_models()]
            refuse_bases(models, merge_config.merge_method)
        original(merge_config, out_path, options, config_source)

    return replacement


def callback(original: Callable[..., Any]) -> Callable[..., Any]:
    """A command that checks a recipe's text before mergekit drops unknown keys.

    Args:
        original: the callback of `mergekit-yaml` or `mergekit-multi`.
    """

    def replacement(*args: Any, **kwargs: Any) -> Any:
        path = kwargs.get("config_file")
        if not (path and os.path.isfile(path)):
            return original(*args, **kwargs)
        with refusing(planning=True):
            recipe = parse(path)
            ours = recipe.uses_our_methods()
            if ours:
                check_names(path, kwargs.get("out_path") or path)
                ranks.one_only(str(click.get_current_context().command.name))
                documents, several = recipe.documents(), "intermediate_dir" in kwargs
                count = len(documents) - documents.count(None)
                if count > 1 and not several:
                    remedy = "expected one; mergekit-multi runs several"
                    raise UserError(f"{path}: {count} recipes, {remedy}")
                given = [d.get("name") for d in documents if isinstance(d, dict) and several]
                for document in documents:  # all, before mergekit works on the first
                    _check_document(document, path, several)
                    for name, value in (document.get("parameters") or {}).items():
                        if isinstance(value, str) and value in given:
                            raise UserError(
                                f"{path}: `{name}: {value}` is also the `name` of a document, "
                                "which mergekit-multi replaces by its folder; rename the document"
                            )
        if not ours:
            return original(*args, **kwargs)
        text = recipe.for_mergekit(documents)
        with refusing(out=str(kwargs.get("out_path"))), unwinding(), _placed(recipe, text) as place:
            return original(*args, **{**kwargs, "config_file": place})

    return replacement


def _check_document(document: Any, path: str, several: bool) -> None:
    """Raise UserError if a document is not a valid recipe.

    Args:
        several: The command takes several documents. The recipe of a single one is read later.
    """
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise UserError(f"{path}: a {kind}, expected a mapping with `merge_method`")
    if document.get("merge_method") in METHODS:
        if several:  # mergekit-multi names its documents
            document = {key: value for key, value in document.items() if key != "name"}
        check_unknown_keys(document)
        config = MergeConfiguration.model_validate(document)
        if several:
            read_recipe(config)


@contextmanager
def _placed(recipe: RecipeFile, text: str) -> Iterator[str]:
    """The path of a file with the text: the recipe itself, or a temporary copy."""
    if text == recipe.text:
        yield recipe.path
        return
    with tempfile.NamedTemporaryFile("w", suffix=".yml", encoding="utf-8") as copy:
        copy.write(text)
        copy.flush()
        yield copy.name
