"""Balanced bases: convex columns in which every task has the same total weight.

They are not in the paper. Addition with one lambda depends on the row sums of W_e alone. With equal
row sums the sum of the M bases is M/T times the sum of all T task vectors, exactly, for any M.
"""

from __future__ import annotations

import numpy as np

from tvb_mergekit.core.encoders.linear import NULL, Array, Encoding, Gram, one_thread
from tvb_mergekit.core.encoders.spread import spread
from tvb_mergekit.errors import UserError


@one_thread()
def balanced(gram: Gram, num_bases: int, weights: Array | None = None) -> Encoding:
    """The balanced encoder of least loss, in closed form.

    Args:
        num_bases: M, from 1 to T.
        weights: [T], positive: the number of tasks that each task stands for; 1 by default.

    Returns:
        W_e >= 0 with columns that sum to 1 and W_e 1 = (M / sum w) w, the least-squares decoder,
        and `balanced_bound`, equal to the loss.
    """
    weights = np.ones(gram.size) if weights is None else np.asarray(weights, dtype=np.float64)
    if weights.shape != (gram.size,) or not (np.isfinite(weights) & (weights > 0)).all():
        raise UserError(f"task weights are {weights}: expected {gram.size} positive numbers")
    directions, bound = completion(gram, num_bases, weights)
    encoder = spread(weights / weights.sum(), directions, num_bases)
    return gram.encoding("balanced", encoder, balanced_bound=bound)


def completion(gram: Gram, num_bases: int, weights: Array) -> tuple[Array, float]:
    """The M-1 directions [T, M-1] that lose least together with w, and the loss of their span.

    They are the top eigenvectors of G' = G - G w w^T G / (w^T G w) in the complement of w: there
    null vectors of G', such as w, cannot replace a direction.
    """
    root, total = gram.root, gram.root @ weights
    length = np.linalg.norm(total)
    if length > NULL * np.linalg.norm(root) * np.linalg.norm(weights):  # else T w is zero
        unit = total / length
        root = root - np.outer(unit, unit @ root)  # F' with F'^T F' = G'
    complement = np.linalg.svd(weights[:, None])[0][:, 1:]
    _, scales, right = np.linalg.svd(root @ complement)
    loss = float(np.square(scales[num_bases - 1 :]).sum())
    return complement @ right.T[:, : num_bases - 1], loss
