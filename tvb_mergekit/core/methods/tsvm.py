"""TSV-M: the first singular vectors of each basis, made orthonormal together."""

from __future__ import annotations

from torch import Tensor

from tvb_mergekit.core.matrices import Noise, beside, blur, polar, top_triples
from tvb_mergekit.core.registry import merge_method


@merge_method(
    "basis_tsvm",
    title="Singular Vectors (TSV-M) on Task Vector Bases",
    paper="Gargiulo et al., CVPR 2025, arXiv 2412.00081",
)
def singular_vectors(bases: Tensor, *, noise: Noise = None, rank: int | None = None) -> Tensor:
    """D = P_U S P_V^T of the bases' first singular triples, r // M of each; 0 if r < M.

    P_U and P_V are the polar factors of all U and of all V, side by side.
    """
    count, most = len(bases), min(bases.shape[1:])
    noise, each = noise or [0.0] * count, min((rank or most) // count, most)
    pairs = list(zip(bases, noise, strict=True))
    every = beside(bases, (top_triples(base, each, noisy) for base, noisy in pairs), count * each)
    sizes = every.sizes.unflatten(0, (count, each))
    turned = max(blur(own, noisy) for own, (_, noisy) in zip(sizes, pairs, strict=True))
    left = polar(every.left, turned)[0]
    return left.mul_(every.sizes.float()) @ polar(every.right, turned)[0].T
