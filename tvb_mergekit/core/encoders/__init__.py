"""The bases. A module here declares some; its import below registers them."""

from tvb_mergekit.core.encoders import autoencoder, baselines, groups
from tvb_mergekit.core.encoders.balanced import balanced
from tvb_mergekit.core.registry import BASES

__all__ = ["BASES", "autoencoder", "balanced", "baselines", "groups"]
