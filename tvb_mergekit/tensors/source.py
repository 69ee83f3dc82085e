"""Named tensors: the interface between passes and models, and a state dict in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tvb_mergekit.core.lora import Factors

Holds = Literal["weight", "delta"]
SAMPLE = 1024  # elements at the start, middle and end of each tensor that enter a fingerprint


@dataclass(frozen=True)
class TensorInfo:
    """Facts of a tensor before it is read.

    Attributes:
        alias_of: the first name of the same memory (tied tensors, in memory and in `.bin`).
        offset: of its first byte in the shard; None in a PyTorch file.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: str = ""
    alias_of: str | None = None
    offset: int | None = None

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Weights:
    """A model's tensors: a `Checkpoint` on disk, a `StateDict` in memory, an `Adapter`."""

    tensors: dict[str, TensorInfo]
    holds: Holds | None = None  # None: the reader knows what the elements are
    in_memory = False  # `read` returns views
    grain = 1  # elements that are decoded together
    base: Weights | None = None  # set by users of vectors that are decoded next to their base
    model_type: str | None = None  # as transformers calls it, if it is known

    def tensor(self, name: str) -> Tensor:
        """The complete tensor on the CPU, in its stored dtype; treat it as read-only."""
        info = self.tensors[name]
        flat = torch.empty(info.numel, dtype=info.dtype, device="cpu")
        return self.read(name, 0, info.numel, flat).view(info.shape)

    def whole(self, name: str) -> Tensor:
        """The complete weight, also of a source of differences that knows its base."""
        return self.tensor(name)

    def factors_of(self, name: str) -> Sequence[Factors] | None:
        """The factors of each matrix of a tensor; () of a zero tensor, None if there are none."""
        return None

    def read(self, name: str, start: int, stop: int, out: Tensor) -> Tensor:
        """Elements `start` to `stop` of the flattened tensor, thread-safe.

        Args:
            out: 1-D, in the stored dtype, on the CPU, at least `stop - start` elements. It may
                stay unused.
        """
        raise NotImplementedError

    def check_unchanged(self) -> None:
        """Raise UserError if a file was changed after it was opened."""

    def share(self, name: str) -> float:
        """The share of a tensor's elements that are stored, if the rest reads as zeros.

        A random sample makes squares of elements 1 / share times too large on average.
        """
        return 1.0

    def canonical(self, name: str) -> str:
        """The first name of a tensor with several names."""
        return self.tensors[name].alias_of or name

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    def fingerprint(self) -> str:
        """64 hexadecimal digits from the names, dtypes, shapes and a sample of every tensor.

        The path, the sharding and the file format do not change it.
        """
        digest = hashlib.sha256()
        for name, start, stop in self.samples():
            info = self.tensors[name]
            sample = self.read(name, start, stop, torch.empty(stop - start, dtype=info.dtype))
            digest.update(f"{name}|{info.dtype}|{info.shape}|".encode())
            digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def samples(self) -> Iterator[tuple[str, int, int]]:
        """(name, start, stop) of the flattened elements in the fingerprint."""
        for name in sorted(self.tensors):
            numel = self.tensors[name].numel
            last = max(0, numel - SAMPLE)
            for start in sorted({0, last // 2, last}):
                yield name, start, min(start + SAMPLE, numel)


class StateDict(Weights):
    """The tensors of a state dict; never modified, and copied to the CPU when they are read."""

    in_memory = True

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = {n: t.detach() for n, t in state.items() if isinstance(t, Tensor)}
        self.tensors = infos_of(self.state.items())
        self._copy = "", torch.empty(0)  # of the last tensor that is not contiguous, flattened

    def tensor(self, name: str) -> Tensor:
        return self.state[name].cpu()

    def read(self, name: str, start: int, stop: int, out: Tensor) -> Tensor:
        tensor = self.state[name]
        if not tensor.is_contiguous():
            known, tensor = self._copy  # one tuple: threads may replace it
            if known != name:
                tensor = self.state[name].reshape(-1)
                self._copy = name, tensor
        return tensor.view(-1)[start:stop].cpu()


def infos_of(tensors: Iterable[tuple[str, Tensor]], shard: str = "") -> dict[str, TensorInfo]:
    """Facts of tensors in memory. All except the first name of a tensor are aliases."""
    infos: dict[str, TensorInfo] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, value in tensors:
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
        owner = first.setdefault(place, name) if value.numel() else name
        alias = None if owner == name else owner
        infos[name] = TensorInfo(tuple(value.shape), value.dtype, shard, alias)
    return infos
