"""One more task in a store, which may be new.

A store of all tasks gets one more vector. Within a budget of M vectors the bases are compressed
first (Algorithm 1 of the paper, see `core.online`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from tvb_mergekit.core import online
from tvb_mergekit.core.basis import unlike
from tvb_mergekit.core.gram import Gram
from tvb_mergekit.errors import UserError, check_known
from tvb_mergekit.store import is_store
from tvb_mergekit.store.build import Warn, build_store, described, planned_task, written
from tvb_mergekit.store.change import changing
from tvb_mergekit.store.facts import StoreFacts, Vector, name_of_dtype
from tvb_mergekit.store.report import UNKNOWN, measured
from tvb_mergekit.store.store import Bases, load
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

    Raise UserError for a model that does not fit the store, which then stays as it was.

    Args:
        inputs_for: the model as the one task of a set, for the bases that it joins.
        dtype: of dense vectors, where the store has none.
        doubt: called with each doubt, such as a model unlike the base; may raise to refuse.
    """
    check_known(compress or "ae", online.COMPRESSIONS, f"--compress {compress}")
    if not is_store(store):
        # The first task is kept as it is; keys of `ae` are for later rounds.
        inputs, sizes = inputs_for(None), ("basis", "num_bases", "basis_ratio")
        later = {k: value for k, value in inputs.settings.given.items() if k not in sizes}
        settings = inputs.settings.but(basis="none", num_bases=None)
        first = replace(inputs, settings=settings, varying={**inputs.varying, **later})
        more = {"budget": budget, "compress": compress or "ae"}
        return build_store(first, store, engine, dtype, 0, doubt, **more)
    with changing(store) as change:
        bases = load(change.store)
        inputs, facts, count = inputs_for(bases), bases.facts, bases.num_bases
        bases.check_base(inputs.base, inputs.base_model)
        how, budget = _room(bases, inputs.tasks[0], compress, budget)
        most = count + 1 if budget is None else min(budget, count + 1)
        joins = facts.whole and most > count  # and the store stays one of all tasks
        inputs = replace(inputs, items=_given(bases, inputs))
        both = _beside(bases, inputs, joins)
        names = [*(vector.name for vector in facts.vectors), *inputs.tasks]
        raw = sums_of(replace(both, tasks=names), engine)
        alone = encoded_by(inputs, replace(raw, gram=raw.gram[-1:, -1:]))  # must not be 0
        known = [facts.norms[t] / abs(w) for t, w in facts.parameters["weights"].items()]
        if reason := unlike(raw.norms[-1], raw.base_norm_squared**0.5, known):
            doubt(f"model {inputs.models[0]}: {reason}: is it fine-tuned from this base?")

        # The new vectors as combinations of the present ones and the new task vector
        scales = torch.tensor([*bases.scales.tolist(), *inputs.weights], dtype=torch.float64)
        products = raw.scaled(scales.tolist()).gram
        shares = [vector.share for vector in facts.vectors if vector.share < 1]
        if shares and joins:
            products[:count, :count] = bases.tensors["gram"]  # of the models, not of samples
        settings = bases.settings.but(basis=how, num_bases=most)
        matrix, encoder, decoder, basis_weights = online.add_task(
            bases.encoder, bases.decoder, facts.basis_weights, products, most, how, settings
        )
        numbers = {"encoder": encoder, "decoder": decoder}
        exact = bases.encoder.equal(torch.eye(len(bases.encoder), dtype=torch.float64))
        if exact and "gram" in bases.tensors and (joins or not shares):
            numbers["gram"] = products  # of the bases, which are the task vectors

        # A task that joins is dense or a sample as the others are, or has the form that suits it
        dense = [vector.dtype for vector in facts.vectors if vector.codec == "dense"]
        own = getattr(torch, dense[0]) if len(dense) == count else dtype
        if joins:
            share = shares[0] if shares and not inputs.adapters else 0
            forms = [planned_task(inputs, 0, own, share)]
        else:
            matrix, name = matrix * scales[:, None], name_of_dtype(own or inputs.own_dtype)
            forms = [Vector(name=f"B{m}", dtype=name) for m in range(most)]
        kept = facts.vectors if most > count else []
        if kept:  # only the last one is new
            both, forms, matrix = inputs, forms[-1:], matrix[-1:, -1:]
        vectors, errors = written(change, both, forms, matrix, engine)
        inputs.check_unchanged()

        made = _joined(facts, described(inputs, alone, vectors[-1:], errors))
        if not joins:
            made["parameters"] |= settings.in_force()
            made |= {"errors": dict.fromkeys(made["tasks"]), **UNKNOWN}
            if "gram" in numbers:  # errors follow from it
                encoding = Gram.of(numbers["gram"]).encoding(encoder.numpy(), decoder.numpy())
                made |= measured(made["tasks"], encoding)
        made |= {"vectors": [*kept, *vectors], "num_bases": most, "seconds": {}}
        made |= {"budget": budget, "compress": how, "basis_weights": basis_weights}
        change.commit(made, numbers)
    return load(change.store)


def _room(bases: Bases, task: str, how: str | None, budget: int | None) -> tuple[str, int | None]:
    """The compression of full bases, and the budget. Raise UserError if the store cannot grow."""
    facts, where, kind = bases.facts, bases.path, bases.facts.parameters["basis"]
    if task in bases.tasks:
        raise UserError(f"the task {task!r} is in {where} already: give another name")
    if facts.compress is None:
        raise UserError(f"the bases in {where} are {kind}, which cannot grow: build another basis")
    how, budget = how or facts.compress, facts.budget if budget is None else budget
    if how == "balanced" and facts.basis_weights is None:
        said = f"the bases in {where} ({kind}) do not hold the sum of all tasks"
        raise UserError(f"{said}: compress by ae, or build the store with `basis: balanced`")
    if budget is not None and budget < 2:
        said = "expected 2 or more, one basis for the previous tasks and one for the new task"
        raise UserError(f"the budget is {budget}: {said}")
    return how, budget


def _given(bases: Bases, inputs: TaskSet) -> list[Item]:
    """The store's tensors, with the new model as input. Raise UserError for other tensors."""
    given, names = {item.name: item for item in inputs.items}, bases.facts.tensors
    left_out = {**inputs.left_out, **bases.facts.left_out}
    for name in sorted(given.keys() ^ {*names}):
        why = left_out.get(name, "missing")
        if name not in given or not why.startswith("excluded"):
            of = bases.path if name in given else inputs.models[0]
            said = f"tensor `{name}` is not in {of} ({why}), and its training would be lost"
            raise UserError(f"{said}; a store holds one set of tensors")
    return [given[name] for name in names]


def _beside(bases: Bases, inputs: TaskSet, samples: bool) -> TaskSet:
    """The vectors of a store and the new one as task vectors; without `samples`, as they are."""
    items = []
    for item in inputs.items:
        parts = [*(Part.of(vector, item.name) for vector in bases.vectors), *item.inputs]
        parts = parts if samples else [replace(part, share=1.0) for part in parts]
        items.append(replace(item, inputs=tuple(parts)))
    return replace(inputs, items=items, sums=None)


def _joined(old: StoreFacts, new: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `store.json` with one more task, by those of the task alone."""
    made = dict(old)
    for key in ("tasks", "models"):
        made[key] = [*made[key], *new[key]]
    for key in ("norms", "errors", "fingerprints"):
        made[key] = {**made[key], **new[key]}
    made["model_bytes"] += new["model_bytes"]
    weights = {**old.parameters["weights"], **new["parameters"]["weights"]}
    return made | {"parameters": {**old.parameters, "weights": weights}}
