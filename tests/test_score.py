"""`tvb score`: golden files of a whole command, the paper's numbers, and whatever can be wrong.

Files that lm_eval itself has written are tabled in evals/mergebench/tests.
"""

import base64
import html
import itertools
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from commands import refused, tvb

from tvb_mergekit.score.pairs import Difference, correct, difference, sign_flip
from tvb_mergekit.score.results import find_benchmark, read_results
from tvb_mergekit.score.table import gather

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests/facts/score"  # to be read by eye whenever it changes
SMALL = (ROOT / "tests/facts/small.yml").read_text()  # a benchmark
TASKS = ("add", "sub", "run")
BENCH = ("--benchmark", "small.yml")
SFT = (*BENCH, "--specialist", "sft")
DATE = "2026-01-02T03-04-05.678901"
LAST = "Average normalized accuracy"
CONFIG = {"model_args": {}, "limit": None, "gen_kwargs": {}, "model_dtype": "f", "batch_size": "8"}


def write_results(path: str, scores: Mapping[str, Any], items: int = 100, **other: Any) -> None:
    """A result file of lm-eval 0.4.13: task -> `score,none`, or with its standard error, or a dict
    of metrics. `other` replaces keys of the file."""
    results = {}
    for task, score in scores.items():
        value, error = score if isinstance(score, tuple) else (score, "N/A")
        metrics = {"score,none": value, "score_stderr,none": error}
        results[task] = {"alias": task, **(score if isinstance(score, dict) else metrics)}
    found = {
        "results": results,
        "versions": dict.fromkeys(scores, 1.0),
        "n-shot": dict.fromkeys(scores, 0),
        "n-samples": {task: {"original": 100, "effective": items} for task in scores},
        "higher_is_better": {task: {"score": True} for task in scores},
        "config": CONFIG,
        "configs": {task: {"metadata": {"MERGEBENCH_JUDGE": "default"}} for task in scores},
        "date": 1.0, "max_length": 2048, "chat_template_sha": None, "system_instruction_sha": None,
        "fewshot_as_multiturn": False, "lm_eval_version": "0.4.13", "transformers_version": "4",
        "task_hashes": dict.fromkeys(scores, "a"),
    }  # fmt: skip
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(found | other))


def write_samples(folder: str, scores: Mapping[str, list[float]], **other: Any) -> None:
    """Results and samples of items as lm-eval 0.4.13 writes them, with another filter's lines."""
    means = {t: (float(np.mean(x)), np.std(x, ddof=1) / len(x) ** 0.5) for t, x in scores.items()}
    counts = {task: {"original": len(own), "effective": len(own)} for task, own in scores.items()}
    write_results(f"{folder}/m/results_{DATE}.json", means, **{"n-samples": counts} | other)
    for task, own in scores.items():
        lines = []
        for number, score in enumerate(own):
            line = {"doc_id": number, "doc_hash": f"{task} {number}", "prompt_hash": str(number)}
            lines += [line | {"filter": "none", "score": score}, line | {"filter": "x", "score": 2}]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        Path(f"{folder}/m/samples_{task}_{DATE}.jsonl").write_text(text)


def run(*words: str) -> str:
    return str(tvb("score", *words).stdout)


def warnings(*words: str) -> list[str]:
    return [line.removeprefix("Warning: ") for line in tvb("score", *words).stderr.splitlines()]


def row(text: str, name: str) -> list[str]:
    """The cells of all rows of this name, of all blocks of a table."""
    lines = [re.split(" {2,}", line.strip()) for line in text.splitlines()]
    return [cell for first, *cells in lines if first == name for cell in cells]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")
    Path("small.yml").write_text(SMALL)
    return tmp_path


@pytest.fixture
def small(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results of base, specialists and two models, in the current folder."""
    monkeypatch.setenv("COLUMNS", "120")
    write_results("base/results_a.json", dict.fromkeys(TASKS, 0.1))
    pairs = ((0.6, 0.03), (0.6, 0.04), (0.4, 0.02)), ((0.5, 0.04), (0.3, 0.03), (0.2, 0.01))
    write_results("sft/results_a.json", dict(zip(TASKS, pairs[0], strict=True)))
    write_results("ta/m/results_b.json", dict(zip(TASKS, pairs[1], strict=True)))
    write_results("ae/results_a.json", {"add": 0.3, "sub": 0.4, "run": 0.3})
    return here


def test_a_whole_command_against_golden_files(small: Path) -> None:
    """Scores with errors and missing tasks, samples of two models, and one with other shots."""
    drawn = np.random.default_rng(0).random((3, 40))
    for name, level in (("one", 0.4), ("two", 0.7)):
        right = (drawn < level).astype(float).tolist()
        write_samples(name, dict(zip(TASKS, right, strict=True)))
    write_results("cut.json", {"add": 0.5, "run": (0.25, 0.01)}, **{"n-shot": {"run": 5}})
    words = ("one", "A|E*=two", "cut=cut.json", "--base", "base", *SFT)
    done = tvb("score", *words, "--out", "out")
    found = {"terminal.txt": done.stdout, "warnings.txt": done.stderr}
    found |= {path.name: path.read_text() for path in Path("out").iterdir()}
    page = html.unescape(re.sub("<[^>]*>", "", found["scores.html"]))
    (picture,) = re.findall('src="data:image/png;base64,([^"]*)"', found.pop("scores.html"))
    for name, text in found.items() if os.environ.get("WRITE_GOLDEN") else ():
        (GOLDEN / name).write_text(text)
    golden = {path.name: path.read_text() for path in GOLDEN.iterdir()}
    for files in (found, golden):  # floats may differ in the last bit
        whole = json.loads(files.pop("scores.json"), parse_float=lambda x: round(float(x), 9))
        files["json"] = json.dumps(whole)
    assert found == golden
    # the page shows the same tables, and a picture
    assert [line for line in done.stdout.splitlines()[:-1] if line.rstrip() not in page] == []
    assert base64.b64decode(picture).startswith(b"\x89PNG")


def test_the_papers_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = run("--reference", "paper", "--show-reference")
    # the paper prints RandSelect's as 63.38
    assert row(text, LAST) == ["100.00", "72.88", "63.49", "47.07", "63.37"]
    found = gather([], reference="paper", show_reference=True)
    means = [cell.value for cell in found.columns[0].categories.values() if cell]
    assert means == pytest.approx([37.52, 52.795, 46.569, 44.21, 75.83], abs=5e-4)


def test_the_benchmarks_are_those_of_the_yamls() -> None:
    groups = {}
    for path in (*ROOT.glob("evals/mergebench/**/*.yaml"), *ROOT.glob("recipes/*/eval/*.yaml")):
        if "\ngroup: " in f"\n{path.read_text()}":
            group = yaml.safe_load(path.read_text())
            groups[group["group"]] = group["task"]
    for name, suffix in (("mergebench", ""), ("mergebench_keyword", "_keyword")):
        for category in find_benchmark(name).categories:
            named = [task.name for task in category.tasks]
            assert named == groups[f"mergebench_{category.name}{suffix}"]
    assert [task.name for task in find_benchmark("quickstart").tasks] == groups["quickstart"]


def test_ratios_and_their_errors_against_gradients(tmp_path: Path) -> None:
    """Normalized accuracy is a function of six scores: its error is that of the gradient, which is
    taken by differences here."""

    def f(x: Any) -> float:
        return float(100 * ((x[0] + x[1]) / 2 + x[2]) / ((x[3] + x[4]) / 2 + x[5]))

    for values, errors in np.random.default_rng(0).uniform(0.1, 0.9, (5, 2, 6)):
        both = [(float(x), float(e)) for x, e in zip(values, errors, strict=True)]
        write_results(f"{tmp_path}/m.json", dict(zip(TASKS, both[:3], strict=True)))
        write_results(f"{tmp_path}/sft.json", dict(zip(TASKS, both[3:], strict=True)))
        words = {"specialists": [f"{tmp_path}/sft.json"], "benchmark": f"{tmp_path}/small.yml"}
        best, model = (c.normalized for c in gather([f"{tmp_path}/m.json"], **words).columns)  # type: ignore[arg-type]
        slopes = np.array([f(values + step) - f(values - step) for step in 1e-6 * np.eye(6)]) / 2e-6
        assert best and model and best.value == pytest.approx(100) and best.stderr is None
        assert model.value == pytest.approx(f(values))
        assert model.stderr == pytest.approx(np.linalg.norm(slopes * errors), rel=1e-4)


def test_of_two_files_the_newer_counts_and_two_models_are_refused(small: Path) -> None:
    # by the date within, whatever the names are
    write_results("ta/results_z.json", {"add": 0.9, "more": 0.5}, date=0.5)
    write_results("ta/results_b.json", {"sub": 0.7}, date=3.0)
    found = {task: f.results[task]["score,none"] for task, f in read_results(Path("ta")).items()}
    assert found == {"add": 0.5, "sub": 0.7, "run": 0.2, "more": 0.5}
    for name in ("code", "math"):
        config = {"model_args": {"pretrained": f"org/{name}"}}
        write_results(f"all/{name}/results_a.json", {"add": 0.5, "run": 0.5}, config=config)
    told = "all/code/results_a.json and all/math/results_a.json hold add of different models"
    for words in (("ta", "--specialist", "all"), ("x=all",), ("ta", "--base", "all")):
        assert told in refused("score", *words, *BENCH)
    run("ta", "--specialist", "math=all/math", "--specialist", "code=all/code", *BENCH)


def test_missing_tasks_are_not_averaged_away(small: Path) -> None:
    write_results("cut.json", {"add": 0.5, "run": 0.2})
    text = run("cut=cut.json", "ta", *SFT)
    assert row(text, "Math") == ["60.00 ± 2.50", "—", "40.00 ± 2.50"]
    assert row(text, LAST) == ["100.00", "—", "60.00 ± 3.31"]
    text, found = tabled("cut.json", "ta", *SFT[2:], "--partial")
    assert text.startswith("Small (partial: code)\n")
    assert row(text, LAST) == ["100.00", "50.00", "50.00 ± 3.54"]
    assert Path("out/scores.md").read_text().startswith("# Small (partial: code)\n")
    assert found["partial"] is True and found["compared"] == ["code"]
    # what specialists lack
    assert row(run("ta", *BENCH, "--specialist", "code=sft"), LAST) == ["—", "—"]
    assert "no specialists, so no normalized accuracy" in warnings("ta", *BENCH)[0]


SEEDED = CONFIG | {"fewshot_seed": 1}
JUDGE = {"run": {"metadata": {"MERGEBENCH_JUDGE": "mine"}}}
# The setting that differs and its values, whether items are still paired, and keys of the file
SETTINGS: list[tuple[str, bool, dict[str, Any]]] = [
    ("n-shot: 2 and 5", False, {"n-shot": {"run": 5}}),
    ("fewshot_seed: 1 and 7", False, {"config": CONFIG | {"fewshot_seed": 7}}),
    ("max_length: 2048 and 64", True, {"max_length": 64}),
    ("the hash of items and prompts: a and b", True, {"task_hashes": {"run": "b"}}),
    ("MERGEBENCH_JUDGE: default and mine", True, {"configs": JUDGE}),
]


def test_what_was_measured_otherwise_is_told(small: Path) -> None:
    own: dict[str, Any] = {"config": SEEDED, "n-shot": {"run": 2}}
    write_samples("a", {"run": A}, **own)
    place = f"a/m/results_{DATE}.json and b/m/results_{DATE}.json"
    for told, paired, other in SETTINGS:
        write_samples("b", {"run": A}, **own | other)
        found, (setting, _, values) = tabled("a", "b")[1], told.partition(": ")
        wanted = [f"{setting} differs between {place}: run ({values})"]
        wanted += [] if paired else [f"no paired differences of a and b ({setting} differs): run"]
        assert [line for line in found["warnings"] if "differs" in line] == wanted
        assert bool(found["pairs"]) == paired
    write_results("sft.json", {"run": 0.4})
    words = ("m.json", *BENCH, "--specialist", "sft.json")
    write_results("m.json", {"run": {"score,none": 0.4, "unchecked,none": 0.002}})
    assert "unchecked differs between" in warnings(*words)[0]
    write_results("m.json", {"run": 0.4}, items=10)
    assert warnings(*words)[0] == "m.json was run on a part of the items: run (10 of 100 items)"
    write_results("m.json", {"run": 0.4})
    assert warnings(*words) == []


def test_other_metrics_and_earlier_tables(small: Path) -> None:
    # scores by keywords have a table of their own
    names = [task.name for task in find_benchmark("mergebench_keyword").tasks]
    write_results("m.json", {name: {"score,keyword": i / 10} for i, name in enumerate(names, 1)})
    text = run("m.json")
    assert text.startswith("Safety judged by keywords, not MergeBench's scores\n")
    assert row(text, "Safety") == ["25.00"] and row(text, "WildGuardTest") == ["10.00"]
    # a table is a reference, whose settings of then are compared with those of now
    run("ta", "--base", "base", *SFT, "--out", "out")
    saved = (*BENCH, "--reference", "out/scores.json")
    text = run("ae", *saved, "--show-reference")
    assert row(text, LAST) == ["100.00", "65.00", "20.00", "60.00 ± 3.31"]
    write_results("ae/results_a.json", {"run": {"strict,none": 0.4}})
    (line,) = warnings("ae", *saved, "--metric", "run:strict,none")
    assert line.startswith("metric differs between sft/results_a.json and ae/results_a.json: run")


def test_mistakes_are_one_line(small: Path) -> None:
    write_results("date.json", {"add": 0.5}, date="May")
    write_results("less.json", {"add": 0.5}, higher_is_better={"add": {"score": False}})
    Path("cut.json").write_text(Path("date.json").read_text()[:90])
    Path("model.json").write_text('{"architectures": []}')
    Path("deeper.yml").write_text(SMALL.replace("label: Add", "lable: Add"))
    write_results("m.json", {"add": (0.5, 0.25)})
    text = Path("m.json").read_text()
    Path("m.json").write_text(text.replace("0.25", "NaN"))  # lm-eval's, of a single item
    assert row(run("m.json", *BENCH), "Add") == ["50.00"]
    Path("error").write_text(text.replace(": 0.25", ": -0.1"))
    expected = {
        "": "found nothing, no task of a known benchmark: name results",
        "cut.json": "cut.json cannot be read as a result file of lm_eval: ",
        "date.json": "`date`: Input should be a valid number",
        "model.json": "model.json is not a result file of lm_eval: `results`: Field req",
        "ta": "found add, run, sub, no task of a known benchmark: .* or --benchmark",
        "ta --benchmark deeper.yml": "is not a benchmark .*: `categories.0.tasks.0.lab",
        "ta --benchmark small.yml --specialist maths=sft": "did you mean `math`",
        "less.json --benchmark small.yml": "better when it is lower; choose another with --metric",
        "error --benchmark small.yml": "error: add has `score_stderr,none` = -0.1: expected",
    }
    for number, value in enumerate(("true", '"0.5"', "1" + "0" * 400)):
        Path(f"score{number}").write_text(text.replace(": 0.5", f": {value}"))
        words = f"score{number} --benchmark small.yml"
        expected[words] = "add has `score,none` = (True|'0.5'|10{39}): expected a number"
    for words, line in expected.items():
        found = refused("score", *words.split())
        assert re.search(line, found), (words, found)


def test_files_of_others_stay(small: Path) -> None:
    words = ("ta", *SFT, "--out", "out")
    run(*words)
    run(*words)  # its own are replaced
    foreign, theirs = Path("out/scores.html"), b"<h1>scores of the thesis</h1>\xff"
    foreign.write_bytes(theirs)
    assert "tvb score did not make it; name another --out" in refused("score", *words)
    assert foreign.read_bytes() == theirs


# Paired tests with lm-eval's samples: p values against enumeration, and what is not paired


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


def samples(folder: str, task: str) -> Path:
    return Path(f"{folder}/m/samples_{task}_{DATE}.jsonl")


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
    value, error, p = gain.mean(), gain.std(ddof=1) / 60**0.5, 2**-10
    wanted = {"value": value, "stderr": error, "p": p, "corrected": 3 * p, "items": 60}
    assert pair["tasks"]["add"] == pytest.approx(wanted)
    assert pair["tasks"]["sub"]["p"] == pair["tasks"]["sub"]["corrected"] == 1
    # the mean of Math is half of add, and the specialists' sum is 200
    wanted = {"value": value / 4, "stderr": error / 4, "p": p, "corrected": p, "items": 180}
    assert pair["whole"] == pytest.approx(wanted)
    assert row(text, LAST)[-1] == "+4.17 ± 1.21 p <0.001*"
    assert row(text, "Add")[3:] == ["+16.67 ± 4.85 p 0.003*"]


def test_other_items_are_not_paired() -> None:
    write_samples("a", {"add": A, "sub": A, "run": A})
    write_samples("b", {"add": A[:59], "sub": A, "run": A})
    write_samples("c", {"add": A, "sub": A, "run": A})
    for folder, old in (("b", '"doc_hash": "sub 7"'), ("c", '"prompt_hash": "5"')):
        place = samples(folder, "sub")
        place.write_text(place.read_text().replace(old, f'{old[:-2]}"'))
    samples("c", "run").unlink()
    text, found = tabled("a", "b", "c")
    pairs = {pair["one"] + pair["other"]: [*pair["tasks"]] for pair in found["pairs"]}
    assert pairs == {"ab": ["run"], "ac": ["add"]}
    assert all(pair["whole"] is None for pair in found["pairs"])
    assert row(text, "Mean of the categories") == ["—", "—"]
    told = "no paired differences of"
    said = [line for line in found["warnings"] if line.startswith(told)]
    for reason in ("a and b (item 59 differs): add", "a and c (no samples of its items): run"):
        assert f"{told} {reason}" in said
    assert len(said) == 7
    # nothing is said where nobody has any; samples of another date belong to other results
    for path in [*Path().glob("?/m/samples_*")]:
        path.rename(path.with_name(path.name.replace("678901", "678902")))
    assert [line for line in warnings("a", "c", *BENCH) if line.startswith(told)] == []


def test_damaged_samples_are_one_line_and_scores_without_items_no_pair() -> None:
    write_samples("a", {"run": A})
    write_samples("b", {"run": A})
    place = samples("b", "run")
    whole = place.read_text()
    place.write_text(whole[:-40])
    said = refused("score", "a", "b", *BENCH)
    assert f"{place} is not a file of samples: Unterminated string" in said
    place.write_text("\n".join(whole.splitlines()[:-4]))
    said = refused("score", "a", "b", *BENCH)
    assert f"{place} holds 58 of 60 items: run lm_eval again" in said
    for score in ("0.0", "NaN", "true"):
        place.write_text(re.sub('"score": 1.0', f'"score": {score}', whole))
        *_, line = warnings("a", "b", *BENCH)
        assert line == "no paired differences of a and b (no samples of its items): run"
