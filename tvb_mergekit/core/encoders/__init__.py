"""From the Gram matrix of T task vectors to the coefficients of M bases.

A module here declares a basis (autoencoder: two); its import below registers it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from tvb_mergekit.core.encoders import autoencoder, groups, none, pca, rand_select
from tvb_mergekit.core.encoders.balanced import balanced
from tvb_mergekit.core.encoders.linear import Encoding, Gram
from tvb_mergekit.core.registry import BASES, METHODS, Level
from tvb_mergekit.errors import UserError

# Bases whose sum is M/T times that of all tasks, whatever G is
EVEN = tuple(name for name, kind in BASES.items() if kind.known is Level.SUM)

__all__ = ["BASES", "EVEN", "Encoding", "Gram", "autoencoder", "balanced", "groups", "none", "pca"]
__all__ += ["encode", "encode_before", "known_before", "rand_select"]


def encode(gram: Tensor | Gram, settings: Any) -> Encoding:
    """The bases of these settings.

    Args:
        gram: G = T^T T [T, T] float64.

    Raises:
        UserError: `gram` is not a Gram matrix, M > T, or training diverged.
    """
    spectrum = gram if isinstance(gram, Gram) else Gram.of(gram)
    count = settings.bases_of(spectrum.size)
    if not 1 <= count <= spectrum.size:
        raise UserError(f"`num_bases` is {count}: expected 1 to {spectrum.size}, the tasks")
    encoding: Encoding = BASES[settings.basis](settings, spectrum, count)
    return encoding


def known_before(settings: Any) -> bool:
    """Whether a merge needs nothing of the bases that depends on the Gram matrix."""
    return BASES[settings.basis].known >= METHODS[settings.method].needs(settings)


def encode_before(tasks: int, settings: Any) -> Encoding | None:
    """Bases by which `settings` merge as by those of the true Gram matrix; None if it decides.

    The loss and the bounds mean nothing.
    """
    if not known_before(settings):
        return None
    gram = Gram.from_array(np.eye(tasks))
    if settings.basis not in EVEN:
        return encode(gram, settings)
    # Only the sum of the bases is known, and counts.
    return gram.encoding(settings.basis, np.full((tasks, settings.bases_of(tasks)), 1 / tasks))
