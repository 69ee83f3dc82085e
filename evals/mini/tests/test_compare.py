"""evals/mini/compare.py: all of `tiny`, as typed, which takes minutes (slow); each kind of cell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

COMPARE = Path(__file__).resolve().parent.parent / "compare.py"
ENV = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def command(out: Path, *options: str) -> list[str]:
    return [sys.executable, str(COMPARE), "--out", str(out), "--device", "cpu", *options]


def run_in(out: Path, *options: str, code: int = 0) -> str:
    """The output of the command."""
    done = subprocess.run(
        command(out, *options), env=ENV, cwd=out, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == code, done.stderr[-4000:]
    return done.stdout + done.stderr if code else done.stdout


def times(out: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in out.glob("*/cells/*/*.json")}


def average(scores: dict[str, float]) -> float:
    return sum(scores.values()) / len(scores)


@pytest.mark.slow
def test_the_whole_comparison(mini: SimpleNamespace, tmp_path: Path) -> None:
    """Specialists can do their task, the base cannot; what is finished is not computed again."""
    out = tmp_path / "out"
    out.mkdir()
    written = run_in(out, "--preset", "tiny").split()
    records = [json.loads(file.read_text()) for file in times(out)]

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

    report = out / "report-tiny"
    assert {str(path) for path in report.iterdir()} == set(written)
    before, tables = times(out), (report / "compare.md").read_bytes()
    (picked,) = (file for file in before if file.name.startswith("online-magmax"))
    result = json.loads(picked.read_text())["result"]
    picked.unlink()
    run_in(out, "--preset", "tiny")
    after = times(out)
    assert {file for file in after if after[file] != before.get(file)} == {picked}
    assert json.loads(picked.read_text())["result"] == result
    run_in(out, "--preset", "tiny", "--as-is", "--report", str(tmp_path / "r"))
    for folder in (report, tmp_path / "r"):
        assert (folder / "compare.md").read_bytes() == tables
    assert times(out) == after
    assert "has no results of micro" in run_in(out, "--preset", "micro", "--as-is", code=1)


def test_results_are_of_one_definition(mini: SimpleNamespace, tmp_path: Path) -> None:
    """Another cell, other weights: another file."""
    from study.cells import Source, fingerprint, works

    cell = next(mini.plan.cells(mini.plan.PLANS["micro"], 0.3))
    cells = [cell, cell | {"items": 11}, cell | {"seed": 1}]
    prints = set()
    for content in (b"a", b"b"):
        (tmp_path / "model.safetensors").write_bytes(content)
        prints.add(fingerprint([tmp_path]))
    files = {
        work.file
        for models in prints
        for source in [Source(dict, (), tmp_path, models, "cpu", ("micro", "full", 0))]
        for work in works(source, cells, mini.kinds.KINDS, mini.plan.KEYS)
    }
    assert len(files) == 6


@pytest.mark.parametrize("which", [
    "addition balanced ta", "addition ae_exact_mixed ta", "negation balanced ", "online ae ",
    "online rand_select ", "online magmax ", "transfer pca_turned ", "transfer finetune ",
])  # fmt: skip
def test_each_kind_of_cell_is_measured(mini: SimpleNamespace, run: Any, which: str) -> None:
    kind, label, merge = which.split(" ")
    plan = mini.plan.PLANS["micro"]
    (cell, *_) = (c for c in mini.plan.cells(plan, 0.3)
                  if c["kind"] == kind and label in (c.get("basis"), c.get("how")))  # fmt: skip
    found = mini.kinds.KINDS[kind](run, cell)
    scores = found["merges"][merge]["scales"]["tasks"]["test"] if merge else found
    assert json.loads(json.dumps(found, allow_nan=False)) and len(scores) > 0
