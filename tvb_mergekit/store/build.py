"""A store of T models: the Gram matrix in one pass, the vectors in a second.

Each of several processes (see `ranks`) reads and writes its share. No write waits for the disk,
because nothing is deleted.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tvb_mergekit.core.basis import Basis, Step, warnings
from tvb_mergekit.core.encoders import EVEN
from tvb_mergekit.core.gram import check_copied
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.change import Change, changing, slugs
from tvb_mergekit.store.codecs import CODECS, fits_lossless
from tvb_mergekit.store.export import write_original
from tvb_mergekit.store.facts import STORE_VERSION, Compression, Facts, StoreFacts, Vector
from tvb_mergekit.store.files import record_of
from tvb_mergekit.store.gates import write_gates
from tvb_mergekit.store.report import errors_of, facts, losses_of, tensors_of
from tvb_mergekit.store.store import DENSE, AsModel, Bases, dtype_name
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.adapter import Adapter
from tvb_mergekit.tensors.coding import MANTISSA
from tvb_mergekit.tensors.merging import check_matrices, encoded_by, sums_of
from tvb_mergekit.tensors.output import check_disk, in_memory
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.stream import Engine, StateDict, Weights
from tvb_mergekit.tensors.taskset import TaskSet

LOG = logging.getLogger(__name__)
LEAST_SHARE = 1e-6
# Basis of a store -> the compression of `tvb add`. Bases of others cannot grow.
COMPRESSED_BY: dict[str, Compression] = {
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
    if not LEAST_SHARE <= keep < 1:
        raise UserError(f"--keep {keep:g}: expected a share from {LEAST_SHARE:g} to below 1")
    return round(keep * 2**32) / 2**32


def build_store(
    inputs: TaskSet,
    out: str | os.PathLike[str] | Change | None,
    engine: Engine = Engine(),
    dtype: torch.dtype | None = None,
    keep: float = 0,
    warn: Warn = LOG.warning,
    budget: int | None = None,
    compress: str | None = None,
) -> Bases:
    """Keep the task vectors, or the bases, of `inputs` in the store `out`; None: in memory.

    Args:
        dtype: float32, bfloat16 or float16, of dense vectors; None: as wide as the models, and task
            vectors in the form that suits each model.
        keep: the share of the entries of each task vector to keep exact; 1: all, to the bit.
        warn: called with each doubt about a model, one line each.
        budget: the most bases of later additions; by default their number.
        compress: how later additions make room; by default as the basis is built.

    Raises:
        UserError: The inputs are bad, `out` exists, or the disk is full.
    """
    world = ranks.world()
    world.agree([item.name for item in inputs.items])
    with ExitStack() as stack:
        change = None
        if isinstance(out, Change):
            change = out
        elif out is not None and world.leads:
            change = stack.enter_context(changing(out, new=True))
            if change.facts is not None:
                raise UserError(f"{out} is a store already; name another folder")
        started, vectors = time.perf_counter(), planned_vectors(inputs, dtype, keep)
        basis = encoded(inputs, engine, warn)
        matrix, squares, sources = matrix_of(basis), [0.0] * len(vectors), list[Weights]()
        if out is None:
            sources = states_of(inputs, vectors, matrix, engine)
        else:
            vectors, squares = written(change, inputs, vectors, matrix, engine)
        basis.seconds["build"] = time.perf_counter() - started
        world.dismiss()
        inputs.check_unchanged()
        made = store_facts(inputs, basis, vectors, squares)
        made = made.but(budget=budget or made.budget, compress=compress or made.compress)
        numbers = {"encoder": basis.encoding.encoder, "decoder": basis.encoding.decoder}
        numbers["gram"] = basis.sums.gram
        return change.commit(made, numbers) if change else Bases(made, numbers, sources)


def states_of(
    inputs: TaskSet, vectors: Sequence[Vector], matrix: Tensor, engine: Engine
) -> list[Weights]:
    """The vectors, the combinations `matrix` [T, K] of the inputs, as state dicts."""
    items = [replace(item, out=DENSE[vectors[0].dtype]) for item in inputs.items]
    count, step = matrix.shape[1], Step.of(matrix)
    held, sink = in_memory(items, count)
    combine_pass(items, dict.fromkeys((i.name for i in items), step), sink, engine, title="Bases")
    return [StateDict({name: rows[k] for name, rows in held.items()}) for k in range(count)]


def inspect_inputs(inputs: TaskSet, engine: Engine = Engine()) -> tuple[Facts, dict[str, Tensor]]:
    """The facts and numbers of a build, without building.

    Raises:
        UserError: NaN or infinity, also in a tensor of the base that a merge copies.
    """
    base, settings = inputs.base, inputs.settings
    taking_part = {(item.base and item.base.name) or item.name for item in inputs.items}
    for name, info in base.tensors.items():
        if name not in taking_part and name not in inputs.tied and info.dtype.is_floating_point:
            check_copied(name, base.tensor(name), settings.excludes(name))
    check_matrices(settings, inputs.items)
    basis = encoded(inputs, engine, LOG.warning)
    errors = errors_of(basis.tasks, basis.sums.gram, basis.encoding.reconstruction)
    return facts(inputs, basis, {}).but(errors=errors), tensors_of(basis)


def encoded(inputs: TaskSet, engine: Engine, warn: Warn) -> Basis:
    """The basis of the inputs, by G; with warnings about doubtful models."""
    basis = encoded_by(inputs, sums_of(inputs, engine))
    for line in warnings(basis, dict(zip(inputs.tasks, inputs.models, strict=True))):
        warn(line)
    return basis


def matrix_of(basis: Basis) -> Tensor:
    """The factors of the models' differences in the vectors, [T, N].

    Task vectors are stored without their weights; PCA's mean is the last vector.
    """
    if basis.settings.basis == "none":
        return torch.eye(len(basis.tasks), dtype=torch.float64)
    if basis.settings.basis != "pca":
        return basis.weighted_encoder
    mean = torch.tensor(basis.weights, dtype=torch.float64)[:, None] / len(basis.tasks)
    return torch.cat([basis.weighted_encoder, mean], dim=1)


def planned_vectors(inputs: TaskSet, dtype: torch.dtype | None, keep: float) -> list[Vector]:
    """The names and forms of the vectors; see `build_store`."""
    settings = inputs.settings
    if settings.basis == "none":
        return [planned_task(inputs, k, dtype, keep) for k in range(len(inputs.tasks))]
    if keep:
        raise UserError(
            "--lossless and --keep keep all tasks: leave out the keys of a basis, or the option"
        )
    own = dtype_name(dtype or inputs.own_dtype)
    names = [f"B{m}" for m in range(settings.bases_of(len(inputs.tasks)))]
    mean = [Vector(name="mean", dtype=own, mean=True)] if settings.basis == "pca" else []
    return [*(Vector(name=name, dtype=own) for name in names), *mean]


def planned_task(inputs: TaskSet, number: int, dtype: torch.dtype | None, keep: float) -> Vector:
    """The form of one task vector; see `build_store`."""
    name, source = inputs.tasks[number], inputs.sources[number] if inputs.sources else None
    stored = isinstance(source, AsModel)  # whose files are not there
    model = all(item.inputs[number].holds == "weight" for item in inputs.items)
    fits = model and fits_lossless(inputs.items, number)
    if keep and (not model or (stored and keep == 1)):
        said = f"`{name}` is an adapter or a vector of a store: list a model"
        raise UserError(f"--lossless and --keep keep entries of models, and {said}")
    if 0 < keep < 1:
        return Vector(name=name, codec="sampled", share=keep)
    if keep == 1 and not fits:
        said = f"`{name}` is not: save all in bfloat16, or build with --keep 0.25"
        raise UserError(
            f"--lossless needs a base and models in bfloat16, or all in float16, and {said}"
        )
    if keep == 1 or (dtype is None and fits and not stored):
        dtypes = [item.inputs[number].dtype for item in inputs.items]
        widest = functools.reduce(torch.promote_types, dtypes)
        own = dtype_name(widest if widest in MANTISSA else torch.float32)
        return Vector(name=name, codec="lossless", dtype=own)
    if dtype is None and isinstance(source, Adapter) and source.under is source.base:
        return Vector(name=name, codec="adapter")
    return Vector(name=name, dtype=dtype_name(dtype or torch.float32))


def written(
    change: Change | None,
    inputs: TaskSet,
    vectors: Sequence[Vector],
    matrix: Tensor,
    engine: Engine,
) -> tuple[list[Vector], list[float]]:
    """Write vectors with the files that a model has beside its vector, by the leader's `change`.

    Returns their records, and the squared norm of the error of each code.
    """
    names, made, squares = slugs([v.name for v in vectors]), list(vectors), [0.0] * len(vectors)
    dense = [DENSE[vector.dtype] for vector in vectors if vector.codec == "dense"]
    items = [replace(item, out=dense[0] if dense else torch.float32) for item in inputs.items]

    def begin() -> tuple[Path, list[str]]:
        assert change is not None
        need = sum(CODECS[v.codec].bytes(i, v.share) for v in vectors for i in items)
        check_disk(str(change.store), int(need))
        return change.store, [change.place("vectors", name) for name in names]

    store, places = ranks.world().led(begin)
    for codec in dict.fromkeys(vector.codec for vector in vectors):
        own = [k for k, vector in enumerate(vectors) if vector.codec == codec]
        files = {store / places[k]: vectors[k] for k in own}
        given = files, replace(inputs, items=items), matrix[:, own], engine
        encode = functools.partial(CODECS[codec].encode, *given)
        # The leader appends blocks in order. Every process has a share of dense vectors.
        coded = encode() if codec == "dense" else ranks.world().led(encode)
        for k, square in zip(own, coded, strict=True):
            squares[k] = square
    for k, vector in enumerate(vectors if change else ()):
        assert change is not None
        kept, gates = [], None
        if vector.codec != "adapter" and vector.name in inputs.tasks:
            place, number = change.place("gates", names[k]), inputs.tasks.index(vector.name)
            gates = write_gates(store, place, inputs, number)
        if vector.codec == "lossless":
            number, place = int(matrix[:, k].nonzero()[0]), change.place("files", names[k])
            kept = write_original(store, place, inputs, number, engine)
        made[k] = vector.but(weights=record_of(store, places[k]), files=kept, gates=gates)
    return made, squares


def lost(vector: Vector, square: float, norm: float) -> float:
    """The relative error of a task vector by the square of its code's error, or its rounding."""
    if vector.codec == "dense" and vector.dtype != "float32":
        return torch.finfo(DENSE[vector.dtype]).eps / 2
    return math.sqrt(square) / norm


def store_facts(
    inputs: TaskSet, basis: Basis, vectors: Sequence[Vector], squares: Sequence[float]
) -> StoreFacts:
    """`store.json` of a new store; `squares`: the squared norm of the error of each code."""
    merged, kind, count = facts(inputs, basis, {}), basis.settings.basis, basis.num_bases
    lent = inputs.base.tensors.keys() - {*inputs.base.in_file, *inputs.tied}
    errors = errors_of(basis.tasks, basis.sums.gram, basis.encoding.reconstruction)
    if kind == "none":
        norms = basis.sums.scaled([1 / w for w in basis.weights]).norms
        errors = dict(zip(basis.tasks, map(lost, vectors, squares, norms), strict=True))
    made = {
        **dict(merged),
        "format_version": STORE_VERSION,
        "parameters": {**merged.parameters, **inputs.varying},
        "errors": errors,
        "budget": None if kind == "none" else count,
        "compress": COMPRESSED_BY.get(kind),
        "basis_weights": [len(inputs.tasks) / count] * count if kind in (*EVEN, "none") else None,
        "base_fingerprint": inputs.base.fingerprint(),
        "base_path": local_path(inputs.base_model),
        "tensors": inputs.names,
        "twins": {**inputs.tied, **{n: inputs.base.canonical(n) for n in sorted(lent)}},
        "model_bytes": inputs.model_bytes,
        "vectors": list(vectors),
    }
    if inputs.sampled:  # what is lost of the models is not known
        made |= {"errors": dict.fromkeys(basis.tasks), **losses_of(None)}
    return StoreFacts.model_validate(made)


def local_path(model: str) -> str | None:
    """The absolute path of a model on this disk; None for other models."""
    return os.path.abspath(model) if os.path.exists(model) else None
