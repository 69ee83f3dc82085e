"""The parts of evals/mergebench/safety: verdicts, phrases, the judge, and the data."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import datasets
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from rows import ROWS, write_judge
from scripted import module

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
