"""The benchmarks of evals/speed run on tiny models and write what they promise."""

import json
import subprocess
import sys
from pathlib import Path

import models
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks need Linux")


def measured(script: str, options: str, work: Path) -> str:
    command = [sys.executable, Path(models.__file__).with_name(script), "--work", work]
    words = ["--tasks", "2", "--megabytes", "2", "--rounds", "1", *options.split()]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_whole_comparison(tmp_path: Path) -> None:
    said = measured("compare.py", "--only addition --only store --keep", tmp_path)
    assert (tmp_path / "results.md").read_text().strip() == said.strip()
    rows = [line.split(" | ") for line in said.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [
        "| `basis_ta` (addition)", "| `task_arithmetic` (addition)",
        "| `tvb merge` of a lossless store", "| `tvb merge` of its models",
    ]  # fmt: skip
    assert all(float(row[1]) > float(row[2]) and float(row[3]) > 50 for row in rows)
    assert "million parameters a second" in said
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["models-2x2MB-seed0-v2"]


@pytest.mark.slow
def test_every_row_of_a_device(tmp_path: Path) -> None:
    """On the CPU, where the second round counts."""
    said = measured("device.py", "--device cpu --minutes 15", tmp_path)
    made = json.loads((tmp_path / "device.json").read_text())
    assert len(made["seconds"]) == 12 and all(runs for runs in made["seconds"].values())
    assert made["stages"]["G, relative difference from the CPU"] == 0
    assert all(value > 0 for value in made["live"].values())
    assert all(f"| {title} |" in said for title in made["seconds"])
