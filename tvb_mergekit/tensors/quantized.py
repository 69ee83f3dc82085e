"""Vectors that are stored in a code: the interfaces of their readers and writers."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors.checkpoint import RESTORE, Checkpoint, metadata_of
from tvb_mergekit.tensors.source import TensorInfo, Weights
from tvb_mergekit.tensors.stream import Item

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

    def stamp(self) -> list[list[int | str]]:
        return self.stored.stamp()

    def check_unchanged(self) -> None:
        self.stored.check_unchanged()

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes


class Coding(ABC):
    """The code in which a pass writes its outputs, and measurements of the pieces.

    Attributes:
        key: of the metadata of its files.
    """

    key: str

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], list[float]] = {}  # each is set once and read once

    def measured(self, name: str, start: int) -> Tensor:
        """The measurements of the piece that begins at element `start`, float64."""
        return torch.tensor(self._found.pop((name, start)), dtype=torch.float64)

    def coded(self, items: Sequence[Item]) -> list[Item]:
        """The items, which a pass gives to a sink as bytes."""
        return [replace(i, out=torch.uint8, widths=self.widths(i.name)) for i in items]

    @abstractmethod
    def widths(self, name: str) -> tuple[int, ...]:
        """The most bytes of an element of each output in one tensor."""

    @abstractmethod
    def encode(self, item: Item, start: int, values: Any, out: Tensor) -> None:
        """Code a piece of a tensor, which begins at element `start`, into `out` [K, bytes] uint8.

        A row ends in unused bytes if it is not the longest.
        """

    @abstractmethod
    def described(self, output: int, items: Sequence[Item]) -> dict[str, Any]:
        """The metadata of a file of these tensors, without its version."""

    @abstractmethod
    def rows(self, item: Item, start: int, stop: int, values: Tensor) -> list[Tensor]:
        """The bytes of a piece that are written."""
