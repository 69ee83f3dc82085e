"""Singular values and vectors of one matrix in float64, for the methods that merge matrices.

They come from the Gram matrix of the shorter side, in a part of an SVD's time. Singular values are
known to about 1e-8 of the largest. Those up to NULL of the largest count as 0: rounding of models
in float32 makes them, and an SVD would fill in directions. For 16 bits see `rounding_noise`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

NULL = 1e-5  # of the largest singular value
Triples = tuple[Tensor, Tensor, Tensor]  # singular triples: U [m, k], S [k] float64, V [n, k]
Noise = Sequence[float] | None  # the largest singular value that rounding to 16 bits makes, [M]


def rounding_noise(matrix: Tensor, dtype: torch.dtype) -> float:
    """Estimate the largest singular value of the errors of a matrix [m, n] after a cast to `dtype`.

    That of independent errors is about the largest norm of a row plus that of a column (Latala
    2005). An entry is off by up to eps / 2 of its size, by 0.41 of this on average; 0.6 leaves a
    margin. Below the normal numbers it is off by up to half of the smallest.
    """
    if not matrix.numel():
        return 0.0
    kind = torch.finfo(dtype)
    rows, columns = (torch.linalg.vector_norm(matrix, dim=dim).max() for dim in (1, 0))
    flat = kind.smallest_normal * sum(math.sqrt(side) for side in matrix.shape)
    return kind.eps / 2 * math.hypot(0.6 * float(rows + columns), flat)


def top_triples(matrix: Tensor, count: int, floor: float) -> Triples:
    """The first singular triples of [m, n].

    Vectors are zero for values of at most `floor`, or NULL times the largest.
    """
    wide, tall = _wide(matrix)
    sizes, vectors = _spectrum(wide)
    inverse = _inverse(sizes, floor)
    first = slice(len(sizes) - count, None)
    sizes, inverse = sizes[first].flip(0), inverse[first].flip(0)
    near = vectors[:, first].flip(1) * (inverse > 0)
    far = wide.T @ near * inverse  # V = W^T U / S
    return (far, sizes, near) if tall else (near, sizes, far)


def polar(matrix: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """U V^T [m, n] float32 of a U S V^T [m, n], and S [r] float64, increasing.

    Newton-Schulz steps to it are six times slower for 1024 x 1024 noise on a CPU.
    """
    wide, tall = _wide(matrix)
    sizes, vectors = _spectrum(wide)
    root = (vectors * _inverse(sizes, floor)) @ vectors.T  # (W W^T)^-1/2
    found = (root @ wide).float()
    return (found.T if tall else found), sizes


def beside(every: Sequence[Triples], turned: float) -> Triples:
    """P_U, S and P_V of triples side by side: the polar factors of all U and of all V.

    No direction is kept that turns of vectors by `turned` have made.
    """
    left, sizes, right = (torch.cat(each, -1) for each in zip(*every, strict=True))
    return polar(left, turned)[0], sizes, polar(right, turned)[0]


def blur(sizes: Tensor, noise: float) -> float:
    """The turn by rounding, about, of vectors with values above a quarter of the largest."""
    largest = float(sizes[:1].sum())
    return 4 * noise / largest if largest else 0.0


def _wide(matrix: Tensor) -> tuple[Tensor, bool]:
    """The matrix, or if it is tall its transpose, in float64."""
    tall = matrix.shape[0] > matrix.shape[1]
    return (matrix.T if tall else matrix).double(), tall


def _spectrum(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values [a], increasing, and left singular vectors [a, a] of [a, b], a <= b."""
    values, vectors = torch.linalg.eigh(wide @ wide.T)
    return values.clamp_(min=0).sqrt_(), vectors


def _inverse(sizes: Tensor, floor: float) -> Tensor:
    """1 / sigma [r], sigma increasing; 0 for sigma up to `floor` or NULL times the largest."""
    return torch.where(sizes > max(floor, NULL * float(sizes[-1:].sum())), 1 / sizes, 0)
