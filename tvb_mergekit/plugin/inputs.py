"""From a recipe as mergekit's commands take it to the inputs of a store."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mergekit.common import ModelReference
from mergekit.options import MergeOptions

from tvb_mergekit import hub
from tvb_mergekit.core.gram import NO_TENSOR
from tvb_mergekit.core.lora import factor_gram
from tvb_mergekit.core.settings import VARYING_KEYS
from tvb_mergekit.errors import UserError, refusing
from tvb_mergekit.plugin.document import Document
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.plugin.planner import check_adapter_place, check_model_place, plan_only
from tvb_mergekit.plugin.recipe import identity_of, refuse_bases
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.adapter import FUSE_INSTEAD, Adapter, NotPlainLora, check_embeddings
from tvb_mergekit.tensors.checkpoint import SAVE_AGAIN, Checkpoint
from tvb_mergekit.tensors.stream import Item, Part
from tvb_mergekit.tensors.taskset import EXCLUDED, TaskSet

LOG = logging.getLogger(__name__)
FUSE = (
    "merge the adapters into models first: --fuse --lora-merge-cache DIR (`tvb merge --lora`: "
    "--lora-merge-cache DIR and a size, as --rank)"
)


class Options(MergeOptions):
    """The command's options for opening models."""

    quiet: bool = True
    fuse: bool = False  # adapters, instead of working on their factors


def read_inputs(document: Document, options: Options, names: Sequence[str] = ()) -> TaskSet:
    """Open the models of a recipe, and match their tensors.

    Adapters of one base stay factors. No tensor of a weight's size is made of them. mergekit plans
    other models: its architectures know all names of a tensor.

    Args:
        names: tensors that take part as zeros although no adapter targets them.

    Raises:
        UserError: a model is missing, damaged, quantized or does not fit the base.
    """
    recipe = document.recipe
    if recipe.store is not None:
        place = recipe.store.place
        raise UserError(f"this lists the bases of {place}: list the fine-tuned models")
    with refusing():
        refuse_bases([recipe.base.model.path], "`base_model`")
    check_for_store(document)
    if by_factors(document, options):
        found = ranks.world().first(lambda: _adapter_inputs(document, options, names))
    else:
        found = tasks_for_store(document, plan_only(document, options))
    if not found.items:
        raise UserError(NO_TENSOR)
    found.varying = document.varying
    return found


def inputs_of_merge(document: Document, options: Options) -> TaskSet:
    """As `read_inputs`, and of recipes that only a merge takes, such as slices."""
    try:
        return read_inputs(document, options)
    except UserError as error:
        if by_factors(document, options):
            raise
        tasks = plan_only(document, options).tasks  # raises if a merge is refused
        if not tasks.items:
            raise
        LOG.warning("not for `tvb build`: %s", error)
    tasks.varying = document.varying
    return tasks


def by_factors(document: Document, options: Options) -> bool:
    """Whether all models are adapters that stay factors."""
    return not options.fuse and all(model.lora is not None for model in document.recipe.models)


def _adapter_inputs(document: Document, options: Options, names: Sequence[str]) -> TaskSet:
    recipe = document.recipe
    if recipe.base.lora is not None:
        raise UserError(f"`base_model` {recipe.base} is a base and an adapter; {FUSE}")
    base = _local(recipe.base, options)
    adapters = []
    for task, model in zip(recipe.tasks, recipe.models, strict=True):
        assert model.lora is not None
        if identity_of(ModelReference(model=model.model)) != identity_of(recipe.base):
            raise UserError(f"model {model} adapts {model.model}, not {recipe.base}; {FUSE}")
        check_adapter_place(model.lora.path)
        path = ModelReference(model=model.lora).local_path(options.transformers_cache)
        check_embeddings(base, Path(path))
        try:
            adapters.append(Adapter.open(path, base.tensors, task, read=base.tensor))
        except NotPlainLora as error:
            raise UserError(str(error).replace(FUSE_INSTEAD, FUSE)) from error
    every = {name for adapter in adapters for name in adapter.factors}.union(names)
    recipe = recipe.over(base)
    settings = recipe.settings
    left_out = {
        name: EXCLUDED if settings.excludes(name) else "no adapter targets it"
        for name in base.tensors
        if name not in every or settings.excludes(name)
    }
    targets = {name: info for name, info in base.tensors.items() if name not in left_out}
    if not targets:
        raise UserError("no tensor takes part: `exclude` matches all that the adapters target")
    sources = [adapter.over(targets) for adapter in adapters]
    items = [
        Item(name, info.shape, None, tuple(Part.of(source, name, "delta") for source in sources))
        for name, info in targets.items()
    ]
    tasks = recipe.task_set(items, base, sources, left_out, {}, document.dtype)
    tasks.adapters, tasks.folder = sources, base.folder
    tasks.sums = factor_gram([source.factors for source in sources])
    return tasks


def open_base(text: str) -> tuple[Checkpoint, Path | None]:
    """A base model by its path or Hub name, and its folder (None for a weight file).

    Raises:
        UserError: it is not there.
    """
    if not os.path.exists(found := hub.local(text)):
        raise UserError(f"base {text}: no such folder (from {os.getcwd()}); name it with --base")
    return Checkpoint.open(found), Path(found) if os.path.isdir(found) else None


def _local(model: ModelReference, options: Options) -> Checkpoint:
    """Open a model, downloading it if it is a name on the Hub."""
    check_model_place(model.model.path)
    return Checkpoint.open(model.local_path(options.transformers_cache))


def check_for_store(document: Document, what: str = "a store") -> None:
    """Raise UserError if a store, or an adapter, cannot hold the merge of a recipe."""
    config = document.config
    if config.slices or any(module.slices for module in (config.modules or {}).values()):
        raise UserError(f"`slices`: {what} has the base's layers; list the models under `models`")
    for name, module in (config.modules or {}).items():
        varying = sorted(set(VARYING_KEYS) & set(module.parameters or {}))
        if varying:
            raise UserError(
                f"`parameters` of `modules`: {what} has no `{varying[0]}` of {name} alone; give it "
                "at the top"
            )
    source = config.tokenizer.source if config.tokenizer else config.tokenizer_source
    if source not in (None, "base"):
        raise UserError(f"`tokenizer_source` is {source}: {what} needs `tokenizer_source: base`")


def tasks_for_store(document: Document, plan: Plan) -> TaskSet:
    """The task vectors of a plan under the base's names of the tensors, for a store.

    Raises:
        UserError: a tensor is not one of the base's.
    """
    items = []
    owners: dict[str, str] = {}
    for item in plan.tasks.items:
        assert item.base is not None
        name = item.base.name
        if name is None or None in [part.name for part in item.inputs]:
            raise UserError(
                f"tensor `{item.name}` is made of others when it is loaded (an old layout of "
                f"experts): {SAVE_AGAIN}, or merge them with mergekit-yaml"
            )
        if (owner := owners.setdefault(name, item.name)) != item.name:
            raise UserError(
                f"tensors `{owner}` and `{item.name}` are one tensor of the base and two of the "
                "models: save the base with both, or leave both out with `exclude`"
            )
        shape = plan.base.tensors[name].shape
        if item.shape != shape:
            raise UserError(
                f"tensor `{item.name}`: the recipe's tokenizer gives it the shape "
                f"{list(item.shape)}, the base has {list(shape)}: a store belongs to the base's "
                "own vocabulary"
            )
        items.append(replace(item, name=name, counted_as=name))
    return replace(plan.tasks, items=items, varying=document.varying)
