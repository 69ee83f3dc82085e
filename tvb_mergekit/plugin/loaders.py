"""Mapped checkpoints instead of mergekit's loaders, during one merge.

mergekit's own cache of loaders lives as long as the process, and would show old weights of a
rewritten file. mergekit's loader for `.bin` shards holds a complete shard of each model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mergekit.common import ModelReference
from mergekit.io.lazy_tensor_loader import LazyTensorLoader, ShardedTensorIndex, ShardInfo
from mergekit.io.tasks import LoaderCache
from torch import Tensor

from tvb_mergekit.tensors.checkpoint import Checkpoint


class MappedLoader(LazyTensorLoader):
    """mergekit's loader interface over a `Checkpoint`: all shards open, nothing read ahead."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.read: set[str] = set()  # names that a merge asked for
        paths = {name: info.shard for name, info in checkpoint.tensors.items()}
        shards = [ShardInfo(s, [n for n in paths if paths[n] == s]) for s in checkpoint.shards]
        safe = checkpoint.shards[0].endswith(".safetensors")
        index = ShardedTensorIndex(str(checkpoint.folder), safe, paths, shards)
        super().__init__(index, lazy_unpickle=False)
        self.lock = threading.Lock()

    def get_tensor(
        self,
        key: str,
        device: str = "cpu",
        aliases: list[str] | None = None,
        raise_on_missing: bool = True,
    ) -> Tensor | None:
        for name in (key, *(aliases or ())):
            if name in self.checkpoint.tensors:
                self.read.add(name)
                return self.checkpoint.tensor(name).to(torch.device(device))
        if raise_on_missing:
            raise KeyError(key)
        return None

    def flush(self) -> None:
        """Nothing is held."""


def install_loader(model: ModelReference, opened: Checkpoint | None = None) -> MappedLoader:
    """Map a model. Unless it is open, download it or fuse its adapter, as mergekit does."""
    LoaderCache.loaders.pop(model, None)
    if opened is None:
        stock = LoaderCache()
        merged = model.merged(
            cache_dir=stock.lora_cache_dir,
            trust_remote_code=stock.trust_remote_code,
            lora_merge_dtype=stock.lora_merge_dtype,
        )
        opened = Checkpoint.open(merged.local_path(cache_dir=stock.hf_cache_dir))
    loader = MappedLoader(opened)
    LoaderCache.loaders[model] = loader
    return loader


@contextmanager
def fresh_loaders() -> Iterator[None]:
    """Forget, before and after a merge, what earlier merges of this process opened."""
    LoaderCache.loaders.clear()
    try:
        yield
    finally:
        LoaderCache.loaders.clear()
