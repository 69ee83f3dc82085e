"""One more task in a store, or one less.

A store of all tasks gets one more vector. Within a budget of M vectors the bases are compressed
first (Algorithm 1 of the paper, see `core.online`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.core import online
from tvb_mergekit.core.basis import Basis, unlike
from tvb_mergekit.core.gram import Gram, GramSums
from tvb_mergekit.core.settings import VARYING_KEYS, Settings
from tvb_mergekit.errors import UserError, check_known
from tvb_mergekit.store import is_store
from tvb_mergekit.store.build import Warn, build_store, described, planned_task, written
from tvb_mergekit.store.change import Change, changing
from tvb_mergekit.store.facts import StoreFacts, Vector, check_files, name_of_dtype
from tvb_mergekit.store.recipes import times
from tvb_mergekit.store.report import UNKNOWN, measured
from tvb_mergekit.store.store import Bases, load, load_numbers
from tvb_mergekit.tensors.merging import encoded_by, sums_of
from tvb_mergekit.tensors.stream import Engine, Item, Part
from tvb_mergekit.tensors.taskset import TaskSet


def add_task(
    store: str | os.PathLike[str],
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
    if not is_store(store):
        # The first task is kept as it is; keys of `ae` are for later rounds.
        inputs = inputs_for(None)
        settings = inputs.settings.but(basis="none", num_bases=None)
        now = {*settings.in_force(), "num_bases", "basis_ratio"}
        later = {k: value for k, value in inputs.settings.given.items() if k not in now}
        first = replace(inputs, settings=settings, varying={**inputs.varying, **later})
        more = {"budget": budget, "compress": compress or "ae"}
        return build_store(first, store, engine, dtype, 0, doubt, **more)
    with changing(store) as change:
        bases = load(change.store)
        _grow(change, bases, inputs_for(bases), engine, budget, compress, dtype, doubt)
    return load(change.store)


def _grow(
    change: Change,
    bases: Bases,
    inputs: TaskSet,
    engine: Engine,
    budget: int | None,
    compress: str | None,
    dtype: torch.dtype | None,
    doubt: Warn,
) -> None:
    """Write the state with one more task: one more vector, or a round of Algorithm 1."""
    started, facts, count = time.perf_counter(), bases.facts, bases.num_bases
    (task,), (weight,) = inputs.tasks, inputs.weights
    if task in bases.tasks:
        raise UserError(f"the task {task!r} is in {bases.path} already: give another name")
    bases.check_base(inputs.base, inputs.base_model)
    how = _compression(bases, compress, doubt)
    budget = facts.budget if budget is None else budget
    if budget is not None and budget < 2:
        said = "expected 2 or more, one basis for the previous tasks and one for the new task"
        raise UserError(f"the budget is {budget}: {said}")
    if budget is not None and not bases.whole and budget < count:
        said = f"the store holds {count} bases: give {count} or more, or build a smaller store"
        raise UserError(f"the budget is {budget}, and {said}")
    joins = bases.whole and (budget is None or count < budget)
    inputs = replace(inputs, items=_given(bases, inputs))
    both = []
    for item in inputs.items:
        parts = [*(Part.of(vector, item.name) for vector in bases.vectors), *item.inputs]
        if not joins:  # samples count as they are
            parts = [replace(part, share=1.0) for part in parts]
        both.append(replace(item, inputs=tuple(parts)))
    alone, raw = _sums(bases, inputs, both, engine, doubt)
    scales = torch.tensor([*bases.scales.tolist(), weight], dtype=torch.float64)
    sums = raw.scaled(scales.tolist())
    seconds = {"sum": time.perf_counter() - started}
    shares = [vector.share for vector in facts.vectors if vector.codec == "sampled"]
    dense = [vector.dtype for vector in facts.vectors if vector.codec == "dense"]
    more: dict[str, Any]
    if joins:  # dense or a sample as the others are, or in the form that suits it
        given, kept, matrix = inputs, facts.vectors, torch.eye(1, dtype=torch.float64)
        if shares and "gram" in bases.tensors:  # that of the models is known
            sums.gram[:count, :count] = bases.tensors["gram"]
        identity = torch.eye(count + 1, dtype=torch.float64)
        tensors = {"encoder": identity, "decoder": identity, "gram": sums.gram}
        own = getattr(torch, dense[0]) if len(dense) == count else dtype
        forms = [planned_task(inputs, 0, own, shares[0] if shares and not inputs.adapters else 0)]
        more = {"basis_weights": [1.0] * (count + 1)}
    else:
        settings, full = bases.settings.but(basis=how), count >= (budget or count)
        matrix, tensors, more = _round(bases, task, sums.gram, budget or count, settings)
        name = dense[0] if dense else name_of_dtype(dtype or inputs.own_dtype)
        forms = [Vector(name=f"B{m}", dtype=name) for m in range(matrix.shape[1])]
        given, kept, matrix = replace(inputs, items=both), [], matrix * scales[:, None]
        if not full:
            given, kept, matrix, forms = inputs, facts.vectors, matrix[-1:, -1:], forms[-1:]
        more["parameters"] = settings.in_force() if full else {"basis": how}
        if how == "balanced" and facts.parameters["lambda_scale"] == "bases":
            # M stays and T grows: the same lambda would mean less and less for each task.
            known = facts.parameters.get("lambda", VARYING_KEYS["lambda"].default_for(facts.method))
            scaled = times(known, count / len(facts.tasks))
            more["parameters"] |= {"lambda_scale": "tasks", "lambda": scaled}
    vectors, squares = written(change, given, forms, matrix, engine)
    inputs.check_unchanged()
    new = described(inputs, alone, vectors[-1:], squares[-1:])
    every = [*kept, *vectors]
    made = _joined(facts, new, more) | {"vectors": every, "num_bases": len(every)}
    change.commit(made | {"budget": budget, "compress": how, "seconds": seconds}, tensors)


def _compression(bases: Bases, compress: str | None, doubt: Warn) -> str:
    """The way in which full bases make room. Raise UserError if they cannot grow so."""
    facts, where, kind = bases.facts, bases.path, bases.facts.parameters["basis"]
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
        why, of = left_out.get(name, "missing"), bases.path if name in given else inputs.models[0]
        if name not in given or not why.startswith("excluded"):
            said = f"tensor `{name}` is not in {of}, and what was trained there would be lost"
            raise UserError(f"{said} ({why}); a store holds one set of tensors")
    return [given[name] for name in names]


def _sums(
    bases: Bases, inputs: TaskSet, items: list[Item], engine: Engine, doubt: Warn
) -> tuple[Basis, GramSums]:
    """The new task vector, which must not be 0, on its own; and G of the vectors and it."""
    names = [*(vector.name for vector in bases.facts.vectors), *inputs.tasks]
    raw = sums_of(replace(inputs, tasks=names, items=items, sums=None), engine)
    alone = encoded_by(inputs, replace(raw, gram=raw.gram[-1:, -1:]))
    weights = zip(bases.tasks, bases.weights.abs().tolist(), strict=True)
    known = [bases.facts.norms[name] / scale for name, scale in weights]
    if reason := unlike(raw.norms[-1], raw.base_norm_squared**0.5, known):
        later = "" if bases.whole else " A task cannot be taken out of the bases later"
        doubt(f"model {inputs.models[0]}: {reason}: is it fine-tuned from this base?{later}")
    return alone, raw


def _round(
    bases: Bases, task: str, gram: Tensor, budget: int, settings: Settings
) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
    """A round of Algorithm 1 over the bases and one more task, by their `gram` [M + 1, M + 1].

    Returns:
        The new bases as combinations [M + 1, M'], matrices, and keys of `store.json`.
    """
    weights, tasks = bases.facts.basis_weights, [*bases.tasks, task]
    sampled = any(vector.codec == "sampled" for vector in bases.facts.vectors)
    buffer = online.Buffer(
        bases.encoder,
        bases.decoder,
        None if sampled else bases.tensors.get("gram"),
        None if weights is None else torch.tensor(weights, dtype=torch.float64),
    )
    matrix, step = online.add_task(buffer, gram, budget, settings.basis, settings)
    tensors = {"encoder": step.encoder, "decoder": step.decoder}
    more: dict[str, Any] = {"errors": dict.fromkeys(tasks), **UNKNOWN}
    if step.gram is not None:
        tensors["gram"] = step.gram
        encoding = Gram.of(step.gram).encoding(step.encoder.numpy(), step.decoder.numpy())
        more = measured(tasks, encoding, step.gram)
    more["basis_weights"] = None if (w := step.basis_weights) is None else w.tolist()
    return matrix, tensors, more


def _joined(old: StoreFacts, new: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `store.json` with one more task, by those of this task alone and `more`."""
    made = dict(old) | {"versions": new["versions"], "base_path": new["base_path"] or old.base_path}
    for key in ("tasks", "models"):
        made[key] = [*made[key], *new[key]]
    for key in ("norms", "errors"):
        made[key] = {**new[key], **made[key]}
    made["fingerprints"] = {**made["fingerprints"], **new["fingerprints"]}
    made["model_bytes"] += new["model_bytes"]
    weights = {**old.parameters["weights"], **new["parameters"]["weights"]}
    parameters = {**old.parameters, "weights": weights, **more.get("parameters", {})}
    return {**made, **more, "parameters": parameters}


def remove(path: str | os.PathLike[str], task: str) -> Bases:
    """Remove a task from the store of all tasks at `path`.

    Raises:
        UserError: another kind of store, no such task, or the only one.
    """
    with changing(path) as change:
        facts = change.facts
        assert facts is not None
        if not facts.whole:
            said = "no task can be taken out of bases; `tvb undo` takes back the last addition"
            raise UserError(f"{path}: {said}")
        if facts.tasks == [task]:
            raise UserError(f"{path}: {task!r} is its only task; delete the folder instead")
        check_known(task, facts.tasks, f"no task {task!r} in {path}")
        index, count = facts.tasks.index(task), len(facts.tasks) - 1
        try:
            check_files(change.store, facts.vectors[index].held)
        except UserError:
            pass  # the remedy, also where several tasks are damaged
        else:  # `undo` could not bring a sound task back, and the next change would delete it
            check_files(change.store, facts.held.values())
        rest = [k for k in range(count + 1) if k != index]

        def without(of: Mapping[str, Any], name: str = task) -> dict[str, Any]:
            return {key: value for key, value in of.items() if key != name}

        held = {facts.base_model, *(facts.models[k] for k in rest)}
        made = dict(facts) | {
            "tasks": [facts.tasks[k] for k in rest],
            "models": [facts.models[k] for k in rest],
            "vectors": [facts.vectors[k] for k in rest],
            "num_bases": count,
            "basis_weights": [1.0] * count,
            "parameters": {**facts.parameters, "weights": without(facts.parameters["weights"])},
            "norms": without(facts.norms) | {"base": facts.norms["base"]},
            "errors": without(facts.errors),
            "fingerprints": {k: v for k, v in facts.fingerprints.items() if k in held},
            "model_bytes": facts.model_bytes * count // (count + 1),
            "seconds": {"remove": 0.0},  # `Bases.sums` reads that G is a part of another
        }
        numbers = load_numbers(change.store, facts)
        tensors = {name: tensor[rest][:, rest] for name, tensor in numbers.items()}
        change.commit(made, tensors)
    return load(change.store)
