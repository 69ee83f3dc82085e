"""Decisions of an addition, which bases and task vectors as codes share: does the model belong?"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tvb_mergekit.core.basis import UNRELATED_RATIO, unlike
from tvb_mergekit.core.gram import GramSums
from tvb_mergekit.core.quantize import BITS
from tvb_mergekit.errors import UserError
from tvb_mergekit.settings import check_tasks
from tvb_mergekit.store.forms import Quantize
from tvb_mergekit.store.store import Bases
from tvb_mergekit.store.vectors import local_path
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.passes import gram_pass
from tvb_mergekit.tensors.source import Weights
from tvb_mergekit.tensors.stream import Item, Part
from tvb_mergekit.tensors.taskset import TaskSet

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Growth:
    """Choices of an addition; None: the store's own.

    Attributes:
        budget: the most bases that the store may hold; a store of all tasks then becomes bases.
        compress: `ae` or `balanced`.
        dtype: of a new store.
        bits: of the new task in a store of all tasks.
        doubt: called with each doubt, such as a model unlike the base; may raise to refuse.
        tell: called with the effect on the tasks that are there, before anything is written.

    Raises:
        UserError: bits together with a budget or a compression.
    """

    budget: int | None = None
    compress: str | None = None
    dtype: torch.dtype = torch.float32
    bits: Quantize | None = None
    doubt: Callable[[str], object] = LOG.warning
    tell: Callable[[str], object] = LOG.info

    def __post_init__(self) -> None:
        if self.bits and (self.budget or self.compress):
            raise UserError("--bits goes with none of --budget, --compress, --dtype")

    def keeps_all(self, bases: Bases) -> bool:
        """Whether the new task joins the task vectors of a store. It refuses bad choices."""
        if bases.keeps_tasks and self.budget is None:
            if self.compress:
                raise UserError(
                    f"--compress: {bases.place} keeps all tasks; --budget M turns them into bases"
                )
            if self.bits and bases.facts.store.codec != "codes":
                raise UserError(
                    f"--bits: {bases.place} is {bases.facts.store.codec}, and keeps the new task "
                    "as the others; leave --bits out"
                )
            if self.bits and self.bits.bits not in BITS:
                raise UserError(
                    f"--bits {self.bits.bits:g}: a sample does not join the codes of "
                    f"{bases.place}; give {', '.join(map(str, BITS))}"
                )
            return True
        if self.bits:
            raise UserError(
                f"{bases.place}: --bits is for stores of all tasks (`tvb build --bits`), not "
                "of bases"
            )
        return False


def check_new(bases: Bases, inputs: TaskSet) -> None:
    """Raise UserError unless the one model of `inputs` is a new task for the base of `bases`."""
    (task,) = inputs.tasks
    if task in bases.tasks:
        raise UserError(
            f"the task {task!r} is in {bases.place} already: give another name with --task"
        )
    check_tasks([*bases.tasks, task], [*bases.facts.models, task])
    bases.check_base(inputs.base, inputs.base_model)


def given_items(bases: Bases, inputs: TaskSet) -> list[Item]:
    """The store's tensors, with the new model as input. Raise UserError for other tensors."""
    given, left_out = {item.name: item for item in inputs.items}, bases.facts.left_out
    where, (model,) = bases.place, inputs.models
    for name in given:
        if name not in bases.names and not left_out.get(name, "").startswith("excluded"):
            raise UserError(
                f"tensor `{name}` of model {model} takes no part in {where} "
                f"({left_out.get(name, 'not in the store')}), so that what was trained there "
                "would be lost: build a store with it"
            )
    for name in bases.names:
        if name not in given:
            reason = inputs.left_out.get(name, "not in it")
            raise UserError(
                f"tensor `{name}` is in {where}, and model {model} does not give it ({reason}): a "
                "store holds one set of tensors"
            )
    return [given[name] for name in bases.names]


def with_vectors(vectors: Sequence[Weights], items: Sequence[Item]) -> list[Item]:
    """The items with the vectors of a store as inputs before their own."""
    made = []
    for item in items:
        parts = (Part.of(vector, item.name, "delta") for vector in vectors)
        made.append(replace(item, inputs=(*parts, *item.inputs)))
    return made


def new_sums(
    bases: Bases,
    inputs: TaskSet,
    items: Sequence[Item],
    doubt: Callable[[str], object],
    engine: Engine,
) -> GramSums:
    """The Gram matrix of the items' vectors, the new one weighted and last; it must not be 0."""
    (task,), (model,), (weight,) = inputs.tasks, inputs.models, inputs.weights
    others = len(items[0].inputs) - 1
    sums = None if others else inputs.sums
    if sums is None:
        names = [*bases.facts.store.folders[:others], task]
        sums = gram_pass(items, names, engine)
    if float(sums.gram[-1, -1]) == 0.0:
        raise UserError(
            f"task `{task}`: its task vector is zero: the model is identical to the base"
        )
    base, *sizes = sums.sizes
    known = bases.tensors["matrix_norms"] / bases.weights.abs()
    if reason := unlike(sizes[-1], base, known.tolist(), UNRELATED_RATIO):
        later = "" if bases.keeps_tasks else " A task cannot be taken out of the bases later"
        doubt(f"model {model}: {reason}: is it fine-tuned from this base?{later}")
    return sums.scaled([*bases.scales.tolist()[:others], weight])


def config_of(bases: Bases) -> Path | None:
    """The folder of a store with the configuration of its vectors."""
    assert bases.path is not None
    folder = bases.path / bases.facts.store.folders[0]
    return folder if (folder / "config.json").is_file() else None


def grown_history(bases: Bases, inputs: TaskSet, sums: GramSums, started: float) -> dict[str, Any]:
    """The keys of basis.json after an addition that do not follow from the vectors.

    `started` is the time by `time.perf_counter`.
    """
    facts, (task,), (weight,) = bases.facts, inputs.tasks, inputs.weights
    norm, base_norm = float(sums.gram[-1, -1]) ** 0.5, sums.base_norm_squared**0.5
    base_size, *sizes = sums.sizes
    weights = {**facts.parameters["weights"], task: weight}
    return {
        **facts,
        "parameters": {**facts.parameters, "weights": weights},
        "tasks": [*facts.tasks, task],
        "models": [*facts.models, *inputs.models],
        "norms": {"base": base_norm, **facts.norms, task: norm},
        "matrix_norms": {"base": base_size, **facts.matrix_norms, task: sizes[-1]},
        "fingerprints": {**facts.fingerprints, **inputs.fingerprints},
        "gram_cached": False,
        "seconds": {"add": round(time.perf_counter() - started, 3)},
        "store": {
            **facts.store,
            "base_path": local_path(inputs.base_model) or facts.store.base_path,
            "model_bytes": facts.store.model_bytes + inputs.model_bytes,
            "added": facts.store.added + 1,
        },
    }
