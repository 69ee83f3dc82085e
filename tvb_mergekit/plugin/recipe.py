"""Our methods in mergekit's registry, and a recipe in mergekit's configuration.

A recipe lists models, or a store's vectors, with tasks and settings.
mergekit's planner asks each model for a configuration, a tokenizer and tensors. A vector of a store
has those of the base. So the vector is planned as the base's folder with a revision, which folders
do not have; the revision is the vector's name in the recipe.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from mergekit.common import ModelPath, ModelReference
from mergekit.config import MergeConfiguration
from mergekit.merge import _set_chat_template
from mergekit.merge_methods.base import (
    BasePolicy,
    InputContract,
    MergeMethod,
    MergeMethodSpec,
    OptionalTensorPolicy,
    ParameterScope,
    ParameterSpec,
)

from tvb_mergekit.core.settings import (
    GLOBAL_KEYS,
    METHODS,
    MODEL_KEYS,
    VARYING_KEYS,
    Settings,
    check_tasks,
    check_value,
    resolve_settings,
    shown,
    unknown_key,
)
from tvb_mergekit.errors import MergeRefused, UserError, check_known, hint, idle
from tvb_mergekit.hub import local
from tvb_mergekit.plugin import store_of
from tvb_mergekit.store.store import Bases, load
from tvb_mergekit.tensors.adapter import MERGE_FIRST

FLOATS = ("bfloat16", "float16", "float32", "float64")  # of weights
_Section = tuple[str, Any]  # a part of the configuration, after its place


@dataclass(frozen=True)
class Recipe:
    """One merge by one of our methods.

    The models may be vectors of one store, which are differences from its base. A store that keeps
    all tasks holds task vectors: any of them may be listed, and bases are built over them. Else the
    vectors are bases: all are listed, and nothing is built.

    Attributes:
        models: In the order of the tasks.
        tasks: Names of the models: their tasks, or the folders of a store's bases.
        bases: The store whose vectors the models are; None for fine-tuned models.
        order: The store's vector that each model is.
        varying: Key that may vary -> its settings in the recipe, its slices and modules.
    """

    settings: Settings
    base: ModelReference
    models: tuple[ModelReference, ...]
    tasks: tuple[str, ...]
    weights: tuple[float, ...]
    varying: Mapping[str, Sequence[Any]]
    bases: Bases | None = None
    order: tuple[int, ...] = ()

    @property
    def store(self) -> Bases | None:
        """The store whose bases the models are; None for task vectors."""
        return None if self.bases is None or self.bases.facts.whole else self.bases

    def shown(self, model: ModelReference) -> str:
        """A model as the recipe lists it."""
        return str(model) if self.bases is None else str(model.model.revision)

    @property
    def every(self) -> tuple[ModelReference, ...]:
        return self.base, *self.models

    def idle_patterns(self, names: Sequence[str], excluded: bool) -> list[str]:
        """A line about each filter that decides about none of these tensors, which take part, and
        about `exclude` if nothing is excluded. As in mergekit, the first filter in a name decides.
        """
        word = self.settings.exclude
        told = [idle("exclude", word, names)] if word and not excluded else []
        for key, setting in ((k, each) for k, every in self.varying.items() for each in every):
            left = set(names)
            for entry in setting if isinstance(setting, list) else [setting]:
                word = entry.get("filter") if isinstance(entry, Mapping) else None
                decided = {name for name in left if word in (None, "*") or word in name}
                told += [idle(key, word, names)] if word and not decided else []
                left -= decided
        return told


def read_recipe(config: MergeConfiguration, bases: Bases | None = None) -> Recipe:
    """The recipe in a configuration of one of our methods.

    Args:
        bases: a store whose vectors the models are.

    Raise UserError if a key, value, model or task name is wrong or missing.
    """
    if config.chat_template not in (None, "auto"):  # mergekit checks it after hours
        _set_chat_template(SimpleNamespace(), config)
    for key in ("dtype", "out_dtype"):
        if value := getattr(config, key):
            check_known(value.removeprefix("torch."), FLOATS, f"`{key}` is {value}")
    if config.base_model is None:
        said = f"{config.merge_method} needs the models' common base"
        raise UserError(f"`base_model` is missing: {said}")
    if config.base_model.lora is not None:
        raise UserError(f"`base_model` {config.base_model} is a base and an adapter; {MERGE_FIRST}")
    base, sections = config.base_model, list(_sections(config))
    models = _models(sections, base)
    given, own = _values(sections, base)
    varying = {key: given[key] for key in VARYING_KEYS if key in given}
    if bases is not None:
        return _over_store(bases, config.merge_method, base, models, given, own, varying)
    weights = tuple(float(own.get((model, "weight"), 1.0)) for model in models)
    tasks = tuple(own.get((model, "task")) or default_task_name(model) for model in models)
    check_tasks(tasks, [str(model) for model in models])
    settings = resolve_settings(config.merge_method, given, tasks)
    return Recipe(settings, base, models, tasks, weights, varying)


def _over_store(
    bases: Bases,
    method: str,
    base: ModelReference,
    models: tuple[ModelReference, ...],
    given: Mapping[str, Any],
    own: Mapping[tuple[ModelReference, str], Any],
    varying: Mapping[str, Sequence[Any]],
) -> Recipe:
    """The recipe over task vectors of a store, or over all its bases."""
    known = [vector.name for vector in bases.facts.vectors]
    places = {f"{bases.path}/{name}": place for place, name in enumerate(known)}
    order = tuple(places[model.model.revision] for model in models)
    if not bases.facts.whole:
        models = tuple(model for _, model in sorted(zip(order, models, strict=True)))
        order = tuple(sorted(order))  # the mean is the last
        if [*order] != used(bases, method):
            raise UserError(
                f"{bases.path} holds bases, which make sense together only: list all, by "
                f"`- model: {bases.path}`"
            )
    names = tuple(known[place] for place in order)
    for model, name in zip(models, names, strict=True):
        if own.get((model, "task"), name) != name:
            raise UserError(
                f"`task` of {model.model.revision}: its store calls it {name}; leave it out"
            )
    settings = bases.merge_settings(method, given, names if bases.facts.whole else ())
    scaled = tuple(
        float(own.get((model, "weight"), 1.0)) * float(bases.scales[place])
        for model, place in zip(models, order, strict=True)
    )
    return Recipe(settings, base, models, names, scaled, varying, bases, order)


def default_task_name(model: ModelReference) -> str:
    """The last part of the model's or adapter's path."""
    path: str = (model.lora or model.model).path
    return path.rstrip("/").rpartition("/")[2] or path


def _sections(part: Any, where: str = "") -> Iterator[_Section]:
    """The parts of a configuration, with their places in it."""
    yield where, part
    for key in ("models", "slices", "sources"):
        for index, item in enumerate(getattr(part, key, None) or ()):
            yield from _sections(item, f"{where}{key}[{index}].")
    for name, module in (getattr(part, "modules", None) or {}).items():
        yield from _sections(module, f"{where}modules.{name}.")


def _models(sections: Sequence[_Section], base: ModelReference) -> tuple[ModelReference, ...]:
    """The fine-tuned models in the recipe's order; every list must name each of them once."""
    lists: dict[str, dict[object, ModelReference]] = {}
    its_own = identity_of(base)
    for place, part in sections:
        model, where = getattr(part, "model", None), place.rstrip(".")
        of_slice = getattr(part, "base_model", None)
        if of_slice is not None and identity_of(of_slice) != its_own:
            raise UserError(f"`{where}.base_model` is {of_slice}; a merge has one base, {base}")
        if model is None:
            continue
        its_list = where.rpartition("[")[0]
        listed = lists.setdefault(its_list, {})
        identity = identity_of(model)
        if identity in listed:
            vector = model.model.revision if os.path.exists(model.model.path) else None
            both = (vector or model, vector or listed[identity])
            raise UserError("`{}` lists {} twice (as {}): list it once".format(where, *both))
        if identity == its_own and (model != base or not its_list.endswith("sources")):
            remedy = "write it as there" if "sources" in its_list else "take it out of this list"
            raise UserError(f"`{where}` is the base model {base}: {remedy}")
        listed[identity] = model
    first: tuple[ModelReference, ...] = ()
    for where, listed in lists.items():
        if where.endswith("sources") and its_own not in listed:
            raise UserError(f"`{where}` does not list the base model {base}: each slice must")
        models = tuple(model for same, model in listed.items() if same != its_own)
        first = first or models
        if different := set(models) ^ set(first):
            raise UserError(
                f"`{where}` lists other models than the first list ({different.pop()} is in one "
                "only): a task vector must reach over all slices and modules"
            )
    return first


def identity_of(model: ModelReference) -> object:
    """A value that is equal for two names of the same folders."""
    parts = [(part.path, part.revision) for part in (model.model, model.lora) if part is not None]
    return tuple((os.path.realpath(p) if os.path.exists(p) else p, of) for p, of in parts)


def _values(
    sections: Sequence[_Section], base: ModelReference
) -> tuple[dict[str, Any], dict[tuple[ModelReference, str], Any]]:
    """The values of the merge by key, and of the models by model and key.

    A varying key has the list of its settings. A model's value given once is valid for all slices.
    """
    merge: dict[str, Any] = {}
    own: dict[tuple[ModelReference, str], Any] = {}
    for place, part in sections:
        model, where = getattr(part, "model", None), f"{place}parameters"
        for key, setting in (part.model_dump(exclude_unset=True).get("parameters") or {}).items():
            elsewhere = key in GLOBAL_KEYS and place  # also a model's
            if elsewhere or (model is not None and key in VARYING_KEYS):
                raise UserError(f"`{key}` under `{where}` belongs to the recipe's `parameters`")
            if key in VARYING_KEYS:
                merge.setdefault(key, []).append(setting)
                continue
            if model is not None and key not in MODEL_KEYS:
                raise unknown_key(key, tuple(MODEL_KEYS), f"`{where}`")
            if model == base:
                raise UserError(f"`{key}` under `{where}`: the base model has no task")
            value = _one_value(key, setting, where)
            if model is None:
                merge[key] = value
            elif own.setdefault((model, key), check_value(key, value)) != check_value(key, value):
                raise UserError(
                    f"`{key}` of {model} is {shown(own[model, key])} in one place and "
                    f"{shown(value)} under `{where}`: it must be one value"
                )
    return merge, own


def _one_value(key: str, setting: Any, where: str) -> Any:
    """The plain value of a setting, which may not be a filter or a layer gradient."""
    if key not in GLOBAL_KEYS and key not in MODEL_KEYS:
        return setting
    if isinstance(setting, list | Mapping):
        remedy = "no filter and no layer gradient (`lambda` may have them)"
        if isinstance(setting, list) and all(isinstance(each, str) for each in setting):
            remedy = f"`{('|', ',')[key == 'forget'].join(setting)}`"
        raise UserError(
            f"`{key}` under `{where}` is {shown(setting)}: it must be one value for the whole "
            f"merge, {remedy}"
        )
    return setting


def expand(config: MergeConfiguration) -> tuple[MergeConfiguration, Bases | None]:
    """The configuration with a model for each listed vector of a store, and the store, if any.

    Raise UserError for models beside vectors, two stores, or a name that the store lacks.
    """
    base = config.base_model
    if base is None:  # which `read_recipe` refuses
        return config, None
    if store_of(base):
        raise UserError(f"`base_model` is {base}, a store: name the base that it was built from")
    models = sorted((m for m in config.referenced_models() if m != base), key=str)
    found = {model: store_of(model) for model in models}
    folders = {os.path.realpath(place[0]): place[0] for place in found.values() if place}
    if not folders:
        return config, None
    place, *others = folders.values()
    if others:
        raise UserError(f"{place} and {others[0]} are two stores: list the vectors of one")
    bases = load(place)
    for model in (model for model in models if found[model] is None):
        raise UserError(
            f"model {model} is not a vector of {bases.path}, and others are: list those of one "
            "store, or models only"
        )
    return _expand(config, config, bases), bases


def _expand(part: Any, config: MergeConfiguration, bases: Bases) -> Any:
    """A part of the configuration with each vector in place of a store."""
    changes: dict[str, Any] = {}
    for key in ("models", "sources"):
        if entries := getattr(part, key, None):
            made = [_vectors(entry, config, bases) for entry in entries]
            changes[key] = [each for several in made for each in several]
    if slices := getattr(part, "slices", None):
        changes["slices"] = [_expand(each, config, bases) for each in slices]
    if modules := getattr(part, "modules", None):
        changes["modules"] = {n: _expand(each, config, bases) for n, each in modules.items()}
    return part.model_copy(update=changes)


def _vectors(entry: Any, config: MergeConfiguration, bases: Bases) -> list[Any]:
    """An entry of a list of models, or one for each vector of a store that the entry names."""
    if (found := store_of(entry.model)) is None:
        return [entry]
    path, name = found
    vectors = bases.facts.vectors
    names = [vector.name for vector in vectors]
    if name and name not in names:
        raise UserError(f"{path} has no vector {name!r}{hint(name, names)}; {', '.join(names)}")
    parameters: Mapping[str, Any] = entry.model_dump().get("parameters") or {}
    if not name and "task" in parameters:
        raise UserError(f"`task` of {entry.model}: a store names its tasks itself; leave it out")
    base, made = local(str(config.base_model)), []
    for each in [name] if name else [vectors[k].name for k in used(bases, config.merge_method)]:
        # One spelling for each vector, so that one which is listed twice is found.
        given = ModelPath(path=base, revision=f"{bases.path}/{each}")
        made.append(entry.model_copy(update={"model": ModelReference(model=given)}))
    return made


def used(bases: Bases, method: str) -> list[int]:
    """The places of the vectors that a merge of all of a store needs."""
    # PCA's mean is the last, which each reconstruction has.
    return [*range(len(bases.sources) if method == "basis_negate" else bases.num_bases)]


class BasisMethod(MergeMethod):
    """One of METHODS. mergekit's planner uses its name and its parameters; see `planner`."""

    def __init__(self, name: str) -> None:
        # A global key that is not given has no value: `resolve_settings` applies its default.
        # `_values` reads the keys of models. mergekit would compare any two models for each tensor.
        rows = [(key, Any, None) for key in GLOBAL_KEYS.values()]
        # mergekit interpolates numbers, and chooses one of texts, as YAML reads `1e-3`.
        rows += [(key, key.kind | None, key.default_for(name)) for key in VARYING_KEYS.values()]
        self.spec = MergeMethodSpec(
            name=name,
            parameters=tuple(
                ParameterSpec(key.name, kind, ParameterScope.SHARED, default, key.help)
                for key, kind, default in rows
                if name in key.methods
            ),
            contract=InputContract(base=BasePolicy.REQUIRED, min_inputs=2, min_non_base=1),
            pretty_name=METHODS[name].title,
            reference_url="https://openreview.net/forum?id=zkc7u3mIaE",
            optional_tensor_policy=OptionalTensorPolicy.BASE_OR_SKIP,
        )

    def validate_inputs(
        self, input_ids: Any, base_id: Any = None, *, group_name: Any = None
    ) -> None:
        if group_name is None:  # mergekit-pytorch and merge_state_dicts, before they read a tensor
            self._execute()
        super().validate_inputs(input_ids, base_id, group_name=group_name)

    def _execute(self, *args: Any, **kwargs: Any) -> NoReturn:
        # mergekit calls this for single tensors, each of which would get a basis of its own.
        raise MergeRefused(
            f"{self.spec.name} needs all tensors of the models at once: use mergekit-yaml, or "
            "tvb_mergekit.merge for weight files and state dicts"
        )


def register(registry: ModuleType) -> None:
    """Add the methods to mergekit's registry (again after a reload)."""
    for name in METHODS:
        if name not in registry._METHODS:
            registry.register(BasisMethod(name))
