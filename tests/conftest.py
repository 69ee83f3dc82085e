"""Fixtures shared by the tests: small models, made once, and settings of hypothesis."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tiny import family
from worlds import FAMILIES, Models

ROOT = Path(__file__).resolve().parent.parent
# Every run has the same examples, and a busy machine fails none of them.
steady: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("tests", derandomize=True, **steady)
settings.load_profile("tests")
# A source distribution has no models, adapters and studies.
needing = ("golden", "house", "manual", "score", "store_recipes", "tune")
collect_ignore = [] if (ROOT / "evals").is_dir() else [f"test_{name}.py" for name in needing]


def pytest_configure(config: pytest.Config) -> None:
    """Keep the order of files: xdist would start files with many tests, which take less time."""
    config.option.loadscopereorder = False


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base, a, b, c: read only."""
    folder = tmp_path_factory.mktemp("models")
    family(folder, tasks=("a", "b", "c"))
    return folder


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Models]:
    """Name -> the family of models, made once: read only."""
    return cache(lambda name: FAMILIES[name](tmp_path_factory.mktemp("world")))
