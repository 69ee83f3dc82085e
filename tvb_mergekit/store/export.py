"""From vectors back to models: theta_0 + tau_hat_j, or any other combination.

A lossless store gives each model as it was. `files/NAME/` holds the other tensors of a model in
`rest.safetensors`, and the files that the base's folder does not have alike, such as configuration
and tokenizer.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tvb_mergekit import hub
from tvb_mergekit.core.basis import Step
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.change import slugs
from tvb_mergekit.store.facts import check_files, record_of
from tvb_mergekit.store.report import OURS, section, vectors
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.checkpoint import TOKENIZER_FILES, Checkpoint, say_untied
from tvb_mergekit.tensors.coding import Coded, keep
from tvb_mergekit.tensors.output import (
    FolderWriter,
    check_disk,
    check_output_folder,
    checksum_of,
    into,
    plan_shards,
    staged,
)
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.stream import Engine, Item, Part, Sink, Weights
from tvb_mergekit.tensors.taskset import TaskSet

LOSSY = 0.3  # relative error of a reconstructed task beyond which an export warns
REST = "rest.safetensors"
ENDINGS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".spm", ".codes", ".py")
# Files of folders: the modules of sentence-transformers
INNER = re.compile(r"(\d_[A-Z]\w*|additional_chat_templates)/\w[\w.-]*")


def items_of(
    bases: Bases,
    base: Weights,
    dtype: torch.dtype | None,
    sources: Sequence[Weights],
) -> list[Item]:
    """Every tensor of the base, with those of `sources` where the bases hold it.

    `dtype` is that of the floating-point tensors of the output; None keeps the base's own.
    """
    items = []
    for name, info in base.tensors.items():
        out = dtype if dtype and info.dtype.is_floating_point else info.dtype
        held = bases.stored_name(name)
        inputs = () if held is None else tuple(Part.of(each, held) for each in sources)
        items.append(Item(name, info.shape, Part.of(base, name), inputs, out))
    return items


def task_column(bases: Bases, task: str) -> Tensor:
    """The combination that is tau_hat of a task, without its weight, [len(bases.sources), 1]."""
    scales = bases.scales[:, None] / bases.weights[bases.index(task)]
    return bases.reconstruction([task]) * scales


def combine(items: Sequence[Item], matrix: Tensor, sink: Sink, engine: Engine = Engine()) -> None:
    """Give `sink` theta_0 + sources @ matrix[:, k] as output k of each item of `items_of`.

    If there is one column, and it is zero or one lossless model, this is a copy to the bit.
    """
    # An input with no part in any output is not read.
    used, made = [k for k, row in enumerate(matrix.tolist()) if any(row)], list[Item]()
    for item in items:
        parts, base = [item.inputs[k] for k in used if item.inputs], item.base
        if matrix[used].tolist() == [[1.0]] and parts and parts[0].holds == "weight":
            base = parts.pop()
        made.append(replace(item, inputs=tuple(parts), base=base))
    step = Step.of(matrix[used], add_base=True)
    steps = dict.fromkeys((item.name for item in made if item.inputs), step)
    combine_pass(made, steps, sink, engine, title="Models")


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
        dtype: of the floating-point tensors; None: their own.
        warn: called with a line about each task whose reconstruction is far from it.
    """
    columns = torch.cat([task_column(bases, task) for task in tasks], 1)
    check_output_folder(out)
    items = items_of(bases, base, dtype, bases.sources)
    check_disk(out, len(tasks) * sum(item.written for item in items))
    for line in filter(None, (lost_of(bases, task) for task in tasks)):
        warn(line)
    exact = {v.name: k for k, v in enumerate(bases.facts.vectors) if v.codec == "lossless"}
    lossy = [k for k, task in enumerate(tasks) if task not in exact]
    with staged(out) as folder:
        places = [folder / slug for slug in slugs(tasks)] if every else [folder]
        if lossy:
            writers = [FolderWriter(places[k], plan_shards(items), {"format": "pt"}) for k in lossy]
            combine(items, columns[:, lossy], into(*writers), engine)
        for task, place in zip(tasks, places, strict=True):
            files = companions(base_folder)
            if task in exact:
                own, files = original(bases, exact[task], base, base_folder, dtype)
                writer = FolderWriter(place, plan_shards(own), {"format": "pt"})
                combine_pass(own, {}, into(writer), engine, title="Models")
            for name, file in files.items():
                (place / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, place / name)
            if task not in exact:
                say_untied(place)
            if dtype is not None and (config := place / "config.json").is_file():
                said = json.loads(config.read_text(encoding="utf-8"))
                named = str(dtype).removeprefix("torch.")
                said |= {key: named for key in ("dtype", "torch_dtype") if key in said}
                config.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
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
    remedy = "without --keep" if bases.whole else "without `basis`, `num_bases` and --budget"
    return (
        f"{task}: its reconstruction has {size}, so this model is not the one that was fine-tuned; "
        f"to get tasks back, build the store {remedy}"
    )


def companions(folder: Path | None) -> dict[str, Path]:
    """The configuration, tokenizer, own code and modules in the folder of a model, by their names,
    with "/" for a folder in between."""
    every = sorted([*folder.glob("*"), *folder.glob("*/*")]) if folder else []
    named = {file.relative_to(str(folder)).as_posix(): file for file in every if file.is_file()}
    return {name: file for name, file in named.items() if is_companion(name)}


def is_companion(name: str) -> bool:
    plain = "\\" not in name and Path(name).name == name and name.endswith(ENDINGS)
    return bool((plain and not name.endswith(".index.json")) or INNER.fullmatch(name))


def write_original(
    store: Path, place: str, inputs: TaskSet, number: int, engine: Engine
) -> dict[str, Any]:
    """Write what the vector of a model lacks into the folder `place`; returns keys of `Vector`."""
    source, base, folder = inputs.sources[number], inputs.base, store / place
    folder.mkdir(parents=True)
    # Not of the model, or made of others, such as rows that a tokenizer put in another order
    foreign = [i.name for i in inputs.items if i.load or i.inputs[number].name != i.name]
    rest, shared, held = [], {}, {*inputs.names} - {*foreign}
    for name in source.in_file:
        info = source.tensors[name]
        if name not in held:
            fits = name in base.in_file and base.tensors[name].shape == info.shape
            near = Part.of(base, name) if fits else None
            rest.append(Item(name, info.shape, near, (Part.of(source, name),)))
    if rest:
        keep({folder / REST: REST}, rest, engine=engine, title="Rest")
    of_folder = isinstance(source, Checkpoint) and not os.path.isfile(inputs.models[number])
    files = companions(source.folder if of_folder else None)
    if files.keys().isdisjoint(TOKENIZER_FILES):
        files = companions(inputs.folder) | files
    for name, file in files.items():
        twin = inputs.folder and inputs.folder / name
        if twin and twin.is_file() and filecmp.cmp(file, twin, shallow=False):
            shared[name] = checksum_of(file)
        else:
            shutil.copyfile(file, folder / name.replace("/", "%2F"))
    own = [record_of(store, f"{place}/{file.name}") for file in sorted(folder.iterdir())]
    if not own:
        folder.rmdir()
    return {"files": own, "shared": shared, "foreign": foreign}


def original(
    bases: Bases,
    number: int,
    base: Weights,
    base_folder: Path | None,
    dtype: torch.dtype | None,
) -> tuple[list[Item], dict[str, Path]]:
    """The tensors and other files, by their names, of a model of a lossless store, as they were.

    Raises:
        UserError: a file of the model, or of the base, is not what it was.
    """
    vector, source = bases.facts.vectors[number], bases.sources[number]
    check_files(bases.path, vector.files, checksums=True)
    places = [bases.path / each.file for each in vector.files]
    files = {file.name.replace("%2F", "/"): file for file in places}
    every = {name: source for name in source.in_file if name not in vector.foreign}
    if rest := files.pop(REST, None):
        every |= dict.fromkeys((other := Coded(rest, base)).in_file, other)
    items = []
    for name, each in every.items():
        info = each.tensors[name]
        own = dtype if dtype and info.dtype.is_floating_point else info.dtype
        items.append(Item(name, info.shape, Part.of(each, name), (), own))
    for name, checksum in vector.shared.items():
        files[name] = file = (base_folder or bases.path) / name
        if not file.is_file() or checksum_of(file) != checksum:
            said = "missing or changed since the store was built, which needs it for the model"
            raise UserError(f"{file}: {said}; restore it")
    for name in files:  # a store of somebody else must not write outside the output
        if not is_companion(name):
            raise UserError(f"{bases.path}: {name!r} is not the name of a model's file")
    return items, files
