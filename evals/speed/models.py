"""A base and T Llama models of a given size in bf16, from a seed: `python models.py --help`.

The weights are noise: speed does not depend on their values. All of it is cut from one buffer of
normal noise, at another place for each tensor of each model, since drawing it afresh would take
longer than writing it. A model is the base plus a tenth of the base's scale: half a direction that
all models share, half its own. The files are as `save_pretrained` writes them, without a tokenizer.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import click

VERSION = 1  # of what is generated: another number is another folder
SLACK = 2**20  # elements: the places in the noise buffer that a tensor may start at


def folder_name(tasks: int, megabytes: int, seed: int) -> str:
    return f"models-{tasks}x{megabytes}MB-seed{seed}-v{VERSION}"


def whole(folder: Path) -> bool:
    """Whether `folder` holds a finished set: it is renamed last, and the sizes are in a list."""
    try:
        sizes = json.loads((folder / "sizes.json").read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def layer(hidden: int) -> dict[str, tuple[int, int]]:
    """The matrices of one layer; four query heads share a key."""
    inner = hidden * 11 // 4
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 4, hidden),
        "self_attn.v_proj": (hidden // 4, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def architecture(megabytes: int) -> tuple[int, int, int]:
    """Hidden size, vocabulary and layers of a model of about `megabytes` in bf16: the widest that
    still has eight layers."""
    parameters = megabytes * 10**6 // 2
    choices = []
    for hidden in (64, 128, 256, 512, 1024, 2048, 4096):
        vocabulary = min(16 * hidden, 32000)
        each = sum(rows * columns for rows, columns in layer(hidden).values()) + 2 * hidden
        layers = round((parameters - 2 * vocabulary * hidden) / each)
        if layers >= 8 or not choices:
            choices.append((hidden, vocabulary, max(1, layers)))
    return choices[-1]


def shapes(hidden: int, vocabulary: int, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for index in range(layers):
        for name, shape in layer(hidden).items():
            yield f"model.layers.{index}.{name}.weight", shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{index}.{name}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def generate(folder: Path, tasks: int, megabytes: int, seed: int) -> None:
    """Write `folder`/base, `folder`/task-0 ... beside their place, then rename."""
    import torch
    from safetensors.torch import save_file

    hidden, vocabulary, layers = architecture(megabytes)
    tensors = dict(shapes(hidden, vocabulary, layers))
    random = torch.Generator().manual_seed(seed)
    largest = max(torch.Size(shape).numel() for shape in tensors.values())
    noise = torch.randn(largest + SLACK, generator=random)

    def cut(shape: tuple[int, ...], place: int) -> torch.Tensor:
        return noise[place : place + torch.Size(shape).numel()].view(shape)

    # One row per model and one for the shared direction; one column per tensor.
    places = torch.randint(SLACK, (tasks + 2, len(tensors)), generator=random).tolist()
    shared, base, *own = places
    beside = folder.with_name(folder.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    sizes = {}
    for index in range(-1, tasks):
        weights = {}
        for number, (name, shape) in enumerate(tensors.items()):
            # The task vector is added to the rounded base, as training would start from it.
            value = (0.02 * cut(shape, base[number])).bfloat16()
            if index >= 0:
                delta = 0.001 * cut(shape, shared[number])
                delta += 0.001 * cut(shape, own[index][number])
                value = value.float().add_(delta).bfloat16()
            weights[name] = value
        name = f"task-{index}" if index >= 0 else "base"
        (beside / name).mkdir(parents=True)
        save_file(weights, beside / name / "model.safetensors", metadata={"format": "pt"})
        heads = max(4, hidden // 64)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": hidden * 11 // 4,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 4,
            "vocab_size": vocabulary,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }
        (beside / name / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for path in (beside / name).iterdir():
            sizes[f"{name}/{path.name}"] = path.stat().st_size
    (beside / "sizes.json").write_text(json.dumps(sizes, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(beside, folder)


@click.command(epilog="Example: python models.py speed-work/models --tasks 8 --megabytes 500")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--tasks", default=8, show_default=True, help="Models besides the base.")
@click.option("--megabytes", default=500, show_default=True, help="Size of each, about.")
@click.option("--seed", default=0, show_default=True)
def main(folder: Path, tasks: int, megabytes: int, seed: int) -> None:
    """Write a base and models of noise to FOLDER, unless it holds a whole set already."""
    if not whole(folder):
        generate(folder, tasks, megabytes, seed)


if __name__ == "__main__":
    main()
