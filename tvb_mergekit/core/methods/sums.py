"""Addition over bases, and forgetting, which subtracts T_hat (paper Eq. 3).

Task arithmetic is of Ilharco et al., ICLR 2023, arXiv 2212.04089.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from torch import Tensor

from tvb_mergekit.core.registry import LARGEST, Key, Level, Text, merge_method

Strength = Annotated[float, Field(ge=0, le=LARGEST)]


@merge_method(
    "basis_ta",
    title="Task Arithmetic on Task Vector Bases",
    merges="sums",
    needs=lambda settings: Level.SUM,
    lambda_=0.4,
)
def addition(encoder: Tensor) -> dict[str, Tensor]:
    """theta_0 + lambda sum_m B_m (paper Eq. 3)."""
    return {"lambda": encoder.sum(1)}  # B = T W_e (Eq. 8), so the sum of the bases is T (W_e 1)


@merge_method(
    "basis_negate",
    title="Task Negation on Task Vector Bases",
    merges="sums",
    keys={
        "forget": Key("task names to forget, comma-separated", Text, (), required=True),
        "alpha": Key("strength of forgetting", Strength, varying=True, required=True),
    },
    needs=lambda settings: Level.RECONSTRUCTIONS,
    lambda_=0.0,
)
def negation(
    encoder: Tensor, *, reconstruction: Tensor, tasks: Sequence[str], forget: Sequence[str]
) -> dict[str, Tensor]:
    """theta_0 + lambda sum_m B_m - alpha sum_{j in forget} tau_hat_j (paper Eq. 3)."""
    columns = [list(tasks).index(name) for name in forget]
    # T_hat = T R (Eq. 10); alpha counts negative
    return {"lambda": encoder.sum(1), "alpha": reconstruction[:, columns].sum(1)}
