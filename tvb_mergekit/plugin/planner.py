"""The plan of a merge: of model folders by mergekit's own planner, or of weight files by name.

mergekit's planner knows the place of each merged tensor in each model, and resolves `lambda`,
`alpha` and `density` for the tensor. Our passes replace mergekit's own tasks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mergekit import merge_methods
from mergekit.architecture import WeightInfo, get_architecture_info
from mergekit.common import ModelReference
from mergekit.config import ConfigReader, MergeConfiguration, OutputSliceDefinition
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from pydantic import PrivateAttr

from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.document import Document
from tvb_mergekit.plugin.items import MergedTensors
from tvb_mergekit.plugin.names import replaced
from tvb_mergekit.plugin.plan import Plan, engine_of
from tvb_mergekit.plugin.preflight import check_model, check_tokenizer_source
from tvb_mergekit.plugin.sources import (
    Candidate,
    Loaders,
    MappedLoader,
    candidate,
    fresh_loaders,
    install_loader,
)
from tvb_mergekit.progress import phase
from tvb_mergekit.refusals import refusing
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.stream import Part


@contextmanager
def planned(document: Document, options: MergeOptions, memory: int | None = None) -> Iterator[Plan]:
    """The plan of a merge, which may be run within the context.

    The document is used up: mergekit rewrites its configuration.

    Args:
        memory: Bytes that the passes may allocate. None: TVB_MERGEKIT_BLOCK_MB.

    Raises:
        UserError, MergeRefused: a reason that stops the merge before its first pass.
    """
    with fresh_loaders():
        with refusing(planning=True):
            plan = _plan(document, options, memory)
        yield plan


def plan_only(document: Document, options: MergeOptions) -> Plan:
    """The plan of a merge that nothing will run; see `planned`."""
    with planned(document, options) as plan:
        return plan


def _plan(document: Document, options: MergeOptions, memory: int | None) -> Plan:
    engine, trust = engine_of(options, memory), options.trust_remote_code
    recipe, world = document.recipe, ranks.world()
    loaders, planner = world.first(lambda: _opened(document, options))
    task = planner._tokenizer_task
    # mergekit orders new tokens by a set, whose order differs between processes.
    tokenizer = None if task is None else world.share(task.execute)
    tensors = MergedTensors(
        recipe,
        {model: loader.checkpoint for model, loader in loaders.items()},
        document.dtype,
        document.config.out_dtype,
        options.safe_serialization,
        tied=all(
            getattr(model.config(trust_remote_code=trust), "tie_word_embeddings", False)
            for model in loaders
        ),
    )
    held, pairs = tensors.checkpoints, planner._tensors
    tensors.fill(candidate(held, weight, task, tokenizer, options) for weight, task in pairs)
    plan = Plan(recipe, options, engine, loaders, tensors)
    plan.tokenizer = tokenizer
    plan.architecture, plan.config = planner.arch_info, planner.out_model_config
    return plan


@phase("Planning")
def _opened(document: Document, options: MergeOptions) -> tuple[Loaders, MergePlanner]:
    """The open models, and mergekit's plan; local files are checked before any download."""
    recipe = document.recipe
    held, opened = recipe.opened, dict[ModelReference, Any]()
    for model in recipe.every:
        opened[model] = check_model(model, recipe.base, options, model not in held)
    check_tokenizer_source(document.config)
    LoaderCache().setup(options=options)
    loaders = {model: install_loader(model, found) for model, found in (opened | held).items()}
    recipe.check_base(loaders[recipe.base].checkpoint)
    return loaders, planned_by_mergekit(document.config, options)


def planned_by_mergekit(config: MergeConfiguration, options: MergeOptions) -> MergePlanner:
    """mergekit's planner, with its task for each tensor in `_tensors`.

    Args:
        config: used up, since mergekit rewrites it.
    """
    from mergekit.merge import _model_out_config  # not above: our hook on it needs this module

    LoaderCache().setup(options=options)
    architecture = get_architecture_info(config, options)
    out = _model_out_config(config, architecture, trust_remote_code=options.trust_remote_code)
    planner = _Planner(config, architecture, options, out)
    with replaced("mergekit.plan:ConfigReader", lambda _original: _Reader):
        planner._plan()  # its plan_in_memory fails for all methods of mergekit's own
    return planner


class _Planner(MergePlanner):
    """mergekit's planner, except that it keeps the configurations of all models: mergekit's own
    cache holds 128."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        architecture = MergePlanner._model_arch.__wrapped__
        self._model_arch = functools.cache(functools.partial(architecture, self))


class _Reader(ConfigReader):
    """mergekit's reader with the same settings in the same order, except that it finds a model by
    its hash: mergekit's own compares each model with each, for every tensor."""

    _of: dict[ModelReference, list[Any]] = PrivateAttr(default_factory=dict)
    _slice: OutputSliceDefinition | None = PrivateAttr(default=None)

    def parameter_sources(self, model: ModelReference | None = None) -> Iterator[Any]:
        if self.slice_out is not None:
            if self._slice is not self.slice_out:
                self._slice, self._of = self.slice_out, {}
                for source in self.slice_out.sources:
                    self._of.setdefault(source.model, []).append(source.parameters)
            if model is not None:
                yield from self._of.get(model, ())
            yield self.slice_out.parameters
        if self.module is not None:
            yield self.module.parameters
        yield self.config.parameters


def plan_files(document: Document, options: MergeOptions, union: bool, intersection: bool) -> Plan:
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
            {m: Part.of(f, name) if name in f.tensors else None for m, f in files.items()},
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
    return Checkpoint.open(path)
