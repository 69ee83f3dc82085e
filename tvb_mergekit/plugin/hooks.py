"""The replacements for functions of mergekit: `names` says which function replaces which name.

Each function gets the original and returns the replacement. Recipes without our methods reach the
original untouched.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from mergekit.config import MergeConfiguration
from mergekit.graph import Task
from mergekit.options import MergeOptions
from pydantic import BaseModel

from tvb_mergekit.errors import UserError, check_names
from tvb_mergekit.plugin.document import Document, RecipeFile, check_unknown_keys, parse
from tvb_mergekit.plugin.planner import plan_files
from tvb_mergekit.plugin.recipe import read_recipe, refuse_bases
from tvb_mergekit.plugin.run import check_place, merge, merge_files
from tvb_mergekit.refusals import refusing, unwinding
from tvb_mergekit.settings import METHODS
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.output import check_disk


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
                document = Document(merge_config, read_recipe(merge_config), False, text)
            merge(document, out_path, options)
            return
        with refusing():
            models = [model.model.path for model in merge_config.referenced_models()]
            refuse_bases(models, merge_config.merge_method)
        original(merge_config, out_path, options, config_source)

    return replacement


class RunMerge(Task[None]):
    """The one task of our merges in mergekit's task graph."""

    run: Callable[[], None]

    def arguments(self) -> dict[str, Task]:
        return {}

    def execute(self, **_kwargs: Any) -> None:
        self.run()

    def main_thread_only(self) -> bool:
        return True


def plan_flat_merge(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `plan_flat_merge` that makes one task of a merge by our methods."""

    def replacement(
        config: Any, out_path: str, tensor_union: bool, tensor_intersection: bool, options: Any
    ) -> Any:
        if config.merge_method not in METHODS:
            paths = [config.base_model, *(model.model for model in config.models)]
            with refusing():
                refuse_bases([path for path in paths if path], config.merge_method)
            return original(config, out_path, tensor_union, tensor_intersection, options)
        started = time.perf_counter()
        with refusing(planning=True):
            document = Document(config, read_recipe(config), True)
            check_place(out_path, document.recipe, options)
            plan = plan_files(document, options, tensor_union, tensor_intersection)
            check_disk(out_path, plan.output_bytes)
        return [RunMerge(run=lambda: merge_files(plan, out_path, started))]

    return replacement


def callback(original: Callable[..., Any]) -> Callable[..., Any]:
    """A command that checks a recipe's text before mergekit drops unknown keys.

    Args:
        original: the callback of `mergekit-yaml`, `mergekit-multi` or `mergekit-pytorch`.
    """

    def replacement(*args: Any, **kwargs: Any) -> Any:
        key, schema = "config_file", MergeConfiguration
        if key not in kwargs:  # mergekit-pytorch
            from mergekit.scripts.merge_raw_pytorch import RawPyTorchMergeConfig

            key, schema = "config_path", RawPyTorchMergeConfig
        path = kwargs.get(key)
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
                    remedy = "; mergekit-multi runs several" * (schema is MergeConfiguration)
                    raise UserError(f"{path}: {count} recipes, expected one{remedy}")
                given = [d.get("name") for d in documents if isinstance(d, dict) and several]
                for document in documents:  # all, before mergekit works on the first
                    _check_document(document, path, schema, several)
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
            return original(*args, **{**kwargs, key: place})

    return replacement


def _check_document(document: Any, path: str, schema: type[BaseModel], several: bool) -> None:
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
        check_unknown_keys(document, schema)
        config = schema.model_validate(document)
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
