"""Algorithm 1 of the paper: an endless stream of tasks within a budget of M vectors.

Below the budget a new task vector joins the bases. At the budget the M bases B are compressed to
M - 1, U = B W_e, and the new task vector joins U. The cost of a step depends on M alone: a step
reads the M bases and the new model, never a previous model.

A step makes the composed encoder E [T, M], B = T E, to [[E W_e, 0], [0, 1]], whose columns stay
convex, and the composed decoder D [M, T], tau_hat = B D, to [[W_d D, 0], [0, 1]]. Errors follow
from the Gram matrix of all tasks. It is known until a task joins compressed bases.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tvb_mergekit.core.basis import encode
from tvb_mergekit.core.encoders.balanced import balanced
from tvb_mergekit.core.gram import Gram
from tvb_mergekit.core.settings import Settings

COMPRESSIONS = ("ae", "balanced")


def add_task(
    encoder: Tensor,
    decoder: Tensor,
    weights: list[float] | None,
    products: Tensor,
    budget: int,
    how: str,
    settings: Settings,
) -> tuple[Tensor, Tensor, Tensor, list[float] | None]:
    """Add a task to T tasks in M bases, and compress the bases first if they have no room.

    Args:
        encoder, decoder: E [T, M] and D [M, T], float64 as all.
        weights: w [M] with sum_m w_m B_m = the sum of all task vectors, if the bases have them.
        products: [M + 1, M + 1], the Gram matrix of the M bases and the new task vector.
        budget: the most bases after the round, at least 2.
        how: `ae`, by `settings`, as in the paper. Or `balanced`, if there are weights:
            sum_m w_m B_m stays the sum of all tasks.

    Returns:
        [M + 1, M'] from the M previous bases and the new task vector to the new bases; then E, D
        and w of T + 1 tasks.
    """
    products, count = (products + products.T) / 2, len(products) - 1
    inner = torch.eye(count, dtype=torch.float64)
    if count >= budget:  # U = B W_e
        old, size = products[:count, :count], budget - 1
        if how == "balanced":
            assert weights is not None
            own = torch.tensor(weights, dtype=torch.float64)
            encoding = balanced(Gram.of(old), size, own.numpy())
            weights = [float(own.sum()) / size] * size
        else:
            encoding, weights = encode(old, settings.but(num_bases=size)), None
        inner = encoding.encoder
        encoder, decoder = encoder @ inner, encoding.decoder @ decoder
    weights = weights and [*weights, 1.0]
    one = torch.ones(1, 1, dtype=torch.float64)  # [[E W_e, 0], [0, 1]], and likewise
    matrix, encoder, decoder = (torch.block_diag(e, one) for e in (inner, encoder, decoder))
    return matrix, encoder, decoder, weights
