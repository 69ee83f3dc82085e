"""Checkpoints as users have them: formats, adapters, tied embeddings, slices and modules."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from commands import Result, assert_close, merge, recipe
from reference import Dense, expect
from safetensors.torch import save_file
from test_merges import assert_same
from tiny import TASKS, as_bin, family, llama, load

THREE = TASKS[:3]
PCA = {"basis": "pca", "num_bases": 2}


def dense_of(base: Path, models: list[Path], names: list[str] | None = None) -> Dense:
    states = [load(path) for path in (base, *models)]
    return Dense(states[0], states[1:], names or list(states[0]))


def check(dense: Dense, result: Result, method: str, keys: dict[str, Any]) -> None:
    want = expect(dense, method, keys, result.basis, THREE)
    assert_close(result.tensors, want.tensors, dense.base, want.boundary)
    assert result.facts["num_parameters"] == len(dense.theta)


def loads(folder: Path) -> transformers.PreTrainedModel:
    """The merged model as transformers loads it, nothing missing and nothing left over."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def tied() -> torch.nn.Module:
    return llama(tie_word_embeddings=True)


# Formats


@pytest.mark.parametrize("method", ["basis_ta", "basis_ties"])
def test_format_and_sharding_do_not_matter(method: str, tmp_path: Path) -> None:
    base, models = family(tmp_path / "single", tasks=THREE)
    plain = merge(recipe(method, base, models, **PCA), tmp_path / "plain")
    rewrites: dict[str, Callable[[Path], None]] = {
        "bin": as_bin,
        "bin-shards": lambda folder: as_bin(folder, shards=3),
    }
    for name, rewrite in rewrites.items():
        copies = [Path(shutil.copytree(p, tmp_path / name / p.name)) for p in (base, *models)]
        for copy in copies:
            rewrite(copy)
        again = merge(recipe(method, copies[0], copies[1:], **PCA), tmp_path / f"out-{name}")
        assert_same(plain, again)
        assert again.facts["gram_cached"] is False
    split = family(tmp_path / "shards", tasks=THREE, max_shard_size="30KB")
    assert len(list(split[0].glob("*.safetensors"))) > 2
    assert_same(plain, merge(recipe(method, *split, **PCA), tmp_path / "out-shards"))
    mixed = [tmp_path / "bin" / "base", models[0], tmp_path / "bin-shards" / "code", split[1][2]]
    again = merge(recipe(method, mixed[0], mixed[1:], **PCA), tmp_path / "out-mixed")
    assert_same(plain, again)


def test_sharded_output_holds_the_same_tensors(tmp_path: Path) -> None:
    base, models = family(tmp_path, tasks=THREE)
    whole = merge(recipe("basis_ta", base, models, **PCA), tmp_path / "whole")
    made = recipe("basis_ta", base, models, **PCA)
    parts = merge(made, tmp_path / "parts", "--out-shard-size", "20K")
    assert len(list(parts.folder.glob("model-*.safetensors"))) > 2
    assert_same(whole, parts)
    loads(parts.folder)


# Adapters


@pytest.mark.parametrize("method", ["basis_ta", "basis_negate"])
def test_adapters_are_fused_and_merged(method: str, tmp_path: Path) -> None:
    base, _ = family(tmp_path, tasks=())
    adapters, states = [], []
    for seed, task in enumerate(THREE):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
        tuned = peft.get_peft_model(model, config)
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        tuned.save_pretrained(tmp_path / task)
        adapters.append(f"{base}+{tmp_path / task}")
        states.append({k: v.clone() for k, v in tuned.merge_and_unload().state_dict().items()})
    start = load(base)
    dense = Dense(start, states, list(start))
    keys: dict[str, Any] = {"basis": "none"} if method == "basis_ta" else dict(PCA)
    if method == "basis_negate":
        keys |= {"forget": "code", "alpha": 1}
    made = recipe(method, base, adapters, **keys)
    result = merge(made, tmp_path / "out", "--lora-merge-cache", str(tmp_path / "fused"))
    check(dense, result, method, keys)
    assert result.facts["tasks"] == list(THREE)
    untouched = [name for name in start if "q_proj" not in name and "down_proj" not in name]
    assert all(torch.equal(result.tensors[name], start[name]) for name in untouched)


# Tied embeddings


@pytest.mark.parametrize("method", ["basis_ta", "basis_ties", "basis_negate"])
@pytest.mark.parametrize("stored", ["once", "aliased", "twice", "safetensors-twice"])
def test_tied_embeddings_count_once(method: str, stored: str, tmp_path: Path) -> None:
    base, models = family(tmp_path, tied, THREE)
    dense = dense_of(base, models)
    assert "lm_head.weight" not in dense.names
    for folder in (base, *models):
        state = load(folder)
        embedding = state["model.embed_tokens.weight"]
        if stored == "aliased":
            state["lm_head.weight"] = embedding
            (folder / "model.safetensors").unlink()
            torch.save(state, folder / "pytorch_model.bin")
        elif stored == "twice":
            as_bin(folder, extra={"lm_head.weight": embedding.clone()})
        elif stored == "safetensors-twice":
            state["lm_head.weight"] = embedding.clone()
            save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    keys: dict[str, Any] = dict(PCA)
    if method == "basis_negate":
        keys = {"basis": "rand_proj", "num_bases": 2, "forget": "code", "alpha": 1, "lambda": 0.1}
    result = merge(recipe(method, base, models, **keys), tmp_path / "out")
    check(dense, result, method, keys)
    model = loads(result.folder)
    want = result.tensors["model.embed_tokens.weight"]
    assert torch.equal(model.get_input_embeddings().weight, want)
    assert torch.equal(model.get_output_embeddings().weight, want)
    if "lm_head.weight" in result.tensors:
        assert torch.equal(result.tensors["lm_head.weight"], want)


def test_an_untied_task_on_a_tied_base(tmp_path: Path) -> None:
    """One task trained its output embedding apart: what is written must be what is loaded."""
    base, models = family(tmp_path, tied, THREE)
    states = [load(path) for path in (base, *models)]
    for state in states:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    states[1]["lm_head.weight"] += 0.01 * torch.randn_like(states[1]["lm_head.weight"])
    save_file(states[1], models[0] / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((models[0] / "config.json").read_text())
    config["tie_word_embeddings"] = False
    (models[0] / "config.json").write_text(json.dumps(config))
    dense = Dense(states[0], states[1:], list(states[0]))
    result = merge(recipe("basis_ta", base, models, **PCA), tmp_path / "out")
    check(dense, result, "basis_ta", PCA)
    model = loads(result.folder)
    assert torch.equal(
        model.get_input_embeddings().weight, result.tensors["model.embed_tokens.weight"]
    )
    assert torch.equal(model.get_output_embeddings().weight, result.tensors["lm_head.weight"])


# Slices and modules


def slices(base: Path, models: list[Path], ranges: list[tuple[int, int]]) -> dict[str, Any]:
    listed = [*models, base]
    parts = [
        {"sources": [{"model": str(m), "layer_range": list(span)} for m in listed]}
        for span in ranges
    ]
    return {"slices": parts}


def layered() -> torch.nn.Module:
    return llama(num_hidden_layers=4)


@pytest.mark.parametrize("method", ["basis_ta", "basis_ties", "basis_negate"])
@pytest.mark.parametrize("kind", ["slices", "modules"])
def test_slices_and_modules_equal_the_models_recipe(method: str, kind: str, tmp_path: Path) -> None:
    base, models = family(tmp_path, layered, THREE)
    keys = {**PCA, **({"forget": "math", "alpha": 1} if method == "basis_negate" else {})}
    plain = merge(recipe(method, base, models, **keys), tmp_path / "plain")
    made = recipe(method, base, models, **keys)
    listed = made.pop("models")
    if kind == "slices":
        made |= slices(base, models, [(0, 1), (1, 3), (3, 4)])
    else:
        made["modules"] = {"default": {"models": listed}}
    other = merge(made, tmp_path / "other")
    assert_same(plain, other)
    assert other.facts["num_parameters"] == plain.facts["num_parameters"]
    assert other.facts["tasks"] == list(THREE)


@pytest.mark.parametrize("method", ["basis_ta", "basis_ties"])
@pytest.mark.parametrize("order", [[0, 1, 2, 1, 2, 3], [0, 3], [2, 0]])
def test_slices_may_repeat_drop_and_reorder_layers(
    method: str, order: list[int], tmp_path: Path
) -> None:
    """A repeated layer is one tensor of the task vector; a dropped one is none."""
    base, models = family(tmp_path, layered, THREE)
    states = [load(path) for path in (base, *models)]
    names = [n for n in states[0] if ".layers." not in n or int(n.split(".")[2]) in order]
    dense = Dense(states[0], states[1:], names)
    made = recipe(method, base, models, **PCA)
    del made["models"]
    made |= slices(base, models, [(layer, layer + 1) for layer in order])
    result = merge(made, tmp_path / "out")
    want = expect(dense, method, PCA, result.basis, THREE)
    assert result.facts["num_parameters"] == len(dense.theta)
    found = dict(result.tensors)
    for place, layer in enumerate(order):
        for name in [n for n in names if f".layers.{layer}." in n]:
            moved = name.replace(f".layers.{layer}.", f".layers.{place}.")
            tensors, skip = {name: found.pop(moved)}, want.boundary and {name: want.boundary[name]}
            assert_close(tensors, {name: want.tensors[name]}, dense.base, skip, strict=1e-5)
    outside = {name: want.tensors[name] for name in names if ".layers." not in name}
    assert set(found) == set(outside)
    assert_close(found, outside, dense.base, want.boundary, strict=1e-5)
    assert loads(result.folder).config.num_hidden_layers == len(order)


def test_a_repeated_layer_has_one_random_projection(tmp_path: Path) -> None:
    base, models = family(tmp_path, layered, THREE)
    keys = {"basis": "rand_proj", "num_bases": 2, "forget": "code", "alpha": 1}
    made = recipe("basis_negate", base, models, **keys)
    del made["models"]
    made |= slices(base, models, [(0, 2), (1, 2)])
    tensors = merge(made, tmp_path / "out").tensors
    for name in [name for name in tensors if ".layers.1." in name]:
        assert torch.equal(tensors[name], tensors[name.replace(".layers.1.", ".layers.2.")]), name
