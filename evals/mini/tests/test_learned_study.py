"""evals/mini/learned.py on `micro`: its data, its controls against their formulas, its tables."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

SHOTS = 4


@pytest.fixture(scope="module")
def run(mini: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of models that learned nothing: for what has to hold of any weights."""
    folder, _ = mini.train.train_run("micro", "full", 0, tmp_path_factory.mktemp("micro"), "cpu")
    return mini.runs.Run(folder, "full")


def measured(mini: SimpleNamespace, run: Any, how: str, label: str, count: int) -> Any:
    plan = mini.plan.PLANS["micro"]
    return mini.cells.compute(run, mini.learned._cell(plan, SHOTS, how, label, count))


def test_examples_are_those_of_the_training(
    mini: SimpleNamespace, run: Any, tmp_path: Path
) -> None:
    files = mini.learned.Data(run, tmp_path, SHOTS)
    assert len(files.drawn(1.0)) == 10 * SHOTS and len(files.drawn(0.5)) == 5 * SHOTS
    doc = run.items("math_add", "validation")[0]
    (trained,) = mini.model.batches(run.tokenizer, iter([(doc["prompt"], doc["answer"])]), 1)
    written = json.loads((tmp_path / "math_add.jsonl").read_text().splitlines()[0])
    ids = run.tokenizer(written["prompt"] + written["response"])["input_ids"]
    assert ids == trained["input_ids"][0].tolist()


def test_cells_of_methods(mini: SimpleNamespace, run: Any) -> None:
    """Half of the bases have half of the examples, and pca a mixture that is not its encoder."""
    every, half = (measured(mini, run, "regmean", *of) for of in (("none", 10), ("pca", 5)))
    assert every["passes"]["forward"] == every["items"] == 10 * SHOTS
    assert half["passes"]["forward"] == half["items"] == 5 * SHOTS
    ta = measured(mini, run, "ta", "balanced", 5)
    assert ta["passes"] == {"forward": 19 * 5 * SHOTS, "backward": 0} and 0.04 <= ta["lambda"]
    every = measured(mini, run, "adamerging", "none", 10)
    assert [*every["start"][0]] == pytest.approx([every["lambda"]] * len(every["start"][0]))
    wanted = mini.learned.method_cells(mini.plan.PLANS["micro"], SHOTS, 2)
    assert {c["seed"] for c in wanted if c["basis"] == "rand_select"} == {2}
    assert {c["options"].get("mixture", "pca") for c in wanted if c["basis"] == "pca"} == {
        "equal", "positive", "pca"
    }  # fmt: skip


def test_weighted_means(mini: SimpleNamespace, run: Any) -> None:
    tau = [{"w": torch.tensor([1.0, 2.0, 4.0])}, {"w": torch.tensor([3.0, 6.0, 0.0])}]
    weights = [{"w": torch.tensor([0.0, 1.0, 3.0])}, {"w": torch.tensor([0.0, 1.0, 1.0])}]
    mean, models = mini.learned.weighted_mean(tau, weights)
    assert mean["w"].tolist() == [2.0, 4.0, 3.0]
    assert models == pytest.approx((2 + 16 / 10) / 2)
    plan = mini.plan.PLANS["micro"]
    cell, *_ = mini.learned.control_cells(plan, SHOTS)
    assert cell["how"] == "mean"
    found = mini.cells.compute(run, cell)
    assert found["length"] == pytest.approx(1) and found["models"] == pytest.approx(10)


def test_controls(mini: SimpleNamespace, run: Any) -> None:
    plan = mini.plan.PLANS["micro"]
    wanted = {(c["kind"], c["how"]): c for c in mini.learned.control_cells(plan, SHOTS)}
    masks = mini.cells.compute(run, wanted["learned_masks", "dataless"])
    assert set(masks["alone"]) == set(run.tasks) and 0 <= masks["shared"] <= 1
    path = mini.cells.compute(run, wanted["learned_path", "labels"])
    losses = [each["loss"] for each in path["seen"]]
    assert len(losses) == len(path["held"]) == 11
    assert mini.learned.gradients.entropy is mini.learned.entropy  # put back
    assert path["held"][path["best"]] == min(path["held"])


def test_the_shipped_tables_are_of_the_shipped_cells(mini: SimpleNamespace) -> None:
    shipped = json.loads((mini.path / "results" / "learned.json").read_text())
    made = mini.learned.sheets(shipped["cells"], "small")
    page = (mini.path / "RESULTS.md").read_text()
    assert page.count("<!-- learned: ") == len(made)
    assert mini.report.filled_study("learned", page, made) == page
