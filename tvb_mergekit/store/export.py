"""From vectors back to models: theta_0 + tau_hat_j, or any other combination.

A lossless store gives each model as it was. `files/NAME/` holds the other tensors of a model in
`rest.safetensors`, and the files that the base's folder does not have alike, such as configuration
and tokenizer. `original.json` lists both.
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

import torch
from torch import Tensor

from tvb_mergekit import hub
from tvb_mergekit.core.basis import Step
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.change import slugs
from tvb_mergekit.store.facts import StoredFile
from tvb_mergekit.store.files import record_of
from tvb_mergekit.store.report import OURS, section, vectors
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.checkpoint import RESTORE, TOKENIZER_FILES, Checkpoint
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
from tvb_mergekit.tensors.ties import say_untied

LOSSY = 0.3  # relative error of a reconstructed task beyond which an export warns
REST, ABOUT = "rest.safetensors", "original.json"
ENDINGS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".spm", ".codes", ".py")
# Files of folders: the modules of sentence-transformers
INNER = re.compile(r"(\d_[A-Z]\w*|additional_chat_templates)/\w[\w.-]*")


def items_of(
    bases: Bases,
    base: Weights,
    dtype: torch.dtype | None,
    sources: Sequence[Weights],
    exclude: Callable[[str], bool] = lambda name: False,
) -> list[Item]:
    """Every tensor of the base, with those of `sources` where the bases hold it, unless excluded.

    `dtype` is that of the floating-point tensors of the output; None keeps the base's own.
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
        warn: called with a line about each task whose reconstruction is far from it.
    """
    columns = torch.cat([task_column(bases, task) for task in tasks], 1)
    check_output_folder(out)
    items = items_of(bases, base, dtype, bases.sources)
    check_disk(os.fspath(out), len(tasks) * sum(item.written for item in items))
    for line in filter(None, (lost_of(bases, task) for task in tasks)):
        warn(line)
    exact = {vector.name: vector for vector in bases.facts.vectors if vector.codec == "lossless"}
    with staged(out) as folder:
        places = [folder / slug for slug in slugs(tasks)] if every else [folder]
        lossy = [k for k, task in enumerate(tasks) if task not in exact]
        if lossy:
            shards = plan_shards(items)
            writers = [FolderWriter(places[k], shards, {"format": "pt"}) for k in lossy]
            combine(items, columns[:, lossy], into(*writers), engine)
            for writer in writers:
                copy_config(base_folder, writer.folder, dtype)
                say_untied(writer.folder)
        for task, place in zip(tasks, places, strict=True):
            if task in exact and bases.path:
                original = (bases.path / exact[task].files[0].file).parent
                vector = bases.sources[bases.index(task)]
                restore(original, vector, base, base_folder, place, dtype, engine)
            (place / "README.md").write_text(_card(bases, task), encoding="utf-8")


def _card(bases: Bases, task: str) -> str:
    """A model card. Its metadata name the base, which the Hub must know."""
    head, base = "tags: [merge, tvb-mergekit]\n", bases.facts.base_model.partition("@")[0]
    if "/" in base and hub.may_be_on_the_hub(base) and not bases.facts.base_path:
        head = f"base_model: {json.dumps(base)}\n{head}"
    weight, facts = float(bases.weights[bases.index(task)]), bases.facts
    lost = f"{said}.\n\n" if (said := lost_of(bases, task)) else ""
    title = task if bases.facts.errors[task] == 0 else f"{task}, reconstructed"
    title += f" (without its weight of {weight:g})" * (weight != 1)
    said = f"{OURS} wrote this model from a store of {vectors(facts)}."
    return f"---\n{head}---\n# {title}\n\n{lost}{section(said, facts)}"


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
) -> list[StoredFile]:
    """Write what the vector of model `number` lacks into the folder `place`; returns the files."""
    source, base, folder = inputs.sources[number], inputs.base, store / place
    folder.mkdir(parents=True)
    held = {item.name for item in inputs.items if _is_own(source, item, number)}
    rest = []
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
    for name, file in files.items():
        twin = inputs.folder and inputs.folder / name
        if not (twin and twin.is_file() and filecmp.cmp(file, twin, shallow=False)):
            shutil.copyfile(file, folder / name.replace("/", "%2F"))
    if files.keys().isdisjoint(TOKENIZER_FILES):
        files = companions(inputs.folder) | files
    sums = {name: checksum_of(file) for name, file in files.items()}
    about = {"tensors": source.in_file, "files": sums}
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return [record_of(store, f"{place}/{file.name}") for file in sorted(folder.iterdir())]


def _is_own(source: Weights, item: Item, number: int) -> bool:
    """Whether an input is the model's tensor of this name, and not one that a tokenizer aligned."""
    same = item.inputs[number].name == item.name
    if not same or item.load is None:
        return same
    item = item.loaded()
    own, given = source.tensor(item.name), item.whole(item.inputs[number])
    same = own.dtype == given.dtype and own.numel() == given.numel()
    return same and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (own, given)))


def restore(
    folder: Path,
    vector: Weights,
    base: Weights,
    base_folder: Path | None,
    out: Path,
    dtype: torch.dtype | None,
    engine: Engine,
) -> None:
    """Write a model of a lossless store into the folder `out`, as it was.

    Args:
        folder: what `write_original` wrote.
        dtype: of the floating-point tensors; None: their own, to the bit.

    Raises:
        UserError: a file of the model, or of the base, is not what it was.
    """
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        names, files = list(about["tensors"]), dict(about["files"])
        # A store of somebody else must not write outside `out`.
        if not all(map(is_companion, files)):
            raise ValueError("a file has a path instead of a name")
        sources: list[Weights] = [vector]
        if (folder / REST).is_file():
            sources.insert(0, Coded(folder / REST, base))
        items = []
        for name in names:
            source = next(each for each in sources if name in each.tensors)
            info = source.tensors[name]
            own = dtype if dtype and info.dtype.is_floating_point else info.dtype
            items.append(Item(name, info.shape, Part.of(source, name), (), own))
    except (OSError, ValueError, LookupError, TypeError, StopIteration, RecursionError) as error:
        raise UserError(f"{folder / ABOUT}: cannot be read ({error}); {RESTORE}") from error
    writer = FolderWriter(out, plan_shards(items), {"format": "pt"})
    combine_pass(items, {}, into(writer), engine, title="Models")
    for name, checksum in files.items():
        places = [folder / name.replace("/", "%2F")]
        places += [] if base_folder is None else [base_folder / name]
        file = next((each for each in places if each.is_file()), places[-1])
        if not file.is_file() or checksum_of(file) != checksum:
            why = "missing or changed since the store was built, which needs it for the model"
            raise UserError(f"{file}: {why}; restore it")
        (out / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, out / name)
    recast(out / "config.json", dtype)


def copy_config(source: Path | None, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Give a folder the companions of the base; `dtype` is the model's, if it is another."""
    for name, file in companions(source).items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, folder / name)
    recast(folder / "config.json", dtype)


def recast(config: Path, dtype: torch.dtype | None) -> None:
    """Name the dtype of a model in its configuration, if there are both."""
    if dtype is not None and config.is_file():
        said = json.loads(config.read_text(encoding="utf-8"))
        name = str(dtype).removeprefix("torch.")
        said |= {key: name for key in ("dtype", "torch_dtype") if key in said}
        config.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
