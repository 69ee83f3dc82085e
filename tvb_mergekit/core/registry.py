"""The registries of bases and of merge methods. Each is a function that a decorator declares.

A decorator names the keys of recipes that belong to the function alone. The keyword-only parameters
of a function are keys of the settings, or offers of the caller.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

LARGEST = 1e30  # coefficient; its products with weights fit in float32


@dataclass(frozen=True)
class Key:
    """The allowed values of one key, and the methods and bases that use the key."""

    help: str
    type: type[int] | type[float] | type[str] = float
    default: Any = None
    choices: tuple[str, ...] = ()
    word: str = ""  # allowed in place of a number
    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # excludes low
    nonzero: bool = False
    pattern: bool = False  # a regular expression
    varying: bool = False  # from tensor to tensor, by filters and gradients
    required: bool = False
    name: str = ""
    methods: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()

    def default_for(self, method: str) -> Any:
        return METHODS[method].lambda_ if self.name == "lambda" else self.default

    def allows(self, number: float) -> bool:
        """Whether a finite number is of the type and in the range."""
        low = self.low < number if self.above else self.low <= number
        whole = self.type is float or number == int(number)
        return low and number <= self.high and whole and not (self.nonzero and number == 0)

    @property
    def expected(self) -> str:
        """The allowed values in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.type is str:
            return "text"
        kind = self.word and f"{self.word} or "
        kind += "a whole number" if self.type is int else "a number"
        kind += " other than 0" * self.nonzero
        if self.high < math.inf:
            high = f"{self.high:g}" if self.type is float else self.high
            return f"{kind} in {'(' if self.above else '['}{self.low:g}, {high}]"
        return f"{kind} {'>' if self.above else '>='} {self.low:g}"


Whole = partial(Key, type=int, low=0)
Positive = partial(Key, low=0, above=True)
Fraction = partial(Positive, high=1)
SIZES = {
    "num_bases": Whole("the number of bases M", low=1),
    "basis_ratio": Fraction("M as a share of the tasks T", default=0.5),
}
MATRICES = {"matrices": Key("matrices, by their names; others: mean", str, pattern=True)}


class Level(IntEnum):
    """The needs of a merge in its bases, or their parts that are known without G; rising."""

    NONE = 0
    SUM = 1  # of the bases; without G: every task has the weight M/T in the sum
    BASES = 2
    RECONSTRUCTIONS = 3


@dataclass(frozen=True)
class Declared:
    """A function in a registry.

    A basis is (Gram, M) -> `Encoding`. What is `known` of it does not depend on the Gram matrix.

    A merge method gives the direction or directions that coefficients scale. `merges` is its form:
    - "sums": (W_e [N, M]) -> coefficient -> the weights [N] of the vectors. Offered: the tasks, and
      `reconstruction` [N, T].
    - "entries": (bases [M, n]) -> [n]. Offered: `thresholds` [M], each basis's for `density`.
    - "matrices": (bases [M, m, n]) -> [m, n], float32. Offered: `noise`, `shares`, `rank`, as
      `tensors.matrices` explains. Other tensors get the mean of the bases.
    """

    name: str
    title: str
    paper: str
    keys: Mapping[str, Key]
    function: Callable[..., Any]
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
Keys = Mapping[str, Key]
Declare = Callable[[Callable[..., Any]], Callable[..., Any]]


def basis(
    name: str,
    title: str,
    paper: str = "",
    keys: Keys | None = None,
    sized: bool = True,
    **more: Any,
) -> Declare:
    """Declare a basis, see `Declared`; one that is `sized` has the keys of M."""
    return _declare(BASES, name, title, paper, (SIZES if sized else {}) | dict(keys or {}), more)


def merge_method(
    name: str, title: str, paper: str, keys: Keys | None = None, **more: Any
) -> Declare:
    """Declare a merge method, see `Declared`."""
    own = {} if more.get("merges") else MATRICES
    return _declare(METHODS, name, title, paper, own | dict(keys or {}), more)


def _declare(
    registry: dict[str, Declared], name: str, title: str, paper: str, keys: Keys, more: Any
) -> Declare:
    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        registry[name] = Declared(name, title, paper, keys, function, **more)
        return function

    return declare
