"""A base and T Llama models of a given size, from a seed: `python models.py --help`.

The weights are noise. All of it is cut from one buffer of normal noise, at another place for each
tensor of each model, since drawing it afresh would take longer than writing it. A task vector has
0.28 % of the base's norm, as after a light fine-tuning: half a direction that all models share,
half its own. The files are as `save_pretrained` writes them, without a tokenizer.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

VERSION = 2  # of the models: another number is another folder
SLACK = 2**20  # elements: the places in the noise buffer that a tensor may start at
PIECE = 2**26  # elements: longer tensors repeat the noise


def folder_name(tasks: int, megabytes: int, seed: int, dtype: str = "bfloat16") -> str:
    more = "" if dtype == "bfloat16" else f"-{dtype}"
    return f"models-{tasks}x{megabytes}MB{more}-seed{seed}-v{VERSION}"


def ensure(work: Path, tasks: int, megabytes: int, seed: int = 0, dtype: str = "bfloat16") -> Path:
    """The folder of such models in `work`, written unless it is there.

    Another process writes them, since a process that measures must stay small (see measure.py).
    """
    folder = work / folder_name(tasks, megabytes, seed, dtype)
    if not whole(folder):
        words = ["--tasks", tasks, "--megabytes", megabytes, "--seed", seed, "--dtype", dtype]
        command = [sys.executable, __file__, folder, *words]
        if subprocess.run([str(word) for word in command]).returncode:
            raise SystemExit(1)  # it has printed why
    return folder


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


def architecture(megabytes: int, itemsize: int = 2, least: int = 8) -> tuple[int, int, int]:
    """Hidden size, vocabulary and layers of a model of about `megabytes`: the widest that still has
    `least` layers."""
    parameters = megabytes * 10**6 // itemsize
    choices = []
    for hidden in (64, 128, 256, 512, 1024, 2048, 4096):
        vocabulary = min(16 * hidden, 32000)
        each = sum(rows * columns for rows, columns in layer(hidden).values()) + 2 * hidden
        layers = round((parameters - 2 * vocabulary * hidden) / each)
        if layers >= least or not choices:
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


def generate(
    folder: Path, tasks: int, megabytes: int, seed: int, dtype: str = "bfloat16", layers: int = 8
) -> None:
    """Write `folder`/base, `folder`/task-0 ... next to their place, then rename."""
    import torch
    from safetensors.torch import save_file

    kind: torch.dtype = getattr(torch, dtype)
    size = architecture(megabytes, kind.itemsize, layers)
    tensors = dict(shapes(*size))
    random = torch.Generator().manual_seed(seed)
    largest = max(math.prod(shape) for shape in tensors.values())
    noise = torch.randn(min(largest, PIECE) + SLACK, generator=random)

    # One row per model and one for the shared direction; one column per tensor.
    places = torch.randint(SLACK, (2 + tasks, len(tensors)), generator=random)
    shared, base, *own = [dict(zip(tensors, row, strict=True)) for row in places.tolist()]

    def value(name: str, own: dict[str, int] | None) -> torch.Tensor:
        numel = math.prod(tensors[name])
        made = torch.empty(numel, dtype=kind)
        for start in range(0, numel, PIECE):
            count = min(PIECE, numel - start)

            def cut(of: dict[str, int], start: int = start, count: int = count) -> torch.Tensor:
                place = (of[name] + start) % SLACK
                return noise[place : place + count]

            # The task vector is added to the rounded base, as training would start from it.
            piece = (0.02 * cut(base)).to(kind)
            if own is not None:
                delta = 4e-5 * cut(shared)  # the time of a lossless store depends on it
                delta += 4e-5 * cut(own)
                piece = piece.float().add_(delta).to(kind)
            made[start : start + count] = piece
        return made.view(tensors[name])

    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    config = json.dumps(configuration(*size, dtype), indent=2) + "\n"
    sizes = {}
    for name, place in {"base": None, **{f"task-{n}": each for n, each in enumerate(own)}}.items():
        (part / name).mkdir(parents=True)
        weights = {tensor: value(tensor, place) for tensor in tensors}
        save_file(weights, part / name / "model.safetensors", metadata={"format": "pt"})
        (part / name / "config.json").write_text(config)
        for path in (part / name).iterdir():
            sizes[f"{name}/{path.name}"] = path.stat().st_size
    (part / "sizes.json").write_text(json.dumps(sizes, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(part, folder)


def configuration(hidden: int, vocabulary: int, layers: int, dtype: str) -> dict[str, Any]:
    heads = max(4, hidden // 64)
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": dtype,
        "hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "vocab_size": vocabulary,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads // 4, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip


@click.command(epilog="Example: python models.py speed-work/models --tasks 8 --megabytes 500")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--tasks", default=8, show_default=True, help="Models besides the base.")
@click.option("--megabytes", default=500, show_default=True, help="Size of each, about.")
@click.option("--seed", default=0, show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16")
@click.option("--layers", default=8, show_default=True, help="At least so many layers.")
def main(folder: Path, tasks: int, megabytes: int, seed: int, dtype: str, layers: int) -> None:
    """Write a base and models of noise to FOLDER, unless it holds a complete set."""
    if not whole(folder):
        generate(folder, tasks, megabytes, seed, dtype, layers)


if __name__ == "__main__":
    main()
