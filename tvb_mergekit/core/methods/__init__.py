"""The merge methods. A module here declares some; its import below registers them."""

from tvb_mergekit.core.methods import iso, sums, ties, tsvm, wudi
from tvb_mergekit.core.registry import METHODS

__all__ = ["METHODS", "iso", "sums", "ties", "tsvm", "wudi"]
