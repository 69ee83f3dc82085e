"""Progress with an ETA, on standard error."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from tvb_mergekit.errors import counted, megabytes

LOG = logging.getLogger(__name__)
Update = Callable[[int], object]  # called with the bytes of each piece, or another unit's number
# (title of a pass, total, unit="B"): the total is in bytes unless the unit says otherwise
Progress = Callable[..., Update]
EVERY = 10.0  # seconds between two lines
LINE = "{desc}: {percentage:.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class Bar(tqdm.tqdm):  # type: ignore[type-arg]
    """tqdm's bar on a terminal; in logs a line every ten seconds and at the end."""

    def __init__(self, **options: Any) -> None:
        self.lines, self.told = not sys.stderr.isatty(), time.monotonic()
        if self.lines:
            options |= {"bar_format": LINE, "mininterval": 0, "miniters": 1}
        # tqdm sets them after the first drawing, and needs them to close a bar
        self.start_t = self.last_print_t = time.time()
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
        if self.lines and not self.disable:
            if self.total is not None and self.n >= self.total:
                print(self, file=sys.stderr, flush=True)
            self.disable = True  # or tqdm writes an empty line
        super().close()


def bars(quiet: bool) -> Progress:
    """A bar for each pass, and a line at INFO with its speed at the end.

    An update accepts a note, which is printed after the bar.
    """

    def start(title: str, total: int, unit: str = "B") -> Update:
        bar = Bar(total=total, desc=title, unit=unit, unit_scale=unit == "B", disable=quiet)
        done, started = 0, time.perf_counter()

        def update(nbytes: int, note: str = "") -> None:
            nonlocal done
            bar.set_postfix_str(note, refresh=False)
            bar.update(nbytes)
            done += nbytes
            if done >= total:
                bar.close()
                seconds = max(time.perf_counter() - started, 1e-9)
                amount = megabytes(total) if unit == "B" else counted(total, unit)
                speed = f", {total / seconds / 1e9:.2f} GB/s" if unit == "B" else ""
                LOG.info("%s: %s in %.2f s%s", title, amount, seconds, speed)

        return update

    return start


@contextmanager
def phase(title: str) -> Iterator[None]:
    """Log at INFO how long the body took."""
    started = time.perf_counter()
    yield
    LOG.info("%s: %.2f s", title, time.perf_counter() - started)


def logging_above_bars() -> AbstractContextManager[None]:
    """Log to a terminal on separate lines above open bars."""
    shown = any(getattr(handler, "stream", None) is sys.stderr for handler in logging.root.handlers)
    return logging_redirect_tqdm() if shown and sys.stderr.isatty() else nullcontext()


def silent(title: str, total: int, unit: str = "B") -> Update:
    return lambda nbytes: None
