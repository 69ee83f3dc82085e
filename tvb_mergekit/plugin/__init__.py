"""The adapter: the only package that knows mergekit, and the names of mergekit that it knows.

The start-up hook calls `on_import` after each of mergekit's modules in PROBED has run, before its
importer has taken names from it. Whatever imports mergekit is imported only then.

mergekit promises none of its names. Each name is looked for as soon as its module is there. A
version of mergekit with the same names works, tested or not. `test_autoload` holds the parameters.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from types import ModuleType
from typing import Any

from tvb_mergekit.core.settings import METHODS

TESTED = "0.1.5"  # the version of mergekit that has the names below

# MODULE:NAME of everything that this package takes from mergekit, replaces or calls
OF_METHODS = """
merge_methods.registry:register
merge_methods.registry:registered_methods
merge_methods.registry:_METHODS
merge_methods.base:MergeMethodSpec
merge_methods.base:ParameterSpec.validate
merge_methods.base:MergeMethod._execute
merge_methods.base:MergeMethod.validate_inputs
""".split()
OF_MERGES = """
architecture:json_definitions._load_architecture_json
merge:run_merge
merge:_model_out_config
merge:_update_config_vocab
merge:_set_chat_template
merge:_copy_tokenizer
plan:ConfigReader.parameter_sources
plan:MergePlanner._plan
plan:MergePlanner.plan_tensor
plan:MergePlanner.plan_layer
plan:MergePlanner._tensors
plan:MergePlanner._tokenizer_task
plan:MergePlanner._model_arch.__wrapped__
merge_methods.task_adapter:ExecuteMergeMethodTask.gather_tensors
merge_methods.task_adapter:ExecuteMergeMethodTask.parameters
io.tasks:GatherTensors.weight_info
io.tasks:LoadTensor
io.tasks:LoaderCache.loaders
io.tasks:LoaderCache.setup
io.lazy_tensor_loader:LazyTensorLoader.get_tensor
io.lazy_tensor_loader:ShardedTensorIndex
tokenizer:PermutedVocabulary
tokenizer:truncate.TruncatedVocabulary
graph:Executor.run
card:is_hf
card:generate_card
""".split()

# An imported module of mergekit -> the names to look for when its import ends. By then mergekit
# has imported their modules as well. Each command needs `mergekit.merge`, wherever it may be.
PROBED = {
    "mergekit.merge_methods.registry": OF_METHODS,
    "mergekit.merge_methods": OF_METHODS,
    "mergekit.merge": OF_MERGES,
    "mergekit.scripts.run_yaml": [*OF_MERGES, "scripts.run_yaml:main.callback"],
    "mergekit.scripts.multimerge": [*OF_MERGES, "scripts.multimerge:main.callback"],
}
REPLACED = ("run_merge", "callback")  # at the import, by the functions of these names in `run`


def on_import(module: ModuleType) -> str | None:
    """Register our methods in a module of mergekit, or replace its names, if all are there.

    Returns:
        The reason why this mergekit cannot be used, in one line, or None.
    """
    name = module.__name__
    problem = out_of_range() or next(filter(None, map(missing, PROBED[name])), None)
    try:
        if problem is None and name == "mergekit.merge_methods.registry":
            from tvb_mergekit.plugin.methods import register

            register(module)
        for place in () if problem else PROBED[name]:
            if place.endswith(REPLACED):
                run = importlib.import_module("tvb_mergekit.plugin.run")
                replace(place, getattr(run, owner_of(place)[1]))
    except ImportError as error:
        if not (error.name or "").startswith("mergekit"):
            raise
        problem = f"does not fit: {error}"
    if problem is None:
        return None
    registry = sys.modules.get("mergekit.merge_methods.registry")
    for method in METHODS:
        getattr(registry, "_METHODS", {}).pop(method, None)
    installed = f"mergekit {version('mergekit')} {problem}"
    return f"{installed}; pip install 'mergekit=={TESTED}', or a newer tvb-mergekit"


def out_of_range() -> str | None:
    """A complaint about another minor version, or None: names may have other meanings there."""
    series = TESTED.rpartition(".")[0]
    known = version("mergekit").startswith(f"{series}.")
    return None if known else f"is installed, {series} is needed"


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


def replace(place: str, make: Callable[[Any], Any]) -> None:
    """Replace a name permanently by `make(original)`, once."""
    owner, attribute = owner_of(place)
    original = getattr(owner, attribute)
    if not getattr(original, "tvb_mergekit", False):
        made: Any = functools.wraps(original)(make(original))
        made.tvb_mergekit = True
        setattr(owner, attribute, made)


@contextmanager
def replaced(place: str, value: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a name by `value(original)` within the context."""
    owner, attribute = owner_of(place)
    original = getattr(owner, attribute)
    setattr(owner, attribute, value(original))
    try:
        yield
    finally:
        setattr(owner, attribute, original)


def owner_of(place: str) -> tuple[Any, str]:
    """What has the name, and the last part of the name."""
    module, _, path = place.partition(":")
    *outer, attribute = path.split(".")
    return functools.reduce(
        getattr, outer, importlib.import_module(f"mergekit.{module}")
    ), attribute


# Before any part of this package that imports mergekit: it would start the import of mergekit's
# registry, and that, through the hook, the import of the same part a second time.
import mergekit.merge_methods  # noqa: E402, F401
