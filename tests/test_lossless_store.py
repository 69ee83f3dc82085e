"""Stores without loss: exports, merges and changes give the models' own bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import assert_same, merge, recipe, refused, tvb, write
from formats import same
from tiny import TASKS, llama, load
from transformers import AutoModelForCausalLM
from worlds import EMBEDDING, SIX, THREE, Models, configure, hub, other_order, save

import tvb_mergekit
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.facts import checksum, record_of
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors.checkpoint import Checkpoint

EMBEDDINGS = "embed_tokens|lm_head"
ONE_LAYER = partial(llama, num_hidden_layers=1)


def bfloat(make: Callable[[], Any], folder: Path, **options: Any) -> Models:
    return hub(make, folder, dtypes=(torch.bfloat16,), scale=0.002, **options)


def more_tokens(folder: Path) -> Models:
    """A model of more tokens, with a folder, and integers and float32 that the base lacks."""
    made = bfloat(llama, folder)
    model, state = Path(made.listed[1]), dict(made.states[2])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = torch.cat([state[name], torch.randn(2, 32).bfloat16()])
    state |= {"ids": torch.arange(7), "scale": torch.randn(5), "mask": torch.tensor([-torch.inf])}
    save(model, state)
    configure(model, vocab_size=98)
    (model / "notes.json").mkdir()
    return made


def tied_twice(folder: Path) -> Models:
    made = bfloat(partial(llama, tie_word_embeddings=True), folder)
    state = made.states[1]
    save(Path(made.listed[0]), {**state, "lm_head.weight": state["model.embed_tokens.weight"] + 0})
    return made


def other_order_in_bfloat16(folder: Path) -> Models:
    made = other_order(folder)
    for place, state in zip((made.base, *made.models.values()), made.states, strict=True):
        save(place, {name: tensor.bfloat16() for name, tensor in state.items()})
    return made


FAMILIES: dict[str, tuple[Callable[[Path], Models], dict[str, Any]]] = {
    "shards": (partial(bfloat, llama, max_shard_size="30KB"), {}),
    "float16": (partial(hub, llama, dtypes=(torch.float16,), scale=0.002), {}),
    "tied": (partial(bfloat, partial(llama, tie_word_embeddings=True)), {}),
    "tied, twice in one": (tied_twice, {}),
    "more tokens": (more_tokens, {"exclude": EMBEDDINGS}),
    "other order": (other_order_in_bfloat16, {"extra": {"tokenizer_source": "base"}}),
}


def others(folder: Path) -> dict[str, bytes]:
    """The files of a model that are not weights, nor a model card."""
    weights = (".safetensors", ".index.json", "README.md")
    files = (f for f in folder.iterdir() if f.is_file() and not f.name.endswith(weights))
    return {f.name: f.read_bytes() for f in files}


def check_export(model: Path, out: Path) -> None:
    want, found = load(model), load(out)
    assert want.keys() == found.keys()
    assert all(same(found[name], want[name]) for name in want)
    assert others(model) == others(out)


@pytest.mark.parametrize("case", FAMILIES)
def test_exports_are_the_models(case: str, tmp_path: Path) -> None:
    """Every tensor and every other file, of one task and of all; what differs is kept once."""
    make, keys = FAMILIES[case]
    given, store = replace(make(tmp_path / "in"), own={0: {"weight": -2.0}}), tmp_path / "store"
    bases = given.build(store, "--lossless", **keys)
    assert bases.keeps_tasks and bases.facts.store.codec == "lossless"
    assert set(bases.facts.relative_error.values()) == {0.0}
    tvb("export", store, "--all", tmp_path / "all", "--quiet")
    tvb("export", store, tmp_path / "code", "--task", "code", "--quiet")
    check_export(given.models["code"], tmp_path / "code")
    base = others(given.base)
    for task, model in given.models.items():
        check_export(model, tmp_path / "all" / task)
        kept = {file.name for file in (store / task).glob("files/*")}
        assert kept == {name for name, text in others(model).items() if base.get(name) != text}
        file = store / task / "rest.safetensors"
        rest = set(Checkpoint.open(file).tensors) if file.is_file() else set()
        reordered = case == "other order" and task == "code"
        assert (EMBEDDING in rest) == (reordered or "exclude" in keys)
    tvb("inspect", store)
    tvb("export", store, tmp_path / "32", "--task", "math", "--dtype", "float32")
    want = load(given.models["math"])
    assert all(same(tensor, want[name].float()) for name, tensor in load(tmp_path / "32").items())
    assert json.loads((tmp_path / "32" / "config.json").read_text())["dtype"] == "float32"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made = bfloat(ONE_LAYER, tmp_path_factory.mktemp("family"), tasks=SIX)
    configure(made.models["code"], note="own")
    state = dict(load(made.models["code"]))
    state["model.norm.weight"][:2] = torch.tensor([-0.0, 1e-12])  # a sum would lose them
    save(made.models["code"], state)
    return replace(made, own={0: {"weight": 2.0}})


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Such models in float32."""
    return hub(ONE_LAYER, tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def built(family: Models, tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return family.build(tmp_path_factory.mktemp("built") / "store", "--lossless", tasks=TASKS)


ALL, SOME = slice(None), slice(1, 4)
FORGET = {"forget": "code", "alpha": 1}
# method, keys, how many of the tasks
MERGES: dict[str, tuple[str, dict[str, Any], slice]] = {
    "addition": ("basis_ta", {"basis": "none"}, ALL),
    "addition of some": ("basis_ta", {"basis": "none"}, SOME),
    "ae": ("basis_ta", {"num_bases": 2, "steps": 50}, ALL),
    "balanced": ("basis_ties", {"basis": "balanced", "num_bases": 2}, ALL),
    "balanced, of some": ("basis_ties", {"basis": "balanced", "num_bases": 2}, SOME),
    "ties": ("basis_ties", {"basis": "none"}, ALL),
    "iso": ("basis_iso", {"basis": "none"}, ALL),
    "tsvm": ("basis_tsvm", {"basis": "none"}, ALL),
    "wudi": ("basis_wudi", {"basis": "none"}, ALL),
    "wudi of some": ("basis_wudi", {"basis": "none"}, SOME),
    "pca": ("basis_negate", {"basis": "pca", "num_bases": 2, **FORGET}, ALL),
    "pca of some": ("basis_negate", {"basis": "pca", "num_bases": 2, **FORGET}, SOME),
    "excluded": ("basis_ta", {"basis": "balanced", "exclude": "mlp"}, ALL),
}


@pytest.mark.parametrize("case", MERGES)
def test_merges_are_those_of_the_models(case, family, built, tmp_path):
    """To the bit, by recipes over the store and by the library."""
    method, keys, chosen = MERGES[case]
    tasks, own = TASKS[chosen], family.own if chosen is ALL else {}
    want = family.merge(method, tmp_path / "models", tasks=tasks, own=own, **keys)
    over = recipe(method, family.base, [built.path / task for task in tasks], {}, **keys)
    assert_same(merge(over, tmp_path / "store"), want)
    if method != "basis_negate" and chosen is ALL:
        dtype = want.tensors["model.norm.weight"].dtype
        state = tvb_mergekit.merge(built, family.base, method, dtype=dtype, **keys)
        assert all(same(state[name], tensor) for name, tensor in want.tensors.items())


def test_a_live_model(
    family: Models, built: Bases, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = AutoModelForCausalLM.from_pretrained(family.base, dtype=torch.bfloat16)
    live = tvb_mergekit.attach(model, built.path)
    for task in TASKS[:2]:
        live.use(task)
        want, found = load(family.models[task]), model.state_dict()
        assert all(same(found[name], want[name]) for name in want)
    live.use({"math": 0.5, "code": 0.25})
    start = load(family.base)
    for name, tensor in model.state_dict().items():
        taus = [load(family.models[t])[name].float() - start[name].float() for t in TASKS[:2]]
        assert same(tensor, (start[name].float() + 0.5 * taus[0] + 0.25 * taus[1]).bfloat16())
    live.reset()
    store = family.build(tmp_path / "store", "--lossless", tasks=TASKS, exclude="lm_head")
    tvb_mergekit.attach(model, store.path).use("math")
    assert caplog.text.count("left out of") == 1 and "lm_head.weight: left out" in caplog.text
    assert same(model.state_dict()["lm_head.weight"], start["lm_head.weight"])


def test_a_weighted_vector_is_not_its_model(family: Models, built: Bases, tmp_path: Path) -> None:
    """Basis 0 of the store is the task vector of `math` times its weight of 2."""
    tvb("export", built.path, tmp_path / "out", "--basis", 0, "--quiet")
    start, model = load(family.base), load(family.models["math"])
    for name, tensor in load(tmp_path / "out").items():
        tau = model[name].float() - start[name].float()
        assert same(tensor, (start[name].float() + 2 * tau).bfloat16())


def test_what_inspect_says(family: Models, built: Bases, tmp_path: Path) -> None:
    file = write(family.recipe(), tmp_path / "r")
    made = tvb("build", file, tmp_path / "store", "--lossless", "--quiet").stdout
    assert "; every bit comes back\n" in made
    said = tvb("inspect", built.path, "--plot", tmp_path / "s.svg").output
    assert "Every bit comes back; storing changes the sum that addition adds by 0 of" in said
    found = json.loads(tvb("inspect", built.path, "--json").output)
    assert [each["relative_error"] for each in found["kept"]["vectors"]] == [0.0] * len(TASKS)
    assert sum(each["bytes"] for each in found["kept"]["vectors"]) == built.facts.bytes


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "a bit of a block": (
        "code/model.safetensors",
        lambda data: data[:-4000] + bytes([data[-4000] ^ 1]) + data[-3999:],
        "code/model.safetensors: tensor `",
    ),
    "of the list": ("code/original.json", lambda data: b"[" + data[1:], "original.json: cannot be"),
    "a name in the list": (
        "code/original.json",
        lambda data: data.replace(b"embed_tokens", b"embed_tokenz"),
        "original.json: cannot be read (not what was stored)",
    ),
    "another file": (
        "code/files/config.json",
        lambda data: data.replace(b"own", b"OWN"),
        "code/files/config.json: missing or changed",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found(case: str, built: Bases, family: Models, tmp_path: Path) -> None:
    """By `tvb inspect`, and by whoever reads it, in a line that names the file."""
    store = Path(shutil.copytree(built.path, tmp_path / "store"))
    name, damage, message = DAMAGE[case]
    (store / name).write_bytes(damage((store / name).read_bytes()))
    assert name in refused("inspect", store) and "checksum" in refused("inspect", store)
    assert message in refused("export", store, tmp_path / "out", "--task", "code", "--quiet")
    assert not (tmp_path / "out").exists()


def test_a_hostile_store_writes_nothing_outside(built: Bases, tmp_path: Path) -> None:
    """Its list of files names a path, with the checksums that belong to it."""
    store = Path(shutil.copytree(built.path, tmp_path / "store"))
    (store / "evil.txt").write_text("evil")
    about = store / "code/original.json"
    said = json.loads(about.read_text())
    said["files"]["../../evil.txt"] = record_of(store / "evil.txt").xxh3_128
    about.write_text(json.dumps(said))
    facts = store / "basis.json"
    text = json.loads(facts.read_text())
    text["store"]["files"]["code/original.json"] = record_of(about).model_dump()
    facts.write_text(json.dumps({**text, "checksum": checksum(text)}))
    message = refused("export", store, tmp_path / "deep/out", "--task", "code", "--quiet")
    assert "a file has a path instead of a name" in message
    assert not (tmp_path / "deep/evil.txt").exists() and not (tmp_path / "evil.txt").exists()


MISTAKES: dict[str, tuple[str, str]] = {
    "with a basis": ("build {b} {o} --lossless", "keeps all tasks: leave out the keys of a basis"),
    "over itself": ("build {l} {o} --lossless", "is a vector of a store: list the model"),
    "float32": ("build {f} {o} --lossless", "`math` has float32, the base float32. Save all"),
    "a wide base": ("build {w} {o} --lossless", "`math` has bfloat16, the base float32. Save all"),
    "an adapter and a budget": ("add {s} {a} --task new --budget 9", "is an adapter: merge it"),
}


def adapter(family: Models, folder: Path) -> Path:
    pair = {"lora_A": torch.ones(2, 32), "lora_B": torch.ones(32, 2)}
    place, layer = folder / "adapter", "base_model.model.model.layers.0.self_attn.q_proj"
    place.mkdir()
    save(place, {f"{layer}.{side}.weight": tensor for side, tensor in pair.items()})
    (place / "model.safetensors").rename(place / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (place / "adapter_config.json").write_text(json.dumps(config))
    return place


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line(case, wide, family, built, tmp_path):
    words, message = MISTAKES[case]
    places = {
        "r": write(family.recipe(), tmp_path / "r"),
        "b": write(family.recipe(basis="balanced"), tmp_path / "b"),
        "f": write(wide.recipe(), tmp_path / "f"),
        "w": write(family.recipe() | {"base_model": str(wide.base)}, tmp_path / "w"),
        "l": write(
            family.recipe() | {"models": [{"model": str(built.path / "code")}]}, tmp_path / "l"
        ),
        "o": tmp_path / "out",
        "s": built.path,
        "m": family.models["poems"],
        "a": f"{family.base}+{adapter(family, tmp_path)}",
    }
    assert message in refused(*words.format(**places).split())
    assert not (tmp_path / "out").exists()


def test_the_library(family: Models, tmp_path: Path) -> None:
    models = {task: family.models[task] for task in THREE}
    made = tvb_mergekit.build(family.base, models, tmp_path / "s", lossless=True)
    for task in THREE:
        found, want = tvb_mergekit.reconstruct(made, family.base, task), load(models[task])
        assert all(same(found[name], want[name]) for name in want)
    with pytest.raises(UserError, match="give `out`"):
        tvb_mergekit.build(family.base, models, lossless=True)


def test_the_default_of_a_store_of_all_tasks(family: Models, wide: Models, tmp_path: Path) -> None:
    """`basis: none` without another choice; models in float32, or a dtype, give a dense store."""
    for models, words, codec in (
        (family, (), "lossless"),
        (family, ("--dtype", "bfloat16"), "dense"),
        (wide, (), "dense"),
    ):
        out = tmp_path / f"{codec}-{len(words)}-{models is wide}"
        assert models.build(out, *words, basis="none").facts.store.codec == codec
