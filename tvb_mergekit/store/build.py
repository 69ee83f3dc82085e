"""A store of T models, and one more task in it.

One pass gives the Gram matrix, a second one writes the vectors. Each of several processes (see
`ranks`) reads and writes its share of dense vectors of a new store.

A store of all tasks gets one more vector. Within a budget of M vectors the bases are compressed
first (Algorithm 1 of the paper, see `core.online`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.core import online
from tvb_mergekit.core.basis import Basis, unlike, warnings
from tvb_mergekit.core.gram import Gram
from tvb_mergekit.core.settings import EVEN
from tvb_mergekit.errors import UserError, check_known
from tvb_mergekit.store import is_store, report
from tvb_mergekit.store.change import Change, changing, slugs
from tvb_mergekit.store.codecs import CODECS
from tvb_mergekit.store.export import write_original
from tvb_mergekit.store.facts import Vector, name_of_dtype, record_of
from tvb_mergekit.store.routing import write_gates
from tvb_mergekit.store.store import Bases, load
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.adapter import Adapter
from tvb_mergekit.tensors.coding import MANTISSA
from tvb_mergekit.tensors.merging import encoded_by, sums_of
from tvb_mergekit.tensors.output import check_disk, check_output_folder, staged
from tvb_mergekit.tensors.stream import Engine, Part
from tvb_mergekit.tensors.taskset import TaskSet

# Basis of a store -> the compression of `tvb add`. Bases of others cannot grow.
COMPRESSED_BY = dict.fromkeys(EVEN, "balanced") | dict.fromkeys(("ae", "none", "rand_select"), "ae")


def kept_share(lossless: bool, keep: float | None, dtype: object) -> float:
    """The share of the entries that a store keeps as they are; 0: it is chosen for each model."""
    if lossless + (keep is not None) + (dtype is not None) > 1:
        raise UserError("choose one of --lossless, --keep and --dtype")
    if keep is not None and not 1e-6 <= keep < 1:
        raise UserError(f"--keep {keep:g}: expected a share from 1e-06 to below 1")
    return float(lossless) if keep is None else round(keep * 2**32) / 2**32


def build_store(
    inputs: TaskSet,
    out: str | os.PathLike[str],
    engine: Engine = Engine(),
    dtype: torch.dtype | None = None,
    share: float = 0,
    warn: Callable[[str], object] = logging.warning,
    **more: Any,
) -> Bases:
    """Keep the task vectors, or the bases, of `inputs` in the new store `out`.

    Args:
        dtype: float32, bfloat16 or float16, of dense vectors; None: as wide as the models, and task
            vectors in the form that suits each model.
        share: of the entries of each task vector to keep exact; 1: all, to the bit.
        warn: called with each doubt about a model, one line each.
        more: keys of `store.json`.
    """
    ranks.agree(inputs.names)
    check_output_folder(out)
    with staged(out) as folder:
        change, forms = Change(folder), planned(inputs, dtype, share)
        basis = encoded_by(inputs, sums_of(inputs, engine))
        for line in warnings(basis, dict(zip(inputs.tasks, inputs.models, strict=True))):
            warn(line)
        encoding, matrix = basis.encoding, basis.weighted_encoder
        if basis.settings.basis == "none":  # task vectors are stored without their weights
            matrix = encoding.encoder
        elif basis.settings.basis == "pca":  # the mean is the last vector
            weights = torch.tensor(basis.weights, dtype=torch.float64)[:, None]
            matrix = torch.cat([matrix, weights / len(basis.tasks)], dim=1)
        vectors, errors = written(change, inputs, forms, matrix, engine)
        made = {**described(inputs, basis, errors), **more, "vectors": vectors}
        numbers = {"encoder": encoding.encoder, "decoder": encoding.decoder}
        change.commit(made, {**numbers, "gram": basis.sums.gram})
    return load(os.path.realpath(out))


def add_task(
    store: str | os.PathLike[str],
    inputs_for: Callable[[Bases | None], TaskSet],
    engine: Engine = Engine(),
    budget: int | None = None,
    compress: str | None = None,
    dtype: torch.dtype | None = None,
    doubt: Callable[[str], object] = print,
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
        both = _beside(bases, inputs, joins)
        inputs = replace(inputs, items=[replace(i, inputs=i.inputs[-1:]) for i in both.items])
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
        if bases.encoder.equal(torch.eye(count).double()) and (joins or not shares):
            numbers["gram"] = products  # of the bases, which are the task vectors

        # A task that joins is dense or a sample as the others are, or has the form that suits it
        dense = [vector.dtype for vector in facts.vectors if vector.codec == "dense"]
        own = getattr(torch, dense[0]) if len(dense) == count else dtype
        share = shares[0] if joins and shares and not inputs.adapters else 0
        forms = planned(inputs if joins else replace(inputs, settings=settings), own, share)
        matrix = matrix if joins else matrix * scales[:, None]
        kept = facts.vectors if most > count else []
        if kept:  # only the last one is new
            both, forms, matrix = inputs, forms[-1:], matrix[-1:, -1:]
        vectors, errors = written(change, both, forms, matrix, engine)

        made, new = facts.model_dump(), described(inputs, alone, errors)
        for key in ("tasks", "models", "model_bytes"):
            made[key] += new[key]
        for key in ("norms", "errors", "fingerprints"):
            made[key] |= new[key]
        made["parameters"]["weights"] |= new["parameters"]["weights"]
        if not joins:
            made["parameters"] |= settings.in_force()
            made |= {"errors": dict.fromkeys(made["tasks"]), **report.UNKNOWN}
            if "gram" in numbers:  # errors follow from it
                encoding = Gram.of(numbers["gram"]).encoding(encoder.numpy(), decoder.numpy())
                made |= report.measured(made["tasks"], encoding)
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


def _beside(bases: Bases, inputs: TaskSet, samples: bool) -> TaskSet:
    """The vectors of a store and the new one as task vectors; without `samples`, as they are."""
    given, names = {item.name: item for item in inputs.items}, bases.facts.tensors
    left_out = {**inputs.left_out, **bases.facts.left_out}
    for name in sorted(given.keys() ^ {*names}):
        why = left_out.get(name, "missing")
        if name not in given or not why.startswith("excluded"):
            of = bases.path if name in given else inputs.models[0]
            said = f"tensor `{name}` is not in {of} ({why}), and its training would be lost"
            raise UserError(f"{said}; a store holds one set of tensors")
    items = []
    for name in names:
        parts = [*(Part.of(vector, name) for vector in bases.vectors), *given[name].inputs]
        parts = parts if samples else [replace(part, share=1.0) for part in parts]
        items.append(replace(given[name], inputs=tuple(parts)))
    return replace(inputs, items=items, sums=None)


def planned(inputs: TaskSet, dtype: torch.dtype | None, share: float) -> list[Vector]:
    """The names and forms of the vectors; see `build_store`."""
    settings = inputs.settings
    if settings.basis == "none":
        return [planned_task(inputs, k, dtype, share) for k in range(len(inputs.tasks))]
    if share:
        raise UserError(
            "--lossless and --keep keep all tasks: leave out the keys of a basis, or the option"
        )
    own, count = name_of_dtype(dtype or inputs.own_dtype), settings.bases_of(len(inputs.tasks))
    mean = ["mean"] if settings.basis == "pca" else []
    return [Vector(name=name, dtype=own) for name in (*(f"B{m}" for m in range(count)), *mean)]


def planned_task(inputs: TaskSet, number: int, dtype: torch.dtype | None, share: float) -> Vector:
    """The form of one task vector; see `build_store`."""
    name, source = inputs.tasks[number], inputs.sources[number]
    parts = [(item.inputs[number], item) for item in inputs.items]
    model = all(part.holds == "weight" for part, _ in parts)
    near = sum(i.numel for part, i in parts if i.base and part.dtype == i.base.dtype in MANTISSA)
    # At least half of it, and no vector of a store, whose other files are not there
    fits = model and source.base is None and 2 * near >= sum(i.numel for i in inputs.items)
    if share and not (fits if share == 1 else model):
        raise UserError(
            "--keep needs models, and --lossless models in bfloat16 or float16 like the base: "
            f"`{name}` has another dtype, or is an adapter or a vector of a store"
        )
    if 0 < share < 1:
        return Vector(name=name, codec="sampled", share=share)
    if share == 1 or (dtype is None and fits):
        return Vector(name=name, codec="lossless")
    if dtype is None and isinstance(source, Adapter) and source.under is source.base:
        return Vector(name=name, codec="adapter")
    return Vector(name=name, dtype=name_of_dtype(dtype or torch.float32))


def written(
    change: Change, inputs: TaskSet, forms: Sequence[Vector], matrix: Tensor, engine: Engine
) -> tuple[list[Vector], dict[str, float]]:
    """Write the combinations `matrix` [T, K] of the inputs as vectors, by the leader's `change`.

    Only the leader returns: the vectors, and the error of each as a task vector, by its name.
    """
    store, names, errors = change.store, slugs([form.name for form in forms]), dict[str, float]()
    most = sum(CODECS[form.codec].bytes(form) for form in forms)
    check_disk(store, int(most * sum(item.numel for item in inputs.items)))
    places = [change.place("vectors", name) for name in names]
    for name, codec in CODECS.items():
        mine = [k for k, form in enumerate(forms) if form.codec == name]
        if mine and (name == "dense" or ranks.leads()):
            files = {store / places[k]: forms[k] for k in mine}
            made = codec.encode(files, inputs, matrix[:, mine], engine)
            errors |= zip((form.name for form in files.values()), made, strict=True)
    ranks.dismiss()
    vectors, before = list[Vector](), change.facts.vectors if change.facts else []
    for form, name, place in zip(forms, names, places, strict=True):
        more: dict[str, Any] = {"weights": record_of(store, place)}
        if form.name in inputs.tasks:
            number = inputs.tasks.index(form.name)
            more["gates"] = write_gates(store, change.place("gates", name), inputs, number)
        if form.codec == "lossless":
            own = change.place("files", name)
            held = [file for vector in (*before, *vectors) for file in vector.files]
            more |= write_original(store, own, inputs, number, held, engine)
        vectors.append(form.model_copy(update=more))
    inputs.check_unchanged()
    return vectors, errors


def described(inputs: TaskSet, basis: Basis, errors: Mapping[str, float]) -> dict[str, Any]:
    """The keys of `store.json` of a new store but its files; `errors` are those of its vectors."""
    merged, base, path = report.facts(inputs, basis, {}, None), inputs.base, inputs.base_model
    kind, count = basis.settings.basis, basis.num_bases
    lent = base.tensors.keys() - {*base.in_file, *inputs.tied}
    made: dict[str, Any] = {
        **dict(merged),
        "format_version": 3,
        "parameters": {**merged.parameters, **inputs.varying},
        "budget": None if kind == "none" else count,
        "compress": COMPRESSED_BY.get(kind),
        "basis_weights": [len(inputs.tasks) / count] * count if kind in (*EVEN, "none") else None,
        "base_fingerprint": base.fingerprint(),
        "base_path": os.path.abspath(path) if os.path.exists(path) else None,
        "tensors": inputs.names,
        "twins": {**inputs.tied, **{n: base.canonical(n) for n in sorted(lent)}},
        "model_bytes": sum(source.nbytes for source in inputs.sources),
    }
    if kind == "none":
        made["errors"] = {task: errors.get(task) for task in basis.tasks}
    if any(part.share < 1 for item in inputs.items for part in item.inputs):
        made |= {"errors": dict.fromkeys(basis.tasks), **report.UNKNOWN}  # of the models, not known
    return made
