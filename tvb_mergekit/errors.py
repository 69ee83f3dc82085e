"""The exception for mistakes that the user can mend, and shared parts of messages."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence


class UserError(ValueError):
    """A mistake in a recipe, a checkpoint or an option.

    The message is one line: place (recipe key, model, tensor), value, expected value and remedy.
    Commands print it without a traceback and exit with a non-zero status.
    """


def remedy(error: BaseException) -> str:
    """The remedy for a full disk or a file above `ulimit -f`; empty for other errors."""
    number, text = getattr(error, "errno", None), str(error)
    if number == errno.EFBIG or os.strerror(errno.EFBIG) in text:
        shards = "use a smaller --out-shard-size if the command has the option"
        return f"allow larger files (`ulimit -f unlimited`) or {shards}"
    if number in (errno.ENOSPC, errno.EDQUOT) or "while serializing" in text:
        return "free some disk"
    return ""


def check_names(*paths: str | os.PathLike[str]) -> None:
    """Raise UserError unless paths, and the current folder, are one line of text."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise UserError("the current folder was deleted; change to another one") from None
    for path in (here, *paths):
        for text in (os.fspath(path), os.path.realpath(path)):
            if text.splitlines() != [text]:
                why = "has line breaks" if text else "is empty (an unset variable?)"
                raise UserError(f"the path {text!r} {why}; name a file or a folder")


def one_line(error: BaseException) -> str:
    """The text of an error in one line, or its type."""
    return " ".join(str(error).split()) or type(error).__name__


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(count: float, noun: str) -> str:
    """`1 basis`, `2 bases`, `2 matrices`, `3 tasks`, `1.52 bits`."""
    if count != 1:
        ends = {"basis": ("is", "es"), "matrix": ("x", "ces")}.get(noun.split(" ")[-1], ("", "s"))
        noun = noun.removesuffix(ends[0]) + ends[1]
    return f"{count:.3g} {noun}" if isinstance(count, float) else f"{count} {noun}"


def megabytes(nbytes: int) -> str:
    if abs(nbytes) < 1e5:
        return f"{nbytes / 1e3:,.1f} kB"
    return f"{nbytes / 1e9:,.1f} GB" if abs(nbytes) >= 1e9 else f"{nbytes / 1e6:,.1f} MB"
