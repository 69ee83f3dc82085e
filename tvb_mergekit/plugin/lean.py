"""mergekit without what few merges need: half of the time that a command of ours takes to start.

mergekit imports peft, which fuses adapters, and two modules of its own, for architectures that are
not in its list and for checkpoints of other layouts; an annotation names a class of transformers,
and what checks configurations there imports all activations. With each come transformers' models,
PyTorch's compiler and its distributed tensors, SymPy or SciPy (transformers before 5.21 imports
those by itself). Here they come when they are used.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

FUNCTIONS = ("mergekit.architecture.auto", "mergekit.architecture.conversion")
IMPORTERS = ("mergekit.common", "mergekit.architecture", "mergekit.io.tasks")
NAMED, MODELS = "PreTrainedModel", "transformers.modeling_utils"
ACTIVATIONS, NAMES_IN = "transformers.activations", "transformers.utils.type_validators"


def _of(stand_in: ModuleType, name: str) -> Any:
    """What the module has under this name, which is imported for it."""
    if sys.modules.get(stand_in.__name__) is stand_in:
        del sys.modules[stand_in.__name__]
    return getattr(importlib.import_module(stand_in.__name__), name)


def _call(stand_in: ModuleType, name: str, *args: Any, **keys: Any) -> Any:
    return _of(stand_in, name)(*args, **keys)


class _Module(ModuleType):
    """A module that is imported when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks every module
            raise AttributeError(name)
        return _of(self, name)


class _Functions(ModuleType):
    """A module of functions, that is imported when one of them is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(_call, self, name)


class _Names(Mapping[str, Any]):
    """ACT2FN of transformers, which checks the configurations of a few models."""

    def _all(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = importlib.import_module(ACTIVATIONS).ACT2FN
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._all()  # to get one would make it

    def __getitem__(self, name: str) -> Any:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


def import_mergekit() -> None:
    """Import the parts of mergekit that import others in vain.

    For a process of ours, where no other thread imports meanwhile; where mergekit is imported
    already, or is being imported, nothing is done.
    """
    if "mergekit" in sys.modules:
        return
    with suppress(Exception), stand_ins():  # what is wrong, plain imports will tell
        with suppress(ModuleNotFoundError):  # some versions of transformers have none
            importlib.import_module(NAMES_IN)
        for name in IMPORTERS:
            importlib.import_module(name)


@contextmanager
def stand_ins() -> Iterator[None]:
    """In the places of modules that are not imported yet; who imports them later gets them."""
    import transformers

    stands: list[ModuleType] = [_Functions(name) for name in FUNCTIONS]
    if (spec := importlib.util.find_spec("peft")) is not None:
        stands.append(_Module("peft"))
        stands[-1].__spec__ = spec  # transformers looks at it
    stands.append(ModuleType(ACTIVATIONS))
    vars(stands[-1])["ACT2FN"] = _Names()
    stands = [module for module in stands if module.__name__ not in sys.modules]
    sys.modules.update({module.__name__: module for module in stands})
    if MODELS not in sys.modules:
        setattr(transformers, NAMED, NAMED)  # an annotation may be a string
    try:
        yield
    finally:
        for module in stands:
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]
        if vars(transformers).get(NAMED) == NAMED:
            delattr(transformers, NAMED)
