"""The registries of bases and of merge methods. Each is a function that a decorator declares.

A decorator names the keys of recipes that belong to the function alone. The keyword-only parameters
of a function are keys of the settings, or offers of the caller.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints

LARGEST = 1e30  # coefficient; its products with weights fit in float32


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"bad regular expression: {error}") from error
    return pattern


# The values that a key allows, as pydantic checks it
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Whole = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Text = Annotated[
    str,
    Field(coerce_numbers_to_str=True),
    StringConstraints(strip_whitespace=True, min_length=1),
]
Pattern = Annotated[Text, AfterValidator(_compiles)]


@dataclass(frozen=True)
class Key:
    """The allowed values of one key, and the methods and bases that use the key."""

    help: str
    kind: Any
    default: Any = None
    varying: bool = False  # from tensor to tensor, by filters and gradients
    required: bool = False
    name: str = ""
    methods: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()

    def default_for(self, method: str) -> Any:
        return METHODS[method].lambda_ if self.name == "lambda" else self.default


Keys = Mapping[str, Key]
NO_KEYS: Keys = {}
SIZES = {
    "num_bases": Key("the number of bases M", AtLeastOne),
    "basis_ratio": Key("M as a share of the tasks T", Fraction, 0.5),
}
MATRICES = {"matrices": Key("matrices, by their names; others: mean", Pattern)}


class Level(IntEnum):
    """The needs of a merge in its bases, or their parts that are known without G; rising."""

    NONE = 0
    SUM = 1  # of the bases; without G: every task has the weight M/T in the sum
    BASES = 2
    RECONSTRUCTIONS = 3


@dataclass(frozen=True)
class Declared:
    """A function in a registry.

    A basis is (Gram, M) -> `Encoding`. Its `known` part does not depend on the Gram matrix.
    A merge method gives the direction or directions that coefficients scale. `merges` is its form:
    - "sums": (W_e [N, M]) -> coefficient -> the weights [N] of the vectors. Offered: the tasks, and
      `reconstruction` [N, T].
    - "entries": (bases [M, n]) -> [n]. Offered: `thresholds` [M], each basis's for `density`.
    - "matrices": (bases [M, m, n]) -> [m, n], float32. Offered: `noise`, `shares`, `rank`,
      `spanned`, as `tensors.merging` explains. Other tensors get the mean of the bases.
    """

    function: Callable[..., Any]
    title: str = ""  # of a merge method
    keys: Keys = field(default_factory=dict)
    known: Level = Level.NONE
    merges: str = "matrices"
    needs: Callable[[Any], Level] = lambda settings: Level.BASES
    lambda_: float = 1.0  # the default of `lambda`

    def __call__(self, settings: Any, *given: Any, **offered: Any) -> Any:
        """Call the function with its keyword-only parameters, if not offered of the settings."""
        every = inspect.signature(self.function).parameters.values()
        named = [each.name for each in every if each.kind is each.KEYWORD_ONLY]
        known = {n: offered[n] if n in offered else getattr(settings, n) for n in named}
        return self.function(*given, **known)


BASES: dict[str, Declared] = {}
METHODS: dict[str, Declared] = {}
Declare = Callable[[Callable[..., Any]], Callable[..., Any]]


def basis(name: str, *, sized: bool = True, keys: Keys = NO_KEYS, **more: Any) -> Declare:
    """Declare a basis, see `Declared`; one that is `sized` has the keys of M."""
    return _declare(BASES, name, {**SIZES, **keys} if sized else keys, more)


def merge_method(name: str, *, keys: Keys = NO_KEYS, **more: Any) -> Declare:
    """Declare a merge method, see `Declared`."""
    return _declare(METHODS, name, keys if "merges" in more else {**MATRICES, **keys}, more)


def _declare(registry: dict[str, Declared], name: str, keys: Keys, more: Any) -> Declare:
    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        registry[name] = Declared(function, keys=keys, **more)
        return function

    return declare
