"""From the Gram matrix of T task vectors to the coefficients of M bases.

`encode` does it for every basis but rand_proj, which needs a sketch of the task vectors besides
the Gram matrix: `projection`.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tvb_mergekit.encoders.autoencoder import autoencoder
from tvb_mergekit.encoders.balanced import balanced
from tvb_mergekit.encoders.linear import Encoding, Gram
from tvb_mergekit.encoders.pca import pca
from tvb_mergekit.encoders.random import projection, rand_select
from tvb_mergekit.errors import UserError
from tvb_mergekit.recipe import DEFAULT_RATIO, Settings, ratio_to_bases

__all__ = ["Encoding", "Gram", "balanced", "encode", "num_bases", "projection"]


def encode(gram: Tensor, settings: Settings) -> Encoding:
    """The bases that `settings` asks for.

    Args:
        gram: G = T^T T [T, T] float64.
        settings: basis, size, solver and seed.

    Raises:
        UserError: `gram` is no Gram matrix, M > T, or training diverged.
    """
    spectrum = Gram.of(gram)
    count = _num_bases(spectrum.values.tolist(), settings)
    match settings.basis:
        case "ae" | "linear_ae":
            return autoencoder(spectrum, count, settings)
        case "balanced":
            return balanced(spectrum, count)
        case "pca":
            return pca(spectrum, count)
        case "rand_select":
            return rand_select(spectrum, count, settings.seed)
        case "none":
            identity = np.eye(spectrum.size)
            return spectrum.encoding("none", identity, identity)
    raise UserError(f"basis {settings.basis} needs a sketch of the task vectors: use `projection`")


def num_bases(eigenvalues: Tensor, settings: Settings) -> int:
    """M from `num_bases`, `basis_ratio` or `energy`, given the T eigenvalues of G, descending.

    Raises:
        UserError: M > T.
    """
    return _num_bases(eigenvalues.tolist(), settings)


def _num_bases(eigenvalues: list[float], settings: Settings) -> int:
    size = len(eigenvalues)
    if settings.basis == "none":
        return size
    if settings.num_bases is not None:
        if not 1 <= settings.num_bases <= size:
            raise UserError(f"`num_bases` is {settings.num_bases}: expected 1 to {size}, the tasks")
        return settings.num_bases
    if settings.energy is not None:
        held = np.cumsum(eigenvalues)
        # relative slack, so that a share met up to rounding is met
        enough = held >= settings.energy * held[-1] * (1 - 1e-12)
        return int(np.argmax(enough)) + 1
    ratio = DEFAULT_RATIO if settings.basis_ratio is None else settings.basis_ratio
    return ratio_to_bases(ratio, size)
