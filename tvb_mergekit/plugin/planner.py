"""The plan of a merge of model folders, by mergekit's own planner.

mergekit's planner knows the place of each merged tensor in each model, and resolves `lambda`,
`alpha` and `density` for the tensor. Our passes replace mergekit's own tasks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mergekit.architecture import get_architecture_info
from mergekit.common import ModelReference
from mergekit.config import ConfigReader, MergeConfiguration, OutputSliceDefinition
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from pydantic import PrivateAttr

from tvb_mergekit.plugin.document import Document
from tvb_mergekit.plugin.items import MergedTensors
from tvb_mergekit.plugin.loaders import MappedLoader, fresh_loaders, install_loader
from tvb_mergekit.plugin.names import replaced
from tvb_mergekit.plugin.plan import Plan, engine_of
from tvb_mergekit.plugin.preflight import check_local_files, check_tokenizer_source
from tvb_mergekit.plugin.sources import candidate
from tvb_mergekit.progress import phase
from tvb_mergekit.refusals import refusing
from tvb_mergekit.tensors import ranks


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
    tensors.fill(
        candidate(tensors.checkpoints, weight, task, tokenizer, options)
        for weight, task in planner._tensors
    )
    plan = Plan(recipe, options, engine, loaders, tensors)
    plan.tokenizer = tokenizer
    plan.architecture, plan.config = planner.arch_info, planner.out_model_config
    return plan


@phase("Planning")
def _opened(
    document: Document, options: MergeOptions
) -> tuple[dict[ModelReference, MappedLoader], MergePlanner]:
    """The open models, and mergekit's plan; local files are checked before any download."""
    recipe = document.recipe
    opened = check_local_files(recipe, options)
    check_tokenizer_source(document.config)
    LoaderCache().setup(options=options)
    opened |= recipe.opened
    loaders = {model: install_loader(model, opened.get(model)) for model in recipe.every}
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
