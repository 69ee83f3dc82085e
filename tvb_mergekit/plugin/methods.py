"""The methods in mergekit's registry: names, parameters, and merging in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from mergekit.merge_methods.base import (
    BasePolicy,
    BatchOptions,
    InputContract,
    MergeMethod,
    MergeMethodSpec,
    OptionalTensorPolicy,
    ParameterScope,
    ParameterSpec,
    TensorGroup,
)
from mergekit.merge_methods.dtype import promoted_dtype
from torch import Tensor

from tvb_mergekit.core.basis import Tunables
from tvb_mergekit.core.gram import check_shapes
from tvb_mergekit.errors import UserError
from tvb_mergekit.settings import (
    GLOBAL_KEYS,
    METHODS,
    MODEL_KEYS,
    TITLES,
    VARYING_KEYS,
    check_tasks,
    check_value,
    resolve_settings,
)
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.matrices import check_matrices
from tvb_mergekit.tensors.merging import build_basis, merge_items
from tvb_mergekit.tensors.stream import held_item
from tvb_mergekit.tensors.taskset import TaskSet
from tvb_mergekit.tensors.writing import MemorySink

PAPER_URL = "https://openreview.net/forum?id=zkc7u3mIaE"


class Parameter(ParameterSpec):
    """A parameter whose complaint names the key, unlike mergekit's own."""

    def validate(self, value: Any) -> Any:
        return None if value is None else check_value(self.name, value)


class BasisMethod(MergeMethod):
    """One of METHODS.

    Merges of models use only the name and the parameters (see `planner`). In memory
    (`merge_state_dicts`, `merge_tensors`), the tensors of one call are the complete task vectors,
    and the inputs' ids, as text, are the names of the tasks.
    """

    def __init__(self, name: str) -> None:
        # A global key that is not given has no value: `resolve_settings` applies its default.
        rows = [(key, ParameterScope.SHARED, None) for key in GLOBAL_KEYS.values()]
        rows += [(k, ParameterScope.SHARED, k.default_for(name)) for k in VARYING_KEYS.values()]
        rows = [row for row in rows if name in row[0].methods]
        rows += [(key, ParameterScope.NON_BASE, key.default) for key in MODEL_KEYS.values()]
        self.spec = MergeMethodSpec(
            name=name,
            parameters=tuple(
                Parameter(key.name, Any, scope, default, key.help) for key, scope, default in rows
            ),
            contract=InputContract(base=BasePolicy.REQUIRED, min_inputs=2, min_non_base=1),
            pretty_name=TITLES[name],
            reference_url=PAPER_URL,
            optional_tensor_policy=OptionalTensorPolicy.BASE_OR_SKIP,
        )

    def _execute_resolved(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        # A task graph of mergekit's calls this for one tensor, which would get its own basis.
        raise RuntimeError(f"{self.spec.name} needs all tensors at once: use mergekit's commands")

    _execute = _execute_resolved  # abstract in mergekit's class; only its own one calls it

    def __call__(
        self,
        groups: Sequence[TensorGroup],
        /,
        *,
        parameters: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        batch_options: BatchOptions | None = None,
    ) -> tuple[Tensor, ...]:
        """Merge tensors held in memory, in float32; see `MergeMethod.__call__`.

        Args:
            dtype: The dtype of the result unless `out_dtype` is given.
        """
        groups = tuple(groups)
        bound = self._bind_parameters(groups, parameters or {})
        ids = [entry.id for entry in groups[0].non_base] if groups else []
        for group in groups:
            if [entry.id for entry in group.non_base] != ids:
                raise UserError("every tensor must have the same inputs in the same order")
        given = {key: value for key, value in (parameters or {}).items() if key not in MODEL_KEYS}
        for key in MODEL_KEYS:
            if any(values[key] != bound[0][key] for values in bound):
                raise UserError(f"`{key}` varies from tensor to tensor; give a model one value")
        tasks = [bound[0]["task"][key] or str(key) for key in ids]
        check_tasks(tasks, [str(key) for key in ids])
        settings = resolve_settings(self.spec.name, given, tasks)
        weights = [bound[0]["weight"][key] for key in ids]
        names: dict[str, str] = {}  # label -> name: mergekit allows a name twice
        for i, group in enumerate(groups):
            name = group.metadata.name or f"tensor {i}"
            names[f"{name} ({i})" if name in names else name] = name
        labels = [*names]
        counted = _counted_names(groups, labels)
        items = []
        for label, group, values in zip(labels, groups, bound, strict=True):
            assert group.base is not None
            excluded = settings.excludes(label)
            models = [] if excluded else [entry.tensor for entry in group.non_base]
            to = out_dtype or dtype or promoted_dtype(group)
            item = held_item(label, group.base.tensor, models, to)
            if not excluded:
                check_shapes(label, group.base.tensor, models, tasks)
                item = replace(item, counted_as=counted[label], tunables=Tunables.of(values))
            items.append(item)
        engine, sink = Engine([groups[0].entries[0].tensor.device]), MemorySink(1)
        with torch.no_grad():
            taking_part = [item for item in items if item.counted_as == item.name]
            basis = build_basis(TaskSet(settings, tasks, weights, taking_part), engine)
            check_matrices(settings, items, basis.num_bases, None)
            merge_items(basis, items, sink, engine)
        devices = [group.base.tensor.device for group in groups if group.base is not None]
        pairs = zip(labels, devices, strict=True)
        return tuple(sink.states[0][label].to(device) for label, device in pairs)


def _counted_names(groups: Sequence[TensorGroup], labels: Sequence[str]) -> dict[str, str]:
    """Each label -> the first label with the same storages: tied tensors count once."""
    first: dict[tuple[object, ...], str] = {}
    names = {}
    for group, label in zip(groups, labels, strict=True):
        place = tuple((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in group.tensors)
        names[label] = first.setdefault(place, label) if group.tensors[0].numel() else label
    return names


def register(registry: ModuleType) -> None:
    """Add the methods to mergekit's registry (again after a reload)."""
    known = {method.spec.name for method in registry.registered_methods()}
    for name in METHODS:
        if name not in known:
            registry.register(BasisMethod(name))
