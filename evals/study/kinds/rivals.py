"""Other ways to keep task vectors small, as their papers or packages have them.

Each takes task vectors (name -> float32 tensor) and gives what comes back of them, and the bytes of
its codes and scales: packed, and without the headers of any file.
"""

from __future__ import annotations

import importlib
import math
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
            return _whole(tensor)
        signs = (tensor >= 0).float() * 2 - 1
        return signs * tensor.abs().mean(), -(-tensor.numel() // 8) + 4

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


def svd(vectors: Sequence[Vector], bits: float = math.inf, share: float = 1.0) -> Kept:
    """The leading singular vectors of each matrix as two factors in bfloat16, as of LoRA.

    With a share of 1 / T this is TSV-C (Gargiulo et al., "Task Singular Vectors", CVPR 2025, arXiv
    2412.00081), which keeps r // T of the r triples of each of T tasks.

    Args:
        bits: the most that an element of the matrix may cost. The rank is at least 1.
        share: of the r = min(m, n) singular triples.
    """

    def keep(tensor: Tensor) -> tuple[Tensor, int]:
        if tensor.ndim != 2:
            return _whole(tensor)
        rank = min(share * min(tensor.shape), bits * tensor.numel() / 16 / sum(tensor.shape))
        left, right = (side.bfloat16() for side in _leading(tensor, int(rank)))
        return left.float() @ right.float().T, 2 * (left.numel() + right.numel())

    return _kept([{name: keep(tensor) for name, tensor in v.items()} for v in vectors])


def delta_come(vectors: Sequence[Vector], bits: float) -> Kept:
    """Delta-CoMe without calibration: singular vectors of projections at 8, 3 and 2 bits.

    Source: Ping et al., "Delta-CoMe", NeurIPS 2024 (arXiv 2406.08903) and the authors' `run.sh`.
    Triples 1 and 2 have 8 bits, the next 32 have 3, and as many others have 2 as fit into `bits` an
    element. Groups of 128 have a scale in bfloat16 and a zero point, which are counted as well. The
    authors round by GPTQ on examples of text; this rounds to the nearest.
    """

    def keep(name: str, tensor: Tensor) -> tuple[Tensor, int]:
        if not is_projection(name):
            return _whole(tensor)
        least, budget = min(tensor.shape), bits * tensor.numel() / sum(tensor.shape)
        others = max(0, int((budget - 8 * 2 - 3 * 32) / 2))
        sides, nbytes = _leading(tensor, min(least, 2 + 32 + others)), 0
        for side in sides:
            for width, some in ((8, slice(2)), (3, slice(2, 34)), (2, slice(34, None))):
                side[:, some], size = _grouped(side[:, some].T, width)
                nbytes += size
        return (sides[0] @ sides[1].T).float(), nbytes

    return _kept([{name: keep(name, tensor) for name, tensor in v.items()} for v in vectors])


def signs_and_svd(vectors: Sequence[Vector], bits: float) -> Kept:
    """D-QRELO by its abstract: a projection's signs times its mean, and an SVD of what is left.

    Source: Li et al., 2026 (arXiv 2604.16940), of which no code was found. How the paper
    "compensates" the low rank is not in its abstract.

    Args:
        bits: of the SVD, an element.
    """

    def keep(name: str, tensor: Tensor) -> tuple[Tensor, int]:
        if not is_projection(name):
            return _whole(tensor)
        signs = bitdelta([{name: tensor}])
        coarse = signs.vectors[0][name]
        fine = svd([{name: tensor - coarse}], bits)
        return coarse + fine.vectors[0][name], signs.nbytes + fine.nbytes

    return _kept([{name: keep(name, tensor) for name, tensor in v.items()} for v in vectors])


def ultradelta(vectors: Sequence[Vector], share: float, step: float = 0.01) -> Kept:
    """UltraDelta: 4 bits a tensor, and a random share of the entries of each level.

    Source: Wang et al., "Breaking the Compression Ceiling", NeurIPS 2025 (arXiv 2505.13563), and
    the authors' code: levels between the least and the largest entry of a tensor; the third of the
    parameters with the least standard deviation keeps `step` less than `share`, the third with the
    largest as much more. All are divided by `share`. (The authors' further factor is 1 there.) The
    bytes are 4 bits for each kept entry, and the entropy of the places.
    """
    rng = torch.Generator().manual_seed(0)

    def keep(tensor: Tensor, rate: float) -> tuple[Tensor, int]:
        low, high = tensor.min(), tensor.max()
        unit = torch.where(high > low, (high - low) / 15, 1)
        levels = ((tensor - low) / unit).round().view(-1) * unit + low
        for level in levels.unique():
            places = (levels == level).nonzero()[:, 0]
            drawn = torch.randperm(len(places), generator=rng)
            levels[places[drawn[: round(len(places) * (1 - rate))]]] = 0
        entropy = -sum(p * math.log2(p) for p in (rate, 1 - rate) if p > 0)
        nbytes = math.ceil(tensor.numel() * (4 * rate + entropy) / 8) + 8
        return levels.view(tensor.shape) / share, nbytes

    found = []
    for vector in vectors:
        order = sorted(vector, key=lambda name: float(vector[name].std(correction=0)))
        sizes = np.array([vector[name].numel() for name in order])
        third = np.minimum(2, np.ceil(3 * sizes.cumsum() / sizes.sum()).astype(int) - 1)
        first, last = (int(sizes[third == part].sum()) for part in (0, 2))
        rates = (share - step, share, min(1.0, share + step * first / last))
        found.append({n: keep(vector[n], rates[p]) for n, p in zip(order, third, strict=True)})
    return _kept(found)


def _whole(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor.bfloat16().float(), 2 * tensor.numel()


def _leading(tensor: Tensor, rank: int) -> list[Tensor]:
    """U S [m, k] and V [n, k] of the first singular triples of [m, n], at least of one."""
    long = tensor.double() if tensor.shape[0] >= tensor.shape[1] else tensor.double().T
    right = torch.linalg.eigh(long.T @ long).eigenvectors.flip(1)[:, : max(1, rank)]
    sides = [long @ right, right]
    return sides if tensor.shape[0] >= tensor.shape[1] else sides[::-1]


def _grouped(rows: Tensor, bits: int) -> tuple[Tensor, int]:
    """Rows in groups of 128 between their least and largest entry, or 0; and the bytes."""
    groups = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 128)).unflatten(1, (-1, 128))
    low, high = groups.amin(-1, True).clamp(max=0), groups.amax(-1, True).clamp(min=0)
    step = ((high - low) / (2**bits - 1)).bfloat16().to(rows)
    step[step == 0] = 1
    zero = (low / -step).round()
    codes = ((groups / step).round() + zero).clamp(0, 2**bits - 1)
    back = ((codes - zero) * step).flatten(1)[:, : rows.shape[1]]
    return back.T, math.ceil((rows.numel() * bits + step.numel() * (16 + bits)) / 8)


def _min_max(tensor: Tensor, bits: int) -> tuple[Tensor, int]:
    x, top = tensor.numpy().reshape(-1), 2**bits - 1
    step = np.float32((x.max() - x.min()) / top)
    if step == 0:  # one value, which the scale alone keeps
        return tensor.clone(), -(-len(x) * bits // 8) + 8
    zero = -np.round(x.min() / step)
    codes = np.clip(np.round(x / step) + zero, 0, top).astype(np.uint8)
    back = (codes.astype(np.float32) - zero) * step
    return torch.from_numpy(back.astype(np.float32)).view(tensor.shape), -(-bits * len(x) // 8) + 8


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
