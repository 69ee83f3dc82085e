"""The bases. A module here declares some; its import below registers them."""

from tvb_mergekit.core.encoders import autoencoder, baselines, groups
from tvb_mergekit.core.encoders.balanced import balanced
from tvb_mergekit.core.encoders.linear import Encoding, Gram
from tvb_mergekit.core.registry import BASES, Level

# Bases whose sum is M/T times that of all tasks, whatever G is
EVEN = tuple(name for name, kind in BASES.items() if kind.known is Level.SUM)

__all__ = ["BASES", "EVEN", "Encoding", "Gram", "autoencoder", "balanced", "baselines", "groups"]
