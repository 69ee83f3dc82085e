"""The form in which a store keeps its vectors: bases, codes, samples, or models without loss."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

import torch
import xxhash

from tvb_mergekit.core.quantize import BITS, Width, block_bytes
from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.settings import METHODS
from tvb_mergekit.store.facts import Codec
from tvb_mergekit.tensors.lossless import BLOCK, INDEX, MANTISSA, Draw, Keeping, Lossless, encode
from tvb_mergekit.tensors.stream import Part
from tvb_mergekit.tensors.taskset import TaskSet
from tvb_mergekit.tensors.writing import SHARD_BYTES

LEAST = 2  # bits of the codes of task vectors; a sample is better below
LEAST_SHARE = 1e-6
PILOT = 256  # blocks from which the bytes of a share are estimated


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
        name, kind = ("bits", float) if self.size is None else ("size", int)
        value = getattr(self, name)
        if not hasattr(value, "__float__"):
            raise UserError(f"`{name}` is {value!r}: expected a number")
        object.__setattr__(self, name, kind(value))
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

    Task vectors in fewer than LEAST bits are a sample. For a size it is the form that loses least:
    all entries of 16-bit models, or the widest codes, or else a sample.

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
        base, theta = (_block(each, first, length) for each in (item.base, part))
        draw = Draw(0, share)
        if draw.of(item.shape) < 1:
            drawn = draw.places(item.name, first // BLOCK, length)
            base, theta = base[drawn], theta[drawn]
        fits = base.dtype == theta.dtype in MANTISSA
        size += INDEX.itemsize + len(encode(theta, base if fits else None)[1])
        numel += length
    return 8 * size / numel


def _block(part: Part, first: int, length: int) -> torch.Tensor:
    return part.read(first, first + length, torch.empty(length, dtype=part.dtype)).cpu()


def kept_share(lossless: bool, keep: float | None, other: object) -> float:
    """The share of the entries that a store keeps exact; 0 for other forms.

    Args:
        other: another form that the user chose, which excludes these.

    Raises:
        UserError: no such share, or more than one choice.
    """
    if bool(lossless) + (keep is not None) + bool(other) > 1:
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
    key = "--lossless" if share == 1 else "--keep"
    if inputs.settings.basis != "none":
        raise UserError(f"{key} keeps all tasks: leave out the keys of a basis, or {key}")
    for task, source in zip(inputs.tasks, inputs.sources, strict=True):
        parts = [(item, item.inputs[inputs.tasks.index(task)]) for item in inputs.items]
        if inputs.adapters or any(part.holds == "delta" for _, part in parts):
            raise UserError(
                f"{key} keeps entries of models, and that of task `{task}` is not one: keep an "
                "adapter as it is, or use --bits"
            )
        if isinstance(source, Lossless):  # its files and its other tensors would be lost
            raise UserError(
                f"{key} keeps entries of models, and that of task `{task}` is a vector of a store: "
                "list the model that `tvb export STORE DIR --task NAME` writes, or use `tvb add`"
            )
        if share < 1:
            continue
        near = [item for item, part in parts if item.base and part.dtype == item.base.dtype]
        fits = sum(item.numel for item in near if item.base and item.base.dtype in MANTISSA)
        if 2 * fits < sum(item.numel for item in inputs.items):
            dtypes = {str(info.dtype) for info in source.tensors.values()}
            found = sorted(name.removeprefix("torch.") for name in dtypes)
            raise UserError(
                f"--lossless needs a base and models in bfloat16, or all in float16; the model of "
                f"task `{task}` has {listed(found)}. Save all in bfloat16, or use --bits 8"
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
