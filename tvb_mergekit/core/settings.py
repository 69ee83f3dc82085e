"""The keys of a recipe with their allowed values, and the settings that they resolve to.

Keys that belong to a basis or a merge method are declared there. Every mistake is a `UserError` of
one line that names the key, the value found and the values expected.
"""

from __future__ import annotations

import functools
import math
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from tvb_mergekit.core import encoders, methods
from tvb_mergekit.core.registry import Declared, Key, Level, Number, Pattern, Text
from tvb_mergekit.errors import UserError, hint
from tvb_mergekit.names import is_linear

BASES, METHODS = encoders.BASES, methods.METHODS
# Bases whose sum is M/T times that of all tasks, whatever G is
EVEN = tuple(name for name, kind in BASES.items() if kind.known is Level.SUM)
MATRIX_METHODS = tuple(name for name, each in METHODS.items() if each.merges == "matrices")
Weight = Annotated[float, Field(gt=0, le=1e6)] | Annotated[float, Field(lt=0, ge=-1e6)]
# Keys of every method and every basis
SHARED = {
    "basis": Key("how the bases are built", Literal[tuple(BASES)], "ae"),
    "seed": Key("seed of everything random", Annotated[int, Field(ge=0, lt=2**64)], 0),
    "exclude": Key("regular expression of tensors to leave alone", Pattern),
    "lambda_scale": Key("lambda, or lambda T/M", Literal["bases", "tasks"], "bases"),
    "lambda": Key("coefficient", Number, 0.4, varying=True),
}


def _users(registry: Mapping[str, Declared], key: str) -> tuple[str, ...]:
    """The functions that declare a key; all, if it is shared."""
    return tuple(name for name, each in registry.items() if key in each.keys) or tuple(registry)


KEYS = {
    name: replace(key, name=name, methods=_users(METHODS, name), bases=_users(BASES, name))
    for keys in (SHARED, *(each.keys for each in (*BASES.values(), *METHODS.values())))
    for name, key in keys.items()
}
GLOBAL_KEYS = {name: key for name, key in KEYS.items() if not key.varying}
VARYING_KEYS = {name: key for name, key in KEYS.items() if key.varying}
MODEL_KEYS = {
    "task": Key("the task's name; by default the last part of the path", Text, name="task"),
    "weight": Key("scale of the vector, not 0", Weight, 1.0, name="weight"),
}
# Keys of the merge of bases. `exclude` is a key of both the merge and the bases.
MERGING_KEYS = ("lambda_scale", *(k for k, x in GLOBAL_KEYS.items() if x.methods != (*METHODS,)))
ALL_KEYS = KEYS | MODEL_KEYS


@dataclass(frozen=True)
class Settings:
    """The resolved keys of the complete merge: each is an attribute, by default its default."""

    method: str
    given: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, key: str) -> Any:
        if key not in GLOBAL_KEYS:
            raise AttributeError(f"no key {key}")
        return self.given.get(key, GLOBAL_KEYS[key].default)

    def but(self, **changes: Any) -> Settings:
        """These settings with other values of some keys."""
        return replace(self, given={**self.given, **changes})

    def or_all_tasks(self) -> Settings:
        """These settings, for the task vectors themselves unless a key is about bases."""
        named = any(key == "basis" or "none" not in GLOBAL_KEYS[key].bases for key in self.given)
        return self if named else self.but(basis="none")

    def in_force(self) -> dict[str, Any]:
        """The keys of this method and basis, as plain JSON values."""
        found = {
            name: getattr(self, name)
            for name, key in GLOBAL_KEYS.items()
            if self.method in key.methods and self.basis in key.bases
            if name != "basis_ratio" or self.num_bases is None
        }
        return {name: [*v] if isinstance(v, tuple) else v for name, v in found.items()}

    def bases_of(self, tasks: int) -> int:
        """M for this many tasks."""
        if self.basis == "none":
            return tasks
        return int(self.num_bases or max(1, math.floor(self.basis_ratio * tasks + 0.5)))

    def is_matrix(self, name: str, shape: Sequence[int]) -> bool:
        """Whether the method merges this tensor as a matrix, or as several (three dimensions)."""
        if self.method not in MATRIX_METHODS or len(shape) not in (2, 3) or 0 in shape:
            return False
        return is_linear(name, len(shape)) if self.matrices is None else _in(self.matrices, name)

    def is_transposed(self, name: str) -> bool:
        """Whether the inputs of a matrix are its rows; WUDI treats both sides differently."""
        return _in(self.transposed, name)

    def excludes(self, tensor_name: str) -> bool:
        return _in(self.exclude, tensor_name)


def _in(pattern: str | None, name: str) -> bool:
    return pattern is not None and re.search(pattern, name) is not None


# Keys of mergekit's own methods -> what serves here instead
INSTEAD = {
    "normalize": "a sum of task vectors is scaled by `lambda`",
    **dict.fromkeys(("rescale", "int8_mask", "filter_wise"), "nothing is needed instead"),
    **dict.fromkeys(("epsilon", "gamma", "select_topk"), "basis_ties keeps a `density`"),
    "t": "`weight` scales a task vector, and `lambda` their sum",
}


def unknown_key(key: str, known: Collection[str], where: str) -> UserError:
    if key in INSTEAD:
        return UserError(f"`{key}` under {where} is of other methods; leave it out: {INSTEAD[key]}")
    if key in MODEL_KEYS:
        return UserError(f"`{key}` under {where} belongs under the `parameters` of one model")
    word = f"`{key if key.isprintable() else repr(key)[1:-1]}` under {where}{hint(key, known)}"
    return UserError(f"unknown key {word}: Known keys: {', '.join(known)}")


@functools.cache  # mergekit checks every value for each tensor
def _adapter(key: str) -> TypeAdapter[Any]:
    return TypeAdapter(ALL_KEYS[key].kind)


def check_value(key: str, value: object) -> Any:
    """The value of a known key in its type. Numbers may be text, as YAML's `1e-3`."""
    wrong = f"`{key}` is {shown(value)}"
    if isinstance(value, bool | np.bool_):
        raise UserError(f"{wrong}; quote a name (YAML reads yes, no, on, off as true or false)")
    try:
        return _adapter(key).validate_python(value)
    except ValidationError as error:
        messages = [each["msg"].removeprefix("Value error, ") for each in error.errors()]
        raise UserError(f"{wrong}: {' or '.join(messages)}") from error


def shown(value: object) -> str:
    """A value in a message. Nested aliases of YAML may stand for more than fits in memory."""
    short = reprlib.Repr()
    short.maxstring = short.maxlong = short.maxother = 80
    text = "empty" if value is None else short.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def resolve_settings(method: str, given: Mapping[str, object], tasks: Sequence[str]) -> Settings:
    """The settings of a merge of T tasks by the `parameters` of its recipe.

    Varying keys (a number, a layer gradient or filters) are only checked: mergekit resolves them.
    """
    if method not in METHODS:
        raise UserError(f"unknown method `{method}`: expected one of {', '.join(METHODS)}")
    if not tasks:
        raise UserError("the recipe lists no models besides the base: list at least one")
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in KEYS:
            here = [name for name, spec in KEYS.items() if method in spec.methods]
            raise unknown_key(key, here, "parameters")
        if method not in (owners := KEYS[key].methods):
            raise UserError(f"`{key}` belongs to {', '.join(owners)}, not to {method}")
        for leaf in _leaves(value) if KEYS[key].varying else [value]:
            values[key] = check_value(key, leaf)
    for name, spec in KEYS.items():
        if spec.required and method in spec.methods and name not in given:
            raise UserError(f"{method} needs `{name}` as a parameter: {spec.help}")
    if "forget" in values:
        names = dict.fromkeys(name.strip() for name in values["forget"].split(","))
        values["forget"] = tuple(names)
        for name in [name for name in names if name not in tasks]:
            known = f"{hint(name, tasks)}; tasks: {', '.join(tasks)}"
            raise UserError(f"`forget` names the unknown task {name!r}{known}")
    settings = Settings(method, {k: value for k, value in values.items() if k in GLOBAL_KEYS})
    for key in settings.given:
        if settings.basis not in (owners := GLOBAL_KEYS[key].bases):
            which = " or ".join(owners)
            raise UserError(f"`{key}` belongs to basis {which}, not to {settings.basis}")
    if settings.num_bases is not None and "basis_ratio" in values:
        raise UserError("`num_bases` and `basis_ratio` both set the number of bases: give one")
    if (count := settings.num_bases or 0) > len(tasks):
        raise UserError(f"`num_bases` is {count} but the recipe lists {len(tasks)} models")
    return settings


def _leaves(value: object) -> Iterator[object]:
    """The plain values in mergekit's filters, layer gradients and PerGroupValues."""
    if isinstance(value, Mapping) and "value" in value:
        yield from _leaves(value["value"])
    elif isinstance(each := getattr(value, "values", value), list | tuple) and each:
        yield from chain.from_iterable(map(_leaves, each))
    else:
        yield value


def check_tasks(names: Sequence[str], models: Sequence[str]) -> None:
    """Raise UserError unless the names are unique and `forget` can list them."""
    for place, (name, model) in enumerate(zip(names, models, strict=True)):
        if name in ("", "base") or "," in name or name != name.strip() or not name.isprintable():
            why = "is empty or `base`, or has a comma, an outer blank or a control character"
        elif name in names[:place]:
            why = f"is also that of model {models[names.index(name)]}"
        else:
            continue
        what = f"the task name {name!r} of model {shown(model)}"
        raise UserError(f"{what} {why}: give it another `task:` name")
