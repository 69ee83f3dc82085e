"""Isotropic merging: Iso-C and Iso-CTS (Marczak et al., ICML 2025, arXiv 2502.04959)."""

from __future__ import annotations

from torch import Tensor

from tvb_mergekit.core.matrices import NULL, Noise, beside, blur, polar, top_triples
from tvb_mergekit.core.registry import Fraction, Key, Level, merge_method


@merge_method(
    "basis_iso",
    title="Isotropic Merging on Task Vector Bases",
    keys={"common": Key("share of the sum's directions", Fraction, 1.0)},
    # Iso-C sees the sum of the bases alone
    needs=lambda settings: Level.SUM if settings.common == 1 else Level.BASES,
)
def isotropic(
    bases: Tensor, *, common: float = 1.0, noise: Noise = None, rank: int | None = None
) -> Tensor:
    """D with one singular value for all its directions: those of the sum, or of each B_m as well.

    `common` below 1 gives Iso-CTS. It joins the first triples of the sum with equally many of each
    B_m minus its projection onto the sum's left space.

    Args:
        common: the sum's share of the r directions, 0 to 1. The B_m share the rest equally, rounded
            as in the authors' code, but never more than r in all (their code may exceed r near M).
    """
    count, most = len(bases), min(bases.shape[1:])
    rank, noise, total = rank or most, noise or [0.0] * count, bases.sum(0)
    each = min(round((rank - int(rank * common)) / count), rank // count)  # of each B_m alone
    if not each:
        # D = mean(S) U V^T for U S V^T = sum_m B_m, the mean over all r singular values
        direction, sizes = polar(total, sum(noise))
        return direction.mul_(sizes.sum() / rank)
    top, each = min(rank - count * each, most), min(each, most)  # others are zeros
    every = [top_triples(total, top, sum(noise))]
    shared, sizes, _ = every[0]
    floor = NULL * float(sizes[:1].sum())
    for base, noisy in zip(bases, noise, strict=True):
        own = base.double()
        own = own - shared @ (shared.T @ own)  # B_m - U U^T B_m
        # whose small singular values are compared with those of the sum
        every.append(top_triples(own, each, max(floor, noisy)))
    # D = mean(S) P_U P_V^T
    left, sizes, right = beside(every, blur(sizes, sum(noise)))
    return left.mul_(sizes.sum() / rank) @ right.T
