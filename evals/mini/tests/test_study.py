"""evals/mini/study.py: every part on `micro`, `tiny` as typed (slow), cells and controls."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import tvb_mergekit

ENV = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
UP = "model.layers.0.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
SHOTS = 4


def times(out: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in out.glob("*/cells/*/*.json")}


@pytest.mark.filterwarnings("ignore:.*gets no bits beside larger vectors")
def test_the_study(mini: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every part, on a few cells of each: done once, resumed, and all tables."""
    few = {"BASES": ("ae_adam_5",), "AT_T": (), "MATRICES": ("balanced",), "LEARNED": ("pca",),
           "SPANS": ("pca",), "ZOOS": (2,), "STORED": ("balanced_5",), "OTHERS": ("tvq_2",),
           "SINGLE": ("opcm",)}  # fmt: skip
    for name, value in few.items():
        monkeypatch.setattr(mini.plan, name, value)
    autoencoder: Any = importlib.import_module("tvb_mergekit.core.encoders.autoencoder")
    train, ways = autoencoder._train, mini.kinds.learned.WAYS
    monkeypatch.setattr(autoencoder, "_train", lambda gram, count, settings: train(
        gram, count, settings.model_copy(update={"steps": 20})))  # fmt: skip
    monkeypatch.setattr(mini.kinds.learned, "WAYS", {how: ways[how] for how in ("ta", "regmean")})
    monkeypatch.setattr(mini.kinds.negation, "GRID", mini.kinds.negation.GRID[::5])

    def study(*more: str, code: int = 0) -> str:
        words = ["--preset", "micro", "--out", str(tmp_path), "--device", "cpu", *more]
        done = CliRunner().invoke(mini.study.main, words)
        assert done.exit_code == code, done.output
        return str(done.output if code else done.stdout)

    assert "has no results of micro" in study("--as-is", code=1)
    report = [Path(line) for line in study().splitlines()]
    assert {*report} == {*(tmp_path / "report-micro").iterdir()}
    tables = report[-1].read_text()
    for title in ("specialist", "Addition, TIES", "WUDI", "RegMean", "2 bits", "TVQ, 2 bits",
                  "OPCM", "gradient ascent", "no budget", "pca, made orthogonal"):  # fmt: skip
        assert title in tables, title
    shipped = json.loads(report[0].read_text())["cells"]
    assert {r["cell"]["kind"] for r in shipped} == mini.kinds.KINDS.keys() - {"theirs", "theory"}
    assert " 0 of " in study("--bill") and ", unknown time" not in study("--bill")
    before = times(tmp_path)
    other, picked = (file for file in sorted(before)
                     if file.name.startswith(("online-continual_ta", "online-magmax")))  # fmt: skip
    result = json.loads(picked.read_text())["result"]
    for file in (picked, other):
        file.unlink()
    study("--part", "online", "--only", "online-magmax-*")
    assert picked.exists() and not other.exists()
    study("--part", "online")
    after = times(tmp_path)
    assert {file for file in after if after[file] != before.get(file)} == {picked, other}
    assert json.loads(picked.read_text())["result"] == result
    study("--as-is")
    assert report[-1].read_text() == tables and times(tmp_path) == after


def average(scores: dict[str, float]) -> float:
    return sum(scores.values()) / len(scores)


@pytest.mark.slow
def test_tiny_models_learn_what_merges_lose(mini: SimpleNamespace, tmp_path: Path) -> None:
    """Specialists can do their task, the base cannot, and a forgotten task is forgotten."""
    command = [sys.executable, str(mini.path / "study.py"), "--part", "negation", "--device", "cpu"]
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


def test_results_are_of_one_definition(mini: SimpleNamespace, tmp_path: Path) -> None:
    """Another cell, other weights: another file."""
    from study.cells import Source, fingerprint, works

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
        for work in works(source, cells, mini.kinds.KINDS)
    }
    assert len(files) == 6


def mean_of(run: Any, name: str) -> torch.Tensor:
    return torch.stack([run.task_vector(task)[name] for task in run.tasks]).mean(0)


def test_directions(mini: SimpleNamespace, run: Any) -> None:
    direction = mini.kinds.matrices.direction
    every = tvb_mergekit.build(run.base, run.models, basis="none")
    of = {how: direction(run, every, how) for how in mini.kinds.matrices.ALL}
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


def test_examples_are_those_of_the_training(mini, run, tmp_path):
    files = mini.kinds.learned.Data(run, tmp_path, SHOTS)
    assert len(files.drawn(1.0)) == 10 * SHOTS and len(files.drawn(0.5)) == 5 * SHOTS
    doc = run.items("math_add", "validation")[0]
    (trained,) = mini.model.batches(run.tokenizer, iter([(doc["prompt"], doc["answer"])]), 1)
    written = json.loads((tmp_path / "math_add.jsonl").read_text().splitlines()[0])
    ids = run.tokenizer(written["prompt"] + written["response"])["input_ids"]
    assert ids == trained["input_ids"][0].tolist()


def test_cells_of_methods(mini: SimpleNamespace, run: Any) -> None:
    """Half of the bases have half of the examples, and pca a mixture that is not its encoder."""
    wanted = mini.plan.parts(mini.plan.PLANS["micro"], 1.0, 0)["learned"]

    def measured(how: str, label: str, count: int) -> Any:
        (cell,) = (c for c in wanted
                   if (c["how"], c["basis"], c["num_bases"]) == (how, label, count))  # fmt: skip
        return mini.kinds.learned.measure(run, cell)

    for label, count in (("none", 10), ("pca", 5)):
        found = measured("regmean", label, count)
        assert found["passes"]["forward"] == found["items"] == count * SHOTS
    ta = measured("ta", "balanced", 5)
    assert ta["passes"] == {"forward": 19 * 5 * SHOTS, "backward": 0} and 0.04 <= ta["lambda"]
