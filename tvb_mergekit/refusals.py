"""A user's mistake at a command line, mergekit's or ours: one line, no traceback, exit code 1."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import click
import pydantic
import safetensors

from tvb_mergekit.errors import UserError, one_line, remedy
from tvb_mergekit.progress import closing_bars

LOG = logging.getLogger(__name__)
SMALLER = "use fewer bases, smaller batches or TVB_MERGEKIT_BLOCK_MB, or another device"


class MergeRefused(click.ClickException, RuntimeError):
    """Raised out of mergekit's functions: its commands print `Error: ...`; code may catch it."""


@contextmanager
def refusing(planning: bool = False, out: str = "the output", keeps: str = "") -> Iterator[None]:
    """Turn a user's mistakes into `MergeRefused`. Other errors keep their traceback.

    Args:
        planning: mergekit plans. Its RuntimeError and ValueError then concern the recipe (unknown
            architecture, no tokenizer ...); `-v` shows the traceback.
        out: the output, for the message of a full disk.
        keeps: the folder that --resume continues, if the command has the option.
    """
    try:
        with closing_bars():
            yield
    except (MergeRefused, BrokenPipeError):
        raise  # click ends in silence when the reader has closed the pipe
    except UserError as error:
        raise MergeRefused(str(error)) from error
    except pydantic.ValidationError as error:
        raise MergeRefused(_complaints(error)) from error
    except (OSError, MemoryError, UnicodeEncodeError, safetensors.SafetensorError) as error:
        raise MergeRefused(_of_the_machine(error, out, keeps)) from error
    except (RuntimeError, ValueError) as error:
        # torch's own, on a device and in main memory
        if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
            raise MergeRefused(f"{one_line(error)}; {SMALLER}") from error
        if not planning:
            raise
        LOG.info("refused while planning", exc_info=error)
        raise MergeRefused(f"mergekit cannot plan this merge: {one_line(error)}") from error
    except Exception as error:
        # An HTTP library raised it; huggingface_hub's depends on its version.
        kinds = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
        if kinds.isdisjoint(("httpx", "httpx2", "requests")):
            raise
        raise MergeRefused(f"the Hugging Face Hub cannot be reached: {one_line(error)}") from error


def _of_the_machine(error: BaseException, out: str, keeps: str) -> str:
    text, mend = one_line(error), remedy(error)
    if not mend:
        return text + "; raise `ulimit -n`" * (getattr(error, "errno", None) == errno.EMFILE)
    if os.path.isdir(keeps):
        return (
            f"cannot write {out}: {text}; {keeps} keeps what was finished: {mend}, and go "
            "on with --resume, or delete it"
        )
    if os.path.isfile(os.path.join(out, "points.jsonl")):  # of `tvb tune`
        return f"cannot write: {text}; {out} keeps the scores: {mend}, and repeat the command"
    return f"cannot write {out}: {text}; nothing was left behind: {mend}, or write elsewhere"


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


def _complaints(error: pydantic.ValidationError) -> str:
    """Each complaint: its place, the value that mergekit expects, and the value found."""
    seen: dict[str, str] = {}
    for item in error.errors(include_url=False):
        # The place includes mergekit's alternatives for a key (filter, list, number).
        kinds = ("ConditionalParameter", "bool", "int", "float", "str")
        parts = [str(part) for part in item["loc"] if part not in kinds]
        parts = [part for part in parts if part.isidentifier() or part.isdigit()]
        message = item["msg"].removeprefix("Value error, ")
        if "parameters" in parts[:-1]:
            parts = parts[: parts.index("parameters") + 2]
            message = "expected a number or text; leave the key out for its default"
        place = ".".join(parts)
        seen.setdefault(place, f"`{place}`: {message} (found {item['input']!r:.60})")
    return f"the recipe is not valid: {'; '.join(seen.values())}"
