"""From vectors back to models: theta_0 + tau_hat_j, or any other combination."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tvb_mergekit import hub
from tvb_mergekit.core.basis import Step
from tvb_mergekit.store.change import slugs
from tvb_mergekit.store.originals import copy_config, restore
from tvb_mergekit.store.report import card_section
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.output import (
    FolderWriter,
    StagedFolder,
    check_disk,
    check_new_folder,
    check_output_folder,
    into,
    plan_shards,
)
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.stream import Engine, Item, Part, Sink, Weights
from tvb_mergekit.tensors.ties import say_untied

LOSSY = 0.3  # relative error of a reconstructed task beyond which an export warns


def items_of(
    bases: Bases,
    base: Weights,
    dtype: torch.dtype | None,
    sources: Sequence[Weights],
    exclude: Callable[[str], bool] = lambda name: False,
) -> list[Item]:
    """Every tensor of the base, with those of `sources` where the bases hold it.

    Args:
        dtype: of the floating-point tensors of the output; None keeps the base's own.
        exclude: the names that stay the base's.
    """
    items = []
    for name, info in base.tensors.items():
        out = dtype if dtype and info.dtype.is_floating_point else info.dtype
        held = None if exclude(name) else bases.stored_name(name)
        inputs = () if held is None else tuple(Part.of(each, held, "delta") for each in sources)
        items.append(Item(name, info.shape, Part.of(base, name), inputs, out))
    return items


def task_column(bases: Bases, task: str) -> Tensor:
    """The combination that is tau_hat of a task, without its weight, [len(bases.sources), 1]."""
    scales = bases.scales[:, None] / bases.weights[bases.index(task)]
    return bases.reconstruction([task]) * scales


def combine(items: Sequence[Item], matrix: Tensor, sink: Sink, engine: Engine = Engine()) -> None:
    """Give `sink` theta_0 + sources @ matrix[:, k] as output k of each item.

    If there is one column, and it is zero or one lossless model, this is a copy to the bit.

    Args:
        items: of `items_of`, for the sources that `matrix` [len(sources), K] is over.

    Raises:
        UserError: an output overflows its dtype.
    """
    # An input with no part in any output is not read.
    used = [k for k, row in enumerate(matrix.tolist()) if any(row)]
    items = [replace(i, inputs=tuple(i.inputs[k] for k in used) if i.inputs else ()) for i in items]
    if matrix[used].tolist() == [[1.0]]:
        items = [
            replace(item, base=part, inputs=())
            if (part := next(iter(item.inputs), None)) and part.holds == "weight"
            else item
            for item in items
        ]
    step = Step.of(matrix[used], add_base=True)
    steps = dict.fromkeys((item.name for item in items if item.inputs), step)
    combine_pass(items, steps, sink, engine, title="Models")


def export(
    bases: Bases,
    base: Weights,
    base_folder: Path | None,
    tasks: Sequence[str],
    out: str | os.PathLike[str],
    engine: Engine = Engine(),
    *,
    every: bool = False,
    dtype: torch.dtype | None = None,
    warn: Callable[[str], object] = lambda line: None,
) -> None:
    """Write the model of a task, theta_0 + tau_hat without its weight, as a Hugging Face model.

    The base and the vectors are read once for all outputs. Models of a lossless store are written
    as they were.

    Args:
        base_folder: whose config.json and tokenizer the models get; None for a bare state dict.
        every: write several, each into a folder of its own below `out`.
        dtype: of the models; None keeps the base's.
        warn: called with a line about each task whose reconstruction is far from it.

    Raises:
        UserError: another base, `out` holds something, no room, a value overflows.
    """
    columns = torch.cat([task_column(bases, task) for task in tasks], 1)
    if every:
        check_new_folder(out)  # it could have folders of these names
    check_output_folder(out, [str(path) for path in (bases.path, base_folder) if path is not None])
    items = items_of(bases, base, dtype, bases.sources)
    check_disk(os.fspath(out), len(tasks) * sum(item.written for item in items))
    for line in filter(None, (lost_of(bases, task) for task in tasks)):
        warn(line)
    exact = {vector.name: vector for vector in bases.facts.vectors if vector.codec == "lossless"}
    stage = StagedFolder(out)
    try:
        places = [stage.path / slug for slug in slugs(tasks)] if every else [stage.path]
        lossy = [k for k, task in enumerate(tasks) if task not in exact]
        if lossy:
            shards = plan_shards(items)
            writers = [FolderWriter(places[k], shards, {"format": "pt"}) for k in lossy]
            combine(items, columns[:, lossy], into(*writers), engine)
            for writer in writers:
                writer.finish()
                copy_config(base_folder, writer.folder, dtype)
                say_untied(writer.folder)
        for task, place in zip(tasks, places, strict=True):
            if task in exact and bases.path:
                folder = (bases.path / exact[task].files[0].file).parent
                vector = bases.sources[bases.index(task)]
                restore(folder, vector, base, base_folder, place, dtype, engine)
            (place / "README.md").write_text(_card(bases, task), encoding="utf-8")
        stage.publish()
    finally:
        stage.discard()


def _card(bases: Bases, task: str) -> str:
    """A model card. Its metadata name the base, which the Hub must know."""
    head, base = "tags: [merge, tvb-mergekit]\n", bases.facts.base_model.partition("@")[0]
    if "/" in base and hub.may_be_on_the_hub(base) and not bases.facts.base_path:
        head = f"base_model: {json.dumps(base)}\n{head}"
    weight = float(bases.weights[bases.index(task)])
    lost = f"{said}.\n\n" if (said := lost_of(bases, task)) else ""
    title = f"{task}, reconstructed" + (f" (without its weight of {weight:g})" * (weight != 1))
    section = card_section(bases.facts, bases.tensors)
    return f"---\n{head}---\n# {title}\n\n{lost}{section}"


def lost_of(bases: Bases, task: str) -> str:
    """What a reconstructed task has lost, if that is much or not known, and the remedy."""
    error = bases.facts.errors[task]
    if error is not None and error <= LOSSY:
        return ""
    size = "an unknown relative error" if error is None else f"a relative error of {error:.2f}"
    remedy = "without --keep" if bases.whole else "without `basis`, `num_bases` and --budget"
    return (
        f"{task}: its reconstruction has {size}, so this model is not the one that was fine-tuned; "
        f"to get tasks back, build the store {remedy}"
    )
