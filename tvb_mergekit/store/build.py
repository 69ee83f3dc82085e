"""A store of T models: the Gram matrix in one pass, the vectors in a second.

A vector has one of four forms: dense numbers, a model without loss, a sample of its entries, or an
adapter's factors. Each of several processes (see `ranks`) reads and writes its share. No write
waits for the disk, because nothing is deleted.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch import Tensor

from tvb_mergekit.core.basis import Basis, Step, warnings
from tvb_mergekit.core.settings import EVEN
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.change import Change, slugs
from tvb_mergekit.store.export import write_original
from tvb_mergekit.store.facts import Vector, name_of_dtype, record_of, write_tensors
from tvb_mergekit.store.gates import write_gates
from tvb_mergekit.store.report import UNKNOWN, facts
from tvb_mergekit.store.store import CONFIG, Bases, load
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.adapter import Adapter
from tvb_mergekit.tensors.coding import MANTISSA, Draw, keep
from tvb_mergekit.tensors.merging import encoded_by, sums_of
from tvb_mergekit.tensors.output import (
    MARKER,
    FolderWriter,
    check_disk,
    check_output_folder,
    into,
    staged,
)
from tvb_mergekit.tensors.passes import combine_pass, share_of
from tvb_mergekit.tensors.stream import Engine
from tvb_mergekit.tensors.taskset import TaskSet

LOG = logging.getLogger(__name__)
# Basis of a store -> the compression of `tvb add`. Bases of others cannot grow.
COMPRESSED_BY = {
    **dict.fromkeys(EVEN, "balanced"),
    **dict.fromkeys(("ae", "none", "rand_select"), "ae"),
}
Warn = Callable[[str], object]


def kept_share(lossless: bool, keep: float | None, dtype: object) -> float:
    """The share of the entries that a store keeps as they are; 0: it is chosen for each model."""
    if lossless + (keep is not None) + (dtype is not None) > 1:
        raise UserError("choose one of --lossless, --keep and --dtype")
    if keep is None:
        return float(lossless)
    if not 1e-6 <= keep < 1:
        raise UserError(f"--keep {keep:g}: expected a share from 1e-06 to below 1")
    return round(keep * 2**32) / 2**32


def build_store(
    inputs: TaskSet,
    out: str | os.PathLike[str],
    engine: Engine = Engine(),
    dtype: torch.dtype | None = None,
    share: float = 0,
    warn: Warn = LOG.warning,
    **more: Any,
) -> Bases:
    """Keep the task vectors, or the bases, of `inputs` in the new store `out`.

    Args:
        dtype: float32, bfloat16 or float16, of dense vectors; None: as wide as the models, and task
            vectors in the form that suits each model.
        share: of the entries of each task vector to keep exact; 1: all, to the bit.
        warn: called with each doubt about a model, one line each.
        more: keys of `store.json`.

    Raises:
        UserError: The inputs are bad, `out` exists, or the disk is full.
    """
    ranks.agree(inputs.names)
    check_output_folder(out)
    with staged(out) as folder:
        change, started = Change(folder, Path(os.path.realpath(out))), time.perf_counter()
        forms = planned(inputs, dtype, share)
        basis = encoded_by(inputs, sums_of(inputs, engine))
        for line in warnings(basis, dict(zip(inputs.tasks, inputs.models, strict=True))):
            warn(line)
        matrix = basis.weighted_encoder
        if basis.settings.basis == "none":  # task vectors are stored without their weights
            matrix = torch.eye(len(basis.tasks), dtype=torch.float64)
        elif basis.settings.basis == "pca":  # the mean is the last vector
            weights = torch.tensor(basis.weights, dtype=torch.float64)[:, None]
            matrix = torch.cat([matrix, weights / len(basis.tasks)], dim=1)
        vectors, squares = written(change, inputs, forms, matrix, engine)
        basis.seconds["build"] = time.perf_counter() - started
        ranks.dismiss()
        inputs.check_unchanged()
        numbers = {"encoder": basis.encoding.encoder, "decoder": basis.encoding.decoder}
        numbers["gram"] = basis.sums.gram
        change.commit(described(inputs, basis, vectors, squares) | more, numbers)
    return load(change.home)


def planned(inputs: TaskSet, dtype: torch.dtype | None, share: float) -> list[Vector]:
    """The names and forms of the vectors; see `build_store`."""
    settings = inputs.settings
    if settings.basis == "none":
        return [planned_task(inputs, k, dtype, share) for k in range(len(inputs.tasks))]
    if share:
        raise UserError(
            "--lossless and --keep keep all tasks: leave out the keys of a basis, or the option"
        )
    own = name_of_dtype(dtype or inputs.own_dtype)
    names = [f"B{m}" for m in range(settings.bases_of(len(inputs.tasks)))]
    mean = ["mean"] if settings.basis == "pca" else []
    return [Vector(name=name, dtype=own) for name in (*names, *mean)]


def planned_task(inputs: TaskSet, number: int, dtype: torch.dtype | None, share: float) -> Vector:
    """The form of one task vector; see `build_store`."""
    name, source = inputs.tasks[number], inputs.sources[number]
    stored = source.base is not None  # a vector of a store, whose other files are not there
    parts = [(item.inputs[number], item) for item in inputs.items]
    model = all(part.holds == "weight" for part, _ in parts)
    near = [i for part, i in parts if i.base and part.dtype == i.base.dtype in MANTISSA]
    # At least half of a lossless model has the base's 16-bit dtype.
    fits = model and 2 * sum(i.numel for i in near) >= sum(i.numel for _, i in parts)
    if share and (not model or (share == 1 and (stored or not fits))):
        raise UserError(
            "--keep needs models, and --lossless models in bfloat16 or float16 like the base: "
            f"`{name}` has another dtype, or is an adapter or a vector of a store"
        )
    if 0 < share < 1:
        return Vector(name=name, codec="sampled", share=share)
    if share == 1 or (dtype is None and fits and not stored):
        widest = functools.reduce(torch.promote_types, [part.dtype for part, _ in parts])
        own = name_of_dtype(widest if widest in MANTISSA else torch.float32)
        return Vector(name=name, codec="lossless", dtype=own)
    if dtype is None and isinstance(source, Adapter) and source.under is source.base:
        return Vector(name=name, codec="adapter")
    return Vector(name=name, dtype=name_of_dtype(dtype or torch.float32))


def written(
    change: Change, inputs: TaskSet, forms: Sequence[Vector], matrix: Tensor, engine: Engine
) -> tuple[list[Vector], list[float]]:
    """Write the combinations `matrix` [T, K] of the inputs as vectors, by the leader's `change`.

    Each process writes its share of dense vectors, and the leader the rest.

    Returns:
        In the leader the vectors, and the squared norm of the error of each code.
    """
    names = slugs([form.name for form in forms])
    dense = [k for k, form in enumerate(forms) if form.codec == "dense"]
    coded = [k for k, form in enumerate(forms) if form.codec in ("lossless", "sampled")]
    out = getattr(torch, forms[dense[0]].dtype) if dense else torch.float32
    items = [replace(item, out=out) for item in inputs.items]

    shares = 2 * sum(forms[k].share for k in coded)  # 16 bits an entry, at the most
    check_disk(change.store, int(sum(len(dense) * i.written + shares * i.numel for i in items)))
    paths = [change.store / change.place("vectors", name) for name in names]
    if dense:
        steps, writers = dict.fromkeys(inputs.names, Step.of(matrix[:, dense])), []
        for k in dense:
            metadata = {"format": "pt", MARKER: forms[k].name}
            writers.append(FolderWriter(paths[k].parent, {paths[k].name: items}, metadata))
        combine_pass(share_of(items), steps, into(*writers), engine, title="Bases")
    ranks.collect(None)  # all have written
    if not ranks.leads():
        return [], []
    squares, made, store = [0.0] * len(forms), list[Vector](), change.store
    own = [int(column.nonzero()[0]) for column in matrix.T]  # the one model of a code
    if coded:
        seeds = [f"{inputs.settings.seed}/{forms[k].name}".encode() for k in coded]
        numbers = map(xxhash.xxh3_64_intdigest, seeds)
        draws = [Draw(seed, forms[k].share) for seed, k in zip(numbers, coded, strict=True)]
        given = [replace(i, inputs=tuple(i.inputs[own[k]] for k in coded)) for i in items]
        errors = keep({paths[k]: forms[k].name for k in coded}, given, draws, engine)
        for k, square in zip(coded, errors, strict=True):
            squares[k] = square
    for k, form in enumerate(forms):
        more: dict[str, Any] = {}
        if form.codec == "adapter":
            source = cast(Adapter, inputs.sources[own[k]])
            tensors = {name: source.file.tensor(name) for name in source.file.tensors}
            metadata = {MARKER: form.name, CONFIG: json.dumps(source.config)}
            write_tensors(paths[k], tensors, metadata)
        if form.name in inputs.tasks:
            more["gates"] = write_gates(store, change.place("gates", names[k]), inputs, own[k])
        if form.codec == "lossless":
            place = change.place("files", names[k])
            before = [*(change.facts.vectors if change.facts else ()), *made]
            held = [file for vector in before for file in vector.files]
            more |= write_original(store, place, inputs, own[k], held, engine)
        weights = record_of(store, f"vectors/{paths[k].name}")
        made.append(form.model_copy(update={"weights": weights, **more}))
    return made, squares


def described(
    inputs: TaskSet, basis: Basis, vectors: Sequence[Vector], squares: Sequence[float]
) -> dict[str, Any]:
    """The keys of `store.json` of a new store; `squares`: the squared error of each code."""
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
        norms = basis.sums.scaled([1 / w for w in basis.weights]).norms
        made["errors"] = dict(zip(basis.tasks, map(lost, vectors, squares, norms), strict=True))
    sampled = any(part.share < 1 for item in inputs.items for part in item.inputs)
    if sampled:  # what is lost of the models is not known
        made |= {"errors": dict.fromkeys(basis.tasks), **UNKNOWN}
    return made


def lost(form: Vector, square: float, norm: float) -> float:
    """The relative error of a task vector by the square of its code's error, or its rounding."""
    if form.codec == "dense" and form.dtype != "float32":
        return torch.finfo(getattr(torch, form.dtype)).eps / 2
    return math.sqrt(square) / norm
