"""Other ways to keep task vectors small, as their papers or packages have them.

Each takes task vectors (name -> float32 tensor) and gives what comes back of them, and the bytes of
its codes and scales: packed, and without the headers of any file.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Vector = dict[str, Tensor]
Array = NDArray[Any]


class Kept(NamedTuple):
    vectors: list[Vector]  # decoded
    nbytes: int


class Missing(Exception):
    """A package that is not installed, and how to install it."""


def tvq(vectors: Sequence[Vector], bits: int) -> Kept:
    """TVQ: each tensor of each task vector between its least and its largest element.

    Source: Kim et al., "Task Vector Quantization for Memory-Efficient Model Merging", ICCV 2025
    (arXiv 2503.06921), asymmetric quantization: step D = (max - min) / (2^b - 1), zero point
    z = -round(min / D), code q = clamp(round(x / D) + z, 0, 2^b - 1), and D (q - z) comes back. The
    codes are counted packed, and four bytes each for D and z.
    """
    found = [{name: _min_max(tensor, bits) for name, tensor in v.items()} for v in vectors]
    return _kept(found)


def rtvq(vectors: Sequence[Vector], base_bits: int, bits: int) -> Kept:
    """RTVQ, of the same paper: the mean of the task vectors by TVQ at `base_bits`; then, by TVQ at
    `bits`, the offset of each task vector from that decoded mean (error correction)."""
    names = vectors[0]
    mean = {name: torch.stack([v[name] for v in vectors]).mean(0) for name in names}
    base = tvq([mean], base_bits)
    (shared,) = base.vectors
    offsets = tvq([{name: v[name] - shared[name] for name in names} for v in vectors], bits)
    whole = [{name: shared[name] + v[name] for name in names} for v in offsets.vectors]
    return Kept(whole, base.nbytes + offsets.nbytes)


def bitdelta(vectors: Sequence[Vector], coded: Callable[[str], bool] = lambda name: True) -> Kept:
    """BitDelta without its distillation: the signs of a tensor times its mean magnitude.

    Source: Liu et al., "BitDelta: Your Fine-Tune May Only Be Worth One Bit", NeurIPS 2024; a zero
    has the sign +1, and the scale four bytes, as in the authors' code (`bitdelta/diff.py`).

    Args:
        coded: names of tensors; the others are kept in bfloat16. (The authors' code takes the
            projections of attention and MLP, and keeps embeddings and norms.)
    """

    def keep(name: str, tensor: Tensor) -> tuple[Tensor, int]:
        if not coded(name):
            return tensor.bfloat16().float(), 2 * tensor.numel()
        signs = np.packbits(tensor.numpy().reshape(-1) >= 0)
        back = np.unpackbits(signs, count=tensor.numel()).astype(np.float32) * 2 - 1
        return torch.from_numpy(back).view(tensor.shape) * tensor.abs().mean(), signs.nbytes + 4

    return _kept([{name: keep(name, tensor) for name, tensor in v.items()} for v in vectors])


def is_projection(name: str) -> bool:
    """Whether the authors' code of BitDelta makes bits of a tensor."""
    return "proj" in name and ("mlp" in name or "self_attn" in name)


def deltatensors(vectors: Sequence[Vector], strategy: str) -> Kept:
    """The package of that name, with the defaults of its `compress`.

    `int4` keeps 1 % of the elements as float16 with their places, the others at 4 bits. `quantized`
    keeps signs and a float16 scale a row.

    Raises:
        Missing: it is not installed.
    """
    package = _import("deltatensors.compress", "deltatensors==0.2.*")

    def keep(tensor: Tensor) -> tuple[Tensor, int]:
        payload = package.compress(tensor.numpy(), strategy)
        held = sum(part.nbytes for part in payload.values() if isinstance(part, np.ndarray))
        return torch.from_numpy(package.decompress(payload)), held

    return _kept([{name: keep(tensor) for name, tensor in v.items()} for v in vectors])


def svd(vectors: Sequence[Vector], bits: float) -> Kept:
    """The leading singular vectors of each matrix as two factors in bfloat16, as of LoRA.

    The rank takes at most `bits` bits an element of the matrix, or is 1. Other tensors stay whole.
    """

    def keep(tensor: Tensor) -> tuple[Tensor, int]:
        if tensor.ndim != 2:
            return tensor.bfloat16().float(), 2 * tensor.numel()
        long = tensor.double() if tensor.shape[0] >= tensor.shape[1] else tensor.double().T
        rank = max(1, int(bits * tensor.numel() / 16 / sum(tensor.shape)))
        right = torch.linalg.eigh(long.T @ long).eigenvectors[:, -rank:]
        left, right = (long @ right).bfloat16(), right.bfloat16()
        back = left.float() @ right.float().T
        shaped = back if tensor.shape[0] >= tensor.shape[1] else back.T
        return shaped.contiguous(), 2 * (left.numel() + right.numel())

    return _kept([{name: keep(tensor) for name, tensor in v.items()} for v in vectors])


def _min_max(tensor: Tensor, bits: int) -> tuple[Tensor, int]:
    x, top = tensor.numpy().reshape(-1), 2**bits - 1
    step = np.float32((x.max() - x.min()) / top)
    if step == 0:  # one value, which the scale alone keeps
        return tensor.clone(), -(-len(x) * bits // 8) + 8
    zero = -np.round(x.min() / step)
    codes = np.clip(np.round(x / step) + zero, 0, top).astype(np.uint8)
    packed = pack(codes, bits)
    back = (unpack(packed, bits, len(x)).astype(np.float32) - zero) * step
    return torch.from_numpy(back.astype(np.float32)).view(tensor.shape), packed.nbytes + 8


def pack(codes: Array, bits: int) -> Array:
    """Codes (uint8) as a stream of bits."""
    each = np.unpackbits(codes[:, None], axis=1, count=bits, bitorder="little")
    return np.packbits(each.reshape(-1), bitorder="little")


def unpack(packed: Array, bits: int, count: int) -> Array:
    each = np.unpackbits(packed, count=count * bits, bitorder="little").reshape(count, bits)
    return np.packbits(each, axis=1, bitorder="little")[:, 0]


def _kept(found: Sequence[Mapping[str, tuple[Tensor, int]]]) -> Kept:
    vectors = [{name: tensor for name, (tensor, _) in each.items()} for each in found]
    return Kept(vectors, sum(size for each in found for _, size in each.values()))


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Missing(
            f"no `{module.split('.')[0]}`: its rows are left out. `pip install --no-deps --target "
            f"DIR '{package}'`, and PYTHONPATH=DIR, to have them"
        ) from error
