"""A merge of adapters as one adapter, without loss: the cores of their factors are merged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mergekit.options import MergeOptions
from safetensors.torch import save_file
from torch import Tensor

from tvb_mergekit.errors import UserError, listed
from tvb_mergekit.plugin.document import Document
from tvb_mergekit.plugin.inputs import check_for_store, tasks_for_store
from tvb_mergekit.plugin.planner import plan_only
from tvb_mergekit.tensors.adapter import CONFIG, WEIGHTS, Target
from tvb_mergekit.tensors.merging import build_basis, merged_factors
from tvb_mergekit.tensors.output import check_output_folder, staged
from tvb_mergekit.tensors.taskset import TaskSet


def merge_to_adapter(
    document: Document, out: str, dtype: torch.dtype, options: MergeOptions
) -> None:
    """Merge the adapters of a recipe into an adapter in the folder `out`.

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
                f"--lora: the merge has no exact factors ({why}): merge to a model, of which "
                "`mergekit-extract-lora` makes an adapter"
            )
    basis = build_basis(plan.tasks, plan.engine)
    tensors, ranks = dict[str, Tensor](), dict[Target, int]()
    # Patterns are of mergekit's names, the adapter has those of the base's files.
    for item, own in zip(plan.tasks.items, tasks.items, strict=True):
        target = next(a.targets[own.name] for a in adapters if own.name in a.targets)
        factors = merged_factors(basis, item)
        if factors.rank:
            ranks[target] = factors.rank
            up, down = factors.left, factors.right
            halves = {"A": up.T, "B": down.T} if target.transposed else {"A": down, "B": up}
            tensors |= {target.key(h): t.to(dtype).contiguous() for h, t in halves.items()}
    with staged(out) as folder:
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        text = json.dumps(_configuration(tasks, ranks), indent=2)
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


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
