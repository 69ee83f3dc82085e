"""evals/mergebench/coding: how programs are built, and that they are locked in."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from rows import ROWS
from scripted import module, namespaces

programs = module("coding/programs")


@pytest.fixture(scope="module")
def isolated() -> None:
    """No program of this file runs where it could do harm; only the kernel excuses from it."""
    if not namespaces():
        pytest.skip("this machine gives no namespaces, as in a container without rights")
    programs.check("docs")


def refusal() -> str:
    with pytest.raises(SystemExit) as caught:
        programs.check("docs")
    return str(caught.value)


def test_a_program_is_prompt_completion_and_tests() -> None:
    assert programs.humaneval_program(ROWS["humaneval"][1], "\n    return ''\nif x") == (
        ROWS["humaneval"][1]["prompt"].rstrip() + "\n    return ''\n\n"
        "def check(candidate):\n    assert candidate(['a', 'bcd', 'ef']) == 'bcd'\n\ncheck(longest)"
    )
    assert programs.mbpp_program(ROWS["mbpp"][1], "x = 1\n<|/end") == (
        '"""\nWrite a function to count the vowels of a text.\nassert vowels(\'tree\') == 2\n"""\n'
        "x = 1\n\nassert vowels('tree') == 2\nassert vowels('') == 0\n"
    )
    # the first stop cuts
    assert programs.cut("a\nif b\ndef c", ("\ndef", "\nif")) == "a"
    assert programs.cut("a\n  if b", ("\ndef", "\nif")) == "a\n  if b"
    assert programs.cut("", ("\ndef",)) == ""
    prompt = module("coding/conala").prompt(ROWS["conala"][1])  # with CoNaLa's own words
    assert f"\nInstruction:\nread a file by lines{19 * ' '}\nSolution:\n" in prompt


ENDS = ROWS["endings"] | {  # program -> how it must end
    f"open({str(Path(__file__))!r})": "FileNotFoundError: ",
    "x = '\ud800'": "UnicodeEncodeError: ",
    "import ctypes\nctypes.string_at(0)": f"killed by signal {int(signal.SIGSEGV)}",
}


def test_what_a_program_may_and_may_not_do(isolated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    for program, end in ENDS.items():
        found = programs.run(program, 10)
        assert found.startswith(f"failed: {end}"), (program, found)
    for program in ROWS["passing"]:
        assert programs.run(program, 10) == "passed", program
    for place in ("/etc/mergebench-test", "/mergebench-test", "/usr/mergebench-test"):
        assert not Path(place).exists()
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"import socket\nsocket.create_connection({server.getsockname()!r}, 3)"
        assert "Network is unreachable" in programs.run(connect, 10)
    with subprocess.Popen(["sleep", "60"]) as bystander:
        kill = f"import os\nfor pid in (-1, {bystander.pid}, {os.getpid()}):\n  try: "
        kill += "os.kill(pid, 9)\n  except OSError: pass\n"
        assert programs.run(kill, 10) == "passed"
        assert bystander.poll() is None
        bystander.kill()


def test_a_program_that_hangs_is_stopped(isolated: None) -> None:
    start = time.monotonic()
    deaf = "import signal\nfor n in (2, 15, 24): signal.signal(n, signal.SIG_IGN)\n"
    for hangs in (deaf + "while True:\n  try: 1\n  except: pass", "import time\ntime.sleep(60)"):
        assert programs.run(hangs, 1) == "failed: timed out"
    assert time.monotonic() - start < 15


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(300)
    os._exit(0)
os.wait()
"""


def running(text: str) -> bool:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text.encode() in file.read_bytes():
                return True
    return False


@pytest.mark.parametrize("bare", ["", "1"])
def test_no_process_outlives_its_program(bare, isolated, monkeypatch):
    monkeypatch.setenv("MERGEBENCH_UNSAFE_NO_SANDBOX", bare)
    seconds = 20 + os.getpid() / 1e7  # to know its processes by
    assert programs.run(DAEMON, seconds) == "passed"
    assert not running(str(seconds))


def test_machines_that_cannot_isolate_are_told_why(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(programs, "run", lambda program, _: (
            "failed: AssertionError" if "mergebench-probe" in program else "passed"))  # fmt: skip
        programs._probe.cache_clear()
        line = refusal()
    assert line.startswith("in the sandbox, a program can write outside of its folder (failed: Ass")
    assert "MERGEBENCH_UNSAFE_NO_SANDBOX=1" in line and "\n" not in line
    monkeypatch.setenv("MERGEBENCH_CODE_MEMORY_GIB", "nan")
    monkeypatch.setattr(programs, "_probe", lambda _: None)
    assert refusal().startswith("MERGEBENCH_CODE_MEMORY_GIB=nan: give a number above 0 and up to a")
