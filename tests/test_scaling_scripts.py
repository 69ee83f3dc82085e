"""The benchmarks of scale run on tiny models: evals/speed/{authors,memory,scaling}.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import recipe, tvb, write
from speed_modules import module, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks need Linux")


def test_models_from_few_versions_of_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    models = module("models")
    models.generate(tmp_path / "a", 9, 1, 0, "float32", versions=2)
    assert models.whole(tmp_path / "a")
    made = set()
    for task in range(9):
        files = sorted((tmp_path / "a" / f"task-{task}").glob("*.safetensors"))
        assert len(files) == 4  # three layers, and the rest
        made.add(tuple(file.stat().st_ino for file in files))
    assert len(made) == 9  # no two alike
    assert len({inode for inodes in made for inode in inodes}) <= 2 * len(files)
    models.generate(tmp_path / "b", 1, 1, 0, shape=(64, 500, 1))
    config = json.loads((tmp_path / "b" / "task-0" / "config.json").read_text())
    assert (config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]) == (
        64,
        500,
        1,
    )
    assert config["tie_word_embeddings"]
    with pytest.raises(Exception, match="take more --versions"):
        models.generate(tmp_path / "c", 9, 1, 0, versions=1)
    with pytest.raises(SystemExit, match="1"):  # in a process of its own
        models.ensure(tmp_path, 9, 1, versions=1)
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "make 1 different models, not 9" in said


@pytest.mark.parametrize("form", ["dicts", "matrix"])
def test_the_procedure_and_build_give_one_result(
    form: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    procedure = module("authors_procedure")
    monkeypatch.setattr(procedure, "STEPS", 300)
    monkeypatch.setattr(procedure, "ROWS", 1000)  # several chunks
    module("models").generate(tmp_path / "in", 4, 1, 0, "float32")
    base, *models = [tmp_path / "in" / name for name in ("base", *(f"task-{i}" for i in range(4)))]
    procedure.main(form, 2, tmp_path / "plain", base, models)
    told = json.loads(capsys.readouterr().out)
    assert list(told) == ["load", "gram", "encode", "combine", "save"]
    made = recipe("basis_ta", base, models, num_bases=2, steps=300)
    tvb("build", write(made, tmp_path / "store"), tmp_path / "store", "--quiet")
    distance = module("same").distance
    for index in range(2):
        plain = tmp_path / "plain" / f"basis-{index}.safetensors"
        assert distance(tmp_path / "store" / f"basis-{index:03d}", plain) < 1e-4
    other = tmp_path / "plain" / "basis-1.safetensors"
    assert distance(tmp_path / "store" / "basis-000", other) > 1e-2


def test_hours_follow_from_the_rates(tmp_path: Path) -> None:
    d, cores, touch, multiply, combine = 10**8, 2, 1e-9, 2e-11, 3e-9
    rows = []
    for tasks in (8, 16, 72):
        gram = d / cores * (touch * (tasks + 1) + multiply * tasks**2)
        phases = {"gram": gram, "write": d / cores * combine * (tasks + 1)}
        row: dict[str, Any] = {"models": "m", "memory": "1GB", "tasks": tasks, "phases": phases}
        rows.append(row | {"num_parameters": d, "cores": cores})
    file = tmp_path / "memory.json"
    file.write_text(json.dumps({"runs": rows}))
    told = run("scaling.py", file)
    assert "1.000 ns to touch" in told and "20.00 ps a product (100 Gflop/s)" in told
    assert "3.000 ns in the second pass" in told and "From T = 50 on" in told
    line = next(
        line for line in told.splitlines() if line.startswith("| 72 x 8B, M = 4 | cloud, 1 H100")
    )
    nbytes = 2 * 8e9 * 73
    assert f"| {nbytes / 1e12:.2f} | {nbytes / 5e9 / 3600:.2f} (disk) |" in line


@pytest.mark.slow
def test_a_small_comparison_with_the_procedure(tmp_path: Path) -> None:
    words = "--tasks 3 --bases 2 --megabytes 2 --rounds 1 --warm-up 0 --memory 250MB --only ae"
    more = ["--only", "library, ae", "--threads", 1, "--work", tmp_path]
    shown = run("authors.py", *words.split(), *more)
    result = json.loads((tmp_path / "authors.json").read_text())
    merges = [run for run in result["runs"] if run["what"] == "merge"]
    for ours, theirs in (merges[:2], merges[2:]):
        assert ours["distance"] < 1e-3 and ours["output_mb"] == pytest.approx(4, rel=0.1)
        assert theirs["output_mb"] == pytest.approx(ours["output_mb"], rel=0.01)
        assert {"gram", "encode", "write"} <= ours["phases"].keys()
        assert ours["net_s"] < ours["wall_s"]
    assert {"ours", "library", "mergekit"} == result["start_up_s"].keys()
    assert "| ae, 250MB | warm | `procedure, dicts` |" in shown
    assert "| library, ae | warm | `tvb_mergekit.build` |" in shown
    assert shown.strip() == (tmp_path / "authors.md").read_text().strip()
    assert not list(tmp_path.glob("models-*")) and not list(tmp_path.glob("run-*"))


@pytest.mark.slow
def test_a_small_measurement_of_memory(tmp_path: Path) -> None:
    words = ["--tasks", 3, "--tasks", 4, "--bases", 2, "--memory", "100MB", "--shape", 64, 500, 2]
    shown = run("memory.py", *words, "--threads", 1, "--work", tmp_path, "--keep")
    rows = json.loads((tmp_path / "memory.json").read_text())["runs"]
    assert [row["tasks"] for row in rows] == [3, 4]
    assert all(row["peak_rss_mb"] > row["peak_rss_anon_mb"] > 100 for row in rows)
    assert "| 64x500x2 bfloat16, warm | 100MB | 4 | 2 |" in shown
    assert "MB T | " in shown and "s (T + 1)" in shown
    again = run("memory.py", *words, "--threads", 1, "--work", tmp_path)
    assert json.loads((tmp_path / "memory.json").read_text())["runs"] == rows
    assert again == shown


@pytest.mark.parametrize("script", ["authors.py", "memory.py", "scaling.py"])
def test_help_has_an_example(script: str) -> None:
    assert f"Example: python evals/speed/{script}" in run(script, "--help")


def test_the_gram_pass_beside_a_read(tmp_path: Path) -> None:
    said = run("gram.py", "--tasks", 2, "--megabytes", 1, "--rounds", 2, "--work", tmp_path)
    *_, head, _line, row = said.strip().splitlines()
    assert head == "| read, GB/s | Gram, GB/s | read again, GB/s | ratio |"
    read, speed, _again, ratio = (float(cell.split()[0]) for cell in row.strip("| ").split(" | "))
    assert read > 0 and speed > 0 and ratio > 0
    assert not list(tmp_path.glob("models-*"))
