"""Before a build: what codes of each width, and what M bases, would take and lose.

The errors of codes are measured, in one pass over the models. Those of bases follow from the Gram
matrix, which is another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tvb_mergekit.core.basis import warnings
from tvb_mergekit.core.encoders import Gram, encode
from tvb_mergekit.core.gram import block_budget
from tvb_mergekit.core.merge import Linear
from tvb_mergekit.core.quantize import BITS, CHOICES, unit_of
from tvb_mergekit.progress import Progress, phase, silent
from tvb_mergekit.settings import Settings
from tvb_mergekit.store.bits import RESERVED, Quantize, Vectors, choose, slugs
from tvb_mergekit.store.build import CPU, LOG, Warn, plan_of
from tvb_mergekit.store.facts import DtypeName
from tvb_mergekit.store.inputs import Inputs
from tvb_mergekit.store.store import MEAN, basis_folder, dtype_name
from tvb_mergekit.tensors.adapter import MARKER
from tvb_mergekit.tensors.merging import build_basis
from tvb_mergekit.tensors.passes import measure_pass
from tvb_mergekit.tensors.quantized import Coding
from tvb_mergekit.tensors.stream import Item

MIXED = (1.5, 0.5)  # bits in the mean
MOST = 12  # numbers of bases that are tried


class Kept(NamedTuple):
    """One way to keep T tasks: all task vectors as codes of `bits`, or `num_bases` of a basis.

    `bytes` are of the files that hold the vectors. `errors` are relative, of each task. `sum_error`
    is that of their sum; of codes the most that it can be, what all lose added up. None: the tasks
    add up to nothing.
    """

    bits: float | None
    num_bases: int | None
    bytes: int
    errors: dict[str, float]
    sum_error: float | None

    @property
    def mean_error(self) -> float:
        return math.fsum(self.errors.values()) / len(self.errors)

    @property
    def worst(self) -> str:
        """The task with the largest error."""
        return max(self.errors, key=lambda task: self.errors[task])


@dataclass(frozen=True)
class Comparison:
    """What a recipe's tasks would take and lose as codes and as bases.

    Attributes:
        basis: whose bases `kept` has, in `dtype`; None where there are none (rand_proj).
        kept: codes of falling bits, then bases of rising M.
    """

    tasks: Sequence[str]
    base_model: str
    model_bytes: int
    basis: str | None
    dtype: DtypeName
    kept: list[Kept]


def compare(
    inputs: Inputs,
    *,
    device: torch.device = CPU,
    budget: int | None = None,
    progress: Progress = silent,
    warn: Warn = LOG.warning,
) -> Comparison:
    """Measure and compute what each way to keep the tasks of a recipe would take and lose.

    Args:
        budget: bytes that may be allocated; None: TVB_MERGEKIT_BLOCK_MB.
        warn: called with what speaks against a model, a line each.

    Raises:
        UserError: the inputs are bad.
    """
    budget = budget or block_budget()
    whole = build_basis(
        Settings(method="basis_ta", basis="none"),
        inputs.tasks,
        inputs.weights,
        lambda: inputs.items,
        devices=[device],
        budget=budget,
        known=inputs.sums,
        key=None if inputs.in_memory else inputs.key,
        models=inputs.models,
        progress=progress,
    )
    for line in warnings(whole, dict(zip(inputs.tasks, inputs.models, strict=True))):
        warn(line)
    gram = whole.sums.gram
    norms = gram.diagonal().sqrt()
    numel = sum(item.numel for item in inputs.items)
    units = [unit_of(norm, numel) for norm in norms.tolist()]
    measured = measure_pass(
        inputs.items,
        Linear.of(torch.diag(torch.tensor(inputs.weights, dtype=torch.float64))),
        units,
        devices=[device],
        budget=budget,
        progress=progress("Errors at each width", inputs.nbytes),
    )
    vectors = Vectors(norms.tolist(), torch.ones(len(units)), units=units)
    kept = []
    for bits in sorted((*BITS, *MIXED), reverse=True):
        coding = choose(inputs.items, vectors, Quantize(bits), 0, lambda units: measured)
        kept.append(_as_codes(inputs, bits, coding, measured, gram))
    settings = inputs.settings
    if settings.basis == "none" or not settings.names_a_basis:
        settings = Settings(method="basis_ta", basis="balanced")
    if settings.basis != "rand_proj":
        counts = np.linspace(1, len(units), min(len(units), MOST)).round().astype(int)
        for count in counts.tolist():
            with phase(f"Encoding M = {count}"):
                kept.append(_as_bases(inputs, settings, count, gram))
    return Comparison(
        inputs.tasks,
        inputs.base_model,
        inputs.model_bytes,
        None if settings.basis == "rand_proj" else settings.basis,
        dtype_name(inputs.own_dtype),
        kept,
    )


def _as_codes(inputs: Inputs, bits: float, coding: Coding, measured: Tensor, gram: Tensor) -> Kept:
    places = torch.tensor(
        [[CHOICES.index(width) for width in coding.widths(item.name)] for item in inputs.items]
    )
    lost = measured.gather(2, places[:, :, None])[:, :, 0]  # squared, [items, T]
    errors = (lost.sum(0) / gram.diagonal()).sqrt()
    # In each tensor no more than the norms of what its vectors lose, added up.
    most = lost.sqrt().sum(1).square().sum().sqrt()
    items = [item.coded(coding.widths(item.name)) for item in inputs.items]
    nbytes = _file_bytes(inputs, items, slugs(inputs.tasks, RESERVED), coding)
    named = dict(zip(inputs.tasks, errors.tolist(), strict=True))
    return Kept(bits, None, nbytes, named, _share(float(most), gram))


def _as_bases(inputs: Inputs, settings: Settings, count: int, gram: Tensor) -> Kept:
    sizes = {"num_bases": count, "basis_ratio": None, "energy": None}
    encoding = encode(gram, settings.model_copy(update=sizes))
    assert encoding.reconstruction is not None
    # by the root of G: the difference of nearly equal squares would leave nothing
    root = torch.from_numpy(Gram.of(gram).root)
    residual = root @ encoding.reconstruction - root
    errors = residual.norm(dim=0) / gram.diagonal().sqrt()
    items = [replace(item, out=inputs.own_dtype) for item in inputs.items]
    folders = [basis_folder(m) for m in range(count)] + [MEAN] * (settings.basis == "pca")
    named = dict(zip(inputs.tasks, errors.tolist(), strict=True))
    of_sum = _share(float(residual.sum(1).norm()), gram)
    return Kept(None, count, _file_bytes(inputs, items, folders), named, of_sum)


def _share(error: float, gram: Tensor) -> float | None:
    """An error relative to the norm of the sum of all tasks; None where that is zero up to
    rounding."""
    square = float(gram.sum())
    return error / math.sqrt(square) if square > 1e-12 * float(gram.abs().sum()) else None


def _file_bytes(
    inputs: Inputs, items: Sequence[Item], folders: Sequence[str], coding: Coding | None = None
) -> int:
    """What the weight files of these folders would take, headers too."""
    plan = plan_of(items, inputs.folder)
    return sum(
        shard.nbytes({"format": "pt", MARKER: name}, index, coding.coded[index] if coding else None)
        for index, name in enumerate(folders)
        for shard in plan
    )
