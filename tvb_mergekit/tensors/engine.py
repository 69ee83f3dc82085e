"""Hardware, memory and progress bars of passes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tvb_mergekit.errors import UserError
from tvb_mergekit.progress import Progress, Update, silent

CPU = torch.device("cpu")
BUDGET_VARIABLE = "TVB_MERGEKIT_BLOCK_MB"
DEFAULT_BUDGET = 256 * 2**20  # bytes


def block_budget() -> int:
    """Bytes for the working buffers of one device: TVB_MERGEKIT_BLOCK_MB, or 256 MB.

    Raises:
        UserError: the variable is not a number of at least 1.
    """
    text = os.environ.get(BUDGET_VARIABLE, "")
    try:
        budget = float(text) * 2**20 if text else DEFAULT_BUDGET
    except ValueError:
        budget = 0
    if not 2**20 <= budget < float("inf"):
        raise UserError(f"{BUDGET_VARIABLE} is `{text}`; expected megabytes, 1 or more")
    return int(budget)


def host_memory(device: torch.device, *shape: int) -> Tensor:
    """Bytes on the CPU for copies to and from `device`."""
    pinned = device.type == "cuda"  # then the copies are fast
    return torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=pinned)


@dataclass(frozen=True)
class Engine:
    """The resources of every pass.

    Attributes:
        devices: All of one kind. The first computes matrices.
        memory: Bytes that a pass may allocate. None: TVB_MERGEKIT_BLOCK_MB for each device.
        progress: Called at the start of each pass.
    """

    devices: Sequence[torch.device] = (CPU,)
    memory: int | None = None
    progress: Progress = silent

    @property
    def budget(self) -> int:
        """Bytes that a pass may allocate."""
        return len(self.devices) * block_budget() if self.memory is None else self.memory

    def under(self, update: Update) -> Engine:
        """An engine whose passes all move one bar."""
        return replace(self, progress=lambda *_: update)
