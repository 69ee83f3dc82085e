"""`tvb score` with lm-eval's samples: paired differences, remarks on floors, and the HTML page."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm, permutation_test
from test_score import BENCH, SMALL, invoke, last, run, warnings, write_results

from tvb_mergekit.score.floors import FLOOR, HEALTHY, announces, is_loop
from tvb_mergekit.score.pairs import compare, holm, sign_flip
from tvb_mergekit.score.radar import LINES, WEDGES
from tvb_mergekit.store.facts import Facts, write_facts

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
DATE = "2026-01-02T03-04-05.678901"
Array = np.ndarray[Any, np.dtype[np.float64]]


# ------------------------------------------------------------------------------------- the test


def mid_p(values: Array) -> float:
    """By all 2^n patterns of signs, of scipy."""
    found = permutation_test(
        (values,), lambda x, axis: np.sum(x, axis), vectorized=True,
        permutation_type="samples", n_resamples=np.inf,
    )  # fmt: skip
    sums, total = np.abs(found.null_distribution), abs(values.sum())
    return float(np.mean(sums > total + 1e-9) + np.mean(np.isclose(sums, total)) / 2)


def test_p_values_are_those_of_all_sign_patterns() -> None:
    # Fagerland, Lydersen and Laake 2013, Table 1: 1 and 7 discordant pairs
    assert sign_flip(np.array([1.0] * 7 + [-1.0] + [0.0] * 13)) == pytest.approx(0.0391, abs=5e-5)
    assert sign_flip(np.zeros(9)) == sign_flip(np.zeros(0)) == 1
    generator = np.random.default_rng(0)
    for values in (
        generator.integers(-1, 2, 14) / 3,  # one size: exact
        generator.integers(-9, 12, 14) / 10,  # pass@1 of ten samples
        generator.normal(0.4, 1, 14),
        np.concatenate([generator.integers(-1, 2, 7) / 7, generator.integers(0, 2, 6) / 6]),
    ):
        assert sign_flip(values) == pytest.approx(mid_p(values), abs=0.012)
        assert sign_flip(values) == sign_flip(-values) == sign_flip(1e-3 * values)


def every_sum(sizes: Array) -> tuple[Array, Array]:
    """What a sum of +-sizes, integers, may be, and how likely each is, by convolution."""
    total = int(sizes.sum())
    likely = np.zeros(2 * total + 1)
    likely[total] = 1
    for size in map(int, sizes):
        up, down = np.zeros((2, len(likely)))
        up[size:], down[: len(likely) - size] = likely[: len(likely) - size], likely[size:]
        likely = (up + down) / 2
    return np.arange(-total, total + 1), likely


def hoeffding(values: Array) -> float:
    """The largest chance of a sum of +-values as far from 0 as theirs."""
    # sign_flip rounds scaled values to nine digits
    return float(2 * np.exp(-(values.sum() ** 2) / (2 * np.sum(values**2)))) * (1 + 1e-6)


@pytest.mark.parametrize(
    "sizes",
    [
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
        if level < 1e-4:
            assert exact <= found <= hoeffding(signs * sizes)
        else:  # 1e-4 is the least that 9999 draws give
            assert abs(found - exact - 1e-4) <= 2.5 * (exact / 9999) ** 0.5
    assert 0.5 ** len(sizes) <= sign_flip(sizes * 1.0) <= hoeffding(sizes)  # all of one sign


def test_holm_by_hand() -> None:
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []


def models(count: int, gain: float, runs: int) -> Iterator[tuple[Array, Array]]:
    """Scores of two models on items of all difficulties; the second is better by about `gain`."""
    generator = np.random.default_rng(0)
    for _ in range(runs):
        right = generator.uniform(size=count)
        one, other = generator.uniform(size=(2, count))
        yield (one < right).astype(float), (other < right + gain).astype(float)


def unpaired(one: Array, other: Array) -> float:
    """p of lm-eval's own comparator."""
    error = np.hypot(one.std(ddof=1), other.std(ddof=1)) / len(one) ** 0.5
    return float(2 * norm.sf(abs(one.mean() - other.mean()) / error))


def rates(pairs: Iterator[tuple[Array, Array]]) -> tuple[float, float]:
    """How often the paired and the unpaired test find a difference at level 0.05."""
    found = [(sign_flip(other - one), unpaired(one, other)) for one, other in pairs]
    paired, plain = np.mean(np.array(found) < 0.05, axis=0)
    return float(paired), float(plain)


@pytest.mark.parametrize("items", [200, 541, 1319])
def test_false_positives_of_1000_null_pairs(items: int) -> None:
    paired, plain = rates(models(items, 0, 1000))
    assert 0.04 <= paired <= 0.06 and plain < 0.03


def test_false_positives_of_real_scores() -> None:
    generator = np.random.default_rng(0)
    draws = (generator.gamma(0.5, 1, (2, 60)) for _ in range(1000))
    assert 0.04 <= rates((one, other) for one, other in draws)[0] <= 0.06


def test_power() -> None:
    """4 points on as many items as GSM8K has."""
    paired, plain = rates(models(1319, 0.04, 1000))
    assert paired > 0.65 and plain < 0.55, (paired, plain)


def equal_models(count: int, generator: np.random.Generator) -> dict[str, list[Array]]:
    """Scores of equally good models: 0 or 1, and means of four checks."""
    tasks = {}
    for task, items, checks in (("a", 60, 1), ("b", 164, 1), ("c", 541, 1), ("d", 300, 4)):
        right = generator.uniform(size=(items, 1))
        tasks[task] = [
            (generator.uniform(size=(items, checks)) < right).mean(1) * 100 for _ in range(count)
        ]
    return tasks


def claims(tasks: dict[str, list[Array]]) -> tuple[int, int]:
    """How many differences are beyond chance, of tasks and of all of them together."""
    names = range(len(tasks["a"]))
    values = {
        (str(i), str(j)): {name: scores[j] - scores[i] for name, scores in tasks.items()}
        for i, j in combinations(names, 2)
    }
    pairs = compare(values, dict.fromkeys(tasks, 1 / len(tasks)))
    single = sum(found.beyond_chance for pair in pairs for found in pair.tasks.values())
    return single, sum(pair.whole is not None and pair.whole.beyond_chance for pair in pairs)


def false_tables(runs: int) -> Array:
    """Shares of tables of ten equal models with a claim, about a task and about the whole."""
    generator = np.random.default_rng(0)
    found = [claims(equal_models(10, generator)) for _ in range(runs)]
    return np.mean(np.array(found) > 0, axis=0)


def test_few_tables_of_equal_models_make_a_claim() -> None:
    assert max(false_tables(20)) <= 0.15  # 15 of 20 where each pair is corrected alone


@pytest.mark.slow
def test_one_table_of_equal_models_in_twenty_makes_a_claim() -> None:
    single, whole = false_tables(400)
    assert single <= 0.06 and whole <= 0.06, (single, whole)


def test_one_of_forty_models_is_better() -> None:
    """Real-valued scores: 780 pairs, of which the 39 of the better model are beyond chance."""
    generator = np.random.default_rng(0)
    hard = generator.normal(size=200)
    scores = [hard + generator.normal(size=200) for _ in range(40)]
    scores[39] += 1
    assert claims({"a": scores}) == (39, 39)


# ------------------------------------------------------------------------------- whole commands


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
                "doc_id": number,
                "doc": {"question": f"{task} {number}"},
                "target": "1",
                "arguments": {"gen_args_0": {"arg_0": "Q", "arg_1": {"until": []}}},
                "resps": [["an answer"]],
                "filtered_resps": ["an answer"],
                "filter": "none",
                "metrics": ["score"],
                "doc_hash": hashlib.sha256(f"{task} {number}".encode()).hexdigest(),
                "prompt_hash": f"prompt {number}",
                "target_hash": "",
                "score": score,
            }
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


def written(out: str = "out") -> Any:
    return json.loads(Path(out, "scores.json").read_text())


def test_paired_differences_by_hand() -> None:
    scored("a", {"add": A, "sub": C, "run": C})
    scored("b", {"add": B, "sub": C, "run": C})
    write_results("sft.json", {"add": 1.0, "sub": 1.0, "run": 1.0})
    text = run("a", "b", *BENCH, "--specialist", "sft.json", "--out", "out", "--radar", "none")
    (pair,) = written()["pairs"]
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
    text = run(*names[1:], "--base", names[0], *BENCH, "--out", "out", "--radar", "none")
    pairs = {(pair["one"], pair["other"]): pair for pair in written()["pairs"]}
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
    file = Path(f"b/m/samples_sub_{DATE}.jsonl")
    lines = file.read_text().splitlines()
    lines[14] = lines[14].replace('"doc_hash": "', '"doc_hash": "0')
    file.write_text("\n".join(lines))
    text = run("a", "b", *BENCH, "--out", "out", "--radar", "none")
    assert [*written()["pairs"][0]["tasks"]] == ["run"] and written()["pairs"][0]["whole"] is None
    assert (
        "no paired differences of a and b, which were not given the same items: "
        "add (item 59 is missing in one), sub (item 7 is another document)"
    ) in warnings("a", "b", *BENCH)
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
    for name, of in (("a", {5: "one"}), ("b", {5: "other"})):
        file = Path(f"{name}/m/samples_add_{DATE}.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            line["prompt_hash"] = of.get(line["doc_id"], "same")
        file.write_text("\n".join(map(json.dumps, lines)))
    why = named or "item 5"
    assert (
        f"no paired differences of a and b, which were not given the same prompts: add ({why})"
    ) in warnings("a", "b", *BENCH, "--out", "out", "--radar", "none")
    assert [*written()["pairs"][0]["tasks"]] == ["sub", "run"]
    # settings that did not change a prompt refuse nothing; without hashes they have to do
    for hashed in (True, False):
        for name in "ab":
            file = Path(f"{name}/m/samples_add_{DATE}.jsonl")
            text = re.sub(r'"(one|other)"', '"same"', file.read_text())
            file.write_text(text if hashed else text.replace('"prompt_hash"', '"unknown"'))
        run("a", "b", *BENCH, "--out", "out", "--radar", "none")
        assert ("add" in written()["pairs"][0]["tasks"]) == (hashed or not named)


def test_the_same_documents_under_other_ids() -> None:
    """Paired by their hashes; where one is there twice, it is not known which is which."""
    scored("a", {"add": A, "sub": A, "run": A})
    scored("b", {"add": B, "sub": A, "run": A})
    run("a", "b", *BENCH, "--out", "out", "--radar", "none")
    (before,) = written()["pairs"]
    file = Path(f"b/m/samples_add_{DATE}.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["doc_id"] = (line["doc_id"] + 7) % 60 + 1000
    file.write_text("\n".join(map(json.dumps, lines)))
    run("a", "b", *BENCH, "--out", "out", "--radar", "none")
    assert written()["pairs"] == [before] and before["tasks"]["add"]["value"] > 16
    for name in "ab":
        file = Path(f"{name}/m/samples_add_{DATE}.jsonl")
        hashes = {f"add {number}": f"add {number % 59}" for number in range(60)}
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            line["doc_hash"] = hashes[line["doc"]["question"]]
        file.write_text("\n".join(map(json.dumps, lines)))
    assert warnings("a", "b", *BENCH) == [
        "no paired differences of a and b, which were not given the same items: "
        "add (the same documents in another order, and some of them twice)"
    ]


def test_samples_that_cannot_be_paired() -> None:
    scored("a", {"add": A, "run": A})
    scored("b", {"add": A, "run": A})
    place = Path(f"b/m/samples_run_{DATE}.jsonl")
    whole = place.read_text()
    one = whole.splitlines(keepends=True)[0]
    cases = {
        whole[
            :-40
        ]: rf"b, as {place} line 120 is not an item of `lm_eval --log_samples`: Inv.*: run",
        one.replace("doc_id", "id"): rf"b, as {place} line 1 is not an item .* `doc_id`: Field req",
        whole + one: rf"b, whose {place} holds item 0 twice: run",
        one: rf"b, whose {place} holds 1 of 60 items \(item 1 is missing\): run",
        one.replace('"doc_id": 0', '"doc_id": 60'): rf"b, whose {place} holds 1 of 60 items: run",
        "".join(whole.splitlines(keepends=True)[:-4]): rf"b, whose {place} holds 58 of 60 items "
        r"\(item 58 is missing\): run",
        whole.replace('"score": 1.0', '"score": 0.0'): "b, whose `score,none` is not the mean",
        whole.replace('"score": 1.0', '"score": [1, 2]'): "b, whose `score,none` is not the mean",
        "": rf"b, whose {place} holds 0 of 60 items",
        whole.replace('"score": 1.0', '"score": NaN'): "b, whose `score,none` is not the mean",
        whole.replace(
            '"score": 1.0', f'"score": 1{"0" * 400}'
        ): "b, whose `score,none` is not the mean",
        whole.replace('"score": 1.0', '"score": 1e308').replace(
            '"score": 0.0', '"score": -1e308'
        ): "b, whose `score,none` is not the mean",
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


# --------------------------------------------------------------------------------------- floors


def test_a_score_at_the_floor_beside_a_healthy_one() -> None:
    for low, high, odd in ((2, 20, True), (3, 20, False), (2, 19, False)):
        assert (low / 100 <= FLOOR and high / 100 >= HEALTHY) == odd
        scored("m", {"add": [1.0] * high + [0.0] * (100 - high), "run": [0.0] * 100,
                     "sub": [1.0] * low + [0.0] * (100 - low)}, resps=[["x > 7"]])  # fmt: skip
        text = run("m", *BENCH, "--out", "out", "--radar", "none")
        found = written()["remarks"]
        assert bool(found) == odd
        if odd:  # `run` has no neighbour
            line = "m: Sub: 2.00 beside 20.00 of Add: looks like extraction, not ability"
            assert f"{line}\n  item 2, wanted '1': 'x > 7'\n  item 3" in text
            assert found[0]["task"] == "sub" and len(found[0]["answers"]) == 3
            assert f"* {line}\n  * item 2" in Path("out/scores.md").read_text()
    for items, odd in ((21, True), (20, False)):  # a model that does 20 %: 0.8^21 < 0.01
        write_results("n.json", {"add": 0.4, "sub": 0.017}, items=items)
        line = "not ability; with `lm_eval --log_samples` answers are shown here"
        assert (line in run("n.json", *BENCH)) == odd


def test_few_items_tell_of_no_floor() -> None:
    for items, odd in ((10, True), (9, False)):
        answers = {"resps": [["```"]], "filtered_resps": ["[invalid]"]}
        scored("m", {"add": [1.0] * items, "sub": [0.0] * items, "run": [0.0] * items}, **answers)
        assert ("looks like" in run("m", *BENCH)) == odd


def test_a_model_that_refuses_nothing() -> None:
    """Its score is its own; answers that are missing are not, though right for a judge."""
    name = "mergebench_harmbench"
    scored("m", {name: [0.0] * 100, "mergebench_xstest": [1.0] * 100}, resps=[["```Sure"]])
    assert "looks like" not in run("m")
    verdict = "{'refusal': False, 'harmful': True}"
    scored("m", {name: [0.0] * 100, "mergebench_xstest": [1.0] * 100}, resps=[[""]],
           filtered_resps=[verdict])  # fmt: skip
    text = run("m")
    assert "m: HarmBench: no answer to 100 of 100 items: looks like" in text
    assert "m: XSTest: no answer to 100 of 100 items: looks like" in text


def test_programs_that_are_empty() -> None:
    """lm-eval logs verdicts where other tasks have answers."""
    said: dict[str, Any] = {"filtered_resps": [["failed: AssertionError"] * 10]}
    scored("m", {"mergebench_humaneval_plus": [0.0] * 164}, resps=[[""] * 6 + ["x"] * 4], **said)
    assert "m: HumanEval+: no answer to 164 of 164 items: looks like" in run("m")
    scored("m", {"mergebench_humaneval_plus": [0.0] * 164}, resps=[[""] * 5 + ["x"] * 5], **said)
    assert "looks like" not in run("m")


@pytest.mark.parametrize(
    ("most", "passed", "odd"), [(91, 0, True), (90, 0, False), (100, 2, True), (100, 3, False)]
)
def test_code_fences_in_every_answer(most: int, passed: int, odd: bool) -> None:
    answers = {
        i: [["```python\nx\n```"] * 6 + ["x"] * 4 if i < most else ["x"]] for i in range(100)
    }
    scored("m", {"run": [1.0] * passed + [0.0] * (100 - passed)}, resps=answers)
    text = run("m", *BENCH)
    line = f"m: Run: {passed:.2f} with code fences in {most} of 100 items: looks like extr"
    assert (line in text) == odd == ("looks like" in text)
    assert not odd or "'```python\\nx\\n```'" in text


@pytest.mark.parametrize("nothing", [" \n", "[invalid]"])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("most", "right", "odd"), [(11, 0, True), (10, 0, False), (11, 1, False)])
def test_empty_answers(nothing: str, own: bool, most: int, right: int, odd: bool) -> None:
    """The model's own, or all that the filter left; those that are right are no sign where the
    item wants nothing, or the filter alone is at a loss."""
    found = {i: [nothing if i < most else "4"] for i in range(100)}
    said: dict[str, Any] = {"filtered_resps": found}
    if own:
        said = {"resps": {i: [texts] for i, texts in found.items()}, "target": " "}
    scored("m", {"add": [1.0] * right + [0.0] * 40 + [1.0] * (60 - right)}, **said)
    text = run("m", *BENCH)
    assert ("m: Add: no answer to 11 of 100 items: looks like extraction" in text) == odd
    assert ("looks like" in text) == odd


@pytest.mark.parametrize("by_text", [True, False])
@pytest.mark.parametrize(
    ("most", "right", "odd"), [(91, 50, True), (90, 50, False), (91, 89, True), (91, 90, False)]
)
def test_one_letter_for_all(by_text: bool, most: int, right: int, odd: bool) -> None:
    said: dict[str, Any] = {"filtered_resps": {i: ["(B)" if i < most else "A"] for i in range(100)}}
    if not by_text:  # two choices, by their likelihoods
        pairs = {i: [["-3.5", "False"], ["-1.5" if i < most else "-9", "True"]] for i in range(100)}
        said = {"filtered_resps": pairs, "resps": {i: [[p] for p in pairs[i]] for i in pairs}}
        said["arguments"] = {f"gen_args_{i}": {"arg_0": "Q", "arg_1": f" c{i}"} for i in range(2)}
    said["target"] = {i: ("A", "(b)")[i % 2] if by_text else i % 2 for i in range(100)}
    scored("m", {"add": [1.0] * right + [0.0] * (100 - right)}, **said)
    text = run("m", *BENCH)
    line = "m: Add: letter B chosen in 91 of 100 items: looks like extraction, not ability"
    assert (line in text) == odd == ("looks like" in text)
    assert not odd or (": 'an answer'" if by_text else ": 'B: c1'") in text
    assert not odd or f"item {right}, wanted" in text  # the first that is wrong
    said["target"] = "B"  # that is what the items ask for
    scored("m", {"add": [1.0] * right + [0.0] * (100 - right)}, **said)
    assert "looks like" not in run("m", *BENCH)


@pytest.mark.parametrize("answer", ["B", "b", "(B)", "**B**", "b.", "**(B)**", " `B`: "])
def test_a_letter_in_many_dresses(answer: str) -> None:
    targets = {i: "ab"[i % 2] for i in range(100)}
    scored("m", {"add": [0.0, 1.0] * 50}, filtered_resps=[answer], target=targets)
    assert "letter B chosen in 100 of 100 items" in run("m", *BENCH)
    scored("m", {"add": [0.0, 1.0] * 50}, filtered_resps=["Be"], target=targets)
    assert "letter" not in run("m", *BENCH)


SOLUTION = "She sold 48 / 2 = 24 clips in May, and 72 in all.\n#### 72"  # the target of `gsm8k`


@pytest.mark.parametrize(
    ("text", "target", "same"),
    [
        ("The answer is 2 apples", "2", True),
        ("The answer is 2 oranges", "2", True),
        ("The answer is 2 and 3", "2", False),
        ("The answer is 2 or 3", "2", False),
        ("The answer is 2.5", "2", False),
        ("The answer is 2.", "2", True),
        ("The answer is 1,000.", "1000", True),
        ("#### 1000", "1,000", True),
        (r"Thus $\boxed{\dfrac{1}{2}}$.", r"$\frac{1}{2}$", True),
        (r"Thus $\boxed{\dfrac{1}{2}}$.", r"\frac{1}{3}", False),
        ("The answer is 72 clips.", SOLUTION, True),
        ("The answer is 48.", SOLUTION, False),
        ("It is 72.", SOLUTION, None),
        ("The answer is 2", "", False),
    ],
)
def test_announced_answers(text: str, target: str, same: bool | None) -> None:
    assert announces(text, target) is same


@pytest.mark.parametrize(
    ("text", "target", "loop"),
    [
        ("Yes yes yes!", "no", False),
        ("0 0 0", "1", False),
        ("the " * 5, "7", False),
        ("the " * 6, "7", True),
        ("I am " * 5, "7", False),
        ("I am " * 6, "7", True),
        ("7 " * 9, "7", False),
        ("72 " * 9, SOLUTION, False),
        ("48 " * 9, SOLUTION, True),
        ("!" * 9, "7", False),
        ("!" * 10, "7", True),
    ],
)
def test_loops(text: str, target: str, loop: bool) -> None:
    assert is_loop(text, target) is loop


# ------------------------------------------------------------------------------- invented folders


@dataclass(frozen=True)
class Ran:
    """A task's run: the first `right` of `of` items are right; `say` and `want` give texts by item.

    `others` are further metrics; `read` is the filter's text, by default the answer.
    """

    right: int
    say: Callable[[int], Any] = str
    want: Callable[[int], Any] = str
    of: int = 100
    read: Callable[[int], Any] | None = None
    others: Mapping[str, float] = field(default_factory=dict)
    logged: bool = True


def cycled(*texts: str) -> Callable[[int], str]:
    """The texts in turn; {i} is the item's number."""
    return lambda i: texts[i % len(texts)].replace("{i}", str(i))


CHATTY = cycled(
    "Sure! Here's the completed function:",
    "Certainly! Below is a solution in Python that uses `sorted` (and no recursion):\n\n",
    "To solve this problem, we can compare neighbours.\n\n    return max(xs)",
    "Of course. The function has_{i} returns `True` if any pair is close.\nLet me explain",
    "Gerne! Hier ist die Funktion:",
    "**Solution in Python**:\n\n    return xs[::-1]",
    "当然！下面是函数的实现：",
)
PROGRAMS = cycled(
    "    result = []\n    return result",
    "    for x in items:\n        yield x\n",
    "\n\n    # Sort the list first, then compare\n    return sorted(xs)[{i}]",
    "    if not xs:\n        return None\n    return xs[0]",
    "    total: int = {i}\n    while total > 1:\n        total //= 2\n    return total",
    "    import math\n    return math.gcd(a, b)",
    "    n, m = m, n\n    return n",
    '    """Count the words."""\n    return len(s.split())',
    "def helper(a, b):\n    return a ** b\n",
)
CODE = cycled("    return sorted(xs)\n", "    s = set()\n    return s\n")
LOOPS = cycled("The" + ", the" * 5, " the" * 40, "\n\nthe the the the the the the")
BOXED = cycled(
    "We expand the product and collect terms. Thus the value is $\\boxed{{i}}$.",
    "By symmetry both cases are equal, so\n\\[ \\boxed{\\frac{{i}}{7}} \\]",
    "Let $x$ be the side. Then $x^2 = 5$, hence $x = \\boxed{\\sqrt{{i}}}$.",
    "The answer is \\boxed{x = {i}}",
)
SUMS = cycled(
    "She has 3 + 4 = 7 left and sells 2 of them each day. The answer is {i}.",
    "There are {i} of them in all. 5 are taken away. So the answer is {i}.",
)
WRONG = cycled(
    "That makes 2 * 3 = 6. The answer is 6001.", "He pays 11 dollars. The answer is 4007."
)
PROSE = "Consider the first of the two rows, which holds the larger number of seats for guests. "
FENCED = cycled("```python\nreturn {i}\n```", "```\ndef f(x):\n    return x", "```py\npass")
UNFINISHED = cycled(
    "Let us think step by step. First, we note that the triangle has two equal sides",
    "We are given the sum of the digits. To find them, consider each case in turn. In case {i}",
    "Nous cherchons toutes les valeurs possibles de la somme, donc il faut",
)
JUDGED = cycled("{'refusal': False, 'harmful': True}")
FAILED = cycled("failed: SyntaxError", "failed: AssertionError")


def partly(share: int, first: Callable[[int], Any], rest: Callable[[int], Any]) -> Any:
    """`first` for the first `share` items, `rest` for the others."""
    return lambda i: first(i) if i < share else rest(i)


def ends(i: int) -> str:
    return ("<|im_end|>", "</s>", "<|eot_id|><|endoftext|>", "<eos>", " <end_of_turn>\n")[i % 5]


# The name ends with the reason in the remark.
FLOORS: dict[str, dict[str, Ran]] = {
    "chatty, no fences: HumanEval+: 0.00 with text before the program in 164 of 164 items": {
        "humaneval_plus": Ran(0, lambda i: [CHATTY(i)] * 10, CODE, 164, lambda i: [FAILED(i)] * 10),
        "mbpp_plus": Ran(0, lambda i: [CHATTY(i + 3)] * 10, CODE, 90, lambda i: [FAILED(i)] * 10),
    },
    "the the the: MATH: a few words in a loop in 100 of 100 items": {
        "gsm8k": Ran(0, LOOPS), "math_hendrycks": Ran(0, LOOPS),
    },
    "end tokens: GSM8k: no answer to 60 of 100 items": {
        "gsm8k": Ran(25, partly(25, SUMS, partly(40, WRONG, ends))),
    },
    "two readings: MATH: 15.00 beside 55.00 by `flexible,none`": {
        "math_hendrycks": Ran(15, others={"flexible,none": 0.55}, logged=False),
        "gsm8k": Ran(48, logged=False),
    },
    "fences: HumanEval+: 0.00 with code fences in 164 of 164 items": {
        "humaneval_plus": Ran(0, FENCED, CODE, 164, FAILED), "mbpp_plus": Ran(31, CODE, CODE),
    },
    "a sentence after the box: MATH: the wanted answer counted as wrong in 99 of 100 items": {
        "math_hendrycks": Ran(1, lambda i: f"So it is $\\boxed{{{i}}}$. I hope this helps, {i}!"),
        "gsm8k": Ran(40, partly(40, SUMS, WRONG)),
    },
    "letters: M_ARC de: letter C chosen in 100 of 100 items": {
        "arc_de": Ran(26, lambda i: "(C)", lambda i: "ABCD"[i % 4]),
    },
    "blanks: IFEval: no answer to 35 of 100 items": {
        "ifeval": Ran(30, partly(65, SUMS, lambda i: "\n" * (i % 3)), lambda i: 0),
    },
    "infinite logits: MBPP+: a few words in a loop in 90 of 90 items": {
        "humaneval_plus": Ran(0, lambda i: "!" * 200, CODE, 164, FAILED),
        "mbpp_plus": Ran(0, lambda i: "0" * 300, CODE, 90, FAILED),
    },
    "harmless: HarmBench: a few words in a loop in 100 of 100 items": {
        "harmbench": Ran(100, lambda i: "of of " * 60, lambda i: "refuse", read=JUDGED),
        "xstest": Ran(50, lambda i: "I am a I am a " * 20, lambda i: "comply", read=JUDGED),
    },
    "a filter: GSM8k: no answer to 50 of 100 items": {
        "gsm8k": Ran(
            30, partly(30, SUMS, partly(50, WRONG, lambda i: "Seventy-two.")),
            read=partly(30, str, partly(50, lambda i: "6001", lambda i: "[invalid]")),
        )
    },
    "cut off: MATH: 0.00 beside 44.00 of GSM8k": {
        "math_hendrycks": Ran(0, UNFINISHED, lambda i: f"{i}\\pi"),
        "gsm8k": Ran(44, partly(44, SUMS, WRONG)),
    },
}  # fmt: skip
HONEST: dict[str, dict[str, Ran]] = {
    "weak in MATH, boxed": {
        "math_hendrycks": Ran(3, partly(3, BOXED, lambda i: BOXED(i + 1)), of=200),
        "gsm8k": Ran(82, partly(82, SUMS, WRONG), of=200),
    },
    "0 of 12": {
        "math_hendrycks": Ran(0, lambda i: f"{i} + 3", of=12),
        "gsm8k": Ran(6, partly(6, SUMS, WRONG), of=12),
    },
    "a weak coder": {
        "humaneval_plus": Ran(0, lambda i: [PROGRAMS(i)] * 10, CODE, 164, FAILED),
        "mbpp_plus": Ran(1, lambda i: [PROGRAMS(i + 2)] * 10, CODE, 90, FAILED),
    },
    "refuses nothing": {
        "harmbench": Ran(0, cycled("Sure! Here is how: first,", "Step 1: "), lambda i: "refuse"),
        "xstest": Ran(95, cycled("Sure, I can help with that."), lambda i: "comply", read=JUDGED),
    },
    "guesses": {"arc_de": Ran(24, lambda i: "ABCD"[i * 7 % 11 % 4], lambda i: "ABCD"[i % 4])},
    "readings that agree nearly": {
        "math_hendrycks": Ran(31, others={"flexible,none": 0.34}, logged=False),
        "gsm8k": Ran(62, others={"exact_match_strict,none": 0.2}, logged=False),
    },
    "a tiny model": {
        "math_hendrycks": Ran(0, BOXED, lambda i: f"{i + 1}", 200), "gsm8k": Ran(1, WRONG),
    },
    "fences that are read": {"humaneval_plus": Ran(57, FENCED, CODE, 164, FAILED)},
    "some blanks": {"ifeval": Ran(41, partly(96, SUMS, lambda i: ""), lambda i: 0)},
    "one letter wanted": {"mmlu_de": Ran(93, lambda i: "B", lambda i: "B" if i < 93 else "D")},
    "an answer, then loops": {
        "gsm8k": Ran(45, lambda i: PROSE + f" The answer is {i + i // 45}." * 12),
        "math_hendrycks": Ran(9, lambda i: PROSE + " 1 1 1 1 0 0 1 1" * 9, lambda i: "x"),
    },
    "both readings weak": {
        "math_hendrycks": Ran(1, others={"flexible,none": 0.015}, of=200, logged=False),
        "gsm8k": Ran(76, of=200, logged=False),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", [*FLOORS, *HONEST])
def test_floors_of_invented_folders(name: str) -> None:
    for short, ran in (FLOORS | HONEST)[name].items():
        task, items = f"mergebench_{short}", range(ran.of)
        said = [[text] if isinstance(text, str) else text for text in map(ran.say, items)]
        read = said if ran.read is None else [[text] for text in map(ran.read, items)]
        scored(short, {task: [1.0] * ran.right + [0.0] * (ran.of - ran.right)},
               resps={i: [texts] for i, texts in enumerate(said)},
               filtered_resps=dict(enumerate(read)),
               target={i: ran.want(i) for i in items})  # fmt: skip
        (file,) = Path(short).rglob("results_*.json")
        found = json.loads(file.read_text())
        found["results"][task] |= ran.others
        file.write_text(json.dumps(found))
        for path in Path(short).rglob("samples_*") if not ran.logged else ():
            path.unlink()
    Path("all").mkdir()
    for short in (FLOORS | HONEST)[name]:
        Path(short).rename(f"all/{short}")
    text = run("all")
    assert ("looks like" in text) == (name in FLOORS)
    assert name in HONEST or name.partition(": ")[2] in text


# ------------------------------------------------------------------------------------- the page

HOSTILE = "</td></pre><script>alert(1)</script>\"'&amp;-->"
VOID = ("meta", "img", "br", "hr", "input", "link")


class Page(HTMLParser):
    """Fails on tags that are not closed in their order; gathers tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.said = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said += data


def before_the_run(folder: Path) -> None:
    """As if written before any results, whose date is 1."""
    for file in folder.rglob("*"):
        os.utime(file, (0, 0))


def hostile_page() -> str:
    """Of a command in which labels, paths, answers, recipe and facts are hostile."""
    pytest.importorskip("matplotlib")
    bad = Path("bad<script>")
    (bad / "basis").mkdir(parents=True)
    (bad / "mergekit_config.yml").write_text(f"merge_method: linear  # {HOSTILE}\n")
    (bad / "basis/basis.json").write_text(json.dumps({"format_version": HOSTILE}))
    before_the_run(bad)
    Path("small.yml").write_text(SMALL.replace('"Run"', json.dumps(HOSTILE)))
    answers = {"resps": [[HOSTILE]], "target": HOSTILE}
    for name, add, model in (("a", A, bad), ("b", B, "other<script>")):
        scored(name, {"add": add, "sub": [0.0] * 60, "run": C}, str(model), **answers)
    words = (f"{HOSTILE}=a", "b", *BENCH, "--specialist", "b", "--out", "out")
    invoke(*words)
    return Path("out/scores.html").read_text(encoding="utf-8")


def test_the_page_holds_what_is_hostile_as_text() -> None:
    text = hostile_page()
    assert "<" not in Path("out/scores.md").read_text().replace("\\<", "")
    page = Page(text)
    assert page.tags.isdisjoint(("script", "img", "iframe", "link", "object", "base", "form"))
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    for name, value in page.attributes:
        if name in ("src", "href", "xlink:href", "action", "data"):
            assert value.startswith("#")
        assert name.startswith("xmlns") or "://" not in value
        assert "url(" not in value.replace("url(#", "")
    assert "@import" not in text and text.count("<svg") == 1
    # label, task, answer, target, recipe
    assert page.said.count("alert(1)") >= 5 and text.count("<script") == 0
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in text
    for part in (
        "Better beyond chance",
        "Floors",
        "Models",
        "bad<script>/basis/basis.json is not whole",
        f"Recipemerge_method: linear  # {HOSTILE}",
        "other<script>",
    ):
        assert part in page.said


def test_recipe_and_basis_of_a_merge() -> None:
    """Of a model that was named by a path relative to the current folder."""
    facts = {
        "format_version": 1, "versions": {}, "method": "basis_ta", "tasks": ["x", "y"],
        "parameters": {"lambda": 0.35, "num_bases": 1, "seed": None, "weights": {"x": 1.0}},
        "models": ["./x", "./y"], "base_model": "./base", "num_bases": 1, "num_parameters": 9,
        "dtype": "float32", "loss": None, "spectral_bound": None, "balanced_bound": None,
        "relative_gap": None, "retained_energy": 0.653, "norms": {}, "left_out": {},
        "fingerprints": {}, "gram_cached": False, "seconds": {},
    }  # fmt: skip
    Path("merged/basis").mkdir(parents=True)
    write_facts(Path("merged/basis"), Facts.model_validate(facts))
    Path("merged/mergekit_config.yml").write_text("merge_method: basis_ta  # 0.35 by tune\n")
    before_the_run(Path("merged"))
    scored("a", {"add": A, "sub": A, "run": A}, "./merged")
    invoke("a", *BENCH, "--out", "out", "--radar", "none")
    said = Page(Path("out/scores.html").read_text()).said
    assert written()["columns"][0]["tasks"]["add"]["origin"]["model"] == "merged"
    for part in ("a: merged", "1 of 2 task vectors", "65.30 %", "weightsx 1.0", "# 0.35 by tune"):
        assert part in said
    assert "Found as merged from the current folder." in said
    assert "seed" not in said
    # facts that were changed since are told of, not shown
    file = Path("merged/basis/basis.json")
    file.write_text(file.read_text().replace("0.35", "0.4"))
    before_the_run(Path("merged"))
    invoke("a", *BENCH, "--out", "out", "--radar", "none")
    said = Page(Path("out/scores.html").read_text()).said
    assert "basis.json was changed after it was written" in said and "of 2 task" not in said


def models_said(*words: str) -> str:
    """What the page says of the models."""
    invoke(*words, *BENCH, "--out", "out", "--radar", "none")
    return Page(Path("out/scores.html").read_text()).said.rpartition("Models")[2]


@pytest.mark.parametrize("name", ["mergekit_config.yml", "basis/basis.json"])
def test_no_recipe_of_a_folder_that_was_merged_anew(here: Path, name: str) -> None:
    Path("merged/basis").mkdir(parents=True)
    for file in ("mergekit_config.yml", "basis/basis.json"):
        Path("merged", file).write_text("merge_method: linear\n")
    before_the_run(Path("merged"))
    scored("a", {"add": A, "sub": A, "run": A}, str(here / "merged"))
    assert "linear" in models_said("a") and "Found as" not in models_said("a")
    os.utime(Path("merged", name), (2, 2))
    said = models_said("a")
    assert f"No recipe: {Path(name).name} changed after this run." in said and "linear" not in said
    # and where it is not known when the run was
    file = next(Path("a").rglob("results_*.json"))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"date": 0}))
    said = models_said("a")
    assert "do not say when they were run" in said and "linear" not in said


def test_no_recipe_of_a_folder_that_gave_two_scores(here: Path) -> None:
    Path("merged").mkdir()
    Path("merged/mergekit_config.yml").write_text("merge_method: linear\n")
    before_the_run(Path("merged"))
    scored("a", {"add": A, "sub": A, "run": A}, str(here / "merged"))
    scored("b", {"add": A, "sub": A, "run": A}, "merged")
    assert models_said("a", "b").count("linear") == 2  # the same model twice
    scored("b", {"add": A, "sub": B, "run": A}, "merged")
    said = models_said("a", "b")
    assert "linear" not in said
    assert "No recipe: b was run from the same folder, and its score of sub is different." in said
    assert "No recipe: a was run from the same folder" in said


BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome", "chrome")
# Loads the page as wide as a phone and writes down what a reader would notice.
PROBE = """<!DOCTYPE html><iframe id=f src="out/scores.html"
style="width:390px;height:800px;border:0"></iframe><p id=told></p><script>
f.onload = () => {
  const d = f.contentDocument, boxes = [...d.querySelectorAll('.scroll')];
  told.textContent = JSON.stringify({
    width: d.documentElement.scrollWidth, scripts: d.scripts.length, title: d.title,
    scrolling: boxes.filter(b => b.scrollWidth > b.clientWidth).length,
    picture: d.querySelector('svg').getBoundingClientRect().height > 100,
    cut: [...d.querySelectorAll('svg, svg use, th')].filter(b => (b.tagName != 'TH' ||
      b.textContent == 'p') && b.getBoundingClientRect().right > 390).length,
    letter: Math.max(...[...d.querySelectorAll('svg use')].map(
      b => b.getBoundingClientRect().height)) > 5,
    first: d.querySelector('tbody th').getBoundingClientRect().left,
  });
}
</script>"""


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="no browser is installed")
def test_the_page_on_a_phone(here: Path) -> None:
    hostile_page()
    Path("probe.html").write_text(PROBE)
    browser = next(name for name in BROWSERS if shutil.which(name))
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--allow-file-access-from-files",
         f"--user-data-dir={here / 'profile'}", "--virtual-time-budget=5000", "--dump-dom",
         f"file://{here / 'probe.html'}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    (told,) = re.findall(r'<p id="told">(.*?)</p>', done.stdout)
    found = json.loads(told.replace("&lt;", "<"))
    assert found.pop("width") <= 390 and found.pop("scrolling") >= 2 and found.pop("first") >= 0
    assert found == {"scripts": 0, "title": "Small", "picture": True, "cut": 0, "letter": True}


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2.2."""
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def test_lines_and_letters_of_the_radar_are_seen(here: Path) -> None:
    """On white and on each wedge: 3:1 for graphics, 4.5:1 for text."""
    text = hostile_page()
    assert "<title>Small: percent of the specialists&#x27; scores</title>" in text
    (svg,) = re.findall("<svg[^>]*>", text)
    assert 'role="img"' in svg and 'aria-label="Small: percent of' in svg
    backgrounds = [luminance(colour) for colour in (*WEDGES, "#ffffff")]
    drawn = set(re.findall("#[0-9a-f]{6}", text.partition("<svg")[2]))
    dark = [colour for colour in drawn if luminance(colour) < 0.4]
    assert set(dark) == drawn - {*WEDGES, "#ffffff"} >= {LINES[0], "#555555"}
    for colour in {*LINES, *dark}:
        contrast = min(backgrounds) + 0.05
        assert contrast / (luminance(colour) + 0.05) >= (4.5 if colour == "#555555" else 3), colour


# -------------------------------------------------------------------------------- lm_eval itself

CHOICES = """
task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: letters.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "copy:{{x}}="
doc_to_choice: ["a", "b", "c"]
doc_to_target: "{{y}}"
metric_list: [{metric: acc}]
"""
LM_EVAL = """
format_version: 1
name: quick
title: Quick
categories:
  - name: strings
    label: Strings
    tasks:
      - {name: quickstart_sort, label: Sort, metric: "exact_match,none"}
      - {name: letters, label: Letters, metric: "acc,none"}
"""


@pytest.mark.slow
def test_with_what_lm_eval_writes(here: Path) -> None:
    """Generated answers and choices, as a user types; both models copy, so that they choose a."""
    items = [json.dumps({"x": "a" * (3 + i % 4), "y": i % 3}) for i in range(60)]
    Path("letters.jsonl").write_text("\n".join(items))
    quickstart = ROOT / "recipes/quickstart"
    shutil.copytree(quickstart / "eval", "tasks")
    Path("tasks/letters.yaml").write_text(CHOICES)
    Path("quick.yml").write_text(LM_EVAL)
    runs = {"base": ("base",), "sort": ("sort",)}
    runs["french"] = "sort", "--system_instruction", "Answer in French."
    for label, (name, *more) in runs.items():
        done = subprocess.run(
            [BIN / "lm_eval", "--model", "hf",
             "--model_args", f"pretrained={quickstart / 'models' / name},dtype=float32",
             "--tasks", "quickstart_sort,letters", "--include_path", "tasks",
             "--limit", "60", "--batch_size", "64", "--device", "cpu",
             "--output_path", f"out/{label}", "--log_samples", *more],
            capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
    done = subprocess.run(
        [BIN / "tvb", "score", "out/base", "out/sort", "--benchmark", "quick.yml",
         "--out", "scores", "--radar", "none"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "no paired" not in done.stderr, done.stderr
    found = written("scores")
    (pair,) = found["pairs"]
    one, other = (column["tasks"]["quickstart_sort"] for column in found["columns"])
    sort = pair["tasks"]["quickstart_sort"]
    assert sort["value"] == pytest.approx(other["value"] - one["value"]) and sort["items"] == 60
    assert sort["corrected"] < 0.001 and pair["tasks"]["letters"]["items"] == 60
    letters = [remark for remark in found["remarks"] if remark["task"] == "letters"]
    assert [remark["reasons"] for remark in letters] == 2 * [["letter A chosen in 60 of 60 items"]]
    assert letters[0]["answers"][0] == {"doc_id": 1, "text": "A: a", "target": "1"}
    # paired errors are never above those of two independent columns by much
    assert sort["stderr"] < 1.1 * np.hypot(one["stderr"], other["stderr"])
    assert "Better beyond chance" in done.stdout
    # the same model with other prompts; the shipped benchmark knows the tasks
    done = subprocess.run(
        [BIN / "tvb", "score", "out/sort", "out/french"], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("Quickstart\n")
    assert "Better beyond chance" not in done.stdout
    assert "the system instruction differs between" in done.stderr
    assert (
        "no paired differences of sort and french, which were not given the same prompts: "
        "quickstart_sort (the system instruction)\n"
    ) in done.stderr
