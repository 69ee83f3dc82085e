"""`tvb score` with lm-eval's samples: paired differences, remarks on floors, and the HTML page."""

import hashlib
import json
import os
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_score import BENCH, SMALL, last, run, warnings, write_results

from tvb_mergekit.score.floors import FLOOR, HEALTHY, PROSE, announces, is_loop
from tvb_mergekit.score.page import BASE, LINES, WEDGES
from tvb_mergekit.score.pairs import difference, holm, sign_flip
from tvb_mergekit.store.facts import Facts, write_facts

DATE = "2026-01-02T03-04-05.678901"
Array = np.ndarray[Any, np.dtype[np.float64]]


def test_p_values_by_hand() -> None:
    # Fagerland, Lydersen and Laake 2013, Table 1: 1 and 7 discordant pairs
    assert sign_flip(np.array([1.0] * 7 + [-1.0] + [0.0] * 13)) == pytest.approx(0.0391, abs=5e-5)
    assert sign_flip(np.zeros(9)) == sign_flip(np.zeros(0)) == 1
    values = np.random.default_rng(0).normal(0.4, 1, 14)
    assert sign_flip(values) == sign_flip(-values) == sign_flip(1e-3 * values)
    # tasks count alike, whatever their items are: 7 of the 8 sums of ±1 ±1/2 ±1/2, those of 0 half
    assert difference([np.ones(1), -np.ones(2)]).p == pytest.approx(7 / 8, abs=0.01)


def every_sum(sizes: Array) -> tuple[Array, Array]:
    """Possible sums of +-sizes, integers, and their probabilities, by convolution."""
    likely = np.ones(1)
    for size in map(int, sizes):
        likely = np.convolve(likely, [0.5, *[0] * (2 * size - 1), 0.5])
    total = int(sizes.sum())
    return np.arange(-total, total + 1), likely


def hoeffding(values: Array) -> float:
    """The largest chance of a sum of +-values as far from 0 as theirs."""
    # sign_flip rounds scaled values to nine digits
    return float(2 * np.exp(-(values.sum() ** 2) / (2 * np.sum(values**2)))) * (1 + 1e-6)


@pytest.mark.parametrize(
    "sizes",
    [
        np.ones(40, int),  # right or wrong
        np.ones(1319, int),  # as many as GSM8K has
        np.random.default_rng(0).integers(1, 10, 40),  # pass@1 of ten samples
        np.round(np.random.default_rng(0).gamma(0.5, 100, 60)) + 1,  # real-valued
        np.array([100] * 3 + [*range(1, 10)] * 22),  # a short task and a long one
        np.array([22] * 5 + [1] * 100),  # the same, of scores 0 and 1
    ],
)
def test_p_values_of_unequal_sizes(sizes: Array) -> None:
    """Within 2.5 standard errors of the draws; below 1e-4 between exact p and Hoeffding's bound."""
    sums, likely = every_sum(sizes)
    tails = likely[::-1].cumsum()[::-1]
    for level in (0.1, 0.03, 4e-3, 1e-3, 1e-7):
        place = np.flatnonzero((2 * tails <= level) & (likely > 0))[0]
        minus = (sizes.sum() - sums[place]) / 2  # the sizes that are taken with a minus
        signs = np.ones(len(sizes))
        for index in np.argsort(-sizes):
            if sizes[index] <= minus:
                signs[index], minus = -1, minus - sizes[index]
        exact = 2 * tails[place] - likely[place]
        found = sign_flip(signs * sizes)
        assert minus == 0  # there are such signs
        if sizes.max() == 1:
            assert found == pytest.approx(exact)
        elif level < 1e-4:
            assert exact <= found <= hoeffding(signs * sizes)
        else:  # 1e-4 is the least that 9999 draws give
            assert abs(found - exact - 1e-4) <= 2.5 * (exact / 9999) ** 0.5
    one_sign = sign_flip(sizes * 1.0)
    assert 0.5 ** len(sizes) * (1 - 1e-9) <= one_sign <= hoeffding(sizes)


def test_holm_by_hand() -> None:
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []


def scored(folder: str, scores: dict[str, Sequence[float]], model: str = "", **more: Any) -> None:
    """Results and samples as lm-eval 0.4.13 writes them; `more` replaces keys of each item."""
    means = {task: sum(values) / len(values) for task, values in scores.items()}
    counts = {task: {"original": len(own), "effective": len(own)} for task, own in scores.items()}
    named: dict[str, Any] = {"n-samples": counts}
    if model:
        named |= {"model_name": model, "config": {"model_args": {"pretrained": model}}}
    write_results(f"{folder}/m/results_{DATE}.json", means, **named)
    for task, values in scores.items():
        lines = []
        for number, score in enumerate(values):
            line = {
                "doc_id": number, "doc": {"question": f"{task} {number}"}, "target": "1",
                "arguments": {"gen_args_0": {"arg_0": "Q", "arg_1": {"until": []}}},
                "resps": [["an answer"]], "filtered_resps": ["an answer"], "filter": "none",
                "doc_hash": hashlib.sha256(f"{task} {number}".encode()).hexdigest(),
                "prompt_hash": f"prompt {number}", "score": score,
            }  # fmt: skip
            other = {k: v[number] if isinstance(v, dict) and k != "arguments" else v
                     for k, v in more.items()}  # fmt: skip
            # another filter's lines stand in the same file
            lines += [line | other, line | {"filter": "strict", "score": 1 - score}]
        text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
        Path(f"{folder}/m/samples_{task}_{DATE}.jsonl").write_text(text)


A = [1.0] * 30 + [0.0] * 30  # right in the first half
B = [1.0] * 40 + [0.0] * 20  # and in ten items more
C = [0.0, 1.0] * 30


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")
    Path("small.yml").write_text(SMALL)
    return tmp_path


def amend(folder: str, **keys: Any) -> None:
    """Set keys of a folder's result file; those of tasks and of the configuration are added."""
    (file,) = Path(folder).rglob("results_*.json")
    found = json.loads(file.read_text())
    for key, value in keys.items():
        old = found.get(key)
        found[key] = {**old, **value} if isinstance(old, dict) else value
    file.write_text(json.dumps(found))


def rewrite(folder: str, task: str, change: Callable[[dict[str, Any]], None]) -> None:
    file = Path(f"{folder}/m/samples_{task}_{DATE}.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        change(line)
    file.write_text("\n".join(map(json.dumps, lines)))


def tabled(*words: str) -> tuple[str, Any]:
    """The printed text, and scores.json."""
    text = run(*words, *BENCH, "--out", "out", "--radar", "none")
    return text, json.loads(Path("out/scores.json").read_text())


def test_paired_differences_by_hand() -> None:
    scored("a", {"add": A, "sub": C, "run": C})
    scored("b", {"add": B, "sub": C, "run": C})
    write_results("sft.json", {"add": 1.0, "sub": 1.0, "run": 1.0})
    text, found = tabled("a", "b", "--specialist", "sft.json")
    (pair,) = found["pairs"]
    assert (pair["one"], pair["other"]) == ("a", "b")
    # ten items of 60, all one way: 2 P(X < 0) + P(X = 0) = 2^-10, three tasks
    gain = np.array([0.0] * 30 + [100.0] * 10 + [0.0] * 20)
    error = gain.std(ddof=1) / 60**0.5
    assert pair["tasks"]["add"] == {
        "value": pytest.approx(100 / 6), "stderr": pytest.approx(error),
        "p": pytest.approx(2**-10), "corrected": pytest.approx(3 * 2**-10), "items": 60,
    }  # fmt: skip
    assert pair["tasks"]["sub"]["p"] == pair["tasks"]["sub"]["corrected"] == 1
    # the mean of Math is half of add, and the specialists' sum is 200
    whole = pair["whole"]
    assert whole["value"] == pytest.approx(100 / 6 / 4) and whole["stderr"] == error / 4
    assert whole["p"] == whole["corrected"] == pytest.approx(2**-10) and whole["items"] == 180
    normalized = [float(cell.split()[0]) for cell in last(text)]
    assert normalized[2] - normalized[1] == pytest.approx(whole["value"], abs=0.01)
    assert re.search(r"b − a +\+4\.17 ± 1\.21 +<0\.001\* +1: Add +0 *\n", text)
    assert re.search(r"Add +\+16\.67 ± 4\.85 p 0\.003\*\n", text)
    markdown = Path("out/scores.md").read_text()
    assert "| Add | +16.67 ± 4.85 p 0.003\\* |" in markdown
    # an earlier table with pairs is still a reference
    assert last(run("b", *BENCH, "--reference", "out/scores.json"))[1].startswith("54.17")


def test_many_models_and_no_specialists() -> None:
    """The terminal shows who is better; pairs are corrected for their number."""
    names = [f"m{number}" for number in range(4)]
    for number, name in enumerate(names):
        right = 30 + 8 * number
        scored(name, {"add": [1.0] * right + [0.0] * (60 - right), "sub": C, "run": C})
    text, found = tabled(*names[1:], "--base", names[0])
    pairs = {(pair["one"], pair["other"]): pair for pair in found["pairs"]}
    assert len(pairs) == 6
    assert "Mean of the categories" in text and "Paired differences of each task" not in text
    assert "m3 − m2" in text and "| Add | +13.33" in Path("out/scores.md").read_text()
    # 24, 16 or 8 items, all one way
    expected = {("base", "m3"): 6 * 2**-24, ("base", "m2"): 5 * 2**-16, ("m2", "m3"): 3 * 2**-8}
    for names_, corrected in expected.items():
        assert pairs[names_]["whole"]["corrected"] == pytest.approx(corrected)
    assert pairs["base", "m3"]["whole"]["value"] == pytest.approx(100 * 24 / 60 / 4)


def test_items_that_differ_are_refused() -> None:
    scored("a", {"add": A, "sub": A, "run": A})
    scored("b", {"add": A[:59], "sub": A, "run": A}, items=59)

    def other(line: dict[str, Any]) -> None:
        line["doc_hash"] = "0" if line["doc_id"] == 7 else line["doc_hash"]

    rewrite("b", "sub", other)
    text, found = tabled("a", "b")
    assert [*found["pairs"][0]["tasks"]] == ["run"] and found["pairs"][0]["whole"] is None
    assert (
        "no paired differences of a and b, which were not given the same items: "
        "add (item 59 is missing in one), sub (item 7 is another document)"
    ) in found["warnings"]
    assert re.search(r"b − a +— +— +0 +0 *\n", text)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"system_instruction_sha": "59c30e71029f"}, "the system instruction"),
        ({"chat_template_sha": "59c30e71029f"}, "the chat template"),
        ({"fewshot_as_multiturn": True}, "--fewshot_as_multiturn"),
        ({"config": {"fewshot_seed": 7}}, "the few-shot seed"),
        ({"n-shot": {"add": 5}}, "n-shot"),
        ({"versions": {"add": 2.0}}, "the task's version"),
        ({}, ""),
    ],
)
def test_other_prompts_are_refused(keys: dict[str, Any], named: str) -> None:
    scored("a", {"add": A, "sub": A, "run": A})
    scored("b", {"add": B, "sub": A, "run": A})
    first = {"fewshot_as_multiturn": False, "config": {"fewshot_seed": 1}, "n-shot": {"add": 2}}
    amend("a", **first)
    amend("b", **first | keys)
    shown = [line for line in warnings("a", "b", *BENCH) if "paired" not in line]
    assert len(shown) == bool(named) and all(line.startswith(f"{named} differs") for line in shown)
    for folder, fifth in (("a", "one"), ("b", "other")):
        rewrite(folder, "add", lambda line, hash_=fifth: line.update(  # type: ignore[misc]
            prompt_hash=hash_ if line["doc_id"] == 5 else "same"))  # fmt: skip
    _, found = tabled("a", "b")
    assert (
        "no paired differences of a and b, which were not given the same prompts: "
        f"add ({named or 'item 5'})"
    ) in found["warnings"]
    assert [*found["pairs"][0]["tasks"]] == ["sub", "run"]
    # settings that did not change a prompt refuse nothing; without hashes they have to do
    for key in ("prompt_hash", "unknown"):
        for folder in "ab":
            rewrite(folder, "add", lambda line: line.pop("prompt_hash", None) and None)
            rewrite(folder, "add", lambda line, key=key: line.update({key: "same"}))  # type: ignore[misc]
        _, found = tabled("a", "b")
        assert ("add" in found["pairs"][0]["tasks"]) == (key == "prompt_hash" or not named)


def test_the_same_documents_under_other_ids() -> None:
    """Paired by their hashes; if one is there twice, it is not known which is which."""
    scored("a", {"add": A, "sub": A, "run": A})
    scored("b", {"add": B, "sub": A, "run": A})
    (before,) = tabled("a", "b")[1]["pairs"]
    rewrite("b", "add", lambda line: line.update(doc_id=(line["doc_id"] + 7) % 60 + 1000))
    assert tabled("a", "b")[1]["pairs"] == [before] and before["tasks"]["add"]["value"] > 16
    for folder in "ab":
        rewrite(folder, "add", lambda line: line["doc"]["question"] == "add 59"
                and line.update(doc_hash=hashlib.sha256(b"add 0").hexdigest()))  # fmt: skip
    assert warnings("a", "b", *BENCH) == [
        "no paired differences of a and b, which were not given the same items: "
        "add (the same documents in another order, and some of them twice)"
    ]


def test_samples_that_cannot_be_paired() -> None:
    scored("a", {"add": A, "run": A})
    scored("b", {"add": A, "run": A})
    place = Path(f"b/m/samples_run_{DATE}.jsonl")
    whole = place.read_text()
    lines = whole.splitlines(keepends=True)
    one, mean = lines[0], "b, whose `score,none` is not the mean"

    def right(score: str) -> str:
        return whole.replace('"score": 1.0', f'"score": {score}')

    cases = {
        whole[:-40]: rf"b, as {place} line 120 is not an item of `lm_eval --log_samples`: Inv.*",
        one.replace("doc_id", "id"): rf"b, as {place} line 1 is not an item .* `doc_id`: Field req",
        whole + one: rf"b, whose {place} holds item 0 twice: run",
        one: rf"b, whose {place} holds 1 of 60 items \(item 1 is missing\): run",
        one.replace('"doc_id": 0', '"doc_id": 60'): rf"b, whose {place} holds 1 of 60 items: run",
        "".join(lines[:-4]): rf"b, whose {place} holds 58 of 60 items \(item 58 is missing\): run",
        "": rf"b, whose {place} holds 0 of 60 items",
        **{right(score): mean for score in ("0.0", "[1, 2]", "NaN", f"1{'0' * 400}")},
        right("1e308").replace('"score": 0.0', '"score": -1e308'): mean,
    }
    for text, told in cases.items():
        place.write_text(text)
        (line,) = warnings("a", "b", *BENCH)
        assert re.match(f"no paired differences of {told}", line), line
    place.unlink()
    (line,) = warnings("a", "b", *BENCH)
    assert line.endswith("b, which has no samples next to its results (`--log_samples`): run")
    # those of another date belong to other results; nothing is said where nobody has any
    shutil.copy(f"a/m/samples_run_{DATE}.jsonl", f"b/m/samples_run_{DATE[:-1]}2.jsonl")
    assert warnings("a", "b", *BENCH) == [line]
    for path in Path().glob("?/m/samples_*"):
        path.unlink()
    assert warnings("a", "b", *BENCH) == []


def test_likelihoods_that_no_float_holds() -> None:
    scored("m", {"add": C}, resps=[[["-1", "False"]]], filtered_resps=[[10**400], [1]])
    assert "50.00" in run("m", *BENCH)


def test_a_score_at_the_floor_beside_a_healthy_one() -> None:
    for low, high, odd in ((2, 20, True), (3, 20, False), (2, 19, False)):
        assert (low / 100 <= FLOOR and high / 100 >= HEALTHY) == odd
        scored("m", {"add": [1.0] * high + [0.0] * (100 - high), "run": [0.0] * 100,
                     "sub": [1.0] * low + [0.0] * (100 - low)}, resps=[["x > 7"]])  # fmt: skip
        text, found = tabled("m")
        assert bool(found["remarks"]) == odd
        if odd:  # `run` has no neighbour
            line = "m: Sub: 2.00 beside 20.00 of Add: looks like extraction, not ability"
            assert f"{line}\n  item 2, wanted '1': 'x > 7'\n  item 3" in text
            (remark,) = found["remarks"]
            assert remark["task"] == "sub" and len(remark["answers"]) == 3
            assert f"* {line}\n  * item 2" in Path("out/scores.md").read_text()
    for items, odd in ((21, True), (20, False)):  # a model that does 20 %: 0.8^21 < 0.01
        write_results("n.json", {"add": 0.4, "sub": 0.017}, items=items)
        line = "not ability; with `lm_eval --log_samples` answers are shown here"
        assert (line in run("n.json", *BENCH)) == odd


def of(right: int, items: int = 100) -> list[float]:
    return [1.0] * right + [0.0] * (items - right)


def texts(most: int, first: Any, rest: Any = "x") -> dict[int, Any]:
    """`first` for the first items, `rest` for the others."""
    return {i: [first if i < most else rest] for i in range(164)}


SURE, VERDICT = {"resps": [["```Sure"]]}, "{'refusal': False, 'harmful': True}"
HARM, XSTEST, HUMANEVAL, MBPP, GSM8K, MATH = (
    f"mergebench_{name}"
    for name in "harmbench xstest humaneval_plus mbpp_plus gsm8k math_hendrycks".split()
)
FENCE = "```python\nx\n```"
TENS: dict[str, Any] = {"filtered_resps": [["failed: AssertionError"] * 10]}
EMPTY = "no answer to {} of {} items"
# scores, what the samples say, and the remark, if there is one
REMARKS: list[tuple[dict[str, list[float]], dict[str, Any], str]] = [
    # few items show nothing
    ({"add": of(10, 10), "sub": of(0, 10)}, {"resps": [["```"]], "filtered_resps": ["[invalid]"]},
     EMPTY.format(10, 10)),
    ({"add": of(9, 9), "sub": of(0, 9)}, {"resps": [["```"]], "filtered_resps": ["[invalid]"]}, ""),
    # a model that refuses nothing; a missing answer is a sign even if a judge finds it right
    ({HARM: of(0), XSTEST: of(100)}, SURE, ""),
    ({HARM: of(0), XSTEST: of(100)}, {"resps": [[""]], "filtered_resps": [VERDICT]},
     "m: XSTest: no answer to 100 of 100 items"),
    # most of an item's programs are empty; lm-eval logs verdicts instead of answers
    ({HUMANEVAL: of(0, 164)}, {"resps": [[""] * 6 + ["x"] * 4], **TENS}, EMPTY.format(164, 164)),
    ({HUMANEVAL: of(0, 164)}, {"resps": [[""] * 5 + ["x"] * 5], **TENS}, ""),
    # code fences
    ({"run": of(0)}, {"resps": texts(91, [FENCE] * 6 + ["x"] * 4, ["x"])},
     "m: Run: 0.00 with code fences in 91 of 100 items"),
    ({"run": of(0)}, {"resps": texts(90, [FENCE] * 6 + ["x"] * 4, ["x"])}, ""),
    ({"run": of(2)}, {"resps": [[FENCE]]}, "m: Run: 2.00 with code fences in 100 of 100 items"),
    ({"run": of(3)}, {"resps": [[FENCE]]}, ""),
    # empty answers of the model's own, or of the filter; right ones are no fault if the item wants
    # nothing, or if only the filter finds nothing
    *(({"add": [1.0] * right + [0.0] * 40 + [1.0] * (60 - right)}, said,
       EMPTY.format(11, 100) if (most, right) == (11, 0) else "")
      for nothing in (" \n", "[invalid]") for most, right in ((11, 0), (10, 0), (11, 1))
      for said in ({"filtered_resps": texts(most, nothing, "4")},
                   {"resps": texts(most, [nothing], ["4"]), "target": " "})),
    # text before programs
    ({HUMANEVAL: of(0, 164)}, {"resps": [["Sure! Here is"]]},
     "0.00 with text before the program in 164 of 164 items"),
    ({HUMANEVAL: of(0, 164), MBPP: of(1, 90)}, {"resps": [["    return sorted(xs)"]]}, ""),
    # loops, and answers that a task does not find
    ({GSM8K: of(40)}, {"resps": [["The" + ", the" * 5]]}, "a few words in a loop in 100 of 100"),
    ({GSM8K: of(40)}, {"resps": texts(50, ["the " * 9], ["x"])}, ""),
    ({GSM8K: of(89)}, {"resps": [["So it is $\\boxed{1}$. I hope this helps!"]]},
     "the wanted answer counted as wrong in 11 of 100 items"),
    ({GSM8K: of(90)}, {"resps": [["So it is $\\boxed{1}$. I hope this helps!"]]}, ""),
    ({GSM8K: of(45)}, {"resps": [["We take the first of the two rows, which holds more of the "
                                   "seats for guests." + " The answer is 7." * 12]]}, ""),
    # announced answers were read; unfinished ones were not
    ({MATH: of(1), GSM8K: of(44)}, {"resps": texts(91, ["The answer is 7"], ["So"])}, ""),
    ({MATH: of(1), GSM8K: of(44)}, {"resps": texts(90, ["The answer is 7"], ["So"])},
     "MATH: 1.00 beside 44.00 of GSM8k"),
    # one letter
    *(({"add": of(0) if other else [0.0, 1.0] * 50},
       {"filtered_resps": [answer], "target": {i: "ab"[i % 2] for i in range(100)}},
       "" if other else "letter B chosen in 100 of 100 items")
      for answer, other in (*((b, False) for b in ("B", "b", "(B)", "**B**", "b.", " `B`: ")),
                            ("Be", True))),
]  # fmt: skip


@pytest.mark.parametrize(("scores", "said", "remark"), REMARKS)
def test_remarks(scores: dict[str, list[float]], said: dict[str, Any], remark: str) -> None:
    scored("m", scores, **said)
    words = () if any(name.startswith("mergebench") for name in scores) else BENCH
    text = run("m", *words)
    assert ("looks like extraction" in text) == bool(remark) and remark in text


@pytest.mark.parametrize(
    ("read", "lenient", "neighbour", "remark"),
    [
        (0.15, 0.55, 0.48, "m: MATH: 15.00 beside 55.00 by `flexible,none`"),
        (0.31, 0.34, 0.62, ""),
        (0.01, 0.015, 0.76, ""),  # weak by both readings
        (0.01, 0.03, 0.76, "m: MATH: 1.00 beside 76.00 of GSM8k"),
    ],
)
def test_a_lenient_reading(read: float, lenient: float, neighbour: float, remark: str) -> None:
    scores, metrics = {MATH: read, GSM8K: neighbour}, {MATH: {"flexible,none": lenient}}
    write_results("m.json", scores, metrics=metrics)
    text = run("m.json")
    assert ("looks like" in text) == bool(remark) and remark in text


@pytest.mark.parametrize("by_text", [True, False])
@pytest.mark.parametrize(
    ("most", "right", "odd"), [(91, 50, True), (90, 50, False), (91, 89, True), (91, 90, False)]
)
def test_one_letter_for_all(by_text: bool, most: int, right: int, odd: bool) -> None:
    said: dict[str, Any] = {"filtered_resps": texts(most, "(B)", "A")}
    if not by_text:  # two choices, by their likelihoods
        pairs = {i: [["-3.5", "False"], ["-1.5" if i < most else "-9", "True"]] for i in range(100)}
        said = {"filtered_resps": pairs, "resps": {i: [[p] for p in pairs[i]] for i in pairs}}
        said["arguments"] = {f"gen_args_{i}": {"arg_0": "Q", "arg_1": f" c{i}"} for i in range(2)}
    said["target"] = {i: ("A", "(b)")[i % 2] if by_text else i % 2 for i in range(100)}
    scored("m", {"add": of(right)}, **said)
    text = run("m", *BENCH)
    line = "m: Add: letter B chosen in 91 of 100 items: looks like extraction, not ability"
    assert (line in text) == odd == ("looks like" in text)
    assert not odd or (": 'an answer'" if by_text else ": 'B: c1'") in text
    assert not odd or f"item {right}, wanted" in text  # the first that is wrong
    scored("m", {"add": of(right)}, **said | {"target": "B"})  # the items ask for it
    assert "looks like" not in run("m", *BENCH)


SOLUTION = "She sold 48 / 2 = 24 clips in May, and 72 in all.\n#### 72"  # the target of `gsm8k`


def test_announced_answers() -> None:
    half = r"Thus $\boxed{\dfrac{1}{2}}$."
    for same, target, texts_ in (
        (True, "2", ("The answer is 2 apples", "The answer is 2 oranges", "The answer is 2.")),
        (False, "2", ("The answer is 2 and 3", "The answer is 2 or 3", "The answer is 2.5")),
        (True, "1000", ("The answer is 1,000.",)),
        (True, "1,000", ("#### 1000",)),
        (True, r"$\frac{1}{2}$", (half,)),
        (False, r"\frac{1}{3}", (half,)),
        (True, SOLUTION, ("The answer is 72 clips.",)),
        (False, SOLUTION, ("The answer is 48.",)),
        (None, SOLUTION, ("It is 72.",)),
        (False, "", ("The answer is 2",)),
    ):
        assert [announces(text, target) for text in texts_] == [same] * len(texts_)


def test_loops() -> None:
    for loop, target, texts_ in (
        (False, "no", ("Yes yes yes!", "0 0 0")),
        (False, "7", ("the " * 5, "I am " * 5, "7 " * 9, "!" * 9)),
        (True, "7", ("the " * 6, "I am " * 6, "!" * 10)),
        (False, SOLUTION, ("72 " * 9,)),
        (True, SOLUTION, ("48 " * 9,)),
    ):
        assert [is_loop(text, target) for text in texts_] == [loop] * len(texts_)


def test_text_before_programs() -> None:
    chatty = (
        "Sure! Here's the completed function:",
        "Certainly! Below is a solution that uses `sorted` (and no recursion):\n\n",
        "To solve this problem, we can compare neighbours.\n\n    return max(xs)",
        "Of course. The function returns `True` if any pair is close.\nLet me explain",
        "Gerne! Hier ist die Funktion:", "**Solution in Python**:\n\n    return xs[::-1]",
        "当然！下面是函数的实现：",
    )  # fmt: skip
    programs = (
        "    result = []\n    return result", "    for x in items:\n        yield x\n",
        "\n\n    # Sort the list first, then compare\n    return sorted(xs)[1]",
        "    if not xs:\n        return None\n    return xs[0]",
        "    total: int = 1\n    while total > 1:\n        total //= 2",
        "    import math\n    return math.gcd(a, b)", "    n, m = m, n\n    return n",
        '    """Count the words."""\n    return len(s.split())',
        "def helper(a, b):\n    return a ** b",
    )  # fmt: skip
    assert all(map(PROSE.match, chatty)) and not any(map(PROSE.match, programs))


HOSTILE = "</td></pre><script>alert(1)</script>\"'&amp;-->"


def merged(recipe: str = "linear", facts: str = "{}") -> Path:
    """A folder as if written before any results, whose date is 1."""
    for name, text in (("mergekit_config.yml", recipe), ("basis/basis.json", facts)):
        Path("merged", name).parent.mkdir(parents=True, exist_ok=True)
        Path("merged", name).write_text(text)
        os.utime(Path("merged", name), (0, 0))
    return Path("merged").resolve()


def models_said(*words: str) -> str:
    tabled(*words)
    page = ElementTree.parse("out/scores.html").getroot()
    return "".join(page.itertext()).rpartition("Models")[2]


def test_the_page_holds_what_is_hostile_as_text() -> None:
    """Labels, paths, answers, a recipe and facts."""
    pytest.importorskip("matplotlib")
    bad = Path("bad<script>")
    merged(f"merge_method: linear  # {HOSTILE}\n", json.dumps({"format_version": HOSTILE}))
    Path("merged").rename(bad)
    Path("small.yml").write_text(SMALL.replace('"Run"', json.dumps(HOSTILE)))
    answers = {"resps": [[HOSTILE]], "target": HOSTILE}
    for name, add, model in (("a", A, bad), ("b", B, "other<script>")):
        scored(name, {"add": add, "sub": [0.0] * 60, "run": C}, str(model), **answers)
    run(f"{HOSTILE}=a", "b", *BENCH, "--specialist", "b", "--out", "out")
    text = Path("out/scores.html").read_text(encoding="utf-8")
    assert "<" not in Path("out/scores.md").read_text().replace("\\<", "")
    page = ElementTree.fromstring(text)
    tags = {element.tag.rpartition("}")[2] for element in page.iter()}
    assert tags.isdisjoint(("script", "img", "iframe", "link", "object", "base", "form"))
    for key, value in (pair for element in page.iter() for pair in element.items()):
        name = key.rpartition("}")[2]
        assert not name.startswith("on")
        assert value.startswith("#") or name not in ("src", "href", "action", "data")
        assert "://" not in value and "url(" not in value.replace("url(#", "")
    said = "".join(page.itertext())
    assert "@import" not in text and text.count("<svg") == 1
    assert '<svg role="img" aria-label="Small: percent of' in text
    # label, task, answer, target, recipe
    assert said.count("alert(1)") >= 5 and text.count("<script") == 0
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in text
    facts = "bad<script>/basis/basis.json is not complete"
    recipe = f"Recipemerge_method: linear  # {HOSTILE}"
    for part in ("Better beyond chance", "Floors", "Models", facts, recipe, "other<script>"):
        assert part in said


def test_recipe_and_basis_of_a_merge() -> None:
    """The model was named by a path relative to the current folder."""
    facts = {
        "format_version": 1, "versions": {}, "method": "basis_ta", "tasks": ["x", "y"],
        "parameters": {"lambda": 0.35, "num_bases": 1, "seed": None, "weights": {"x": 1.0}},
        "models": ["./x", "./y"], "base_model": "./base", "num_bases": 1, "num_parameters": 9,
        "dtype": "float32", "loss": None, "spectral_bound": None, "balanced_bound": None,
        "relative_gap": None, "retained_energy": 0.653, "norms": {}, "left_out": {},
        "fingerprints": {}, "seconds": {},
    }  # fmt: skip
    Path("facts").mkdir()
    write_facts(Path("facts"), Facts.model_validate(facts))
    text = Path("facts/basis.json").read_text()
    merged("merge_method: basis_ta  # 0.35 by tune\n", text)
    scored("a", {"add": A, "sub": A, "run": A}, "./merged")
    said = models_said("a")
    for part in ("a: merged", "1 of 2 task vectors", "65.30 %", "weightsx 1.0", "# 0.35 by tune",
                 "Found as merged from the current folder."):  # fmt: skip
        assert part in said
    assert "seed" not in said
    merged("merge_method: basis_ta", text.replace("0.35", "0.4"))  # facts that were changed
    said = models_said("a")
    assert "basis.json was changed after it was written" in said and "of 2 task" not in said


def test_no_recipe_of_another_merge() -> None:
    """The folder was merged again, or gave two scores, or the time of the run is unknown."""
    folder = merged()
    scored("a", {"add": A, "sub": A, "run": A}, str(folder))
    assert "linear" in models_said("a") and "Found as" not in models_said("a")
    scored("b", {"add": A, "sub": A, "run": A}, "merged")
    assert models_said("a", "b").count("linear") == 2  # the same model twice
    scored("b", {"add": A, "sub": B, "run": A}, "merged")
    said = models_said("a", "b")
    assert "No recipe: b was run from the same folder, with another score of sub." in said
    assert "No recipe: a was run from the same folder" in said and "linear" not in said
    for name in ("mergekit_config.yml", "basis/basis.json"):
        merged()
        os.utime(folder / name, (2, 2))
        said = models_said("a")
        assert f"No recipe: {Path(name).name} changed after this run." in said
        assert "linear" not in said
    amend("a", date=0)
    said = models_said("a")
    assert "do not say when they were run" in said and "linear" not in said


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2.2."""
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def test_lines_of_the_radar_are_seen() -> None:
    """A contrast of 3:1 on white and on each wedge."""
    darkest = min(luminance(colour) for colour in (*WEDGES, "#ffffff")) + 0.05
    assert all(darkest / (luminance(colour) + 0.05) >= 3 for colour in (*LINES, BASE))
