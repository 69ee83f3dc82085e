"""A recipe's merge as a LoRA adapter: exact if all models are adapters, else truncated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from mergekit import merge_methods
from mergekit.parameter_resolver import resolve_parameters

from tvb_mergekit.core.basis import Combination, Tunables
from tvb_mergekit.core.gram import NO_TENSOR
from tvb_mergekit.core.lora import Factors
from tvb_mergekit.errors import UserError, counted, listed, megabytes
from tvb_mergekit.plugin.document import Document
from tvb_mergekit.plugin.inputs import (
    FUSE,
    Options,
    by_factors,
    check_for_store,
    read_inputs,
    tasks_for_store,
)
from tvb_mergekit.plugin.planner import input_folders, planned
from tvb_mergekit.store.lora import AdapterExport, AdapterReport, NewAdapter
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.factoring import Truncation
from tvb_mergekit.tensors.matrices import check_matrices, merged_factors
from tvb_mergekit.tensors.merging import build_basis, changes_of, check_tables, most_bases
from tvb_mergekit.tensors.output import check_new_folder
from tvb_mergekit.tensors.passes import LEAST
from tvb_mergekit.tensors.stream import Item, Part
from tvb_mergekit.tensors.taskset import TaskSet

GRADIENT = "`lambda`, `alpha` and `density` of adapters may have filters, but no layer gradient"
NEEDS_SIZE = "the merge has no exact factors ({}): give --rank R, --energy SHARE or --size SIZE"


def merge_to_adapter(
    document: Document,
    out: str,
    size: Truncation,
    dtype: torch.dtype,
    engine: Engine,
    options: Options,
) -> Sequence[AdapterReport]:
    """Merge the models of a recipe into an adapter in the folder `out`.

    Without a size it is exact: the models are adapters, and the method is not basis_ties.

    Raises:
        UserError: no exact factors and no size, and as `read_inputs` and `AdapterExport.write`.
    """
    recipe = document.recipe
    settings, folders = recipe.settings, input_folders(recipe)
    check_new_folder(out, folders)
    check_for_store(document, "an adapter")
    factored = by_factors(document, options)
    for why, found in (
        ("not all models are adapters", not factored),
        ("basis_ties trims single entries", settings.method == "basis_ties"),
    ):
        if found and not any(size):
            raise UserError(NEEDS_SIZE.format(why))
    if factored:
        tasks = _with_tunables(document, read_inputs(document, options))
        bases = most_bases(settings, len(tasks.tasks))
        if any(size):
            check_matrices(settings, tasks.items, bases, engine.memory)
            _check_memory(tasks.items, engine.memory)
        if settings.method == "basis_ties" and engine.memory is not None:
            check_tables(bases, engine.memory)
        basis: Combination = build_basis(tasks, engine)
        merged_items = tasks.items
    else:
        with planned(document, options, engine.memory) as plan:
            tasks = tasks_for_store(document, plan)
            _check_memory(tasks.items, engine.memory)
            basis, merged_items = plan.build(), plan.tasks.items

    # The recipe's patterns are of mergekit's names, the adapter has those of the base's files.
    pairs = zip(changes_of(basis, merged_items, engine), tasks.items, strict=True)
    items = [replace(item, name=to.name, counted_as=to.name) for item, to in pairs]
    known = dict[str, Factors]()
    if not any(size):
        known |= {item.name: merged_factors(basis, item, tasks.adapters) for item in tasks.items}
        merged = replace(tasks.adapters[0], factors=known)
        items = [replace(i, inputs=(Part.of(merged, i.name, "delta"),)) for i in items]
    title = f"{settings.method} of {counted(len(tasks.tasks), 'model')}: {listed(tasks.tasks)}"
    one = NewAdapter("", title, torch.ones(1, dtype=torch.float64))
    exporter = AdapterExport(
        items,
        ["the merge"],
        tasks.base,
        tasks.base_model,
        tasks.folder,
        size,
        dtype,
        engine,
        known=known,
    )
    return exporter.write([one], out, folders, {})


def _with_tunables(document: Document, tasks: TaskSet) -> TaskSet:
    """The task set of adapters with lambda and alpha of each tensor, as mergekit resolves filters.

    Raises:
        UserError: no value for a tensor, or a layer gradient, which needs mergekit's plan.
    """
    if any(map(_is_graded, document.varying.values())):
        raise UserError(f"{GRADIENT}; {FUSE}")
    if any(module.parameters for module in (document.config.modules or {}).values()):
        raise UserError(
            f"`parameters` of `modules` need mergekit's plan: name them at the top; {FUSE}"
        )
    spec, given = merge_methods.get(document.config.merge_method).spec, document.config.parameters
    items = []
    for item in tasks.items:
        values, _ = resolve_parameters(
            spec, tensor_name=item.name, inputs={}, sources=lambda _: [given]
        )
        if any(values.get(key) is None for key in document.varying):
            raise UserError(f"{', '.join(document.varying)}: no value for tensor `{item.name}`")
        items.append(replace(item, tunables=Tunables.of(values)))
    return replace(tasks, items=items)


def _is_graded(setting: object) -> bool:
    """Whether a setting is a list of values for layers, also as the value of a filter."""
    if isinstance(setting, Mapping):
        return _is_graded(setting.get("value"))
    if not isinstance(setting, list):
        return False
    return not any(isinstance(each, Mapping) for each in setting) or any(map(_is_graded, setting))


def _check_memory(items: Sequence[Item], memory: int | None) -> None:
    """Raise UserError unless `memory` bytes hold each tensor of the merge in float32."""
    if not items:
        raise UserError(NO_TENSOR)
    largest = max(items, key=lambda item: item.numel)
    if memory is not None and 4 * largest.numel + LEAST > memory:
        raise UserError(
            f"{megabytes(memory)} of memory are too little: tensor `{largest.name}` of the merge "
            f"takes {megabytes(4 * largest.numel + LEAST)} in float32; raise --memory"
        )
