"""LoRA adapters as task vectors: reading, Gram matrix, combinations, writing, against PEFT."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import tiny
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tvb_mergekit import lora
from tvb_mergekit.checkpoints import Checkpoint, TensorInfo
from tvb_mergekit.errors import UserError
from tvb_mergekit.lora import Adapter, AdapterDelta, Factors, NotPlainLora

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONV = ["c_attn", "c_proj", "c_fc"]  # attn.c_proj is square


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("bases")
    tied = lambda: tiny.llama(tie_word_embeddings=True)  # noqa: E731
    makers = {"llama": tiny.llama, "gpt2": tiny.gpt2, "tied": tied}

    def get(name: str) -> Path:
        if not (folder / name).exists():
            tiny.family(folder / name, makers[name], (), tokenizer=False)
        return folder / name / "base"

    return get


def model_of(base: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def train(
    base: Path, out: Path, seed: int = 0, safe: bool = True, **config: object
) -> dict[str, Tensor]:
    """Save a random adapter as PEFT does; returns what fusing it adds to each of the base's
    tensors, in float64."""
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


def read(base: Path, folder: Path, label: str = "math") -> Adapter:
    checkpoint = Checkpoint.open(base)
    return Adapter.open(folder, checkpoint.tensors, label, read=checkpoint.tensor)


def dense(factors: Factors) -> Tensor:
    return factors.left.double() @ factors.right.double()


def check(adapter: Adapter, expected: dict[str, Tensor]) -> None:
    """The adapter is these changes, and nothing else."""
    changed = {name for name, change in expected.items() if change.abs().max() > 0}
    assert set(adapter.factors) == changed
    for name, factors in adapter.factors.items():
        torch.testing.assert_close(dense(factors), expected[name], atol=2e-6, rtol=1e-5)


# Reading


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
        {
            "rank_pattern": {"k_proj": 2, "^model.layers.1.self_attn.q_proj": 6, "layers.0.q": 9},
            "alpha_pattern": {"layers.1.mlp.up_proj": 3, r"self_attn\.(v|o)_proj": 1},
        },
        {
            "rank_pattern": {".*proj": 3},
            "alpha_pattern": {"v_proj": 5, ".*_proj": 7},
            "use_rslora": True,
        },
        {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
        {"init_lora_weights": "gaussian", "target_modules": r".*\.(0|1)\.mlp\.(up|down)_proj"},
    ],
    ids=["plain", "rslora", "layers", "patterns", "patterns-rslora", "embeddings", "regex"],
)
def test_reads_what_peft_writes(bases, tmp_path, config):
    base = bases("llama")
    expected = train(base, tmp_path, **config)
    check(read(base, tmp_path), expected)


@pytest.mark.parametrize("targets", [CONV, ["attn.c_proj"], ["wte", "c_fc"], ["lm_head", *CONV]])
def test_conv1d_is_transposed(bases, tmp_path, targets):
    # With lm_head PEFT writes fan_in_fan_out: false although most layers are Conv1D.
    base = bases("gpt2")
    expected = train(base, tmp_path, target_modules=targets)
    if "lm_head" in targets:
        file = tmp_path / lora.WEIGHTS
        state = load_file(file)  # and a copy of the base's lm_head, which its file does not hold
        del state["base_model.model.lm_head.base_layer.weight"]
        save_file(state, file)
        with pytest.raises(NotPlainLora, match="`lm_head`, which this base ties to its embedding"):
            read(base, tmp_path)
        save_file({key: state[key] for key in state if "lm_head" not in key}, file)
        expected["transformer.wte.weight"].zero_()
    check(read(base, tmp_path), expected)


@pytest.mark.parametrize(
    ("shapes", "flag", "kind"),
    [
        ({"a": (4, 4)}, True, "conv1d"),  # only square ones: PEFT's flag
        ({"a": (4, 4)}, False, "linear"),
        ({"a": (4, 4), "b": (4, 8)}, False, "conv1d"),  # a bias tells, whatever the flag
        ({"a": (4, 4), "b": (8, 4)}, True, "linear"),
        ({"a": (4, 4), "b": (8, 4), "c": (4, 8)}, True, None),
    ],
)
def test_orientation_of_square_matrices(tmp_path, shapes, flag, kind):
    base = {
        f"{name}.weight": TensorInfo(shape, torch.float32, "x") for name, shape in shapes.items()
    }
    base |= {
        f"{name}.bias": TensorInfo((8 if name != "a" else 4,), torch.float32, "x")
        for name in shapes
    }
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "fan_in_fan_out": flag}
    (tmp_path / lora.CONFIG).write_text(json.dumps(config))
    down, up = torch.randn(1, 4), torch.randn(4, 1)
    save_file({"a.lora_A.weight": down, "a.lora_B.weight": up}, tmp_path / lora.WEIGHTS)
    if kind is None:
        with pytest.raises(NotPlainLora, match="`a`, square in a model of Linear and Conv1D"):
            Adapter.open(tmp_path, base)
        return
    adapter = Adapter.open(tmp_path, base)
    assert adapter.targets["a.weight"].kind == kind
    expected = up @ down if kind == "linear" else (up @ down).T
    torch.testing.assert_close(dense(adapter.factors["a.weight"]).float(), expected)
    del base["a.bias"]  # Conv1D always has one
    assert Adapter.open(tmp_path, base).targets["a.weight"].kind == "linear"


def test_base_saved_without_its_head(bases, tmp_path):
    """The Hub's GPT-2 names `h.0.attn...`; adapters name `transformer.h.0.attn...`."""
    base = bases("gpt2")
    expected = train(base, tmp_path, target_modules=CONV)
    short = {n.removeprefix("transformer."): i for n, i in Checkpoint.open(base).tensors.items()}
    adapter = Adapter.open(tmp_path, short)
    check(adapter, {n.removeprefix("transformer."): change for n, change in expected.items()})
    assert adapter.targets["h.0.mlp.c_fc.weight"].module == "transformer.h.0.mlp.c_fc"


def test_tied_embedding(bases, tmp_path):
    base = bases("tied")
    expected = train(base, tmp_path, target_modules=["embed_tokens"])
    check(read(base, tmp_path), expected)
    name = "model.embed_tokens.weight"  # a .bin file may hold both names of one tensor
    infos = dict(Checkpoint.open(base).tensors)
    infos["lm_head.weight"] = TensorInfo(infos[name].shape, torch.float32, "x", alias_of=name)
    adapter = Adapter.open(tmp_path, infos, read=Checkpoint.open(base).tensor)
    assert list(adapter.factors) == [name]
    delta = AdapterDelta(adapter, infos)
    assert torch.equal(delta.tensor("lm_head.weight"), delta.tensor(name))


def test_bin_files_and_adapter_names_in_keys(bases, tmp_path):
    base = bases("llama")
    expected = train(base, tmp_path / "bin", safe=False, target_modules=["q_proj", "embed_tokens"])
    assert (tmp_path / "bin" / "adapter_model.bin").exists()
    check(read(base, tmp_path / "bin"), expected)
    shutil.copytree(tmp_path / "bin", tmp_path / "named")
    file = tmp_path / "named" / "adapter_model.bin"
    state = torch.load(file, weights_only=True)
    torch.save({named(key): value for key, value in state.items()}, file)
    check(read(base, tmp_path / "named"), expected)


def named(key: str) -> str:
    for half in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
        key = key.replace(half, f"{half}.default")
    return key.removeprefix("base_model.model.")


# Refusing


def altered(
    folder: Path, out: Path, config: dict[str, object], edit: Callable[[dict[str, Tensor]], object]
) -> Path:
    shutil.copytree(folder, out)
    whole = json.loads((out / lora.CONFIG).read_text()) | config
    (out / lora.CONFIG).write_text(json.dumps(whole))
    state = load_file(out / lora.WEIGHTS)
    edit(state)
    save_file(state, out / lora.WEIGHTS)
    return out


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "edit", "message"),
    [
        ({"use_dora": True}, {}, "uses `use_dora`"),
        ({}, {f"{Q}.lora_magnitude_vector": torch.ones(32)}, "uses DoRA"),
        ({}, {f"{Q}.bias": torch.ones(32)}, "stores more than factors .*modules or biases trained"),
        ({}, {f"{Q}.lora_B.bias": torch.ones(32)}, "stores more than factors"),
        ({}, {"base_model.model.lm_head.weight": torch.ones(96, 32)}, "stores more than factors"),
        ({}, {f"{Q}.lora_A.weight": torch.ones(4, 32, 1, 1)}, "targets a convolution"),
        ({"target_parameters": ["x.y"]}, {}, "uses `target_parameters`"),
        ({"trainable_token_indices": [3]}, {}, "uses `trainable_token_indices`"),
        ({}, {"base_model.model.e.token_adapter.trainable_tokens_delta": torch.ones(1)}, "stores"),
        ({"layer_replication": [[0, 2]]}, {}, "uses `layer_replication`"),
        ({"lora_bias": True}, {}, "uses `lora_bias`"),
        ({"alora_invocation_tokens": [1]}, {}, "uses `alora_invocation_tokens`"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, "changes the base .*pissa_niter_4"),
        ({"peft_type": "LOHA"}, {}, "is of type LOHA, expected LORA"),
    ],
)
def test_refuses_what_is_not_plain(bases, tmp_path, config, edit, message):
    base = bases("llama")
    train(base, tmp_path / "a", target_modules=["q_proj"])
    folder = altered(tmp_path / "a", tmp_path / "b", config, lambda state: state.update(edit))
    with pytest.raises(NotPlainLora, match=message) as caught:
        read(base, folder)
    one_line(caught.value, folder)
    assert str(caught.value).endswith(f"; {lora.FUSE_INSTEAD}")


def one_line(error: UserError, folder: Path) -> None:
    assert str(error).startswith(f"adapter {folder} (task `math`): ") and "\n" not in str(error)


@pytest.mark.parametrize(
    ("config", "edit", "message"),
    [
        (
            {},
            {f"{Q}.lora_A.weight": None},
            "holds `.*lora_B.weight` but not its other half, lora_A",
        ),
        (
            {"base_model_name_or_path": "org/base"},
            {
                f"{Q}x.lora_A.weight": torch.ones(4, 32),
                f"{Q}x.lora_B.weight": torch.ones(32, 4),
            },
            r"`.*q_projx` is targeted, the base has no such tensor; take the base .*\(org/base\)",
        ),
        (
            {},
            {f"{Q}.lora_B.weight": torch.ones(33, 4)},
            r"`.*q_proj` is \[33, 32\], in the base \[32, 32\]; take the base",
        ),
        (
            {},
            {f"{Q}.lora_A.weight": torch.ones(3, 32)},
            "lora_A of rank 3 and .* rank 4, expected 4",
        ),
        (
            {"r": 5},
            {},
            "lora_A of rank 4 and lora_B of rank 4, expected 5 from adapter_config.json",
        ),
        (
            {},
            {f"{Q}.lora_A.weight": torch.full((4, 32), torch.nan)},
            "holds 128 NaN and 0 infinite",
        ),
        (
            {},
            {f"{Q}.lora_A.weight": torch.ones(0)},
            r"is \[0\] torch.float32, expected a matrix .*",
        ),
        ({}, {f"{Q}.lora_A.weight": torch.ones(4, 32).int()}, "int32, expected a matrix of floats"),
        ({}, {f"{Q}.lora_A.other.weight": torch.ones(4, 32)}, "holds several adapters"),
        ({"alpha_pattern": {"(": 3}}, {}, "adapter_config.json: rank and alpha of"),
        ({"lora_alpha": "many"}, {}, "adapter_config.json: rank and alpha of .*many"),
    ],
)
def test_names_what_is_wrong(bases, tmp_path, config, edit, message):
    base = bases("llama")
    train(base, tmp_path / "a", target_modules=["q_proj"])

    def change(state: dict[str, Tensor]) -> None:
        for key, value in edit.items():
            state.pop(key, None) if value is None else state.update({key: value})

    folder = altered(tmp_path / "a", tmp_path / "b", config, change)
    with pytest.raises(UserError, match=message) as caught:
        read(base, folder)
    one_line(caught.value, folder)
    assert not isinstance(caught.value, NotPlainLora)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        ({}, "has no adapter_config.json"),
        ({lora.CONFIG: "{"}, "adapter_config.json cannot be read"),
        ({lora.CONFIG: "[]"}, "adapter_config.json cannot be read"),
        ({lora.CONFIG: '{"peft_type": "LORA"}'}, "has no adapter_model.safetensors or"),
    ],
)
def test_names_what_is_missing(tmp_path, write, message):
    for name, text in write.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        Adapter.open(tmp_path, {}, "math")
    one_line(caught.value, tmp_path)


def test_stored_embeddings_must_be_the_bases(bases, tmp_path):
    base = bases("llama")
    train(base, tmp_path, target_modules=["embed_tokens"])
    key = "base_model.model.model.embed_tokens.base_layer.weight"
    state = load_file(tmp_path / lora.WEIGHTS)
    assert key in state  # PEFT stores a copy
    read(base, tmp_path)
    with pytest.raises(NotPlainLora, match="stores more than factors"):
        Adapter.open(tmp_path, Checkpoint.open(base).tensors)
    state[key][3, 4] += 1e-3
    save_file(state, tmp_path / lora.WEIGHTS)
    with pytest.raises(NotPlainLora, match="stores more than factors"):
        read(base, tmp_path)


# The Gram matrix, combinations, truncation


def test_gram_is_that_of_the_fused_models(bases, tmp_path):
    base = bases("llama")
    targets = [LINEAR, ["q_proj", "v_proj"], ["embed_tokens", "down_proj"]]
    fused, adapters = [], []
    for i, modules in enumerate(targets):
        change = train(base, tmp_path / str(i), i, r=i + 2, target_modules=modules)
        fused.append(torch.cat([change[name].reshape(-1) for name in sorted(change)]))
        adapters.append(read(base, tmp_path / str(i)))
    expected = torch.stack(fused) @ torch.stack(fused).T
    sums = lora.factor_gram(adapters)
    assert sums.gram.dtype == torch.float64 and torch.equal(sums.gram, sums.gram.T)
    assert (sums.gram - expected).norm() <= 1e-5 * expected.norm()
    infos = Checkpoint.open(base).tensors
    union = {name for adapter in adapters for name in adapter.factors}
    assert sums.num_parameters == sum(infos[name].numel for name in union)
    assert sums.base_norm_squared == 0


@st.composite
def families(draw: st.DrawFn) -> list[Adapter]:
    """Adapters of random ranks, which may target different tensors, or none."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shapes = draw(st.lists(st.tuples(*[st.integers(1, 9)] * 2), min_size=1, max_size=3))
    adapters = []
    for _ in range(draw(st.integers(1, 4))):
        factors = {}
        for i, (rows, columns) in enumerate(shapes):
            if rank := draw(st.integers(0, 5)):
                left = torch.randn(rows, rank, generator=generator)
                factors[f"t{i}"] = Factors(left, torch.randn(rank, columns, generator=generator))
        adapters.append(Adapter(factors))
    return adapters


def flat(factors: dict[str, Factors], like: list[Adapter]) -> Tensor:
    """All updates in one float64 vector, zeros where there is none."""
    shapes = {name: f.shape for adapter in like for name, f in adapter.factors.items()}
    parts = [
        dense(factors[name]).reshape(-1)
        if name in factors
        else torch.zeros(shape).double().view(-1)
        for name, shape in sorted(shapes.items())
    ]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])


@given(families())
@settings(deadline=None, max_examples=60)
def test_gram_is_that_of_the_dense_products(adapters):
    vectors = torch.stack([flat(adapter.factors, adapters) for adapter in adapters])
    expected = vectors @ vectors.T
    assert (lora.factor_gram(adapters).gram - expected).norm() <= 1e-9 * expected.norm()


@given(families(), st.data())
@settings(deadline=None, max_examples=60)
def test_combinations_are_linear(adapters, data):
    weights = [data.draw(st.sampled_from([0.0, -1.5, 0.1, 2.0])) for _ in adapters]
    combined = lora.combine_adapters(adapters, torch.tensor(weights, dtype=torch.float64))
    parts = [w * flat(a.factors, adapters) for w, a in zip(weights, adapters, strict=True)]
    torch.testing.assert_close(flat(combined, adapters), sum(parts), atol=1e-5, rtol=1e-5)
    used = [a.factors for w, a in zip(weights, adapters, strict=True) if w]
    assert set(combined) == set().union(*used)
    for name, factors in combined.items():
        assert factors.rank == sum(f[name].rank for f in used if name in f)


@given(families(), st.integers(1, 6))
@settings(deadline=None, max_examples=60)
def test_truncation_is_the_nearest(adapters, rank):
    """Eckart and Young: the error is the tail of the dense matrix's singular values."""
    given_ = adapters[0].factors
    kept, lost, total = lora.truncate(given_, rank)
    tail = norm = 0.0
    for name, factors in given_.items():
        values = torch.linalg.svdvals(dense(factors)).square()
        tail, norm = tail + float(values[rank:].sum()), norm + float(values.sum())
        assert kept[name].rank <= min(rank, *factors.shape)
        assert kept[name].left.dtype == kept[name].right.dtype == torch.float32
        torch.testing.assert_close(  # balanced
            kept[name].left.norm(dim=0), kept[name].right.norm(dim=1), atol=1e-3, rtol=1e-3
        )
    error = float((flat(kept, adapters) - flat(given_, adapters)).square().sum())
    assert lost == pytest.approx(tail, rel=1e-9, abs=1e-9 * norm)
    assert total == pytest.approx(norm, rel=1e-9)
    assert error == pytest.approx(tail, rel=1e-4, abs=1e-9 * norm)


def test_truncation_needs_a_rank():
    with pytest.raises(UserError, match="is 0; expected 1 or more"):
        lora.truncate({}, 0)


class Largest(TorchDispatchMode):
    """Remembers the numel of the largest tensor that was made."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.numel())
        return result


def test_nothing_of_the_size_of_a_layer_is_made():
    adapters = [Adapter({"w": Factors(torch.randn(700, 2), torch.randn(2, 500))}) for _ in range(3)]
    with Largest() as largest:
        lora.factor_gram(adapters)
        combined = lora.combine_adapters(adapters, torch.ones(3, dtype=torch.float64))
        lora.truncate(combined, 2)
    assert 0 < largest.numel <= 700 * 6


# Writing


def write(folder: Path, base: Path, factors: dict[str, Factors], adapters: list[Adapter]) -> None:
    targets = lora.common_targets(adapters)
    lora.write_adapter(
        folder,
        factors,
        targets=targets,
        dtype=torch.float32,
        base_model=str(base),
        marker={"kind": "basis", "index": 1},
        task_type="CAUSAL_LM",
    )


def loaded_by_peft(folder: Path, base: Path) -> dict[str, Tensor]:
    """What PEFT adds to the base, with every warning an error."""
    model = model_of(base)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", FutureWarning)  # PEFT's use of transformers
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")  # GPT-2's wte
        with_adapter = peft.PeftModel.from_pretrained(model, folder)
        assert isinstance(with_adapter, peft.PeftModelForCausalLM)
        return changes(with_adapter.merge_and_unload(), base)


@pytest.mark.parametrize("rank", [None, 3], ids=["stacked", "truncated"])
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", (LINEAR, LINEAR)),
        ("llama", (["q_proj", "lm_head"], ["embed_tokens", "q_proj", "up_proj"])),
        ("gpt2", (CONV, ["c_fc", "wte"])),
    ],
    ids=["llama", "different-modules", "gpt2"],
)
def test_peft_loads_a_basis(bases, tmp_path, name, targets, rank):
    base = bases(name)
    coefficients = torch.tensor([0.7, -1.3], dtype=torch.float64)
    parts, adapters = [], []
    for i, modules in enumerate(targets):
        parts.append(train(base, tmp_path / str(i), i, r=2 + i, target_modules=modules))
        adapters.append(read(base, tmp_path / str(i)))
    factors = lora.combine_adapters(adapters, coefficients)
    expected = {n: 0.7 * parts[0][n] - 1.3 * parts[1][n] for n in parts[0]}
    if rank:
        factors, lost, _ = lora.truncate(factors, rank)
        assert lost > 0
        expected |= {n: dense(f) for n, f in factors.items()}
    write(tmp_path / "basis", base, factors, adapters)
    found = loaded_by_peft(tmp_path / "basis", base)
    for n in expected:
        torch.testing.assert_close(found[n], expected[n], atol=3e-6, rtol=1e-5)
    check(read(base, tmp_path / "basis"), found)  # and so do we
    config = json.loads((tmp_path / "basis" / lora.CONFIG).read_text())
    different = len({f.rank for f in factors.values()}) > 1
    assert bool(config["rank_pattern"]) == bool(config["alpha_pattern"]) == different
    assert config["fan_in_fan_out"] == (name == "gpt2")


def test_written_files(bases, tmp_path):
    """The same bytes each time; the marker lies where PEFT does not look."""
    base = bases("llama")
    train(base, tmp_path / "a")
    adapter = read(base, tmp_path / "a")
    files = []
    for name in ("1", "2", "3"):
        write(tmp_path / name, base, adapter.factors, [adapter])
        files.append({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()})
    assert files[0] == files[1] == files[2]
    assert set(files[0]) == {lora.CONFIG, lora.WEIGHTS}
    data = files[0][lora.WEIGHTS]
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.pop("__metadata__")
    assert list(header) == sorted(header)
    assert metadata["format"] == "pt"
    assert json.loads(metadata[lora.MARKER]) == {"kind": "basis", "index": 1}


def test_modules_whose_names_end_alike_stay_the_bases(tmp_path):
    """A full name in target_modules also catches names that end in it: with an update of zero."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(4, 4, bias=False)
            self.b = torch.nn.Linear(4, 4, bias=False)
            self.inner = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4, bias=False)})

    base = Model()
    adapter = Adapter(
        {
            f"{name}.weight": Factors(torch.randn(4, rank), torch.randn(rank, 4))
            for name, rank in (("a", 1), ("b", 2))
        },
        {f"{name}.weight": lora.Target(name, "linear") for name in "ab"},
    )
    write(tmp_path, Path("none"), adapter.factors, [adapter])
    before = {name: value.clone() for name, value in base.state_dict().items()}
    config = peft.PeftConfig.from_pretrained(tmp_path)
    config.task_type = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT names the module that the file does not hold
        model = peft.PeftModel.from_pretrained(base, tmp_path, config=config).merge_and_unload()
    after = model.state_dict()
    assert torch.equal(after["inner.a.weight"], before["inner.a.weight"])
    for name, factors in adapter.factors.items():
        torch.testing.assert_close(after[name] - before[name], dense(factors).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_written_dtype(bases, tmp_path, dtype):
    base = bases("llama")
    train(base, tmp_path / "a")
    adapter = read(base, tmp_path / "a")
    lora.write_adapter(
        tmp_path / "b",
        adapter.factors,
        targets=adapter.targets,
        dtype=dtype,
        base_model=str(base),
        marker={},
    )
    assert {v.dtype for v in load_file(tmp_path / "b" / lora.WEIGHTS).values()} == {dtype}
    for name, factors in read(base, tmp_path / "b").factors.items():
        given_ = adapter.factors[name]
        assert torch.equal(factors.left, given_.left.to(dtype).float())
        assert torch.equal(factors.right, given_.right.to(dtype).float())


def test_writing_refuses(bases, tmp_path):
    huge = Adapter(
        {"a.weight": Factors(torch.full((2, 1), 1e6), torch.ones(1, 2))},
        {"a.weight": lora.Target("a", "linear")},
    )
    arguments = {"dtype": torch.float16, "base_model": "", "marker": {}}
    with pytest.raises(
        UserError, match=r"`a.weight` overflows torch.float16; write it in bfloat16"
    ):
        lora.write_adapter(tmp_path, huge.factors, targets=huge.targets, **arguments)
    with pytest.raises(UserError, match="nothing to write"):
        lora.write_adapter(tmp_path, {}, targets={}, **arguments)
    other = Adapter({}, {"a.weight": lora.Target("b", "embedding")}, label="code")
    with pytest.raises(NotPlainLora, match=r"task `code`: targets `a.weight` as embedding `b`"):
        lora.common_targets([huge, other])


# Dense views


@given(families(), st.data())
@settings(deadline=None, max_examples=60)
def test_reading_any_range(adapters, data):
    shapes = {n: f.shape for adapter in adapters for n, f in adapter.factors.items()}
    base = {n: TensorInfo(shape, torch.bfloat16, "x") for n, shape in shapes.items()}
    base["norm.weight"] = TensorInfo((7,), torch.bfloat16, "x")
    adapter = adapters[0]
    assert set(AdapterDelta(adapter, base).tensors) == set(adapter.factors)
    delta = AdapterDelta(adapter, base, every=True)
    assert set(delta.tensors) == set(base)
    name = data.draw(st.sampled_from(sorted(base)))
    info = delta.tensors[name]
    assert (info.shape, info.dtype) == (base[name].shape, torch.float32)
    expected = torch.zeros(info.shape)
    if name in adapter.factors:
        expected = dense(adapter.factors[name]).float()
    torch.testing.assert_close(delta.tensor(name), expected)
    start = data.draw(st.integers(0, info.numel))
    stop = data.draw(st.integers(start, info.numel))
    out = torch.full((info.numel + 3,), torch.nan)
    piece = delta.read(name, start, stop, out)
    torch.testing.assert_close(piece, expected.view(-1)[start:stop])
    assert piece.data_ptr() == out.data_ptr() or start == stop
    assert out[stop - start :].isnan().all()
    assert delta.canonical(name) == name


def test_delta_of_a_file(bases, tmp_path):
    base = bases("gpt2")
    expected = train(base, tmp_path, target_modules=CONV)
    infos = Checkpoint.open(base).tensors
    delta = AdapterDelta(read(base, tmp_path), infos)
    for name in delta.tensors:
        torch.testing.assert_close(
            delta.tensor(name).double(), expected[name], atol=2e-6, rtol=1e-5
        )
    assert delta.nbytes == sum(v.nbytes for v in load_file(tmp_path / lora.WEIGHTS).values())
    with pytest.raises(KeyError):
        delta.read("transformer.wte.weight", 0, 1, torch.empty(1))

    before = delta.fingerprint(), delta.stamp()
    same = AdapterDelta(read(base, tmp_path), infos)
    assert (same.fingerprint(), same.stamp()) == before
    config = json.loads((tmp_path / lora.CONFIG).read_text())
    (tmp_path / lora.CONFIG).write_text(json.dumps(config | {"lora_alpha": 9}))
    other = AdapterDelta(read(base, tmp_path), infos)
    assert other.fingerprint() != before[0] and other.stamp() != before[1]
