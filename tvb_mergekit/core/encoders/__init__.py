"""From the Gram matrix of T task vectors to the coefficients of M bases."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tvb_mergekit.core.encoders.autoencoder import autoencoder
from tvb_mergekit.core.encoders.balanced import balanced
from tvb_mergekit.core.encoders.groups import groups
from tvb_mergekit.core.encoders.linear import Encoding, Gram, tensor
from tvb_mergekit.core.encoders.pca import pca
from tvb_mergekit.core.encoders.random import rand_select
from tvb_mergekit.errors import UserError
from tvb_mergekit.settings import Settings

EVEN = ("balanced", "groups")  # bases whose sum is M/T times that of all tasks, whatever G is

__all__ = [
    "EVEN",
    "Encoding",
    "Gram",
    "balanced",
    "encode",
    "encode_before",
    "known_before",
    "sum_alone",
]


def encode(gram: Tensor, settings: Settings) -> Encoding:
    """The bases of these settings.

    Args:
        gram: G = T^T T [T, T] float64.
        settings: basis, size and seed.

    Raises:
        UserError: `gram` is not a Gram matrix, M > T, or training diverged.
    """
    spectrum = Gram.of(gram)
    count = _num_bases(spectrum.size, settings)
    match settings.basis:
        case "ae" | "linear_ae":
            return autoencoder(spectrum, count, settings)
        case "balanced":
            return balanced(spectrum, count)
        case "groups":
            return groups(spectrum, count)
        case "pca":
            return pca(spectrum, count)
        case "rand_select":
            return rand_select(spectrum, count, settings.seed)
        case "none":
            identity = np.eye(spectrum.size)
            return spectrum.encoding("none", identity, identity)


def sum_alone(settings: Settings) -> bool:
    """Whether the method needs the sum of the bases only: addition and Iso-C."""
    return settings.method == "basis_ta" or (
        settings.method == "basis_iso" and settings.common == 1
    )


def known_before(settings: Settings) -> bool:
    """Whether a merge needs nothing of the bases that depends on the Gram matrix.

    The encoder of `none` and of drawn tasks does not, nor does the sum of EVEN bases. The
    decoder, which negation needs, is known for `none` only.
    """
    known = {"none": 3, "rand_select": 2, **dict.fromkeys(EVEN, 1)}.get(settings.basis, 0)
    return known >= (1 if sum_alone(settings) else 3 if settings.method == "basis_negate" else 2)


def encode_before(tasks: int, settings: Settings) -> Encoding | None:
    """Bases by which `settings` merge as by those of the true Gram matrix; None if it decides.

    The loss and the bounds mean nothing.
    """
    if not known_before(settings):
        return None
    gram = Gram.from_array(np.eye(tasks))
    if settings.basis not in EVEN:
        return encode(tensor(gram.matrix), settings)
    # Only the sum of the bases is known, and counts.
    count = _num_bases(tasks, settings)
    return gram.encoding(settings.basis, np.full((tasks, count), 1 / tasks))


def _num_bases(tasks: int, settings: Settings) -> int:
    """M, at most T."""
    count = settings.bases_of(tasks)
    if not 1 <= count <= tasks:
        raise UserError(f"`num_bases` is {count}: expected 1 to {tasks}, the tasks")
    return count
