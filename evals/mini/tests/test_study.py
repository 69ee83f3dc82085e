"""evals/mini/study.py: every part on `micro`, `tiny` as typed (slow), cells and controls."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mini.study
import pytest
import study.kinds
import torch
from click.testing import CliRunner
from study.cells import Source, fingerprint, works

import tvb_mergekit

ENV = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
UP = "model.layers.0.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
SHOTS = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Models that learned nothing, for statements that hold for any weights."""
    folder, _ = mini.train.train_run("micro", "full", 0, tmp_path_factory.mktemp("micro"), "cpu")
    return mini.runs.Run(folder, "full")


def times(out: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in out.glob("*/cells/*/*.json")}


@pytest.mark.filterwarnings("ignore:.*gets no bits beside larger vectors")
def test_the_study(few_steps, monkeypatch, tmp_path):
    """Every part, on four tasks and a few cells of each: done once, resumed, and all tables."""
    tasks = {name: mini.data.TASKS[name] for name in [*mini.data.TASKS][1:8:2]}
    monkeypatch.setattr(mini.data, "TASKS", tasks)
    few = {"T": 4, "HALF": 2, "BASES": ("ae_adam_5",), "AT_T": (), "MATRICES": ("balanced",),
           "LEARNED": ("pca",), "SPANS": ("pca",), "ZOOS": (2,), "STORED": ("balanced_2",),
           "OTHERS": ("tvq_2",), "SINGLE": ("opcm",)}  # fmt: skip
    for name, value in few.items():
        monkeypatch.setattr(mini.plan, name, value)
    size = mini.plan.Plan((2,), 8, 8, 1, (2,), (2,), 1, (4,), 4)
    monkeypatch.setitem(mini.plan.PLANS, "micro", size)
    ways = study.kinds.learned.WAYS
    monkeypatch.setattr(study.kinds.learned, "WAYS", {how: ways[how] for how in ("ta", "regmean")})
    monkeypatch.setattr(study.kinds.negation, "GRID", study.kinds.negation.GRID[::5])

    def command(*more: str, code: int = 0) -> str:
        words = ["--preset", "micro", "--out", str(tmp_path), "--device", "cpu", *more]
        done = CliRunner().invoke(mini.study.main, words)
        assert done.exit_code == code, done.output
        return str(done.output if code else done.stdout)

    assert "has no results of micro" in command("--as-is", code=1)
    report = [Path(line) for line in command().splitlines()]
    assert {*report} == {*(tmp_path / "report-micro").iterdir()}
    tables = report[-1].read_text()
    for title in ("specialist", "Addition, TIES", "WUDI", "RegMean", "2 bits", "TVQ, 2 bits",
                  "OPCM", "gradient ascent", "no budget", "pca, made orthogonal"):  # fmt: skip
        assert title in tables, title
    shipped = json.loads(report[0].read_text())["cells"]
    assert {r["cell"]["kind"] for r in shipped} == study.kinds.KINDS.keys() - {"theirs", "theory"}
    learned = [(r["cell"], r["result"]) for r in shipped if r["cell"]["kind"] == "learned"]
    for cell, result in learned:
        items = cell["num_bases"] * SHOTS  # half of the bases have half of the examples
        passes = items * (19 if cell["how"] == "ta" else 1)  # one for each lambda
        assert result["items"] == items and result["lambda"] >= 0.04
        assert result["passes"] == {"forward": passes, "backward": 0}
    assert {cell["num_bases"] for cell, _ in learned} == {2, 3, 4}
    assert " 0 of " in command("--bill") and ", unknown time" not in command("--bill")
    before = times(tmp_path)
    other, picked = (file for file in sorted(before)
                     if file.name.startswith(("online-continual_ta", "online-magmax")))  # fmt: skip
    result = json.loads(picked.read_text())["result"]
    for file in (picked, other):
        file.unlink()
    command("--part", "online", "--only", "online-magmax-*")
    assert picked.exists() and not other.exists()
    command("--part", "online")
    after = times(tmp_path)
    assert {file for file in after if after[file] != before.get(file)} == {picked, other}
    assert json.loads(picked.read_text())["result"] == result
    command("--as-is")
    assert report[-1].read_text() == tables and times(tmp_path) == after


def average(scores: dict[str, float]) -> float:
    return sum(scores.values()) / len(scores)


@pytest.mark.slow
def test_tiny_models_learn_what_merges_lose(tmp_path: Path) -> None:
    """Specialists can do their task, the base cannot, and a forgotten task is forgotten."""
    command = [sys.executable, mini.study.__file__, "--part", "negation", "--device", "cpu"]
    done = subprocess.run([*command, "--out", "out"], env=ENV, cwd=tmp_path, capture_output=True,
                          text=True, timeout=1500)  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    records = [json.loads(file.read_text()) for file in times(tmp_path / "out")]

    def one(**cell: Any) -> Any:
        (result,) = (r["result"] for r in records if cell.items() <= r["cell"].items())
        return result

    reference = one(kind="reference")
    own = reference["specialists"]
    assert set(own) == set(mini.data.TASKS) and min(own.values()) > 0.9
    assert average({task: reference["base"][task] for task in own}) < 0.4 * average(own)
    added = one(kind="addition", basis="none")["merges"]["ta"]["scales"]["bases"]
    assert 0.6 < average(added["test"]) / average(own) < 0.9
    assert max(added["validation"]) == added["validation"][added["grid"].index(added["lambda"])]
    forgotten = one(kind="negation", basis="plain")
    for task, scores in forgotten["tasks"].items():
        fallen = forgotten["start"][task] - scores["target"]
        assert fallen > max(0.0, scores["control_before"] - scores["control"]), task


def test_results_are_of_one_definition(tmp_path: Path) -> None:
    """Another cell, other weights: another file."""
    cell = mini.plan.reference(mini.plan.PLANS["micro"])[1]
    cells = [cell, cell | {"items": 11}, cell | {"seed": 1}]
    prints = set()
    for content in (b"a", b"b"):
        (tmp_path / "model.safetensors").write_bytes(content)
        prints.add(fingerprint([tmp_path]))
    files = {
        work.file
        for models in prints
        for source in [Source(dict, (), tmp_path, models, "cpu", ("micro", "full", 0))]
        for work in works(source, cells, study.kinds.KINDS)
    }
    assert len(files) == 6


def mean_of(run: Any, name: str) -> torch.Tensor:
    return torch.stack([run.task_vector(task)[name] for task in run.tasks]).mean(0)


def test_directions(run: Any) -> None:
    direction = study.kinds.matrices.direction
    every = tvb_mergekit.build(run.base, run.models, basis="none")
    of = {how: direction(run, every, how) for how in study.kinds.matrices.ALL}
    total = 10 * mean_of(run, UP)
    assert torch.allclose(of["ta"][UP], total, atol=1e-6)
    assert torch.equal(of["ta_matrices"][UP], of["ta"][UP])
    ratio = of["ta_lengths"][UP] / total
    assert torch.allclose(ratio, ratio.mean(), rtol=1e-2) and not math.isclose(ratio.mean(), 1)
    norms = [float(torch.linalg.norm(of[how][UP])) for how in ("ta_lengths", "iso")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert torch.equal(of["wudi_30_summed"][UP], of["wudi_30"][UP])
    assert torch.equal(of["wudi_30_summed"][EMBEDDING], of["ta"][EMBEDDING])
    assert not of["wudi_30_left_out"][EMBEDDING].any() and of["wudi_30_left_out"][UP].any()
    assert not torch.allclose(of["wudi_30_embedded"][EMBEDDING], mean_of(run, EMBEDDING), atol=1e-4)
    for how in ("iso", "tsvm", "wudi", "wudi_30", "ta_matrices", "ta_lengths"):
        assert torch.allclose(of[how][EMBEDDING], mean_of(run, EMBEDDING), atol=1e-6)


def test_examples_are_those_of_the_training(run, tmp_path):
    files = study.kinds.learned.Data(run, tmp_path, SHOTS)
    assert len(files.drawn(1.0)) == 10 * SHOTS and len(files.drawn(0.5)) == 5 * SHOTS
    doc = run.items("math_add", "validation")[0]
    (trained,) = mini.model.batches(run.tokenizer, iter([(doc["prompt"], doc["answer"])]), 1)
    written = json.loads((tmp_path / "math_add.jsonl").read_text().splitlines()[0])
    ids = run.tokenizer(written["prompt"] + written["response"])["input_ids"]
    assert ids == trained["input_ids"][0].tolist()
