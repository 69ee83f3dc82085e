"""The nodes that replace mergekit's in its task graph; each only moves values to the engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from mergekit.common import ModelReference, dtype_from_name
from mergekit.graph import Task
from pydantic import ConfigDict
from torch import Tensor

from tvb_mergekit.basis import Combination
from tvb_mergekit.combine import check_output
from tvb_mergekit.engine import CPU, Job, Tunables, merge_item
from tvb_mergekit.refusals import refusing
from tvb_mergekit.stream import Item, held_item


class BuildBasis(Task[Combination]):
    """The one node that all merged tensors depend on. Equal only to itself."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    build: Callable[[], Combination]

    def arguments(self) -> dict[str, Task]:
        return {}

    def execute(self, **_kwargs: Any) -> Combination:
        return self.build()

    def main_thread_only(self) -> bool:
        return True

    def priority(self) -> int:
        # Before the writer makes the output folder: a refused merge leaves nothing.
        return 100_000

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class MergeTensor(Task[Tensor]):
    """One merged tensor from the base's and the models' tensors and the basis.

    Tensors that are merged as they are stored are read here, piece by piece: mergekit would map
    them whole. It still brings those that it changes (a vocabulary, converted experts).
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    name: str
    counted_as: str  # the name under which the Gram pass saw these tensors, once
    inputs: Task
    basis: BuildBasis
    base: ModelReference
    models: tuple[ModelReference, ...]
    bases: bool = False  # of a store, and no models: their dtype is not the output's
    tunables: Tunables
    dtype: str | None  # None: what the inputs' dtypes promote to
    device: str
    more: tuple[Callable[[], Tensor], ...] = ()  # inputs that are no models of the recipe
    stored: Callable[[], Item] | None = None  # the tensor where mergekit does not change it

    def arguments(self) -> dict[str, Task]:
        changed = {"tensors": self.inputs} if self.stored is None else {}
        return {"basis": self.basis, **changed}

    def group_label(self) -> str | None:
        label: str | None = self.inputs.group_label()
        return label

    def out_dtype(self, base: torch.dtype, models: Sequence[torch.dtype]) -> torch.dtype:
        """Of the merged tensor, from those of the stored ones."""
        others = [] if self.bases else models
        return torch_dtype(self.dtype) or functools.reduce(torch.promote_types, others, base)

    def typed(self, item: Item) -> Item:
        """The item with the dtype of the merged tensor."""
        assert item.base is not None
        models = [part.dtype for part in item.inputs[: len(self.models)]]
        return replace(item, out=self.out_dtype(item.base.dtype, models))

    def execute(
        self,
        basis: Combination,
        tensors: dict[ModelReference, Tensor] | None = None,
        **_kwargs: Any,
    ) -> Tensor:
        if self.stored is not None:
            item, home = self.stored(), CPU
        else:
            assert tensors is not None
            base = tensors[self.base]
            models = [*(tensors[model] for model in self.models), *(load() for load in self.more)]
            item, home = held_item(self.name, base, models), base.device
        device = home
        if device.type == "cpu":  # move block by block, not the T + 1 tensors at once
            inner = torch.get_default_device()  # the worker's own under --multi-gpu
            device = inner if inner.type != "cpu" else torch.device(self.device)
        job = Job(self.counted_as, self.tunables)
        with refusing():
            return merge_item(basis, self.typed(item), job, device, home)


class KeepBase(Task[Tensor]):
    """A tensor that stays the base's, cast to the output dtype."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    name: str
    inputs: Task
    base: ModelReference
    dtype: str | None
    basis: BuildBasis  # so that nothing is written before the inputs are known to be good

    def arguments(self) -> dict[str, Task]:
        return {"tensors": self.inputs, "basis": self.basis}

    def group_label(self) -> str | None:
        label: str | None = self.inputs.group_label()
        return label

    def execute(self, tensors: dict[ModelReference, Tensor], **_kwargs: Any) -> Tensor:
        tensor = tensors[self.base]
        if self.dtype is None or not tensor.is_floating_point():
            return tensor
        dtype = self.out_dtype(tensor.dtype)
        cast = tensor.to(dtype)
        with refusing():
            check_output(self.name, cast, dtype)
        return cast

    def out_dtype(self, base: torch.dtype) -> torch.dtype:
        """Of the tensor that is written, from the stored one's."""
        return (torch_dtype(self.dtype) or base) if base.is_floating_point else base


def torch_dtype(name: str | None) -> torch.dtype | None:
    dtype: torch.dtype | None = dtype_from_name(name)
    return dtype
