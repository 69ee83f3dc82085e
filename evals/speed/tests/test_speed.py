"""The benchmarks of evals/speed run on tiny models and write what they promise."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import models
import pytest
import scaling

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks need Linux")
SPEED = Path(models.__file__).parent


def test_models_come_from_the_seed_and_are_written_once(tmp_path: Path) -> None:
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        models.generate(tmp_path / folder, 2, 2, seed)
    file = tmp_path / "a" / "task-1" / "model.safetensors"
    written = file.read_bytes()
    assert written == (tmp_path / "b" / "task-1" / "model.safetensors").read_bytes()
    for other in ("c/task-1", "a/task-0"):
        assert written != (tmp_path / other / "model.safetensors").read_bytes()
    assert 1.8e6 < len(written) < 2.2e6
    assert not list(tmp_path.glob("*.part"))
    assert models.whole(tmp_path / "a")
    file.write_bytes(written[:-1])
    assert not models.whole(tmp_path / "a") and not models.whole(tmp_path / "none")
    for megabytes in (2, 10, 100, 500, 8000):
        shapes = dict(models.shapes(*models.architecture(megabytes)))
        size = sum(2 * math.prod(shape) for shape in shapes.values()) / 1e6
        assert size == pytest.approx(megabytes, rel=0.05)


@pytest.mark.slow
def test_a_whole_comparison(tmp_path: Path) -> None:
    options = "--tasks 2 --megabytes 2 --rounds 1 --warm-up 0 --threads 1 --only addition --keep"
    command = [sys.executable, SPEED / "compare.py", *options.split(), "--work", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = done.stdout
    result = json.loads((tmp_path / "results.json").read_text())
    size = result["settings"]["input_bytes"]
    assert 5e6 < size < 7e6 and result["machine"]["cores"] >= 1
    runs = [run for run in result["runs"] if run["what"] != "start-up"]
    kinds = [(run["cache"], run["method"]) for run in runs]
    methods = ("basis_ta", "task_arithmetic")
    assert kinds == [(state, method) for state in ("warm", "cold") for method in methods]
    for child in result["runs"]:
        assert child["wall_s"] > 0 and child["cpu_s"] > 0 and child["peak_rss_mb"] > 10
        assert child["cache"] != "warm" or child["resident_before"] == 1
        if child["cache"] == "cold" and child["resident_before"] == 0:
            assert child["read_mb"] > 0.9 * size / 1e6
        if child.get("method") == "basis_ta":
            assert {"merge"} == child["phases"].keys()
    assert [row["cache"] for row in result["ratios"]] == ["warm", "cold"]
    for row in result["ratios"]:
        for key in ("wall_s", "cpu_s", "peak_rss_mb", "peak_rss_anon_mb"):
            assert 0 < row[key]["min"] <= row[key]["median"] <= row[key]["max"]
    assert (tmp_path / "results.md").read_text().strip() == shown.strip()
    assert "| addition | cold | `basis_ta` |" in shown
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {".gitignore", "models-2x2MB-seed0-v2", "results.json", "results.md"}


def test_the_table_on_paper_is_that_of_its_model() -> None:
    text = (SPEED / "SCALING.md").read_text()
    rows = text[text.index("| machine | one pass, s") :].splitlines()[2:7]
    for machine, row in zip(scaling.MACHINES, rows, strict=True):
        found = [
            scaling.row(machine, [scaling.read_pass(machine, *kind) for kind in kinds])
            for kinds in ([(True, True)], [(True, False), (False, True)])
        ]
        assert [each.split(" | ")[1] for each in found] == row.split(" | ")[1:3]
        for name, seconds in re.findall(r"(CPU|PCIe|NVMe write)s?, (\d+)", row):
            assert f"{name} {seconds}" in found[0]
