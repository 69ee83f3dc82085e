"""The keys of a recipe in one table, and the check of one value.

Every mistake is a `UserError` of one line that names the key, what was found and what was expected.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

from tvb_mergekit.errors import UserError

Method = Literal["basis_ta", "basis_ties", "basis_negate"]
Basis = Literal["ae", "balanced", "linear_ae", "pca", "rand_select", "rand_proj", "none"]
METHODS: tuple[Method, ...] = ("basis_ta", "basis_ties", "basis_negate")
BASES: tuple[Basis, ...] = (
    "ae",
    "balanced",
    "linear_ae",
    "pca",
    "rand_select",
    "rand_proj",
    "none",
)
TRAINED = ("ae", "linear_ae")
LARGEST = 1e30  # coefficient; times what it multiplies it fits in float32


@dataclass(frozen=True)
class Key:
    """One key: its type, default and range, and the methods, bases and solvers it belongs to."""

    name: str
    type: type[int] | type[float] | type[str]
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # low itself is not allowed
    nonzero: bool = False
    methods: tuple[str, ...] = METHODS
    bases: tuple[str, ...] = BASES
    solvers: tuple[str, ...] = ("adam", "exact")
    method_defaults: Mapping[str, Any] = field(default_factory=dict)

    def default_for(self, method: str) -> Any:
        return self.method_defaults.get(method, self.default)

    @property
    def expected(self) -> str:
        """The allowed values in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.type is str:
            return "text"
        kind = "a whole number" if self.type is int else "a number"
        if self.nonzero:
            kind += " other than 0"
        if self.high < math.inf:
            high = f"{self.high:g}" if self.type is float else self.high
            return f"{kind} in {'(' if self.above else '['}{self.low:g}, {high}]"
        return f"{kind} {'>' if self.above else '>='} {self.low:g}"


def _table(*keys: Key) -> dict[str, Key]:
    return {key.name: key for key in keys}


def _adam(name: str, kind: type[int] | type[float], default: Any, help: str, **rest: Any) -> Key:
    return Key(name, kind, default, help, bases=TRAINED, solvers=("adam",), **rest)


GLOBAL_KEYS = _table(
    Key("basis", str, "ae", "how the bases are built from the task vectors", choices=BASES),
    Key("num_bases", int, None, "the number of bases M", low=1),
    Key("basis_ratio", float, None, "M as a share of the tasks T", low=0, above=True, high=1),
    Key("energy", float, None, "M from the share of tr G to hold", low=0, above=True, high=1),
    Key(
        "solver",
        str,
        "adam",
        "the authors' training, or the least loss",
        choices=("adam", "exact"),
        bases=TRAINED,
    ),
    _adam("temperature", float, 5.0, "temperature of the softmax", low=0, above=True),
    _adam("steps", int, 4000, "training steps", low=1),
    _adam("learning_rate", float, 0.01, "learning rate of Adam", low=0, above=True),
    _adam("weight_decay", float, 1e-6, "weight decay of Adam", low=0),
    _adam("anneal_every", int, 0, "steps between two coolings, 0 for none", low=0),
    _adam("anneal_factor", float, 0.9, "the temperature's factor per cooling", low=0, above=True),
    Key(
        "decoder",
        str,
        "least_squares",
        "W_d of least loss, or the one that was trained",
        choices=("least_squares", "learned"),
        bases=("ae",),
        solvers=("adam",),
    ),
    Key("seed", int, 0, "seed of everything random", low=0, high=2**64 - 1),
    Key("exclude", str, None, "regular expression: matching tensors stay the base's"),
    Key(
        "lambda_scale",
        str,
        "bases",
        "lambda as given, or times T/M (`tasks`)",
        choices=("bases", "tasks"),
    ),
    Key(
        "trim",
        str,
        "model",
        "trim over the whole vector or tensor by tensor",
        choices=("model", "tensor"),
        methods=("basis_ties",),
    ),
    Key(
        "merge_func",
        str,
        "sum",
        "how entries that agree in sign are merged",
        choices=("sum", "mean", "max"),
        methods=("basis_ties",),
    ),
    Key("forget", str, None, "task names to forget, comma-separated", methods=("basis_negate",)),
)
VARYING_KEYS = _table(
    Key(
        "lambda",
        float,
        0.4,
        "scaling coefficient",
        low=-LARGEST,
        high=LARGEST,
        method_defaults={"basis_negate": 0.0},
    ),
    Key(
        "alpha",
        float,
        None,
        "strength of forgetting",
        low=0,
        high=LARGEST,
        methods=("basis_negate",),
    ),
    Key(
        "density",
        float,
        0.2,
        "share of each basis that trimming keeps",
        low=0,
        above=True,
        high=1,
        methods=("basis_ties",),
    ),
)
MODEL_KEYS = _table(
    Key("task", str, None, "the task's name; by default the last part of the path"),
    Key("weight", float, 1.0, "scale of the task vector", low=-1e6, high=1e6, nonzero=True),
)
ALL_KEYS = GLOBAL_KEYS | VARYING_KEYS | MODEL_KEYS


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that `name` is most likely meant to be, ignoring case."""
    lower = {candidate.lower(): candidate for candidate in known}
    match = difflib.get_close_matches(name.lower(), lower, n=1)
    return lower[match[0]] if match else None


def unknown_key(key: str, known: Collection[str], where: str) -> UserError:
    guess = nearest(key, known)
    hint = f"did you mean `{guess}`? " if guess else ""
    return UserError(
        f"unknown key {_quoted(key)} under {where}: {hint}Known keys: {', '.join(known)}"
    )


def check_value(key: str, value: object) -> Any:
    """The value of one key as its type (numbers may come as text, as YAML's `1e-3` does).

    Raises:
        UserError: the type or the range is wrong, or the key is unknown.
    """
    spec = ALL_KEYS.get(key)
    if spec is None:
        raise unknown_key(key, ALL_KEYS, "parameters")
    wrong = UserError(f"`{key}` is {shown(value)}: expected {spec.expected}")
    if spec.type is str:
        return _check_text(spec, value)
    number = _number(value)
    if number is None:
        raise wrong
    in_range = spec.low < number if spec.above else spec.low <= number
    if not in_range or number > spec.high or (spec.nonzero and number == 0):
        raise wrong
    if spec.type is int and number != int(number):
        raise wrong
    return spec.type(number)


def _check_text(spec: Key, value: object) -> str:
    if isinstance(value, bool):
        raise UserError(
            f"`{spec.name}` is {shown(value)}: expected {spec.expected}; "
            "if that is a name (YAML reads yes, no, on, off as true or false), quote it"
        )
    if isinstance(value, int) and not spec.choices:
        value = str(value)
    if not isinstance(value, str) or (spec.choices and value not in spec.choices):
        guess = nearest(value, spec.choices) if isinstance(value, str) else None
        hint = f" (did you mean `{guess}`?)" if guess else ""
        raise UserError(f"`{spec.name}` is {shown(value)}: expected {spec.expected}{hint}")
    if not value.strip():
        raise UserError(f"`{spec.name}` is empty: leave the key out, or give it {spec.expected}")
    if spec.name == "exclude":
        try:
            re.compile(value)
        except (re.error, RecursionError, OverflowError) as error:
            raise UserError(f"`exclude` is {value!r}: no regular expression: {error}") from error
    return value


def _number(value: object) -> int | float | None:
    """An exact int, a finite float, or None if the value is neither."""
    if isinstance(value, bool) or not isinstance(value, Real | str):
        return None
    try:
        if isinstance(value, str):
            try:
                value = int(value)
            except ValueError:
                value = float(value)
        else:  # NumPy's too
            value = int(value) if isinstance(value, Integral) else float(value)
        return value if math.isfinite(value) else None
    except (ValueError, OverflowError):  # no number; an int beyond the floats
        return None


def shown(value: object) -> str:
    text = "empty" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _quoted(name: str) -> str:
    """A name from the recipe between backticks, on one line whatever it holds."""
    return f"`{name if name.isprintable() else repr(name)[1:-1]}`"
