"""From bases back to models: theta_0 + B_m, theta_0 + tau_hat_j, or any other combination.

A lossless store also holds the parts of its models that are not in their task vectors.
`docs/files.md` describes these files: `rest.safetensors`, `original.json`, `files/`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tvb_mergekit import hub
from tvb_mergekit.core.basis import Linear
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.facts import FileRecord, record_of
from tvb_mergekit.store.report import card_section
from tvb_mergekit.store.store import Bases, dtype_name
from tvb_mergekit.store.vectors import COPIED, copy_config
from tvb_mergekit.tensors.checkpoint import RESTORE, TOKENIZER_FILES, Checkpoint
from tvb_mergekit.tensors.lossless import Keeping, Lossless
from tvb_mergekit.tensors.output import (
    StagedFolder,
    check_disk,
    check_new_folder,
    check_output_folder,
)
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.stream import Engine, Item, Part, Sink, Weights
from tvb_mergekit.tensors.taskset import TaskSet
from tvb_mergekit.tensors.writing import (
    FoldersSink,
    FolderWriter,
    plan_shards,
)

REST, ABOUT, FILES = "rest.safetensors", "original.json", "files"
ENDINGS = (
    ".json",
    ".jinja",
    ".txt",
    ".model",
    ".tiktoken",
    ".spm",
    ".codes",
    ".py",
)  # of a model's other files


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
            (place / "README.md").write_text(card_of(bases, line), encoding="utf-8")
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


def card_of(bases: Bases, title: str) -> str:
    """A model card. Its metadata name the base, which the Hub must know."""
    head, base = "tags: [merge, tvb-mergekit]\n", bases.facts.base_model.partition("@")[0]
    if "/" in base and hub.may_be_on_the_hub(base) and not bases.facts.store.base_path:
        head = f"base_model: {json.dumps(base)}\n{head}"
    return f"---\n{head}---\n# {title}\n\n{card_section(bases.facts, bases.tensors)}"


def write_originals(
    place: Path, folders: list[str], inputs: TaskSet, engine: Engine
) -> dict[str, FileRecord]:
    """Write what the vectors in `folders` below `place` lack of the models; returns the files."""
    made: dict[str, FileRecord] = {}
    for k, (name, source) in enumerate(zip(folders, inputs.sources, strict=True)):
        held = {item.name for item in inputs.items if _is_own(source, item, k)}
        folder, known = place / name, inputs.base.tensors
        items = []
        for own, info in source.tensors.items():
            if own not in held:
                fits = own in known and known[own].shape == info.shape
                base = Part.of(inputs.base, own) if fits else None
                items.append(Item(own, info.shape, base, (Part.of(source, own),)))
        if items:
            Keeping([folder], items, name=REST).write(engine, "Rest")
            made[f"{name}/{REST}"] = record_of(folder / REST)
        files = _write_files(source, inputs.folder, folder, made)
        about = {"tensors": list(source.tensors), "files": files}
        (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        made[f"{name}/{ABOUT}"] = record_of(folder / ABOUT)
    return made


def _is_own(source: Weights, item: Item, number: int) -> bool:
    """Whether an input is the model's tensor of this name, and not one that a tokenizer aligned."""
    same = item.inputs[number].name == item.name
    if not same or item.load is None:
        return same
    item = item.loaded()
    own, given = source.tensor(item.name), item.whole(item.inputs[number])
    same = own.dtype == given.dtype and own.numel() == given.numel()
    return same and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (own, given)))


def _write_files(
    source: Weights, base: Path | None, folder: Path, made: dict[str, FileRecord]
) -> dict[str, str]:
    """Copy the files of a model that are not also the base's; returns file -> checksum of all."""
    files: dict[str, str] = {}
    if base is None or not isinstance(source, Checkpoint):
        return files
    for file in sorted(source.folder.iterdir()):
        wanted = file.name.endswith(ENDINGS) and not file.name.endswith(".index.json")
        if not wanted or not file.is_file():
            continue
        files[file.name] = (record := record_of(file)).xxh3_128
        twin = base / file.name
        if not (twin.is_file() and record_of(twin) == record):
            (folder / FILES).mkdir(exist_ok=True)
            shutil.copyfile(file, folder / FILES / file.name)
            made[f"{folder.name}/{FILES}/{file.name}"] = record
    if files.keys().isdisjoint(TOKENIZER_FILES):  # a fused adapter has the base's
        lacking = [base / name for name in COPIED if name not in files and (base / name).is_file()]
        files |= {file.name: record_of(file).xxh3_128 for file in lacking}
    return files


def restore(
    bases: Bases,
    index: int,
    base: Weights,
    base_folder: Path | None,
    out: Path,
    engine: Engine,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model of a lossless store into the folder `out`, as it was.

    Args:
        index: of the task.
        dtype: of the floating-point tensors; None: their own, to the bit.

    Raises:
        UserError: a file of the model, or of the base, is not what it was.
    """
    assert bases.path is not None
    folder, rest = bases.path / bases.facts.store.folders[index], None
    try:
        if record_of(folder / ABOUT) != bases.facts.store.files[f"{folder.name}/{ABOUT}"]:
            raise ValueError("not what was stored")
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        names, files = list(about["tensors"]), dict(about["files"])
        # A store of somebody else must not write outside `out`.
        if any("\\" in n or Path(n).name != n or not n.endswith(ENDINGS) for n in files):
            raise ValueError("a file has a path instead of a name")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{folder / ABOUT}: cannot be read ({error}); {RESTORE}") from error
    if (folder / REST).is_file():
        rest = Lossless.open(folder / REST)
        rest.base = base
    items = []
    for name in names:
        source = rest if rest is not None and name in rest.tensors else bases.vectors[index]
        info = source.tensors[name]
        own = dtype if dtype and info.dtype.is_floating_point else info.dtype
        items.append(Item(name, info.shape, Part.of(source, name), (), own))
    writer = FolderWriter(out, plan_shards(items), {"format": "pt"})
    combine_pass(items, {}, FoldersSink([writer]), engine, title="Models")
    writer.finish()
    _copy_files(files, folder, base_folder, out, dtype)


def _copy_files(
    files: Mapping[str, str],
    folder: Path,
    base_folder: Path | None,
    out: Path,
    dtype: torch.dtype | None,
) -> None:
    for name, checksum in files.items():
        places = [folder / FILES / name, *([] if base_folder is None else [base_folder / name])]
        file = next((each for each in places if each.is_file()), places[-1])
        if not file.is_file() or record_of(file).xxh3_128 != checksum:
            raise UserError(
                f"{file}: missing or changed since the store was built, which needs it for the "
                f"model; restore it"
            )
        shutil.copyfile(file, out / name)
    config = out / "config.json"
    if dtype is not None and config.is_file():
        said = json.loads(config.read_text(encoding="utf-8"))
        said |= {key: dtype_name(dtype) for key in ("dtype", "torch_dtype") if key in said}
        config.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
