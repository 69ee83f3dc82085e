"""Models without loss, and samples of them: blocks of entries coded next to the base's.

A tensor is cut into blocks of 2^17 elements, each with a checksum. `units` codes a block of 16-bit
weights next to the base's; other blocks are compressed alone. A sample codes the drawn entries of
each block. `docs/files.md` has the formats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors.checkpoint import DTYPES, NAMES, RESTORE, Checkpoint, metadata_of
from tvb_mergekit.tensors.output import MARKER, header_of
from tvb_mergekit.tensors.passes import Piece, Read, run
from tvb_mergekit.tensors.stream import CPU, Engine, Item, TensorInfo, Weights

KEY, VERSION = "tvb_coded", 1  # of the metadata, and of the format
BLOCK = 2**17  # elements that are decoded together
INDEX = np.dtype([("bytes", "<u4"), ("form", "u1"), ("xxh3", "<u8")])  # of a block: 13 bytes
PLAIN, ZSTD, UNITS = range(3)  # forms of a block
MANTISSA = {torch.bfloat16: 7, torch.float16: 10}  # dtype -> bits
LEVEL = 1  # of zstd; 3 took a third longer, and more bytes
_MALFORMED = (LookupError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError)


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
    if form == UNITS and base is not None and theta.dtype in MANTISSA:
        from tvb_mergekit.tensors import units

        beside, made = (each.view(torch.uint16).numpy() for each in (base, theta))
        return bool(units.unpack(data, beside, MANTISSA[theta.dtype], made))
    if form >= UNITS or len(data) != theta.nbytes:
        return False
    np.copyto(theta.view(torch.uint8).numpy(), data)
    return True


def _bytes_of(values: Tensor) -> memoryview:
    return values.contiguous().view(torch.uint8).numpy().data


def checksum(values: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(_bytes_of(values))


def keep(
    files: Mapping[Path, str],
    items: Sequence[Item],
    draws: Sequence[Draw] = (),
    engine: Engine = Engine(),
    title: str = "Models",
) -> list[float]:
    """Write every input of some items, or a sample of it, to the bit, coded next to the base.

    Args:
        files: a new file for each input -> the name in its metadata.
        items: all with that number of inputs.
        draws: of each input; none: all entries.

    Returns:
        The relative error of each sample as a task vector; 0 for all entries.
    """
    draws = draws or [Draw(0, 1.0)] * len(files)
    headers = [partial(_header, name, items, k, draws[k]) for k, name in enumerate(files.values())]
    rooms = [len(header()) for header in headers]  # of the most bytes: it is written last
    index, ends = [list[NDArray[Any]]() for _ in files], [[room] for room in rooms]
    work, lost = partial(_coded, draws), np.zeros((len(files), 2))
    with ExitStack() as stack:
        opened = [stack.enter_context(path.open("wb")) for path in files]
        for file, room in zip(opened, rooms, strict=True):
            file.write(b" " * room)
        for piece, coded in run(items, work, replace(engine, device=CPU), title, grain=BLOCK):
            for k, (blocks, own, squares) in enumerate(coded):
                opened[k].writelines(blocks)
                index[k].append(own)
                lost[k] += squares
                if piece.stop == piece.item.numel:  # its tensor ends
                    opened[k].write(np.concatenate(index[k]).tobytes())
                    index[k].clear()
                    ends[k].append(opened[k].tell())
        for k, file in enumerate(opened):
            file.seek(0)
            file.write(headers[k]([stop - start for start, stop in pairwise(ends[k])], rooms[k]))
    return [(error / total) ** 0.5 if total else 0.0 for error, total in lost.tolist()]


def _header(
    name: str,
    items: Sequence[Item],
    number: int,
    draw: Draw,
    sizes: Sequence[int] = (),
    length: int = 0,
) -> bytes:
    """The header of input `number`. `sizes` are the bytes of its tensors; none: the most."""
    both = [(item, item.inputs[number].dtype) for item in items]
    said = {item.name: [NAMES[dtype], list(item.shape)] for item, dtype in both}
    about = {"version": VERSION, "seed": draw.seed, "share": draw.share, "tensors": said}
    sizes = sizes or [d.itemsize * i.numel + INDEX.itemsize * -(-i.numel // BLOCK) for i, d in both]
    tensors = {i.name: (torch.uint8, [size]) for i, size in zip(items, sizes, strict=True)}
    return header_of({"format": "pt", MARKER: name, KEY: json.dumps(about)}, tensors, length)


def _coded(
    draws: Sequence[Draw], piece: Piece, read: Read
) -> list[tuple[list[bytes], NDArray[Any], NDArray[Any]]]:
    """The blocks of a piece of each input, their index, and squares of error and task vector."""
    item, made = piece.item, []
    base = None if item.base is None else piece.stored(item.base)
    for draw, part in zip(draws, item.inputs, strict=True):
        whole, share, squares = piece.stored(part), draw.of(item.shape), np.zeros(2)
        starts = range(0, len(whole), BLOCK)
        blocks, index = list[bytes](), np.zeros(len(starts), INDEX)
        for number, start in enumerate(starts):
            theta = whole[start : start + BLOCK]
            beside = None if base is None else base[start : start + BLOCK]
            if draw.share < 1:
                assert beside is not None, "a task vector has a base"
                tau, place = theta.float() - beside.float(), piece.start // BLOCK + number
                kept = draw.places(item.name, place, len(theta)) if share < 1 else slice(None)
                held, total = (float(each.double().square().sum()) for each in (tau[kept], tau))
                squares += ((1 / share - 1) ** 2 * held + total - held, total)
                theta, beside = theta[kept], beside[kept]
            fits = beside is not None and theta.dtype == beside.dtype in MANTISSA
            form, code = encode(theta, beside if fits else None)
            blocks.append(code)
            index[number] = len(code), form, checksum(theta)
        made.append((blocks, index, squares))
    return made


class Coded(Weights):
    """One model of a store by its coded entries, decoded next to `base`.

    All entries, in their own dtypes: then the elements are the model's weights, to the bit. Or a
    random sample: its elements are exact entries of the task vector times the inverse of the share,
    or 0, in float32. Their expectation, and that of products of different ones, is the task
    vector's. Tensors of one dimension are complete. Thread-safe.
    """

    grain = BLOCK

    def __init__(self, path: Path, base: Weights | None = None) -> None:
        self.stored, self.path, self.base = Checkpoint.open(path), path, base
        self.files, self.tensors = (self.stored,), {}
        self.folder = path.parent
        self.dtypes: dict[str, torch.dtype] = {}  # of the entries
        self._indices: dict[str, tuple[NDArray[Any], NDArray[np.int64]]] = {}
        try:
            said = json.loads(metadata_of(path)[KEY])
            if said["version"] != VERSION:
                raise ValueError(f"version {said['version']}, expected {VERSION}")
            self.sample = Draw(int(said["seed"]), float(said["share"]))
            if not 0 < self.sample.share <= 1:
                raise ValueError(f"a share of {self.sample.share}")
            self.holds = "weight" if self.sample.share == 1 else "delta"
            for name, (dtype, shape) in said["tensors"].items():
                if any(not 0 <= size < 2**48 for size in shape):
                    raise ValueError(f"`{name}` has shape {shape}")
                self.dtypes[name] = own = DTYPES[dtype]
                read = own if self.holds == "weight" else torch.float32
                self.tensors[name] = TensorInfo(tuple(shape), read, path.name)
        except _MALFORMED as error:
            raise UserError(
                f"{path}: its header does not describe a coded model ({error}); {RESTORE}"
            ) from error
        for name in sorted(self.tensors.keys() | self.stored.tensors.keys()):
            info = self.stored.tensors.get(name)
            least = INDEX.itemsize * self._blocks(name) if name in self.tensors else np.inf
            if info is None or info.dtype != torch.uint8 or info.nbytes < least:
                raise self.damaged(name)

    def damaged(self, name: str) -> UserError:
        return UserError(f"{self.path}: tensor `{name}` is not what was stored; {RESTORE}")

    def _blocks(self, name: str) -> int:
        return -(-self.tensors[name].numel // BLOCK)

    def share(self, name: str) -> float:
        return self.sample.of(self.tensors[name].shape)

    def read(self, name: str, start: int, stop: int, out: Tensor) -> Tensor:
        """Elements `start` to `stop`; blocks that they are a part of are decoded complete."""
        name, chunk = self.canonical(name), out[: stop - start]
        numel = self.tensors[name].numel
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            first, last = block * BLOCK, min((block + 1) * BLOCK, numel)
            low, high = max(first, start), min(last, stop)
            part = chunk[low - start : high - start]
            whole = part if len(part) == last - first else part.new_empty(last - first)
            if self.holds == "weight":
                self._entries(name, block, None, whole)
            else:
                share, base = self.share(name), self._base(name, block, len(whole))
                places = self.sample.places(name, block, len(base)) if share < 1 else slice(None)
                base = base[places]
                theta = torch.empty(len(base), dtype=self.dtypes[name])
                self._entries(name, block, base, theta)
                whole.zero_()
                whole[places] = (theta.float() - base.float()).div_(share)
            if whole is not part:
                part.copy_(whole[low - first : high - first])
        return chunk

    def _base(self, name: str, block: int, length: int) -> Tensor:
        """The base's block, in the base's dtype."""
        assert self.base is not None, "a vector of a store is read with its base"
        return self.base.elements(name, block * BLOCK, block * BLOCK + length)

    def _entries(self, name: str, block: int, base: Tensor | None, theta: Tensor) -> None:
        """Fill `theta` with the entries that a block was encoded from.

        `base` are the same entries of the base; None: read them if the block needs them.
        """
        index, ends = self._index(name)
        size, form, known = index[block].tolist()
        stored = self.stored.elements(name, int(ends[block]) - size, int(ends[block]))
        if base is None and form == UNITS:
            base = self._base(name, block, len(theta))
        if not decode(form, stored, base, theta) or checksum(theta) != known:
            other = ". Or the base is another than at the build, if `tvb inspect STORE` is silent"
            raise UserError(f"{self.damaged(name)}{other * (form == UNITS)}")

    def fingerprint(self) -> str:
        """That of the coded bytes: to sample elements would decode a large part of the model."""
        return self.stored.fingerprint()

    def _index(self, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The index of a tensor's blocks, and the place where each ends."""
        if name not in self._indices:
            size = self.stored.tensors[name].nbytes
            first = size - INDEX.itemsize * self._blocks(name)
            index = self.stored.elements(name, first, size).numpy().view(INDEX)
            ends = np.cumsum(index["bytes"], dtype=np.int64)
            if ends[-1:].sum() != first:
                raise self.damaged(name)
            self._indices[name] = index, ends
        return self._indices[name]
