"""A store of T models: the Gram matrix in one pass, the vectors in a second.

Each of several processes (see `ranks`) reads and writes its share. No write waits for the disk,
because nothing is deleted.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.core.basis import Basis, warnings
from tvb_mergekit.core.gram import check_copied
from tvb_mergekit.core.settings import EVEN
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.change import Change
from tvb_mergekit.store.codecs import planned, written
from tvb_mergekit.store.facts import Facts, Form, Vector
from tvb_mergekit.store.report import facts, measured, tensors_of
from tvb_mergekit.store.store import Bases, load
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.merging import check_matrices, encoded_by, sums_of
from tvb_mergekit.tensors.output import check_output_folder, staged
from tvb_mergekit.tensors.stream import Engine
from tvb_mergekit.tensors.taskset import TaskSet

LOG = logging.getLogger(__name__)
LEAST_SHARE = 1e-6
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
    if not LEAST_SHARE <= keep < 1:
        raise UserError(f"--keep {keep:g}: expected a share from {LEAST_SHARE:g} to below 1")
    return round(keep * 2**32) / 2**32


def build_store(
    inputs: TaskSet,
    out: str | os.PathLike[str],
    engine: Engine = Engine(),
    dtype: torch.dtype | None = None,
    keep: float = 0,
    warn: Warn = LOG.warning,
    **more: Any,
) -> Bases:
    """Keep the task vectors, or the bases, of `inputs` in the new store `out`.

    Args:
        dtype: float32, bfloat16 or float16, of dense vectors; None: as wide as the models, and task
            vectors in the form that suits each model.
        keep: the share of the entries of each task vector to keep exact; 1: all, to the bit.
        warn: called with each doubt about a model, one line each.
        more: keys of `store.json`.

    Raises:
        UserError: The inputs are bad, `out` exists, or the disk is full.
    """
    ranks.world().agree(inputs.names)
    check_output_folder(out)
    with staged(out) as folder:
        change, started = Change(folder, Path(os.path.realpath(out))), time.perf_counter()
        forms, basis = planned(inputs, dtype, keep), encoded(inputs, engine, warn)
        matrix = basis.weighted_encoder
        if basis.settings.basis == "none":  # task vectors are stored without their weights
            matrix = torch.eye(len(basis.tasks), dtype=torch.float64)
        elif basis.settings.basis == "pca":  # the mean is the last vector
            weights = torch.tensor(basis.weights, dtype=torch.float64)[:, None]
            matrix = torch.cat([matrix, weights / len(basis.tasks)], dim=1)
        vectors, squares = written(change, inputs, forms, matrix, engine)
        basis.seconds["build"] = time.perf_counter() - started
        ranks.world().dismiss()
        inputs.check_unchanged()
        numbers = {"encoder": basis.encoding.encoder, "decoder": basis.encoding.decoder}
        numbers["gram"] = basis.sums.gram
        change.commit(described(inputs, basis, vectors, squares) | more, numbers)
    return load(change.home)


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
    return facts(inputs, basis, {}), tensors_of(basis)


def encoded(inputs: TaskSet, engine: Engine, warn: Warn) -> Basis:
    """The basis of the inputs, by G; with warnings about doubtful models."""
    basis = encoded_by(inputs, sums_of(inputs, engine))
    for line in warnings(basis, dict(zip(inputs.tasks, inputs.models, strict=True))):
        warn(line)
    return basis


def described(
    inputs: TaskSet, basis: Basis, vectors: Sequence[Vector], squares: Sequence[float]
) -> dict[str, Any]:
    """The keys of `store.json` of a new store; `squares`: the squared error of each code."""
    merged, kind, count = facts(inputs, basis, {}), basis.settings.basis, basis.num_bases
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
        "model_bytes": inputs.model_bytes,
        "vectors": list(vectors),
    }
    if kind == "none":
        norms = basis.sums.scaled([1 / w for w in basis.weights]).norms
        made["errors"] = dict(zip(basis.tasks, map(lost, vectors, squares, norms), strict=True))
    if inputs.sampled:  # what is lost of the models is not known
        made |= {"errors": dict.fromkeys(basis.tasks), **measured((), None, basis.sums.gram)}
    return made


def lost(form: Form, square: float, norm: float) -> float:
    """The relative error of a task vector by the square of its code's error, or its rounding."""
    if form.codec == "dense" and form.dtype != "float32":
        return torch.finfo(getattr(torch, form.dtype)).eps / 2
    return math.sqrt(square) / norm
