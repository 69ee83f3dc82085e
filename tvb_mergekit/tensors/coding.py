"""The code of models without loss and of samples: blocks of entries next to the base's.

A tensor is cut into blocks of 2^17 elements. `units` codes a block of 16-bit weights next to the
base's; other blocks are compressed alone. A sample codes the drawn entries of each block.
`lossless` reads them; `docs/files.md` has the formats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from tvb_mergekit.tensors.checkpoint import NAMES
from tvb_mergekit.tensors.passes import Reader, run
from tvb_mergekit.tensors.stream import CPU, Engine, Item, Piece
from tvb_mergekit.tensors.writing import MARKER, header_of

KEY, VERSION = "tvb_coded", 1  # of the metadata, and of the format
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


def checksum(values: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(_bytes_of(values))


class Keeping:
    """Writes every input of some items, or a sample of it, to the bit, coded next to the base.

    Args:
        paths: a new file for each input.
        items: all with that number of inputs.
        samples: of each input; none: all entries.
    """

    def __init__(
        self, paths: Sequence[Path], items: Sequence[Item], samples: Sequence[Draw] = ()
    ) -> None:
        self._items, self._samples = items, list(samples) or [ALL] * len(paths)
        self._files = [
            _Appender(path, items, number, sample)
            for number, (path, sample) in enumerate(zip(paths, self._samples, strict=True))
        ]

    def write(self, engine: Engine = Engine(), title: str = "Models") -> list[float]:
        """Write all tensors in order; returns the squared norm of the error of each sample."""
        errors = np.zeros(len(self._files))
        before = [list[NDArray[Any]]() for _ in self._files]
        engine = replace(engine, device=CPU)
        for piece, coded in run(self._items, self._coded, engine, title, grain=BLOCK):
            last = piece.stop == piece.item.numel
            for file, (data, index, _), indices in zip(self._files, coded, before, strict=True):
                indices.append(index)
                end = [np.concatenate(indices).tobytes()] if last else []
                file.append(b"".join([*data, *end]), last)
                if last:
                    indices.clear()
            errors += [error for _, _, error in coded]
        for file in self._files:
            file.finish()
        return list(errors.tolist())

    def _coded(self, piece: Piece, reader: Reader) -> list[tuple[list[bytes], Any, float]]:
        """Of each input: the blocks of a piece, their index, and the squared error."""
        item = piece.item
        base = None if item.base is None else reader.stored(item.base, piece)
        made = []
        for sample, part in zip(self._samples, item.inputs, strict=True):
            whole, share, error = reader.stored(part, piece), sample.of(item.shape), 0.0
            blocks = whole.split(BLOCK) if len(whole) else ()
            data, index = list[bytes](), np.zeros(len(blocks), INDEX)
            for number, theta in enumerate(blocks):
                beside = None if base is None else base[number * BLOCK :][: len(theta)]
                if share < 1:
                    assert beside is not None, "a task vector has a base"
                    places = sample.places(item.name, piece.start // BLOCK + number, len(theta))
                    tau = (theta.float() - beside.float()).double()
                    held = float(tau[places].square().sum())
                    error += (1 / share - 1) ** 2 * held + float(tau.square().sum()) - held
                    theta, beside = theta[places], beside[places]
                fits = beside is not None and theta.dtype == beside.dtype in MANTISSA
                form, coded = encode(theta, beside if fits else None)
                data.append(coded)
                index[number] = len(coded), form, checksum(theta)
            made.append((data, index, error))
        return made


class _Appender:
    """One file of input `number` of the items, as bytes whose sizes are known when they end.

    The header gets room for the most bytes, and is written last.
    """

    def __init__(self, path: Path, items: Sequence[Item], number: int, sample: Draw) -> None:
        said: dict[str, Any] = {"version": VERSION, "seed": sample.seed, "share": sample.share}
        dtypes = [item.inputs[number].dtype for item in items]
        said["tensors"] = {
            i.name: [NAMES[dtype], list(i.shape)] for i, dtype in zip(items, dtypes, strict=True)
        }
        self._metadata = {"format": "pt", MARKER: path.stem, KEY: json.dumps(said)}
        self._names, self._sizes, self._size = [item.name for item in items], list[int](), 0
        most = [
            dtype.itemsize * item.numel + INDEX.itemsize * -(-item.numel // BLOCK)
            for item, dtype in zip(items, dtypes, strict=True)
        ]
        self._room = len(self._header(most))
        self._file: BinaryIO = path.open("wb")
        self._file.write(b" " * self._room)

    def append(self, data: bytes, last: bool) -> None:
        """Append to the current tensor, which `last` ends."""
        self._file.write(data)
        self._size += len(data)
        if last:
            self._sizes.append(self._size)
            self._size = 0

    def finish(self) -> None:
        with self._file:
            self._file.seek(0)
            self._file.write(self._header(self._sizes, self._room))

    def _header(self, sizes: Sequence[int], length: int = 0) -> bytes:
        pairs = zip(self._names, sizes, strict=True)
        tensors: Mapping[str, Any] = {name: (torch.uint8, [size]) for name, size in pairs}
        return header_of(self._metadata, tensors, length)
