"""The Gram matrix of an unfinished build, in a file for `--resume`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from tvb_mergekit.atomic import write_file
from tvb_mergekit.core.gram import GramSums


def key_of(parts: Mapping[str, object]) -> str:
    """SHA-256 of `parts` as canonical JSON."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_sums(path: Path) -> GramSums | None:
    """The sums in a file; None if it cannot be read."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            note: dict[str, Any] = json.loads(file.metadata()["tvb_mergekit"])
            return GramSums(**note, **{name: file.get_tensor(name) for name in file.keys()})
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError):
        return None


def write_sums(path: Path, sums: GramSums) -> None:
    """Write a file for `read_sums`."""
    tensors = {n: v.contiguous() for n, v in vars(sums).items() if isinstance(v, Tensor)}
    note: dict[str, Any] = {n: v for n, v in vars(sums).items() if isinstance(v, int | float)}
    write_file(path, safetensors.torch.save(tensors, {"tvb_mergekit": json.dumps(note)}))
