"""TSV-M: the first singular vectors of each basis, made orthonormal together."""

from __future__ import annotations

from torch import Tensor

from tvb_mergekit.core.matrices import Noise, Triples, polar, top_triples
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
    noise, share = noise or [0.0] * count, min((rank or most) // count, most)
    every, blur = Triples.empty(bases, count * share), 0.0
    for number, base in enumerate(bases):
        own = top_triples(base, share, noise[number])
        every.put(number * share, own)
        blur = max(blur, own.blur(noise[number]))
    left = polar(every.left, blur)[0]
    return left.mul_(every.sizes.float()) @ polar(every.right, blur)[0].T
