"""Mistakes that the user can mend, as one line at a command line; and parts of messages."""

from __future__ import annotations

import difflib
import errno
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import click
import pydantic
import safetensors
import tqdm
import yaml

LOG = logging.getLogger(__name__)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a full disk
Described = TypeVar("Described", bound=pydantic.BaseModel)


class UserError(ValueError):
    """A mistake in a recipe, a checkpoint or an option.

    The message is one line: place (recipe key, model, tensor), value, expected value and remedy.
    Commands print it without a traceback and exit with a non-zero status.
    """


class MergeRefused(click.ClickException, RuntimeError):
    """Raised out of mergekit's functions: its commands print `Error: ...`; code may catch it."""


@contextmanager
def refusing(planning: bool = False, out: str = "") -> Iterator[None]:
    """Turn a user's mistakes into `MergeRefused`. Other errors keep their traceback.

    Args:
        planning: mergekit plans. Its RuntimeError and ValueError then concern the recipe (unknown
            architecture, no tokenizer ...); `-v` shows the traceback.
        out: the output, for the message of a full disk.
    """
    try:
        yield
    except BaseException as error:
        for bar in list(getattr(tqdm.tqdm, "_instances", ())):  # so that the line begins one
            with suppress(AttributeError):  # of an incomplete bar
                bar.close()
        # click ends in silence when the reader has closed the pipe
        known = isinstance(error, click.ClickException | BrokenPipeError)
        if known or (line := _line(error, planning, out)) is None:
            raise
        LOG.info("refused", exc_info=error)
        raise MergeRefused(line) from error


def _line(error: BaseException, planning: bool, out: str) -> str | None:
    """The message about a user's mistake, or about the machine; None for other errors."""
    text = one_line(error)
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, pydantic.ValidationError):
        return f"the recipe is not valid: {complaints(error)}"
    if isinstance(error, OSError | MemoryError | UnicodeEncodeError | safetensors.SafetensorError):
        full = getattr(error, "errno", None) in FULL or "while serializing" in text
        return f"cannot write {out or 'the output'}: {text}" if full else text
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in text:
        return f"{text}; use fewer bases, smaller batches or another device"  # torch's own
    if planning and isinstance(error, RuntimeError | ValueError):
        return f"mergekit cannot plan this merge: {text}"
    # An HTTP library raised it; huggingface_hub's depends on its version.
    kinds = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    if kinds.isdisjoint(("httpx", "httpx2", "requests")):
        return None
    return f"the Hugging Face Hub cannot be reached: {text}"


def complaints(error: pydantic.ValidationError) -> str:
    """Each complaint: its place, what is expected, and the value found."""
    seen: dict[str, str] = {}
    for item in error.errors(include_url=False):
        # The place includes mergekit's alternatives for a key (filter, list, number).
        kinds = ("ConditionalParameter", "bool", "int", "float", "str")
        parts = [str(part) for part in item["loc"] if part not in kinds]
        parts = [part for part in parts if part.isidentifier() or part.isdigit()]
        message = item["msg"].removeprefix("Value error, ")
        if "parameters" in parts[:-1]:
            parts = parts[: parts.index("parameters") + 2]
            message = "expected text, a number, a list of numbers, or filters with `value`"
        place = ".".join(parts)
        seen.setdefault(place, f"`{place}`: {message} (found {item['input']!r:.60})")
    return "; ".join(seen.values())


@contextmanager
def unwinding() -> Iterator[None]:
    """Let SIGTERM (a scheduler, `docker stop`) end a merge like Ctrl-C, without leftovers."""
    alone = threading.current_thread() is threading.main_thread()
    if not alone or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def check_path(path: str | os.PathLike[str]) -> None:
    """Raise UserError if a path is empty: it would stand for the current folder."""
    if not os.fspath(path):
        raise UserError("the path '' is empty (an unset variable?); name a file or a folder")


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


def hint(word: object, known: Collection[str]) -> str:
    """The known word that is closest to a wrong one, for the end of a message, if any is close."""
    lower = {candidate.lower(): candidate for candidate in known}
    match = difflib.get_close_matches(str(word).lower(), lower, n=1)
    return f" (did you mean `{lower[match[0]]}`?)" if match else ""


def check_known(name: str, known: Collection[str], what: str) -> None:
    """Raise UserError with the nearest known name unless `name` is known."""
    if name not in known:
        raise UserError(f"{what}{hint(name, known) or f': expected one of {listed([*known], 9)}'}")


def idle(key: str, word: str, names: Sequence[str]) -> str:
    """A complaint about a pattern under a key that no tensor depends on."""
    parts = dict.fromkeys(part for name in names for part in name.split(".") if not part.isdigit())
    why = hint(word, parts) or f"; their names have {listed([*parts], 20)}"
    why = ": an earlier entry decides" if any(word in name for name in names) else why
    return f"`{key}`: no tensor of this merge depends on {word!r}{why}"


def read_described(path: Path, kind: type[Described], what: str) -> Described:
    """Read a file (JSON by its suffix, else YAML) as a `kind`, which messages call `what`."""
    try:
        read = json.loads if path.suffix == ".json" else yaml.safe_load
        return kind.model_validate(read(path.read_text(encoding="utf-8")))
    except pydantic.ValidationError as error:
        raise UserError(f"{path} is not {what}: {complaints(error)}") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as {what}: {one_line(error)}") from error
