"""The library: build, load, add, reconstruct and merge, on state dicts or paths.

A model is a state dict (name -> tensor), a folder in Hugging Face's layout, a weight file, or a
name on the Hub. All models must name their tensors alike. The CPU or `device` does all work.
Weights are read in pieces, so memory does not grow with the models on disk.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from tvb_mergekit import hub
from tvb_mergekit.core.basis import Combination, StoredBases, Tunables
from tvb_mergekit.core.settings import (
    VARYING_KEYS,
    check_tasks,
    check_value,
    resolve_settings,
    shown,
)
from tvb_mergekit.errors import UserError, check_names, listed
from tvb_mergekit.store import export as exporting
from tvb_mergekit.store import store
from tvb_mergekit.store.add import add_in_memory, add_to_store
from tvb_mergekit.store.addition import Growth, remove_task
from tvb_mergekit.store.build import build_in_memory, build_store
from tvb_mergekit.store.forms import kept_share, sums_of
from tvb_mergekit.store.store import Bases
from tvb_mergekit.store.writer import undo_change
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.matrices import check_matrices, settings_over
from tvb_mergekit.tensors.merging import build_basis, count_if_needed, merge_items
from tvb_mergekit.tensors.stream import Engine, StateDict, Weights, device_of
from tvb_mergekit.tensors.taskset import UNCHANGED, TaskSet, match
from tvb_mergekit.tensors.writing import MemorySink

Model = Mapping[str, Tensor] | str | os.PathLike[str]
Device = torch.device | str
PATHS = (str, os.PathLike)
# By the annotation of an argument: its types, and their names in words
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "Bases": ((Bases,), "bases of `build`, `load` or `add`"),
    "Bases | str | os.PathLike[str]": ((Bases, *PATHS), "a store's path, or bases"),
    "Device": ((torch.device, str), "a torch.device, or its name"),
    "Mapping[str, Model]": ((Mapping,), "a mapping of task to model"),
    "Mapping[str, float]": ((Mapping,), "a mapping of task to number"),
    "Model": ((Mapping, *PATHS), "a model's state dict, or its path"),
    "float": ((Real,), "a number"),
    "bool": ((bool,), "True or False"),
    "int": ((Integral,), "a whole number"),
    "nn.Module": ((nn.Module,), "a loaded model, a torch.nn.Module"),
    "str": ((str,), "text"),
    "str | os.PathLike[str]": (PATHS, "a path"),
    "torch.dtype": ((torch.dtype,), "a torch.dtype"),
}


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
    """Compress T task vectors into M bases, or keep all of them.

    Args:
        base: theta_0.
        models: Task -> its fine-tuned model, T of them, in the order of the tasks.
        out: The path of the store to write. Without it the bases are state dicts in memory.
        weights: Task -> scale of its task vector; 1 by default.
        dtype: float32 (default), bfloat16 or float16, of the bases.
        lossless: Keep the models in the store `out` to the bit, as differences from the base.
        keep: Keep a random share of the entries of each task vector in the store `out`, exact and
            times 1 / share.
        device: The device that computes.
        settings: the recipe's keys, such as `basis="balanced"`, `num_bases=2`, `exclude="head"`,
            and `lambda_` for the recipes of a store.

    Returns:
        The bases: `encoder` W_e [T, M] and `decoder` W_d [M, T] float64, `vectors`, `facts`.

    Warns:
        UserWarning: Tensors are left out of a task vector, or a model is unlike the others.

    Raises:
        UserError: a wrong setting, models that do not fit the base, NaN or infinity.

    Source: Zeng et al., TMLR 2026, Eqs. 5-8 (`ae`); `balanced` is ours, see `docs/mathematics.md`.

    >>> import torch
    >>> base = {"w": torch.zeros(4)}
    >>> models = {"a": {"w": torch.eye(4)[0]}, "b": {"w": torch.eye(4)[1]}}
    >>> bases = build(base, models, basis="balanced", num_bases=1)
    >>> bases.vectors[0].tensor("w")
    tensor([0.5000, 0.5000, 0.0000, 0.0000])
    """
    check_types(build, locals())
    engine = Engine(device_of(device))
    inputs = _inputs(base, models, weights or {}, settings)
    told: list[str] = []
    share, dtype = kept_share(lossless, keep, dtype), dtype or torch.float32
    if share and not inputs.settings.names_a_basis:
        inputs.settings = inputs.settings.but(basis="none")
    if out is not None:
        built = build_store(inputs, out, engine, dtype=dtype, keep=share, warn=told.append)
    elif share:
        raise UserError("`lossless` and `keep` are for a store on disk: give `out`")
    else:
        built = build_in_memory(inputs, engine, dtype=dtype, warn=told.append)
    for line in told:
        warnings.warn(line, stacklevel=2)
    return built


def load(path: str | os.PathLike[str]) -> Bases:
    """The bases in a store that `build` or `tvb build` wrote; tensors stay on disk until read.

    Raises:
        UserError: no store, a newer format, or a file that is missing, cut short or damaged in
            its header. `tvb inspect` compares the checksums.
    """
    check_types(load, locals())
    return store.load(path)


def add(
    bases: Bases | str | os.PathLike[str] | None,
    base: Model,
    model: Model,
    task: str,
    *,
    weight: float = 1.0,
    budget: int | None = None,
    compress: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
    **settings: Any,
) -> Bases:
    """Add a task (Algorithm 1). At the budget M the bases are compressed to M - 1 first.

    A store that keeps all tasks gets one more vector, unless a budget is given.

    Args:
        bases: The path of a store, which is changed, or made if it does not exist. Or bases in
            memory, which are not changed. None begins new bases.
        base: theta_0, from which the bases were built.
        model: The new fine-tuned model.
        task: The name of the new task.
        weight: The scale of the new task vector.
        budget: The most bases; by default the previous budget.
        compress: `ae` as in the paper, or `balanced`, which keeps the sum of all tasks.
        dtype: The dtype of new bases. Existing bases keep theirs.
        settings: The recipe's keys for new bases.

    Warns:
        UserWarning: The task vector is unlike the others, or the bases will no longer add up to
            the sum of all tasks. `tvb add` refuses both without `--force`.

    Raises:
        UserError: As `add_to_store`.
    """
    check_types(add, locals())
    engine = Engine(device_of(device))
    found, where = (bases, bases.path) if isinstance(bases, Bases) else (None, bases)
    if found is None and where is not None and store.is_store(where):
        found = store.load(where)
    if found is not None:
        if settings:
            raise UserError(f"`{next(iter(settings))}`: the bases are built; leave it out")
        settings = {"exclude": found.settings.exclude} if found.settings.exclude else {}
    elif "num_bases" in settings:
        raise UserError("`num_bases`: new bases begin with one task; leave it out")
    elif compress is not None:
        settings.setdefault("basis", compress)
    inputs = _inputs(base, {task: model}, {task: weight}, {**settings, "num_bases": 1})
    told: list[str] = []
    growth = Growth(budget, compress, dtype, told.append)
    if where is None:
        grown = add_in_memory(found, inputs, growth, engine)
    else:
        grown = add_to_store(where, inputs, growth, engine)
    for line in told:
        warnings.warn(line, stacklevel=2)
    return grown


def remove(path: str | os.PathLike[str], task: str) -> Bases:
    """The store of all tasks at `path` without one of them, which must not be the only one."""
    check_types(remove, locals())
    return remove_task(path, task)


def undo(path: str | os.PathLike[str]) -> Bases:
    """The store at `path` as it was before the last `add` or `remove`; one step is kept."""
    check_types(undo, locals())
    return undo_change(path)


def reconstruct(
    bases: Bases, base: Model, task: str, *, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """theta_0 + tau_hat of one task, as a state dict on the CPU (paper Eq. 10: T_hat = B W_d).

    Args:
        dtype: of the floating-point tensors; the base's own by default.

    Raises:
        UserError: no such task, or another base.
    """
    check_types(reconstruct, locals())
    found = base_of(bases, base, dtype)
    items = exporting.items_of(bases, found, dtype, bases.sources)
    sink = MemorySink(items)
    exporting.combine(items, exporting.task_column(bases, task), sink)
    return sink.states[0]


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
        bases: of `build`, `load` or `add`.
        base: theta_0.
        dtype: of the floating-point tensors; the base's own by default.
        device: The device that computes.
        parameters: The recipe's keys for merging: `lambda_` for `lambda`, `lambda_scale`,
            `density`, `merge_func`, `common`, `flow_time`, `matrices`,
            `transposed`, `forget`, `alpha`, `exclude`. Over a store of all tasks also the keys of
            bases, such as `basis`. Defaults are those of a merge of models.

    Raises:
        UserError: a wrong parameter, another base, or an overflow of `dtype`.
    """
    check_types(merge, locals())
    given = _keys(parameters)
    settings = bases.merge_settings(method, given)
    defaults = {key: spec.default_for(method) for key, spec in VARYING_KEYS.items()}
    chosen = {key: check_value(key, given[key]) for key in defaults if key in given}
    tunables = Tunables.of({**defaults, **chosen})
    found = base_of(bases, base, dtype)
    settings = settings_over(found, settings)
    sources = bases.sources if method == "basis_negate" else list(bases.vectors)
    items = [
        replace(item, counted_as=bases.stored_name(item.name), tunables=tunables)
        if item.inputs
        else item
        for item in exporting.items_of(bases, found, dtype, sources, settings.excludes)
    ]
    counted = [item for item in items if item.counted_as == item.name]
    engine = Engine(device_of(device))
    combined: Combination
    if bases.keeps_tasks:
        known = None if settings.exclude else sums_of(bases, range(bases.num_bases))
        scales = bases.scales.tolist()
        combined = build_basis(TaskSet(settings, bases.tasks, scales, counted, sums=known), engine)
    else:
        table = bases.reconstruction(bases.tasks)[: len(sources)]
        combined = StoredBases(settings, bases.tasks, bases.shares, table)
        left = bases.facts.left_out
        zeros = (found.tensors[name].numel for name in left if left[name] == UNCHANGED)
        count_if_needed(combined, counted, engine, zeros=sum(zeros))
    check_matrices(settings, items)
    sink = MemorySink(items)
    merge_items(combined, items, sink, engine)
    return sink.states[0]


def check_types(function: Callable[..., object], given: Mapping[str, object]) -> None:
    """Raise UserError if an argument is of another type than its annotation, or a path is empty."""
    for name, value in given.items():
        annotation = function.__annotations__[name]
        if value is not None or not annotation.endswith(" | None"):
            check_type(f"`{name}`", value, annotation.removesuffix(" | None"))


def check_type(name: str, value: object, annotation: str) -> None:
    """Raise UserError unless a value is of the types that KINDS has for an annotation."""
    types, expected = KINDS.get(annotation, ((object,), ""))
    if not isinstance(value, types) or (isinstance(value, bool) and annotation != "bool"):
        raise UserError(f"{name} is of type {type(value).__name__}: expected {expected}")
    if os.PathLike in types and isinstance(value, PATHS):
        check_names(value)
    elif isinstance(value, str) and value.splitlines() != [value]:
        raise UserError(f"{name} is {shown(value)}: expected one line of text")


def _keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's keys: `lambda_` for `lambda`, which Python reserves."""
    return {key.rstrip("_"): value for key, value in given.items()}


def base_of(bases: Bases, base: Model, dtype: torch.dtype | None = None) -> Weights:
    """Open the base. Raise UserError for another base, or a `dtype` that is not floating-point."""
    if dtype is not None and not dtype.is_floating_point:
        raise UserError(f"`dtype` is {dtype}: expected a floating-point torch.dtype")
    found = open_model(base)
    bases.check_base(found, name_of(base))
    return found


def _inputs(
    base: Model,
    models: Mapping[str, Model],
    weights: Mapping[str, float],
    settings: Mapping[str, Any],
) -> TaskSet:
    for task, model in models.items():
        check_type(f"the task {shown(task)}", task, "str")
        check_type(f"the model of {task}", model, "Model")
    found = open_model(base)
    sources = [open_model(model) for model in models.values()]
    tasks = list(models)
    names = [name_of(model, task) for task, model in models.items()]
    check_tasks(tasks, names)
    if unknown := [task for task in weights if task not in models]:
        raise UserError(f"`weights` names the unknown task {unknown[0]!r}")
    given = _keys(settings)
    varying = {key: check_value(key, given[key]) for key in VARYING_KEYS if key in given}
    made, notes = match(found, sources, tasks, resolve_settings("basis_ta", given, tasks))
    for note in notes:
        warnings.warn(note, stacklevel=3)  # at the caller of `build` or `add`
    made.weights = [check_value("weight", weights.get(task, 1.0)) for task in tasks]
    made.base_model, made.models, made.varying = name_of(base, "base"), names, varying
    if isinstance(found, Checkpoint) and not os.path.isfile(name_of(base)):
        made.folder = found.folder
    return made


def open_model(model: Model) -> Weights:
    """A model's tensors.

    Raises:
        UserError: nothing there, a basis vector of a store, or tensors without data.
    """
    if isinstance(model, Mapping):
        for name, value in model.items():
            check_type(f"the key {shown(name)} of a state dict", name, "str")
            if isinstance(value, Tensor) and (value.is_meta or value.layout != torch.strided):
                kind = "on the meta device, without data" if value.is_meta else value.layout
                raise UserError(f"tensor `{name}` is {kind}: expected a dense tensor")
        if not (found := StateDict(model)).tensors:
            kinds = sorted({type(value).__name__ for value in model.values()})
            raise UserError(
                f"a state dict holds no torch.Tensor ({listed(kinds) or 'it is empty'}): expected "
                "names and tensors"
            )
        return found
    model = hub.local(model)
    if not os.path.exists(model):
        raise UserError(f"model {model}: no such folder or file (from {os.getcwd()})")
    if store.is_basis(model):
        raise UserError(
            f"model {model} is a basis vector of a store, a difference from its base, "
            "and no model: `load` the store"
        )
    return Checkpoint.open(model)


def name_of(model: Model, otherwise: str = "the given state dict") -> str:
    """The path of a model, or `otherwise` for a state dict."""
    return otherwise if isinstance(model, Mapping) else os.fspath(model)
