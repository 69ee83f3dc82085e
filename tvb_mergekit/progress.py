"""Progress with an ETA, on standard error."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from tvb_mergekit.errors import counted, megabytes

LOG = logging.getLogger(__name__)
Update = Callable[..., object]  # called with the bytes of each piece, or another unit's number
# (title of a pass, total, unit="B"): the total is in bytes unless the unit says otherwise
Progress = Callable[..., Update]
EVERY = 10.0  # seconds between two lines
LINE = "{desc}: {percentage:.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


def bars(quiet: bool) -> Progress:
    """A bar for each pass, in logs a line every ten seconds and at the end; and its speed at INFO.

    An update accepts a note, which is printed after the bar, and whether it is the last one.
    """

    def start(title: str, total: int, unit: str = "B") -> Update:
        logs = not sys.stderr.isatty()
        how: dict[str, Any] = {"unit": unit, "unit_scale": unit == "B"}
        bar = tqdm.tqdm(total=total, desc=title, disable=quiet or logs, **how)
        done, started = 0, time.monotonic()
        told = started

        def update(nbytes: int, note: str = "", last: bool = False) -> None:
            nonlocal done, told, total
            bar.set_postfix_str(note, refresh=False)
            bar.update(nbytes)
            done += nbytes
            if last:  # perhaps sooner than planned
                bar.total = total = done
            now = time.monotonic()
            if logs and not quiet and (done >= total or now - told >= EVERY):
                told, shown = now, how | {"prefix": title, "postfix": note, "bar_format": LINE}
                line = tqdm.tqdm.format_meter(done, total, now - started, **shown)
                print(line, file=sys.stderr, flush=True)
            if done >= total:
                bar.close()
                seconds = max(now - started, 1e-9)
                amount = megabytes(total) if unit == "B" else counted(total, unit)
                speed = f", {total / seconds / 1e9:.2f} GB/s" if unit == "B" else ""
                LOG.info("%s: %s in %.2f s%s", title, amount, seconds, speed)

        return update

    return start


def logging_above_bars() -> AbstractContextManager[None]:
    """Log to a terminal on separate lines above open bars."""
    shown = any(getattr(handler, "stream", None) is sys.stderr for handler in logging.root.handlers)
    return logging_redirect_tqdm() if shown and sys.stderr.isatty() else nullcontext()


def silent(title: str, total: int, unit: str = "B") -> Update:
    return lambda nbytes: None
