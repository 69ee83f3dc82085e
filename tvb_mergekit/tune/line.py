"""The merges of a recipe along its coefficient, and a loaded model that moves along them.

Our methods are linear in lambda, or in alpha of `basis_negate`: a merged tensor is
start + fl(coefficient * scale * direction). The model in memory moves by the same two roundings and
the same cast, from `start` each time. So no error accumulates, and its weights are those that
`mergekit-yaml` writes, to the last bit of their dtype.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tvb_mergekit.core.basis import check_output
from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.plugin.document import from_mapping, read_document
from tvb_mergekit.plugin.inputs import Options
from tvb_mergekit.plugin.planner import planned
from tvb_mergekit.plugin.run import merge
from tvb_mergekit.plugin.text import parse
from tvb_mergekit.tensors.merging import merge_items
from tvb_mergekit.tensors.output import FolderWriter, check_disk, into, plan_shards
from tvb_mergekit.tensors.stream import Item

LOG = logging.getLogger(__name__)
CHUNK = 2**22  # elements that are moved at a time
DISK = 5  # merged models of 16 bits: one, and start and direction in float32
BEGIN = 1.0  # the point that is merged first; not 0, through which every line leads
FILE = "model.safetensors"


@dataclass(frozen=True)
class TunedRecipe:
    """A recipe as plain objects, and its coefficient `key`: `lambda` or `alpha`."""

    document: dict[str, Any]
    method: str
    key: str
    options: Options

    def at(self, point: float) -> dict[str, Any]:
        """The recipe of one point."""
        parameters = self.document.get("parameters") or {}
        return self.document | {"parameters": parameters | {self.key: point}}

    def merge(self, point: float, out: Path) -> None:
        """Merge one point into a folder, as `mergekit-yaml` does."""
        options = self.options.model_copy(update={"out_shard_size": sys.maxsize, "quiet": True})
        merge(from_mapping(self.at(point)), os.fspath(out), options)

    def draw(self, work: Path) -> tuple[float, dict[str, Item]]:
        """Write `start` and `direction` of every tensor that moves, as two models in float32.

        Returns:
            The scale of the direction at coefficient 1, and the tensors by name.
        """
        with planned(from_mapping(self.at(BEGIN)), self.options) as plan:
            if plan.tensors.tunables.get(self.key, {BEGIN}) != {BEGIN}:  # of slices or modules
                raise UserError(f"`{self.key}` differs between tensors; tvb tune finds one number")
            check_disk(work, DISK * plan.output_bytes)
            basis = plan.build()
            moving, starts, directions = dict[str, Item](), list[Item](), list[Item]()
            for item in plan.tensors.items:
                if item.tunables is not None:
                    moving[item.name] = item
                    # Negation starts from theta_0 + lambda * the sum of the bases.
                    own = replace(item.tunables, alpha=0.0) if self.key == "alpha" else None
                    starts.append(replace(item, out=torch.float32, tunables=own))
                    directions.append(replace(item, out=torch.float32))
            for name, items in (("start", starts), ("direction", directions)):
                writer = FolderWriter(work / name, plan_shards(items, sys.maxsize), {})
                alone = items is directions
                merge_items(basis, items, into(writer), plan.engine, alone=alone)
            return (-1.0 if self.key == "alpha" else basis.scale), moving


def read_tuned(path: str, options: Options) -> TunedRecipe:
    method = read_document(path).recipe.settings.method
    document, key = parse(path).single(), "alpha" if method == "basis_negate" else "lambda"
    if isinstance(given := (document.get("parameters") or {}).get(key), list | dict):
        raise UserError(f"{path}: `{key}` is {given}: tvb tune finds one number, give one")
    return TunedRecipe(document, method, key, options)


class MovingModel:
    """An lm-eval model at any point.

    One point is merged to a folder and loaded from there, so that configuration, tokenizer and
    dtype are those of a merged model. Afterwards the weights move in place. The line must lead
    through the first point to the last bit. Otherwise every point is merged to a folder and loaded.

    Args:
        work: an empty folder, for the merged model and the line.
        load: loads the lm-eval model in a folder; its `model` is the module.
    """

    def __init__(self, recipe: TunedRecipe, work: Path, load: Callable[[Path], Any]) -> None:
        self.recipe, self.work, self.load = recipe, work, load
        self.unit, self.items = recipe.draw(work)
        # transformers stacks the experts of some models, and accelerate offloads what is on `meta`
        held = self._merged(BEGIN).model.state_dict().items()
        state = {name: t for name, t in held if t.is_contiguous() and not t.is_meta}
        fits = [n for n, item in self.items.items() if n in state and state[n].shape == item.shape]
        self.live = {name: state[name].view(-1) for name in fits}
        values = self._values(BEGIN)
        apart = {name for name, live, new in values if not torch.equal(new.to(live), live)}
        if lost := sorted(apart | (self.items.keys() - self.live.keys())):
            told = "%s cannot move in the loaded model: each point is merged to disk and loaded"
            LOG.warning(told, listed(lost))
            self.live = {}

    def at(self, point: float) -> Any:
        """The lm-eval model with the weights of a point."""
        if not self.live:
            return self._merged(point)
        for _, live, value in self._values(point):
            live.copy_(value)
        return self.lm

    def _merged(self, point: float) -> Any:
        self.lm = None  # before the next one is loaded
        shutil.rmtree(self.work / "model", ignore_errors=True)
        self.recipe.merge(point, self.work / "model")
        self.lm = self.load(self.work / "model")
        return self.lm

    def _values(self, point: float) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (name, chunk of the live tensor [n], its values at a point [n])."""
        files = [safe_open(self.work / part / FILE, "pt") for part in ("start", "direction")]
        for name, live in self.live.items():
            tensors = (live, *(file.get_tensor(name).view(-1) for file in files))
            chunks = (tensor.split(CHUNK) for tensor in tensors)
            for place, start, direction in zip(*chunks, strict=True):
                moved = direction.to(place.device) * (point * self.unit)
                value = moved.add_(start.to(moved)).to(self.items[name].out)
                check_output(name, value, value.dtype)
                yield name, place, value
