"""Vectors of a store as codes: the width of each tensor, and the errors.

`core.quantize` defines the codes, and `docs/files.md` the files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tvb_mergekit.core import quantize
from tvb_mergekit.core.gram import GramSums
from tvb_mergekit.core.quantize import BITS, CHOICES, Width
from tvb_mergekit.errors import UserError
from tvb_mergekit.settings import EMBEDDINGS, METHODS, OUTPUT_LAYER
from tvb_mergekit.store.facts import weight_bytes
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.layout import chunk_length
from tvb_mergekit.tensors.lossless import Lossless
from tvb_mergekit.tensors.passes import gram_pass
from tvb_mergekit.tensors.quantized import Coded, Codes, Coding
from tvb_mergekit.tensors.source import Weights
from tvb_mergekit.tensors.stream import Item, Part
from tvb_mergekit.tensors.taskset import TaskSet
from tvb_mergekit.tensors.writing import SHARD_BYTES

PLAN = "coding.json"  # in STORE.partial: the bits of each tensor of each vector, once chosen
WORKING = ("state.json", "sums.safetensors", "journal.jsonl", PLAN)  # in STORE.partial
RESERVED = ("recipes", "mean", "basis.json", "basis.safetensors", *WORKING)
# Group of tensors -> pattern of their names; the first match counts, otherwise OTHER.
KINDS_OF_TENSORS = {
    "norms": r"norm|\bln_|\bln\d?\b",
    "output layer": OUTPUT_LAYER,
    "embeddings": EMBEDDINGS,
    "attention": r"att(entio)?n|\b[qkvo]_proj\b|query_key_value|\bqkv\b",
    "MLP": r"mlp|ffn|feed_?forward|experts|moe|intermediate|output\.dense|\bfc_?\d|densereludense",
}
OTHER = "other"


@dataclass(frozen=True)
class Quantize:
    """The bits of the elements of a store.

    Attributes:
        bits: one of BITS for all, or a mean; tensors then get different widths.
        size: instead, the most bytes that the whole store may take.

    Raises:
        UserError: bits that there are not, or both.
    """

    bits: float | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        if (self.bits is None) == (self.size is None):
            raise UserError("give either bits or a size, not both")
        name, kind = ("bits", float) if self.size is None else ("size", int)
        value = getattr(self, name)
        if not hasattr(value, "__float__"):
            raise UserError(f"`{name}` is {value!r}: expected a number")
        object.__setattr__(self, name, kind(value))
        if self.bits is not None and not quantize.LEAST_BITS <= self.bits <= BITS[-1]:
            raise UserError(
                f"--bits {self.bits:g}: expected {', '.join(map(str, reversed(BITS)))}, or a mean "
                f"from {quantize.LEAST_BITS} to {BITS[-1]}"
            )

    @property
    def uniform(self) -> Width | None:
        """The width of every tensor; None where they differ."""
        return Width(int(self.bits)) if self.bits in BITS else None

    def weight_bytes(self, numels: Sequence[int], vectors: int, fixed: int) -> int:
        """The most bytes of all codes; other files take `fixed`. Raise UserError below that."""
        if self.bits is not None:
            return vectors * quantize.mean_bytes(numels, self.bits)
        assert self.size is not None
        scales = vectors * sum(2 * -(-numel // quantize.LONG) for numel in numels)
        if self.size < fixed + scales:
            raise UserError(
                f"--size {self.size:,} bytes: the scales of all vectors and the other "
                f"files take {fixed + scales:,}; give more, or keep fewer tasks or "
                "tensors (`exclude`)"
            )
        return self.size - fixed


def choose(
    items: Sequence[Item],
    norms: Sequence[float],
    shares: Tensor,
    wanted: Quantize,
    measure: Callable[[Sequence[float]], Tensor],
    fixed: int = 0,
) -> Coding:
    """Choose the width of each tensor of each of K vectors.

    Args:
        norms: of the vectors, [K].
        shares: the factor of each vector in the sum that a merge adds, [K].
        measure: units -> squared errors at each of CHOICES, [items, K, 9]; called if widths differ.
        fixed: bytes of the other files in the store, which a size includes.
    """
    numels, count = [item.numel for item in items], len(norms)
    units = [quantize.unit_of(norm, sum(numels)) for norm in norms]
    most = wanted.weight_bytes(numels, count, fixed)
    if wanted.uniform is not None:
        places = np.full((len(items), count), CHOICES.index(wanted.uniform))
    else:
        errors = measure(units).reshape(-1, len(CHOICES)).numpy()
        each = [numel for numel in numels for _ in range(count)]
        owners = [*range(count)] * len(numels)
        places = quantize.choose_widths(errors, each, most, owners).reshape(len(items), count)
    names = [item.name for item in items]
    return Coding(
        [
            Coded(unit, {name: CHOICES[k] for name, k in zip(names, column, strict=True)})
            for unit, column in zip(units, places.T.tolist(), strict=True)
        ],
        shares,
    )


def to_json(coding: Coding) -> str:
    """The text of STORE.partial/coding.json."""
    return json.dumps([[coded.unit, coded.widths] for coded in coding.coded])


def from_json(file: Path, shares: Tensor) -> Coding:
    """The coding that an interrupted build has chosen."""
    try:
        made = [
            Coded(float(unit), {name: Width(*each) for name, each in widths.items()})
            for unit, widths in json.loads(file.read_bytes())
        ]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file}: cannot be read ({error}); start again without --resume"
        ) from error
    return Coding(made, shares)


def mean_bits(coded: Sequence[Coded], numels: Mapping[str, int]) -> float:
    """Bits of an element on average, without scales; `numels`: tensor -> its elements."""
    total = sum(numels.values()) * len(coded) or 1
    bits = (n * each.widths[name].bits for name, n in numels.items() for each in coded)
    return sum(bits) / total


def fixed_bytes(inputs: TaskSet, vectors: int) -> int:
    """The most bytes of a store without codes: headers, configurations, facts, recipes."""
    items, tasks, config = inputs.items, len(inputs.tasks), inputs.folder
    shards = 1 + sum(item.numel for item in items) // SHARD_BYTES  # a byte an element, or less
    names = sum(len(item.name.encode()) for item in items)
    headers = 600 * shards + 150 * len(items) + 2 * names
    if shards > 1:  # and an index
        headers += 60 * len(items) + names
    files = 0
    if config is not None and (config / "config.json").is_file():
        files += (config / "config.json").stat().st_size + 500
        files += sum(file.stat().st_size for file in config.glob("*.py"))
    facts = 8_000 + 1500 * tasks + 2 * len(json.dumps(dict(inputs.left_out)))
    numbers = 2000 + 8 * (6 * tasks**2 + 2 * len(items) * (vectors + 1))
    listed = 1 if vectors == tasks else vectors  # in each recipe that forgets a task
    recipes = (len(METHODS) - 1) * (800 + 70 * vectors) + tasks * (1200 + 70 * listed)
    return vectors * (headers + files) + facts + numbers + recipes


def stored_gram(vectors: Sequence[Weights], names: Sequence[str], engine: Engine) -> Tensor:
    """Inner products of vectors as their codes give them, [K, K] float64."""
    return gram_pass(items_of(vectors), names, engine).gram


def items_of(vectors: Sequence[Weights]) -> list[Item]:
    """The tensors of the vectors of a store."""
    first, items = vectors[0], []
    for name, info in first.tensors.items():
        base = Part.of(first.base, name) if isinstance(first, Lossless) and first.base else None
        parts = tuple(Part.of(vector, name, "delta") for vector in vectors)
        items.append(Item(name, info.shape, base, parts))
    return items


def measured_tensors(measured: Sequence[Sequence[float]]) -> dict[str, Tensor]:
    """`tensor_squares` and `tensor_errors` [items, K + 1], from numbers that a sink collected."""
    table = torch.tensor(measured, dtype=torch.float64)
    squares, errors = table.chunk(2, dim=1)
    return {"tensor_squares": squares.contiguous(), "tensor_errors": errors.contiguous()}


def lost(tensors: Mapping[str, Tensor]) -> Tensor:
    """The norms of the errors of each vector and of their sum, [K + 1]."""
    return tensors["tensor_errors"].sum(0).sqrt()


def sums_of(bases: Bases, order: Sequence[int]) -> GramSums | None:
    """G of decoded task vectors; None if a task's name hides the norm of the base."""
    facts, order = bases.facts, list(order)
    if "base" in facts.tasks or "base" not in facts.norms:  # its norm takes the base's place
        return None
    gram = bases.tensors["gram_bases"][order][:, order]
    for k, square in zip(order, gram.diagonal().tolist(), strict=True):
        if not square:
            raise UserError(
                f"task `{facts.tasks[k]}` of {bases.path} got no bits when it was stored, beside "
                "larger task vectors: leave it out, or build the store with more bits"
            )
    if not bases.scales[order].eq(1).all():  # G is of the weighted models
        return None
    chunks = [chunk_length(count, "cpu") for count in (len(order), len(facts.tasks))]
    if facts.store.codec == "lossless" and chunks[0] != chunks[1]:
        return None  # the last digits of G would not be those of the models
    sizes = [facts.matrix_norms[name] for name in ("base", *(facts.tasks[k] for k in order))]
    return GramSums(
        gram,
        facts.norms["base"] ** 2,
        num_parameters=facts.num_parameters,
        matrix_squares=torch.tensor(sizes, dtype=torch.float64) ** 2,
    )


def slugs(names: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    """A name for a file or folder for each, which no two share even where case does not count."""
    used = {name.lower() for name in taken}
    made = []
    for name in names:
        short = slug = re.sub(r"[^\w.-]+", "-", name)[:60].lstrip(".") or "task"
        number = 1
        while slug.lower() in used:
            number += 1
            slug = f"{short}-{number}"
        used.add(slug.lower())
        made.append(slug)
    return made


@dataclass(frozen=True)
class Loss:
    """Bytes and error of a vector, or of a group of tensors in all vectors, as codes.

    `bits` is the mean of an element. `relative_error` is None if the norm is zero.
    """

    name: str
    bytes: int
    bits: float
    relative_error: float | None


@dataclass(frozen=True)
class Losses:
    """Errors of the codes of a store.

    Attributes:
        vectors: One for each task, or for B0, B1 ... and PCA's mean.
        sum: The relative error of the sum of the vectors. None after `tvb add` or `tvb remove`,
            which do not measure it.
        groups: One for each group of KINDS_OF_TENSORS that the model has.
    """

    vectors: list[Loss]
    sum: float | None
    groups: list[Loss]


def losses(bases: Bases) -> Losses | None:
    """Errors of the codes of a store; None without codes."""
    facts, tensors = bases.facts, bases.tensors
    vectors = [vector for vector in bases.sources if isinstance(vector, Codes | Lossless)]
    if not vectors:
        return None
    held = [[vector.stored.tensors[name].nbytes for vector in vectors] for name in bases.names]
    squares = errors = np.zeros((len(held), len(vectors)))
    if "tensor_errors" in tensors:
        squares, errors = tensors["tensor_squares"].numpy(), tensors["tensor_errors"].numpy()
    sizes = [vectors[0].tensors[name].numel for name in bases.names]
    numels, exact = np.broadcast_to(np.array(sizes)[:, None], (len(sizes), len(vectors))), True
    bits = 8 * np.array(held)
    if isinstance(vectors[0], Codes):  # without scales
        exact = False
        widths = [[each.coded.widths[n].bits for each in vectors] for n in bases.names]  # type: ignore[union-attr]
        bits = np.array(widths) * numels

    def loss(name: str, nbytes: int, rows: Sequence[int] | slice, columns: int | slice) -> Loss:
        elements = max(int(numels[rows, columns].sum()), 1)
        mean = float(bits[rows, columns].sum()) / elements
        ratio = _ratio(errors[rows, columns], squares[rows, columns])
        return Loss(name, nbytes, mean, 0.0 if exact else ratio)

    of_vectors = [
        loss(label, weight_bytes(facts.store.files, f"{folder}/"), slice(None), place)
        for place, (label, folder) in enumerate(zip(bases.labels, facts.store.folders, strict=True))
    ]
    of_groups, known = [], errors.shape[1] > len(vectors)
    for group in (*KINDS_OF_TENSORS, OTHER):
        rows = [row for row, name in enumerate(bases.names) if group_of(name) == group]
        if rows:
            nbytes = sum(sum(held[row]) for row in rows)
            of_groups.append(loss(group, nbytes, rows, slice(len(vectors))))
    return Losses(of_vectors, _ratio(errors[:, -1], squares[:, -1]) if known else None, of_groups)


def group_of(name: str) -> str:
    """The group of KINDS_OF_TENSORS for the name of a tensor."""
    for group, pattern in KINDS_OF_TENSORS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return group
    return OTHER


def _ratio(errors: NDArray[np.float64], squares: NDArray[np.float64]) -> float | None:
    """The relative norm of errors, from squared norms."""
    whole = float(squares.sum())
    return math.sqrt(float(errors.sum()) / whole) if whole > 0 else None
