"""Hardware, memory and progress bars of passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tvb_mergekit.core.gram import block_budget
from tvb_mergekit.progress import Progress, Update, silent

CPU = torch.device("cpu")


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
