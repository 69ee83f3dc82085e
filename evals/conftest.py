"""The studies, the benchmarks of speed and the recipe of evals/real, as modules to import."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tvb_mergekit.core.settings import GLOBAL_KEYS

EVALS = Path(__file__).resolve().parent
sys.path += [str(EVALS), str(EVALS / "speed"), str(EVALS.parent / "recipes/smollm2")]


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autoencoders are trained for 20 steps."""
    steps = GLOBAL_KEYS["steps"]
    monkeypatch.setitem(GLOBAL_KEYS, "steps", replace(steps, default=20))
