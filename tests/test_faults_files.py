"""Damaged, missing and unfit files, and output folders: found before or during the merge."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mergekit.common import ModelReference
from safetensors.torch import load_file, save_file
from test_faults import Case, check, recipe
from tiny import gpt2, llama

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM, HEAD, MLP = "model.norm.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"
SHARDED = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
Setup = Callable[[Path], object]


def rewrite(file: Path, content: bytes) -> None:
    """Replace a file that may be a hard link to another case's."""
    file.unlink(missing_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def write(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    file.unlink(missing_ok=True)
    if file.suffix == ".safetensors":
        save_file(tensors, file, {"format": "pt"})
    else:
        torch.save(tensors, file)


def edited(model: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Setup:

    def setup(folder: Path) -> None:
        tensors = load_file(folder / model / WEIGHTS)
        change(tensors)
        write(folder / model / WEIGHTS, tensors)

    return setup


def filled(model: str, name: str, count: int, value: float) -> Setup:
    return edited(model, lambda tensors: tensors[name].view(-1)[:count].fill_(value))


def cut(name: str, keep: float) -> Setup:

    def setup(folder: Path) -> None:
        content = (folder / name).read_bytes()
        rewrite(folder / name, content[: int(len(content) * keep)])

    return setup


def both(*setups: Setup) -> Setup:
    return lambda folder: [setup(folder) for setup in setups]


def sharded(folder: Path) -> None:
    """Split the weights of b into two shards with an index."""
    tensors = load_file(folder / "b" / WEIGHTS)
    (folder / "b" / WEIGHTS).unlink()
    names = sorted(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    for shard, half in zip(SHARDED, halves, strict=True):
        write(folder / "b" / shard, {name: tensors[name] for name in half})
    places = {name: shard for shard, half in zip(SHARDED, halves, strict=True) for name in half}
    text = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "b" / INDEX).write_text(text)


def indexed(**places: Any) -> Setup:
    """Shards of which the index says something else; `norm` stands for NORM."""

    def setup(folder: Path) -> None:
        sharded(folder)
        index = json.loads((folder / "b" / INDEX).read_text())
        index["weight_map"] |= {NORM if k == "norm" else k: v for k, v in places.items()}
        (folder / "b" / INDEX).write_text(json.dumps(index))

    return setup


def removed(name: str) -> Setup:
    return lambda folder: (folder / name).unlink()


def as_bin(folder: Path) -> None:
    write(folder / "b" / "pytorch_model.bin", load_file(folder / "b" / WEIGHTS))
    (folder / "b" / WEIGHTS).unlink()


class Payload:
    """Creates the file `executed` in the current folder when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return open, ("executed", "w")


def payload(folder: Path) -> None:
    (folder / "b" / WEIGHTS).unlink()
    torch.save({NORM: Payload()}, folder / "b" / "pytorch_model.bin")


def gpt(folder: Path) -> None:
    shutil.rmtree(folder / "b")
    gpt2().save_pretrained(folder / "b")


def other_base(folder: Path) -> None:
    torch.manual_seed(99)
    model = llama()
    for parameter in model.parameters():
        parameter.data.add_(0.5 * torch.randn_like(parameter))
    shutil.rmtree(folder / "b")
    model.save_pretrained(folder / "b")


def adapter(folder: Path) -> None:
    shutil.rmtree(folder / "b")
    (folder / "b").mkdir()
    text = json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]})
    (folder / "b" / "adapter_config.json").write_text(text)
    save_file({"x": torch.zeros(2)}, folder / "b" / "adapter_model.safetensors")


def half_fused(folder: Path) -> None:
    adapter(folder)
    model = ModelReference.model_validate("./base+./b")
    name = f"{model.model._unique_id()}_{model.lora._unique_id()}"
    (folder / "cache" / name).mkdir(parents=True)
    (folder / "cache" / name / "config.json").write_text("{}")


LORA = ("./a", "./base+./b", "./c")
HALF = {"dtype": "float16"}
CASES = {
    # values
    "nan": Case(setup=filled("b", MLP, 3, float("nan")), wants=(MLP, "`b`", "3 NaN", "exclude")),
    "overflow": Case(
        recipe(**HALF),
        (MLP, "float16", "bfloat16"),
        both(*(filled(m, MLP, 1, 7e4) for m in ("base", "a", "b", "c"))),
    ),
    "identical": Case(
        setup=lambda f: rewrite(f / "b" / WEIGHTS, (f / "base" / WEIGHTS).read_bytes()),
        wants=("`b`", "zero", "identical to the base"),
    ),
    "other base": Case(
        setup=other_base,
        wants=(r"`b` \(\./b\).*norm is [\d.]+, the base's [\d.]+", "this base"),
        ok=True,
    ),
    "shape": Case(
        setup=edited("b", lambda t: t.update({MLP: torch.ones(60, 32)})),
        wants=(MLP, "`b`", r"\[60, 32\]", r"\[64, 32\]", "exclude"),
    ),
    "tensor lost in a model": Case(
        setup=edited("b", lambda t: t.pop(MLP)), wants=(MLP, "b: it stays"), ok=True
    ),
    # files
    "data cut": Case(
        setup=cut(f"b/{WEIGHTS}", 0.7), wants=(f"b/{WEIGHTS}", "truncated", "download")
    ),
    "pointer for weights": Case(
        setup=lambda f: rewrite(f / "b" / WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"),
        wants=(f"b/{WEIGHTS}", "not a safetensors"),
    ),
    "shard missing": Case(
        setup=both(sharded, removed(f"b/{SHARDED[1]}")), wants=("b: shard", SHARDED[1], "missing")
    ),
    "shard lacks": Case(
        setup=indexed(norm=SHARDED[0]), wants=("b: the index", f"`{NORM}`", SHARDED[0])
    ),
    "bin cut": Case(
        setup=both(as_bin, cut("b/pytorch_model.bin", 0.5)),
        wants=("b/pytorch_model.bin", "truncated"),
    ),
    "bin code": Case(setup=payload, wants=("b/pytorch_model.bin", "running code", "safetensors")),
    "no config": Case(setup=removed("b/config.json"), wants=("./b", "no config.json", WEIGHTS)),
    "architectures": Case(setup=gpt, wants=("./b", "GPT2|gpt2", "Llama|llama")),
    "adapter as a model": Case(
        setup=adapter, wants=("./b", "no config.json", "adapter_model.safetensors")
    ),
    "adapter without cache": Case(
        recipe(models=LORA), (r"\./base\+\./b", "--lora-merge-cache"), adapter
    ),
    "half fused": Case(
        recipe(models=LORA),
        (r"\./base\+\./b", "cache/", "delete"),
        half_fused,
        ("--quiet", "--lora-merge-cache", "cache"),
    ),
}


ENDS = ("nan", "overflow", "other base", "tensor lost in a model", "data cut", "bin code")


@pytest.mark.parametrize("name", ENDS)
def test_files(name: str, tmp_path: Path, tiny_models: Path) -> None:
    check(tmp_path / "work", tiny_models, CASES[name])
