"""The adapter: the only package that knows mergekit (0.1.5).

`on_import` is called by the start-up hook after each of mergekit's modules below has run, before
its importer has taken names from it. Every part that imports mergekit is imported only then.
"""

from __future__ import annotations

from types import ModuleType


def on_import(module: ModuleType) -> None:
    """Register our methods in, or wrap the functions of, one freshly imported mergekit module."""
    name = module.__name__
    if name == "mergekit.merge_methods.registry":
        from tvb_mergekit.plugin.methods import register

        register(module)
    elif name == "mergekit.merge":
        from tvb_mergekit.plugin.run import wrap_run_merge

        wrap_run_merge(module)
    elif name == "mergekit.scripts.merge_raw_pytorch":
        from tvb_mergekit.plugin.run import wrap_raw_pytorch

        wrap_raw_pytorch(module)
    elif name in ("mergekit.scripts.run_yaml", "mergekit.scripts.multimerge"):
        from tvb_mergekit.plugin.run import wrap_command

        wrap_command(module.main)


# Before any part of this package that imports mergekit: it would start the import of mergekit's
# registry, and that, through the hook, the import of the same part a second time.
import mergekit.merge_methods  # noqa: E402, F401
