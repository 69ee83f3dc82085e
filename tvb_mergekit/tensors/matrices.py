"""Merging of matrices one by one, with all inputs in memory; three dimensions by slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tvb_mergekit.core.basis import Combination, Step
from tvb_mergekit.core.gram import Factors, cores_of
from tvb_mergekit.core.matrices import rounding_noise
from tvb_mergekit.core.settings import GLOBAL_KEYS, METHODS, Settings
from tvb_mergekit.errors import UserError
from tvb_mergekit.names import TRANSPOSED
from tvb_mergekit.progress import silent
from tvb_mergekit.tensors.passes import RunningSums, combine_pass
from tvb_mergekit.tensors.stream import Engine, Item, Part, Sink, Weights
from tvb_mergekit.tensors.writing import Stacked

FAR = 3  # a merge this many times as long as its bases together gets a warning


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
    if settings.matrices is None or any(settings.is_matrix(i.name, i.shape) for i in items):
        return
    raise UserError(
        f"`matrices` is {settings.matrices!r}: it is found in the name of no tensor of two "
        "or three dimensions that takes part; leave it out, or mend it"
    )


class Within:
    """A sink that hands pieces of a matrix on as parts of a tensor, from element `first` on."""

    def __init__(self, sink: Sink, item: Item, first: int) -> None:
        self.sink, self.item, self.first = sink, item, first

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        self.sink.write(self.item, self.first + start, self.first + stop, values)


def slice_of(item: Item, first: int, shape: tuple[int, ...]) -> Item:
    """An item of this shape from element `first` on."""

    def moved(part: Part) -> Part:
        return replace(part, read=lambda a, b, buffer: part.read(first + a, first + b, buffer))

    item = item.loaded()  # else a pass would load the complete tensor in place of the slice
    base = None if item.base is None else moved(item.base)
    return replace(item, shape=shape, base=base, inputs=tuple(map(moved, item.inputs)))


def merge_matrices(
    basis: Combination,
    item: Item,
    scale: float,
    sink: Sink,
    add_base: bool,
    engine: Engine,
    sums: RunningSums | None = None,
) -> Iterator[bool]:
    """Merge each matrix of a tensor in two or three dimensions; results as of `merge_one`."""
    encoder, settings = merged_encoder(basis), basis.settings
    rows, columns = item.shape[-2:]
    starts = range(0, max(1, item.numel), max(1, rows * columns))  # one if it is empty
    for number, first in enumerate(starts):
        matrix = item if len(item.shape) == 2 else slice_of(item, first, (rows, columns))
        within = Within(sink, item, first)
        updates = item.updates(number) if item.factored else []
        if updates and sum(each.rank for each in updates) < min(rows, columns):
            left, cores, right = cores_of(updates)
            bases = _combined(cores, encoder)
            core = by_inputs(settings, matrix, bases).double()
            merged = (left @ core).float() @ right.T.float()
            yield _write(matrix, merged, bases, within, engine, scale, add_base)
        else:
            bases = stacked_bases(matrix, encoder, engine, sums)
            noise, drawn = input_noise(matrix, bases), _drawn(matrix, encoder)
            merged = by_inputs(settings, matrix, bases, noise, drawn)
            yield _write(matrix, merged, bases, within, engine, scale, add_base)


def merged_encoder(basis: Combination) -> Tensor:
    """From the inputs to the bases that the method merges, [N, M], or to their sum, [N, 1]."""
    encoder = basis.weighted_encoder
    return encoder.sum(1, keepdim=True) if basis.settings.sum_alone else encoder


def by_inputs(
    settings: Settings,
    item: Item,
    bases: Tensor,
    noise: Sequence[float] | None = None,
    shares: Sequence[float] | None = None,
) -> Tensor:
    """D of bases whose inputs are their columns, or their rows if `transposed`.

    Args:
        noise: the largest singular value that rounding to 16 bits makes in each B_m, [M].
        shares: of the entries that each B_m has, if it is a random sample, [M].
    """
    # `rank` is that of the whole matrix: bases P B_m Q^T are merged as B_m, P and Q orthonormal
    known = {"noise": noise, "shares": shares, "rank": min(item.shape[-2:])}
    turned = settings.is_transposed(item.name)
    with torch.no_grad():
        merged: Tensor = METHODS[settings.method](settings, bases.mT if turned else bases, **known)
    return merged.T if turned else merged


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
        bases = _combined(cores, merged_encoder(basis))
        core = by_inputs(basis.settings, item, bases) * (values.lambda_ * basis.scale)
    else:
        terms = [scale * w for scale, w in basis.terms(values)]
        core = _combined(cores, torch.stack(terms).sum(0))[0]
    near, sizes, far = torch.linalg.svd(core.double(), full_matrices=False)
    rank = int((sizes > 1e-6 * sizes[:1].sum()).sum())
    roots = sizes[:rank].sqrt()
    halves = left @ (near[:, :rank] * roots), (roots[:, None] * far[:rank]) @ right.T
    return Factors(halves[0].float(), halves[1].float())


def _combined(cores: Tensor, encoder: Tensor) -> Tensor:
    """[M, p, q] float32 of [T, p, q] and [T, M]."""
    return torch.einsum("tpq,tm->mpq", cores, encoder).float()


def input_noise(matrix: Item, bases: Tensor) -> list[float] | None:
    """The noise of each basis [m, n] if the inputs are differences that were rounded to 16 bits."""
    for part in matrix.inputs:
        if part.holds == "delta" and part.dtype in (torch.bfloat16, torch.float16):
            return [rounding_noise(base, part.dtype) for base in bases]
    return None


def _drawn(matrix: Item, encoder: Tensor) -> list[float] | None:
    """The share of the entries that each basis has of random samples, [M]; None if of all."""
    shares = torch.tensor([part.share for part in matrix.inputs], dtype=torch.float64)
    if shares.eq(1).all():
        return None
    squares = encoder.square()
    found: list[float] = (shares @ squares / squares.sum(0)).nan_to_num(1.0).tolist()
    return found  # 1 of a zero basis


def merge_one(
    matrix: Item, encoder: Tensor, merging: Callable[[Tensor], Tensor], sink: Sink, engine: Engine
) -> bool:
    """Write theta_0 + D of one matrix [m, n].

    Args:
        encoder: of the bases, from the inputs of `matrix`, [N, M].
        merging: the bases [M, m, n] -> D [m, n], float32.

    Returns:
        Whether D is more than FAR times as long as all bases together.
    """
    matrix = matrix.loaded()
    bases = stacked_bases(matrix, encoder, engine)
    with torch.no_grad():
        merged = merging(bases)
    return _write(matrix, merged, bases, sink, engine)


def _write(
    matrix: Item,
    merged: Tensor,
    bases: Tensor,
    sink: Sink,
    engine: Engine,
    scale: float = 1.0,
    add_base: bool = True,
) -> bool:
    """Write theta_0 (or 0) + scale * D; as `merge_one`."""
    together = sum(float(torch.linalg.vector_norm(base)) for base in bases)
    merged = merged.to("cpu")
    direction = replace(Part.in_memory(merged), holds="delta")
    step = Step([(scale, torch.ones(1, 1))], add_base)
    quiet = replace(engine, progress=silent)
    combine_pass([replace(matrix, inputs=(direction,))], {matrix.name: step}, sink, quiet)
    return float(torch.linalg.vector_norm(merged)) > FAR * together


def stacked_bases(
    item: Item, encoder: Tensor, engine: Engine, sums: RunningSums | None = None
) -> Tensor:
    """The bases [M, *shape] of one tensor from its inputs, float32 on the device.

    Args:
        encoder: [N, M].
        sums: of the inputs.
    """
    plain, count = replace(item, out=torch.float32), encoder.shape[1]
    bases, quiet = Stacked([plain], count), replace(engine, progress=silent)
    combine_pass([plain], {item.name: Step.of(encoder)}, bases, quiet, sums=sums)
    return bases.held.pop(item.name).view(count, *item.shape).to(engine.device)
