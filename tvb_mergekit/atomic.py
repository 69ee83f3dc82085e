"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """A path for a file that replaces `target` at the end, and is deleted after an error."""
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as folder:
        path = Path(folder) / target.name
        yield path
        os.replace(path, target)


def write_file(target: Path, data: bytes) -> None:
    """Write next to `target`, then rename."""
    with beside(target) as path:
        path.write_bytes(data)
