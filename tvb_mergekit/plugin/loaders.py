"""Our mapped checkpoints in the place of mergekit's loaders, for the time of one merge.

mergekit's own cache of loaders lives as long as the process and would show old weights of a
rewritten file; its loader for `.bin` shards holds a whole shard per model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from mergekit.common import ModelReference
from mergekit.io.lazy_tensor_loader import LazyTensorLoader, ShardedTensorIndex, ShardInfo
from mergekit.io.tasks import LoaderCache
from torch import Tensor

from tvb_mergekit.tensors.checkpoint import Checkpoint, metadata_of
from tvb_mergekit.tensors.quantized import KEY, Codes
from tvb_mergekit.tensors.sparse import KEY as SPARSE
from tvb_mergekit.tensors.sparse import Sparse


class MappedLoader(LazyTensorLoader):
    """mergekit's loader interface over a `Checkpoint`: all shards open, nothing read ahead."""

    def __init__(
        self, checkpoint: Checkpoint, names: Mapping[str, str | None] | None = None
    ) -> None:
        """`names`: what else the index lists -> the checkpoint's name for it, if it has one."""
        self.checkpoint = checkpoint
        self.names = names or {}
        self.read: set[str] = set()  # names that a merge asked for
        paths = {name: info.shard for name, info in checkpoint.tensors.items()}
        shards = [
            ShardInfo(shard, [name for name in paths if paths[name] == shard])
            for shard in checkpoint.shards
        ]
        safe = checkpoint.shards[0].endswith(".safetensors")
        index = ShardedTensorIndex(str(checkpoint.folder), safe, paths, shards)
        super().__init__(index, lazy_unpickle=False)
        paths |= {name: checkpoint.shards[0] for name in self.names if name not in paths}
        self.lock = threading.Lock()

    def get_tensor(
        self,
        key: str,
        device: str = "cpu",
        aliases: list[str] | None = None,
        raise_on_missing: bool = True,
    ) -> Tensor | None:
        for name in (key, *(aliases or ())):
            stored = self.names.get(name) or name
            if stored in self.checkpoint.tensors:
                self.read.add(stored)
                return self.checkpoint.tensor(stored).to(torch.device(device))
        if raise_on_missing:
            raise KeyError(key)
        return None

    def flush(self) -> None:
        """Nothing is held."""


def install_loader(model: ModelReference, opened: Checkpoint | None = None) -> MappedLoader:
    """Map `model`, if it is not open yet: download it, or fuse its adapter, as mergekit does."""
    LoaderCache.loaders.pop(model, None)
    if opened is None:
        stock = LoaderCache()
        merged = model.merged(
            cache_dir=stock.lora_cache_dir,
            trust_remote_code=stock.trust_remote_code,
            lora_merge_dtype=stock.lora_merge_dtype,
        )
        opened = open_model(merged.local_path(cache_dir=stock.hf_cache_dir))
    loader = MappedLoader(opened)
    LoaderCache.loaders[model] = loader
    return loader


def open_model(path: str) -> Checkpoint:
    """The weights at `path`, a folder or a file; a vector of a store as what it stands for."""
    # Codes and sparse vectors have all of a checkpoint that a merge asks for.
    opened = Checkpoint.open(path)
    said = metadata_of(opened.folder / opened.shards[0])
    if KEY in said:
        return cast(Checkpoint, Codes.open(path))
    return cast(Checkpoint, Sparse.open(path)) if SPARSE in said else opened


@contextmanager
def fresh_loaders() -> Iterator[None]:
    """Forget, before and after a merge, what earlier merges of this process opened."""
    LoaderCache.loaders.clear()
    try:
        yield
    finally:
        LoaderCache.loaders.clear()
