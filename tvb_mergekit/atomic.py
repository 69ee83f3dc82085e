"""Files that are never half there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tvb_mergekit.errors import UserError


def write_file(target: Path, data: bytes) -> None:
    """Write beside `target`, then rename.

    Raises:
        UserError: it cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as folder:
            beside = Path(folder) / target.name
            beside.write_bytes(data)
            os.replace(beside, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from error
