"""mergekit's configuration to a recipe: models, tasks, weights and settings, all checked."""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from mergekit.common import ModelReference
from pydantic import BaseModel

from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.stores import FINE_TUNED, FineTuned, StoreRecipe, find_store
from tvb_mergekit.settings import (
    GLOBAL_KEYS,
    MODEL_KEYS,
    VARYING_KEYS,
    Settings,
    check_tasks,
    check_value,
    default_task_name,
    nearest,
    resolve_settings,
    shown,
    unknown_key,
)
from tvb_mergekit.store.store import basis_folder

DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Recipe:
    """One merge by one of our methods, as the recipe's keys say it.

    Where the models are the bases of a `store`, the `tasks` are the bases' names; the names of the
    tasks that they stand for are the store's.
    """

    settings: Settings
    base: ModelReference
    models: tuple[ModelReference, ...]  # in the order of the tasks
    tasks: tuple[str, ...]
    weights: tuple[float, ...]
    inputs: FineTuned = FINE_TUNED  # what the models are

    @property
    def store(self) -> StoreRecipe | None:
        """The store whose bases the models are, or None."""
        return self.inputs if isinstance(self.inputs, StoreRecipe) else None

    @property
    def model_names(self) -> dict[str, str]:
        """Task -> model, as the recipe writes it."""
        return {task: str(model) for task, model in zip(self.tasks, self.models, strict=True)}


@dataclass(frozen=True)
class _Section:
    """A `parameters` mapping of the configuration, where it stands, and whose it is."""

    where: str
    values: Mapping[str, Any]
    model: ModelReference | None = None


def read_recipe(config: BaseModel) -> Recipe:
    """The recipe in a MergeConfiguration or RawPyTorchMergeConfig of one of our methods.

    Raises:
        UserError: a key, value, model or task name is wrong or missing. Nothing of the models has
            been read by then.
    """
    sections = list(_sections(config))
    method = config.merge_method  # type: ignore[attr-defined]
    _check_dtypes(config)
    _check_chat_template(getattr(config, "chat_template", None))
    base = _reference(config.base_model)  # type: ignore[attr-defined]
    if base is None:
        raise UserError(
            f"`base_model` is missing: {method} needs the model that all others are fine-tuned from"
        )
    models = _models(config, base)
    given = _global_values(sections)
    own = _model_values(sections, base)
    _check_same_everywhere(config, sections)
    weights = tuple(float(own.get((model, "weight"), 1.0)) for model in models)
    store = find_store(models)
    if store is not None:
        for model in models:
            if (model, "task") in own:
                raise UserError(
                    f"`task` of {model}: a basis stands for several tasks, whose names its store "
                    "knows; leave it out"
                )
        settings = store.settings(method, given)
        names = tuple(basis_folder(m) for m in store.order)
        return Recipe(settings, base, models, names, weights, store)
    tasks = tuple(own.get((model, "task")) or _default_task(model) for model in models)
    check_tasks(tasks, [str(model) for model in models])
    return Recipe(resolve_settings(method, given, tasks), base, models, tasks, weights)


def _check_dtypes(config: Any) -> None:
    for key in ("dtype", "out_dtype"):
        name = getattr(config, key)
        if name is not None and name.removeprefix("torch.") not in DTYPES:
            raise UserError(f"`{key}` is {shown(name)}: expected one of {', '.join(DTYPES)}")


def _check_chat_template(template: str | None) -> None:
    """mergekit notices a misspelt template after the weights are merged."""
    if not template or template == "auto" or (len(template) >= 20 and "{" in template):
        return
    files = importlib.resources.files("mergekit._data.chat_templates").iterdir()
    known = sorted(f.name.removesuffix(".jinja") for f in files if f.name.endswith(".jinja"))
    if template not in known:
        guess = nearest(template, known)
        hint = f"did you mean `{guess}`? " if guess else ""
        raise UserError(
            f"`chat_template` is {shown(template)}: {hint}Expected auto, a Jinja template, or one "
            f"of {', '.join(known)}"
        )


def _reference(model: Any) -> ModelReference | None:
    """mergekit-pytorch names its models by plain paths, which may hold `+` and `@`."""
    if isinstance(model, str):
        return ModelReference.model_validate({"model": {"path": model}})
    assert model is None or isinstance(model, ModelReference)
    return model


def _inputs(config: Any) -> Iterator[tuple[str, Any, bool]]:
    """(where, definition, in a slice) of every model that the configuration lists."""
    modules = getattr(config, "modules", None) or {}
    for prefix, part in (("", config), *((f"modules.{name}.", m) for name, m in modules.items())):
        for index, item in enumerate(getattr(part, "models", None) or ()):
            yield f"{prefix}models[{index}]", item, False
        for number, piece in enumerate(getattr(part, "slices", None) or ()):
            for index, item in enumerate(piece.sources):
                yield f"{prefix}slices[{number}].sources[{index}]", item, True


def _sections(config: Any) -> Iterator[_Section]:
    def section(where: str, part: Any, model: ModelReference | None = None) -> Iterator[_Section]:
        values = part.model_dump().get("parameters") or {}
        yield _Section(f"{where}parameters", values, model)

    yield from section("", config)
    for where, item, _in_slice in _inputs(config):
        yield from section(f"{where}.", item, _reference(item.model))
    modules = getattr(config, "modules", None) or {}
    for prefix, part in (("", config), *((f"modules.{name}.", m) for name, m in modules.items())):
        if prefix:
            yield from section(prefix, part)
        for number, piece in enumerate(getattr(part, "slices", None) or ()):
            yield from section(f"{prefix}slices[{number}].", piece)


def _models(config: Any, base: ModelReference) -> tuple[ModelReference, ...]:
    """The fine-tuned models in the recipe's order; every list must name each of them once."""
    lists: dict[str, dict[_Identity, ModelReference]] = {}
    its_own = _identity(base)
    for where, item, in_slice in _inputs(config):
        model = _reference(item.model)
        assert model is not None
        listed = lists.setdefault(where.rpartition("[")[0], {})
        identity = _identity(model)
        if identity == its_own:
            if in_slice and model != base:
                raise UserError(
                    f"`{where}` writes the base as {model}, `base_model` as {base}: mergekit takes "
                    "them for two models; write both alike"
                )
            if not in_slice:
                raise UserError(
                    f"`{where}` is the base model {base}: list only fine-tuned models; the base "
                    "stands under `base_model`"
                )
        elif same := listed.get(identity):
            also = "" if str(same) == str(model) else f" (it is the same folder as {same})"
            raise UserError(f"`{where}` lists {model} a second time{also}: list each model once")
        listed[identity] = model
    first: tuple[ModelReference, ...] = ()
    for where, listed in lists.items():
        if ".sources" in where and its_own not in listed:
            raise UserError(f"`{where}` does not list the base model {base}: each slice must")
        models = tuple(model for same, model in listed.items() if same != its_own)
        first = first or models
        if set(models) != set(first):
            missing = next(iter(set(first) ^ set(models)))
            raise UserError(
                f"`{where}` lists other models than the first list ({missing} is in one only): "
                "a task vector must reach over all slices and modules"
            )
    if not first:
        raise UserError("the recipe lists no models besides the base: list at least one")
    return first


_Identity: TypeAlias = tuple[tuple[str, str | None] | None, ...]


def _identity(model: ModelReference) -> _Identity:
    """Equal for two ways to write one model: where it lies, its revision, and its adapter's."""

    def place(path: Any) -> tuple[str, str | None] | None:
        if path is None:
            return None
        local = os.path.realpath(path.path) if os.path.exists(path.path) else path.path
        return local, path.revision

    return place(model.model), place(model.lora)


def _global_values(sections: Sequence[_Section]) -> dict[str, Any]:
    """key -> value (varying keys: all settings of it in a list) of the whole merge."""
    found: dict[str, Any] = {}
    shared = [section for section in sections if section.model is None]
    for section in shared:
        for key, setting in section.values.items():
            if key in MODEL_KEYS:
                raise UserError(
                    f"`{key}` under `{section.where}`: it belongs under the parameters of one model"
                )
            if key in VARYING_KEYS:
                found.setdefault(key, []).append(setting)
                continue
            value = _one_value(key, setting, section.where)
            # A part's own parameters are the whole merge's only if every part says the same.
            parts = [s for s in shared if _list_of(s.where) == _list_of(section.where)]
            same = [s for s in parts if _one_value(key, s.values.get(key), s.where) == value]
            if len(same) < len(parts) or found.setdefault(key, value) != value:
                raise UserError(
                    f"`{key}` under `{section.where}` would hold for the whole merge: it belongs "
                    "under the recipe's own `parameters`"
                )
    return found


def _list_of(where: str) -> str:
    """The list or mapping that a section is an entry of: `slices`, `modules`, or nothing."""
    head = where.removesuffix("parameters").rstrip(".")
    return head.rpartition("[")[0] or head.partition(".")[0]


def _model_values(
    sections: Sequence[_Section], base: ModelReference
) -> dict[tuple[ModelReference, str], Any]:
    found: dict[tuple[ModelReference, str], Any] = {}
    for section in sections:
        model = section.model
        if model is None:
            continue
        for key, setting in section.values.items():
            if key in GLOBAL_KEYS or key in VARYING_KEYS:
                raise UserError(
                    f"`{key}` under `{section.where}` would be ignored: it belongs under the "
                    "recipe's own `parameters`"
                )
            if key not in MODEL_KEYS:
                raise unknown_key(key, tuple(MODEL_KEYS), f"`{section.where}`")
            if _identity(model) == _identity(base):
                raise UserError(f"`{key}` under `{section.where}`: the base model has no task")
            value = check_value(key, _one_value(key, setting, section.where))
            if found.setdefault((model, key), value) != value:
                raise UserError(
                    f"`{key}` of {model} is {shown(found[model, key])} in one place and "
                    f"{shown(value)} under `{section.where}`: it must be one value"
                )
    return found


def _check_same_everywhere(config: Any, sections: Sequence[_Section]) -> None:
    """A model's weight and task hold for all slices, so each place that lists it must say them."""
    for where, item, _in_slice in _inputs(config):
        model = _reference(item.model)
        here = {key for s in sections if s.where == f"{where}.parameters" for key in s.values}
        for section in sections:
            missing = [key for key in section.values if section.model == model and key not in here]
            if missing:
                raise UserError(
                    f"`{missing[0]}` of {model} stands under `{section.where}` but not under "
                    f"`{where}`: it holds for the whole merge, so say it in both"
                )


def _one_value(key: str, setting: Any, where: str) -> Any:
    """The plain value of a setting, which may not be a filter or a layer gradient."""
    if isinstance(setting, Mapping) and setting.get("filter") in (None, "*"):
        setting = setting.get("value")
    if isinstance(setting, list) and len(setting) == 1:
        return _one_value(key, setting[0], where)
    if isinstance(setting, list | Mapping):
        known = key in GLOBAL_KEYS or key in MODEL_KEYS
        hint = '; several names are one text: "math,code"' if key == "forget" else ""
        if known:
            raise UserError(
                f"`{key}` under `{where}` is {shown(setting)}: it must be one value for the whole "
                f"merge, no filter and no layer gradient{hint}"
            )
    return setting


def _default_task(model: ModelReference) -> str:
    return default_task_name(model.model.path, model.lora.path if model.lora else None)
