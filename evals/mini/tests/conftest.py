"""The modules of evals/mini, which import each other by short names, for its tests."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

MINI = Path(__file__).resolve().parent.parent
# `data`, `plan` and the like are no names to leave in sys.modules for other tests
NAMES = "data plan model score train runs cells sheets report pictures compare matrices".split()
NAMES += ["learned"]


@pytest.fixture(scope="module")
def mini() -> Iterator[SimpleNamespace]:
    """Imported afresh, and gone again afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(MINI)
        for name in NAMES:
            patch.delitem(sys.modules, name, raising=False)
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES}, path=MINI)
        for name in NAMES:
            sys.modules.pop(name, None)
