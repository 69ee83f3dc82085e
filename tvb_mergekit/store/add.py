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
    build_store,
    in_memory,
    local_path,
    lost,
    planned_task,
    written,
)
from tvb_mergekit.store.change import changing
from tvb_mergekit.store.facts import StoreFacts, Vector, subset
from tvb_mergekit.store.recipes import times
from tvb_mergekit.store.report import errors_of, losses_of, versions
from tvb_mergekit.store.store import DTYPES, Bases, dtype_name, is_store, load, load_numbers
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

    def __post_init__(self) -> None:
        if self.compress not in (None, *online.COMPRESSIONS):
            ways = ", ".join(online.COMPRESSIONS)
            raise UserError(f"--compress {self.compress}: expected one of {ways}")
        _check_budget(self.budget)


def _check_budget(budget: int | None) -> None:
    if budget is not None and budget < 2:
        raise UserError(
            f"the budget is {budget}: expected 2 or more, one basis for the previous tasks and one "
            "for the new task"
        )


@dataclass(frozen=True)
class _Next:
    """The next state: the first `kept` vectors stay, and `matrix` [inputs, new] makes the others.

    Its facts have no files of new vectors, nor what a code loses of the new task.
    """

    facts: StoreFacts
    tensors: Mapping[str, Tensor]
    kept: int
    items: Sequence[Item]
    matrix: Tensor

    def with_vectors(self, new: Sequence[Vector], squares: Sequence[float]) -> StoreFacts:
        facts, task = self.facts, self.facts.tasks[-1]
        errors = facts.errors
        if facts.whole:
            norm = facts.norms[task] / abs(facts.parameters["weights"][task])
            errors = {**errors, task: lost(new[-1], squares[-1], norm)}
        return facts.but(vectors=[*facts.vectors[: self.kept], *new], errors=errors)


def add_task(
    store: str | os.PathLike[str] | Bases | None,
    inputs: TaskSet,
    growth: Growth,
    engine: Engine = Engine(),
) -> Bases:
    """Add the one model of `inputs` to a store, which is made if it does not exist.

    Args:
        store: its path. Or bases in memory, which are not changed; None begins new ones.

    Raises:
        UserError: another base, tensors that differ from the store's, a task name that is there,
            a budget that does not fit, no room, a doubt. The store stays as it was.
    """
    if isinstance(store, Bases):
        state = _next(store, inputs, growth, engine)
        dtype = store.facts.vectors[0].dtype
        planned = [v.but(codec="dense", dtype=dtype) for v in state.facts.vectors[state.kept :]]
        new = in_memory(replace(inputs, items=state.items), planned, state.matrix, engine)
        facts = state.with_vectors(planned, [0.0] * len(planned))
        return Bases(facts, state.tensors, [*store.sources[: state.kept], *new])
    if store is None or not is_store(store):
        # The first task is kept as it is; keys of `ae` are for later rounds.
        settings = inputs.settings.but(basis="none", num_bases=None)
        now = {*settings.in_force(), "num_bases", "basis_ratio"}
        later = {key: value for key, value in inputs.settings.given.items() if key not in now}
        return build_store(
            replace(inputs, settings=settings, varying={**inputs.varying, **later}),
            store,
            engine,
            dtype=growth.dtype or (torch.float32 if store is None else None),
            budget=growth.budget,
            compress=growth.compress,
            warn=growth.doubt,
        )
    with changing(store) as change:
        state = _next(load(change.store), inputs, growth, engine)
        own, planned = replace(inputs, items=state.items), state.facts.vectors[state.kept :]
        made, squares = written(change, own, planned, state.matrix, engine)
        inputs.check_unchanged()
        return change.commit(state.with_vectors(made, squares), state.tensors)


def _next(bases: Bases, inputs: TaskSet, growth: Growth, engine: Engine) -> _Next:
    """The state with one more task: one more vector, or a round of Algorithm 1."""
    started, facts, count = time.perf_counter(), bases.facts, bases.num_bases
    (task,), (weight,) = inputs.tasks, inputs.weights
    if task in bases.tasks:
        raise UserError(f"the task {task!r} is in {bases.place} already: give another name")
    check_tasks([*bases.tasks, task], [*facts.models, task])
    bases.check_base(inputs.base, inputs.base_model)
    budget = facts.budget if growth.budget is None else growth.budget
    _check_budget(budget)
    how = _compression(bases, growth)
    if budget is not None and not bases.whole and budget < count:
        raise UserError(
            f"the budget is {budget}, and the store holds {count} bases: give {count} or more, or "
            "build a smaller store"
        )
    joins = bases.whole and (budget is None or count < budget)
    items = _given(bases, inputs)
    stored = [[Part.of(vector, i.name, "delta") for vector in bases.vectors] for i in items]
    both = [replace(i, inputs=(*s, *i.inputs)) for i, s in zip(items, stored, strict=True)]
    if not joins:  # samples count as they are
        both = [replace(i, inputs=tuple(replace(p, share=1.0) for p in i.inputs)) for i in both]
    scales = torch.tensor([*bases.scales.tolist(), weight], dtype=torch.float64)
    sums = _sums(bases, inputs, both, growth.doubt, engine).scaled(scales.tolist())
    made = _with_task(facts, inputs, sums) | {"budget": budget, "compress": how}
    made["seconds"] = {"sum": round(time.perf_counter() - started, 3)}
    shares = [vector.share for vector in facts.vectors if vector.codec == "sampled"]
    dense = [vector.dtype for vector in facts.vectors if vector.codec == "dense"]
    if joins:  # dense or a sample as the others are, or in the form that suits it
        kept, matrix = count, torch.eye(1, dtype=torch.float64)
        encoder = decoder = torch.eye(count + 1, dtype=torch.float64)
        tensors = {"encoder": encoder, "decoder": decoder.clone(), "gram": sums.gram.clone()}
        if shares and "gram" in bases.tensors:  # that of the models is known
            tensors["gram"][:count, :count] = bases.tensors["gram"]
        dtype = DTYPES[dense[0]] if len(dense) == count else growth.dtype
        keep = shares[0] if shares and not inputs.adapters else 0.0
        vectors = [*facts.vectors, planned_task(inputs, 0, dtype, keep)]
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
            tensors["gram"] = gram = step.gram
            halves = step.encoder.numpy(), step.decoder.numpy()
            encoding = Gram.of(gram).encoding(*halves)
            made |= losses_of(encoding)
            made["errors"] = errors_of(made["tasks"], gram, encoding.reconstruction)
        made["basis_weights"] = None if (w := step.basis_weights) is None else w.tolist()
        made["parameters"] |= settings.in_force() if full else {"basis": how}
        if how == "balanced" and facts.parameters["lambda_scale"] == "bases":
            # M stays and T grows: the same lambda would mean less and less for each task.
            given = facts.parameters.get("lambda", VARYING_KEYS["lambda"].default_for(facts.method))
            scaled = times(given, count / len(facts.tasks))
            made["parameters"] |= {"lambda_scale": "tasks", "lambda": scaled}
        own = dense[0] if dense else dtype_name(growth.dtype or inputs.own_dtype)
        vectors = [Vector(name=f"B{m}", dtype=own) for m in range(len(step.decoder))]
        kept, matrix = 0, matrix * scales[:, None]
        if not (full or bases.whole):
            kept, matrix, vectors = count, matrix[-1:, -1:], [*facts.vectors, vectors[-1]]
    made |= {"vectors": vectors, "num_bases": len(vectors), "numbers": None, "previous": None}
    return _Next(
        StoreFacts.model_validate(made),
        tensors,
        kept,
        both if len(matrix) > 1 else items,
        matrix,
    )


def _compression(bases: Bases, growth: Growth) -> str:
    """The way in which full bases make room. Raise UserError if they cannot grow so."""
    facts, where = bases.facts, bases.place
    if facts.compress is None:
        raise UserError(
            f"the bases in {where} are {bases.basis}, no convex combinations of tasks: only ae, "
            "balanced, groups, rand_select and none can grow"
        )
    how = growth.compress or facts.compress
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
    if lacking := [name for name in names if name not in given]:
        raise UserError(
            f"tensor `{lacking[0]}` is in {where}, and model {model} does not give it "
            f"({inputs.left_out.get(lacking[0], 'not in it')}): a store holds one set of tensors"
        )
    return [given[name] for name in names]


def _sums(
    bases: Bases, inputs: TaskSet, items: Sequence[Item], doubt: Doubt, engine: Engine
) -> GramSums:
    """G of the vectors and the new task vector, which must not be 0; unweighted."""
    (task,), (model,), norms = inputs.tasks, inputs.models, bases.facts.norms
    names = [*(vector.name for vector in bases.facts.vectors), task]
    sums = sums_of(replace(inputs, tasks=names, items=items, sums=None), engine)
    if float(sums.gram[-1, -1]) == 0.0:
        raise UserError(
            f"task `{task}`: its task vector is zero: the model is identical to the base"
        )
    weights = dict(zip(bases.tasks, bases.weights.abs().tolist(), strict=True))
    known = [norms[name] / weight for name, weight in weights.items()]
    if reason := unlike(sums.norms[-1], sums.base_norm_squared**0.5, known):
        later = "" if bases.whole else " A task cannot be taken out of the bases later"
        doubt(f"model {model}: {reason}: is it fine-tuned from this base?{later}")
    return sums


def _with_task(facts: StoreFacts, inputs: TaskSet, sums: GramSums) -> dict[str, Any]:
    """The keys of `store.json` that follow from the new task alone; `sums` has it as the last."""
    (task,), (weight,), path = inputs.tasks, inputs.weights, local_path(inputs.base_model)
    norms = {"base": sums.base_norm_squared**0.5, **facts.norms}
    weights = facts.parameters["weights"]
    return {
        **dict(facts),
        "versions": versions(),
        "parameters": {**facts.parameters, "weights": {**weights, task: weight}},
        "tasks": [*facts.tasks, task],
        "models": [*facts.models, *inputs.models],
        "norms": {**norms, task: sums.norms[-1]},
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
            raise UserError(
                f"{path}: it holds {facts.num_bases} bases, from which no task can be taken out; "
                "`tvb undo` takes back the last addition"
            )
        if facts.tasks == [task]:
            raise UserError(f"{path}: {task!r} is its only task; delete the folder instead")
        index, count = bases.index(task), len(facts.tasks) - 1
        rest = [k for k in range(count + 1) if k != index]
        tasks, models = [facts.tasks[k] for k in rest], [facts.models[k] for k in rest]
        weights = subset(facts.parameters["weights"], tasks)
        identity = torch.eye(count, dtype=torch.float64)
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
            model_bytes=facts.model_bytes * count // (count + 1),
            basis_weights=[1.0] * count,
            vectors=[facts.vectors[k] for k in rest],
            num_bases=count,
            seconds={"remove": 0.0},  # `Bases.sums` reads that G is a part of another
            previous=None,
        )
        return change.commit(made, tensors)
