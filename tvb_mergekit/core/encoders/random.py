"""Seeded random baselines: some of the tasks themselves, or a random subspace."""

from __future__ import annotations

import numpy as np
import scipy  # whose parts are imported when they are used
import torch
from torch import Tensor

from tvb_mergekit.core.encoders.linear import Encoding, Gram, tensor
from tvb_mergekit.errors import UserError


def rand_select(gram: Gram, num_bases: int, seed: int) -> Encoding:
    """M distinct tasks as bases: one-hot columns in the order of the tasks."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(gram.size, generator=generator)[:num_bases].sort().values.numpy()
    return gram.encoding("rand_select", np.eye(gram.size)[:, chosen])


def projection(gram: Tensor, sketch_gram: Tensor, sketch_tasks: Tensor) -> Encoding:
    """The projection on a random subspace, without a complete Omega.

    With Omega^T Omega = L L^T (Cholesky-QR) the bases are Q = Omega L^-T, orthonormal.

    Args:
        gram: G [T, T] float64.
        sketch_gram: Omega^T Omega [M, M] float64, Omega the d x M Gaussian.
        sketch_tasks: Omega^T T [M, T] float64.

    Returns:
        decoder Q^T T, mixing L^-T with B = Omega mixing; no encoder and no reconstruction.

    Raises:
        UserError: the columns of Omega are dependent, as with fewer parameters than bases.
    """
    spectrum = Gram.of(gram)
    products = sketch_tasks.detach().cpu().double().numpy()
    count = len(products)
    try:
        lower = np.linalg.cholesky(sketch_gram.detach().cpu().double().numpy())
    except np.linalg.LinAlgError as error:
        raise UserError(
            f"rand_proj finds no {count} independent directions: take fewer bases than parameters"
        ) from error
    decoder = scipy.linalg.solve_triangular(lower, products, lower=True)
    mixing = scipy.linalg.solve_triangular(lower, np.eye(count), lower=True).T
    trace = float(np.trace(spectrum.matrix))
    return Encoding(
        basis="rand_proj",
        encoder=None,
        decoder=tensor(decoder),
        reconstruction=None,
        eigenvalues=tensor(spectrum.values),
        loss=max(0.0, trace - float(np.square(decoder).sum())),
        spectral_bound=spectrum.bound(count),
        mixing=tensor(mixing),
    )
