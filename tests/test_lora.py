"""Low-rank updates against dense matrices, adapters against what PEFT writes, loads and fuses."""

import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import commands
import peft
import pytest
import tiny
import torch
import transformers
from commands import contents, recipe, refused, tvb
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from worlds import CONV, Models

from tvb_mergekit.core import lora
from tvb_mergekit.core.lora import Factors
from tvb_mergekit.errors import UserError
from tvb_mergekit.store import store
from tvb_mergekit.tensors import adapter as peft_files
from tvb_mergekit.tensors.adapter import Adapter, NotPlainLora
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.source import TensorInfo

CONFIG, WEIGHTS = peft_files.CONFIG, peft_files.WEIGHTS
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def bases(world) -> Callable[[str], Path]:
    return lambda name: world(name).base


def model_of(base: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def train(
    base: Path, out: Path, seed: int = 0, safe: bool = True, **config: object
) -> dict[str, Tensor]:
    """Save a random adapter as PEFT does; return the float64 change of each tensor by fusing it."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": LINEAR, **config}
    model = peft.get_peft_model(model_of(base), peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied or saved embeddings
        model.save_pretrained(out, safe_serialization=safe)
        # Read back: PEFT sorts rank_pattern and alpha_pattern when it writes them.
        return changes(peft.PeftModel.from_pretrained(model_of(base), out).merge_and_unload(), base)


def changes(model: torch.nn.Module, base: Path) -> dict[str, Tensor]:
    state = model.state_dict()
    return {name: state[name].double() - old.double() for name, old in tiny.load(base).items()}


def read(base: Path, folder: Path) -> Adapter:
    checkpoint = Checkpoint.open(base)
    return Adapter.open(folder, checkpoint.tensors, "math", read=checkpoint.tensor)


def dense(factors: Factors) -> Tensor:
    return factors.left.double() @ factors.right.double()


def check(adapter: Adapter, expected: dict[str, Tensor]) -> None:
    changed = {name for name, change in expected.items() if change.abs().max() > 0}
    assert set(adapter.factors) == set(adapter.tensors) == changed
    for name, factors in adapter.factors.items():
        torch.testing.assert_close(dense(factors), expected[name], atol=2e-6, rtol=1e-5)
        read = adapter.tensor(name).double()
        torch.testing.assert_close(read, expected[name], atol=2e-6, rtol=1e-5)


# Factors in memory


@st.composite
def families(draw: st.DrawFn) -> list[dict[str, Factors]]:
    """Updates of random ranks, which may change different matrices, or none."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shapes = draw(st.lists(st.tuples(*[st.integers(1, 12)] * 2), min_size=1, max_size=3))
    updates: list[dict[str, Factors]] = [{} for _ in range(draw(st.integers(1, 4)))]
    for update in updates:
        for i, (rows, columns) in enumerate(shapes):
            if rank := draw(st.integers(0, 5)):
                left = torch.randn(rows, rank, generator=generator)
                right = torch.randn(rank, columns, generator=generator)
                update[f"t{i}.weight"] = Factors(left, right)
    return updates


@given(families())
@settings(deadline=None, max_examples=40)
def test_factors_are_the_dense_matrices(updates):
    shapes = {name: both.shape for each in updates for name, both in each.items()}
    zero = {name: Factors(torch.zeros(m, 1), torch.zeros(1, n)) for name, (m, n) in shapes.items()}
    nothing = torch.zeros(0).double()
    filled = [{**zero, **each} for each in updates]
    vectors = torch.stack(
        [torch.cat([nothing, *(dense(each[n]).flatten() for n in shapes)]) for each in filled]
    )
    expected = vectors @ vectors.T
    sums = lora.factor_gram(updates)
    assert sums.gram.dtype == torch.float64 and torch.equal(sums.gram, sums.gram.T)
    assert (sums.gram - expected).norm() <= 1e-9 * expected.norm()
    assert sums.num_parameters == vectors.shape[1]


class Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.numel = max([self.numel, *made])
        return result


def test_nothing_of_the_size_of_a_layer_is_made():
    updates = [{"w": Factors(torch.randn(700, 2), torch.randn(2, 500))} for _ in range(3)]
    with Largest() as largest:
        lora.factor_gram(updates)
    assert 0 < largest.numel <= 700 * 6


# Reading


PATTERNS = {
    "rank_pattern": {"k_proj": 2, "^model.layers.1.self_attn.q_proj": 6, "layers.0.q": 9},
    "alpha_pattern": {"layers.1.mlp.up_proj": 3, r"self_attn\.(v|o)_proj": 1},
}
WIDE_PATTERNS = {"rank_pattern": {".*proj": 3}, "alpha_pattern": {"v_proj": 5, ".*_proj": 7}}
READABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "layers": ("llama", {"layers_to_transform": [1], "init_lora_weights": "gaussian"}),
    "patterns": ("llama", PATTERNS),
    "rslora": ("llama", {**WIDE_PATTERNS, "use_rslora": True}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "pickled": ("llama", {"target_modules": ["embed_tokens", "q_proj"], "safe": False}),
    "tied": ("tied", {"target_modules": ["embed_tokens"]}),
    "conv1d": ("gpt2", {"target_modules": CONV}),
    "square": ("gpt2", {"target_modules": ["attn.c_proj"]}),
    "conv1d-embedding": ("gpt2", {"target_modules": ["wte", "c_fc"]}),
}  # fmt: skip


@pytest.mark.parametrize("case", READABLE)
def test_reads_what_peft_writes(bases, tmp_path, case):
    name, config = READABLE[case]
    base = bases(name)
    expected = train(base, tmp_path, **config)
    check(read(base, tmp_path), expected)
    assert (tmp_path / "adapter_model.bin").exists() == (case == "pickled")
    if case == "plain":
        first, same = (read(base, tmp_path) for _ in range(2))
        assert first.nbytes == sum(v.nbytes for v in load_file(tmp_path / WEIGHTS).values())
        before = first.fingerprint(), first.stamp()
        assert before == (same.fingerprint(), same.stamp())
        edit_config(tmp_path, lora_alpha=9)
        other = read(base, tmp_path)
        assert other.fingerprint() != before[0] and other.stamp() != before[1]
    if case == "pickled":  # with the adapter's name in the keys, as older versions have
        file = tmp_path / "adapter_model.bin"
        state = torch.load(file, weights_only=True)
        torch.save({named(key): value for key, value in state.items()}, file)
        check(read(base, tmp_path), expected)
    if case == "tied":  # a .bin file may hold both names of one tensor
        embed = "model.embed_tokens.weight"
        infos = dict(Checkpoint.open(base).tensors)
        infos["lm_head.weight"] = TensorInfo(infos[embed].shape, torch.float32, "", embed)
        whole = Adapter.open(tmp_path, infos, read=Checkpoint.open(base).tensor).over(infos)
        assert list(whole.factors) == [embed]
        assert torch.equal(whole.tensor("lm_head.weight"), whole.tensor(embed))
    if case == "conv1d":  # the Hub's GPT-2 names `h.0.attn...`, adapters `transformer.h.0.attn...`
        cut = len("transformer.")
        short = {n[cut:]: info for n, info in Checkpoint.open(base).tensors.items()}
        adapter = Adapter.open(tmp_path, short)
        check(adapter, {n[cut:]: change for n, change in expected.items()})


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))


def named(key: str) -> str:
    for half in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
        key = key.replace(half, f"{half}.default")
    return key.removeprefix("base_model.model.")


def test_linear_layers_in_a_model_of_conv1d(bases, tmp_path):
    """With lm_head PEFT writes fan_in_fan_out: false, although most layers are Conv1D."""
    base = bases("gpt2")
    expected = train(base, tmp_path, target_modules=["lm_head", *CONV])
    state = load_file(tmp_path / WEIGHTS)
    # the base's file does not hold this copy of its lm_head
    del state["base_model.model.lm_head.base_layer.weight"]
    save_file(state, tmp_path / WEIGHTS)
    with pytest.raises(NotPlainLora, match="`lm_head`, which this base ties to its embedding"):
        read(base, tmp_path)
    save_file({key: state[key] for key in state if "lm_head" not in key}, tmp_path / WEIGHTS)
    expected["transformer.wte.weight"].zero_()
    check(read(base, tmp_path), expected)


@pytest.mark.parametrize(
    ("shapes", "flag", "kind"),
    [
        ({"a": (4, 4)}, True, "conv1d"),  # only square ones: PEFT's flag
        ({"a": (4, 4)}, False, "linear"),
        ({"a": (4, 4), "b": (4, 8)}, False, "conv1d"),  # a bias decides for any flag
        ({"a": (4, 4), "b": (8, 4)}, True, "linear"),
        ({"a": (4, 4), "b": (8, 4), "c": (4, 8)}, True, None),
    ],
)
def test_orientation_of_square_matrices(tmp_path, shapes, flag, kind):
    base = {f"{n}.weight": TensorInfo(shape, torch.float32, "") for n, shape in shapes.items()}
    for name in shapes:
        base[f"{name}.bias"] = TensorInfo((4 if name == "a" else 8,), torch.float32, "")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "fan_in_fan_out": flag}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    down, up = torch.randn(1, 4), torch.randn(4, 1)
    save_file({"a.lora_A.weight": down, "a.lora_B.weight": up}, tmp_path / WEIGHTS)
    if kind is None:
        with pytest.raises(NotPlainLora, match="`a`, square in a model of Linear and Conv1D"):
            Adapter.open(tmp_path, base)
        return
    adapter = Adapter.open(tmp_path, base)
    expected = up @ down if kind == "linear" else (up @ down).T
    torch.testing.assert_close(adapter.tensor("a.weight"), expected)
    del base["a.bias"]  # Conv1D always has one
    torch.testing.assert_close(Adapter.open(tmp_path, base).tensor("a.weight"), up @ down)


@given(families(), st.data())
@settings(deadline=None, max_examples=40)
def test_any_range_of_a_source(updates, data):
    update = data.draw(st.sampled_from(updates))
    assume(update)
    base = {n: TensorInfo(f.shape, torch.bfloat16, "") for each in updates for n, f in each.items()}
    base["norm.weight"] = TensorInfo((7,), torch.bfloat16, "")
    halves = {}
    for name, both in update.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        halves[f"{module}.lora_A.weight"] = both.right.contiguous()
        halves[f"{module}.lora_B.weight"] = both.left.contiguous()
    ranks = {re.escape(name.removesuffix(".weight")): both.rank for name, both in update.items()}
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": [*ranks],
              "rank_pattern": ranks, "alpha_pattern": ranks}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        save_file(halves, Path(folder) / WEIGHTS)
        (Path(folder) / CONFIG).write_text(json.dumps(config))
        source = Adapter.open(folder, base).over(base)
    assert set(source.tensors) == set(base) and set(source.factors) == set(update)
    name = data.draw(st.sampled_from(sorted(base)))
    info = source.tensors[name]
    assert (info.shape, info.dtype) == (base[name].shape, torch.float32)
    expected = dense(update[name]).float() if name in update else torch.zeros(info.shape)
    start = data.draw(st.integers(0, info.numel))
    stop = data.draw(st.integers(start, info.numel))
    out = torch.full((info.numel + 3,), torch.nan)
    with mock.patch.object(peft_files, "PIECE", 3 * info.shape[-1]):  # few rows at a time
        chunk = source.read(name, start, stop, out)
        whole = source.tensor(name).view(-1)
    torch.testing.assert_close(chunk, expected.view(-1)[start:stop])
    assert torch.equal(chunk, whole[start:stop])  # to the bit
    assert chunk.data_ptr() == out.data_ptr() or start == stop
    assert out[stop - start :].isnan().all()


# Refusing


Q = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
NOT_PLAIN: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"use_dora": True}, {}, "uses `use_dora`"),
    ({}, {f"{Q}.lora_magnitude_vector": torch.ones(32)}, "uses DoRA"),
    ({}, {f"{Q}.bias": torch.ones(32)}, "stores more than factors .*modules or biases trained"),
    ({}, {f"{Q}.lora_B.bias": torch.ones(32)}, "stores more than factors"),
    ({}, {"base_model.model.lm_head.weight": torch.ones(96, 32)}, "stores more than factors"),
    ({}, {"base_model.model.e.token_adapter.trainable_tokens_delta": torch.ones(1)}, "stores"),
    ({}, {A: torch.ones(4, 32, 1, 1)}, "targets a convolution"),
    *[({key: value}, {}, f"uses `{key}`") for key, value in {
        "target_parameters": ["x.y"], "trainable_token_indices": [3], "lora_bias": True,
        "layer_replication": [[0, 2]], "alora_invocation_tokens": [1],
    }.items()],
    ({"init_lora_weights": "pissa_niter_4"}, {}, "changes the base .*pissa_niter_4"),
    ({"peft_type": "LOHA"}, {}, "is of type LOHA, expected LORA"),
]  # fmt: skip
WRONG: list[tuple[Any, dict[str, Any] | None, str]] = [  # text as it is; None: no file
    (None, {}, "has no adapter_config.json"),
    ("{", {}, "adapter_config.json cannot be read"),
    ("[]", {}, "adapter_config.json cannot be read"),
    ({}, None, "has no adapter_model.safetensors or"),
    ({}, {A: None}, "holds `.*lora_B.weight` but not its other half, lora_A"),
    ({"base_model_name_or_path": "org/base"},
     {f"{Q}x.lora_A.weight": torch.ones(4, 32), f"{Q}x.lora_B.weight": torch.ones(32, 4)},
     r"`.*q_projx` is targeted, the base has no such tensor; take the base .*\(org/base\)"),
    ({}, {B: torch.ones(33, 4)}, r"q_proj` is \[33, 32\], in the base \[32, 32\]; take the base"),
    ({}, {A: torch.ones(3, 32)}, "lora_A of rank 3 and .* rank 4, expected 4"),
    ({"r": 5}, {}, "lora_A of rank 4 and lora_B of rank 4, expected 5 from adapter_config.json"),
    ({}, {A: torch.full((4, 32), torch.nan)}, "holds 128 NaN and 0 infinite"),
    ({}, {A: torch.ones(0)}, r"is \[0\] torch.float32, expected a matrix .*"),
    ({}, {A: torch.ones(4, 32).int()}, "int32, expected a matrix of floats"),
    ({}, {f"{Q}.lora_A.other.weight": torch.ones(4, 32)}, "holds several adapters"),
    ({"alpha_pattern": {"(": 3}}, {}, "adapter_config.json: rank and alpha of"),
    ({"lora_alpha": "many"}, {}, "adapter_config.json: rank and alpha of .*many"),
]  # fmt: skip


@pytest.fixture(scope="module")
def plain(bases, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "a"
    train(bases("llama"), folder, target_modules=["q_proj"])
    return folder


@pytest.mark.parametrize(("config", "edit", "message"), NOT_PLAIN + WRONG)
def test_refuses_in_one_line(bases, plain, tmp_path, config, edit, message):
    folder = tmp_path / "b"
    shutil.copytree(plain, folder)
    if isinstance(config, dict):
        edit_config(folder, **config)
    elif config is None:
        (folder / CONFIG).unlink()
    else:
        (folder / CONFIG).write_text(config)
    if edit is None:
        (folder / WEIGHTS).unlink()
    else:
        state = load_file(folder / WEIGHTS) | edit
        state = {key: value for key, value in state.items() if value is not None}
        save_file(state, folder / WEIGHTS)
    with pytest.raises(UserError, match=message) as caught:
        read(bases("llama"), folder)
    assert str(caught.value).startswith(f"adapter {folder} (task `math`): ")
    assert "\n" not in str(caught.value)
    fused = message in {text for _, _, text in NOT_PLAIN}
    assert isinstance(caught.value, NotPlainLora) == fused
    assert str(caught.value).endswith(f"; {peft_files.FUSE_INSTEAD}") == fused


def test_stored_embeddings_must_be_the_bases(bases, tmp_path):
    base = bases("llama")
    train(base, tmp_path, target_modules=["embed_tokens"])
    key = "base_model.model.model.embed_tokens.base_layer.weight"
    state = load_file(tmp_path / WEIGHTS)
    assert key in state  # PEFT stores a copy
    read(base, tmp_path)
    with pytest.raises(NotPlainLora, match="stores more than factors"):
        Adapter.open(tmp_path, Checkpoint.open(base).tensors)
    state[key][3, 4] += 1e-3
    save_file(state, tmp_path / WEIGHTS)
    with pytest.raises(NotPlainLora, match="stores more than factors"):
        read(base, tmp_path)


# Stores built from adapters, against PEFT and dense numbers


BALANCED = {"basis": "balanced", "num_bases": 2}


@pytest.fixture
def adapters(world) -> Models:
    return world("mixed adapters")


def flat(state: dict[str, Tensor], made: Models) -> Tensor:
    """In the order of `task_vectors`, zero for what is not there."""
    parts = [state.get(n, torch.zeros(v.shape)) for n, v in sorted(made.states[0].items())]
    return torch.cat([part.double().flatten() for part in parts])


def task_vectors(made: Models) -> Tensor:
    """T [d, 3] float64."""
    return torch.stack([flat(made.tau(task), made) for task in made.tasks], dim=1)


def vectors_of(folder: Path, made: Models) -> Tensor:
    """The bases of a store, [d, M] float64."""
    columns = [flat(tiny.load(basis), made) for basis in sorted(folder.glob("basis-*/"))]
    return torch.stack(columns, dim=1)


def near(found: Tensor, expected: Tensor) -> None:
    error = (found.double() - expected).norm() / expected.norm()
    assert float(error) < 1e-5


def test_bases_are_the_dense_combinations_and_get_an_adapter(
    adapters: Models, tmp_path: Path
) -> None:
    folder, tau = tmp_path / "store", task_vectors(adapters)
    bases, built = adapters.build(folder, tasks=["math", "safety"], **BALANCED), tau[:, [0, 2]]
    near(bases.tensors["gram"], built.T @ built)
    near(vectors_of(folder, adapters), built @ bases.encoder)
    numels = [v.numel() for n, v in adapters.states[0].items() if "proj" in n]
    assert bases.facts["num_parameters"] == sum(numels)
    # it targets fewer modules than the store holds
    tvb("add", folder, adapters.listed[1], "--task", "code", "--budget", 3, "--quiet")
    bases, found = store.load(folder), vectors_of(folder, adapters)
    near(found, tau[:, [0, 2, 1]] @ bases.encoder)
    near(found[:, 2], tau[:, 1])
    train(adapters.base, tmp_path / "more", target_modules=["embed_tokens", "q_proj"])
    before = contents(folder)
    said = refused("add", folder, f"{adapters.base}+{tmp_path / 'more'}", "--task", "more")
    assert "`model.embed_tokens.weight`" in said and "no adapter targets it" in said
    assert before == contents(folder)


# What is not s B A, or not only adapters


def test_dora_and_trained_modules_are_fused_instead(adapters: Models, tmp_path: Path) -> None:
    base, trained, out = adapters.base, tmp_path / "trained", tmp_path / "store"
    dora = train(base, tmp_path / "dora", use_dora=True)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(model_of(base), settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            parameter.data.add_(0.1)
    model.save_pretrained(trained)
    expected = changes(model.merge_and_unload(), base), dora
    for adapter, change in zip((trained, tmp_path / "dora"), expected, strict=True):
        models = [adapters.listed[0], f"{base}+{adapter}"]
        file = commands.write(recipe("basis_ta", base, models, basis="balanced"), tmp_path / "r")
        for command in (("build", file, out), ("inspect", file)):
            said = refused(*command)
            assert str(adapter) in said and "--fuse --lora-merge-cache DIR" in said
        assert "--lora-merge-cache DIR" in refused("build", file, out, "--fuse")
        fused = ["--fuse", "--lora-merge-cache", tmp_path / "fused"]
        tvb("build", file, out, *fused, "--quiet")
        tau = torch.stack([task_vectors(adapters)[:, 0], flat(change, adapters)], dim=1)
        near(store.load(out).tensors["gram"], tau.T @ tau)
        tvb("inspect", file, *fused)
        half = ("--lora-merge-dtype", "float16")
        assert "is not in torch.float16" in refused("inspect", file, *fused, *half)
        shutil.rmtree(tmp_path / "fused")
        tvb("build", file, tmp_path / "half", *fused, *half, "--quiet")
        tvb("inspect", file, *fused, *half)
        shutil.rmtree(tmp_path / "half")
        os.utime(adapter / "adapter_config.json", (2e9, 2e9))  # edited later
        assert "of another adapter or base, or of older ones" in refused("inspect", file, *fused)
        for record in (tmp_path / "fused").rglob("tvb_origin.json"):
            record.unlink()  # mergekit made the copy
        assert "older than the adapter or the base" in refused("inspect", file, *fused)
        shutil.rmtree(out)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_of_one_use_of_tied_embeddings(target: str, tmp_path: Path) -> None:
    """PEFT trains one of the two uses; a merge would change both."""
    base, _ = tiny.family(tmp_path, lambda: tiny.llama(tie_word_embeddings=True), ())
    train(base, tmp_path / "a", target_modules=["q_proj", target])
    file = commands.write(recipe("basis_ta", base, [f"{base}+{tmp_path / 'a'}"]), tmp_path / "r")
    for words in ((), ("--fuse", "--lora-merge-cache", tmp_path / "fused")):
        assert "output layer too" in refused("build", file, tmp_path / "out", *words)
        assert not (tmp_path / "fused").exists()


def test_adapters_of_another_base(
    adapters: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base, (math, code, _) = adapters.base, (str(each) for each in adapters.listed)
    wide, (full,) = tiny.family(tmp_path, lambda: tiny.llama(hidden_size=64), ("full",))
    train(wide, tmp_path / "wide", target_modules=["q_proj"])
    for models, said in (
        ([f"{base}+{tmp_path / 'wide'}"], "take the base that it was trained on"),
        ([math.replace(str(base), str(full)), code], f"adapts {full}"),
        ([math.partition("+")[2]], "BASE+ADAPTER"),
    ):
        file = commands.write(recipe("basis_ta", base, models), tmp_path / "r")
        assert said in refused("inspect", file)
    file = commands.write(recipe("basis_ta", math, [code]), tmp_path / "r")
    assert "is a base and an adapter" in refused("build", file, tmp_path / "out")
    (tmp_path / "link").symlink_to(base)
    made = recipe("basis_ta", tmp_path / "link", [math, code], exclude="nothing")
    tvb("inspect", commands.write(made, tmp_path / "r"))  # two names of one base
    assert "`exclude: nothing` matches no tensor" in caplog.text
    file = commands.write(recipe("basis_ta", "./nowhere", ["./nowhere+./here"]), tmp_path / "r")
    for words in (("inspect", file), ("build", file, tmp_path / "out")):
        assert "model ./nowhere: no such folder (from " in refused(*words)
