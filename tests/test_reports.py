"""Public bug reports, each as a small input of our own with the right value stated beforehand."""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from commands import merge, recipe
from safetensors.torch import save_file
from tiny import as_bin, family, llama, load
from transformers import AutoModelForCausalLM
from worlds import configure

from tvb_mergekit.store.routing import Routed, routed_parameters, router_of

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
    model = AutoModelForCausalLM.from_pretrained(a)
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    tuned.save_pretrained(a)


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
    model, folder = AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter"
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(folder)
    held = load_adapter(folder)
    torch.save({name: 2 * tensor for name, tensor in held.items()}, folder / "adapter_model.bin")
    made = merge(recipe("basis_ta", base, [f"{base}+{folder}"], lambda_=1.0), tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(base)
    right = peft.PeftModel.from_pretrained(plain, folder).merge_and_unload().state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.allclose(made.tensors[name], right[name], atol=1e-6)


def load_adapter(folder: Path) -> Mapping[str, torch.Tensor]:
    from safetensors.torch import load_file

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
    ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, in the base 1e-06"),
    ({"hidden_act": "gelu"}, "hidden_act is gelu, in the base silu"),
    ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "'rope_theta': 500000.0"),
    ({"num_attention_heads": 8, "head_dim": 4}, "num_attention_heads is 8, in the base 4"),
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
    told = [line for line in caplog.messages if "in the base" in line]
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


def test_an_empty_recipe(tmp_path: Path) -> None:
    for text in ("", "---\n", "# only a comment\n", "just words"):
        (tmp_path / "out.yml").write_text(text)
        from click.testing import CliRunner
        from mergekit.scripts.run_yaml import main

        done = CliRunner().invoke(main, [str(tmp_path / "out.yml"), str(tmp_path / "out")])
        assert done.exit_code == 1 and "expected a mapping with `merge_method`" in done.output
        assert done.output.count("\n") == 1


def test_an_adapter_with_names_of_its_very_base(tmp_path: Path) -> None:
    base, _ = family(tmp_path, tasks=())
    model, folder = AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter"
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(folder)
    held = load_adapter(folder)
    save_file({n.replace(".model.layers", ".model.language_model.layers"): t
               for n, t in held.items()}, folder / "adapter_model.safetensors")  # fmt: skip
    out = tmp_path / "out"
    said = merge(recipe("basis_ta", base, [f"{base}+{folder}"]), out, fails=True).output
    assert f"trained on ({base}), or merge it with PEFT" in said
