"""evals/speed/compare.py runs from end to end on tiny models and writes what it promises."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import pytest
from speed_modules import module, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmark needs Linux")


def test_models_come_from_the_seed_and_are_written_once(tmp_path: Path) -> None:
    models = module("models")
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        models.generate(tmp_path / folder, 2, 2, seed)
    file = tmp_path / "a" / "task-1" / "model.safetensors"
    written = file.read_bytes()
    assert written == (tmp_path / "b" / "task-1" / "model.safetensors").read_bytes()
    assert written != (tmp_path / "c" / "task-1" / "model.safetensors").read_bytes()
    assert written != (tmp_path / "a" / "task-0" / "model.safetensors").read_bytes()
    assert 1.8e6 < len(written) < 2.2e6
    assert not list(tmp_path.glob("*.part"))

    assert models.whole(tmp_path / "a")
    file.write_bytes(written[:-1])
    assert not models.whole(tmp_path / "a")
    assert not models.whole(tmp_path / "none")


@pytest.mark.parametrize("megabytes", [2, 10, 100, 500, 8000])
def test_models_have_the_size_asked_for(megabytes: int) -> None:
    models = module("models")
    shapes = dict(models.shapes(*models.architecture(megabytes)))
    size = sum(2 * math.prod(shape) for shape in shapes.values()) / 1e6
    assert size == pytest.approx(megabytes, rel=0.05)


def test_what_a_child_costs(tmp_path: Path) -> None:
    measure = module("measure")
    size = 40 * 10**6
    work = f"import time; a = b'1' * {size}; time.sleep(0.2); print(sum(range(10**6)))"
    usage = measure.run([sys.executable, "-c", work], {}, tmp_path / "log")
    assert 0.2 < usage.wall_s < 60
    assert usage.cpu_s > 0
    assert size / 1e6 < usage.peak_rss_anon_mb <= usage.peak_rss_mb + 1
    assert (tmp_path / "log").read_text() == "499999500000\n"
    with pytest.raises(measure.CommandFailed, match=r"exited with 3\nsorry$"):
        command = [sys.executable, "-c", "print('sorry'); raise SystemExit(3)"]
        measure.run(command, {}, tmp_path / "log")


def test_files_leave_and_enter_the_page_cache(tmp_path: Path) -> None:
    measure = module("measure")
    file = tmp_path / "file"
    file.write_bytes(os.urandom(10**6))
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
    assert measure.resident([file]) == 1
    measure.evict([file])
    if measure.resident([file]) > 0:
        pytest.skip("this file system keeps its pages, as tmpfs does")
    usage = measure.run(["cat", str(file)], {"PATH": os.environ["PATH"]}, tmp_path / "log")
    assert usage.read_mb >= 1
    measure.evict([file])
    measure.warm([file])
    assert measure.resident([file]) == 1


def test_help_has_an_example() -> None:
    assert "Example: python evals/speed/compare.py" in run("compare.py", "--help")


@pytest.mark.slow
def test_a_whole_comparison(tmp_path: Path) -> None:
    options = "--tasks 2 --megabytes 2 --rounds 1 --warm-up 0 --threads 1 --only addition --keep"
    shown = run("compare.py", *options.split(), "--work", tmp_path)
    result = json.loads((tmp_path / "results.json").read_text())

    assert result["format_version"] == 1
    assert result["settings"]["tasks"] == 2
    assert 5e6 < result["settings"]["input_bytes"] < 7e6
    machine = result["machine"]
    assert machine["cores"] >= 1
    assert machine["ram_gb"] > 0
    assert {"mergekit", "torch", "tvb-mergekit"} <= machine["packages"].keys()
    assert {"cpu", "kernel", "python", "date"} <= machine.keys()

    states = ["warm", "cold"]
    kinds = [(child["what"], child["cache"], child.get("method")) for child in result["runs"]]
    expected = [("start-up", None, None)] * 2
    for state in states:
        expected.append(("read", state, None))
        expected += [("merge", state, method) for method in ("basis_ta", "task_arithmetic")]
    assert kinds == expected
    for child in result["runs"]:
        assert child["counted"]
        assert child["wall_s"] > 0
        assert child["cpu_s"] > 0
        assert child["peak_rss_mb"] > 10
        assert child["peak_rss_anon_mb"] > 5
        assert child["read_mb"] >= 0
        if child["cache"] == "warm":
            assert child["resident_before"] == 1
        if child["cache"] == "cold" and child["resident_before"] == 0:
            assert child["read_mb"] > 0.9 * result["settings"]["input_bytes"] / 1e6
    ours = [child for child in result["runs"] if child.get("method") == "basis_ta"]
    for child in ours:
        assert {"gram", "encode", "merge"} <= child["phases"].keys()
        assert child["gram_cached"] is False

    assert [(row["pair"], row["cache"]) for row in result["ratios"]] == [
        ("addition", state) for state in states
    ]
    for row in result["ratios"]:
        assert row["rounds"] == 1
        for key in ("wall_s", "cpu_s", "peak_rss_mb", "peak_rss_anon_mb"):
            assert 0 < row[key]["min"] <= row[key]["median"] <= row[key]["max"]
        # Of such small models the start-up's noise can leave no net time.
        assert row["net_s"] is None or row["net_s"]["median"] > 0
    assert [row["cache"] for row in result["gram"]] == states
    assert all(row["ratio"]["median"] > 0 for row in result["gram"])
    assert len(result["medians"]) == 4

    assert (tmp_path / "results.md").read_text().strip() == shown.strip()
    assert "| addition | cold | `basis_ta` |" in shown
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {".gitignore", "models-2x2MB-seed0-v1", "results.json", "results.md"}
