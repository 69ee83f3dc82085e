"""Task Vector Bases for mergekit, and as a library.

    build         keep the task vectors of models, or compress them into bases, as a store
    load          open a store
    add           add the task of a model to a store
    remove        remove a task from a store that keeps all tasks
    undo          undo the last `add` or `remove`
    merge         merge the tasks of a store into a state dict
    reconstruct   the weights of one task, as a state dict
    attach        give a live PyTorch model the tasks of a store: `use`, `reset`, `route`
    Bases         an open store
    UserError     a mistake that a message of one line explains

The library behind these names is imported when one is used.
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


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
