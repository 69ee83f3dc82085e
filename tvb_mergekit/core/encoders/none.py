"""All task vectors as bases."""

from __future__ import annotations

import numpy as np

from tvb_mergekit.core.encoders.linear import Encoding, Gram
from tvb_mergekit.core.registry import Level, basis


@basis("none", title="all T task vectors (M = T)", known=Level.RECONSTRUCTIONS, sized=False)
def none(gram: Gram, num_bases: int) -> Encoding:
    """W_e = W_d = I."""
    identity = np.eye(num_bases)
    return gram.encoding("none", identity, identity)
