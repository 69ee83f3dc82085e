"""One more task in a store, or one less.

A store of all tasks gets one more vector. Within a budget of M vectors the bases are compressed
first (Algorithm 1 of the paper, see `core.online`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.core import online
from tvb_mergekit.core.basis import unlike
from tvb_mergekit.core.encoders import Gram
from tvb_mergekit.core.gram import GramSums
from tvb_mergekit.core.settings import VARYING_KEYS, check_tasks
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.build import (
    build_in_memory,
    build_store,
    in_memory,
    local_path,
    planned_task,
    written,
)
from tvb_mergekit.store.change import changing
from tvb_mergekit.store.facts import Compression, StoreFacts, Vector, subset
from tvb_mergekit.store.recipes import times
from tvb_mergekit.store.report import LOSSES, versions
from tvb_mergekit.store.store import DTYPES, Bases, dtype_name, is_store, load, read_store
from tvb_mergekit.tensors.merging import sums_of
from tvb_mergekit.tensors.stream import Engine, Item, Part
from tvb_mergekit.tensors.taskset import TaskSet

Doubt = Callable[[str], object]


@dataclass(frozen=True)
class Growth:
    """Choices of an addition; None: the store's own.

    Attributes:
        budget: the most vectors that the store may hold from now on.
        compress: `ae` or `balanced`.
        dtype: of dense vectors, where the store has none.
        doubt: called with each doubt, such as a model unlike the base; may raise to refuse.
    """

    budget: int | None = None
    compress: str | None = None
    dtype: torch.dtype | None = None
    doubt: Doubt = print


@dataclass(frozen=True)
class _Next:
    """The next state: the first `kept` vectors stay, and `matrix` [inputs, new] makes the others.

    `facts` has all keys of `store.json` except the vectors.
    """

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    kept: int
    vectors: Sequence[Vector]
    items: Sequence[Item]
    matrix: Tensor

    def with_vectors(self, vectors: Sequence[Vector]) -> StoreFacts:
        made = {**self.facts, "vectors": list(vectors), "num_bases": len(vectors)}
        return StoreFacts.model_validate({**made, "numbers": None, "previous": None})


def add_to_store(
    path: str | os.PathLike[str], inputs: TaskSet, growth: Growth, engine: Engine = Engine()
) -> Bases:
    """Add the one model of `inputs` to the store at `path`, which is made if it does not exist.

    Raises:
        UserError: another base, tensors that differ from the store's, a task name that is there,
            a budget that does not fit, no room, a doubt. The store stays as it was.
    """
    if not is_store(path):
        return build_store(
            _first(inputs),
            path,
            engine,
            dtype=growth.dtype,
            budget=_budget(growth.budget),
            compress=_way(growth.compress),
            warn=growth.doubt,
        )
    with changing(path) as change:
        bases = load(change.store)
        state = _next(bases, inputs, growth, engine)
        old = bases.facts.vectors[: state.kept]
        taken = [v.weights.file.split("/")[1].rpartition("-")[0] for v in old if v.weights]
        own = replace(inputs, items=state.items)
        new, squares = written(change, own, state.vectors, state.matrix, engine, taken)
        inputs.check_unchanged()
        facts = state.with_vectors([*old, *new])
        if facts.whole:
            (task,) = inputs.tasks
            size = facts.norms[task] / abs(facts.parameters["weights"][task])
            facts = facts.but(errors={**facts.errors, task: squares[0] ** 0.5 / size})
        return change.commit(facts, state.tensors)


def add_in_memory(
    bases: Bases | None, inputs: TaskSet, growth: Growth, engine: Engine = Engine()
) -> Bases:
    """Add the one model of `inputs` to bases, which are not changed, as state dicts."""
    dtype = growth.dtype or torch.float32
    if bases is None:
        budget, how = _budget(growth.budget), _way(growth.compress)
        made = build_in_memory(_first(inputs), engine, dtype=dtype, warn=growth.doubt)
        return replace(
            made, facts=made.facts.but(budget=budget, compress=how or made.facts.compress)
        )
    state = _next(bases, inputs, growth, engine)
    dtype = DTYPES[bases.facts.vectors[0].dtype]
    new = in_memory(replace(inputs, items=state.items), state.matrix, dtype, engine)
    added = [vector.but(codec="dense", dtype=dtype_name(dtype)) for vector in state.vectors]
    vectors = [*bases.facts.vectors[: state.kept], *added]
    sources = [*bases.sources[: state.kept], *new]
    return Bases(state.with_vectors(vectors), state.tensors, sources)


def _first(inputs: TaskSet) -> TaskSet:
    """The first task of a store, which is kept as it is; keys of `ae` are for later rounds."""
    settings = inputs.settings.but(basis="none", num_bases=None)
    now = {*settings.in_force(), "num_bases", "basis_ratio"}
    later = {key: value for key, value in settings.given.items() if key not in now}
    return replace(inputs, settings=settings, varying={**inputs.varying, **later})


def _budget(budget: int | None) -> int | None:
    if budget is not None and budget < 2:
        raise UserError(
            f"the budget is {budget}: expected 2 or more, one basis for the previous tasks and one "
            "for the new task"
        )
    return budget


def _way(how: str | None) -> Compression | None:
    """A way to compress, if one is given. Raise UserError for a word that is none."""
    if how is None:
        return None
    if how not in online.COMPRESSIONS:
        raise UserError(f"--compress {how}: expected one of {', '.join(online.COMPRESSIONS)}")
    return "balanced" if how == "balanced" else "ae"


def _compression(bases: Bases, growth: Growth) -> Compression:
    """The way in which full bases make room. Raise UserError if they cannot grow so."""
    facts, where = bases.facts, bases.place
    if facts.compress is None:
        raise UserError(
            f"the bases in {where} are {bases.basis}, no convex combinations of tasks: only ae, "
            "balanced, groups, rand_select and none can grow"
        )
    how = _way(growth.compress) or facts.compress
    if how == "balanced" and facts.basis_weights is None:
        raise UserError(
            f"--compress balanced keeps the sum of all tasks, and the bases in {where} "
            f"({bases.basis}) do not hold it: compress by ae, or build the store with "
            "`basis: balanced`"
        )
    if how == "ae" and facts.compress == "balanced":
        growth.doubt(
            f"{where} is balanced: once it is compressed by ae, its bases no longer add up to the "
            "sum of all tasks, and it cannot be compressed by balanced again"
        )
    return how


def _next(bases: Bases, inputs: TaskSet, growth: Growth, engine: Engine) -> _Next:
    """The state with one more task."""
    started, facts, count = time.perf_counter(), bases.facts, bases.num_bases
    (task,), (weight,) = inputs.tasks, inputs.weights
    if task in bases.tasks:
        raise UserError(f"the task {task!r} is in {bases.place} already: give another name")
    check_tasks([*bases.tasks, task], [*facts.models, task])
    bases.check_base(inputs.base, inputs.base_model)
    budget = _budget(facts.budget if growth.budget is None else growth.budget)
    how = _compression(bases, growth)
    if budget is not None and not bases.whole and budget < count:
        raise UserError(
            f"the budget is {budget}, and the store holds {count} bases: give {count} or more, or "
            "build a smaller store"
        )
    joins = bases.whole and (budget is None or count < budget)
    items = _given(bases, inputs)
    both = [replace(i, inputs=(*_stored(bases, i), *i.inputs)) for i in items]
    if not joins:  # samples count as they are
        both = [replace(i, inputs=tuple(replace(p, share=1.0) for p in i.inputs)) for i in both]
    sums = _sums(bases, inputs, both, growth.doubt, engine).scaled([*bases.scales.tolist(), weight])
    made = _grown(bases, inputs, sums) | {"budget": budget, "compress": how}
    made["seconds"] = {"sum": round(time.perf_counter() - started, 3)}
    grow = _joined if joins else _compressed
    return grow(bases, replace(inputs, items=items), both, sums.gram, growth, made)


def _joined(
    bases: Bases,
    inputs: TaskSet,
    both: Sequence[Item],
    products: Tensor,
    growth: Growth,
    made: dict[str, Any],
) -> _Next:
    """One more task vector: dense or a sample as the others are, or in the form that suits it."""
    facts, count, first = bases.facts, bases.num_bases, bases.facts.vectors[0]
    codecs = {vector.codec for vector in facts.vectors}
    gram = products.clone()
    if "sampled" in codecs and "gram" in bases.tensors:  # that of the models is known
        gram[:count, :count] = bases.tensors["gram"]
    one = torch.eye(count + 1, dtype=torch.float64)
    dtype = DTYPES[first.dtype] if codecs == {"dense"} else growth.dtype
    shares = [] if inputs.adapters else [v.share for v in facts.vectors if v.codec == "sampled"]
    vector = planned_task(inputs, 0, dtype, shares[0] if shares else 0.0)
    errors = {**facts.errors, inputs.tasks[0]: 0.0}
    made |= {"errors": errors, "basis_weights": [1.0] * (count + 1)}
    tensors = {"encoder": one, "decoder": one.clone(), "gram": gram}
    return _Next(made, tensors, count, [vector], inputs.items, one[:1, :1])


def _compressed(
    bases: Bases,
    inputs: TaskSet,
    both: Sequence[Item],
    products: Tensor,
    growth: Growth,
    made: dict[str, Any],
) -> _Next:
    """A round of Algorithm 1."""
    facts, count, how = bases.facts, bases.num_bases, made["compress"]
    weights, sampled = facts.basis_weights, any(v.codec == "sampled" for v in facts.vectors)
    buffer = online.Buffer(
        bases.encoder,
        bases.decoder,
        None if sampled else bases.tensors.get("gram"),
        None if weights is None else torch.tensor(weights, dtype=torch.float64),
    )
    settings = bases.settings.but(basis=how)
    budget = made["budget"] or count
    matrix, step = online.add_task(buffer, products, budget, how, settings)
    tensors = {"encoder": step.encoder, "decoder": step.decoder}
    made |= {"errors": dict.fromkeys(made["tasks"]), **dict.fromkeys(LOSSES)}
    if step.gram is not None:
        tensors["gram"] = step.gram
        known, norms = Gram.of(step.gram), step.gram.diagonal().sqrt()
        encoding = known.encoding(step.encoder.numpy(), step.decoder.numpy())
        lost = known.errors((step.encoder @ step.decoder).numpy()) / norms.numpy()
        made |= {name: getattr(encoding, name) for name in LOSSES}
        made["errors"] = dict(zip(made["tasks"], lost.tolist(), strict=True))
    held = step.basis_weights
    made["basis_weights"] = None if held is None else held.tolist()
    made["parameters"] |= _changed(bases, settings, how, count >= budget)
    dtype = next((v.dtype for v in facts.vectors if v.codec == "dense"), None)
    dtype = dtype or dtype_name(growth.dtype or inputs.own_dtype)
    vectors = [Vector(name=f"B{m}", dtype=dtype) for m in range(len(step.decoder))]
    scales = [*bases.scales.tolist(), *inputs.weights]
    matrix = matrix * torch.tensor(scales, dtype=torch.float64)[:, None]
    if count >= budget or bases.whole:
        return _Next(made, tensors, 0, vectors, both, matrix)
    return _Next(made, tensors, count, vectors[-1:], inputs.items, matrix[-1:, -1:])


def _changed(bases: Bases, settings: Any, how: str, compressed: bool) -> dict[str, Any]:
    """The recipe's keys that a round of Algorithm 1 changes."""
    old = bases.facts
    changed: dict[str, Any] = {"basis": how}
    if compressed:
        changed = settings.in_force()
    if how == "balanced" and old.parameters["lambda_scale"] == "bases":
        # M stays and T grows: the same lambda would mean less and less for each task.
        given = old.parameters.get("lambda", VARYING_KEYS["lambda"].default_for(old.method))
        factor = bases.num_bases / len(old.tasks)
        changed |= {"lambda_scale": "tasks", "lambda": times(given, factor)}
    return changed


def _given(bases: Bases, inputs: TaskSet) -> list[Item]:
    """The store's tensors, with the new model as input. Raise UserError for other tensors."""
    given, left_out = {item.name: item for item in inputs.items}, bases.facts.left_out
    where, (model,), names = bases.place, inputs.models, bases.facts.tensors
    for name in given:
        if name not in names and not left_out.get(name, "").startswith("excluded"):
            raise UserError(
                f"tensor `{name}` of model {model} takes no part in {where} "
                f"({left_out.get(name, 'not in the store')}), so that what was trained there "
                "would be lost: build a store with it"
            )
    for name in names:
        if name not in given:
            reason = inputs.left_out.get(name, "not in it")
            raise UserError(
                f"tensor `{name}` is in {where}, and model {model} does not give it ({reason}): a "
                "store holds one set of tensors"
            )
    return [given[name] for name in names]


def _stored(bases: Bases, item: Item) -> list[Part]:
    return [Part.of(vector, item.name, "delta") for vector in bases.vectors]


def _sums(
    bases: Bases, inputs: TaskSet, items: Sequence[Item], doubt: Doubt, engine: Engine
) -> GramSums:
    """G of the vectors and the new task vector, which must not be 0; unweighted."""
    (task,), (model,) = inputs.tasks, inputs.models
    names = [*(vector.name for vector in bases.facts.vectors), task]
    sums = sums_of(replace(inputs, tasks=names, items=items, sums=None), engine)
    if float(sums.gram[-1, -1]) == 0.0:
        raise UserError(
            f"task `{task}`: its task vector is zero: the model is identical to the base"
        )
    known = [
        bases.facts.norms[name] / abs(scale)
        for name, scale in zip(bases.tasks, bases.weights.tolist(), strict=True)
    ]
    if reason := unlike(sums.norms[-1], sums.base_norm_squared**0.5, known):
        later = "" if bases.whole else " A task cannot be taken out of the bases later"
        doubt(f"model {model}: {reason}: is it fine-tuned from this base?{later}")
    return sums


def _grown(bases: Bases, inputs: TaskSet, sums: GramSums) -> dict[str, Any]:
    """The keys of `store.json` that follow from the new task alone."""
    facts, (task,), (weight,) = bases.facts, inputs.tasks, inputs.weights
    weights = {**facts.parameters["weights"], task: weight}
    path = local_path(inputs.base_model)
    return {
        **dict(facts),
        "versions": versions(),
        "parameters": {**facts.parameters, "weights": weights},
        "tasks": [*facts.tasks, task],
        "models": [*facts.models, *inputs.models],
        "norms": {
            "base": sums.base_norm_squared**0.5,
            **facts.norms,
            task: sums.norms[-1],
        },
        "fingerprints": {**facts.fingerprints, **inputs.fingerprints},
        "model_bytes": facts.model_bytes + inputs.model_bytes,
        "base_path": path or facts.base_path,
        "base_beside": None if path else facts.base_beside,
    }


def remove_task(path: str | os.PathLike[str], task: str) -> Bases:
    """Remove a task from the store of all tasks at `path`.

    Raises:
        UserError: another kind of store, no such task, or the only one.
    """
    with changing(path) as change:
        facts = read_store(change.store)
        if not facts.whole:
            raise UserError(
                f"{path}: it holds {facts.num_bases} bases, from which no task can be taken out; "
                "`tvb undo` takes back the last addition; a store of all tasks can remove them"
            )
        if facts.tasks == [task]:
            raise UserError(f"{path}: {task!r} is its only task; delete the folder instead")
        bases = load(change.store, without=task)  # whose file may be damaged
        index, count = bases.index(task), len(facts.tasks)
        rest = [k for k in range(count) if k != index]
        tasks, models = [facts.tasks[k] for k in rest], [facts.models[k] for k in rest]
        weights = subset(facts.parameters["weights"], tasks)
        identity = torch.eye(count - 1, dtype=torch.float64)
        tensors = {"encoder": identity, "decoder": identity.clone()}
        if "gram" in bases.tensors:
            tensors["gram"] = bases.tensors["gram"][rest][:, rest]
        made = facts.but(
            tasks=tasks,
            models=models,
            parameters={**facts.parameters, "weights": weights},
            norms=subset(facts.norms, ["base", *tasks]),
            fingerprints=subset(facts.fingerprints, [facts.base_model, *models]),
            errors=subset(facts.errors, tasks),
            model_bytes=facts.model_bytes * (count - 1) // count,
            basis_weights=[1.0] * (count - 1),
            vectors=[facts.vectors[k] for k in rest],
            num_bases=count - 1,
            previous=None,
        )
        return change.commit(made, tensors)
