"""T models in, a basis store out: the Gram matrix in one pass, the M bases in a second.

The store is written in STORE.partial and renamed when it is whole. What is there after an
interruption is gone on with by `resume`: the Gram matrix and every tensor that was finished. Of
several processes (see `ranks`) each reads and writes its share.

Nothing waits for the disk, as nothing is deleted. A file that a power cut left short or altered
has another checksum than basis.json or, for `resume`, the journal.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from tvb_mergekit import cache, ranks
from tvb_mergekit.basis import Basis, warnings
from tvb_mergekit.basis import build as encode_basis
from tvb_mergekit.engine import sketch_of, sums_of
from tvb_mergekit.errors import UserError
from tvb_mergekit.gram import GramSums, Sketch, block_budget
from tvb_mergekit.inputs import Inputs
from tvb_mergekit.output import check_disk, check_new_folder, megabytes
from tvb_mergekit.progress import Progress, silent
from tvb_mergekit.store import Bases, dtype_name, load, note_files, numbers_of
from tvb_mergekit.store import lock as store_lock
from tvb_mergekit.store_writing import (
    finish_store,
    finish_vectors,
    folders_of,
    store_facts,
    tensors_of,
    writers_of,
)
from tvb_mergekit.stream import Item, combine
from tvb_mergekit.weights import StateDict
from tvb_mergekit.writing import FoldersSink, MemorySink, read_journal, run_of

LOG = logging.getLogger(__name__)

CPU = torch.device("cpu")
Warn = Callable[[str], object]
ROUNDING = 0.05  # of a task vector's norm: what a 16-bit store may cost without a warning
BEGUN = "state.json.part"
STATE, SUMS, MATRIX, JOURNAL = (
    "state.json",
    "sums.safetensors",
    "matrix.safetensors",
    "journal.jsonl",
)  # of a partial store


def build_store(
    inputs: Inputs,
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    devices: Sequence[torch.device] = (CPU,),
    resume: bool = False,
    budget: int | None = None,
    progress: Progress = silent,
    warn: Warn = LOG.warning,
) -> Bases:
    """Build the bases of `inputs` and write them as the store `out`.

    Args:
        dtype: float32, bfloat16 or float16, of the stored bases.
        devices: where to compute.
        resume: go on with `out`.partial, if it is there.
        budget: bytes that may be allocated; None: TVB_MERGEKIT_BLOCK_MB.
        warn: called with what speaks against a model, a line each.

    Raises:
        UserError: the inputs are bad, `out` exists, there is no room, or `resume` finds other
            inputs than were there.
    """
    dtype_name(dtype)
    target = Path(os.path.realpath(out))
    world = ranks.world()
    held = store_lock(target, LOG.warning) if world.leads else None
    try:
        with world.whole():
            budget = budget or block_budget()
            return _build(inputs, target, dtype, devices, resume, budget, progress, warn)
    finally:
        if held is not None:
            held.release()


def build_in_memory(
    inputs: Inputs,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    warn: Warn = LOG.warning,
) -> Bases:
    """The same bases as state dicts."""
    dtype_name(dtype)
    sketch = sketch_of(inputs.settings, len(inputs.tasks))
    budget = block_budget()
    basis = _basis(inputs, _sums(inputs, sketch, [device], budget, silent), sketch)
    _warn_of_models(basis, inputs, warn)
    matrix = encoder_matrix(basis)
    sink = MemorySink(matrix.shape[1])
    items = [replace(item, out=dtype) for item in inputs.items]
    _combine(inputs, basis, matrix, sink, items, [device], budget, silent)
    tensors = tensors_of(basis, dtype)
    facts = store_facts(inputs, basis, dtype, {}, tensors)
    vectors = [StateDict(state) for state in sink.states]
    mean = vectors.pop() if basis.settings.basis == "pca" else None
    return Bases(facts, {**numbers_of(facts), **tensors}, vectors, mean)


def inspect_inputs(
    inputs: Inputs,
    device: torch.device = CPU,
    progress: Progress = silent,
    budget: int | None = None,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """basis.json and basis.safetensors of what a build would give, without building."""
    sketch = sketch_of(inputs.settings, len(inputs.tasks))
    sums = _sums(inputs, sketch, [device], budget or block_budget(), progress)
    basis = _basis(inputs, sums, sketch)
    _warn_of_models(basis, inputs, LOG.warning)
    tensors = tensors_of(basis, torch.float32)
    facts = store_facts(inputs, basis, torch.float32, {}, tensors)
    return {key: value for key, value in facts.items() if key != "store"}, tensors


def _build(
    inputs: Inputs,
    out: Path,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    resume: bool,
    budget: int,
    progress: Progress,
    warn: Warn,
) -> Bases:
    world = ranks.world()
    partial = out.with_name(f"{out.name}.partial")
    state = {
        "key": cache.key_of({**inputs.key, "dtype": str(dtype), "weights": list(inputs.weights)}),
        "settings": inputs.settings.model_dump(mode="json"),
        "tasks": list(inputs.tasks),
        "processes": world.size if world.size > 1 else None,
    }
    world.agree([item.name for item in inputs.items], "tensors")
    going_on = world.share(lambda: _looked_at(partial, inputs, out, state, resume))
    started = time.perf_counter()
    sketch = sketch_of(inputs.settings, len(inputs.tasks))
    sums = world.share(lambda: cache.read_sums(partial / SUMS) if going_on else None)
    sums = sums or _sums(inputs, sketch, devices, budget, progress)
    summed = time.perf_counter()
    basis = world.share(lambda: _basis(inputs, sums, sketch))
    _warn_of_models(basis, inputs, warn)
    matrix = encoder_matrix(basis)
    if world.leads:
        if not going_on:  # not before, so that inputs which are refused leave nothing
            _begin(partial, state)
        cache.write_sums(partial / SUMS, sums, inputs.tasks, inputs.models)
        _check_matrix(partial / MATRIX, matrix)
    _warn_of_size(inputs, dtype, matrix.shape[1])
    encoded = time.perf_counter()
    journals = [partial / _journal(number, world.size) for number in range(world.size)]
    every = world.share(lambda: [read_journal(journal) for journal in journals])
    world.check_shared(partial)
    items = [replace(item, out=dtype) for item in inputs.items]
    finished = every[world.rank]
    writers = writers_of(partial, folders_of(basis), items, inputs.folder, finished)
    plan = writers[0].plan
    left = [run_of(plan, number)[len(found) :] for number, found in enumerate(every)]
    numel = sum(item.numel for item in chain.from_iterable(left))
    check_disk(str(partial), numel * dtype.itemsize * matrix.shape[1])
    sink = FoldersSink(writers, journals[world.rank])
    _combine(inputs, basis, matrix, sink, left[world.rank], devices, budget, progress)
    basis.seconds = {
        "gram": summed - started,
        "encode": encoded - summed,
        "write": time.perf_counter() - encoded,
    }
    files = finish_vectors(writers, inputs.folder)
    tensors = tensors_of(basis, dtype)
    facts = store_facts(inputs, basis, dtype, files, tensors)
    _warn_of_rounding(facts)
    finish_store(partial, out, facts, tensors)
    os.rename(partial, out)
    names = [journal.name for journal in journals]
    for name in (STATE, SUMS, MATRIX, *names):  # not before: until then `resume` may need them
        (out / name).unlink(missing_ok=True)
    note_files(out, facts["store"]["files"])
    return load(out, verify=False)  # they were hashed while they were written


def _looked_at(
    partial: Path, inputs: Inputs, out: Path, state: Mapping[str, object], resume: bool
) -> bool:
    """Whether what an unfinished build has left is gone on with."""
    check_new_folder(out, [name for name in inputs.fingerprints if os.path.exists(name)])
    there = {entry.name for entry in partial.iterdir()} if partial.is_dir() else set()
    if resume and STATE in there:
        _check_same(partial, state)
        return True
    if resume:
        LOG.warning("--resume: nothing to go on with in %s; starting anew", partial)
    if there - {BEGUN} and STATE not in there:
        raise UserError(f"{partial} is in the way, and no unfinished build; move or delete it")
    return False


def _begin(partial: Path, state: Mapping[str, object]) -> None:
    if partial.is_dir():
        if (partial / STATE).is_file():
            LOG.warning("%s, an unfinished build, is replaced (--resume would go on)", partial)
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    (partial / BEGUN).write_text(json.dumps(state), encoding="utf-8")
    os.replace(partial / BEGUN, partial / STATE)


def _journal(rank: int, size: int) -> str:
    """The journal of one process: where there are several, each has its own."""
    return JOURNAL if size == 1 else f"{rank}-{JOURNAL}"


def _warn_of_size(inputs: Inputs, dtype: torch.dtype, vectors: int) -> None:
    stored = vectors * dtype.itemsize * sum(item.numel for item in inputs.items)
    if stored > inputs.model_bytes:
        LOG.warning(
            "the store will take %s more than the models: fewer bases%s take less",
            megabytes(stored - inputs.model_bytes),
            ", or bases of --adapters," if inputs.adapters else " or a narrower --dtype",
        )


def _warn_of_models(basis: Basis, inputs: Inputs, warn: Warn) -> None:
    for line in warnings(basis, dict(zip(inputs.tasks, inputs.models, strict=True))):
        warn(line)


def _warn_of_rounding(facts: Mapping[str, Any]) -> None:
    """Nearly equal bases give a decoder with large entries, which enlarge what a cast loses."""
    widths = {task: (e["at_most"] - e["at_least"]) / 2 for task, e in facts["errors"].items()}
    worst = max(widths, key=widths.__getitem__)
    if widths[worst] > ROUNDING:
        dtype = facts["store"]["dtype"]
        LOG.warning(
            "rounding to %s may cost the reconstruction of `%s` up to %.2g of its norm, since the "
            "bases are nearly equal (a decoder with large entries): for `tvb export --task` and "
            "basis_negate take %s",
            dtype,
            worst,
            widths[worst],
            "fewer bases, or another basis" if dtype == "float32" else "--dtype float32",
        )


def _check_same(partial: Path, state: Mapping[str, object]) -> None:
    try:
        before = json.loads((partial / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--resume: {partial} cannot be gone on with; delete it") from error
    for key, what in (
        ("tasks", "other tasks"),
        ("settings", "other settings"),
        ("key", "other model files or another --dtype"),
        ("processes", "another number of processes"),
    ):
        if before.get(key) != state[key]:
            raise UserError(
                f"--resume: {partial} was begun with {what}; start anew without --resume"
            )


def _check_matrix(path: Path, matrix: Tensor) -> None:
    """What is gone on with must be the same bases to the bit: another machine or PyTorch may give
    others from the same Gram matrix."""
    if not path.is_file():
        path.write_bytes(save({"matrix": matrix.contiguous()}))
        return
    try:
        begun = load_file(path)["matrix"]
    except (safetensors.SafetensorError, KeyError) as error:
        raise UserError(f"{path}: cannot be read; start anew without --resume") from error
    if not torch.equal(begun, matrix):
        raise UserError(
            f"--resume: {path.parent} was begun with another encoder (on another machine, or with "
            "another PyTorch?); start anew without --resume"
        )


def _sums(
    inputs: Inputs,
    sketch: Sketch | None,
    devices: Sequence[torch.device],
    budget: int,
    progress: Progress,
) -> GramSums:
    if inputs.sums is not None:
        return inputs.sums
    sums, _cached = sums_of(
        lambda: inputs.items,
        inputs.tasks,
        devices=devices,
        budget=budget,
        deltas=len(inputs.tasks) if inputs.deltas else 0,
        sketch=sketch,
        key=None if inputs.in_memory else inputs.key,
        models=inputs.models,
        progress=progress,
    )
    return sums


def _basis(inputs: Inputs, sums: GramSums, sketch: Sketch | None) -> Basis:
    return encode_basis(inputs.settings, inputs.tasks, inputs.weights, sums, sketch)


def encoder_matrix(basis: Basis) -> Tensor:
    """What the task vectors (or Omega) are multiplied by: [T, M], for PCA [T, M + 1] with the
    mean at the end, for rand_proj [M, M]."""
    if basis.encoding.mixing is not None:
        return basis.encoding.mixing
    encoder = basis.weighted_encoder
    if basis.settings.basis != "pca":
        return encoder
    mean = torch.tensor(basis.weights, dtype=torch.float64)[:, None] / len(basis.tasks)
    return torch.cat([encoder, mean], dim=1)


def _combine(
    inputs: Inputs,
    basis: Basis,
    matrix: Tensor,
    sink: FoldersSink | MemorySink,
    items: Sequence[Item],
    devices: Sequence[torch.device],
    budget: int,
    progress: Progress,
) -> None:
    if basis.sketch is not None:  # Omega is drawn, not read
        items = [replace(item, base=None, inputs=()) for item in items]
    combine(
        items,
        matrix,
        sink,
        devices=devices,
        budget=budget,
        deltas=len(inputs.tasks) if inputs.deltas else 0,
        sketch=basis.sketch,
        progress=progress("Bases", sum(item.nbytes for item in items)),
    )
