"""T models in, a basis store out: the Gram matrix in one pass, the M bases in a second.

The store is written in STORE.partial and renamed when it is whole. What is there after an
interruption is gone on with by `resume`: the Gram matrix and every tensor that was finished.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from tvb_mergekit import cache, report
from tvb_mergekit.basis import Basis, warnings
from tvb_mergekit.basis import build as encode_basis
from tvb_mergekit.engine import sketch_of
from tvb_mergekit.errors import UserError
from tvb_mergekit.gram import GramSums, Sketch, block_budget
from tvb_mergekit.inputs import Inputs
from tvb_mergekit.online import cast_loss, errors_of, relative
from tvb_mergekit.output import check_disk, check_new_folder, sync
from tvb_mergekit.progress import Progress, silent
from tvb_mergekit.ready import write_recipes
from tvb_mergekit.report import write_tensors
from tvb_mergekit.store import (
    FACTS,
    MARKER,
    MEAN,
    TENSORS,
    Bases,
    basis_folder,
    dtype_name,
    load,
    note_files,
)
from tvb_mergekit.store import lock as store_lock
from tvb_mergekit.stream import Item, combine, gram_of
from tvb_mergekit.weights import StateDict
from tvb_mergekit.writing import (
    SHARD_BYTES,
    FoldersSink,
    FolderWriter,
    MemorySink,
    Shard,
    file_record,
    plan_shards,
    read_journal,
)

LOG = logging.getLogger(__name__)

CPU = torch.device("cpu")
ROUNDING = 0.05  # of a task vector's norm: what a 16-bit store may cost without a warning
BEGUN = "state.json.part"
STATE, SUMS, MATRIX, JOURNAL = (
    "state.json",
    "sums.safetensors",
    "matrix.safetensors",
    "journal.jsonl",
)  # of a partial store
# What belongs to the base and a basis folder needs, to be loaded and to be merged by mergekit.
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)


def build_store(
    inputs: Inputs,
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    resume: bool = False,
    progress: Progress = silent,
) -> Bases:
    """Build the bases of `inputs` and write them as the store `out`.

    Args:
        dtype: float32, bfloat16 or float16, of the stored bases.
        device: where to compute.
        resume: go on with `out`.partial, if it is there.

    Raises:
        UserError: the inputs are bad, `out` exists, there is no room, or `resume` finds other
            inputs than were there.
    """
    dtype_name(dtype)
    target = Path(os.path.realpath(out))
    held = store_lock(target, LOG.warning)
    try:
        return _build(inputs, target, dtype, device, resume, progress)
    finally:
        held.release()


def build_in_memory(
    inputs: Inputs, *, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> Bases:
    """The same bases as state dicts."""
    dtype_name(dtype)
    sketch = sketch_of(inputs.settings, len(inputs.tasks))
    basis = _basis(inputs, _sums(inputs, sketch, device, silent), sketch)
    matrix = encoder_matrix(basis)
    sink = MemorySink(matrix.shape[1])
    _combine(inputs, basis, matrix, sink, 0, dtype, device, silent)
    facts = store_facts(inputs, basis, dtype, {}, cast_losses(basis, dtype))
    vectors = [StateDict(state) for state in sink.states]
    mean = vectors.pop() if basis.settings.basis == "pca" else None
    return Bases(facts, tensors_of(basis), vectors, mean)


def inspect_inputs(
    inputs: Inputs, device: torch.device = CPU, progress: Progress = silent
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """basis.json and basis.safetensors of what a build would give, without building."""
    sketch = sketch_of(inputs.settings, len(inputs.tasks))
    basis = _basis(inputs, _sums(inputs, sketch, device, progress), sketch)
    for line in warnings(basis, dict(zip(inputs.tasks, inputs.models, strict=True))):
        LOG.warning("%s", line)
    facts = store_facts(inputs, basis, torch.float32, {}, cast_losses(basis, torch.float32))
    return {key: value for key, value in facts.items() if key != "store"}, tensors_of(basis)


def _build(
    inputs: Inputs,
    out: Path,
    dtype: torch.dtype,
    device: torch.device,
    resume: bool,
    progress: Progress,
) -> Bases:
    check_new_folder(out, [name for name in inputs.fingerprints if os.path.exists(name)])
    partial = out.with_name(f"{out.name}.partial")
    state = {
        "key": cache.key_of({**inputs.key, "dtype": str(dtype), "weights": list(inputs.weights)}),
        "settings": inputs.settings.model_dump(mode="json"),
        "tasks": list(inputs.tasks),
    }
    going_on = resume and (partial / STATE).is_file()
    there = {entry.name for entry in partial.iterdir()} if partial.is_dir() else set()
    if going_on:
        _check_same(partial, state)
    elif resume:
        LOG.warning("--resume: nothing to go on with in %s; starting anew", partial)
    if there - {BEGUN} and STATE not in there:
        raise UserError(f"{partial} is in the way, and no unfinished build; move or delete it")
    started = time.perf_counter()
    sketch = sketch_of(inputs.settings, len(inputs.tasks))
    sums = cache.read_sums(partial / SUMS) if going_on else None
    sums = sums or _sums(inputs, sketch, device, progress)
    summed = time.perf_counter()
    basis = _basis(inputs, sums, sketch)
    for line in warnings(basis, dict(zip(inputs.tasks, inputs.models, strict=True))):
        LOG.warning("%s", line)
    if not going_on:  # not before, so that inputs which are refused leave nothing
        if partial.is_dir():
            if there - {BEGUN}:
                LOG.warning("%s, an unfinished build, is replaced (--resume would go on)", partial)
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        (partial / BEGUN).write_text(json.dumps(state), encoding="utf-8")
        os.replace(partial / BEGUN, partial / STATE)
    cache.write_sums(partial / SUMS, sums, inputs.tasks, inputs.models)
    encoded = time.perf_counter()
    matrix = encoder_matrix(basis)
    outputs = matrix.shape[1]
    _check_matrix(partial / MATRIX, matrix)
    finished = read_journal(partial / JOURNAL)
    done = finished.done
    size = sum(item.numel for item in inputs.items) * dtype.itemsize * outputs
    written = sum(item.numel for item in inputs.items[:done]) * dtype.itemsize * outputs
    check_disk(str(partial), size - written)
    writers = writers_of(partial, inputs, outputs, dtype, done)
    sink = FoldersSink(writers, partial / JOURNAL, finished)
    _combine(inputs, basis, matrix, sink, done, dtype, device, progress)
    basis.seconds = {
        "gram": summed - started,
        "encode": encoded - summed,
        "write": time.perf_counter() - encoded,
    }
    files = {
        f"{writer.folder.name}/{name}": record
        for writer in writers
        for name, record in writer.finish().items()
    }
    for index, writer in enumerate(writers):
        copy_config(inputs.folder, writer.folder, index)
    facts = store_facts(inputs, basis, dtype, files, cast_losses(basis, dtype))
    _warn_of_rounding(facts)
    finish_store(partial, out, facts, tensors_of(basis))
    os.rename(partial, out)
    sync(out.parent)
    for name in (STATE, SUMS, MATRIX, JOURNAL):  # not before: until then `resume` may need them
        (out / name).unlink(missing_ok=True)
    note_files(out, facts["store"]["files"])
    return load(out)


def _warn_of_rounding(facts: Mapping[str, Any]) -> None:
    """Nearly equal bases give a decoder with large entries, which enlarge what a cast loses."""
    widths = {task: (e["at_most"] - e["at_least"]) / 2 for task, e in facts["errors"].items()}
    worst = max(widths, key=widths.__getitem__)
    if widths[worst] > ROUNDING:
        LOG.warning(
            "--dtype %s may cost the reconstruction of `%s` up to %.2g of its norm, since the "
            "bases are nearly equal (a decoder with large entries); take float32 for `tvb export "
            "--task` and basis_negate",
            facts["store"]["dtype"],
            worst,
            widths[worst],
        )


def finish_store(
    folder: Path, out: Path, facts: dict[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write all of a store but its bases into `folder`, basis.json last.

    Args:
        out: where the folder will lie.
    """
    write_tensors(folder, tensors)
    facts["store"]["files"][TENSORS] = file_record(folder / TENSORS)
    facts["store"]["recipes"] = write_recipes(folder, out, facts)
    report.write_facts(folder, facts)
    for path in (folder / TENSORS, folder / FACTS, folder):  # the weights are synced already
        sync(path)


def _check_same(partial: Path, state: Mapping[str, object]) -> None:
    try:
        before = json.loads((partial / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--resume: {partial} cannot be gone on with; delete it") from error
    for key, what in (
        ("tasks", "other tasks"),
        ("settings", "other settings"),
        ("key", "other model files or another --dtype"),
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
    elif not torch.equal(load_file(path)["matrix"], matrix):
        raise UserError(
            f"--resume: {path.parent} was begun with another encoder (on another machine, or with "
            "another PyTorch?); start anew without --resume"
        )


def _sums(
    inputs: Inputs, sketch: Sketch | None, device: torch.device, progress: Progress
) -> GramSums:
    if inputs.sums is not None:
        return inputs.sums
    drawn = [sketch.columns, sketch.seed] if sketch else None
    entry = None if inputs.in_memory else cache.key_of({**inputs.key, "sketch": drawn})
    sums = cache.load(entry) if entry else None
    if sums is None:
        sums = gram_of(
            inputs.items,
            inputs.tasks,
            device=device,
            budget=block_budget(),
            deltas=len(inputs.tasks) if inputs.deltas else 0,
            sketch=sketch,
            progress=progress("Gram matrix", inputs.nbytes),
        )
        if entry:
            cache.store(entry, sums, list(inputs.tasks), list(inputs.models))
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
    done: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> None:
    items = [replace(item, out=dtype) for item in inputs.items[done:]]
    if basis.sketch is not None:  # Omega is drawn, not read
        items = [replace(item, base=None, inputs=()) for item in items]
    combine(
        items,
        matrix,
        sink,
        device=device,
        budget=block_budget(),
        deltas=len(inputs.tasks) if inputs.deltas else 0,
        sketch=basis.sketch,
        progress=progress("Bases", sum(item.nbytes for item in items)),
    )


def writers_of(
    folder: Path, inputs: Inputs, outputs: int, dtype: torch.dtype, done: int = 0
) -> list[FolderWriter]:
    """A writer for each basis, and for PCA's mean."""
    shards = shards_of([replace(item, out=dtype) for item in inputs.items], inputs.folder)
    count = outputs - (inputs.settings.basis == "pca")
    names = [basis_folder(m) for m in range(count)] + [MEAN] * (outputs - count)
    return [
        FolderWriter(folder / name, shards, {"format": "pt", MARKER: name}, done) for name in names
    ]


def shards_of(items: Sequence[Item], config: Path | None) -> list[Shard]:
    """The files of a basis whose base has its configuration in the folder `config`."""
    # mergekit-pytorch, which takes bare weights, takes them from one file.
    return plan_shards(items, sys.maxsize if config is None else SHARD_BYTES)


def copy_config(source: Path | None, folder: Path, index: int) -> None:
    """Give a basis folder the base's configuration, marked, and its tokenizer."""
    if source is None or not (source / "config.json").is_file():
        return
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config[MARKER] = {"folder": folder.name, "index": index}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in companions(source, config):
        shutil.copyfile(file, folder / file.name)


def companions(source: Path, config: Mapping[str, Any]) -> list[Path]:
    """The small files beside a model's weights and configuration; its own code, if it has any."""
    code = sorted(source.glob("*.py")) if "auto_map" in config else []
    return [*(source / name for name in COPIED if (source / name).is_file()), *code]


def tensors_of(basis: Basis) -> dict[str, Tensor]:
    """`basis.safetensors` of a store: that of a merge, and `gram_bases`."""
    encoding = basis.encoding
    if encoding.encoder is None:  # rand_proj: orthonormal
        products = torch.eye(encoding.num_bases, dtype=torch.float64)
    else:
        products = encoding.encoder.T @ basis.sums.gram @ encoding.encoder
    return {**report.tensors_of(basis), "gram_bases": (products + products.T) / 2}


def reconstruction_errors(basis: Basis) -> Tensor:
    """||tau_hat_i - tau_i|| [T], from the Gram matrix."""
    gram, encoding = basis.sums.gram, basis.encoding
    if encoding.reconstruction is not None:
        return errors_of(gram, encoding.reconstruction)
    lost = gram.diagonal() - encoding.decoder.square().sum(0)  # an orthogonal projection
    return lost.clamp(min=0).sqrt()


def local_path(model: str) -> str | None:
    """Where a model that is on this disk lies, to be found from any folder."""
    return os.path.abspath(model) if os.path.exists(model) else None


def cast_losses(basis: Basis, dtype: torch.dtype) -> Tensor:
    """The most that storing each basis (and PCA's mean) in `dtype` can lose, [M] or [M + 1]."""
    squares = tensors_of(basis)["gram_bases"].diagonal()
    if basis.settings.basis == "pca":
        squares = torch.cat([squares, basis.sums.gram.mean().reshape(1)])
    return cast_loss(squares.clamp(min=0).sqrt(), dtype, basis.sums.num_parameters)


def store_facts(
    inputs: Inputs,
    basis: Basis,
    dtype: torch.dtype,
    files: dict[str, dict[str, object]],
    lost: Tensor,
    contents: str = "tensors",
) -> dict[str, Any]:
    """All of a new store's basis.json but the checksum of basis.safetensors.

    Args:
        lost: [M], for PCA [M + 1]: the most that each stored vector can differ from the exact one.
    """
    facts = report.facts(
        basis,
        base_model=inputs.base_model,
        models=dict(zip(inputs.tasks, inputs.models, strict=True)),
        left_out=inputs.left_out,
        fingerprints=inputs.fingerprints,
        tunables={},
        dtype=inputs.dtype,
    )
    facts["parameters"] |= inputs.varying
    kind, count = basis.settings.basis, basis.encoding.num_bases
    weights = None
    if kind in ("balanced", "none"):
        weights = [len(inputs.tasks) / count] * count
    compress = {"balanced": "balanced", "ae": "ae", "none": "ae", "rand_select": "ae"}.get(kind)
    facts["store"] = {
        "contents": contents,
        "dtype": dtype_name(dtype),
        "folders": [basis_folder(m) for m in range(count)] + [MEAN] * (kind == "pca"),
        "budget": count,
        "compress": compress,
        "basis_weights": weights,
        "base_fingerprint": inputs.base_fingerprint,
        "base_path": local_path(inputs.base_model),
        "twins": dict(inputs.twins),
        "model_bytes": inputs.model_bytes,
        "added": 0,
        "files": files,
    }
    exact = reconstruction_errors(basis)
    # What basis m lost moves tau_hat_i by at most |W_d[m, i]| times that.
    slack = lost[:count] @ basis.encoding.decoder.abs()
    slack += lost[count:].sum()  # PCA's mean is in every task
    low, high = (exact - slack).clamp(min=0), exact + slack
    facts["errors"] = relative(inputs.tasks, facts["norms"], low, high)
    return facts
