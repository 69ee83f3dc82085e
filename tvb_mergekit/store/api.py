"""The library: build, load, add, reconstruct and merge, on state dicts or paths.

A model is a state dict (name -> tensor), a folder in Hugging Face's layout, a weight file, or a
name on the Hub. All models must name their tensors alike. The CPU or `device` does all work.
Weights are read in pieces, so memory does not grow with the models on disk.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit import hub
from tvb_mergekit.core.basis import Tunables
from tvb_mergekit.core.settings import VARYING_KEYS, check_tasks, check_value, resolve_settings
from tvb_mergekit.errors import UserError, check_known, idle
from tvb_mergekit.store.build import add_task, build_store, kept_share
from tvb_mergekit.store.change import remove, undo
from tvb_mergekit.store.export import combine, items_of, task_column
from tvb_mergekit.store.store import Bases, load, over_store
from tvb_mergekit.tensors.checkpoint import Checkpoint, metadata_of
from tvb_mergekit.tensors.merging import build_basis, check_matrices, merge_items, settings_over
from tvb_mergekit.tensors.output import MARKER, in_memory
from tvb_mergekit.tensors.stream import Engine, StateDict, Weights, device_of
from tvb_mergekit.tensors.taskset import UNCHANGED, TaskSet, match

Model = Mapping[str, Tensor] | str | os.PathLike[str]
Device = torch.device | str
StorePlace = Bases | str | os.PathLike[str] | None
__all__ = ["add", "build", "load", "merge", "reconstruct", "remove", "undo"]


def build(
    base: Model,
    models: Mapping[str, Model],
    out: str | os.PathLike[str] | None = None,
    *,
    weights: Mapping[str, float] | None = None,
    dtype: torch.dtype | None = None,
    lossless: bool = False,
    keep: float | None = None,
    device: Device = "cpu",
    **settings: Any,
) -> Bases:
    """Keep T task vectors, or compress them into M bases if `settings` have keys of a basis.

    Warns of tensors that are left out of a task vector, and of a model unlike the others.

    Args:
        models: Task -> its fine-tuned model.
        out: The new store; by default a temporary folder, which goes when nothing needs it.
        weights: Task -> scale of its task vector; 1 by default.
        dtype, lossless, keep: As the options of `tvb build`. Bases, and vectors without `out`, are
            float32 by default.
        settings: the recipe's keys, such as `basis="balanced"`, `num_bases=2`, `exclude="head"`.

    >>> import torch
    >>> base = {"w": torch.zeros(4)}
    >>> models = {"a": {"w": torch.eye(4)[0]}, "b": {"w": torch.eye(4)[1]}}
    >>> bases = build(base, models, basis="balanced", num_bases=1)
    >>> bases.vectors[0].tensor("w")
    tensor([0.5000, 0.5000, 0.0000, 0.0000])
    """
    share, engine = kept_share(lossless, keep, dtype), Engine(device_of(device))
    inputs = _inputs(base, models, weights or {}, settings)
    if dtype is None and not share and (out is None or inputs.settings.basis != "none"):
        dtype = torch.float32
    return _at(out, lambda at: build_store(inputs, at, engine, dtype, share, warnings.warn))


def add(
    bases: StorePlace,
    base: Model,
    model: Model,
    task: str,
    *,
    weight: float = 1.0,
    budget: int | None = None,
    compress: str | None = None,
    dtype: torch.dtype | None = None,
    device: Device = "cpu",
    **settings: Any,
) -> Bases:
    """Add a task: one more vector, or within a budget of M vectors a round of Algorithm 1.

    Doubts are warnings, where `tvb add` needs `--force`.

    Args:
        bases: A store, which is changed, or made if it does not exist. Bases in a temporary folder
            are not changed; None begins new ones.
        budget, compress: As the options of `tvb add`.
        dtype: The dtype of new vectors; existing bases keep theirs.
        settings: The recipe's keys for a new store.
    """
    engine, own = Engine(device_of(device)), dtype or (torch.float32 if bases is None else None)

    def inputs_for(found: Bases | None) -> TaskSet:
        if found is not None and settings:
            raise UserError(f"`{next(iter(settings))}`: the bases are built; leave it out")
        kept = {"exclude": found.settings.exclude} if found and found.settings.exclude else settings
        return _inputs(base, {task: model}, {task: weight}, kept)

    how = engine, budget, compress, own, warnings.warn
    return _at(bases, lambda at: add_task(at, inputs_for, *how))


def _at(place: StorePlace, make: Callable[[Any], Bases]) -> Bases:
    """The bases that `make` gives at a place of the user, or in a folder that goes with them.

    Bases in such a folder are copied first.
    """
    old = place if isinstance(place, Bases) else None
    if place is not None and not (old and old.temporary):
        return make(old.path if old else place)
    folder = tempfile.TemporaryDirectory(prefix="tvb-")
    if old is not None:
        shutil.copytree(old.path, folder.name, copy_function=os.link, dirs_exist_ok=True)
    return replace(make(folder.name), temporary=folder)


def reconstruct(
    bases: Bases, base: Model, task: str, *, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """theta_0 + tau_hat of one task, as a state dict on the CPU (paper Eq. 10: T_hat = B W_d).

    `dtype` is that of the floating-point tensors; the base's own by default.
    """
    items = items_of(bases, base_of(bases, base, dtype), bases.sources, dtype)
    held, sink = in_memory(items)
    combine(items, task_column(bases, task), sink)
    return {name: tensor[0] for name, tensor in held.items()}


def merge(
    bases: Bases,
    base: Model,
    method: str = "basis_ta",
    *,
    dtype: torch.dtype | None = None,
    device: Device = "cpu",
    **parameters: Any,
) -> dict[str, Tensor]:
    """Merge by one of our methods, `basis_ta` ... `basis_negate`, into a state dict on the CPU.

    Args:
        dtype: of the floating-point tensors; the base's own by default.
        parameters: The recipe's keys for merging: `lambda_` for `lambda`, `density`, `exclude`, ...
            Over a store of all tasks also those of bases; without them all task vectors merge.
    """
    found = base_of(bases, base, dtype)
    given = {key.rstrip("_"): value for key, value in parameters.items()}
    settings, engine = bases.merge_settings(method, given), Engine(device_of(device))
    settings = settings_over(found, settings.or_all_tasks() if bases.facts.whole else settings)
    varying = {key: spec.default_for(method) for key, spec in VARYING_KEYS.items()}
    varying |= {key: check_value(key, given[key]) for key in varying if key in given}
    tunables, left = Tunables.of(varying), bases.facts.left_out
    sources = bases.sources if method == "basis_negate" else bases.vectors
    items = items_of(bases, found, sources, dtype)
    for place, item in enumerate(items):
        if item.inputs and not settings.excludes(item.name):
            items[place] = replace(item, tunables=tunables)
    if settings.exclude and not any(settings.excludes(item.name) for item in items):
        warnings.warn(idle("exclude", settings.exclude, [i.name for i in items]), stacklevel=2)
    once = [item for item in items if item.tunables and item.counted_as == item.name]
    tasks = TaskSet(settings, bases.tasks, bases.scales.tolist(), once)
    tasks.sums = None if settings.exclude else bases.sums(range(bases.num_bases))
    tasks.unchanged = sum(found.tensors[n].numel for n in left if left[n] == UNCHANGED)
    made = build_basis(tasks, engine) if bases.facts.whole else over_store(bases, tasks, engine)
    check_matrices(settings, items)
    held, sink = in_memory(items)
    merge_items(made, items, sink, engine)
    return {name: tensor[0] for name, tensor in held.items()}


def base_of(bases: Bases, base: Model | None = None, dtype: torch.dtype | None = None) -> Weights:
    """Open the base, by default the store's. UserError for another, or an integer `dtype`."""
    if dtype is not None and not dtype.is_floating_point:
        raise UserError(f"`dtype` is {dtype}: expected a floating-point torch.dtype")
    base = bases.base_name if base is None else base
    bases.check_base(found := open_model(base), name_of(base))
    return found


def _inputs(
    base: Model, models: Mapping[str, Model], weights: Mapping[str, float], settings: dict[str, Any]
) -> TaskSet:
    """The models as a task set. Warn of tensors that are left out of it."""
    found, tasks = open_model(base), list(models)
    given = {key.rstrip("_"): value for key, value in settings.items()}  # `lambda_` is `lambda`
    check_tasks(tasks, names := [name_of(model, task) for task, model in models.items()])
    for task in weights:
        check_known(task, tasks, f"`weights` names the unknown task {task!r}")
    resolved = resolve_settings("basis_ta", given, tasks).or_all_tasks()
    made, notes = match(found, [*map(open_model, models.values())], tasks, resolved)
    for note in notes:
        warnings.warn(note, stacklevel=3)  # at the caller of `build`
    made.weights = [check_value("weight", weights.get(task, 1.0)) for task in tasks]
    made.base_model, made.models = name_of(base, "base"), names
    made.varying = {key: check_value(key, given[key]) for key in VARYING_KEYS if key in given}
    return made


def open_model(model: Model) -> Weights:
    """A model's tensors."""
    if isinstance(model, Mapping):
        return StateDict(model)
    model = hub.local(model)
    if not os.path.exists(model):
        raise UserError(f"model {model}: no such folder or file (from {os.getcwd()})")
    if os.path.isfile(model) and MARKER in metadata_of(Path(model)):
        raise UserError(f"model {model} is a vector of a store, and not a model: `load` the store")
    return Checkpoint.open(model)


def name_of(model: Model, otherwise: str = "the given state dict") -> str:
    """The path of a model, or `otherwise` for a state dict."""
    return otherwise if isinstance(model, Mapping) else os.fspath(model)
