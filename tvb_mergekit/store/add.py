"""One more task in a store, or one less.

A store of all tasks gets one more vector. Within a budget of M vectors the bases are compressed
first (Algorithm 1 of the paper, see `core.online`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.core import online
from tvb_mergekit.core.basis import unlike
from tvb_mergekit.core.encoders import Gram
from tvb_mergekit.core.gram import GramSums
from tvb_mergekit.core.settings import VARYING_KEYS, check_tasks
from tvb_mergekit.errors import UserError, check_known
from tvb_mergekit.store.build import (
    Warn,
    build_store,
    local_path,
    lost,
    planned_task,
    states_of,
    written,
)
from tvb_mergekit.store.change import changing
from tvb_mergekit.store.facts import StoreFacts, Vector
from tvb_mergekit.store.files import check_files
from tvb_mergekit.store.recipes import times
from tvb_mergekit.store.report import errors_of, losses_of, versions
from tvb_mergekit.store.store import DENSE, Bases, dtype_name, load, load_numbers
from tvb_mergekit.tensors.merging import sums_of
from tvb_mergekit.tensors.stream import Engine, Item, Part, Weights
from tvb_mergekit.tensors.taskset import TaskSet


def add_task(
    store: str | os.PathLike[str] | Bases | None,
    inputs_for: Callable[[Bases | None], TaskSet],
    engine: Engine = Engine(),
    budget: int | None = None,
    compress: str | None = None,
    dtype: torch.dtype | None = None,
    doubt: Warn = print,
) -> Bases:
    """Add one model to a store, which is made if it does not exist; see `api.add`.

    Args:
        inputs_for: the model as the one task of a set, for the bases that it joins.
        dtype: of dense vectors, where the store has none.
        doubt: called with each doubt, such as a model unlike the base; may raise to refuse.

    Raises:
        UserError: what does not fit the store, no room, a doubt. The store stays as it was.
    """
    if compress is not None:
        check_known(compress, online.COMPRESSIONS, f"--compress {compress}")
    with ExitStack() as stack:
        change, bases = None, store if isinstance(store, Bases) else None
        if store is not None and not isinstance(store, Bases):
            change = stack.enter_context(changing(store, new=True))
            bases = load(change.store) if change.facts else None
        inputs = inputs_for(bases)
        budget = bases.facts.budget if bases and budget is None else budget
        if budget is not None and budget < 2:
            said = "expected 2 or more, one basis for the previous tasks and one for the new task"
            raise UserError(f"the budget is {budget}: {said}")
        if bases is None:
            # The first task is kept as it is; keys of `ae` are for later rounds.
            settings = inputs.settings.but(basis="none", num_bases=None)
            now = {*settings.in_force(), "num_bases", "basis_ratio"}
            later = {k: value for k, value in inputs.settings.given.items() if k not in now}
            first = replace(inputs, settings=settings, varying={**inputs.varying, **later})
            own = dtype or (None if change else torch.float32)
            return build_store(first, change, engine, own, 0, doubt, budget, compress)
        found = _next(bases, inputs, engine, budget, compress, dtype, doubt)
        facts, tensors, kept, items, matrix = found
        given, planned, sources = (
            replace(inputs, items=items),
            facts.vectors[kept:],
            list[Weights](),
        )
        if change is None:
            dense = {"codec": "dense", "dtype": bases.facts.vectors[0].dtype}
            planned, squares = [vector.but(**dense) for vector in planned], [0.0]
            sources = [*bases.sources[:kept], *states_of(given, planned, matrix, engine)]
        else:
            planned, squares = written(change, given, planned, matrix, engine)
            inputs.check_unchanged()
        made: dict[str, Any] = {"vectors": [*facts.vectors[:kept], *planned]}
        if facts.whole:
            task = facts.tasks[-1]
            norm = facts.norms[task] / abs(facts.parameters["weights"][task])
            made["errors"] = {**facts.errors, task: lost(planned[-1], squares[-1], norm)}
        facts = facts.but(**made)
        return change.commit(facts, tensors) if change else Bases(facts, tensors, sources)


def _next(
    bases: Bases,
    inputs: TaskSet,
    engine: Engine,
    budget: int | None,
    compress: str | None,
    dtype: torch.dtype | None,
    doubt: Warn,
) -> tuple[StoreFacts, dict[str, Tensor], int, Sequence[Item], Tensor]:
    """The state with one more task: one more vector, or a round of Algorithm 1.

    Returns:
        Facts, without files of new vectors and without what a code loses of the new task; matrices;
        K; items; and a matrix [inputs, new]. The first K vectors stay, and it makes the others.
    """
    started, facts, count = time.perf_counter(), bases.facts, bases.num_bases
    (task,), (weight,) = inputs.tasks, inputs.weights
    if task in bases.tasks:
        raise UserError(f"the task {task!r} is in {bases.place} already: give another name")
    check_tasks([*bases.tasks, task], [*facts.models, *inputs.models])
    bases.check_base(inputs.base, inputs.base_model)
    how = _compression(bases, compress, doubt)
    if budget is not None and not bases.whole and budget < count:
        said = f"the store holds {count} bases: give {count} or more, or build a smaller store"
        raise UserError(f"the budget is {budget}, and {said}")
    joins = bases.whole and (budget is None or count < budget)
    items = _given(bases, inputs)
    stored = [[Part.of(vector, i.name, "delta") for vector in bases.vectors] for i in items]
    both = [replace(i, inputs=(*s, *i.inputs)) for i, s in zip(items, stored, strict=True)]
    if not joins:  # samples count as they are
        both = [replace(i, inputs=tuple(replace(p, share=1.0) for p in i.inputs)) for i in both]
    scales = torch.tensor([*bases.scales.tolist(), weight], dtype=torch.float64)
    sums = _sums(bases, inputs, both, doubt, engine).scaled(scales.tolist())
    made = _with_task(facts, inputs, sums) | {"budget": budget, "compress": how}
    made["seconds"] = {"sum": time.perf_counter() - started}
    shares = [vector.share for vector in facts.vectors if vector.codec == "sampled"]
    dense = [vector.dtype for vector in facts.vectors if vector.codec == "dense"]
    if joins:  # dense or a sample as the others are, or in the form that suits it
        kept, matrix = count, torch.eye(1, dtype=torch.float64)
        encoder = decoder = torch.eye(count + 1, dtype=torch.float64)
        tensors = {"encoder": encoder, "decoder": decoder, "gram": sums.gram}
        if shares and "gram" in bases.tensors:  # that of the models is known
            sums.gram[:count, :count] = bases.tensors["gram"]
        own = DENSE[dense[0]] if len(dense) == count else dtype
        keep = shares[0] if shares and not inputs.adapters else 0.0
        vectors = [*facts.vectors, planned_task(inputs, 0, own, keep)]
        made |= {"errors": {**facts.errors, task: 0.0}, "basis_weights": [1.0] * (count + 1)}
    else:
        weights = facts.basis_weights
        buffer = online.Buffer(
            bases.encoder,
            bases.decoder,
            None if shares else bases.tensors.get("gram"),
            None if weights is None else torch.tensor(weights, dtype=torch.float64),
        )
        settings = bases.settings.but(basis=how)
        full = count >= (budget or count)
        matrix, step = online.add_task(buffer, sums.gram, budget or count, how, settings)
        tensors = {"encoder": step.encoder, "decoder": step.decoder}
        made |= {"errors": dict.fromkeys(made["tasks"]), **losses_of(None)}
        if step.gram is not None:
            tensors["gram"] = step.gram
            encoding = Gram.of(step.gram).encoding(step.encoder.numpy(), step.decoder.numpy())
            made |= losses_of(encoding)
            made["errors"] = errors_of(made["tasks"], step.gram, encoding.reconstruction)
        made["basis_weights"] = None if (w := step.basis_weights) is None else w.tolist()
        made["parameters"] |= settings.in_force() if full else {"basis": how}
        if how == "balanced" and facts.parameters["lambda_scale"] == "bases":
            # M stays and T grows: the same lambda would mean less and less for each task.
            given = facts.parameters.get("lambda", VARYING_KEYS["lambda"].default_for(facts.method))
            scaled = times(given, count / len(facts.tasks))
            made["parameters"] |= {"lambda_scale": "tasks", "lambda": scaled}
        name = dense[0] if dense else dtype_name(dtype or inputs.own_dtype)
        vectors = [Vector(name=f"B{m}", dtype=name) for m in range(len(step.decoder))]
        kept, matrix = 0, matrix * scales[:, None]
        if not (full or bases.whole):
            kept, matrix, vectors = count, matrix[-1:, -1:], [*facts.vectors, vectors[-1]]
    made |= {"vectors": vectors, "num_bases": len(vectors), "numbers": None, "previous": None}
    items = both if len(matrix) > 1 else items
    return StoreFacts.model_validate(made), tensors, kept, items, matrix


def _compression(bases: Bases, compress: str | None, doubt: Warn) -> str:
    """The way in which full bases make room. Raise UserError if they cannot grow so."""
    facts, where, kind = bases.facts, bases.place, bases.facts.parameters["basis"]
    if facts.compress is None:
        raise UserError(f"the bases in {where} are {kind}, which cannot grow: build another basis")
    how = compress or facts.compress
    if how == "balanced" and facts.basis_weights is None:
        said = f"the bases in {where} ({kind}) do not hold the sum of all tasks"
        raise UserError(f"{said}: compress by ae, or build the store with `basis: balanced`")
    if how == "ae" and facts.compress == "balanced":
        doubt(
            f"{where} is balanced: compressed by ae, its bases no longer add up to the sum of all "
            "tasks, and it cannot be compressed by balanced again"
        )
    return how


def _given(bases: Bases, inputs: TaskSet) -> list[Item]:
    """The store's tensors, with the new model as input. Raise UserError for other tensors."""
    given, names = {item.name: item for item in inputs.items}, bases.facts.tensors
    left_out = {**inputs.left_out, **bases.facts.left_out}
    for name in sorted(given.keys() ^ {*names}):
        why, of = left_out.get(name, "missing"), bases.place if name in given else inputs.models[0]
        if name not in given or not why.startswith("excluded"):
            said = f"tensor `{name}` is not in {of}, and what was trained there would be lost"
            raise UserError(f"{said} ({why}); a store holds one set of tensors")
    return [given[name] for name in names]


def _sums(
    bases: Bases, inputs: TaskSet, items: Sequence[Item], doubt: Warn, engine: Engine
) -> GramSums:
    """G of the vectors and the new task vector, which must not be 0; unweighted."""
    (task,), (model,), norms = inputs.tasks, inputs.models, bases.facts.norms
    names = [*(vector.name for vector in bases.facts.vectors), task]
    sums = sums_of(replace(inputs, tasks=names, items=items, sums=None), engine)
    if float(sums.gram[-1, -1]) == 0.0:
        said = "its task vector is zero: the model is identical to the base"
        raise UserError(f"task `{task}`: {said}")
    weights = dict(zip(bases.tasks, bases.weights.abs().tolist(), strict=True))
    known = [norms[name] / weight for name, weight in weights.items()]
    if reason := unlike(sums.norms[-1], sums.base_norm_squared**0.5, known):
        later = "" if bases.whole else " A task cannot be taken out of the bases later"
        doubt(f"model {model}: {reason}: is it fine-tuned from this base?{later}")
    return sums


def _with_task(facts: StoreFacts, inputs: TaskSet, sums: GramSums) -> dict[str, Any]:
    """The keys of `store.json` that follow from the new task alone; `sums` has it as the last."""
    (task,), (weight,), path = inputs.tasks, inputs.weights, local_path(inputs.base_model)
    weights = facts.parameters["weights"]
    return {
        **dict(facts),
        "versions": versions(),
        "parameters": {**facts.parameters, "weights": {**weights, task: weight}},
        "tasks": [*facts.tasks, task],
        "models": [*facts.models, *inputs.models],
        "norms": {**facts.norms, task: sums.norms[-1]},
        "fingerprints": {**facts.fingerprints, **inputs.fingerprints},
        "model_bytes": facts.model_bytes + inputs.model_bytes,
        "base_path": path or facts.base_path,
        "base_beside": None if path else facts.base_beside,
    }


def remove(path: str | os.PathLike[str], task: str) -> Bases:
    """Remove a task from the store of all tasks at `path`.

    Raises:
        UserError: another kind of store, no such task, or the only one.
    """
    with changing(path) as change:
        bases = load_numbers(change.store)  # vectors may be damaged
        facts = bases.facts
        if not facts.whole:
            said = "no task can be taken out of bases; `tvb undo` takes back the last addition"
            raise UserError(f"{path}: {said}")
        if facts.tasks == [task]:
            raise UserError(f"{path}: {task!r} is its only task; delete the folder instead")
        index, count = bases.index(task), len(facts.tasks) - 1
        rest = [k for k in range(count + 1) if k != index]
        try:
            check_files(change.store, facts.vectors[index].held)
        except UserError:
            pass  # the remedy, also where several tasks are damaged
        else:  # `undo` could not bring a sound task back, and the next change would delete it
            check_files(change.store, [file for v in facts.vectors for file in v.held])
        tasks, models = [facts.tasks[k] for k in rest], [facts.models[k] for k in rest]
        tensors = {name: tensor[rest][:, rest] for name, tensor in bases.tensors.items()}
        named, weights = {"base", *tasks}, facts.parameters["weights"]
        prints = {facts.base_model, *models}

        def kept(of: Mapping[str, Any], names: set[str] = named) -> dict[str, Any]:
            return {name: value for name, value in of.items() if name in names}

        made = facts.but(
            tasks=tasks,
            models=models,
            parameters={**facts.parameters, "weights": kept(weights, {*tasks})},
            norms=kept(facts.norms),
            fingerprints=kept(facts.fingerprints, prints),
            errors=kept(facts.errors, {*tasks}),
            model_bytes=facts.model_bytes * count // (count + 1),
            basis_weights=[1.0] * count,
            vectors=[facts.vectors[k] for k in rest],
            num_bases=count,
            seconds={"remove": 0.0},  # `Bases.sums` reads that G is a part of another
            previous=None,
        )
        return change.commit(made, tensors)
