"""Wrappers of mergekit's functions, which import the rest of this package only for our methods.

Each gets the original, which recipes without our methods reach untouched.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import yaml

from tvb_mergekit.errors import UserError, check_names, refusing, unwinding
from tvb_mergekit.plugin import ready
from tvb_mergekit.plugin.text import OURS, parse, store_of


def get(original: Callable[[str], Any]) -> Callable[[str], Any]:
    """mergekit's method of a name, with ours."""

    def replacement(name: str) -> Any:
        if str(name).startswith(OURS):
            ready()
        return original(name)

    return replacement


def registered_methods(original: Callable[[], Any]) -> Callable[[], Any]:
    """mergekit's methods, with ours."""

    def replacement() -> Any:
        ready()
        return original()

    return replacement


def run_merge(original: Callable[..., None]) -> Callable[..., None]:
    """A `run_merge` of mergekit that merges our methods by `run.merge`."""

    def replacement(
        merge_config: Any, out_path: str, options: Any, config_source: str | None = None
    ) -> None:
        if merge_config.merge_method.startswith(OURS) and ready():
            from tvb_mergekit.plugin import document, run

            with refusing(planning=True):
                text = config_source or merge_config.to_yaml()
                # `python -m mergekit.scripts.run_yaml` has not been through `callback`
                document.check_unknown_keys(yaml.safe_load(text), merge_config.model_dump())
                read = document.document_of(merge_config, text)
            run.merge(read, out_path, options)
            return
        with refusing():
            for model in merge_config.referenced_models():
                if store_of(model):
                    raise UserError(
                        f"model {model} is of a store, a difference from its base, and "
                        f"{merge_config.merge_method} takes models: make them with `tvb export`"
                    )
        original(merge_config, out_path, options, config_source)

    return replacement


def callback(original: Callable[..., Any]) -> Callable[..., Any]:
    """A command of mergekit that checks a recipe's text before mergekit drops unknown keys."""

    def replacement(*args: Any, **kwargs: Any) -> Any:
        path = kwargs.get("config_file")
        if not (path and os.path.isfile(path)):
            return original(*args, **kwargs)
        with refusing(planning=True):
            recipe = parse(path)
            if ours := recipe.uses_our_methods() and ready():
                gc.set_threshold(50_000)  # else the libraries' million objects are searched again
                check_names(kwargs.get("out_path") or path)
                from tvb_mergekit.plugin.document import check_documents

                check_documents(recipe, several="intermediate_dir" in kwargs)
        if not ours:
            return original(*args, **kwargs)
        with refusing(out=str(kwargs.get("out_path"))), unwinding():
            return original(*args, **kwargs)

    return replacement
