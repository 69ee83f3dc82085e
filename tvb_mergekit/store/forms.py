"""Vectors of a store in a code: its choice, its size, the errors, and names of files and groups.

`core.quantize` defines codes, and `docs/files.md` the files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from tvb_mergekit.core.gram import GramSums
from tvb_mergekit.core.quantize import BITS, Width, block_bytes, unit_of
from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.settings import EMBEDDINGS, METHODS, OUTPUT_LAYER
from tvb_mergekit.store.facts import Codec
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.layout import chunk_length
from tvb_mergekit.tensors.lossless import BLOCK, INDEX, MANTISSA, Draw, Keeping, Lossless, encode
from tvb_mergekit.tensors.passes import gram_pass
from tvb_mergekit.tensors.quantized import Quantizing
from tvb_mergekit.tensors.source import Weights
from tvb_mergekit.tensors.stream import Item, Part
from tvb_mergekit.tensors.taskset import TaskSet
from tvb_mergekit.tensors.writing import SHARD_BYTES

LEAST = 2  # bits of the codes of task vectors; a sample is better below
LEAST_SHARE = 1e-6
PILOT = 256  # blocks from which the bytes of a share are estimated
WORKING = ("state.json", "sums.safetensors", "journal.jsonl")  # in STORE.partial
# Names that folders of vectors must not have; tasks.json is of an export of adapters.
RESERVED = ("recipes", "mean", "basis.json", "basis.safetensors", "tasks.json", *WORKING)
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
    factors = torch.tensor(weights or [1.0], dtype=torch.float64).square()
    return {"tensor_squares": squares * factors, "tensor_errors": errors * factors}


def lost(tensors: Mapping[str, Tensor]) -> Tensor:
    """The norms of the errors of each vector and of their sum, [K + 1]."""
    return tensors["tensor_errors"].sum(0).sqrt()


def before_coding(
    bases: Bases, order: Sequence[int], names: Container[str | None]
) -> tuple[list[float], list[float]]:
    """`TaskSet.norms` and `missed` of vectors of a store of all tasks, over these tensors of it."""
    held, scales = bases.tensors, bases.scales[list(order)].abs()
    if "tensor_errors" not in held:  # models
        return [], []
    rows = torch.tensor([name in names for name in bases.names])
    errors, some, squares = (
        each[:, : bases.num_bases].sum(0).sqrt()
        for each in (
            held["tensor_errors"],
            held["tensor_errors"][rows],
            held["tensor_squares"][rows],
        )
    )
    norms = held["norms"] * squares / held["tensor_squares"][:, : bases.num_bases].sum(0).sqrt()
    missed = some + (held["errors"][1] - errors).clamp(min=0)  # of codes of codes: both
    return (norms[list(order)] / scales).tolist(), (missed[list(order)] / scales).tolist()


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
        short = slug = re.sub(r"[^\w.-]+", "-", name)[:60].strip(".") or "task"
        number = 1
        while slug.lower() in used:
            number += 1
            slug = f"{short}-{number}"
        used.add(slug.lower())
        made.append(slug)
    return made


def group_of(name: str) -> str:
    """The group of KINDS_OF_TENSORS for the name of a tensor."""
    for group, pattern in KINDS_OF_TENSORS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return group
    return OTHER


@dataclass(frozen=True)
class Quantize:
    """The bits of the elements of a store.

    Attributes:
        bits: one of BITS. Less than LEAST: the mean bits of an element in a sample.
        size: instead, the most bytes that the store may take.

    Raises:
        UserError: bits that there are not, or both.
    """

    bits: float | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        if (self.bits is None) == (self.size is None):
            raise UserError("give either bits or a size, not both")
        if self.bits is not None and self.bits not in BITS and not 0 < self.bits < LEAST:
            raise UserError(
                f"--bits {self.bits:g}: expected {', '.join(map(str, reversed(BITS)))}, or less "
                f"than {LEAST} for a sample of task vectors"
            )


class Form(NamedTuple):
    """The stored form of vectors: codes, a share of the entries, or (without either) a dtype."""

    bits: int = 0
    share: float = 0.0

    @property
    def codec(self) -> Codec:
        if self.share:
            return "lossless" if self.share == 1 else "sampled"
        return "codes" if self.bits else "dense"


def form_of(inputs: TaskSet, wanted: Quantize) -> Form:
    """The form for a number of bits or a size.

    Task vectors in fewer than LEAST bits are a sample. For a size, 16-bit models are kept without
    loss or sampled. Other vectors get the widest codes, and task vectors otherwise a sample.

    Raises:
        UserError: the vectors have no such form, or a size is too small.
    """
    tasks, numels = inputs.settings.basis == "none", [item.numel for item in inputs.items]
    count = inputs.settings.bases_of(len(inputs.tasks)) or 1
    count += inputs.settings.basis == "pca"  # its mean
    total, least = count * sum(numels), LEAST if tasks else BITS[0]
    if wanted.size is None:
        assert wanted.bits is not None
        if wanted.bits in BITS and wanted.bits >= least:
            return Form(bits=int(wanted.bits))
        if not tasks:
            every = ", ".join(map(str, BITS))
            raise UserError(f"--bits {wanted.bits:g} is for task vectors; bases take {every}")
        return Form(share=share_for(inputs, wanted.bits))
    if inputs.settings.bases_of(len(inputs.tasks)) is None:
        raise UserError("--size: `energy` chooses M after the bytes are shared; give num_bases")
    fixed = fixed_bytes(inputs, count)
    room = wanted.size - fixed
    if room <= 0:
        raise UserError(
            f"--size {wanted.size:,} bytes: the other files of the store take {fixed:,}; give "
            "more, or keep fewer tasks or tensors (`exclude`)"
        )
    if tasks and default_share(inputs):
        return Form(share=share_for(inputs, 8 * room / total))
    for bits in reversed([each for each in BITS if each >= least]):
        if count * sum(block_bytes(numel, Width(bits)) for numel in numels) <= room:
            return Form(bits=bits)
    if not tasks:
        raise UserError(f"--size {wanted.size:,} bytes: codes of {BITS[0]} bit do not fit; give "
                        "more, or take fewer bases")  # fmt: skip
    return Form(share=share_for(inputs, 8 * room / total))


def share_for(inputs: TaskSet, bits: float) -> float:
    """The share of the entries that takes about `bits` an element, from some of the blocks.

    Raises:
        UserError: the task vectors cannot be sampled.
    """
    check_kept(inputs, 0.5)
    sixteen = bool(default_share(inputs))
    share, most = 1.0, 0.97 * bits  # the blocks are a part only
    for _ in range(6):
        found = _bits_at(inputs, share)
        if share == 1 and sixteen and found <= most:
            return 1.0
        share = round(min(share * most / found, 0.99) * 2**32) / 2**32
    if share < LEAST_SHARE or _bits_at(inputs, share) > 1.05 * bits:
        raise UserError(f"{bits:.2g} bits an element are too few for a sample; give more")
    return share


def _bits_at(inputs: TaskSet, share: float) -> float:
    """Bits of an element at a share of the entries, from at most PILOT blocks, evenly spread."""
    pairs = [(item, part) for item in inputs.items for part in item.inputs if item.numel]
    places = [(item, part, first) for item, part in pairs for first in range(0, item.numel, BLOCK)]
    step, size, numel = max(1, len(places) // PILOT), 0, 0
    for item, part, first in places[step // 2 :: step]:
        length = min(BLOCK, item.numel - first)
        assert item.base is not None
        base, theta = (
            each.read(first, first + length, torch.empty(length, dtype=each.dtype)).cpu()
            for each in (item.base, part)
        )
        draw = Draw(0, share)
        if draw.of(item.shape) < 1:
            drawn = draw.places(item.name, first // BLOCK, length)
            base, theta = base[drawn], theta[drawn]
        fits = base.dtype == theta.dtype in MANTISSA
        size += INDEX.itemsize + len(encode(theta, base if fits else None)[1])
        numel += length
    return 8 * size / numel


def kept_share(lossless: bool, keep: float | None, *others: object) -> float:
    """The share of the entries that a store keeps exact; 0 for other forms.

    Args:
        others: other forms, of which the user may choose one instead.

    Raises:
        UserError: no such share, or more than one choice.
    """
    if lossless + (keep is not None) + sum(map(bool, others)) > 1:
        raise UserError("choose one of --lossless, --keep, --bits, --size and --dtype")
    if keep is None:
        return float(lossless)
    if not LEAST_SHARE <= keep < 1:
        raise UserError(f"--keep {keep:g}: expected a share from {LEAST_SHARE:g} to below 1")
    return round(keep * 2**32) / 2**32


def check_kept(inputs: TaskSet, share: float) -> None:
    """Raise UserError unless a store can keep a share of the entries of the models.

    For all entries, most of the models must have the base's 16-bit dtype.
    """
    key = "--lossless" if share == 1 else "a sample (--keep, or fewer than 2 bits)"
    if inputs.settings.basis != "none":
        raise UserError(f"{key} keeps all tasks: leave out the keys of a basis, or the option")
    for task, source in zip(inputs.tasks, inputs.sources, strict=True):
        parts = [(item, item.inputs[inputs.tasks.index(task)]) for item in inputs.items]
        if inputs.adapters:
            raise UserError(
                f"{key} keeps entries of models, and that of task `{task}` is an adapter: fuse it "
                "first (--fuse --lora-merge-cache DIR)"
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
                "--bits 8"
            )


def default_share(inputs: TaskSet) -> float:
    """The share of entries that a store keeps without a choice: 1 if it can be lossless."""
    try:
        check_kept(inputs, 1.0)
    except UserError:
        return 0.0
    return 1.0


def keeping_of(inputs: TaskSet, share: float) -> Keeping:
    """The outputs of a pass that keeps a share of the entries of each model."""
    names = (f"{inputs.settings.seed}/{task}".encode() for task in inputs.tasks)
    return Keeping(inputs.items, [Draw(xxhash.xxh3_64_intdigest(name), share) for name in names])


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
