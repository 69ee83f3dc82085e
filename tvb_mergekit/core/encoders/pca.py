"""Principal components of the task vectors, the paper's baseline (section 3.1)."""

from __future__ import annotations

import numpy as np

from tvb_mergekit.core.encoders.linear import Array, Encoding, Gram
from tvb_mergekit.core.registry import basis

NULL = 1e-12  # of the task vectors' length


@basis("pca", title="principal components and the mean", paper="section 3.1")
def pca(gram: Gram, num_bases: int) -> Encoding:
    """W_e = J V_M and W_d = V_M^T, so that B = T J V_M = U_M S_M, and T_hat = B W_d + mu 1^T.

    V_M [T, M] holds the top eigenvectors of J G J, J = I - 11^T/T: the right singular vectors of
    F J. The mean makes `reconstruction` J V_M V_M^T + 11^T/T. F J has at most T - 1 directions. A
    basis without one is 0, and not the rounding of J v, which WUDI would make long.
    """
    size = gram.size
    centering = np.eye(size) - 1.0 / size
    _, scales, right = np.linalg.svd(gram.root @ centering)
    vectors = _signed(right.T[:, :num_bases])
    encoder = centering @ vectors
    encoder[:, scales[:num_bases] <= NULL * np.linalg.norm(gram.root)] = 0.0
    return gram.encoding("pca", encoder, vectors.T, reconstruction=encoder @ vectors.T + 1.0 / size)


def _signed(vectors: Array) -> Array:
    """Each column with its largest entry positive; among near ties the first decides."""
    sizes = np.abs(vectors)
    first = np.argmax(sizes >= (1 - 1e-9) * sizes.max(axis=0), axis=0)
    signed: Array = vectors * np.where(vectors[first, np.arange(vectors.shape[1])] < 0, -1.0, 1.0)
    return signed
