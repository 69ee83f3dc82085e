"""The live model at any point: moved along the line, merged in memory, or loaded anew."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tvb_mergekit.errors import UserError
from tvb_mergekit.output import listed, megabytes
from tvb_mergekit.progress import bars
from tvb_mergekit.tuning.line import Line, Live, Point

if TYPE_CHECKING:
    from tvb_mergekit.plugin.tuning import TunedRecipe

LOG = logging.getLogger(__name__)
SLACK = 2**28  # bytes, of a batch of a tiny model and the like


class Model:
    """What lm-eval scores, at any point.

    One point is merged to a folder and loaded from there, so that configuration, tokenizer and
    dtype are those of a merged model. From then on its weights move in place. The line must lead
    through that point to the last bit; where it does not, and where the recipe is not linear, every
    point is merged to a folder and loaded.

    Args:
        work: a folder for the merged model and the line; emptied here.
        load: a folder -> the lm-eval model in it, whose `model` is the module.
        begin: a coefficient to merge first in the place of 0, through which every line leads, and
            where what the models say differently is the same.
    """

    def __init__(
        self,
        recipe: TunedRecipe,
        work: Path,
        load: Callable[[Path], Any],
        quiet: bool,
        begin: float = 1.0,
    ) -> None:
        self.recipe, self.work, self.load, self.quiet = recipe, work, load, quiet
        self.begin = begin
        self._lm: Any = None
        self._merged: Point | None = None  # what lies in the folder
        self._live: Live | None = None
        self._line: Line | None = None

    def at(self, point: Point) -> Any:
        """The lm-eval model with the weights of a point.

        Raises:
            UserError, MergeRefused: what stops a merge; an overflow of the output dtype.
        """
        if self._lm is None:
            self._begin(Point(point.value or self.begin) if self.recipe.linear else point)
        if self._live is None or self._line is None:
            return self._lm if point == self._merged else self._reload(point)
        if point.weights:
            self.recipe.merge_into(point, self._live, self._live.dtypes)
        else:
            self._line.move(self._live, self.recipe.coefficients(point, self._line.names))
        return self._lm

    def _begin(self, point: Point) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        self._reload(point)
        recipe, anew = self.recipe, "each point is merged to disk and loaded"
        if not recipe.linear:
            LOG.warning(
                "%s draws at random and is not linear in %s: %s, with mergekit's seed %d",
                recipe.method,
                recipe.key,
                anew,
                recipe.seed,
            )
            return
        try:
            live = Live(self._lm.model, self.work / "model")
        except UserError as error:
            LOG.warning("%s: %s", error, anew)
            return
        unit = recipe.draw(self.work / "line", bars(self.quiet))
        line = Line(self.work / "line", unit, self._lm.device, _room(self._lm.device))
        differing = line.differs(live, recipe.coefficients(point, line.names))
        if differing:
            LOG.warning(
                "%s: not linear in %s to the last bit; %s", listed(differing), recipe.key, anew
            )
            return
        self._live, self._line = live, line

    def _reload(self, point: Point) -> Any:
        folder = self.work / "model"
        self._lm = self._merged = None  # before the next one is loaded
        shutil.rmtree(folder, ignore_errors=True)
        self.recipe.write(point, folder, quiet=True)
        self._lm, self._merged = self.load(folder), point
        return self._lm

    def close(self) -> None:
        """Delete what was only for the search."""
        self._lm = self._live = self._line = None
        shutil.rmtree(self.work, ignore_errors=True)


def _room(device: torch.device) -> int:
    """Bytes of the line to keep on a device: a quarter of what is free on an accelerator; mapped
    files are in the CPU's memory already."""
    return torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else 0


def check_memory(nbytes: int, device: str) -> None:
    """Raise UserError unless a model of `nbytes` fits beside what runs already."""
    import psutil

    on = torch.device(device)
    if on.type == "cuda":
        free: int = torch.cuda.mem_get_info(on)[0]
    else:
        free = psutil.virtual_memory().available
    needed = nbytes + nbytes // 4 + SLACK
    if free < needed:
        raise UserError(
            f"too little memory on {device}: the model takes {megabytes(needed)} with room to "
            f"work, {megabytes(free)} are free; free some, or take another --device"
        )
