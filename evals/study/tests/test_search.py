"""The search that climbs along a grid of lambdas."""

import importlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

EVALS = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def climbed() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EVALS)
        yield importlib.import_module("study.kinds.addition").climbed


@given(data=st.data(), count=st.integers(1, 12))
def test_a_climb_ends_at_the_maximum_and_asks_once(climbed, data, count):
    """Of a score that rises and falls; each neighbour of the maximum was asked for."""
    grid = [float(i + 1) for i in range(count)]
    top, start = (data.draw(st.integers(0, count - 1)) for _ in range(2))
    asked = list[float]()

    def score(point: float) -> float:
        asked.append(point)
        return -abs(point - grid[top])

    point, scores = climbed(grid, score, start)
    assert point == grid[top]
    assert len(asked) == len(set(asked)) == sum(s is not None for s in scores)
    assert all(scores[i] is not None for i in (top - 1, top, top + 1) if 0 <= i < count)
    assert climbed(grid, lambda point: 0.0, start)[0] == grid[0]  # the smallest of equal ones
