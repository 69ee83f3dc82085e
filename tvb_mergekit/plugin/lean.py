"""mergekit without what few merges need: half of the time that a command of ours takes to start.

mergekit imports peft, which fuses adapters, and two modules of its own, for architectures that are
not in its list and for checkpoints of other layouts; an annotation names a class of transformers,
and what checks configurations there imports all activations. With each come transformers' models,
PyTorch's compiler and its distributed tensors, SymPy or SciPy. Here they come when they are used.
A process that has mergekit already is left as it is.
"""

from __future__ import annotations

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


class _Later(ModuleType):
    """A module that is imported when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks every module
            raise AttributeError(name)
        return self.found(name)

    def found(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


class _Functions(_Later):
    """A module of functions, that is imported when one of them is called."""

    def found(self, name: str) -> Any:
        def later(*args: Any, **keys: Any) -> Any:
            return super(_Functions, self).found(name)(*args, **keys)

        return later


class _Names(Mapping[str, Any]):
    """ACT2FN of transformers, which checks the configurations of a few models."""

    def _all(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = importlib.import_module(ACTIVATIONS).ACT2FN
        return found

    def __getitem__(self, name: str) -> Any:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


def import_mergekit() -> None:
    """Import the parts of mergekit that import others in vain, unless that has been done."""
    if IMPORTERS[0] in sys.modules:
        return
    with suppress(Exception), _later():  # what is wrong, plain imports will tell
        with suppress(ModuleNotFoundError):  # some versions of transformers have none
            importlib.import_module(NAMES_IN)
        for name in IMPORTERS:
            importlib.import_module(name)


@contextmanager
def _later() -> Iterator[None]:
    """Nothing of this is seen by who imports later."""
    import torch  # noqa: F401  # it must not meet a stand-in
    import transformers

    stands: list[ModuleType] = [_Functions(name) for name in FUNCTIONS]
    if (spec := importlib.util.find_spec("peft")) is not None:
        stands.append(_Later("peft"))
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
