"""Vectors of a store in a code: its choice, the errors, and names of files."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence

import torch
import xxhash
from torch import Tensor

from tvb_mergekit.core.gram import GramSums
from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.adapter import Adapter
from tvb_mergekit.tensors.lossless import MANTISSA, Draw, Lossless
from tvb_mergekit.tensors.peft_files import MERGE_FIRST
from tvb_mergekit.tensors.stream import Item, Part, Weights
from tvb_mergekit.tensors.taskset import TaskSet

LEAST_SHARE = 1e-6
# Names that folders of vectors must not have; tasks.json is of an export of adapters.
RESERVED = ("mean", "basis.json", "basis.safetensors", "tasks.json")


def items_of(vectors: Sequence[Weights]) -> list[Item]:
    """The tensors of the vectors of a store."""
    first, items = vectors[0], []
    for name, info in first.tensors.items():
        base = Part.of(first.base, name) if first.base and first.holds == "weight" else None
        parts = tuple(Part.of(vector, name, "delta") for vector in vectors)
        items.append(Item(name, info.shape, base, parts))
    return items


def measured_tensors(
    measured: Sequence[Sequence[float]], weights: Sequence[float]
) -> dict[str, Tensor]:
    """`tensor_squares` and `tensor_errors` [items, K], from numbers that a sink collected.

    They are measured without weights.
    """
    squares, errors = torch.tensor(measured, dtype=torch.float64).chunk(2, dim=1)
    factors = torch.tensor(weights, dtype=torch.float64).square()
    return {"tensor_squares": squares * factors, "tensor_errors": errors * factors}


def lost(tensors: Mapping[str, Tensor]) -> Tensor:
    """The norms of the errors of each vector, [K]."""
    return tensors["tensor_errors"].sum(0).sqrt()


def before_coding(
    bases: Bases, order: Sequence[int], names: Container[str | None]
) -> tuple[list[float], list[float]]:
    """`TaskSet.norms` and `missed` of vectors of a store of all tasks, over these tensors of it."""
    held, scales = bases.tensors, bases.scales[list(order)].abs()
    if "tensor_errors" not in held:  # models
        return [], []
    rows = torch.tensor([name in names for name in bases.names])
    missed, squares = (
        held[name][rows].sum(0).sqrt() for name in ("tensor_errors", "tensor_squares")
    )
    norms = held["norms"] * squares / held["tensor_squares"].sum(0).sqrt()
    return (norms[list(order)] / scales).tolist(), (missed[list(order)] / scales).tolist()


def sums_of(bases: Bases, order: Sequence[int]) -> GramSums | None:
    """G of decoded task vectors; None if a task's name hides the norm of the base."""
    facts, order = bases.facts, list(order)
    if "base" in facts.tasks or "base" not in facts.norms:  # its norm takes the base's place
        return None
    gram = bases.tensors["gram_bases"][order][:, order]
    for k, square in zip(order, gram.diagonal().tolist(), strict=True):
        if not square:
            raise UserError(f"task `{facts.tasks[k]}` of {bases.path} is zero: leave it out")
    if not bases.scales[order].eq(1).all():  # G is of the weighted models
        return None
    if facts.store.codec == "lossless" and len(order) < len(facts.tasks):
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
        short = slug = re.sub(r"[^\w.-]+", "-", name)[:60].strip(".") or "task"
        number = 1
        while slug.lower() in used:
            number += 1
            slug = f"{short}-{number}"
        used.add(slug.lower())
        made.append(slug)
    return made


def kept_share(lossless: bool, keep: float | None, dtype: object) -> float:
    """The share of the entries that a store keeps exact; 0 for other forms.

    Args:
        dtype: of a store of other numbers, which the user may choose instead.

    Raises:
        UserError: no such share, or more than one choice.
    """
    if lossless + (keep is not None) + (dtype is not None) > 1:
        raise UserError("choose one of --lossless, --keep and --dtype")
    if keep is None:
        return float(lossless)
    if not LEAST_SHARE <= keep < 1:
        raise UserError(f"--keep {keep:g}: expected a share from {LEAST_SHARE:g} to below 1")
    return round(keep * 2**32) / 2**32


def check_kept(inputs: TaskSet, share: float) -> None:
    """Raise UserError unless a store can keep a share of the entries of the models.

    For all entries, most of the models must have the base's 16-bit dtype.
    """
    key = "--lossless" if share == 1 else "--keep"
    if inputs.settings.basis != "none":
        raise UserError(f"{key} keeps all tasks: leave out the keys of a basis, or the option")
    for task, source in zip(inputs.tasks, inputs.sources, strict=True):
        parts = [(item, item.inputs[inputs.tasks.index(task)]) for item in inputs.items]
        if isinstance(source, Adapter):
            raise UserError(
                f"{key} keeps entries of models, and that of task `{task}` is an adapter: "
                + MERGE_FIRST
            )
        # The files and the other tensors of a lossless store would be lost.
        if isinstance(source, Lossless) or any(part.holds == "delta" for _, part in parts):
            raise UserError(
                f"{key} keeps entries of models, and that of task `{task}` is a vector of a store: "
                "list the model that `tvb export STORE DIR --task NAME` writes, or use `tvb add`"
            )
        if share < 1:
            continue
        near = [item for item, part in parts if item.base and part.dtype == item.base.dtype]
        fits = sum(item.numel for item in near if item.base and item.base.dtype in MANTISSA)
        if 2 * fits < sum(item.numel for item in inputs.items):
            found, base = (
                listed(sorted({str(i.dtype).removeprefix("torch.") for i in w.tensors.values()}))
                for w in (source, inputs.base)
            )
            raise UserError(
                f"--lossless needs a base and models in bfloat16, or all in float16; the model of "
                f"task `{task}` has {found}, the base {base}. Save all in bfloat16, or build with "
                "--keep 0.25"
            )


def default_share(inputs: TaskSet) -> float:
    """The share of entries that a store keeps without a choice: 1 if it can be lossless."""
    try:
        check_kept(inputs, 1.0)
    except UserError:
        return 0.0
    return 1.0


def draws_of(inputs: TaskSet, share: float) -> list[Draw]:
    """The entries to keep of each model."""
    names = (f"{inputs.settings.seed}/{task}".encode() for task in inputs.tasks)
    return [Draw(xxhash.xxh3_64_intdigest(name), share) for name in names]
