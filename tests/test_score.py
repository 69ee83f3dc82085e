"""`tvb score`: the paper's numbers, hand-made result files, and everything that is wrong with one.

Files that lm_eval itself has written are tabled in evals/mergebench/tests.
"""

import io
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import refused, tvb
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tvb_mergekit.score import read_benchmark, read_reference, read_results, table
from tvb_mergekit.score.benchmark import Benchmark
from tvb_mergekit.score.columns import Cell
from tvb_mergekit.score.results import Origin, Results, TaskResult
from tvb_mergekit.score.table import Table
from tvb_mergekit.score.text import print_table

EVALS = Path(__file__).resolve().parent.parent / "evals"
SMALL = """
format_version: 1
name: small
title: Small
include_path: my tasks
categories:
  - name: math
    label: Math
    group: small_math
    tasks: [{name: add, label: Add}, {name: sub, label: Sub}]
  - name: code
    label: Code
    options: --confirm_run_unsafe_code
    tasks: [{name: run, label: "Run"}]
"""
BENCH = ("--benchmark", "small.yml")
TWICE = ("--metric", "add:acc,none", "--metric", "add:f1,none")
SFT = (*BENCH, "--specialist", "sft")
WORDS = ("TA=ta", "A|E*=ae", "--base", "base", *SFT)
FILES = ("scores.json", "scores.md")
LATER = "ta/m/results_2026-01-02T03-04-05.678.json"
LAST = "Average normalized accuracy"


def write_results(
    path: str,
    scores: Mapping[str, float | tuple[float, float]],
    *,
    date: float = 1.0,
    of: int = 100,
    items: int = 100,
    metrics: Mapping[str, Mapping[str, float]] = {},
    **other: Any,
) -> None:
    """A result file of lm-eval 0.4.13: task -> `score,none`, or with its standard error.

    `metrics` gives further metrics of tasks; `other` replaces keys of the file.
    """
    results = {}
    for task, score in scores.items():
        value, error = score if isinstance(score, tuple) else (score, "N/A")
        results[task] = {"name": task, "alias": task, "sample_len": items}
        results[task] |= {"score,none": value, "score_stderr,none": error, **metrics.get(task, {})}
    config = {"model_args": {}, "limit": None, "gen_kwargs": {}, "model_dtype": "torch.float32",
              "batch_size": "auto"}  # fmt: skip
    found = {
        "results": results,
        "versions": dict.fromkeys(scores, 1.0),
        "n-shot": dict.fromkeys(scores, 0),
        "n-samples": {task: {"original": of, "effective": items} for task in scores},
        "higher_is_better": {task: {"score": True} for task in scores},
        "config": config,
        "configs": {task: {"metadata": {"MERGEBENCH_JUDGE": "default"}} for task in scores},
        "date": date, "model_name": "abcd1234", "max_length": 2048,
        "chat_template_sha": None, "system_instruction_sha": None,
        "lm_eval_version": "0.4.13", "transformers_version": "4",
        "task_hashes": dict.fromkeys(scores, "a"),
    }  # fmt: skip
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(found | other))


def run(*words: str) -> str:
    return str(tvb("score", *words).stdout)


def warnings(*words: str) -> list[str]:
    return [line.removeprefix("Warning: ") for line in tvb("score", *words).stderr.splitlines()]


def last(text: str) -> list[str]:
    """The normalized accuracies, of all blocks of the table."""
    lines = [line for line in text.splitlines() if line.startswith(LAST)]
    return [cell for line in lines for cell in re.split(" {2,}", line)[1:]]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """small.yml, and results of base, specialists and two models, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("small.yml").write_text(SMALL)
    write_results("base/results_a.json", {"add": 0.1, "sub": 0.1, "run": 0.1})
    write_results(
        "sft/results_a.json", {"add": (0.6, 0.03), "sub": (0.6, 0.04), "run": (0.4, 0.02)}
    )
    write_results(LATER, {"add": (0.5, 0.04), "sub": (0.3, 0.03), "run": (0.2, 0.01)})
    write_results("ae/results_a.json", {"add": 0.3, "sub": 0.4, "run": 0.3})
    return tmp_path


def papers_table() -> Table:
    benchmark = read_benchmark("mergebench")
    paper = read_reference("paper", benchmark)
    return table(benchmark, {}, reference=paper, show_reference=True)


def test_the_papers_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    # the paper prints RandSelect's as 63.38
    normalized = ["100.00", "72.88", "63.49", "47.07", "63.37"]
    assert last(run("--reference", "paper", "--show-reference")) == normalized
    found = papers_table()
    sft = [found.score(found.columns[0], category) for category in found.benchmark.categories]
    means = [cell.value for cell in sft if cell is not None]
    assert means == pytest.approx([37.52, 52.795, 46.569, 44.21, 75.83], abs=5e-4)
    assert found.gaps() == [] and not found.is_partial


CATEGORIES = "instruction math multilingual coding safety"


@pytest.mark.parametrize(
    ("name", "categories", "tasks", "metric"),
    [
        ("mergebench", CATEGORIES, 21, "score,none"),
        ("mergebench_keyword", "safety", 4, "score,keyword"),
        ("quickstart", "copy reverse sort upper shift max double sum", 8, "exact_match,none"),
    ],
)
def test_the_benchmarks_are_those_of_the_yamls(name, categories, tasks, metric):
    benchmark = read_benchmark(name)
    assert [category.name for category in benchmark.categories] == categories.split()
    assert len(benchmark.tasks) == tasks and {t.metric for t in benchmark.tasks} == {metric}
    groups = {}
    for path in (EVALS.parent / str(benchmark.include_path)).rglob("*.yaml"):
        if "\ngroup: " in f"\n{path.read_text()}":
            group = yaml.safe_load(path.read_text())
            groups[group["group"]] = group["task"]
    parts = [(str(category.group), category.tasks) for category in benchmark.categories]
    for group, found in [(name, benchmark.tasks)] if name == "quickstart" else parts:
        assert [task.name for task in found] == groups[group]


def test_the_manuals_benchmark(tmp_path: Path) -> None:
    manual = (EVALS.parent / "docs/tune-and-score.md").read_text()
    (tmp_path / "mine.yml").write_text(re.findall("```yaml\n(.*?)```", manual, re.DOTALL)[0])
    sums, gsm8k = read_benchmark(str(tmp_path / "mine.yml")).tasks
    assert (sums.metric, gsm8k.metric) == ("score,none", "exact_match,strict-match")


def test_means_and_standard_errors_by_hand(small: Path) -> None:
    """ta: Math (50 + 30) / 2 = 40, error sqrt(4² + 3²) / 2 = 2.5; Code 20, error 1. Specialists:
    60 ± 2.5 and 40 ± 2. So 60 / 100, error sqrt(2.5² + 1 + 0.6² (2.5² + 2²)) = sqrt(10.94)."""
    found = table(
        read_benchmark("small.yml"),
        {"ta": read_results("ta"), "ae": read_results("ae")},
        base=read_results("base"),
        specialists=dict.fromkeys(("math", "code"), read_results("sft")),
    )
    base, sft, ta, ae = found.columns
    math, code = found.benchmark.categories
    assert found.score(ta, math) == Cell(pytest.approx(40), pytest.approx(2.5))
    assert found.score(ta, code) == Cell(pytest.approx(20), pytest.approx(1))
    assert found.normalized(ta) == Cell(pytest.approx(60), pytest.approx(10.94**0.5))
    assert found.normalized(sft) == Cell(100.0, None)
    # no error where a part has none
    assert found.score(ae, math) == Cell(pytest.approx(35), None)
    assert found.normalized(ae) == Cell(pytest.approx(65), None)
    assert found.normalized(base) == Cell(pytest.approx(20), None)
    # nor where one is NaN
    write_results("m.json", {"add": (0.5, 0.04), "run": (0.2, float("nan"))})
    text = run("m.json", *BENCH)
    assert re.search(r"Add +50.00 ± 4.00\n", text) and re.search(r"Run +20.00\n", text)


def test_each_category_from_its_own_specialist(small: Path) -> None:
    write_results("math.json", {"add": 0.8, "sub": 0.6, "run": 0.0})
    write_results("code.json", {"add": 0.0, "sub": 0.0, "run": 0.5})
    # (40 + 20) / (70 + 50), and with one for the rest (40 + 20) / (70 + 40)
    for rest, normalized in (("code=code.json", "50.00"), ("sft", "54.55")):
        text = run("ta", *BENCH, "--specialist", "math=math.json", "--specialist", rest)
        assert last(text)[1].startswith(normalized)


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Benchmark:
    path = tmp_path_factory.mktemp("benchmark") / "small.yml"
    path.write_text(SMALL)
    return read_benchmark(str(path))


def of_values(values: Iterable[float]) -> Results:
    pairs = zip(("add", "sub", "run"), values, strict=True)
    origin = Origin("f.json")
    return Results({n: TaskResult({"score,none": v}, {}, frozenset(), origin) for n, v in pairs})


THREE = st.tuples(*3 * [st.floats(0.01, 1)])


@given(own=THREE, model=THREE, share=st.floats(0, 1))
def test_properties_of_the_ratio(benchmark, own, model, share):
    scaled = of_values(share * value for value in model)
    models = {"same": of_values(own), "model": of_values(model), "scaled": scaled}
    specialists = dict.fromkeys(("math", "code"), of_values(own))
    found = table(benchmark, models, specialists=specialists)
    _, same, whole, part = (found.normalized(column).value for column in found.columns)  # type: ignore[union-attr]
    assert same == pytest.approx(100) and part == pytest.approx(share * whole)
    sums = [(values[0] + values[1]) / 2 + values[2] for values in (model, own)]
    assert whole == pytest.approx(100 * sums[0] / sums[1])


def test_of_two_files_the_newer_counts(small: Path) -> None:
    # by the date within, whatever the names and the files' own times
    write_results("ta/results_z.json", {"add": 0.9, "more": 0.5}, date=0.5)
    write_results("ta/results_b.json", {"sub": 0.7}, date=3.0)
    Path("ta/results_x.json").mkdir()  # no file
    os.utime("ta/results_b.json", (1, 1))
    found = read_results("ta")
    values = {name: result.metrics["score,none"] for name, result in found.tasks.items()}
    assert values == {"add": 0.5, "sub": 0.7, "run": 0.2, "more": 0.5}
    assert found.notes == (
        f"ta/results_z.json and {LATER} both hold add: the newer, {LATER}, counts",
        f"{LATER} and ta/results_b.json both hold sub: the newer, ta/results_b.json, counts",
    )
    assert warnings("ta", *SFT) == list(found.notes)


def test_files_of_different_models_in_one_folder(small: Path) -> None:
    def of_model(path: str, model: str, *tasks: str) -> None:
        config = {"model_args": {"pretrained": model}}
        write_results(path, dict.fromkeys(tasks, 0.5), model_name=model, config=config)

    for name in ("code", "math"):
        of_model(f"all/{name}/results_a.json", f"org/{name}", "add", "sub", "run")
    all_, math = ("--specialist", "all"), ("--specialist", "math=all/math")
    for words, line in (
        (("ta", *all_), "specialists: add was run by different models, org/code (all/code/res"),
        (("ta", *all_, *math), "specialists: run was run by different models"),
        (("x=all",), "x: add was run by different models"),
        (("ta", "--base", "all"), "base: add was run by different models"),
    ):
        assert line in refused("score", *words, *BENCH)
    run("ta", *math, "--specialist", "code=all/code", *BENCH)
    # one model may run a task again, whatever its folder is called
    of_model("m/a/results_a.json", "./merged", "add", "sub", "run")
    of_model("m/b/results_a.json", "merged/", "add")
    assert len(warnings("m", *BENCH)) == 1
    # each specialist in a folder of its own, below one that is named
    of_model("own/math/results_a.json", "org/math", "add", "sub")
    of_model("own/code/results_a.json", "org/code", "run")
    assert warnings("own", *BENCH) == []


def test_labels(small: Path) -> None:
    own = "own_2026-01-02T03-04-05.678.json"
    for path in (own, "a=b/results_a.json", "y=ta/results_a.json"):
        write_results(path, {"add": 0.5})
    expected = {"ta": "ta", "./ta/m": "m", LATER: "m", own: "own", "x=y=ta": "x", "a=b": "a=b"}
    for word, label in expected.items():
        assert run(word, *SFT).splitlines()[1].split()[-1] == label


def test_missing_tasks_are_named_and_not_averaged_away(small: Path) -> None:
    write_results("cut.json", {"add": 0.5, "run": 0.2})
    text = run("cut=cut.json", "ta", *SFT)
    lines = [re.split(" {2,}", line.strip()) for line in text.splitlines()]
    shown = {name: cells for name, *cells in lines}
    assert shown["Math"] == ["60.00 ± 2.50", "—", "40.00 ± 2.50"]
    assert shown["Sub"] == ["60.00 ± 4.00", "—", "30.00 ± 3.00"]
    assert shown["Code"] == ["40.00 ± 2.00", "20.00", "20.00 ± 1.00"]
    assert last(text) == ["100.00", "—", "60.00 ± 3.31"]
    assert text.splitlines()[-1] == (
        "cut: 1 of 3 tasks are missing, so no mean of Math: sub; to run them: lm_eval "
        "--include_path 'my tasks' --tasks sub --model hf --model_args pretrained=MODEL "
        "--output_path OUT"
    )
    write_results("cut.json", {"run": 0.2})
    assert "--tasks small_math --model" in run("cut.json", *SFT)
    write_results("cut.json", {"add": 0.2})
    assert "--tasks sub,run --confirm_run_unsafe_code --model" in run("cut.json", *SFT)
    # what specialists lack
    text = run("ta", *BENCH, "--specialist", "code=sft")
    assert last(text) == ["—", "—"] and "specialists: 2 of 3 tasks are missing" in text
    text = run("ta", *BENCH)
    assert text.splitlines()[-1].startswith("No specialists, so no normalized accuracy")


def test_partial_is_labelled_everywhere(small: Path) -> None:
    write_results("cut.json", {"add": 0.5, "run": 0.2})
    text = run("cut.json", "ta", *SFT, "--partial", "--out", "out")
    assert text.startswith("Small (partial: Code)\n") and f"{LAST} (partial)" in text
    assert last(text) == ["100.00", "50.00", "50.00 ± 3.54"]
    markdown = Path("out/scores.md").read_text()
    assert markdown.startswith("# Small (partial: Code)\n") and f"*{LAST} (partial)*" in markdown
    found = json.loads(Path("out/scores.json").read_text())
    assert found["partial"] is True and found["compared"] == ["code"]
    # nothing is complete everywhere
    write_results("other.json", {"add": 0.5, "sub": 0.2})
    text = run("cut.json", "other.json", *SFT, "--partial", "--out", "none")
    assert text.startswith("Small (partial: no category is complete)\n")


def test_what_was_measured_otherwise_is_told(small: Path) -> None:
    write_results("sft.json", {"run": 0.4})
    judge = {"run": {"metadata": {"version": 1.0, "MERGEBENCH_JUDGE": "mine"}}}
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"n-shot": {"run": 5}}, "n-shot", "0 and 5"),
        ({"versions": {"run": 2.0}}, "the task's version", "1.0 and 2.0"),
        ({"of": 90, "items": 90}, "the number of items", "100 and 90"),
        ({"chat_template_sha": "abcdef012345"}, "the chat template", "none and abcdef01"),
        ({"system_instruction_sha": "1"}, "the system instruction", "none and 1"),
        ({"lm_eval_version": "0.4.12"}, "the version of lm-eval", "0.4.13 and 0.4.12"),
        ({"transformers_version": "5"}, "the version of transformers", "4 and 5"),
        ({"max_length": 64}, "max_length", "2048 and 64"),
        ({"config": {"model_dtype": "f"}}, "the dtype", "torch.float32 and f"),
        ({"config": {"batch_size": "8"}}, "the batch size", "auto and 8"),
        ({"task_hashes": {"run": "b"}}, "the hash of items and prompts", "a and b"),
        ({"configs": judge}, "MERGEBENCH_JUDGE", "default and mine"),
        ({"config": {"gen_kwargs": [1]}}, "--gen_kwargs", "{} and [1]"),
    ]
    for other, setting, values in cases:
        write_results("m.json", {"run": 0.4}, **other)
        found = warnings("m.json", *BENCH, "--specialist", "sft.json")
        assert found == [f"{setting} differs between sft.json and m.json: run ({values})"]
    write_results("m.json", {"run": 0.4})
    assert warnings("m.json", *BENCH, "--specialist", "sft.json") == []


def test_limited_runs_and_answers_that_were_not_judged(small: Path) -> None:
    metrics = {
        "add": {"as_text,none": 34 / 300, "as_text_stderr,none": 0.01},
        "sub": {"as_text,none": 0.0, "unchecked,none": 0.0},
        "run": {"unchecked,none": 0.002, "parse_error,none": 0.5},
    }
    write_results("m.json", dict.fromkeys(metrics, 0.4), items=10, metrics=metrics)
    assert warnings("m.json", *SFT, "--out", "out")[:4] == [
        "m (limited): m.json was run with --limit or --samples: add (10 of 100 items), "
        "sub (10 of 100 items), run (10 of 100 items)",
        "m: m.json: answers compared as text only, for lack of time (`as_text`): add (11.33 %)",
        "m: m.json: programs that timed out and were not run again (`unchecked`): run (0.20 %)",
        "m: m.json: verdicts of the judge that could not be read (`parse_error`): run (50.00 %)",
    ]
    assert "| m (limited) |" in Path("out/scores.md").read_text()
    saved = json.loads(Path("out/scores.json").read_text())["columns"][1]["tasks"]["add"]
    assert saved["others"] == {"as_text,none": pytest.approx(34 / 3)}
    # a group's items are not counted
    write_results("g.json", {"run": 0.4}, config={"limit": 8}, **{"n-samples": {}})
    assert read_results("g.json").tasks["run"].origin.limited == "--limit 8"


def test_scores_by_keywords_have_a_table_of_their_own(small: Path) -> None:
    names = [task.name for task in read_benchmark("mergebench").categories[4].tasks]
    by_keyword = {f"{name}_keyword": i / 10 for i, name in enumerate(names, 1)}
    write_results("m.json", by_keyword)
    Path("m.json").write_text(Path("m.json").read_text().replace("score,none", "score,keyword"))
    text = run("m.json")
    assert text.startswith("Safety judged by keywords, not MergeBench's scores\n")
    assert re.search(r"Safety +25.00\n  WildGuardTest +10.00\n", text)
    # another metric than the other columns'
    run("ta", *SFT, "--out", "out")
    strict = {"results": {"run": {"strict,none": 0.1}}}
    Path("m.json").write_text(json.dumps(strict))
    words = ("m.json", *BENCH, "--reference", "out/scores.json", "--metric", "run:strict,none")
    assert re.search(r"Run +40.00 ± 2.00 +10.00\n", run(*words))
    told = "differs between sft/results_a.json and m.json: run (score,none and strict,none)"
    assert warnings(*words) == [f"the metric {told}"]


def test_an_earlier_table_is_a_reference(small: Path) -> None:
    run("ta", "--base", "base", *SFT, "--out", "out")
    saved = (*BENCH, "--reference", "out/scores.json")
    text = run("ae", *saved, "--show-reference")
    heads = ["", "specialists (scores)", "ae", "base (scores)", "ta (scores)"]
    assert re.split(" {2,}", text.splitlines()[1]) == heads
    assert last(text) == ["100.00", "65.00", "20.00", "60.00 ± 3.31"]
    # the settings of then are compared with those of now
    write_results("ae/results_a.json", {"run": 0.4}, **{"n-shot": {"run": 5}})
    assert warnings("ae", *saved) == [
        "n-shot differs between sft/results_a.json and ae/results_a.json: run (0 and 5)"
    ]
    whole = json.loads(Path("out/scores.json").read_text())
    for change, line in (
        ({"columns": [whole["columns"][2]]}, "the reference r has no specialists"),
        ({"columns": [{"label": "a", "kind": "best", "tasks": {}}]}, "`columns.0.kind`"),
        ({"columns": [whole["columns"][1] | {"tasks": {"ad": 1.0}}]}, "no task ad in small (did"),
    ):
        Path("r.json").write_text(json.dumps(whole | change))
        assert line in refused("score", "ae", *BENCH, "--reference", "r.json")


def test_mistakes_are_one_line(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_results("good.json", {"add": 0.5})
    files = {
        "cut.json": Path("good.json").read_text().partition(": null")[0],
        "model.json": '{"architectures": []}',
        "version.yml": SMALL.replace("version: 1", "version: 2"),
        "deeper.yml": SMALL.replace("label: Add", "lable: Add"),
        "twice.yml": SMALL.replace("name: sub", "name: add"),
        "empty.yml": SMALL.replace('[{name: run, label: "Run"}]', "[]"),
    }
    for name, text in files.items():
        Path(name).write_text(text)
    Path("empty").mkdir()
    write_results("date.json", {"add": 0.5}, date="May")  # type: ignore[arg-type]
    write_results("two.json", {"quickstart_copy": 0.5, "mergebench_gsm8k": 0.5})
    write_results("big.json", {"add": 37.5})
    write_results("less.json", {"add": 0.5}, higher_is_better={"add": {"score": False}})
    column = {"label": "", "kind": "model", "tasks": {"add": math.nan}}
    reference = {"format_version": 1, "benchmark": "small", "columns": [column]}
    Path("nan.json").write_text(json.dumps(reference))
    two = ("ta", "--specialist")
    expected: dict[tuple[str, ...], str] = {
        (): "nothing to score: name result files",
        ("nope",): "nope: No such file or directory; expected a result file",
        ("empty",): "empty: no results of lm_eval in this folder: expected results_",
        ("cut.json",): "cut.json cannot be read as a result file of lm_eval: Expecting",
        ("model.json", *BENCH): "model.json is not a result file of lm_eval: `results`: Field req",
        ("date.json",): "date.json is not a result file of lm_eval: `date`: .* .found 'May'.",
        ("",): "the path '' is empty",
        ("ta", *BENCH, "--out", "good.json"): "cannot write good.json: it is a file; name a folder",
        ("=ta",): "`=ta`: expected NAME=PATH, or a path",
        ("ta",): "belong to no known benchmark .add, sub, run.: say which with --benchmark",
        ("two.json",): "belong to more than one benchmark",
        ("ta", "--benchmark", "quick"): "expected mergebench, mergebench_keyword, quickstart",
        ("ta", "--benchmark", "quickstart"): "ta: expected quickstart_copy, .* found add, sub",
        ("ta", "--benchmark", "version.yml"): "`format_version`: Input should be 1 .found 2.",
        ("ta", "--benchmark", "deeper.yml"): "is not a benchmark: `categories.0.tasks.0.lab",
        ("ta", "--benchmark", "twice.yml"): "add is in it twice",
        ("ta", "--benchmark", "empty.yml"): "`categories.1.tasks`: .* at least 1 item",
        ("ta", "ta", *BENCH): "two columns are called ta: give one another label, LABEL=PATH",
        ("base=ta", "--base", "ta", *BENCH): "two columns are called base",
        (*two, "maths=sft", *BENCH): "did you mean `math`",
        (*two, "sft", "--specialist", "ae", *BENCH): "--specialist names all categories twice",
        (*two, "code=good.json", *BENCH): "specialists: expected .* in good.json, found add",
        ("big.json", *BENCH): "big.json: add has `score,none` = 37.5: expected a share in",
        ("less.json", *BENCH): "better when it is lower: choose another with --metric add:",
        ("ta", *BENCH, "--metric", "add:acc,none"): "add has no `acc,none`: it has `score,none`;",
        ("ta", *BENCH, "--metric", "ad:acc,none"): "--metric ad: no such task in small .did you",
        ("ta", *BENCH, *TWICE): "--metric names acc,none and f1,none of add: give one",
        ("ta", *BENCH, "--reference", "nan.json"): "columns.0.tasks.*finite number .found nan.",
        ("ta", *BENCH, "--reference", "paper"): "reference paper is for mergebench, and the table",
        ("ta", *BENCH, "--reference", "nope"): "nope: No such file or directory; expected a ref",
    }
    for words, line in expected.items():
        found = refused("score", *words)
        assert re.search(line, found), (words, found)


def test_as_a_user_types(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    done = tvb("score", *WORDS, "--out", "out")
    assert done.stderr == ""
    assert sorted(path.name for path in Path("out").iterdir()) == sorted(FILES)
    assert [line.rstrip() for line in done.stdout.splitlines()] == [
        "Small",
        "                              base   specialists            TA   A|E*",
        "Math                         10.00  60.00 ± 2.50  40.00 ± 2.50  35.00",
        "  Add                        10.00  60.00 ± 3.00  50.00 ± 4.00  30.00",
        "  Sub                        10.00  60.00 ± 4.00  30.00 ± 3.00  40.00",
        "Code                         10.00  40.00 ± 2.00  20.00 ± 1.00  30.00",
        "  Run                        10.00  40.00 ± 2.00  20.00 ± 1.00  30.00",
        "Average normalized accuracy  20.00        100.00  60.00 ± 3.31  65.00",
        "",
        "Written to out",
    ]
    lines = Path("out/scores.md").read_text().splitlines()
    assert lines[2:10] == [
        "| Category                      | Task   |  base |  specialists |               TA |    A\\|E\\* |",  # noqa: E501
        "| ----------------------------- | ------ | ----: | -----------: | ---------------: | --------: |",  # noqa: E501
        "| Math                          | Add    | 10.00 | 60.00 ± 3.00 | **50.00 ± 4.00** |     30.00 |",  # noqa: E501
        "| Math                          | Sub    | 10.00 | 60.00 ± 4.00 |     30.00 ± 3.00 | **40.00** |",  # noqa: E501
        "| *Math*                        | *mean* | 10.00 | 60.00 ± 2.50 | **40.00 ± 2.50** |     35.00 |",  # noqa: E501
        "| Code                          | Run    | 10.00 | 40.00 ± 2.00 |     20.00 ± 1.00 | **30.00** |",  # noqa: E501
        "| *Code*                        | *mean* | 10.00 | 40.00 ± 2.00 |     20.00 ± 1.00 | **30.00** |",  # noqa: E501
        "| *Average normalized accuracy* |        | 20.00 |       100.00 |     60.00 ± 3.31 | **65.00** |",  # noqa: E501
    ]
    assert lines[11].endswith("The best of the models is bold.")
    found = json.loads(Path("out/scores.json").read_text())
    assert found["format_version"] == 1 and found["partial"] is False
    kinds = [column["kind"] for column in found["columns"]]
    assert kinds == ["base", "specialists", "model", "model"]
    ta = found["columns"][2]
    assert ta["categories"]["code"] == {"value": 20.0, "stderr": 1.0}
    assert ta["tasks"]["add"]["origin"].pop("settings")["n-shot"] == "0"
    assert ta["tasks"]["add"] == {
        "value": 50.0, "stderr": 4.0, "metric": "score,none",
        "origin": {"file": LATER, "limited": None, "model": None, "date": 1.0},
        "others": {},
    }  # fmt: skip


def test_files_of_others_stay(small: Path) -> None:
    words = ("ta", *SFT, "--out", "out")
    for name in FILES:
        for place in (Path("out", name), Path("out", name, "x")):  # a folder, empty or not
            place.mkdir(parents=True)
            assert f"cannot write {Path('out', name)}: " in refused("score", *words)
            assert [each.name for each in Path("out").iterdir()] == [name]
        shutil.rmtree("out")
    run(*words)
    theirs = b"<h1>tvb score of the thesis</h1>\xff"
    for name in FILES:
        foreign = Path("out", name)
        own = foreign.read_bytes()
        foreign.write_bytes(theirs)
        told = f"cannot write {foreign}: tvb score did not make it; name another --out"
        assert refused("score", *words) == f"Error: {told}\n"
        assert foreign.read_bytes() == theirs
        foreign.write_bytes(own)
    run(*words)
    run(*words)  # its own are replaced


@pytest.mark.parametrize(("width", "encoding"), [(30, "utf-8"), (80, "ascii"), (300, "utf-8")])
def test_no_number_is_cut(width: int, encoding: str) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="")
    print_table(papers_table(), Console(file=file, width=width))
    file.flush()
    text = raw.getvalue().decode(encoding)
    for column in read_reference("paper", read_benchmark("mergebench")).columns:
        for cell in column.tasks.values():
            assert f" {cell.value:.2f}" in text
    heads = sum("(paper)" in line for line in text.splitlines())
    assert heads == {30: 5, 80: 2, 300: 1}[width]
