"""The code of models without loss and of samples: blocks of entries next to the base's.

A tensor is cut into blocks of 2^17 elements. `units` codes a block of 16-bit weights next to the
base's; other blocks are compressed alone. A sample codes the drawn entries of each block.
`lossless` reads them; `docs/files.md` has the formats.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
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


def keep(
    paths: Sequence[Path],
    items: Sequence[Item],
    draws: Sequence[Draw] = (),
    engine: Engine = Engine(),
    title: str = "Models",
) -> list[float]:
    """Write every input of some items, or a sample of it, to the bit, coded next to the base.

    Args:
        paths: a new file for each input.
        items: all with that number of inputs.
        draws: of each input; none: all entries.

    Returns:
        The squared norm of the error of each sample.
    """
    draws = draws or [ALL] * len(paths)
    files = [_File(path, items, k, draws[k]) for k, path in enumerate(paths)]
    work, errors = partial(_coded, draws), np.zeros(len(files))
    for piece, coded in run(items, work, replace(engine, device=CPU), title, grain=BLOCK):
        for k, (blocks, index, error) in enumerate(coded):
            files[k].append(blocks, index, last=piece.stop == piece.item.numel)
            errors[k] += error
    for file in files:
        file.finish()
    return list(errors.tolist())


def _coded(
    draws: Sequence[Draw], piece: Piece, reader: Reader
) -> list[tuple[list[bytes], NDArray[Any], float]]:
    """Of each input: the blocks of a piece, their index, and the squared error."""
    item, made = piece.item, []
    base = None if item.base is None else reader.stored(item.base, piece)
    for draw, part in zip(draws, item.inputs, strict=True):
        whole, share, error = reader.stored(part, piece), draw.of(item.shape), 0.0
        starts = range(0, len(whole), BLOCK)
        blocks, index = list[bytes](), np.zeros(len(starts), INDEX)
        for number, start in enumerate(starts):
            theta = whole[start : start + BLOCK]
            beside = None if base is None else base[start : start + BLOCK]
            if share < 1:
                assert beside is not None, "a task vector has a base"
                places = draw.places(item.name, piece.start // BLOCK + number, len(theta))
                tau = (theta.float() - beside.float()).double()
                held = float(tau[places].square().sum())
                error += (1 / share - 1) ** 2 * held + float(tau.square().sum()) - held
                theta, beside = theta[places], beside[places]
            fits = beside is not None and theta.dtype == beside.dtype in MANTISSA
            form, code = encode(theta, beside if fits else None)
            blocks.append(code)
            index[number] = len(code), form, checksum(theta)
        made.append((blocks, index, error))
    return made


class _File:
    """One file of input `number` of the items, as bytes whose sizes are known when they end.

    The header gets room for the most bytes, and is written last.
    """

    def __init__(self, path: Path, items: Sequence[Item], number: int, draw: Draw) -> None:
        dtypes = {item.name: item.inputs[number].dtype for item in items}
        said = {item.name: [NAMES[dtypes[item.name]], list(item.shape)] for item in items}
        about = {"version": VERSION, "seed": draw.seed, "share": draw.share, "tensors": said}
        self._metadata = {"format": "pt", MARKER: path.stem, KEY: json.dumps(about)}
        # Tensor -> its bytes: the most until it is written
        self._sizes = {
            item.name: dtypes[item.name].itemsize * item.numel
            + INDEX.itemsize * -(-item.numel // BLOCK)
            for item in items
        }
        self._names, self._index, self._start = iter(dtypes), list[NDArray[Any]](), 0
        self._room = len(self._header())
        self._file: BinaryIO = path.open("wb")
        self._file.write(b" " * self._room)

    def append(self, blocks: Sequence[bytes], index: NDArray[Any], last: bool) -> None:
        """Append blocks of the current tensor, which `last` ends."""
        self._index.append(index)
        self._file.writelines(blocks)
        if last:
            self._file.write(np.concatenate(self._index).tobytes())
            self._index.clear()
            stop = self._file.tell() - self._room
            self._sizes[next(self._names)], self._start = stop - self._start, stop

    def finish(self) -> None:
        with self._file:
            self._file.seek(0)
            self._file.write(self._header(self._room))

    def _header(self, length: int = 0) -> bytes:
        tensors = {name: (torch.uint8, [size]) for name, size in self._sizes.items()}
        return header_of(self._metadata, tensors, length)
