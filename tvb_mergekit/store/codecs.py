"""The forms of a store's vectors: dense numbers, models without loss, samples, adapters' factors.

`encode` writes a file for each vector, the combinations `matrix` [T, K] of the T inputs, and
returns the squared norm of the error of each code. `decode` opens one as named tensors. `bytes` is
the size of one tensor, at the most. The metadata of a file name its vector.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import xxhash
from torch import Tensor

from tvb_mergekit.core.basis import Step
from tvb_mergekit.errors import UserError
from tvb_mergekit.store import STORE
from tvb_mergekit.store.facts import Codec, Vector
from tvb_mergekit.store.files import write_tensors
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.adapter import Adapter
from tvb_mergekit.tensors.checkpoint import RESTORE, Checkpoint, metadata_of
from tvb_mergekit.tensors.coding import MANTISSA, Coded, Draw, keep
from tvb_mergekit.tensors.output import MARKER, FolderWriter, into
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.stream import Engine, Item, Weights
from tvb_mergekit.tensors.taskset import TaskSet

CONFIG = "tvb_adapter"  # key of adapter_config.json in the metadata of a file of factors


class Dense:
    """Numbers of one dtype, of any combination of task vectors."""

    def encode(
        self, files: Mapping[Path, Vector], inputs: TaskSet, matrix: Tensor, engine: Engine
    ) -> list[float]:
        writers, items = [], inputs.items
        for path, vector in files.items():
            metadata = {"format": "pt", MARKER: vector.name}
            writers.append(FolderWriter(path.parent, {path.name: items}, metadata))
        steps = dict.fromkeys((item.name for item in items), Step.of(matrix))
        mine = ranks.share_of(items)
        combine_pass(mine, steps, into(*writers), engine, title="Bases")
        ranks.world().collect(None)  # all have written
        return [0.0] * len(writers)

    def decode(self, file: Path, base: Weights | None) -> Weights:
        return Checkpoint.open(file)

    def bytes(self, item: Item, share: float) -> float:
        return item.written


class Kept:
    """Entries of models as they are, all or a random sample, coded next to the base."""

    def encode(
        self, files: Mapping[Path, Vector], inputs: TaskSet, matrix: Tensor, engine: Engine
    ) -> list[float]:
        draws = []
        for vector in files.values():
            seed = f"{inputs.settings.seed}/{vector.name}".encode()
            draws.append(Draw(xxhash.xxh3_64_intdigest(seed), vector.share))
        own = models_of(matrix)
        items = [replace(i, inputs=tuple(i.inputs[k] for k in own)) for i in inputs.items]
        return keep({p: v.name for p, v in files.items()}, items, draws, engine)

    def decode(self, file: Path, base: Weights | None) -> Weights:
        return Coded(file, base)

    def bytes(self, item: Item, share: float) -> float:
        return share * item.numel * 2


class Adapters:
    """The factors of a LoRA adapter, and its complete tensors, as PEFT stores them."""

    def encode(
        self, files: Mapping[Path, Vector], inputs: TaskSet, matrix: Tensor, engine: Engine
    ) -> list[float]:
        for number, (file, vector) in zip(models_of(matrix), files.items(), strict=True):
            adapter = inputs.sources[number]
            assert isinstance(adapter, Adapter)
            tensors = {name: adapter.file.tensor(name) for name in adapter.file.tensors}
            config = json.dumps(adapter.config)
            write_tensors(file, tensors, {MARKER: vector.name, CONFIG: config})
        return [0.0] * len(files)

    def decode(self, file: Path, base: Weights | None) -> Weights:
        if base is None:
            return Checkpoint.open(file)
        try:
            config = json.loads(metadata_of(file)[CONFIG])
        except (ValueError, KeyError) as error:
            raise UserError(f"{file}: no configuration of an adapter ({error})") from error
        return Adapter(file, base, config=config)

    def bytes(self, item: Item, share: float) -> float:
        return 0  # of an adapter, little


KEPT = Kept()
CODECS: Mapping[Codec, Dense | Kept | Adapters] = {
    "dense": Dense(),
    "lossless": KEPT,
    "sampled": KEPT,
    "adapter": Adapters(),
}


def models_of(matrix: Tensor) -> list[int]:
    """The one model of each column, for codecs that keep models as they are."""
    return [int(column.nonzero()[0]) for column in matrix.T]


def open_vector(store: Path, vector: Vector, base: Weights | None) -> Weights:
    """One vector of a store, which is read with `base`. Raise UserError for a file of another."""
    assert vector.weights is not None
    file = store / vector.weights.file
    opened = CODECS[vector.codec].decode(file, base)
    if (name := metadata_of(file).get(MARKER)) != vector.name:
        raise UserError(f"{file}: holds {name!r}, {STORE} says {vector.name!r}; {RESTORE}")
    return opened


def fits_lossless(items: Sequence[Item], number: int) -> bool:
    """Whether at least half of a model has the base's 16-bit dtype."""
    near = [i for i in items if i.base and i.inputs[number].dtype == i.base.dtype]
    close = sum(i.numel for i in near if i.inputs[number].dtype in MANTISSA)
    return 2 * close >= sum(i.numel for i in items)
