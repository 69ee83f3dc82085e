"""The scorers on real items: reference answers count as right, other answers as wrong.

    MERGEBENCH_REAL_DATA=FOLDER pytest -m slow -s evals/mergebench/tests/test_real_items.py

The folder holds `humaneval.json`, `humanevalplus.json`, `mbppplus.json`, `gsm8k.json`, `math.json`
and `ifeval.json`: lists of rows in the columns that the tasks read. What is not there is skipped.
No item is kept in this repository.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safety_rows import write_judge
from scripted import module, namespaces
from text_rows import stage_punkt
from transformers import AutoTokenizer

pytestmark = pytest.mark.slow
programs = module("coding/programs")
answers = module("math/math_answers")
gsm8k = module("math/gsm8k_score")

# Reference solutions that fail "+" tests rebuilt from EvalPlus' inputs, in plain Python too.
REBUILT_WRONGLY = {
    "humanevalplus": {"HumanEval/32"},
    "mbppplus": {"88", "596", "737", "787", "794"},
}
SPOILT = ("", "{}\n(", "{}\nraise SystemExit(0)", "import os; os._exit(0)")
# What a chatty model says of its answer. The first two are read by dart-math's rules as well.
MANNERS = (
    r"As $@ = @$, it is $\boxed{@}$.",
    "So $1 + 1 = 2$. The answer is: $@$",
    r"It is $\boxed{@}$. Therefore we are done.",
    "The answer is $@$. I hope this helps!",
    "**Answer:** **$@$**\n\nLet me know if you have 7 more questions.",
    "The final answer is **$@$**, as $1 + 1 = 2$.",
)


def rows(name: str) -> list[dict[str, Any]]:
    folder = os.environ.get("MERGEBENCH_REAL_DATA")
    if not folder or not (file := Path(folder, f"{name}.json")).is_file():
        pytest.skip(f"no {name}.json in a folder MERGEBENCH_REAL_DATA")
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("name", ["humaneval", "humanevalplus", "mbppplus"])
def test_programs(name: str, tmp_path: Path) -> None:
    items = rows(name)
    if not namespaces():
        pytest.skip("this machine gives no namespaces")
    judge = programs.judge_mbpp if name == "mbppplus" else programs.judge_humaneval
    gold = [
        row["code"] if name == "mbppplus" else "\n" + row["canonical_solution"] for row in items
    ]
    write_judge(tmp_path)
    reader = AutoTokenizer.from_pretrained(tmp_path, clean_up_tokenization_spaces=True)
    assert [reader.decode(reader(code)["input_ids"]) for code in gold] == gold

    said = judge([[code] for code in gold], items)
    failed = {str(row["task_id"]) for row, (verdict,) in zip(items, said, strict=True)
              if verdict != programs.PASSED}  # fmt: skip
    some = range(0, len(items), 10)
    other = judge([["\n" + text.replace("{}", gold[n]) for text in SPOILT] for n in some],
                  [items[n] for n in some])  # fmt: skip
    passed = sum(verdicts.count(programs.PASSED) for verdicts in other)
    print(f"\n{name}: {len(gold) - len(failed)} of {len(gold)} solutions pass, all but {failed};"
          f" {passed} of {len(SPOILT) * len(some)} that are none")  # fmt: skip
    assert failed <= REBUILT_WRONGLY.get(name, set()) and passed == 0


def test_gsm8k() -> None:
    items = rows("gsm8k")
    right = dict.fromkeys(("exact_match_strict", "exact_match_flexible", "flexible"), 0.0)
    wrong = dict(right)
    boxed = {True: 0.0, False: 0.0}
    for row in items:
        gold = row["answer"].split("####")[-1].strip()
        other = int(gold.replace(",", "")) + 1
        for counts, text in ((right, f" Not {other}. The answer is {gold}."),
                             (wrong, f" Not {gold}. The answer is {other}.")):  # fmt: skip
            found = gsm8k.score(row, [text])
            for metric in counts:
                counts[metric] += found[metric]
        for text in (gold, str(other)):
            boxed[text == gold] += gsm8k.score(row, [rf"It is $\boxed{{{text}}}$."])["flexible"]
    print(f"\ngsm8k: of {len(items)} reference answers {right} right, of as many others {wrong};"
          f" in boxes {boxed}")  # fmt: skip
    assert set(right.values()) == {len(items)} and set(wrong.values()) == {0}
    assert boxed == {True: len(items), False: 0}


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_math(name: str) -> None:
    """Answers in many manners, those of GSM8K as well: `math.json` has them in `solution`, and 10
    of 5000 at most may be read otherwise."""
    items = rows(name)
    gold = [answers.boxed(row["solution"]) if name == "math" else
            row["answer"].split("####")[-1].strip() for row in items]  # fmt: skip
    counts = {text: {"score": 0.0, "flexible": 0.0} for text in MANNERS}
    wrong = {"score": 0.0, "flexible": 0.0}
    for this, another in zip(gold, gold[1:] + gold[:1], strict=True):
        for text in MANNERS:
            found = answers.score({"answer": this}, [text.replace("@", this)])
            for metric in wrong:
                counts[text][metric] += found[metric]
        if this.replace(",", "") != another.replace(",", ""):
            found = answers.score({"answer": this}, [MANNERS[0].replace("@", another)])
            for metric in wrong:
                wrong[metric] += found[metric]
    print(f"\n{name}, of {len(gold)}:", *counts.items(), f"others: {wrong}", sep="\n  ")
    least = len(gold) * (1 - 10 / 5000 * (name == "math"))
    assert all(found["flexible"] >= least for found in counts.values())
    assert all(counts[text]["score"] >= least for text in MANNERS[:2])
    assert name == "math" or set(wrong.values()) == {0}


def test_ifeval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No response follows nothing, and no item's instructions are unknown to lm-eval."""
    items = rows("ifeval")
    stage_punkt(tmp_path)
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))
    score = module("instruction/ifeval_score").score
    found = [score(row, [text])["score"] for row in items for text in ("", " \n")]
    print(f"\nifeval: {sum(found):g} of {len(found)} empty responses right")
    assert sum(found) == 0
    assert all(score(row, [row["prompt"]])["score"] in (0, 1) for row in items)
