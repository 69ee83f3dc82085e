"""Public bug reports, each as a small input of our own with the right value stated beforehand."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import peft
import pytest
import torch
import transformers
from click.testing import CliRunner
from commands import merge, recipe, slices, tvb, write
from mergekit.scripts import run_yaml
from safetensors.torch import load_file, save_file
from tiny import DECODER, as_bin, family, gpt2, llama, load, save_tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from worlds import VISION, clip, configure, llava, vit

import tvb_mergekit
from tvb_mergekit.store.routing import Routed, routed_parameters, router_of
from tvb_mergekit.store.store import load as load_store

# Two ways to read one folder: what `change` makes of model `a`, given `b`, and whose weights count


def shards(folder: Path) -> None:
    """The model in four shards with their index."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="30KB")


def single_beside_shards(a: Path, b: Path) -> None:
    shards(a)
    shutil.copy(b / "model.safetensors", a)


def single_beside_stale_index(a: Path, b: Path) -> None:
    single_beside_shards(a, b)
    for file in a.glob("model-*"):
        file.unlink()


def index_of_the_single_file(a: Path, b: Path) -> None:  # as mlx writes it
    index = {"weight_map": dict.fromkeys(load(a), "model.safetensors")}
    (a / "model.safetensors.index.json").write_text(json.dumps(index))


def single_bin_beside_shards(a: Path, b: Path) -> None:
    as_bin(a, 3)
    torch.save(load(b), a / "pytorch_model.bin")


def later_bin(a: Path, b: Path) -> None:
    torch.save(load(b), a / "pytorch_model.bin")


def shards_of_bin(a: Path, b: Path) -> None:
    as_bin(b, 3)
    for file in b.glob("pytorch*"):
        shutil.copy(file, a)


def bin_beside_shards(a: Path, b: Path) -> None:
    shards(a)
    later_bin(a, b)


def consolidated(a: Path, b: Path) -> None:
    save_file(load(b), a / "consolidated.safetensors")


def adapter_beside(a: Path, b: Path) -> None:
    adapter(b, a)


FOLDERS: list[tuple[Callable[[Path, Path], None], str]] = [
    (single_beside_shards, "model.safetensors and model.safetensors.index.json"),
    (single_beside_stale_index, "b"),
    (index_of_the_single_file, "a"),
    (single_bin_beside_shards, "pytorch_model.bin and pytorch_model.bin.index.json"),
    (later_bin, "a"),
    (shards_of_bin, "a"),
    (bin_beside_shards, "a"),
    (consolidated, "a"),
    (adapter_beside, "adapter_config.json"),
]


@pytest.mark.parametrize(("change", "right"), FOLDERS)
def test_one_folder_read_in_two_ways(
    tmp_path: Path, change: Callable[[Path, Path], None], right: str
) -> None:
    base, (a, b) = family(tmp_path, tasks=("a", "b"))
    states = {"base": load(base), "a": load(a), "b": load(b)}
    change(a, b)
    made = merge(recipe("basis_ta", base, [a], lambda_=1.0), tmp_path / "out", fails=len(right) > 1)
    if len(right) > 1:
        assert right in made.output and made.output.count("\n") == 1, made.output
        return
    seen = AutoModelForCausalLM.from_pretrained(a).state_dict()
    for name, tensor in made.tensors.items():
        assert torch.equal(seen[name], states[right][name])
        assert torch.allclose(tensor, states[right][name], atol=1e-6)


def test_an_adapter_in_two_formats_is_what_peft_loads(tmp_path: Path) -> None:
    base, _ = family(tmp_path, tasks=())
    held = adapter(base, folder := tmp_path / "adapter")
    torch.save({name: 2 * tensor for name, tensor in held.items()}, folder / "adapter_model.bin")
    made = merge(recipe("basis_ta", base, [f"{base}+{folder}"], lambda_=1.0), tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(base)
    right = peft.PeftModel.from_pretrained(plain, folder).merge_and_unload().state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.allclose(made.tensors[name], right[name], atol=1e-6)


def adapter(base: Path, folder: Path) -> Mapping[str, torch.Tensor]:
    """A random adapter of a model."""
    model = AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(folder)
    return load_file(folder / "adapter_model.safetensors")


# Tokenizers


def as_vocab_files(model: Path) -> None:
    """The tokenizer as older models have it."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    (model / "tokenizer.json").unlink()
    (model / "vocab.json").write_text(json.dumps(vocabulary))


def changed_tokenizer(model: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = model / "tokenizer.json"
    held = json.loads(file.read_text())
    change(held)
    file.write_text(json.dumps(held))


def swap(held: dict[str, Any]) -> None:
    words = held["model"]["vocab"]
    words["t5"], words["t6"] = words["t6"], words["t5"]


def rename(held: dict[str, Any]) -> None:  # a reserved token gets its meaning
    words = held["model"]["vocab"]
    words["<|im_start|>"] = words.pop("t95")


def as_unigram(held: dict[str, Any]) -> None:
    words = sorted(held["model"]["vocab"], key=held["model"]["vocab"].get)
    held["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [[word, -1.0] for word in words]}


SWAPPED = "use `tokenizer_source: base`, or `exclude`"
VOCABULARIES: list[tuple[Callable[[Path], None], Mapping[str, Any], str]] = [
    (partial(changed_tokenizer, change=swap), {}, SWAPPED),
    (partial(changed_tokenizer, change=swap), {"exclude": "embed_tokens|lm_head"}, ""),
    (lambda m: (changed_tokenizer(m, swap), as_vocab_files(m))[0], {}, SWAPPED),  # type: ignore[func-returns-value]
    (as_vocab_files, {}, ""),
    (partial(changed_tokenizer, change=rename), {}, ""),
    (partial(changed_tokenizer, change=as_unigram), {}, ""),
    (lambda model: (model / "tokenizer.json").unlink(), {}, ""),
]


@pytest.mark.parametrize(("change", "keys", "said"), VOCABULARIES)
def test_words_in_another_order(
    tmp_path: Path, change: Callable[[Path], None], keys: Mapping[str, Any], said: str
) -> None:
    base, (a, b) = family(tmp_path, tasks=("a", "b"))
    change(b)
    made = merge(recipe("basis_ta", base, [a, b], **keys), tmp_path / "out", fails=bool(said))
    assert said in made.output
    if said:
        assert "2 tokens of task `b`" in made.output
        aligned = recipe("basis_ta", base, [a, b], extra={"tokenizer_source": "base"})
        if (b / "tokenizer.json").exists():
            merge(aligned, tmp_path / "aligned")


# Configurations


CONFIGS: list[tuple[Mapping[str, Any], str]] = [
    ({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05 (base: 1e-06)"),
    ({"hidden_act": "gelu"}, "hidden_act gelu (base: silu)"),
    ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "'rope_theta': 500000.0"),
    ({"num_attention_heads": 8, "head_dim": 4}, "num_attention_heads 8 (base: 4)"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "'factor': 2.0"),
    ({"max_position_embeddings": 128, "eos_token_id": 5, "use_cache": False}, ""),
]


@pytest.mark.parametrize(("changes", "said"), CONFIGS)
def test_a_configuration_that_changes_the_function(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: Mapping[str, Any], said: str
) -> None:
    base, (a, b) = family(tmp_path, tasks=("a", "b"))
    configure(b, **changes)
    if "rope_scaling" in changes:
        configure(b, rope_parameters=None)
    merge(recipe("basis_ta", base, [a, b]), tmp_path / "out")
    told = [line for line in caplog.messages if "otherwise than the base" in line]
    assert len(told) == bool(said)
    assert all(said in line and "`b`" in line for line in told), told


# Routing


def test_a_cache_is_continued_by_its_own_prompts_alone() -> None:
    torch.manual_seed(0)
    model = llama().eval().requires_grad_(False)
    sizes = dict(model.named_parameters())
    names = routed_parameters(model)
    bases = {name: 0.1 * torch.randn(2, *sizes[name].shape) for name in names}
    there = Routed(model, {mlp: router_of([32, 2]) for mlp in names.values()}, bases)
    one, other, token = (torch.tensor([words]) for words in ([3, 1, 4], [9, 2, 6], [5]))
    before = model(one).past_key_values
    there.route()
    cache = model(one).past_key_values
    right = model(token, past_key_values=cache).logits
    again = model(one, return_dict=False)[1]
    assert torch.equal(model(token, past_key_values=again).logits, right)
    cache = model(one).past_key_values
    model(other)
    for wrong in (cache, before):
        with pytest.raises(ValueError, match="of other prompts than the last"):
            model(token, past_key_values=wrong)


# Messages


def prefixed(prefix: str, model: Path) -> None:
    save_file({f"{prefix}{name}": tensor for name, tensor in load(model).items()},
              model / "model.safetensors", metadata={"format": "pt"})  # fmt: skip


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "model."])
def test_a_prefix_of_all_names_is_told(tmp_path: Path, prefix: str) -> None:
    base, (a, b) = family(tmp_path, tasks=("a", "b"))
    prefixed(prefix, b)
    said = merge(recipe("basis_ta", base, [a, b]), tmp_path / "out", fails=True).output
    assert "21 missing in b (model.embed_tokens" in said
    assert f"but {prefix}model.embed_tokens.weight: save it without the prefix" in said


def test_an_adapter_with_names_of_its_very_base(tmp_path: Path) -> None:
    base, _ = family(tmp_path, tasks=())
    held = adapter(base, folder := tmp_path / "adapter")
    save_file({n.replace(".model.layers", ".model.language_model.layers"): t
               for n, t in held.items()}, folder / "adapter_model.safetensors")  # fmt: skip
    out = tmp_path / "out"
    said = merge(recipe("basis_ta", base, [f"{base}+{folder}"]), out, fails=True).output
    assert f"trained on ({base}), or merge it with PEFT" in said


# Recipes as people publish them, with our methods in place of mergekit's: the coefficient of each
# task vector in the merged model, or what the one line of a refusal says

A_AND_B = "base_model: ./base\nmodels: [{model: ./a}, {model: ./b}]\n"
TA = f"merge_method: basis_ta\n{A_AND_B}"
SUM = {"a": 1.0, "b": 1.0}
PUBLISHED: dict[str, tuple[str, Mapping[str, float] | str]] = {
    "task arithmetic": (
        """
        merge_method: basis_ta
        base_model: ./base
        models:
          - model: ./a
            parameters: {weight: 0.3}
          - model: ./b
            parameters: {weight: -0.7}
        parameters: {basis: none, lambda: 1.0}
        dtype: float32
        """,
        {"a": 0.3, "b": -0.7},
    ),
    "ties, the base in the list": (
        """
        models:
          - model: ./base
            # no parameters necessary for base model
          - model: ./a
            parameters: {density: 0.5, weight: 0.5}
        merge_method: basis_ties
        base_model: ./base
        parameters: {normalize: true}
        dtype: float16
        """,
        "`models[0]` is the base model ./base: take it out of this list",
    ),
    "ties, densities of models": (
        """
        models:
          - model: ./a
            parameters: {density: [1, 0.7, 0.1], weight: 1.0}
          - model: ./b
            parameters: {density: 0.5, weight: [0, 0.3, 0.7, 1]}
        merge_method: basis_ties
        base_model: ./base
        parameters: {normalize: true, int8_mask: true}
        """,
        "`density` under `models[0].parameters` belongs to the recipe's `parameters`",
    ),
    "ties, a gradient of densities": (
        """
        merge_method: basis_ties
        base_model: ./base
        models: [{model: ./a}]
        parameters: {basis: none, density: [1, 1.0, 1], lambda: 0.5}
        """,
        {"a": 0.5},
    ),
    "a gradient of weights": (
        """
        merge_method: basis_ta
        base_model: ./base
        models:
          - {model: ./a, parameters: {weight: [0, 0.3, 0.7, 1]}}
          - {model: ./b, parameters: {weight: [{filter: mlp, value: 0.5}, {value: 0}]}}
        """,
        "no filter and no layer gradient (`lambda` may have them)",
    ),
    "normalize": (f"{TA}parameters: {{normalize: true}}", "is scaled by `lambda`"),
    "int8_mask": (f"{TA}parameters: {{int8_mask: true}}", "`int8_mask` under parameters is of"),
    "dare's rescale": (f"{TA}parameters: {{rescale: true}}", "leave it out: nothing is needed"),
    "della's epsilon": (f"{TA}parameters: {{epsilon: 0.05}}", "basis_ties keeps a `density`"),
    "breadcrumbs' gamma": (f"{TA}parameters: {{gamma: 0.01}}", "leave it out: basis_ties keeps"),
    "sce's select_topk": (f"{TA}parameters: {{select_topk: 0.1}}", "basis_ties keeps a `density`"),
    "model stock's filter_wise": (f"{TA}parameters: {{filter_wise: true}}", "leave it out"),
    "slerp with slices": (
        """
        slices:
          - sources:
              - {model: ./base, layer_range: [0, 4]}
              - {model: ./a, layer_range: [0, 4]}
        merge_method: basis_ta
        base_model: ./base
        parameters:
          t:
            - {filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}
            - {value: 0.5}
        """,
        "`t` under parameters is of other methods; leave it out: `weight` scales",
    ),
    "slices of all layers": (
        """
        slices:
          - sources:
              - {model: ./base, layer_range: [0, 2]}
              - {model: ./a, layer_range: [0, 2]}
          - sources:
              - {model: ./base, layer_range: [2, 4]}
              - {model: ./a, layer_range: [2, 4]}
        merge_method: basis_ta
        base_model: ./base
        parameters: {basis: none, lambda: 0.5}
        """,
        {"a": 0.5},
    ),
    "passthrough": (
        """
        slices:
          - sources: [{model: ./a, layer_range: [0, 3]}]
          - sources: [{model: ./b, layer_range: [1, 4]}]
        merge_method: basis_ta
        base_model: ./base
        """,
        "`slices[0].sources` does not list the base model ./base: each slice must",
    ),
    "linear without a base": (
        """
        models: [{model: ./a, parameters: {weight: 1.0}}, {model: ./b, parameters: {weight: 0.3}}]
        merge_method: basis_ta
        """,
        "`base_model` is missing: basis_ta needs the models' common base",
    ),
    "experts": (
        """
        base_model: ./base
        gate_mode: hidden
        merge_method: basis_ta
        experts: [{source_model: ./a, positive_prompts: [math]}]
        """,
        "unknown key `gate_mode` under the recipe",
    ),
    "one weight for all": (
        f"{TA}parameters: {{weight: 0.5}}",
        "belongs under the `parameters` of one model",
    ),
    "weight 0": (
        TA.replace("{model: ./b}", "{model: ./b, parameters: {weight: 0.0}}"),
        "`weight` is 0.0: Input should be",
    ),
    "union of equal vocabularies": (
        f"{TA}tokenizer_source: union\nparameters: {{basis: none, lambda: 1}}",
        SUM,
    ),
    "a model's tokenizer": (
        f"{TA}tokenizer_source: ./a\nparameters: {{basis: none, lambda: 1}}",
        SUM,
    ),
    "tokens of a model": (
        f"{TA}tokenizer: {{source: base, tokens: {{t5: {{source: ./a}}}}}}\n"
        "parameters: {basis: none, lambda: 1}",
        SUM,
    ),
    "a padded vocabulary": (f"{TA}pad_to_multiple_of: 64", "put it in `tokenizer`"),
    "a chat template": (
        f"{TA}chat_template: chatml\ntokenizer_source: base\ndtype: float32\n"
        "parameters: {basis: none, lambda: 1}",
        SUM,
    ),
    "no such chat template": (f"{TA}chat_template: chatlm", "chatlm"),
    "dtype in parameters": (f"{TA}parameters: {{dtype: bfloat16}}", "belongs at the recipe's top"),
    "density of addition": (f"{TA}parameters: {{density: 0.5}}", "`density` belongs to basis_ties"),
    "lambda of a model": (
        TA.replace("{model: ./b}", "{model: ./b, parameters: {lambda: 0.5}}"),
        "`lambda` under `models[1].parameters` belongs to the recipe's `parameters`",
    ),
    "an adapter as a mapping": (
        """
        merge_method: basis_ta
        base_model: ./base
        models: [{model: {model: {path: ./base}, lora: {path: ./x}}}, {model: ./a}]
        parameters: {basis: none, lambda: 1}
        """,
        {"x": 1.0, "a": 1.0},
    ),
    "an adapter alone": (TA.replace("./b}", "./x}"), "an adapter goes as BASE+ADAPTER"),
    "names of models alone": (
        "merge_method: basis_ta\nbase_model: ./base\nmodels: [./a, ./b]",
        "`models.0`: ",
    ),
    "several bases": (TA.replace("./base", "[./base, ./a]"), "`base_model`"),
    "anchors": (
        """
        merge_method: basis_ta
        base_model: ./base
        models:
          - &one {model: ./a, parameters: &half {weight: 0.5}}
          - {<<: *one, model: ./b}
        parameters: {basis: none, lambda: 1}
        """,
        {"a": 0.5, "b": 0.5},
    ),
    "exclude as a list": (f"{TA}parameters: {{exclude: [embed, lm_head]}}", "`embed|lm_head`"),
    "layers of models": (
        TA.replace("{model: ./b}", "{model: ./b, layer_range: [0, 4]}"),
        "unknown key `layer_range` under `models`[1]",
    ),
    "a module of vision models": (
        """
        merge_method: basis_ta
        base_model: ./base
        modules: {text_decoder: {models: [{model: ./a}, {model: ./b}]}}
        """,
        "`modules`: the models have no text_decoder",
    ),
    "an option of the command": (f"{TA}allow_crimes: true", "unknown key `allow_crimes`"),
    "a method's name with a dash": (TA.replace("basis_ta", "basis-ta"), "did you mean `basis_ta`?"),
    "several recipes": (f"name: one\n{TA}---\nname: two\n{TA}", "mergekit-multi runs several"),
    "an empty recipe": ("# nothing yet\n", "expected a mapping with `merge_method`"),
    "a path with a tilde": (TA.replace("./a", "~/a"), "recipes expand neither `~` nor `$`"),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    base, _ = family(folder, partial(llama, num_hidden_layers=4), ("a", "b"))
    adapter(base, folder / "x")
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_recipes(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(published)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text, right = PUBLISHED[name]
    file, out = tmp_path / "recipe.yml", tmp_path / "out"
    file.write_text(dedent(text))
    done = CliRunner().invoke(run_yaml.main, [str(file), str(out), "--quiet"])
    if isinstance(right, str):
        assert done.exit_code == 1 and not out.exists()
        assert right in done.output and done.output.count("\n") == 1, done.output
        return
    assert done.exit_code == 0, done.output
    start, merged = load(published / "base"), load(out)
    states = {"a": load(published / "a"), "b": load(published / "b"), "x": start | fused(published)}
    for key, tensor in start.items():
        moved = [by * (states[task][key] - tensor) for task, by in right.items()]
        assert torch.allclose(merged[key], sum(moved, tensor), atol=1e-6), key


def fused(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    tuned: Any = peft.PeftModel.from_pretrained(model, folder / "x")
    state: dict[str, torch.Tensor] = tuned.merge_and_unload().state_dict()
    return state


Make = Callable[[], nn.Module]
SUM: dict[str, Any] = {"basis": "none", "lambda": 1.0}

# Architectures that mergekit's definitions lack in part: every tensor of the base is merged

BERT = {key: value for key, value in DECODER.items() if key != "tie_word_embeddings"}
SEQUENCES = {"vocab_size": 96, "d_model": 32, "decoder_start_token_id": 1, "pad_token_id": 0}
LAYERS = {
    f"{half}_{key}": value
    for half in ("encoder", "decoder")
    for key, value in {"layers": 2, "attention_heads": 4, "ffn_dim": 64}.items()
}
T5 = {"d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
AUDIO = {"num_mel_bins": 8, "max_source_positions": 32, "bos_token_id": 1, "eos_token_id": 2}


def of(name: str, head: str, **sizes: Any) -> Make:
    config = getattr(transformers, f"{name}Config")
    return lambda: getattr(transformers, name + head)(config(**sizes))


def gemma3() -> nn.Module:
    text = DECODER | {"head_dim": 8, "tie_word_embeddings": True}
    tokens = {"image_token_index": 95, "boi_token_index": 94, "eoi_token_index": 93}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=VISION, mm_tokens_per_image=4, **tokens
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def two_towers() -> nn.Module:
    text = {**BERT, "projection_dim": 16}
    config = transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=16)
    return transformers.CLIPModel(config)


BIASED = partial(llama, attention_bias=True, mlp_bias=True)
PARTLY_KNOWN: dict[str, Make] = {
    "biases of Llama": BIASED,
    "encoder of BERT, sentence-transformers": of("Bert", "Model", **BERT),
    "encoder of RoBERTa, sentence-transformers": of("Roberta", "Model", **BERT),
    "BERT with MLM head": of("Bert", "ForMaskedLM", **BERT),
    "BERT with both heads": of("Bert", "ForPreTraining", **BERT),
    "T5 v1.0": of("T5", "ForConditionalGeneration", **SEQUENCES, **T5),
    "GPT-NeoX of transformers 5": of("GPTNeoX", "ForCausalLM", **BERT),
    "Gemma 3 from a config": gemma3,
    "Whisper": of("Whisper", "ForConditionalGeneration", **SEQUENCES, **LAYERS, **AUDIO),
    "CLIP, both towers": two_towers,
    "CLIP, vision alone": clip,
    "ViT": vit,
    "LLaVA": llava,
}


def assert_sum(make: Make, folders: list[Path]) -> None:
    """transformers loads the last folder completely, as base + the sum of the task vectors."""
    kind: Any = type(make())
    loaded = [kind.from_pretrained(folder, output_loading_info=True) for folder in folders]
    assert not any(loaded[-1][1].values()), loaded[-1][1]
    base, *states, merged = [model.state_dict() for model, _ in loaded]
    for name, tensor in base.items():
        want = tensor.double() + sum(state[name].double() - tensor.double() for state in states)
        torch.testing.assert_close(merged[name].double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", PARTLY_KNOWN.values(), ids=PARTLY_KNOWN)
def test_tensors_that_a_definition_lacks(make: Make, tmp_path: Path) -> None:
    base, models = family(tmp_path, make, ["math", "code"], tokenizer=False)
    result = merge(recipe("basis_ta", base, models, **SUM), tmp_path / "out")
    assert not result.facts["left_out"]
    assert_sum(make, [base, *models, result.folder])


def test_a_store_of_sentence_encoders(tmp_path: Path) -> None:
    make = PARTLY_KNOWN["encoder of BERT, sentence-transformers"]
    base, models = family(tmp_path, make, ["math", "code"], tokenizer=False)
    store, out = tmp_path / "store", tmp_path / "out"
    tvb("build", write(recipe("basis_ta", base, models), store), store, "--quiet")
    tvb("export", store, out, "--task", "math", "--quiet")
    assert_sum(make, [base, models[0], out])


def test_one_module_of_three(tmp_path: Path) -> None:
    """The merge would lack the vision tower."""
    base, models = family(tmp_path, gemma3, ["math"], tokenizer=False)
    document = recipe("basis_ta", base, models, **SUM)
    document["modules"] = {"text_decoder": {"models": document.pop("models")}}
    result = merge(document, tmp_path / "out", fails=True)
    assert "without multi_modal_projector, vision_tower" in result.output


def test_layers_of_what_a_definition_lacks(tmp_path: Path) -> None:
    """Gradients, and slices in another order, count the layers of biases as of other tensors."""
    base, models = family(tmp_path, BIASED, ["math"])
    whole = recipe("basis_ta", base, models, **SUM)
    graded = recipe("basis_ta", base, models, **SUM | {"lambda": [0.0, 1.0]})
    sliced = {key: value for key, value in whole.items() if key != "models"}
    sliced |= slices(base, models, [(1, 2), (0, 1)])
    found = [merge(r, tmp_path / f"out{n}").tensors for n, r in enumerate((graded, sliced))]
    start, state = load(base), load(models[0])
    for name in [name for name in start if name.endswith("bias")]:
        other = name.replace(".0.", ".x.").replace(".1.", ".0.").replace(".x.", ".1.")
        torch.testing.assert_close(found[0][name], (state if ".1." in name else start)[name])
        torch.testing.assert_close(found[1][name], state[other])


def test_tensors_that_the_base_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pooler, and a head that no definition names, in one model alone."""
    base, models = family(tmp_path, of("Bert", "ForMaskedLM", **BERT), ["math", "code"])
    extra = {"bert.pooler.dense.weight": torch.ones(32, 32), "v_head.bias": torch.ones(3)}
    save_file(load(models[1]) | extra, models[1] / "model.safetensors", {"format": "pt"})
    result = merge(recipe("basis_ta", base, models, **SUM), tmp_path / "out")
    assert result.facts["left_out"].keys() == extra.keys()
    assert "2 tensors are in models, but neither in the base nor in the merge" in caplog.text
    assert result.tensors.keys() == load(base).keys()


def test_a_new_vocabulary_of_an_encoder(tmp_path: Path) -> None:
    """`tokenizer_source: base` with a model that has two more tokens."""
    base, models = family(tmp_path, of("Bert", "Model", **BERT), ["math", "code"])
    name = "embeddings.word_embeddings.weight"
    state = load(models[1])
    grown = torch.cat([state[name], torch.ones(2, 32)])
    save_file(state | {name: grown}, models[1] / "model.safetensors", {"format": "pt"})
    configure(models[1], vocab_size=98)
    save_tokenizer(models[1], 96, ("<think>", "</think>"))
    document = recipe("basis_ta", base, models, **SUM, extra={"tokenizer_source": "base"})
    result = merge(document, tmp_path / "out")
    start, first = load(base)[name], load(models[0])[name]
    torch.testing.assert_close(result.tensors[name], first + state[name] - start)


# Files beside the weights that loaders of the merge need

CODE = """
import transformers
class OwnConfig(transformers.LlamaConfig):
    model_type = "own"
class OwnForCausalLM(transformers.LlamaForCausalLM):
    config_class = OwnConfig
"""
OWN = {
    "model_type": "own",
    "architectures": ["OwnForCausalLM"],
    "auto_map": {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    },
}


def test_own_code_loads(tmp_path: Path) -> None:
    base, models = family(tmp_path, llama, ["math", "code"])
    for folder in (base, *models):
        (folder / "modeling_own.py").write_text(CODE)
        configure(folder, **OWN)
    document = recipe("basis_ta", base, models, **SUM)
    result = merge(document, tmp_path / "out", "--trust-remote-code")
    loaded = AutoModelForCausalLM.from_pretrained(result.folder, trust_remote_code=True)
    assert type(loaded).__name__ == "OwnForCausalLM"


@pytest.mark.parametrize(
    "words", [{}, {"tokenizer_source": "base"}, {"tokenizer": {"source": "base"}}]
)
def test_files_that_loaders_need(words: Mapping[str, Any], tmp_path: Path) -> None:
    """Generation, and the modules of sentence-transformers."""
    base, models = family(tmp_path, llama, ["math", "code"])
    given = {
        "generation_config.json": '{"top_k": 7}',
        "preprocessor_config.json": "{}",
        "modules.json": "[]",
        "sentence_bert_config.json": "{}",
        "config_sentence_transformers.json": "{}",
        "1_Pooling/config.json": "{}",
    }
    (base / "1_Pooling").mkdir()
    for name, text in given.items():
        (base / name).write_text(text)
    result = merge(recipe("basis_ta", base, models, **SUM, extra=words), tmp_path / "out")
    assert {name: (result.folder / name).read_text() for name in given} == given


# Which tensors are tied: values decide

State = dict[str, Tensor]
TASKS = ("math", "code")
HEAD, SHARED, WTE = "lm_head.weight", "model.shared.weight", "transformer.wte.weight"
EMBEDDING = "model.embed_tokens.weight"
COPIES = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
T5_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
SIZES = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
LAYERS = {
    f"{half}_{key}": size
    for half in ("encoder", "decoder")
    for key, size in {"layers": 1, "attention_heads": 4, "ffn_dim": 64}.items()
}


def bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=96, d_model=32, max_position_embeddings=64, **LAYERS
    )
    return transformers.BartForConditionalGeneration(config)


def t5() -> nn.Module:
    config = transformers.T5Config(**SIZES, feed_forward_proj="gated-gelu")
    return transformers.T5ForConditionalGeneration(config)


@dataclass
class Ties:
    """Models with ties: the input embedding, its copies, and what each model has or lacks.

    Attributes:
        own: the models that have an output layer of their own; 0 is the base.
        stored: of the tied names, what the file of each model holds.
        tied: what config.json says, if it is not as `make` says.
    """

    make: Callable[[], nn.Module]
    names: Sequence[str]
    stored: Sequence[Sequence[str]]
    own: Sequence[int] = ()
    tied: Mapping[int, bool] | None = None

    def write(self, folder: Path) -> tuple[list[Path], list[State]]:
        """The folders, the base's first, and all tensors that transformers has of each."""
        torch.manual_seed(0)
        model, paths, states = self.make(), list[Path](), list[State]()
        start = {name: torch.randn_like(t) / 10 for name, t in model.state_dict().items()}
        for number, task in enumerate(("base", *TASKS)):
            state = {n: t + number * torch.randn_like(t) / 100 for n, t in start.items()}
            for name in self.names[1:]:
                if not (name == HEAD and number in self.own):
                    state[name] = state[self.names[0]]
            paths.append(path := folder / task)
            model.save_pretrained(path)
            lost = set(self.names) - set(self.stored[number])
            held = {n: t.clone() for n, t in state.items() if n not in lost}
            save_file(held, path / "model.safetensors", {"format": "pt"})
            if number in (self.tied or {}):
                config = json.loads((path / "config.json").read_text())
                config["tie_word_embeddings"] = self.tied[number]
                (path / "config.json").write_text(json.dumps(config))
            states.append(state)
        return paths, states

    def gram(self, states: Sequence[State]) -> Tensor:
        """G over every tensor once: those that all models tie are one."""
        same = {n: n for n in states[0]} | dict.fromkeys(self.names[:-1], self.names[0])
        if not self.own and self.names[-1] == HEAD:
            same[HEAD] = self.names[0]
        rows = [
            torch.cat(
                [(s[n].double() - states[0][n].double()).reshape(-1) for n in same if same[n] == n]
            )
            for s in states[1:]
        ]
        return torch.stack(rows) @ torch.stack(rows).T


PAIR, BOTH = (EMBEDDING, HEAD), [(EMBEDDING, HEAD)]
ONE, HEADED, GPT2 = [(EMBEDDING,)], [(HEAD,)], (WTE, HEAD)
BART, T5 = (SHARED, *COPIES, HEAD), ("shared.weight", *T5_COPIES, HEAD)
TIED = partial(llama, tie_word_embeddings=True)
TIES = {
    "own head in one model": Ties(TIED, PAIR, ONE + BOTH + ONE, [1]),
    "own heads in both models": Ties(TIED, PAIR, ONE + BOTH * 2, [1, 2]),
    "own head, base stored twice": Ties(TIED, PAIR, BOTH * 2 + ONE, [1]),
    "own head, that model untied": Ties(TIED, PAIR, ONE + BOTH + ONE, [1], {1: False}),
    "own head in the base": Ties(llama, PAIR, BOTH + ONE * 2, [0], {1: True, 2: True}),
    "untied in words alone": Ties(llama, PAIR, BOTH * 3),
    "head alone in one model": Ties(TIED, PAIR, ONE + HEADED + ONE),
    "head alone in the base": Ties(TIED, PAIR, HEADED + ONE * 2),
    "head alone in all": Ties(TIED, PAIR, HEADED * 3),
    "own head, base head alone": Ties(TIED, PAIR, HEADED + BOTH + ONE, [1]),
    "own head of GPT-2": Ties(gpt2, GPT2, [(WTE,), GPT2, (WTE,)], [1]),
    "copies of BART in base": Ties(bart, BART, [BART, (SHARED,), (SHARED,)]),
    "copies of BART in models": Ties(bart, BART, [(SHARED,), BART, (SHARED,)]),
    "own head of BART": Ties(bart, BART, [(SHARED,), BART, (SHARED,)], [1]),
    "own head of BART alone": Ties(bart, BART, [(SHARED,), (SHARED, HEAD), (SHARED,)], [1]),
    "own head of T5": Ties(t5, T5, [T5[:1], (T5[0], HEAD), T5], [1, 2]),
}


def loaded(folder: Path, make: Callable[[], nn.Module]) -> nn.Module:
    return type(make()).from_pretrained(folder, dtype=torch.float32)


def check(model: nn.Module, want: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """The model has these tensors, and its configuration says what is tied."""
    state = model.state_dict()
    for name, tensor in want.items():
        torch.testing.assert_close(state[name].double(), tensor.double(), rtol=0, atol=1e-6)
    one = all(torch.equal(state[names[0]], state[name]) for name in names)
    if not one and model.config.model_type != "t5":  # its configuration scales by that key
        assert not model.config.tie_word_embeddings


@pytest.mark.parametrize("case", TIES)
def test_values_decide_which_tensors_are_tied(case: str, tmp_path: Path) -> None:
    given = TIES[case]
    paths, states = given.write(tmp_path)
    keys: dict[str, Any] = {"basis": "none", "lambda": 0.5}
    want = {
        name: base.double() + sum(0.5 * (s[name].double() - base.double()) for s in states[1:])
        for name, base in states[0].items()
    }
    made = recipe("basis_ta", paths[0], paths[1:], **keys)
    merged = merge(made, tmp_path / "merged")
    check(loaded(merged.folder, given.make), want, given.names)
    tvb("build", write(made, tmp_path / "r"), tmp_path / "store", "--quiet")
    store = load_store(tmp_path / "store")
    inspected = json.loads(tvb("inspect", tmp_path / "r.yml", "--json").stdout)
    gram = given.gram(states)
    assert torch.allclose(torch.as_tensor(store.tensors["gram"]), gram, rtol=1e-5, atol=0)
    norms = torch.tensor([inspected["norms"][task] for task in TASKS], dtype=torch.float64)
    assert torch.allclose(norms, gram.diagonal().sqrt(), rtol=1e-5, atol=0)
    tvb("merge", tmp_path / "store", tmp_path / "over", "--method", "add", "--quiet")
    check(loaded(tmp_path / "over", given.make), want, given.names)
    tvb("export", tmp_path / "store", tmp_path / "all", "--all", "--quiet")
    live = tvb_mergekit.attach(loaded(paths[0], given.make), tmp_path / "store")
    for task, state in zip(TASKS, states[1:], strict=True):
        check(loaded(tmp_path / "all" / task, given.make), state, given.names)
        check(live.use(task), state, given.names)
    check(live.reset(), states[0], given.names[:1])
    models = dict(zip(TASKS, paths[1:], strict=True))
    bases = tvb_mergekit.build(paths[0], models, basis="none")
    assert torch.allclose(torch.as_tensor(bases.tensors["gram"]), gram, rtol=1e-5, atol=0)
    found = tvb_mergekit.merge(bases, paths[0], lambda_=0.5)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), want[name], rtol=0, atol=1e-6)
    ours = {n for n in given.names if n in found}
    assert ours and (HEAD in ours or not given.own or HEAD not in given.names)
