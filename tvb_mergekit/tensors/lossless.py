"""Models stored without loss, and samples of them, as named tensors decoded next to their base.

A tensor is cut into blocks of 2^17 elements, each with a checksum: see `coding`, which writes them.
`docs/files.md` has the formats.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors.checkpoint import DTYPES, RESTORE, Checkpoint, metadata_of
from tvb_mergekit.tensors.coding import BLOCK, INDEX, KEY, UNITS, VERSION, Draw, checksum, decode
from tvb_mergekit.tensors.stream import Holds, TensorInfo, Weights

_MALFORMED = (LookupError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError)


class Coded(Weights):
    """One model of a store by its coded entries, decoded next to `base`, which its user sets.

    All entries, in their own dtypes: then the elements are the model's weights, to the bit. Or a
    random sample: its elements are exact entries of the task vector times the inverse of the share,
    or 0, in float32. It is unbiased: the expectation of each element is that of the task vector.
    So are products of different elements. Tensors of one dimension are complete. Thread-safe.

    Raises:
        UserError: the file does not hold what its header says.
    """

    grain = BLOCK

    def __init__(self, path: Path) -> None:
        self.stored, self.path = Checkpoint.open(path), path
        self.tensors, self.dtypes = {}, dict[str, torch.dtype]()  # of the entries
        self._indices: dict[str, tuple[NDArray[Any], NDArray[np.int64]]] = {}
        try:
            said = json.loads(metadata_of(path)[KEY])
            if said["version"] != VERSION:
                raise ValueError(f"version {said['version']}, expected {VERSION}")
            self.sample = Draw(int(said["seed"]), float(said["share"]))
            if not 0 < self.sample.share <= 1:
                raise ValueError(f"a share of {self.sample.share}")
            self.holds: Holds | None = "weight" if self.sample.share == 1 else "delta"
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
            if name not in self.tensors or info is None or info.dtype != torch.uint8:
                raise self.damaged(name)
            if info.nbytes < INDEX.itemsize * self._blocks(name):
                raise self.damaged(name)

    def damaged(self, name: str) -> UserError:
        return UserError(f"{self.path}: tensor `{name}` is not what was stored; {RESTORE}")

    def check_unchanged(self) -> None:
        self.stored.check_unchanged()

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

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
            if self.holds == "weight":
                self._entries(name, block, None, whole)
            else:
                self._sampled(name, block, whole)
            if whole is not part:
                part.copy_(whole[low - first : high - first])
        return chunk

    def _sampled(self, name: str, block: int, out: Tensor) -> None:
        """Fill `out` with a block of the sample."""
        share, base = self.share(name), self._base(name, block, len(out))
        places = self.sample.places(name, block, len(out)) if share < 1 else slice(None)
        base = base[places]
        theta = self._entries(name, block, base, torch.empty(len(base), dtype=self.dtypes[name]))
        out.zero_()
        out[places] = (theta.float() - base.float()).div_(share)

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
        size, form, known = index[block].tolist()
        stored = torch.empty(size, dtype=torch.uint8, device="cpu")
        self.stored.read(name, int(ends[block]) - size, int(ends[block]), stored)
        if base is None and form == UNITS:
            base = self._base(name, block, len(theta))
        if not decode(form, stored, base, theta) or checksum(theta) != known:
            other = ". Or the base is another than at the build, if `tvb inspect STORE` is silent"
            raise UserError(f"{self.damaged(name)}{other * (form == UNITS)}")
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
            size = self.stored.tensors[name].nbytes
            first = size - INDEX.itemsize * self._blocks(name)
            held = self.stored.read(name, first, size, torch.empty(size - first, dtype=torch.uint8))
            index = held.numpy().view(INDEX)
            ends = np.cumsum(index["bytes"], dtype=np.int64)
            if ends[-1:].sum() != first:
                raise self.damaged(name)
            self._indices[name] = index, ends
        return self._indices[name]
