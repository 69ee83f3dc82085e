"""The least loss over convex encoders, by a search over their row sums alone.

The loss depends on the span of W_e alone (variable projection eliminates W_d). The span of M
columns >= 0 holds x = W_e 1 >= 0. The best M-dimensional span that holds x adds the top M-1
eigenvectors of G deflated by x. If x > 0, convex columns spread around x reach this span
(`balanced`, with weights x). So the least loss for given row sums is a function of x alone,

    phi(x) = the sum of the eigenvalues of G - G x x^T G / (x^T G x) beyond the (M-1)-th,

and the least loss of all is its minimum over x > 0: T variables instead of T M. The minimum equals
the spectral bound if the top-M eigenspace of G holds a positive x (Theorem 3.4); a linear program
decides this. Otherwise phi falls towards an x with zeros, an infimum that no encoder attains, since
all columns would coincide. So the smallest entry of x is at least FLOOR times the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import scipy  # whose parts are imported when they are used

from tvb_mergekit.core.encoders.balanced import completion, spread_encoder
from tvb_mergekit.core.encoders.linear import NULL, Array, Gram, one_thread

FLOOR = 1e-4  # W_d grows as its inverse, the loss above the infimum in proportion to it
ATTAINED = 1e-11  # a relative gap to the bound that ends the search
ITERATIONS = 1000
RANDOM_STARTS = 20


@one_thread()
def least_loss(gram: Gram, num_bases: int, seed: int = 0) -> Array:
    """W_e [T, M] float64 of the least loss, columns >= 0 that sum to 1.

    Sorts the tasks first, so that the recipe's order does not matter.
    """
    if num_bases == gram.size:
        return np.eye(gram.size)
    order = _canonical_order(gram.matrix)
    ordered = Gram.from_array(gram.matrix[np.ix_(order, order)])
    weights = np.empty(gram.size)
    weights[order] = _best_row_sums(ordered, num_bases, np.random.default_rng(seed))
    return spread_encoder(gram, num_bases, weights)[0]


def _canonical_order(matrix: Array) -> list[int]:
    """Tasks by length, then by exactly rounded sums over their row, equal for any permutation."""
    keys = [
        (row[task], *(math.fsum(x**power for x in row) for power in (1, 2, 3)))
        for task, row in enumerate(matrix.tolist())
    ]
    return sorted(range(len(matrix)), key=keys.__getitem__, reverse=True)


def _best_row_sums(gram: Gram, num_bases: int, random: np.random.Generator) -> Array:
    """x [T] with the least phi, entries in [FLOOR, 1]; the most uniform one if phi is the bound."""
    equal = np.ones(gram.size)
    bound = gram.bound(num_bases)
    if completion(gram, num_bases, equal)[1] <= bound * (1 + ATTAINED) + 1e-20 * gram.total:
        return equal
    uniform = most_uniform_vector(gram.vectors[:, :num_bases])
    if uniform.min() >= FLOOR * uniform.max() > 0:
        return uniform
    scale = max(bound, 1e-12 * gram.total)
    objective, limits = _objective(gram, num_bases, scale), scipy.optimize.Bounds(FLOOR, 1.0)
    keys = {"method": "L-BFGS-B", "options": {"maxiter": ITERATIONS, "ftol": 0.0, "gtol": 1e-10}}
    best_value, best = math.inf, uniform
    starts = [equal, uniform][: 2 if uniform.max() > 0 else 1]  # near the top eigenvectors
    starts += [np.abs(gram.vectors[:, 0]), *random.uniform(size=(RANDOM_STARTS, gram.size))]
    for start in starts:
        start = np.clip(start / start.max(), FLOOR, 1.0)
        result = scipy.optimize.minimize(objective, start, jac=True, bounds=limits, **keys)
        if result.fun < best_value * (1 - 1e-12):
            best_value, best = float(result.fun), result.x
        if best_value <= bound / scale * (1 + ATTAINED):
            break
    return best


def most_uniform_vector(subspace: Array) -> Array:
    """x [T] in span(V), V [T, M], with sum 1 and the largest smallest entry; positive if any is.

    One positive x is enough for Theorem 3.4's condition: x plus small steps within the span gives M
    independent vectors. A linear program: maximize t such that V c >= t and 1^T V c = 1.
    """
    size, count = subspace.shape
    sums = subspace.sum(axis=0)
    result = scipy.optimize.linprog(
        c=np.r_[np.zeros(count), -1.0],
        A_ub=np.c_[-subspace, np.ones(size)],
        b_ub=np.zeros(size),
        A_eq=np.r_[sums, 0.0][None, :],
        b_eq=[1.0],
        bounds=(None, None),
        method="highs",
    )
    if result.x is None:  # infeasible only if every vector of the span sums to 0
        return np.zeros(size)
    vector: Array = subspace @ result.x[:count]
    return vector


def _objective(gram: Gram, num_bases: int, scale: float) -> Callable[[Array], tuple[float, Array]]:
    """phi / scale and its gradient, in the coordinates of F where F F^T is diagonal.

    With u = F x / |F x|, K = F F^T and N the projector on the complement of u and the M-1
    directions, phi = Tr(N K) and its gradient is -2 F^T N K u / |F x|.
    """
    root, spectrum = gram.root / math.sqrt(scale), gram.values / scale

    def evaluate(row_sums: Array) -> tuple[float, Array]:
        image = root @ row_sums
        length = np.linalg.norm(image)
        if length <= NULL * np.linalg.norm(root) * np.linalg.norm(row_sums):
            return float(spectrum[num_bases - 1 :].sum()), np.zeros_like(row_sums)
        unit = image / length
        pulled = spectrum * unit
        along = unit @ pulled
        deflated = np.diag(spectrum) - np.outer(unit, pulled) - np.outer(pulled, unit)
        deflated += along * np.outer(unit, unit)
        values, vectors = np.linalg.eigh(deflated)
        kept = vectors[:, len(values) - (num_bases - 1) :]
        left = pulled - unit * along - kept @ (kept.T @ pulled)
        rest = values[: len(values) - (num_bases - 1)]
        return float(np.maximum(rest, 0.0).sum()), -2.0 * (root.T @ left) / length

    return evaluate
