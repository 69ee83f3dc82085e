"""The settings of a merge: the recipe's keys resolved, their combinations checked.

The keys themselves, their types and ranges are one table in `keys`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tvb_mergekit.errors import UserError
from tvb_mergekit.keys import (
    BASES,
    GLOBAL_KEYS,
    METHODS,
    MODEL_KEYS,
    VARYING_KEYS,
    Basis,
    Key,
    Method,
    check_value,
    nearest,
    shown,
    unknown_key,
)

__all__ = [
    "BASES",
    "GLOBAL_KEYS",
    "METHODS",
    "MODEL_KEYS",
    "VARYING_KEYS",
    "Basis",
    "Key",
    "Method",
    "Settings",
    "check_tasks",
    "check_value",
    "default_task_name",
    "nearest",
    "ratio_to_bases",
    "resolve_settings",
    "shown",
    "unknown_key",
]

DEFAULT_RATIO = 0.5  # of the tasks, when no size key is given
SIZE_KEYS = ("num_bases", "basis_ratio", "energy")


def _default(name: str) -> Any:
    return GLOBAL_KEYS[name].default


class Settings(BaseModel):
    """The global keys of a recipe, resolved. Build it with `resolve_settings`, which checks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Method
    basis: Basis = _default("basis")
    num_bases: int | None = None
    basis_ratio: float | None = None
    energy: float | None = None
    solver: Literal["adam", "exact"] = _default("solver")
    temperature: float = _default("temperature")
    steps: int = _default("steps")
    learning_rate: float = _default("learning_rate")
    weight_decay: float = _default("weight_decay")
    anneal_every: int = _default("anneal_every")
    anneal_factor: float = _default("anneal_factor")
    decoder: Literal["least_squares", "learned"] = _default("decoder")
    seed: int = _default("seed")
    exclude: str | None = None
    lambda_scale: Literal["bases", "tasks"] = _default("lambda_scale")
    trim: Literal["model", "tensor"] = _default("trim")
    merge_func: Literal["sum", "mean", "max"] = _default("merge_func")
    forget: tuple[str, ...] = ()

    def in_force(self) -> dict[str, Any]:
        """The keys that belong to this method, basis and solver, as plain JSON values."""
        values = self.model_dump(mode="json")
        return {
            name: values[name]
            for name, key in GLOBAL_KEYS.items()
            if self.method in key.methods and self.basis in key.bases and self.solver in key.solvers
        }

    def excludes(self, tensor_name: str) -> bool:
        """Whether `exclude` leaves this tensor to the base."""
        return self.exclude is not None and re.search(self.exclude, tensor_name) is not None


def ratio_to_bases(ratio: float, num_tasks: int) -> int:
    return max(1, math.floor(ratio * num_tasks + 0.5))


def resolve_settings(method: str, given: Mapping[str, object], tasks: Sequence[str]) -> Settings:
    """The settings of a merge from what the recipe gives under `parameters`.

    Args:
        method: one of METHODS.
        given: every key the recipe gives, varying ones too (a number, a layer gradient or filters):
            those are checked here, but stay with mergekit, which resolves them per tensor.
        tasks: the names of the T tasks in order.

    Raises:
        UserError: a key is unknown, does not belong here or has a wrong value.
    """
    if method not in METHODS:
        raise UserError(f"unknown method `{method}`: expected one of {', '.join(METHODS)}")
    if not tasks:
        raise UserError("the recipe lists no models besides the base: list at least one")
    values: dict[str, Any] = {}
    for key, value in given.items():
        _check_place(method, key)
        if key in VARYING_KEYS:
            for leaf in _leaves(value):
                check_value(key, leaf)
        else:
            values[key] = check_value(key, value)
    _check_combination(method, values)
    _check_size(values, len(tasks))
    if method == "basis_negate":
        if "forget" not in given or "alpha" not in given:
            raise UserError(
                "basis_negate needs `forget: task` and `alpha: number` under parameters"
            )
        values["forget"] = _forgotten(values["forget"], tasks)
    return Settings(method=method, **values)


def _check_place(method: str, key: str) -> None:
    known = GLOBAL_KEYS | VARYING_KEYS
    if key in MODEL_KEYS:
        raise UserError(
            f"`{key}` belongs under the parameters of one model, not of the whole merge"
        )
    if key not in known:
        here = [name for name, spec in known.items() if method in spec.methods]
        raise unknown_key(key, here, "parameters")
    if method not in known[key].methods:
        owner = ", ".join(known[key].methods)
        raise UserError(f"`{key}` belongs to {owner}, not to {method}: leave it out")


def _leaves(value: object) -> Iterator[object]:
    """The plain values in mergekit's filters and layer gradients."""
    if isinstance(value, list | tuple) and value:
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, Mapping) and "value" in value:
        yield from _leaves(value["value"])
    else:
        yield value


def _check_combination(method: str, values: Mapping[str, Any]) -> None:
    basis = values.get("basis", _default("basis"))
    solver = values.get("solver", _default("solver"))
    if basis == "rand_proj" and method != "basis_negate":
        raise UserError(
            f"`basis` is rand_proj, whose bases are no sums of tasks: only basis_negate takes it, "
            f"not {method}"
        )
    if basis == "rand_proj" and "energy" in values:
        raise UserError(
            "`energy` with basis rand_proj: random directions hold no share of the energy to "
            "choose M by; give `num_bases` or `basis_ratio`"
        )
    for key in values:
        spec = GLOBAL_KEYS[key]
        if basis not in spec.bases:
            owners = " or ".join(spec.bases)
            raise UserError(f"`{key}` belongs to basis {owners}, and the basis is {basis}")
        if solver not in spec.solvers:
            raise UserError(f"`{key}` belongs to solver adam, and the solver is {solver}")
    if basis == "linear_ae" and solver == "exact":
        raise UserError("`solver` is exact, which belongs to basis ae: linear_ae takes adam only")
    if "anneal_factor" in values and not values.get("anneal_every"):
        raise UserError(
            "`anneal_factor` needs `anneal_every`, the number of steps between coolings"
        )


def _check_size(values: dict[str, Any], num_tasks: int) -> None:
    """Resolve the default size in place; refuse two size keys and more bases than tasks."""
    sizes = [key for key in SIZE_KEYS if key in values]
    if len(sizes) > 1:
        raise UserError(f"`{sizes[0]}` and `{sizes[1]}` both set the number of bases: give one")
    count = values.get("num_bases")
    if count is not None and count > num_tasks:
        raise UserError(f"`num_bases` is {count} but the recipe lists {num_tasks} models")
    if values.get("basis") == "none":
        if "basis_ratio" in values:
            count = ratio_to_bases(values["basis_ratio"], num_tasks)
        if (count or num_tasks) != num_tasks or values.get("energy", 1) != 1:
            raise UserError(
                f"`basis` is none, which keeps all {num_tasks} tasks: leave out `{sizes[0]}`"
            )
    elif not sizes:
        values["basis_ratio"] = DEFAULT_RATIO


def _forgotten(text: str, tasks: Sequence[str]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for position, name in enumerate(names):
        if not name:
            raise UserError(f"`forget` is {text!r}: a name between the commas is empty")
        if name in names[:position]:
            raise UserError(f"`forget` is {text!r}: {name!r} is there twice")
        if name not in tasks:
            guess = nearest(name, tasks)
            hint = f": did you mean {guess!r}?" if guess else "."
            listed = ", ".join(tasks)
            raise UserError(f"`forget` names the unknown task {name!r}{hint} Tasks: {listed}")
    return names


def default_task_name(model_path: str, lora_path: str | None = None) -> str:
    """The last part of the path, of the adapter's path for base+lora, without @revision."""
    path = (lora_path or model_path).partition("@")[0].rstrip("/")
    return path.rpartition("/")[2] or lora_path or model_path


def check_tasks(names: Sequence[str], models: Sequence[str]) -> None:
    """Raises UserError unless the names are unique and fit to be listed in `forget`."""
    first: dict[str, str] = {}
    for name, model in zip(names, models, strict=True):
        remedy = "give it a `task:` name without them under its parameters"
        if not name.strip():
            raise UserError(f"model {model} has an empty task name: give it a `task:` name")
        if "," in name or name != name.strip() or not name.isprintable():
            raise UserError(
                f"the task name {name!r} of model {shown(model)} has a comma, an outer blank or a "
                f"control character: {remedy}"
            )
        if name in first:
            raise UserError(
                f"models {first[name]} and {model} have the same task name {name!r}: "
                "give them `task:` names"
            )
        first[name] = model
