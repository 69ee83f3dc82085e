"""The adapter: the only package that knows mergekit, and the names of mergekit that it knows.

The start-up hook calls `on_import` after each of mergekit's modules in WRAPPED has run, before its
importer has taken names from it. The wrappers import the rest of this package when a
recipe or a caller asks for one of our methods. Until then mergekit starts as fast as without us.

mergekit promises none of its names. `ready` looks for each of them before the first merge. A
version of mergekit with the same names works, tested or not.
"""

from __future__ import annotations

import functools
import importlib
from importlib.metadata import version
from types import ModuleType
from typing import Any

import tvb_mergekit_hook

TESTED = "0.1.5"  # the version of mergekit that has the names below

# Module of mergekit -> its names that `wrappers` wraps when the module is imported
_REGISTRY = ("get", "registered_methods")
WRAPPED = {
    "mergekit.merge_methods.registry": _REGISTRY,
    "mergekit.merge_methods": _REGISTRY,
    "mergekit.merge": ("run_merge",),
    "mergekit.scripts.run_yaml": ("run_merge", "main.callback"),
    "mergekit.scripts.multimerge": ("run_merge", "main.callback"),
}
# Module -> everything else that this package takes from mergekit, replaces or calls
USED = {
    "merge_methods.registry": "register _METHODS",
    "merge_methods.base": "MergeMethodSpec ParameterSpec.validate MergeMethod._execute "
    "MergeMethod.validate_inputs",
    "architecture": "json_definitions._load_architecture_json",
    "merge": "_model_out_config _update_config_vocab _set_chat_template _copy_tokenizer",
    "plan": "MergePlanner._plan MergePlanner.plan_tensor MergePlanner.plan_layer "
    "MergePlanner._tensors MergePlanner._tokenizer_task MergePlanner._model_arch",
    "merge_methods.task_adapter": "ExecuteMergeMethodTask.gather_tensors "
    "ExecuteMergeMethodTask.parameters",
    "io.tasks": "GatherTensors.weight_info LoadTensor LoaderCache.loaders LoaderCache.setup",
    "io.lazy_tensor_loader": "LazyTensorLoader.get_tensor ShardedTensorIndex",
    "tokenizer": "PermutedVocabulary truncate.TruncatedVocabulary",
    "graph": "Executor.run",
    "card": "is_hf generate_card",
}
NAMES = [f"{module}:{name}" for module, names in USED.items() for name in names.split()]


def on_import(module: ModuleType) -> str | None:
    """Wrap the names of a module of mergekit, permanently and once.

    Returns:
        The reason why this mergekit cannot be used, in one line, or None.
    """
    from tvb_mergekit.plugin import wrappers

    places = [f"{module.__name__[9:]}:{name}" for name in WRAPPED[module.__name__]]
    if problem := _problem(places):
        return problem
    for owner, name in map(owner_of, places):
        original = getattr(owner, name)
        if not getattr(original, "tvb_mergekit", False):
            made: Any = functools.wraps(original)(getattr(wrappers, name)(original))
            made.tvb_mergekit = True
            setattr(owner, name, made)
    return None


def ready() -> bool:
    """Register our methods. False, after one line on stderr, if this mergekit cannot be used."""
    finder = tvb_mergekit_hook.FINDER
    try:
        registry = importlib.import_module("mergekit.merge_methods.registry")
        if finder.stopped or "basis_ta" in getattr(registry, "_METHODS", ()):
            return not finder.stopped
        if problem := _problem(NAMES):
            finder.stop(f"are not available: {problem}")
            return False
        importlib.import_module("tvb_mergekit.plugin.methods").register(registry)
    except Exception as error:
        finder.give_up(error)
    return not finder.stopped


def _problem(places: list[str]) -> str | None:
    """A complaint about the installed mergekit: another minor version, or a name that is missing.

    Names may have other meanings in another minor version.
    """
    installed, series = version("mergekit"), TESTED.rpartition(".")[0]
    problem = None if installed.startswith(f"{series}.") else f"is installed, {series} is needed"
    if problem := problem or next(filter(None, map(missing, places)), None):
        return (
            f"mergekit {installed} {problem}; pip install 'mergekit=={TESTED}', or a newer "
            "tvb-mergekit"
        )
    return None


def missing(place: str) -> str | None:
    """A complaint if the installed mergekit lacks a name, or None."""
    try:
        owner, attribute = owner_of(place)
        # A field of a pydantic class is an annotation only.
        if hasattr(owner, attribute) or attribute in owner.__annotations__:
            return None
    except (ImportError, AttributeError):
        pass
    return f"has no `mergekit.{place.replace(':', '.')}`"


def owner_of(place: str) -> tuple[Any, str]:
    """The module or class that has the name, and the last part of the name."""
    module, _, path = place.partition(":")
    *outer, attribute = path.split(".")
    found = importlib.import_module(f"mergekit.{module}")
    return functools.reduce(getattr, outer, found), attribute
