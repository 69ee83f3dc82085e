"""From a recipe as mergekit's commands take it to the inputs of a store."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from mergekit.options import MergeOptions

from tvb_mergekit.core.gram import NO_TENSOR
from tvb_mergekit.core.settings import VARYING_KEYS
from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.document import Document
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.plugin.planner import plan_only
from tvb_mergekit.tensors.checkpoint import SAVE_AGAIN
from tvb_mergekit.tensors.taskset import TaskSet

LOG = logging.getLogger(__name__)


class Options(MergeOptions):
    """The command's options for opening models."""

    quiet: bool = True


def read_inputs(document: Document, options: Options, names: Sequence[str] = ()) -> TaskSet:
    """Open the models of a recipe, and match their tensors.

    Args:
        names: tensors that take part as zeros although no adapter changes them.

    Raise UserError if a model is missing, damaged, quantized or does not fit the base.
    """
    recipe = document.recipe
    if recipe.store is not None:
        place = recipe.store.place
        raise UserError(f"this lists the bases of {place}: list the fine-tuned models")
    check_for_store(document)
    found = tasks_for_store(document, plan_only(document, options, names))
    if not found.items:
        raise UserError(NO_TENSOR)
    return found


def inputs_of_merge(document: Document, options: Options) -> TaskSet:
    """As `read_inputs`, and of recipes that only a merge takes, such as slices."""
    try:
        return read_inputs(document, options)
    except UserError as error:
        tasks = plan_only(document, options).tasks  # raises if a merge is refused
        if not tasks.items:
            raise
        LOG.warning("not for `tvb build`: %s", error)
    tasks.varying = document.varying
    return tasks


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
    """The task vectors of a plan under the base's names of tensors. UserError for other tensors."""
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
        base = item.base if any(part.holds == "weight" for part in item.inputs) else None
        items.append(replace(item, name=name, counted_as=name, base=base))
    return replace(plan.tasks, items=items, varying=document.varying)
