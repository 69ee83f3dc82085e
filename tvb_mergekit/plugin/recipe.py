"""A recipe in mergekit's configuration: models, or a store's vectors, with tasks and settings."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration

from tvb_mergekit.core.settings import (
    GLOBAL_KEYS,
    MODEL_KEYS,
    VARYING_KEYS,
    Settings,
    check_tasks,
    check_value,
    resolve_settings,
    shown,
    unknown_key,
)
from tvb_mergekit.errors import UserError
from tvb_mergekit.store import store
from tvb_mergekit.store.forms import before_coding
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.matrices import settings_over
from tvb_mergekit.tensors.stream import Item, Weights
from tvb_mergekit.tensors.taskset import EXCLUDED, TaskSet

LOG = logging.getLogger(__name__)


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
    """

    settings: Settings
    base: ModelReference
    models: tuple[ModelReference, ...]
    tasks: tuple[str, ...]
    weights: tuple[float, ...]
    bases: store.Bases | None = None
    order: tuple[int, ...] = ()

    @property
    def store(self) -> store.Bases | None:
        """The store whose bases the models are; None for task vectors."""
        return None if self.bases is None or self.bases.keeps_tasks else self.bases

    @functools.cached_property
    def opened(self) -> dict[ModelReference, Any]:
        """The models that are vectors of a store, as the store has opened them."""
        if self.bases is None:
            return {}
        vectors = (self.bases.vectors[index] for index in self.order)
        return dict(zip(self.models, vectors, strict=True))

    @property
    def mean(self) -> Weights | None:
        """PCA's mean, which only the reconstruction of a task needs."""
        negates = self.store is not None and self.settings.method == "basis_negate"
        return self.store.mean if self.store and negates else None

    @property
    def every(self) -> tuple[ModelReference, ...]:
        return self.base, *self.models

    def over(self, base: Weights) -> Recipe:
        """The recipe with the defaults of its settings for this base."""
        return replace(self, settings=settings_over(base, self.settings))

    def check_base(self, opened: Weights) -> None:
        """Raise UserError if the base is a vector of a store, or is not the base of the vectors."""
        refuse_bases([self.base.model.path], "`base_model`")
        if self.bases is not None:
            self.bases.check_base(opened, str(self.base))

    def task_set(
        self,
        items: Sequence[Item],
        base: Checkpoint,
        sources: Sequence[Weights],
        left_out: Mapping[str, str],
        tied: Mapping[str, str],
        dtype: str | None,
    ) -> TaskSet:
        """The task vectors with these tensors; see `TaskSet`."""
        exclude = self.settings.exclude
        if exclude and EXCLUDED not in left_out.values():
            LOG.warning("`exclude: %s` matches no tensor of this merge", exclude)
        names = str(self.base), [str(model) for model in self.models]
        given = self.settings, self.tasks, self.weights, items, base, *names, sources
        tasks = TaskSet(*given, left_out, tied, dtype=dtype)
        if self.bases is not None and self.bases.keeps_tasks:
            tasks.built = (self.bases.weights / self.bases.scales)[list(self.order)].tolist()
            held = {part.name for item in items for part in item.inputs[:1]}
            tasks.norms, tasks.missed = before_coding(self.bases, self.order, held)
        return tasks


def read_recipe(config: MergeConfiguration) -> Recipe:
    """The recipe in a configuration of one of our methods.

    Raises:
        UserError: a key, value, model or task name is wrong or missing.
    """
    from mergekit.merge import _set_chat_template  # our hook on its module needs this one

    if config.chat_template not in (None, "auto"):  # mergekit checks it after hours
        _set_chat_template(SimpleNamespace(), config)
    if config.base_model is None:
        raise UserError(
            f"`base_model` is missing: {config.merge_method} needs the models' common base"
        )
    base, sections = config.base_model, list(_sections(config))
    models = _models(sections, base)
    given, own = _values(sections, base)
    weights = tuple(float(own.get((model, "weight"), 1.0)) for model in models)
    bases, order = find_store(models)
    if bases is not None:
        every = bases.tasks if bases.keeps_tasks else bases.facts.store.folders
        names = tuple(every[index] for index in order)
        for model, name in zip(models, names, strict=True):
            if own.get((model, "task"), name) != name:
                raise UserError(
                    f"`task` of {model}: its store calls it {name}; give this name, or none"
                )
        settings = bases.merge_settings(
            config.merge_method, given, names if bases.keeps_tasks else ()
        )
        scales = zip(weights, bases.scales[list(order)].tolist(), strict=True)
        scaled = tuple(weight * scale for weight, scale in scales)
        return Recipe(settings, base, models, names, scaled, bases, order)
    tasks = tuple(own.get((model, "task")) or default_task_name(model) for model in models)
    check_tasks(tasks, [str(model) for model in models])
    settings = resolve_settings(config.merge_method, given, tasks)
    return Recipe(settings, base, models, tasks, weights)


def default_task_name(model: ModelReference) -> str:
    """The last part of the model's or adapter's path."""
    path: str = (model.lora or model.model).path
    return path.rstrip("/").rpartition("/")[2] or path


@dataclass(frozen=True)
class _Section:
    """A part of the configuration, its model if the part is about one, and a slice's base."""

    where: str
    parameters: Mapping[str, Any]
    model: ModelReference | None
    base: ModelReference | None


def _sections(part: Any, where: str = "") -> Iterator[_Section]:
    parameters = part.model_dump().get("parameters") or {}
    own = (getattr(part, key, None) for key in ("model", "base_model"))
    yield _Section(where, parameters, *own)
    for key in ("models", "slices", "sources"):
        for index, item in enumerate(getattr(part, key, None) or ()):
            yield from _sections(item, f"{where}{key}[{index}].")
    for name, module in (getattr(part, "modules", None) or {}).items():
        yield from _sections(module, f"{where}modules.{name}.")


def _models(sections: Sequence[_Section], base: ModelReference) -> tuple[ModelReference, ...]:
    """The fine-tuned models in the recipe's order; every list must name each of them once."""
    lists: dict[str, dict[object, ModelReference]] = {}
    its_own = identity_of(base)
    for section in sections:
        model, where = section.model, section.where.rstrip(".")
        if section.base is not None and identity_of(section.base) != its_own:
            raise UserError(f"`{where}.base_model` is {section.base}; a merge has one base, {base}")
        if model is None:
            continue
        its_list = where.rpartition("[")[0]
        listed = lists.setdefault(its_list, {})
        identity = identity_of(model)
        if identity in listed:
            raise UserError(f"`{where}` lists {model} twice (as {listed[identity]}): list it once")
        if identity == its_own and (model != base or not its_list.endswith("sources")):
            raise UserError(
                f"`{where}` is the base model {base}: list only fine-tuned models, and the base in "
                "`sources`, as `base_model` writes it"
            )
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
    for section in sections:
        model, where = section.model, f"{section.where}parameters"
        for key, setting in section.parameters.items():
            elsewhere = key in GLOBAL_KEYS and section.where  # also a model's
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
    if isinstance(setting, list) and len(setting) == 1:
        setting = setting[0]
    if isinstance(setting, Mapping) and setting.get("filter") in (None, "*"):
        setting = setting.get("value")
    if isinstance(setting, list | Mapping):
        raise UserError(
            f"`{key}` under `{where}` is {shown(setting)}: it must be one value for the whole "
            "merge, no filter and no layer gradient"
        )
    return setting


def find_store(models: Sequence[ModelReference]) -> tuple[store.Bases | None, tuple[int, ...]]:
    """The store whose vectors the models are, None if no model is a vector, and their order in it.

    Raises:
        UserError: Only some are vectors, they are of several stores, or a basis is missing.
    """
    paths = [Path(model.model.path) for model in models]
    vectors = [m.lora is None and store.is_basis(p) for m, p in zip(models, paths, strict=True)]
    if not any(vectors):
        return None, ()
    if not all(vectors):
        raise UserError(
            f"model {models[vectors.index(False)]} is not a vector of a store, and "
            f"{models[vectors.index(True)]} is one: list those of one store, or models only"
        )
    folders = [Path(os.path.realpath(path)) for path in paths]
    place = folders[0].parent
    if other := next((folder for folder in folders if folder.parent != place), None):
        raise UserError(f"{folders[0]} and {other} are of two stores: list those of one")
    bases = store.load(place)
    names = [folder.name for folder in folders]
    expected = bases.facts.store.folders[: bases.num_bases]
    all_of_them = bases.keeps_tasks or len(names) == len(expected)
    if not all_of_them or not set(names) <= set(expected):
        what = "tasks" if bases.keeps_tasks else "all bases, and nothing else"
        raise UserError(
            f"the recipe lists {', '.join(names)} of {place}: list {what}, {', '.join(expected)}"
        )
    return bases, tuple(expected.index(name) for name in names)


def refuse_bases(paths: Sequence[str], method: str) -> None:
    """Raise UserError if a model is a vector of a store. Other methods would use it as a model."""
    for path in filter(store.is_basis, paths):
        raise UserError(
            f"model {path} is a vector of a store, a difference from its base, and {method} takes "
            "models: make them with `tvb export`"
        )
