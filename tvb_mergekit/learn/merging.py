"""The bases, and what was learned of them, to merged tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tvb_mergekit.core.basis import Basis
from tvb_mergekit.core.learned import FisherMean, Stitch, regression_bytes, regression_mean
from tvb_mergekit.core.merge import Linear, Step
from tvb_mergekit.errors import UserError
from tvb_mergekit.learn.moving import Rows
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.matrices import merge_one, slice_of
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.sparse import Sparse
from tvb_mergekit.tensors.stream import Item, Part, Sink

# Whose encoder may have negative entries.
MIXED = ("pca", "linear_ae")
Mixture = Literal["encoder", "equal", "positive"]
BY_MIXTURES = ("fisher", "regmean", "localize")


@dataclass(frozen=True, eq=False)
class ByStatistics:
    """A `plan.Learned` by statistics in files.

    Attributes:
        files: one for each task.
        mixtures: how much of each task's statistics a basis has, [T, M].
        dimensions: weight of a linear layer -> the dimension in which its inputs lie.
        normalize: divide each task's Fisher information by its sum over all entries.
        write: as in `plan.Learned`.
    """

    method: str
    files: Sequence[Path]
    mixtures: Tensor
    dimensions: Mapping[str, int]
    off_diagonal: float
    normalize: bool
    write: Callable[[Path], None]

    def merge_into(self, plan: Plan, sink: Sink, items: Sequence[Item]) -> None:
        """As in `plan.Learned`."""
        bases, encoder = bases_of(plan), self.mixtures
        statistics = [Checkpoint.open(file) for file in self.files]
        held = set.intersection(*(set(each.tensors) for each in statistics))
        if self.normalize:
            names = sorted(held)  # a sum in one order
            totals = [sum(float(f.tensor(n).double().sum()) for n in names) for f in statistics]
            scales = [1 / total if total else 0.0 for total in totals]
            encoder = torch.tensor(scales, dtype=torch.float64)[:, None] * encoder
        means = plan.means
        # Tensor -> the one whose statistics merge it; all others are the mean of the bases.
        known = {i.name: i.counted_as for i in items if i.tunables and i.counted_as in held}
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
                steps = {item.name: step for item in some if item.tunables}
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


@dataclass(frozen=True, eq=False)
class ByCoefficients:
    """A `plan.Learned` by coefficients of the bases: theta_0 + sum_m c_m B_m.

    Attributes:
        values: c [rows, M].
        rows: which of them a tensor has.
        write: as above.
    """

    method: str
    values: Tensor
    rows: Rows
    write: Callable[[Path], None]

    def merge_into(self, plan: Plan, sink: Sink, items: Sequence[Item]) -> None:
        """As in `plan.Learned`."""
        weights = self.values.double() @ bases_of(plan).T  # of the vectors that are read
        means = plan.means
        update = means.pop("progress")("Merged model", sum(item.nbytes for item in items))
        pieces, steps = list[Item](), dict[str, Step]()
        joined = Joined(sink, {item.name: item for item in items})
        for item in items:
            if item.tunables is None:
                pieces.append(item)
                continue
            own = weights[self.rows.of_tensor(str(item.counted_as))]
            for number, (first, piece) in enumerate(blocks_of(item, self.rows.blocks)):
                name = item.name if self.rows.blocks == 1 else f"{item.name}, block {number}"
                joined.places[name] = item.name, first
                pieces.append(replace(piece, name=name))
                steps[name] = Linear([[(1.0, own[number])]])
        combine_pass(pieces, steps, joined, **means, progress=update)


class Joined:
    """A `stream.Sink` that gives another the pieces of tensors as parts of them.

    Attributes:
        places: name of a piece -> its tensor, and the element where it begins.
    """

    def __init__(self, sink: Sink, items: Mapping[str, Item]) -> None:
        self._sink, self._items = sink, items
        self.places: dict[str, tuple[str, int]] = {}

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        name, first = self.places.get(item.name, (item.name, 0))
        self._sink.write(self._items[name], first + start, first + stop, values)


def blocks_of(item: Item, blocks: int) -> list[tuple[int, Item]]:
    """An item cut as `torch.tensor_split` cuts its entries: where each block begins, and the block.
    Empty blocks are left out but where the item is."""
    if blocks == 1:
        return [(0, item)]
    least, more = divmod(item.numel, blocks)
    sizes = [least + (number < more) for number in range(blocks)]
    starts = [0, *itertools.accumulate(sizes)]
    return [
        (start, slice_of(item, start, (size,)))
        for start, size in zip(starts, sizes, strict=False)
        if size or not start
    ]


@dataclass(frozen=True, eq=False)
class ByMasks:
    """A `plan.Learned` by masked bases in files: theta_0 and their mean where masks overlap.

    Attributes:
        files: one for each basis.
        write: as above.
    """

    method: str
    files: Sequence[Path]
    write: Callable[[Path], None]

    def merge_into(self, plan: Plan, sink: Sink, items: Sequence[Item]) -> None:
        """As in `plan.Learned`."""
        masked = [Sparse.open(file) for file in self.files]
        means, names = plan.means, base_names(plan)

        def of_masked(item: Item) -> Item:
            name = names[str(item.counted_as)]
            return replace(item, inputs=tuple(Part.of(each, name, "delta") for each in masked))

        stitched = [of_masked(item) if item.tunables else item for item in items]
        moving = [item.name for item in items if item.tunables]
        step: Step = Stitch(len(masked))
        update = means.pop("progress")("Merged model", sum(item.nbytes for item in stitched))
        combine_pass(stitched, dict.fromkeys(moving, step), sink, **means, progress=update)


def base_names(plan: Plan) -> dict[str, str]:
    """Tensor that counts -> its name in the base's files."""
    bases = ((item.name, item.base) for item in plan.tasks.items)
    return {name: (base and base.name) or name for name, base in bases}


def bases_of(plan: Plan) -> Tensor:
    """The bases from the vectors that the plan reads, [N, M] float64."""
    if plan.recipe.store is None:
        assert plan.basis is not None
        return plan.basis.weighted_encoder
    return torch.diag(torch.tensor(plan.recipe.weights, dtype=torch.float64))


def mixtures_of(plan: Plan, mixture: Mixture) -> Tensor:
    """How much of each task's data a basis learns from, [T, M] float64, without negative entries.

    `encoder`: W_e, of the bases of a store that stand for different numbers of tasks (`tvb add` to
    balanced ones) times the store's v. `equal`: 1/T. `positive`: PCA>=0 of the paper's appendix,
    the softmax of a column's positive entries.

    Raises:
        UserError: W_e has negative entries, or a column has no positive one.
    """
    store, basis = plan.recipe.store, plan.basis
    encoder: Tensor | None
    if store is None:
        assert isinstance(basis, Basis)
        encoder = basis.encoding.encoder
    else:
        encoder = store.bases.encoder
        if encoder is not None:
            encoder = (encoder * store.bases.shares)[:, list(store.order)]
    if mixture == "equal":
        tasks = plan.recipe.tasks if store is None else store.bases.tasks
        return torch.full((len(tasks), bases_of(plan).shape[1]), 1 / len(tasks)).double()
    if encoder is None:
        raise UserError(needs_mixtures("this", mixture))
    if mixture == "positive":
        if float(encoder.amax(0).min()) <= 0:
            raise UserError("--mixture positive: a basis has no positive weight; take equal")
        return torch.where(encoder > 0, encoder, -torch.inf).softmax(0)
    if float(encoder.min()) < 0:
        raise UserError(needs_mixtures("this", mixture))
    if float(encoder.sum(0).min()) <= 0:
        raise UserError("a basis holds no task (its column of W_e is 0); take fewer bases")
    return encoder


def check_basis(plan: Plan, mixture: Mixture) -> None:
    """Raise UserError where the recipe's basis is known to give no mixtures of tasks."""
    recipe = plan.recipe
    name = recipe.settings.basis if recipe.store is None else recipe.store.bases.basis
    if name in MIXED and mixture == "encoder":
        raise UserError(needs_mixtures(str(name), mixture))


def needs_mixtures(name: str, mixture: Mixture) -> str:
    """Why a basis is refused."""
    return (
        f"`basis` is {name}, whose encoder has negative weights: a basis learns from a mixture of "
        "the tasks' data, which has none; take balanced, ae, rand_select or none, or give "
        f"--mixture equal{' or positive' if mixture == 'encoder' else ''}"
    )
