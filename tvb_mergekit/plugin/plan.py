"""mergekit's plan of a merge, as the items of our passes: which tensors take part, and how.

mergekit's planner says where each tensor of the merged model comes from and resolves `lambda`,
`alpha` and `density` for it. What it plans to do with them is ours: one pass over all tensors.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from mergekit.architecture import WeightInfo, get_architecture_info
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import ConfigReader, MergeConfiguration, OutputSliceDefinition
from mergekit.graph import Task
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from mergekit.tokenizer import PermutedVocabulary
from mergekit.tokenizer.truncate import TruncatedVocabulary
from pydantic import PrivateAttr
from torch import Tensor

from tvb_mergekit.core.basis import Combination, Tunables
from tvb_mergekit.core.gram import block_budget, count_not_finite, not_finite, shapes_differ
from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.plugin.loaders import MappedLoader, install_loader
from tvb_mergekit.plugin.names import note_untested, replaced
from tvb_mergekit.plugin.recipe import Recipe
from tvb_mergekit.plugin.sources import (
    Changed,
    Planned,
    each,
    graph_sources,
    stored_dtypes,
)
from tvb_mergekit.plugin.stores import Source
from tvb_mergekit.progress import bars, phase
from tvb_mergekit.refusals import refusing
from tvb_mergekit.settings import VARYING_KEYS
from tvb_mergekit.store.facts import Facts
from tvb_mergekit.store.inputs import QUANTIZED
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.checkpoint import DTYPES, Checkpoint
from tvb_mergekit.tensors.layout import accelerators, device_of
from tvb_mergekit.tensors.matrices import check_matrices
from tvb_mergekit.tensors.merging import Job, check_tables, merge_items, most_bases
from tvb_mergekit.tensors.stream import Item, Sink

LOG = logging.getLogger(__name__)


class Learned(Protocol):
    """What merges the bases in the place of the recipe's method: statistics of the models."""

    @property
    def method(self) -> str:
        """Its name, for the report."""

    def merge_into(self, plan: Plan, sink: Sink, items: Sequence[Item]) -> None:
        """Give `sink` the merged tensors."""

    def write(self, folder: Path) -> None:
        """Write what was learned into the folder of the merged model, before it is published."""


@dataclass
class Plan:
    """One merge from planning to report."""

    recipe: Recipe
    options: MergeOptions
    devices: Sequence[torch.device]
    loaders: Mapping[ModelReference, MappedLoader]
    out_dtype: str | None
    saved_dtype: str | None = None  # to which mergekit casts whatever it writes
    tied: bool = False  # all configurations say that the output embedding is the input embedding
    memory: int | None = None  # bytes that a pass may allocate, if the command says so
    tensors: dict[str, Planned] = field(default_factory=dict)  # of the merged model, as they lie
    left_out: dict[str, str] = field(default_factory=dict)  # tensor -> reason
    same_as: dict[str, str] = field(default_factory=dict)  # base's second names -> counted one
    output_bytes: int = 0
    untied: bool = False  # the base ties its output embedding, a model does not
    tunables: dict[str, set[float]] = field(default_factory=dict)  # values of lambda, alpha ...
    tokenizer_task: Task[Any] | None = None
    tokenizers: dict[Any, Any] = field(default_factory=dict)  # that task -> what it made
    architecture: Any = None
    config: Any = None  # of the merged model
    basis: Combination | None = None
    learned: Learned | None = None
    _first: dict[tuple[str | None, ...], Planned] = field(default_factory=dict)

    @functools.cached_property
    def checkpoints(self) -> dict[ModelReference, Checkpoint]:
        return {model: loader.checkpoint for model, loader in self.loaders.items()}

    @property
    def counted(self) -> dict[str, Planned]:
        """The tensors in the Gram matrix."""
        return {name: p for name, p in self.tensors.items() if p.counted_as == name}

    @property
    def budget(self) -> int:
        """Bytes that a pass may allocate."""
        return block_budget() * len(self.devices) if self.memory is None else self.memory

    @property
    def means(self) -> dict[str, Any]:
        """What every pass is given."""
        progress = bars(self.options.quiet)
        return {"devices": self.devices, "budget": self.budget, "progress": progress}

    def items(self) -> list[Item]:
        """The tensors that count, as items to be read."""
        return [planned.item() for planned in self.counted.values()]

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Model -> fingerprint, the base's first."""
        models = (self.recipe.base, *self.recipe.models)
        return {str(model): self.checkpoints[model].fingerprint() for model in models}

    @property
    def changed(self) -> list[str]:
        """What else than the files decides the tensors: how a tokenizer aligns them."""
        changes = [planned.whole for planned in self.counted.values()]
        return [change.identity() for change in changes if isinstance(change, Changed)]

    def key(self) -> dict[str, object]:
        """Everything that G depends on: contents and stamps of the files, and what was summed."""
        models = (self.recipe.base, *self.recipe.models)
        return {
            "fingerprints": list(self.fingerprints.values()),
            "stamps": [self.checkpoints[model].stamp() for model in models],
            "slots": sorted([name, planned.names] for name, planned in self.counted.items()),
            "kept": sorted(p.name for p in self.tensors.values() if p.counted_as is None),
            "changed": self.changed,
        }

    def make_tokenizer(self) -> None:
        """Make the merged model's tokenizer, if the recipe asks for one."""
        if (task := self.tokenizer_task) is not None:
            # mergekit puts new tokens in the order of a set, which each process has another of.
            self.tokenizers[task] = ranks.world().share(task.execute)

    def build(self) -> Combination:
        """The basis, by the passes that it takes; checks what stays the base's on the way."""
        with refusing():
            settings, store = self.recipe.settings, self.recipe.store
            bases = store.bases.num_bases if store else most_bases(settings, len(self.recipe.tasks))
            if self.memory is not None and settings.method == "basis_ties":
                check_tables(bases, self.memory)
            check_matrices(settings, self.items(), bases, self.memory)
            world = ranks.world()
            left = [p for p in self.tensors.values() if p.counted_as is None]
            for planned in left[world.rank :: world.size]:
                tensor = planned.sources[0].load()
                if tensor.is_floating_point() and any(count_not_finite(tensor)):
                    raise UserError(not_finite(planned.name, tensor))
            self.basis = self.recipe.inputs.combination(self)
            return self.basis

    def jobs(self) -> dict[str, Job]:
        """How each tensor that moves is merged, as they lie on the disk."""
        return {
            name: Job(planned.counted_as, planned.tunables)
            for name, planned in self.tensors.items()
            if planned.counted_as is not None and planned.tunables is not None
        }

    def merge_into(self, sink: Sink, items: Sequence[Item]) -> None:
        """The last pass: give `sink` the merged tensors, of `build`'s basis."""
        assert self.basis is not None
        if self.learned is not None:
            self.learned.merge_into(self, sink, items)
            return
        merge_items(self.basis, items, self.jobs(), sink, **self.means)

    def note_unread(self) -> None:
        """After the merge: name the stored tensors that nothing asked for."""
        recipe, base = self.recipe, self.loaders[self.recipe.base]
        read = {model: set(loader.read) for model, loader in self.loaders.items()}
        for planned in self.tensors.values():
            if planned.whole is None:
                for model, name in zip(self.loaders, planned.names, strict=False):
                    read[model].add(str(name))
        unread = {
            name: model
            for model in (recipe.base, *recipe.models)
            for name in self.checkpoints[model].tensors
            if name not in read[model]
            and name not in self.left_out
            and (model == recipe.base or name not in base.checkpoint.tensors)
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
        tunables = self.tunables if self.learned is None else {}
        facts, tensors = self.recipe.inputs.report(
            self, left_out=self.left_out, tunables=tunables, dtype=self.out_dtype
        )
        return facts if self.learned is None else facts.but(method=self.learned.method), tensors


@phase("Planning")
def plan_merge(
    recipe: Recipe, config: MergeConfiguration, options: MergeOptions, memory: int | None = None
) -> Plan:
    """The plan of a merge of model folders. `config` is used up: mergekit rewrites it.

    Raises:
        UserError: what would stop the merge, before anything of a tensor is read.
    """
    LoaderCache().setup(options=options)
    devices = devices_of(options)
    loaders = {model: install_loader(model) for model in (recipe.base, *recipe.models)}
    recipe.inputs.check(recipe.base, loaders[recipe.base].checkpoint)
    plan = Plan(recipe, options, devices, loaders, config.out_dtype or config.dtype, memory=memory)
    plan.saved_dtype = config.out_dtype
    trust = options.trust_remote_code
    plan.tied = all(
        getattr(model.config(trust_remote_code=trust), "tie_word_embeddings", False)
        for model in loaders
    )
    planner = planned_by_mergekit(config, options)
    plan.architecture, plan.config = planner.arch_info, planner.out_model_config
    plan.tokenizer_task = planner._tokenizer_task
    plan_tensors(
        plan,
        (
            (
                weight,
                dict(task.parameters.items()),
                graph_sources(plan.checkpoints, task, trust),
                task.gather_tensors,
            )
            for weight, task in planner._tensors
        ),
    )
    return plan


def planned_by_mergekit(config: MergeConfiguration, options: MergeOptions) -> MergePlanner:
    """mergekit's planner, with its task for each tensor in `_tensors`."""
    from mergekit.merge import _model_out_config  # not above: our hook on it needs this module

    LoaderCache().setup(options=options)
    architecture = get_architecture_info(config, options)
    out = _model_out_config(config, architecture, trust_remote_code=options.trust_remote_code)
    planner = _Planner(config, architecture, options, out)
    with replaced("mergekit.plan:ConfigReader", lambda _original: _Reader):
        planner._plan()  # its plan_in_memory fails for all methods of mergekit's own
    return planner


class _Planner(MergePlanner):
    """mergekit's, whose own cache holds the configurations of 128 models."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        architecture = MergePlanner._model_arch.__wrapped__
        self._model_arch = functools.cache(functools.partial(architecture, self))


class _Reader(ConfigReader):
    """mergekit's, with the same settings in the same order, but a model's are found by its hash:
    mergekit's own compares each model with each, for every tensor."""

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


def devices_of(options: MergeOptions) -> list[torch.device]:
    """Where to compute: every accelerator under --multi-gpu, else the merge's device.

    Raises:
        UserError: there is no such device here.
    """
    return accelerators() if options.multi_gpu else [device_of(options.device or "cpu")]


# One tensor of the merged model as mergekit plans it: what it is, the values of the recipe's keys,
# where it lies in each model, and mergekit's task that gives the inputs (None: they are files).
Candidate: TypeAlias = tuple[WeightInfo, Mapping[str, Any], dict[ModelReference, Source], Any]


def plan_tensors(plan: Plan, candidates: Iterable[Candidate]) -> None:
    """Fill the plan with the tensors of the merged model.

    Raises:
        UserError: shapes differ, or a tensor that the model must have is not in the base.
    """
    note_untested()
    recipe, found = plan.recipe, []
    for weight, values, sources, inputs in candidates:
        base = sources[recipe.base]
        if not base.present:
            if not weight.optional:
                raise UserError(
                    f"tensor `{weight.name}` is not in the base {recipe.base}; it cannot be merged"
                )
            plan.left_out[weight.name] = "not in the base; not written"
            continue
        sources |= recipe.inputs.sources(recipe, plan.checkpoints, base)
        planned = Planned(
            weight.name,
            recipe.tasks,
            [sources[model] for model in (recipe.base, *recipe.models)],
            wanted=dtype_from_name(weight.force_dtype or plan.out_dtype),
            saved=dtype_from_name(weight.force_dtype or plan.saved_dtype),
            holds=recipe.inputs.holds,
        )
        plan.output_bytes += planned.output_bytes
        out = planned.saved or base.dtype
        if plan.options.safe_serialization and out is not None and out not in DTYPES.values():
            raise UserError(
                f"tensor `{weight.name}`: safetensors hold no {out}; write .bin files with "
                "--no-safe-serialization"
            )
        if reason := _why_left_to_base(plan, weight.name, planned):
            plan.left_out[weight.name] = reason
            planned = replace(planned, tasks=(), sources=[base])
        else:
            if weight.tied_names and not plan.tied and base.name != weight.name:
                plan.untied |= weight.name in planned.names
            planned.counted_as = _count_once(plan, weight, planned)
            planned.tunables = Tunables.of(_values(plan, weight.name, values))
            planned.more = recipe.inputs.more(recipe, planned.names[1])
        if isinstance(inputs, PermutedVocabulary | TruncatedVocabulary):
            alone = planned.counted_as is None
            inputs = stored_dtypes(inputs)
            planned.whole = Changed(
                planned.name, inputs, recipe, plan.tokenizers, plan.options, alone
            )
        elif any(source.part is None for source in planned.sources):
            planned.whole = each(planned.sources, plan.options)
        found.append(planned)
    base_tensors = plan.checkpoints[recipe.base].tensors
    if any(None in p.names for p in found):  # converted: sizes are not known yet
        wide = (dtype_from_name(plan.out_dtype) or torch.float32).itemsize
        most = wide * sum(info.numel for info in base_tensors.values())
        plan.output_bytes = max(plan.output_bytes, most)

    def place(planned: Planned) -> tuple[str, int]:
        name = planned.names[0]
        info = None if name is None else base_tensors[name]
        return ("", 0) if info is None else (info.shard, info.offset or 0)

    plan.tensors = {planned.name: planned for planned in sorted(found, key=place)}
    exclude = recipe.settings.exclude
    if exclude and "excluded by the recipe" not in plan.left_out.values():
        LOG.warning("`exclude: %s` matches no tensor of this merge", exclude)


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


def _why_left_to_base(plan: Plan, name: str, planned: Planned) -> str | None:
    """Why a tensor stays the base's, or None if it takes part: the one place that decides."""
    recipe = plan.recipe
    if recipe.settings.excludes(name):
        return "excluded by the recipe"
    base, *sources = planned.sources
    for who, source in zip(("the base", *recipe.tasks), planned.sources, strict=True):
        if source.dtype in QUANTIZED:
            raise UserError(
                f"tensor `{name}` of {who} is stored as {source.dtype}: quantized codes are "
                "no weights; take an unquantized checkpoint, or leave it out with `exclude`"
            )
    missing = [task for task, s in zip(recipe.tasks, sources, strict=True) if not s.present]
    if missing:
        return recipe.inputs.why_missing(missing, base.name, name)
    for task, source in zip(recipe.tasks, sources, strict=True):
        for who, part in (("the base", base), (f"task {task}", source)):
            if part.dtype is not None and not part.dtype.is_floating_point:
                return f"not floating point in {who} ({str(part.dtype).removeprefix('torch.')})"
        if base.shape is not None and source.shape is not None and base.shape != source.shape:
            raise UserError(shapes_differ(name, task, source.shape, base.shape))
    return None


def _count_once(plan: Plan, weight: WeightInfo, planned: Planned) -> str:
    """The name under which a tensor counts in the Gram matrix: its own, or that of the first with
    the same stored tensors."""
    order = (plan.recipe.base, *plan.recipe.models)
    place = tuple(
        None if name is None else plan.checkpoints[model].canonical(name)
        for model, name in zip(order, planned.names, strict=True)
    )
    if plan.tied and weight.tied_names:
        place = (weight.tied_names[0],) * len(order)
    if None in place:
        place = (weight.name, *place)
    first = plan._first.setdefault(place, planned)
    if first is not planned:
        base, counted = planned.names[0], first.names[0]
        if place[0] is not None and base is not None and counted is not None:
            plan.same_as[base] = counted
        plan.left_out[planned.name] = (
            f"the same tensor as {first.name}: merged with it, counted once"
        )
    return first.name
