"""Progress in bytes with an ETA, on standard error."""

from __future__ import annotations

from collections.abc import Callable

import tqdm

Update = Callable[[int], object]  # called with the bytes of each piece
Progress = Callable[[str, int], Update]  # called with the title and total bytes of each pass


def bars(quiet: bool) -> Progress:
    """A bar for each pass."""

    def start(title: str, total: int) -> Update:
        bar = tqdm.tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=quiet)

        def update(nbytes: int) -> None:
            bar.update(nbytes)
            if bar.n >= total:
                bar.close()

        return update

    return start


def silent(title: str, total: int) -> Update:
    """No bars."""
    return lambda nbytes: None
