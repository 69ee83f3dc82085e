"""Readers of a store's files that know only docs/files.md and the programs there."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from torch import Tensor

MANUAL = (Path(__file__).parent.parent / "docs" / "files.md").read_text(encoding="utf-8")


def program(name: str) -> Callable[..., Any]:
    """The manual's function of this name."""
    (text,) = re.findall(rf"```python\n(def {name}\(.*?)```", MANUAL, re.DOTALL)
    names = dict[str, Any](np=np, xxhash=xxhash)
    exec(text, names)
    found: Callable[..., Any] = names[name]
    return found


def opened(file: Path, kind: str) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The description of a file of our own kind, its entries by name, and its data."""
    text = file.read_bytes()
    length = int.from_bytes(text[:8], "little")
    header = json.loads(text[8 : 8 + length])
    said = json.loads(header["__metadata__"][kind])
    assert said["version"] == 1
    return said, header, text[8 + length :]


def lossless(file: Path, base: dict[str, Tensor], size: int) -> dict[str, bytes]:
    """The bytes of the tensors in a lossless file, in blocks of `size` elements."""
    made, theta = {}, program("theta")
    said, header, data = opened(file, "tvb_lossless")
    for name, (dtype, shape) in said["tensors"].items():
        start, stop = header[name]["data_offsets"]
        numel, width, out = int(np.prod(shape)), {"F32": 4, "I64": 8}.get(dtype, 2), b""
        index = stop - 13 * -(-numel // size)
        for first in range(0, numel, size):
            count = min(size, numel - first)
            long, form = int.from_bytes(data[index : index + 4], "little"), data[index + 4]
            block = data[start : start + long]
            if form:
                block = zstandard.ZstdDecompressor().decompress(block)
            if form == 2:
                flat = base[name].reshape(-1)[first : first + count]
                units = np.frombuffer(raw(flat), np.uint16)
                mantissa = {"BF16": 7, "F16": 10}[dtype]
                block = theta(np.frombuffer(block, np.uint8), units, mantissa).tobytes()
            assert len(block) == count * width
            digest = int.from_bytes(data[index + 5 : index + 13], "little")
            assert xxhash.xxh3_64_intdigest(block) == digest
            out, start, index = out + block, start + long, index + 13
        made[name] = out
    return made


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor's elements."""
    flat = tensor.reshape(-1).clone()
    return flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""


def same(found: Tensor, want: Tensor) -> bool:
    """Whether two tensors are the same to the bit: NaN is itself, and -0 is not 0."""
    return (found.dtype, found.shape, raw(found)) == (want.dtype, want.shape, raw(want))
