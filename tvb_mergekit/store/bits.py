"""Vectors of a store as codes: the width of each tensor, and the errors.

`core.quantize` defines the codes, and `docs/files.md` the files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tvb_mergekit.core.gram import GramSums
from tvb_mergekit.core.quantize import Width, unit_of
from tvb_mergekit.errors import UserError
from tvb_mergekit.settings import EMBEDDINGS, OUTPUT_LAYER
from tvb_mergekit.store.facts import OF_TASKS, weight_bytes
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.checkpoint import Decoded
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.layout import chunk_length
from tvb_mergekit.tensors.passes import gram_pass
from tvb_mergekit.tensors.quantized import Quantizing
from tvb_mergekit.tensors.source import Weights
from tvb_mergekit.tensors.stream import Item, Part

WORKING = ("state.json", "sums.safetensors", "journal.jsonl")  # in STORE.partial
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


def coding_of(
    items: Sequence[Item], norms: Sequence[float], shares: Tensor, bits: int
) -> Quantizing:
    """Codes of one width for K vectors of these norms.

    Args:
        shares: the factor of each vector in the sum that a merge adds, [K].
    """
    numel = sum(item.numel for item in items)
    return Quantizing([unit_of(norm, numel) for norm in norms], Width(bits), shares)


def stored_gram(vectors: Sequence[Weights], names: Sequence[str], engine: Engine) -> Tensor:
    """Inner products of vectors as their codes give them, [K, K] float64."""
    return gram_pass(items_of(vectors), names, engine).gram


def items_of(vectors: Sequence[Weights]) -> list[Item]:
    """The tensors of the vectors of a store."""
    first, items = vectors[0], []
    for name, info in first.tensors.items():
        base = Part.of(first.base, name) if first.base and first.holds == "weight" else None
        parts = tuple(Part.of(vector, name, "delta") for vector in vectors)
        items.append(Item(name, info.shape, base, parts))
    return items


def measured_tensors(
    measured: Sequence[Sequence[float]], weights: Sequence[float] | None = None
) -> dict[str, Tensor]:
    """`tensor_squares` and `tensor_errors`, from numbers that a sink collected.

    [items, K + 1], with the sum of the vectors last. Samples are measured without weights and
    without a sum, which makes these [items, K].
    """
    squares, errors = torch.tensor(measured, dtype=torch.float64).chunk(2, dim=1)
    factors = torch.ones(1) if weights is None else torch.tensor(weights).double().square()
    return {"tensor_squares": squares * factors, "tensor_errors": errors * factors}


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
                f"task `{facts.tasks[k]}` of {bases.path} is zero: leave it out, or build the "
                "store with more bits"
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
    if facts.store.codec not in OF_TASKS:
        return None
    vectors = cast("list[Decoded]", bases.sources)
    held = [[vector.bytes_of(name) for vector in vectors] for name in bases.names]
    squares = errors = np.zeros((len(held), len(vectors)))
    if "tensor_errors" in tensors:
        squares, errors = tensors["tensor_squares"].numpy(), tensors["tensor_errors"].numpy()
    sizes = [vectors[0].tensors[name].numel for name in bases.names]
    numels = np.broadcast_to(np.array(sizes)[:, None], (len(sizes), len(vectors)))
    bits = np.array([[vector.bits_of(name) for vector in vectors] for name in bases.names])
    exact = facts.store.codec == "lossless"

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
    total = _ratio(errors[:, -1], squares[:, -1]) if known else None
    if facts.store.codec == "sampled":  # errors of independent samples add up in squares
        total = _ratio(errors, tensors["gram_bases"].sum().numpy())
    return Losses(of_vectors, total, of_groups)


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
