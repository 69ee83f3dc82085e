"""The paper's baselines (section 3.1): principal components, random tasks, all tasks."""

from __future__ import annotations

import numpy as np
import torch

from tvb_mergekit.core.gram import Array, Encoding, Gram
from tvb_mergekit.core.registry import Level, basis

NULL = 1e-12  # of the task vectors' length


@basis("pca")
def pca(gram: Gram, num_bases: int) -> Encoding:
    """W_e = J V_M and W_d = V_M^T, so that B = T J V_M = U_M S_M, and T_hat = B W_d + mu 1^T.

    V_M [T, M] holds the top eigenvectors of J G J, J = I - 11^T/T: the right singular vectors of
    F J. The mean makes `reconstruction` J V_M V_M^T + 11^T/T. F J has at most T - 1 directions. A
    basis without one is 0, and not the rounding of J v, which WUDI would make long.
    """
    centering = np.eye(gram.size) - 1 / gram.size
    _, scales, right = np.linalg.svd(gram.root @ centering)
    vectors = _signed(right.T[:, :num_bases])
    encoder = centering @ vectors
    encoder[:, scales[:num_bases] <= NULL * np.linalg.norm(gram.root)] = 0.0
    return gram.encoding(encoder, vectors.T, mean=1 / gram.size)


def _signed(vectors: Array) -> Array:
    """Each column with its largest entry positive; among near ties the first decides."""
    sizes = np.abs(vectors)
    first = np.argmax(sizes >= (1 - 1e-9) * sizes.max(axis=0), axis=0)
    return vectors * np.where(vectors[first, np.arange(vectors.shape[1])] < 0, -1.0, 1.0)


@basis("rand_select", known=Level.BASES)
def rand_select(gram: Gram, num_bases: int, *, seed: int) -> Encoding:
    """M distinct one-hot columns in the order of the tasks."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(gram.size, generator=generator)[:num_bases].sort().values.numpy()
    return gram.encoding(np.eye(gram.size)[:, chosen])


@basis("none", known=Level.RECONSTRUCTIONS, sized=False)
def none(gram: Gram, num_bases: int) -> Encoding:
    """All T task vectors (M = T): W_e = W_d = I."""
    return gram.encoding(np.eye(num_bases), np.eye(num_bases))
