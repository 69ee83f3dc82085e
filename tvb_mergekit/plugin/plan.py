"""One merge from planning to report: which tensors of the merged model are merged, and how.

mergekit's planner says where each tensor of the merged model comes from and resolves `lambda`,
`alpha` and `density` for it. Our passes replace mergekit's own tasks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import MergeConfiguration
from mergekit.graph import Task
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from torch import Tensor

from tvb_mergekit.core.basis import Basis, Combination, StoredBases, Tunables, warnings
from tvb_mergekit.core.gram import count_not_finite, not_finite
from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.plugin.loaders import MappedLoader, install_loader
from tvb_mergekit.plugin.names import note_untested
from tvb_mergekit.plugin.planner import planned_by_mergekit
from tvb_mergekit.plugin.recipe import Recipe
from tvb_mergekit.plugin.sources import Candidate, candidate
from tvb_mergekit.plugin.stores import refuse_bases
from tvb_mergekit.progress import bars, phase
from tvb_mergekit.refusals import refusing
from tvb_mergekit.settings import VARYING_KEYS
from tvb_mergekit.store import report
from tvb_mergekit.store.facts import Facts
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.checkpoint import DTYPES, Checkpoint
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.layout import accelerators, device_of
from tvb_mergekit.tensors.matrices import check_matrices
from tvb_mergekit.tensors.merging import (
    build_basis,
    check_tables,
    count_if_needed,
    merge_items,
    most_bases,
)
from tvb_mergekit.tensors.stream import Item, Part, Sink, whole_parts
from tvb_mergekit.tensors.taskset import TaskSet, why_left_out

LOG = logging.getLogger(__name__)


class Learned(Protocol):
    """A merge of the bases by statistics of the models instead of by the recipe's method."""

    @property
    def method(self) -> str:
        """Its name, for the report."""

    def merge_into(self, plan: Plan, sink: Sink, items: Sequence[Item]) -> None:
        """Give `sink` the merged tensors."""

    def write(self, folder: Path) -> None:
        """Write what was learned into the folder of the merged model, before it is published."""


@dataclass
class Plan:
    """One merge from planning to report.

    Attributes:
        saved_dtype: The dtype to which mergekit casts everything that it writes.
        tied: All configurations say that the output embedding is the input embedding.
        left_out: Tensor -> reason why it stays the base's, or is not written.
        same_as: The base's second names of tensors -> the name that counts.
        untied: The base ties its output embedding, a model does not.
        tunables: `lambda`, `alpha`, `density` -> all values of it.
        changed: A tensor that counts and that a tokenizer changes -> a checksum of the change.
        tokenizers: mergekit's task for a tokenizer -> the tokenizer.
        config: Of the merged model.
    """

    recipe: Recipe
    options: MergeOptions
    engine: Engine
    loaders: Mapping[ModelReference, MappedLoader]
    out_dtype: str | None
    saved_dtype: str | None = None
    tied: bool = False
    candidates: Sequence[Candidate] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    same_as: dict[str, str] = field(default_factory=dict)
    untied: bool = False
    tunables: dict[str, set[float]] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)
    tokenizer_task: Task[Any] | None = None
    tokenizers: dict[Any, Any] = field(default_factory=dict)
    architecture: Any = None
    config: Any = None
    basis: Combination | None = None
    learned: Learned | None = None
    _items: Sequence[Item] = ()
    _fresh: dict[str, Callable[[], Item]] = field(default_factory=dict)

    @functools.cached_property
    def checkpoints(self) -> dict[ModelReference, Checkpoint]:
        """The base's first."""
        return {model: loader.checkpoint for model, loader in self.loaders.items()}

    @property
    def base(self) -> Checkpoint:
        return self.checkpoints[self.recipe.base]

    def open(self) -> None:
        """Make the tokenizer, if the recipe asks for one, and the items.

        Raises:
            UserError: Shapes differ, or the base lacks a tensor that the model must have.
        """
        if (task := self.tokenizer_task) is not None:
            # mergekit puts new tokens in the order of a set, which each process has another of.
            self.tokenizers[task] = ranks.world().share(task.execute)
        _make_items(self)

    def items(self) -> list[Item]:
        """The tensors of the merged model, as they lie on the disk."""
        # Parts that are loaded whole are held until they are read, so each pass gets its own.
        return [self._fresh[i.name]() if i.name in self._fresh else i for i in self._items]

    @property
    def output_bytes(self) -> int:
        return sum(item.numel * item.out.itemsize for item in self._items)

    @functools.cached_property
    def tasks(self) -> TaskSet:
        """The task vectors, with the tensors that count."""
        recipe, vectors = self.recipe, self.recipe.vectors
        counted = [item for item in self.items() if item.counted_as == item.name]
        tasks = TaskSet(
            recipe.settings,
            recipe.tasks,
            recipe.weights,
            counted,
            self.base,
            str(recipe.base),
            [str(model) for model in recipe.models],
            [self.checkpoints[model] for model in recipe.models],
            self.left_out,
            self.same_as,
            folder=self.base.folder,
            dtype=self.out_dtype,
            built=vectors.built if vectors else (),
            changed=list(self.changed.values()),
        )
        if vectors is not None and not self.changed:
            # The store knows G where the same tensors count.
            held = {part.name for item in counted for part in item.inputs[:1]}
            tasks.sums = vectors.sums() if held == set(vectors.bases.names) else None
        return tasks

    def build(self) -> Combination:
        """The basis, by the passes that it needs. Checks tensors that stay the base's on the way.

        Raises:
            UserError: Too little memory, NaN or infinity, a zero task vector.
        """
        with refusing():
            settings, store = self.recipe.settings, self.recipe.store
            memory = self.engine.memory
            bases = store.bases.num_bases if store else most_bases(settings, len(self.recipe.tasks))
            if memory is not None and settings.method == "basis_ties":
                check_tables(bases, memory)
            check_matrices(settings, self.tasks.items, bases, memory)
            world = ranks.world()
            left = [item for item in self.items() if item.counted_as is None]
            for item in left[world.rank :: world.size]:
                assert item.base is not None
                name = item.base.name
                tensor = item.whole(item.base) if name is None else self.base.tensor(name)
                if tensor.is_floating_point() and any(count_not_finite(tensor)):
                    raise UserError(not_finite(item.name, tensor))
            self.basis = self._combination()
            return self.basis

    def _combination(self) -> Combination:
        recipe, store = self.recipe, self.recipe.store
        if store is None:
            basis = build_basis(self.tasks, self.engine)
            for line in warnings(basis, recipe.model_names):
                LOG.warning("%s", line)
            return basis
        order = list(store.order)
        shares = store.bases.shares[order] * torch.tensor(recipe.weights, dtype=torch.float64)
        mean = [] if store.mean(recipe.settings) is None else [len(order)]
        table = store.bases.reconstruction(store.bases.tasks)[[*order, *mean]]
        stored = StoredBases(recipe.settings, store.bases.tasks, shares, table)
        count_if_needed(stored, self.tasks.items, self.engine)
        return stored

    def merge_into(self, sink: Sink, items: Sequence[Item]) -> None:
        """The last pass: give `sink` the merged tensors, of `build`'s basis."""
        assert self.basis is not None
        if self.learned is not None:
            self.learned.merge_into(self, sink, items)
            return
        merge_items(self.basis, items, sink, self.engine)

    def note_unread(self) -> None:
        """After the merge: name the stored tensors that nothing asked for."""
        read = {model: set(loader.read) for model, loader in self.loaders.items()}
        for item in self._items:
            for model, part in zip(self.loaders, item.parts, strict=False):
                read[model].add(str(part.name))
        unread = {
            name: model
            for model in self.recipe.every
            for name in self.checkpoints[model].tensors
            if name not in read[model]
            and name not in self.left_out
            and (model == self.recipe.base or name not in self.base.tensors)
        }
        for name, model in unread.items():
            self.left_out[name] = (
                f"in {model}, but not used by this recipe or not in mergekit's definition of the "
                "architecture; not written"
            )
        if unread:
            LOG.warning(
                "%d tensors are not in the merged model: not used by this recipe, or unknown to "
                "mergekit's definition of the architecture: %s",
                len(unread),
                listed(list(unread)),
            )

    def report(self) -> tuple[Facts, dict[str, Tensor]]:
        """basis.json and basis.safetensors of the merge."""
        learned, store, basis = self.learned, self.recipe.store, self.basis
        tunables = self.tunables if learned is None else {}
        if isinstance(basis, StoredBases):
            assert store is not None
            facts = report.facts_over_store(
                store.bases.facts,
                basis,
                store=str(store.path),
                basis_weights=basis.shares[torch.tensor(store.order).argsort()].tolist(),
                left_out=self.left_out,
                tunables=tunables,
                dtype=self.out_dtype,
            )
            held = store.bases.tensors
            tensors = {name: held[name] for name in report.MERGED if name in held}
        else:
            assert isinstance(basis, Basis)
            facts, tensors = report.facts(self.tasks, basis, tunables), report.tensors_of(basis)
            if self.recipe.vectors is not None:
                facts = facts.but(from_store=str(self.recipe.vectors.path))
        return facts if learned is None else facts.but(method=learned.method), tensors


@phase("Planning")
def plan_merge(
    recipe: Recipe,
    config: MergeConfiguration,
    options: MergeOptions,
    memory: int | None = None,
    opened: Mapping[ModelReference, Checkpoint] | None = None,
) -> Plan:
    """The plan of a merge of model folders; `Plan.open` completes it.

    Args:
        config: used up, since mergekit rewrites it.
        opened: checkpoints that are open already.

    Raises:
        UserError: what would stop the merge, before anything of a tensor is read.
    """
    LoaderCache().setup(options=options)
    engine = engine_of(options, memory)
    known = {**(opened or {}), **vectors_of(recipe)}
    loaders = {model: install_loader(model, known.get(model)) for model in recipe.every}
    check_base(recipe, loaders[recipe.base].checkpoint)
    plan = Plan(recipe, options, engine, loaders, config.out_dtype or config.dtype)
    plan.saved_dtype = config.out_dtype
    trust = options.trust_remote_code
    plan.tied = all(
        getattr(model.config(trust_remote_code=trust), "tie_word_embeddings", False)
        for model in loaders
    )
    planner = planned_by_mergekit(config, options)
    plan.architecture, plan.config = planner.arch_info, planner.out_model_config
    plan.tokenizer_task = planner._tokenizer_task
    plan.candidates = [
        candidate(plan.checkpoints, weight, task, plan.tokenizers, options)
        for weight, task in planner._tensors
    ]
    return plan


def vectors_of(recipe: Recipe) -> dict[ModelReference, Any]:
    """The models of a recipe that are vectors of a store, as the store has opened them."""
    if (vectors := recipe.vectors) is None:
        return {}
    return {m: vectors.bases.vectors[k] for m, k in zip(recipe.models, vectors.order, strict=True)}


def check_base(recipe: Recipe, opened: Checkpoint) -> None:
    """Raise UserError if the base is a vector of a store, or is not the base of the vectors."""
    refuse_bases([recipe.base.model.path], "`base_model`")
    if recipe.vectors is not None:
        recipe.vectors.bases.check_base(opened, str(recipe.base))


def engine_of(options: MergeOptions, memory: int | None = None) -> Engine:
    """The engine of a merge: every accelerator with --multi-gpu, else the merge's device.

    Raises:
        UserError: This machine has no such device.
    """
    devices = accelerators() if options.multi_gpu else [device_of(options.device or "cpu")]
    return Engine(devices, memory, bars(options.quiet))


def _make_items(plan: Plan) -> None:
    note_untested()
    recipe, base_tensors = plan.recipe, plan.base.tensors
    first: dict[tuple[str | None, ...], Item] = {}
    made = []
    for each in plan.candidates:
        if each.parts[recipe.base] is None:
            if not each.weight.optional:
                raise UserError(
                    f"tensor `{each.weight.name}` is not in the base {recipe.base}; it cannot be "
                    "merged"
                )
            plan.left_out[each.weight.name] = "not in the base; not written"
            continue
        made.append(_item(plan, each, first))

    def place(item: Item) -> tuple[str, int]:
        name = item.base.name if item.base else None
        info = None if name is None else base_tensors[name]
        return ("", 0) if info is None else (info.shard, info.offset or 0)

    plan._items = sorted(made, key=place)
    exclude = recipe.settings.exclude
    if exclude and "excluded by the recipe" not in plan.left_out.values():
        LOG.warning("`exclude: %s` matches no tensor of this merge", exclude)


def _item(plan: Plan, given: Candidate, first: dict[tuple[str | None, ...], Item]) -> Item:
    """One tensor of the merged model, in the dtype that is written.

    Args:
        first: Names in the models' files -> the item that counts in the Gram matrix.
    """
    recipe, name, whole = plan.recipe, given.weight.name, given.whole
    base, *models = _parts(recipe, given)
    assert base is not None
    absent = recipe.vectors.why_absent(base.name, name) if recipe.vectors else None
    rule = functools.partial(why_left_out, name, recipe.settings, recipe.tasks, absent=absent)
    reason = rule(base, models)
    fresh: Callable[[], Sequence[Part]] | None = None
    if whole is not None and not (reason and base.shape):
        load = functools.partial(whole.load, reason is not None)
        fresh = _loaded_whole(load, [base] if reason else [base, *(p for p in models if p)])
        loaded = fresh()
        base, models = loaded[0], list(loaded[1:])
        reason = reason or rule(base, models)
    if reason is not None:
        if recipe.vectors is None and reason.startswith("missing"):
            LOG.warning("tensor `%s` is not in %s: it stays the base's", name, reason[11:])
        plan.left_out[name] = reason
        models = []
    assert base.shape is not None
    inputs = [part for part in models if part is not None]
    more = _means(recipe, name, base.shape, inputs)
    wanted = dtype_from_name(given.weight.force_dtype or plan.out_dtype)
    saved = dtype_from_name(given.weight.force_dtype or plan.saved_dtype)
    # A store's dtype is not the output's, and integers are never cast to a float.
    weights = [part.dtype for part in inputs if part.holds == "weight"]
    out = saved or (wanted if base.dtype.is_floating_point else None)
    out = out or functools.reduce(torch.promote_types, weights, base.dtype)
    if plan.options.safe_serialization and out not in DTYPES.values():
        raise UserError(
            f"tensor `{name}`: safetensors hold no {out}; write .bin files with "
            "--no-safe-serialization"
        )
    item = Item(name, base.shape, base, (*inputs, *more), out)
    if reason is None:
        counted = _count_once(plan, given, item, first)
        tunables = Tunables.of(_values(plan, name, given.values))
        item = replace(item, counted_as=counted, tunables=tunables)
        if counted == name and whole is not None and (change := whole.identity()):
            plan.changed[name] = change
    if fresh is not None:
        plan._fresh[name] = lambda: _refreshed(item, fresh())
    return item


def _parts(recipe: Recipe, given: Candidate) -> list[Part | None]:
    """Where a tensor lies in the base and the models; vectors of a store have its own names."""
    parts = [given.parts[model] for model in recipe.every]
    vectors, base = recipe.vectors, parts[0]
    if vectors is None or base is None:
        return parts
    if (name := vectors.bases.stored_name(base.name)) is None:
        return [base, *[None] * len(recipe.models)]
    shape = None if given.whole else base.shape
    stored = (Part.of(vectors.bases.vectors[index], name, "delta") for index in vectors.order)
    return [base, *(replace(part, shape=shape and part.shape) for part in stored)]


def _loaded_whole(
    load: Callable[[], Sequence[Tensor]], parts: Sequence[Part]
) -> Callable[[], Sequence[Part]]:
    """A function that gives new parts of a tensor that is loaded whole, once now for its shapes."""
    told = [(tensor.dtype, tuple(tensor.shape)) for tensor in load()]
    dtypes = [dtype for dtype, _ in told]
    numel = torch.Size(told[0][1]).numel()

    def fresh() -> list[Part]:
        every = zip(whole_parts(load, dtypes, numel), parts, told, strict=True)
        return [
            replace(new, holds=old.holds, name=old.name, shape=shape)
            for new, old, (_, shape) in every
        ]

    return fresh


def _refreshed(item: Item, parts: Sequence[Part]) -> Item:
    base, *models = parts
    count = len(models)
    return replace(item, base=base, inputs=(*models, *item.inputs[count:]) if item.inputs else ())


def _means(
    recipe: Recipe, name: str, shape: tuple[int, ...], inputs: Sequence[Part]
) -> Sequence[Part]:
    """PCA's mean, an input that is not a model of the recipe."""
    mean = recipe.store.mean(recipe.settings) if recipe.store else None
    if mean is None or not inputs or inputs[0].name is None:
        return ()
    part = Part.of(mean, inputs[0].name, "delta")
    if part.shape != shape:
        raise UserError(
            f"tensor `{name}`: the recipe's tokenizer gives it the shape {list(shape)}, the "
            f"store's mean has {list(part.shape or ())}: use the base's tokenizer as it is, or "
            "leave the tensor out with `exclude`"
        )
    return (part,)


def _values(plan: Plan, name: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys that may vary, resolved for this tensor, and noted for the report."""
    for key in VARYING_KEYS:
        value = values.get(key)
        if value is not None:
            plan.tunables.setdefault(key, set()).add(value)
        elif key in values:
            raise UserError(
                f"`{key}` has no value for tensor `{name}`, which matches none of its filters; add "
                "an entry without `filter`"
            )
    return values


def _count_once(
    plan: Plan, given: Candidate, item: Item, first: dict[tuple[str | None, ...], Item]
) -> str:
    """The name under which a tensor counts in the Gram matrix: its own, or that of the first with
    the same stored tensors."""
    weight, order = given.weight, plan.recipe.every
    names = [part.name for part in item.parts[: len(order)]]
    if weight.tied_names and not plan.tied and names[0] != weight.name:
        plan.untied |= weight.name in names
    place = tuple(
        None if name is None else plan.checkpoints[model].canonical(name)
        for model, name in zip(order, names, strict=True)
    )
    if plan.tied and weight.tied_names:
        place = (weight.tied_names[0],) * len(order)
    if None in place:
        place = (weight.name, *place)
    other = first.setdefault(place, item)
    if other is not item:
        assert other.base is not None
        if place[0] is not None and names[0] is not None and other.base.name is not None:
            plan.same_as[names[0]] = other.base.name
        plan.left_out[item.name] = f"the same tensor as {other.name}: merged with it, counted once"
    return other.name
