"""Several processes at one job, one of which leads: the only module that knows torch.distributed.

`accelerate launch` and `torchrun` start the same command N times and say so in the environment.
Rank 0 leads: it alone looks at what is there, prints, keeps caches, and publishes; the others read
and write their share. What they tell each other (small float64 sums, a basis, records of files)
goes through gloo from CPU to CPU, each of the others with rank 0, so that it works with or without
accelerators. In each process a thread listens, which tells when another process fails or dies:
then all end, and what was begun is deleted by the leader when the others have let go of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from queue import Empty, Full, Queue
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from tvb_mergekit.errors import UserError
from tvb_mergekit.refusals import MergeRefused, refusing

if TYPE_CHECKING:
    from torch import Tensor

Value = TypeVar("Value")

# By torchrun and accelerate; by mpirun, which accelerate takes for CPUs.
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
PIECE = 2**17  # numbers that one message holds, of which the leader gets one from each
BEAT = 30.0  # seconds between signs of life
SILENCE = 600.0  # seconds without one after which a process counts as dead
GATHERING = 600.0  # seconds that the processes may take to come together
NEWS = 2.0  # seconds in which the reason for a signal may arrive
LETTING_GO = 20.0  # seconds that the others get to end; a launcher waits 30 before it kills


def rank() -> int:
    """The number of this process."""
    return _number(RANKS, 0)


def size() -> int:
    """How many processes a launcher started; 1 without one."""
    return _number(SIZES, 1)


def local_rank() -> int:
    """The number of this process on its machine."""
    return _number(LOCAL_RANKS, rank())


def local_size() -> int:
    """How many processes run on this machine."""
    return _number(LOCAL_SIZES, size())


def _number(names: Sequence[str], otherwise: int) -> int:
    for name in names:
        if text := os.environ.get(name, ""):
            try:
                return int(text)
            except ValueError as error:
                raise UserError(f"{name} is `{text}`: expected a launcher's number") from error
    return otherwise


def shares(sizes: Sequence[int], count: int) -> list[slice]:
    """Cut a list into `count` runs, some perhaps empty, of which the largest is the least."""
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_runs(sizes, middle)) <= count else (middle + 1, high)
    runs = _runs(sizes, low)
    return [*runs, *[slice(len(sizes), len(sizes))] * (count - len(runs))]


def _runs(sizes: Sequence[int], most: int) -> list[slice]:
    """Runs as long as `most` allows."""
    runs, start, held = [], 0, 0
    for index, nbytes in enumerate(sizes):
        if held + nbytes > most and index > start:
            runs.append(slice(start, index))
            start, held = index, 0
        held += nbytes
    return [*runs, slice(start, len(sizes))]


class World:
    """The processes of this job: here one alone, which shares with nobody."""

    rank = 0
    size = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def cleans(self) -> bool:
        """Whether this process deletes what a job that failed has begun."""
        return self.leads

    def share(self, make: Callable[[], Value]) -> Value:
        """What the leader makes, for all."""
        return make()

    def first(self, act: Callable[[], Value]) -> Value:
        """Have the leader do it before the others: download models, fuse adapters, refuse."""
        made = [act()] if self.leads else []
        self.share(lambda: None)
        return made[0] if made else act()

    def collect(self, value: Value) -> list[Value]:
        """The leader gets everyone's, in order of rank; the others nothing."""
        return [value]

    def in_turn(self, act: Callable[[Value | None], Value]) -> Value:
        """What the last process makes of what the one before made, from rank 0's of None on; for
        the leader, while the others get anything."""
        return act(None)

    def add_up(self, counts: Tensor) -> None:
        """Add what all have counted, int64 and contiguous, into everyone's."""

    def agree(self, what: object, about: str) -> None:
        """Raise UserError unless all have come to the same, plain JSON."""
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        for number, found in enumerate(self.collect(digest)):
            if found != digest:
                raise UserError(
                    f"rank {number} finds other {about} than rank 0: the processes must see the "
                    "same files, with the same versions of all packages"
                )

    def check_shared(self, folder: Path) -> None:
        """Raise UserError unless a file that the leader makes in `folder` is seen by all."""
        if self.size == 1:
            return
        with tempfile.NamedTemporaryFile(dir=folder) if self.leads else nullcontext() as made:
            token = self.share(lambda: "" if made is None else str(made.name))
            for number, seen in enumerate(self.collect(_appears(Path(token)))):
                if not seen:
                    raise UserError(
                        f"rank {number} does not see {folder}, which rank 0 has made: the output "
                        "must lie on a file system that all machines share"
                    )

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Around what all do together, within whatever deletes it: who fails here, ends all."""
        yield

    def dismiss(self) -> None:
        """All is written: the others stop here, and end as the leader does who goes on alone."""


def _appears(path: Path) -> bool:
    """Whether a file is there; a network's file system may take a while to show it."""
    for _ in range(10):
        if path.exists():
            return True
        time.sleep(1)
    return False


ALONE = World()
_current: ContextVar[World] = ContextVar("tvb_mergekit_world", default=ALONE)


def world() -> World:
    """The processes of the running command."""
    return _current.get()


def one_only(what: str) -> None:
    """Raise UserError if a command that would do its work, or write, N times was started so."""
    if size() > 1:
        raise UserError(
            f"{what} runs in one process, and was started {size()} times (WORLD_SIZE): start it "
            "without the launcher (`tvb build` and `tvb merge` work in several processes)"
        )


@contextmanager
def joined(out: str) -> Iterator[World]:
    """The world of a command, which ends in all processes as it does in one: with one line.

    Args:
        out: what the command writes, for the line.

    Raises:
        UserError: the processes cannot reach each other.
        click.ClickException: in rank 0, another process failed or died.
        SystemExit: in the others.
    """
    if size() == 1:
        if "ACCELERATE_USE_CPU" in os.environ and "MASTER_PORT" in os.environ:
            click.echo(
                "WARNING: `accelerate launch --cpu` starts one process (but by mpirun): for "
                "several take --multi_gpu, which serves CPUs too, or torchrun",
                err=True,
            )
        yield ALONE
        return
    if sys.platform == "win32":
        raise UserError("several processes at one job need Linux or macOS")
    several = Several(rank(), size())
    several.meet()  # nothing is written yet: a launcher's signal may end it at once
    token = _current.set(several)
    told = logging.root.manager.disable
    logging.disable(told if several.leads else logging.WARNING)
    try:
        with several.handling():
            try:
                with several.whole():
                    several.listen()
                    yield several
                several.bid_farewell()
            except BaseException as error:
                several.end(error, out)
    finally:
        logging.disable(told)
        _current.reset(token)


class Stopped(SystemExit):
    """Another process died. No `Exception`, which some code between here and there would take."""


class Refused(Stopped):
    """Another process refused its input: it would do so again."""


class Several(World):
    """One of several processes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.peers = list(range(1, size)) if rank == 0 else [0]
        self._told: str | None = None  # why all end
        self._refused = False  # because of a user's mistake
        self._news = threading.Event()
        self._over = threading.Event()
        self._ending = self._dismissed = self._headless = self._mine = self._sends = False
        self._late = 0  # the number of a signal that came while a message was sent
        self._noting = threading.Lock()
        self._sending = {peer: threading.Lock() for peer in self.peers}
        self._came: dict[int, Queue[Any]] = {peer: Queue(4) for peer in self.peers}
        self._listeners: list[threading.Thread] = []

    # Coming together

    def meet(self) -> None:
        """Wait for the others.

        Raises:
            UserError: they cannot be reached.
        """
        import torch.distributed as dist

        limit = timedelta(seconds=GATHERING)
        try:
            dist.init_process_group("gloo", timeout=limit, rank=self.rank, world_size=self.size)
        except (RuntimeError, ValueError) as error:  # what PyTorch raises, its own kinds too
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"rank {self.rank} cannot reach the other {self.size - 1} processes: {reason} "
                "(GLOO_SOCKET_IFNAME names the network interface to take)"
            ) from error

    def listen(self) -> None:
        """To the others, from now on."""
        self._listeners = [
            threading.Thread(target=self._listen, args=(peer,), daemon=True) for peer in self.peers
        ]
        for thread in (*self._listeners, threading.Thread(target=self._beat, daemon=True)):
            thread.start()

    @contextmanager
    def handling(self) -> Iterator[None]:
        """SIGTERM, by a launcher or by a listening thread of ours, ends the main thread, as Ctrl-C
        does; but not in the middle of a message."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = [signal.signal(number, self._on_signal) for number in numbers]
        try:
            yield
        finally:  # what ends already needs no launcher's signal
            for number, handler in zip(numbers, before, strict=True):
                ignored = self._ending and number == signal.SIGTERM
                signal.signal(number, signal.SIG_IGN if ignored else handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._ending:
            return
        if self._sends:
            self._late = number
            return
        if self._told is not None:
            self._stop()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """No signal ends what the main thread does here, but then."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._sends = True
        try:
            yield
        finally:
            self._sends = False
        late, self._late = self._late, 0
        if late:
            self._on_signal(late, None)

    def _stop(self) -> NoReturn:
        raise (Refused if self._refused else Stopped)(1)

    # Messages: each a pickle behind its length

    def _send(self, peer: int, kind: str, *what: object) -> None:
        import torch
        import torch.distributed as dist

        data = pickle.dumps((kind, *what), protocol=pickle.HIGHEST_PROTOCOL)
        body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with self._undisturbed(), self._sending[peer]:
            dist.send(torch.tensor([len(body)]), dst=peer)
            dist.send(body, dst=peer)

    def _tell(self, peer: int, kind: str, *what: object) -> None:
        """The same to one who may be gone."""
        with suppress(RuntimeError):
            self._send(peer, kind, *what)

    def _receive(self, peer: int) -> tuple[Any, ...]:
        import torch
        import torch.distributed as dist

        def get(room: Tensor) -> Tensor:
            work = dist.irecv(room, src=peer)
            assert work is not None
            work.wait(timedelta(seconds=SILENCE))
            return room

        length = int(get(torch.empty(1, dtype=torch.int64)))
        body = get(torch.empty(length, dtype=torch.uint8))
        message: tuple[Any, ...] = pickle.loads(memoryview(body.numpy()))  # type: ignore[arg-type]
        return message

    def _listen(self, peer: int) -> None:
        while True:
            try:
                kind, *what = self._receive(peer)
            except Exception:  # no message that came whole
                self._lost(peer)
                return
            if kind == "value":
                self._keep(peer, what[0])
            elif kind == "failed":
                self._note(*what)
            elif kind == "left":
                return

    def _keep(self, peer: int, value: object) -> None:
        """For the main thread to fetch, unless nobody will."""
        while not self._ending:
            with suppress(Full):
                self._came[peer].put(value, timeout=1)
                return

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            for peer in self.peers:
                self._tell(peer, "alive")

    def _put(self, peer: int, value: object) -> None:
        try:
            self._send(peer, "value", value)
        except RuntimeError:
            self._lost(peer)
            self._stop()

    def _fetch(self, peer: int) -> Any:
        while self._told is None:  # a signal just before a wait does not interrupt it
            with suppress(Empty):
                return self._came[peer].get(timeout=1)
        self._stop()

    # What is told by them

    def share(self, make: Callable[[], Value]) -> Value:
        if not self.leads:
            value: Value = self._fetch(0)
            return value
        value = make()
        for peer in self.peers:
            self._put(peer, value)
        return value

    def in_turn(self, act: Callable[[Value | None], Value]) -> Value:
        if not self.leads:
            value = act(self._fetch(0))
            self._put(0, value)
            return value
        value = act(None)
        for peer in self.peers:
            self._put(peer, value)
            value = self._fetch(peer)
        return value

    def collect(self, value: Value) -> list[Value]:
        if not self.leads:
            self._put(0, value)
            return []
        return [value, *(self._fetch(peer) for peer in self.peers)]

    def add_up(self, counts: Tensor) -> None:
        for piece in counts.view(-1).split(PIECE):
            self._add_up(piece)

    def _add_up(self, counts: Tensor) -> None:
        total = counts.clone()  # a pickle of a view would hold all that it is a view of
        for other in self.collect(total)[1:]:
            total += other
        counts.copy_(self.share(lambda: total))

    # Ending

    def _lost(self, peer: int) -> None:
        if self._told is None:
            self._headless = peer == 0
        self._note(
            f"rank {peer} died (it was killed, perhaps for lack of memory, or its machine was lost)"
        )

    def _note(self, text: str, refused: bool = False) -> None:
        """Why all end: the first reason counts. Ends this process, and by the leader all."""
        with self._noting:
            if self._told is not None or self._over.is_set():
                return
            self._told, self._refused = text, refused
        self._news.set()
        if self.leads:
            for peer in self.peers:
                self._tell(peer, "failed", text, refused)
        main = threading.main_thread()
        if threading.current_thread() is not main and main.ident is not None:
            signal.pthread_kill(main.ident, signal.SIGTERM)

    @contextmanager
    def whole(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not (self._ending or (self._dismissed and not self.leads)):
                self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Tell the others, and wait until they have let go of what they wrote."""
        self._ending = True
        # A launcher's signal may be sooner here than its reason; of a signal to all, rank 0 tells.
        if isinstance(error, SystemExit) or not (self.leads or isinstance(error, Exception)):
            self._news.wait(NEWS if self.leads else 2 * NEWS)
        if self._told is None:
            self._mine = True
            text, refused = _line_of(error, self.rank)
            if self.leads:
                self._note(text, refused)
            else:
                self._tell(0, "failed", text, refused)
        if not self.leads:
            self._tell(0, "left")
        deadline = time.monotonic() + LETTING_GO
        for thread in self._listeners:
            thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def cleans(self) -> bool:
        return self.leads or self._headless

    def dismiss(self) -> None:
        if not self.leads:
            self._tell(0, "left")
        for thread in self._listeners:  # of the leader: until all have left
            while thread.is_alive() and self._told is None:
                thread.join(1)
        self._dismissed = True
        if self._told is not None:
            self._stop()
        if not self.leads:
            raise SystemExit(0)

    def bid_farewell(self) -> None:
        """The work of all is done."""
        self._over.set()
        for peer in self.peers:
            self._tell(peer, "left")

    def end(self, error: BaseException, out: str) -> NoReturn:
        """Raise what ends this process: the first that is left says why, the others are silent."""
        if self._dismissed and self._told is None and not self.leads:
            raise error
        self._over.set()
        text = self._told or _line_of(error, self.rank)[0]
        if self.rank != (1 if self._headless else 0):
            _record(text)
            raise SystemExit(1) from None
        if not (self._mine or isinstance(error, Exception)):  # but a signal: of others, or ours
            if not self._refused:
                kept = Path(f"{out}.partial")
                text += ": all stopped; " + (
                    f"{kept} keeps what was finished: go on with --resume"
                    if kept.is_dir()
                    else "nothing was written"
                )
            error = click.ClickException(text)
        _record(text)
        raise error


def _line_of(error: BaseException, rank: int) -> tuple[str, bool]:
    """What to say of an error, and whether it refuses a user's mistake."""
    try:
        with refusing():
            raise error
    except MergeRefused as refused:
        return refused.message, True
    except KeyboardInterrupt:
        return f"rank {rank} was interrupted", False
    except SystemExit:
        return f"rank {rank} was told to end", False
    except BaseException as other:
        if rank:  # the leader's own is raised
            traceback.print_exception(other)
        return f"rank {rank}: {type(other).__name__}: {other}", False


def _record(text: str) -> None:
    """Where torchrun's own report, the last thing that a user sees, looks for the reason."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra: Mapping[str, str] = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
