"""Named tensors as passes see them: models, the parts of a tensor, pieces, sinks and the device."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tvb_mergekit.core.basis import Tunables
from tvb_mergekit.core.gram import Factors
from tvb_mergekit.errors import UserError, one_line
from tvb_mergekit.progress import Progress, silent

Holds = Literal["weight", "delta"]
SAMPLE = 1024  # elements at the start, middle and end of each tensor that enter a fingerprint


@dataclass(frozen=True)
class TensorInfo:
    """Facts of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: str = ""
    alias_of: str | None = None  # the first name of the same memory, or as `checkpoint.tie` says
    offset: int | None = None  # of its first byte in the shard; None in a PyTorch file
    stored: bool = True  # False for a name that the file lacks

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
    grain = 1  # elements that are decoded together
    folder: Path | None  # of its files; None of state dicts
    base: Weights | None = None  # set by users of vectors that are decoded next to their base
    under: Weights | None = None  # the model that an adapter changes
    files: Sequence[Weights] = ()  # whose tensors it is made of, its own first
    changed: Set[str] = frozenset()  # the tensors that an adapter changes
    model_type: str | None = None  # as transformers calls it, if it is known

    def tensor(self, name: str) -> Tensor:
        """The complete tensor on the CPU, in its stored dtype; treat it as read-only."""
        info = self.tensors[name]
        return self.elements(name, 0, info.numel).view(info.shape)

    def elements(self, name: str, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of the flattened tensor, on the CPU in its stored dtype."""
        dtype = self.tensors[name].dtype
        return self.read(name, start, stop, torch.empty(stop - start, dtype=dtype, device="cpu"))

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
        for each in self.files:
            each.check_unchanged()

    def share(self, name: str) -> float:
        """The share of a tensor's elements that are stored, if the rest reads as zeros.

        A random sample makes squares of elements 1 / share times too large on average.
        """
        return 1.0

    def name_tensors(self) -> None:
        """Take the names of tensors that the model of an adapter has got; see `checkpoint.tie`."""

    def canonical(self, name: str) -> str:
        """The first name of a tensor with several names."""
        return self.tensors[name].alias_of or name

    @property
    def nbytes(self) -> int:
        if self.files:
            return self.files[0].nbytes
        return sum(self.tensors[name].nbytes for name in self.in_file)

    @property
    def in_file(self) -> list[str]:
        """The names that the file holds."""
        return [name for name, info in self.tensors.items() if info.stored]

    def fingerprint(self) -> str:
        """64 hexadecimal digits from the names, dtypes, shapes and a sample of every tensor."""
        digest = hashlib.sha256()
        for name, start, stop in self.samples():
            info = self.tensors[name]
            digest.update(f"{name}|{info.dtype}|{info.shape}|".encode())
            sample = self.elements(name, start, stop).contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def samples(self) -> Iterator[tuple[str, int, int]]:
        """(name, start, stop) of the flattened elements in the fingerprint."""
        for name in sorted(self.in_file):
            numel = self.tensors[name].numel
            last = max(0, numel - SAMPLE)
            for start in sorted({0, last // 2, last}):
                yield name, start, min(start + SAMPLE, numel)


class StateDict(Weights):
    """The tensors of a state dict; never modified, and copied to the CPU when they are read."""

    folder = None

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = {n: t.detach() for n, t in state.items() if isinstance(t, Tensor)}
        self.tensors = infos_of(self.state.items())
        self._flat = {name: tensor.reshape(-1) for name, tensor in self.state.items()}

    def read(self, name: str, start: int, stop: int, out: Tensor) -> Tensor:
        return self._flat[self.canonical(name)][start:stop].cpu()


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


@dataclass(frozen=True)
class Part:
    """One model's part of a tensor: read(start, stop, buffer) returns flattened elements.

    They are in the buffer, or a view of a tensor that is in memory on any device.
    """

    dtype: torch.dtype
    read: Callable[[int, int, Tensor], Tensor]
    holds: Holds = "weight"  # or a delta, the difference from the base's weight
    name: str | None = None  # of the stored tensor; None: it is made of others
    shape: tuple[int, ...] | None = None  # of the stored tensor; None: unknown
    share: float = 1.0  # of the elements in a random sample, see `Weights.share`
    grain: int = 1  # elements that are decoded together
    factors: Sequence[Factors] | None = None  # of each matrix, see `Weights.factors_of`

    @classmethod
    def of(cls, weights: Weights, name: str) -> Part:
        info, read = weights.tensors[name], partial(weights.read, name)
        known = weights.share(name), weights.grain, weights.factors_of(name)
        return cls(info.dtype, read, weights.holds or "weight", name, info.shape, *known)

    @classmethod
    def in_memory(cls, tensor: Tensor, first: int = 0) -> Part:
        """A tensor as the elements of a larger one from `first` on."""
        flat = tensor.detach().reshape(-1)
        return cls(tensor.dtype, lambda a, b, _: flat[a - first : b - first])

    def between(self, start: int, stop: int, memory: Tensor | None = None) -> Tensor:
        """Elements in their dtype, on the CPU, or where a tensor in memory is; `memory`: bytes."""
        size = (stop - start) * self.dtype.itemsize
        if memory is None:
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self.read(start, stop, memory[:size].view(self.dtype))


@dataclass(frozen=True)
class Item:
    """One tensor of a pass.

    Attributes:
        counted_as: The name under which the tensor counts in the Gram matrix: its own, or the first
            name of a tensor that is stored once and has several. None: the base's own.
        load: Gives the tensors of `parts` complete, if they cannot be read in pieces. A pass calls
            it just before it reads them, and drops them afterwards.
    """

    name: str
    shape: tuple[int, ...]
    base: Part | None  # theta_0; None if no input needs it
    inputs: tuple[Part, ...]  # of each task vector; an item without inputs is the base's own
    out: torch.dtype = torch.float32  # of its outputs
    counted_as: str | None = None
    tunables: Tunables | None = None  # lambda, alpha, density; None: the base's own, in a merge
    load: Callable[[], Sequence[Tensor]] | None = None
    first: int = 0  # the place of its first element, if it is one matrix of a larger tensor

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.inputs if self.base is None else (self.base, *self.inputs)

    @property
    def factored(self) -> bool:
        """Whether the factors of all inputs are known."""
        return all(part.factors is not None for part in self.inputs)

    def updates(self, number: int = 0) -> list[Factors]:
        """The factors of one matrix of a tensor that is `factored`, of each input."""
        none = Factors(torch.empty(self.shape[-2], 0), torch.empty(0, self.shape[-1]))
        return [part.factors[number] if part.factors else none for part in self.inputs]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, as they are stored."""
        return self.numel * sum(part.dtype.itemsize for part in self.parts)

    @property
    def written(self) -> int:
        """Bytes of an output."""
        return self.numel * self.out.itemsize

    def loaded(self) -> Item:
        """The item with its parts in memory, if they cannot be read in pieces."""
        if self.load is None:
            return self
        pairs = zip(self.parts, map(Part.in_memory, self.load()), strict=False)
        found = [replace(part, read=loaded.read) for part, loaded in pairs]
        found += self.parts[len(found) :]  # such as the mean of a store, which is read in pieces
        base = None if self.base is None else found.pop(0)
        return replace(self, base=base, inputs=tuple(found), load=None)

    def whole(self, part: Part) -> Tensor:
        """A part of it, complete."""
        return part.between(self.first, self.first + self.numel)


# A receiver of outputs: sink(item, start, stop, values). Several threads call it with the pieces of
# a pass, in any order. `values` [outputs, stop - start] are in `item.out`, on the CPU; those with
# one row are of all outputs.
Sink = Callable[[Item, int, int, Tensor], None]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Engine:
    """The device of passes, and a function that is called at the start of each."""

    device: torch.device = CPU
    progress: Progress = silent


def device_of(name: torch.device | str) -> torch.device:
    """The device of this name."""
    try:
        device = torch.device(name)
        torch.zeros(1, dtype=torch.float64, device=device).item()
    except (RuntimeError, AssertionError, TypeError, ImportError) as error:
        told = f"{one_line(error).partition('. ')[0]:.100}; name another, such as cpu"
        raise UserError(f"device `{name}` cannot be used here: {told}") from error
    return device
