"""The authors' published bases (see `authors`) as a store."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit import report
from tvb_mergekit.authors import Published, read_published
from tvb_mergekit.errors import UserError
from tvb_mergekit.facts import FORMAT_VERSION
from tvb_mergekit.gram import block_budget
from tvb_mergekit.inputs import Matched, match
from tvb_mergekit.output import StagedFolder, check_disk, check_new_folder
from tvb_mergekit.progress import Progress, silent
from tvb_mergekit.recipe import check_tasks, resolve_settings
from tvb_mergekit.store import (
    MEAN,
    Bases,
    basis_folder,
    dtype_name,
    load,
    note_files,
)
from tvb_mergekit.store_writing import finish_store, finish_vectors, local_path, writers_of
from tvb_mergekit.stream import combine, gram_of
from tvb_mergekit.weights import StateDict, Weights
from tvb_mergekit.writing import FoldersSink


def convert_published(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    base: Weights,
    base_model: str,
    base_folder: Path | None,
    *,
    dtype: torch.dtype = torch.float32,
    prefix: str = "",
    progress: Progress = silent,
) -> Bases:
    """Write what one of the authors' methods left in `folder` as the store `out`.

    Their files hold no Gram matrix of the tasks: `gram`, `eigenvalues`, the loss and the errors of
    single tasks are unknown in the store, and what a task was trained from is its dataset's name.

    Args:
        base: the model that the task vectors are differences from.
        prefix: of their names of tensors, before the base's names.

    Raises:
        UserError: files missing, damaged or at odds with each other, tensors that the base lacks.
    """
    check_new_folder(out, [os.fspath(folder)])
    published = read_published(folder)
    check_tasks(published.tasks, published.tasks)
    vectors: list[Weights] = [
        StateDict({_stripped(name, prefix): t for name, t in vector.items()})
        for vector in (*published.vectors, *([] if published.mean is None else [published.mean]))
    ]
    names = [basis_folder(m) for m in range(len(published.vectors))]
    names += [MEAN] * (published.mean is not None)
    matched = _match(base, vectors, names)
    items = [replace(item, base=None, out=dtype) for item in matched.items]
    check_disk(os.fspath(out), len(names) * sum(i.numel for i in items) * dtype.itemsize)
    stage = StagedFolder(out)
    try:
        sums = gram_of(
            items,
            names,
            budget=block_budget(),
            deltas=len(names),
            progress=progress("Gram matrix", sum(item.nbytes for item in items)),
        )
        writers = writers_of(stage.path, names, items, base_folder)
        combine(
            items,
            torch.eye(len(names), dtype=torch.float64),
            FoldersSink(writers),
            budget=block_budget(),
            deltas=len(names),
            progress=progress("Bases", sum(item.nbytes for item in items)),
        )
        files = finish_vectors(writers, base_folder)
        facts = _facts(published, base, base_model, matched, names, dtype)
        facts["store"]["files"] = files
        count = len(published.vectors)
        tensors = _tensors(published, sums.gram[:count, :count])
        finish_store(stage.path, Path(os.path.realpath(out)), facts, tensors)
        stage.publish()
    finally:
        stage.discard()
    note_files(Path(out), facts["store"]["files"])
    return load(out, verify=False)  # they were hashed while they were written


def _stripped(name: str, prefix: str) -> str:
    if not name.startswith(prefix):
        raise UserError(f"tensor `{name}` does not begin with --prefix {prefix}")
    return name[len(prefix) :]


def _match(base: Weights, vectors: list[Weights], names: list[str]) -> Matched:
    for name, info in vectors[0].tensors.items():
        if name not in base.tensors:
            raise UserError(f"tensor `{name}` of the bases is not in the base{_hint(name, base)}")
        if info.numel and not info.dtype.is_floating_point:
            raise UserError(f"tensor `{name}` of the bases is stored as {info.dtype}")
    return match(base, vectors, names, resolve_settings("basis_ta", {}, names))


def _hint(name: str, base: Weights) -> str:
    longest = max((n for n in base.tensors if name.endswith(f".{n}")), key=len, default=None)
    if longest is not None:
        return f"; it has `{longest}`: --prefix {name.removesuffix(longest)}"
    close = next((n for n in base.tensors if n.endswith(f".{name}")), None)
    if close is not None:
        return f", which has `{close}`: give the base as the authors' code names its tensors"
    return ": give the model that they were fine-tuned from"


def _tensors(published: Published, gram_bases: Tensor) -> dict[str, Tensor]:
    tensors = {"decoder": published.decoder, "gram_bases": gram_bases}
    if published.encoder is not None:
        tensors["encoder"] = published.encoder
    return {name: tensor.contiguous().double() for name, tensor in tensors.items()}


def _facts(
    published: Published,
    base: Weights,
    base_model: str,
    matched: Matched,
    names: list[str],
    dtype: torch.dtype,
) -> dict[str, Any]:
    tasks = list(published.tasks)
    unknown = ("loss", "spectral_bound", "balanced_bound", "relative_gap", "retained_energy")
    fingerprint = base.fingerprint()
    return {
        "format_version": FORMAT_VERSION,
        "versions": report.versions(),
        "method": "basis_negate" if published.basis == "rand_proj" else "basis_ta",
        "parameters": {
            "basis": published.basis,
            "seed": published.seed,
            "lambda_scale": "bases",
            **published.parameters,
            "weights": dict.fromkeys(tasks, 1.0),
        },
        "tasks": tasks,
        "models": tasks,
        "base_model": base_model,
        "num_bases": len(published.vectors),
        "num_parameters": sum(item.numel for item in matched.items),
        "dtype": None,
        **dict.fromkeys(unknown),
        "norms": {"base": None, **dict.fromkeys(tasks)},
        "left_out": dict(matched.left_out),
        "fingerprints": {base_model: fingerprint},
        "gram_cached": False,
        "seconds": {},
        "store": {
            "contents": "tensors",
            "dtype": dtype_name(dtype),
            "folders": names,
            "budget": len(published.vectors),
            # No norms of the old tasks, no bounds of their errors: the store cannot grow.
            "compress": None,
            "basis_weights": None,
            "base_fingerprint": fingerprint,
            "base_path": local_path(base_model),
            "twins": dict(matched.twins),
            "model_bytes": len(tasks) * base.nbytes,
            "added": 0,
            "published": published.source,
        },
        "errors": {task: {"at_least": 0.0, "at_most": None} for task in tasks},
    }
