"""A base and T Llama models of a given size, from a seed.

The weights are noise. All of it is cut from one buffer of normal noise, at another place for each
tensor of each model, since drawing it afresh would take longer than writing it. A task vector has
0.28 % of the base's norm, as after a light fine-tuning: half a direction that all models share,
half its own. The files are as `save_pretrained` writes them, without a tokenizer.
"""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

SLACK = 2**20  # elements: the places in the noise buffer that a tensor may start at


def ensure(work: Path, tasks: int, megabytes: int, seed: int = 0) -> Path:
    """The folder of such models in `work`, written unless it is there."""
    folder = work / f"models-{tasks}x{megabytes}MB-seed{seed}-v3"
    if not folder.exists():
        generate(folder, tasks, megabytes, seed)
    return folder


def architecture(megabytes: int) -> LlamaConfig:
    """The widest Llama of this size that has eight layers; four query heads share a key."""
    for hidden in (4096, 2048, 1024, 512, 256, 128, 64):
        vocabulary, inner = min(16 * hidden, 32000), hidden * 11 // 4
        each = hidden * hidden * 5 // 2 + 3 * hidden * inner + 2 * hidden  # of a layer
        layers = round((megabytes * 10**6 // 2 - 2 * vocabulary * hidden) / each)
        if layers >= 8:
            break
    heads = max(4, hidden // 64)
    return LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, vocab_size=vocabulary,
        num_hidden_layers=max(1, layers), num_attention_heads=heads,
        num_key_value_heads=heads // 4, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def generate(folder: Path, tasks: int, megabytes: int, seed: int) -> None:
    """Write `folder`/base, `folder`/task-0 ... next to their place, then rename."""
    config = architecture(megabytes)
    with torch.device("meta"):
        tensors = {n: tuple(t.shape) for n, t in LlamaForCausalLM(config).state_dict().items()}
    random = torch.Generator().manual_seed(seed)
    largest = max(math.prod(shape) for shape in tensors.values())
    noise = torch.randn(largest + SLACK, generator=random)
    # One row for the shared direction and for each model; one column for each tensor
    places = torch.randint(SLACK, (2 + tasks, len(tensors)), generator=random)
    shared, base, *every = [dict(zip(tensors, row, strict=True)) for row in places.tolist()]

    def value(name: str, own: dict[str, int] | None) -> torch.Tensor:
        def cut(of: dict[str, int]) -> torch.Tensor:
            return noise[of[name] : of[name] + math.prod(tensors[name])]

        made = (0.02 * cut(base)).bfloat16()
        if own is not None:  # added to the rounded base, as training would start from it
            delta = 4e-5 * cut(shared)  # the time of a lossless store depends on it
            made = made.float().add_(delta.add_(4e-5 * cut(own))).bfloat16()
        return made.view(tensors[name])

    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    for name, own in {"base": None, **{f"task-{n}": each for n, each in enumerate(every)}}.items():
        (part / name).mkdir(parents=True)
        weights = {tensor: value(tensor, own) for tensor in tensors}
        save_file(weights, part / name / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(part / name)
    os.rename(part, folder)
