"""Public bug reports, each as a small input of our own with the right value stated beforehand.

Numbers such as mergekit 653 are those of the reports' threads.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
import yaml
from click.testing import CliRunner
from commands import merge, recipe, refused, slices, tvb, write
from mergekit.scripts import run_yaml
from reference import Dense
from safetensors.torch import load_file, save_file
from tiny import DECODER, as_bin, family, gpt2, llama, load
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from worlds import EMBEDDING, HEAD, TIED, VISION, configure, of, save

import tvb_mergekit
from tvb_mergekit.store.store import load as load_store

Make = Callable[[], nn.Module]
State = dict[str, Tensor]
Change = Callable[[State], State]
Edit = Callable[[Path, Path, Path], object]  # of the base and two models
SUM: dict[str, Any] = {"basis": "none", "lambda": 1.0}
TASKS = ("a", "b")

MULTIMODAL = "ForConditionalGeneration"
BIASED = partial(llama, attention_bias=True, mlp_bias=True)
ENCODER, MASKED, BOTH_HEADS = (of("Bert", h) for h in ("Model", "ForMaskedLM", "ForPreTraining"))
T5_MODEL, BART = of("T5", MULTIMODAL), of("Bart", MULTIMODAL)
WAV2VEC = of("Wav2Vec2", "Model", feat_extract_norm="layer", do_stable_layer_norm=True)
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
TURNED = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
QWEN_VL = of("Qwen2_5_VL", MULTIMODAL, text_config={"rope_parameters": TURNED})
IMAGES = {"image_token_index": 95, "boi_token_index": 94, "eoi_token_index": 93}
LLAVA = of("Llava", MULTIMODAL, vision_config=VISION, text_config=DECODER)
GEMMA_3 = of("Gemma3", MULTIMODAL, vision_config=VISION, mm_tokens_per_image=4, **IMAGES)


# Architectures that mergekit's definitions lack, in part or wholly
ENCODERS = [("Bert", "Model"), ("Roberta", "Model"), ("ModernBert", "Model"), ("Qwen3", "Model")]
HEADS = [("Bert", "ForMaskedLM"), ("Bert", "ForPreTraining"), ("GPTNeoX", "ForCausalLM")]
PARTLY_KNOWN: dict[str, Make] = {
    name + head: of(name, head)
    for name, head in (*ENCODERS, *HEADS, ("T5", MULTIMODAL), ("Whisper", MULTIMODAL))
} | {
    "Llama with biases": BIASED,
    "LLaVA": LLAVA,
    "CLIP": of("CLIP", "Model"),
    "vision tower of CLIP": of("CLIPVision", "ModelWithProjection"),
    "ViT": of("ViT", "ForImageClassification"),
    "wav2vec 2": WAV2VEC,
    "Gemma 3 from a config": GEMMA_3,
    "Qwen2.5-VL, mergekit 579": QWEN_VL,
    "Qwen3.5 MoE, mergekit 696": of("Qwen3_5Moe", MULTIMODAL, text_config=HYBRID),
    "Granite 4, mergekit 614": of("GraniteMoeHybrid", layer_types=["mamba", "attention"]),
    "DeepSeek V3, mergekit 445": of("DeepseekV3", num_key_value_heads=4),
}


def adapter(base: Path, folder: Path, kind: Any = AutoModelForCausalLM, **config: Any) -> Any:
    """A random adapter of a model, which may have got more `tokens`; returns the tuned model."""
    model = kind.from_pretrained(base)
    if tokens := config.pop("tokens", 0):
        model.resize_token_embeddings(tokens)
    config = {"target_modules": ["q_proj"], "init_lora_weights": False} | config
    tuned = peft.get_peft_model(model, peft.LoraConfig(**config)).eval()
    for name, parameter in tuned.named_parameters():
        if parameter.requires_grad:
            parameter.data.mul_(0.2 if "lora" in name else 1.1)
    tuned.save_pretrained(folder)
    return tuned


def rewrite(model: Path, change: Change) -> None:
    save(model, {name: tensor.clone() for name, tensor in change(load(model)).items()})


def assert_sum(make: Make, folders: Sequence[Path]) -> None:
    """transformers loads the last folder completely, as base + the sum of the task vectors."""
    kind: Any = type(make())
    loaded = [kind.from_pretrained(folder, output_loading_info=True) for folder in folders]
    assert not loaded[-1][1]["missing_keys"] and not loaded[-1][1]["mismatched_keys"]
    base, *states, merged = [model.state_dict() for model, _ in loaded]
    for name, tensor in base.items():
        want = tensor.double() + sum(state[name].double() - tensor.double() for state in states)
        torch.testing.assert_close(merged[name].double(), want, rtol=1e-5, atol=1e-6)


# Folders: what is done to the base and two models, and what the one line says. Without a line the
# merge is the sum of what transformers loads from the folders


def shards(base: Path, a: Path, b: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(a)
    (a / "model.safetensors").unlink()
    model.save_pretrained(a, max_shard_size="30KB")


def steps(*each: Edit) -> Edit:
    return lambda base, a, b: [step(base, a, b) for step in each]


def copied(pattern: str) -> Edit:
    return lambda base, a, b: [shutil.copy(file, a) for file in b.glob(pattern)]


def of_one_file(base: Path, a: Path, b: Path) -> None:  # as mlx writes the index
    index = {"weight_map": dict.fromkeys(load(a), "model.safetensors")}
    (a / "model.safetensors.index.json").write_text(json.dumps(index))


def new_bin(base: Path, a: Path, b: Path) -> None:
    torch.save(load(b), a / "pytorch_model.bin")


def names(*pairs: tuple[str, str]) -> Change:
    return lambda s: {reduce(lambda n, pair: re.sub(*pair, n), pairs, n): t for n, t in s.items()}


def renamed(*pairs: tuple[str, str]) -> Edit:
    return lambda base, a, b: rewrite(b, names(*pairs))


def changed(pattern: str, change: Callable[[Tensor], Tensor]) -> Edit:
    def all_of(state: State) -> State:
        return {n: change(t) if re.search(pattern, n) else t for n, t in state.items()}

    return lambda base, a, b: rewrite(b, all_of)


def in_base(change: Change) -> Edit:
    return lambda base, a, b: rewrite(base, change)


def words(model: Path, file: str = "tokenizer.json", **others: str) -> None:
    """Write a tokenizer with other words in some rows, also as older models have it."""
    held = json.loads((model / "tokenizer.json").read_text())
    rows = {others.get(word, word): row for word, row in held["model"]["vocab"].items()}
    held["model"]["vocab"] = rows
    (model / "tokenizer.json").unlink()
    old = json.dumps(rows) if file == "vocab.json" else "\n".join(sorted(rows, key=rows.get))
    (model / file).write_text(json.dumps(held) if file == "tokenizer.json" else old)


def anew(*file: str, **others: str) -> Edit:
    return lambda base, a, b: words(b, *file, **others)


POOLER = {"bert.pooler.dense.weight": torch.ones(32, 32)}
NEW, SWAP = copied("model.safetensors"), {"t5": "t6", "t6": "t5"}
SWAPPED, CODES = "use `tokenizer_source: base`, or `exclude`", "quantized codes are not weights"
FOLDERS: dict[str, tuple[Make, Edit, str]] = {
    **{
        f"all names with {prefix}": (llama, renamed(("^", prefix)), f"`{prefix}lm_head.weight` in")
        for prefix in ("_orig_mod.", "module.", "model.", "pretrained_model.")
    },
    **{f"a whole {name}": (make, steps(), "") for name, make in PARTLY_KNOWN.items()},
    "file beside shards": (llama, steps(shards, NEW), "model.safetensors and model.safetensors.i"),
    "file beside the index of lost shards": (
        llama, steps(shards, NEW, lambda _, a, b: [f.unlink() for f in a.glob("model-*")]), ""),
    "index of the one file": (llama, of_one_file, ""),
    "bin beside its shards": (
        llama, steps(lambda _, a, b: as_bin(a, 3), new_bin), "pytorch_model.bin and pytorch_"),
    "bin beside safetensors": (llama, new_bin, ""),
    "shards of bin": (llama, steps(lambda _, a, b: as_bin(b, 3), copied("pytorch*")), ""),
    "bin beside shards": (llama, steps(shards, new_bin), ""),
    "consolidated": (llama, lambda _, a, b: save_file(load(b), a / "consolidated.safetensors"), ""),
    "an adapter beside weights": (llama, lambda _, a, b: adapter(b, a), "adapter_config.json"),
    "wrapped layers, dinov2 544": (
        llama, renamed((r"(layers\.\d\.)", r"\1_checkpoint_wrapped_module.")), "without wrappers"),
    "Qwen3 embeddings, mergekit 653": (llama, renamed((r"^model\.", "")), "named `embed_tokens."),
    "encoder over BERT": (BOTH_HEADS, renamed((r"^bert\.", "")), "is named `embeddings.LayerNorm."),
    "LoRA not merged, trl 2698": (
        llama, renamed((r"q_proj\.", "q_proj.base_layer.")), "its adapter is not merged"),
    "Qwen2.5-VL of transformers 4.52, transformers 38403": (
        QWEN_VL, renamed((r"^model\.", "model.language_model."), ("^visual", "model.visual")),
        "is named `model.language_model.embed_tokens.weight` in"),
    "LLaVA of transformers 4.52, ms-swift 7947": (
        LLAVA, renamed((r"^language_model\.model", "model.language_model")), "without wrappers"),
    "weight norm": (
        WAV2VEC, renamed((r"parametrizations\.weight\.original0", "weight_g")), "conv.weight_g`"),
    "8 bits, llama.cpp 12923": (llama, changed("_proj", lambda t: (t * 99).to(torch.int8)), CODES),
    "4 bits, unsloth 1877": (llama, changed("_proj", lambda t: t.view(-1, 1).byte()), CODES),
    "ZeRO-3, LlamaFactory 7141": (llama, changed("", lambda t: t.new_empty(0)), "must gather the"),
    "fewer tokens, mergekit 614": (
        llama, changed("embed_tokens|lm_head", lambda t: t[:90]), "`tokenizer_source: base`"),
    "older names of norms": (
        ENCODER, in_base(names((r"Norm\.weight", "Norm.gamma"), (r"Norm\.bias", "Norm.beta"))), ""),
    "frequencies": (
        llama, in_base(lambda s: s | {"model.rotary_emb.inv_freq": torch.ones(4)}), ""),
    "integers": (llama, in_base(lambda s: s | {"ids": torch.arange(300)}), ""),
    "further tokens, unsloth 4164": (
        llama, in_base(lambda s: s | {"model.layers.2.eh_proj.weight": torch.ones(4, 8)}), ""),
    "a pooler in a model alone": (MASKED, lambda _, a, b: rewrite(b, lambda s: s | POOLER), ""),
    "words in another order": (llama, anew(**SWAP), SWAPPED),
    "words in another order, vocab.json": (llama, anew("vocab.json", **SWAP), SWAPPED),
    "words in another order, vocab.txt": (llama, anew("vocab.txt", **SWAP), SWAPPED),
    "the same words in vocab.txt": (llama, anew("vocab.txt"), ""),
    "a reserved token with a meaning": (llama, anew(t95="<|im_start|>"), ""),
    "no tokenizer": (llama, lambda _, a, b: (b / "tokenizer.json").unlink(), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_folders(name: str, tmp_path: Path) -> None:
    make, change, said = FOLDERS[name]
    base, models = family(tmp_path, make, TASKS, tokenizer=make is llama)
    change(base, *models)
    document = recipe("basis_ta", base, models, **SUM)
    made = merge(document, tmp_path / "out", fails=bool(said))
    if not said:
        found, want = (Counter(t.dtype for t in s.values()) for s in (made.tensors, load(base)))
        assert found == want  # whole numbers stay
        assert_sum(make, [base, *models, made.folder])
        return
    assert said in made.output and made.output.count("\n") == 1, made.output
    with pytest.raises(tvb_mergekit.UserError, match=re.escape(said)):
        tvb_mergekit.build(base, dict(zip(TASKS, models, strict=True)))
    if said == SWAPPED and (models[1] / "tokenizer.json").exists():
        merge({**document, "tokenizer_source": "base"}, tmp_path / "aligned")
        document["parameters"]["exclude"] = "embed_tokens|lm_head"
        merge(document, tmp_path / "excluded")


# Adapters: the merge computes what the tuned model does, or one line says why it cannot

STACKED = {"target_modules": ["q_proj"], "target_parameters": [
    "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}  # fmt: skip
USES, MLM = ["embed_tokens", "lm_head"], transformers.AutoModelForMaskedLM
ADAPTERS: dict[str, tuple[Make, Mapping[str, Any], str]] = {
    "more tokens, transformers 45127": (
        TIED, {"tokens": 99, "modules_to_save": USES}, "is [99, 32], in the base [96, 32]"),
    "fewer rows, axolotl 2277": (
        llama, {"tokens": 90, "modules_to_save": USES}, "is [90, 32], in the base [96, 32]"),
    "both tied uses, peft 2972": (TIED, {"target_modules": USES}, ""),
    "both tied uses saved, unsloth 9331": (TIED, {"modules_to_save": USES}, ""),
    "rows of new tokens, vllm 55796": (TIED, {"trainable_token_indices": [3]}, "trainable_token"),
    "stacked experts, peft 3009": (of("Qwen3Moe"), STACKED, ""),
    "gpt-oss, LlamaFactory 8969": (of("GptOss"), STACKED, ""),
    "ranks of experts, Automodel 3834": (
        of("Qwen3Moe"), STACKED | {"rank_pattern": {"experts.gate_up_proj": 1}}, ""),
    "shared experts, peft 3711": (
        of("Qwen2Moe"), {"target_modules": ["shared_expert.up_proj", "shared_expert_gate"]}, ""),
    "BERT's output layer": (MASKED, {"kind": MLM, "target_modules": ["word_embeddings"]}, ""),
    "RoBERTa's output layer": (
        of("Roberta", "ForMaskedLM"), {"kind": MLM, "target_modules": ["decoder"]}, ""),
    "ModernBERT's output layer": (
        of("ModernBert", "ForMaskedLM"), {"kind": MLM, "target_modules": ["tok_embeddings"]}, ""),
    "shared embeddings": (
        T5_MODEL, {"kind": transformers.AutoModelForSeq2SeqLM, "target_modules": ["shared", "q"]},
        "targets `shared`"),
}  # fmt: skip


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name: str, tmp_path: Path) -> None:
    make, config, said = ADAPTERS[name]
    base, _ = family(tmp_path, make, ())
    tuned = adapter(base, tmp_path / "x", **config)
    document = recipe("basis_ta", base, [f"{base}+{tmp_path / 'x'}"], **SUM)
    made = merge(document, tmp_path / "out", fails=bool(said))
    if said:
        assert said in made.output and made.output.count("\n") == 1, made.output
        return
    kind: Any = type(make())
    words = torch.arange(3, 23)[None]
    old, new = (kind.from_pretrained(f).eval()(words).logits for f in (base, made.folder))
    right = tuned(words).logits
    assert (right - old).abs().max() > 1e-3
    torch.testing.assert_close(new, right, rtol=1e-4, atol=1e-5)


def test_an_adapter_in_two_formats(tmp_path: Path) -> None:
    base, _ = family(tmp_path, tasks=())
    right = adapter(base, folder := tmp_path / "x").merge_and_unload().state_dict()
    held = load_file(folder / "adapter_model.safetensors")
    torch.save({name: 2 * tensor for name, tensor in held.items()}, folder / "adapter_model.bin")
    document = recipe("basis_ta", base, [f"{base}+{folder}"], **SUM)
    found = merge(document, tmp_path / "out").tensors  # PEFT loads safetensors
    torch.testing.assert_close(found, {name: right[name] for name in found})


# Models unlike the base: what is done to the models, and what a warning says


def set_in(*models: int, **changes: Any) -> Edit:
    return lambda *folders: [configure(folders[model], **changes) for model in models]


DOUBTS: list[tuple[Edit, str]] = [
    (set_in(2, rms_norm_eps=1e-5), "rms_norm_eps 1e-05 (base: 1e-06)"),
    (set_in(2, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}), "heta': 500000.0"),
    (set_in(2, num_attention_heads=8, head_dim=4), "num_attention_heads 8 (base: 4)"),
    (set_in(2, max_position_embeddings=128, eos_token_id=5, use_cache=False), ""),
    (set_in(1, 2, eos_token_id=5), "every model ends its texts with token 5"),  # open-r1 663
    (lambda _, a, b: rewrite(b, lambda s: s | {"v_head.bias": torch.ones(3)}), "v_head.bias"),
]


@pytest.mark.parametrize(("change", "said"), DOUBTS)
def test_models_unlike_the_base(tmp_path, caplog, recwarn, change, said):
    base, (a, b) = family(tmp_path, tasks=TASKS)
    change(base, a, b)
    merge(recipe("basis_ta", base, [a, b]), tmp_path / "out")
    tvb_mergekit.build(base, {"a": a, "b": b})
    for every in (caplog.messages, [str(each.message) for each in recwarn]):
        told = [e for e in every if re.search("the base.?:|the base's:|ends its|v_head", e)]
        assert len(told) == bool(said) and all(said in line for line in told), told


# Recipes as people publish them, with our methods in place of mergekit's, and mistakes in recipes:
# the coefficient of each task vector in the merged model, or what the one line of a refusal says

RECIPES = (Path(__file__).parent / "facts" / "published.txt").read_text()
PUBLISHED = re.findall(r"^== (.*)\n((?:(?!== ).*\n)+)", RECIPES, re.M)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    base, _ = family(folder, partial(llama, num_hidden_layers=4), TASKS)
    torch.save(adapter(base, folder / "x").merge_and_unload().state_dict(), folder / "fused")
    return folder


@pytest.mark.parametrize(("right", "text"), PUBLISHED)
def test_published_recipes(published, tmp_path, monkeypatch, right, text):
    monkeypatch.chdir(published)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file, out = tmp_path / "recipe.yml", tmp_path / "out"
    file.write_text(text)
    done = CliRunner().invoke(run_yaml.main, [str(file), str(out), "--quiet"])
    if not right.startswith("{"):
        assert done.exit_code == 1 and not out.exists()
        assert right in done.output and done.output.count("\n") == 1, done.output
        assert right in refused("inspect", file, "--quiet")
        return
    assert done.exit_code == 0, done.output
    states = {"a": load(published / "a"), "b": load(published / "b")}
    states["x"], merged = torch.load(published / "fused"), load(out)
    for key, tensor in load(published / "base").items():
        parts = yaml.safe_load(right).items()
        moved = [by * (states[task][key] - tensor) for task, by in parts]
        assert torch.allclose(merged[key], sum(moved, tensor), atol=1e-6), key


# What mergekit's definitions of architectures lack

THREE = {"num_hidden_layers": 3}
SLICED = {
    "Qwen3, optipfair 20": of("Qwen3", **THREE),
    "Gemma 2, mergekit 537": of("Gemma2", **THREE),
    "SmolLM3": of("SmolLM3", **THREE),
    "Llama with biases": partial(BIASED, **THREE),
}


@pytest.mark.parametrize("name", SLICED)
def test_slices(name: str, tmp_path: Path) -> None:
    """Tensors, the number of layers, and lists with an entry for each follow the slices."""
    base, models = family(tmp_path, SLICED[name], TASKS[:1])
    document = recipe("basis_ta", base, [], **SUM) | slices(base, models, [(0, 2), (1, 3)])
    del document["models"]
    made = merge(document, tmp_path / "out")
    model, info = AutoModelForCausalLM.from_pretrained(made.folder, output_loading_info=True)
    own, new = (json.loads((f / "config.json").read_text()) for f in (base, made.folder))
    assert not any(info.values()) and len(model.model.layers) == new["num_hidden_layers"] == 4
    for key in {"layer_types", "no_rope_layers"} & own.keys():
        assert new[key] == [own[key][layer] for layer in (0, 1, 1, 2)]
    for key, tensor in load(models[0]).items():
        torch.testing.assert_close(made.tensors[key.replace("layers.2.", "layers.3.")], tensor)


def test_models_of_two_architectures(tmp_path: Path) -> None:
    base, models = family(tmp_path, llama, TASKS)
    configure(models[1], architectures=["MistralForCausalLM"])
    made = merge(recipe("basis_ta", base, models, **SUM), tmp_path / "out", fails=True)
    said = rf"{models[1]} is .'MistralFor.*, the base {base} .'LlamaFor.*--allow-crimes"
    assert re.search(said, made.output), made.output


def test_one_module_of_three(tmp_path: Path) -> None:
    """The merge would lack the vision tower."""
    base, models = family(tmp_path, GEMMA_3, TASKS[:1], tokenizer=False)
    document = recipe("basis_ta", base, models)
    document["modules"] = {"text_decoder": {"models": document.pop("models")}}
    said = merge(document, tmp_path / "out", fails=True).output
    assert "`modules` are text_decoder, but a whole model has " in said


def test_patterns_that_no_tensor_depends_on(tmp_path: Path, caplog) -> None:
    base, models = family(tmp_path, llama, TASKS)
    listed = [{"filter": "mlpp", "value": 1}, {"value": 0.3}, {"filter": "norm", "value": 0}]
    merge(recipe("basis_ta", base, models, exclude="vision", lambda_=listed), tmp_path / "out")
    told = "; ".join(caplog.messages)
    assert re.search("`exclude`: no tensor .* 'vision'; their names have .*mlp, down_proj", told)
    assert "'mlpp' (did you mean `mlp`?)" in told and "'norm': an earlier entry decides" in told
    with pytest.warns(UserWarning, match="depends on 'vision'"):
        bases = tvb_mergekit.build(base, {"a": models[0]}, exclude="vision")
    with pytest.warns(UserWarning, match="depends on 'vision'"):
        tvb_mergekit.merge(bases, base, exclude="vision")


def test_gradients_over_tensors_that_a_definition_lacks(tmp_path: Path) -> None:
    base, models = family(tmp_path, BIASED, TASKS[:1])
    graded = recipe("basis_ta", base, models, **SUM | {"lambda": [0.0, 1.0]})
    found, start, state = merge(graded, tmp_path / "out").tensors, load(base), load(models[0])
    for name in [name for name in start if name.endswith("bias")]:
        torch.testing.assert_close(found[name], (state if ".1." in name else start)[name])


# Files beside the weights that loaders of the merge need

CODE = """
import transformers
class OwnConfig(transformers.LlamaConfig):
    model_type = "own"
class OwnForCausalLM(transformers.LlamaForCausalLM):
    config_class = OwnConfig
"""
OWN = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
GIVEN = {
    "generation_config.json": '{"top_k": 7}',
    "preprocessor_config.json": "{}",
    "modules.json": "[]",
    "sentence_bert_config.json": "{}",
    "config_sentence_transformers.json": "{}",
    "1_Pooling/config.json": "{}",  # sentence-transformers 3776
    "chat_template.jinja": "CHAT",  # mergekit 589
    "additional_chat_templates/tool.jinja": "TOOL",
    "tekken.json": "{}",
}


def test_own_code_loads(tmp_path: Path) -> None:
    base, models = family(tmp_path, llama, TASKS)
    for folder in (base, *models):
        (folder / "own.py").write_text(CODE)
        configure(folder, model_type="own", architectures=["OwnForCausalLM"], auto_map=OWN)
    document = recipe("basis_ta", base, models, **SUM)
    folder = merge(document, tmp_path / "out", "--trust-remote-code").folder
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(loaded).__name__ == "OwnForCausalLM"


@pytest.mark.parametrize("source", ["", "tokenizer_source: base", "tokenizer: {source: base}"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_that_loaders_need(dtype: torch.dtype, source: str, tmp_path: Path) -> None:
    """In a merge, and in exports of stores with dense and with lossless vectors."""
    base, models = family(tmp_path, llama, TASKS, dtypes=[dtype])
    for file, text in ((f / name, text) for f in (base, *models) for name, text in GIVEN.items()):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    document = recipe("basis_ta", base, models, extra=yaml.safe_load(source))
    outs = [merge(document, tmp_path / "out").folder]
    if not source:
        tvb("build", write(document, tmp_path / "r"), tmp_path / "store", "--quiet")
        tvb("export", tmp_path / "store", tmp_path / "again", "--task", "a", "--quiet")
        outs.append(tmp_path / "again")
    for out, name in ((out, name) for out in outs for name in GIVEN):
        if not (source and name == "tekken.json"):  # of the old vocabulary
            assert (out / name).read_text() == GIVEN[name], name


def test_models_in_the_cache_of_the_hub_offline(tmp_path: Path) -> None:
    """huggingface_hub 4487; mergekit asks the Hub for a list of files."""
    base, models = family(tmp_path / "models", tasks=TASKS)
    for folder in (base, *models):
        place = tmp_path / "hub" / f"models--org--{folder.name}"
        shutil.copytree(folder, place / "snapshots" / ("0" * 40))
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text("0" * 40)
    document = recipe("basis_ta", Path("org/base"), ["org/a", "org/b"], **SUM)
    command = Path(sys.executable).with_name("mergekit-yaml")
    words = [str(command), str(write(document, tmp_path / "out")), str(tmp_path / "out")]
    offline = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, env=os.environ | offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_sum(llama, [base, *models, tmp_path / "out"])
    assert (tmp_path / "out" / "tokenizer.json").exists()


# Which tensors are tied: values decide

SHARED, WTE = "model.shared.weight", "transformer.wte.weight"
COPIES = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
T5_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


Tied = tuple[Make, Sequence[str], Sequence[Sequence[str]], Sequence[int], Mapping[int, bool]]


def write_tied(folder: Path, given: Tied) -> tuple[list[Path], list[State]]:
    """The folders, the base's first, and all tensors that transformers has of each."""
    make, names, stored, own, tied = given
    torch.manual_seed(0)
    model, paths, states = make(), list[Path](), list[State]()
    start = {name: torch.randn_like(t) / 10 for name, t in model.state_dict().items()}
    for number, task in enumerate(("base", *TASKS)):
        state = {n: t + number * torch.randn_like(t) / 100 for n, t in start.items()}
        twins = (n for n in names[1:] if n != HEAD or number not in own)
        state |= dict.fromkeys(twins, state[names[0]])
        paths.append(path := folder / task)
        model.save_pretrained(path)
        lost = set(names) - set(stored[number])
        save(path, {n: t.clone() for n, t in state.items() if n not in lost})
        if number in tied:
            configure(path, tie_word_embeddings=tied[number])
        states.append(state)
    return paths, states


PAIR, BOTH = (EMBEDDING, HEAD), [(EMBEDDING, HEAD)]
ONE, HEADED, GPT2 = [(EMBEDDING,)], [(HEAD,)], (WTE, HEAD)
OF_BART, T5 = (SHARED, *COPIES, HEAD), ("shared.weight", *T5_COPIES, HEAD)
GATED = of("T5", MULTIMODAL, feed_forward_proj="gated-gelu")
TIES: dict[str, Tied] = {
    # The input embedding and what it is tied to; of these what each file stores, the base's first;
    # the models with an output layer of their own; what config.json says otherwise
    "own head in one model": (TIED, PAIR, ONE + BOTH + ONE, [1], {}),
    "own head, base stored twice": (TIED, PAIR, BOTH * 2 + ONE, [1], {}),
    "own head in the base": (llama, PAIR, BOTH + ONE * 2, [0], {1: True, 2: True}),
    "untied in words alone": (llama, PAIR, BOTH * 3, [], {}),
    "head alone in one model": (TIED, PAIR, ONE + HEADED + ONE, [], {}),
    "head alone in the base": (TIED, PAIR, HEADED + ONE * 2, [], {}),
    "own head, base head alone": (TIED, PAIR, HEADED + BOTH + ONE, [1], {}),
    "own head of GPT-2": (gpt2, GPT2, [(WTE,), GPT2, (WTE,)], [1], {}),
    "copies of BART in base": (BART, OF_BART, [OF_BART, (SHARED,), (SHARED,)], [], {}),
    "copies of BART in models": (BART, OF_BART, [(SHARED,), OF_BART, (SHARED,)], [], {}),
    "own head of BART": (BART, OF_BART, [(SHARED,), OF_BART, (SHARED,)], [1], {}),
    "own head of T5": (GATED, T5, [T5[:1], (T5[0], HEAD), T5], [1, 2], {}),
}


@pytest.mark.parametrize("case", TIES)
def test_values_decide_which_tensors_are_tied(case: str, tmp_path: Path) -> None:
    make, names, _, own, _ = TIES[case]
    (base, *models), states = write_tied(tmp_path, TIES[case])
    twins = names[1:-1] if own else names[1:]  # tensors of which G counts the first name
    dense = Dense(states[0], states[1:], [name for name in states[0] if name not in twins])
    want = {n: t + 0.5 * sum(s[n].double() - t for s in states[1:]) for n, t in states[0].items()}

    def loaded(folder: Path) -> Any:
        return type(make()).from_pretrained(folder, dtype=torch.float32)  # type: ignore[attr-defined]

    def check(model: Any, want: Mapping[str, Tensor]) -> None:
        """The model has these tensors, and its configuration says what is tied."""
        state = model.state_dict()
        for name, tensor in want.items():
            torch.testing.assert_close(state[name].double(), tensor.double(), rtol=0, atol=1e-6)
        one = all(torch.equal(state[names[0]], state[name]) for name in names)
        # T5 scales by that key
        assert one or not model.config.tie_word_embeddings or model.config.model_type == "t5"

    made = recipe("basis_ta", base, models, **SUM | {"lambda": 0.5})
    check(loaded(merge(made, tmp_path / "merged").folder), want)
    tvb("build", write(made, tmp_path / "r"), tmp_path / "store", "--quiet")
    inspected = json.loads(tvb("inspect", tmp_path / "r.yml", "--json").stdout)
    np.testing.assert_allclose(inspected["gram"], dense.gram, rtol=1e-5)
    tvb("merge", tmp_path / "store", tmp_path / "over", "--method", "add", "--quiet")
    check(loaded(tmp_path / "over"), want)
    tvb("export", tmp_path / "store", tmp_path / "all", "--all", "--quiet")
    live = tvb_mergekit.attach(loaded(base), tmp_path / "store")
    bases = tvb_mergekit.build(base, dict(zip(TASKS, models, strict=True)), basis="none")
    for task, state in zip(TASKS, states[1:], strict=True):
        check(loaded(tmp_path / "all" / task), state)
        check(live.use(task), state)
    for held in (load_store(tmp_path / "store"), bases):
        np.testing.assert_allclose(held.tensors["gram"], dense.gram, rtol=1e-5)
    found = tvb_mergekit.merge(bases, base, lambda_=0.5)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), want[name], rtol=0, atol=1e-6)
    assert found.keys() & names and (HEAD in found or not own)
