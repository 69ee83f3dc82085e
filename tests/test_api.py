"""The library on state dicts, folders and files (merges: test_merges.py)."""

import doctest
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import commands
import huggingface_hub
import peft
import pytest
import torch
from commands import contents, ready
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file
from tiny import TASKS, family, llama, load
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM
from worlds import EMBEDDING, HEAD, MIXED, THREE, TIED, World, hub, state_dicts

import tvb_mergekit as tvb
from tvb_mergekit.store import api
from tvb_mergekit.store import attach as attaching
from tvb_mergekit.tensors.checkpoint import Checkpoint, tie

State = dict[str, Tensor]


def refuses(said: str, call: Callable[[], object]) -> None:
    with pytest.raises(tvb.UserError) as caught:
        call()
    assert said in str(caught.value) and "\n" not in str(caught.value), str(caught.value)


def test_mistakes_are_user_errors(world: World, tmp_path: Path) -> None:
    base, *states = map(dict, world("five").states)
    models = dict(zip(TASKS, states, strict=True))
    bases = tvb.build(base, models, tmp_path / "store", basis="pca", num_bases=2)
    ae, balanced = tvb.build(base, models, basis="ae", steps=2), {"compress": "balanced"}
    three = tvb.build(base, models, basis="balanced", num_bases=3)
    other = {n: t + 1 if t.is_floating_point() else t for n, t in base.items()}
    short = {**models, "code": models["code"] | {"bias": torch.zeros(3)}}
    rows, twice = (dict.fromkeys(("embed", "head"), n * torch.ones(9, 5)) for n in (1, 2))
    own = {"embed": torch.randn(9, 5), "head": torch.randn(9, 5)}  # a tensor that is tied
    tied = tvb.build(rows, {"a": twice}, basis="none")
    math, store = models["math"], tmp_path / "store"
    vector = store / "vectors/B0-1.safetensors"
    for message, call in {
        "unknown key `num_base`": lambda: tvb.build(base, models, num_base=2),
        "compress by ae, or build": lambda: tvb.add(ae, base, math, "new", **balanced),
        "the budget is 1: expected 2": lambda: tvb.add(three, base, math, "new", budget=1),
        "has shape": lambda: tvb.build(base, short),
        "belongs to the base": lambda: tvb.merge(bases, other),
        "depends on 'zzz'": lambda: tvb.merge(bases, base, "basis_iso", matrices="zzz"),
        "and the weights of": lambda: tvb.reconstruct(bases, other, "math"),
        "nothing to undo": lambda: tvb.undo(store),
        "is a vector of a store": lambda: tvb.build(base, {"x": vector}),
        "keep all tasks: leave out": lambda: tvb.build(base, models, "s", keep=0.5, num_bases=2),
        "same tensor as embed": lambda: tvb.add(tied, rows, own, "c", budget=3),
    }.items():
        refuses(message, call)
    assert {path.name for path in tmp_path.iterdir()} == {"store"} and not Path("s").exists()
    tvb.build(base, models, tmp_path / "tuned", basis="none", lambda_=0.3)
    assert ready(tmp_path / "tuned", "add")["parameters"]["lambda"] == 0.3


def test_doctests() -> None:
    for module, least in ((api, 4), (attaching, 3)):
        found = doctest.testmod(module)
        assert found.attempted >= least and not found.failed


# What is left out of the task vectors: said in a warning, refused where it is most


Change = Callable[[State], State]
SIZES = {"a": (40,), "b": (30,), "c": (5,), "d": (5,), "e": (5,), "head": (15,)}


def without(*names: str, **more: object) -> Change:
    return lambda given: {n: t for n, t in given.items() if n not in names} | more


X, MOST = "not in x, so the base's: ", "% of the base would be left out"
USES = (EMBEDDING, HEAD)
# Changes of the base, x and y, keys of the build, and how the line begins
LEFT_OUT: list[tuple[tuple[Change, Change, Change], dict[str, Any], str]] = [
    ((dict, without("c", "d", "e", "head"), dict), {}, f"{X}c, d, e and 1 more"),
    ((without("head"), dict, dict), {}, "not in the base, and so not in the merge: head"),
    # not floating point, no tensor, excluded, tied, and whole
    ((dict, without("steps", more=torch.tensor(1), epoch=3), dict), {}, ""),
    ((dict, without("head", z_head=torch.ones(1)), dict), {"exclude": "head"}, ""),
    (tuple(without(**dict.fromkeys(USES[:n], torch.ones(2))) for n in (1, 2, 1)), {}, ""),
    ((dict, without(*SIZES), dict), {}, f"100 {MOST}: {X}a, b"),
    ((dict, without("a"), without("b")), {}, f"70 {MOST}"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "keys", "said"), LEFT_OUT)
def test_what_is_left_out_is_said_or_refused(changes, keys, said, tmp_path):
    made = state_dicts(tmp_path, "safetensors", tasks=("x", "y"), sizes=SIZES)
    base, x, y = (change(dict(s)) for change, s in zip(changes, made.states, strict=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # garbage of other tests
        try:
            tvb.build(base, {"x": x, "y": y}, basis="none", **keys)
        except tvb.UserError as error:
            assert str(error).startswith(said or "nothing") and MOST in said
            return
    assert MOST not in said
    assert all(warning.category is UserWarning for warning in caught)
    assert said in [str(w.message) for w in caught] or not (said or caught)


# A base on the Hub


def test_the_base_of_a_store_is_downloaded(tmp_path: Path, monkeypatch: Any) -> None:
    """The remote repository `org/base`, without what no merge reads; to `cache` beside it."""
    remote, cached = tmp_path / "remote", tmp_path / "cache"
    unread = {"pytorch_model.bin", "notes.md", "original/model.safetensors"}

    def download(name: str, revision: str | None = None, **patterns: Any) -> str:
        assert name == "org/base" and revision in (None, "main")
        for file in filter_repo_objects(sorted(contents(remote)), **patterns):
            (cached / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(remote / file, cached / file)
        return str(cached)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    how = {"dtypes": (torch.bfloat16,), "scale": 0.01, "max_shard_size": "30KB"}
    base, models = family(tmp_path, tasks=TASKS[:2], **how)
    base.rename(remote)
    (remote / "original").mkdir()
    for name in (*unread, "chat_template.jinja"):
        (remote / name).write_text("{{ messages }}")
    tvb.build(Path("org/base"), dict(zip(TASKS, models, strict=False)), "store")
    shutil.rmtree(cached)
    commands.tvb("export", "store", "out", "--task", "math", "--quiet")
    states = load(tmp_path / "out"), load(models[0])
    assert states[0].keys() == states[1].keys()
    assert all(value.equal(states[1][name]) for name, value in states[0].items())
    assert 'base_model: "org/base"' in (tmp_path / "out/README.md").read_text()
    assert not unread & contents(cached).keys() and (cached / "chat_template.jinja").exists()
    live = tvb.attach(AutoModelForCausalLM.from_pretrained(cached), "store")
    assert live.tasks == [*TASKS[:2]]


# A live model that changes tasks: the bits of exports, the base again, and clear refusals


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


@pytest.mark.parametrize("kind", STORES)
def test_the_bits_of_exports_and_of_the_base(kind: str, stored: Any, tmp_path: Path) -> None:
    base, store = stored(kind)
    for dtype, given in ((torch.bfloat16, store), (torch.float32, tvb.load(store))):
        model = loaded(base, dtype)
        start, places = state_of(model), [p.data_ptr() for p in model.parameters()]
        live = tvb.attach(model, given)
        assert live.tasks == list(THREE) and live.current == {}
        for task in ("math", "code"):
            assert live.use(task) is model and live.current == {task: 1.0}
            assert_bits(model, want := tvb.reconstruct(tvb.load(store), base, task, dtype=dtype))
        if dtype == torch.bfloat16:
            commands.tvb("export", store, tmp_path / "out", "--task", "code", "--quiet")
            assert_bits(model, load(tmp_path / "out"))
            assert_bits(loaded(tmp_path / "out"), state_of(model))
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
    model: Any = nn.Sequential(*layers, nn.Embedding(0, 2)).to(memory_format=torch.channels_last)
    model[3].weight = model[2].weight
    base = {n: torch.randint(-128, 128, t.shape) / 64 for n, t in model.state_dict().items()}
    base["1.num_batches_tracked"] = torch.tensor(3)  # left alone: no task moves it
    taus = {t: {n: torch.randint(-8, 8, b.shape) / 64 for n, b in base.items()} for t in THREE}
    tuned = {task: {n: b + taus[task][n].to(b.dtype) for n, b in base.items()} for task in THREE}
    for state in (base, *taus.values(), *tuned.values()):
        state["3.weight"] = state["2.weight"]
    model.load_state_dict(base)
    live = tvb.attach(model.to(dtype), tvb.build(base, tuned, basis="none"), base)
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


NAMES = f"the model names {UP}.weight"
# Changes of a model -> what is said of a model that is attached after the change; "": nothing
CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "LoRA": (wrap, NAMES),
    "left PiSSA": (lambda m: wrap(m, init_lora_weights="pissa").unload(), "are not the base's"),
    "compiled": (lambda m: setattr(m, "model", torch.compile(m.model)), f"names {EMBEDDING}"),
    "tied": (
        lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight),
        "are not the base's",
    ),
    "cast": (lambda m: m.float(), ""),
    "offloaded": (lambda m: m.to("meta"), "on meta are not the base"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_model_that_changed_is_refused(case: str, stored: Any) -> None:
    """After `attach`, and before if it is not the base's model any more."""
    (change, said), (base, place) = CHANGES[case], stored("sampled")
    live = tvb.attach(model := loaded(base), place)
    live.use("code")
    change(model)
    start = state_of(model)
    for call in (lambda: live.use("math"), live.reset):
        refuses("is not what was attached", call)
        assert live.current == {"code": 1.0}
        assert_bits(model, start)
    change(model := loaded(base))
    refuses(said, lambda: tvb.attach(model, place)) if said else tvb.attach(model, place)


def test_bases_and_models_that_do_not_fit(stored: Any) -> None:
    base, store = stored("sampled")
    model, inner = loaded(base), AutoModel.from_pretrained(base)  # whose names lack `model.`
    refuses(f"the model names {HEAD}, {EMBEDDING}", lambda: tvb.attach(inner, store))
    refuses("belongs to the base", lambda: tvb.attach(model, store, base.parent / "math"))
    live = tvb.attach(model, store)
    live.use("math")
    refuses("are not the base's", lambda: tvb.attach(model, store))
    live.reset()
    tvb.attach(torch.compile(model), store)
    refuses("a later `attach` of this model has replaced this one", lambda: live.use("math"))


def test_threads_take_turns_and_keep_their_number(stored: Any) -> None:
    base, store = stored("sampled")
    live = tvb.attach(model := loaded(base), store)
    states = {task: state_of(live.use(task)) for task in THREE}
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(live.use, THREE * 4))
    with ThreadPoolExecutor(1) as pool:  # a thread that uses PyTorch for the first time
        assert pool.submit(torch.get_num_threads).result() == 3
    torch.set_num_threads(before)
    (task,) = live.current
    assert_bits(model, states[task])


def test_uses_that_fail_leave_right_weights(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    base, store = stored("sampled")
    start = state_of(model := loaded(base, torch.float16))
    live = tvb.attach(model, store)
    want = state_of(live.use("code"))
    refuses("did you mean `math`", lambda: live.use({"code": 1, "mth": 0.5}))
    assert live.current == {"code": 1.0}
    assert_bits(model, want)
    refuses("the scale of 'code' is nan; give a finite", lambda: live.use({"code": float("nan")}))
    refuses("or a mapping task -> scale", lambda: live.use(["code"]))
    refuses("overflow float16 in the output", lambda: live.use({"code": 1e9}))
    assert live.current == {}
    assert_bits(model, start)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(attaching, "writing", lambda live: lambda *_: 1 / 0)
        live.use({"math": 3.0})
    assert live.current is None
    assert_bits(live.use("code"), want)


def test_files_that_are_overwritten_in_place(stored: Any, tmp_path: Path) -> None:
    base, store = (shutil.copytree(each, tmp_path / each.name) for each in stored("sampled"))
    live = tvb.attach(model := loaded(base), store, base)
    want = state_of(live.use("math"))
    (task,) = store.glob("vectors/math*")
    for file, call in ((task, lambda: live.use("math")), (base / "model.safetensors", live.reset)):
        with file.open("r+b") as opened:
            opened.write(file.read_bytes()[:-64] + bytes(range(64)))
        os.utime(file, ns=2 * (file.stat().st_mtime_ns + 1,))  # whatever the clock is
        refuses(f"{file}: was changed after it was opened", call)
        assert live.current == {"math": 1.0}
        assert_bits(model, want)


def test_equal_tensors_of_two_shards_that_were_pickled(tmp_path: Path) -> None:
    value, weight_map = torch.rand(4, 2), dict[str, str]()
    for number, name in enumerate((EMBEDDING, HEAD), 1):
        weight_map[name] = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: value.clone()}, tmp_path / weight_map[name])
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    found = Checkpoint.open(tmp_path)
    tie([found])
    assert found.fingerprint() and all(torch.equal(found.tensor(n), value) for n in weight_map)


def test_a_model_that_changed_since_it_left_and_came_back(tmp_path: Path) -> None:
    base, file, store = {"w": torch.zeros(2, 2)}, tmp_path / "m.safetensors", tmp_path / "s"
    prints = list[str]()
    for task in ("a", "b"):
        save_file({"w": torch.ones(2, 2) * (1 + len(prints))}, file)
        if prints:
            tvb.add(store, base, file, task)
        else:
            tvb.build(base, {task: file}, store, basis="none")
        prints.append(tvb.load(store).facts.fingerprints[str(file)])
    assert prints[0] != prints[1]
    tvb.remove(store, "a")
    assert tvb.load(store).facts.fingerprints[str(file)] == prints[1]
