"""The vectors of a store: their files, their numbers, and the one writer of a store's facts."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.core.basis import Basis, Linear
from tvb_mergekit.core.encoders import EVEN, Gram
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.facts import (
    EXACT,
    STORE_VERSION,
    Codec,
    Compression,
    DtypeName,
    FileRecord,
    StoreFacts,
    record_of,
    weight_bytes,
)
from tvb_mergekit.store.report import LOSSES, facts, tensors_of, versions
from tvb_mergekit.store.store import MEAN, Bases, basis_folder, dtype_name, numbers_of
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.lossless import Draw, Keeping
from tvb_mergekit.tensors.output import check_disk
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.stream import Engine, Item, Sink, StateDict, written_bytes
from tvb_mergekit.tensors.taskset import TaskSet
from tvb_mergekit.tensors.writing import (
    MARKER,
    SHARD_BYTES,
    Appender,
    FoldersSink,
    FolderWriter,
    MemorySink,
    plan_shards,
    records_of,
)

# Basis of a store -> the compression of `tvb add`. Other stores cannot grow.
COMPRESSED_BY: dict[str, Compression] = {
    **dict.fromkeys(EVEN, "balanced"),
    "ae": "ae",
    "none": "ae",
    "rand_select": "ae",
}
MEASURED = ("bits", "bytes", "density", "relative_error")  # the keys of codecs
# Files of the base that a vector needs next to its weights, to be loaded and merged by mergekit.
COPIED = (
    "generation_config.json tokenizer.json tokenizer.model tokenizer_config.json "
    "special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt spiece.model "
    "sentencepiece.bpe.model tiktoken.model chat_template.jinja chat_template.json "
    "normalizer.json spm.model bpe.codes "
    "preprocessor_config.json video_preprocessor_config.json processor_config.json"
).split()


@dataclass(frozen=True)
class Vectors:
    """The vectors of the next state of a store.

    Attributes:
        tensors: basis.safetensors, except those that `numbers_of` gives.
        folders: One for each of the M vectors, and one for PCA's mean.
        files: Path below the store -> size and checksum.
        dtype: The dtype of decoded vectors.
        codec: `dense` (tensors of a model), `lossless` or `sampled`.
        density: The share of entries that are sampled.
    """

    tensors: Mapping[str, Tensor]
    folders: Sequence[str]
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    dtype: DtypeName = "float32"
    codec: Codec = "dense"
    density: float | None = None


def facts_of(vectors: Vectors, history: Mapping[str, Any]) -> StoreFacts:
    """`basis.json` of a store, except the keys that `StoreWriter.commit` adds.

    `history` has all keys that do not follow from the vectors.
    """
    count, tasks = len(vectors.tensors["decoder"]), history["tasks"]
    errors: dict[str, float | None] = dict.fromkeys(tasks)
    if "errors" in vectors.tensors:
        for task, error in zip(tasks, vectors.tensors["errors"].tolist(), strict=True):
            errors[task] = error / (history["norms"][task] or math.inf)
    made = {key: history[key] for key in history if key not in MEASURED}
    if vectors.codec != "dense":
        made["bytes"] = nbytes = weight_bytes(vectors.files)
    if vectors.codec in EXACT:
        made["bits"] = 8 * nbytes / (count * history["num_parameters"])
        made["relative_error"] = errors
    if vectors.density is not None:
        made["density"] = vectors.density
    store = {**history["store"], "codec": vectors.codec, "dtype": vectors.dtype}
    store |= {"folders": list(vectors.folders), "files": dict(vectors.files)}
    made |= {"format_version": STORE_VERSION, "versions": versions(), "num_bases": count}
    return StoreFacts.model_validate({**made, "errors": errors, "store": store})


def history_of(tasks: TaskSet, basis: Basis) -> dict[str, Any]:
    """The keys of a new store's `basis.json` that do not follow from its vectors."""
    merged, kind, count = facts(tasks, basis, {}), basis.settings.basis, basis.encoding.num_bases
    weights = [len(tasks.tasks) / count] * count if kind in (*EVEN, "none") else None
    store = {
        "budget": count,
        "compress": COMPRESSED_BY.get(kind),
        "basis_weights": weights,
        "base_fingerprint": tasks.prints[0],
        "base_path": local_path(tasks.base_model),
        "twins": dict(tasks.tied),
        "model_bytes": tasks.model_bytes,
        "added": 0,
    }
    made = {**merged, "parameters": {**merged.parameters, **tasks.varying}, "store": store}
    return made | dict.fromkeys(LOSSES, None) if tasks.missed else made  # of the models: not known


def dense_vectors(
    tasks: TaskSet,
    basis: Basis,
    dtype: torch.dtype,
    files: Mapping[str, FileRecord] | None = None,
) -> Vectors:
    """The vectors of a new store, stored as tensors of `dtype`."""
    tensors = numbers_of_bases(tasks, basis)
    return Vectors(tensors, folders_of(basis), files or {}, dtype_name(dtype))


def folders_of(basis: Basis) -> list[str]:
    """The folders of the vectors of a store: each basis, and PCA's mean."""
    names = [basis_folder(m) for m in range(basis.encoding.num_bases)]
    return names + [MEAN] * (basis.settings.basis == "pca")


def local_path(model: str) -> str | None:
    """The absolute path of a model on this disk; None for other models."""
    return os.path.abspath(model) if os.path.exists(model) else None


def numbers_of_bases(tasks: TaskSet, basis: Basis, lost: Tensor | None = None) -> dict[str, Tensor]:
    """`basis.safetensors` of new bases.

    `errors` are ||tau_hat_i - tau_i|| of exact sums of exact vectors. They are not known over
    samples. Bases over samples that can grow have no `gram`, which `tvb add` would use.

    Args:
        lost: The norm of the error of each task vector, if these are kept instead.
    """
    tensors, held = tensors_of(basis), held_gram(tasks, basis)
    encoder, reconstruction = basis.encoding.encoder, basis.encoding.reconstruction
    products = encoder.T @ held @ encoder
    tensors["gram_bases"] = (products + products.T) / 2
    if lost is not None:  # each vector is a task's, and nothing else is lost
        tensors["errors"] = lost
    elif not tasks.missed:
        errors = Gram.of(basis.sums.gram).errors(reconstruction.numpy())
        tensors["errors"] = torch.from_numpy(errors)
    if tasks.missed and basis.settings.basis in COMPRESSED_BY:
        del tensors["gram"], tensors["eigenvalues"]
    return tensors


def held_gram(tasks: TaskSet, basis: Basis) -> Tensor:
    """The Gram matrix of the vectors in the bases, [T, T].

    Samples are longer than their task vectors. Their errors are independent of each other.
    """
    gram: Tensor = basis.sums.gram + tasks.sampled * tasks.lacking.square().diag()
    return gram


def write_vectors(
    place: Path,
    names: Sequence[str],
    items: Sequence[Item],
    matrix: Tensor,
    config: Path | None,
    engine: Engine,
    *,
    first: int = 0,
    draws: Sequence[Draw] = (),
) -> tuple[dict[str, FileRecord], list[list[float]]]:
    """Write vectors of a store; returns their files, and what `Keeping.write` measured.

    Args:
        place: the folder of the folders `names`.
        matrix: the factors of the items' inputs in each vector.
        config: the folder of the configuration that the vectors get.
        first: the index of the first of these vectors in the store.
        draws: keep the items' inputs themselves, or a sample of each.
    """
    world, measured = ranks.world(), list[list[float]]()
    limit = SHARD_BYTES if config else sys.maxsize  # a bare state dict has no index
    size = len(names) * written_bytes(items)
    check_disk(str(place), size // 4 if draws else size)
    folders, writers = [place / name for name in names], list[FolderWriter | Appender]()
    if not draws:
        plan = plan_shards(items, limit)
        dense = [FolderWriter(f, plan, {"format": "pt", MARKER: f.name}) for f in folders]
        _combine(items[ranks.part_of(items)], matrix, FoldersSink(dense), engine)
        writers += dense
    elif world.leads:  # blocks are appended in order
        keeping = Keeping(folders, items, draws, limit)
        measured = keeping.write(engine)
        writers += keeping.files
    world.collect(None)  # all have written

    def finish() -> dict[str, FileRecord]:
        files = {}
        for index, writer in enumerate(writers, first):
            writer.finish()
            for name, record in records_of(writer.folder, writer.plan).items():
                files[f"{writer.folder.name}/{name}"] = FileRecord.model_validate(record)
            files |= copy_config(config, writer.folder, index, tokenizer=not draws)
        return files

    return world.led(finish), world.led(lambda: measured)


def in_memory(
    vectors: Vectors,
    history: Mapping[str, Any],
    items: Sequence[Item],
    matrix: Tensor,
    engine: Engine,
) -> Bases:
    """Bases as state dicts; the arguments are those of `facts_of` and `write_vectors`."""
    sink = MemorySink(items, matrix.shape[1])
    _combine(items, matrix, sink, engine)
    facts, states = facts_of(vectors, history), [StateDict(state) for state in sink.states]
    mean = states.pop() if MEAN in vectors.folders else None
    return Bases(facts, {**numbers_of(facts), **vectors.tensors}, states, mean)


def _combine(
    items: Sequence[Item],
    matrix: Tensor,
    sink: Sink,
    engine: Engine,
) -> None:
    steps = dict.fromkeys((item.name for item in items), Linear.of(matrix))
    combine_pass(items, steps, sink, engine, title="Bases")


def copy_config(
    source: Path | None,
    folder: Path,
    index: int | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: bool = True,
) -> dict[str, FileRecord]:
    """Give a folder the base's configuration, tokenizer and own code; returns these files.

    Args:
        index: The index of the basis in the folder, which marks its config.json.
        dtype: of the model in that folder, if it is not the base's.
        tokenizer: copy more than the configuration and its code.
    """
    if source is None or not (source / "config.json").is_file():
        return {}
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"expected an object, found {type(config).__name__}")
    except ValueError as error:
        raise UserError(f"{source / 'config.json'}: not JSON ({error}); restore it") from error
    names = [name for name in COPIED if tokenizer and (source / name).is_file()]
    names += sorted(file.name for file in source.glob("*.tiktoken")) if tokenizer else []
    names += sorted(file.name for file in source.glob("*.py")) if "auto_map" in config else []
    if index is not None:
        config[MARKER] = {"folder": folder.name, "index": index}
    if dtype is not None:
        config |= {key: dtype_name(dtype) for key in ("dtype", "torch_dtype") if key in config}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in names:
        shutil.copyfile(source / name, folder / name)
    return {f"{folder.name}/{name}": record_of(folder / name) for name in ("config.json", *names)}
