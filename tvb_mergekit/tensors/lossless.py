"""Models stored without loss, as differences from their base.

A tensor is cut into blocks of 2^17 elements. `units` codes a block of 16-bit weights next to the
base's; other blocks are compressed alone. Each has a checksum. `docs/files.md` has the format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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


class Lossless(Decoded):
    """One model of a store, read in its own dtypes with `base`, which its user sets. Thread-safe.

    Unlike other vectors of a store it holds weights, not their differences from the base.
    """

    holds: Holds | None = "weight"
    base: Weights | None = None

    def __init__(
        self,
        stored: Checkpoint,
        shapes: Mapping[str, Sequence[int]],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        super().__init__(stored, shapes, "")
        self.tensors = {n: replace(of, dtype=dtypes[n]) for n, of in self.tensors.items()}
        self._indices: dict[str, tuple[NDArray[Any], NDArray[np.int64]]] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Lossless:
        """Read the headers of the model at `path`, a folder or one file.

        Raises:
            UserError: no such files, or their headers do not say what a reader needs.
        """
        stored = Checkpoint.open(path)
        shapes, dtypes = dict[str, torch.Size](), dict[str, torch.dtype]()

        def parse(said: dict[str, Any]) -> None:
            for name, (dtype, shape) in said["tensors"].items():
                shapes[name], dtypes[name] = torch.Size(shape), DTYPES[dtype]

        parse_headers(stored, KEY, VERSION, "a model without loss", parse)
        for name, info in stored.tensors.items():
            least = INDEX.itemsize * -(-shapes[name].numel() // BLOCK) if name in shapes else -1
            if info.dtype != torch.uint8 or not 0 <= least <= info.nbytes:
                raise UserError(
                    f"{stored.folder / info.shard}: the blocks of tensor `{name}` do not fit what "
                    f"its header says; {RESTORE}"
                )
        return cls(stored, {name: shapes[name] for name in stored.tensors}, dtypes)

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
                whole = self._decode(name, block, part.new_empty(last - first))
                part.copy_(whole[low - first : high - first])
        return chunk

    def _decode(self, name: str, block: int, theta: Tensor) -> Tensor:
        index, ends = self._index(name)
        size, form, checksum = index[block].tolist()
        stored = torch.empty(size, dtype=torch.uint8, device="cpu")
        self.stored.read(name, int(ends[block]) - size, int(ends[block]), stored)
        base = None
        if form == UNITS:
            assert self.base is not None, "set `base` before a lossless vector is read"
            first = block * BLOCK
            base = self.base.read(name, first, first + len(theta), torch.empty_like(theta))
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
        tensors = {name: [_NAMES[self.dtypes[name]], list(of)] for name, of in shapes.items()}
        return json.dumps({"version": VERSION, "tensors": tensors})

    def most(self, item: Item) -> int:
        """The most bytes of a tensor; the number that is written is known at its end."""
        size = item.numel * self.dtypes[item.name].itemsize
        return size + INDEX.itemsize * -(-item.numel // BLOCK)


class Keeping(Measured):
    """The outputs of `keep_pass`; `measured` returns the bytes of each."""

    def __init__(self, items: Sequence[Item]) -> None:
        super().__init__()
        count = len(items[0].inputs) if items else 0
        self.coded = [Kept({i.name: i.inputs[k].dtype for i in items}) for k in range(count)]
        self._made: dict[tuple[str, int], list[NDArray[Any]]] = {}  # indices of pieces
        self._before: list[list[NDArray[Any]]] = [[] for _ in range(count)]  # of this tensor

    def widths(self, name: str) -> tuple[Width, ...]:
        """Widths of room for each output in one tensor."""
        return tuple(Width(8 * kept.dtypes[name].itemsize, BLOCK) for kept in self.coded)

    def encode(self, item: Item, start: int, found: Sequence[Tensor], out: Tensor) -> None:
        """Code a piece, which begins with a block: base and models to `out` [K, bytes] uint8."""
        base, models = (found[0], found[1:]) if item.base is not None else (None, found)
        indices = []
        for theta, row in zip(models, out, strict=True):
            fits = base is not None and theta.dtype == base.dtype and theta.dtype in MANTISSA
            index, place = np.zeros(-(-len(theta) // BLOCK), INDEX), 0
            for k, block in enumerate(theta.split(BLOCK) if len(theta) else ()):
                beside = base[k * BLOCK :][: len(block)] if base is not None and fits else None
                form, made = encode(block, beside)
                row[place : place + len(made)] = torch.frombuffer(bytearray(made), dtype=row.dtype)
                index[k], place = (len(made), form, _checksum(block)), place + len(made)
            indices.append(index)
        self._made[item.name, start] = indices

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
        self._found[item.name, start] = [len(row) for row in made]
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
