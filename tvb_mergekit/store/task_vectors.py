"""A store of all task vectors: one more task, or one less."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.core.encoders import Gram
from tvb_mergekit.errors import UserError, counted
from tvb_mergekit.store import addition, bits
from tvb_mergekit.store.addition import Growth
from tvb_mergekit.store.facts import FileRecord
from tvb_mergekit.store.forms import check_kept, keeping_of
from tvb_mergekit.store.originals import write_originals
from tvb_mergekit.store.store import Bases, load, open_vector, read_store_facts
from tvb_mergekit.store.vectors import Vectors, write_vectors
from tvb_mergekit.store.writer import StoreWriter, changing
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.lossless import Lossless
from tvb_mergekit.tensors.quantized import Codes, Coding
from tvb_mergekit.tensors.source import Weights
from tvb_mergekit.tensors.taskset import TaskSet


def join(
    writer: StoreWriter, bases: Bases, inputs: TaskSet, growth: Growth, engine: Engine
) -> Bases:
    """Add the task of `inputs` to a store of all tasks, whose other vectors stay as they are."""
    started, count = time.perf_counter(), bases.num_bases
    items = addition.given_items(bases, inputs)
    sums = addition.new_sums(bases, inputs, items, growth.doubt, engine)
    matrix = torch.tensor([inputs.weights], dtype=torch.float64)

    newest, share = bases.vectors[-1], 0.0
    coding: Coding
    if isinstance(newest, Lossless):
        share = newest.sample.share
        settings = inputs.settings.model_copy(update={"basis": "none"})
        kept = replace(inputs, settings=settings, items=items)
        check_kept(kept, share)
        coding = keeping_of(kept, share)
        told = "without loss" if share == 1 else f"with {100 * share:.3g} % of its entries"
    else:
        assert isinstance(newest, Codes)
        norm, one = float(sums.gram[0, 0]) ** 0.5, torch.ones(1, dtype=torch.float64)
        width = next(iter(newest.widths.values())).bits
        width = width if growth.bits is None else int(growth.bits.bits or 0)
        coding = bits.coding_of(items, [norm], one, width)
        told = f"at {counted(width, 'bit')}"
    growth.tell(f"{inputs.tasks[0]} joins {counted(count, 'task')} {told}; they stay as they are")
    old = bases.facts.store.folders
    folders = [*old, *bits.slugs(inputs.tasks, [*bits.RESERVED, *old])]
    files = writer.keep(bases)
    items = [item.coded(coding.widths(item.name)) for item in items]
    config, new = addition.config_of(bases), folders[-1:]
    found, measured = write_vectors(
        writer.folder, new, items, matrix, config, engine, first=count, coding=coding
    )
    own = {"errors": torch.zeros(2, 1, dtype=torch.float64)}
    if share == 1:
        found |= write_originals(writer.folder, new, replace(inputs, items=items), engine)
    else:  # the last column would be of the sum of all tasks, which nobody has measured
        weights = inputs.weights if share else None
        own = {n: of[:, :1] for n, of in bits.measured_tensors(measured, weights).items()}
        own["errors"] = bits.lost(own).expand(2, 1)
    tensors = {name: torch.cat([bases.tensors[name][:, :count], own[name]], 1) for name in own}
    vectors = [open_vector(writer.folder / name, bases.facts.store.codec) for name in folders]
    for vector in vectors:
        vector.base = inputs.base
    scales = torch.cat([bases.scales, torch.tensor(inputs.weights if share else [1.0])]).double()
    tensors["gram_bases"] = bits.stored_gram(vectors, folders, engine) * scales.outer(scales)
    if 0 < share < 1:  # the products of the models themselves, where they are known
        tensors["gram_bases"][:count, :count] = bases.tensors["gram_bases"]
        tensors["gram_bases"][count, count] = sums.gram[0, 0]
    if share:
        tensors["gram"] = tensors["gram_bases"].clone()
    history = addition.grown_history(bases, inputs, sums, started)
    return _commit(writer, vectors, folders, {**files, **found}, history, tensors)


def remove_task(path: str | os.PathLike[str], task: str) -> Bases:
    """Remove a task from the store of all tasks at `path`.

    Raises:
        UserError: another kind of store, no such task, or the only one.
    """
    started = time.perf_counter()
    with changing(path) as writer:
        facts = read_store_facts(writer.store)
        if not facts.keeps_tasks:
            raise UserError(
                f"{path}: its tasks are combined in {facts.num_bases} bases, and none can be taken "
                "out; `tvb undo` takes back the last addition"
            )
        if len(facts.tasks) == 1 and task in facts.tasks:
            raise UserError(f"{path}: {task!r} is its only task; delete the folder instead")
        index = facts.tasks.index(task) if task in facts.tasks else load(writer.store).index(task)
        without = facts.store.folders[index]  # which may be damaged
        bases = load(writer.store, without)
        rest = [k for k in range(len(facts.tasks)) if k != index]
        tensors = bases.tensors
        named = [n for n in ("tensor_squares", "tensor_errors", "errors") if n in tensors]
        columns = {n: tensors[n][:, rest] for n in named}
        grams = {n: tensors[n][rest][:, rest] for n in ("gram_bases", "gram") if n in tensors}
        folders = [facts.store.folders[k] for k in rest]
        vectors = bases.vectors
        history = _history_without(bases, index, started)
        return _commit(
            writer, vectors, folders, writer.keep(bases, without), history, {**columns, **grams}
        )


def _history_without(bases: Bases, index: int, started: float) -> dict[str, Any]:
    """The facts of a store without the task at `index` that do not follow from the vectors."""
    facts = bases.facts

    def others(of: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in of.items() if name != facts.tasks[index]}

    models = [*facts.models[:index], *facts.models[index + 1 :]]
    known, count = {facts.base_model, *models}, len(facts.tasks)
    store = {**facts.store, "model_bytes": facts.store.model_bytes * (count - 1) // count}
    return {
        **facts,
        "tasks": list(others(dict.fromkeys(facts.tasks))),
        "models": models,
        "parameters": {**facts.parameters, "weights": others(facts.parameters["weights"])},
        "norms": others(facts.norms),
        "matrix_norms": others(facts.matrix_norms),
        "fingerprints": {n: of for n, of in facts.fingerprints.items() if n in known},
        "gram_cached": False,
        "seconds": {"remove": round(time.perf_counter() - started, 3)},
        "store": store,
    }


def _commit(
    writer: StoreWriter,
    vectors: Sequence[Weights],
    folders: Sequence[str],
    files: Mapping[str, FileRecord],
    history: Mapping[str, Any],
    tensors: dict[str, Tensor],
) -> Bases:
    """Publish a store of these task vectors."""
    count, one = len(vectors), torch.eye(len(vectors), dtype=torch.float64)
    tensors |= {"encoder": one, "decoder": one.clone()}
    if "gram" in tensors:
        tensors["eigenvalues"] = torch.from_numpy(Gram.of(tensors["gram"]).values.copy())
    store = {**history["store"], "budget": count, "basis_weights": [1.0] * count}
    codes = [vector for vector in vectors if isinstance(vector, Codes)]
    numel = sum(info.numel for info in vectors[0].tensors.values())
    mean = sum(each.bits_of(name) for each in codes for name in each.tensors) / (count * numel)
    codec, dtype, density = store["codec"], store["dtype"], history.get("density")
    made = Vectors(tensors, folders, files, dtype, codec, mean, density)
    return writer.commit(made, {**history, "store": store})
