"""TSV-M (Gargiulo et al., CVPR 2025, arXiv 2412.00081): singular vectors, orthonormal together."""

from __future__ import annotations

from torch import Tensor

from tvb_mergekit.core.matrices import Noise, beside, blur, top_triples
from tvb_mergekit.core.registry import merge_method


@merge_method("basis_tsvm", title="Singular Vectors (TSV-M) on Task Vector Bases")
def singular_vectors(bases: Tensor, *, noise: Noise = None, rank: int | None = None) -> Tensor:
    """D = P_U S P_V^T of the bases' first singular triples, r // M of each; 0 if r < M.

    P_U and P_V are the polar factors of all U and of all V, side by side.
    """
    count, most = len(bases), min(bases.shape[1:])
    noise, each = noise or [0.0] * count, min((rank or most) // count, most)
    every = [top_triples(*own) for own in zip(bases, [each] * count, noise, strict=True)]
    turned = max(blur(sizes, noisy) for (_, sizes, _), noisy in zip(every, noise, strict=True))
    left, sizes, right = beside(every, turned)
    return left.mul_(sizes.float()) @ right.T
