"""`tvb` in several processes without a launcher: forked from one that has imported everything.

A start of Python with mergekit takes seconds; a fork does not. Each process gets the environment
that torchrun would give it, and may be made to die: once all that are made slow are where it is.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

METHOD = "forkserver"
PRELOAD = ["torch.distributed", "tvb_mergekit.plugin.streaming", "tvb_mergekit.building"]


@dataclass(frozen=True)
class Ended:
    """How one process ended."""

    code: int
    out: str
    err: str


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def started(
    size: int,
    words: Sequence[object],
    folder: Path,
    *,
    cache: Path | str = "off",
    does: Mapping[int, str] | None = None,
    others: Mapping[int, Sequence[object]] | None = None,
) -> list[Any]:
    """The processes of one job, running.

    Args:
        folder: where each writes what it says.
        does: rank -> what befalls it, a key of `MISHAPS`.
        others: rank -> its words, where they are not those of all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    common = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "HF_HUB_OFFLINE": "1",
        "TVB_MERGEKIT_CACHE": str(cache),
    }
    context = multiprocessing.get_context(METHOD)
    context.set_forkserver_preload(PRELOAD)
    made = []
    read_once = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with mock.patch.dict(os.environ, read_once):
        for rank in range(size):
            own = [str(word) for word in (others or {}).get(rank, words)]
            env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            args = (own, env, folder / str(rank), (does or {}).get(rank, ""), len(does or {}))
            made.append(context.Process(target=child, args=args))
            made[-1].start()
    return made


def waited(processes: Sequence[Any], folder: Path, seconds: float = 120) -> list[Ended]:
    """How each process of a job ended."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in late:
        processes[rank].kill()
        processes[rank].join()
    ended = [
        Ended(p.exitcode, *((folder / f"{rank}.{kind}").read_text() for kind in ("out", "err")))
        for rank, p in enumerate(processes)
    ]
    assert not late, (late, ended)
    return ended


def run(size: int, words: Sequence[object], folder: Path, **keys: Any) -> list[Ended]:
    return waited(started(size, words, folder, **keys), folder)


def child(words: list[str], env: dict[str, str], said: Path, does: str, befallen: int) -> None:
    """`tvb` with these words, in a process of a job, `befallen` of which have mishaps."""
    os.environ.update(env)
    for name, number in (("out", 1), ("err", 2)):
        with open(f"{said}.{name}", "wb", buffering=0) as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    from tvb_mergekit.cli import main

    if does:
        MISHAPS[does](lambda: _met(said, befallen))
    code: Any = 0
    try:
        main(words, prog_name="tvb")
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


# Mishaps


Meet = Callable[[], object]  # returns when all whom a mishap befalls have called it


def _met(said: Path, count: int) -> None:
    said.with_suffix(".there").touch()
    deadline = time.monotonic() + 60
    while len(list(said.parent.glob("*.there"))) < count and time.monotonic() < deadline:
        time.sleep(0.01)


def _after(module: Any, name: str, count: int, meet: Meet, then: Callable[[], object]) -> None:
    """Have something happen after so many calls of a method, and after each from there on."""
    original, calls = getattr(module, name), itertools.count(1)

    def wrapped(*args: Any, **keys: Any) -> Any:
        value = original(*args, **keys)
        call = next(calls)
        if call == count:
            meet()
        if call >= count:
            then()
        return value

    setattr(module, name, wrapped)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dawdle() -> None:
    time.sleep(0.5)


def _dies_summing(meet: Meet) -> None:
    from tvb_mergekit.gram import GramSums

    _after(GramSums, "end", 2, meet, _die)


def _slow_summing(meet: Meet) -> None:
    from tvb_mergekit.gram import GramSums

    _after(GramSums, "end", 1, meet, _dawdle)


def _dies_writing(meet: Meet) -> None:
    from tvb_mergekit import writing

    _after(writing.FoldersSink, "write", 1, meet, _die)


def _slow_writing(meet: Meet) -> None:
    from tvb_mergekit import writing

    _after(writing.FoldersSink, "write", 1, meet, _dawdle)


def _elsewhere(meet: Meet) -> None:
    """Sees nothing that the others have made."""
    from tvb_mergekit import ranks

    ranks._appears = lambda path: False


MISHAPS = {
    "dies summing": _dies_summing,
    "slow summing": _slow_summing,
    "dies writing": _dies_writing,
    "slow writing": _slow_writing,
    "elsewhere": _elsewhere,
}
