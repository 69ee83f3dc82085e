"""Run one untrusted Python program apart from this machine, and say whether it came to its end.

    python -I -S sandbox.py --seconds 10 --memory-gib 4 --show PREFIX --site SITE < PROGRAM

prints a line of JSON, {"passed": false, "reason": "AssertionError: "}. Status 3 and a line on the
standard error mean that the machine cannot isolate: nothing of the program ran.

A program gets (Linux, as any user; root's programs become users without rights):
- its own PID, network, IPC and host-name namespaces: it sees and signals only its own processes,
  and has no network, not even 127.0.0.1. When it ends, the kernel kills all that it started.
- a root of its own with /usr, the `--show` folders (Python, numpy), all read-only, and four
  devices: no homes, no /etc, no /proc, no /run. Only /tmp can be written, 64 MiB that vanish.
- no capability, no way to get one back (no_new_privs), no new user namespace (it is in a chroot).
- limits on wall and CPU time, memory and file size, and on the number of processes.
- the environment of this script, which its caller chooses; input and output on /dev/null.

`--bare` is for a machine that isolates already: the limits hold except that on processes, and the
program starts in the working folder of this script. Its processes are killed at its end, as far as
possible in five seconds. A hostile program can stop this script, and leave processes.

Not covered are bugs of the kernel, sockets outside of namespaces (AF_VSOCK to the host of a virtual
machine), and memory in sum: the limit is for each of up to 32 processes. A program that looks
for it can pass without passing its tests: tests and answer share one interpreter. Prints, exits and
signals do not pass: "passed" needs a secret, written after the last line on a pipe that only this
process reads.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Sequence

MIB = 2**20
PROCESSES = 32
REASON_BYTES = 300
NOBODY = 65534
FIRST_USER = 60000  # ids below 65536, which containers have, and that nobody logs in as
USERS = 5000
REAP_SECONDS = 5.0

# linux/sched.h, linux/mount.h, linux/prctl.h, linux/capability.h
NEW_NS, NEW_UTS, NEW_IPC, NEW_USER = 0x00020000, 0x04000000, 0x08000000, 0x10000000
NEW_PID, NEW_NET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
CAPABILITY_VERSION_3 = 0x20080522
KEYCTL = {"x86_64": 250, "aarch64": 219}  # the number of the system call
KEYCTL_JOIN_SESSION_KEYRING = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: bytes | int | ctypes.Array[ctypes.c_uint32] | None) -> None:
    """A function of libc that gives 0, or an OSError with the function's name."""
    wide = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments]
    if getattr(_libc, name)(*wide) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    try:
        _call("mount", *(None if text is None else os.fsencode(text)
                         for text in (source, target, kind)), flags, data.encode())  # fmt: skip
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({target.removeprefix('/new')})") from None


# ------------------------------------------------------------------------------------- the outside


def _enter_namespaces(user: int) -> None:
    """Enter new namespaces; the one of PIDs is for the children of this process.

    Root needs no user namespace. All others, and root in a container without that right, enter one;
    root's has two users, so that the program can become `user`.
    """
    flags = NEW_NS | NEW_UTS | NEW_IPC | NEW_PID | NEW_NET
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        with contextlib.suppress(PermissionError):
            return _call("unshare", flags)
        ids = f"0 0 1\n{user} {user} 1"
        maps = {"uid_map": ids, "gid_map": ids}
    else:
        maps = {"setgroups": "deny", "uid_map": f"{NOBODY} {uid} 1", "gid_map": f"{NOBODY} {gid} 1"}
    # A process outside must write the maps: only there root may say more than one line.
    own, (heard, told) = os.getpid(), os.pipe()
    outside = os.fork()
    if outside == 0:
        code = 1
        try:
            os.close(told)
            os.read(heard, 1)  # until the other end is closed
            for name, text in maps.items():
                with open(f"/proc/{own}/{name}", "w") as file:
                    file.write(text)
            code = 0
        except OSError as error:
            code = error.errno or 1
        finally:
            os._exit(code)
    try:
        _call("unshare", NEW_USER | flags)
    finally:
        os.close(told)
        code = os.waitstatus_to_exitcode(os.waitpid(outside, 0)[1])
    if code != 0:
        raise OSError(code, f"uid_map: {os.strerror(code)}")


def _read_only(top: str, forbidden: int = MS_NOSUID | MS_NODEV) -> None:
    """Remount all that is mounted at or below a path. The flags it has must stay: they may be
    locked."""
    with open("/old/proc/self/mountinfo", "rb") as file:
        points = [line.split()[4] for line in file]
    for escaped in points:
        # a blank is written as \040
        point = os.fsdecode(re.sub(rb"\\(\d{3})", lambda found: bytes([int(found[1], 8)]), escaped))
        if point == top or point.startswith(f"{top}/"):
            kept = os.statvfs(point).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
            _mount(None, point, None, kept | forbidden | MS_RDONLY | MS_BIND | MS_REMOUNT)


def _enter_root(show: Sequence[str]) -> None:
    """Replace this machine's files by a new root with a few read-only folders."""
    links = {}
    sources = {}
    for path in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(path):
            links[path] = os.readlink(path)
        elif os.path.isdir(path):
            sources[path] = path
    sources |= {path: os.path.realpath(path) for path in sorted(show, key=len)}

    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    os.mkdir("/tmp/old")
    _call("pivot_root", b"/tmp", b"/tmp/old")
    os.chdir("/")

    for path in ("/new", "/new/dev", "/new/tmp", "/new/proc"):
        os.mkdir(path)
    _mount("tmpfs", "/new/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777,size=64m,nr_inodes=4096")
    for path, target in links.items():
        os.symlink(target, f"/new{path}")
    for path, source in sources.items():
        if not os.path.isdir(f"/new{path}"):  # else it is in a folder that is there
            os.makedirs(f"/new{path}")
            _mount(f"/old{source}", f"/new{path}", None, MS_BIND | MS_REC)
            _read_only(f"/new{path}")
    for path in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
        os.close(os.open(f"/new{path}", os.O_CREAT | os.O_WRONLY))
        _mount(f"/old{path}", f"/new{path}", None, MS_BIND)
        _read_only(f"/new{path}", MS_NOSUID | MS_NOEXEC)
    _call("umount2", b"/old", MNT_DETACH)
    _mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    # A folder below the root of the mounts: from there, the kernel gives no user namespaces.
    os.chroot("/new")
    os.chdir("/tmp")


def _reap() -> None:
    """Kill and collect all that descends from this process, a subreaper; give up where it forks
    faster than that."""
    deadline = time.monotonic() + REAP_SECONDS
    while time.monotonic() < deadline:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = [int(child) for child in file.read().split()]
        if not children:
            return
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, os.WNOHANG)
        time.sleep(0.001)


def run(
    program: str, *, seconds: float, memory: int, show: Sequence[str], site: Sequence[str],
    bare: bool,
) -> tuple[bool, str]:  # fmt: skip
    """Whether the program ran to its end, and else why not. `memory` is in bytes.

    Changes this process for good (namespaces, root): once per process. Raises OSError where the
    machine does not let it, before the program starts.
    """
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    user = FIRST_USER + os.getpid() % USERS
    if bare:
        _call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    else:
        _enter_namespaces(user)
        _enter_root([*show, *site])
    # Not before: a change of rights takes it away.
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    secret = os.urandom(16).hex().encode()
    heard, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _kill_first(proc)
            _confine(told, memory, math.ceil(seconds) + 1, None if bare else user)
            sys.path += site
            _execute(program, secret)
        finally:
            os._exit(1)
    os.close(told)
    ended, _, _ = select.select([os.pidfd_open(child)], [], [], seconds)
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if bare:
        _reap()
    os.set_blocking(heard, False)  # of a bare program, a process may be left that holds the pipe
    said = b""
    with contextlib.suppress(BlockingIOError):
        said = os.read(heard, REASON_BYTES)
    if ended and said == secret:
        return True, ""
    killed = f"killed by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else ""
    reason = said.decode(errors="replace") or killed or "ended before its last line"
    return False, reason if ended else "timed out"


# -------------------------------------------------------------------------------------- the inside


def _kill_first(proc: int) -> None:
    """Let the kernel kill this process first when memory runs out. `proc` is the folder /proc."""
    with contextlib.suppress(OSError):
        os.write(os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=proc), b"1000")


def _confine(told: int, memory: int, cpu_seconds: int, user: int | None) -> None:
    """Drop all rights of the program, and put the pipe `told` at file 3. Root becomes `user`, who
    has no other program, since the kernel counts processes per user. None: `--bare`."""
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.dup2(told, 3)
    os.closerange(4, 256)

    limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: cpu_seconds}
    limits |= {resource.RLIMIT_FSIZE: 16 * MIB, resource.RLIMIT_NOFILE: 256}
    limits[resource.RLIMIT_CORE] = 0
    if user is not None:  # else the other processes of whoever runs this would count too
        limits[resource.RLIMIT_NPROC] = PROCESSES
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))

    if user is not None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
        _call("capset", header, (ctypes.c_uint32 * 6)())
    if (keyctl := KEYCTL.get(os.uname().machine)) is not None:
        # An empty keyring instead of the caller's. If this is forbidden, so is reading keys.
        _libc.syscall(ctypes.c_long(keyctl), ctypes.c_long(KEYCTL_JOIN_SESSION_KEYRING), None)
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # No signal comes for a parent that ended before this call: then nobody has the pipe's other
    # end any more. (The parent's id does not help: it is 0 in a new PID namespace.)
    pipe = select.poll()
    pipe.register(3, 0)
    if pipe.poll(0):
        os._exit(1)


def _execute(program: str, secret: bytes) -> None:
    """Run the program in an empty namespace, as bigcode's harness does; file 3 gets its end."""
    write, leave = os.write, os._exit  # the program may replace those of the module
    try:
        sys.argv[:] = ["program"]
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            # not with the `annotations` that this file imports from the future
            exec(compile(program, "<string>", "exec", dont_inherit=True), {})
        except BaseException as error:
            said = f"{type(error).__name__}: {error}".encode("utf-8", "replace")
            write(3, said[:REASON_BYTES])
        else:
            write(3, secret)
    finally:
        leave(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--seconds", "--memory-gib"):
        parser.add_argument(name, type=float, required=True)
    for name in ("--show", "--site"):
        parser.add_argument(name, action="append", default=[])
    parser.add_argument("--bare", action="store_true")
    options = parser.parse_args()
    program = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    try:
        passed, reason = run(
            program, seconds=options.seconds, memory=int(options.memory_gib * 2**30),
            show=options.show, site=options.site, bare=options.bare,
        )  # fmt: skip
    except OSError as error:
        print(error.strerror or error, file=sys.stderr)
        sys.exit(3)
    print(json.dumps({"passed": passed, "reason": reason}))


if __name__ == "__main__":
    main()
