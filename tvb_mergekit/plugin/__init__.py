"""The adapter: the only package that knows mergekit.

The start-up hook calls `on_import` after each of mergekit's modules in `names.PROBED` has run,
before its importer has taken names from it. Whatever imports mergekit is imported only then.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def on_import(module: ModuleType) -> str | None:
    """Register our methods in a module of mergekit, or replace its names, if all are as known.

    Returns:
        The reason why this mergekit cannot be used, in one line, or None.
    """
    from tvb_mergekit.plugin import names

    problem = names.problem(module.__name__)
    try:
        if problem is None and module.__name__ == "mergekit.merge_methods.registry":
            from tvb_mergekit.plugin.methods import register

            register(module)
        for name in () if problem else names.PROBED[module.__name__]:
            if name.by:
                hooks = importlib.import_module("tvb_mergekit.plugin.hooks")
                names.replace(name, getattr(hooks, name.by))
    except ImportError as error:
        if not (error.name or "").startswith("mergekit"):
            raise
        problem = names.remedied(f"does not fit: {error}")
    if problem is not None:
        names.withdraw()
    return problem


# Before any part of this package that imports mergekit: it would start the import of mergekit's
# registry, and that, through the hook, the import of the same part a second time.
import mergekit.merge_methods  # noqa: E402, F401
