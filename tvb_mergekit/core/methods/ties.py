"""TIES over bases: Trim, Elect, Merge. `core.trim` finds the thresholds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor
from torch.nn.functional import hardshrink

from tvb_mergekit.core.registry import Key, Share, merge_method


@merge_method(
    "basis_ties",
    title="TIES on Task Vector Bases",
    paper="Yadav et al., NeurIPS 2023, arXiv 2306.01708",
    merges="entries",
    keys={
        "merge_func": Key("of entries of one sign", str, "sum", choices=("sum", "mean", "max")),
        "density": Share("share of a basis to keep", default=0.2, varying=True),
    },
    lambda_=0.4,
)
def trim_elect_merge(bases: Tensor, *, thresholds: Sequence[float], merge_func: str) -> Tensor:
    """TrimElectMerge(B_1 ... B_M) [n] of the bases [M, n], which it overwrites."""
    # Trim: the largest entries of each basis stay
    for row, threshold in zip(bases, thresholds, strict=True):
        # hardshrink drops |x| <= its limit, Trim |x| < the threshold: the float32 just below.
        limit = max(0.0, float(np.nextafter(np.float32(threshold), np.float32(-1))))
        row.copy_(hardshrink(row, limit))
    # Elect: the sign that has the larger sum
    sign = bases.sum(0).sign_()
    # Merge: what agrees with it, as magnitudes; 0 for the other sign
    agreeing = bases.mul_(sign).clamp_(min=0)
    if merge_func == "max":
        return agreeing.amax(0).mul_(sign)
    total = agreeing.sum(0)
    if merge_func == "mean":
        total /= agreeing.sign_().sum(0).clamp_(min=1)
    return total.mul_(sign)
