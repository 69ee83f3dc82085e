"""`mergekit-pytorch`: the same for raw state dicts (vision models and the like), one file each."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from mergekit.common import ModelReference
from mergekit.graph import Task
from pydantic import ConfigDict

from tvb_mergekit.checkpoints import Checkpoint
from tvb_mergekit.errors import UserError
from tvb_mergekit.output import StagedFolder, check_disk, check_output_folder
from tvb_mergekit.plugin.files import input_folders
from tvb_mergekit.plugin.loaders import MappedLoader
from tvb_mergekit.plugin.planning import Plan, check_store, devices_of, replace_tasks
from tvb_mergekit.plugin.reading import read_recipe
from tvb_mergekit.plugin.running import finish, warn_of_stale_parts, wrap_command
from tvb_mergekit.plugin.sources import Source, mapped
from tvb_mergekit.plugin.stores import refuse_bases
from tvb_mergekit.recipe import METHODS
from tvb_mergekit.refusals import refusing


class Publish(Task[None]):
    """The last node: our files beside the weights, then the rename."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    finalize: Task
    stage: StagedFolder
    plan: Any  # a Plan, of which pydantic would make a schema
    started: float
    forget: Callable[[], None]  # our loaders, which a later merge must not find

    def arguments(self) -> dict[str, Task]:
        return {"done": self.finalize}

    def execute(self, **_kwargs: Any) -> None:
        with refusing(out=str(self.stage.out)):
            finish(self.stage, self.plan, self.started, card=False)
        self.forget()

    def main_thread_only(self) -> bool:
        return True

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def wrap_raw_pytorch(module: ModuleType) -> None:
    """Wrap `plan_flat_merge` and the command of `mergekit.scripts.merge_raw_pytorch`."""
    original = module.plan_flat_merge
    if getattr(original, "tvb_mergekit", False):
        return

    @functools.wraps(original)
    def plan_flat_merge(
        config: Any, out_path: str, tensor_union: bool, tensor_intersection: bool, options: Any
    ) -> list[Task[Any]]:
        if config.merge_method not in METHODS:
            listed = [config.base_model, *(model.model for model in config.models)]
            with refusing():
                refuse_bases([_reference(path) for path in listed if path], config.merge_method)
            tasks: list[Task[Any]] = original(
                config, out_path, tensor_union, tensor_intersection, options
            )
            return tasks
        started = time.perf_counter()
        with refusing(planning=lambda: True):
            recipe = read_recipe(config)
            check_output_folder(out_path, input_folders(recipe))
            devices = devices_of(options)
            checkpoints = {m: open_file(m) for m in (recipe.base, *recipe.models)}
            loaders = {model: MappedLoader(checkpoint) for model, checkpoint in checkpoints.items()}
            check_store(recipe, loaders)
            if recipe.store is not None:  # mergekit plans what the listed files name
                named = recipe.store.names(checkpoints[recipe.base].tensors)
                for model in recipe.models:
                    loaders[model] = MappedLoader(checkpoints[model], named)
            known = module.SimpleLoaderCache().loaders
            known.clear()  # an earlier merge of this process may have seen other files
            known.update({model.model.path: loader for model, loader in loaders.items()})
            if recipe.store is None and not (tensor_union or tensor_intersection):
                _check_same_tensors(checkpoints)
            warn_of_stale_parts(out_path)
            stage = StagedFolder(out_path)
            planned = original(config, str(stage.path), tensor_union, tensor_intersection, options)
            dtype = config.out_dtype or config.dtype
            plan = Plan(recipe, options, devices, loaders, dtype)
            *saves, finalize = planned
            saves.sort(key=lambda save: save.tensor_name)  # mergekit's order is that of a set
            pairs = [(save.tensor_task.output_weight, save.tensor_task) for save in saves]
            made = replace_tasks(plan, pairs, lambda task: _file_sources(checkpoints, task))
            replaced = {weight.name: task for weight, task in made}
            check_disk(out_path, plan.output_bytes)
            kept = [
                save.model_copy(update={"tensor_task": replaced[save.tensor_name]})
                for save in saves
                if save.tensor_name in replaced
            ]
            finalize = finalize.model_copy(update={"tensor_save_tasks": tuple(kept)})
            publish = Publish(
                finalize=finalize, stage=stage, plan=plan, started=started, forget=known.clear
            )
            return [*kept, finalize, publish]

    plan_flat_merge.tvb_mergekit = True  # type: ignore[attr-defined]
    vars(module)["plan_flat_merge"] = plan_flat_merge
    wrap_command(module.main, schema=module.RawPyTorchMergeConfig)


def _reference(path: str) -> ModelReference:
    return ModelReference.model_validate({"model": {"path": path}})


def _check_same_tensors(checkpoints: Mapping[ModelReference, Checkpoint]) -> None:
    every = {name for checkpoint in checkpoints.values() for name in checkpoint.tensors}
    for model, checkpoint in checkpoints.items():
        for name in sorted(every - set(checkpoint.tensors)):
            raise UserError(
                f"tensor `{name}` is not in {model}, but in others; merge what all have with "
                "--tensor-intersection, or keep the base's with --tensor-union"
            )


def open_file(model: ModelReference) -> Checkpoint:
    """The weight file that a recipe of mergekit-pytorch names."""
    path = model.model.path
    if not os.path.isfile(path):
        found = "is a folder" if os.path.isdir(path) else "no such file"
        raise UserError(f"model {path}: {found}; mergekit-pytorch takes one weight file each")
    return Checkpoint.open(path)


def _file_sources(
    checkpoints: Mapping[ModelReference, Checkpoint], task: Any
) -> dict[ModelReference, Source]:
    name = task.output_weight.name
    return {
        model: mapped(checkpoint, name if name in checkpoint.tensors else None)
        for model, checkpoint in checkpoints.items()
    }
