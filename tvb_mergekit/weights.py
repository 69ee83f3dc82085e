"""Named tensors wherever they are: what the streaming engine asks of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tvb_mergekit.checkpoints import Named, TensorInfo, bytes_of


class Weights(Protocol):
    """A model's tensors: a `Checkpoint` on disk, a `StateDict` in memory, an `AdapterDelta`."""

    tensors: dict[str, TensorInfo]
    others: Sequence[str]  # names of what is no tensor

    def tensor(self, name: str) -> Tensor:
        """The whole tensor on the CPU; treat it as read-only."""

    def read(self, name: str, start: int, stop: int, out: Tensor) -> Tensor:
        """Elements `start` to `stop` of the flattened tensor; `out` is room for them."""

    def canonical(self, name: str) -> str:
        """The first name of a tensor that has several."""

    def fingerprint(self) -> str:
        """64 hexadecimal digits that the contents decide; see `Checkpoint.fingerprint`."""

    def stamp(self) -> list[list[int | str]]:
        """What changes with every write to the files; empty in memory."""

    @property
    def nbytes(self) -> int:
        """Stored bytes."""


class StateDict(Named):
    """The tensors of a state dict as `Weights`; never modified, moved to the CPU when read."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = {n: t.detach() for n, t in state.items() if isinstance(t, Tensor)}
        self.others = [name for name in state if name not in self._state]
        self.tensors: dict[str, TensorInfo] = {}
        first: dict[tuple[object, ...], str] = {}
        for name, value in self._state.items():
            place = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
            owner = first.setdefault(place, name) if value.numel() else name
            alias = None if owner == name else owner
            self.tensors[name] = TensorInfo(tuple(value.shape), value.dtype, "", alias)

    def tensor(self, name: str) -> Tensor:
        return self._state[name].cpu()

    def read(self, name: str, start: int, stop: int, out: Tensor) -> Tensor:
        return self._state[name].reshape(-1)[start:stop].cpu()

    def fingerprint(self) -> str:
        return self._digest(lambda n, i, j: bytes_of(self.read(n, i, j, torch.empty(0))))

    def stamp(self) -> list[list[int | str]]:
        return []
