"""The modules of evals/mini, which import each other by short names, and a small run for tests."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

MINI = Path(__file__).resolve().parent.parent
# `data`, `plan` and the like must not stay in sys.modules for other tests
NAMES = "data plan model score train runs sheets pictures compare matrices learned"


@pytest.fixture(scope="module")
def mini() -> Iterator[SimpleNamespace]:
    """Imported again for each module of tests, and removed afterwards."""
    names = NAMES.split()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(MINI.parent)
        patch.syspath_prepend(MINI)
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        kinds = importlib.import_module("study.kinds")
        yield SimpleNamespace(
            **{name: importlib.import_module(name) for name in names}, kinds=kinds, path=MINI
        )
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def run(mini: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Models that learned nothing, for statements that hold for any weights."""
    folder, _ = mini.train.train_run("micro", "full", 0, tmp_path_factory.mktemp("micro"), "cpu")
    return mini.runs.Run(folder, "full")
