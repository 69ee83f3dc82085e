"""evals/mini/matrices.py on `micro`: controls and rivals against their formulas; its tables."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tvb_mergekit

UP = "model.layers.0.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
Vector = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def run(mini: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of models that learned nothing: for what has to hold of any weights."""
    folder, _ = mini.train.train_run("micro", "full", 0, tmp_path_factory.mktemp("micro"), "cpu")
    return mini.runs.Run(folder, "full")


def close(one: Vector, other: Vector) -> bool:
    return all(torch.allclose(one[n], other[n], rtol=1e-3, atol=1e-6) for n in other)


def mean_of(run: Any, name: str) -> torch.Tensor:
    return torch.stack([run.task_vector(task)[name] for task in run.tasks]).mean(0)


def test_directions(mini: SimpleNamespace, run: Any) -> None:
    direction = mini.matrices.direction
    every = tvb_mergekit.build(run.base, run.models, basis="none")
    some = tvb_mergekit.build(run.base, run.models, basis="balanced", num_bases=5)
    of = {how: direction(run, every, how) for how in mini.matrices.ALL}
    assert close(direction(run, some, "iso"), of["iso"])
    assert not close(direction(run, some, "iso_cts"), of["iso"])
    total = 10 * mean_of(run, UP)
    assert torch.allclose(of["ta"][UP], total, atol=1e-6)
    assert torch.equal(of["ta_matrices"][UP], of["ta"][UP])
    ratio = of["ta_lengths"][UP] / total
    assert torch.allclose(ratio, ratio.mean(), rtol=1e-2) and not math.isclose(ratio.mean(), 1)
    norms = [float(torch.linalg.norm(of[how][UP])) for how in ("ta_lengths", "iso")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    for how in ("iso", "tsvm", "wudi", "ta_matrices", "ta_lengths"):
        assert torch.allclose(of[how][EMBEDDING], mean_of(run, EMBEDDING), atol=1e-6)


def test_a_cell(mini: SimpleNamespace, run: Any) -> None:
    """On which items lambda is chosen, along which grid, and on which it is tested."""
    asked = []

    class Watched(mini.runs.Run):  # type: ignore[misc]
        def __init__(self) -> None:
            vars(self).update(vars(run))

        def accuracy(self, weights: Any, split: str, tasks: Any, items: int) -> dict[str, float]:
            asked.append((split, items))
            away = float((weights[UP] - self.base[UP]).norm())
            return dict.fromkeys(tasks, 1 / (1 + abs(away - near)))

    cell = mini.matrices._cell("balanced", 5, 50, 200) | {"merges": ["iso"]}
    bases = tvb_mergekit.build(run.base, run.models, basis="balanced", num_bases=5)
    near = 0.5 * float(mini.matrices.direction(run, bases, "iso")[UP].norm())
    found = mini.cells.compute(Watched(), cell)
    iso = found["merges"]["iso"]
    assert asked == [("validation", 25)] * 19 + [("test", 200)] * 2 and found["items"] == 25
    assert iso["lambda"] == 0.5 and max(iso["curve"]) == iso["curve"][cell["lambdas"].index(0.5)]
    assert iso["tuned"]["math_add"] > iso["fixed"]["math_add"]


def test_lambdas(mini: SimpleNamespace) -> None:
    lambdas = mini.matrices.LAMBDAS
    assert {0.1, 0.2, 0.5, 1.0, 2.0} <= set(lambdas) and (lambdas[0], lambdas[-1]) == (0.04, 2.5)
    assert all(1.2 < b / a < 1.31 for a, b in pairwise(lambdas))


@pytest.mark.parametrize(
    ("curve", "low", "high"),
    [
        ([0, 0, 1, 0.9, 0], 2 ** (2 - 0.05), 2**2.5),  # 0.95 is at 0.05 and at 0.5 of a step
        ([0.96, 0.97, 1, 0.96, 0.98], 1, 16),
        ([0, 1, 0, 1, 0], 2 ** (1 - 0.05), 2**1.05),  # the first of two, and what is joined to it
    ],
)
def test_range(mini: SimpleNamespace, curve: list[float], low: float, high: float) -> None:
    assert mini.matrices.range_of([1, 2, 4, 8, 16], curve) == pytest.approx((low, high))


def test_opcm(mini: SimpleNamespace, run: Any) -> None:
    """Of two tasks, by the sum over i and j of its paper."""
    order = ["math_add", "coding_run"]
    found, lambdas = mini.matrices._opcm(run, order)
    first, second = (
        {n: t.double().numpy() for n, t in run.task_vector(task).items()} for task in order
    )
    both = {}
    for name, new in second.items():
        both[name] = first[name] + new
        if new.ndim == 2 and name != EMBEDDING:
            u, s, vt = np.linalg.svd(first[name])
            rank = next(r for r in range(len(s)) if s[: r + 1].sum() > 0.5 * s.sum())
            both[name] = first[name].copy()
            for i in range(len(u)):
                for j in range(len(vt)):
                    if i != j and not (i < rank and j < rank):
                        both[name] += (u[:, i] @ new @ vt[j]) * np.outer(u[:, i], vt[j])
    norms = [math.sqrt(sum((t**2).sum() for t in v.values())) for v in (first, second, both)]
    factor = (norms[0] + norms[1]) / 2 / norms[2]
    expected = {n: torch.from_numpy(factor * t).float() for n, t in both.items()}
    assert close(found, expected) and lambdas == (1.0,)


def test_continual_ties(mini: SimpleNamespace, run: Any) -> None:
    order = ["math_add", "coding_run"]
    models = {task: run.models[task] for task in order}
    bases = tvb_mergekit.build(run.base, models, basis="none")
    both = mini.matrices.direction(run, bases, "ties")
    found, lambdas = mini.matrices.SINGLE["continual_ties_in_place"](run, order)
    assert close(found, both) and lambdas == (0.3,)

    first = {n: 0.3 * t for n, t in run.task_vector(order[0]).items()}
    shorter = {"before": run.shifted((1.0, first)), "new": run.models[order[1]]}
    bases = tvb_mergekit.build(run.base, shorter, basis="none")
    both = mini.matrices.direction(run, bases, "ties")
    found, lambdas = mini.matrices.SINGLE["continual_ties"](run, order)
    assert close(found, {n: first[n] + 0.3 * both[n] for n in first}) and lambdas == (1.0,)


def test_buffers(mini: SimpleNamespace, run: Any) -> None:
    order = list(run.tasks)
    cell = {"budget": 8, "order": 0, "annealed": False}
    bases = mini.matrices.held(run, cell | {"how": "rand_select"}, order)
    assert bases.num_bases == 8 and order[-1] in bases.tasks
    plain, annealed = (
        mini.matrices.held(run, cell | {"how": "ae", "annealed": by}, order).encoder
        for by in (False, True)
    )
    assert plain.shape == annealed.shape == (10, 8) and not torch.allclose(plain, annealed)
    wanted = mini.matrices.online_cells(mini.plan.PLANS["small"])
    by_budget = {c["budget"]: c["annealed"] for c in wanted if c["how"] == "ae"}
    assert by_budget == {m: m >= 8 for m in range(2, 10)}


def test_the_quickstart(mini: SimpleNamespace) -> None:
    run = mini.matrices.Quickstart("cpu")
    assert len(run.tasks) == 8 and "base" not in run.tasks
    assert run.accuracy(run.models["max"], "test", ["max"], 200) == {"max": 0.95}  # recipes/README
    assert run.items("sum", "validation")[0]["prompt"].startswith("sum:")


def test_the_shipped_tables_are_of_the_shipped_cells(mini: SimpleNamespace) -> None:
    shipped = json.loads((mini.path / "results" / "matrices.json").read_text())
    made = mini.matrices.sheets(shipped["cells"], "small")
    page = (mini.path / "RESULTS.md").read_text()
    assert page.count("<!-- matrices: ") == 7
    assert mini.report.filled_study("matrices", page, made) == page
