"""Some of the tasks themselves, the paper's seeded baseline."""

from __future__ import annotations

import numpy as np
import torch

from tvb_mergekit.core.encoders.linear import Encoding, Gram
from tvb_mergekit.core.registry import Level, basis


@basis("rand_select", title="M task vectors drawn at random", known=Level.BASES)
def rand_select(gram: Gram, num_bases: int, *, seed: int) -> Encoding:
    """M distinct one-hot columns in the order of the tasks."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(gram.size, generator=generator)[:num_bases].sort().values.numpy()
    return gram.encoding("rand_select", np.eye(gram.size)[:, chosen])
