"""The modules of evals/mini, and a small run for tests."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

MINI = Path(__file__).resolve().parent.parent
NAMES = "data plan model score train runs sheets study"


@pytest.fixture(scope="module")
def mini() -> Iterator[SimpleNamespace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(MINI.parent)
        modules = {name: importlib.import_module(f"mini.{name}") for name in NAMES.split()}
        kinds = importlib.import_module("study.kinds")
        yield SimpleNamespace(**modules, kinds=kinds, path=MINI)


@pytest.fixture(scope="module")
def run(mini: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Models that learned nothing, for statements that hold for any weights."""
    folder, _ = mini.train.train_run("micro", "full", 0, tmp_path_factory.mktemp("micro"), "cpu")
    return mini.runs.Run(folder, "full")
