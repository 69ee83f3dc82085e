"""The one exception for mistakes that the user can mend, and what mends a failed write."""

from __future__ import annotations

import errno
import os


class UserError(ValueError):
    """A mistake in a recipe, a checkpoint or an option, told in one line.

    The message names where the mistake is (recipe key, model, tensor), what was found, what was
    expected and what to do. Commands print it without a traceback and exit with a non-zero status.
    """


def remedy(error: BaseException) -> str:
    """What mends a write that the disk or `ulimit -f` has ended; empty for other errors."""
    number, text = getattr(error, "errno", None), str(error)
    if number == errno.EFBIG or os.strerror(errno.EFBIG) in text:
        return (
            "allow larger files (`ulimit -f unlimited`) or, where the command has it, take a "
            "smaller --out-shard-size"
        )
    if number in (errno.ENOSPC, errno.EDQUOT) or "while serializing" in text:
        return "free some disk"
    return ""
