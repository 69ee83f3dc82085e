"""Run one command and say what it cost; put files into the page cache or out of it. Linux only.

The process that measures must stay small: Linux counts a parent's resident memory at the time of
the fork in the child's peak. So nothing large is imported here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL = 0.010  # seconds between two looks at a process's anonymous memory
MB = 10**6


@dataclass
class Usage:
    """The cost of one process. MB are 10^6 bytes."""

    wall_s: float  # from before its start to its end
    cpu_s: float  # user and system, all threads
    peak_rss_mb: float  # by the kernel (getrusage), mapped files included
    peak_rss_anon_mb: float  # polled every POLL seconds: a shorter peak may be missed
    read_mb: float  # by the kernel (getrusage): what came from the disk, not the page cache
    others_cpu_s: float  # of all other processes and the hypervisor's steal, over the same time


def environment(**more: str) -> dict[str, str]:
    """The environment of a child, where no setting of the caller's shell decides: threads least."""
    dropped = ("TVB_", "OMP_", "MKL_", "OPENBLAS_", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, "HF_HUB_OFFLINE": "1", **more}


class CommandFailed(Exception):
    """A measured command exited with an error; the message ends with its last lines."""


def run(command: Sequence[str], env: Mapping[str, str], log: Path) -> Usage:
    """Run a command to its end, its output in `log`.

    Raises:
        CommandFailed: its exit status is not 0.
    """
    done = threading.Event()
    peak = [0]
    with log.open("wb") as file:
        own, busy = time.process_time(), _busy()
        started = time.perf_counter()
        child = subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
        watch = threading.Thread(target=_watch, args=(child.pid, done, peak), daemon=True)
        watch.start()
        try:
            # Not reaped yet, so that the watch cannot meet another process of the same number.
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            wall = time.perf_counter() - started
            busy = _busy() - busy
        except BaseException:
            child.kill()
            raise
        finally:
            done.set()
            watch.join()
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        tail = log.read_text(errors="replace").replace("\r", "\n").splitlines()[-15:]
        text = "\n".join([f"{' '.join(command)} exited with {child.returncode}", *tail])
        raise CommandFailed(text)
    cpu = usage.ru_utime + usage.ru_stime
    return Usage(
        wall_s=wall,
        cpu_s=cpu,
        peak_rss_mb=usage.ru_maxrss * 1024 / MB,
        peak_rss_anon_mb=peak[0] * 1024 / MB,
        read_mb=usage.ru_inblock * 512 / MB,
        others_cpu_s=max(0.0, busy - cpu - (time.process_time() - own)),
    )


def _watch(pid: int, done: threading.Event, peak: list[int]) -> None:
    while not done.wait(POLL):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        if match := re.search(r"^RssAnon:\s*(\d+) kB", status, re.MULTILINE):
            peak[0] = max(peak[0], int(match[1]))


def _busy() -> float:
    """CPU seconds that all processors have spent on something, steal included."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def evict(paths: Iterable[Path]) -> None:
    """Drop files from the page cache, if the file system lets it; see `resident`."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def warm(paths: Iterable[Path]) -> None:
    """Read files into the page cache."""
    buffer = bytearray(2**22)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def resident(paths: Iterable[Path]) -> float:
    """The share of the files' pages that the page cache holds (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    held = total = 0
    for path in paths:
        size = path.stat().st_size
        pages = -(-size // mmap.PAGESIZE)
        flags = (ctypes.c_ubyte * pages)()
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as m:
            anchor = ctypes.c_char.from_buffer(m)
            address = ctypes.c_void_p(ctypes.addressof(anchor))
            failed = libc.mincore(address, ctypes.c_size_t(size), flags)
            del anchor  # the map cannot be closed before
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
        held += sum(flag & 1 for flag in bytes(flags))
        total += pages
    return held / max(1, total)
