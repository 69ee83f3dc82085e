"""All tasks in one run of lm_eval on a scripted model, with scores by hand and lm-eval's own."""

import itertools
import json
import math
import os
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import rows
from click.testing import CliRunner
from scripted import MERGEBENCH, lm_eval, module, namespaces

from tvb_mergekit.cli import commands

answers = module("math/math_answers")
PROMPTS = Path(__file__).with_name("prompts.txt")
CATEGORIES = ("instruction", "math", "multilingual", "coding", "safety")
# Task, row, a text of its prompt, completion -> does it pass; below ten the first ones again
CODE = [(task, row, text, dict(programs)) for (task, row), (text, programs) in
        zip([("mergebench_humaneval_plus", 0), ("mergebench_humaneval_plus", 1),
             ("mergebench_mbpp_plus", 0)], rows.ROWS["programs"].items(), strict=True)]  # fmt: skip
ISOLATED = namespaces()
PROGRAMS = 10 if ISOLATED else 1  # of an item that differ: the first one is harmless


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    rows.stage_text(home)
    rows.stage_coding(home)
    said = {text: list(found)[:PROGRAMS] for _, _, text, found in CODE}
    said |= {"vowels": ["def vowels(text):\n    return 2"], "by lines": ["open('f').read()"]}
    said |= {"sort list": [" x.sort()\n\nInstruction:"]}
    groups = ("mergebench", "mergebench_val", "mergebench_safety_keyword")
    done = lm_eval(
        home, rows.RESPONSES | said | rows.ANSWERS, "--tasks", ",".join(groups),
        "--include_path", MERGEBENCH.parent, "--confirm_run_unsafe_code",
        "--output_path", home / "out", "--log_samples",
        HF_TOKEN="hf_secret", MERGEBENCH_UNSAFE_NO_SANDBOX="0" if ISOLATED else "1",
        **rows.stage_safety(home),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return home / "out"


@pytest.fixture(scope="module")
def found(out: Path) -> Any:
    (file,) = out.rglob("results_*.json")
    return json.loads(file.read_text())


def samples(out: Path, task: str) -> list[dict[str, Any]]:
    (file,) = out.rglob(f"samples_{task}_[0-9]*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(lines, key=lambda sample: int(sample["doc_id"]))


def passing(verdicts: dict[str, bool]) -> float:
    every = itertools.cycle([*verdicts.values()][:PROGRAMS])
    return sum(itertools.islice(every, 10)) / 10


def test_scores_are_those_computed_by_hand(found: Any) -> None:
    add, longest, double = (passing(verdicts) for *_, verdicts in CODE)
    humaneval, mbpp = (add + longest) / 2, double / 2
    # x . sort ( ) is as meant; open ( 'f' ) . read ( ) shares 7 of 8, 5 of 7, 3 of 6 and 2 of 5.
    shares = 13 / 14 * 10 / 12 * 7 / 10 * 5 / 8
    expected = {
        "mergebench_ifeval": 1 / 4,
        "mergebench_gsm8k": 11 / 19,
        "mergebench_math_hendrycks": 5 / 8,
        **{f"mergebench_arc_{language}": 3 / 5 for language in rows.LANGUAGES},
        **{f"mergebench_hellaswag_{language}": 2 / 4 for language in rows.LANGUAGES},
        **{f"mergebench_mmlu_{language}": 2 / 4 for language in ("fr", "de")},
        **{f"mergebench_mmlu_{language}": 1 / 4 for language in ("es", "ru")},
        "mergebench_humaneval_plus": humaneval,
        "mergebench_mbpp_plus": mbpp,
        "mergebench_instruction": 1 / 4,
        "mergebench_math": (11 / 19 + 5 / 8) / 2,
        "mergebench_multilingual": (4 * 3 / 5 + 4 * 2 / 4 + 6 / 4) / 12,
        "mergebench_coding": (humaneval + mbpp) / 2,
        "mergebench_val_instruction": 56 / 541,  # 0, 5, 50 to 59, 500 to 543
        "mergebench_val_math": 20 / 41,
        "mergebench_val_multilingual": 1 / 3,
        "mergebench_val_coding": math.exp(1 - 15 / 13) * shares**0.25,
        **rows.SCORES,
    }
    values = {
        name: task["score,none"] for name, task in found["results"].items() if "score,none" in task
    }
    # a group of groups would average the leaves, twelve of them multilingual
    assert values == pytest.approx(expected)
    for name in values.keys() - {"mergebench_val_coding"}:  # BLEU is of all answers at once
        assert found["results"][name]["score_stderr,none"] > 0, name


def test_scores_by_keywords_are_under_another_name(found: Any) -> None:
    results = found["results"]
    for task, score in rows.KEYWORD.items():
        for name in (task, f"{task}_keyword"):
            assert results[name]["score,keyword"] == pytest.approx(score)
        assert not [key for key in results[f"{task}_keyword"] if key.endswith(",none")]
        assert "parse_error,keyword" not in results[task]
    group = results["mergebench_safety_keyword"]
    assert group["score,keyword"] == pytest.approx(fmean(rows.KEYWORD.values()))
    assert "score,none" not in group


def test_the_table_of_these_results(out: Path, found: Any, tmp_path: Path) -> None:
    """With specialists from the same file the normalized accuracy is 100; samples can be paired."""
    words = ["score", "--benchmark", "mergebench", "--specialist", str(out)]
    words += [f"merged={out}", f"other={shutil.copytree(out, tmp_path / 'other')}"]
    done = CliRunner().invoke(commands.main, [*words, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    scores = json.loads((tmp_path / "scores.json").read_text())
    (pair,) = scores["pairs"]
    assert pair["tasks"].keys() == scores["columns"][1]["tasks"].keys()
    assert {(each["value"], each["p"]) for each in pair["tasks"].values()} == {(0.0, 1.0)}
    merged = scores["columns"][1]
    assert merged["normalized"]["value"] == pytest.approx(100)
    assert len(merged["tasks"]) == 21 and list(merged["categories"]) == list(CATEGORIES)
    for category, mean in merged["categories"].items():
        group = found["results"][f"mergebench_{category}"]
        assert mean["value"] == pytest.approx(100 * group["score,none"])
    error = math.sqrt(11 / 19 * 8 / 19 / 18)  # a sample's standard deviation over sqrt(19)
    assert merged["tasks"]["mergebench_gsm8k"]["stderr"] == pytest.approx(100 * error)


def shown(name: str, shots: int, sample: dict[str, Any]) -> str:
    requests = [list(arguments.values()) for arguments in sample["arguments"].values()]
    (prompt, settings), *_ = requests
    lines = [f"## {name}\n", f"{shots}-shot\n", "~~~~text", prompt, "~~~~\n"]
    if isinstance(settings, dict):
        lines += [f"- {key}: `{json.dumps(settings[key])}`" for key in sorted(settings)]
        lines += [f"- answers: {len(sample['resps'][0])}"]
    else:
        assert {request[0] for request in requests} == {prompt}
        lines += [f"- continuation: `{json.dumps(r[1], ensure_ascii=False)}`" for r in requests]
    return "\n".join([*lines, ""])


def test_prompts_are_those_of_the_file(out: Path, found: Any) -> None:
    members = found["group_subtasks"]
    names = [name for part in members["mergebench"] for name in members[part]]
    names += members["mergebench_val"]
    said = [shown(name, found["n-shot"][name], samples(out, name)[0]) for name in names]
    text = PROMPTS.read_text(encoding="utf-8").partition("## ")[0] + "\n".join(said)
    if os.environ.get("UPDATE_GOLDEN"):
        PROMPTS.write_text(text, encoding="utf-8", newline="\n")
    assert text == PROMPTS.read_text(encoding="utf-8")


def test_answers_to_gsm8k_in_boxes() -> None:
    score = module("math/gsm8k_score").score
    for reference, response, *expected in rows.ROWS["boxes"]:
        found = score({"answer": f"#### {reference}"}, [response])
        assert [found["score"], found["flexible"]] == expected, response
        assert found["score"] == found["exact_match_flexible"]


def table(name: str) -> list[list[str]]:
    """The rows of a file of verdicts; ⏎ is the end of a line."""
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    rows = [line.replace("⏎", "\n").split("\t") for line in lines if not line.startswith("# ")]
    assert len(rows) > 30
    return rows


def test_where_the_answer_is() -> None:
    for *expected, response in table("found.txt"):
        found = [answers.find_answer(response), answers.find_answer_flexibly(response)]
        assert found == expected, response
    for (score, flexible), reference, response in table("read.txt"):
        found = answers.score({"answer": reference}, [response])
        assert [*found.values()] == [int(score), int(flexible), 0], response


def test_what_is_equal() -> None:
    for verdict, reference, answer in table("equal.txt"):
        assert answers.equal(reference, answer) is (verdict == "="), (reference, answer)
    assert answers.equal("", "") is False
    for odd in ("", "\x00 {{{ \\frac", "\ud83d", "\n"):
        assert answers.equal("5", odd) is False


def test_what_cannot_be_computed_is_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "SECONDS", 0.5)
    for endless in ("99999999^{99999999}", "9^{9^{9^9}}"):
        assert answers.equal("1", endless) is None
        assert answers.score({"answer": "1"}, [rf"\boxed{{{endless}}}"]) == {
            "score": 0, "flexible": 0, "as_text": 1,
        }  # fmt: skip
    assert not answers.equal("1", "(" * 400)
    monkeypatch.undo()
    assert answers.equal("1", "2/2") is True  # and the next comparison is made


def test_the_answer_is_found_in_time() -> None:
    """Each cost seconds for 2,048 of them, by its square: these would take many minutes."""
    for text in rows.ROWS["endless"]:
        for start in ("", "The answer is ", r"\("):
            response = start + text * 2**13
            answers.find_answer(response), answers.find_answer_flexibly(response)
