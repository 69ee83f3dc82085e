"""From a recipe as mergekit's commands take it to the inputs of a store, or to one adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from mergekit.options import MergeOptions
from safetensors.torch import save_file
from torch import Tensor

from tvb_mergekit.core.gram import NO_TENSOR
from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.plugin.document import Document
from tvb_mergekit.plugin.plan import Plan
from tvb_mergekit.plugin.planner import plan_only
from tvb_mergekit.tensors.adapter import CONFIG, WEIGHTS, key_of
from tvb_mergekit.tensors.merging import build_basis, merged_factors
from tvb_mergekit.tensors.output import check_output_folder, staged
from tvb_mergekit.tensors.taskset import TaskSet

Options: TypeAlias = MergeOptions  # under the plugin's own name, for layers that know no mergekit
# transformers 5 writes experts as its older versions did, unless it is asked for its own names.
SAVE_AGAIN = (
    "save the models again with transformers' `save_pretrained(FOLDER, save_original_format=False)`"
)


def read_inputs(document: Document, options: Options, names: Sequence[str] = ()) -> TaskSet:
    """Open the models of a recipe, and match their tensors.

    Args:
        names: tensors that take part as zeros although no adapter changes them.

    Raise UserError if a model is missing, damaged, quantized or does not fit the base.
    """
    recipe = document.recipe
    if recipe.store is not None:
        path = recipe.store.path
        raise UserError(f"this lists the bases of {path}: list the fine-tuned models")
    check_for_store(document)
    found = tasks_for_store(document, plan_only(document, options, names))
    if not found.items:
        raise UserError(NO_TENSOR)
    return found


def check_for_store(document: Document, what: str = "a store") -> None:
    """Raise UserError if a store, or an adapter, cannot hold the merge of a recipe."""
    config = document.config
    if config.slices or any(module.slices for module in (config.modules or {}).values()):
        raise UserError(f"`slices`: {what} has the base's layers; list the models under `models`")
    for name, module in (config.modules or {}).items():
        if module.parameters:
            told = f"`parameters` under `modules.{name}`: {what} has none of a module alone"
            raise UserError(f"{told}; give them at the top")
    source = config.tokenizer.source if config.tokenizer else config.tokenizer_source
    if source not in (None, "base"):
        raise UserError(f"`tokenizer_source` is {source}: {what} needs `tokenizer_source: base`")


def tasks_for_store(document: Document, plan: Plan) -> TaskSet:
    """The task vectors of a plan under the base's names of tensors. UserError for other tensors."""
    items = []
    owners: dict[str, str] = {}
    for item in plan.tasks.items:
        assert item.base is not None
        name = item.base.name
        if name is None or None in [part.name for part in item.inputs]:
            raise UserError(
                f"tensor `{item.name}` is made of others when it is loaded (an old layout of "
                f"experts): {SAVE_AGAIN}, or merge them with mergekit-yaml"
            )
        if (owner := owners.setdefault(name, item.name)) != item.name:
            raise UserError(
                f"tensors `{owner}` and `{item.name}` are one tensor of the base and two of the "
                "models: save the base with both, or leave both out with `exclude`"
            )
        shape = plan.base.tensors[name].shape
        if item.shape != shape:
            raise UserError(
                f"tensor `{item.name}`: the recipe's tokenizer gives it the shape "
                f"{list(item.shape)}, the base has {list(shape)}: a store belongs to the base's "
                "own vocabulary"
            )
        base = item.base if any(part.holds == "weight" for part in item.inputs) else None
        items.append(replace(item, name=name, counted_as=name, base=base))
    varying = {key: settings[0] for key, settings in document.recipe.varying.items()}
    return replace(plan.tasks, items=items, varying=varying)


def merge_to_adapter(
    document: Document, out: str, dtype: torch.dtype, options: MergeOptions
) -> None:
    """Merge the adapters of a recipe into an adapter in the folder `out`, by their factors' cores.

    Raise UserError if the merge has no exact factors, and as `planned`.
    """
    check_output_folder(out)
    check_for_store(document, "an adapter")
    plan = plan_only(document, options)
    tasks, adapters = tasks_for_store(document, plan), plan.tasks.adapters
    dense = [i.name for i in tasks.items if not i.factored or len(i.shape) != 2]
    for why, found in (
        ("not all models are adapters", len(adapters) < len(tasks.tasks)),
        (f"{listed(dense)}: no factors of one matrix of the base", dense),
        ("basis_ties trims single entries", tasks.settings.method == "basis_ties"),
    ):
        if found:
            raise UserError(
                f"--lora: the merge has no exact factors ({why}): merge to a model, then "
                "`mergekit-extract-lora` makes an adapter"
            )
    basis = build_basis(plan.tasks, plan.engine)
    tensors, ranks, conv1d = dict[str, Tensor](), dict[str, int](), False
    # Patterns are of mergekit's names, the adapter has those of the base's files.
    for item, own in zip(plan.tasks.items, tasks.items, strict=True):
        targets = (a.targets[own.name] for a in adapters if own.name in a.targets)
        module, transposed, embedding = next(targets)
        factors = merged_factors(basis, item)
        if factors.rank:
            ranks[module] = factors.rank
            conv1d |= transposed and not embedding
            up, down = factors.left, factors.right
            halves = {"A": up.T, "B": down.T} if transposed else {"A": down, "B": up}
            for half, tensor in halves.items():
                tensors[key_of(module, half, embedding)] = tensor.to(dtype).contiguous()
    with staged(out) as folder:
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        text = json.dumps(_configuration(tasks, ranks, conv1d), indent=2)
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def _configuration(tasks: TaskSet, ranks: Mapping[str, int], conv1d: bool) -> dict[str, Any]:
    """adapter_config.json. The scale alpha / r is 1 in every module."""
    most = max(ranks.values(), default=1)
    pattern = {f"^{module}": rank for module, rank in ranks.items() if rank != most}
    first = tasks.adapters[0].config
    return {
        "peft_type": "LORA",
        "task_type": first.get("task_type"),
        "base_model_name_or_path": tasks.base_model,
        "r": most,
        "lora_alpha": most,
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
        "target_modules": sorted(_modules(tasks, [*ranks])),
        "fan_in_fan_out": conv1d,
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
