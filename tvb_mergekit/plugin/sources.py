"""The places of mergekit's planned tensors, mergekit's changes of them at loading, and loaders.

Mapped checkpoints stand for mergekit's loaders during one merge. mergekit's own cache of loaders
lives as long as the process, and would show old weights of a rewritten file. mergekit's loader for
`.bin` shards holds a complete shard of each model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mergekit.architecture import WeightInfo
from mergekit.architecture.conversion import can_convert_checkpoint_keys
from mergekit.common import ModelReference
from mergekit.graph import Executor, TaskUniverse
from mergekit.io.lazy_tensor_loader import LazyTensorLoader, ShardedTensorIndex, ShardInfo
from mergekit.io.tasks import GatherTensors, LoaderCache, LoadTensor
from mergekit.options import MergeOptions
from mergekit.tokenizer import PermutedVocabulary
from mergekit.tokenizer.truncate import TruncatedVocabulary
from torch import Tensor

from tvb_mergekit.atomic import write_file
from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors.adapter import CONFIG
from tvb_mergekit.tensors.checkpoint import Checkpoint, weight_files
from tvb_mergekit.tensors.stream import Part

ORIGIN = "tvb_origin.json"  # in the folder of a fused adapter


@dataclass(frozen=True)
class Candidate:
    """One tensor of the merged model as mergekit plans it. Nothing is read yet.

    Attributes:
        values: The values of the recipe's keys for this tensor.
        parts: Its part of each model, the base first; None: the model lacks it.
        whole: Loads the tensor if mergekit changes it or makes it of others.
    """

    weight: WeightInfo
    values: Mapping[str, Any]
    parts: Mapping[ModelReference, Part | None]
    whole: Changed | Made | None = None


def candidate(
    checkpoints: Mapping[ModelReference, Checkpoint],
    weight: WeightInfo,
    task: Any,
    tokenizer: Any,
    options: MergeOptions,
) -> Candidate:
    """A tensor planned by mergekit. The rules of mergekit's `LoadTensor` find its parts.

    Args:
        checkpoints: The base's first.
        task: mergekit's task that would merge the tensor.
        tokenizer: mergekit's `TokenizerInfo` of the merged model, if the recipe asks for one.
    """
    inputs = task.gather_tensors
    gather = inputs if isinstance(inputs, GatherTensors) else inputs.gather_tensors
    for model in gather.weight_info:
        if model not in checkpoints:
            raise UserError(f"`base_model` of a slice is {model}; a merge has one base")
    parts: dict[ModelReference, Part | None] = {}
    loads: list[Callable[[], Tensor]] = []
    converted = False
    for model, checkpoint in checkpoints.items():
        info = gather.weight_info[model]
        names = [info.name, *(info.aliases or ()), *(info.tied_names or ())]
        if name := next((n for n in names if n in checkpoint.tensors), None):
            parts[model] = Part.of(checkpoint, name)
            loads.append(partial(checkpoint.tensor, name))
            continue
        kind = model.config(trust_remote_code=options.trust_remote_code).model_type
        able = any(can_convert_checkpoint_keys(kind, set(checkpoint.tensors), n) for n in names)
        parts[model] = Part(torch.float32, _unread) if able else None
        loads.append(LoadTensor(model=model, tensor=info.name, aliases=info.aliases).execute)
        converted |= able
    whole: Changed | Made | None = None
    if isinstance(inputs, PermutedVocabulary | TruncatedVocabulary):
        parts = {m: part and replace(part, shape=None) for m, part in parts.items()}
        whole = Changed(weight.name, _stored_dtypes(inputs), checkpoints, tokenizer, options)
    elif converted:
        whole = Made(loads, options)
    return Candidate(weight, dict(task.parameters.items()), parts, whole)


def _unread(start: int, stop: int, buffer: Tensor) -> Tensor:
    raise AssertionError("a tensor that is made of others is loaded whole")


@dataclass(frozen=True)
class Made:
    """A tensor that mergekit makes of other tensors when it loads one of the models."""

    loads: Sequence[Callable[[], Tensor]]
    options: MergeOptions

    def load(self, base_alone: bool) -> Sequence[Tensor]:
        """The base's tensor and, unless it is wanted alone, the models'; in any thread."""
        LoaderCache().setup(options=self.options)  # mergekit has one for each thread
        return [load() for load in (self.loads[:1] if base_alone else self.loads)]


@dataclass(frozen=True)
class Changed:
    """A vocabulary tensor that mergekit's own tasks change before merging; the base first."""

    name: str
    inputs: Any
    checkpoints: Mapping[ModelReference, Checkpoint]
    tokenizer: Any
    options: MergeOptions

    def load(self, base_alone: bool) -> Sequence[Tensor]:
        """The changed tensors, as `Made.load` gives them."""
        LoaderCache().setup(options=self.options)  # mergekit has one for each thread
        # The plan's loaders are closed if nothing is merged. Those of mergekit read no store.
        lacking = {m: c for m, c in self.checkpoints.items() if m not in LoaderCache.loaders}
        LoaderCache.loaders |= {model: MappedLoader(each) for model, each in lacking.items()}
        universe = TaskUniverse()
        wanted = universe.add_task(self.inputs)
        known = {}
        if isinstance(self.inputs, PermutedVocabulary):
            if not base_alone:  # else rows for new tokens may be made up
                self._check_tokens()
            known[universe.add_task(self.inputs.tokenizer_task)] = self.tokenizer
        ((_, tensors),) = Executor([wanted], cached_values=known).run(quiet=True)
        return [tensors[m] for m in [*self.checkpoints][: 1 if base_alone else None]]

    def _check_tokens(self) -> None:
        rows = self.tokenizer.permutations[next(iter(self.checkpoints))]
        vocabulary = self.tokenizer.tokenizer.get_vocab()
        added = [token for token, new in vocabulary.items() if rows.get(new, -1) < 0]
        if added:
            raise UserError(
                f"tensor `{self.name}`: the recipe's tokenizer has {len(added):,} tokens that the "
                f"base lacks (such as {added[0]!r}), so their rows have no task vector; use "
                "`tokenizer_source: base`, or leave the tensor to the base with `exclude`"
            )


def _stored_dtypes(inputs: Any) -> Any:
    """The inputs without mergekit's cast to `dtype` at loading: a task vector formed after a cast
    to 16 bits would be mostly rounding."""
    if isinstance(inputs, GatherTensors):
        return inputs.model_copy(update={"dtype": None})
    return inputs.model_copy(update={"gather_tensors": _stored_dtypes(inputs.gather_tensors)})


class MappedLoader(LazyTensorLoader):
    """mergekit's loader interface over a `Checkpoint`: all shards open, nothing read ahead."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.read: set[str] = set()  # names that a merge asked for
        paths = {name: info.shard for name, info in checkpoint.tensors.items()}
        shards = [ShardInfo(s, [n for n in paths if paths[n] == s]) for s in checkpoint.shards]
        safe = checkpoint.shards[0].endswith(".safetensors")
        index = ShardedTensorIndex(str(checkpoint.folder), safe, paths, shards)
        super().__init__(index, lazy_unpickle=False)

    def get_tensor(
        self,
        key: str,
        device: str = "cpu",
        aliases: list[str] | None = None,
        raise_on_missing: bool = True,
    ) -> Tensor | None:
        for name in (key, *(aliases or ())):
            if name in self.checkpoint.tensors:
                self.read.add(name)
                return self.checkpoint.tensor(name).to(torch.device(device))
        if raise_on_missing:
            raise KeyError(key)
        return None


Loaders = Mapping[ModelReference, MappedLoader]  # the base's first


def fused_folder(model: ModelReference, cache: str) -> Path:
    """The folder of mergekit's fused copy, named by a hash of the paths as they are written."""
    assert model.lora is not None
    return Path(cache, f"{model.model._unique_id()}_{model.lora._unique_id()}")


def files_of(model: ModelReference) -> list[Path]:
    """The local files that a fused copy is made of."""
    assert model.lora is not None
    folders = (model.model.path, model.lora.path)
    files = [Path(folder, name) for folder in folders for name in weight_files(folder)]
    return files + [file for file in [Path(model.lora.path, CONFIG)] if file.is_file()]


def origin_of(files: Sequence[Path]) -> list[list[Any]]:
    """The record of these files; without folders, since a project may be moved with its copies."""
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]


def install_loader(model: ModelReference, opened: Checkpoint | None) -> MappedLoader:
    """Map a model. Unless it is open, download it or fuse its adapter, as mergekit does."""
    if opened is None:
        stock = LoaderCache()
        fused = None if model.lora is None else fused_folder(model, str(stock.lora_cache_dir))
        new = fused is not None and not fused.exists()
        origin = [] if fused is None else origin_of(files_of(model))  # before the files are read
        try:
            merged = model.merged(
                cache_dir=stock.lora_cache_dir,
                trust_remote_code=stock.trust_remote_code,
                lora_merge_dtype=stock.lora_merge_dtype,
            )
        except BaseException:  # mergekit would take an empty folder for the fused copy
            if fused is not None and new:
                shutil.rmtree(fused, ignore_errors=True)
            raise
        if fused is not None and new:
            write_file(fused / ORIGIN, json.dumps(origin).encode())
        opened = Checkpoint.open(merged.local_path(cache_dir=stock.hf_cache_dir))
    LoaderCache.loaders[model] = loader = MappedLoader(opened)
    return loader


@contextmanager
def fresh_loaders() -> Iterator[None]:
    """Forget, before and after a merge, what earlier merges of this process opened."""
    LoaderCache.loaders.clear()
    try:
        yield
    finally:
        LoaderCache.loaders.clear()
