"""A live model that changes tasks: the bits of exports, the base again, and clear refusals."""

from __future__ import annotations

import copy
import doctest
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from commands import recipe, tvb, write
from families import EMBEDDING, HEAD
from test_lora import train
from tiny import TASKS, family, gpt2, llama, load
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM

import tvb_mergekit as library
from tvb_mergekit.store import export as exporting
from tvb_mergekit.store import live as live_
from tvb_mergekit.store.live import attach
from tvb_mergekit.store.store import Bases

pytestmark = pytest.mark.usefixtures("own_cache")
THREE = TASKS[:3]
MIXED = (torch.bfloat16, torch.float32, torch.float16)
WEIGHTS = {0: {"weight": 0.6}}  # which exports take out again
NORM = "model.norm.weight"


def built(
    folder: Path, *options: str, make: Callable[[], nn.Module] = llama, **keys: Any
) -> tuple[Path, Path]:
    """A base in bfloat16, and the store of three tasks over it."""
    base, models = family(folder, make, THREE, dtypes=MIXED, scale=0.005)
    file = write(recipe("basis_negate", base, models, WEIGHTS, forget="math", alpha=1.0, **keys),
                 folder / "store")  # fmt: skip
    tvb("build", file, folder / "store", "--quiet", *options)
    return base, folder / "store"


def loaded(base: Path, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    return model


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_bits(model: nn.Module, want: Mapping[str, Tensor]) -> None:
    """The tensors that the files have, signs of zeros too; nothing else is compared."""
    for name, tensor in want.items():
        found = model.state_dict()[name]
        assert found.dtype == tensor.dtype, name
        kind = {2: torch.int16, 4: torch.int32}[tensor.itemsize]
        assert torch.equal(found.contiguous().view(kind), tensor.contiguous().view(kind)), name


STORES: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    "zoo": lambda folder: built(folder, "--bits", "2", basis="none"),
    "zoo, mixed bits": lambda folder: built(folder, "--bits", "1.5", basis="none"),
    "pca": lambda folder: built(folder, basis="pca", num_bases=2, exclude="lm_head"),
    "balanced, coded": lambda folder: built(
        folder, "--bits", "4", basis="balanced", num_bases=2
    ),
    "rand_proj": lambda folder: built(folder, basis="rand_proj", num_bases=2),
    "gpt2": lambda folder: built(folder, "--bits", "2", make=gpt2, basis="none"),
    "tied": lambda folder: built(
        folder, "--bits", "2", make=partial(llama, tie_word_embeddings=True), basis="none"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", STORES)
def test_the_bits_of_exports_and_of_the_base(kind: str, tmp_path: Path) -> None:
    base, store = STORES[kind](tmp_path)
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        model = loaded(base, dtype)
        start, places = state_of(model), [p.data_ptr() for p in model.parameters()]
        live = library.attach(model, store if name == "float32" else library.load(store))
        assert live.tasks == list(THREE) and live.current == {}
        for task in ("math", "code"):
            out = tmp_path / f"{name}-{task}"
            tvb("export", store, out, "--task", task, "--dtype", name, "--quiet")
            assert live.use(task) is model and live.current == {task: 1.0}
            want = load(out)
            assert_bits(model, want)
            assert any(not torch.equal(want[n], start[n]) for n in want)
        assert_bits(loaded(out, dtype), state_of(model))
        live.use({"math": 0.7, "safety": -0.2})
        assert live.reset() is model and live.current == {}
        assert_bits(model, start)
        live.use({"code": 1})
        assert_bits(model, want)  # nothing is left of what was before
        live.use({"code": 0.0})
        assert_bits(model, start)
        assert [p.data_ptr() for p in model.parameters()] == places


@pytest.mark.parametrize("kind", ["zoo", "pca", "adapters"])
def test_mixtures_are_the_dense_sum(kind: str, tmp_path: Path) -> None:
    scales = {"math": 0.5, "safety": -1.25}
    if kind == "adapters":
        base, _ = family(tmp_path, tasks=())
        listed = [f"{base}+{tmp_path / task}" for task in THREE]
        changes = [train(base, tmp_path / task, seed) for seed, task in enumerate(THREE)]
        file = write(recipe("basis_ta", base, listed, WEIGHTS, basis="none"), tmp_path / "store")
        tvb("build", file, tmp_path / "store", "--adapters", "--quiet")
        store = tmp_path / "store"
        taus = {t: c for t, c in zip(THREE, changes, strict=True) if t in scales}
    else:
        base, store = STORES[kind](tmp_path)
        bases = library.load(store)
        taus = {task: reconstructed(bases, task) for task in scales}
    model = loaded(base, torch.float32)
    attach(model, store).use(scales)
    for name, start in load(base).items():
        want = start.double()
        for task, scale in scales.items():
            want = want + scale * taus[task].get(name, torch.zeros(1)).double()
        torch.testing.assert_close(
            model.state_dict()[name].double(), want, rtol=1e-6, atol=1e-7, msg=name
        )


def reconstructed(bases: Bases, task: str) -> dict[str, Tensor]:
    """tau_hat in float64, without its weight."""
    column = bases.decoder[:, list(bases.tasks).index(task)].tolist()
    column += [1.0] * (bases.mean is not None)
    weight = 0.6 if task == "math" else 1.0
    terms = list(zip(column, bases.sources, strict=True))
    return {n: sum(c * s.tensor(n).double() for c, s in terms) / weight for n in bases.names}


class Vision(nn.Module):
    """Buffers in float and integers, a tied head, and weights laid out channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.head, self.other = nn.Linear(8, 5), nn.Linear(8, 5)
        self.other.weight = self.head.weight


def test_any_module_and_layout_and_bases_in_memory() -> None:
    torch.manual_seed(0)
    base = state_of(Vision())
    models = {
        task: {n: t + 0.1 * torch.randn_like(t) if t.is_floating_point() else t + 7
               for n, t in base.items()}
        for task in THREE
    }  # fmt: skip
    for state in (base, *models.values()):
        state["other.weight"] = state["head.weight"]
    bases = library.build(base, models, basis="balanced", num_bases=2)
    model = Vision()
    model.load_state_dict(base)
    model.to(memory_format=torch.channels_last)
    model.features[1].num_batches_tracked += 3  # left alone: no task moves it
    live = attach(model, bases, base)
    live.use("code")
    want = library.reconstruct(bases, base, "code")
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            assert torch.equal(tensor, want[name]), name
    assert not model.features[0].weight.is_contiguous()
    assert model.features[1].num_batches_tracked == 3
    live.reset()
    assert torch.equal(model.features[0].weight, base["features.0.weight"])


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVB_MERGEKIT_CACHE", "off")
        return STORES["zoo"](tmp_path_factory.mktemp("zoo"))


def parameter(model: nn.Module, name: str, value: Tensor | nn.Parameter) -> nn.Module:
    module, _, last = name.rpartition(".")
    owner = model.get_submodule(module)
    if isinstance(value, nn.Parameter) or value.is_floating_point():
        setattr(owner, last, nn.Parameter(value, requires_grad=False))
    else:
        delattr(owner, last)
        owner.register_buffer(last, value)
    return model


def with_rank(model: nn.Module) -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    wrapped: nn.Module = peft.get_peft_model(model, config)
    return wrapped


def shifted(model: nn.Module) -> nn.Module:
    model.get_parameter(NORM).data[-1] += 1
    return model


def tying(model: nn.Module) -> nn.Module:
    model.get_parameter(HEAD).data.copy_(model.get_parameter(EMBEDDING).data)
    return parameter(model, HEAD, model.get_parameter(EMBEDDING))


# What is done to the model, and what is said of it.
UNFIT: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "other weights": (shifted, f"tensor `{NORM}`: the model's weights are not the base's"),
    "another shape": (
        lambda model: parameter(model, NORM, torch.ones(40)),
        f"tensor `{NORM}`: the model has shape [40], the base [32]",
    ),
    "meta": (
        lambda model: parameter(model, NORM, torch.ones(32, device="meta")),
        f"tensor `{NORM}`: the model holds it on the meta device",
    ),
    "int8": (
        lambda model: parameter(model, NORM, torch.ones(32, dtype=torch.int8)),
        f"tensor `{NORM}`: the model holds it as int8",
    ),
    "float8": (
        lambda model: parameter(model, NORM, torch.ones(32).to(torch.float8_e4m3fn)),
        f"tensor `{NORM}`: the model holds it as float8_e4m3fn",
    ),
    "wrapped": (with_rank, "base_model.model.model.embed_tokens.weight, base_model.model.model."),
    "a parameter more": (
        lambda model: parameter(model, "model.more", torch.ones(3)),
        "its model.more are not in the base's files",
    ),
    "tied": (tying, f"tensors `{HEAD}` and `{EMBEDDING}`: the model ties them"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_models_that_do_not_fit(case: str, zoo: tuple[Path, Path]) -> None:
    change, said = UNFIT[case]
    refused(said, lambda: attach(change(loaded(zoo[0])), zoo[1]))


def refused(said: str, call: Callable[[], object]) -> None:
    with pytest.raises(library.UserError) as caught:
        call()
    assert said in str(caught.value) and "\n" not in str(caught.value), str(caught.value)


def test_bases_that_do_not_fit(zoo: tuple[Path, Path], tmp_path: Path) -> None:
    base, store = zoo
    model = loaded(base)
    inner = AutoModel.from_pretrained(base)  # whose names lack `model.`
    refused("of the base's files are not in it, and its", lambda: attach(inner, store))
    refused("belongs to the base", lambda: attach(model, store, base.parent / "math"))
    refused("no such folder or file", lambda: attach(model, store, tmp_path / "none"))
    refused("the model's own memory", lambda: attach(model, store, model.state_dict()))
    start = state_of(model)
    shutil.copytree(store, tmp_path / "store")
    moved = library.load(tmp_path / "store")
    lost = copy.copy(moved)
    object.__setattr__(lost, "path", None)
    record = moved.facts.store.model_copy(update={"base_path": None, "base_beside": None})
    facts = moved.facts.model_copy(update={"base_model": "org/name", "store": record})
    object.__setattr__(lost, "facts", facts)
    refused("base org/name: no such file or folder", lambda: attach(model, lost))
    live = attach(model, lost, load(base))  # a state dict, on its own
    live.use("math")
    live.reset()
    assert_bits(model, start)


def test_uses_that_are_refused_leave_right_weights(
    zoo: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, store = zoo
    model = loaded(base, torch.float16)
    start = state_of(model)
    live = attach(model, store)
    live.use("code")
    want = state_of(model)
    for said, tasks in {
        "no task 'mth' in": "mth",
        "did you mean 'math'": {"code": 1, "mth": 0.5},
        "`use` got no task": {},
        "the scale of task 'math' is nan": {"math": float("nan")},
        "the scale of task 'code' is inf": {"code": float("inf")},
        "the scale of task 'code' is '1'": {"code": "1"},
    }.items():
        refused(said, lambda tasks=tasks: live.use(tasks))
        assert live.current == {"code": 1.0}
    assert_bits(model, want)

    refused("overflow float16 in the output", lambda: live.use({"code": 1e9}))
    assert_bits(model, start)
    assert live.current == {}
    refused("; the model has the base's weights again", lambda: live.use({"code": 1e9}))

    # Interrupted in the middle, after tensors have moved.
    usual, written = live_.LiveSink.place, []

    def stopped(sink: Any, *given: Any) -> Any:
        written.append(given)
        if len(written) == 5:
            raise KeyboardInterrupt
        return usual(sink, *given)

    live.use("safety")
    monkeypatch.setattr(live_.LiveSink, "place", stopped)
    with pytest.raises(KeyboardInterrupt):
        live.use({"math": 3.0})
    assert len(written) >= 5 and live.current is None
    live.use("code")
    assert_bits(model, want)
    live.reset()
    assert_bits(model, start)


def test_a_small_budget_gives_the_same_bits(
    zoo: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, store = zoo
    model, other = loaded(base), loaded(base)
    attach(other, store).use("math")
    monkeypatch.setattr(exporting, "block_budget", lambda: 10**6)
    attach(model, store).use("math")
    assert_bits(model, state_of(other))


def test_doctests() -> None:
    found = doctest.testmod(live_)
    assert found.attempted >= 6 and not found.failed
