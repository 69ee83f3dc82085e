"""Merging of matrices one by one, with all inputs in memory; three dimensions by slices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tvb_mergekit.core.basis import Combination
from tvb_mergekit.core.lora import Factors, cores_of
from tvb_mergekit.core.matrices import rounding_noise
from tvb_mergekit.core.merge import Linear
from tvb_mergekit.core.settings import GLOBAL_KEYS, METHODS, Settings
from tvb_mergekit.errors import UserError
from tvb_mergekit.names import TRANSPOSED
from tvb_mergekit.progress import silent
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.passes import RunningSums, combine_pass
from tvb_mergekit.tensors.source import StateDict, Weights
from tvb_mergekit.tensors.stream import Item, Part, Sink
from tvb_mergekit.tensors.writing import Stacked

LOG = logging.getLogger(__name__)
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
    if settings.matrices is not None:
        if not any(settings.is_matrix(item.name, item.shape) for item in items):
            raise UserError(
                f"`matrices` is {settings.matrices!r}: it is found in the name of no tensor of two "
                "or three dimensions that takes part; leave it out, or mend it"
            )


def _is_sampled(item: Item) -> bool:
    return any(part.share < 1 for part in item.inputs)


class Joined:
    """A sink that hands pieces of tensors on as parts of these tensors.

    Attributes:
        places: name of a piece -> its tensor, and its first element there. Others stay as they are.
    """

    def __init__(self, sink: Sink, places: Mapping[str, tuple[Item, int]]) -> None:
        self._sink, self.places = sink, dict(places)

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        joined, first = self.places.get(item.name, (item, 0))
        self._sink.write(joined, first + start, first + stop, values)


def slice_of(item: Item, first: int, shape: tuple[int, ...]) -> Item:
    """An item of this shape from element `first` on."""
    item = item.loaded()  # else a pass would load the complete tensor in place of the slice
    base = None if item.base is None else _moved(item.base, first)
    return replace(
        item, shape=shape, base=base, inputs=tuple(_moved(p, first) for p in item.inputs)
    )


def _moved(part: Part, first: int) -> Part:
    def read(start: int, stop: int, buffer: Tensor) -> Tensor:
        return part.read(first + start, first + stop, buffer)

    return replace(part, read=read)


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
    encoder = merged_encoder(basis)
    rows, columns = item.shape[-2:]
    starts = range(0, max(1, item.numel), max(1, rows * columns))  # one if it is empty
    for number, first in enumerate(starts):
        matrix = item if len(item.shape) == 2 else slice_of(item, first, (rows, columns))
        within = Joined(sink, {item.name: (item, first)})
        updates = item.updates(number) if item.factored else []
        if updates and sum(each.rank for each in updates) < min(rows, columns):
            merged, together = _by_cores(basis.settings, matrix, encoder, updates)
            yield _add(matrix, merged, together, within, engine, scale, add_base)
            continue
        merging = partial(_merged, basis.settings, matrix, encoder)
        yield merge_one(matrix, encoder, merging, within, engine, scale, add_base, sums)


def merged_encoder(basis: Combination) -> Tensor:
    """From the inputs to the bases that the method merges, [N, M], or to their sum, [N, 1]."""
    encoder = basis.weighted_encoder
    return encoder.sum(1, keepdim=True) if basis.settings.sum_alone else encoder


def _merged(settings: Settings, matrix: Item, encoder: Tensor, bases: Tensor) -> Tensor:
    shares = None
    if _is_sampled(matrix):
        squares = encoder.square()
        each = torch.tensor([part.share for part in matrix.inputs], dtype=torch.float64)
        shares = (each @ squares / squares.sum(0)).nan_to_num(1.0).tolist()  # 1 of a zero basis
    return _by_inputs(settings, matrix, bases, input_noise(matrix, bases), shares)


def _by_inputs(
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
        core = _by_inputs(basis.settings, item, bases) * (values.lambda_ * basis.scale)
    else:
        terms = [scale * w for scale, w in basis.terms(values)]
        core = _combined(cores, torch.stack(terms).sum(0)[:, None])[0]
    near, sizes, far = torch.linalg.svd(core.double(), full_matrices=False)
    rank = int((sizes > 1e-6 * sizes[:1].sum()).sum())
    roots = sizes[:rank].sqrt()
    halves = left @ (near[:, :rank] * roots), (roots[:, None] * far[:rank]) @ right.T
    return Factors(halves[0].float(), halves[1].float())


def _combined(cores: Tensor, encoder: Tensor) -> Tensor:
    """[M, p, q] float32 of [T, p, q] and [T, M]."""
    return torch.einsum("tpq,tm->mpq", cores, encoder).float()


def _by_cores(
    settings: Settings, item: Item, encoder: Tensor, updates: Sequence[Factors]
) -> tuple[Tensor, float]:
    """D [m, n] of a matrix, and the length of all bases together, by the cores of its updates."""
    left, cores, right = cores_of(updates)
    bases = _combined(cores, encoder)
    core = _by_inputs(settings, item, bases).double()
    return (left @ core).float() @ right.T.float(), _length(bases)


def _length(bases: Tensor) -> float:
    return sum(float(torch.linalg.vector_norm(base)) for base in bases)


def input_noise(matrix: Item, bases: Tensor) -> list[float] | None:
    """The noise of each basis [m, n] if the inputs are differences that were rounded to 16 bits."""
    stored = [part.dtype for part in matrix.inputs if part.holds == "delta"]
    for dtype in stored:
        if dtype in (torch.bfloat16, torch.float16):
            return [rounding_noise(base, dtype) for base in bases]
    return None


def merge_one(
    matrix: Item,
    encoder: Tensor,
    merging: Callable[[Tensor], Tensor],
    sink: Sink,
    engine: Engine,
    scale: float = 1.0,
    add_base: bool = True,
    sums: RunningSums | None = None,
) -> bool:
    """Write theta_0 (or 0) + scale * D of one matrix [m, n].

    Args:
        encoder: of the bases, from the inputs of `matrix`, [N, M].
        merging: the bases [M, m, n] -> D [m, n], float32.
        sums: of the inputs.

    Returns:
        Whether D is more than FAR times as long as all bases together.
    """
    engine, matrix = replace(engine, progress=silent), matrix.loaded()
    stacked = stacked_bases(matrix, encoder, engine, sums)
    with torch.no_grad():
        together, merged = _length(stacked), merging(stacked).to("cpu")
    del stacked
    return _add(matrix, merged, together, sink, engine, scale, add_base)


def _add(
    matrix: Item,
    merged: Tensor,
    together: float,
    sink: Sink,
    engine: Engine,
    scale: float,
    add_base: bool,
) -> bool:
    """Write theta_0 (or 0) + scale * D; as `merge_one`."""
    direction = Part.of(StateDict({matrix.name: merged.reshape(-1)}), matrix.name, "delta")
    step = Linear([[(scale, torch.ones(1, dtype=torch.float64))]], add_base)
    combine_pass([replace(matrix, inputs=(direction,))], {matrix.name: step}, sink, engine)
    return float(torch.linalg.vector_norm(merged)) > FAR * together


def stacked_bases(
    item: Item, encoder: Tensor, engine: Engine, sums: RunningSums | None = None
) -> Tensor:
    """The bases of one tensor from its inputs, [M, *shape] float32 on the first device.

    Args:
        encoder: [N, M].
        sums: of the inputs.
    """
    plain, count = replace(item, out=torch.float32), encoder.shape[1]
    bases = Stacked([plain], count)
    combine_pass([plain], {item.name: Linear.of(encoder)}, bases, engine, sums=sums)
    return bases.held.pop(item.name).view(count, *item.shape).to(engine.device)
