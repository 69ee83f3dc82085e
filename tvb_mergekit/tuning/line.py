"""A live model moved in place: theta(c) = start + fl(scale * direction), piece by piece.

Every move begins at `start`, so no error piles up, and its two roundings are those of the merge
(see `combine`): the weights are those that `mergekit-yaml` writes, to the last bit of their dtype.
start and direction lie in files, mapped when they are read; what fits is kept on an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tvb_mergekit.checkpoints import Checkpoint
from tvb_mergekit.combine import check_output
from tvb_mergekit.errors import UserError
from tvb_mergekit.output import listed
from tvb_mergekit.stream import Item

START, DIRECTION = "start", "direction"  # folders of a line, each with the files of a model
PIECE = 2**22  # elements that are moved at a time


@dataclass(frozen=True)
class Point:
    """A value of the coefficient and, where each basis has its own, their M factors of it."""

    value: float
    weights: tuple[float, ...] = ()

    def __str__(self) -> str:
        if not self.weights:
            return f"{self.value:g}"
        return f"{self.value:g} x ({', '.join(f'{weight:.3g}' for weight in self.weights)})"


class Live:
    """The tensors of a loaded model under the names that the merged model's files give them.

    A `stream.Sink` for single outputs.

    Raises:
        UserError: a parameter has another name in memory than in the files.
    """

    def __init__(self, model: torch.nn.Module, folder: Path) -> None:
        held = {n: t for n, t in model.state_dict(keep_vars=True).items() if t.is_contiguous()}
        self.tensors: dict[str, Tensor] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for name, info in Checkpoint.open(folder).tensors.items():
            if name in held and tuple(held[name].shape) == info.shape:
                self.tensors[name], self.dtypes[name] = held[name].detach().view(-1), info.dtype
        reached = {tensor.data_ptr() for tensor in self.tensors.values()}
        lost = [name for name, p in model.named_parameters() if p.data_ptr() not in reached]
        if lost:
            raise UserError(f"in memory the model names {listed(lost)} otherwise than its files")

    def write(self, item: Item, start: int, stop: int, values: Tensor) -> None:
        self.tensors[item.name][start:stop] = values[0]


class Line:
    """start and direction of every tensor that moves, in the files of two models below `folder`.

    Args:
        unit: what a coefficient is multiplied by to give the scale of the direction.
        device: where the model is.
        room: bytes of the line to keep there.
    """

    def __init__(self, folder: Path, unit: float, device: torch.device, room: int = 0) -> None:
        self.unit, self.device = unit, device
        self._parts = Checkpoint.open(folder / START), Checkpoint.open(folder / DIRECTION)
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}
        for name in self.names:
            size = sum(part.tensors[name].nbytes for part in self._parts)
            if size <= room:
                room -= size
                start, direction = self._read(name)
                self._kept[name] = start.to(device), direction.to(device)

    @property
    def names(self) -> list[str]:
        return list(self._parts[1].tensors)

    def _read(self, name: str) -> tuple[Tensor, Tensor]:
        start, direction = (part.tensor(name).view(-1) for part in self._parts)
        return start, direction

    def at(
        self, name: str, coefficient: float, dtype: torch.dtype
    ) -> Iterator[tuple[slice, Tensor]]:
        """The pieces of one flattened tensor in the output's `dtype`, on the device.

        Raises:
            UserError: it overflows.
        """
        start, direction = self._kept.get(name) or self._read(name)
        scale = coefficient * self.unit
        for first in range(0, len(start), PIECE):
            place = slice(first, min(first + PIECE, len(start)))
            moved = direction[place].to(self.device) * scale
            value = moved.add_(start[place].to(self.device).to(moved.dtype)).to(dtype)
            check_output(name, value, dtype)
            yield place, value

    def move(self, live: Live, coefficients: Mapping[str, float]) -> None:
        """Put the model where the line has these coefficients, by tensor name."""
        for name in self.names:
            if name in live.tensors:
                for place, value in self.at(name, coefficients[name], live.dtypes[name]):
                    live.tensors[name][place] = value

    def differs(self, live: Live, coefficients: Mapping[str, float]) -> list[str]:
        """The tensors that are not what the model was loaded with at this point."""
        return [
            name
            for name in self.names
            if name in live.tensors
            and not all(
                torch.equal(value.to(live.tensors[name].dtype), live.tensors[name][place])
                for place, value in self.at(name, coefficients[name], live.dtypes[name])
            )
        ]
