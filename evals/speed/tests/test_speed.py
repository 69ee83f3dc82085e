"""The benchmark of evals/speed runs on tiny models and writes what it promises."""

import json
import subprocess
import sys
from pathlib import Path

import models
import pytest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark needs Linux")
def test_every_row_on_a_cpu(tmp_path: Path) -> None:
    """On the CPU, where the second round counts."""
    command = [sys.executable, Path(models.__file__).with_name("device.py"), "--work", tmp_path]
    words = "--tasks 2 --megabytes 2 --rounds 1 --device cpu --minutes 15".split()
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "device.json").read_text())
    assert len(made["seconds"]) == 14 and all(runs for runs in made["seconds"].values())
    assert made["stages"]["G, relative difference from the CPU"] == 0
    assert all(value > 0 for value in made["live"].values())
    rows = {line.split(" | ")[0]: line for line in done.stdout.splitlines() if "| " in line}
    assert all(f"| {title}" in rows for title in made["seconds"])
    assert rows["| TIES, cpu"].count(" to ") == 2 and not rows["| WUDI, cpu"].count(" to ")
