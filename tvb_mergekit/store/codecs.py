"""The ways to store a vector. A new one is a row of `CODECS` and a name in `facts.Vector`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias, cast

import torch
import xxhash
from torch import Tensor

from tvb_mergekit.core.basis import Step
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.facts import Vector, write_tensors
from tvb_mergekit.tensors.adapter import Adapter
from tvb_mergekit.tensors.checkpoint import Checkpoint, metadata_of
from tvb_mergekit.tensors.coding import Coded, Draw, keep
from tvb_mergekit.tensors.output import MARKER, each_into, to_files
from tvb_mergekit.tensors.passes import combine_pass, share_of
from tvb_mergekit.tensors.stream import Engine, Weights
from tvb_mergekit.tensors.taskset import TaskSet

CONFIG = "tvb_adapter"  # key of adapter_config.json in the metadata of a file of factors
Files: TypeAlias = Mapping[Path, Vector]


class Codec(NamedTuple):
    """A way to store vectors."""

    # Writes the combinations `matrix` [T, K] of the inputs to K new files. Only dense numbers may
    # combine several inputs. Returns the relative error of each task vector.
    encode: Callable[[Files, TaskSet, Tensor, Engine], list[float]]
    decode: Callable[[Path, Weights | None], Weights]  # opens a file; some need the base to read it
    bytes: Callable[[Vector], float]  # of an element, at most


def _numbers(files: Files, inputs: TaskSet, matrix: Tensor, engine: Engine) -> list[float]:
    """Write combinations in one dtype, each process its share."""
    dtypes = [getattr(torch, form.dtype) for form in files.values()]
    items = [replace(item, out=dtypes[0]) for item in inputs.items]
    heads = {path: {"format": "pt", MARKER: form.name} for path, form in files.items()}
    sinks = [to_files(p.parent, {p.name: items}, head) for p, head in heads.items()]
    steps = dict.fromkeys(inputs.names, Step.of(matrix))
    combine_pass(share_of(items), steps, each_into(*sinks), engine, title="Bases")
    return [torch.finfo(each).eps / 2 * (each is not torch.float32) for each in dtypes]


def _differences(file: Path, base: Weights | None) -> Weights:
    opened = Checkpoint.open(file)
    opened.holds = "delta"
    return opened


def _entries(files: Files, inputs: TaskSet, matrix: Tensor, engine: Engine) -> list[float]:
    """Write exact entries of single models: all, or a random sample."""
    own = matrix.argmax(0).tolist()
    items = [replace(i, inputs=tuple(i.inputs[k] for k in own)) for i in inputs.items]
    key, seed = xxhash.xxh3_64_intdigest, inputs.settings.seed
    draws = [Draw(key(f"{seed}/{form.name}".encode()), form.share) for form in files.values()]
    return keep({path: form.name for path, form in files.items()}, items, draws, engine)


def _factors(files: Files, inputs: TaskSet, matrix: Tensor, engine: Engine) -> list[float]:
    """Write the factors of single adapters, as PEFT stores them."""
    for (path, form), number in zip(files.items(), matrix.argmax(0).tolist(), strict=True):
        source = cast(Adapter, inputs.sources[number])
        tensors = {name: source.file.tensor(name) for name in source.file.tensors}
        write_tensors(path, tensors, {MARKER: form.name, CONFIG: json.dumps(source.config)})
    return [0.0] * len(files)


def _adapter(file: Path, base: Weights | None) -> Weights:
    if base is None:  # the factors
        return Checkpoint.open(file)
    try:
        return Adapter(file, base, config=json.loads(metadata_of(file).get(CONFIG, "")))
    except ValueError as error:
        raise UserError(f"{file}: no configuration of an adapter ({error})") from error


CODECS = {
    "dense": Codec(_numbers, _differences, lambda form: getattr(torch, form.dtype).itemsize),
    "lossless": Codec(_entries, Coded, lambda form: 2),
    "sampled": Codec(_entries, Coded, lambda form: 2 * form.share),
    "adapter": Codec(_factors, _adapter, lambda form: 0),  # few
}
