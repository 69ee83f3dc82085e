"""Blocks of models, next to their base: models stored without loss, and their samples.

A tensor is cut into blocks of 2^17 elements. `units` codes a block of 16-bit weights next to the
base's; other blocks are compressed alone. Each has a checksum. A sample holds the drawn entries of
each block. `docs/files.md` has the formats.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors.checkpoint import DTYPES, NAMES, Checkpoint
from tvb_mergekit.tensors.engine import CPU, Engine
from tvb_mergekit.tensors.layout import Needs, plan_layout
from tvb_mergekit.tensors.passes import read_width
from tvb_mergekit.tensors.quantized import Coding, Decoded, Parsed
from tvb_mergekit.tensors.source import Holds
from tvb_mergekit.tensors.stream import Item, Piece, PieceBuffer, Sink, deliver

BLOCK = 2**17  # elements that are decoded together
INDEX = np.dtype([("bytes", "<u4"), ("form", "u1"), ("xxh3", "<u8")])  # of a block: 13 bytes
PLAIN, ZSTD, UNITS = range(3)  # forms of a block
MANTISSA = {torch.bfloat16: 7, torch.float16: 10}  # dtype -> bits
LEVEL = 1  # of zstd; 3 took a third longer, and more bytes
SCRATCH = 16 * BLOCK  # bytes of one thread


@dataclass(frozen=True)
class Draw:
    """The entries of one vector that are stored. Each entry of a matrix is drawn by itself.

    Attributes:
        seed: of the random places.
        share: the probability of an entry, a multiple of 2^-32.
    """

    seed: int
    share: float

    def of(self, shape: Sequence[int]) -> float:
        """The share of a tensor's entries: 1 if all are stored."""
        return self.share if len(shape) > 1 else 1.0

    def places(self, name: str, block: int, length: int) -> Tensor:
        """The stored entries of a block of a matrix, increasing; int64.

        Philox's stream of bits is the same in every version of numpy and on every machine.
        """
        key = xxhash.xxh3_64_intdigest(f"{self.seed}/{block}/{name}".encode())
        bits = np.random.Philox(key=key).random_raw(-(-length // 2)).astype("<u8").view("<u4")
        return torch.from_numpy(np.flatnonzero(bits[:length] < self.share * 2**32))


ALL = Draw(0, 1.0)


class Lossless(Decoded):
    """One model of a store, in its own dtypes, decoded with `base`, which its user sets.

    Unlike other vectors of a store it holds weights, not their differences from the base.
    """

    key, what = "tvb_lossless", "a model without loss"
    holds: Holds | None = "weight"
    sample, grain = ALL, BLOCK

    def __init__(self, stored: Checkpoint) -> None:
        self.dtypes = dict[str, torch.dtype]()  # of the entries that were encoded
        super().__init__(stored)
        self._indices: dict[str, tuple[NDArray[Any], NDArray[np.int64]]] = {}

    def _parse(self, said: Any) -> Parsed:
        for name, (dtype, shape) in said["tensors"].items():
            self.dtypes[name] = DTYPES[dtype]
            yield name, torch.float32 if self.holds == "delta" else DTYPES[dtype], shape

    def _fits(self, name: str) -> bool:
        least, info = INDEX.itemsize * self._blocks(name), self.stored.tensors[name]
        return info.dtype == torch.uint8 and info.nbytes >= least

    def _blocks(self, name: str) -> int:
        return -(-self.tensors[name].numel // BLOCK)

    def share(self, name: str) -> float:
        return self.sample.of(self.tensors[name].shape)

    def read(self, name: str, start: int, stop: int, out: Tensor) -> Tensor:
        """Elements `start` to `stop`; blocks that they are a part of are decoded complete.

        Raises:
            UserError: a block is not what was stored.
        """
        chunk, numel = out[: stop - start], self.tensors[name].numel
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            first, last = block * BLOCK, min((block + 1) * BLOCK, numel)
            low, high = max(first, start), min(last, stop)
            part = chunk[low - start : high - start]
            whole = part if len(part) == last - first else part.new_empty(last - first)
            self._decode(name, block, whole)
            if whole is not part:
                part.copy_(whole[low - first : high - first])
        return chunk

    def _decode(self, name: str, block: int, out: Tensor) -> None:
        """Fill `out` with a block."""
        self._entries(name, block, None, out)

    def _base(self, name: str, block: int, length: int) -> Tensor:
        """The same block of the base, in the base's dtype."""
        assert self.base is not None, "set `base` before the vector is read"
        first = block * BLOCK
        buffer = torch.empty(length, dtype=self.base.tensors[name].dtype, device="cpu")
        return self.base.read(name, first, first + length, buffer)

    def _entries(self, name: str, block: int, base: Tensor | None, theta: Tensor) -> Tensor:
        """Fill `theta` with the entries that a block was encoded from.

        Args:
            base: the same entries of the base; None: read them if the block needs them.
        """
        index, ends = self._index(name)
        size, form, checksum = index[block].tolist()
        stored = torch.empty(size, dtype=torch.uint8, device="cpu")
        self.stored.read(name, int(ends[block]) - size, int(ends[block]), stored)
        if base is None and form == UNITS:
            base = self._base(name, block, len(theta))
        if not decode(form, stored, base, theta) or _checksum(theta) != checksum:
            if form != UNITS:
                raise self.damaged(name)
            raise UserError(
                f"{self.damaged(name)}. Or the base is another one than at the build, "
                "if `tvb inspect STORE` finds nothing"
            )
        return theta

    def ahead(self, name: str, start: int, stop: int) -> None:
        if start < stop:
            index, ends = self._index(name)
            first = start // BLOCK
            low = int(ends[first]) - int(index["bytes"][first])
            self.stored.ahead(name, low, int(ends[(stop - 1) // BLOCK]))

    def fingerprint(self) -> str:
        """64 hexadecimal digits from the names, dtypes, shapes and checksums of all blocks.

        Samples of elements, as of other weights, would decode a large part of the model.
        """
        digest = hashlib.sha256(f"{self.sample}".encode())
        for name in sorted(self.tensors):
            digest.update(f"{name}|{self.dtypes[name]}|{self.tensors[name].shape}|".encode())
            digest.update(self._index(name)[0]["xxh3"].tobytes())
        return digest.hexdigest()

    def _index(self, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The index of a tensor's blocks, and the place where each ends."""
        if name not in self._indices:
            size = self.bytes_of(name)
            first = size - INDEX.itemsize * self._blocks(name)
            held = self.stored.read(name, first, size, torch.empty(size - first, dtype=torch.uint8))
            index = held.numpy().view(INDEX)
            ends = np.cumsum(index["bytes"], dtype=np.int64)
            if ends[-1:].sum() != first:
                raise self.damaged(name)
            self._indices[name] = index, ends
        return self._indices[name]


class Sampled(Lossless):
    """One task vector as a random sample: exact entries times the inverse of the share, float32.

    It is unbiased: the expectation of each entry is its value. So are products of different
    entries. Tensors of one dimension are stored complete.
    """

    key, what = "tvb_sampled", "a sampled task vector"
    holds = "delta"

    def _parse(self, said: Any) -> Parsed:
        sample = Draw(int(said["seed"]), float(said["share"]))
        if self.sample not in (ALL, sample) or not 0 < sample.share <= 1:
            raise ValueError("its sample is another one")
        self.sample = sample
        yield from super()._parse(said)

    def _decode(self, name: str, block: int, out: Tensor) -> None:
        share, base = self.share(name), self._base(name, block, len(out))
        places = self.sample.places(name, block, len(out)) if share < 1 else slice(None)
        base = base[places]
        theta = self._entries(name, block, base, torch.empty(len(base), dtype=self.dtypes[name]))
        out.zero_()
        out[places] = (theta.float() - base.float()).div_(share)


def encode(theta: Tensor, base: Tensor | None) -> tuple[int, bytes]:
    """The shortest form of a block, and its bytes.

    Args:
        theta: 1-D, of any dtype.
        base: of the same length and dtype, one of MANTISSA; None: no tensor of the base fits.
    """
    data = _bytes_of(theta)
    compressor, form = zstandard.ZstdCompressor(level=LEVEL), ZSTD
    if base is None:
        made = compressor.compress(data)
    else:
        from tvb_mergekit.tensors import units  # imports numba, which takes long

        content = np.empty(4 * len(theta) + 300, np.uint8)
        cuts, form = np.empty(260, np.int64), UNITS
        patterns = (each.contiguous().view(torch.uint16).numpy() for each in (base, theta))
        size, sections = units.pack(*patterns, MANTISSA[theta.dtype], content, cuts)
        frame, start, pieces = compressor.compressobj(size=size), 0, list[bytes]()
        for stop in cuts[:sections].tolist():
            if start < stop:  # a Huffman code for each section
                pieces.append(frame.compress(content[start:stop].data))
                pieces.append(frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
            start = stop
        made = b"".join((*pieces, frame.flush()))
    return (form, made) if len(made) < len(data) else (PLAIN, bytes(data))


def decode(form: int, stored: Tensor, base: Tensor | None, theta: Tensor) -> bool:
    """Fill `theta` from the bytes of a block; False if they cannot be its bytes."""
    data, most = stored.numpy(), 4 * len(theta) + 300 if form == UNITS else theta.nbytes
    if form in (ZSTD, UNITS):
        try:
            if not 0 <= zstandard.frame_content_size(data.data) <= most:
                return False
            data = np.frombuffer(zstandard.ZstdDecompressor().decompress(data.data), np.uint8)
        except zstandard.ZstdError:
            return False
    if form == UNITS:
        from tvb_mergekit.tensors import units

        if base is None or theta.dtype not in MANTISSA:
            return False
        beside, made = (each.view(torch.uint16).numpy() for each in (base, theta))
        return bool(units.unpack(data, beside, MANTISSA[theta.dtype], made))
    if form > UNITS or len(data) != theta.nbytes:
        return False
    np.copyto(theta.view(torch.uint8).numpy(), data)
    return True


def _bytes_of(values: Tensor) -> memoryview:
    return values.contiguous().view(torch.uint8).numpy().data


def _checksum(values: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(_bytes_of(values))


class Keeping(Coding):
    """The inputs of `keep_pass`, or a sample of each.

    `measured` returns the bytes of each of K outputs. Of samples it also returns K squared norms of
    task vectors, then of errors.
    """

    def __init__(self, items: Sequence[Item], samples: Sequence[Draw] = ()) -> None:
        super().__init__()
        self.count = len(items[0].inputs) if items else 0
        self.samples = samples or [ALL] * self.count
        self.share = self.samples[0].share if self.samples else 1.0
        self.key = (Lossless if self.share == 1 else Sampled).key
        self._dtypes = {i.name: [part.dtype for part in i.inputs] for i in items}
        self._made: dict[tuple[str, int], list[NDArray[Any]]] = {}  # indices of pieces
        self._before: list[list[NDArray[Any]]] = [[] for _ in range(self.count)]  # of this tensor

    def widths(self, name: str) -> tuple[int, ...]:
        return tuple(dtype.itemsize for dtype in self._dtypes[name])

    def described(self, output: int, items: Sequence[Item]) -> dict[str, Any]:
        sample, dtypes = self.samples[output], self._dtypes
        said = {"seed": sample.seed, "share": sample.share} if sample.share < 1 else {}
        tensors = {i.name: [NAMES[dtypes[i.name][output]], list(i.shape)] for i in items}
        return {**said, "tensors": tensors}

    def encode(self, item: Item, start: int, values: Sequence[Tensor], out: Tensor) -> None:
        """Code a piece, which begins with a block: base and models."""
        base, models = (values[0], values[1:]) if item.base is not None else (None, values)
        indices, more = [], list[list[float]]()
        for sample, whole, row in zip(self.samples, models, out, strict=True):
            index, place = np.zeros(-(-len(whole) // BLOCK), INDEX), 0
            sums = [0.0] * (2 if self.share < 1 else 0)
            for b, theta in enumerate(whole.split(BLOCK) if len(whole) else ()):
                beside = None if base is None else base[b * BLOCK :][: len(theta)]
                if sums:
                    assert beside is not None, "a task vector has a base"
                    places: Tensor | slice = slice(None)
                    if (share := sample.of(item.shape)) < 1:
                        places = sample.places(item.name, start // BLOCK + b, len(theta))
                    numbers = _measured(theta, beside, places, share)
                    sums = list(map(operator.add, sums, numbers))
                    theta, beside = theta[places], beside[places]
                fits = beside is not None and theta.dtype == beside.dtype in MANTISSA
                form, made = encode(theta, beside if fits else None)
                if made:
                    stored = torch.frombuffer(bytearray(made), dtype=row.dtype)
                    row[place : place + len(made)] = stored
                index[b], place = (len(made), form, _checksum(theta)), place + len(made)
            indices.append(index)
            more.append(sums)
        self._made[item.name, start] = indices
        self._found[item.name, start] = list(chain(*zip(*more, strict=True)))

    def rows(self, item: Item, start: int, stop: int, values: Tensor) -> list[Tensor]:
        """Blocks, and at the end of a tensor the index."""
        made = []
        for row, index, before in zip(
            values, self._made.pop((item.name, start)), self._before, strict=True
        ):
            before.append(index)
            made.append(row[: int(index["bytes"].sum())])
            if stop == item.numel:
                whole = np.concatenate(before)
                made[-1] = torch.cat([made[-1], torch.from_numpy(whole.view(np.uint8))])
                before.clear()
        self._found[item.name, start][:0] = [float(len(row)) for row in made]
        return made


def _measured(theta: Tensor, base: Tensor, places: Tensor | slice, share: float) -> list[float]:
    """Squared norms of the difference, and of the error of its sample."""
    tau = (theta.float() - base.float()).double()
    square, held = float(tau.square().sum()), float(tau[places].square().sum())
    return [square, (1 / share - 1) ** 2 * held + square - held]


def keep_pass(
    items: Sequence[Item], keeping: Keeping, sink: Sink, engine: Engine, title: str = "Models"
) -> None:
    """Give `sink` every input of `keeping.coded` items to the bit, coded next to the base."""
    count = keeping.count
    written = count * max((item.width for item in items), default=0)
    engine = replace(engine, devices=[CPU])
    needs = Needs(count, read_width(items), written, kept=SCRATCH * 2)
    layout = plan_layout(needs, engine, block=BLOCK)

    def work(device: torch.device) -> Callable[[Piece, Tensor], None]:
        buffer = PieceBuffer(layout.buffer_bytes)
        return lambda piece, out: keeping.encode(piece.item, piece.start, buffer.read(piece), out)

    update = engine.progress(title, sum(item.nbytes for item in items))
    deliver(items, layout, count, work, sink, lambda piece, _: update(piece.nbytes))
