"""From bases back to models: theta_0 + B_m, theta_0 + tau_hat_j, or any other combination."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tvb_mergekit.core.merge import Linear
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.originals import restore
from tvb_mergekit.store.report import card_section
from tvb_mergekit.store.store import Bases
from tvb_mergekit.store.vectors import copy_config
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.output import (
    StagedFolder,
    check_disk,
    check_new_folder,
    check_output_folder,
)
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.source import Weights
from tvb_mergekit.tensors.stream import Item, Part, Sink
from tvb_mergekit.tensors.writing import FoldersSink, FolderWriter, MemorySink, plan_shards


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
        out = dtype if dtype is not None and info.dtype.is_floating_point else info.dtype
        held = None if exclude(name) else bases.stored_name(name)
        inputs = () if held is None else tuple(Part.of(each, held, "delta") for each in sources)
        items.append(Item(name, info.shape, Part.of(base, name), inputs, out))
    return items


def state_dict_of(
    bases: Bases, base: Weights, column: Tensor, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """theta_0 + sources @ column [len(bases.sources)], as a state dict on the CPU."""
    sink = MemorySink(1)
    combine(items_of(bases, base, dtype, bases.sources), column[:, None], sink)
    return sink.states[0]


def export(
    bases: Bases,
    base: Weights,
    base_folder: Path | None,
    matrix: Tensor,
    folders: Sequence[str],
    out: str | os.PathLike[str],
    engine: Engine = Engine(),
    *,
    what: Sequence[str],
    dtype: torch.dtype | None = None,
) -> None:
    """Write theta_0 + sources @ matrix[:, k] as the model `out`/folders[k] for every k.

    The base and the bases are read once for all outputs.

    Args:
        base_folder: whose config.json and tokenizer the models get; None for a bare state dict.
        matrix: [len(bases.sources), number of outputs].
        folders: below `out`; "" is `out` itself.
        what: one line about each output, for its model card.
        dtype: of the models; None keeps the base's.

    Raises:
        UserError: another base, `out` holds something, no room, a value overflows.
    """
    if any(folders):
        check_new_folder(out)  # it could have folders of these names
    check_output_folder(out, [str(path) for path in (bases.path, base_folder) if path is not None])
    items = items_of(bases, base, dtype, bases.sources)
    size = sum(item.numel * item.out.itemsize for item in items)
    check_disk(os.fspath(out), size * len(folders))
    stage = StagedFolder(out)
    try:
        shards = plan_shards(items)
        places = [stage.path / name for name in folders]
        models = [_whole(bases.sources, column) for column in matrix.T]
        if None in models:
            writers = [FolderWriter(place, shards, {"format": "pt"}) for place in places]
            combine(items, matrix, FoldersSink(writers), engine)
            for writer in writers:
                writer.finish()
                copy_config(base_folder, writer.folder, dtype=dtype)
        for place, model in zip(places, models, strict=True):
            if model is not None:
                restore(bases, model, base, base_folder, place, engine, dtype)
        for place, line in zip(places, what, strict=True):
            _write_card(place, bases, line)
        stage.publish()
    finally:
        stage.discard()


def task_column(bases: Bases, task: str) -> Tensor:
    """The combination that is tau_hat of a task, without its weight, [len(bases.sources), 1]."""
    scales = bases.scales[:, None] / bases.weights[bases.index(task)]
    return bases.reconstruction([task]) * scales


def basis_columns(bases: Bases, indices: Sequence[int]) -> Tensor:
    """The combinations that are single bases, [len(bases.sources), len(indices)]."""
    for index in indices:
        if not 0 <= index < bases.num_bases:
            raise UserError(
                f"basis {index}: {bases.place} has the bases 0 to {bases.num_bases - 1}"
            )
    return torch.diag(bases.scales)[:, list(indices)]


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
    combine_pass(
        items,
        dict.fromkeys((i.name for i in items if i.inputs), Linear.of(matrix[used], add_base=True)),
        sink,
        engine,
        title="Models",
    )


def _whole(sources: Sequence[Weights], column: Tensor) -> int | None:
    """The index of the lossless model that a combination is; None if it is another."""
    used = column.nonzero()[:, 0].tolist()
    one = len(used) == 1 and float(column[used[0]]) == 1.0
    return used[0] if one and sources[used[0]].holds == "weight" else None


def _write_card(folder: Path, bases: Bases, what: str) -> None:
    head = (
        f"---\nbase_model: {json.dumps(bases.facts.base_model)}\ntags: [merge, tvb-mergekit]\n---\n"
    )
    section = card_section(bases.facts, bases.tensors)
    (folder / "README.md").write_text(f"{head}# {what}\n\n{section}", encoding="utf-8")
