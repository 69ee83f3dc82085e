"""The model that lm-eval scores, moved along start + fl(scale * direction).

Each move begins at `start`, so no error accumulates. The two roundings are those of the merge, so
the weights are those that `mergekit-yaml` writes, to the last bit of their dtype.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tvb_mergekit.core.basis import check_output
from tvb_mergekit.errors import UserError, listed, megabytes
from tvb_mergekit.progress import bars
from tvb_mergekit.store.attach import live_tensors
from tvb_mergekit.tensors.checkpoint import Checkpoint

if TYPE_CHECKING:
    from tvb_mergekit.tune.merges import TunedRecipe

LOG = logging.getLogger(__name__)
CHUNK = 2**22  # elements that are moved at a time
SLACK = 2**28  # bytes, for batches and other small things


class Line:
    """The tensors of a live model that move, with start and direction in the files of two models.

    Args:
        unit: scale of the direction at coefficient 1.
        live: name in the files -> (flattened tensor in memory, dtype of the merge).
    """

    def __init__(
        self, start: Path, direction: Path, unit: float, live: Mapping[str, tuple[Tensor, Any]]
    ) -> None:
        self.unit = unit
        self._files = Checkpoint.open(start), Checkpoint.open(direction)
        self.live = {name: live[name] for name in self._files[1].tensors if name in live}

    def move(self, coefficients: Mapping[str, float]) -> None:
        for _, held, value in self._values(coefficients):
            held.copy_(value)

    def differing(self, coefficients: Mapping[str, float]) -> list[str]:
        """Return the tensors of the model that differ from the line at these coefficients."""
        found = self._values(coefficients)
        names = [name for name, held, value in found if not torch.equal(value.to(held.dtype), held)]
        return list(dict.fromkeys(names))

    def _values(self, coefficients: Mapping[str, float]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (name, chunk of the live tensor [n], its values at the coefficients [n])."""
        for name, (held, dtype) in self.live.items():
            scale = coefficients[name] * self.unit
            tensors = (held, *(file.tensor(name).view(-1) for file in self._files))
            chunks = (tensor.split(CHUNK) for tensor in tensors)
            for place, start, direction in zip(*chunks, strict=True):
                moved = direction.to(held.device) * scale
                value = moved.add_(start.to(held.device).to(moved.dtype)).to(dtype)
                check_output(name, value, dtype)
                yield name, place, value


class MovingModel:
    """An lm-eval model at any point.

    One point is merged to a folder and loaded from there, so that configuration, tokenizer and
    dtype are those of a merged model. Afterwards the weights move in place. The line must lead
    through the first point to the last bit. Otherwise every point is merged to a folder and loaded.

    Args:
        work: a folder for the merged model and the line; emptied here.
        load: loads the lm-eval model in a folder; its `model` is the module.
        begin: the coefficient to merge first; not 0, through which every line leads.
    """

    def __init__(
        self, recipe: TunedRecipe, work: Path, load: Callable[[Path], Any], quiet: bool,
        begin: float,
    ) -> None:  # fmt: skip
        self.recipe, self.work, self.load, self.quiet = recipe, work, load, quiet
        self.begin = begin
        self.line: Line | None = None
        self._lm: Any = None
        self._merged: float | None = None  # the point in the folder

    def at(self, point: float) -> Any:
        """Return the lm-eval model with the weights of a point."""
        if self._lm is None:
            shutil.rmtree(self.work, ignore_errors=True)
            if why := self._not_a_line():
                LOG.warning("%s; each point is merged to disk and loaded", why)
        if self.line is not None:
            self.line.move(self.recipe.coefficients(point, list(self.line.live)))
        elif point != self._merged:
            self._reload(point)
        return self._lm

    def _not_a_line(self) -> str | None:
        """Make the line, or return why there is none."""
        recipe = self.recipe
        self._reload(self.begin)
        stored = Checkpoint.open(self.work / "model")
        tensors, unknown = live_tensors(self._lm.model, stored)
        live = {
            name: (tensor.view(-1), stored.tensors[name].dtype)
            for name, tensor in tensors.items()
            if tensor.is_contiguous() and tuple(tensor.shape) == stored.tensors[name].shape
        }
        if lost := [*unknown, *(name for name in tensors if name not in live)]:
            return f"the loaded model and its files have different names for {listed(lost)}"
        start, direction = self.work / "start", self.work / "direction"
        unit = recipe.draw(start, direction, bars(self.quiet))
        line = Line(start, direction, unit, live)
        differing = line.differing(recipe.coefficients(self.begin, list(line.live)))
        if differing:
            return f"{listed(differing)}: not linear in {recipe.key} to the last bit"
        self.line = line
        return None

    def _reload(self, point: float) -> None:
        folder = self.work / "model"
        self._lm = self._merged = None  # before the next one is loaded
        shutil.rmtree(folder, ignore_errors=True)
        self.recipe.write(point, folder)
        self._lm, self._merged = self.load(folder), point

    def close(self) -> None:
        self._lm = self.line = None
        shutil.rmtree(self.work, ignore_errors=True)


def check_memory(nbytes: int, device: str) -> None:
    """Raise UserError unless a model of `nbytes` fits into the free memory."""
    import psutil

    free = int(psutil.virtual_memory().available)
    if (on := torch.device(device)).type == "cuda":
        free = torch.cuda.mem_get_info(on)[0]
    needed = nbytes + nbytes // 4 + SLACK
    if free < needed:
        raise UserError(
            f"too little memory on {device}: the model needs {megabytes(needed)} with room to "
            f"work, {megabytes(free)} are free; free some, or use another --device"
        )
