"""Checkpoints on disk as named tensors: read range by range, never whole, never unpickled.

A checkpoint is a folder as Hugging Face writes it (one file, or shards and an index) or one file,
in safetensors or PyTorch's zip format. Opening it reads headers only, and finds shards that are
missing, truncated or code, and an index that points outside its folder or to no tensor.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import threading
import zipfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import safetensors
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tvb_mergekit.errors import UserError, one_line
from tvb_mergekit.tensors.stream import TensorInfo, Weights, infos_of

# In mergekit's and transformers' order of preference.
_STEMS = ("model.safetensors", "pytorch_model.bin")
RESTORE = "restore it, or build the store anew"
TOKENIZER_FILES = (
    "tokenizer.json tokenizer.model vocab.json vocab.txt spiece.model tokenizer_config.json"
).split()
# transformers 5 writes experts as its older versions did, unless it is asked for its own names.
SAVE_AGAIN = (
    "save the models again with transformers' `save_pretrained(FOLDER, save_original_format=False)`"
)

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "C64": torch.complex64,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class Checkpoint(Weights):
    """A model's weights on disk. Thread-safe."""

    folder: Path
    shards: tuple[str, ...]
    tensors: dict[str, TensorInfo]
    # A shard's mapped file; its tensors, if it is in PyTorch's format
    _mapped: dict[str, Any] = field(default_factory=dict, repr=False)
    _open: tuple[str, Any] = field(default=("", None), repr=False)  # the last file that was read
    _seen: dict[str, object] = field(default_factory=dict, repr=False)  # identities of the shards
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read the headers of the checkpoint at `path`, a folder or one weight file."""
        path = Path(path)
        names = {path.name: None} if path.is_file() else _index(path)
        folder = path.parent if path.is_file() else path
        made = cls(folder, tuple(names), {})
        made._seen = {shard: _identity(folder / shard) for shard in names}  # before it is read
        for shard, own in names.items():
            if shard.endswith(".safetensors"):
                held, made._mapped[shard] = _open_safetensors(folder, shard)
            else:
                mapped = _map_pickle(folder / shard)
                held = infos_of(mapped.items(), shard)  # finds tied tensors by their memory
                made._mapped[shard] = {name: value.contiguous() for name, value in mapped.items()}
            for name in held if own is None else own:
                if name not in held:
                    raise UserError(
                        f"{folder}: the index says that `{name}` is in {shard}, which does not "
                        "hold it; download the model again"
                    )
                made.tensors[name] = held[name]
        return made

    @property
    def model_type(self) -> str | None:  # type: ignore[override]
        """`model_type` of the folder's config.json; None without one."""
        with suppress(OSError, ValueError, LookupError, TypeError):
            return str(json.loads((self.folder / "config.json").read_bytes())["model_type"])
        return None

    def tensor(self, name: str) -> Tensor:
        """The tensor, mapped into memory."""
        name = self.canonical(name)
        shard = self.tensors[name].shard
        self.check_unchanged(shard)
        held = self._mapped[shard]
        tensor: Tensor = held[name] if isinstance(held, dict) else held.get_tensor(name)
        return tensor

    def read(self, name: str, start: int, stop: int, out: Tensor) -> Tensor:
        """Elements `start` to `stop` of the flattened tensor, as a view of `out`.

        The file is read, not mapped, so that its pages do not stay resident.
        """
        info = self.tensors[name]
        chunk = out[: stop - start]
        if info.offset is None:  # a PyTorch file
            return chunk.copy_(self.tensor(name).view(-1)[start:stop])
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
            raise UserError(
                f"{self.folder / info.shard}: ends in tensor `{name}`; the file was changed while "
                "it was read"
            )
        return chunk

    def check_unchanged(self, *shards: str) -> None:
        for shard in shards or self.shards:  # an open one may be overwritten in place
            if shard in self._seen and _identity(self.folder / shard) != self._seen[shard]:
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


def vocabulary(folder: Path) -> dict[str, int]:
    """Token -> row, by the files of a tokenizer; empty if none can be read."""
    with suppress(Exception):  # missing or damaged: the tokenizer's own loader complains
        return dict(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab())
    with suppress(OSError, ValueError):
        return dict(json.loads((folder / "vocab.json").read_bytes()))
    with suppress(OSError, ValueError):
        lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
        return {word: row for row, word in enumerate(lines)}
    return {}


def configuration(folder: Path, trust: bool = False) -> dict[str, Any]:
    """A model's configuration, of a multimodal model that of its text; empty if none can be read.

    Args:
        trust: whether to run a model's own code.
    """
    with suppress(Exception):
        from transformers import AutoConfig  # slow

        found = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
        return dict((getattr(found, "text_config", None) or found).to_dict())
    return {}


def weight_files(folder: str | os.PathLike[str]) -> list[str]:
    """Names of the files in `folder` that a loader could read as weights."""
    endings = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".index.json")
    if not os.path.isdir(folder):
        return []
    return sorted(entry for entry in os.listdir(folder) if entry.endswith(endings))


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


def _open_safetensors(folder: Path, shard: str) -> tuple[dict[str, TensorInfo], Any]:
    """The tensors of a file, and the maps that hold them."""
    path = folder / shard
    try:
        mapped = safetensors.safe_open(path, framework="pt")  # compares header and file size
    except safetensors.SafetensorError as error:
        raise UserError(
            f"{path}: truncated, damaged or not a safetensors file ({error}); download it again"
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
    return infos, mapped


def _map_pickle(path: Path) -> dict[str, Tensor]:
    """Map a PyTorch file without running code from it."""
    maps = zipfile.is_zipfile(path)  # a file older than PyTorch 1.6 is loaded
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=maps)
    except pickle.UnpicklingError as error:
        told = "cannot be read without running code that it carries; convert it to safetensors"
        raise UserError(f"{path}: {told}") from error
    except Exception as error:  # torch raises RuntimeError, EOFError, ValueError, OSError here
        told = f"truncated, or not a PyTorch file ({one_line(error):.100}); download it again"
        raise UserError(f"{path}: {told}") from error
    held = loaded if isinstance(loaded, dict) else {}
    held = held["state_dict"] if isinstance(held.get("state_dict"), dict) else held
    found = {str(name): value for name, value in held.items() if isinstance(value, Tensor)}
    if not found:
        raise UserError(f"{path}: holds no tensors; save the state dict alone")
    for name, value in found.items():
        if value.is_meta or value.layout != torch.strided:
            raise UserError(f"{path}: `{name}` is without data, or sparse; save it dense")
    return found
