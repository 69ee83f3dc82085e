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
from transformers import LlamaConfig

SLACK = 2**20  # elements: the places in the noise buffer that a tensor may start at


def ensure(work: Path, tasks: int, megabytes: int, seed: int = 0) -> Path:
    """The folder of such models in `work`, written unless it is there."""
    folder = work / f"models-{tasks}x{megabytes}MB-seed{seed}-v2"
    if not folder.exists():
        generate(folder, tasks, megabytes, seed)
    return folder


def matrices(hidden: int) -> dict[str, tuple[int, int]]:
    """The matrices of one layer; four query heads share a key."""
    inner = hidden * 11 // 4
    rows = {"self_attn.q": hidden, "self_attn.k": hidden // 4, "self_attn.v": hidden // 4,
            "self_attn.o": hidden, "mlp.gate": inner, "mlp.up": inner}  # fmt: skip
    found = {f"{name}_proj": (size, hidden) for name, size in rows.items()}
    return found | {"mlp.down_proj": (hidden, inner)}


def architecture(megabytes: int) -> tuple[int, int, int]:
    """Hidden size, vocabulary and layers of the widest model of this size with eight layers."""
    found = []
    for hidden in (64, 128, 256, 512, 1024, 2048, 4096):
        vocabulary = min(16 * hidden, 32000)
        each = sum(rows * columns for rows, columns in matrices(hidden).values()) + 2 * hidden
        layers = round((megabytes * 10**6 // 2 - 2 * vocabulary * hidden) / each)
        found.append((hidden, vocabulary, max(1, layers)))
    return max([size for size in found if size[2] >= 8] or found[:1])


def shapes(hidden: int, vocabulary: int, layers: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in (f"model.layers.{index}" for index in range(layers)):
        found |= {f"{layer}.{name}.weight": shape for name, shape in matrices(hidden).items()}
        found[f"{layer}.input_layernorm.weight"] = (hidden,)
        found[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def generate(folder: Path, tasks: int, megabytes: int, seed: int) -> None:
    """Write `folder`/base, `folder`/task-0 ... next to their place, then rename."""
    hidden, vocabulary, layers = architecture(megabytes)
    tensors = shapes(hidden, vocabulary, layers)
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

    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 11 // 4, vocab_size=vocabulary,
        num_hidden_layers=layers, num_attention_heads=max(4, hidden // 64),
        num_key_value_heads=max(4, hidden // 64) // 4, dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    for name, own in {"base": None, **{f"task-{n}": each for n, each in enumerate(every)}}.items():
        (part / name).mkdir(parents=True)
        weights = {tensor: value(tensor, own) for tensor in tensors}
        save_file(weights, part / name / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(part / name)
    os.rename(part, folder)
