"""The merge methods. A module here declares one; its import below registers it."""

from tvb_mergekit.core.methods import iso, negate, ta, ties, tsvm, wudi
from tvb_mergekit.core.registry import METHODS

__all__ = ["METHODS", "iso", "negate", "ta", "ties", "tsvm", "wudi"]
