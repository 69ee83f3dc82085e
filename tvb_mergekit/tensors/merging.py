"""Basis and merged model from a recipe's settings and its tensors.

Methods that combine entries work by `passes`. Others merge matrices one by one, with all inputs of
one matrix in memory; tensors of three dimensions by slices.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tvb_mergekit.core.basis import Basis, Combination, Step, build, check_not_zero
from tvb_mergekit.core.gram import NO_TENSOR, Factors, GramSums, cores_of, factor_gram
from tvb_mergekit.core.matrices import rounding_noise
from tvb_mergekit.core.registry import Level
from tvb_mergekit.core.settings import BASES, GLOBAL_KEYS, METHODS, Settings
from tvb_mergekit.errors import UserError, idle, listed
from tvb_mergekit.names import TRANSPOSED
from tvb_mergekit.progress import silent
from tvb_mergekit.tensors import ranks
from tvb_mergekit.tensors.output import in_memory
from tvb_mergekit.tensors.passes import RunningSums, combine_pass, count_pass, gram_pass, share_of
from tvb_mergekit.tensors.stream import Engine, Item, Part, Sink, Weights
from tvb_mergekit.tensors.taskset import TaskSet

LOG = logging.getLogger(__name__)
OfBases = Sequence[float] | None
HALF = (torch.bfloat16, torch.float16)
FAR = 3  # a merge this many times as long as its bases together gets a warning


def build_basis(tasks: TaskSet, engine: Engine = Engine(), *, inner: bool = False) -> Basis:
    """The basis. G is computed by a pass if it decides the merge, or if `inner`; see `Basis.waits`.

    Trim's thresholds need a pass in any case, which gives G as well unless it was needed before.
    """
    settings, method = tasks.settings, METHODS[tasks.settings.method]
    free = tasks.sums is not None or any(item.factored for item in tasks.items)
    decides = BASES[settings.basis].known < method.needs(settings)
    if free or decides or (inner and method.merges != "entries"):
        basis = encoded_by(tasks, sums_of(tasks, engine))
    else:
        basis = build(settings, tasks.tasks, tasks.weights, None)
    summing = RunningSums(tasks.tasks) if basis.waits else None
    count_if_needed(basis, tasks.items, engine, summing, tasks.unchanged)
    if summing is not None and basis.trims:
        known = encoded_by(tasks, summing.total())
        known.histogram = basis.histogram
        return known
    return basis


def encoded_by(tasks: TaskSet, sums: GramSums) -> Basis:
    """The basis of a task set with these unweighted sums; see `core.basis.build`."""
    # Solvers differ in the last bits between machines.
    return ranks.led(lambda: build(tasks.settings, tasks.tasks, tasks.weights, sums))


def sums_of(tasks: TaskSet, engine: Engine) -> GramSums:
    """The unweighted Gram matrix of a task set: known, of factors, or from a pass over tensors."""
    if tasks.sums is not None:
        return tasks.sums
    factored = [item for item in tasks.items if item.factored]
    read = [item for item in tasks.items if not item.factored]
    if not factored:
        return gram_pass(read, tasks.tasks, engine)
    # Sorted: sums must not depend on the order of files.
    each = (
        item.updates(number)
        for item in sorted(factored, key=lambda item: item.name)
        for number in range(max(len(part.factors or ()) for part in item.inputs))
    )
    sums = factor_gram(each, len(tasks.tasks))
    if read:  # and so the base in part
        sums = sums.plus(replace(gram_pass(read, tasks.tasks, engine), base_norm_squared=0.0))
    return sums


def count_if_needed(
    basis: Combination,
    items: Sequence[Item],
    engine: Engine = Engine(),
    sums: RunningSums | None = None,
    zeros: int = 0,
) -> None:
    """Count the magnitudes of the bases into `basis.histogram`, for TIES."""
    if not any(item.numel for item in items):
        raise UserError(NO_TENSOR)
    if not basis.trims:
        return
    counted = count_pass(basis.weighted_encoder, share_of(items), engine, sums)
    counted = torch.stack(ranks.collect(counted)).sum(0)
    counted[:, 0] += zeros  # the bin of zero
    basis.histogram = counted


def merge_items(
    basis: Combination,
    items: Sequence[Item],
    sink: Sink,
    engine: Engine = Engine(),
    *,
    alone: bool = False,
) -> None:
    """Give `sink` the merged tensors; see `combine_pass`.

    A basis that waits gets the norms of the task vectors.

    Args:
        items: their inputs are those of `basis`, in order. An item without `tunables` stays the
            base's.
        alone: as in `Combination.step`; a merge of all terms adds fl(scale * direction) last.
    """
    moving = [item for item in items if item.tunables]
    waits = isinstance(basis, Basis) and basis.waits and (moving or ranks.place()[1] > 1)
    sums = RunningSums(basis.tasks, inner=False) if waits else None
    matrices = {i.name: count_matrices(basis.settings, i, basis.num_bases) for i in moving}
    if total := sum(matrices.values()):  # they take nearly all of the time
        update = engine.progress("Merged model", total, "matrix")
        engine = replace(engine, progress=silent)
    step_of, far = functools.lru_cache(basis.step), list[str]()  # most are alike
    for name, group in itertools.groupby(items, lambda i: i.name if matrices.get(i.name) else None):
        some = list(group)
        if name is None:
            steps = {each.name: step_of(each.tunables, alone) for each in some if each.tunables}
            combine_pass(some, steps, sink, engine, sums=sums)
            continue
        for is_far in merge_matrices(basis, some[0].loaded(), sink, engine, alone, sums):
            update(1)
            far += [name] * is_far
    if sums is not None and isinstance(basis, Basis):
        basis.sums = check_not_zero(sums.total(), basis.tasks).scaled(basis.weights)
    if far:
        told = "%s merges to far more than its bases together: %s; give it a shorter `flow_time`"
        LOG.warning(told + " or a small lambda", basis.settings.method, listed(far))


def settings_over(base: Weights, settings: Settings) -> Settings:
    """The settings with the default of `transposed` for this base."""
    pattern = TRANSPOSED.get(base.model_type or "")
    used = settings.method in GLOBAL_KEYS["transposed"].methods
    return settings.but(transposed=pattern) if used and not settings.transposed else settings


def count_matrices(settings: Settings, item: Item, bases: int) -> int:
    """The number of matrices in a tensor; 0 if it is merged as a vector."""
    if not settings.is_matrix(item.name, item.shape):
        return 0
    if settings.method == "basis_tsvm" and min(item.shape[-2:]) < bases:
        return 0  # such as a row: a basis would have no direction of its own
    return 1 if len(item.shape) == 2 else item.shape[0]


def check_matrices(settings: Settings, items: Sequence[Item]) -> None:
    """Raise UserError if `matrices` does not match the name of a matrix."""
    if settings.matrices and not any(settings.is_matrix(i.name, i.shape) for i in items):
        names = [item.name for item in items if len(item.shape) in (2, 3)]
        raise UserError(idle("matrices", settings.matrices, names))


def merge_matrices(
    basis: Combination,
    item: Item,
    sink: Sink,
    engine: Engine,
    alone: bool,
    sums: RunningSums | None,
) -> Iterator[bool]:
    """Merge each matrix of a loaded tensor in two or three dimensions; yield as `_write`."""
    settings, shape, tunables = basis.settings, item.shape[-2:], item.tunables
    assert tunables is not None
    scale, encoder = 1.0 if alone else tunables.lambda_ * basis.scale, _merged_encoder(basis)
    size = shape[0] * shape[1]
    rounded = [part.dtype for part in item.inputs if part.holds == "delta" and part.dtype in HALF]
    # The share of the entries that each basis has of random samples, [M]; 1 of a zero basis.
    shares = torch.tensor([part.share for part in item.inputs], dtype=torch.float64)
    squares = encoder.square()
    each = (shares @ squares / squares.sum(0)).nan_to_num(1.0).tolist()
    drawn = None if shares.eq(1).all() else each
    for number, first in enumerate(range(0, max(1, item.numel), max(1, size))):
        matrix = replace(item, first=first, shape=shape)
        updates = item.updates(number) if item.factored else []
        if updates and sum(each.rank for each in updates) < min(shape):
            left, cores, right = cores_of(updates)
            bases = _combined(cores, encoder)
            core = _by_inputs(settings, matrix, bases).double()
            merged = (left @ core).float() @ right.T.float()
        else:
            bases = _bases_of(matrix, encoder, engine, sums)
            noise = [rounding_noise(base, rounded[0]) for base in bases] if rounded else None
            merged = _by_inputs(settings, matrix, bases, noise, drawn)
        yield _write(matrix, merged, bases, sink, engine, scale, not alone)


def merge_one(
    item: Item, encoder: Tensor, merging: Callable[[Tensor], Tensor], sink: Sink, engine: Engine
) -> None:
    """Write theta_0 + D of one tensor.

    Args:
        encoder: of the bases, from the inputs of `item`, [N, M].
        merging: the bases [M, ...] -> D [...], float32.
    """
    item, engine = item.loaded(), replace(engine, progress=silent)
    bases = _bases_of(item, encoder, engine)
    with torch.no_grad():
        merged = merging(bases)
    _write(item, merged, bases, sink, engine)


def merged_factors(basis: Combination, item: Item) -> Factors:
    """The factors of a merged matrix from those of its updates, without loss: no larger matrix.

    All methods except TIES commute with P and Q of `cores_of`: the cores are merged.

    Args:
        item: with `tunables`, a matrix that is `factored`.

    Returns:
        Factors U S^1/2 and S^1/2 V^T, of as many directions as are not zero in float32.
    """
    values = item.tunables
    assert values is not None
    left, cores, right = cores_of(item.updates())
    if count_matrices(basis.settings, item, basis.num_bases):
        bases = _combined(cores, _merged_encoder(basis))
        core = _by_inputs(basis.settings, item, bases) * (values.lambda_ * basis.scale)
    else:
        terms = [scale * w for scale, w in basis.terms(values)]
        core = _combined(cores, torch.stack(terms).sum(0))[0]
    near, sizes, far = torch.linalg.svd(core.double(), full_matrices=False)
    rank = int((sizes > 1e-6 * sizes[:1].sum()).sum())
    roots = sizes[:rank].sqrt()
    halves = left @ (near[:, :rank] * roots), (roots[:, None] * far[:rank]) @ right.T
    return Factors(halves[0].float(), halves[1].float())


def _merged_encoder(basis: Combination) -> Tensor:
    """From the inputs to the bases that the method merges, [N, M], or to their sum, [N, 1]."""
    alone = METHODS[basis.settings.method].needs(basis.settings) is Level.SUM
    return basis.weighted_encoder.sum(1, keepdim=True) if alone else basis.weighted_encoder


def _combined(cores: Tensor, encoder: Tensor) -> Tensor:
    """[M, p, q] float32 of [T, p, q] and [T, M]."""
    return torch.einsum("tpq,tm->mpq", cores, encoder).float()


def _bases_of(
    item: Item, encoder: Tensor, engine: Engine, sums: RunningSums | None = None
) -> Tensor:
    """The bases [M, *shape] of a loaded item, float32 on the device; `sums` of the inputs."""
    plain = replace(item, out=torch.float32)
    held, sink = in_memory([plain], encoder.shape[1])
    combine_pass([plain], {item.name: Step.of(encoder)}, sink, engine, sums=sums)
    return held[item.name].to(engine.device)


def _by_inputs(
    settings: Settings, item: Item, bases: Tensor, noise: OfBases = None, shares: OfBases = None
) -> Tensor:
    """D of bases whose inputs are their columns, or their rows if `transposed`.

    `noise` is the largest singular value that rounding to 16 bits makes in each B_m, and `shares`
    are those of the entries that each has, if it is a random sample.
    """
    shape, turned = item.shape[-2:], settings.is_transposed(item.name)
    outputs, inputs = reversed(shape) if turned else shape
    # The whole matrix counts: bases P B_m Q^T are merged as B_m, P and Q orthonormal
    whole = {"rank": min(shape), "spanned": min(inputs, len(bases) * outputs)}
    known = {"noise": noise, "shares": shares, **whole}
    with torch.no_grad():
        merged: Tensor = METHODS[settings.method](settings, bases.mT if turned else bases, **known)
    return merged.T if turned else merged


def _write(
    matrix: Item,
    merged: Tensor,
    bases: Tensor,
    sink: Sink,
    engine: Engine,
    scale: float = 1.0,
    add_base: bool = True,
) -> bool:
    """Write theta_0 (or 0) + scale * D.

    Returns:
        Whether D is more than FAR times as long as all bases together.
    """
    together = sum(float(torch.linalg.vector_norm(base)) for base in bases)
    merged = merged.to("cpu")
    direction = replace(Part.in_memory(merged, matrix.first), holds="delta")
    step = Step([(scale, torch.ones(1, 1))], add_base)
    combine_pass([replace(matrix, inputs=(direction,))], {matrix.name: step}, sink, engine)
    return float(torch.linalg.vector_norm(merged)) > FAR * together
