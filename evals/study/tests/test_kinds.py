"""The search along a grid of lambdas, and merges of equal and of orthogonal tasks."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from study.kinds import addition, matrices

# The search along a grid


@given(data=st.data(), count=st.integers(1, 12))
def test_a_climb_ends_at_the_maximum_and_asks_once(data, count):
    """Of a score that rises and falls; each neighbour of the maximum was asked for."""
    grid = [float(i + 1) for i in range(count)]
    top, start = (data.draw(st.integers(0, count - 1)) for _ in range(2))
    asked = list[float]()

    def score(point: float) -> float:
        asked.append(point)
        return -abs(point - grid[top])

    point, scores = addition.climbed(grid, score, start)
    assert point == grid[top]
    assert len(asked) == len(set(asked)) == sum(s is not None for s in scores)
    assert all(scores[i] is not None for i in (top - 1, top, top + 1) if 0 <= i < count)
    # The smallest of equal ones:
    assert addition.climbed(grid, lambda point: 0.0, start)[0] == grid[0]


@pytest.mark.parametrize("alike", [True, False])
def test_equal_tasks_count_once_and_orthogonal_ones_all(alike: bool) -> None:
    """After SVC of the sum, and after NUFILT's steps."""
    names, shape = ("a", "b", "c"), (9, 7)
    torch.manual_seed(0)
    q, r = torch.linalg.qr(torch.randn(9, 9))[0], torch.linalg.qr(torch.randn(7, 7))[0]
    parts = [slice(0, 2)] * 3 if alike else [slice(0, 2), slice(2, 4), slice(4, 6)]
    found = {n: {"x.w": q[:, p] @ torch.diag(torch.tensor([3.0, 1.0])) @ r[:, p].T,
                 "norm": torch.ones(2)} for n, p in zip(names, parts, strict=True)}  # fmt: skip
    run = SimpleNamespace(tasks=names, task_vector=found.__getitem__)
    total = {n: sum(each[n] for each in found.values()) for n in ("x.w", "norm")}
    made = matrices._calibrated(run, total)
    assert made["x.w"].shape == shape and torch.equal(made["norm"], total["norm"])
    torch.testing.assert_close(made["x.w"], found["a"]["x.w"] if alike else total["x.w"])
    run.base = {n: torch.zeros_like(each) for n, each in total.items()}
    streamed, _ = matrices._nufilt(run, names, share=2 / 7)
    torch.testing.assert_close(streamed["x.w"], made["x.w"], atol=1e-5, rtol=1e-5)
    assert not streamed["norm"].any()
