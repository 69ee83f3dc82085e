"""The commands in processes of their own, with faults: full disks, signals, kills.

They are forked from a server that has imported everything, since a start of Python with mergekit
takes seconds and a fork does not. A fault is a picklable function that patches the new process
before the command runs. `on_change` needs no names of ours: it acts at the n-th change of a folder,
as Python's audit events tell it.
"""

import atexit
import ctypes
import errno
import gc
import importlib
import itertools
import multiprocessing
import os
import pkgutil
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

resource = pytest.importorskip("resource", reason="processes are forked")

MAINS = {
    "tvb": "tvb_mergekit.cli.commands",
    "mergekit-yaml": "mergekit.scripts.run_yaml",
    "mergekit-multi": "mergekit.scripts.multimerge",
}
PRELOADED = (
    *("processes", *MAINS.values(), "transformers.models.llama.configuration_llama"),
    *(f"tvb_mergekit.{n}" for n in ("cli.inspect", "plugin.inputs", "plugin.run", "store.build")),
)
Fault = Callable[[], object]


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (minus the signal that killed it), and what it said."""

    code: int
    out: str
    err: str


class Running:
    """A command that runs in `folder`; `words` start with its name."""

    def __init__(
        self, words: Sequence[object], folder: Path, fault: Fault | None = None, **env: str
    ) -> None:
        self._said = Path(tempfile.mkdtemp())
        for name in ("out", "err"):
            (self._said / name).touch()
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        with mock.patch.dict(
            os.environ,
            PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), *sys.path]),
            HF_HUB_OFFLINE="1",
            OMP_NUM_THREADS="1",
            TRANSFORMERS_VERBOSITY="error",
        ):
            listed = [str(word) for word in words]
            args = (listed, folder, self._said, fault, {**env})
            self.process = context.Process(target=_run, args=args)
            self.process.start()

    def wait(self) -> Ended:
        self.process.join(120)
        self.process.kill()
        self.process.join()
        out, err = ((self._said / name).read_text(errors="replace") for name in ("out", "err"))
        shutil.rmtree(self._said)
        return Ended(self.process.exitcode, out, err)


def run(words: Sequence[object], folder: Path, fault: Fault | None = None, **env: str) -> Ended:
    return Running(words, folder, fault, **env).wait()


def _run(
    words: list[str], folder: Path, said: Path, fault: Fault | None, env: Mapping[str, str]
) -> None:
    gc.freeze()  # a collection of what the server imported would copy its memory
    atexit._clear()
    # The shell of a background job, nohup or a CI may have had the tests ignore signals.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ.update(env)
    os.chdir(folder)
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(said / name, os.O_WRONLY), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    main = importlib.import_module(MAINS[words[0]]).main
    if fault is not None:
        fault()
    try:
        main(words[1:], prog_name=words[0])
    finally:
        atexit._run_exitfuncs()  # which multiprocessing does not do


# What may happen


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def fail(number: int) -> None:
    raise OSError(number, os.strerror(number))


KILL = partial(send, signal.SIGKILL)
INTERRUPT = partial(send, signal.SIGINT)
TERMINATE = partial(send, signal.SIGTERM)
FULL = partial(fail, errno.ENOSPC)


# When


def on_call(target: str, act: Fault, number: int = 1) -> None:
    """Have it happen before the `number`-th call of the function `target`."""
    path, _, name = target.rpartition(".")
    place, calls = pkgutil.resolve_name(path), itertools.count(1)
    original = getattr(place, name)

    def patched(*args: Any, **keys: Any) -> Any:
        if next(calls) == number:
            act()
        return original(*args, **keys)

    setattr(place, name, patched)


def on_change(folder: Path | str, act: Fault, number: int, log: Path | None = None) -> None:
    """Have it happen before the `number`-th change of what is in `folder` (0: before each).

    Changes are files opened to be written, and names made, moved and deleted. `log` gets a line
    for each.
    """
    inside, calls = os.path.abspath(folder) + os.sep, itertools.count(1)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if log else None

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            changes = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        else:
            changes = event in ("os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir")
        if not changes:
            return
        within = event in ("os.remove", "os.rmdir") and args[-1] >= 0  # of shutil.rmtree
        if not (within or os.path.abspath(os.fsdecode(args[0])).startswith(inside)):
            return
        if handle is not None:
            os.write(handle, f"{event} {args[0]}\n".encode())
        if number in (0, next(calls)):
            act()

    sys.addaudithook(hook)


def unprivileged() -> None:
    """Permissions count for root, too: without CAP_DAC_OVERRIDE and _READ_SEARCH."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, old = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, old) == 0
    assert libc.capset(header, (ctypes.c_uint32 * 6)(old[0] & ~6, *old[1:])) == 0


def closed_output() -> None:
    """Nobody reads the standard output any more."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    encoded_output("utf-8")


def encoded_output(encoding: str) -> None:
    """As with PYTHONIOENCODING, or on a terminal of a locale."""
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)


def little_disk() -> None:
    shutil.disk_usage = lambda path: SimpleNamespace(free=1000, total=1000)  # type: ignore
