"""Where the tensors of mergekit's plan come from, and what its own tasks do to them on the way."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from mergekit.architecture.conversion import can_convert_checkpoint_keys
from mergekit.common import ModelReference
from mergekit.graph import Executor, TaskUniverse
from mergekit.io.tasks import GatherTensors, LoaderCache, LoadTensor
from mergekit.options import MergeOptions
from mergekit.tokenizer import PermutedVocabulary
from torch import Tensor

from tvb_mergekit.core.basis import Tunables
from tvb_mergekit.core.gram import check_shapes
from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.recipe import Recipe
from tvb_mergekit.plugin.stores import Source, mapped
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.stream import Holds, Item, whole_parts


def graph_sources(
    checkpoints: Mapping[ModelReference, Checkpoint], task: Any, trust_remote_code: bool
) -> dict[ModelReference, Source]:
    """Where a tensor planned by `MergePlanner` comes from, by the rules of its `LoadTensor`."""
    inputs = task.gather_tensors
    gather = inputs if isinstance(inputs, GatherTensors) else inputs.gather_tensors
    changed = inputs is not gather
    found = {}
    for model, info in gather.weight_info.items():
        checkpoint = checkpoints.get(model)
        if checkpoint is None:
            raise UserError(f"`base_model` of a slice is {model}; a merge has one base")
        names = [info.name, *(info.aliases or ()), *(info.tied_names or ())]
        source = mapped(checkpoint, next((n for n in names if n in checkpoint.tensors), None))
        if source.present:
            found[model] = replace(source, shape=None) if changed else source
            continue
        kind = model.config(trust_remote_code=trust_remote_code).model_type
        able = any(can_convert_checkpoint_keys(kind, set(checkpoint.tensors), n) for n in names)
        load = LoadTensor(model=model, tensor=info.name, aliases=info.aliases)
        found[model] = Source(None, able, None, None, 0, load.execute)
    return found


@dataclass
class Planned:
    """One tensor of the merged model, before anything of it is read.

    Attributes:
        tasks: names of the inputs, for messages; none where the tensor stays the base's.
        sources: the base's first, then those of the tasks.
        wanted: the dtype that the recipe says; None: what the stored ones promote to.
        saved: the dtype to which mergekit casts whatever it writes.
        holds: what the tasks' sources hold.
        counted_as: the name under which it counts in the Gram matrix; None: it stays the base's.
        whole: gives all sources at once where mergekit changes them (`Changed`) or makes them of
            others; None where they are merged as they are stored.
        more: inputs that are no models of the recipe, as they are stored.
    """

    name: str
    tasks: Sequence[str]
    sources: Sequence[Source]
    wanted: torch.dtype | None = None
    saved: torch.dtype | None = None
    holds: Holds = "weight"
    counted_as: str | None = None
    tunables: Tunables | None = None
    whole: Callable[[], Sequence[Tensor]] | None = None
    more: Sequence[Source] = ()
    _known: tuple[tuple[int, ...], list[torch.dtype]] | None = None

    @property
    def names(self) -> list[str | None]:
        """In the models' files, the base's first."""
        return [source.name for source in self.sources]

    @property
    def numel(self) -> int:
        """0 where only loading tells."""
        shape = self.sources[0].shape
        return 0 if shape is None else torch.Size(shape).numel()

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in self.sources)

    @property
    def output_bytes(self) -> int:
        """Of the merged tensor; where only loading tells them, the stored ones."""
        base = self.sources[0]
        if base.dtype is None or not base.dtype.is_floating_point:
            return base.nbytes
        return self.numel * (self.wanted or base.dtype).itemsize or base.nbytes

    def item(self) -> Item:
        """The tensor as an item of a pass, in the dtype that is written; loaded once, and dropped,
        where only that tells its shape.

        Raises:
            UserError: the shapes differ.
        """
        if self.whole is None:
            shape = self.sources[0].shape
            parts = [source.part for source in self.sources if source.part is not None]
            assert shape is not None and len(parts) == len(self.sources)
        else:
            if self._known is None:
                first, *others = self.whole()
                check_shapes(self.name, first, others, self.tasks)
                self._known = tuple(first.shape), [t.dtype for t in (first, *others)]
            shape, dtypes = self._known
            parts = whole_parts(self.whole, dtypes, torch.Size(shape).numel())
        base, *models = parts
        # A store's dtype is not the output's, and what is no float is never cast to one.
        weights = [part.dtype for part in models if self.holds == "weight"]
        out = self.saved or (self.wanted if base.dtype.is_floating_point else None)
        out = out or functools.reduce(torch.promote_types, weights, base.dtype)
        models = [replace(part, holds=self.holds) for part in models]
        for source in self.more:
            if source.shape != shape or source.part is None:
                raise UserError(
                    f"tensor `{self.name}`: the recipe's tokenizer gives it the shape "
                    f"{list(shape)}, the store's mean has {list(source.shape or ())}: use the "
                    "base's tokenizer as it is, or leave the tensor out with `exclude`"
                )
            models.append(source.part)
        return Item(self.name, shape, base, tuple(models), out)


def each(sources: Sequence[Source], options: MergeOptions) -> Callable[[], Sequence[Tensor]]:
    """What loads every source, in any thread."""

    def load() -> Sequence[Tensor]:
        LoaderCache().setup(options=options)  # mergekit has one for each thread
        return [source.load() for source in sources]

    return load


@dataclass
class Changed:
    """A vocabulary tensor that mergekit's own tasks change before merging: run them, whole."""

    name: str
    inputs: Any
    recipe: Recipe
    tokenizers: dict[Any, Any]  # the plan's: building one takes seconds
    options: MergeOptions
    base_alone: bool = False  # the tensor stays the base's: rows for new tokens may be made up

    def identity(self) -> str:
        """What the change depends on besides the checkpoints, for the key of the Gram cache."""
        if not isinstance(self.inputs, PermutedVocabulary):
            return f"{self.name}: truncated"
        info = self._tokenizer(self.inputs.tokenizer_task)
        digest = hashlib.sha256(repr(sorted(info.tokenizer.get_vocab().items())).encode())
        for model in (self.recipe.base, *self.recipe.models):
            digest.update(repr(sorted(info.permutations[model].items())).encode())
        rest = (self.inputs.tokens, self.inputs.pad_to_multiple_of)
        tokens = sorted(rest[0].items()) if rest[0] else []
        return f"{self.name}: {digest.hexdigest()} {tokens!r} {rest[1]}"

    def _tokenizer(self, task: Any) -> Any:
        if task not in self.tokenizers:
            self.tokenizers[task] = task.execute()
        return self.tokenizers[task]

    def __call__(self) -> Sequence[Tensor]:
        """The base's tensor and, unless it is wanted alone, the models'."""
        LoaderCache().setup(options=self.options)  # mergekit has one for each thread
        universe = TaskUniverse()
        wanted = universe.add_task(self.inputs)
        known = {}
        if isinstance(self.inputs, PermutedVocabulary):
            task = self.inputs.tokenizer_task
            info = self._tokenizer(task)
            if not self.base_alone:
                self._check_tokens(info)
            known[universe.add_task(task)] = info
        ((_, tensors),) = Executor([wanted], cached_values=known).run(quiet=True)
        models = () if self.base_alone else self.recipe.models
        return [tensors[model] for model in (self.recipe.base, *models)]

    def _check_tokens(self, info: Any) -> None:
        rows = info.permutations[self.recipe.base]
        added = [
            token for token, new in info.tokenizer.get_vocab().items() if rows.get(new, -1) < 0
        ]
        if added:
            raise UserError(
                f"tensor `{self.name}`: the recipe's tokenizer has {len(added):,} tokens that the "
                f"base lacks (such as {added[0]!r}), so their rows have no task vector; use "
                "`tokenizer_source: base`, or leave the tensor to the base with `exclude`"
            )


def stored_dtypes(inputs: Any) -> Any:
    """The same inputs without mergekit's cast to `dtype` at loading: a task vector formed after a
    cast to 16 bits would be mostly rounding."""
    if isinstance(inputs, GatherTensors):
        return inputs.model_copy(update={"dtype": None})
    return inputs.model_copy(update={"gather_tensors": stored_dtypes(inputs.gather_tensors)})
