"""A store of T models: the Gram matrix in one pass, the vectors in a second.

Each of several processes (see `ranks`) reads and writes its share of dense vectors. No write waits
for the disk, because nothing is deleted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.core.basis import Basis, warnings
from tvb_mergekit.core.settings import EVEN
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.change import Change, slugs
from tvb_mergekit.store.codecs import CODECS
from tvb_mergekit.store.export import write_original
from tvb_mergekit.store.facts import Vector, name_of_dtype, record_of
from tvb_mergekit.store.report import UNKNOWN, facts
from tvb_mergekit.store.routing import write_gates
from tvb_mergekit.store.store import Bases, load
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.adapter import Adapter
from tvb_mergekit.tensors.coding import MANTISSA
from tvb_mergekit.tensors.merging import encoded_by, sums_of
from tvb_mergekit.tensors.output import check_disk, check_output_folder, staged
from tvb_mergekit.tensors.stream import Engine
from tvb_mergekit.tensors.taskset import TaskSet

# Basis of a store -> the compression of `tvb add`. Bases of others cannot grow.
COMPRESSED_BY = dict.fromkeys(EVEN, "balanced") | dict.fromkeys(("ae", "none", "rand_select"), "ae")
Warn = Callable[[str], object]


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
    warn: Warn = logging.warning,
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
        matrix = basis.weighted_encoder
        if basis.settings.basis == "none":  # task vectors are stored without their weights
            matrix = torch.eye(len(basis.tasks), dtype=torch.float64)
        elif basis.settings.basis == "pca":  # the mean is the last vector
            weights = torch.tensor(basis.weights, dtype=torch.float64)[:, None]
            matrix = torch.cat([matrix, weights / len(basis.tasks)], dim=1)
        vectors, errors = written(change, inputs, forms, matrix, engine)
        ranks.dismiss()
        inputs.check_unchanged()
        made, encoding = described(inputs, basis, vectors, errors) | more, basis.encoding
        numbers = {"encoder": encoding.encoder, "decoder": encoding.decoder}
        change.commit(made, {**numbers, "gram": basis.sums.gram})
    return load(os.path.realpath(out))


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
    stored = source.base is not None  # a vector of a store, whose other files are not there
    parts = [(item.inputs[number], item) for item in inputs.items]
    model = all(part.holds == "weight" for part, _ in parts)
    near = sum(i.numel for part, i in parts if i.base and part.dtype == i.base.dtype in MANTISSA)
    fits = model and 2 * near >= sum(item.numel for item in inputs.items)  # at least half of it
    if share and (not model or (share == 1 and (stored or not fits))):
        raise UserError(
            "--keep needs models, and --lossless models in bfloat16 or float16 like the base: "
            f"`{name}` has another dtype, or is an adapter or a vector of a store"
        )
    if 0 < share < 1:
        return Vector(name=name, codec="sampled", share=share)
    if share == 1 or (dtype is None and fits and not stored):
        return Vector(name=name, codec="lossless")
    if dtype is None and isinstance(source, Adapter) and source.under is source.base:
        return Vector(name=name, codec="adapter")
    return Vector(name=name, dtype=name_of_dtype(dtype or torch.float32))


def written(
    change: Change, inputs: TaskSet, forms: Sequence[Vector], matrix: Tensor, engine: Engine
) -> tuple[list[Vector], dict[str, float]]:
    """Write the combinations `matrix` [T, K] of the inputs as vectors, by the leader's `change`.

    Returns:
        In the leader the vectors, and the relative error of each as a task vector, by its name.
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
    vectors, before = list[Vector](), change.facts.vectors if change.facts else []
    for form, name, place in zip(forms, names, places, strict=True) if ranks.leads() else ():
        more: dict[str, Any] = {"weights": record_of(store, place)}
        if form.name in inputs.tasks:
            number = inputs.tasks.index(form.name)
            more["gates"] = write_gates(store, change.place("gates", name), inputs, number)
        if form.codec == "lossless":
            own = change.place("files", name)
            held = [file for vector in (*before, *vectors) for file in vector.files]
            more |= write_original(store, own, inputs, number, held, engine)
        vectors.append(form.model_copy(update=more))
    return vectors, errors


def described(
    inputs: TaskSet, basis: Basis, vectors: Sequence[Vector], errors: Mapping[str, float]
) -> dict[str, Any]:
    """The keys of `store.json` of a new store; `errors` are those of its vectors."""
    merged, kind, count = facts(inputs, basis, {}, None), basis.settings.basis, basis.num_bases
    base, path = inputs.base, inputs.base_model
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
        "vectors": list(vectors),
    }
    if kind == "none":
        made["errors"] = {task: errors.get(task) for task in basis.tasks}
    if any(part.share < 1 for item in inputs.items for part in item.inputs):
        made |= {"errors": dict.fromkeys(basis.tasks), **UNKNOWN}  # of the models, not known
    return made
