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
from datetime import timedelta
from typing import TypeVar, cast

from tvb_mergekit.errors import UserError

Value = TypeVar("Value")
_rank, _size = 0, 1  # of this process, and of all of the command


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


def place() -> tuple[int, int]:
    """The rank of this process, and the number of all."""
    return _rank, _size


def leads() -> bool:
    return _rank == 0


def led(make: Callable[[], Value]) -> Value:
    """The result of `make`, which rank 0 alone calls, in all."""
    return cast(Value, collect(make() if leads() else None)[0])


def first(act: Callable[[], Value]) -> Value:
    """The result of `act`, which rank 0 calls first: to download models, to refuse."""
    done = [act()] if leads() else []
    collect(None)
    return done[0] if done else act()


def collect(value: Value) -> list[Value]:
    """Every process's value, in the order of the ranks. UserError if a process has ended."""
    values = [value] * _size
    if _size > 1:
        import torch.distributed as dist  # slow

        try:
            dist.all_gather_object(values, value)
        except RuntimeError as error:
            raise UserError(
                f"rank {_rank}: another process ended: its message or the launcher says why"
            ) from error
    return values


def agree(what: object) -> None:
    """Raise UserError unless all processes have the same description of the tensors."""
    for rank, other in enumerate(found := collect(what)):
        if other != found[0]:
            raise UserError(
                f"rank {rank} finds other tensors than rank 0: the processes must see the same "
                "files, with the same versions of all packages"
            )


def dismiss() -> None:
    """End all processes except rank 0, when all have come here."""
    collect(None)
    if not leads():
        raise SystemExit(0)


@contextmanager
def joined() -> Iterator[None]:
    """Connect the processes that a launcher started for a command."""
    global _rank, _size
    rank, size = launched("RANK", 0), launched("WORLD_SIZE", 1)
    if size == 1:
        yield
        return
    import torch.distributed as dist

    # A dead process is seen at once, and a live one may download or read models.
    dist.init_process_group("gloo", timeout=timedelta(days=1), rank=rank, world_size=size)
    _rank, _size = rank, size
    if not leads():
        logging.disable(logging.WARNING)
    try:
        yield
    finally:
        _rank, _size = 0, 1
        dist.destroy_process_group()
