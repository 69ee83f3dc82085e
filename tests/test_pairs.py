"""`tvb score` with lm-eval's samples: p values against enumeration, and what is not paired."""

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import refused
from test_score import BENCH, DATE, SMALL, row, run, warnings, write_results, write_samples

from tvb_mergekit.score.pairs import Difference, correct, difference, sign_flip


def enumerated(values: Any) -> float:
    """The mid-p value over all 2^n patterns of signs."""
    signs = np.array(list(itertools.product((-1, 1), repeat=len(values))))
    sums, total = np.abs(signs @ values), abs(sum(values))
    equal = np.isclose(sums, total)
    return float(np.mean((sums > total) & ~equal) + np.mean(equal) / 2)


def test_p_values_against_enumeration() -> None:
    # Fagerland, Lydersen and Laake 2013, Table 1: 1 and 7 discordant pairs
    assert sign_flip(np.array([1.0] * 7 + [-1.0] + [0.0] * 13)) == pytest.approx(0.0391, abs=5e-5)
    assert sign_flip(np.zeros(9)) == sign_flip(np.zeros(0)) == 1
    rng = np.random.default_rng(0)
    for count in range(1, 13):
        right = rng.choice([-0.1, 0, 0.1], count)  # right or wrong: exact
        exact = enumerated(right) if abs(right.sum()) > 0.05 else 1.0  # McNemar's of a balance
        assert sign_flip(right) == pytest.approx(exact)
        # drawn, within three standard errors; 1e-4 is the least that 9999 draws give
        for values in (rng.normal(0.4, 1, count), rng.integers(-3, 5, count)):
            exact, found = enumerated(values), sign_flip(values)
            assert found == pytest.approx(exact, abs=3 * (exact / 9999) ** 0.5 + 1e-4)
            assert found == sign_flip(-values) == sign_flip(1e-3 * values)
    # McNemar's mid-p for as many items as GSM8K has
    below = sum(math.comb(300, k) for k in range(121)) - math.comb(300, 120) / 2
    assert sign_flip(np.repeat([1.0, -1.0, 0.0], [180, 120, 1019])) == pytest.approx(below / 2**299)
    # tasks count alike, whatever their items are: 7 of the 8 sums of ±1 ±1/2 ±1/2, those of 0 half
    assert difference([np.ones(1), -np.ones(2)]).p == pytest.approx(7 / 8, abs=0.01)


def test_small_p_values_lie_between_exact_p_and_hoeffdings_bound() -> None:
    sizes = np.array([100] * 3 + [*range(1, 10)] * 22)
    likely = np.ones(1)  # of the sums of +-sizes, by convolution
    for size in sizes:
        likely = np.convolve(likely, [0.5, *[0] * (2 * size - 1), 0.5])
    for minus in range(60, 100, 10):
        signs = np.where(np.arange(len(sizes)) < minus, -1, 1)[::-1]
        total = int(abs(signs @ sizes))
        tail = likely[sizes.sum() + total :]
        exact, bound = 2 * tail.sum() - tail[0], 2 * np.exp(-(total**2) / (2 * sizes @ sizes))
        if exact < 1e-5:
            assert exact <= sign_flip(1.0 * signs * sizes) <= bound * (1 + 1e-6)


def test_holm_against_closed_testing() -> None:
    """The corrected p of a test is the largest Bonferroni p of the sets of tests with it."""
    rng = np.random.default_rng(0)
    for count in range(7):
        tests = [Difference(0, 0, float(p), 0, 1) for p in rng.uniform(0, 0.3, count)]
        correct(tests)
        sets = [s for n in range(1, count + 1) for s in itertools.combinations(tests, n)]
        for test in tests:
            ps = [min(1, len(each) * min(one.p for one in each)) for each in sets if test in each]
            assert test.corrected == pytest.approx(max(ps))


A = [1.0] * 30 + [0.0] * 30  # right in the first half
B = [1.0] * 40 + [0.0] * 20  # and in ten items more
C = [0.0, 1.0] * 30


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")
    Path("small.yml").write_text(SMALL)
    return tmp_path


def samples(folder: str, task: str) -> Path:
    return Path(f"{folder}/m/samples_{task}_{DATE}.jsonl")


def rewrite(folder: str, task: str, change: Callable[[dict[str, Any]], object]) -> None:
    lines = [json.loads(line) for line in samples(folder, task).read_text().splitlines()]
    for line in lines:
        change(line)
    samples(folder, task).write_text("\n".join(map(json.dumps, lines)))


def tabled(*words: str) -> tuple[str, Any]:
    """The printed text, and scores.json."""
    text = run(*words, *BENCH, "--out", "out")
    return text, json.loads(Path("out/scores.json").read_text())


def test_paired_differences_by_hand() -> None:
    write_samples("a", {"add": A, "sub": C, "run": C})
    write_samples("b", {"add": B, "sub": C, "run": C})
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
    _, one, other, gained = row(text, "Average normalized accuracy")
    assert gained == "+4.17 ± 1.21 p <0.001*"
    assert float(other.split()[0]) - float(one.split()[0]) == pytest.approx(4.17, abs=0.01)
    assert row(text, "Add")[3:] == ["+16.67 ± 4.85 p 0.003*"]
    # an earlier table with pairs is still a reference
    text = run("b", *BENCH, "--reference", "out/scores.json")
    assert row(text, "Average normalized accuracy")[1].startswith("54.17")


def test_other_items_are_not_paired() -> None:
    write_samples("a", {"add": A, "sub": A, "run": A})
    write_samples("b", {"add": A[:59], "sub": A, "run": A})
    write_samples("c", {"add": A, "sub": A, "run": A})
    rewrite("b", "sub", lambda line: line["doc_id"] == 7 and line.update(doc_hash="0"))
    rewrite("c", "sub", lambda line: line["doc_id"] == 5 and line.update(prompt_hash="0"))
    samples("c", "run").unlink()
    text, found = tabled("a", "b", "c")
    pairs = {(pair["one"], pair["other"]): pair for pair in found["pairs"]}
    assert {names: [*pair["tasks"]] for names, pair in pairs.items()} == {
        ("a", "b"): ["run"], ("a", "c"): ["add"]}  # fmt: skip
    assert all(pair["whole"] is None for pair in pairs.values())
    assert row(text, "Mean of the categories") == ["—", "—"]
    told = "no paired differences of"
    assert [line for line in found["warnings"] if line.startswith(told)] == [
        f"{told} a and b (item 59 differs): add",
        f"{told} b and c (item 59 differs): add",
        f"{told} a and b (item 7 differs): sub",
        f"{told} a and c (item 5 differs): sub",
        f"{told} b and c (item 5 differs): sub",
        f"{told} a and c (no samples of its items): run",
        f"{told} b and c (no samples of its items): run",
    ]
    # nothing is said where nobody has any; samples of another date belong to other results
    for path in [*Path().glob("?/m/samples_*")]:
        path.rename(path.with_name(path.name.replace("678901", "678902")))
    assert [line for line in warnings("a", "c", *BENCH) if line.startswith(told)] == []


def test_runs_with_other_settings_are_not_paired() -> None:
    shots = {"config": {"fewshot_seed": 1}, "n-shot": {"add": 2}}
    for setting, keys in {
        "system_instruction_sha": {"system_instruction_sha": "59c30e71029f"},
        "fewshot_seed": {"config": {"fewshot_seed": 7}},
        "n-shot": {"n-shot": {"add": 5}},
        "the task's version": {"versions": {"add": 2.0}},
    }.items():
        for folder, own in (("a", shots), ("b", shots | keys)):
            write_samples(folder, {"add": A})
            (file,) = Path(folder).rglob("results_*.json")
            file.write_text(json.dumps(json.loads(file.read_text()) | own))
        told = f"no paired differences of a and b ({setting} differs): add"
        assert told in warnings("a", "b", *BENCH)
        assert tabled("a", "b")[1]["pairs"] == []


def test_damaged_samples_are_one_line_and_scores_without_items_no_pair() -> None:
    write_samples("a", {"run": A})
    write_samples("b", {"run": A})
    place = samples("b", "run")
    whole = place.read_text()
    lines = whole.splitlines(keepends=True)
    cases = {
        whole[:-40]: "is not a file of samples: Unterminated string",
        lines[0].replace("doc_id", "id"): "is not a file of samples: 'doc_id'",
        "[1]\n": "is not a file of samples: 'list' object",
        "".join(lines[:-4]): "holds 58 of 60 items: run lm_eval again",
        "": "holds 0 of 60 items",
    }
    for text, told in cases.items():
        place.write_text(text)
        assert f"Error: {place} {told}" in refused("score", "a", "b", *BENCH)
    for score in ("0.0", "[1, 2]", "NaN", f"1{'0' * 400}", '"text"', "true"):
        place.write_text(re.sub('"score": 1.0', f'"score": {score}', whole))
        *_, line = warnings("a", "b", *BENCH)
        assert line == "no paired differences of a and b (no samples of its items): run"
