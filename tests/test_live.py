"""A live model that changes tasks: the bits of exports, the base again, and clear refusals."""

import asyncio
import copy
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import peft
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


def with_rank(model: nn.Module, **keys: Any) -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], **keys)
    wrapped: nn.Module = peft.get_peft_model(model, config)
    return wrapped


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


# What is done to the model, and what is said of it: before `attach`, at both times, and after it.
BEFORE: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "other weights": (shifted, f"tensor `{NORM}`: the model's weights are not the base's"),
    "wrapped": (with_rank, "base_model.model.model.embed_tokens.weight, base_model.model.model."),
    "a parameter more": (
        lambda model: parameter(model, "model.more", torch.ones(3)),
        "its model.more are not in the base's files",
    ),
}
BOTH: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "int8": (
        lambda model: parameter(model, NORM, torch.ones(32, dtype=torch.int8)),
        f"tensor `{NORM}`: the model holds it as int8",
    ),
    "tied": (tying, f"tensors `{HEAD}` and `{EMBEDDING}`: the model ties them"),
}
AFTER: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "all on meta": (lambda model: model.to("meta"), "the model holds it on the meta device"),
    "resized": (resized, "the model has shape [100, 32], the base [96, 32]"),
    "removed": (removed, f"{NORM} of the base's files are not in it; load it"),
    "one element": (
        lambda model: parameter(model, NORM, nn.Parameter(torch.ones(1).expand(32))),
        f"tensor `{NORM}`: the model holds it with elements that share memory",
    ),
    "a saved head": (
        partial(with_rank, modules_to_save=["lm_head"]),
        f"tensor `{HEAD}`: a module that PEFT wraps it in holds a copy",
    ),
    "untied": (untied, f"the model no longer ties its {HEAD} to"),
}


@pytest.mark.parametrize("case", [*BEFORE, *BOTH])
def test_models_that_do_not_fit(case: str, sampled: Stored) -> None:
    change, said = (BEFORE | BOTH)[case]
    refused(said, lambda: attach(change(loaded(sampled[0])), sampled[1]))


@pytest.mark.parametrize("case", [*BOTH, *AFTER])
def test_models_that_no_longer_fit(case: str, stored: Any) -> None:
    base, store = stored("tied" if "untied" in case else "sampled")
    model = loaded(base)
    live = attach(model, store)
    live.use("code")
    change, said = (BOTH | AFTER)[case]
    change(model)
    start = state_of(model)
    for call in (lambda: live.use("math"), live.reset, live.verify):
        refused(said, call)
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

    # Interrupted in the middle, after tensors have moved; in a block the base returns.
    usual, left = live_.LiveSink.place, 5

    def stopped(sink: Any, *given: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return usual(sink, *given)

    live.use("safety")
    monkeypatch.setattr(live_.LiveSink, "place", stopped)
    with pytest.raises(KeyboardInterrupt):
        live.use({"math": 3.0})
    assert live.current is None
    left = 5
    with pytest.raises(KeyboardInterrupt), live.using("math"):
        pytest.fail("interrupted before")
    assert_bits(model, start)
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


def swapped(model: nn.Module) -> nn.Module:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.half()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def partly(model: nn.Module, change: Callable[[Any], Any]) -> nn.Module:
    layers: Any = model.get_submodule("model.layers")
    layers[0] = change(layers[0])
    return model


# What is done to a model in float32 after `attach`, besides `.to` and assignment of all its
# parameters: see the last test.
MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "swapped by .half()": swapped,
    "one layer in half": partial(partly, change=lambda layer: layer.half()),
    "inference tensors": torch.inference_mode()(
        partial(assigned, change=lambda tensor: transposed(tensor.half()))
    ),
    "to meta and back": lambda model: model.to("meta").to_empty(device="cpu"),
    "wrapped by PEFT": with_rank,
    "a compiled layer": partial(partly, change=torch.compile),
}


@pytest.mark.parametrize("case", MOVES)
def test_models_that_are_moved(case: str, sampled: Stored) -> None:
    """The next change writes theta_0 + tau_hat, rounded once to each tensor's dtype of then."""
    base, store = sampled
    model, bases = loaded(base, torch.float32), library.load(store)
    start, taus = load(base), {task: reconstructed(bases, task) for task in THREE[1:]}
    live = attach(model, bases)
    live.use("math")
    MOVES[case](model)

    def held() -> dict[str, Tensor]:
        state = model.state_dict()
        own = {n.replace(".base_layer", "").replace("._orig_mod", ""): n for n in state}
        return {name: state[own[name]] for name in start}

    def assert_task(task: str | None) -> None:
        for name, found in held().items():
            want = start[name].float()
            if task is not None:
                want = want + taus[task][name].float()
            assert torch.equal(found, want.to(dtypes[name])), name
        live.verify()

    dtypes = {name: tensor.dtype for name, tensor in held().items()}
    live.use("code")
    assert_task("code")
    with torch.inference_mode():
        live.use("safety")
        assert_task("safety")
        live.reset()
        assert_task(None)


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


def test_copies_by_peft(model, live):
    keys = {"modules_to_save": ["lm_head"], "trainable_token_indices": [1, 2]}
    live.use("math")
    want = state_of(model)
    live.use("code")
    wrapped: Any = with_rank(model, **keys)
    refused("; `unload()` the PEFT model first", lambda: live.use("math"))
    wrapped.unload()
    live.use("math")
    assert_bits(model, want)
    wrapped = with_rank(model)
    wrapped.merge_adapter()
    refused("`unmerge_adapter()` first", lambda: live.use("code"))
    wrapped.unmerge_adapter()
    live.use("code")


def test_two_stores_of_one_model(model, live, sampled):
    """One moves a part of the tensors; the object of the other may be gone, or see a wrapper."""
    base = {name: tensor.clone() for name, tensor in state_of(model).items()}
    taus = {"x": {name: t + 0.01 * torch.randn_like(t) for name, t in base.items()}}
    few = library.build(base, taus, basis="none", exclude="embed")
    other = attach(model, few, base=base)
    want = state_of(model)
    for attached in (lambda: live, lambda: attach(torch.compile(model), sampled[1])):
        attached().use("math")
        refused("another `attach` of this model has moved model.embed", lambda: other.use("x"))
        live.reset()
        other.use("x")
        other.reset()
        assert_bits(model, want)
    other.use("x")
    live.use("code")  # moves all that the other has moved
    live.verify()


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
    for call in (lambda: live.use({"math": 1}), live.verify):
        refused(changed, call)
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


def test_blocks_and_comparisons(model, live, monkeypatch):
    states = {}
    for tasks in (None, "math", "code"):
        live.reset() if tasks is None else live.use(tasks)
        states[tasks] = state_of(model)
    live.use("code")
    with live.using("math") as inner:
        assert inner is model and live.current == {"math": 1.0}
        assert_bits(model, states["math"])
        with pytest.raises(ZeroDivisionError), live.using({"math": 0.5}):
            raise ZeroDivisionError
        assert_bits(model, states["math"])
        shifted(model)  # a block may change what it likes
        live.reset()
    assert_bits(model, states["code"])
    assert live.current == {"code": 1.0}
    again = "; the model has the weights of {'code': 1.0} again"
    for tasks, said in (({"math": 1e39}, "overflow"), ({"math": 1e39}, again), ("mth", "no task")):
        refused(said, lambda tasks=tasks: live.using(tasks).__enter__())
        assert_bits(model, states["code"])
        assert live.current == {"code": 1.0}

    live.verify()
    weight = model.get_parameter(NORM).detach()
    was = weight[-1].item()
    shifted(model)
    told = (
        f"element 31 is {weight[-1].item()} in the model, {was} in the weights of {{'code': 1.0}}"
    )
    refused(f"tensor `{NORM}`: {told}", live.verify)
    live.reset()
    live.verify()
    assert_bits(model, states[None])


def test_blocks_whose_end_fails(model, live, caplog):
    said = f"{NORM} of the base's files are not in it"
    with pytest.raises(ZeroDivisionError), live.using("math"):
        norm = model.get_submodule("model.norm")
        removed(model)
        raise ZeroDivisionError
    assert said in caplog.text and live.current == {"math": 1.0}
    caplog.clear()
    setattr(model.get_submodule("model"), "norm", norm)  # noqa: B010
    with pytest.raises(library.UserError, match=said), live.using("code"):
        removed(model)
    assert live.current == {"code": 1.0} and "ERROR" not in caplog.text


def test_blocks_that_end_out_of_order(model, live, caplog):
    start = state_of(model)
    said = "`using` blocks ended out of order, and the model has the base's weights again"

    async def work(task: str, turns: int) -> None:
        with live.using(task):
            for _ in range(turns):
                await asyncio.sleep(0)
            if turns == 3:
                raise ZeroDivisionError

    async def both(first: int, second: int) -> list[BaseException | None]:
        works = work("math", first), work("code", second)
        return await asyncio.gather(*works, return_exceptions=True)

    early, late = asyncio.run(both(1, 3))
    assert isinstance(early, library.UserError) and said in str(early)
    assert isinstance(late, ZeroDivisionError) and said in caplog.text
    assert live.current == {}
    assert_bits(model, start)
    assert asyncio.run(both(2, 0)) == [None, None]  # one inside the other


def test_threads(model, live):
    """One change at a time; a block keeps others out."""
    states = {}
    for task in THREE:
        live.use(task)
        states[task] = state_of(model)
    start = threading.Barrier(6)

    def work(number: int) -> None:
        start.wait()
        for turn in range(number, number + 6):
            task = THREE[turn % len(THREE)]
            if number % 2:
                live.use(task)
                continue
            with live.using(task):
                assert_bits(model, states[task])
                assert live.current == {task: 1.0}

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert live.current is not None
    (task,) = live.current
    assert_bits(model, states[task])
    live.verify()


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCALES = st.dictionaries(
    st.sampled_from(THREE), st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0]), min_size=1
)
STEPS = st.one_of(
    st.tuples(st.just("use"), SCALES),
    st.tuples(st.sampled_from(["using", "raise"]), SCALES),
    st.tuples(st.sampled_from(["reset", "refused", "transposed"]), st.just({})),
    st.tuples(st.sampled_from(["to", "assign"]), st.sampled_from(DTYPES)),
)


@settings(max_examples=25, deadline=None)
@given(steps=st.lists(STEPS, max_size=12))
def test_any_sequence_against_float64(steps: list[tuple[str, Any]]) -> None:
    """Of weights whose sums are exact in float32, so that only the last rounding counts."""
    generator = torch.Generator().manual_seed(0)

    def exact(*shape: int, most: int = 128) -> Tensor:
        return torch.randint(-most, most, shape, generator=generator) / 64

    base = {"0.weight": exact(7, 5), "0.bias": exact(7), "1.weight": exact(5, 7)}
    taus = {task: {name: exact(*t.shape, most=8) for name, t in base.items()} for task in THREE}
    tuned = {task: {name: base[name] + tau[name] for name in base} for task, tau in taus.items()}
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5, bias=False))
    model.load_state_dict(base)
    live = attach(model, library.build(base, tuned, basis="none"), base)

    def assert_at(scales: Mapping[str, float]) -> None:
        assert live.current == scales
        for name, found in model.state_dict().items():
            want = base[name].double()
            for task, scale in scales.items():
                want = want + scale * taus[task][name].double()
            assert torch.equal(found, want.to(found.dtype)), name
        live.verify()

    now: dict[str, float] = {}
    for step, given_ in steps:
        if step in ("to", "assign", "transposed"):
            if step == "to":
                model.to(given_)
            elif step == "assign":
                assigned(model, lambda tensor, dtype=given_: tensor.to(dtype, copy=True))
            else:
                assigned(model, transposed)
            assert live.current == now
            continue
        if step == "refused":
            refused("no task 'mth'", lambda: live.use({"math": 1.0, "mth": 1.0}))
            continue
        if step in ("using", "raise"):
            with suppress(ZeroDivisionError), live.using(given_):
                assert_at(given_)
                if step == "raise":
                    raise ZeroDivisionError
        elif step == "use":
            live.use(now := given_)
        else:
            live.reset()
            now = {}
        assert_at(now)
