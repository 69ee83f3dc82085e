"""Files that are never half there."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tvb_mergekit.errors import UserError


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """Where to write a file that is renamed to `target` at the end; after an error it is gone.

    Raises:
        UserError: it cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as folder:
            path = Path(folder) / target.name
            yield path
            os.replace(path, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from error


def is_left_over(path: Path) -> bool:
    """Whether `path` has the name of a folder of `beside`, which a killed process leaves."""
    return path.is_dir() and bool(re.fullmatch(r"\.partial-[a-z0-9_]{8}", path.name))


def write_file(target: Path, data: bytes) -> None:
    """Write beside `target`, then rename.

    Raises:
        UserError: it cannot be written.
    """
    with beside(target) as path:
        path.write_bytes(data)
