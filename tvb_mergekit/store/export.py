"""From vectors back to models: theta_0 + tau_hat_j, or any other combination.

A lossless store gives each model as it was. `files/NAME/` holds the other tensors of a model in
`rest.safetensors`, and its configuration, tokenizer and code.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit import hub
from tvb_mergekit.core.basis import Step
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.change import slugs
from tvb_mergekit.store.facts import StoredFile, check_files, record_of
from tvb_mergekit.store.report import OURS, section, vectors
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors import output
from tvb_mergekit.tensors.checkpoint import TOKENIZER_FILES, say_untied
from tvb_mergekit.tensors.coding import Coded, keep
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.stream import Engine, Item, Part, Sink, Weights
from tvb_mergekit.tensors.taskset import TaskSet

LOSSY = 0.3  # relative error of a reconstructed task beyond which an export warns
REST = "rest.safetensors"
# Files of a model beside its weights: the last are modules of sentence-transformers
COMPANION = re.compile(
    r"(?!.*\.index\.json)[^/\\]+\.(json|jinja|txt|model|tiktoken|spm|codes|py)"
    r"|(\d_[A-Z]\w*|additional_chat_templates)/\w[\w.-]*"
)


def items_of(
    bases: Bases, base: Weights, sources: Sequence[Weights], dtype: torch.dtype | None = None
) -> list[Item]:
    """Every tensor of the base, with those of `sources` where the bases hold it.

    `dtype` is that of the floating-point tensors of the output; None keeps the base's own.
    """
    items = []
    for name in base.tensors:
        held, own = bases.stored_name(name), copied(base, name)
        inputs = () if held is None else tuple(Part.of(each, held) for each in sources)
        out = dtype if dtype and own.out.is_floating_point else own.out
        items.append(replace(own, inputs=inputs, out=out, counted_as=held))
    return items


def copied(weights: Weights, name: str) -> Item:
    """A tensor as it is."""
    info = weights.tensors[name]
    return Item(name, info.shape, Part.of(weights, name), (), info.dtype)


def task_column(bases: Bases, task: str) -> Tensor:
    """The combination that is tau_hat of a task, without its weight, [len(bases.sources), 1]."""
    scales = bases.scales[:, None] / bases.weights[bases.index(task)]
    return bases.reconstruction([task]) * scales


def combine(items: Sequence[Item], column: Tensor, sink: Sink, engine: Engine = Engine()) -> None:
    """Give `sink` theta_0 + sources @ column [N, 1] of each item of `items_of`.

    If that is theta_0 or one lossless model, this is a copy to the bit.
    """
    # An input with no part in the output is not read.
    used, made = [k for k, scale in enumerate(column.tolist()) if any(scale)], list[Item]()
    for item in items:
        parts, base = [item.inputs[k] for k in used if item.inputs], item.base
        if column[used].tolist() == [[1.0]] and parts and parts[0].holds == "weight":
            base = parts.pop()
        made.append(replace(item, inputs=tuple(parts), base=base))
    steps = dict.fromkeys((i.name for i in made if i.inputs), Step.of(column[used], add_base=True))
    combine_pass(made, steps, sink, engine, title="Models")


def export(
    bases: Bases, base: Weights, tasks: Sequence[str], out: str, every: bool, engine: Engine
) -> None:
    """Write the model of a task, theta_0 + tau_hat without its weight, as a Hugging Face model.

    If `every`, write several, each into a folder of its own below `out`. Models of a lossless store
    are written as they were, others with the base's configuration and tokenizer. Warn of each task
    whose reconstruction is far from it.
    """
    columns = [task_column(bases, task) for task in tasks]
    output.check_output_folder(out)
    output.check_disk(out, len(tasks) * sum(info.nbytes for info in base.tensors.values()))
    for line in filter(None, (lost_of(bases, task) for task in tasks)):
        logging.warning("%s", line)
    with output.staged(out) as folder:
        for task, column, slug in zip(tasks, columns, slugs(tasks), strict=True):
            place, exact = folder / slug if every else folder, original(bases, task, base)
            items, files = exact or (items_of(bases, base, bases.sources), companions(base.folder))
            if not files and companions(base.folder):  # a state dict, or an older store
                logging.warning("%s: the store lacks its config.json and tokenizer; add them", task)
            sink = output.to_files(place, output.plan_shards(items), {"format": "pt"})
            combine(items, column, sink, engine)
            for name, file in files.items():
                (place / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, place / name)
            if not exact:
                say_untied(place)
            (place / "README.md").write_text(_card(bases, task), encoding="utf-8")


def _card(bases: Bases, task: str) -> str:
    """A model card. Its metadata name the base, which the Hub must know."""
    head, base = "tags: [merge, tvb-mergekit]\n", bases.facts.base_model.partition("@")[0]
    if "/" in base and hub.may_be_on_the_hub(base) and not bases.facts.base_path:
        head = f"base_model: {json.dumps(base)}\n{head}"
    lost = f"{said}.\n\n" if (said := lost_of(bases, task)) else ""
    title = task if bases.facts.errors[task] == 0 else f"{task}, reconstructed"
    said = f"{OURS} wrote this model from a store of {vectors(bases.facts)}."
    return f"---\n{head}---\n# {title}\n\n{lost}{section(said, bases.facts)}"


def lost_of(bases: Bases, task: str) -> str:
    """The loss of a reconstructed task, if it is large or not known, and the remedy."""
    error = bases.facts.errors[task]
    if error is not None and error <= LOSSY:
        return ""
    size = "an unknown relative error" if error is None else f"a relative error of {error:.2f}"
    remedy = "without --keep" if bases.facts.whole else "without `basis`, `num_bases` and --budget"
    return (
        f"{task}: its reconstruction has {size}, so this model is not the one that was fine-tuned; "
        f"to get tasks back, build the store {remedy}"
    )


def companions(folder: Path | None) -> dict[str, Path]:
    """The configuration, tokenizer, own code and modules in the folder of a model, by their names,
    with "/" for a folder in between. None without config.json: other files may lie there."""
    if folder is None or not (folder / "config.json").is_file():
        return {}
    every = (file for file in sorted([*folder.glob("*"), *folder.glob("*/*")]) if file.is_file())
    named = {file.relative_to(str(folder)).as_posix(): file for file in every}
    return {name: file for name, file in named.items() if COMPANION.fullmatch(name)}


def write_original(
    store: Path, place: str, inputs: TaskSet, number: int, held: list[StoredFile], engine: Engine
) -> dict[str, Any]:
    """Write what the vector of a model lacks into the folder `place`; returns keys of `Vector`.

    A file that other models of the store have alike, among `held`, is stored once.
    """
    source, base, folder = inputs.sources[number], inputs.base, store / place
    folder.mkdir(parents=True)
    # Not of the model, or made of others, such as rows that a tokenizer put in another order
    foreign = [i.name for i in inputs.items if i.load or i.inputs[number].name != i.name]
    counted = {*inputs.names} - {*foreign}
    others = [copied(source, name) for name in source.in_file if name not in counted]
    near = {(name, base.tensors[name].shape): Part.of(base, name) for name in base.in_file}
    rest = [replace(i, base=near.get((i.name, i.shape)), inputs=i.parts) for i in others]
    if rest:
        keep({folder / REST: REST}, rest, engine=engine, title="Rest")
    files = companions(source.folder)
    if files.keys().isdisjoint(TOKENIZER_FILES):
        files = companions(base.folder) | files
    for name, file in files.items():
        shutil.copyfile(file, folder / name.replace("/", "%2F"))
    kept = list[StoredFile]()
    for file in sorted(folder.iterdir()):
        own = record_of(store, f"{place}/{file.name}")
        twins = (f for f in held if (Path(f.file).name, f.xxh3_128) == (file.name, own.xxh3_128))
        kept.append(next((f for f in twins if record_of(store, f.file) == f), own))  # if sound
        if kept[-1] is not own:
            file.unlink()
    with suppress(OSError):
        folder.rmdir()
    return {"files": kept, "foreign": foreign}


def original(bases: Bases, task: str, base: Weights) -> tuple[list[Item], dict[str, Path]] | None:
    """The tensors and other files, by their names, of a model of a lossless store, as they were.

    None for another vector. Raise UserError if a file of the model is not what it was.
    """
    number = bases.index(task)
    if not bases.facts.whole or (vector := bases.facts.vectors[number]).codec != "lossless":
        return None
    check_files(bases.path, vector.files, checksums=True)
    files = {Path(f.file).name.replace("%2F", "/"): bases.path / f.file for f in vector.files}
    source = bases.sources[number]
    every = {name: source for name in source.in_file if name not in vector.foreign}
    if rest := files.pop(REST, None):
        every |= dict.fromkeys((other := Coded(rest, base)).in_file, other)
    if wrong := [name for name in files if not COMPANION.fullmatch(name)]:
        # A store of somebody else must not write outside the output
        raise UserError(f"{bases.path}: {wrong[0]!r} is not the name of a model's file")
    return [copied(each, name) for name, each in every.items()], files
