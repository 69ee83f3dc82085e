"""Progress in bytes with an ETA, on standard error."""

from __future__ import annotations

from collections.abc import Callable

import tqdm

Progress = Callable[[str, int], Callable[[int], object]]


def bars(quiet: bool) -> Progress:
    """What gives each pass a bar: called with its title and total bytes."""

    def start(title: str, total: int) -> Callable[[int], object]:
        bar = tqdm.tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=quiet)

        def update(nbytes: int) -> None:
            bar.update(nbytes)
            if bar.n >= total:
                bar.close()

        return update

    return start


def silent(title: str, total: int) -> Callable[[int], object]:
    """No bars."""
    return lambda nbytes: None
