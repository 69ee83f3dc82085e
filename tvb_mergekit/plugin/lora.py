"""A merge of adapters as one adapter, without loss: the cores of their factors are merged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from mergekit import merge_methods
from mergekit.parameter_resolver import resolve_parameters
from safetensors.torch import save_file
from torch import Tensor

from tvb_mergekit.core.basis import Tunables
from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.document import Document
from tvb_mergekit.plugin.inputs import FUSE, Options, by_factors, check_for_store, read_inputs
from tvb_mergekit.plugin.planner import input_folders
from tvb_mergekit.tensors.adapter import CONFIG, WEIGHTS, Target
from tvb_mergekit.tensors.engine import Engine
from tvb_mergekit.tensors.matrices import merged_factors
from tvb_mergekit.tensors.merging import build_basis
from tvb_mergekit.tensors.output import StagedFolder, check_new_folder
from tvb_mergekit.tensors.taskset import TaskSet

GRADIENT = "`lambda` and `alpha` of adapters may have filters, but no layer gradient"


def merge_to_adapter(
    document: Document, out: str, dtype: torch.dtype, engine: Engine, options: Options
) -> None:
    """Merge the adapters of a recipe into an adapter in the folder `out`.

    Raises:
        UserError: The merge has no exact factors, and as `read_inputs`.
    """
    settings, folders = document.recipe.settings, input_folders(document.recipe)
    check_new_folder(out, folders)
    check_for_store(document, "an adapter")
    for why, found in (
        ("not all models are adapters", not by_factors(document, options)),
        ("basis_ties trims single entries", settings.method == "basis_ties"),
    ):
        if found:
            raise UserError(
                f"--lora: the merge has no exact factors ({why}): merge to a model, of which "
                "`mergekit-extract-lora` makes an adapter"
            )
    tasks = _with_tunables(document, read_inputs(document, options))
    basis = build_basis(tasks, engine)
    tensors, ranks = dict[str, Tensor](), dict[Target, int]()
    for item in tasks.items:
        target = next(a.targets[item.name] for a in tasks.adapters if item.name in a.targets)
        factors = merged_factors(basis, item, tasks.adapters)
        if factors.rank:
            ranks[target] = factors.rank
            up, down = factors.left, factors.right
            halves = {"A": up.T, "B": down.T} if target.transposed else {"A": down, "B": up}
            tensors |= {target.key(h): t.to(dtype).contiguous() for h, t in halves.items()}
    stage = StagedFolder(out)
    try:
        save_file(tensors, stage.path / WEIGHTS, {"format": "pt"})
        text = json.dumps(_configuration(tasks, ranks), indent=2)
        (stage.path / CONFIG).write_text(text + "\n", encoding="utf-8")
        stage.publish()
    finally:
        stage.discard()


def _configuration(tasks: TaskSet, ranks: Mapping[Target, int]) -> dict[str, Any]:
    """adapter_config.json. The scale alpha / r is 1 in every module."""
    most = max(ranks.values(), default=1)
    pattern = {f"^{target.module}": rank for target, rank in ranks.items() if rank != most}
    first = tasks.adapters[0].config
    return {
        "peft_type": "LORA",
        "task_type": first.get("task_type"),
        "base_model_name_or_path": tasks.base_model,
        "r": most,
        "lora_alpha": most,
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
        "target_modules": sorted(_modules(tasks, [target.module for target in ranks])),
        "fan_in_fan_out": any(t.transposed and not t.embedding for t in ranks),
        "lora_dropout": 0.0,
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _modules(tasks: TaskSet, modules: Sequence[str]) -> set[str]:
    """The last parts of the modules' names, which servers know, if the base has no others alike."""
    last = {module.rpartition(".")[2] for module in modules}
    names = [name.split(".") for name in tasks.base.tensors if name.endswith(".weight")]
    alike = sum(name[-2] in last for name in names if len(name) > 1)
    return last if alike == len(modules) else set(modules)


def _with_tunables(document: Document, tasks: TaskSet) -> TaskSet:
    """The task set of adapters with lambda and alpha of each tensor, as mergekit resolves filters.

    Raises:
        UserError: no value for a tensor, or a layer gradient, which needs mergekit's plan.
    """
    if any(map(_is_graded, document.varying.values())):
        raise UserError(f"{GRADIENT}; {FUSE}")
    if any(module.parameters for module in (document.config.modules or {}).values()):
        raise UserError(
            f"`parameters` of `modules` need mergekit's plan: name them at the top; {FUSE}"
        )
    spec, given = merge_methods.get(document.config.merge_method).spec, document.config.parameters
    items = []
    for item in tasks.items:
        values, _ = resolve_parameters(
            spec, tensor_name=item.name, inputs={}, sources=lambda _: [given]
        )
        if any(values.get(key) is None for key in document.varying):
            raise UserError(f"{', '.join(document.varying)}: no value for tensor `{item.name}`")
        items.append(replace(item, tunables=Tunables.of(values)))
    return replace(tasks, items=items)


def _is_graded(setting: object) -> bool:
    """Whether a setting is a list of values for layers, also as the value of a filter."""
    if isinstance(setting, Mapping):
        return _is_graded(setting.get("value"))
    if not isinstance(setting, list):
        return False
    return not any(isinstance(each, Mapping) for each in setting) or any(map(_is_graded, setting))
