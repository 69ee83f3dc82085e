"""The bases and the statistics to merged tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tvb_mergekit.core.basis import Basis
from tvb_mergekit.core.learned import FisherMean, regression_bytes, regression_mean
from tvb_mergekit.core.merge import Linear, Step
from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.matrices import merge_one
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.stream import Item, Part, Sink

# Whose encoder may have negative entries, or none at all.
MIXED = ("pca", "linear_ae", "rand_proj")


@dataclass(frozen=True, eq=False)
class Merging:
    """A `plan.Learned` by statistics in files.

    Attributes:
        files: one for each task.
        dimensions: weight of a linear layer -> the dimension in which its inputs lie.
        note: writes what else belongs into the folder of the merged model.
    """

    method: str
    files: Sequence[Path]
    dimensions: Mapping[str, int]
    off_diagonal: float
    note: Callable[[Path], None]

    def write(self, folder: Path) -> None:
        """As in `plan.Learned`."""
        self.note(folder)

    def merge_into(self, plan: Plan, sink: Sink, items: Sequence[Item]) -> None:
        """As in `plan.Learned`."""
        bases, encoder = bases_of(plan)
        statistics = [Checkpoint.open(file) for file in self.files]
        held = set.intersection(*(set(each.tensors) for each in statistics))
        jobs, means = plan.jobs(), plan.means
        # Tensor -> the one whose statistics merge it; all others are the mean of the bases.
        known = {name: job.counted_as for name, job in jobs.items() if job.counted_as in held}
        mean: Step = Linear.of(bases.mean(1, keepdim=True), add_base=True)
        weighted: Step = FisherMean(bases, encoder)

        def with_sums(item: Item) -> Item:
            parts = (Part.of(each, known[item.name], "delta") for each in statistics)
            return replace(item, inputs=(*item.inputs, *parts))

        if self.method == "fisher":
            items = [with_sums(item) if item.name in known else item for item in items]
        update = means.pop("progress")("Merged model", sum(item.nbytes for item in items))
        for by_data, group in itertools.groupby(items, lambda item: item.name in known):
            some = list(group)
            if not by_data or self.method == "fisher":
                step = weighted if by_data else mean
                steps = {item.name: step for item in some if item.name in jobs}
                combine_pass(some, steps, sink, **means, progress=update)
                continue
            for item in some:
                name = known[item.name]
                one = partial(self._regression, name, encoder, statistics)
                size = layer_bytes(item.shape, bases.shape[1], self.dimensions[name])
                merge_one(item, bases, one, size, sink, **means)
                update(item.nbytes)

    def _regression(
        self, name: str, encoder: Tensor, statistics: Sequence[Checkpoint], bases: Tensor
    ) -> Tensor:
        grams = (each.tensor(name) for each in statistics)
        if self.dimensions[name] == 1:
            return regression_mean(name, bases, grams, encoder, self.off_diagonal)
        return regression_mean(name, bases.mT, grams, encoder, self.off_diagonal).T


def layer_bytes(shape: Sequence[int], bases: int, dimension: int) -> int:
    """The bytes that merging a linear layer takes, with its inputs in `dimension` of its weight."""
    return regression_bytes(bases, shape[1 - dimension], shape[dimension])


def bases_of(plan: Plan) -> tuple[Tensor, Tensor]:
    """The bases from the vectors that the plan reads [N, M], and W_e [T, M].

    Bases of a store that stand for different numbers of tasks (`tvb add` to balanced ones) count
    for so many: the columns of W_e are multiplied by the store's v.

    Raises:
        UserError: W_e has negative entries.
    """
    basis, store = plan.basis, plan.recipe.store
    if store is None:
        assert isinstance(basis, Basis)
        bases, encoder = basis.weighted_encoder, basis.encoding.encoder
    else:
        bases = torch.diag(torch.tensor(plan.recipe.weights, dtype=torch.float64))
        encoder = store.bases.encoder
        if encoder is not None:
            encoder = (encoder * store.bases.shares)[:, list(store.order)]
    if encoder is None or float(encoder.min()) < 0:
        raise UserError(needs_mixtures("this"))
    return bases, encoder


def check_basis(plan: Plan) -> None:
    """Raise UserError where the recipe's basis is known to give no mixtures of tasks."""
    recipe = plan.recipe
    name = recipe.settings.basis if recipe.store is None else recipe.store.bases.basis
    if name in MIXED:
        raise UserError(needs_mixtures(name))


def needs_mixtures(name: str) -> str:
    """Why a basis is refused."""
    return (
        f"`basis` is {name}, whose encoder has negative weights: a basis learns from a mixture of "
        "the tasks' data, which has none; take balanced, ae, rand_select or none"
    )
