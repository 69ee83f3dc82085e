"""A basis store of T models: the Gram matrix in one pass, the M bases in a second.

The store is written in STORE.partial and renamed when it is complete. Each of several processes
(see `ranks`) reads and writes its share.

No write waits for the disk, because nothing is deleted. If a power cut damages a file, its checksum
differs from that in basis.json.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tvb_mergekit.atomic import check_interrupted, next_to
from tvb_mergekit.core.basis import Basis, warnings
from tvb_mergekit.core.gram import GramSums, check_copied
from tvb_mergekit.errors import megabytes
from tvb_mergekit.store import forms
from tvb_mergekit.store.export import write_originals
from tvb_mergekit.store.facts import Facts
from tvb_mergekit.store.forms import check_kept, draws_of
from tvb_mergekit.store.report import tensors_of
from tvb_mergekit.store.store import Bases, dtype_name
from tvb_mergekit.store.vectors import (
    Vectors,
    dense_vectors,
    facts_of,
    folders_of,
    history_of,
    in_memory,
    numbers_of_bases,
    write_vectors,
)
from tvb_mergekit.store.writer import StoreWriter, check_movable, lock
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.matrices import check_matrices
from tvb_mergekit.tensors.merging import encoded_by, sums_of
from tvb_mergekit.tensors.output import check_new_folder
from tvb_mergekit.tensors.stream import Engine
from tvb_mergekit.tensors.taskset import TaskSet

LOG = logging.getLogger(__name__)

Warn = Callable[[str], object]


def build_store(
    inputs: TaskSet,
    out: str | os.PathLike[str],
    engine: Engine = Engine(),
    *,
    dtype: torch.dtype = torch.float32,
    keep: float = 0,
    warn: Warn = LOG.warning,
) -> Bases:
    """Write the bases of `inputs` as the store `out`.

    Args:
        dtype: float32, bfloat16 or float16, of the stored bases.
        keep: Store this share of the entries of each task vector instead, exact. With 1 these are
            the models themselves, to the bit.
        warn: Called with each doubt about a model, one line each.

    Raises:
        UserError: The inputs are bad, `out` exists, or the disk is full.
    """
    dtype_name(dtype)
    world, out = ranks.world(), Path(os.path.realpath(out))
    world.first(lambda: check_interrupted(out))
    check_movable(out)
    if keep:
        check_kept(inputs, keep)
    with ExitStack() as stack:
        if world.leads:
            stack.callback(lock(out).release)
        world.agree([item.name for item in inputs.items])
        given = [name for name in inputs.fingerprints if os.path.exists(name)]
        world.led(lambda: check_new_folder(out, given))
        writer = StoreWriter(out, next_to(out, "partial"))
        if world.leads:
            stack.callback(writer.discard)
        world.led(writer.begin)
        started = time.perf_counter()
        sums = sums_of(inputs, engine)
        summed = time.perf_counter()
        basis = _basis(inputs, sums, warn)
        encoded = time.perf_counter()
        partial, folders = writer.folder, folders_of(basis)
        items = [replace(item, out=dtype) for item in inputs.items]
        draws = draws_of(inputs, keep) if keep else []
        if draws:
            folders = forms.slugs(inputs.tasks, forms.RESERVED)
        stored = len(folders) * sum(item.numel * item.out.itemsize for item in items)
        if stored > inputs.model_bytes and not draws:
            more = megabytes(stored - inputs.model_bytes)
            warn(f"the store will take {more} more than the models: take fewer bases or a narrower "
                 "--dtype")  # fmt: skip
        files, measured = write_vectors(
            partial,
            folders,
            items,
            encoder_matrix(basis),
            inputs.folder,
            engine,
            draws=draws,
        )
        basis.seconds = {
            "gram": summed - started,
            "encode": encoded - summed,
            "write": time.perf_counter() - encoded,
        }
        if not draws:
            vectors = dense_vectors(inputs, basis, dtype, files)
        else:
            numbers = _numbers(inputs, basis, measured, keep)
            if keep == 1:
                own = dtype_name(inputs.own_dtype)
                vectors = Vectors(numbers, folders, files, own, "lossless")
            else:
                vectors = Vectors(numbers, folders, files, "float32", "sampled", keep)
        world.dismiss()
        if keep == 1:
            rest = write_originals(partial, folders, inputs, engine)
            vectors = replace(vectors, files={**files, **rest})
        inputs.check_unchanged()
        return writer.commit(vectors, history_of(inputs, basis))


def build_in_memory(
    inputs: TaskSet,
    engine: Engine = Engine(),
    *,
    dtype: torch.dtype = torch.float32,
    warn: Warn = LOG.warning,
) -> Bases:
    """Build the bases of `inputs` as state dicts."""
    dtype_name(dtype)
    basis = _basis(inputs, sums_of(inputs, engine), warn)
    items = [replace(item, out=dtype) for item in inputs.items]
    vectors, history = dense_vectors(inputs, basis, dtype), history_of(inputs, basis)
    return in_memory(vectors, history, items, encoder_matrix(basis), engine)


def inspect_inputs(inputs: TaskSet, engine: Engine = Engine()) -> tuple[Facts, dict[str, Tensor]]:
    """basis.json and basis.safetensors of a build in float32, without building.

    Raises:
        UserError: NaN or infinity, also in a tensor of the base that a merge copies.
    """
    base, settings = inputs.base, inputs.settings
    taking_part = {(item.base and item.base.name) or item.name for item in inputs.items}
    for name, info in base.tensors.items():
        if name not in taking_part and name not in inputs.tied and info.dtype.is_floating_point:
            check_copied(name, base.tensor(name), settings.excludes(name))
    check_matrices(settings, inputs.items)
    basis = _basis(inputs, sums_of(inputs, engine), LOG.warning)
    vectors = dense_vectors(inputs, basis, torch.float32)
    tensors = {**vectors.tensors, **tensors_of(basis)}
    return facts_of(vectors, history_of(inputs, basis)).of_merge(), tensors


def _basis(inputs: TaskSet, sums: GramSums, warn: Warn) -> Basis:
    basis = encoded_by(inputs, sums)
    for line in warnings(basis, dict(zip(inputs.tasks, inputs.models, strict=True))):
        warn(line)
    return basis


def encoder_matrix(basis: Basis) -> Tensor:
    """The factors of the task vectors in each basis, [T, M]; [T, M + 1] with PCA's mean."""
    if basis.settings.basis != "pca":
        return basis.weighted_encoder
    mean = torch.tensor(basis.weights, dtype=torch.float64)[:, None] / len(basis.tasks)
    return torch.cat([basis.weighted_encoder, mean], dim=1)


def _numbers(
    inputs: TaskSet, basis: Basis, measured: Sequence[Sequence[float]], share: float
) -> dict[str, Tensor]:
    """`basis.safetensors` of kept task vectors; `gram_bases` is of the models themselves."""
    if share == 1:
        none = torch.zeros(len(basis.tasks), dtype=torch.float64)
        return numbers_of_bases(inputs, basis, none)
    own = forms.measured_tensors(measured, basis.weights)
    return numbers_of_bases(inputs, basis, forms.lost(own)) | own
