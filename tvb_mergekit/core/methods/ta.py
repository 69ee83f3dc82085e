"""Addition over bases, the paper's first merge."""

from __future__ import annotations

from torch import Tensor

from tvb_mergekit.core.registry import Level, merge_method


@merge_method(
    "basis_ta",
    title="Task Arithmetic on Task Vector Bases",
    paper="Ilharco et al., ICLR 2023, arXiv 2212.04089",
    merges="sums",
    needs=lambda settings: Level.SUM,
    lambda_=0.4,
)
def addition(encoder: Tensor) -> dict[str, Tensor]:
    """theta_0 + lambda sum_m B_m (paper Eq. 3)."""
    return {"lambda": encoder.sum(1)}  # B = T W_e (Eq. 8), so the sum of the bases is T (W_e 1)
