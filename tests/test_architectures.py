"""Merged models of many architectures load in transformers and equal the dense reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import Result, assert_close, merge, merge_outside, recipe
from reference import Dense, expect
from safetensors.torch import load_file, save_file
from tiny import DECODER, family, llama, load
from torch import nn

TASKS = ("math", "code", "safety")
ENCODER = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "num_labels": 3,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config)


def gemma() -> nn.Module:
    sizes = {**DECODER, "tie_word_embeddings": True, "head_dim": 8}
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**sizes))


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, num_labels=3))


def clip() -> nn.Module:
    config = transformers.CLIPVisionConfig(**VISION, projection_dim=24)
    return transformers.CLIPVisionModelWithProjection(config)


CAUSAL, CLASSIFIER = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
ARCHITECTURES: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "llama": (CAUSAL, llama),
    "mistral": (
        CAUSAL,
        lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**DECODER)),
    ),
    "qwen2": (CAUSAL, lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DECODER))),
    "qwen2-tied": (
        CAUSAL,
        lambda: transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(**{**DECODER, "tie_word_embeddings": True})
        ),
    ),
    "qwen3": (
        CAUSAL,
        lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER, head_dim=8)),
    ),
    "gemma": (CAUSAL, gemma),
    "gpt2": (CAUSAL, gpt2),
    "bert": (
        CLASSIFIER,
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**ENCODER)),
    ),
    "roberta": (
        CLASSIFIER,
        lambda: transformers.RobertaForSequenceClassification(
            transformers.RobertaConfig(**ENCODER)
        ),
    ),
    "clip": ("CLIPVisionModelWithProjection", clip),
}
METHODS: dict[str, dict[str, Any]] = {
    "basis_ta": {"basis": "balanced", "num_bases": 2},
    "basis_ties": {"basis": "pca", "num_bases": 2, "density": 0.5},
    "basis_negate": {"basis": "pca", "num_bases": 2, "forget": "code", "alpha": 1},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_merged_models_load_and_equal_the_reference(architecture: str, tmp_path: Path) -> None:
    loader, make = ARCHITECTURES[architecture]
    tokens = loader in (CAUSAL, CLASSIFIER)
    base, models = family(tmp_path, make, TASKS, tokenizer=tokens)
    states = [load(path) for path in (base, *models)]
    dense = Dense(states[0], states[1:], list(states[0]))
    for method, keys in METHODS.items():
        result = merge(recipe(method, base, models, **keys), tmp_path / method)
        want = expect(dense, method, keys, result.basis, TASKS)
        assert set(result.tensors) == set(dense.names)
        assert_close(result.tensors, want.tensors, dense.base, want.boundary)
        assert result.facts["num_parameters"] == len(dense.theta)
        assert result.facts["left_out"] == {}
        model, info = getattr(transformers, loader).from_pretrained(
            result.folder, output_loading_info=True, dtype=torch.float32
        )
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            assert not info[kind], (kind, info[kind])
        state = model.state_dict()
        assert all(torch.equal(state[name], result.tensors[name]) for name in result.tensors)


MOE = {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**DECODER, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def qwen3_moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(**DECODER, **MOE, head_dim=8)
    return transformers.Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
def test_tensors_that_mergekit_converts(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """Stored expert by expert, merged and written as transformers holds them in memory."""
    base, models = family(tmp_path, make, TASKS)
    read = transformers.AutoModelForCausalLM.from_pretrained
    states = [read(path, dtype=torch.float32).state_dict() for path in (base, *models)]
    dense = Dense(states[0], states[1:], list(states[0]))
    for method, keys in METHODS.items():
        result = merge(recipe(method, base, models, **keys), tmp_path / method)
        want = expect(dense, method, keys, result.basis, TASKS)
        model, info = read(result.folder, dtype=torch.float32, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert_close(model.state_dict(), want.tensors, dense.base, want.boundary)
        assert result.facts["num_parameters"] == len(dense.theta)
        assert set(result.facts["left_out"]) == set()


def llava() -> nn.Module:
    vision = transformers.CLIPVisionConfig(**VISION)
    text = transformers.LlamaConfig(**DECODER)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text)
    return transformers.LlavaForConditionalGeneration(config)


@pytest.mark.parametrize("make", [vit, llava])
def test_no_tensor_is_lost_in_silence(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """mergekit 0.1.5 infers some architectures with parts missing where transformers stores other
    names than it holds in memory. What is not written is named with the reason."""
    base, models = family(tmp_path, make, TASKS, tokenizer=make is llava)
    result = merge(recipe("basis_ta", base, models, basis="none"), tmp_path / "out")
    stored = {name: tensor.numel() for name, tensor in load(base).items()}
    written = sum(tensor.numel() for tensor in result.tensors.values())
    named = sum(stored[name] for name in result.facts["left_out"])
    assert written + named == sum(stored.values())


# mergekit-pytorch: raw state dicts


def raw_family(folder: Path, make: Callable[[], nn.Module], ending: str) -> tuple[Path, list[Path]]:
    """Files as a training script writes them: `state_dict()` with integer buffers."""
    base, models = family(folder / "hf", make, TASKS, tokenizer=False)
    paths = []
    for source in (base, *models):
        state = load(source)
        state["embeddings.position_ids"] = torch.arange(5)[None]
        state["norm.num_batches_tracked"] = torch.tensor(7)
        state["norm.mask"] = torch.tensor([True, False])
        path = folder / f"{source.name}.{ending}"
        if ending == "safetensors":
            save_file(state, path)
        elif ending == "ckpt":
            torch.save({"state_dict": state, "epoch": 3}, path)
        else:
            torch.save(state, path)
        paths.append(path)
    return paths[0], paths[1:]


def read_raw(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    loaded = torch.load(path, weights_only=True)
    state: dict[str, torch.Tensor] = loaded.get("state_dict", loaded)
    return state


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("make", "ending"), [(vit, "pt"), (clip, "safetensors"), (clip, "bin")])
def test_raw_state_dicts_equal_the_reference(
    method: str, make: Callable[[], nn.Module], ending: str, tmp_path: Path
) -> None:
    base, models = raw_family(tmp_path, make, ending)
    states = [read_raw(path) for path in (base, *models)]
    buffers = {name for name, tensor in states[0].items() if not tensor.is_floating_point()}
    assert len(buffers) == 3
    dense = Dense(states[0], states[1:], [n for n in states[0] if n not in buffers])
    own = {index: {"task": task} for index, task in enumerate(TASKS)}
    keys = METHODS[method]
    made = recipe(method, base, models, own, **keys)
    result = merge(made, tmp_path / "out", command="mergekit-pytorch")
    want = expect(dense, method, keys, result.basis, TASKS)
    assert set(result.tensors) == set(states[0])
    assert_close(result.tensors, want.tensors, dense.base, want.boundary)
    assert all(torch.equal(result.tensors[name], states[0][name]) for name in buffers)
    assert set(result.facts["left_out"]) == buffers
    assert result.facts["num_parameters"] == len(dense.theta)


def test_aliased_tensors_of_a_state_dict_count_once(tmp_path: Path) -> None:
    base, models = family(
        tmp_path / "hf", lambda: llama(tie_word_embeddings=True), TASKS, tokenizer=False
    )
    paths = []
    for source in (base, *models):
        state = load(source)
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        torch.save(state, tmp_path / f"{source.name}.pt")
        paths.append(tmp_path / f"{source.name}.pt")
    states = [load(path) for path in (base, *models)]
    dense = Dense(states[0], states[1:], list(states[0]))
    own = {index: {"task": task} for index, task in enumerate(TASKS)}
    keys = METHODS["basis_ties"]
    made = recipe("basis_ties", paths[0], paths[1:], own, **keys)
    result = merge(made, tmp_path / "out", command="mergekit-pytorch")
    assert result.facts["num_parameters"] == len(dense.theta)
    want = expect(dense, "basis_ties", keys, result.basis, TASKS)
    assert_close(result.tensors, want.tensors, dense.base, want.boundary)
    tensors = result.tensors
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])


def test_raw_merges_do_not_depend_on_the_process(tmp_path: Path) -> None:
    """mergekit collects the tensor names in a set, whose order differs between processes."""
    base, models = raw_family(tmp_path, vit, "pt")
    keys = {"basis": "rand_proj", "num_bases": 2, "forget": "code.pt", "alpha": 1}
    made = recipe("basis_negate", base, models, **keys)
    results: list[Result] = []
    for seed in ("1", "2"):
        env = {"PYTHONHASHSEED": seed}
        cache = tmp_path / "cache"
        out = tmp_path / f"out{seed}"
        results.append(merge_outside(made, out, command="mergekit-pytorch", cache=cache, env=env))
    one, two = results
    assert two.facts["gram_cached"] is True, "the second merge did not find the first's Gram matrix"
    assert all(torch.equal(one.tensors[name], two.tensors[name]) for name in one.tensors)
