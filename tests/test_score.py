"""`tvb score`: the paper's numbers, hand-made and real result files, and everything that is wrong
with one."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tvb_mergekit.cli import main
from tvb_mergekit.errors import UserError
from tvb_mergekit.scoring import (
    Cell,
    Origin,
    Results,
    Table,
    TaskResult,
    find_benchmark,
    read_benchmark,
    read_reference,
    read_results,
    table,
)
from tvb_mergekit.scoring.text import cell_text, print_table

ROOT = Path(__file__).resolve().parent.parent
TVB = Path(sys.executable).with_name("tvb")
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
Scores = Mapping[str, float | tuple[float, float]]
MATH = {"mergebench_gsm8k": 0.5, "mergebench_math_hendrycks": 0.25}


def write_results(
    path: Path, scores: Scores, *, date: float = 1.0, of: int = 100, items: int = 100, **other: Any
) -> Path:
    """A result file of lm-eval 0.4.13: task -> `score,none`, or with its standard error."""
    results = {}
    for task, score in scores.items():
        value, error = score if isinstance(score, tuple) else (score, "N/A")
        results[task] = {"name": task, "alias": task, "sample_len": items, "score,none": value,
                         "score_stderr,none": error}  # fmt: skip
    found = {
        "results": results,
        "versions": dict.fromkeys(scores, 1.0),
        "n-shot": dict.fromkeys(scores, 0),
        "n-samples": {task: {"original": of, "effective": items} for task in scores},
        "higher_is_better": {task: {"score": True} for task in scores},
        "config": {"model": "hf", "model_args": {}, "limit": None, "gen_kwargs": {}},
        "configs": {task: {"metadata": {"MERGEBENCH_JUDGE": "default"}} for task in scores},
        "date": date,
        "model_name": "abcd1234",
        "chat_template_sha": None,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found | other))
    return path


def results(scores: Mapping[str, float]) -> Results:
    found = {}
    for name, score in scores.items():
        found[name] = TaskResult({"score,none": score}, {}, frozenset(), Origin("f.json"))
    return Results(found)


def run(*words: object, code: int = 0) -> str:
    """Standard output; the one line of the error where `code` is not 0."""
    done = CliRunner().invoke(main, ["score", *map(str, words)], prog_name="tvb")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    if code:
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("Error: "), done.stderr
    return done.stderr if code else done.stdout


def column(found: Table, label: str) -> Any:
    return next(column for column in found.columns if column.label == label)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """small.yml, and results of base, specialists and two models, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("small.yml").write_text(SMALL)
    write_results(Path("base/results_a.json"), {"add": 0.1, "sub": 0.1, "run": 0.1})
    sft = {"add": (0.6, 0.03), "sub": (0.6, 0.04), "run": (0.4, 0.02)}
    write_results(Path("sft/results_a.json"), sft)
    ta = {"add": (0.5, 0.04), "sub": (0.3, 0.03), "run": (0.2, 0.01)}
    write_results(Path("ta/m/results_2026-01-02T03-04-05.678.json"), ta)
    write_results(Path("ae/results_a.json"), {"add": 0.3, "sub": 0.4, "run": 0.3})
    return tmp_path


SMALL_OPTIONS = ("--benchmark", "small.yml", "--specialist", "sft")


# ---------------------------------------------------------------------------------------- the paper


def test_the_papers_table() -> None:
    benchmark = read_benchmark("mergebench")
    paper = read_reference("paper", benchmark)
    found = table(benchmark, {}, reference=paper, show_reference=True)
    normalized = {c.label: found.normalized(c) for c in found.columns}
    assert {label: cell_text(cell) for label, cell in normalized.items()} == {
        "SFT (paper)": "100.00",
        "TA (paper)": "72.88",
        "AE (paper)": "63.49",
        "PCA (paper)": "47.07",
        "RandSelect (paper)": "63.37",  # printed as 63.38
    }
    sft = [found.mean(found.columns[0], category) for category in benchmark.categories]
    means = [cell.value for cell in sft if cell is not None]
    assert means == pytest.approx([37.52, 52.795, 46.569, 44.21, 75.83], abs=5e-4)
    assert sum(means) == pytest.approx(256.924, abs=5e-4)
    assert found.gaps() == [] and not found.is_partial


def test_the_papers_table_without_results_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = run("--reference", "paper", "--show-reference")
    lines = [line for line in said.splitlines() if line.startswith("Average")]  # it may be folded
    assert " ".join(line.removeprefix("Average normalized accuracy") for line in lines).split() == [
        "100.00",
        "72.88",
        "63.49",
        "47.07",
        "63.37",
    ]


def test_the_papers_columns_are_by_language() -> None:
    """Of M_ARC, es alone has 1170 items: its shares are of them, the others' of 1169."""
    paper = read_reference("paper", read_benchmark("mergebench"))
    for column in paper.columns[:4]:  # no share of either gives RandSelect's 38.71
        for language, items in {"fr": 1169, "de": 1169, "es": 1170}.items():
            value = column.entries[f"mergebench_arc_{language}"].value
            right = round(value * items / 100)
            assert f"{100 * right / items:.2f}" == f"{value:.2f}", (column.label, language)


def test_the_keyword_tasks_are_a_benchmark_of_their_own() -> None:
    benchmark = read_benchmark("mergebench_keyword")
    (category,) = benchmark.categories
    path = ROOT / "evals/mergebench/safety/mergebench_safety_keyword.yaml"
    group = yaml.safe_load(path.read_text())
    assert category.group == group["group"]
    assert [task.name for task in category.tasks] == group["task"]
    assert {task.metric for task in category.tasks} == {"score,keyword"}


@pytest.mark.parametrize("name", ["mergebench", "mini"])
def test_the_benchmarks_are_those_of_the_yamls(name: str) -> None:
    benchmark = read_benchmark(name)
    assert [category.name for category in benchmark.categories] == [
        "instruction", "math", "multilingual", "coding", "safety",
    ]  # fmt: skip
    groups = {}
    for path in (ROOT / "evals").rglob(f"{name}_*.yaml"):
        group = yaml.safe_load(path.read_text())
        if "group" in group:
            groups[group["group"]] = group["task"]
    for category in benchmark.categories:
        assert [task.name for task in category.tasks] == groups[str(category.group)]
    assert str(benchmark.include_path) in ("evals", "evals/mini/tasks")
    assert len(benchmark.tasks) == {"mergebench": 21, "mini": 10}[name]
    assert {task.metric for task in benchmark.tasks} == {"score,none"}


# ------------------------------------------------------------------------------------------ numbers


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
    assert found.mean(ta, math) == Cell(pytest.approx(40), pytest.approx(2.5))
    assert found.mean(ta, code) == Cell(pytest.approx(20), pytest.approx(1))
    assert found.normalized(ta) == Cell(pytest.approx(60), pytest.approx(10.94**0.5))
    assert found.normalized(sft) == Cell(100.0, None)
    # no error where a part has none
    assert found.mean(ae, math) == Cell(pytest.approx(35), None)
    assert found.normalized(ae) == Cell(pytest.approx(65), None)
    assert found.normalized(base) == Cell(pytest.approx(20), None)
    assert found.normalized_task(ta, math.tasks[0]) == pytest.approx(100 * 5 / 6)
    assert found.normalized_category(ta, math) == pytest.approx(100 * 2 / 3)


def test_an_error_that_is_half_known_is_not_known(small: Path) -> None:
    write_results(Path("m.json"), {"add": (0.5, 0.04), "sub": 0.3, "run": (0.2, float("nan"))})
    text = run("m.json", "--benchmark", "small.yml")
    assert re.search(r"Math +40.00\n  Add +50.00 ± 4.00\n", text)
    assert re.search(r"Code +20.00\n  Run +20.00\n", text)


def test_each_category_from_its_own_specialist(small: Path) -> None:
    write_results(Path("math.json"), {"add": 0.8, "sub": 0.6, "run": 0.0})
    write_results(Path("code.json"), {"add": 0.0, "sub": 0.0, "run": 0.5})
    options = ("ta", "--benchmark", "small.yml", "--out", "out", "--radar", "none")
    run(*options, "--specialist", "math=math.json", "--specialist", "code=code.json")
    found = json.loads(Path("out/scores.json").read_text())["columns"]
    assert [found[0]["tasks"][task]["value"] for task in ("add", "sub", "run")] == [80, 60, 50]
    # (40 + 20) / (70 + 50)
    assert found[1]["normalized"] == {"value": pytest.approx(50), "stderr": None}
    # one for the rest
    run(*options, "--specialist", "math=math.json", "--specialist", "sft")
    found = json.loads(Path("out/scores.json").read_text())["columns"]
    assert [found[0]["tasks"][task]["value"] for task in ("add", "sub", "run")] == [80, 60, 40]


SHARES = st.floats(0.01, 1)
VALUES = {"add": 0.1, "sub": 0.2, "run": 0.3}
THREE = st.tuples(SHARES, SHARES, SHARES).map(
    lambda values: dict(zip(("add", "sub", "run"), values, strict=True))
)


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("benchmark") / "small.yml"
    path.write_text(SMALL)
    return read_benchmark(str(path))


@given(own=THREE, model=THREE, share=st.floats(0, 1))
def test_properties_of_the_ratio(
    benchmark: Any, own: dict[str, float], model: dict[str, float], share: float
) -> None:
    specialists = dict.fromkeys(("math", "code"), results(own))
    scaled = {task: share * value for task, value in model.items()}
    models = {"same": results(own), "model": results(model), "scaled": results(scaled)}
    found = table(benchmark, models, specialists=specialists)
    _, same, whole, part = (found.normalized(column).value for column in found.columns)  # type: ignore[union-attr]
    assert same == pytest.approx(100)
    assert part == pytest.approx(share * whole)
    math = (model["add"] + model["sub"]) / 2
    best = (own["add"] + own["sub"]) / 2
    assert whole == pytest.approx(100 * (math + model["run"]) / (best + own["run"]))


@settings(max_examples=20)
@given(order=st.permutations(["add", "sub", "run"]), dates=st.permutations([1.0, 2.0, 3.0]))
def test_neither_the_order_of_files_nor_their_dates_matter(
    tmp_path_factory: pytest.TempPathFactory, order: list[str], dates: list[float]
) -> None:
    folder = tmp_path_factory.mktemp("files")
    for place, (task, date) in enumerate(zip(order, dates, strict=True)):
        write_results(folder / f"{place}/results_a.json", {task: VALUES[task]}, date=date)
    found = read_results(folder)
    assert {name: r.metrics["score,none"] for name, r in found.tasks.items()} == VALUES
    assert found.notes == ()


# ------------------------------------------------------------------------------------- result files


@pytest.mark.slow
def test_files_of_lm_eval_itself(tmp_path: Path) -> None:
    """The stock command on two of the mini tasks, four items each, three and one right."""
    items = {
        "math_add": [(f"add 0 0 {i} + 0 0 1 =", f"0 0 {i + 1}") for i in range(4)],
        "math_largest": [(f"max {i} 5 =", "5") for i in range(4)],
    }
    rules = {}
    for task, pairs in items.items():
        rows = [{"task": task, "prompt": prompt, "answer": answer} for prompt, answer in pairs]
        lines = "\n".join(map(json.dumps, rows))
        for split in ("test", "validation"):
            (tmp_path / f"{task}.{split}.jsonl").write_text(lines + "\n")
        right = 3 if task == "math_add" else 1
        rules |= dict(pairs[:right])
    script = stand_ins.script(tmp_path / "script.json", rules)
    out = tmp_path / "out"
    done = stand_ins.lm_eval(
        *(tmp_path, "--model", "scripted", "--model_args", f"script={script}"),
        *("--tasks", "mini_math", "--include_path", ROOT / "evals/mini/tasks"),
        *("--output_path", out),
        MINI_DATA=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = out.rglob("results_*.json")
    found = read_results(out)
    add = found.tasks["mini_math_add"]
    # a sample's standard deviation over sqrt(4): sqrt(4 * 3/16 / 3) / 2
    assert add.metrics["score,none"] == 0.75 and add.stderrs["score,none"] == pytest.approx(0.25)
    settings_ = {"n-shot": "0", "the task's version": "1.0", "the number of items": "4"}
    assert settings_.items() <= add.origin.settings.items()
    assert add.origin.file == str(file) and add.origin.limited is None
    assert found.tasks["mini_math"].metrics["score,none"] == 0.5  # the group is there as well
    done = subprocess.run(
        [str(TVB), "score", f"merged={out}", "--specialist", f"math={out}", "--partial"],
        cwd=tmp_path, env=os.environ | {"COLUMNS": "80"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "evals/mini (partial: Math)"
    assert "Math                                   50.00 ± 17.68   50.00 ± 17.68" in lines
    assert "  Add                                  75.00 ± 25.00   75.00 ± 25.00" in lines
    assert "Average normalized accuracy (partial)         100.00  100.00 ± 50.00" in lines
    assert "--tasks mini_instruction,mini_multilingual,mini_coding,mini_safety" in done.stdout


def test_of_two_files_the_newer_counts(small: Path) -> None:
    # by the date within, whatever the names and the files' own times
    write_results(Path("ta/results_z.json"), {"add": 0.9, "more": 0.5}, date=0.5)
    new = write_results(Path("ta/results_b.json"), {"sub": 0.7}, date=3.0)
    os.utime(new, (1, 1))
    found = read_results("ta")
    assert {name: r.metrics["score,none"] for name, r in found.tasks.items()} == {
        "add": 0.5, "sub": 0.7, "run": 0.2, "more": 0.5,
    }  # fmt: skip
    middle = "ta/m/results_2026-01-02T03-04-05.678.json"
    assert found.notes == (
        f"ta/results_z.json and {middle} both hold add: the newer, {middle}, counts",
        f"{middle} and ta/results_b.json both hold sub: the newer, ta/results_b.json, counts",
    )
    done = CliRunner().invoke(main, ["score", "ta", *SMALL_OPTIONS])
    assert f"Warning: {found.notes[0]}" in done.stderr.splitlines()
    assert found.notes[0] not in done.stdout


def test_a_folder_of_two_models_is_told(small: Path) -> None:
    for name, task in (("one", "add"), ("two", "run")):
        config = {"model_args": {"pretrained": f"org/{name}"}}
        write_results(
            Path(f"both/{name}/results_a.json"),
            {task: 0.5},
            model_name=f"org/{name}",
            config=config,
        )
    assert read_results("both").notes == (
        "both joins the results of different models: org/one (both/one/results_a.json), "
        "org/two (both/two/results_a.json)",
    )


def of_model(path: str, model: str, *tasks: str, score: float = 0.5) -> None:
    config = {"model_args": {"pretrained": model}}
    write_results(Path(path), dict.fromkeys(tasks, score), model_name=model, config=config)


def test_one_task_of_two_models_is_a_mistake(small: Path) -> None:
    for name in ("code", "math"):
        of_model(f"all/{name}/m/results_a.json", f"org/{name}", "add", "sub", "run")
    of_model("flat/results_a.json", "one", "run")
    of_model("flat/results_b.json", "two", "run")
    bench = ("--benchmark", "small.yml")
    assert run("ta", "--specialist", "all", *bench, code=1) == (
        "Error: specialists: add is there of different models, org/code (all/code), org/math "
        "(all/math): name each category's own, such as --specialist math=all/math\n"
    )
    # one category has its own, the other has not
    error = run("ta", "--specialist", "all", "--specialist", "math=all/math", *bench, code=1)
    assert error.endswith("run is there of different models, org/code (all/code), org/math "
                          "(all/math): name each category's own, such as --specialist "
                          "code=all/code\n")  # fmt: skip
    assert run("ta", "--specialist", "flat", *bench, code=1).endswith(
        "one (flat/results_a.json), two (flat/results_b.json): name each category's own, such as "
        "--specialist code=PATH\n"
    )
    assert run("x=all", *bench, code=1) == (
        "Error: x: add is there of different models, org/code (all/code), org/math (all/math): "
        "name each by itself, LABEL=all/code LABEL=all/math\n"
    )
    of_model("up/all/results_a.json", "one", "run")
    of_model("up/all/m/results_a.json", "two", "run")
    assert "two (up/all/m), one (up/all/results_a.json): name" in run("up", *bench, code=1)
    assert run("ta", "--base", "all", *bench, code=1).endswith(": name one, --base all/code\n")
    run("ta", "--specialist", "math=all/math", "--specialist", "code=all/code", *bench)


def test_one_task_of_one_model_may_be_run_again(small: Path) -> None:
    of_model("m/a/results_a.json", "./merged", "add", "sub", "run")
    of_model("m/b/results_a.json", "merged/", "add", score=0.7)
    assert warnings("m", "--benchmark", "small.yml") == [
        "Warning: m/a/results_a.json and m/b/results_a.json both hold add: the newer, "
        "m/b/results_a.json, counts"
    ]
    # nor is it a mistake where the table does not ask for the task
    of_model("two/a/results_a.json", "one", "add", "sub", "other")
    of_model("two/b/results_a.json", "two", "run", "other")
    run("ta", "--benchmark", "small.yml", "--specialist", "two")


@pytest.mark.parametrize(
    ("words", "label"),
    [
        (("ta",), "ta"),
        (("./ta/m",), "m"),
        (("ta/m/results_2026-01-02T03-04-05.678.json",), "m"),
        (("own_2026-01-02T03-04-05.678.json",), "own"),
        (("x=y=ta",), "x"),
        (("a=b",), "a=b"),  # a folder
    ],
)
def test_labels(small: Path, words: tuple[str, ...], label: str) -> None:
    write_results(Path("own_2026-01-02T03-04-05.678.json"), {"add": 0.5})
    write_results(Path("a=b/results_a.json"), {"add": 0.5})
    write_results(Path("y=ta/results_a.json"), {"add": 0.5})
    found = run(*words, *SMALL_OPTIONS)
    assert found.splitlines()[1].split()[-1] == label


# ------------------------------------------------------------------------------- what is not there


def test_missing_tasks_are_named_and_not_averaged_away(small: Path) -> None:
    write_results(Path("cut.json"), {"add": 0.5, "run": 0.2})
    text = run("cut=cut.json", "ta", *SMALL_OPTIONS)
    rows = {line[:29].strip(): line[29:].split("  ") for line in text.splitlines()}
    shown = {name: [cell.strip() for cell in cells if cell.strip()] for name, cells in rows.items()}
    assert shown["Math"] == ["60.00 ± 2.50", "—", "40.00 ± 2.50"]
    assert shown["Sub"] == ["60.00 ± 4.00", "—", "30.00 ± 3.00"]
    assert shown["Code"] == ["40.00 ± 2.00", "20.00", "20.00 ± 1.00"]
    assert shown["Average normalized accuracy"] == ["100.00", "—", "60.00 ± 3.31"]
    assert text.splitlines()[-1] == (
        "cut: 1 of 3 tasks are missing, so Math has no mean: sub; to run them: lm_eval "
        "--include_path 'my tasks' --tasks sub --model hf --model_args pretrained=MODEL "
        "--output_path OUT"
    )
    write_results(Path("cut.json"), {"run": 0.2})
    assert "--tasks small_math --model" in run("cut.json", *SMALL_OPTIONS)
    write_results(Path("cut.json"), {"add": 0.2})
    assert "--tasks sub,run --confirm_run_unsafe_code --model" in run("cut.json", *SMALL_OPTIONS)
    # without a specialist nobody is normalized
    text = run("ta", "--benchmark", "small.yml", "--specialist", "code=sft")
    assert re.search(r"Average normalized accuracy +— +—\n", text)
    assert "specialists: 2 of 3 tasks are missing" in text
    text = run("ta", "--benchmark", "small.yml")
    assert text.splitlines()[-1].startswith("No specialists, so no normalized accuracy")


def test_partial_is_labelled_everywhere(small: Path) -> None:
    pytest.importorskip("matplotlib")
    write_results(Path("cut.json"), {"add": 0.5, "run": 0.2})
    text = run("cut.json", "ta", *SMALL_OPTIONS, "--partial", "--out", "out")
    assert text.startswith("Small (partial: Code)\n")
    assert re.search(r"Average normalized accuracy \(partial\) +100.00 +50.00 +50.00 ± 3.54", text)
    markdown = Path("out/scores.md").read_text()
    assert markdown.startswith("# Small (partial: Code)\n")
    assert "*Average normalized accuracy (partial)*" in markdown
    found = json.loads(Path("out/scores.json").read_text())
    assert found["partial"] is True and found["compared"] == ["code"]
    picture = Path("out/radar.svg").read_text()
    assert "<!-- Small: percent of the specialists' scores (partial: Code) -->" in picture
    assert "<!-- Run -->" in picture and "<!-- Add -->" not in picture
    # where nothing is missing it changes nothing
    text = run("ta", *SMALL_OPTIONS, "--partial")
    assert "partial" not in text and "60.00 ± 3.31" in text
    # nothing is complete everywhere
    write_results(Path("other.json"), {"add": 0.5, "sub": 0.2})
    text = run("cut.json", "other.json", *SMALL_OPTIONS, "--partial", "--out", "none")
    assert text.startswith("Small (partial: no category is complete)\n")
    assert re.search(r"Average normalized accuracy \(partial\) +— +— +—\n", text)
    assert sorted(p.name for p in Path("none").iterdir()) == ["scores.json", "scores.md"]


def test_specialists_that_can_nothing(small: Path) -> None:
    write_results(Path("zero.json"), {"add": 0.0, "sub": 0.0, "run": 0.0})
    text = run("ta", "--benchmark", "small.yml", "--specialist", "zero.json")
    assert re.search(r"Average normalized accuracy +— +—\n", text)
    assert text.splitlines()[-1].startswith("The specialists' scores are all 0")


# ----------------------------------------------------------------------------- what is comparable


def warnings(*words: object) -> list[str]:
    done = CliRunner().invoke(main, ["score", *map(str, words)])
    assert done.exit_code == 0, done.output
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"n-shot": {"run": 5}}, "n-shot differs between sft.json and m.json: run (0 and 5)"),
        (
            {"versions": {"run": 2.0}},
            "the task's version differs between sft.json and m.json: run (1.0 and 2.0)",
        ),
        (
            {"n-samples": {"run": {"original": 90, "effective": 90}}},
            "the number of items differs between sft.json and m.json: run (100 and 90)",
        ),
        (
            {"chat_template_sha": "abc"},
            "the use of a chat template differs between sft.json and m.json: run (no and yes)",
        ),
        (
            {"configs": {"run": {"metadata": {"version": 1.0, "MERGEBENCH_JUDGE": "mine"}}}},
            "MERGEBENCH_JUDGE differs between sft.json and m.json: run (default and mine)",
        ),
        (
            {"config": {"gen_kwargs": {"temperature": 1}}},
            '--gen_kwargs differs between sft.json and m.json: run ({} and {"temperature": 1})',
        ),
    ],
)
def test_what_was_measured_otherwise_is_told(
    small: Path, other: dict[str, Any], expected: str
) -> None:
    write_results(Path("sft.json"), {"run": 0.4})
    write_results(Path("m.json"), {"run": 0.4}, **other)
    options = ("--benchmark", "small.yml", "--specialist", "sft.json")
    assert warnings("m.json", *options) == [f"Warning: {expected}"]
    write_results(Path("m.json"), {"run": 0.4})
    assert warnings("m.json", *options) == []


def test_a_limited_run_is_marked(small: Path) -> None:
    write_results(Path("m.json"), {"add": 0.4, "sub": 0.4, "run": 0.4}, items=10)
    assert (
        "Warning: m (limited): m.json was run with --limit or --samples: add (10 of 100 items), "
        "sub (10 of 100 items), run (10 of 100 items)"
    ) in warnings("m.json", *SMALL_OPTIONS)
    assert "  m (limited)\n" in run("m.json", *SMALL_OPTIONS, "--out", "out", "--radar", "none")
    assert "| m (limited) |" in Path("out/scores.md").read_text()
    # a group's items are not counted
    config = {"limit": 0.5}
    write_results(Path("g.json"), {"run": 0.4}, config=config, **{"n-samples": {}})
    assert read_results("g.json").tasks["run"].origin.limited == "--limit 0.5"


def test_keywords_are_no_judge(small: Path) -> None:
    names = [task.name for task in read_benchmark("mergebench").categories[4].tasks]
    write_results(Path("m.json"), dict.fromkeys([f"{name}_keyword" for name in names[:1]], 0.9)
                  | dict.fromkeys(names[1:], 0.5))  # fmt: skip
    (line,) = warnings("m.json")
    assert line == (
        "Warning: m: m.json holds mergebench_wildguardtest_keyword, judged by keywords: not the "
        "score of mergebench_wildguardtest, and left out"
    )
    found = json.loads(Path("m.json").read_text())
    for name in names[1:]:
        found["results"][name]["score,keyword"] = 0.7
    Path("m.json").write_text(json.dumps(found))
    lines = warnings("m.json", "--reference", "paper", "--metric",
                     f"{names[1]}:score,keyword")  # fmt: skip
    assert (
        "Warning: Safety mixes scores by keyword (mergebench_harmbench) with others "
        "(mergebench_xstest): its mean is of neither kind"
    ) in lines
    assert (
        "Warning: the metric differs between SFT (paper) and m.json: mergebench_harmbench "
        "(score,none and score,keyword)"
    ) in lines


def test_keywords_alone_have_a_table(small: Path) -> None:
    names = [task.name for task in read_benchmark("mergebench_keyword").tasks]
    write_results(Path("m.json"), dict.fromkeys(names, 0.0))
    found = json.loads(Path("m.json").read_text())
    for place, name in enumerate(names):
        found["results"][name] = {"score,keyword": (place + 1) / 10}
    Path("m.json").write_text(json.dumps(found))
    text = run("m.json")
    assert text.startswith("Safety judged by keywords, not MergeBench's scores\n")
    assert re.search(r"Safety +25.00\n  WildGuardTest +10.00\n", text)
    hint = "judged by keywords, not MergeBench's scores"
    error = run("m.json", "--benchmark", "mergebench", code=1)
    assert error.endswith(f", {hint}: table them with --benchmark mergebench_keyword\n")
    assert hint in run("m.json", "--reference", "paper", code=1)
    # beside judged ones they are left out
    assert find_benchmark([*names, "mergebench_gsm8k"]).name == "mergebench"
    with pytest.raises(UserError, match="more than one benchmark"):
        find_benchmark([*names, "mini_math_add"])


def test_another_metric(small: Path) -> None:
    found = json.loads(Path("ta/m/results_2026-01-02T03-04-05.678.json").read_text())
    found["results"]["run"]["strict,none"] = 0.1
    Path("m.json").write_text(json.dumps(found))
    assert re.search(r"Run +10.00\n", run("m.json", "--benchmark", "small.yml",
                                          "--metric", "run:strict,none"))  # fmt: skip


def test_an_earlier_table_is_a_reference(small: Path) -> None:
    run("ta", "--base", "base", *SMALL_OPTIONS, "--out", "out", "--radar", "none")
    saved = ("--benchmark", "small.yml", "--reference", "out/scores.json")
    text = run("ae", *saved, "--show-reference")
    heads = re.split(" {2,}", text.splitlines()[1])
    assert heads[-3:] == ["ae", "base (scores)", "ta (scores)"]
    assert "specialists (scores)" in text
    assert re.search(r"Average normalized accuracy +100.00 +65.00 +20.00 +60.00 ± 3.31", text)
    # the settings of then are compared with those of now
    write_results(Path("ae/results_a.json"), {"run": 0.4}, **{"n-shot": {"run": 5}})
    assert warnings("ae", *saved) == [
        "Warning: n-shot differs between sft/results_a.json and ae/results_a.json: run (0 and 5)"
    ]


def test_what_is_no_result_file_in_a_folder_is_told(small: Path) -> None:
    Path("ta/results_gone.json").symlink_to("nowhere")
    Path("ta/results_x.json").mkdir()
    Path("ta/results.json").write_text('{"accuracy": 0.5}')
    assert warnings("ta", *SMALL_OPTIONS) == [
        "Warning: ta/results.json is not a result file of lm_eval; skipped",
        "Warning: ta/results_gone.json is not a file; skipped",
        "Warning: ta/results_x.json is not a file; skipped",
    ]
    for path in Path("ta").rglob("results_2*"):
        path.unlink()
    error = run("ta", *SMALL_OPTIONS, code=1)
    assert error.startswith("Error: ta: no results of lm_eval in this folder: expected results_")
    assert "ta/results.json, ta/results_gone.json, ta/results_x.json are none" in error
    Path("ta/results_x.json").rmdir()
    Path("ta/results_x.json").write_text('{"results": {"add"')
    assert "ta/results_x.json is not a whole JSON file" in run("ta", *SMALL_OPTIONS, code=1)


def test_a_limit_of_any_kind(small: Path) -> None:
    for limit, shown in ((8, "8"), (0.5, "0.5"), ("8", "8"), (10**400, "inf")):
        config = {"limit": limit}
        write_results(Path("g.json"), {"run": 0.4}, config=config, **{"n-samples": {}})
        assert read_results("g.json").tasks["run"].origin.limited == f"--limit {shown}"


# ----------------------------------------------------------------------------------------- mistakes


def test_mistakes_are_one_line(small: Path) -> None:
    good = write_results(Path("good.json"), {"add": 0.5})
    files = {
        "cut.json": good.read_text()[:-40],
        "list.json": "[1]",
        "model.json": '{"architectures": []}',
        "bare.json": '{"results": {"add": 0.5}}',
        "version.yml": SMALL.replace("version: 1", "version: 2"),
        "typo.yml": SMALL.replace("label: Math", "lable: Math"),
        "twice.yml": SMALL.replace("name: sub", "name: add"),
        "deep.json": "[" * 10**6,
        "deep.yml": "[" * 10**4,
        "empty.yml": SMALL.replace('[{name: run, label: "Run"}]', "[]"),
    }
    for name, text in files.items():
        Path(name).write_text(text)
    Path("empty").mkdir()
    Path("binary.json").write_bytes(b"\xff\xfe\x00")
    for name, date in (("nan", float("nan")), ("huge", 10**400), ("text", "May")):
        write_results(Path(f"date-{name}.json"), {"add": 0.5}, date=date)  # type: ignore[arg-type]
    write_results(Path("huge.json"), {"add": 10**400})
    write_results(Path("nan.json"), {"add": float("nan")})
    write_results(Path("big.json"), {"add": 37.5})
    less = {"higher_is_better": {"add": {"score": False}}}
    write_results(Path("less.json"), {"add": 0.5}, **less)
    bench, two = ("--benchmark", "small.yml"), ("ta", "--specialist")
    expected: dict[tuple[str, ...], str] = {
        (): "nothing to score: name result files",
        ("nope",): "nope: No such file or directory; expected a result file",
        ("empty",): "empty: no results of lm_eval in this folder: expected results_",
        ("cut.json",): "cut.json is not a whole JSON file (.*): .*run lm_eval again",
        ("binary.json",): "binary.json is not a whole JSON file",
        ("list.json",): "list.json is not a result file of lm_eval: it has no `results`",
        ("model.json",): "model.json is not a result file of lm_eval",
        ("bare.json",): "bare.json is not a result file of lm_eval",
        ("model.json", *bench): "has no `results`; expected what `lm_eval --output_path` writes$",
        ("deep.json",): "deep.json is not a whole JSON file .nested too deeply.: expected",
        ("date-nan.json",): "date-nan.json: `date` is nan: expected seconds",
        ("date-huge.json",): "date-huge.json: `date` is 1000.*: expected seconds",
        ("date-text.json",): "date-text.json: `date` is 'May': expected seconds",
        ("huge.json", *bench): "huge.json: add has `score,none` = inf: expected a share in",
        ("",): "an empty PATH: name a result file of lm_eval, or a folder of them",
        ("ta", "--base", "", *bench): "an empty PATH",
        (*two, "", *bench): "an empty PATH",
        ("ta", *bench, "--out", ""): "--out is empty: name a folder",
        ("=ta",): "=ta: expected NAME=PATH, or a path",
        ("x=",): "x=: expected NAME=PATH, or a path",
        ("ta",): "belong to no known benchmark .add, sub, run.: say which with --benchmark",
        ("ta", "--benchmark", "minni"): "expected mergebench, mergebench_keyword, mini, or a YAML",
        ("ta", "--benchmark", "deep.yml"): "deep.yml cannot be read as a benchmark",
        ("ta", "--benchmark", "mini"): "ta: expected mini_instruction_format, .* found add, sub",
        ("ta", "--benchmark", "version.yml"): "`format_version` is 2, expected 1",
        ("ta", "--benchmark", "typo.yml"): "typo.yml is not a benchmark: `categories.0.l",
        ("ta", "--benchmark", "twice.yml"): "the task add is in it twice",
        ("ta", "--benchmark", "empty.yml"): "each category needs a task",
        ("ta", "--benchmark", "binary.json"): "binary.json cannot be read as a benchmark",
        ("ta", "--benchmark", "list.json"): "list.json is not a benchmark: expected a mapping",
        ("ta", "ta", *bench): "two columns are called ta: give ta another label, LABEL=ta",
        ("base=ta", *bench): "two columns are called base",
        (*two, "maths=sft", *bench): "no such category in small: did you mean math?",
        (*two, "x=sft", *bench): "no such category in small: expected one of math, code",
        (*two, "sft", "--specialist", "ae", *bench): "all categories have already sft",
        (*two, "math=sft", "--specialist", "math=ae", *bench): "math already sft",
        (*two, "code=good.json", *bench): "specialists: expected run in good.json, found add",
        ("nan.json", *bench): "nan.json: add has `score,none` = nan: expected a share in",
        ("big.json", *bench): "big.json: add has `score,none` = 37.5: expected a share in",
        ("less.json", *bench): "of which less is better: choose another with --metric add:",
        ("ta", *bench, "--metric", "add:acc,none"): "add has no `acc,none`: it has `score,none`;",
        ("ta", *bench, "--metric", "ad:acc,none"): "--metric ad: no such task in small: did you",
        ("ta", *bench, "--metric", "add:acc"): "expected TASK:METRIC,FILTER",
        ("ta", *bench, "--reference", "paper"): "reference paper is of mergebench, and the table",
        ("ta", *bench, "--reference", "nope"): "nope: No such file or directory; expected a ref",
        ("ta", *bench, "--show-reference"): "--show-reference needs --reference",
        ("ta", *bench, "--out", "good.json"): "cannot write good.json: it is a file; name a folder",
    }
    for words, line in expected.items():
        found = run(*words, code=1)
        assert re.search(line, found), (words, found)


def test_references_that_are_none(small: Path) -> None:
    run("ta", *SMALL_OPTIONS, "--out", "out", "--radar", "none")
    whole = json.loads(Path("out/scores.json").read_text())
    options = ("ae", "--benchmark", "small.yml", "--reference", "r.json")
    for change, line in (
        ({"format_version": 2}, "`format_version` is 2, expected 1"),
        ({"columns": [whole["columns"][1]]}, "the reference r has no specialists"),
        ({"columns": [{"label": "a", "kind": "best", "tasks": {}}]}, "`columns.0.kind`"),
        ({"columns": [whole["columns"][0] | {"tasks": {"ad": 1.0}}]}, "no task ad in small: did"),
    ):
        Path("r.json").write_text(json.dumps(whole | change))
        assert line in run(*options, code=1)


def test_without_matplotlib(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    options = ("ta", *SMALL_OPTIONS, "--out", "out")
    assert "pip install 'tvb-mergekit[plot]', or give --radar none" in run(*options, code=1)
    assert not Path("out").exists()
    run(*options, "--radar", "none")
    assert sorted(p.name for p in Path("out").iterdir()) == ["scores.json", "scores.md"]


def test_two_benchmarks_in_one_folder() -> None:
    with pytest.raises(UserError, match="more than one benchmark"):
        find_benchmark(["mini_math_add", "mergebench_gsm8k"])
    assert find_benchmark(["other", "mini_math_add"]).name == "mini"


# -------------------------------------------------------------------------------------------- shown


def test_as_a_user_types(small: Path) -> None:
    pytest.importorskip("matplotlib")
    words = [str(TVB), "score", "TA=ta", "A|E*=ae", "--base", "base", *SMALL_OPTIONS]
    env = os.environ | {"COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    kept = []
    for out in ("one", "two"):
        done = subprocess.run([*words, "--out", out], env=env, capture_output=True, text=True)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        kept.append({path.name: path.read_bytes() for path in Path(out).iterdir()})
    assert kept[0] == kept[1]
    assert sorted(kept[0]) == ["radar.png", "radar.svg", "scores.json", "scores.md"]
    assert done.stdout.splitlines() == [
        "Small",
        "                              base   specialists            TA   A|E*",
        "Math                         10.00  60.00 ± 2.50  40.00 ± 2.50  35.00",
        "  Add                        10.00  60.00 ± 3.00  50.00 ± 4.00  30.00",
        "  Sub                        10.00  60.00 ± 4.00  30.00 ± 3.00  40.00",
        "Code                         10.00  40.00 ± 2.00  20.00 ± 1.00  30.00",
        "  Run                        10.00  40.00 ± 2.00  20.00 ± 1.00  30.00",
        "Average normalized accuracy  20.00        100.00  60.00 ± 3.31  65.00",
        "",
        "Written to two",
    ]
    lines = kept[0]["scores.md"].decode().splitlines()
    assert lines[2:12] == [
        "| Category                      | Task   |  base |  specialists |               TA |    A\\|E\\* |",  # noqa: E501
        "| ----------------------------- | ------ | ----: | -----------: | ---------------: | --------: |",  # noqa: E501
        "| Math                          | Add    | 10.00 | 60.00 ± 3.00 | **50.00 ± 4.00** |     30.00 |",  # noqa: E501
        "| Math                          | Sub    | 10.00 | 60.00 ± 4.00 |     30.00 ± 3.00 | **40.00** |",  # noqa: E501
        "| *Math*                        | *mean* | 10.00 | 60.00 ± 2.50 | **40.00 ± 2.50** |     35.00 |",  # noqa: E501
        "| Code                          | Run    | 10.00 | 40.00 ± 2.00 |     20.00 ± 1.00 | **30.00** |",  # noqa: E501
        "| *Code*                        | *mean* | 10.00 | 40.00 ± 2.00 |     20.00 ± 1.00 | **30.00** |",  # noqa: E501
        "| *Average normalized accuracy* |        | 20.00 |       100.00 |     60.00 ± 3.31 | **65.00** |",  # noqa: E501
        "",
        lines[11],
    ]
    assert lines[11].endswith("The best of the models is bold.")
    found = json.loads(kept[0]["scores.json"])
    assert found["format_version"] == 1 and found["partial"] is False
    assert [column["kind"] for column in found["columns"]] == [
        "base", "specialists", "model", "model"]  # fmt: skip
    ta = found["columns"][2]
    assert ta["categories"]["code"] == {"value": 20.0, "stderr": 1.0}
    entry = ta["tasks"]["add"]
    assert (entry["value"], entry["stderr"], entry["metric"]) == (50.0, 4.0, "score,none")
    assert entry["origin"]["file"] == "ta/m/results_2026-01-02T03-04-05.678.json"


@pytest.mark.parametrize("width", [30, 80, 300])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_number_is_cut(width: int, encoding: str) -> None:
    benchmark = read_benchmark("mergebench")
    paper = read_reference("paper", benchmark)
    found = table(benchmark, {}, reference=paper, show_reference=True)
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="")
    print_table(found, Console(file=file, width=width))
    file.flush()
    text = raw.getvalue().decode(encoding)
    for column in paper.columns:
        for entry in column.entries.values():
            assert f" {entry.value:.2f}" in text
    heads = sum("(paper)" in line for line in text.splitlines())
    assert heads == {30: 5, 80: 2, 300: 1}[width]
    if width == 80:
        assert max(map(len, text.splitlines())) <= 80


def test_one_model_is_not_the_best(small: Path) -> None:
    run("ta", *SMALL_OPTIONS, "--out", "out", "--radar", "none")
    assert "**" not in Path("out/scores.md").read_text()
    # what prints alike is best alike
    write_results(Path("one.json"), {"run": 0.30001})
    run("one.json", "ae", *SMALL_OPTIONS, "--out", "out", "--radar", "none")
    text = Path("out/scores.md").read_text()
    assert re.search(r"Run .*\*\*30.00\*\* \| +\*\*30.00\*\* \|", text)


@pytest.mark.parametrize("by", ["tasks", "categories"])
def test_the_radar_plot(small: Path, by: str) -> None:
    pytest.importorskip("matplotlib")
    write_results(Path("high.json"), {"add": 0.5, "sub": 0.5, "run": 0.9})
    run("$x$=ta", "high.json", *SMALL_OPTIONS, "--radar", by, "--out", "out")
    text = Path("out/radar.svg").read_text()
    ElementTree.fromstring(text)
    axes = ("Add", "Sub", "Run") if by == "tasks" else ("Math", "Code")
    said = [*axes, "$x$: 60.00", "high: 140.00", "specialists: 100"]
    # 0.9 of 0.4 is 225 %
    said += ["Small: percent of the specialists' scores; what is above 200 is drawn at 200"]
    for line in said:
        assert f"<!-- {line} -->" in text
    assert ("<!-- Add -->" in text) == (by == "tasks")
    assert "<!-- 200 -->" in text and "<!-- 240 -->" not in text
