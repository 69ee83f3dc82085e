"""A reader of a store's coded files that knows only docs/files.md and the programs there."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from torch import Tensor

MANUAL = (Path(__file__).parent.parent / "docs" / "files.md").read_text(encoding="utf-8")
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I64": torch.int64}
SIZE = 131_072  # elements of a block


def program(name: str) -> Callable[..., Any]:
    """The manual's function of this name."""
    (text,) = re.findall(rf"```python\n(def {name}\(.*?)```", MANUAL, re.DOTALL)
    names = dict[str, Any](np=np, xxhash=xxhash)
    exec(text, names)
    found: Callable[..., Any] = names[name]
    return found


def coded(file: Path, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model without loss, or the task vector of a sample."""
    text, made = file.read_bytes(), dict[str, Tensor]()
    length = int.from_bytes(text[:8], "little")
    header, data = json.loads(text[8 : 8 + length]), text[8 + length :]
    said = json.loads(header["__metadata__"]["tvb_coded"])
    assert said["version"] == 1
    for name, (dtype, shape) in said["tensors"].items():
        start, stop = header[name]["data_offsets"]
        numel, own = int(np.prod(shape)), DTYPES[dtype]
        sampled = said["share"] < 1
        out = torch.zeros(numel, dtype=torch.float32 if sampled else own)
        index, share = stop - 13 * -(-numel // SIZE), said["share"] if len(shape) > 1 else 1
        for block, first in enumerate(range(0, numel, SIZE)):
            count = min(SIZE, numel - first)
            places = np.arange(count)
            if share < 1:
                places = np.array(program("places")(said["seed"], share, name, block, count), int)
            length, form = int.from_bytes(data[index : index + 4], "little"), data[index + 4]
            content = data[start : start + length]
            if form:
                content = zstandard.ZstdDecompressor().decompress(content)
            if form == 2:
                near = base[name].reshape(-1)[first + places]
                units = np.frombuffer(raw(near), np.uint16)
                mantissa = {"BF16": 7, "F16": 10}[dtype]
                content = program("theta")(np.frombuffer(content, np.uint8), units, mantissa)
                content = content.tobytes()
            assert len(content) == len(places) * own.itemsize
            digest = int.from_bytes(data[index + 5 : index + 13], "little")
            assert xxhash.xxh3_64_intdigest(content) == digest
            if content:
                theta = torch.frombuffer(bytearray(content), dtype=own)
                if sampled:
                    near = base[name].reshape(-1)[first + places]
                    theta = (theta.float() - near.float()) / share
                out[first + places] = theta
            start, index = start + length, index + 13
        made[name] = out.view(shape)
    return made


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor's elements."""
    flat = tensor.reshape(-1).clone()
    return flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""


def same(found: Tensor, want: Tensor) -> bool:
    """Whether two tensors are the same to the bit: NaN is itself, and -0 is not 0."""
    return (found.dtype, found.shape, raw(found)) == (want.dtype, want.shape, raw(want))
