"""The one exception for mistakes that the user can mend, and what several messages are made of."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence


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


def check_names(*paths: str | os.PathLike[str]) -> None:
    """Raise UserError unless paths, and the current folder, are one line of text."""
    for path in (os.getcwd(), *paths):
        for text in (os.fspath(path), os.path.realpath(path)):
            if text.splitlines() != [text]:
                why = "has line breaks" if text else "is empty (an unset variable?)"
                raise UserError(f"the path {text!r} {why}; name a file or a folder")


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first of many names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(count: float, noun: str) -> str:
    """`1 basis`, `2 bases`, `2 matrices`, `3 tasks`, `1.52 bits`."""
    if count != 1:
        ends = {"basis": ("is", "es"), "matrix": ("x", "ces")}.get(noun.split(" ")[-1], ("", "s"))
        noun = noun.removesuffix(ends[0]) + ends[1]
    return f"{count:.3g} {noun}" if isinstance(count, float) else f"{count} {noun}"


def megabytes(nbytes: int) -> str:
    """A number of bytes as a person reads it."""
    if abs(nbytes) < 1e5:
        return f"{nbytes / 1e3:,.1f} kB"
    return f"{nbytes / 1e9:,.1f} GB" if abs(nbytes) >= 1e9 else f"{nbytes / 1e6:,.1f} MB"
