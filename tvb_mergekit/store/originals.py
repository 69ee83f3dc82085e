"""The models of a lossless store: the parts that are not in their task vectors, and their export.

`docs/files.md` describes the files next to a vector: `rest.safetensors`, `original.json`, `files/`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from tvb_mergekit.errors import UserError
from tvb_mergekit.store.facts import FileRecord, record_of
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.checkpoint import RESTORE, Checkpoint
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.lossless import Keeping, Lossless, keep_pass
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.source import Weights
from tvb_mergekit.tensors.stream import Item, Part
from tvb_mergekit.tensors.taskset import TaskSet
from tvb_mergekit.tensors.writing import MARKER, FoldersSink, FolderWriter, Shard, plan_shards

REST, ABOUT, FILES = "rest.safetensors", "original.json", "files"
ENDINGS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")  # of a model's other files


def write_originals(
    place: Path, folders: list[str], inputs: TaskSet, engine: Engine
) -> dict[str, FileRecord]:
    """Write what the vectors in `folders` below `place` lack of the models; returns the files."""
    made: dict[str, FileRecord] = {}
    for k, (name, source) in enumerate(zip(folders, inputs.sources, strict=True)):
        held = {item.name for item in inputs.items if item.inputs[k].name == item.name}
        folder, known = place / name, inputs.base.tensors
        items = []
        for own, info in source.tensors.items():
            if own not in held:
                fits = own in known and known[own].shape == info.shape
                base = Part.of(inputs.base, own) if fits else None
                items.append(Item(own, info.shape, base, (Part.of(source, own),)))
        if items:
            keeping = Keeping(items)
            plan = [Shard(REST, tuple(i.coded(keeping.widths(i.name)) for i in items))]
            writer = FolderWriter(folder, plan, {MARKER: name}, coding=keeping)
            keep_pass(items, keeping, FoldersSink([writer], None, keeping), engine, "Rest")
            writer.finish()
            made[f"{name}/{REST}"] = record_of(folder / REST)
        files = _write_files(source, inputs.folder, folder, made)
        about = {"tensors": list(source.tensors), "files": files}
        (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        made[f"{name}/{ABOUT}"] = record_of(folder / ABOUT)
    return made


def _write_files(
    source: Weights, base: Path | None, folder: Path, made: dict[str, FileRecord]
) -> dict[str, str]:
    """Copy the files of a model that are not also the base's; returns file -> checksum of all."""
    files: dict[str, str] = {}
    if base is None or not isinstance(source, Checkpoint):
        return files
    for file in sorted(source.folder.iterdir()):
        if not file.name.endswith(ENDINGS) or file.name.endswith(".index.json"):
            continue
        files[file.name] = (record := record_of(file)).xxh3_128
        twin = base / file.name
        if not (twin.is_file() and record_of(twin) == record):
            (folder / FILES).mkdir(exist_ok=True)
            shutil.copyfile(file, folder / FILES / file.name)
            made[f"{folder.name}/{FILES}/{file.name}"] = record
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
        out_dtype = dtype if dtype is not None and info.dtype.is_floating_point else info.dtype
        items.append(Item(name, info.shape, Part.of(source, name), (), out_dtype))
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
        said, named = json.loads(config.read_text(encoding="utf-8")), str(dtype)[len("torch.") :]
        said |= {key: named for key in ("dtype", "torch_dtype") if key in said}
        config.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
