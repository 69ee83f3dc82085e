"""Balanced bases: convex columns in which every task has the same total weight.

They are not in the paper. Addition with one lambda depends on the row sums of W_e alone. With equal
row sums the sum of the M bases is M/T times the sum of all T task vectors, exactly, for any M.
"""

from __future__ import annotations

import numpy as np
import scipy  # whose parts are imported when they are used

from tvb_mergekit.core.gram import NULL, Array, Encoding, Gram
from tvb_mergekit.core.registry import Level, basis

REFINEMENTS = 40
RANDOM_ROTATIONS = 3
OVERSHOOT = 1.25
CLEARLY = 1e-6


@basis("balanced", known=Level.SUM)
def balanced(gram: Gram, num_bases: int, weights: Array | None = None) -> Encoding:
    """The balanced encoder of least loss, in closed form: W_e >= 0, and its columns sum to 1.

    W_e 1 = (M / sum w) w for w [T], the number of tasks that each task stands for, 1 by default.
    The loss is its bound: the eigenvalues of G' beyond the (M-1)-th.
    """
    weights = np.ones(gram.size) if weights is None else weights
    directions, _ = completion(gram, num_bases, weights)
    encoder = spread(weights / weights.sum(), directions, num_bases)
    return gram.encoding(encoder)


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


def choices(gram: Gram) -> list[dict[str, float]]:
    """For each M = 1..T the energy that M bases retain at best, of any encoder and balanced."""
    found, total = [], float(gram.values.sum()) or 1.0  # without any energy all of it is retained
    for count in range(1, gram.size + 1):
        best = 1.0 - float(gram.values[count:].sum()) / total  # Eq. 6
        even = 1.0 - completion(gram, count, np.ones(gram.size))[1] / total
        found.append({"num_bases": count, "retained_energy": best, "balanced_energy": even})
    return found


def spread(centre: Array, directions: Array, num_columns: int) -> Array:
    """W_e [T, M] = centre 1^T + eps V Q R: columns >= 0 that sum to 1 and average to the centre.

    V [T, M-1] is an orthonormal basis of the directions' span, shifted along the centre so that
    its columns sum to 0. R holds the vertices of a regular simplex. Every rotation Q gives the
    same span; the search maximizes eps, the distance of the columns, within W_e >= 0.
    V is continuous in the directions, and a rotation replaces only a clearly worse one. So the
    last digits of a Gram matrix, which differ between processors, choose nothing.

    The centre [T] is positive and sums to 1. The directions [T, K >= M - 1] have rank M - 1 modulo
    the centre.
    """
    count = num_columns - 1
    if count == 0:
        return centre[:, None].copy()
    shifted = directions - np.outer(centre, directions.sum(axis=0))
    left, _, right = np.linalg.svd(shifted, full_matrices=False)
    frame = left @ right if shifted.shape[1] == count else left[:, :count]  # nearest to `shifted`
    frame *= np.sign(frame[np.abs(frame).argmax(axis=0), np.arange(count)])
    frame -= np.outer(centre, frame.sum(axis=0))  # rounding left small sums
    vertices = scipy.linalg.helmert(num_columns) * np.sqrt(num_columns / count)  # [M-1, M]

    best_step, best = 0.0, np.zeros((len(centre), num_columns))
    for rotation in _rotations(frame, centre, vertices):
        for _ in range(REFINEMENTS):
            offsets = frame @ rotation @ vertices
            step = 1.0 / np.max(-offsets / centre[:, None])
            if step > best_step * (1 + CLEARLY):
                best_step, best = step, offsets
            # alternate: raise the entries to the limits of a larger step, rotate back
            wanted = np.maximum(offsets, -centre[:, None] / (OVERSHOOT * step))
            rotation = _polar(frame.T @ wanted @ vertices.T)
    return np.maximum(centre[:, None] + best_step * best, 0.0)


def _rotations(frame: Array, centre: Array, vertices: Array) -> list[Array]:
    """Starts: the tasks that differ most as corners, the identity, seeded rotations."""
    count = frame.shape[1]
    if count == 1:
        return [np.eye(1), -np.eye(1)]
    corners = scipy.linalg.qr((frame / np.sqrt(centre)[:, None]).T, mode="r", pivoting=True)[1]
    one_hot = np.zeros((len(centre), count + 1))
    picked = corners[: count + 1]
    one_hot[picked, np.arange(len(picked))] = 1.0
    random = np.random.default_rng(0)
    return [
        _polar(frame.T @ one_hot @ vertices.T),
        np.eye(count),
        *(_polar(random.standard_normal((count, count))) for _ in range(RANDOM_ROTATIONS)),
    ]


def _polar(matrix: Array) -> Array:
    """The orthogonal matrix nearest to `matrix`."""
    left, _, right = np.linalg.svd(matrix)
    return left @ right
