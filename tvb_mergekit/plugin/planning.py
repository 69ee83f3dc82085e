"""mergekit's plan with our tasks in it: which tensors take part, and the node for the basis.

mergekit plans one task per tensor. For our methods each is replaced: by `MergeTensor`, which also
depends on one `BuildBasis` node, or by `KeepBase` for a tensor that stays the base's. `BuildBasis`
has no inputs in the graph and reads the checkpoints itself, in bounded blocks: had it graph inputs,
every tensor would stay resident until the basis is known.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from mergekit.architecture import WeightInfo
from mergekit.common import (
    ModelReference,
    get_torch_accelerator_count,
    get_torch_accelerator_type,
)
from mergekit.config import ConfigReader, OutputSliceDefinition
from mergekit.graph import Task
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.options import MergeOptions
from mergekit.tokenizer import PermutedVocabulary
from mergekit.tokenizer.truncate import TruncatedVocabulary
from pydantic import PrivateAttr
from torch import Tensor

from tvb_mergekit import ranks, report
from tvb_mergekit.basis import Basis, Combination, StoredBases, warnings
from tvb_mergekit.checkpoints import Checkpoint
from tvb_mergekit.engine import (
    Tunables,
    build_basis,
    check_tables,
    count_if_needed,
    most_bases,
)
from tvb_mergekit.errors import UserError
from tvb_mergekit.gram import block_budget, count_not_finite, not_finite, shapes_differ
from tvb_mergekit.inputs import QUANTIZED
from tvb_mergekit.layout import device_of
from tvb_mergekit.output import check_disk, listed
from tvb_mergekit.plugin.loaders import MappedLoader, install_loader
from tvb_mergekit.plugin.reading import Recipe, read_recipe
from tvb_mergekit.plugin.sources import (
    Changed,
    Planned,
    Source,
    base_only,
    each,
    graph_sources,
    mapped,
    output_bytes,
    stored_dtypes,
)
from tvb_mergekit.plugin.stores import refuse_bases
from tvb_mergekit.plugin.tasks import BuildBasis, KeepBase, MergeTensor, torch_dtype
from tvb_mergekit.progress import bars
from tvb_mergekit.recipe import METHODS, VARYING_KEYS
from tvb_mergekit.refusals import refusing
from tvb_mergekit.store import load as load_store
from tvb_mergekit.stream import Item, Part

LOG = logging.getLogger(__name__)


@dataclass
class Plan:
    """One merge from planning to report; `basis` is filled when the graph reaches `BuildBasis`."""

    recipe: Recipe
    options: MergeOptions
    devices: Sequence[torch.device]
    loaders: Mapping[ModelReference, MappedLoader]
    out_dtype: str | None
    tied: bool = False  # all configurations say that the output embedding is the input embedding
    counted: dict[str, Planned] = field(default_factory=dict)  # in the Gram matrix
    outputs: dict[str, Planned] = field(default_factory=dict)  # every tensor of the merged model
    kept: dict[str, Callable[[], Tensor]] = field(default_factory=dict)  # tensors left to the base
    left_out: dict[str, str] = field(default_factory=dict)  # tensor -> reason
    tokenizers: dict[Any, Any] = field(default_factory=dict)
    counted_as: dict[tuple[str | None, ...], str] = field(default_factory=dict)
    output_bytes: int = 0
    basis: Combination | None = None
    twins: dict[str, str] = field(default_factory=dict)  # base's names: second name -> counted one
    fingerprints: dict[str, str] = field(default_factory=dict)
    untied: bool = False  # the base ties its output embedding, a model does not
    tunables: dict[str, set[float]] = field(default_factory=dict)  # values of lambda, alpha ...
    memory: int | None = None  # bytes that a pass may allocate, if the command says so

    @functools.cached_property
    def checkpoints(self) -> dict[ModelReference, Checkpoint]:
        return {model: loader.checkpoint for model, loader in self.loaders.items()}

    @property
    def budget(self) -> int:
        """Bytes that a pass may allocate."""
        return block_budget() * len(self.devices) if self.memory is None else self.memory

    def items(self) -> list[Item]:
        """The tensors that count, ready to be read."""
        return [planned.item() for planned in self.counted.values()]

    def place(self, planned: Planned) -> tuple[str, int]:
        """Where the base's tensor lies: shard and offset."""
        name = planned.names[0]
        info = None if name is None else self.checkpoints[self.recipe.base].tensors[name]
        return ("", 0) if info is None else (info.shard, info.offset or 0)

    def note_read(self, planned: Planned) -> None:
        """A tensor is read from the checkpoints, and not through mergekit's loaders."""
        for model, name in zip(
            (self.recipe.base, *self.recipe.models), planned.names, strict=False
        ):
            if name is not None:
                self.loaders[model].read.add(name)

    def note_unread(self) -> None:
        """After the merge: name the stored tensors that nothing asked for."""
        base = self.loaders[self.recipe.base]
        unread = {
            name: self.recipe.base for name in base.checkpoint.tensors if name not in base.read
        }
        for model in self.recipe.models:
            names = self.checkpoints[model].tensors
            extra = (n for n in names if n not in base.checkpoint.tensors)
            unread |= {n: model for n in extra if n not in self.loaders[model].read}
        unread = {name: model for name, model in unread.items() if name not in self.left_out}
        for name, model in unread.items():
            self.left_out[name] = (
                f"in {model}, but not used by this recipe or not in mergekit's definition of the "
                "architecture; not written"
            )
        if unread:
            name, model = next(iter(unread.items()))
            LOG.warning(
                "%d tensors, such as `%s` of %s, are not used by this recipe or unknown to "
                "mergekit's definition of the architecture: they are not in the merged model",
                len(unread),
                name,
                model,
            )

    def build(self) -> Combination:
        """Passes 1 and 2; called by the graph, once, on the main thread."""
        with refusing():
            settings, store = self.recipe.settings, self.recipe.store
            if self.memory is not None and settings.method == "basis_ties":
                bases = most_bases(settings, len(self.recipe.tasks))
                check_tables(store.bases.num_bases if store else bases, self.memory)
            world = ranks.world()
            for name, load in list(self.kept.items())[world.rank :: world.size]:
                if (tensor := load()).is_floating_point() and any(count_not_finite(tensor)):
                    raise UserError(not_finite(name, tensor))
            if self.recipe.store is not None:
                stored = self.recipe.store.combination(self.recipe.settings, self.recipe.weights)
                count_if_needed(
                    stored,
                    self.items,
                    devices=self.devices,
                    budget=self.budget,
                    progress=bars(self.options.quiet),
                )
                self.basis = stored
                return stored
            basis = self.basis = build_basis(
                self.recipe.settings,
                self.recipe.tasks,
                self.recipe.weights,
                self.items,
                devices=self.devices,
                budget=self.budget,
                key=self._key(),
                models=[str(model) for model in self.recipe.models],
                progress=bars(self.options.quiet),
            )
            for line in warnings(basis, self.recipe.model_names):
                LOG.warning("%s", line)
            return basis

    def report(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """basis.json and basis.safetensors of the merge."""
        basis, recipe = self.basis, self.recipe
        if isinstance(basis, Basis):
            facts = report.facts(
                basis,
                base_model=str(recipe.base),
                models=recipe.model_names,
                left_out=self.left_out,
                fingerprints=self.fingerprints,
                tunables=self.tunables,
                dtype=self.out_dtype,
            )
            return facts, report.tensors_of(basis)
        assert isinstance(basis, StoredBases) and recipe.store is not None
        bases = recipe.store.bases
        facts = report.facts_over_store(
            bases.facts,
            basis,
            store=str(recipe.store.path),
            basis_weights=basis.shares[torch.tensor(recipe.store.order).argsort()].tolist(),
            left_out=self.left_out,
            tunables=self.tunables,
            dtype=self.out_dtype,
        )
        return facts, {name: t for name, t in bases.tensors.items() if name in report.MERGED}

    @property
    def changed(self) -> list[str]:
        """What else than the files decides the tensors: how a tokenizer aligns them."""
        changes = [planned.whole for planned in self.counted.values()]
        return [change.identity() for change in changes if isinstance(change, Changed)]

    def _key(self) -> dict[str, object]:
        """Everything that G depends on: contents and stamps of the files, and what was summed."""
        opened = [self.checkpoints[m] for m in (self.recipe.base, *self.recipe.models)]
        self.fingerprints = {
            str(model): self.checkpoints[model].fingerprint()
            for model in (self.recipe.base, *self.recipe.models)
        }
        return {
            "fingerprints": list(self.fingerprints.values()),
            "stamps": [checkpoint.stamp() for checkpoint in opened],
            "slots": sorted([name, planned.names] for name, planned in self.counted.items()),
            "kept": sorted(self.kept),
            "changed": self.changed,
        }


@dataclass
class Session:
    """One run of a command: where its output goes, and the plan that it will report on."""

    out: str | None  # None: nothing will be written by the graph
    plan: Plan | None = None


# Set around mergekit's own functions, which pass nothing through. None: planned from other code.
session: ContextVar[Session | None] = ContextVar("tvb_mergekit_session", default=None)


def accelerators() -> list[torch.device]:
    """All of this machine.

    Raises:
        UserError: it has none.
    """
    if not torch.accelerator.is_available():
        raise UserError("--multi-gpu: PyTorch sees no accelerator on this machine; leave it out")
    kind, count = get_torch_accelerator_type(), get_torch_accelerator_count()
    return [torch.device(f"{kind}:{index}") for index in range(count)]


def devices_of(options: MergeOptions) -> list[torch.device]:
    """Where the Gram pass computes: every accelerator under --multi-gpu, else the merge's device.

    Raises:
        UserError: there is no such device here.
    """
    return accelerators() if options.multi_gpu else [device_of(options.device or "cpu")]


def wrap_planner(module: ModuleType) -> None:
    """Let `MergePlanner._plan` of `mergekit.plan` replace its tasks for our methods."""
    planner = module.MergePlanner
    original = planner._plan
    if getattr(original, "tvb_mergekit", False):
        return

    def _plan(self: Any) -> None:
        if self.config.merge_method not in METHODS:
            with refusing():
                refuse_bases(self.config.referenced_models(), self.config.merge_method)
            original(self)
            return
        with refusing():
            recipe = read_recipe(self.config)
            devices = devices_of(self.options)
            loaders = {model: install_loader(model) for model in (recipe.base, *recipe.models)}
            check_store(recipe, loaders)
            with _for_many_models(module, self):
                original(self)
            trust = self.options.trust_remote_code
            dtype = self.config.out_dtype or self.config.dtype
            plan = Plan(recipe, self.options, devices, loaders, dtype)
            plan.tied = _tied_by_config(loaders, trust)
            self._tensors = replace_tasks(
                plan, self._tensors, lambda task: graph_sources(plan.checkpoints, task, trust)
            )
            if (running := session.get()) is not None:
                if running.out is not None:
                    check_disk(running.out, plan.output_bytes)
                running.plan = plan

    _plan.tvb_mergekit = True  # type: ignore[attr-defined]
    planner._plan = _plan


@contextmanager
def _for_many_models(module: ModuleType, planner: Any) -> Iterator[None]:
    """Let mergekit's planner take time in proportion to the number of models.

    For every tensor it compares each model with each, and from 128 models on it reads every
    configuration anew for every layer.
    """
    architecture = type(planner)._model_arch.__wrapped__
    planner._model_arch = functools.cache(functools.partial(architecture, planner))
    reader, module.ConfigReader = module.ConfigReader, _Reader  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.ConfigReader = reader  # type: ignore[attr-defined]


class _Reader(ConfigReader):
    """mergekit's, with the same settings in the same order, found by the model's hash."""

    _of: dict[ModelReference, list[Any]] = PrivateAttr(default_factory=dict)
    _slice: OutputSliceDefinition | None = PrivateAttr(default=None)

    def parameter_sources(self, model: ModelReference | None = None) -> Iterator[Any]:
        if self.slice_out is not None:
            if self._slice is not self.slice_out:
                self._slice, self._of = self.slice_out, {}
                for source in self.slice_out.sources:
                    self._of.setdefault(source.model, []).append(source.parameters)
            if model is not None:
                yield from self._of.get(model, ())
            yield self.slice_out.parameters
        if self.module is not None:
            yield self.module.parameters
        yield self.config.parameters


def check_store(recipe: Recipe, loaders: Mapping[ModelReference, MappedLoader]) -> None:
    """Before anything is read of bases: their files are those that were written, for this base.

    Raises:
        UserError: a checksum differs, or the base is another, or a basis.
    """
    refuse_bases([recipe.base], "`base_model`")
    if recipe.store is not None:
        load_store(recipe.store.path)
        recipe.store.bases.check_base(loaders[recipe.base].checkpoint, str(recipe.base))


def replace_tasks(
    plan: Plan,
    planned: Iterable[tuple[WeightInfo, ExecuteMergeMethodTask]],
    sources_of: Callable[[ExecuteMergeMethodTask], dict[ModelReference, Source]],
) -> list[tuple[WeightInfo, Task[Any]]]:
    """Our tasks for mergekit's, in order; fills the plan on the way.

    Raises:
        UserError: shapes differ, or a tensor that the model must have is not in the base.
    """
    recipe = plan.recipe
    node = BuildBasis(build=plan.build)
    result: list[tuple[WeightInfo, Task[Any]]] = []
    for weight, task in planned:
        sources = sources_of(task)
        base = sources[recipe.base]
        if recipe.store is not None:
            sources |= {
                model: mapped(plan.checkpoints[model], recipe.store.bases.stored_name(base.name))
                for model in recipe.models
            }
        dtype = weight.force_dtype or plan.out_dtype
        if not base.present:
            if not weight.optional:
                raise UserError(
                    f"tensor `{weight.name}` is not in the base {recipe.base}; it cannot be merged"
                )
            plan.left_out[weight.name] = "not in the base; not written"
            continue
        plan.output_bytes += output_bytes(base, dtype)
        inputs = stored_dtypes(task.gather_tensors)
        if reason := _reason_to_keep(plan, weight, sources):
            plan.left_out[weight.name] = reason
            plan.kept[weight.name] = base.load
            kept = KeepBase(
                name=weight.name,
                inputs=base_only(inputs, recipe.base),
                base=recipe.base,
                dtype=dtype,
                basis=node,
            )
            result.append((weight, kept))
            whole = _whole(plan, weight, inputs, [base], base_alone=True)
            plan.outputs[weight.name] = Planned(weight.name, (), [base], whole)
            continue
        counted_as = _count_once(plan, weight, sources)
        names = [sources[model].name for model in recipe.models]
        if plan.tied or not weight.tied_names:
            pass
        elif base.name == weight.name and base.name not in names:
            LOG.warning("`%s` of every model is tied, but not of the base", weight.name)
        elif base.name != weight.name and weight.name in names:
            plan.untied = True
            LOG.warning(
                "`%s` is tied in the base and not in %s: the merged model is written untied",
                weight.name,
                listed(
                    [t for t, name in zip(recipe.tasks, names, strict=True) if name == weight.name]
                ),
            )
        values = dict(task.parameters.items())
        for key in VARYING_KEYS:
            if values.get(key) is not None:
                plan.tunables.setdefault(key, set()).add(values[key])
            elif key in values:
                raise UserError(
                    f"`{key}` has no value for tensor `{weight.name}`, which matches none of its "
                    "filters; add an entry without `filter`"
                )
        mean = recipe.store.mean(recipe.settings) if recipe.store is not None else None
        first = sources[recipe.models[0]]
        more = () if mean is None else (functools.partial(mean.tensor, first.name),)
        every = [sources[model] for model in (recipe.base, *recipe.models)]
        whole = _whole(plan, weight, inputs, every)
        parts = () if mean is None else (Part.of(mean, str(first.name)),)
        output = Planned(weight.name, recipe.tasks, every, whole, parts)
        plan.outputs[weight.name] = output
        if whole is None:
            plan.note_read(output)
        if counted_as == weight.name:
            plan.counted[weight.name] = output
        merge = MergeTensor(
            name=weight.name,
            bases=recipe.store is not None,
            more=more,
            stored=output.item if whole is None else None,
            counted_as=counted_as,
            inputs=inputs,
            basis=node,
            base=recipe.base,
            models=recipe.models,
            tunables=Tunables.of(values),
            dtype=dtype,
            device=plan.options.device or "cpu",
        )
        result.append((weight, merge))
    base_tensors = plan.checkpoints[recipe.base].tensors
    if any(None in p.names for p in plan.counted.values()):  # converted: sizes are not known yet
        wide = (torch_dtype(plan.out_dtype) or torch.float32).itemsize
        plan.output_bytes = max(
            plan.output_bytes, wide * sum(info.numel for info in base_tensors.values())
        )
    for found in (plan.counted, plan.outputs):  # as they lie on the disk
        ordered = sorted(found.values(), key=plan.place)
        found.clear()
        found.update({planned.name: planned for planned in ordered})
    exclude = recipe.settings.exclude
    if exclude and "excluded by the recipe" not in plan.left_out.values():
        LOG.warning("`exclude: %s` matches no tensor of this merge", exclude)
    return result


def _reason_to_keep(
    plan: Plan, weight: WeightInfo, sources: Mapping[ModelReference, Source]
) -> str | None:
    """Why a tensor stays the base's, or None if it takes part."""
    recipe = plan.recipe
    order = (recipe.base, *recipe.models)
    if recipe.settings.excludes(weight.name):
        return "excluded by the recipe"
    base = sources[recipe.base]
    for who, source in zip(("the base", *recipe.tasks), map(sources.get, order), strict=True):
        if source is not None and source.dtype is not None and source.dtype in QUANTIZED:
            raise UserError(
                f"tensor `{weight.name}` of {who} is stored as {source.dtype}: quantized codes are "
                "no weights; take an unquantized checkpoint, or leave it out with `exclude`"
            )
    missing = [
        task
        for task, model in zip(recipe.tasks, recipe.models, strict=True)
        if not sources[model].present
    ]
    if missing and recipe.store is not None:
        left_out = recipe.store.bases.facts["left_out"]
        return str(left_out.get(base.name, left_out.get(weight.name, "not in the store")))
    if missing:
        LOG.warning("tensor `%s` is not in %s: it stays the base's", weight.name, listed(missing))
        return f"missing in {listed(missing)}"
    for task, model in zip(recipe.tasks, recipe.models, strict=True):
        source = sources[model]
        for who, part in (("the base", base), (f"task {task}", source)):
            if part.dtype is not None and not part.dtype.is_floating_point:
                return f"not floating point in {who} ({str(part.dtype).removeprefix('torch.')})"
        if base.shape is not None and source.shape is not None and base.shape != source.shape:
            raise UserError(shapes_differ(weight.name, task, source.shape, base.shape))
    return None


def _count_once(
    plan: Plan,
    weight: WeightInfo,
    sources: Mapping[ModelReference, Source],
) -> str:
    """Give the tensor a place in the Gram matrix unless the same stored tensors already have one.

    Returns the name under which it counts.
    """
    recipe = plan.recipe
    order = (recipe.base, *recipe.models)
    place = tuple(
        None if (name := sources[model].name) is None else plan.checkpoints[model].canonical(name)
        for model in order
    )
    if plan.tied and weight.tied_names:
        place = (weight.tied_names[0],) * len(order)
    if None in place:
        place = (weight.name, *place)
    if place in plan.counted_as:
        twin = plan.counted[plan.counted_as[place]].names[0]
        if place[0] is not None and twin is not None and sources[recipe.base].name is not None:
            plan.twins[str(sources[recipe.base].name)] = twin
        plan.left_out[weight.name] = (
            f"the same tensor as {plan.counted_as[place]}: merged with it, counted once"
        )
        return plan.counted_as[place]
    plan.counted_as[place] = weight.name
    return str(weight.name)


def _whole(
    plan: Plan, weight: WeightInfo, inputs: Any, sources: Sequence[Source], base_alone: bool = False
) -> Callable[[], Sequence[Tensor]] | None:
    """What loads a tensor that is not merged as it is stored."""
    if isinstance(inputs, PermutedVocabulary | TruncatedVocabulary):
        return Changed(weight.name, inputs, plan.recipe, plan.tokenizers, plan.options, base_alone)
    return each(sources, plan.options) if any(source.part is None for source in sources) else None


def _tied_by_config(models: Iterable[ModelReference], trust_remote_code: bool) -> bool:
    """Whether all models say that their output embedding is the input embedding."""
    configs = [model.config(trust_remote_code=trust_remote_code) for model in models]
    return all(getattr(config, "tie_word_embeddings", False) for config in configs)
