"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_file(target: Path, data: bytes) -> None:
    """Write a new file next to `target`, then rename it."""
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as folder:
        path = Path(folder, target.name)
        path.write_bytes(data)
        os.replace(path, target)
