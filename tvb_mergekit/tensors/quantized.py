"""Vectors that are stored in a code: the interfaces of their readers and writers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors.checkpoint import RESTORE, Checkpoint, metadata_of
from tvb_mergekit.tensors.stream import TensorInfo, Weights

if TYPE_CHECKING:
    from typing_extensions import Self

VERSION = 1  # of the formats of encoded tensors
Parsed = Iterable[tuple[str, torch.dtype, Sequence[int]]]  # tensors, their dtypes when read, shapes
_MALFORMED = (LookupError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError)


class Decoded(Weights):
    """A vector whose files hold encoded tensors. Thread-safe.

    The metadata of a file has JSON under `key`, with a version and the shape of each tensor.
    Messages call its content `what`.

    Raises:
        UserError: a newer version, or files that do not hold what their headers say.
    """

    key = what = ""

    def __init__(self, stored: Checkpoint) -> None:
        self.stored, self.folder, self.shards = stored, stored.folder, stored.shards
        self.tensors = {}
        for shard in self.shards:
            file = self.folder / shard
            try:
                said = json.loads(metadata_of(file)[self.key])
                newer = int(said["version"]) > VERSION
                for name, dtype, shape in () if newer else self._parse(said):
                    if any(not 0 <= size < 2**48 for size in shape):
                        raise ValueError(f"`{name}` has shape {shape}")
                    self.tensors[name] = TensorInfo(tuple(shape), dtype, shard)
            except _MALFORMED as error:
                raise UserError(
                    f"{file}: its header does not describe {self.what} ({error}); {RESTORE}"
                ) from error
            if newer:
                raise UserError(
                    f"{file}: {self.what} of version {said['version']}, this tvb-mergekit reads "
                    f"up to {VERSION}; upgrade it: pip install -U tvb-mergekit"
                )
        if strange := sorted(set(self.tensors) ^ set(stored.tensors)):
            raise UserError(
                f"{self.folder}: tensor `{strange[0]}` does not fit what the headers there say; "
                f"{RESTORE}"
            )
        for name in self.tensors:
            if not self._fits(name):
                raise self.damaged(name)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Read the headers of the vector at `path`, a folder or one file."""
        return cls(Checkpoint.open(path))

    def _parse(self, said: Any) -> Parsed:
        """The tensors that the metadata describe."""
        raise NotImplementedError

    def _fits(self, name: str) -> bool:
        """Whether the stored bytes can be those of a tensor of this shape."""
        raise NotImplementedError

    def bytes_of(self, name: str) -> int:
        """The stored bytes of a tensor."""
        return self.stored.tensors[name].nbytes

    def damaged(self, name: str) -> UserError:
        file = self.folder / self.tensors[name].shard
        return UserError(f"{file}: tensor `{name}` is not what was stored; {RESTORE}")

    def check_unchanged(self) -> None:
        self.stored.check_unchanged()

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes
