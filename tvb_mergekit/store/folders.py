"""The folders of vectors: their weight files, and the base's configuration."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tvb_mergekit.errors import UserError
from tvb_mergekit.store.facts import FileRecord, record_of
from tvb_mergekit.store.store import dtype_name
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.quantized import Coding
from tvb_mergekit.tensors.stream import Item
from tvb_mergekit.tensors.writing import (
    MARKER,
    SHARD_BYTES,
    FolderWriter,
    Shard,
    Whole,
    plan_shards,
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


def writers_of(
    folder: Path,
    names: Sequence[str],
    items: Sequence[Item],
    config: Path | None,
    done: Sequence[Whole] = (),
    coding: Coding | None = None,
) -> list[FolderWriter]:
    """A writer for each vector of a store in `folder`.

    Args:
        config: the folder of the base's configuration.
        done: the items that are written already (`read_journal`).
        coding: of the vectors, if they are coded.
    """
    world, shards = ranks.world(), plan_of(items, config)
    return [
        FolderWriter(
            folder / name,
            shards,
            {"format": "pt", MARKER: name},
            [each.hashes[index] for each in done],
            world.rank,
            index,
            coding.coded[index] if coding else None,
        )
        for index, name in enumerate(names)
    ]


def plan_of(items: Sequence[Item], config: Path | None) -> list[Shard]:
    """The files of each vector; `config` as for `writers_of`."""
    if config is None:  # mergekit-pytorch, which takes bare weights, takes them from one file
        return plan_shards(items, sys.maxsize)
    return plan_shards(items, SHARD_BYTES, ranks.world().size)


def finish_vectors(
    writers: Sequence[FolderWriter], config: Path | None, first: int = 0
) -> dict[str, FileRecord]:
    """Complete the folders of vectors and return the records of their files.

    Rank 0 does it. The other processes wait.

    Args:
        first: The index of the first vector in the store.
    """
    world = ranks.world()
    records = world.collect([writer.whole() for writer in writers])

    def finish() -> dict[str, FileRecord]:
        files = {}
        for index, (writer, *written) in enumerate(zip(writers, *records, strict=True), first):
            for name, record in writer.finish(written).items():
                files[f"{writer.folder.name}/{name}"] = FileRecord.model_validate(record)
            files |= copy_config(config, writer.folder, index, tokenizer=not writer.coded)
        return files

    return world.share(finish)


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
