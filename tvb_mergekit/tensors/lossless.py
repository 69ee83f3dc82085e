"""Blocks of models, next to their base: models stored without loss, and their samples.

A tensor is cut into blocks of 2^17 elements. `units` codes a block of 16-bit weights next to the
base's; other blocks are compressed alone. Each has a checksum. A sample holds the drawn entries of
each block. `docs/files.md` has the formats.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors.checkpoint import DTYPES, NAMES, Checkpoint
from tvb_mergekit.tensors.passes import Reader, run
from tvb_mergekit.tensors.quantized import VERSION, Decoded, Parsed
from tvb_mergekit.tensors.stream import CPU, Engine, Holds, Item, Piece
from tvb_mergekit.tensors.writing import MARKER, SHARD_BYTES, Appender, Shard, plan_shards

BLOCK = 2**17  # elements that are decoded together
INDEX = np.dtype([("bytes", "<u4"), ("form", "u1"), ("xxh3", "<u8")])  # of a block: 13 bytes
PLAIN, ZSTD, UNITS = range(3)  # forms of a block
MANTISSA = {torch.bfloat16: 7, torch.float16: 10}  # dtype -> bits
LEVEL = 1  # of zstd; 3 took a third longer, and more bytes


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


class Keeping:
    """Writes every input of some items, or a sample of it, to the bit, coded next to the base.

    Args:
        items: all with the same number of inputs, a file of each in its folder.
        samples: of each input; none: complete models.
        limit: bytes of a file, before coding.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        items: Sequence[Item],
        samples: Sequence[Draw] = (),
        limit: int = SHARD_BYTES,
        name: str = "",
    ) -> None:
        self._items, self._samples = items, samples or [ALL] * len(folders)
        raw = [replace(item, out=item.inputs[0].dtype) for item in items]
        plan = [Shard(name, tuple(raw))] if name else plan_shards(raw, limit)
        self.files = [
            Appender(folder, plan, partial(_described, folder.name, number, sample), _most)
            for number, (folder, sample) in enumerate(zip(folders, self._samples, strict=True))
        ]

    def write(self, engine: Engine = Engine(), title: str = "Models") -> list[list[float]]:
        """Write all tensors in order.

        Returns:
            Of samples, for each tensor: the squared norms of the task vectors, then of the errors.
        """
        measured: list[list[float]] = []
        sums, before = np.zeros(0), [list[NDArray[Any]]() for _ in self.files]
        engine = replace(engine, device=CPU)
        for piece, coded in run(self._items, self._coded, engine, title, grain=BLOCK):
            last = piece.stop == piece.item.numel
            for file, (data, index, _), indices in zip(self.files, coded, before, strict=True):
                indices.append(index)
                end = [np.concatenate(indices).tobytes()] if last else []
                file.append(b"".join([*data, *end]), last)
                if last:
                    indices.clear()
            found = np.array([each[2] for each in coded]).T.reshape(-1)
            sums = found if piece.start == 0 else sums + found
            if last:
                measured.append(sums.tolist())
        for file in self.files:
            file.finish()
        return measured

    def _coded(self, piece: Piece, reader: Reader) -> list[tuple[list[bytes], Any, list[float]]]:
        """Of each input: the blocks of a piece, their index, and what is measured."""
        item = piece.item
        base = None if item.base is None else reader.stored(item.base, piece)
        made = []
        for sample, part in zip(self._samples, item.inputs, strict=True):
            whole, share = reader.stored(part, piece), sample.of(item.shape)
            blocks = whole.split(BLOCK) if len(whole) else ()
            data, index = list[bytes](), np.zeros(len(blocks), INDEX)
            sums = [0.0] * (2 if sample.share < 1 else 0)
            for number, theta in enumerate(blocks):
                beside = None if base is None else base[number * BLOCK :][: len(theta)]
                if sums:
                    assert beside is not None, "a task vector has a base"
                    places: Tensor | slice = slice(None)
                    if share < 1:
                        block = piece.start // BLOCK + number
                        places = sample.places(item.name, block, len(theta))
                    numbers = _measured(theta, beside, places, share)
                    sums = list(map(operator.add, sums, numbers))
                    theta, beside = theta[places], beside[places]
                fits = beside is not None and theta.dtype == beside.dtype in MANTISSA
                form, coded = encode(theta, beside if fits else None)
                data.append(coded)
                index[number] = len(coded), form, _checksum(theta)
            made.append((data, index, sums))
        return made


def _most(item: Item) -> int:
    """The most bytes of a coded tensor: blocks as they are, and their index."""
    size = max(part.dtype.itemsize for part in item.inputs)
    return size * item.numel + INDEX.itemsize * -(-item.numel // BLOCK)


def _described(label: str, number: int, sample: Draw, items: Sequence[Item]) -> dict[str, str]:
    """The metadata of a file of these tensors."""
    said: dict[str, Any] = {"version": VERSION}
    if sample.share < 1:
        said |= {"seed": sample.seed, "share": sample.share}
    said["tensors"] = {i.name: [NAMES[i.inputs[number].dtype], list(i.shape)] for i in items}
    key = (Lossless if sample.share == 1 else Sampled).key
    return {"format": "pt", MARKER: label, key: json.dumps(said)}


def _measured(theta: Tensor, base: Tensor, places: Tensor | slice, share: float) -> list[float]:
    """Squared norms of the difference, and of the error of its sample."""
    tau = (theta.float() - base.float()).double()
    square, held = float(tau.square().sum()), float(tau[places].square().sum())
    return [square, (1 / share - 1) ** 2 * held + square - held]
