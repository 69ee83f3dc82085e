"""A base and T Llama models of a given size, from a seed: `python models.py --help`.

The weights are noise: speed does not depend on their values. All of it is cut from one buffer of
normal noise, at another place for each tensor of each model, since drawing it afresh would take
longer than writing it. A model is the base plus a tenth of the base's scale: half a direction that
all models share, half its own. The files are as `save_pretrained` writes them, without a tokenizer.

With `--versions K` a model is a file for each layer and one for the rest, and each file is one of
K: hard links, so that T models take the disk of K. Every model has a combination of its own, so
that no two are equal; their Gram matrix has a rank of at most (K - 1) * files + 1.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import click

VERSION = 1  # of what is generated: another number is another folder
SLACK = 2**20  # elements: the places in the noise buffer that a tensor may start at
PIECE = 2**26  # elements: longer tensors repeat the noise


def folder_name(
    tasks: int, megabytes: int, seed: int, dtype: str = "bfloat16", versions: int = 0,
    shape: Sequence[int] | None = None,
) -> str:  # fmt: skip
    size = f"{megabytes}MB" if shape is None else "-".join(map(str, shape))
    more = ("" if dtype == "bfloat16" else f"-{dtype}") + (f"-of{versions}" if versions else "")
    return f"models-{tasks}x{size}{more}-seed{seed}-v{VERSION}"


def ensure(work: Path, tasks: int, megabytes: int, seed: int = 0, **more: Any) -> Path:
    """The folder of such models in `work`, written unless it is there: in a process of its own,
    since one that measures must stay small (see measure.py)."""
    folder = work / folder_name(tasks, megabytes, seed, **more)
    if not whole(folder):
        words = ["--tasks", tasks, "--megabytes", megabytes, "--seed", seed]
        for name, value in more.items():
            if value is not None:
                words += [f"--{name}", *(value if name == "shape" else [value])]
        command = [sys.executable, __file__, folder, *words]
        if subprocess.run([str(word) for word in command]).returncode:
            raise SystemExit(1)  # it has said why
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


def architecture(megabytes: int, itemsize: int = 2) -> tuple[int, int, int]:
    """Hidden size, vocabulary and layers of a model of about `megabytes`: the widest that still has
    eight layers."""
    parameters = megabytes * 10**6 // itemsize
    choices = []
    for hidden in (64, 128, 256, 512, 1024, 2048, 4096):
        vocabulary = min(16 * hidden, 32000)
        each = sum(rows * columns for rows, columns in layer(hidden).values()) + 2 * hidden
        layers = round((parameters - 2 * vocabulary * hidden) / each)
        if layers >= 8 or not choices:
            choices.append((hidden, vocabulary, max(1, layers)))
    return choices[-1]


def shapes(
    hidden: int, vocabulary: int, layers: int, tied: bool = False
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for index in range(layers):
        for name, shape in layer(hidden).items():
            yield f"model.layers.{index}.{name}.weight", shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{index}.{name}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not tied:
        yield "lm_head.weight", (vocabulary, hidden)


def generate(
    folder: Path, tasks: int, megabytes: int, seed: int, dtype: str = "bfloat16",
    versions: int = 0, shape: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Write `folder`/base, `folder`/task-0 ... beside their place, then rename."""
    import torch
    from safetensors.torch import save_file

    kind: torch.dtype = getattr(torch, dtype)
    tied = shape is not None
    hidden, vocabulary, layers = shape or architecture(megabytes, kind.itemsize)
    tensors = dict(shapes(hidden, vocabulary, layers, tied))
    random = torch.Generator().manual_seed(seed)
    largest = max(math.prod(shape) for shape in tensors.values())
    noise = torch.randn(min(largest, PIECE) + SLACK, generator=random)

    # One row per model (or version) and one for the shared direction; one column per tensor.
    places = torch.randint(SLACK, (2 + (versions or tasks), len(tensors)), generator=random)
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
                delta = 0.001 * cut(shared)
                delta += 0.001 * cut(own)
                piece = piece.float().add_(delta).to(kind)
            made[start : start + count] = piece
        return made.view(tensors[name])

    def write(path: Path, names: Sequence[str], own: dict[str, int] | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        weights = {name: value(name, own) for name in names}
        save_file(weights, path, metadata={"format": "pt"})

    beside = folder.with_name(folder.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    files = parts(tensors) if versions else {"model.safetensors": list(tensors)}
    config = configuration(hidden, vocabulary, layers, tied, dtype)
    index = {name: file for file, names in files.items() for name in names}
    picked = [(task,) for task in range(tasks)]
    if versions:
        picked = combinations(tasks, versions, len(files), seed)
    picked.append((-1,) * len(files))  # the base, by the index -1
    made: dict[tuple[str, int], Path] = {}
    sizes = {}
    for task in range(-1, tasks):
        place = beside / (f"task-{task}" if task >= 0 else "base")
        for (file, names), version in zip(files.items(), picked[task], strict=True):
            if (first := made.get((file, version))) is None:
                write(place / file, names, None if task < 0 else own[version])
                made[file, version] = place / file
            else:
                place.mkdir(parents=True, exist_ok=True)
                os.link(first, place / file)
        (place / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if len(files) > 1:
            listed = json.dumps({"metadata": {}, "weight_map": index})
            (place / "model.safetensors.index.json").write_text(listed + "\n")
        for path in place.iterdir():
            sizes[f"{place.name}/{path.name}"] = path.stat().st_size
    (beside / "sizes.json").write_text(json.dumps(sizes, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(beside, folder)


def parts(tensors: Iterable[str]) -> dict[str, list[str]]:
    """File -> its tensors: one for each layer, the first for all else."""
    groups: dict[str, list[str]] = {"": []}
    for name in tensors:
        layer = name.split(".")[2] if ".layers." in name else ""
        groups.setdefault(layer, []).append(name)
    total = len(groups)
    return {
        f"model-{number + 1:05d}-of-{total:05d}.safetensors": names
        for number, names in enumerate(groups.values())
    }


def combinations(tasks: int, versions: int, files: int, seed: int) -> list[tuple[int, ...]]:
    """Which version each file of each model is: no two models alike."""
    if versions**files < tasks:
        raise click.ClickException(
            f"{versions} versions of each of {files} files make {versions**files} different "
            f"models, not {tasks}: take more --versions"
        )
    drawn = Random(seed)
    made: dict[tuple[int, ...], None] = {}
    while len(made) < tasks:
        made[tuple(drawn.randrange(versions) for _ in range(files))] = None
    return list(made)


def configuration(
    hidden: int, vocabulary: int, layers: int, tied: bool, dtype: str
) -> dict[str, Any]:
    heads = max(4, hidden // 64)
    return {
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
        "tie_word_embeddings": tied,
        "dtype": dtype,
    }


@click.command(epilog="Example: python models.py speed-work/models --tasks 8 --megabytes 500")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--tasks", default=8, show_default=True, help="Models besides the base.")
@click.option("--megabytes", default=500, show_default=True, help="Size of each, about.")
@click.option("--seed", default=0, show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16")
@click.option("--versions", default=0, help="Put models together from so many versions of files.")
@click.option("--shape", nargs=3, type=int, help="Hidden size, vocabulary, layers; tied.")
def main(folder: Path, tasks: int, megabytes: int, seed: int, **more: Any) -> None:
    """Write a base and models of noise to FOLDER, unless it holds a whole set already."""
    if not whole(folder):
        generate(folder, tasks, megabytes, seed, **more)


if __name__ == "__main__":
    main()
