"""mergekit's plan with our tasks in it: which tensors take part, and the node that builds the basis.

mergekit plans one task per tensor. For our methods each is replaced: by `MergeTensor`, which also
depends on one `BuildBasis` node, or by `KeepBase` for a tensor that stays the base's. `BuildBasis`
has no inputs in the graph and reads the checkpoints itself, mapped and in bounded blocks: had it
graph inputs, every tensor would stay resident until the basis is known.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import immutables
import torch
import tqdm
from mergekit.architecture import WeightInfo
from mergekit.architecture.conversion import can_convert_checkpoint_keys
from mergekit.common import (
    ModelReference,
    get_torch_accelerator_count,
    get_torch_accelerator_type,
)
from mergekit.graph import Executor, Task, TaskUniverse
from mergekit.io.tasks import GatherTensors, LoadTensor
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.options import MergeOptions
from mergekit.tokenizer import PermutedVocabulary
from mergekit.tokenizer.truncate import TruncatedVocabulary
from torch import Tensor

from tvb_mergekit.basis import Basis, warnings
from tvb_mergekit.checkpoints import Checkpoint
from tvb_mergekit.engine import Tunables, build_basis
from tvb_mergekit.errors import UserError
from tvb_mergekit.gram import Slot, block_budget, count_not_finite, not_finite, shapes_differ
from tvb_mergekit.output import check_disk
from tvb_mergekit.plugin.loaders import install_loader
from tvb_mergekit.plugin.reading import Recipe, read_recipe
from tvb_mergekit.plugin.refusals import refusing
from tvb_mergekit.plugin.tasks import BuildBasis, KeepBase, MergeTensor, torch_dtype
from tvb_mergekit.recipe import METHODS, VARYING_KEYS

LOG = logging.getLogger(__name__)

Loads = Callable[[], tuple[Tensor, Sequence[Tensor]]]


@dataclass(frozen=True)
class Source:
    """One model's part in one tensor: where it is and how to get it (CPU, mapped if possible)."""

    name: str | None  # in the model's files; None where mergekit converts other tensors into it
    present: bool
    shape: tuple[int, ...] | None  # None: known only when loaded
    dtype: torch.dtype | None
    nbytes: int
    load: Callable[[], Tensor]


@dataclass
class Plan:
    """One merge from planning to report; `basis` is filled when the graph reaches `BuildBasis`."""

    recipe: Recipe
    options: MergeOptions
    checkpoints: Mapping[ModelReference, Checkpoint]
    out_dtype: str | None
    tokenizer: object = None  # what the recipe says of it, and whether embeddings are truncated
    slots: list[Slot] = field(default_factory=list)
    sources: dict[str, list[str | None]] = field(default_factory=dict)  # of each slot
    kept: dict[str, Callable[[], Tensor]] = field(default_factory=dict)  # tensors left to the base
    left_out: dict[str, str] = field(default_factory=dict)  # tensor -> reason
    tokenizers: dict[Any, Any] = field(default_factory=dict)
    counted_as: dict[tuple[str | None, ...], str] = field(default_factory=dict)
    output_bytes: int = 0
    basis: Basis | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)
    tunables: dict[str, set[float]] = field(default_factory=dict)  # values of lambda, alpha ...

    def build(self) -> Basis:
        """Passes 1 and 2; called by the graph, once, on the main thread."""
        with refusing():
            for name, load in self.kept.items():
                if (tensor := load()).is_floating_point() and any(count_not_finite(tensor)):
                    raise UserError(not_finite(name, tensor, [], []))
            self.basis = build_basis(
                self.recipe.settings,
                self.recipe.tasks,
                self.recipe.weights,
                self.slots,
                devices=devices_of(self.options),
                budget=block_budget(),
                key=self._key(),
                models=[str(model) for model in self.recipe.models],
                progress=self._progress,
            )
            for line in warnings(self.basis, self.recipe.model_names):
                LOG.warning("%s", line)
            return self.basis

    def _progress(self, title: str, total: int) -> Callable[[int], object]:
        bar = tqdm.tqdm(
            total=total, desc=title, unit="B", unit_scale=True, disable=self.options.quiet
        )

        def update(nbytes: int) -> None:
            bar.update(nbytes)
            if bar.n >= total:
                bar.close()

        return update

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
            "slots": [[slot.name, slot.numel, self.sources[slot.name]] for slot in self.slots],
            "kept": sorted(self.kept),
            "tokenizer": self.tokenizer,
        }


@dataclass
class Session:
    """One run of a command: where its output goes, and the plan that it will report on."""

    out: str
    plan: Plan | None = None


# Set around mergekit's own functions, which pass nothing through. None: planned from other code.
session: ContextVar[Session | None] = ContextVar("tvb_mergekit_session", default=None)


def devices_of(options: MergeOptions) -> list[torch.device]:
    """Where the Gram pass computes: every accelerator under --multi-gpu, else the merge's device."""
    if options.multi_gpu:
        kind, count = get_torch_accelerator_type(), get_torch_accelerator_count()
        return [torch.device(f"{kind}:{index}") for index in range(count)]
    return [torch.device(options.device or "cpu")]


def wrap_planner(module: ModuleType) -> None:
    """Let `MergePlanner._plan` of `mergekit.plan` replace its tasks for our methods."""
    planner = module.MergePlanner
    original = planner._plan
    if getattr(original, "tvb_mergekit", False):
        return

    def _plan(self: Any) -> None:
        if self.config.merge_method not in METHODS:
            return original(self)
        with refusing():
            recipe = read_recipe(self.config)
            checkpoints = {
                model: install_loader(model) for model in (recipe.base, *recipe.models)
            }
            original(self)
            config = self.config
            tokenizer = (config.tokenizer_source, config.tokenizer)
            plan = Plan(recipe, self.options, checkpoints, config.out_dtype or config.dtype)
            if any(tokenizer) or self.options.unsafe_truncate_embeddings:
                plan.tokenizer = [repr(tokenizer), _tokenizer_stamps(checkpoints.values())]
            self._tensors = replace_tasks(plan, self._tensors, _graph_sources)
            _note_unused(plan)
            if (running := session.get()) is not None:
                check_disk(running.out, plan.output_bytes)
                running.plan = plan

    _plan.tvb_mergekit = True  # type: ignore[attr-defined]
    planner._plan = _plan


def replace_tasks(
    plan: Plan,
    planned: Iterable[tuple[WeightInfo, ExecuteMergeMethodTask]],
    sources_of: Callable[[Plan, WeightInfo, Any], dict[ModelReference, Source]],
) -> list[tuple[WeightInfo, Task[Any]]]:
    """Our tasks for mergekit's, in order; fills the plan on the way.

    Raises:
        UserError: shapes differ, or a tensor that the model must have is not in the base.
    """
    recipe = plan.recipe
    node = BuildBasis(build=plan.build)
    tied = _tied_by_config(plan)
    result: list[tuple[WeightInfo, Task[Any]]] = []
    for weight, task in planned:
        sources = sources_of(plan, weight, task)
        base = sources[recipe.base]
        dtype = weight.force_dtype or plan.out_dtype
        if not base.present:
            if not weight.optional:
                raise UserError(
                    f"tensor `{weight.name}` is not in the base {recipe.base}; it cannot be merged"
                )
            plan.left_out[weight.name] = "not in the base; not written"
            continue
        plan.output_bytes += _output_bytes(base, dtype)
        inputs = _stored_dtypes(task.gather_tensors)
        if reason := _reason_to_keep(plan, weight, sources):
            plan.left_out[weight.name] = reason
            plan.kept[weight.name] = base.load
            kept = KeepBase(
                inputs=_only(inputs, recipe.base), base=recipe.base, dtype=dtype, basis=node
            )
            result.append((weight, kept))
            continue
        _count_once(plan, weight, inputs, sources, tied)
        values = dict(task.parameters.items())
        for key in VARYING_KEYS:
            if values.get(key) is not None:
                plan.tunables.setdefault(key, set()).add(values[key])
        merge = MergeTensor(
            name=weight.name,
            inputs=inputs,
            basis=node,
            base=recipe.base,
            models=recipe.models,
            tunables=Tunables.of(values),
            dtype=dtype,
            device=plan.options.device or "cpu",
        )
        result.append((weight, merge))
    return result


def _reason_to_keep(
    plan: Plan, weight: WeightInfo, sources: Mapping[ModelReference, Source]
) -> str | None:
    """Why a tensor stays the base's, or None if it takes part."""
    recipe = plan.recipe
    if recipe.settings.excludes(weight.name):
        return "excluded by the recipe"
    base = sources[recipe.base]
    missing = [
        task
        for task, model in zip(recipe.tasks, recipe.models, strict=True)
        if not sources[model].present
    ]
    if missing:
        LOG.warning("tensor `%s` is not in %s: it stays the base's", weight.name, _listed(missing))
        return f"missing in {_listed(missing)}"
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
    inputs: Task[Any],
    sources: Mapping[ModelReference, Source],
    tied: bool,
) -> None:
    """Give the tensor a slot in the Gram matrix unless the same stored tensors already have one."""
    recipe = plan.recipe
    order = (recipe.base, *recipe.models)
    place = tuple(
        None if (name := sources[model].name) is None else plan.checkpoints[model].canonical(name)
        for model in order
    )
    if tied and weight.tied_names:
        place = (weight.tied_names[0],) * len(order)
    if None in place:
        place = (weight.name, *place)
    if place in plan.counted_as:
        plan.left_out[weight.name] = (
            f"the same tensor as {plan.counted_as[place]}: merged with it, counted once"
        )
        return
    plan.counted_as[place] = weight.name
    load: Loads
    if isinstance(inputs, PermutedVocabulary | TruncatedVocabulary):
        load = _Changed(weight.name, inputs, recipe, plan.tokenizers)
    else:
        loads = [sources[model].load for model in order]

        def load() -> tuple[Tensor, Sequence[Tensor]]:
            base, *models = [get() for get in loads]
            return base, models

    base = sources[recipe.base]
    numel = torch.Size(base.shape).numel() if base.shape is not None else 0
    plan.slots.append(Slot(weight.name, numel, sum(sources[m].nbytes for m in order), load))
    plan.sources[weight.name] = [sources[model].name for model in order]


@dataclass
class _Changed:
    """A vocabulary tensor that mergekit's own tasks change before merging: run them, whole."""

    name: str
    inputs: Any
    recipe: Recipe
    tokenizers: dict[Any, Any]  # the plan's: building one takes seconds

    def __call__(self) -> tuple[Tensor, Sequence[Tensor]]:
        universe = TaskUniverse()
        wanted = universe.add_task(self.inputs)
        known = {}
        if isinstance(self.inputs, PermutedVocabulary):
            task = self.inputs.tokenizer_task
            if task not in self.tokenizers:
                self.tokenizers[task] = task.execute()
            self._check_tokens(self.tokenizers[task])
            known[universe.add_task(task)] = self.tokenizers[task]
        ((_, tensors),) = Executor([wanted], cached_values=known).run(quiet=True)
        return tensors[self.recipe.base], [tensors[model] for model in self.recipe.models]

    def _check_tokens(self, info: Any) -> None:
        rows = info.permutations[self.recipe.base]
        added = [token for token, new in info.tokenizer.get_vocab().items() if rows[new] < 0]
        if added:
            raise UserError(
                f"tensor `{self.name}`: the recipe's tokenizer has {len(added):,} tokens that the "
                f"base lacks (such as {added[0]!r}), so their rows have no task vector; use "
                "`tokenizer_source: base`, or leave the tensor to the base with `exclude`"
            )


def _graph_sources(
    plan: Plan, weight: WeightInfo, task: ExecuteMergeMethodTask
) -> dict[ModelReference, Source]:
    """Where a tensor planned by `MergePlanner` comes from, by the rules of its `LoadTensor`."""
    inputs = task.gather_tensors
    gather = inputs if isinstance(inputs, GatherTensors) else inputs.gather_tensors
    changed = inputs is not gather
    found = {}
    for model, info in gather.weight_info.items():
        checkpoint = plan.checkpoints.get(model)
        if checkpoint is None:
            raise UserError(f"`base_model` of a slice is {model}; a merge has one base")
        names = [info.name, *(info.aliases or ()), *(info.tied_names or ())]
        name = next((n for n in names if n in checkpoint.tensors), None)
        if name is not None:
            source = mapped(checkpoint, name)
            found[model] = replace(source, shape=None) if changed else source
            continue
        kind = model.config(trust_remote_code=plan.options.trust_remote_code).model_type
        able = any(can_convert_checkpoint_keys(kind, set(checkpoint.tensors), n) for n in names)
        load = LoadTensor(model=model, tensor=info.name, aliases=info.aliases)
        found[model] = Source(None, able, None, None, 0, load.execute)
    return found


def mapped(checkpoint: Checkpoint, name: str | None) -> Source:
    """The tensor `name` of a checkpoint as a source; None: the checkpoint lacks it."""
    if name is None:
        return Source(None, False, None, None, 0, _absent)
    stored = checkpoint.tensors[name]
    load = functools.partial(checkpoint.tensor, name)
    return Source(name, True, stored.shape, stored.dtype, stored.nbytes, load)


def _absent() -> Tensor:
    raise AssertionError("a tensor that a checkpoint lacks takes no part")


def _stored_dtypes(inputs: Any) -> Any:
    """The same inputs without mergekit's cast to `dtype` at loading: a task vector formed after a
    cast to 16 bits would be mostly rounding."""
    if isinstance(inputs, GatherTensors):
        return inputs.model_copy(update={"dtype": None})
    if isinstance(inputs, PermutedVocabulary | TruncatedVocabulary):
        return inputs.model_copy(update={"gather_tensors": _stored_dtypes(inputs.gather_tensors)})
    tensors = {
        model: load.model_copy(update={"dtype": None}) for model, load in inputs.tensors.items()
    }
    return inputs.model_copy(update={"tensors": immutables.Map(tensors)})


def _only(inputs: Any, base: ModelReference) -> Any:
    """The base's part of the inputs; all of them where a tokenizer must see all."""
    if isinstance(inputs, GatherTensors):
        info = {base: dict(inputs.weight_info.items())[base]}
        return inputs.model_copy(update={"weight_info": immutables.Map(info)})
    if isinstance(inputs, PermutedVocabulary | TruncatedVocabulary):
        return inputs
    return inputs.model_copy(update={"tensors": immutables.Map({base: dict(inputs.tensors.items())[base]})})


def _output_bytes(base: Source, dtype: str | None) -> int:
    if base.shape is None or base.dtype is None or not base.dtype.is_floating_point:
        return base.nbytes
    itemsize = (torch_dtype(dtype) or base.dtype).itemsize
    return torch.Size(base.shape).numel() * itemsize


def _tied_by_config(plan: Plan) -> bool:
    """Whether base and models all say that their output embedding is the input embedding."""
    if plan.checkpoints is None:
        return False
    models = (plan.recipe.base, *plan.recipe.models)
    try:
        configs = [m.config(trust_remote_code=plan.options.trust_remote_code) for m in models]
    except (OSError, ValueError):  # mergekit-pytorch: files without a configuration
        return False
    return all(getattr(config, "tie_word_embeddings", False) for config in configs)


def _note_unused(plan: Plan) -> None:
    """Name the stored tensors that mergekit's definition of the architecture does not know."""
    used: dict[ModelReference, set[str]] = {model: set() for model in plan.checkpoints}
    order = (plan.recipe.base, *plan.recipe.models)
    for names in plan.sources.values():
        if None in names:
            return  # a converted architecture: its stored names are not the merge's
        for model, name in zip(order, names, strict=True):
            used[model].add(str(name))
    known = set(plan.left_out) | {slot.name for slot in plan.slots}
    unused = {
        name: model
        for model in order
        for name in plan.checkpoints[model].tensors
        if name not in used[model] and name not in known
    }
    for name, model in unused.items():
        plan.left_out[name] = f"in {model}, but not in mergekit's definition of this architecture"
    if unused:
        name, model = next(iter(unused.items()))
        LOG.warning(
            "%d tensors, such as `%s` of %s, are not in mergekit's definition of this "
            "architecture: they are not merged and not written",
            len(unused),
            name,
            model,
        )


def _tokenizer_stamps(checkpoints: Iterable[Checkpoint]) -> list[list[object]]:
    patterns = ("*token*", "*vocab*", "merges.txt")
    files: list[Path] = []
    for checkpoint in checkpoints:
        files += sorted(f for pattern in patterns for f in checkpoint.folder.glob(pattern))
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
