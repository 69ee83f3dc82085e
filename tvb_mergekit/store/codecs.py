"""The forms of a store's vectors: dense numbers, models without loss, samples, adapters' factors.

`encode` writes files of vectors and returns the squared norm of what each loses of its input;
`decode` opens one as named tensors; `bytes` says how many bytes a vector takes at the most.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash
from safetensors.torch import save_file
from torch import Tensor

from tvb_mergekit.core.basis import Step
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.facts import Codec, StoredFile, Vector, record_of
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.adapter import Adapter
from tvb_mergekit.tensors.checkpoint import Checkpoint, metadata_of
from tvb_mergekit.tensors.coding import MANTISSA, Draw, Keeping
from tvb_mergekit.tensors.lossless import Coded
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.peft_files import open_adapter
from tvb_mergekit.tensors.stream import Engine, Item, Weights
from tvb_mergekit.tensors.writing import MARKER, FoldersSink, FolderWriter, Shard

CONFIG = "tvb_adapter"  # key of adapter_config.json in the metadata of a file of factors


@dataclass(frozen=True)
class Writing:
    """Vectors to be written: `matrix` [T, K] holds the factors of the items' inputs in each.

    `sources` are the T models, `vectors` what is known of the K vectors.
    """

    store: Path
    places: Sequence[str]
    vectors: Sequence[Vector]
    items: Sequence[Item]
    matrix: Tensor
    sources: Sequence[Weights]
    seed: int
    engine: Engine

    @property
    def inputs(self) -> list[int]:
        """The one input of each vector, for codecs that keep inputs as they are."""
        return [int(column.nonzero()[0]) for column in self.matrix.T]


class Dense:
    """Numbers of one dtype, of any combination of task vectors."""

    def encode(self, job: Writing) -> list[float]:
        writers = []
        for vector, place in zip(job.vectors, job.places, strict=True):
            path = job.store / place
            plan = [Shard(path.name, tuple(job.items))]
            metadata = {"format": "pt", MARKER: vector.name}
            writers.append(FolderWriter(path.parent, plan, metadata))
        steps = dict.fromkeys((item.name for item in job.items), Step.of(job.matrix))
        mine = job.items[ranks.part_of(job.items)]
        combine_pass(mine, steps, FoldersSink(writers), job.engine, title="Bases")
        ranks.world().collect(None)  # all have written
        return [0.0] * len(writers)

    def decode(self, file: Path, base: Weights | None) -> Weights:
        return Checkpoint.open(file)

    def bytes(self, item: Item, share: float) -> float:
        return item.written


class Kept:
    """Entries of models as they are, all or a random sample, coded next to the base."""

    def encode(self, job: Writing) -> list[float]:
        draws = []
        for vector in job.vectors:
            seed = xxhash.xxh3_64_intdigest(f"{job.seed}/{vector.name}".encode())
            draws.append(Draw(seed, vector.share))
        items = [replace(i, inputs=tuple(i.inputs[k] for k in job.inputs)) for i in job.items]
        world, errors = ranks.world(), list[float]()
        if world.leads:  # blocks are appended in order
            files = [job.store / place for place in job.places]
            errors = Keeping(files, items, draws).write(job.engine)
        return world.led(lambda: errors)

    def decode(self, file: Path, base: Weights | None) -> Weights:
        opened = Coded(file)
        opened.base = base
        return opened

    def bytes(self, item: Item, share: float) -> float:
        return share * item.numel * 2


class Adapters:
    """The factors of a LoRA adapter, and what it trained completely, as PEFT stores them."""

    def encode(self, job: Writing) -> list[float]:
        for number, place in zip(job.inputs, job.places, strict=True):
            adapter = job.sources[number]
            assert isinstance(adapter, Adapter)
            if ranks.world().leads:
                tensors = {n: adapter.file.tensor(n).contiguous() for n in adapter.file.tensors}
                metadata = {"format": "pt", CONFIG: json.dumps(adapter.config)}
                save_file(tensors, job.store / place, metadata)
                (job.store / place).chmod(0o666 & ~_umask())  # safetensors: of the owner alone
        ranks.world().collect(None)
        return [0.0] * len(job.places)

    def decode(self, file: Path, base: Weights | None) -> Weights:
        if base is None:
            return Checkpoint.open(file)
        try:
            config: dict[str, Any] = json.loads(metadata_of(file)[CONFIG])
        except (ValueError, KeyError) as error:
            raise UserError(f"{file}: no configuration of an adapter ({error})") from error
        return open_adapter(file, base, config=config)

    def bytes(self, item: Item, share: float) -> float:
        return 0  # of an adapter, little


CODECS: Mapping[Codec, Dense | Kept | Adapters] = {
    "dense": Dense(),
    "lossless": Kept(),
    "sampled": Kept(),
    "adapter": Adapters(),
}


def open_vector(store: Path, vector: Vector, base: Weights | None) -> Weights:
    """One vector of a store, which is read with `base`."""
    assert vector.weights is not None
    return CODECS[vector.codec].decode(store / vector.weights.file, base)


def encode(job: Writing) -> tuple[list[Vector], list[float]]:
    """Write vectors of any codecs; returns their records, and the squared norms of their errors."""
    made, errors = list(job.vectors), [0.0] * len(job.vectors)
    for codec in dict.fromkeys(vector.codec for vector in job.vectors):
        own = [k for k, vector in enumerate(job.vectors) if vector.codec == codec]
        part = replace(
            job,
            places=[job.places[k] for k in own],
            vectors=[job.vectors[k] for k in own],
            matrix=job.matrix[:, own],
        )
        for k, error in zip(own, CODECS[codec].encode(part), strict=True):
            errors[k] = error
    files = ranks.world().led(lambda: [record_of(job.store, place) for place in job.places])
    return [_with_file(*each) for each in zip(made, files, strict=True)], errors


def _with_file(vector: Vector, file: StoredFile) -> Vector:
    return vector.but(weights=file)


def fits_lossless(items: Sequence[Item], number: int) -> bool:
    """Whether at least half of a model has the base's 16-bit dtype."""
    near = [i for i in items if i.base and i.inputs[number].dtype == i.base.dtype]
    close = sum(i.numel for i in near if i.inputs[number].dtype in MANTISSA)
    models = all(i.inputs[number].holds == "weight" for i in items)
    return models and 2 * close >= sum(i.numel for i in items)


def _umask() -> int:
    import os

    os.umask(mask := os.umask(0))
    return mask
