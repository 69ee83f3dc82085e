"""Task Vector Bases for mergekit, and as a library: `build`, `load`, `add`, `remove`, `undo`,
`reconstruct`, `merge`, `attach`.

Importing the package is cheap; the library behind these names is imported when one is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvb_mergekit.errors import UserError
    from tvb_mergekit.store.api import add, build, load, merge, reconstruct, remove, undo
    from tvb_mergekit.store.attach import attach
    from tvb_mergekit.store.store import Bases

__version__ = "0.1.0"
__all__ = [
    "Bases",
    "UserError",
    "add",
    "attach",
    "build",
    "load",
    "merge",
    "reconstruct",
    "remove",
    "undo",
]

_HOME = {"Bases": "store.store", "UserError": "errors", "attach": "store.attach"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"tvb_mergekit.{_HOME.get(name, 'store.api')}"), name)
