"""The adapter: the only package that knows mergekit, and the names of mergekit that it knows.

The start-up hook calls `on_import` after each of mergekit's modules in PROBED has run, before its
importer has taken names from it. Whatever imports mergekit is imported only then.

mergekit promises none of its names. They are compared with the table as soon as their modules are
there. A version of mergekit with the same names works, tested or not. A new name needs only a row.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from types import ModuleType
from typing import Any, NamedTuple

from tvb_mergekit.core.settings import METHODS

LOG = logging.getLogger(__name__)
TESTED = "0.1.5"  # the version of mergekit that has the names below


class Name(NamedTuple):
    """A name of mergekit.

    Attributes:
        place: MODULE:NAME.
        parameters: the names of the parameters in their order; None: only presence counts.
            A final `...` allows further parameters with defaults, a final `*` any others.
    """

    place: str
    parameters: str | None = None

    @property
    def shown(self) -> str:
        return self.place.replace(":", ".")


def _names(rows: str) -> tuple[Name, ...]:
    """A line for each name: its place in mergekit, then its parameters if they count."""
    split = (row.split(maxsplit=1) for row in rows.strip().splitlines())
    return tuple(Name(f"mergekit.{place}", *parameters) for place, *parameters in split)


OF_METHODS = _names("""
merge_methods.registry:register method ...
merge_methods.registry:registered_methods ...
merge_methods.registry:_METHODS
merge_methods.base:MergeMethodSpec name parameters contract ...
merge_methods.base:ParameterSpec name value_type scope default description ...
merge_methods.base:ParameterSpec.validate self value
merge_methods.base:MergeMethod._execute
merge_methods.base:MergeMethod.validate_inputs self input_ids base_id group_name
""")
OF_MERGES = _names("""
merge:run_merge merge_config out_path options config_source
merge:_model_out_config config arch_info trust_remote_code ...
merge:_update_config_vocab config arch_info tokenizer pad_to_multiple_of ...
merge:_set_chat_template tokenizer merge_config ...
merge:_copy_tokenizer merge_config out_path options ...
merge:_copy_tagalong_files merge_config out_path files options ...
plan:ConfigReader config t slice_out module
plan:ConfigReader.parameter_sources self model
plan:MergePlanner config arch_info options out_model_config ...
plan:MergePlanner._plan self ...
plan:MergePlanner._tensors
plan:MergePlanner._tokenizer_task
plan:MergePlanner._model_arch.__wrapped__ self model
merge_methods.task_adapter:ExecuteMergeMethodTask.gather_tensors
merge_methods.task_adapter:ExecuteMergeMethodTask.parameters
io.tasks:GatherTensors.weight_info
io.tasks:LoadTensor model tensor aliases ...
io.tasks:LoaderCache.loaders
io.tasks:LoaderCache.setup self options ...
io.lazy_tensor_loader:LazyTensorLoader.get_tensor self key device aliases raise_on_missing
io.lazy_tensor_loader:ShardedTensorIndex base_path is_safetensors tensor_paths shards ...
tokenizer:PermutedVocabulary gather_tensors tokenizer_task tokens *
tokenizer:truncate.TruncatedVocabulary gather_tensors *
graph:Executor targets cached_values ...
graph:Executor.run self quiet ...
card:is_hf path
card:generate_card config config_yaml name ...
""")
COMMAND = "scripts.{}:main.callback config_file out_path *"

# An imported module of mergekit -> the names to be compared when its import ends. By then mergekit
# has imported their modules as well. Each command needs `mergekit.merge`, wherever it may be.
PROBED = {
    "mergekit.merge_methods.registry": OF_METHODS,
    "mergekit.merge_methods": OF_METHODS,
    "mergekit.merge": OF_MERGES,
    "mergekit.scripts.run_yaml": OF_MERGES + _names(COMMAND.format("run_yaml")),
    "mergekit.scripts.multimerge": OF_MERGES + _names(COMMAND.format("multimerge")),
}
REPLACED = ("run_merge", "callback")  # at the import, by the functions of these names in `run`


def on_import(module: ModuleType) -> str | None:
    """Register our methods in a module of mergekit, or replace its names, if all are as known.

    Returns:
        The reason why this mergekit cannot be used, in one line, or None.
    """
    name = module.__name__
    problem = out_of_range() or next(filter(None, map(difference, PROBED[name])), None)
    try:
        if problem is None and name == "mergekit.merge_methods.registry":
            from tvb_mergekit.plugin.methods import register

            register(module)
        for each in () if problem else PROBED[name]:
            if (last := each.shown.rpartition(".")[2]) in REPLACED:
                run = importlib.import_module("tvb_mergekit.plugin.run")
                replace(each, getattr(run, last))
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


def difference(name: Name) -> str | None:
    """The difference between the installed mergekit and a row of the table, or None."""
    expected = (name.parameters or "").split()
    wanted = f", expected `{name.place.split(':')[1]}({', '.join(expected)})`"
    try:
        owner, attribute = owner_of(name.place)
        # A field of a pydantic class is an annotation only.
        if not hasattr(owner, attribute) and attribute not in owner.__annotations__:
            raise AttributeError(attribute)
        if name.parameters is None:
            return None
        found = inspect.signature(getattr(owner, attribute)).parameters
    except (ImportError, AttributeError):
        return f"has no `{name.shown}`{'' if name.parameters is None else wanted}"
    except (TypeError, ValueError):
        return f"has `{name.shown}`, which is not a function{wanted}"
    others = expected.pop() if expected[-1:] in (["..."], ["*"]) else ""
    rest = [parameter for parameter in found.values() if parameter.name not in expected]
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    optional = all(p.default is not p.empty or p.kind in open_ended for p in rest)
    allowed = not rest or others == "*" or (others == "..." and optional)
    if allowed and [parameter for parameter in found if parameter in expected] == expected:
        return None
    return f"has `{name.shown}({', '.join(found)})`{wanted}"


def replace(name: Name, make: Callable[[Any], Any]) -> None:
    """Replace a name permanently by `make(original)`, once."""
    owner, attribute = owner_of(name.place)
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
    return functools.reduce(getattr, outer, importlib.import_module(module)), attribute


# Before any part of this package that imports mergekit: it would start the import of mergekit's
# registry, and that, through the hook, the import of the same part a second time.
import mergekit.merge_methods  # noqa: E402, F401
