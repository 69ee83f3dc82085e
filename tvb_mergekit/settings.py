"""The keys of a recipe with their allowed values, and the settings that they resolve to.

`Settings` declares the keys of the complete merge, and `GLOBAL_KEYS` lists them. Every mistake is
a `UserError` of one line that names the key, the value found and the values expected.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from numbers import Integral, Real
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from tvb_mergekit.errors import UserError

Method = Literal["basis_ta", "basis_ties", "basis_iso", "basis_tsvm", "basis_wudi", "basis_negate"]
BasisName = Literal["ae", "balanced", "groups", "linear_ae", "pca", "rand_select", "none"]
METHODS: tuple[Method, ...] = get_args(Method)
MATRIX_METHODS: tuple[Method, ...] = ("basis_iso", "basis_tsvm", "basis_wudi")
TITLES: dict[str, str] = {  # of the methods, in model cards
    "basis_ta": "Task Arithmetic on Task Vector Bases",
    "basis_ties": "TIES on Task Vector Bases",
    "basis_iso": "Isotropic Merging on Task Vector Bases",
    "basis_tsvm": "Singular Vectors (TSV-M) on Task Vector Bases",
    "basis_wudi": "Interference-Free Merging (WUDI) on Task Vector Bases",
    "basis_negate": "Task Negation on Task Vector Bases",
}
# Patterns of tensor names, in upper or lower case.
OUTPUT_LAYER = r"lm_head|embed_out|^output\.weight|classifier|\bscore\b|\bhead\b"
EMBEDDINGS = r"embed|\bwte\b|\bwpe\b|^shared\."
EXPERTS = r"expert|moe"  # stacked to three dimensions
LARGEST = 1e30  # coefficient; its products with weights fit in float32
# An int within the floats, or else a finite float; both may be text.
Whole = Annotated[int, Field(gt=-(10**300), lt=10**300)]
NUMBER: TypeAdapter[int | float] = TypeAdapter(Whole | FiniteFloat)


@dataclass(frozen=True)
class Key:
    """The allowed values of one key, and the methods and bases that use the key."""

    help: str
    name: str = ""
    type: type[int] | type[float] | type[str] = float
    default: Any = None
    choices: tuple[str, ...] = ()
    word: str = ""  # allowed in place of a number
    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # excludes low
    nonzero: bool = False
    methods: tuple[str, ...] = METHODS
    bases: tuple[str, ...] = get_args(BasisName)
    method_defaults: Mapping[str, Any] = field(default_factory=dict)

    def default_for(self, method: str) -> Any:
        return self.method_defaults.get(method, self.default)

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
        if self.nonzero:
            kind += " other than 0"
        if self.high < math.inf:
            high = f"{self.high:g}" if self.type is float else self.high
            return f"{kind} in {'(' if self.above else '['}{self.low:g}, {high}]"
        return f"{kind} {'>' if self.above else '>='} {self.low:g}"


Share = partial(Key, low=0, above=True, high=1)
BASES: tuple[str, ...] = get_args(BasisName)
SIZED = tuple(name for name in BASES if name != "none")
Training = partial(Key, bases=("ae", "linear_ae"))
Positive = partial(Training, low=0, above=True)
Ties = partial(Key, methods=("basis_ties",))
Negate = partial(Key, methods=("basis_negate",))
Wudi = partial(Key, methods=("basis_wudi",), low=0, above=True)
Matrix = partial(Key, methods=MATRIX_METHODS)


class Settings(BaseModel):
    """The resolved keys of the complete merge. `resolve_settings` checks and builds them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Method
    basis: Annotated[BasisName, Key("how the bases are built from the task vectors")] = "ae"
    num_bases: Annotated[int | None, Key("the number of bases M", low=1, bases=SIZED)] = None
    basis_ratio: Annotated[float, Share("M as a share of the tasks T", bases=SIZED)] = 0.5
    temperature: Annotated[float, Positive("temperature of the softmax")] = 5.0
    steps: Annotated[int, Training("training steps", low=1)] = 4000
    learning_rate: Annotated[float, Positive("learning rate of Adam")] = 0.01
    weight_decay: Annotated[float, Training("weight decay of Adam", low=0)] = 1e-6
    anneal_every: Annotated[int, Training("steps between two coolings, 0 for none", low=0)] = 0
    anneal_factor: Annotated[float, Positive("the temperature's factor per cooling")] = 0.9
    seed: Annotated[int, Key("seed of everything random", low=0, high=2**64 - 1)] = 0
    exclude: Annotated[str | None, Key("regular expression of tensors to leave alone")] = None
    lambda_scale: Annotated[Literal["bases", "tasks"], Key("lambda, or lambda T/M")] = "bases"
    merge_func: Annotated[Literal["sum", "mean", "max"], Ties("of entries of one sign")] = "sum"
    common: Annotated[float, Share("share of the sum's directions", methods=("basis_iso",))] = 1.0
    flow_time: Annotated[float | Literal["exact"], Wudi("end of the flow", word="exact")] = 300.0
    matrices: Annotated[str | None, Matrix("regular expression of matrices; others: mean")] = None
    transposed: Annotated[str | None, Key("inputs are rows", methods=("basis_wudi",))] = None
    forget: Annotated[tuple[str, ...], Negate("task names to forget, comma-separated")] = ()

    @property
    def names_a_basis(self) -> bool:
        """Whether the recipe has keys about bases."""
        said = self.model_fields_set.intersection(GLOBAL_KEYS)
        sizes = {"basis", "num_bases", "basis_ratio"}
        return any(name in sizes or "none" not in GLOBAL_KEYS[name].bases for name in said)

    def in_force(self) -> dict[str, Any]:
        """The keys of this method and basis, as plain JSON values."""
        values = self.model_dump(mode="json")
        left_out = "basis_ratio" if self.num_bases else ""
        return {
            name: values[name]
            for name, key in GLOBAL_KEYS.items()
            if name != left_out and self.method in key.methods and self.basis in key.bases
        }

    def bases_of(self, tasks: int) -> int:
        """M for this many tasks."""
        if self.basis == "none":
            return tasks
        return self.num_bases or max(1, math.floor(self.basis_ratio * tasks + 0.5))

    def is_matrix(self, name: str, shape: Sequence[int]) -> bool:
        """Whether the method merges this tensor as one matrix, or as several (three dimensions).

        By default: stacked experts, and two dimensions except embeddings and the output layer.
        """
        if self.method not in MATRIX_METHODS or len(shape) not in (2, 3) or 0 in shape:
            return False
        if self.matrices is not None:
            return re.search(self.matrices, name) is not None
        if len(shape) == 3 and not re.search(EXPERTS, name, re.IGNORECASE):
            return False
        return not re.search(f"{EMBEDDINGS}|{OUTPUT_LAYER}", name, re.IGNORECASE)

    def is_transposed(self, name: str) -> bool:
        """Whether the inputs of a matrix are its rows; WUDI treats both sides differently."""
        return self.transposed is not None and re.search(self.transposed, name) is not None

    def excludes(self, tensor_name: str) -> bool:
        return self.exclude is not None and re.search(self.exclude, tensor_name) is not None


def _declared_keys() -> Iterator[Key]:
    for name, declared in Settings.model_fields.items():
        for key in declared.metadata:
            kinds = get_args(declared.annotation) or (declared.annotation,)
            choices = kinds if isinstance(kinds[0], str) else ()
            kind = kinds[0] if kinds[0] in (int, float) else str
            yield replace(key, name=name, type=kind, default=declared.default, choices=choices)


GLOBAL_KEYS = {key.name: key for key in _declared_keys()}
LAMBDAS = {"basis_negate": 0.0} | dict.fromkeys(MATRIX_METHODS, 1.0)
VARYING_KEYS = {
    "lambda": Key(
        "coefficient", "lambda", default=0.4, low=-LARGEST, high=LARGEST, method_defaults=LAMBDAS
    ),
    "alpha": Negate("strength of forgetting", "alpha", low=0, high=LARGEST),
    "density": Share("share of a basis to keep", "density", default=0.2, methods=("basis_ties",)),
}
MODEL_KEYS = {
    "task": Key("the task's name; by default the last part of the path", "task", str),
    "weight": Key("scale of the vector", "weight", default=1.0, low=-1e6, high=1e6, nonzero=True),
}
# Keys of the merge of bases. `exclude` is a key of both the merge and the bases.
MERGING_KEYS = ("lambda_scale", *(k for k, key in GLOBAL_KEYS.items() if key.methods != METHODS))
ALL_KEYS = GLOBAL_KEYS | VARYING_KEYS | MODEL_KEYS


def hint(word: object, known: Collection[str]) -> str:
    """The known word that is closest to a wrong one, for the end of a message, if any is close."""
    lower = {candidate.lower(): candidate for candidate in known}
    match = difflib.get_close_matches(str(word).lower(), lower, n=1)
    return f" (did you mean `{lower[match[0]]}`?)" if match else ""


def unknown_key(key: str, known: Collection[str], where: str) -> UserError:
    word = f"`{key if key.isprintable() else repr(key)[1:-1]}` under {where}{hint(key, known)}"
    return UserError(f"unknown key {word}: Known keys: {', '.join(known)}")


def check_value(key: str, value: object) -> Any:
    """The value of a known key in its type. Numbers may be text, as YAML's `1e-3`.

    Raises:
        UserError: the type or the range is wrong.
    """
    spec = ALL_KEYS[key]
    wrong = f"`{key}` is {shown(value)}: expected {spec.expected}"
    if spec.type is str:
        return _text(spec, value, wrong)
    if spec.word and value == spec.word:
        return value
    if isinstance(value, bool) or not isinstance(value, Real | str):
        raise UserError(wrong)
    try:
        number = NUMBER.validate_python(int(value) if isinstance(value, Integral) else value)
    except ValidationError as error:
        raise UserError(wrong) from error
    if not spec.allows(number):
        raise UserError(wrong)
    return spec.type(number)


def _text(spec: Key, value: object, wrong: str) -> str:
    if isinstance(value, bool):
        raise UserError(f"{wrong}; quote a name (YAML reads yes, no, on, off as true or false)")
    if isinstance(value, int) and not spec.choices:
        value = str(value)
    if not isinstance(value, str):
        raise UserError(wrong)
    if spec.choices and value not in spec.choices:
        raise UserError(wrong + hint(value, spec.choices))
    if not value.strip():
        raise UserError(f"`{spec.name}` is empty: leave the key out, or give it {spec.expected}")
    if spec.name in ("exclude", "matrices", "transposed"):
        try:
            re.compile(value)
        except (re.error, RecursionError, OverflowError) as error:
            wrong = f"`{spec.name}` is {value!r}: bad regular expression: {error}"
            raise UserError(wrong) from error
    return value


def shown(value: object) -> str:
    text = "empty" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def resolve_settings(method: str, given: Mapping[str, object], tasks: Sequence[str]) -> Settings:
    """The settings of a merge.

    Args:
        method: one of METHODS.
        given: the recipe's `parameters`. Varying keys (a number, a layer gradient or filters) are
            only checked: mergekit resolves them per tensor.
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
    _check_combination(values)
    _check_size(values, len(tasks))
    if method == "basis_negate":
        if "forget" not in given or "alpha" not in given:
            raise UserError("basis_negate needs `forget: task` and `alpha: number` as parameters")
        values["forget"] = _forgotten(values["forget"], tasks)
    return Settings(method=method, **values)


def _check_place(method: str, key: str) -> None:
    known = GLOBAL_KEYS | VARYING_KEYS
    if key in MODEL_KEYS:
        raise UserError(f"`{key}` belongs under the parameters of one model, not of the merge")
    if key not in known:
        here = [name for name, spec in known.items() if method in spec.methods]
        raise unknown_key(key, here, "parameters")
    if method not in known[key].methods:
        owner = ", ".join(known[key].methods)
        raise UserError(f"`{key}` belongs to {owner}, not to {method}: leave it out")


def _leaves(value: object) -> Iterator[object]:
    """The plain values in mergekit's filters, layer gradients and PerGroupValues."""
    if isinstance(value, Mapping) and "value" in value:
        yield from _leaves(value["value"])
    elif isinstance(each := getattr(value, "values", value), list | tuple) and each:
        yield from chain.from_iterable(map(_leaves, each))
    else:
        yield value


def _check_combination(values: Mapping[str, Any]) -> None:
    basis = values.get("basis", GLOBAL_KEYS["basis"].default)
    for key in values:
        if basis not in (owners := GLOBAL_KEYS[key].bases):
            raise UserError(f"`{key}` belongs to basis {' or '.join(owners)}, not to {basis}")
    if "anneal_factor" in values and not values.get("anneal_every"):
        raise UserError("`anneal_factor` needs `anneal_every`, the steps between coolings")


def _check_size(values: Mapping[str, Any], num_tasks: int) -> None:
    """Refuse two size keys and more bases than tasks."""
    count = values.get("num_bases")
    if count is not None and "basis_ratio" in values:
        raise UserError("`num_bases` and `basis_ratio` both set the number of bases: give one")
    if count is not None and count > num_tasks:
        raise UserError(f"`num_bases` is {count} but the recipe lists {num_tasks} models")


def _forgotten(text: str, tasks: Sequence[str]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for position, name in enumerate(names):
        if not name:
            raise UserError(f"`forget` is {text!r}: a name between the commas is empty")
        if name in names[:position]:
            raise UserError(f"`forget` is {text!r}: {name!r} is there twice")
        if name not in tasks:
            known = f"{hint(name, tasks)}; tasks: {', '.join(tasks)}"
            raise UserError(f"`forget` names the unknown task {name!r}{known}")
    return names


def check_tasks(names: Sequence[str], models: Sequence[str]) -> None:
    """Raise UserError unless the names are unique and `forget` can list them."""
    first: dict[str, str] = {}
    for name, model in zip(names, models, strict=True):
        remedy = "give it a `task:` name"
        if not name.strip():
            raise UserError(f"model {model} has an empty task name: {remedy}")
        if "," in name or name != name.strip() or not name.isprintable():
            why = "has a comma, an outer blank or a control character"
            raise UserError(
                f"the task name {name!r} of model {shown(model)} {why}: {remedy} without them"
            )
        if name in first:
            same = f"models {first[name]} and {model} have the same task name {name!r}"
            raise UserError(f"{same}: give them `task:` names")
        first[name] = model
