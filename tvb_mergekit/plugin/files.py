"""Merges of weight files, as `mergekit-pytorch` plans and runs them."""

from __future__ import annotations

import os

from mergekit import merge_methods
from mergekit.architecture import WeightInfo
from mergekit.common import ModelReference
from mergekit.options import MergeOptions

from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.document import Document
from tvb_mergekit.plugin.items import MergedTensors
from tvb_mergekit.plugin.loaders import MappedLoader, open_model
from tvb_mergekit.plugin.plan import Plan, engine_of
from tvb_mergekit.plugin.sources import Candidate, part_of
from tvb_mergekit.tensors.checkpoint import Checkpoint


def plan_files(
    document: Document, options: MergeOptions, union: bool = False, intersection: bool = False
) -> Plan:
    """The plan of a merge of weight files.

    Args:
        union: A model may lack tensors. They stay the base's.
        intersection: Only tensors that all files have are merged and written.

    Raises:
        UserError: a reason that stops the merge before its first pass.
    """
    # An import above would call our hook, which needs this module.
    from mergekit.scripts.merge_raw_pytorch import construct_param_dicts

    recipe, config, engine = document.recipe, document.config, engine_of(options)
    files = {model: recipe.opened.get(model) or open_file(model) for model in recipe.every}
    base, stored = files[recipe.base], recipe.vectors is not None
    recipe.check_base(base)
    # A store may hold a tensor under another name, which the plan looks up.
    held = [set((base if stored else file).tensors) for file in files.values()]
    every = set().union(*held)
    if not (union or intersection):
        for model, names in zip(files, held, strict=True):
            for name in sorted(every - names):
                raise UserError(
                    f"tensor `{name}` is not in {model}, but in others; merge what all have with "
                    "--tensor-intersection, or keep the base's with --tensor-union"
                )
    method = merge_methods.get(config.merge_method)
    tensors = MergedTensors(recipe, files, document.dtype, safe=options.safe_serialization)
    tensors.fill(
        Candidate(
            WeightInfo(name=name),
            dict(construct_param_dicts(config, method, name)[0].items()),
            {model: part_of(file, name) for model, file in files.items()},
        )
        for name in sorted(every.intersection(*held) if intersection else every)
    )
    loaders = {model: MappedLoader(file) for model, file in files.items()}
    return Plan(recipe, options, engine, loaders, tensors)


def open_file(model: ModelReference) -> Checkpoint:
    """The weight file that a recipe of mergekit-pytorch names."""
    path = model.model.path
    if not os.path.isfile(path):
        found = "is a folder" if os.path.isdir(path) else "no such file"
        raise UserError(f"model {path}: {found}; mergekit-pytorch takes one weight file each")
    return open_model(path)
