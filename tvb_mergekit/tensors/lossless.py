"""Blocks of models, next to their base: models stored without loss, and their samples.

A tensor is cut into blocks of 2^17 elements. `units` codes a block of 16-bit weights next to the
base's; other blocks are compressed alone. Each has a checksum. `docs/files.md` has the format.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from tvb_mergekit.core.quantize import Width
from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors.checkpoint import DTYPES, RESTORE, Checkpoint, Decoded, parse_headers
from tvb_mergekit.tensors.engine import CPU, Engine
from tvb_mergekit.tensors.layout import Needs, plan_layout
from tvb_mergekit.tensors.passes import read_width
from tvb_mergekit.tensors.quantized import Measured
from tvb_mergekit.tensors.source import Holds, Weights
from tvb_mergekit.tensors.stream import Item, Piece, PieceBuffer, Sink, deliver

KEY = "tvb_lossless"  # in the metadata of a file of such a model
VERSION = 1
BLOCK = 2**17  # elements that are decoded together
INDEX = np.dtype([("bytes", "<u4"), ("form", "u1"), ("xxh3", "<u8")])  # of a block: 13 bytes
PLAIN, ZSTD, UNITS = range(3)  # forms of a block
MANTISSA = {torch.bfloat16: 7, torch.float16: 10}  # dtype -> bits
LEVEL = 1  # of zstd; 3 took a third longer, and more bytes
SCRATCH = 16 * BLOCK  # bytes of one thread
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Blocks(Decoded):
    """A vector in blocks of BLOCK elements, decoded with `base`, which its user sets. Thread-safe.

    Args:
        stored: the files.
        dtypes: of the tensors that were encoded.
    """

    base: Weights | None = None

    def __init__(
        self,
        stored: Checkpoint,
        shapes: Mapping[str, Sequence[int]],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        super().__init__(stored, shapes, "")
        self.dtypes = dtypes
        self._indices: dict[str, tuple[NDArray[Any], NDArray[np.int64]]] = {}

    @staticmethod
    def headers(
        stored: Checkpoint, key: str, version: int, what: str, parse: Callable[[Any], object]
    ) -> tuple[dict[str, torch.Size], dict[str, torch.dtype]]:
        """Shapes and dtypes of the encoded tensors; the arguments are those of `parse_headers`.

        Raises:
            UserError: the headers do not say what a reader needs.
        """
        shapes, dtypes = dict[str, torch.Size](), dict[str, torch.dtype]()

        def parse_tensors(said: dict[str, Any]) -> None:
            parse(said)
            for name, (dtype, shape) in said["tensors"].items():
                shapes[name], dtypes[name] = torch.Size(shape), DTYPES[dtype]

        parse_headers(stored, key, version, what, parse_tensors)
        for name, info in stored.tensors.items():
            least = INDEX.itemsize * -(-shapes[name].numel() // BLOCK) if name in shapes else -1
            if info.dtype != torch.uint8 or not 0 <= least <= info.nbytes:
                raise UserError(
                    f"{stored.folder / info.shard}: the blocks of tensor `{name}` do not fit what "
                    f"its header says; {RESTORE}"
                )
        return {name: shapes[name] for name in stored.tensors}, dtypes

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
            if high - low == last - first:
                self._decode(name, block, part)
            else:
                whole = part.new_empty(last - first)
                self._decode(name, block, whole)
                part.copy_(whole[low - first : high - first])
        return chunk

    def _decode(self, name: str, block: int, out: Tensor) -> None:
        """Fill `out` with a block."""
        raise NotImplementedError

    def base_block(self, name: str, block: int, length: int) -> Tensor:
        """The same block of the base, in the base's dtype."""
        assert self.base is not None, "set `base` before the vector is read"
        first = block * BLOCK
        buffer = torch.empty(length, dtype=self.base.tensors[name].dtype, device="cpu")
        return self.base.read(name, first, first + length, buffer)

    def decoded(self, name: str, block: int, base: Tensor | None, theta: Tensor) -> Tensor:
        """Fill `theta` with the entries that a block was encoded from.

        Args:
            base: the same entries of the base; None: read them if the block needs them.
        """
        index, ends = self._index(name)
        size, form, checksum = index[block].tolist()
        stored = torch.empty(size, dtype=torch.uint8, device="cpu")
        self.stored.read(name, int(ends[block]) - size, int(ends[block]), stored)
        if base is None and form == UNITS:
            base = self.base_block(name, block, len(theta))
        if not decode(form, stored, base, theta) or _checksum(theta) != checksum:
            raise self._damaged(name)
        return theta

    def ahead(self, name: str, start: int, stop: int) -> None:
        if start < stop:
            index, ends = self._index(name)
            first = start // BLOCK
            low = int(ends[first]) - int(index["bytes"][first])
            self.stored.ahead(name, low, int(ends[(stop - 1) // BLOCK]))

    def _index(self, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The index of a tensor's blocks, and the place where each ends."""
        if name not in self._indices:
            size, count = self.stored.tensors[name].nbytes, -(-self.tensors[name].numel // BLOCK)
            first = size - INDEX.itemsize * count
            held = self.stored.read(name, first, size, torch.empty(size - first, dtype=torch.uint8))
            index = held.numpy().view(INDEX)
            ends = np.cumsum(index["bytes"], dtype=np.int64)
            if ends[-1:].sum() != first:
                raise self._damaged(name)
            self._indices[name] = index, ends
        return self._indices[name]

    def _damaged(self, name: str) -> UserError:
        file = self.folder / self.tensors[name].shard
        return UserError(f"{file}: tensor `{name}` is not what was stored; {RESTORE}")


class Lossless(Blocks):
    """One model of a store, in its own dtypes.

    Unlike other vectors of a store it holds weights, not their differences from the base.
    """

    holds: Holds | None = "weight"

    def __init__(
        self,
        stored: Checkpoint,
        shapes: Mapping[str, Sequence[int]],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        super().__init__(stored, shapes, dtypes)
        self.tensors = {n: replace(of, dtype=dtypes[n]) for n, of in self.tensors.items()}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Lossless:
        """Read the headers of the model at `path`, a folder or one file.

        Raises:
            UserError: no such files, or their headers do not say what a reader needs.
        """
        stored = Checkpoint.open(path)
        headers = cls.headers(stored, KEY, VERSION, "a model without loss", lambda said: None)
        return cls(stored, *headers)

    def _decode(self, name: str, block: int, out: Tensor) -> None:
        self.decoded(name, block, None, out)


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


@dataclass(frozen=True)
class Kept:
    """The form of one output of `keep_pass`: the dtype of each tensor."""

    dtypes: Mapping[str, torch.dtype]
    key = KEY

    def metadata(self, shapes: Mapping[str, Sequence[int]]) -> str:
        """The metadata of a file with these tensors."""
        return json.dumps({"version": VERSION, "tensors": self.tensors(shapes)})

    def tensors(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[Any]]:
        """The dtype and shape of each tensor, as a header has them."""
        return {name: [_NAMES[self.dtypes[name]], list(of)] for name, of in shapes.items()}

    def most(self, item: Item) -> int:
        """The most bytes of a tensor; the number that is written is known at its end."""
        size = item.numel * self.dtypes[item.name].itemsize
        return size + INDEX.itemsize * -(-item.numel // BLOCK)


class Keeping(Measured):
    """The outputs of `keep_pass`.

    `measured` returns the bytes of each of K, then `numbers` times K sums of what `chosen` returns.
    """

    numbers = 0

    def __init__(self, items: Sequence[Item]) -> None:
        super().__init__()
        count = len(items[0].inputs) if items else 0
        self.coded: Sequence[Kept] = [
            Kept({i.name: i.inputs[k].dtype for i in items}) for k in range(count)
        ]
        self._made: dict[tuple[str, int], list[NDArray[Any]]] = {}  # indices of pieces
        self._before: list[list[NDArray[Any]]] = [[] for _ in range(count)]  # of this tensor

    def widths(self, name: str) -> tuple[Width, ...]:
        """Widths of room for each output in one tensor."""
        return tuple(Width(8 * kept.dtypes[name].itemsize, BLOCK) for kept in self.coded)

    def encode(self, item: Item, start: int, found: Sequence[Tensor], out: Tensor) -> None:
        """Code a piece, which begins with a block: base and models to `out` [K, bytes] uint8."""
        base, models = (found[0], found[1:]) if item.base is not None else (None, found)
        indices, more = [], list[list[float]]()
        for k, (whole, row) in enumerate(zip(models, out, strict=True)):
            index, place = np.zeros(-(-len(whole) // BLOCK), INDEX), 0
            sums = [0.0] * self.numbers
            for b, block in enumerate(whole.split(BLOCK) if len(whole) else ()):
                beside = None if base is None else base[b * BLOCK :][: len(block)]
                theta, beside, numbers = self.chosen(k, item, start // BLOCK + b, block, beside)
                fits = beside is not None and theta.dtype == beside.dtype in MANTISSA
                form, made = encode(theta, beside if fits else None)
                if made:
                    stored = torch.frombuffer(bytearray(made), dtype=row.dtype)
                    row[place : place + len(made)] = stored
                index[b], place = (len(made), form, _checksum(theta)), place + len(made)
                sums = list(map(operator.add, sums, numbers))
            indices.append(index)
            more.append(sums)
        self._made[item.name, start] = indices
        self._found[item.name, start] = list(chain(*zip(*more, strict=True)))

    def chosen(
        self, k: int, item: Item, block: int, theta: Tensor, base: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Sequence[float]]:
        """The entries of a block that output k keeps, the base's, and `numbers` measurements."""
        return theta, base, ()

    def rows(self, item: Item, start: int, stop: int, values: Tensor) -> list[Tensor]:
        """The bytes of a piece that are written: blocks, and at the end of a tensor the index."""
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


def keep_pass(
    items: Sequence[Item], keeping: Keeping, sink: Sink, engine: Engine, title: str = "Models"
) -> None:
    """Give `sink` every input of the items to the bit, coded next to the base."""
    items = [item.coded(keeping.widths(item.name)) for item in items]
    count = len(keeping.coded)
    written = max((-(-count * item.widest(BLOCK) // BLOCK) for item in items), default=0)
    engine = replace(engine, devices=[CPU])
    needs = Needs(count, read_width(items), written, kept=SCRATCH * 2)
    layout = plan_layout(needs, engine, block=BLOCK)

    def work(device: torch.device) -> Callable[[Piece, Tensor], None]:
        buffer = PieceBuffer(layout.buffer_bytes)
        return lambda piece, out: keeping.encode(piece.item, piece.start, buffer.read(piece), out)

    update = engine.progress(title, sum(item.nbytes for item in items))
    deliver(items, layout, count, work, sink, lambda piece, _: update(piece.nbytes))
