"""The adapter: the only package that knows mergekit, and the names of mergekit that it knows.

The start-up hook calls `on_import` after each of mergekit's modules in WRAPPED has run, before its
importer has taken names from it. The wrappers import the rest of this package when a recipe or a
caller asks for one of our methods. Until then mergekit starts as fast as without us, and other
recipes reach mergekit's own functions untouched. So the text of a recipe (strict YAML, a known
method) is read here, where no torch is imported.

mergekit promises none of its names. `ready` looks for each of them before the first merge. A
version of mergekit with the same names works, tested or not.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import math
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

import tvb_mergekit_hook
from tvb_mergekit.errors import UserError, check_path, hint, one_line, refusing, unwinding
from tvb_mergekit.store import is_store

MOST = 1_000_000  # values in a recipe: a few lines of nested aliases may stand for billions
OURS = "basis_"  # with which the names of our methods begin, and no other method's
TESTED = "0.1.5"  # the version of mergekit that has the names below

# Module of mergekit -> its names that are wrapped when the module is imported
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
    """Wrap names of mergekit's module, for good and once; or say why this mergekit is unfit."""
    places = [f"{module.__name__[9:]}:{name}" for name in WRAPPED[module.__name__]]
    if problem := _problem(places):
        return problem
    for owner, name in map(owner_of, places):
        original = getattr(owner, name)
        if not getattr(original, "tvb_mergekit", False):
            setattr(owner, name, _wrapped(original, WRAPPERS[name]))
    return None


def _wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    replacement.tvb_mergekit = True  # type: ignore[attr-defined]
    return replacement


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
        importlib.import_module("tvb_mergekit.plugin.recipe").register(registry)
    except Exception as error:
        finder.give_up(error)
    return not finder.stopped


def _problem(places: list[str]) -> str | None:
    """A complaint about the installed mergekit: another minor version, or a missing name."""
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


def _get(original: Callable[[str], Any], name: str) -> Any:
    """mergekit's method of a name, or ours."""
    if str(name).startswith(OURS):
        ready()
    return original(name)


def _registered_methods(original: Callable[[], Any]) -> Any:
    """mergekit's methods and ours."""
    ready()
    return original()


def _run_merge(
    original: Callable[..., None],
    merge_config: Any,
    out_path: str,
    options: Any,
    config_source: str | None = None,
) -> None:
    """mergekit's `run_merge`, which merges our methods by `run.merge`."""
    if merge_config.merge_method.startswith(OURS) and ready():
        from tvb_mergekit.plugin import document, run

        with refusing(planning=True):
            text = config_source or merge_config.to_yaml()
            # `python -m mergekit.scripts.run_yaml` has not been through `_callback`
            document.check_unknown_keys(yaml.safe_load(text), merge_config.model_dump())
            read = document.document_of(merge_config, text)
        return run.merge(read, out_path, options)
    with refusing():
        for model in merge_config.referenced_models():
            if store_of(model):
                raise UserError(
                    f"model {model} is of a store, a difference from its base, and "
                    f"{merge_config.merge_method} takes models: make them with `tvb export`"
                )
    return original(merge_config, out_path, options, config_source)


def _callback(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A command of mergekit, after checks of a recipe whose unknown keys mergekit would drop."""
    path = kwargs.get("config_file")
    if not (path and os.path.isfile(path)):
        return original(*args, **kwargs)
    with refusing(planning=True):
        _, documents = parse(path)
        if ours := are_ours(path, documents) and ready():
            gc.set_threshold(50_000)  # else the libraries' million objects are searched again,
            atexit.register(gc.freeze)  # and once more at the end
            check_path(kwargs.get("out_path") or path)
            from tvb_mergekit.plugin.document import check_documents

            check_documents(path, documents, several="intermediate_dir" in kwargs)
    if not ours:
        return original(*args, **kwargs)
    with refusing(out=str(kwargs.get("out_path"))), unwinding():
        return original(*args, **kwargs)


WRAPPERS: dict[str, Callable[..., Any]] = {
    "get": _get,
    "registered_methods": _registered_methods,
    "run_merge": _run_merge,
    "callback": _callback,
}


def store_of(model: object) -> tuple[str, str] | None:
    """The store that a model names, and the vector in it ("" for all); None for other models."""
    path = Path(str(model))  # names of tasks may have `+`, `@` and `/`
    if is_store(path):
        return str(path), ""
    for folder in path.parents:  # but not USER/NAME in a store
        named = folder != Path() and not (path / "config.json").is_file()
        if named and is_store(folder):
            return str(folder), os.path.relpath(path, folder)
    return None


def methods_in(documents: Sequence[Any]) -> list[str]:
    """The merge methods that YAML documents name."""
    methods = [each.get("merge_method") for each in documents if isinstance(each, dict)]
    return [method for method in methods if isinstance(method, str)]


def are_ours(path: str, documents: Sequence[Any]) -> bool:
    """Whether a document asks for one of our methods. Raise UserError if nobody knows a method."""
    if not any(isinstance(each, dict) for each in documents):
        raise UserError(f"{path}: no recipe, expected a mapping with `merge_method`")
    named = methods_in(documents)
    known = importlib.import_module("mergekit.merge_methods.registry")._METHODS
    if unknown := [name for name in named if name not in known]:
        from tvb_mergekit.core.settings import METHODS

        for name in (name for name in unknown if name not in METHODS):
            every = *METHODS, *sorted(known.keys() - METHODS.keys())
            raise unknown_method(path, name, every)
    return any(name.startswith(OURS) for name in named)


def single(path: str, documents: Sequence[Any]) -> dict[str, Any]:
    """The one document. Raise UserError for several documents, or another value."""
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise UserError(
            f"{path}: expected one recipe, a mapping with `merge_method`; mergekit-multi runs "
            "several"
        )
    return documents[0]


def unknown_method(path: str, method: object, known: Sequence[str]) -> UserError:
    expected = f"expected one of {', '.join(known)}{hint(method, known)}"
    return UserError(f"{path}: `merge_method` is {method!r:.80}: {expected}")


class _Loader(yaml.SafeLoader):
    """SafeLoader that notes the first key that stands twice in one mapping."""

    repeated: str | None = None

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _value in node.value:
            if key.tag == "tag:yaml.org,2002:str":
                if key.value in seen and not self.repeated:
                    line = key.start_mark.line + 1
                    self.repeated = f"line {line}: `{key.value}` stands here a second time"
                seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def parse(path: str) -> tuple[str, list[Any]]:
    """The text of a recipe file, and its YAML documents.

    Raise UserError if the text is not YAML, or if a key stands twice in a mapping and the recipe is
    ours: for mergekit the last value counts.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
        loader: Any = _Loader(text)
        documents = []
        while loader.check_data():
            documents.append(loader.get_data())
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not a YAML recipe: {one_line(error)}") from error
    if _count(documents, {}) > MOST:
        raise UserError(f"{path}: its aliases (`*`) repeat each other to over {MOST:,} values")
    if loader.repeated and any(name.startswith(OURS) for name in methods_in(documents)):
        raise UserError(f"{path}, {loader.repeated}")
    return text, documents


def _count(value: Any, known: dict[int, float]) -> float:
    """The number of values in a part of a recipe, with those that each alias repeats."""
    if not isinstance(value, list | dict):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf  # of a list that holds itself
        parts = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count(part, known) for part in parts)
    return known[id(value)]
