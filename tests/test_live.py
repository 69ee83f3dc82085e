"""A live model that changes tasks: the bits of exports, the base again, and clear refusals."""

import copy
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import tvb
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import gpt2, llama, load
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM
from worlds import EMBEDDING, HEAD, MIXED, THREE, TIED, hub

import tvb_mergekit as library
from tvb_mergekit.store import live as live_
from tvb_mergekit.store.attaching import attach
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.checkpoint import Checkpoint

WEIGHTS = {0: {"weight": 0.6}}  # which exports take out again
NORM = "model.norm.weight"


def loaded(base: Path, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    return model


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_bits(model: nn.Module, want: Mapping[str, Tensor]) -> None:
    """The tensors of `want` that hold data, signs of zeros too."""
    state = model.state_dict()
    for name, tensor in want.items():
        found = state[name]
        assert (found.dtype, found.is_meta) == (tensor.dtype, tensor.is_meta), name
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
        if not found.is_meta:
            pair = (each.contiguous().view(kind) for each in (found, tensor))
            assert torch.equal(*pair), name


STORES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], dict[str, Any]]] = {
    "sampled": (llama, ("--keep", "0.25"), {}),
    "pca": (llama, (), {"basis": "pca", "num_bases": 2, "exclude": "lm_head"}),
    "gpt2": (gpt2, ("--keep", "0.5"), {}),
    "tied": (TIED, ("--keep", "0.25"), {}),
}
Stored = tuple[Path, Path]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Stored]:
    """Kind -> a base in bfloat16, and the store of three tasks over it, built once."""

    @cache
    def get(kind: str) -> Stored:
        make, words, keys = STORES[kind]
        folder = tmp_path_factory.mktemp("live")
        made = replace(hub(make, folder, dtypes=MIXED, scale=0.005), own=WEIGHTS)
        made.build(folder / "store", *words, **keys)
        return made.base, folder / "store"

    return get


@pytest.fixture
def sampled(stored: Callable[[str], Stored]) -> Stored:
    return stored("sampled")


@pytest.fixture
def model(sampled: Stored) -> nn.Module:
    return loaded(sampled[0])


@pytest.fixture
def live(model: nn.Module, sampled: Stored) -> Any:
    return attach(model, sampled[1])


@pytest.mark.parametrize("kind", STORES)
def test_the_bits_of_exports_and_of_the_base(kind: str, stored: Any, tmp_path: Path) -> None:
    base, store = stored(kind)
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
        live.use(scales := {"math": 0.7, "safety": -0.2})
        if (kind, name) == ("pca", "float32"):  # a mixture is the dense sum
            taus = {task: reconstructed(library.load(store), task) for task in scales}
            for place in load(base):
                parts = (scale * taus[task].get(place, 0) for task, scale in scales.items())
                mixed, found = start[place].double() + sum(parts), model.state_dict()[place]
                torch.testing.assert_close(found.double(), mixed, rtol=1e-6, atol=1e-7)
        assert live.reset() is model and live.current == {}
        assert_bits(model, start)
        live.use({"code": 1})
        assert_bits(model, want)  # nothing is left of what was before
        live.use({"code": 0.0})
        assert_bits(model, start)
        assert [p.data_ptr() for p in model.parameters()] == places


def reconstructed(bases: Bases, task: str) -> dict[str, Tensor]:
    """tau_hat in float64, without its weight."""
    bases.check_base(Checkpoint.open(bases.base_name), "the base")
    column = (bases.reconstruction([task])[:, 0] * bases.scales).tolist()
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


def parameter(model: nn.Module, name: str, value: Tensor | nn.Parameter) -> nn.Module:
    module, _, last = name.rpartition(".")
    owner = model.get_submodule(module)
    if isinstance(value, nn.Parameter) or value.is_floating_point():
        setattr(owner, last, nn.Parameter(value, requires_grad=False))
    else:
        delattr(owner, last)
        owner.register_buffer(last, value)
    return model


def shifted(model: nn.Module) -> nn.Module:
    model.get_parameter(NORM).data[-1] += 1
    return model


def tying(model: nn.Module) -> nn.Module:
    model.get_parameter(HEAD).data.copy_(model.get_parameter(EMBEDDING).data)
    return parameter(model, HEAD, model.get_parameter(EMBEDDING))


def removed(model: nn.Module) -> nn.Module:
    inner: Any = model.get_submodule("model")
    inner.norm = None
    return model


def untied(model: nn.Module) -> nn.Module:
    return parameter(model, HEAD, nn.Parameter(model.get_parameter(HEAD).detach().clone()))


def resized(model: Any) -> nn.Module:
    model.resize_token_embeddings(100, mean_resizing=False)
    return model


# What is done to the model, and what is said of it: before `attach`, and after it.
BEFORE: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "other weights": (shifted, f"tensor `{NORM}`: the model's weights are not the base's"),
    "other names": (nn.Sequential, "of the base's files are not in it, and its 0.model"),
    "a parameter more": (
        lambda model: parameter(model, "model.more", torch.ones(3)),
        "its model.more are not in the base's files",
    ),
    "int8": (
        lambda model: parameter(model, NORM, torch.ones(32, dtype=torch.int8)),
        f"tensor `{NORM}`: the model holds it as int8",
    ),
    "on meta": (lambda model: model.to("meta"), "the model holds it on the meta device"),
    "resized": (resized, "the model has shape [100, 32], the base [96, 32]"),
    "removed": (removed, f"{NORM} of the base's files are not in it"),
    "one element": (
        lambda model: parameter(model, NORM, nn.Parameter(torch.ones(1).expand(32))),
        f"tensor `{NORM}`: the model holds it with elements that share memory",
    ),
    "tied": (tying, f"tensors `{HEAD}` and `{EMBEDDING}`: the model ties them"),
}
AFTER: dict[str, Callable[[nn.Module], nn.Module]] = {
    "cast": lambda model: model.float(),
    "on meta": lambda model: model.to("meta"),
    "removed": removed,
    "tied": tying,
    "untied": untied,
    "assigned": lambda model: assigned(model),
    "wrapped": lambda model: partly(model, torch.compile),
}


@pytest.mark.parametrize("case", BEFORE)
def test_models_that_do_not_fit(case: str, sampled: Stored) -> None:
    change, said = BEFORE[case]
    refused(said, lambda: attach(change(loaded(sampled[0])), sampled[1]))


@pytest.mark.parametrize("case", AFTER)
def test_models_that_are_no_longer_what_was_attached(case: str, stored: Any) -> None:
    base, store = stored("tied" if case == "untied" else "sampled")
    model = loaded(base)
    live = attach(model, store)
    live.use("code")
    AFTER[case](model)
    start = state_of(model)
    for call in (lambda: live.use("math"), live.reset):
        refused("is not what was attached: the model was moved, cast or wrapped", call)
        assert live.current == {"code": 1.0}
        assert_bits(model, start)


def refused(said: str, call: Callable[[], object]) -> None:
    with pytest.raises(library.UserError) as caught:
        call()
    assert said in str(caught.value) and "\n" not in str(caught.value), str(caught.value)


def test_bases_that_do_not_fit(sampled: Stored, tmp_path: Path) -> None:
    base, store = sampled
    model = loaded(base)
    inner = AutoModel.from_pretrained(base)  # whose names lack `model.`
    refused("of the base's files are not in it, and its", lambda: attach(inner, store))
    refused("belongs to the base", lambda: attach(model, store, base.parent / "math"))
    refused("no such folder or file", lambda: attach(model, store, tmp_path / "none"))
    refused("the model's own memory", lambda: attach(model, store, model.state_dict()))
    lost = copy.copy(library.load(store))
    object.__setattr__(lost, "path", None)
    record = lost.facts.store.model_copy(update={"base_path": None, "base_beside": None})
    facts = lost.facts.model_copy(update={"base_model": "org/name", "store": record})
    object.__setattr__(lost, "facts", facts)
    refused("org/name: no such folder", lambda: attach(model, lost))


def test_uses_that_are_refused_leave_right_weights(sampled, monkeypatch):
    base, store = sampled
    model = loaded(base, torch.float16)
    start = state_of(model)
    live = attach(model, store)
    live.use("code")
    want = state_of(model)
    for said, tasks in {
        "no task 'mth' in": "mth",
        "did you mean `math`": {"code": 1, "mth": 0.5},
        "the scale of task 'math' is nan": {"math": float("nan")},
        "the scale of task 'code' is '1'": {"code": "1"},
    }.items():
        refused(said, lambda tasks=tasks: live.use(tasks))
        assert live.current == {"code": 1.0}
    assert_bits(model, want)

    refused("overflow float16 in the output", lambda: live.use({"code": 1e9}))
    assert_bits(model, start)
    assert live.current == {}

    # Interrupted in the middle, after tensors have moved.
    usual, left = live_.LiveSink.write, 5

    def stopped(sink: Any, *given: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return usual(sink, *given)

    live.use("safety")
    monkeypatch.setattr(live_.LiveSink, "write", stopped)
    with pytest.raises(KeyboardInterrupt):
        live.use({"math": 3.0})
    assert live.current is None
    live.use("code")
    assert_bits(model, want)
    live.reset()
    assert_bits(model, start)


def transposed(tensor: Tensor) -> Tensor:
    """A copy; of a matrix one that is not contiguous."""
    return tensor.mT.contiguous().mT if tensor.ndim == 2 else tensor.clone()


def assigned(model: nn.Module, change: Callable[[Tensor], Tensor] = torch.clone) -> nn.Module:
    """The model with new parameters."""
    state = {name: change(tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


def partly(model: nn.Module, change: Callable[[Any], Any]) -> nn.Module:
    layers: Any = model.get_submodule("model.layers")
    layers[0] = change(layers[0])
    return model


def test_slow_writes_next_to_direct_ones(sampled: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer is used again too early, as in a model that is partly on another device."""
    usual = live_.LiveSink.write

    def slowly(sink: Any, *given: Any) -> None:
        time.sleep(0.02)
        usual(sink, *given)

    model, other = loaded(sampled[0]), assigned(loaded(sampled[0]), change=transposed)
    attach(model, sampled[1]).use("code")
    monkeypatch.setattr(live_.LiveSink, "write", slowly)
    attach(other, sampled[1]).use("code")
    assert_bits(other, state_of(model))


def test_two_stores_of_one_model(model, live, sampled):
    """The later object replaces the earlier one, and needs the base's weights."""
    live.use("math")
    refused("the model's weights are not the base's", lambda: attach(model, sampled[1]))
    live.reset()
    other = attach(torch.compile(model), sampled[1])
    refused("a later `attach` of this model has replaced this one", lambda: live.use("math"))
    other.use("code")
    other.reset()


@pytest.mark.parametrize("case", ["base", "task"])
def test_files_that_are_overwritten_in_place(case: str, sampled: Stored, tmp_path: Path) -> None:
    base, store = (shutil.copytree(folder, tmp_path / folder.name) for folder in sampled)
    file = (base if case == "base" else store / "math") / "model.safetensors"

    model = loaded(base)
    start = state_of(model)
    live = attach(model, store, base)
    live.use("math")
    want, changed = state_of(model), f"{file}: was changed after it was opened"
    with file.open("r+b") as opened:
        opened.seek(-64, os.SEEK_END)
        opened.write(bytes(range(64)))
    later = file.stat().st_mtime_ns + 1  # whatever the clock of the file system is
    os.utime(file, ns=(later, later))
    refused(changed, lambda: live.use({"math": 1}))
    if case == "base":
        refused(changed, live.reset)
        assert_bits(model, want)
        assert live.current == {"math": 1.0}
    else:
        live.use("code")  # whose file is as it was
        live.reset()
        assert_bits(model, start)


def test_gradients_through_other_weights_are_refused(model, live):
    tokens = torch.arange(8)[None]
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    live.use("math")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_threads(model, live):
    """One change at a time."""
    states = {}
    for task in THREE:
        live.use(task)
        states[task] = state_of(model)
    start = threading.Barrier(6)

    def work(number: int) -> None:
        start.wait()
        for turn in range(number, number + 6):
            live.use(THREE[turn % len(THREE)])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert live.current is not None
    (task,) = live.current
    assert_bits(model, states[task])


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCALES = st.dictionaries(
    st.sampled_from(THREE), st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0]), min_size=1
)
STEPS = st.one_of(
    st.tuples(st.just("use"), SCALES),
    st.tuples(st.sampled_from(["reset", "refused"]), st.just({})),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(STEPS, max_size=12), st.sampled_from(DTYPES), st.booleans())
def test_any_sequence_against_float64(
    steps: list[tuple[str, Any]], dtype: torch.dtype, turned: bool
) -> None:
    """Of weights whose sums are exact in float32, so that only the last rounding counts."""
    generator = torch.Generator().manual_seed(0)

    def exact(*shape: int, most: int = 128) -> Tensor:
        return torch.randint(-most, most, shape, generator=generator) / 64

    base = {"0.weight": exact(7, 5), "0.bias": exact(7), "1.weight": exact(5, 7)}
    taus = {task: {name: exact(*t.shape, most=8) for name, t in base.items()} for task in THREE}
    tuned = {task: {name: base[name] + tau[name] for name in base} for task, tau in taus.items()}
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5, bias=False))
    model.load_state_dict(base)
    model.to(dtype)
    assigned(model, transposed if turned else torch.clone)
    live = attach(model, library.build(base, tuned, basis="none"), base)

    def assert_at(scales: Mapping[str, float]) -> None:
        assert live.current == scales
        for name, found in model.state_dict().items():
            want = base[name].double()
            for task, scale in scales.items():
                want = want + scale * taus[task][name].double()
            assert torch.equal(found, want.to(found.dtype)), name

    now: dict[str, float] = {}
    for step, given_ in steps:
        if step == "refused":
            refused("no task 'mth'", lambda: live.use({"math": 1.0, "mth": 1.0}))
            continue
        if step == "use":
            live.use(now := given_)
        else:
            live.reset()
            now = {}
        assert_at(now)
