"""Checkpoints on disk as named tensors: read range by range, never whole, never unpickled.

A checkpoint is a folder as Hugging Face writes it (one file, or shards and an index) or one file,
in safetensors or PyTorch's zip format. Opening it reads headers only, and finds shards that are
missing, truncated or code, and an index that points outside its folder or to no tensor.

One tensor may have several names, such as the input and output embeddings. Values decide what is
tied, whatever config.json says. A file may hold tied tensors under each of their names, or under
any one of them.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import threading
import zipfile
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

import safetensors
import torch
from torch import Tensor

from tvb_mergekit.core.gram import AT_ONCE
from tvb_mergekit.errors import UserError, one_line
from tvb_mergekit.names import COPIES, INPUT_EMBEDDING, OUTPUT_EMBEDDING, tied_uses
from tvb_mergekit.tensors.stream import Part, TensorInfo, Weights, infos_of

# In mergekit's and transformers' order of preference.
_STEMS = ("model.safetensors", "pytorch_model.bin")
SAME = "the same tensor as"  # the beginning of a reason why a tensor is left out
RESTORE = "restore it, or build the store anew"
TOKENIZER_FILES = (
    "tokenizer.json tokenizer.model vocab.json vocab.txt spiece.model tokenizer_config.json"
).split()

DTYPES = {
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{"BF16": torch.bfloat16, "C64": torch.complex64, "BOOL": torch.bool},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class Checkpoint(Weights):
    """A model's weights on disk. Thread-safe."""

    folder: Path
    tensors: dict[str, TensorInfo]
    _mapped: dict[tuple[str, str], Tensor] = field(default_factory=dict, repr=False)
    _open: tuple[str, Any] = field(default=("", None), repr=False)  # the last file that was read
    _seen: dict[str, object] = field(default_factory=dict, repr=False)  # identities of the shards
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read the headers of the checkpoint at `path`, a folder or one weight file."""
        path = Path(path)
        names = {path.name: None} if path.is_file() else _index(path)
        folder = path.parent if path.is_file() else path
        made = cls(folder, {})
        made._seen = {shard: _identity(folder / shard) for shard in names}  # before it is read
        for shard, own in names.items():
            if shard.endswith(".safetensors"):
                held = _open_safetensors(folder, shard)
            else:
                mapped = _map_pickle(folder / shard)
                held = infos_of(mapped.items(), shard)  # finds tied tensors by their memory
                made._mapped |= {(shard, name): t.contiguous() for name, t in mapped.items()}
            for name in held if own is None else own:
                if name not in held:
                    told = f"the index says that `{name}` is in {shard}, which lacks it"
                    raise UserError(f"{folder}: {told}; download the model again")
                made.tensors[name] = held[name]
        return made

    @property
    def model_type(self) -> str | None:  # type: ignore[override]
        """`model_type` of the folder's config.json; None without one."""
        with suppress(OSError, ValueError, LookupError, TypeError):
            return str(json.loads((self.folder / "config.json").read_bytes())["model_type"])
        return None

    def read(self, name: str, start: int, stop: int, out: Tensor) -> Tensor:
        """Elements `start` to `stop` of the flattened tensor, as a view of `out`.

        The file is read, not mapped, so that its pages do not stay resident.
        """
        info = self.tensors[name]
        chunk = out[: stop - start]
        if info.offset is None:  # a PyTorch file
            own = self.canonical(name)  # of tied tensors, perhaps in another shard
            shard = self.tensors[own].shard
            self.check_unchanged(shard)
            return chunk.copy_(self._mapped[shard, own].view(-1)[start:stop])
        data: Any = chunk.view(torch.uint8).numpy()
        with self._lock:  # threads share one open file: hundreds of models have as many
            if self._open[0] != info.shard:
                self.check_unchanged(info.shard)
                self._open = info.shard, OwnFile(self.folder / info.shard)
            file = self._open[1]
            file.seek(info.offset + start * info.dtype.itemsize)
            while len(data) and (count := file.readinto(data)):  # Linux reads 2 GB at most
                data = data[count:]
        if len(data):
            raise UserError(f"{self.folder / info.shard} ends in `{name}`: changed meanwhile")
        return chunk

    def check_unchanged(self, *shards: str) -> None:
        for shard in shards or self._seen:  # an open one may be overwritten in place
            if _identity(self.folder / shard) != self._seen[shard]:
                raise UserError(
                    f"{self.folder / shard}: was changed after it was opened (by `tvb add`, or a "
                    "training that goes on?); run the command, or `attach`, again"
                )


def metadata_of(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file of any name; empty for other and damaged files."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, safetensors.SafetensorError):
        return {}


def _identity(path: Path) -> object:
    with suppress(OSError):
        stat = path.stat()
        return stat.st_ino, stat.st_size, stat.st_mtime_ns
    return None


def weight_files(folder: str | os.PathLike[str]) -> list[str]:
    """Names of the files in `folder` that a loader could read as weights."""
    endings = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".index.json")
    return sorted(file.name for file in Path(folder).glob("*") if file.name.endswith(endings))


class OwnFile(io.FileIO):
    """A file that closes without a warning when nothing needs it any more."""

    __del__ = io.FileIO.close


def _index(folder: Path) -> dict[str, list[str] | None]:
    """Shard -> tensors in it by the index; None: all tensors of the file."""
    for stem in _STEMS:
        index = folder / f"{stem}.index.json"
        ways = [stem] if (folder / stem).exists() else []
        # Without shards beside it, an index is of the one file, or of an earlier save.
        if index.exists() and not (ways and not any(folder.glob(stem.replace(".", "-*-of-*.")))):
            ways.append(index.name)
        if ways and (folder / "adapter_config.json").exists():
            ways.append("adapter_config.json")  # transformers adds the adapter
        if len(ways) > 1:
            raise UserError(f"{folder}: {' and '.join(ways)} are two models; move one elsewhere")
        if ways:
            return {stem: None} if ways == [stem] else _read_index(index)
    raise UserError(
        f"{folder}: no model weights; expected {' or '.join(_STEMS)} (or their .index.json), "
        f"found {', '.join(weight_files(folder)) or 'no weight file'}"
    )


def _read_index(index: Path) -> dict[str, list[str] | None]:
    shards: dict[str, Any] = {}
    try:
        for name, shard in json.loads(index.read_bytes())["weight_map"].items():
            shards.setdefault(str(PurePath(shard)), []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        told = f"{index}: not a shard index ({one_line(error)}); download it again"
        raise UserError(told) from error
    for shard in shards:
        if PurePath(shard).is_absolute() or ".." in PurePath(shard).parts:
            raise UserError(
                f"{index}: points outside its folder (`{shard}`); a shard must lie beside its "
                "index. Do not use this checkpoint unless you know why"
            )
        if not (index.parent / shard).is_file():
            raise UserError(f"{index.parent}: shard {shard} is missing; download the model again")
    return dict(sorted(shards.items()))


def _open_safetensors(folder: Path, shard: str) -> dict[str, TensorInfo]:
    """The tensors of a file."""
    path = folder / shard
    try:
        safetensors.safe_open(path, framework="pt")  # compares header and file size
    except safetensors.SafetensorError as error:
        raise UserError(
            f"{path}: truncated, or a pointer of Git LFS ({error}); download it again"
        ) from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    infos = {}
    for name, entry in header.items():
        if (dtype := DTYPES.get(entry["dtype"])) is None:
            raise UserError(f"{path}: tensor `{name}` is {entry['dtype']}, which is not supported")
        offset = 8 + length + entry["data_offsets"][0]
        infos[name] = TensorInfo(tuple(entry["shape"]), dtype, shard, offset=offset)
    return infos


def _map_pickle(path: Path) -> dict[str, Tensor]:
    """Map a PyTorch file without running code from it."""
    maps = zipfile.is_zipfile(path)  # a file older than PyTorch 1.6 is loaded
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=maps)
    except Exception as error:  # torch raises any kind here
        why = "needs running code" if isinstance(error, pickle.UnpicklingError) else "is damaged"
        raise UserError(f"{path}: {why} ({one_line(error):.100}); take safetensors") from error
    held = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else {}
    found = {str(name): value for name, value in held.items() if isinstance(value, Tensor)}
    if not found:
        raise UserError(f"{path}: holds no tensors; save the state dict alone")
    return found


def tie(every: Sequence[Weights], names: Iterable[str] = ()) -> None:
    """Give the tied tensors of models all names that any of the models, or `names`, have for them.

    Embeddings and output layers of equal bytes are one tensor. A name that a model lacks is that of
    the tensor with which another model ties it. It is that of the other use of the embeddings, if
    the model has only one of the two uses.
    """
    models = [each.under or each for each in every if each.under or each.holds is None]
    wanted = dict.fromkeys(tied_uses(names))
    for model in models:
        _compare(model)
        aliases = (n for name, i in model.tensors.items() if i.alias_of for n in (i.alias_of, name))
        wanted |= dict.fromkeys((*tied_uses(model.tensors), *aliases))
    if any(map(_unties, models)):  # transformers would make up what an untied model lacks
        shared = [n.removesuffix("shared.weight") for n in wanted if n.endswith("shared.weight")]
        wanted |= dict.fromkeys(f"{start}{copy}" for start in shared for copy in COPIES)
    for name in (name for each in every for name in each.changed):
        if INPUT_EMBEDDING.search(name):  # and so not the output layer
            wanted["embed_out.weight" if "embed_in" in name else _head_of(models[0])] = None
    for model in models:
        for name in [name for name in wanted if name not in model.tensors]:
            if found := _tied_to(name, model, models, wanted):
                lend(model, name, found)
    for each in every:
        each.name_tensors()


def _head_of(model: Weights) -> str:
    """The output layer's name by the model's class."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration):
        config = json.loads((Path(str(model.folder)) / "config.json").read_bytes())
        import transformers  # slow

        tied = getattr(transformers, config["architectures"][0])._tied_weights_keys
        return next(str(name) for name in tied if OUTPUT_EMBEDDING.search(name))
    return "lm_head.weight"


def lend(model: Weights, name: str, of: str) -> None:
    """Give the tensor `of` of a model a second name, which its file lacks."""
    of = model.canonical(of)
    model.tensors[name] = replace(model.tensors[of], alias_of=of, stored=False)


def _compare(model: Weights) -> None:
    """Note which embeddings and output layers of a model have equal bytes."""
    firsts: list[Part] = []
    for name in tied_uses(model.tensors):
        info = model.tensors[name]
        if info.alias_of is None:
            own = Part.of(model, name)
            first = next((o.name for o in firsts if o.dtype == own.dtype and equal(o, own)), None)
            model.tensors[name] = replace(info, alias_of=first)
            firsts += [] if first else [own]


def equal(one: Part, other: Part) -> bool:
    """Whether two stored tensors are equal, by their bytes if they have one dtype."""
    if one.shape != other.shape:
        return False
    numel = math.prod(one.shape or ())
    for start in range(0, numel, AT_ONCE):  # up to the first difference
        pair = [each.between(start, min(start + AT_ONCE, numel)) for each in (one, other)]
        bits = one.dtype == other.dtype
        if not torch.equal(*(each.view(torch.uint8) if bits else each.float() for each in pair)):
            return False
    return True


def _tied_to(
    name: str, model: Weights, models: Sequence[Weights], wanted: Collection[str]
) -> str | None:
    """The tensor of a model that has `name` too; see `tie`."""
    having = [each for each in models if name in each.tensors]
    for other in having:
        for twin in (each for each in wanted if each in other.tensors and each in model.tensors):
            if other.canonical(twin) == other.canonical(name):
                return twin
    widths = {each.tensors[name].shape[1:] for each in having}  # other models may have more tokens
    uses = [n for n in tied_uses(model.tensors) if widths <= {model.tensors[n].shape[1:]}]
    inputs, outputs = ([*filter(use.search, uses)] for use in (INPUT_EMBEDDING, OUTPUT_EMBEDDING))
    if INPUT_EMBEDDING.search(name):
        shared = [n for n in inputs if n.endswith("shared.weight") and not having]
        return next(iter(shared if inputs else outputs), None)
    return inputs[0] if OUTPUT_EMBEDDING.search(name) and inputs and not outputs else None


def _unties(model: Weights) -> bool:
    """Whether a model has an output layer that is not its embeddings."""
    uses = tied_uses(model.tensors)
    return any(map(OUTPUT_EMBEDDING.search, uses)) and len({*map(model.canonical, uses)}) > 1


def say_untied(folder: Path) -> None:
    """Let the configuration in a folder say so if its embeddings and output layer differ.

    transformers 5 loads such a model right either way, and other loaders go by the configuration.
    """
    file = folder / "config.json"
    if not file.is_file():
        return
    values = json.loads(file.read_text(encoding="utf-8"))
    tie([model := Checkpoint.open(folder)])
    if not _unties(model) or "scale_decoder_outputs" in values:  # as which T5 reads the key
        return
    if any(name.endswith("decoder.weight") for name in tied_uses(model.tensors)):
        return  # transformers would make up the head's bias, which is tied too
    for part in (values, values.get("text_config")):
        if isinstance(part, dict) and (part is values or "tie_word_embeddings" in part):
            part["tie_word_embeddings"] = False
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
