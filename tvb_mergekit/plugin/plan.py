"""One merge from its plan to its report: the tensors of the merged model as items of our passes."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from mergekit.architecture import WeightInfo
from mergekit.common import ModelReference, dtype_from_name
from mergekit.options import MergeOptions
from torch import Tensor

from tvb_mergekit.core.basis import Basis, Combination, Tunables, warnings
from tvb_mergekit.core.gram import check_copied
from tvb_mergekit.core.settings import VARYING_KEYS
from tvb_mergekit.errors import UserError, refusing
from tvb_mergekit.plugin.recipe import Recipe
from tvb_mergekit.plugin.sources import Load, Parts, parts_of
from tvb_mergekit.store import report
from tvb_mergekit.store.facts import Facts
from tvb_mergekit.store.store import over_store
from tvb_mergekit.tensors import merging, ranks
from tvb_mergekit.tensors.checkpoint import DTYPES, Checkpoint
from tvb_mergekit.tensors.merging import check_matrices
from tvb_mergekit.tensors.stream import Engine, Item, Part, Sink, Weights
from tvb_mergekit.tensors.taskset import (
    EXCLUDED,
    UNCHANGED,
    TaskSet,
    check_missing,
    why_left_out,
)

LOG = logging.getLogger(__name__)


@dataclass
class MergedTensors:
    """The tensors of the merged model, and the facts found while they are made.

    Attributes:
        checkpoints: The base's first.
        saved_dtype: The dtype to which mergekit casts everything that it writes.
        items: In the order of the base's files.
        left_out: Tensor -> reason why it stays the base's, or is not written.
        same_as: The base's second names of tensors -> the name that counts.
        tunables: `lambda`, `alpha`, `density` -> all values of it.
        changed: The tensors that count and that a tokenizer changes.
        zeros: Tensors of the base that take part although no adapter changes them.
        unchanged: Other tensors that no adapter changes -> their elements.
    """

    recipe: Recipe
    checkpoints: Mapping[ModelReference, Weights]
    out_dtype: str | None
    saved_dtype: str | None = None
    items: Sequence[Item] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    same_as: dict[str, str] = field(default_factory=dict)
    tunables: dict[str, set[float]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    zeros: Collection[str] = ()
    unchanged: dict[str, int] = field(default_factory=dict)
    _first: dict[tuple[str | None, ...], Item] = field(default_factory=dict)

    def fill(
        self,
        planned: Iterable[tuple[WeightInfo, Any]],
        tokenizer: Any,
        options: MergeOptions,
        extra: Mapping[str, str],
    ) -> None:
        """Make an item of each planned tensor that the base has; see `parts_of`.

        Args:
            extra: Other tensors that the base lacks -> a model that has them.

        Raise UserError if shapes differ, or if models lack most of the base.
        """
        base = self.recipe.base
        tensors = self.checkpoints[base].tensors
        made, lacking = [], dict(extra)
        for weight, task in planned:
            parts, load, changes = parts_of(self.checkpoints, weight, task, tokenizer, options)
            if parts[base] is not None:
                made.append(self._item(weight, dict(task.parameters.items()), parts, load, changes))
            elif having := [str(model) for model, part in parts.items() if part]:
                lacking[weight.name] = having[0]
        for name, model in lacking.items():
            self.left_out[name] = f"in {model}, but not in the base; not written"

        def place(item: Item) -> tuple[str, int]:
            name = item.base.name if item.base else None
            return ("", 0) if name is None else (tensors[name].shard, tensors[name].offset or 0)

        self.items = sorted(made, key=place)
        every = (i for i in self.items if i.base is not None and i.base.dtype.is_floating_point)
        shapes = {i.name: i.shape for i in every if self.left_out.get(i.name) != EXCLUDED}
        others = {}
        for task, model in zip(self.recipe.tasks, self.recipe.models, strict=True):
            held = self.checkpoints[model].tensors
            others[task] = {n: held[n].shape for n in lacking if n in held and held[n].stored}
        for line in check_missing(self.left_out, shapes, others):
            LOG.warning("%s", line)

    def _item(
        self,
        weight: WeightInfo,
        values: Mapping[str, Any],
        parts: Parts,
        whole: Load | None,
        changes: bool,
    ) -> Item:
        recipe, name = self.recipe, weight.name
        base, *models = (parts[model] for model in recipe.every)
        assert base is not None
        absent = None
        if recipe.bases is not None:  # by the base's or the merged model's name
            left_out = recipe.bases.facts.left_out
            absent = left_out.get(str(base.name), left_out.get(name, "not in the store"))
        rule = functools.partial(why_left_out, name, recipe.settings, recipe.tasks, absent=absent)
        reason = rule(base, models)
        if reason == UNCHANGED and base.name in self.zeros:
            reason = None
        if recipe.bases is not None and reason is None and changes:
            raise UserError(
                f"tensor `{name}`: the recipe's tokenizer changes it, and {recipe.bases.path} has "
                "the base's own vocabulary: use `tokenizer_source: base` as it is, or `exclude`"
            )
        load: Callable[[], Sequence[Tensor]] | None = None
        if whole is not None and not (reason and base.shape):
            load = functools.partial(whole, reason is not None)
            some = [base] if reason else [base, *(part for part in models if part)]
            found = zip(some, load(), strict=True)
            base, *rest = (replace(p, dtype=t.dtype, shape=tuple(t.shape)) for p, t in found)
            models = [*rest]
            reason = reason or rule(base, models)
        if reason is not None:
            self.left_out[name] = reason
            models = []
        if reason == UNCHANGED:
            place = self.checkpoints[recipe.base].canonical(base.name) if base.name else name
            self.unchanged[place] = math.prod(base.shape or ())
        assert base.shape is not None
        inputs = [part for part in models if part is not None]
        # All parts of a changed tensor are loaded in one dtype, a store's too.
        out = self._dtype(weight, (changes and parts[recipe.base]) or base, inputs)
        item = Item(name, base.shape, base, tuple(inputs), out, load=load)
        if reason is None:
            counted, tunables = self._count_once(item), self._tunables(name, values)
            item = replace(item, counted_as=counted, tunables=tunables)
            if counted == name and changes:
                self.changed.add(name)
        return item

    def _dtype(self, weight: WeightInfo, base: Part, inputs: Sequence[Part]) -> torch.dtype:
        forced, dtypes = weight.force_dtype, (self.out_dtype, self.saved_dtype)
        wanted, saved = (dtype_from_name(forced or dtype) for dtype in dtypes)
        # A store's dtype is not the output's, and integers are never cast to a float.
        weights = [part.dtype for part in inputs if part.holds == "weight"]
        out = saved or (wanted if base.dtype.is_floating_point else None)
        out = out or functools.reduce(torch.promote_types, weights, base.dtype)
        if out not in DTYPES.values():
            raise UserError(f"tensor `{weight.name}`: safetensors hold no {out}")
        return out

    def _tunables(self, name: str, given: Mapping[str, Any]) -> Tunables:
        """The keys that may vary, resolved for this tensor, and noted for the report."""
        for key in VARYING_KEYS:
            if (value := given.get(key)) is not None:
                self.tunables.setdefault(key, set()).add(value)
            elif key in given:
                raise UserError(
                    f"`{key}` has no value for tensor `{name}`, which matches none of its filters; "
                    "add an entry without `filter`"
                )
        return Tunables.of(given)

    def _count_once(self, item: Item) -> str:
        """The name under which a tensor counts in the Gram matrix: its own, or that of the first
        tensor with the same stored names."""
        order = self.recipe.every
        names = [part.name for part in item.parts[: len(order)]]
        place = tuple(
            None if name is None else self.checkpoints[model].canonical(name)
            for model, name in zip(order, names, strict=True)
        )
        if None in place:
            place = (item.name, *place)
        other = self._first.setdefault(place, item)
        if other is not item:  # so the base has both
            self.same_as[str(names[0])] = str(other.parts[0].name)
            reason = f"the same tensor as {other.name}: merged with it, counted once"
            self.left_out[item.name] = reason
        return other.name


@dataclass
class Plan:
    """One merge from its plan to its report.

    Attributes:
        tokenizer: mergekit's `TokenizerInfo` of the merged model, if the recipe asks for one.
        config: The merged model's configuration.
        built: The basis, after `build`.
        learned: A merge of the bases by statistics of the models instead of by the recipe's method:
            it has `method`, `merge_into(plan, sink, items)` and `write(folder)`.
    """

    recipe: Recipe
    options: MergeOptions
    engine: Engine
    tensors: MergedTensors
    tokenizer: Any = None
    architecture: Any = None
    config: Any = None
    built: Combination | None = None
    learned: Any = None

    @property
    def base(self) -> Checkpoint:
        base = self.tensors.checkpoints[self.recipe.base]
        assert isinstance(base, Checkpoint)
        return base

    @property
    def basis(self) -> Combination:
        assert self.built is not None
        return self.built

    @property
    def output_bytes(self) -> int:
        return sum(item.written for item in self.tensors.items)

    @functools.cached_property
    def tasks(self) -> TaskSet:
        """The task vectors, with the tensors that count."""
        recipe, tensors, bases = self.recipe, self.tensors, self.recipe.bases
        sources = [tensors.checkpoints[model] for model in recipe.models]
        counted = [item for item in self.tensors.items if item.counted_as == item.name]
        names = str(recipe.base), [recipe.shown(model) for model in recipe.models]
        given = recipe.settings, recipe.tasks, recipe.weights, counted, self.base, *names, sources
        tasks = TaskSet(*given, tensors.left_out, tensors.same_as, dtype=tensors.out_dtype)
        tasks.unchanged = sum(tensors.unchanged.values())
        if bases is not None and not tensors.changed:
            # The store knows G where the same tensors count.
            stored = (part.name for item in counted for part in item.inputs[:1])
            if {bases.stored_name(name) for name in stored} == set(bases.facts.tensors):
                tasks.sums = bases.sums(recipe.order)
        return tasks

    @refusing()
    def build(self, inner: bool = False) -> Combination:
        """Build the basis, and check the tensors that stay the base's.

        Args:
            inner: By the Gram matrix, also if the merge needs only what any matrix gives.

        Raise UserError for NaN or infinity, or a zero task vector.
        """
        settings, store = self.recipe.settings, self.recipe.store
        check_matrices(settings, self.tasks.items)
        left = [item for item in self.tensors.items if item.counted_as is None]
        excluding = [settings, *([] if store is None else [store.settings])]
        rank, size = ranks.place()
        for item in map(Item.loaded, left[rank::size]):
            assert item.base is not None
            tensor = item.whole(item.base)
            check_copied(item.name, tensor, any(s.excludes(item.name) for s in excluding))
        if store is None:
            self.built = merging.build_basis(self.tasks, self.engine, inner=inner)
        else:
            self.built = over_store(store, self.tasks, self.engine)
        return self.built

    def merge_into(self, sink: Sink, items: Sequence[Item]) -> None:
        """Give `sink` the merged tensors. Raise UserError as `build`, or if a result overflows."""
        if self.learned is not None:
            self.learned.merge_into(self, sink, items)
        else:
            merging.merge_items(self.basis, items, sink, self.engine)
        self.tasks.check_unchanged()
        self.warn()

    def warn(self) -> None:
        """Warn of suspicious task vectors, by the norms and, if known, G."""
        if isinstance(self.basis, Basis):
            models = dict(zip(self.basis.tasks, self.tasks.models, strict=True))
            for line in warnings(self.basis, models):
                LOG.warning("%s", line)

    def report(self) -> tuple[Facts, Mapping[str, Tensor]]:
        """basis.json and basis.safetensors of the merge."""
        learned, store = self.learned, self.recipe.store
        tunables = self.tensors.tunables if learned is None else {}
        method = {} if learned is None else {"method": learned.method}
        facts = report.facts(self.tasks, self.basis, tunables, store.facts if store else None)
        return facts.model_copy(update=method), (store or cast(Basis, self.basis)).tensors
