"""Adapters against what PEFT writes, loads and fuses, and adapters in, an adapter out."""

import json
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import commands
import peft
import pytest
import tiny
import torch
import transformers
from commands import contents, recipe, refused, tvb, write
from mergekit.options import MergeOptions
from reference import Dense, expect
from safetensors.torch import load_file, save_file
from torch import Tensor
from worlds import CONV

from tvb_mergekit.core.gram import Factors
from tvb_mergekit.errors import UserError
from tvb_mergekit.learn.job import Job, Request
from tvb_mergekit.plugin.document import from_mapping
from tvb_mergekit.plugin.planner import planned
from tvb_mergekit.tensors import adapter as adapters_of_peft
from tvb_mergekit.tensors.adapter import CONFIG, MERGE_FIRST, PREFIX, WEIGHTS, Adapter
from tvb_mergekit.tensors.checkpoint import Checkpoint

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def model_of(base: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)


def train(
    base: Path, out: Path, seed: int = 0, safe: bool = True, **config: object
) -> dict[str, Tensor]:
    """Save a random adapter as PEFT does; return the float64 change of each tensor by fusing it."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": LINEAR, **config}
    model = peft.get_peft_model(model_of(base), peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            kept = 0.0 if "lora_" in name else parameter.data
            parameter.data = kept + 0.2 * torch.randn(parameter.shape, generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied or saved embeddings
        model.save_pretrained(out, safe_serialization=safe)
    return changes(base, out)


def changes(base: Path, adapter: Path) -> dict[str, Tensor]:
    """The change of each tensor of the model in memory, as PEFT fuses what is on the disk."""
    start, model = (model_of(base, torch.float64) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    return {name: fused[name].double() - old for name, old in start.state_dict().items()}


def read(base: Path, folder: Path) -> Adapter:
    return Adapter(folder, Checkpoint.open(base))


def dense(factors: Factors | Sequence[Factors]) -> Tensor:
    """A matrix, or the matrices of experts."""
    if isinstance(factors, Factors):
        return factors.left.double() @ factors.right.double()
    products = [dense(each) for each in factors]
    return torch.stack(products) if len(products) > 1 else products[0]


def check(adapter: Adapter, expected: Mapping[str, Tensor]) -> None:
    """Factors, tensors, and a part of each, read a few rows at a time."""
    for name in adapter.tensors.keys() & {n for n, change in expected.items() if change.any()}:
        shape, size = expected[name].shape, expected[name].numel()
        with mock.patch.object(adapters_of_peft, "AT_ONCE", 3 * shape[-1]):
            found = adapter.tensor(name)
            part = adapter.read(name, size // 3, size * 2 // 3, torch.empty(size))
        torch.testing.assert_close(found.double(), expected[name], atol=2e-6, rtol=0)
        assert torch.equal(part, found.view(-1)[size // 3 : size * 2 // 3])
        if factors := adapter.factors.get(name):
            torch.testing.assert_close(dense(factors), expected[name], atol=2e-6, rtol=0)


# Every kind of adapter, merged by mergekit-yaml


PATTERNS = {
    "rank_pattern": {"k_proj": 2, "^model.layers.1.self_attn.q_proj": 6, "0.self_attn.q": 9},
    "alpha_pattern": {"layers.1.mlp.up_proj": 3, r"self_attn\.(v|o)_proj": 1},
}
WIDE_PATTERNS = {"rank_pattern": {".*proj": 3}, "alpha_pattern": {"v_proj": 5, ".*_proj": 7}}
STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": STACKED}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "layers": ("llama", {"layers_to_transform": [1], "init_lora_weights": "gaussian"}),
    "patterns": ("llama", PATTERNS),
    "rslora": ("llama", {**WIDE_PATTERNS, "use_rslora": True}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "pickled": ("llama", {"target_modules": ["embed_tokens", "q_proj"], "safe": False}),
    "conv1d": ("gpt2", {"target_modules": CONV}),
    "square": ("gpt2", {"target_modules": ["attn.c_proj"]}),
    "modules to save": ("llama", {"modules_to_save": ["lm_head", "norm", "embed_tokens"]}),
    "wide": ("llama", {"r": 32}),  # the cores are as large as the matrices
    "stacked experts": ("mixtral", EXPERTS),
    "stacked experts, one parameter": (
        "qwen3 moe", {"target_modules": [], "target_parameters": ["experts.down_proj"]}
    ),
}  # fmt: skip


def merged_is_dense(base: Path, adapters: Sequence[Path], expected: Any, out: Path) -> None:
    """`mergekit-yaml` adds up the adapters as a dense sum in float64, and writes nothing else."""
    before = contents(out.parent).keys()
    start = model_of(base, torch.float64).state_dict()
    listed = [f"{base}+{each}" for each in adapters]
    made = recipe("basis_ta", base, listed, basis="none", lambda_=0.4)
    merged = commands.merge(made, out).tensors
    assert set(merged) <= set(start)
    for name, tensor in merged.items():
        want = start[name] + 0.4 * sum(each[name] for each in expected)
        torch.testing.assert_close(tensor.double(), want, atol=1e-6, rtol=0)
    new = contents(out.parent).keys() - before
    assert {name for name in new if not name.startswith("out/")} == {"out.yml"}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_merges_as_peft_fuses_it(world, tmp_path, kind):
    name, config = KINDS[kind]
    adapters = [tmp_path / "one", tmp_path / "two"]
    expected = [train(world(name).base, each, seed=n, **config) for n, each in enumerate(adapters)]
    assert (adapters[0] / "adapter_model.bin").exists() == (kind == "pickled")
    check(read(world(name).base, adapters[0]), expected[0])
    merged_is_dense(world(name).base, adapters, expected, tmp_path / "out")


ONE_BY_ONE = {
    "mixtral": ("block_sparse_moe.experts.{}.{}", {"w1": 64, "w3": 64, "w2": 32}),
    "qwen3 moe": ("mlp.experts.{}.{}", {"gate_proj": 16, "up_proj": 16, "down_proj": 32}),
}


def experts(name: str, out: Path, seed: int) -> None:
    """An adapter of each expert, as transformers 4 and PEFT wrote it."""
    place, sides = ONE_BY_ONE[name]
    generator, state = torch.Generator().manual_seed(seed), {}
    inner = next(iter(sides.values()))
    for layer in range(2):
        for expert in range(4):
            for module, rows in sides.items():
                key = f"base_model.model.model.layers.{layer}.{place.format(expert, module)}"
                columns = 32 if rows == inner else inner
                state[f"{key}.lora_A.weight"] = 0.2 * torch.randn(2, columns, generator=generator)
                state[f"{key}.lora_B.weight"] = 0.2 * torch.randn(rows, 2, generator=generator)
    out.mkdir()
    save_file(state, out / WEIGHTS)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": [*sides]}
    (out / CONFIG).write_text(json.dumps(config | {"task_type": "CAUSAL_LM"}))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_adapters_of_single_experts(world, tmp_path, name, stacked):
    base, adapters = world(name).base, [tmp_path / "one", tmp_path / "two"]
    for seed, each in enumerate(adapters):
        experts(name, each, seed)
    expected = [changes(base, each) for each in adapters]
    if stacked:
        model = model_of(base)
        base = tmp_path / "stacked"
        model.save_pretrained(base, save_original_format=False)
        tiny.save_tokenizer(base, 96)
        assert any(name.endswith("gate_up_proj") for name in tiny.load(base))
    merged_is_dense(base, adapters, expected, tmp_path / "out")
    wrong = load_file(adapters[0] / WEIGHTS)
    wrong = {key.replace("experts.3", "experts.4"): value for key, value in wrong.items()}
    save_file(wrong, adapters[0] / WEIGHTS)
    file = commands.write(recipe("basis_ta", base, [f"{base}+{adapters[0]}"]), tmp_path / "r")
    said = refused("merge", file, tmp_path / "no")
    assert "fits no tensor of the base" in said and ".experts." in said and "one" in said


def test_models_that_learn_with_adapters(world, tmp_path):
    base = world("llama").base
    change = train(base, tmp_path / "one", modules_to_save=["norm"])
    train(base, tmp_path / "two", seed=1)
    made = recipe("basis_ta", base, [f"{base}+{tmp_path / each}" for each in ("one", "two")])
    asked = Request(document=from_mapping(made), method="fisher", out="out")
    with planned(asked.document, MergeOptions()) as plan:
        state = Job(plan, asked).load("one")[0].state_dict()
    for name, theta in model_of(base, torch.float64).state_dict().items():
        torch.testing.assert_close(state[name].double(), theta + change[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("tokenizer", [{"tokenizer_source": "base"}, {"dtype": "float32"}])
def test_an_adapter_over_another_model(world, tmp_path, tokenizer):
    """X - theta_0 + s B A, next to a full model and an adapter of the base."""
    models = world("llama")
    (full, other), base = models.listed[:2], tiny.load(models.base)
    over = train(Path(full), tmp_path / "over", modules_to_save=["lm_head"])
    own = train(models.base, tmp_path / "own", seed=1)
    listed = [f"{full}+{tmp_path / 'over'}", other, f"{models.base}+{tmp_path / 'own'}"]
    made = recipe("basis_ta", models.base, listed, basis="none", **{"lambda": 0.5}) | tokenizer
    merged = commands.merge(made, tmp_path / "out").tensors
    assert f"{full}+{tmp_path}" in (tmp_path / "out" / "mergekit_config.yml").read_text()
    x, y = tiny.load(Path(full)), tiny.load(Path(other))
    for name, theta in base.items():
        tau = x[name].double() + y[name].double() - 2 * theta.double() + over[name] + own[name]
        want = theta.double() + 0.5 * tau
        torch.testing.assert_close(merged[name].double(), want, atol=1e-6, rtol=0)
    # G of adapters alone, of which the base's has factors
    file = write(recipe("basis_ta", models.base, listed[::2]) | tokenizer, tmp_path / "two")
    told = json.loads(tvb("inspect", file, "--json", "--quiet").stdout)
    taus = {"over": {n: x[n].double() - theta + over[n] for n, theta in base.items()}, "own": own}
    vectors = torch.stack([torch.cat([tau[n].flatten() for n in base]) for tau in taus.values()])
    torch.testing.assert_close(
        torch.tensor(told["gram"]).double(), vectors @ vectors.T, rtol=1e-5, atol=1e-3
    )


def test_a_vocabulary_in_another_order(world, tmp_path):
    """Embeddings are loaded whole, theta_0 + s B A, if a tokenizer of a model moves their rows."""
    models = world("other order")
    change = train(models.base, tmp_path / "a", target_modules=["embed_tokens", "q_proj"])
    listed = [f"{models.base}+{tmp_path / 'a'}", models.listed[1]]
    made = recipe("basis_ta", models.base, listed, basis="none", **{"lambda": 1.0})
    made |= {"tokenizer_source": "base"}
    merged = commands.merge(made, tmp_path / "out").tensors
    base, model = models.states[0], models.states[2]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        want = model[name].double() + change[name]
        torch.testing.assert_close(merged[name].double(), want, atol=1e-6, rtol=0)
    assert base.keys() == merged.keys()


# Reading


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))


def test_names_of_older_files_and_of_the_hub(world, tmp_path):
    """With the adapter's name in the keys, and `h.0.attn` for `transformer.h.0.attn`."""
    base, folder = world("gpt2").base, tmp_path / "a"
    expected = train(base, folder, target_modules=CONV, safe=False)
    del expected["lm_head.weight"]
    state = torch.load(folder / "adapter_model.bin", weights_only=True)
    old = {re.sub("(lora_[AB])", r"\1.default", key)[len("base_model.model.") :]: value
           for key, value in state.items()}  # fmt: skip
    torch.save(old, folder / "adapter_model.bin")
    edit_config(folder, fan_in_fan_out=False)  # PEFT's flag is of the last layer
    check(read(base, folder), expected)
    before = read(base, folder).fingerprint()
    for key, value, old_value in (("lora_alpha", 9, 8), ("use_rslora", True, False)):
        edit_config(folder, **{key: value})
        assert read(base, folder).fingerprint() != before
        edit_config(folder, **{key: old_value})
    shutil.copytree(base, tmp_path / "short")
    base, expected = (
        {name.removeprefix("transformer."): tensor for name, tensor in each.items()}
        for each in (tiny.load(base), expected)
    )
    save_file(base, tmp_path / "short" / "model.safetensors", {"format": "pt"})
    check(read(tmp_path / "short", folder), expected)


# Refusing


Q = f"{PREFIX}model.layers.0.self_attn.q_proj"
A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
FIRST = re.escape(MERGE_FIRST)  # of what is more than A and B
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # None: no such tensor
    ({"use_dora": True}, {}, f"has `use_dora: True`.*{FIRST}"),
    ({}, {f"{Q}.lora_magnitude_vector": torch.ones(32)}, f"uses DoRA.*{FIRST}"),
    ({}, {f"{Q}.base_layer.weight": torch.ones(32, 32)}, f"changes the weight that.*{FIRST}"),
    ({}, {A: torch.ones(4, 32, 1, 1)}, f"expected a matrix of floats.*{FIRST}"),
    ({"init_lora_weights": "pissa_niter_4"}, {}, f"has `init_lora_weights: pissa.*{FIRST}"),
    ({"peft_type": "LOHA"}, {}, f"has `peft_type: LOHA`.*{FIRST}"),
    ({}, {A: None}, "holds `.*lora_B.weight` but not its other half, lora_A"),
    ({"base_model_name_or_path": "org/base"},
     {f"{Q}x.lora_A.weight": torch.ones(4, 32), f"{Q}x.lora_B.weight": torch.ones(32, 4)},
     r"`.*q_projx` fits no tensor of the base; take the base .*\(org/base\)"),
    ({}, {"base_model.model.lm_head.weight": torch.ones(97, 32)}, r"lm_head.* is \[97, 32\]"),
    ({}, {B: torch.ones(33, 4)}, r"q_proj` is \[33, 32\], in the base \[32, 32\]; take the base"),
    ({"lora_alpha": None}, {}, "`lora_alpha` of `.*q_proj` is None, expected a number"),
    ({"r": 5}, {}, "lora_A of rank 4 and lora_B of rank 4, expected 5 from adapter_config.json"),
    ({}, {A: torch.full((4, 32), torch.nan)}, "holds 128 NaN and 0 infinite"),
    ({}, {f"{Q}.lora_A.other.weight": torch.ones(4, 32)}, "holds several adapters"),
    ({}, {f"{PREFIX}x.{key.removeprefix(PREFIX)}": torch.ones(shape)
          for key, shape in ((A, (4, 32)), (B, (32, 4)))}, "q_proj.weight` under two names"),
]  # fmt: skip


@pytest.fixture(scope="module")
def plain(world, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "a"
    train(world("llama").base, folder, target_modules=["q_proj"])
    return folder


@pytest.mark.parametrize(("config", "edit", "message"), REFUSED)
def test_refuses_in_one_line(world, plain, tmp_path, config, edit, message):
    folder = tmp_path / "b"
    shutil.copytree(plain, folder)
    edit_config(folder, **config)
    state = load_file(folder / WEIGHTS) | edit
    (folder / WEIGHTS).unlink()
    kept = {key: value for key, value in state.items() if value is not None}
    save_file(kept, folder / WEIGHTS)
    with pytest.raises(UserError, match=message) as caught:
        read(world("llama").base, folder)
    assert str(caught.value).startswith(f"adapter {folder}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [{"target_modules": ["q_proj", "embed_tokens"]},
                                    {"target_modules": ["q_proj", "lm_head"]},
                                    {"modules_to_save": ["embed_tokens"]},
                                    {"modules_to_save": ["lm_head"]}])  # fmt: skip
@pytest.mark.parametrize("stored", ["once", "twice"])
def test_an_adapter_of_one_use_of_tied_embeddings(config, stored, tmp_path):
    """PEFT runs the base with one use changed; its fusion would change both."""
    base, _ = tiny.family(tmp_path, lambda: tiny.llama(tie_word_embeddings=True), ())
    if stored == "twice":
        state = tiny.load(base)
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        save_file(state, base / "model.safetensors", {"format": "pt"})
    train(base, tmp_path / "a", **config)
    tokens = torch.arange(12)[None]
    made = recipe("basis_ta", base, [f"{base}+{tmp_path / 'a'}"], basis="none", lambda_=1.0)
    commands.merge(made, tmp_path / "out")
    tvb("build", commands.write(made, tmp_path / "r"), tmp_path / "s", "--quiet")
    tvb("export", tmp_path / "s", tmp_path / "back", "--task", "a", "--quiet")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = peft.PeftModel.from_pretrained(model_of(base), tmp_path / "a")(tokens).logits
        for folder in ("out", "back"):
            torch.testing.assert_close(model_of(tmp_path / folder)(tokens).logits, want)
    edit_config(tmp_path / "a", ensure_weight_tying=True)
    assert "both uses" in refused("build", tmp_path / "r.yml", tmp_path / "out2")


def test_adapters_of_another_base(world, tmp_path):
    made = world("mixed adapters")
    base, (math, code, _) = made.base, map(str, made.listed)
    wide, (full,) = tiny.family(tmp_path, lambda: tiny.llama(hidden_size=64), ("full",))
    train(wide, tmp_path / "wide", target_modules=["q_proj"])
    for start, model, said in (
        (base, f"{base}+{tmp_path / 'wide'}", "take the base that it was trained on"),
        (base, f"{full}+{tmp_path / 'wide'}", "has other tensors than the base"),
        (base, math.partition("+")[2], "BASE+ADAPTER"),
        (math, code, "is a base and an adapter"),
        ("./nowhere", "./nowhere+./here", "model ./nowhere: no such folder (from "),
    ):
        file = commands.write(recipe("basis_ta", start, [model]), tmp_path / "r")
        assert said in refused("build", file, tmp_path / "out")
    (tmp_path / "link").symlink_to(base)  # two names of one base
    file = commands.write(recipe("basis_ta", tmp_path / "link", [math, code]), tmp_path / "r")
    tvb("build", file, tmp_path / "store", "--quiet")
    train(base, tmp_path / "more", target_modules=["embed_tokens", "q_proj"])
    before, more = contents(tmp_path / "store"), f"{base}+{tmp_path / 'more'}"
    said = refused("add", tmp_path / "store", more, "--task", "more")
    assert "`model.embed_tokens.weight`" in said and "no adapter changes it" in said
    assert before | {".lock": b""} == contents(tmp_path / "store")


# Adapters in, an adapter out: against dense merges in float64, as PEFT loads them


FILTERS = [{"filter": "mlp", "value": 0.2}, {"value": 0.7}]
UNEVEN = {0: {"weight": 2.5}, 2: {"weight": -0.5}}
TO_ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "addition": ("basis_ta", {"basis": "none", "lambda": 0.6, "own": UNEVEN}),
    "filters": ("basis_ta", {"basis": "pca", "num_bases": 2, "lambda": FILTERS}),
    "negation": ("basis_negate", {"basis": "pca", "num_bases": 2, "forget": "code", "alpha": 0.5}),
    "iso": ("basis_iso", {"basis": "none"}),
    "iso-cts": ("basis_iso", {"basis": "none", "common": 0.8, "lambda": 1.5, "own": UNEVEN}),
    "tsvm": ("basis_tsvm", {"basis": "none"}),
    "tsvm of bases": ("basis_tsvm", {"basis": "pca", "num_bases": 2, "lambda_scale": "tasks"}),
    "wudi": ("basis_wudi", {"basis": "none", "flow_time": 3}),
}


RANKS = {"mixed adapters": (4, 2, 3), "conv1d adapters": (4, 4, 4)}


@pytest.mark.parametrize("family_of", ["mixed adapters", "conv1d adapters"])
@pytest.mark.parametrize("case", TO_ADAPTERS)
def test_adapters_merge_to_an_adapter_without_loss(world, tmp_path, case, family_of):
    method, keys = TO_ADAPTERS[case]
    models, out = world(family_of), tmp_path / "out"
    tvb("merge", write(models.recipe(method, **keys), tmp_path / "r"), out, "--lora", "--quiet")
    found = {n: change for n, change in changes(models.base, out).items() if change.any()}
    base, own = models.states[0], keys.get("own", {})
    names = [name for name in base if name not in models.copied]
    weights = [own.get(number, {}).get("weight", 1.0) for number in range(3)]
    known = Dense(base, models.states[1:], names, weights)
    varying: Any = {"lambda": lambda name: 0.2 if "mlp" in name else 0.7}
    varying = varying if keys.get("lambda") is FILTERS else None
    if method == "basis_wudi" and family_of == "conv1d adapters":  # by the base's config.json
        keys = {**keys, "transposed": r"c_(attn|proj|fc)\."}
    want = expect(known, method, keys, {}, models.tasks, varying).tensors
    assert set(found) == set(names)
    change = torch.cat([(want[n].double() - base[n].double()).flatten() for n in names])
    off = torch.cat([found[n].flatten() for n in names]) - change
    assert off.norm() <= 1e-5 * change.norm()
    config = json.loads((out / CONFIG).read_text())
    assert config["r"] <= sum(RANKS[family_of])
    assert all(len(module.split(".")) == 1 for module in config["target_modules"])


def test_mistakes_in_merges_to_adapters(world, tmp_path):
    made, words, llama = world("mixed adapters"), ("--lora", "--quiet"), world("llama")
    two = recipe("basis_ta", llama.base, llama.listed[:2])
    parts = made.recipe()
    del parts["models"]
    sliced = commands.slices(made.base, made.listed, [(0, 1)])
    train(made.base, tmp_path / "trained", modules_to_save=["lm_head"])
    trained = recipe("basis_ta", made.base, [f"{made.base}+{tmp_path / 'trained'}"])
    for plan, more, said in (
        (two, words, "no exact factors (not all models are adapters)"),
        (two, ("--dtype", "float16"), "--dtype is for adapters: add --lora"),
        (trained, words, "no exact factors (lm_head.weight: no factors of one matrix"),
        (parts | {"modules": {"default": sliced}}, words, "`slices`: an adapter has"),
        (made.recipe("basis_ties"), words, "no exact factors (basis_ties trims single entries)"),
    ):
        assert said in refused("merge", write(plan, tmp_path / "r"), tmp_path / "out", *more)
    assert not (tmp_path / "out").exists()
