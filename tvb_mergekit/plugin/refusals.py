"""A user's mistake at mergekit's command line: one line, no traceback, exit code 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click
import pydantic

from tvb_mergekit.errors import UserError


class MergeRefused(click.ClickException, RuntimeError):
    """Raised out of mergekit's functions: its commands print `Error: ...`; code may catch it."""


@contextmanager
def refusing() -> Iterator[None]:
    """Turn what a user can mend into `MergeRefused`; all else passes with its traceback."""
    try:
        yield
    except UserError as error:
        raise MergeRefused(str(error)) from error
    except pydantic.ValidationError as error:
        raise MergeRefused(_first_lines(error)) from error
    except (OSError, MemoryError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise MergeRefused(text) from error


def _first_lines(error: pydantic.ValidationError) -> str:
    """Each complaint as `key: what (found ...)`; of alternatives for one key only the first."""
    seen: dict[str, str] = {}
    for item in error.errors(include_url=False):
        parts = [str(part) for part in item["loc"]]
        key = ".".join(part for part in parts if part.isidentifier() or part.isdigit())
        root = ".".join(parts[:2])
        message = item["msg"].removeprefix("Value error, ")
        seen.setdefault(root, f"`{key}`: {message} (found {item['input']!r:.60})")
    return f"the recipe is not valid: {'; '.join(seen.values())}"
