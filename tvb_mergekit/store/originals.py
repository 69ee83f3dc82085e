"""What a lossless store keeps of a model beside its vector: other tensors, and files.

Configuration and tokenizer are such files.

They lie in `files/NAME/`: `rest.safetensors`, `original.json`, and the files that the base's folder
does not have alike.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch

from tvb_mergekit.errors import UserError
from tvb_mergekit.store.facts import StoredFile, record_of
from tvb_mergekit.tensors.checkpoint import RESTORE, TOKENIZER_FILES, Checkpoint
from tvb_mergekit.tensors.coding import Coded, keep
from tvb_mergekit.tensors.output import FolderWriter, checksum_of, into, plan_shards
from tvb_mergekit.tensors.passes import combine_pass
from tvb_mergekit.tensors.stream import Engine, Item, Part, Weights
from tvb_mergekit.tensors.taskset import TaskSet

REST, ABOUT = "rest.safetensors", "original.json"
# Of the base that a model without tokenizer gets
COPIED = (
    "generation_config.json tokenizer.json tokenizer.model tokenizer_config.json "
    "special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt spiece.model "
    "sentencepiece.bpe.model tiktoken.model chat_template.jinja chat_template.json "
    "normalizer.json spm.model bpe.codes "
    "preprocessor_config.json video_preprocessor_config.json processor_config.json"
).split()
ENDINGS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".spm", ".codes", ".py")  # kept


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
        keep([folder / REST], rest, engine=engine, title="Rest")
    files, base_folder = dict[str, str](), inputs.folder  # name -> checksum
    if isinstance(source, Checkpoint) and not os.path.isfile(inputs.models[number]):
        for file in sorted(source.folder.iterdir()):
            wanted = file.name.endswith(ENDINGS) and not file.name.endswith(".index.json")
            if wanted and file.is_file():
                files[file.name] = checksum_of(file)
                twin = base_folder and base_folder / file.name
                if not (twin and twin.is_file() and checksum_of(twin) == files[file.name]):
                    shutil.copyfile(file, folder / file.name)
    if base_folder is not None and files.keys().isdisjoint(TOKENIZER_FILES):
        lacking = [base_folder / n for n in ("config.json", *COPIED) if n not in files]
        files |= {file.name: checksum_of(file) for file in lacking if file.is_file()}
    about = {"tensors": source.in_file, "files": files}
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
        if any("\\" in n or Path(n).name != n or not n.endswith(ENDINGS) for n in files):
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
    writer.finish()
    for name, checksum in files.items():
        places = [folder / name, *([] if base_folder is None else [base_folder / name])]
        file = next((each for each in places if each.is_file()), places[-1])
        if not file.is_file() or checksum_of(file) != checksum:
            why = "missing or changed since the store was built, which needs it for the model"
            raise UserError(f"{file}: {why}; restore it")
        shutil.copyfile(file, out / name)
    if dtype is not None:
        recast(out / "config.json", dtype)


def copy_config(source: Path | None, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Give a folder the base's configuration, tokenizer and own code.

    Args:
        dtype: of the model in that folder, if it is not the base's.
    """
    if source is not None and (source / "config.json").is_file():
        own = [source / name for name in ("config.json", *COPIED)]
        for file in (*own, *source.glob("*.tiktoken"), *source.glob("*.py")):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
        if dtype is not None:
            recast(folder / "config.json", dtype)


def recast(config: Path, dtype: torch.dtype) -> None:
    """Name the dtype of a model in its configuration, if there is one."""
    if config.is_file():
        said = json.loads(config.read_text(encoding="utf-8"))
        name = str(dtype).removeprefix("torch.")
        said |= {key: name for key in ("dtype", "torch_dtype") if key in said}
        config.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
