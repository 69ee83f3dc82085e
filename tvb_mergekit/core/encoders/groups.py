"""Means of groups of similar tasks: few tasks in a basis, and the same total weight for each.

They are not in the paper. `balanced` bases are mixtures of all tasks, which lose least as T_hat.
Matrix merges keep more of bases in which few tasks meet.
"""

from __future__ import annotations

import numpy as np

from tvb_mergekit.core.gram import Array, Encoding, Gram
from tvb_mergekit.core.registry import Level, basis

STARTS = 20
CLEARLY = 1e-6  # relative: the last digits of a Gram matrix, which differ, choose nothing


@basis("groups", known=Level.SUM)
def groups(gram: Gram, num_bases: int) -> Encoding:
    """The means of M groups of T/M tasks, chosen by a search for the longest bases.

    The tasks are put in an order, and the order is cut into M runs of T/M. A task at a cut belongs
    to both groups in part if M does not divide T. Similar tasks have a long mean, so the search
    exchanges two tasks as long as sum_m ||B_m||^2 = Tr(W_e^T G W_e) grows, from several orders.
    W_e >= 0 has columns that sum to 1, rows that sum to M/T, and at most T + M - 1 entries.
    """
    runs = _runs(gram.size, num_bases)
    random = np.random.default_rng(0)
    best, longest = runs, -1.0
    for start in (runs, *(random.permutation(runs) for _ in range(STARTS))):
        found = _exchanged(gram.matrix, start)
        length = float(np.square(gram.root @ found).sum())
        if length > longest * (1 + CLEARLY):
            best, longest = found, length
    # The bases in the order of their first tasks: the order of equal groups does not count
    encoder = best[:, np.argsort((best > 0).argmax(axis=0), kind="stable")]
    return gram.encoding(encoder)


def _runs(tasks: int, num_bases: int) -> Array:
    """[T, M]: the share of each place, of T, in each run of T/M places."""
    ends = np.arange(num_bases + 1) * tasks / num_bases
    places = np.arange(tasks)[:, None]
    overlaps = np.minimum(places + 1, ends[1:]) - np.maximum(places, ends[:-1])
    return np.maximum(overlaps, 0.0) * num_bases / tasks


def _exchanged(gram: Array, encoder: Array) -> Array:
    """The encoder after exchanges of two tasks, until none makes the bases longer.

    The exchange of i and j adds d c^T to the bases, d = x_j - x_i and c = w_i - w_j, the rows of
    the encoder. Their squared norm grows by 2 d^T B c + |d|^2 |c|^2.
    """
    found, apart = encoder.copy(), _distances(gram)
    least = CLEARLY * float(np.trace(gram)) * float(encoder.max()) ** 2
    while True:
        crossed = gram @ found @ found.T
        inner = crossed + crossed.T - np.add.outer(crossed.diagonal(), crossed.diagonal())
        gains = 2 * inner + apart * _distances(found @ found.T)
        if (most := gains.max()) <= least:
            return found
        i, j = np.unravel_index((gains > most - least / 2).argmax(), gains.shape)
        found[[i, j]] = found[[j, i]]


def _distances(gram: Array) -> Array:
    return np.add.outer(gram.diagonal(), gram.diagonal()) - 2 * gram
