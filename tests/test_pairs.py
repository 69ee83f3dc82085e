"""`tvb score` with lm-eval's samples: paired differences."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_score import BENCH, SMALL, last, run, warnings, write_results

from tvb_mergekit.score.pairs import difference, holm, sign_flip

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


def scored(folder: str, scores: dict[str, Sequence[float]]) -> None:
    """Results and samples as lm-eval 0.4.13 writes them."""
    means = {task: sum(values) / len(values) for task, values in scores.items()}
    counts = {task: {"original": len(own), "effective": len(own)} for task, own in scores.items()}
    write_results(f"{folder}/m/results_{DATE}.json", means, **{"n-samples": counts})
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
            # another filter's lines stand in the same file
            lines += [line, line | {"filter": "strict", "score": 1 - score}]
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
    text = run(*words, *BENCH, "--out", "out")
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
    scored("b", {"add": A[:59], "sub": A, "run": A})

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
