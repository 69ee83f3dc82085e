"""One command in several processes, as `torchrun` and `accelerate launch` start it.

Rank 0 leads: it alone downloads, prints and publishes. All plan the same merge, read and write
their share of the tensors, and meet in collectives of torch.distributed (gloo, from CPU to CPU).
When a process fails, the next collective fails in the others, and the launcher ends the rest.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

from tvb_mergekit.errors import UserError

Value = TypeVar("Value")


def launched(name: str, otherwise: int) -> int:
    """A launcher's number, such as RANK; without a launcher `otherwise`."""
    return int(os.environ.get(name) or otherwise)


def one_only(what: str) -> None:
    """Raise UserError if a command that cannot share its work was started several times."""
    if (size := launched("WORLD_SIZE", 1)) > 1:
        raise UserError(
            f"{what} runs in one process, and was started {size} times (WORLD_SIZE): start it "
            "without the launcher (`tvb build`, `tvb merge` work in several processes)"
        )


@dataclass(frozen=True)
class World:
    """The processes of a command. All call the same methods in the same order."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def led(self, make: Callable[[], Value]) -> Value:
        """The result of `make`, which rank 0 alone calls, in all."""
        return cast(Value, self.collect(make() if self.leads else None)[0])

    def first(self, act: Callable[[], Value]) -> Value:
        """The result of `act`, which rank 0 calls first: to download models, to refuse."""
        done = [act()] if self.leads else []
        self.led(lambda: None)
        return done[0] if done else act()

    def collect(self, value: Value) -> list[Value]:
        """Every process's value, in the order of the ranks. UserError if a process has ended."""
        values = [value] * self.size
        if self.size > 1:
            import torch.distributed as dist  # slow

            try:
                dist.all_gather_object(values, value)
            except RuntimeError as error:
                raise UserError(
                    f"rank {self.rank}: another process ended: its message or the launcher says why"
                ) from error
        return values

    def agree(self, what: object) -> None:
        """Raise UserError unless all processes have the same description of the tensors."""
        for rank, other in enumerate(found := self.collect(what)):
            if other != found[0]:
                raise UserError(
                    f"rank {rank} finds other tensors than rank 0: the processes must see the "
                    "same files, with the same versions of all packages"
                )

    def dismiss(self) -> None:
        """End all processes except rank 0, when all have come here."""
        self.collect(None)
        if not self.leads:
            raise SystemExit(0)


_worlds = [World()]  # the last is the present one


def world() -> World:
    return _worlds[-1]


@contextmanager
def joined() -> Iterator[World]:
    """Connect the processes that a launcher started for a command."""
    made = World(launched("RANK", 0), launched("WORLD_SIZE", 1))
    if made.size == 1:
        yield made
        return
    import torch.distributed as dist

    # A dead process is seen at once, and a live one may download or read models.
    day = timedelta(days=1)
    dist.init_process_group("gloo", timeout=day, rank=made.rank, world_size=made.size)
    if not made.leads:
        logging.disable(logging.WARNING)
    _worlds.append(made)
    try:
        yield made
    finally:
        _worlds.pop()
        dist.destroy_process_group()
