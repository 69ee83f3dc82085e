"""Where the tensors of mergekit's plan come from, and what its own tasks do to them on the way."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import immutables
import torch
from mergekit.common import ModelReference
from mergekit.graph import Executor, TaskUniverse
from mergekit.io.tasks import GatherTensors, LoaderCache, LoadTensor
from mergekit.options import MergeOptions
from mergekit.tokenizer import PermutedVocabulary
from mergekit.tokenizer.truncate import TruncatedVocabulary
from torch import Tensor

from tvb_mergekit.checkpoints import Checkpoint
from tvb_mergekit.errors import UserError
from tvb_mergekit.gram import check_shapes
from tvb_mergekit.plugin.reading import Recipe
from tvb_mergekit.plugin.tasks import torch_dtype
from tvb_mergekit.stream import Item, Part, whole_parts


@dataclass(frozen=True)
class Source:
    """One model's part in one tensor: where it is and how to get it (CPU, mapped if possible)."""

    name: str | None  # in the model's files; None where mergekit converts other tensors into it
    present: bool
    shape: tuple[int, ...] | None  # None: known only when loaded
    dtype: torch.dtype | None
    nbytes: int
    load: Callable[[], Tensor]
    part: Part | None = None  # of it as it is stored


def mapped(checkpoint: Checkpoint, name: str | None) -> Source:
    """The tensor `name` of a checkpoint as a source; None: the checkpoint lacks it."""
    if name is None:
        return Source(None, False, None, None, 0, _absent)
    stored = checkpoint.tensors[name]
    load = functools.partial(checkpoint.tensor, name)
    part = Part.of(checkpoint, name)
    return Source(name, True, stored.shape, stored.dtype, stored.nbytes, load, part)


def _absent() -> Tensor:
    raise AssertionError("a tensor that a checkpoint lacks takes no part")


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
        name = next((n for n in names if n in checkpoint.tensors), None)
        if name is not None:
            source = mapped(checkpoint, name)
            found[model] = replace(source, shape=None) if changed else source
            continue
        from mergekit.architecture.conversion import can_convert_checkpoint_keys  # see `lean`

        kind = model.config(trust_remote_code=trust_remote_code).model_type
        able = any(can_convert_checkpoint_keys(kind, set(checkpoint.tensors), n) for n in names)
        load = LoadTensor(model=model, tensor=info.name, aliases=info.aliases)
        found[model] = Source(None, able, None, None, 0, load.execute)
    return found


@dataclass
class Planned:
    """One tensor of the merge, before anything of it is read.

    Attributes:
        tasks: names of the inputs, for messages; none where the tensor stays the base's.
        sources: the base's first, then those of the tasks.
        whole: gives all of them at once where mergekit changes them (`Changed`) or makes them of
            others; None where they are merged as they are stored.
        more: inputs that are no models of the recipe.
    """

    name: str
    tasks: Sequence[str]
    sources: Sequence[Source]
    whole: Callable[[], Sequence[Tensor]] | None = None
    more: tuple[Part, ...] = ()
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

    def item(self) -> Item:
        """The tensor as an item of the stream, in the base's dtype; loaded once, and dropped, where
        only that tells its shape.

        Raises:
            UserError: the shapes differ.
        """
        if self.whole is None:
            shape = self.sources[0].shape
            parts = [source.part for source in self.sources if source.part is not None]
            assert shape is not None and len(parts) == len(self.sources)
        else:
            shape, dtypes = self._learned(self.whole)
            parts = whole_parts(self.whole, dtypes, torch.Size(shape).numel())
        base, *models = parts
        return Item(self.name, shape, base, (*models, *self.more), base.dtype)

    def _learned(
        self, load: Callable[[], Sequence[Tensor]]
    ) -> tuple[tuple[int, ...], list[torch.dtype]]:
        if self._known is None:
            base, *models = load()
            check_shapes(self.name, base, models, self.tasks)
            self._known = tuple(base.shape), [tensor.dtype for tensor in (base, *models)]
        return self._known


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
        added = [token for token, new in info.tokenizer.get_vocab().items() if rows[new] < 0]
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
    if isinstance(inputs, PermutedVocabulary | TruncatedVocabulary):
        return inputs.model_copy(update={"gather_tensors": stored_dtypes(inputs.gather_tensors)})
    tensors = {
        model: load.model_copy(update={"dtype": None}) for model, load in inputs.tensors.items()
    }
    return inputs.model_copy(update={"tensors": immutables.Map(tensors)})


def base_only(inputs: Any, base: ModelReference) -> Any:
    """The base's part of the inputs; all of them where a tokenizer must see all."""
    if isinstance(inputs, GatherTensors):
        info = {base: dict(inputs.weight_info.items())[base]}
        return inputs.model_copy(update={"weight_info": immutables.Map(info)})
    if isinstance(inputs, PermutedVocabulary | TruncatedVocabulary):
        return inputs
    return inputs.model_copy(
        update={"tensors": immutables.Map({base: dict(inputs.tensors.items())[base]})}
    )


def output_bytes(base: Source, dtype: str | None) -> int:
    if base.shape is None or base.dtype is None or not base.dtype.is_floating_point:
        return base.nbytes
    itemsize = (torch_dtype(dtype) or base.dtype).itemsize
    return torch.Size(base.shape).numel() * itemsize
