"""HumanEval+ and MBPP+ as bigcode-evaluation-harness runs them, each program in sandbox.py.

Prompts, stops and programs are those of
https://github.com/bigcode-project/bigcode-evaluation-harness (bigcode_eval/tasks and
custom_metrics/code_eval.py).

Environment: MERGEBENCH_CODE_WORKERS (programs at a time), MERGEBENCH_CODE_MEMORY_GIB (for each, 4),
MERGEBENCH_CODE_SECONDS (instead of bigcode's 20 and 10). MERGEBENCH_UNSAFE_NO_SANDBOX=1 uses no
namespaces, for a container that isolates already.
"""

import contextlib
import importlib.util
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from tqdm import tqdm

Doc = dict[str, Any]

SANDBOX = Path(__file__).with_name("sandbox.py")
HUMANEVAL_STOPS = ("\nclass", "\ndef", "\n#", "\n@", "\nprint", "\nif", "\n```", "<file_sep>")
MBPP_STOPS = ("\nclass", "\nassert", '\n"""', "\nprint", "\nif", "\n<|/", "\n```")
HUMANEVAL_SECONDS, MBPP_SECONDS = 20.0, 10.0
MORE_SECONDS = 30.0  # for sandbox.py to start and to end
SECOND_LOOK_SECONDS = 300.0  # in which programs of a task that timed out may start once more
PASSED, TIMED_OUT = "passed", "failed: timed out"
UNCHECKED = TIMED_OUT + ", and was not looked at again"
CGROUP = Path("/sys/fs/cgroup")

log = logging.getLogger(__name__)


# ---------------------------------------------------------------------------- prompts and programs


def humaneval_prompt(doc: Doc) -> str:
    prompt: str = doc["prompt"]
    return prompt.strip()


def mbpp_prompt(doc: Doc) -> str:
    return f'"""\n{doc["prompt"]}\n{doc["test_list"][0]}\n"""\n'


def cut(completion: str, stops: Iterable[str]) -> str:
    """The text before the first of the stops. Some of lm-eval's models accept fewer than eight."""
    ends = (completion.find(stop) for stop in stops)
    return completion[: min((end for end in ends if end >= 0), default=len(completion))]


def humaneval_program(doc: Doc, completion: str) -> str:
    tests = f"\n{doc['test']}\ncheck({doc['entry_point']})"
    return f"{humaneval_prompt(doc)}{cut(completion, HUMANEVAL_STOPS)}\n{tests}"


def mbpp_program(doc: Doc, completion: str) -> str:
    return f"{mbpp_prompt(doc)}{cut(completion, MBPP_STOPS)}\n\n{doc['test']}"


# ------------------------------------------------------------------------------------------ running


def _number(name: str, default: float) -> float:
    """A positive number out of the environment."""
    text = os.environ.get(name, "")
    try:
        value = float(text or default)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1e6:
        raise SystemExit(f"{name}={text}: give a number above 0 and up to a million, or leave it "
                           f"out for {default:g}")  # fmt: skip
    return value


def _memory_gib() -> float:
    return _number("MERGEBENCH_CODE_MEMORY_GIB", 4)


def _workers() -> int:
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = min(len(os.sched_getaffinity(0)), _quota()) // processes
    return int(max(1, _number("MERGEBENCH_CODE_WORKERS", max(1, cores))))


def _quota() -> float:
    """The cores that a container may use, by its cgroup (version 2, or else 1)."""
    for names in ("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"):
        with contextlib.suppress(OSError):
            quota, period = " ".join((CGROUP / name).read_text() for name in names).split()
            if quota not in ("max", "-1"):
                return float(quota) / float(period)
    return math.inf


def _bare() -> bool:
    return os.environ.get("MERGEBENCH_UNSAFE_NO_SANDBOX") == "1"


@cache
def _site() -> str:
    """The folder that numpy is in: the tests of both data sets import it."""
    numpy = importlib.util.find_spec("numpy")
    assert numpy is not None and numpy.origin is not None  # lm-eval needs it
    return str(Path(numpy.origin).parents[1])


def run(program: str, seconds: float) -> str:
    """`PASSED`, or why the program did not pass. OSError where the machine cannot isolate it, or
    twice could not for want of memory or processes."""
    try:
        return _run(program, seconds)
    except OSError:
        time.sleep(1)
        return _run(program, seconds)


def _run(program: str, seconds: float) -> str:
    command = [
        sys.executable, "-I", "-S", str(SANDBOX), "--seconds", str(seconds),
        "--memory-gib", str(_memory_gib()), "--show", sys.base_prefix, "--site", _site(),
    ]  # fmt: skip
    env = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
    env |= {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    if "LD_LIBRARY_PATH" in os.environ:  # some builds of Python need it to start
        env["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    own: contextlib.AbstractContextManager[str] = contextlib.nullcontext("/")  # it has its own /tmp
    if _bare():
        own = tempfile.TemporaryDirectory(prefix="mergebench-", ignore_cleanup_errors=True)
    with (
        own as folder,
        subprocess.Popen(
            command + ["--bare"] * _bare(), cwd=folder, env=env, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as sandbox,
    ):  # fmt: skip
        try:
            given = program.encode("utf-8", "surrogatepass")
            out, said = sandbox.communicate(given, seconds + MORE_SECONDS)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            _kill(sandbox)
    if sandbox.returncode < 0 and _bare():  # only with namespaces it is out of a program's reach
        return f"failed: killed its sandbox by signal {-sandbox.returncode}"
    if sandbox.returncode != 0:
        lines = said.decode(errors="replace").strip().splitlines() or ["no message"]
        raise OSError(f"{SANDBOX.name} ended with status {sandbox.returncode}: {lines[-1]}")
    verdict = json.loads(out)
    return PASSED if verdict["passed"] else f"failed: {verdict['reason']}"


def _kill(sandbox: "subprocess.Popen[bytes]") -> None:
    """Kill what did not end by itself, with all that it started: a bare program may stop it."""
    if sandbox.poll() is not None:
        return
    family = [sandbox.pid]
    for pid in family:  # it grows
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it may have ended
                family += map(int, file.read_text().split())
    for pid in family:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def run_all(programs: Sequence[str], seconds: float, items: Sequence[int]) -> list[str]:
    """The verdicts, in order, of programs that run in parallel.

    Programs that time out run a second time, alone, since a busy machine may be the cause. None
    starts later than SECOND_LOOK_SECONDS after the first; the others are UNCHECKED. One program of
    each item runs first, then a second of each. `items` holds the item of each program.
    """
    seconds = _number("MERGEBENCH_CODE_SECONDS", seconds)
    with ThreadPoolExecutor(_workers()) as pool:
        found = pool.map(lambda program: run(program, seconds), programs)
        try:
            verdicts = list(tqdm(found, total=len(programs), desc="Running programs"))
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, do not run the others first
    seen: Counter[int] = Counter()
    rounds = []
    for number, verdict in enumerate(verdicts):
        if verdict == TIMED_OUT:
            rounds.append((seen[items[number]], number))
            seen[items[number]] += 1
    slow = [number for _, number in sorted(rounds)]
    end = time.monotonic() + SECOND_LOOK_SECONDS
    for number in tqdm(slow, desc="Running the slow ones alone", disable=not slow):
        late = time.monotonic() >= end
        verdicts[number] = UNCHECKED if late else run(programs[number], seconds)
    if slow:
        unchecked = verdicts.count(UNCHECKED)
        log.warning("%d of %d programs timed out after %g s; %d of them ran again, alone, and %d "
                    "passed or failed in time; %d were not looked at again", len(slow),
                    len(programs), seconds, len(slow) - unchecked,
                    len(slow) - unchecked - verdicts.count(TIMED_OUT), unchecked)  # fmt: skip
    return verdicts


# ---------------------------------------------------------------------------------- what YAML names


def _judge(
    resps: Iterable[Sequence[str]], docs: Iterable[Doc],
    build: Callable[[Doc, str], str], seconds: float,
) -> list[list[str]]:  # fmt: skip
    completions = [list(each) for each in resps]
    programs = [build(doc, text) for doc, texts in zip(docs, completions, strict=True)
                for text in texts]  # fmt: skip
    items = [item for item, texts in enumerate(completions) for _ in texts]
    verdicts = iter(run_all(programs, seconds, items))
    return [[next(verdicts) for _ in texts] for texts in completions]


def judge_humaneval(resps: Iterable[Sequence[str]], docs: Iterable[Doc]) -> list[list[str]]:
    """A filter: for each document, the verdicts on its completions."""
    return _judge(resps, docs, humaneval_program, HUMANEVAL_SECONDS)


def judge_mbpp(resps: Iterable[Sequence[str]], docs: Iterable[Doc]) -> list[list[str]]:
    """A filter: for each document, the verdicts on its completions."""
    return _judge(resps, docs, mbpp_program, MBPP_SECONDS)


def score(doc: Doc, results: list[list[str]]) -> dict[str, float]:
    """The share of programs that passed: pass@1 without bias (arXiv 2107.03374). `unchecked` is the
    share of programs that timed out and might have passed on a machine less busy."""
    (verdicts,) = results
    return {name: verdicts.count(verdict) / len(verdicts)
            for name, verdict in (("score", PASSED), ("unchecked", UNCHECKED))}  # fmt: skip


# ------------------------------------------------------------------------------------------- probes

ADVICE = (
    "Allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces "
    "above 0, kernel.apparmor_restrict_unprivileged_userns=0), in a container run as root with "
    "--cap-add SYS_ADMIN --security-opt apparmor=unconfined --security-opt seccomp=unconfined; or "
    "set MERGEBENCH_UNSAFE_NO_SANDBOX=1 if this machine holds nothing that such code may not touch"
)

STARTS = "start Python with numpy"


def probes(port: int) -> dict[str, str]:
    """Forbidden actions -> programs that pass if the action fails. `port` is open on 127.0.0.1."""
    home = Path.home()
    secrets = [home / ".ssh", home / ".netrc", home / ".aws", home / ".cache" / "huggingface"]
    secrets += [Path("/etc/passwd"), Path(os.environ.get("HF_HOME", "/etc/shadow"))]
    outside = [str(Path(folder) / "mergebench-probe") for folder in
               ("/", "/usr", "/etc", "/dev/shm", str(home), sys.base_prefix, _site())]  # fmt: skip
    memory = int(_memory_gib() * 2**30)
    return {
        STARTS: "import numpy",
        "see your files": (
            f"import os\nseen = [path for path in {[str(path) for path in secrets]}"
            " if os.path.exists(path)]\nassert not seen, seen"
        ),
        "write outside of its folder": f"""
open("own", "w").close()
for path in {outside}:
    try:
        open(path, "w").close()
    except OSError:
        continue
    raise AssertionError(path)
""",
        "see other processes": "import os\nassert (os.getpid(), os.getppid()) == (1, 0)",
        "reach 127.0.0.1": f"""
import socket
assert socket.socket().connect_ex(("127.0.0.1", {port})) != 0
""",
        "gain rights": """
import ctypes
libc = ctypes.CDLL(None)
assert libc.unshare(0x10000000) == -1  # CLONE_NEWUSER
assert libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) == -1
""",
        "start processes without end": """
import os, time
try:
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(60)
except OSError:
    pass
else:
    raise AssertionError("100 processes")
""",
        "take more memory than it may": f"""
try:
    bytearray({memory + 1})
except MemoryError:
    pass
else:
    raise AssertionError("{memory + 1} bytes")
""",
    }


@cache
def _probe(bare: bool) -> None:
    def verdict(program: str) -> str:
        try:
            return run(program, 10)
        except OSError as error:
            return str(error)

    with socket.create_server(("127.0.0.1", 0)) as server:
        tried = probes(server.getsockname()[1])
        if bare:
            tried = {STARTS: tried[STARTS]}
        with ThreadPoolExecutor(_workers()) as pool:
            found = list(pool.map(verdict, tried.values()))
    for name, said in zip(tried, found, strict=True):
        if said != PASSED and bare:
            raise SystemExit(f"a program cannot {name} ({said}): is MERGEBENCH_CODE_MEMORY_GIB="
                             f"{_memory_gib():g} enough, and numpy there?")  # fmt: skip
        if said != PASSED:
            what = "cannot" if name == STARTS else "can"
            raise SystemExit(f"in the sandbox, a program {what} {name} ({said}). {ADVICE}")


def check(docs: Any) -> Any:
    """A `process_docs` that changes nothing. It ends the program with one line, before the model
    generates, if the sandbox does not hold or a number is wrong."""
    if sys.platform != "linux":
        raise SystemExit(f"MergeBench's code tasks need Linux, this is {sys.platform}: run them "
                           "in a virtual machine or leave mergebench_coding out")  # fmt: skip
    _workers(), _memory_gib(), _number("MERGEBENCH_CODE_SECONDS", 1)  # refuses a wrong number early
    _probe(_bare())
    return docs
