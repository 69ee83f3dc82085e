"""evals/mini/matrices.py and learned.py on `micro`: cells and controls. Shipped tables of all."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import pytest
import torch

import tvb_mergekit

UP = "model.layers.0.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
SHOTS = 4


def mean_of(run: Any, name: str) -> torch.Tensor:
    return torch.stack([run.task_vector(task)[name] for task in run.tasks]).mean(0)


# ------------------------------------------------------------------------------ merges of matrices


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
    for how in ("iso", "tsvm", "wudi", "ta_matrices", "ta_lengths"):
        assert torch.allclose(of[how][EMBEDDING], mean_of(run, EMBEDDING), atol=1e-6)


@pytest.mark.parametrize(
    ("curve", "low", "high"),
    [
        ([0, 0, 1, 0.9, 0], 2 ** (2 - 0.05), 2**2.5),  # 0.95 is at 0.05 and at 0.5 of a step
        ([0.96, 0.97, 1, 0.96, 0.98], 1, 16),
        ([0, 1, 0, 1, 0], 2 ** (1 - 0.05), 2**1.05),  # the first of two, with its neighbours
    ],
)
def test_range(mini: SimpleNamespace, curve: list[float], low: float, high: float) -> None:
    assert mini.matrices.range_of([1, 2, 4, 8, 16], curve) == pytest.approx((low, high))


def test_the_quickstart(mini: SimpleNamespace) -> None:
    run = mini.runs.Quickstart("cpu")
    assert len(run.tasks) == 8 and "base" not in run.tasks
    assert run.accuracy(run.models["max"], "test", ["max"], 200) == {"max": 0.95}  # recipes/README


# ------------------------------------------------------------------------------- merges that learn


def test_examples_are_those_of_the_training(
    mini: SimpleNamespace, run: Any, tmp_path: Path
) -> None:
    files = mini.kinds.learned.Data(run, tmp_path, SHOTS)
    assert len(files.drawn(1.0)) == 10 * SHOTS and len(files.drawn(0.5)) == 5 * SHOTS
    doc = run.items("math_add", "validation")[0]
    (trained,) = mini.model.batches(run.tokenizer, iter([(doc["prompt"], doc["answer"])]), 1)
    written = json.loads((tmp_path / "math_add.jsonl").read_text().splitlines()[0])
    ids = run.tokenizer(written["prompt"] + written["response"])["input_ids"]
    assert ids == trained["input_ids"][0].tolist()


def test_cells_of_methods(mini: SimpleNamespace, run: Any) -> None:
    """Half of the bases have half of the examples, and pca a mixture that is not its encoder."""
    plan = mini.plan.PLANS["micro"]
    wanted = mini.learned.method_cells(plan, SHOTS, 0)

    def measured(how: str, label: str, count: int) -> Any:
        (cell,) = (c for c in wanted
                   if (c["how"], c["basis"], c["num_bases"]) == (how, label, count))  # fmt: skip
        return mini.kinds.learned.measure(run, cell)

    for label, count in (("none", 10), ("pca", 5)):
        found = measured("regmean", label, count)
        assert found["passes"]["forward"] == found["items"] == count * SHOTS
    ta = measured("ta", "balanced", 5)
    assert ta["passes"] == {"forward": 19 * 5 * SHOTS, "backward": 0} and 0.04 <= ta["lambda"]
    every = measured("adamerging", "none", 10)
    assert [*every["start"][0]] == pytest.approx([every["lambda"]] * len(every["start"][0]))


# ---------------------------------------------------------------------------------- shipped tables


@pytest.mark.parametrize("study", ["compare", "matrices", "learned"])
def test_the_shipped_tables_are_of_the_shipped_cells(
    mini: SimpleNamespace, study: str, tmp_path: Path
) -> None:
    """To the byte, for any order of the records and any settings of matplotlib."""
    shipped = json.loads((mini.path / "results" / f"{study}.json").read_text())
    page = tmp_path / "RESULTS.md"
    page.write_bytes((mini.path / "RESULTS.md").read_bytes())
    assert page.read_text().count(f"<!-- {study}: ") > 5
    cells = random.Random(1).sample(shipped["cells"], len(shipped["cells"]))
    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": None}):
        files = getattr(mini, study).write(cells, "small", tmp_path / "out", page)
        assert matplotlib.rcParams["font.size"] == 30
    assert {file.name for file in files} <= {*os.listdir(mini.path / "results"), "RESULTS.md"}
    assert page.read_bytes() == (mini.path / "RESULTS.md").read_bytes()
    again = json.loads((tmp_path / "out" / f"{study}.json").read_text())
    assert again["cells"] == shipped["cells"] and again["tables"].keys() == shipped["tables"].keys()
