"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import re
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


def is_left_over(path: Path) -> bool:
    """Whether `path` is a folder of `beside` that a killed process left."""
    return path.is_dir() and bool(re.fullmatch(r"\.partial-[a-z0-9_]{8}", path.name))


def write_file(target: Path, data: bytes) -> None:
    """Write next to `target`, then rename."""
    with beside(target) as path:
        path.write_bytes(data)
