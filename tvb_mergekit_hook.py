"""Makes the stock mergekit commands know tvb-mergekit's merge methods, and lm-eval a model type.

mergekit has no entry points. So `tvb_mergekit.pth` (from Python 3.15 on `tvb_mergekit.start`)
calls `install()` when Python starts. A finder on `sys.meta_path` then waits for the imports of
MODULES. It hands each executed module to `tvb_mergekit.plugin.on_import`, before the importer
reads a name. The rest of the package is imported when one of our methods is needed.

Every start of Python runs this module, so it imports only `sys`. A failure prints one line on
stderr. It never shows a traceback or stops mergekit.

    TVB_MERGEKIT_DISABLE=1   leaves mergekit as it is
    TVB_MERGEKIT_DEBUG=1     shows the traceback of a plugin that failed

Call `install()` if Python does not read `.pth` files (`python -S`, `pip install --target`).
"""

import sys

TYPE_CHECKING = False  # typing is not imported, nor __future__: hence the quoted annotations
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

METHODS = "basis_ta, basis_ties, basis_iso, basis_tsvm, basis_wudi and basis_negate"

# The modules for the plugin, in the order of mergekit's imports. Every mergekit has the second one:
# it reveals a mergekit without the first.
MODULES = (
    "mergekit.merge_methods.registry",
    "mergekit.merge_methods",
    "mergekit.merge",
    "mergekit.scripts.run_yaml",
    "mergekit.scripts.multimerge",
)
LM_EVAL = "lm_eval.models"  # gets the model type `tvb`
WATCHED = (*MODULES, LM_EVAL)


def install() -> None:
    """Make mergekit know the merge methods. May be called any number of times; never raises."""
    try:
        if _env("TVB_MERGEKIT_DISABLE"):
            return
        if FINDER not in sys.meta_path:
            sys.meta_path.insert(0, FINDER)
            FINDER.catch_up()
    except Exception as error:
        FINDER.give_up(error)


def _env(name: str) -> bool:
    import os

    return os.environ.get(name, "") not in ("", "0")


class TvbMergekitFinder:
    """Finds modules by the finders after it, and watches the loaders of WATCHED."""

    stopped = False

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        if name not in WATCHED or self.stopped:
            return None
        finders = list(sys.meta_path)
        first = finders.index(self) + 1 if self in finders else 0
        for finder in finders[first:]:
            find_spec = getattr(finder, "find_spec", None)
            spec: Any = find_spec and find_spec(name, path, target)
            if spec is not None:
                self._watch(spec.loader)
                return spec  # type: ignore[no-any-return]
        return None

    def _watch(self, loader: "Any") -> None:
        """Let a loader hand over the next module that it executes."""
        original = getattr(loader, "exec_module", None)
        # Another finder may have called this one: then the loader is watched already.
        if original is None or getattr(original, "watched", False):
            return

        def exec_module(module: "ModuleType") -> None:
            del loader.exec_module  # it may load others, and the module keeps it
            original(module)
            self.after(module)

        exec_module.watched = True  # type: ignore[attr-defined]
        try:
            loader.exec_module = exec_module
        except AttributeError as error:  # a loader without attributes of its own
            self.give_up(error)

    def catch_up(self) -> None:
        """Hand over the modules that were imported before install() was called."""
        for name in MODULES:
            module = sys.modules.get(name)
            # The loader hands over a module whose import has begun.
            begun = getattr(getattr(module, "__spec__", None), "_initializing", False)
            if module is not None and not begun:
                self.after(module)

    def after(self, module: "ModuleType") -> None:
        """Hand the executed module to the plugin."""
        self.stopped = self.stopped or _env("TVB_MERGEKIT_DISABLE")
        if self.stopped or module.__name__ not in WATCHED:  # a loader may be of many modules
            return
        try:
            if module.__name__ == LM_EVAL:
                registry = sys.modules.get("lm_eval.api.registry")
                if register := getattr(getattr(registry, "model_registry", None), "register", None):
                    register("tvb", target="tvb_mergekit.tune.served:Served")
                return
            from tvb_mergekit.plugin import on_import

            if problem := on_import(module):
                self.stop(f"are not available: {problem}")
        except Exception as error:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        self.stop(
            f"do not work: {message} (TVB_MERGEKIT_DEBUG=1 shows the traceback, "
            "TVB_MERGEKIT_DISABLE=1 leaves mergekit as it is)"
        )
        if _env("TVB_MERGEKIT_DEBUG"):
            import traceback

            traceback.print_exception(type(error), error, error.__traceback__)

    def stop(self, problem: str) -> None:
        """Leave mergekit alone from now on. The line is written once in a process."""
        if self.stopped:
            return
        self.stopped = True
        try:
            sys.stderr.write(f"tvb-mergekit: {METHODS} {problem}\n")
        except Exception:  # no stderr, or a closed one
            pass


FINDER = TvbMergekitFinder()
