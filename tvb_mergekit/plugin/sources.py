"""The places of mergekit's planned tensors, mergekit's changes of them at loading, and loaders.

Our checkpoints stand for mergekit's loaders during one merge. mergekit's own cache of loaders lives
as long as the process, and would show old weights of a rewritten file. mergekit's loader for `.bin`
shards holds a complete shard of each model.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from mergekit.architecture import WeightInfo
from mergekit.architecture.conversion import (
    can_convert_checkpoint_keys,
    convert_checkpoint_tensors,
)
from mergekit.common import ModelReference
from mergekit.graph import Executor, TaskUniverse
from mergekit.io.lazy_tensor_loader import LazyTensorLoader, ShardedTensorIndex
from mergekit.io.tasks import GatherTensors, LoaderCache, LoadTensor
from mergekit.options import MergeOptions
from mergekit.tokenizer import PermutedVocabulary
from mergekit.tokenizer.truncate import TruncatedVocabulary
from torch import Tensor

from tvb_mergekit.errors import UserError
from tvb_mergekit.names import EXPERT, LAYER
from tvb_mergekit.tensors.adapter import Adapter
from tvb_mergekit.tensors.stream import Part, Weights

Parts = Mapping[ModelReference, Part | None]  # of each model, the base first; None: it has none
# Loads a whole tensor of the base and, unless that is wanted alone (True), of the models
Load = Callable[[bool], list[Tensor]]


def parts_of(
    checkpoints: Mapping[ModelReference, Weights],
    weight: WeightInfo,
    task: Any,
    tokenizer: Any,
    options: MergeOptions,
) -> tuple[Parts, Load | None, bool]:
    """The parts of a tensor planned by mergekit. The rules of mergekit's `LoadTensor` find them.

    Args:
        checkpoints: The base's first.
        task: mergekit's task that would merge the tensor.
        tokenizer: mergekit's `TokenizerInfo` of the merged model, if the recipe asks for one.

    Returns:
        The parts, of which nothing is read yet; a function, for any thread, if mergekit makes the
        tensor of others or changes its rows; and whether it changes the rows of a vocabulary.
    """
    inputs = task.gather_tensors
    gather = inputs if isinstance(inputs, GatherTensors) else inputs.gather_tensors
    for model in gather.weight_info:
        if model not in checkpoints:
            raise UserError(f"`base_model` of a slice is {model}; a merge has one base")
    parts: dict[ModelReference, Part | None] = {}
    loads: list[Callable[[], Tensor]] = []
    converted = False
    for model, weights in checkpoints.items():
        info = gather.weight_info[model]
        names = [info.name, *(info.aliases or ()), *(info.tied_names or ())]
        name = next((n for n in names if n in weights.tensors), None)
        adapter = weights if isinstance(weights, Adapter) else None
        stored = name is not None and not (adapter and adapter.loose)
        trust = options.trust_remote_code
        kind = None if stored else model.config(trust_remote_code=trust).model_type
        load = LoadTensor(model=model, tensor=info.name, aliases=info.aliases).execute
        if adapter and not stored and (made := _made_of_changes(adapter, kind, names)):
            parts[model], load = made
            converted = True
        elif name is not None:
            parts[model], load = Part.of(weights, name), partial(weights.tensor, name)
        else:
            able = any(can_convert_checkpoint_keys(kind, set(weights.tensors), n) for n in names)
            parts[model] = Part(torch.float32, _unread) if able else None
            converted |= able
        loads.append(load)
    vocabulary = isinstance(inputs, PermutedVocabulary | TruncatedVocabulary)
    if vocabulary and not _is_as_stored(inputs, tokenizer, parts):
        # mergekit changes weights, not differences.
        parts = {m: part and replace(part, shape=None, holds="weight") for m, part in parts.items()}
        given = weight.name, _stored_dtypes(inputs), checkpoints, tokenizer, options
        return parts, partial(_changed, *given), True
    return parts, partial(_made, loads, options) if converted else None, False


def stored_names(weights: Weights, kind: str | None, planned: Iterable[WeightInfo]) -> set[str]:
    """The stored tensors of a model that mergekit's planned tensors are, or are made of."""
    names, layers = set[str](), defaultdict[str | None, set[tuple[str, tuple[int, ...]]]](set)
    for name, info in weights.tensors.items():
        layers[_layer(name)].add((name, info.shape))
    for weight in planned:
        own = {weight.name, *(weight.aliases or ()), *(weight.tied_names or ())}
        if found := own & weights.tensors.keys():
            names |= found
        elif not weight.optional:  # which mergekit plans by their own names alone
            for name in own:  # among all tensors a search takes minutes
                names |= _origins(kind, frozenset(layers[_layer(name)]), name)
    return names


def _layer(name: str) -> str | None:
    found = LAYER.match(name)
    return found and found[3]


def _made_of_changes(
    adapter: Adapter, kind: str | None, names: Sequence[str]
) -> tuple[Part, Callable[[], Tensor]] | None:
    """A tensor of experts whose difference mergekit would make of others, and its maker.

    The adapter may name experts as X's files do or in the other layout: one by one, or stacked.
    None: X holds the tensor, and no expert of it has another name in the adapter.
    """
    part = Part(torch.float32, _unread, holds="delta")
    for name in names:
        if name in adapter.loose:
            adapter.claimed.add(name)
            return part, partial(adapter.change, name)
    loose = {name: adapter.change for name in adapter.loose}
    held = adapter.tensors
    stored = {} if held.keys() & {*names} else dict.fromkeys(held, adapter.tensor)
    for reads, shapes in ((loose, adapter.loose_shapes), (stored, adapter.shapes)):
        for name in names if reads else ():
            of = _origins(kind, shapes, name)
            experts = {int(number) for each in of for number in EXPERT.findall(each)}
            if of and experts == {*range(len(experts))}:  # mergekit counts them, whatever they are
                adapter.claimed |= of
                if not of & adapter.changed:
                    part = replace(part, factors=adapter.factors_of(next(iter(of))))
                sources = {each: partial(reads[each], each) for each in of}
                return part, partial(convert_checkpoint_tensors, kind, sources, name)
    return None


@functools.lru_cache(4096)
def _origins(
    kind: str | None, stored: frozenset[tuple[str, tuple[int, ...]]], name: str
) -> frozenset[str]:
    """The tensors, with their shapes, that mergekit makes a tensor of; empty if it cannot."""
    shapes, found = dict(stored), set[str]()
    if not can_convert_checkpoint_keys(kind, set(shapes), name):
        return frozenset()

    def take(each: str) -> Tensor:
        found.add(each)
        return torch.empty(shapes[each], device="meta")

    convert_checkpoint_tensors(kind, {each: partial(take, each) for each in shapes}, name)
    return frozenset(found)


def _is_as_stored(inputs: Any, tokenizer: Any, parts: Parts) -> bool:
    """Whether mergekit would change a vocabulary tensor into itself."""
    shapes = {part.shape for part in parts.values() if part is not None}
    shape = shapes.pop() if len(shapes) == 1 else None
    if shape is None or isinstance(inputs, TruncatedVocabulary):
        return shape is not None
    rows = shape[inputs.vocabulary_axis]
    same = {row: row for row in range(rows)}
    padded = rows % (inputs.pad_to_multiple_of or 1)
    kept = all(tokenizer.permutations[model] == same for model in parts)
    return kept and not padded and not dict(inputs.tokens or {})


def _unread(start: int, stop: int, buffer: Tensor) -> Tensor:
    raise AssertionError("a tensor that is made of others is loaded whole")


def _made(
    loads: Sequence[Callable[[], Tensor]], options: MergeOptions, base_alone: bool
) -> list[Tensor]:
    """A tensor that mergekit makes of others; see `Load`."""
    LoaderCache().setup(options=options)  # mergekit has one for each thread
    return [load() for load in (loads[:1] if base_alone else loads)]


def _changed(
    name: str,
    inputs: Any,
    checkpoints: Mapping[ModelReference, Weights],
    tokenizer: Any,
    options: MergeOptions,
    base_alone: bool,
) -> list[Tensor]:
    """A vocabulary tensor that mergekit's own tasks change; see `Load`."""
    LoaderCache().setup(options=options)  # mergekit has one for each thread
    # The plan's loaders are closed if nothing is merged. Those of mergekit read no store.
    give_loaders({m: c for m, c in checkpoints.items() if m not in LoaderCache.loaders})
    universe = TaskUniverse()
    wanted, known = universe.add_task(inputs), {}
    if isinstance(inputs, PermutedVocabulary):
        rows = tokenizer.permutations[next(iter(checkpoints))]
        vocabulary = tokenizer.tokenizer.get_vocab()
        added = [token for token, new in vocabulary.items() if rows.get(new, -1) < 0]
        if added and not base_alone:  # rows of a tensor that is left to the base may be made up
            raise UserError(
                f"tensor `{name}`: the recipe's tokenizer has {len(added):,} tokens that the "
                f"base lacks (such as {added[0]!r}), so their rows have no task vector; use "
                "`tokenizer_source: base`, or leave the tensor to the base with `exclude`"
            )
        known[universe.add_task(inputs.tokenizer_task)] = tokenizer
    ((_, tensors),) = Executor([wanted], cached_values=known).run(quiet=True)
    return [tensors[m] for m in [*checkpoints][: 1 if base_alone else None]]


def _stored_dtypes(inputs: Any) -> Any:
    """The inputs without mergekit's cast to `dtype` at loading: a task vector formed after a cast
    to 16 bits would be mostly rounding."""
    if isinstance(inputs, GatherTensors):
        return inputs.model_copy(update={"dtype": None})
    return inputs.model_copy(update={"gather_tensors": _stored_dtypes(inputs.gather_tensors)})


class MappedLoader(LazyTensorLoader):
    """mergekit's loader interface over a model: each tensor is read when it is asked for."""

    def __init__(self, checkpoint: Weights) -> None:
        self.checkpoint = checkpoint
        paths = {name: info.shard for name, info in checkpoint.tensors.items()}
        index = ShardedTensorIndex(str(checkpoint.folder), True, paths, shards=[])
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
                return self.checkpoint.whole(name).to(torch.device(device))
        if raise_on_missing:
            raise KeyError(key)
        return None


def give_loaders(held: Mapping[ModelReference, Weights]) -> None:
    """Let mergekit find our loaders in place of its own, which would fuse adapters."""
    LoaderCache.loaders |= {model: MappedLoader(weights) for model, weights in held.items()}
