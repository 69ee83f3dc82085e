"""mergekit's configuration to a recipe: models, tasks, weights and settings, all checked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergekit.common import ModelReference
from pydantic import BaseModel

from tvb_mergekit.checkpoints import Checkpoint, weight_files
from tvb_mergekit.errors import UserError
from tvb_mergekit.recipe import (
    GLOBAL_KEYS,
    MODEL_KEYS,
    VARYING_KEYS,
    Settings,
    check_tasks,
    check_value,
    default_task_name,
    resolve_settings,
    shown,
    unknown_key,
)


@dataclass(frozen=True)
class Recipe:
    """One merge by one of our methods, as the recipe's keys say it."""

    settings: Settings
    base: ModelReference
    models: tuple[ModelReference, ...]  # in the order of the tasks
    tasks: tuple[str, ...]
    weights: tuple[float, ...]

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
        UserError: see issue by issue below; nothing of the models has been read by then.
    """
    sections = list(_sections(config))
    method = config.merge_method  # type: ignore[attr-defined]
    base = _reference(config.base_model)  # type: ignore[attr-defined]
    if base is None:
        raise UserError(
            f"`base_model` is missing: {method} needs the model that all others are fine-tuned from"
        )
    models = _models(config, base)
    given = _global_values(section for section in sections if section.model is None)
    own = _model_values((section for section in sections if section.model is not None), base)
    tasks = tuple(own.get((model, "task")) or _default_task(model) for model in models)
    check_tasks(tasks, [str(model) for model in models])
    weights = tuple(float(own.get((model, "weight"), 1.0)) for model in models)
    return Recipe(resolve_settings(method, given, tasks), base, models, tasks, weights)


def check_local_files(recipe: Recipe, lora_cache: str | None) -> None:
    """Open what lies on this disk, before anything else is downloaded or planned.

    Raises:
        UserError: a folder, its configuration or its weights are missing or damaged.
    """
    for model in (recipe.base, *recipe.models):
        path = model.model.path
        if model.lora is not None:
            _check_adapter(model, lora_cache)
        if os.path.isdir(path):
            if not os.path.isfile(os.path.join(path, "config.json")):
                found = ", ".join(weight_files(path)) or "no weight file"
                raise UserError(
                    f"model {path}: no config.json in this folder (found {found}); expected a "
                    "Hugging Face model folder"
                )
            Checkpoint.open(path)
        elif os.path.isfile(path):
            raise UserError(
                f"model {path} is a file; expected a model folder (or mergekit-pytorch)"
            )
        elif path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise UserError(f"model {path}: no such folder (from {os.getcwd()})")


def check_unknown_keys(raw: object, schema: type[BaseModel], where: str = "the recipe") -> None:
    """Refuse keys that mergekit would drop in silence, anywhere in the recipe's own text.

    Args:
        raw: the YAML document as plain objects.
        schema: the pydantic class that mergekit reads it into.
    """
    if not isinstance(raw, Mapping):
        return
    for key, value in raw.items():
        if key not in schema.model_fields:
            raise unknown_key(str(key), tuple(schema.model_fields), where)
        inner = _model_class(schema.model_fields[key].annotation)
        if inner is None or inner is ModelReference:
            continue
        if isinstance(value, list):
            for index, item in enumerate(value):
                check_unknown_keys(item, inner, f"`{key}`[{index}]")
        elif isinstance(value, Mapping) and key == "modules":
            for module, item in value.items():
                check_unknown_keys(item, inner, f"`modules.{module}`")
        elif key != "parameters":
            check_unknown_keys(value, inner, f"`{key}`")


def _model_class(annotation: Any) -> type[BaseModel] | None:
    """The first pydantic class inside an annotation such as Optional[List[X]]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if (found := _model_class(inner)) is not None:
            return found
    return None


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
        values = part.model_dump().get("parameters")
        if values:
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
    lists: dict[str, list[ModelReference]] = {}
    for where, item, in_slice in _inputs(config):
        model = _reference(item.model)
        assert model is not None
        listed = lists.setdefault(where.rpartition("[")[0], [])
        if _same(model, base):
            if not in_slice:
                raise UserError(
                    f"`{where}` is the base model {base}: list only fine-tuned models; the base "
                    "stands under `base_model`"
                )
        elif any(_same(model, other) for other in listed):
            raise UserError(f"`{where}` lists {model} a second time: list each model once")
        listed.append(model)
    first: tuple[ModelReference, ...] = ()
    for where, listed in lists.items():
        if ".sources" in where and not any(_same(model, base) for model in listed):
            raise UserError(f"`{where}` does not list the base model {base}: each slice must")
        models = tuple(model for model in listed if not _same(model, base))
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


def _same(a: ModelReference, b: ModelReference) -> bool:
    def identity(path: Any) -> tuple[str, str | None] | None:
        if path is None:
            return None
        local = os.path.realpath(path.path) if os.path.exists(path.path) else path.path
        return local, path.revision

    return identity(a.model) == identity(b.model) and identity(a.lora) == identity(b.lora)


def _global_values(sections: Iterator[_Section]) -> dict[str, Any]:
    """key -> value (varying keys: all settings of it in a list) of the whole merge."""
    found: dict[str, Any] = {}
    for section in sections:
        for key, setting in section.values.items():
            if key in MODEL_KEYS:
                raise UserError(
                    f"`{key}` under `{section.where}`: it belongs under the parameters of one model"
                )
            if key in VARYING_KEYS:
                found.setdefault(key, []).append(setting)
                continue
            value = _one_value(key, setting, section.where)
            if key in found and found[key] != value:
                raise UserError(
                    f"`{key}` is {shown(found[key])} in one place and {shown(value)} under "
                    f"`{section.where}`: it must be one value for the whole merge"
                )
            found[key] = value
    return found


def _model_values(
    sections: Iterator[_Section], base: ModelReference
) -> dict[tuple[ModelReference, str], Any]:
    found: dict[tuple[ModelReference, str], Any] = {}
    for section in sections:
        model = section.model
        assert model is not None
        for key, setting in section.values.items():
            if key in GLOBAL_KEYS or key in VARYING_KEYS:
                raise UserError(
                    f"`{key}` under `{section.where}` would be ignored: it belongs under the "
                    "recipe's own `parameters`"
                )
            if key not in MODEL_KEYS:
                raise unknown_key(key, tuple(MODEL_KEYS), f"`{section.where}`")
            if _same(model, base):
                raise UserError(f"`{key}` under `{section.where}`: the base model has no task")
            value = check_value(key, _one_value(key, setting, section.where))
            if found.setdefault((model, key), value) != value:
                raise UserError(
                    f"`{key}` of {model} is {shown(found[model, key])} in one place and "
                    f"{shown(value)} under `{section.where}`: it must be one value"
                )
    return found


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


def _check_adapter(model: ModelReference, lora_cache: str | None) -> None:
    assert model.lora is not None
    if not lora_cache:
        raise UserError(
            f"model {model} has an adapter: say where its fused copy may be kept, "
            "--lora-merge-cache DIR (it takes a base model's size per adapter)"
        )
    path = model.lora.path
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "adapter_config.json")):
        raise UserError(
            f"adapter {path}: no adapter_config.json in this folder; expected a PEFT adapter"
        )
    if not os.path.isdir(path) and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise UserError(f"adapter {path}: no such folder (from {os.getcwd()})")
    fused = Path(lora_cache) / f"{model.model._unique_id()}_{model.lora._unique_id()}"
    if fused.exists():
        try:
            Checkpoint.open(fused)
        except UserError as error:
            # mergekit makes the folder first and would take a half-written one for whole.
            raise UserError(
                f"model {model}: its fused copy in {fused} was cut while it was written; "
                f"delete that folder ({error})"
            ) from error


def input_folders(recipe: Recipe) -> Sequence[str]:
    """Every local folder that the merge reads."""
    paths = [model.model.path for model in (recipe.base, *recipe.models)]
    paths += [model.lora.path for model in recipe.models if model.lora]
    return [path for path in paths if os.path.exists(path)]
