"""The device and the progress bars of passes."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace

import torch

from tvb_mergekit.errors import UserError
from tvb_mergekit.progress import Progress, Update, silent

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Engine:
    """Where passes compute, and what is called at the start of each."""

    device: torch.device = CPU
    progress: Progress = silent

    def under(self, update: Update) -> Engine:
        """An engine whose passes all move one bar."""
        return replace(self, progress=lambda *_: update)


def device_of(name: torch.device | str) -> torch.device:
    """The device of this name.

    Raises:
        UserError: the device is missing here, or lacks float64.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, dtype=torch.float64, device=device).item()
    except (RuntimeError, AssertionError, TypeError, ImportError) as error:
        reason = textwrap.shorten(str(error).partition("\n")[0].partition(". ")[0], 100)
        raise UserError(
            f"device `{name}` cannot be used here: {reason}; name another, such as cpu"
        ) from error
    return device
