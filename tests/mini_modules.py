"""The modules of evals/mini, which import each other by short names, for tests."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

MINI = Path(__file__).resolve().parent.parent / "evals" / "mini"


# `data`, `plan` and the like are no names to leave in sys.modules for other tests
NAMES = "data plan model score train runs cells sheets report pictures compare".split()


@contextmanager
def loaded() -> Iterator[dict[str, ModuleType]]:
    """Imported afresh, and gone again afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(MINI)
        for name in NAMES:
            patch.delitem(sys.modules, name, raising=False)
        yield {name: importlib.import_module(name) for name in NAMES}
        for name in NAMES:
            sys.modules.pop(name, None)
