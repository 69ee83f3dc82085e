"""One command in several processes, as `torchrun` and `accelerate launch` start it.

Rank 0 leads: it alone downloads, prints and publishes. All plan the same merge, read and write
their share of the tensors, and meet in collectives of torch.distributed (gloo, from CPU to CPU).
When a process fails, the next collective fails in the others, and the launcher ends the rest.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tvb_mergekit.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from tvb_mergekit.tensors.stream import Item

Value = TypeVar("Value")
PATIENCE = timedelta(days=1)  # for one that downloads or reads models; a dead one is seen at once


def launched(name: str, otherwise: int) -> int:
    """A launcher's number, such as RANK or LOCAL_WORLD_SIZE; without a launcher `otherwise`."""
    return int(os.environ.get(name) or otherwise)


def one_only(what: str) -> None:
    """Raise UserError if a command that cannot share its work was started several times."""
    size = launched("WORLD_SIZE", 1)
    if size > 1:
        raise UserError(
            f"{what} runs in one process, and was started {size} times (WORLD_SIZE): start it "
            "without the launcher (`tvb build`, `tvb merge` work in several processes)"
        )


@dataclass(frozen=True)
class World:
    """The processes of a command: by default one.

    All call the same methods in the same order, which raise UserError if another process has ended.
    """

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def _meet(self, collective: Callable[[Any], object]) -> None:
        if self.size == 1:
            return
        import torch.distributed

        try:
            collective(torch.distributed)
        except RuntimeError as error:
            raise UserError(
                f"rank {self.rank}: another process ended: its message or the launcher says why"
            ) from error

    def led(self, make: Callable[[], Value]) -> Value:
        """The result of `make` in rank 0."""
        made = [make() if self.leads else None]
        self._meet(lambda dist: dist.broadcast_object_list(made, src=0))
        return cast(Value, made[0])

    def first(self, act: Callable[[], Value]) -> Value:
        """The result of `act`, which rank 0 calls first: to download models, to refuse."""
        done = [act()] if self.leads else []
        self.led(lambda: None)
        return done[0] if done else act()

    def collect(self, value: Value) -> list[Value]:
        """Every process's value, in the order of the ranks."""
        values = [value] * self.size
        self._meet(lambda dist: dist.all_gather_object(values, value))
        return values

    def add_up(self, counts: Tensor) -> None:
        """Add every process's numbers (contiguous, on the CPU) in place."""
        self._meet(lambda dist: dist.all_reduce(counts))

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


_current = ContextVar("tvb_mergekit_world", default=World())  # noqa: B039 (it is frozen)
world = _current.get


@contextmanager
def joined() -> Iterator[World]:
    """Connect the processes that a launcher started for a command."""
    made = World(launched("RANK", 0), launched("WORLD_SIZE", 1))
    if made.size == 1:
        yield made
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=PATIENCE, rank=made.rank, world_size=made.size)
    if not made.leads:
        logging.disable(logging.WARNING)
    token = _current.set(made)
    try:
        yield made
    finally:
        _current.reset(token)
        dist.destroy_process_group()


def part_of(items: Sequence[Item]) -> slice:
    """The items that this process reads, balanced by bytes."""
    found = world()
    found.agree([[item.name, list(item.shape), item.nbytes] for item in items])
    return even_runs([item.nbytes for item in items], found.size)[found.rank]


def even_runs(sizes: Sequence[int], count: int) -> list[slice]:
    """Cut a list into `count` runs, some perhaps empty.

    The middle of an item decides its run, so that no run exceeds its part by more than one item.
    """
    middles = (2 * end - size for size, end in zip(sizes, accumulate(sizes), strict=True))
    owners = [middle * count // (2 * sum(sizes) or 1) for middle in middles]
    starts = [bisect_left(owners, rank) for rank in range(1, count)]
    return [slice(*ends) for ends in pairwise([0, *starts, len(sizes)])]
