"""A live model that changes tasks: the bits of exports, the base again, and clear refusals."""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from commands import tvb
from tiny import llama, load
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM
from worlds import EMBEDDING, HEAD, MIXED, THREE, TIED, hub

import tvb_mergekit as library
from tvb_mergekit.store.attach import LiveSink

attach: Any = library.attach
NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj"
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
STORES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], dict[str, Any]]] = {
    "sampled": (llama, ("--keep", "0.25"), {}),
    "pca": (partial(llama, rope_parameters=DYNAMIC), (), {"basis": "pca", "exclude": "lm_head"}),
    "tied": (TIED, ("--keep", "0.25"), {}),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Kind -> a base in bfloat16, and the store of three tasks over it, built once."""

    @cache
    def get(kind: str) -> tuple[Path, Path]:
        make, words, keys = STORES[kind]
        folder = tmp_path_factory.mktemp("live")
        made = hub(make, folder, dtypes=MIXED, scale=0.005)
        # A weight, which exports take out again
        replace(made, own={0: {"weight": 0.6}}).build(folder / "store", *words, **keys)
        return made.base, folder / "store"

    return get


def loaded(base: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=dtype)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_bits(model: nn.Module, want: Mapping[str, Tensor]) -> None:
    """The tensors of `want`, signs of zeros too."""
    for name, tensor in want.items():
        found = model.state_dict()[name]
        assert (found.dtype, found.device) == (tensor.dtype, tensor.device), name
        pair = (each.reshape(-1).view(torch.uint8) for each in (found, tensor))
        assert found.is_meta or torch.equal(*pair), name


def refused(said: str, call: Callable[[], object]) -> None:
    with pytest.raises(library.UserError) as caught:
        call()
    assert said in str(caught.value) and "\n" not in str(caught.value), str(caught.value)


@pytest.mark.parametrize("kind", STORES)
def test_the_bits_of_exports_and_of_the_base(kind: str, stored: Any, tmp_path: Path) -> None:
    base, store = stored(kind)
    for dtype, given in ((torch.bfloat16, store), (torch.float32, library.load(store))):
        model, name = loaded(base, dtype), str(dtype).removeprefix("torch.")
        start, places = state_of(model), [p.data_ptr() for p in model.parameters()]
        live = attach(model, given)
        assert live.tasks == list(THREE) and live.current == {}
        for task in ("math", "code"):
            out = tmp_path / f"{name}-{task}"
            tvb("export", store, out, "--task", task, "--dtype", name, "--quiet")
            assert live.use(task) is model and live.current == {task: 1.0}
            assert_bits(model, want := load(out))
        assert_bits(loaded(out, dtype), state_of(model))
        model.get_parameter(NORM).data += 1  # mended by the next change
        live.use({"math": 0.7, "safety": -0.2})
        assert live.reset() is model and live.current == {}
        assert_bits(model, start)
        tokens = torch.arange(90 if kind == "pca" else 60)  # more: new frequencies of `dynamic`
        loss = model(tokens[None]).logits.sum()
        assert_bits(live.use({"code": 1}), want)  # nothing is left of what was before
        assert [p.data_ptr() for p in model.parameters()] == places
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_module_and_layout_against_float64(dtype: torch.dtype) -> None:
    """Tied weights, channels last and buffers, whose sums are exact in float32: rounded once."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5), nn.Linear(8, 5)
    model: Any = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    model[3].weight = model[2].weight
    base = {n: torch.randint(-128, 128, t.shape) / 64 for n, t in model.state_dict().items()}
    base["1.num_batches_tracked"] = torch.tensor(3)  # left alone: no task moves it
    taus = {t: {n: torch.randint(-8, 8, b.shape) / 64 for n, b in base.items()} for t in THREE}
    tuned = {task: {n: b + taus[task][n].to(b.dtype) for n, b in base.items()} for task in THREE}
    for state in (base, *taus.values(), *tuned.values()):
        state["3.weight"] = state["2.weight"]
    model.load_state_dict(base)
    live = attach(model.to(dtype), library.build(base, tuned, basis="none"), base)
    mixtures = {"math": -2.0, "code": 0.5}, {}, {"safety": 0.25}, {"code": 0.0}, {"math": 1.0}
    for scales in mixtures:
        live.use(scales)
        for name, found in model.state_dict().items():
            want = base[name].double()
            if found.is_floating_point():
                want = want + sum(scale * taus[task][name] for task, scale in scales.items())
            assert torch.equal(found, want.to(found.dtype)), name
    assert not model[0].weight.is_contiguous()


def wrap(model: Any, **keys: Any) -> Any:
    config = peft.LoraConfig(target_modules=["up_proj", "k_proj"], **keys)
    return peft.get_peft_model(model, config)


NAMES, INT8 = f"the model names {UP}.weight", nn.Parameter(torch.ones(32, dtype=torch.int8), False)
# Changes of a model -> what is said of a model that is attached after the change; "": nothing
CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "LoRA": (wrap, NAMES),
    "PiSSA": (partial(wrap, init_lora_weights="pissa"), NAMES),
    "left PiSSA": (lambda m: wrap(m, init_lora_weights="pissa").unload(), "are not the base's"),
    "compiled": (lambda m: setattr(m, "model", torch.compile(m.model)), f"names {EMBEDDING}"),
    "int8": (lambda m: setattr(m.model.norm, "weight", INT8), f"`{NORM}` is torch.int8 on cpu"),
    "on meta": (lambda m: m.to("meta"), "is torch.bfloat16 on meta"),
    "resized": (lambda m: m.resize_token_embeddings(99), "[99, 32] are not the base's [96, 32]"),
    "tied": (lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight), "shares its"),
    "cast": (lambda m: m.float(), ""),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_model_that_changed_is_refused(case: str, stored: Any) -> None:
    """After `attach`, and before if it is not the base's model any more."""
    (change, said), (base, place) = CHANGES[case], stored("sampled")
    live = attach(model := loaded(base), place)
    live.use("code")
    change(model)
    start = state_of(model)
    for call in (lambda: live.use("math"), live.reset):
        refused("is not what was attached", call)
        assert live.current == {"code": 1.0}
        assert_bits(model, start)
    change(model := loaded(base))
    refused(said, lambda: attach(model, place)) if said else attach(model, place)


def test_bases_and_models_that_do_not_fit(stored: Any, tmp_path: Path) -> None:
    base, store = stored("sampled")
    model, inner = loaded(base), AutoModel.from_pretrained(base)  # whose names lack `model.`
    refused(f"the model names {HEAD}, {EMBEDDING}", lambda: attach(inner, store))
    refused("belongs to the base", lambda: attach(model, store, base.parent / "math"))
    refused("no such folder or file", lambda: attach(model, store, tmp_path / "none"))
    refused("memory with the base", lambda: attach(model, store, model.state_dict()))
    live = attach(model, store)
    live.use("math")
    refused("are not the base's", lambda: attach(model, store))
    live.reset()
    attach(torch.compile(model), store)
    refused("a later `attach` of this model has replaced this one", lambda: live.use("math"))


def test_uses_that_fail_leave_right_weights(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    base, store = stored("sampled")
    start = state_of(model := loaded(base, torch.float16))
    live = attach(model, store)
    want = state_of(live.use("code"))
    refused("did you mean `math`", lambda: live.use({"code": 1, "mth": 0.5}))
    assert live.current == {"code": 1.0}
    assert_bits(model, want)
    for scale in (1e9, float("nan")):
        refused("overflow float16 in the output", lambda scale=scale: live.use({"code": scale}))
        assert live.current == {}
        assert_bits(model, start)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(LiveSink, "write", lambda *_: 1 / 0)
        live.use({"math": 3.0})
    assert live.current is None
    assert_bits(live.use("code"), want)


def test_files_that_are_overwritten_in_place(stored: Any, tmp_path: Path) -> None:
    base, store = (shutil.copytree(each, tmp_path / each.name) for each in stored("sampled"))
    live = attach(model := loaded(base), store, base)
    want = state_of(live.use("math"))
    (task,) = (file for file in store.rglob("*.safetensors") if "/math" in str(file))
    for file, call in ((task, lambda: live.use("math")), (base / "model.safetensors", live.reset)):
        with file.open("r+b") as opened:
            opened.write(file.read_bytes()[:-64] + bytes(range(64)))
        os.utime(file, ns=2 * (file.stat().st_mtime_ns + 1,))  # whatever the clock is
        refused(f"{file}: was changed after it was opened", call)
        assert live.current == {"math": 1.0}
        assert_bits(model, want)
