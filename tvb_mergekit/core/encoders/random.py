"""A seeded random baseline: some of the tasks themselves."""

from __future__ import annotations

import numpy as np
import torch

from tvb_mergekit.core.encoders.linear import Encoding, Gram


def rand_select(gram: Gram, num_bases: int, seed: int) -> Encoding:
    """M distinct tasks as bases: one-hot columns in the order of the tasks."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(gram.size, generator=generator)[:num_bases].sort().values.numpy()
    return gram.encoding("rand_select", np.eye(gram.size)[:, chosen])
