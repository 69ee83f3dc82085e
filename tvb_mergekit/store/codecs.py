"""The forms of a store's vectors: dense numbers, models without loss, samples, adapters' factors.

The metadata of a file name its vector.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import xxhash
from torch import Tensor

from tvb_mergekit.core.basis import Step
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.change import Change, slugs
from tvb_mergekit.store.export import write_original
from tvb_mergekit.store.facts import DtypeName, Form, Vector, record_of, write_tensors
from tvb_mergekit.store.gates import write_gates
from tvb_mergekit.store.store import CONFIG
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.adapter import Adapter
from tvb_mergekit.tensors.coding import MANTISSA, Draw, keep
from tvb_mergekit.tensors.output import MARKER, FolderWriter, check_disk, into
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.stream import Engine
from tvb_mergekit.tensors.taskset import TaskSet


def planned(inputs: TaskSet, dtype: torch.dtype | None, share: float) -> list[Form]:
    """The names and forms of the vectors; see `build.build_store`."""
    settings = inputs.settings
    if settings.basis == "none":
        return [planned_task(inputs, k, dtype, share) for k in range(len(inputs.tasks))]
    if share:
        raise UserError(
            "--lossless and --keep keep all tasks: leave out the keys of a basis, or the option"
        )
    own = name_of_dtype(dtype or inputs.own_dtype)
    names = [f"B{m}" for m in range(settings.bases_of(len(inputs.tasks)))]
    mean = [Form(name="mean", dtype=own, mean=True)] if settings.basis == "pca" else []
    return [*(Form(name=name, dtype=own) for name in names), *mean]


def planned_task(inputs: TaskSet, number: int, dtype: torch.dtype | None, share: float) -> Form:
    """The form of one task vector; see `build.build_store`."""
    name, source = inputs.tasks[number], inputs.sources[number]
    stored = source.base is not None  # a vector of a store, whose other files are not there
    parts = [(item.inputs[number], item) for item in inputs.items]
    model = all(part.holds == "weight" for part, _ in parts)
    near = [i for part, i in parts if i.base and part.dtype == i.base.dtype in MANTISSA]
    # At least half of a lossless model has the base's 16-bit dtype.
    fits = model and 2 * sum(i.numel for i in near) >= sum(i.numel for _, i in parts)
    if share and (not model or (stored and share == 1)):
        said = f"`{name}` is an adapter or a vector of a store: list a model"
        raise UserError(f"--lossless and --keep keep entries of models, and {said}")
    if 0 < share < 1:
        return Form(name=name, codec="sampled", share=share)
    if share == 1 and not fits:
        said = f"`{name}` is not: save all in bfloat16, or build with --keep 0.25"
        raise UserError(
            f"--lossless needs a base and models in bfloat16, or all in float16, and {said}"
        )
    if share == 1 or (dtype is None and fits and not stored):
        widest = functools.reduce(torch.promote_types, [part.dtype for part, _ in parts])
        own = name_of_dtype(widest if widest in MANTISSA else torch.float32)
        return Form(name=name, codec="lossless", dtype=own)
    if dtype is None and isinstance(source, Adapter) and source.under is source.base:
        return Form(name=name, codec="adapter")
    return Form(name=name, dtype=name_of_dtype(dtype or torch.float32))


def name_of_dtype(dtype: torch.dtype) -> DtypeName:
    """The name of a dtype. `Form` refuses all that a store cannot have."""
    return cast(DtypeName, str(dtype).removeprefix("torch."))


def written(
    change: Change, inputs: TaskSet, forms: Sequence[Form], matrix: Tensor, engine: Engine
) -> tuple[list[Vector], list[float]]:
    """Write the combinations `matrix` [T, K] of the inputs as vectors, by the leader's `change`.

    Each process writes its share of dense vectors, and the leader the rest.

    Returns:
        In the leader the vectors, and the squared norm of the error of each code.
    """
    world, names = ranks.world(), slugs([form.name for form in forms])
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
        combine_pass(ranks.share_of(items), steps, into(*writers), engine, title="Bases")
    world.collect(None)  # all have written
    if not world.leads:
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
            more |= write_original(store, place, inputs, own[k], engine)
        weights = record_of(store, f"vectors/{paths[k].name}")
        made.append(Vector(**dict(form), weights=weights, **more))
    return made, squares
