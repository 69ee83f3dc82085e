"""All of MergeBench's tasks in one run of lm_eval on a scripted model, beside lm-eval's own tasks.

The items' scores are worked out by hand, prompts and values are those of lm-eval's own tasks, and
`tvb score` tables the results.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from coding_rows import stage_coding
from safety_rows import (
    KEYWORD,
    KEYWORD_MEAN,
    PARSE_ERRORS,
    RESPONSES,
    SCORES,
    TASKS,
    stage_safety,
    write_files,
)
from scripted import MERGEBENCH, lm_eval, module, namespaces, stage
from text_rows import ANSWERS, IFEVAL, IFEVAL_LIKE, LANGUAGES, MMLU_STEM, members, stage_text

PROMPTS = Path(__file__).with_name("prompts.md")
CATEGORIES = ("instruction", "math", "multilingual", "coding", "safety")
STOCK = {
    "mergebench_ifeval": "ifeval",
    "mergebench_gsm8k": "gsm8k_cot",
    "mergebench_val_math": "mmlu_stem",
    "mergebench_val_multilingual": "lambada_openai",
    **{f"mergebench_mmlu_{language}": f"m_mmlu_{language}" for language in LANGUAGES},
    **{f"mergebench_arc_{language}": f"arc_{language}" for language in LANGUAGES},
    **{f"mergebench_hellaswag_{language}": f"hellaswag_{language}" for language in LANGUAGES},
}
RIGHT = "\n    return a + b\n"
ADD = {  # completion -> does it pass
    RIGHT: True,
    "\n    return a - b\n": False,
    "": False,
    "\n    return a +\n": False,
    RIGHT + "\ndef broken(:\n": True,  # cut at a stop
    "\n    return a + b```\n": False,  # not a stop: no new line before it
    RIGHT + "\n```\nThis adds them.": True,
    "\n    print('passed')\n    raise SystemExit(0)\n": False,
    "\n    import os; os._exit(0)\n": False,
    "\n    while True: pass\n": False,
}
LONGEST = {
    "\n    return max(words, key=len)": True,
    "\n    return words[1]<file_sep>x y z": True,
    "\n    return sorted(words)[1]\nprint(1 / 0)": True,
    "\n    import builtins\n    builtins.AssertionError = ValueError\n    return ''": False,
    "\n    import sys\n    sys.modules.clear()\n    return ''": False,
    "\n    return sorted(words, key=len)[-1]\n@wraps\n": True,
    "\n    return words[-1]": False,
    "\nreturn 'bcd'": False,
    "\n    return 'bcd'\nassert 1 == 2": False,  # a stop of MBPP+ alone
    "\n    return 'bcd'\nclass Word(str): nonsense": True,
}
DOUBLE = {
    "def double(n):\n    return 2 * n\n": True,
    "def double(n):\n    return n * n\n": False,  # only the "+" tests notice
    "def double(n):\n    return 2 ** n\n": False,
    "import os\nos.fork()\nos._exit(0)\n": False,
    "x = bytearray(100 * 2**30)\ndef double(n):\n    return 2 * n\n": False,
    "open('/etc/mergebench-test', 'w')\ndef double(n):\n    return 2 * n\n": False,
    "open('mine', 'w').write('!')\ndef double(n):\n    return 2 * n\n": True,
    "def double(n):\n    return n + n\nassert double(3) == 7\n": True,
    'def double(n):\n    return n + n\n"""': True,
    "def double(n):\n    return n + n\n# 1 + \ndef other(:": False,  # stops of HumanEval+ alone
}
CODE = [
    ("mergebench_humaneval_plus", 0, "The sum of a and b", ADD),
    ("mergebench_humaneval_plus", 1, "The longest", LONGEST),
    ("mergebench_mbpp_plus", 0, "double a number", DOUBLE),
]
ISOLATED = namespaces()  # else only the first answers are run, which are harmless


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    stage_text(home)
    stage_coding(home)
    said = {text: list(found)[: 10 if ISOLATED else 1] for _, _, text, found in CODE}
    said |= {"vowels": ["def vowels(text):\n    return 2"], "by lines": ["open('f').read()"]}
    said |= {"sort list": [" x.sort()\n\nInstruction:"]}
    groups = ("mergebench", "mergebench_val", "mergebench_safety_keyword", *STOCK.values())
    done = lm_eval(
        home, RESPONSES | said | ANSWERS, "--tasks", ",".join(groups),
        "--include_path", MERGEBENCH.parent, "--confirm_run_unsafe_code",
        "--output_path", home / "out", "--log_samples",
        MERGEBENCH_CODE_SECONDS="2", HF_TOKEN="hf_secret",
        MERGEBENCH_UNSAFE_NO_SANDBOX="0" if ISOLATED else "1", **stage_safety(home),
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


# ------------------------------------------------------------------------------------------ scores


def passing(verdicts: dict[str, bool]) -> float:
    run = list(verdicts.values())[: 10 if ISOLATED else 1]
    return sum(run) / len(run)


def test_scores_are_those_computed_by_hand(found: Any) -> None:
    humaneval, mbpp = (passing(ADD) + passing(LONGEST)) / 2, passing(DOUBLE) / 2
    # x . sort ( ) is as meant; open ( 'f' ) . read ( ) shares 7 of 8, 5 of 7, 3 of 6 and 2 of 5.
    shares = 13 / 14 * 10 / 12 * 7 / 10 * 5 / 8
    expected = {
        "mergebench_ifeval": 1 / 4,
        "mergebench_gsm8k": 11 / 19,
        "mergebench_math_hendrycks": 5 / 8,
        **dict.fromkeys((f"mergebench_arc_{language}" for language in LANGUAGES), 3 / 5),
        **dict.fromkeys((f"mergebench_hellaswag_{language}" for language in LANGUAGES), 2 / 4),
        "mergebench_mmlu_fr": 2 / 4,
        "mergebench_mmlu_de": 2 / 4,
        "mergebench_mmlu_es": 1 / 4,
        "mergebench_mmlu_ru": 1 / 4,
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
        **SCORES,
    }
    values = {
        name: task["score,none"] for name, task in found["results"].items() if "score,none" in task
    }
    # a group of groups would average the leaves, twelve of them multilingual
    assert values == pytest.approx(expected)
    for name in values.keys() - {"mergebench_val_coding"}:  # BLEU is of all answers at once
        assert found["results"][name]["score_stderr,none"] > 0, name


def test_the_other_metrics(found: Any) -> None:
    for task, expected in {
        "mergebench_ifeval": {
            "prompt_level_strict_acc": 1 / 4,
            "prompt_level_loose_acc": 2 / 4,
            "inst_level_strict_acc": 3 / 6,
            "inst_level_loose_acc": 4 / 6,
        },
        "mergebench_gsm8k": {
            "exact_match_flexible": 11 / 19,
            "exact_match_strict": 6 / 19,
            "flexible": 13 / 19,
        },
        "mergebench_math_hendrycks": {"flexible": 6 / 8, "as_text": 0},
        "mergebench_arc_ru": {"acc": 2 / 5},
        "mergebench_hellaswag_ru": {"acc": 1 / 4},
        "mergebench_val_multilingual": {"perplexity": math.exp(200 / 3)},
        **{task: {"parse_error": share} for task, share in PARSE_ERRORS.items()},
    }.items():
        for metric, value in expected.items():
            assert found["results"][task][f"{metric},none"] == pytest.approx(value), (task, metric)


def test_scores_by_keywords_are_under_another_name(found: Any) -> None:
    results = found["results"]
    for task, score in KEYWORD.items():
        for name in (task, f"{task}_keyword"):
            assert results[name]["score,keyword"] == pytest.approx(score)
        assert not [key for key in results[f"{task}_keyword"] if key.endswith(",none")]
        assert "parse_error,keyword" not in results[task]
    group = results["mergebench_safety_keyword"]
    assert group["score,keyword"] == pytest.approx(KEYWORD_MEAN)
    assert "score,none" not in group and "score,keyword" not in results["mergebench_safety"]


def test_each_safety_item_is_judged_as_by_hand(out: Path) -> None:
    for task, items in TASKS.items():
        for name, wanted in (("none", "right"), ("keyword", "by_phrase")):
            kept = [sample for sample in samples(out, task) if sample["filter"] == name]
            scored = {sample["doc"]["prompt"]: sample["score"] for sample in kept}
            assert scored == {item.prompt: getattr(item, wanted) for item in items}, task


@pytest.mark.skipif(not ISOLATED, reason="no namespaces to run hostile programs in")
@pytest.mark.parametrize(("task", "row", "text", "expected"), CODE)
def test_each_of_ten_programs_is_judged(
    out: Path, task: str, row: int, text: str, expected: dict[str, bool]
) -> None:
    (verdicts,) = samples(out, task)[row]["filtered_resps"]
    passed = [verdict == "passed" for verdict in verdicts]
    assert dict(zip(expected, passed, strict=True)) == expected
    assert not Path("/etc/mergebench-test").exists()


def test_items_and_what_scores_depend_on_are_kept(out: Path, found: Any) -> None:
    prompts = [sample["doc"]["prompt"] for sample in samples(out, "mergebench_val_instruction")]
    assert prompts[:2] == ["Mention a pear (0).", "Mention a plum (4)."]
    assert len(prompts) == len(set(prompts)) == 541
    docs = [sample["doc"] for sample in samples(out, "mergebench_math_hendrycks")]
    assert [doc["config"] for doc in docs] == [
        "algebra", "algebra", "counting_and_probability", "geometry", "intermediate_algebra",
        "number_theory", "prealgebra", "precalculus",
    ]  # fmt: skip
    assert [doc["answer"] for doc in docs][:3] == [r"\frac12", "(x-1)(x+1)", "4"]
    judged = found["configs"]["mergebench_xstest"]["metadata"]
    assert judged["MERGEBENCH_JUDGE"].endswith("judge")
    assert judged["MERGEBENCH_JUDGE_DTYPE"] == "default"
    run = found["configs"]["mergebench_mbpp_plus"]["metadata"]
    assert run["MERGEBENCH_CODE_SECONDS"] == "2" and run["version"] == 1.0


def test_the_table_of_these_results(out: Path, found: Any, tmp_path: Path) -> None:
    """The specialists' column from the same file: the model's normalized accuracy is 100. And each
    task has samples that can be paired, with those of a second model that is the same."""
    tvb = [str(Path(sys.executable).with_name("tvb")), "score", "--benchmark", "mergebench"]
    files = ["--out", str(tmp_path), "--radar", "none", "--specialist", str(out)]
    files += [f"merged={out}", f"other={shutil.copytree(out, tmp_path / 'other')}"]
    done = subprocess.run([*tvb, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
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
    gsm8k = merged["tasks"]["mergebench_gsm8k"]
    # a sample's standard deviation over sqrt(19)
    assert gsm8k["stderr"] == pytest.approx(100 * math.sqrt(11 / 19 * 8 / 19 / 18))
    expected = {"n-shot": "8", "the task's version": "1.0", "the number of items": "19"}
    assert expected.items() <= gsm8k["origin"]["settings"].items()
    assert gsm8k["origin"]["limited"] is None


# ----------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("ours", STOCK)
def test_stock_tasks_get_the_same_prompts_and_values(out: Path, found: Any, ours: str) -> None:
    mine = {sample["doc_id"]: sample for sample in samples(out, ours)}
    if ours == "mergebench_val_math":
        subjects = [samples(out, f"mmlu_{subject}") for subject in sorted(MMLU_STEM)]
        stock = [sample for subject in subjects for sample in subject]
        values = [found["results"][name] for name in (ours, "mmlu_stem")]
        assert values[0]["score,none"] == pytest.approx(values[1]["acc,none"])
        stock = [sample | {"doc_id": number} for number, sample in enumerate(stock)]
    else:
        stock = samples(out, STOCK[ours])
    named = {"strict-match": "exact_match_strict", "flexible-extract": "exact_match_flexible"}
    compared = 0
    for sample in stock:
        own = mine[sample["doc_id"]]
        assert asked(own) == asked(sample) and own["target"] == sample["target"]
        for metric in sample["metrics"]:
            assert own[named.get(sample["filter"], metric)] == sample[metric]
            compared += 1
    assert compared >= len(mine)


def asked(sample: dict[str, Any]) -> list[list[Any]]:
    """All that a model is asked for one item; a missing limit is lm-eval's default."""
    requests = [list(arguments.values()) for arguments in sample["arguments"].values()]
    for request in requests:
        if isinstance(request[-1], dict):
            request[-1] = {"max_gen_toks": 256, **request[-1]}
    return requests


HEAD = """\
# What MergeBench's tasks ask a model

One made-up item of each task, word for word. test_run.py compares this file with what the tasks
say; with UPDATE_GOLDEN=1 in its environment it writes it anew.
"""


def shown(name: str, shots: int, sample: dict[str, Any]) -> str:
    """The prompt in a fence, then the settings or the continuations to choose from."""
    requests = [list(arguments.values()) for arguments in sample["arguments"].values()]
    prompt, settings = requests[0]
    lines = [f"## {name}\n", f"{shots}-shot\n", "~~~~text", prompt, "~~~~\n"]
    if isinstance(settings, dict):
        lines += [f"- {key}: `{json.dumps(settings[key])}`" for key in sorted(settings)]
        lines += [f"- answers: {len(sample['resps'][0])}"]
    else:
        assert {request[0] for request in requests} == {prompt}
        lines += [f"- continuation: `{json.dumps(r[1], ensure_ascii=False)}`" for r in requests]
    return "\n".join([*lines, ""])


def test_prompts_are_those_of_the_file(out: Path, found: Any) -> None:
    names = [name for part in members("mergebench") for name in members(part)]
    names += members("mergebench_val")
    said = [shown(name, found["n-shot"][name], samples(out, name)[0]) for name in names]
    text = "\n".join([HEAD, *said])
    if os.environ.get("UPDATE_GOLDEN"):
        PROMPTS.write_text(text, encoding="utf-8", newline="\n")
    assert text == PROMPTS.read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------- other commands


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "told"),
    [
        ("mergebench_mbpp_plus", "mergebench_mbpp_plus which is marked as unsafe"),
        ("mergebench_harmbench", "the judge allenai/wildguard is not in the cache and the Hub is"),
        ("mergebench_ifeval", "IFEval needs NLTK's `punkt_tab`"),
        ("mergebench_val_instruction", "IFEval needs NLTK's `punkt_tab`"),
    ],
)
def test_what_is_refused_before_anything_is_generated(tmp_path: Path, task: str, told: str) -> None:
    stage_coding(tmp_path)
    write_files(tmp_path)
    stage(tmp_path, "google/IFEval", train=IFEVAL)
    stage(tmp_path, "argilla/ifeval-like-data", "filtered", train=IFEVAL_LIKE)
    done = lm_eval(
        tmp_path, {}, "--tasks", task, "--include_path", MERGEBENCH, "--output_path",
        tmp_path / "out", MERGEBENCH_DATA=str(tmp_path), MERGEBENCH_JUDGE_DEVICE="cpu",
        MERGEBENCH_CACHE=str(tmp_path / "cache"), HOME=str(tmp_path), https_proxy="127.0.0.1:9",
    )  # fmt: skip
    assert done.returncode != 0 and told in done.stderr
    assert task == "mergebench_mbpp_plus" or "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_without_punkt_it_is_said_before_any_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    ifeval = module("instruction/ifeval_score")
    ifeval.instructions_util._get_sentence_tokenizer.cache_clear()
    monkeypatch.setattr(ifeval.instructions_util.nltk.data, "path", [])
    with pytest.raises(SystemExit, match=r"nltk\.downloader punkt_tab"):
        ifeval.check([])


def test_nothing_is_measured_under_predict_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval then leaves a task without metrics."""
    headline = module("headline")
    measured: dict[str, float] = {"acc": 1.0}
    stock = headline.ConfigurableTask
    monkeypatch.setattr(stock, "process_results", lambda self, doc, results: dict(measured))
    task = headline.HeadlineTask.__new__(headline.HeadlineTask)
    task.headline = "acc"
    assert task.process_results({}, []) == {"score": 1.0, "acc": 1.0}
    measured.clear()
    assert task.process_results({}, []) == {}


# -------------------------------------------------------------------------------- answers to GSM8K

GSM8K = [  # reference, response, is it right by lm-eval's flexible reading, and by `flexible`?
    ("72", r"So it is $\boxed{72}$.", 0, 1),
    ("72", r"So it is $\boxed{73}$.", 0, 0),
    ("72", r"The answer is $\boxed{\$72.00}$.", 0, 1),
    ("1,072", r"\[ \boxed{1\,072 \text{ m}^2} \]", 0, 1),
    ("72", r"\boxed{3 \cdot 24 = 72}, of 80.", 0, 1),
    ("-72", r"$\boxed{-72}$.", 0, 1),
    ("0", r"$\boxed{0}$.", 0, 1),
    ("72", r"$\boxed{7}$2$.", 0, 0),
    ("72", "**Answer:** 72 eggs, as 70 + 2.", 0, 1),
    ("72", "The answer is 60 + 12 = 72.", 1, 1),  # what lm-eval reads counts too
]


def test_answers_to_gsm8k_in_boxes() -> None:
    score = module("math/gsm8k_score").score
    for reference, response, *expected in GSM8K:
        found = score({"answer": f"#### {reference}"}, [response])
        assert [found["score"], found["flexible"]] == expected, response
        assert found["score"] == found["exact_match_flexible"]


# --------------------------------------------------------------------------------- answers to MATH

answers = module("math/math_answers")
FOUND = {  # response -> where its answer is
    r"First \boxed{1}, then $\boxed{\frac{1}{2}}$.": r"\frac{1}{2}",
    r"\boxed{\{1, 2\}}": r"\{1, 2\}",
    r"\boxed{\left\{ 1 \right.} and more}": r"\left\{ 1 \right.",
    r"$\boxed 5$ it is": "5",
    r"\fbox{5}": "5",
    r"\boxed{\frac{1}{2": r"\frac{1}{2",
    r"The answer is 3. So \boxed{4}.": "4",
    "The answer is: $7$.": "7",
    "The answer is $\\frac{1}{3}$": r"\frac{1}{3}",
    r"answer: \(x + 1\).": "x + 1",
    "By symmetry, 3.5 is the answer.": "3.5",
    r"We had \boxed{1}. Therefore, the answer is 2.": "2",
    "7 times 8\n#### 56": "56",
    "Here $x = 1$ and then $y = 2$ in 3 steps.": "y = 2",
    r"We get \[ z = 3 \] at last": "z = 3",
    "It takes 1,234.5 hours, not -7": "-7",
    "It takes 1,234.5 hours": "1234.5",
    **dict.fromkeys(("I do not know", "", "answer is", "$$", r"\boxed{}", r"\boxed"), ""),
}
MANNERS = {  # response -> its answer by dart-math's rules, and by `flexible`
    r"$x=\boxed{\$36}$. Therefore we are done.": ("x=\\boxed{\\", r"\$36"),
    r"We get $\boxed{9}$. Therefore, 9 hens lay 9 eggs.": (r"\boxed{9}", "9"),
    "The final answer is **$9$**": ("**$9$**", "9"),
    "**Answer:** $\\frac{1}{2}$\n\nLet me know if you need more!": ("\\frac{1}{2}", "\\frac{1}{2}"),
    "The answer is 5. I hope this helps!": ("5. I hope this helps!", "5"),
    "The answer is: $2.5$. Let me check: $2 + 0.5 = 2.5$.": (
        "$2.5$. Let me check: $2 + 0.5 = 2.5$",
        "2.5",
    ),
    "The answer is 4:30 p.m. in London. Good luck!": (
        "4:30 p.m. in London. Good luck!",
        "4:30 p.m. in London",
    ),
    "The answers are $3$ and $-5$, as said.": ("-5", "3, -5"),
    "The answer is \\[\n 7 \n\\] as you see.": ("\\[\n 7 \n\\] as you see", "7"),
    r"The answer is $\$36$ in all.": (r"$\$36$ in all", r"\$36"),
    "The answer is 12 apples, because $3 \\cdot 4 = 12$.": (
        r"12 apples, because $3 \cdot 4 = 12$",
        "12",
    ),
    "The answer is Evelyn. Have fun!": ("Evelyn. Have fun!", "Evelyn"),
    r"It is $\boxed{5}$. The answer is correct.": ("5", "5"),
    r"We had \boxed{1}. Therefore, the answer is 2.": ("2", "2"),
    "First 2**3 = 8 and 4**2 = 16. #### 24": ("24", "24"),
    "I do not know": ("", ""),
    # a box counts before what is announced after it, unless that begins with a number or formula
    r"The answer is $\boxed{12}$. To check the answer: 5+7 is 12, so the answer is right.": (
        "12",
        "12",
    ),
    r"The answer is $\boxed{12}$. The answer is not 13.": ("12", "12"),
    r"As $\boxed{12}$ is 5 + 7, the answer is what 5 + 7 is.": ("12", "12"),
    r"Is it $\boxed{12}$? The answer is 13 apples.": ("12", "13"),
    r"Is it $\boxed{12}$? The answer is (1, 2).": ("12", "(1, 2)"),
    "The answer is 12. The answer is not 13.": ("not 13", "12"),
    "The answer is 12. To check the answer: 5+7 is 12.": (
        "12. To check the answer: 5+7 is 12",
        "12",
    ),
    "The answer is therefore 5.": ("5", "5"),
    # numbers that are a part of the answer
    "The answer is 3 million people.": ("3 million people", "3 million people"),
    "The answer is 3 out of 7.": ("3 out of 7", "3 out of 7"),
    "The answer is 2 pi.": ("2 pi", "2 pi"),
    "The answer is 2 Pi.": ("2 Pi", "2 Pi"),
    "The answer is 8 minus 3 equals 5.": ("8 minus 3 equals 5", "8 minus 3 equals 5"),
    "The answer is 4 percent.": ("4 percent", "4 percent"),
    "The answer is 2 to the 5th.": ("2 to the 5th", "2 to the 5th"),
    "The answer is 2 tons.": ("2 tons", "2"),
    "The answer is 5 or 7.": ("5 or 7", "5 or 7"),
}
READ = [  # reference, response, whether it is right by `score` and by `flexible`
    ("5", "The answer is 5. I hope this helps!", 0, 1),
    ("12", r"The answer is $\boxed{12}$. The answer is 13.", 1, 1),  # what `score` takes counts too
    ("5", "The answer is 5. Therefore 5.", 1, 1),
    ("5", "The answer is 6. I hope this helps!", 0, 0),
    ("5", "If the answer is 5, then it is not. So it is $6$.", 0, 0),
    (r"4:30 \text{ p.m.}", "The answer is 4:30 p.m. Hope this helps", 0, 1),
    (r"\frac12", "The answer is 1/2, as required.", 0, 1),
    *(
        ("5", f"The answer is {said}", 0, 1)
        for said in (
            "*5*.",
            "`5`.",
            "__5__.",
            "$5$ cm. See?",
            "5 square feet. See?",
            "the number $5$. See?",
            "5 cm^2, as said.",
            "exactly 5 because of it.",
            "$5$, or equivalently $10/2$.",
        )
    ),
    *(
        ("5", f"The answer is {said}.", 0, 0)
        for said in (
            "5 dozen",
            "5 halves",
            "5 sixths",
            "5 millions",
            "5 choose 2",
            "5 mod 3",
            "5 factorial",
            "5 fewer than 20, so 15",
            "5 apples more than 20, so 25",
            "5 degrees more than 6",
            "5 when x=1, in general 6",
            "$5$ times $3$",
            "$5$ percent of $20$, or $1$",
            "found by adding $5$ to $6$",
            "obtained from $5$ and $6$, giving $11$",
            "see $5$. It is $6$",
            "5, 6 or 7",
            "$5$, or 6",
        )
    ),
]
EQUAL = [  # reference, answer, are they the same?
    (r"\frac12", "0.5", True),
    (r"\frac12", "1/2", True),
    (r"\frac12", "0.51", False),
    (r"3\sqrt2", r"\sqrt{18}", True),
    ("x^2+2x+1", "(x+1)^2", True),
    ("x^2+2x+1", "(x+1)^3", False),
    ("1,2", "2, 1", True),
    ("[1,2)", "[1, 2)", True),
    ("[1,2)", "[1,2]", False),
    (r"11,\! 111", "11111", True),
    (r"\$18.90", "18.9", True),
    (r"25\%", "25", True),
    (r"90^\circ", "90", True),
    ("5", "x = 5", True),
    (r"10\text{ cm}", "10", True),
    (r"\text{Tuesday}", "Tuesday", True),
    (r"\text{Tuesday}", "Friday", False),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "\\begin{pmatrix}1\\\\\n2\\end{pmatrix}", True),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", False),
    (r"\frac{7}{5} + \frac{1}{5} i.", r"\frac{7}{5} + \frac{1}{5} i", True),
    ("x^2+1.", "x^2-1", False),
    ("(0.225, 0.275).", "(0.235, 0.275)", False),
    (r"\left. 5 \right.", "6", False),
    (r"\text{June 20}", "June 20", True),
    (r"\text{June 20}", "June 21", False),
    (r"\text{A,D}", "D, A", True),
    (r"\text{A,D}", "A, C", False),
    (r"\text{(B)}", "b", True),
    (r"4:30 \text{ p.m.}", "4:30 PM", True),
    (r"4:30 \text{ p.m.}", "4:30", True),
    (r"4:30 \text{ p.m.}", "4:30 a.m.", False),
    (r"4:30 \text{ p.m.}", "5:30 p.m.", False),
    (r"4:30 \text{ p.m.}", "9/2", False),
    ("2:4", "1:2", True),
    ("2112_6", "2112_{6}", True),
    ("2112_6", "2112", True),
    ("2112", "2112_{10}", True),
    ("2112_6", "2112_3", False),
    ("2112_6", "2113", False),
    (r"4\text{A}_{11}", "4a_{11}", True),
    ("x_1", "x_2", False),
    (r"\frac \pi4 + 2 - \sqrt2", r"\frac \pi4 - 2 - \sqrt2", False),
    (r"\frac \pi4 + 2 - \sqrt2", r"2 - \sqrt{2} + \dfrac{\pi}{4}", True),
    (r"\sqrt\frac12", r"\frac{\sqrt2}2", True),
    (r"\sqrt[3]8 + \frac1{x^{2}}", r"2 + x^{-2}", True),
    (r"\frac", r"\sqrt{", False),
    ("a. 3, b. 4", "a. 4, b. 4", False),
    ("12%", r"12\%", True),
    ("1,000", r"1{,}000", True),
    ("3", "3!", False),
    ("White", r"\text{white}", True),
    # a blank is part of a number or a list
    ("31/2", "3 1/2", False),
    ("3 1/2", "31/2", False),
    (r"3\frac12", "3 1/2", True),
    (r"\frac72", "3 1/2", True),
    ("2", "3 1/2", False),
    ("12", "1 2", False),
    ("3", "1 2", False),
    ("1,234", "1, 234", False),
    ("1, 234", "1,234", False),
    ("(1, 234)", "(1,234)", True),
    ("10000", r"10\,000", True),
    (r"10\ 000", "10000", True),
    ("x + 1", "x+1", True),
    # large and small letters
    (r"\pi r^2", r"\pi R^2", False),
    (r"\pi r^2", r"r^2\pi", True),
    (r"\frac12 R", "0.5r", False),
    (r"\Delta", r"\delta", False),
    ("x", "X", False),
    (r"\text{B}", "b", True),
    (r"\text{B}", "(B)", True),
    ("(B)", "B", True),
    ("White and Blue", "white and blue", True),
    # words are no products
    (r"\text{AB}", "BA", False),
    ("TTH", "HTT", False),
    ("TTH", "tth", True),
    (r"\text{even}", "odd", False),
    # the base of the reference
    ("10", "10_2", False),
    ("10", "2", False),
    ("10_2", "10", True),
    *(("52_8", same, True) for same in (r"52_{\text{eight}}", "52_{(8)}", "(52)_8", "(52)_{8}")),
    ("52_8", r"52_{\text{nine}}", False),
    ("A5_{16}", "a5_{16}", True),
    ("2x_1", r"x_1 \cdot 2", True),  # no base
    (r"52_{\text{eight}}", "52_8", True),
    # times of the day
    (r"8\text{ a.m.}", "8 a.m.", True),
    (r"8\text{ a.m.}", "8:00 AM", True),
    (r"8\text{ a.m.}", "8 p.m.", False),
    (r"8\text{ a.m.}", "9 a.m.", False),
    ("10:08", "10{:}08", True),
    ("10{:}08", "10:09", False),
    # signs that mean the same
    (r"75\degree", r"75^\circ", True),
    (r"75\degree", "75", True),
    (r"75\degree", "75°", True),
    (r"75\degree", "76", False),
    (r"\emptyset", r"\varnothing", True),
    (r"\varnothing", r"\emptyset", True),
    # percent, as dart-math has it
    ("0.5", r"50\%", True),
    (r"50\%", "0.5", True),
    (r"50\%", r"\frac12", True),
    (r"50\%", "50 percent", True),
    ("50", "50 percent", True),
    (r"50\%", "5", False),
    (r"50\%", r"0.5\%", False),
    (r"66\frac23\%", r"66\frac23", True),
    (r"66\frac23", r"66\frac{2}{3}\%", True),
    (r"66\frac23\%", "66", False),
    # other ways to write the same
    (r"\text{I and II}", "I, II", True),
    (r"\text{I and II}", "I, III", False),
    *(("1,2,3", same, True) for same in (r"1, 2 \text{, and } 3", r"1, 2 \text{ and } 3")),
    *(("10000", same, True) for same in ("10 000", "10~000")),
    ("3 125/8", "3125/8", False),
    ("10", "10 000", False),
    (r"\$36", "36 dollars", True),
    (r"\$12.50", "12.05 dollars", False),
    ("10", r"\binom 52", True),
    ("7", r"\approx 7", True),
    ("7", r"\approx 7.2", False),
    (r"2\sqrt{3}", "2√3", True),
    (r"2\sqrt{13}", "2√(13)", True),
    (r"2\sqrt{13}", "2√1", False),
    (r"3\frac12", "3½", True),
    ("x^2+1", "x²+1", True),
    (r"(-\infty,0)\cup(1,\infty)", "(-∞,0)∪(1,∞)", True),
    ("-3", "– 3", True),
    *(("xy", same, True) for same in ("yx", r"x\cdot y", "x y")),
    ("xy", "xz", False),
    *(("2112_6", same, True) for same in (r"2112\text{ base }6", r"2112 \text{ (base 6)}")),
    ("2112_6", "2112 base 7", False),
    (r"12\frac12\%", r"12.5\%", True),
    # to eight decimals, as dart-math
    (r"\sqrt2", "1.41421356", True),
    (r"\sqrt2", "1.4142136", False),
    ("0.1234567", "0.1234568", False),
    # a point or an interval is no list
    ("(1,2)", "1,2", False),
    ("1,2", "(1,2)", False),
    (r"[\frac12,1]", r"\frac12,1", False),
    ("(1,2)", "x=1, y=2", True),
    # intervals
    (r"(-\infty,3)", "x<3", True),
    ("x<3", r"(-\infty,3)", True),
    (r"(-\infty,3)", r"x\le 3", False),
    ("[1,3]", r"1\le x\le 3", True),
    ("[1,3]", "1<x<3", False),
    # the imaginary unit
    *(
        ("116 - 75i", same, True)
        for same in (
            "116 - 75 i",
            r"116-75\,i",
            r"116-75\cdot i",
            "-75i+116",
            "116 - i 75",
            "z = 116-75*i",
        )
    ),
    ("116 - 75i", "116 + 75 i", False),
    ("116 - 75i", "75 - 116 i", False),
    (r"1+2i\sqrt{2}", r"1 + 2\sqrt{2}\, i", True),
    (r"2i\sqrt{2}", r"\sqrt{-8}", True),
    # units, and letters and powers that are none
    *(("4", f"4{letter}", False) for letter in ("t", "h", "d", " t", r"\,x")),
    ("4", "4 m", True),
    ("4", "4 people", True),
    *(("4", f"4 {word}", False) for word in ("dozen", "squared", "factorial", "thousandths")),
    (r"\pi r^2 h", r"\pi r^2", False),
    ("6 + 2t", r"2\cdot t+6", True),
    (r"5\text{ cm}^2", r"5\text{ cm}^3", False),
    (r"5\text{ cm}^2", r"5\text{ cm}^{2}", True),
    (r"5\text{ cm}^2", "5 square centimeters", True),
    (r"5\text{ cm}^2", "5 cubic centimeters", False),
    (r"3\text{ hours}", "3 hours and 20 minutes", False),
    (r"3\text{ hours}", r"3\text{ hours and }20\text{ minutes}", False),
    # numbers by their value
    ("-221_4", "-221_3", False),
    ("-221_4", "-221_{4}", True),
    ("0.0011_3", "0.0011_2", False),
    ("0.0011_3", "(0.0011)_{3}", True),
    (r"\frac{1}{2004!}", "-1/2004!", False),
    (r"\frac{1}{2004!}", "1/2004!", True),
    ("-15", r"\approx -15", True),
    (r"\frac13", r"0.\overline{3}", True),
    (r"0.1\overline{6}", r"\frac16", True),
    (r"\frac13", r"0.\overline{4}", False),
    (r"\frac12", r"\sin 30^\circ", True),
    (r"\frac12", r"\sin{30^{\circ}}", True),
    (r"\frac12", r"\sin 30", False),
    (r"\log_2 15", r"\frac{\log 15}{\log 2}", True),
    # lists and unions, part by part
    (r"45^\circ, 135^\circ", r"45\text{ degrees}, 135\text{ degrees}", True),
    (r"45^\circ, 135^\circ", r"45\text{ degrees}, 136\text{ degrees}", False),
    (r"\pm 3", "3, -3", True),
    (r"2+\sqrt3, 2-\sqrt3", r"x = 2 \pm \sqrt{3}", True),
    (r"\pm 3", "3", False),
    ("3, -4", r"\pm 3", False),
    (r"1, \frac12", r"x = 0.5 \text{ or } x = 1", True),
    ("x=1, y=2", "x=2, y=1", False),
    ("2, 5", "2 < x < 5", False),
    *(
        (reference, answer, True)
        for reference in (r"(-\infty,3)\cup(5,\infty)", r"x<3 \text{ or } x>5")
        for answer in (
            r"(-\infty,3)\bigcup(5,\infty)",
            r"(5,\infty)\cup(-\infty,3)",
            "x<3 or 5<x",
            r"x > 5 \text{ or } x < \frac{6}{2}",
        )
    ),
    (r"(-\infty,3)\cup(5,\infty)", r"(-\infty,3]\cup(5,\infty)", False),
    (r"x<3 \text{ or } x>5", r"x<3 \text{ or } x>6", False),
    (r"x<3 \text{ or } x>5", r"y<3 \text{ or } y>5", False),
    ("[1,3]", r"x \ge 1 \text{ and } x \le 3", True),
    # as usual graders have it
    (r"5\text{ cm}", r"5\text{ m}", True),
    ("(1,2)", r"\{1,2\}", True),
    ("5", "6=5", True),
    *(("5", odd, False) for odd in ("", "\x00 {{{ \\frac", "\ud83d", "\n")),
    ("", "", False),
]


def test_where_the_answer_is() -> None:
    assert {response: answers.find_answer(response) for response in FOUND} == FOUND
    for response in MANNERS:
        found = (answers.find_answer(response), answers.find_answer_flexibly(response))
        assert found == MANNERS[response], response
    for response, answer in FOUND.items():
        assert answers.find_answer_flexibly(response) == answer, response
    for reference, response, *expected in READ:
        found = [*answers.score({"answer": reference}, [response]).values()]
        assert found == [*expected, 0], response


def test_what_is_equal() -> None:
    for reference, answer, same in EQUAL:
        assert answers.equal(reference, answer) is same, (reference, answer)


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


def test_what_is_long_is_compared_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers._Comparer, "ask", lambda self, pair: True)
    for answer, same in (("1" * 500, True), ("1" * 501, False), (" 2 " + "3" * 501, True)):
        assert answers.equal("2 " + "3" * 501 if same and "3" in answer else "1", answer) is same


def test_slow_comparisons_leave_time_for_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many are slow, what takes milliseconds is compared, and all time has a bound."""
    comparer = answers._Comparer()
    for name, value in (("SECONDS", 0.5), ("ALL_SECONDS", 2.0), ("ALL_SHARE", 0.1)):
        monkeypatch.setattr(answers, name, value)
    for n in range(34):
        assert comparer.ask(["1", f"9^{{9^{{9^{n + 5}}}}}"]) is None
        assert comparer.ask([rf"\frac{{{n}}}{{7}}", rf"\dfrac{{{3 * n}}}{{21}}"]) is True
        assert comparer.ask([f"{n} - 5i", f"-5 i + {n}"]) is True
        assert comparer.spent <= 2.0 + 0.1 * comparer.asked
    assert comparer.unfinished == 34
    comparer.close()
    assert [text.split(" took")[0] for text in caplog.messages] == [
        "34 of 102 comparisons of answers to MATH"
    ]


def test_comparisons_have_the_time_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that gets none for longer than a comparison may take makes it all the same."""
    monkeypatch.setattr(answers, "SECONDS", 0.5)
    comparer = answers._Comparer()
    assert comparer.ask(["1", "2/2"]) is True
    parent = comparer.running().pid
    child = int(Path(f"/proc/{parent}/task/{parent}/children").read_text())
    os.kill(child, signal.SIGSTOP)
    threading.Timer(1.5, os.kill, [child, signal.SIGCONT]).start()
    assert comparer.ask(["x^2-1", "(x-1)(x+1)"]) is True
    comparer.close()


ENDLESS = [  # each cost seconds, by its square
    "**a **", "$", "$$", r"\(", r"\[", "**a", "__a ", "`", "The answer is $", "The answer is **a ",
    "1", "1,", "The answer is 1", "answer to ", r"\boxed{", r"\boxed", "herefore",
    "is the ans", "-", "not ",
]  # fmt: skip


def test_the_answer_is_found_in_time() -> None:
    for text in ENDLESS:
        for response in (text * 2048, "The answer is " + text * 2048, r"\(" + text * 2048):
            start = time.process_time()
            answers.find_answer(response), answers.find_answer_flexibly(response)
            assert time.process_time() - start < 1, response[:40]


def test_without_math_verify_it_is_said_before_any_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comparer = answers._Comparer()
    monkeypatch.setattr(answers, "__file__", os.devnull)  # no program beside it
    with pytest.raises(SystemExit, match=r"pip install 'lm_eval\[math\]'"):
        comparer.running()


# -------------------------------------------------------------------------------------------- BLEU

conala = module("coding/conala")


BLEU: list[tuple[str, str, float]] = [  # prediction, reference, score by hand
    # 4 of 5, then 2 of 4, 0 of 3 and 0 of 2; one more each
    ("a b c d e", "a b x d e", (5 / 6 * 3 / 5 * 1 / 4 * 1 / 3) ** 0.25),
    # two tokens of four: 3/3, 2/2, and 1/1 where there are none; a brevity penalty of 1 - 4/2
    ("a b", "a b c d", math.exp(-1)),
    ("f ( x )", "f(x)", 1),  # 13a splits punctuation off
    ("", "a", 0),
]


def test_bleu_by_hand() -> None:
    for prediction, reference, expected in BLEU:
        assert conala.bleu([(prediction, reference)]) == pytest.approx(expected)


def test_bleu_is_of_the_corpus() -> None:
    nltk = pytest.importorskip("nltk.translate.bleu_score")
    pairs = [("a b c d e f", "a b c d x f"), ("g h i j", "g h i k j l"), ("m n o p", "m n o p")]
    plus_one = lambda precisions, **_: [(p.numerator + 1) / (p.denominator + 1) for p in precisions]  # noqa: E731
    theirs = nltk.corpus_bleu(
        [[meant.split()] for _, meant in pairs], [said.split() for said, _ in pairs],
        smoothing_function=plus_one,
    )  # fmt: skip
    assert conala.bleu(pairs) == pytest.approx(theirs)
