"""Progress in bytes with an ETA, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tqdm

Update = Callable[[int], object]  # called with the bytes of each piece
Progress = Callable[[str, int], Update]  # called with the title and total bytes of each pass

EVERY = 10.0  # seconds between two lines
LINE = "{desc}: {percentage:.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class Bar(tqdm.tqdm):  # type: ignore[type-arg]
    """tqdm's bar on a terminal; in files and logs a whole line every ten seconds at most."""

    def __init__(self, **options: Any) -> None:
        self.lines, self.told = not sys.stderr.isatty(), time.monotonic()
        if self.lines:
            options |= {"bar_format": LINE, "mininterval": 0, "miniters": 1}
        super().__init__(**options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if not self.lines:
            super().display(msg, pos)
        elif time.monotonic() - self.told >= EVERY:
            self.told = time.monotonic()
            print(self, file=sys.stderr, flush=True)

    def clear(self, nolock: bool = False) -> None:
        if not self.lines:
            super().clear(nolock)

    def close(self) -> None:
        self.disable = self.disable or self.lines  # or tqdm writes an empty line
        super().close()


def bars(quiet: bool) -> Progress:
    """A bar for each pass."""

    def start(title: str, total: int) -> Update:
        bar = Bar(total=total, desc=title, unit="B", unit_scale=True, disable=quiet)

        def update(nbytes: int) -> None:
            bar.update(nbytes)
            if bar.n >= total:
                bar.close()

        return update

    return start


@contextmanager
def closing_bars() -> Iterator[None]:
    """An exception closes all open bars, so that what is said of it has a line of its own."""
    try:
        yield
    except BaseException:
        for bar in list(getattr(tqdm.tqdm, "_instances", ())):
            bar.close()
        raise


def silent(title: str, total: int) -> Update:
    """No bars."""
    return lambda nbytes: None
