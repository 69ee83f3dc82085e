"""The vectors of a store as they are made: folders of weight files, or state dicts."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit.core.gram import Sketch
from tvb_mergekit.core.merge import Linear
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.facts import FileRecord, record_of
from tvb_mergekit.store.store import MEAN, Bases, dtype_name, numbers_of
from tvb_mergekit.store.vectors import Vectors, facts_of
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.output import check_disk
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.quantized import Coding
from tvb_mergekit.tensors.source import StateDict
from tvb_mergekit.tensors.stream import Item, Sink
from tvb_mergekit.tensors.writing import (
    MARKER,
    SHARD_BYTES,
    FoldersSink,
    FolderWriter,
    MemorySink,
    plan_shards,
    read_journal,
    run_of,
)

# Files of the base that a vector needs next to its weights, to be loaded and merged by mergekit.
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


def write_vectors(
    place: Path,
    names: Sequence[str],
    items: Sequence[Item],
    matrix: Tensor,
    config: Path | None,
    engine: Engine,
    *,
    first: int = 0,
    coding: Coding | None = None,
    sketch: Sketch | None = None,
    journals: Sequence[Path] = (),
) -> tuple[dict[str, FileRecord], list[list[float]]]:
    """Write vectors of a store; returns their files, and the numbers that `coding` measured.

    Each of several processes writes its share. Rank 0 completes the folders.

    Args:
        place: the folder of the folders `names`.
        matrix: the factors of the items' inputs in each vector.
        config: the folder of the configuration that the vectors get.
        first: the index of the first of these vectors in the store.
        coding: of the vectors, if they are coded.
        sketch: the random directions that replace the items' inputs.
        journals: a file for each process, with the tensors that an interrupted build has written.
    """
    world, outputs = ranks.world(), range(len(names))
    # mergekit-pytorch reads bare weights from one file.
    limit, runs = (SHARD_BYTES, world.size) if config else (sys.maxsize, 1)
    plan = plan_shards(items, limit, runs)
    every = world.share(lambda: [read_journal(journal) for journal in journals])
    every = every or [[] for _ in range(world.size)]
    done = every[world.rank]
    writers = [
        FolderWriter(
            place / name,
            plan,
            {"format": "pt", MARKER: name},
            [each.hashes[k] for each in done],
            world.rank,
            k,
            coding.coded[k] if coding else None,
        )
        for k, name in enumerate(names)
    ]
    left = [run_of(plan, rank)[len(done) :] for rank, done in enumerate(every)]
    rest = chain.from_iterable(left)
    check_disk(str(place), sum(item.written(item.numel, k) for item in rest for k in outputs))
    journal = journals[world.rank] if journals else None
    sink = FoldersSink(writers, journal, coding, [each.measured for each in done])
    _combine(left[world.rank], matrix, sink, engine, coding, sketch)
    records = world.collect([writer.whole() for writer in writers])

    def finish() -> dict[str, FileRecord]:
        files = {}
        for index, (writer, *written) in enumerate(zip(writers, *records, strict=True), first):
            for name, record in writer.finish(written).items():
                files[f"{writer.folder.name}/{name}"] = FileRecord.model_validate(record)
            files |= copy_config(config, writer.folder, index, tokenizer=not coding)
        return files

    return world.share(finish), list(chain(*world.collect(sink.measured)))


def in_memory(
    vectors: Vectors,
    history: Mapping[str, Any],
    items: Sequence[Item],
    matrix: Tensor,
    engine: Engine,
    sketch: Sketch | None = None,
) -> Bases:
    """Bases as state dicts; the arguments are those of `facts_of` and `write_vectors`."""
    sink = MemorySink(matrix.shape[1])
    _combine(items, matrix, sink, engine, None, sketch)
    facts, states = facts_of(vectors, history), [StateDict(state) for state in sink.states]
    mean = states.pop() if MEAN in vectors.folders else None
    return Bases(facts, {**numbers_of(facts), **vectors.tensors}, states, mean)


def _combine(
    items: Sequence[Item],
    matrix: Tensor,
    sink: Sink,
    engine: Engine,
    coding: Coding | None,
    sketch: Sketch | None,
) -> None:
    if sketch is not None:  # Omega is drawn, not read
        items = [replace(item, base=None, inputs=()) for item in items]
    steps = dict.fromkeys((item.name for item in items), Linear.of(matrix))
    combine_pass(items, steps, sink, engine, title="Bases", sketch=sketch, coding=coding)


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
    except ValueError as error:
        raise UserError(f"{source / 'config.json'}: not JSON ({error}); restore it") from error
    names = [name for name in COPIED if tokenizer and (source / name).is_file()]
    names += sorted(file.name for file in source.glob("*.py")) if "auto_map" in config else []
    if index is not None:
        config[MARKER] = {"folder": folder.name, "index": index}
    if dtype is not None:
        config |= {key: dtype_name(dtype) for key in ("dtype", "torch_dtype") if key in config}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in names:
        shutil.copyfile(source / name, folder / name)
    return {f"{folder.name}/{name}": record_of(folder / name) for name in ("config.json", *names)}
