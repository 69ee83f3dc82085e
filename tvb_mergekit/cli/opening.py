"""Opening of recipes, models, stores and base models for the commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tvb_mergekit.cli.options import import_mergekit, model_options
from tvb_mergekit.errors import UserError
from tvb_mergekit.progress import phase

if TYPE_CHECKING:
    import torch

    from tvb_mergekit.plugin.document import Document
    from tvb_mergekit.store.facts import DtypeName
    from tvb_mergekit.store.store import Bases
    from tvb_mergekit.tensors.checkpoint import Checkpoint
    from tvb_mergekit.tensors.taskset import TaskSet


def read_recipe(recipe: str) -> Document:
    import_mergekit()
    from tvb_mergekit.plugin.document import read_document

    with phase("Reading the recipe"):
        return read_document(recipe)


def open_models(
    document: Document, values: dict[str, Any], names: list[str] | None = None
) -> TaskSet:
    """The opened models of a recipe; `names` as for `read_inputs`."""
    from tvb_mergekit.plugin.inputs import read_inputs

    with phase("Opening the models"):
        return read_inputs(document, model_options(values), names)


def load_store(path: str, checksums: bool = False) -> Bases:
    """The bases of a store; `checksums` compares the checksums of all files."""
    from tvb_mergekit.store.store import check, is_basis, load

    if os.path.isfile(path):
        raise UserError(f"{path} is a file; expected the folder of a store")
    if is_basis(path):
        raise UserError(f"{path} is one basis of a store; name the store, the folder around it")
    with phase("Opening the store"):
        return (check if checksums else load)(path)


def base_of(store: Bases, given: str | None) -> tuple[str, Checkpoint, Path | None]:
    """The base of a store: its name, its weights and its folder.

    Raises:
        UserError: it cannot be opened, or belongs to another store.
    """
    import_mergekit()
    from tvb_mergekit.plugin.inputs import open_base

    name = given or store.base_name
    try:
        weights, folder = open_base(name)
    except (UserError, OSError, click.ClickException) as error:
        if os.path.exists(name) or isinstance(error.__cause__, UserError):  # a damaged download
            raise
        raise UserError(
            f"base {name}: no such file or folder (from {os.getcwd()}); name the base of "
            f"{store.path} with --base"
        ) from error
    store.check_base(weights, name)
    return name, weights, folder


def document_of(recipe: str, method: str | None, base: str | None) -> Document:
    """A recipe, or the recipe of a store for a method."""
    if not os.path.isdir(recipe):
        if method is not None or base is not None:
            raise UserError(f"{recipe} is a recipe: --method and --base belong to a STORE")
        return read_recipe(recipe)
    from tvb_mergekit.settings import hint
    from tvb_mergekit.store.recipes import templates

    bases = load_store(recipe)
    known = templates(bases.facts, os.path.abspath(recipe), base_of(bases, base)[0])
    if method in known:
        from tvb_mergekit.plugin.document import from_mapping  # `base_of` has checked mergekit

        return from_mapping(known[method][1])
    if method is None:
        raise UserError(f"{recipe} is a store: name a --method, one of {', '.join(known)}")
    known_words = f"expected one of {', '.join(known)}"
    raise UserError(f"--method {method}: {known_words}{hint(method, known)}")


def dtype_of(name: DtypeName | None) -> torch.dtype | None:
    from tvb_mergekit.store.store import DTYPES

    return DTYPES[name] if name else None
