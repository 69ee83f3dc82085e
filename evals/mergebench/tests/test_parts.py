"""Parts of evals/mergebench: programs that are locked in, and the judge of safety."""

import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from rows import ROWS, write_judge
from scripted import module, namespaces

programs = module("coding/programs")


@pytest.fixture(scope="module")
def isolated() -> None:
    """No program of this file runs where it could do harm; only the kernel excuses from it."""
    if not namespaces():
        pytest.skip("this machine gives no namespaces, as in a container without rights")
    programs.check("docs")


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
    deaf = "import signal\nfor n in (2, 15, 24): signal.signal(n, signal.SIG_IGN)\n"
    for hangs in (deaf + "while True:\n  try: 1\n  except: pass", "import time\ntime.sleep(60)"):
        assert programs.run(hangs, 1) == "failed: timed out"


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


# Safety: verdicts, phrases, the judge


phrases, wildguard = module("safety/refusal_phrases"), module("safety/wildguard")


def test_the_judges_three_lines() -> None:
    for answer, expected in ROWS["verdicts"]:
        fields = dict(zip(("parse_error", "refusal", "harmful"), expected, strict=True))
        assert wildguard.parse(answer) == fields, answer


def told(part: int, sign: str) -> tuple[int, int]:
    """How many of our refusals or answers are taken for refusals, and of how many."""
    text = Path(__file__).with_name("refusals.txt").read_text().split("# held out")[part]
    lines = (line for line in text.split("\n") if line.startswith(f"{sign} "))
    texts = [line[2:].replace("\\n", "\n") for line in lines]
    return sum(map(phrases.is_refusal, texts)), len(texts)


def test_how_many_refusals_are_told_by_their_phrases() -> None:
    assert (told(0, "-"), told(0, "+")) == ((263, 278), (2, 248))  # in view when it was made
    assert (told(1, "-"), told(1, "+")) == ((34, 50), (3, 50))  # held out: the manual's figures
    assert (told(2, "-"), told(2, "+")) == ((39, 60), (5, 60))  # held out lectures: the manual's
    assert (told(3, "-"), told(3, "+")) == ((29, 29), (0, 30))  # one for each rule


def test_a_real_model_says_the_same_in_any_batch(monkeypatch, tmp_path):
    """One whose answers nobody can read."""
    write_judge(tmp_path / "judge")
    for name, value in (("", tmp_path / "judge"), ("_DEVICE", "cpu"), ("_DTYPE", "float32")):
        monkeypatch.setenv(f"MERGEBENCH_JUDGE{name}", str(value))
    monkeypatch.setattr(wildguard, "NEW_TOKENS", 24)
    responses = ("", "Twice.", "No. " * 20, "So", "Or {so}.")
    pairs = [wildguard.Pair("Fold a {napkin}." * (1 + n), r) for n, r in enumerate(responses)]
    said = []
    for size in (1, 2, 5):
        monkeypatch.setenv("MERGEBENCH_JUDGE_BATCH_SIZE", str(size))
        monkeypatch.setenv("MERGEBENCH_CACHE", str(tmp_path / str(size)))
        said.append(wildguard.answers(pairs))
    assert said[0] == said[1] == said[2] and len(set(said[0].values())) > 1
