"""The merges of a recipe along its coefficient, and a loaded model that moves along them.

Our methods are linear in lambda, or in alpha of `basis_negate`: a merged tensor is
start + fl(coefficient * scale * direction). The model in memory moves by the same two roundings and
the same cast, from `start` each time. So no error accumulates, and its weights are those that
`mergekit-yaml` writes, to the last bit of their dtype.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tvb_mergekit.core.basis import check_output
from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.plugin import parse, single
from tvb_mergekit.plugin.document import from_mapping, read_document
from tvb_mergekit.plugin.inputs import Options
from tvb_mergekit.plugin.planner import planned
from tvb_mergekit.plugin.run import merge
from tvb_mergekit.tensors.merging import merge_items
from tvb_mergekit.tensors.output import check_disk, plan_shards, to_files
from tvb_mergekit.tensors.stream import Item
from tvb_mergekit.tune.search import Estimate, mean
from tvb_mergekit.tune.tasks import EvalTask

LOG = logging.getLogger(__name__)
CHUNK = 2**22  # elements that are moved at a time
DISK = 5  # merged models of 16 bits: one, and start and direction in float32
BEGIN = 1.0  # the point that is merged first; not 0, through which every line leads


@dataclass
class Tuning:
    """A recipe as plain objects, its coefficient `key`, and the scores of its points by task."""

    document: dict[str, Any]
    key: str  # `lambda` or `alpha`
    options: Options
    tasks: Sequence[EvalTask] = ()
    points: dict[float, dict[str, Estimate]] = field(default_factory=dict)
    best: float = math.nan

    def at(self, point: float) -> dict[str, Any]:
        """The recipe of one point."""
        parameters = self.document.get("parameters") or {}
        return self.document | {"parameters": parameters | {self.key: point}}

    def mean(self, point: float, control: bool = False) -> Estimate:
        scores = self.points[point]
        return mean(scores[task.name] for task in self.tasks if task.control == control)


def read_tuning(path: str, options: Options) -> Tuning:
    method = read_document(path).recipe.settings.method
    document, key = single(path, parse(path)[1]), "alpha" if method == "basis_negate" else "lambda"
    if isinstance(given := (document.get("parameters") or {}).get(key), list | dict):
        raise UserError(f"{path}: `{key}` is {given}: tvb tune finds one number, give one")
    return Tuning(document, key, options)


def draw(tuning: Tuning, work: Path) -> tuple[float, dict[str, Item]]:
    """Write `start` and `direction` of every tensor that moves, as two models in float32.

    Returns:
        The scale of the direction at coefficient 1, and the tensors by name.
    """
    with planned(from_mapping(tuning.at(BEGIN)), tuning.options) as plan:
        if plan.tensors.tunables.get(tuning.key, {BEGIN}) != {BEGIN}:  # of slices or modules
            raise UserError(f"`{tuning.key}` differs between tensors; tvb tune finds one number")
        check_disk(work, DISK * plan.output_bytes)
        basis, negation = plan.build(), tuning.key == "alpha"
        moving = {item.name: item for item in plan.tensors.items if item.tunables is not None}
        directions = [replace(item, out=torch.float32) for item in moving.values()]
        # Negation starts from theta_0 + lambda * the sum of the bases.
        starts = [
            replace(i, tunables=replace(i.tunables, alpha=0.0) if i.tunables and negation else None)
            for i in directions
        ]
        for name, items in (("start", starts), ("direction", directions)):
            sink = to_files(work / name, plan_shards(items, sys.maxsize), {})
            merge_items(basis, items, sink, plan.engine, alone=name == "direction")
        return (-1.0 if negation else basis.scale), moving


def moving_model(tuning: Tuning, work: Path, load: Callable[[Path], Any]) -> Callable[[float], Any]:
    """A function from a point to one lm-eval model, whose weights it moves there.

    One point is merged to a folder and loaded from there, so that configuration, tokenizer and
    dtype are those of a merged model. Afterwards the weights move in place. The line must lead
    through the first point to the last bit. Otherwise every point is merged to a folder and loaded.

    Args:
        work: an empty folder, for the merged model and the line.
        load: loads the lm-eval model in a folder; its `model` is the module.
    """
    unit, items = draw(tuning, work)
    lines = [safe_open(work / part / "model.safetensors", "pt") for part in ("start", "direction")]

    def merged(point: float) -> Any:
        shutil.rmtree(work / "model", ignore_errors=True)
        options = tuning.options.model_copy(update={"out_shard_size": sys.maxsize, "quiet": True})
        merge(from_mapping(tuning.at(point)), os.fspath(work / "model"), options)
        return load(work / "model")

    def values(point: float) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (name, chunk of the live tensor [n], its values at a point [n])."""
        for name, tensor in live.items():
            chunks = [each.get_tensor(name).view(-1).split(CHUNK) for each in lines]
            for place, start, direction in zip(tensor.split(CHUNK), *chunks, strict=True):
                moved = direction.to(place.device) * (point * unit)
                value = moved.add_(start.to(moved)).to(items[name].out)
                check_output(name, value, value.dtype)
                yield name, place, value

    lm, loaded = merged(BEGIN), BEGIN
    # transformers stacks the experts of some models, and accelerate offloads what is on `meta`
    state = {n: t for n, t in lm.model.state_dict().items() if t.is_contiguous() and not t.is_meta}
    fits = [n for n, item in items.items() if n in state and state[n].shape == item.shape]
    live = {name: state[name].view(-1) for name in fits}
    apart = {name for name, place, new in values(BEGIN) if not torch.equal(new.to(place), place)}
    if lost := sorted(apart | (items.keys() - live.keys())):
        told = "%s cannot move in the loaded model: each point is merged to disk and loaded"
        LOG.warning(told, listed(lost))
        live = {}

    def at(point: float) -> Any:
        nonlocal lm, loaded
        if not live and point != loaded:
            lm = None  # before the next one is loaded
            lm, loaded = merged(point), point
        for _, place, value in values(point):
            place.copy_(value)
        return lm

    return at
