"""One merge from its plan to its report."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from mergekit.options import MergeOptions
from torch import Tensor

from tvb_mergekit.core.basis import Basis, Combination, StoredBases, warnings
from tvb_mergekit.core.gram import check_copied
from tvb_mergekit.errors import listed, refusing
from tvb_mergekit.plugin.items import MergedTensors
from tvb_mergekit.plugin.recipe import Recipe
from tvb_mergekit.plugin.sources import Loaders
from tvb_mergekit.progress import bars
from tvb_mergekit.store import report
from tvb_mergekit.store.facts import Facts
from tvb_mergekit.store.forms import sums_of
from tvb_mergekit.tensors import merging, ranks
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.engine import Engine, device_of
from tvb_mergekit.tensors.matrices import check_matrices
from tvb_mergekit.tensors.stream import Item, Sink
from tvb_mergekit.tensors.taskset import TaskSet

LOG = logging.getLogger(__name__)
UNREAD = "not used by this recipe, or unknown to mergekit's definition of the architecture"


class Learned(Protocol):
    """A merge of the bases by statistics of the models instead of by the recipe's method."""

    @property
    def method(self) -> str: ...
    def merge_into(self, plan: Plan, sink: Sink, items: Sequence[Item]) -> None: ...
    def write(self, folder: Path) -> None: ...


@dataclass
class Plan:
    """One merge from its plan to its report.

    Attributes:
        tokenizer: mergekit's `TokenizerInfo` of the merged model, if the recipe asks for one.
        config: The merged model's configuration.
        built: The basis, after `build`.
    """

    recipe: Recipe
    options: MergeOptions
    engine: Engine
    loaders: Loaders
    tensors: MergedTensors
    tokenizer: Any = None
    architecture: Any = None
    config: Any = None
    built: Combination | None = None
    learned: Learned | None = None

    @property
    def base(self) -> Checkpoint:
        base = self.tensors.checkpoints[self.recipe.base]
        assert isinstance(base, Checkpoint)
        return base

    @property
    def basis(self) -> Combination:
        assert self.built is not None
        return self.built

    def items(self) -> list[Item]:
        """The tensors of the merged model, in the order of the base's files."""
        return [*self.tensors.items]

    @property
    def output_bytes(self) -> int:
        return sum(item.numel * item.out.itemsize for item in self.tensors.items)

    @functools.cached_property
    def tasks(self) -> TaskSet:
        """The task vectors, with the tensors that count."""
        recipe, bases = self.recipe, self.recipe.bases
        tensors = self.tensors
        sources = [tensors.checkpoints[model] for model in recipe.models]
        counted = [item for item in self.items() if item.counted_as == item.name]
        facts = (tensors.left_out, tensors.same_as, tensors.out_dtype)
        tasks = recipe.task_set(counted, self.base, sources, *facts)
        tasks.folder, tasks.unchanged = self.base.folder, sum(tensors.unchanged.values())
        if bases is not None and not tensors.changed:
            # The store knows G where the same tensors count.
            held = {part.name for item in counted for part in item.inputs[:1]}
            if bases.keeps_tasks and held == set(bases.names):
                tasks.sums = sums_of(bases, recipe.order)
        return tasks

    @refusing()
    def build(self, inner: bool = False) -> Combination:
        """Build the basis, and check the tensors that stay the base's.

        Args:
            inner: By the Gram matrix, also if the merge needs only what any matrix gives.

        Raises:
            UserError: NaN or infinity, a zero task vector.
        """
        settings, store, world = self.recipe.settings, self.recipe.store, ranks.world()
        check_matrices(settings, self.tasks.items)
        left = [item for item in self.items() if item.counted_as is None]
        excluding = [settings, *([] if store is None else [store.settings])]
        for item in map(Item.loaded, left[world.rank :: world.size]):
            assert item.base is not None
            name = item.base.name
            tensor = item.whole(item.base) if name is None else self.base.tensor(name)
            check_copied(item.name, tensor, any(s.excludes(item.name) for s in excluding))
        self.built = self._combination(inner)
        return self.built

    def _combination(self, inner: bool) -> Combination:
        recipe, store = self.recipe, self.recipe.store
        if store is None:
            return merging.build_basis(self.tasks, self.engine, inner=inner)
        order = list(recipe.order)
        shares = store.shares[order] * torch.tensor(recipe.weights, dtype=torch.float64)
        mean = [] if recipe.mean is None else [len(order)]
        table = store.reconstruction(store.tasks)[[*order, *mean]]
        stored = StoredBases(recipe.settings, store.tasks, shares, table)
        merging.count_if_needed(stored, self.tasks.items, self.engine, zeros=self.tasks.unchanged)
        return stored

    def merge_into(self, sink: Sink, items: Sequence[Item]) -> None:
        """Give `sink` the merged tensors, after `build`.

        Raises:
            UserError: As `build`, if models are read only now; a result overflows its dtype.
        """
        if self.learned is not None:
            self.learned.merge_into(self, sink, items)
        else:
            merging.merge_items(self.basis, items, sink, self.engine)
        self.tasks.check_unchanged()
        if isinstance(self.basis, Basis):
            models = dict(zip(self.basis.tasks, self.tasks.models, strict=True))
            for line in warnings(self.basis, models):
                LOG.warning("%s", line)

    def note_unread(self) -> None:
        """Name the stored tensors that the merge did not need, once it is done."""
        left_out = self.tensors.left_out
        read = {model: set(loader.read) for model, loader in self.loaders.items()}
        for item in self.tensors.items:
            for model, part in zip(self.loaders, item.parts, strict=False):
                read[model].add(str(part.name))
        unread = {
            name: model
            for model in self.recipe.every
            for name in self.tensors.checkpoints[model].tensors
            if name not in read[model]
            and name not in left_out
            and (model == self.recipe.base or name not in self.base.tensors)
        }
        left_out.update({name: f"in {m}, but {UNREAD}; not written" for name, m in unread.items()})
        if unread:
            told = "%d tensors are not in the merged model: %s: %s"
            LOG.warning(told, len(unread), UNREAD, listed(list(unread)))

    def report(self) -> tuple[Facts, dict[str, Tensor]]:
        """basis.json and basis.safetensors of the merge."""
        learned, bases, basis = self.learned, self.recipe.bases, self.basis
        tunables = self.tensors.tunables if learned is None else {}
        if isinstance(basis, StoredBases):
            assert bases is not None
            weights = basis.shares[torch.tensor(self.recipe.order).argsort()].tolist()
            own = self.tensors.left_out, tunables, self.tensors.out_dtype
            facts = report.facts_over_store(bases.facts, basis, weights, *own)
            held = bases.tensors
            tensors = {name: held[name] for name in report.MERGED if name in held}
        else:
            assert isinstance(basis, Basis)
            facts, tensors = report.facts(self.tasks, basis, tunables), report.tensors_of(basis)
        if bases is not None:
            facts = facts.but(from_store=bases.place)
        return facts if learned is None else facts.but(method=learned.method), tensors


def engine_of(options: MergeOptions) -> Engine:
    """The engine of a merge.

    Raises:
        UserError: This machine has no such device.
    """
    return Engine(device_of(options.device or "cpu"), bars(options.quiet))
