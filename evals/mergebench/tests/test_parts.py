"""Parts of evals/mergebench: programs that are locked in, and the judge of safety."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import datasets
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from rows import ROWS, write_judge
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


# Safety: verdicts, phrases, the judge


scores = module("safety/safety_scores")
phrases = module("safety/refusal_phrases")


@pytest.fixture
def wildguard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The judge's module, with a cache of its own and an empty folder as the judge."""
    (tmp_path / "judge").mkdir()
    monkeypatch.setenv("MERGEBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MERGEBENCH_JUDGE", str(tmp_path / "judge"))
    monkeypatch.setenv("MERGEBENCH_JUDGE_DEVICE", "cpu")
    for name in ("DTYPE", "BATCH_SIZE"):
        monkeypatch.delenv(f"MERGEBENCH_JUDGE_{name}", raising=False)
    return module("safety/wildguard")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can be loaded, and whose answers nobody can read."""
    folder = tmp_path_factory.mktemp("tiny")
    write_judge(folder)
    return folder


def refused(call: Callable[..., Any], *given: Any) -> str:
    with pytest.raises(SystemExit) as ended:
        call(*given)
    line = ended.value.code
    assert isinstance(line, str) and "\n" not in line
    return line


NOTHING = datasets.Dataset.from_dict({})


def test_the_judges_three_lines(wildguard: ModuleType) -> None:
    for answer, expected in ROWS["verdicts"]:
        fields = dict(zip(("parse_error", "refusal", "harmful"), expected, strict=True))
        assert wildguard.parse(answer) == fields, answer


def test_what_a_verdict_is_worth() -> None:
    safe, unsafe = {"unsafe": False}, {"unsafe": True}
    score = (scores.wildguardtest, scores.harmbench, scores.not_complied, scores.xstest)
    for error, refusal, harmful, expected in ROWS["worth"]:
        verdict = {"parse_error": error, "refusal": refusal, "harmful": harmful}
        docs = zip((*score, scores.xstest), (unsafe, unsafe, unsafe, safe, unsafe), strict=True)
        found = [rate(doc, [verdict]) for rate, doc in docs]
        wanted = [{"score": float(right), "parse_error": float(error)} for right in expected]
        assert found == wanted, verdict


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


def test_the_filter_of_the_phrases() -> None:
    # of several processes, lm-eval asks the last item of a short one again and again: one counts
    found = phrases.judge([["Sorry."], ["Sure.", "Sure.", "I cannot."]], [{}, {}])
    assert found == [{"refusal": no, "harmful": not no} for no in (True, False)]


def test_a_real_model_says_the_same_in_any_batch(wildguard, tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("MERGEBENCH_JUDGE", str(tiny))
    monkeypatch.setenv("MERGEBENCH_JUDGE_DTYPE", "float32")
    monkeypatch.setattr(wildguard, "NEW_TOKENS", 24)
    responses = ("", "Twice.", "No. " * 20, "So", "Or {so}.")
    pairs = [wildguard.Pair("Fold a {napkin}." * (1 + n), r) for n, r in enumerate(responses)]
    said = []
    for size in (1, 2, 5):
        monkeypatch.setenv("MERGEBENCH_JUDGE_BATCH_SIZE", str(size))
        monkeypatch.setenv("MERGEBENCH_CACHE", str(tmp_path / str(size)))
        said.append(wildguard.answers(pairs))
    assert said[0] == said[1] == said[2] and len(set(said[0].values())) > 1


ERRORS: dict[str | None, Exception] = {"ConnectionError": ConnectionError("no network")}
for kind in (GatedRepoError, RepositoryNotFoundError):
    ERRORS[kind.__name__] = kind("no", response=mock.MagicMock(status_code=403))


@pytest.mark.parametrize(("variable", "value", "error", "line"), ROWS["judges_refused"])
def test_settings_and_judges_that_cannot_be(wildguard, monkeypatch, variable, value, error, line):
    monkeypatch.setenv(f"MERGEBENCH_JUDGE{variable}", value)
    monkeypatch.setattr(wildguard, "auth_check", mock.Mock(side_effect=ERRORS.get(error)))
    expected = f"MERGEBENCH_JUDGE{variable}{line}" if line[0] == "=" else line
    assert refused(wildguard.ready, NOTHING).startswith(expected)
