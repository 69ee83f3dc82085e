"""One contract for every form of a store's vectors: dense, lossless, sampled, adapters, mixed."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import worlds
import xxhash
import zstandard
from commands import contents, tvb
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import TASKS, as_bin, llama, load
from torch import Tensor
from worlds import EMBEDDING, HEAD, TIED, Models, State, configure, hub, save, tensors_of

import tvb_mergekit
from tvb_mergekit.core.methods.wudi import interference_free
from tvb_mergekit.store import store as stores
from tvb_mergekit.store.store import Bases
from tvb_mergekit.tensors import coding, units
from tvb_mergekit.tensors.coding import BLOCK, Coded, Draw
from tvb_mergekit.tensors.stream import Item, Part, StateDict

# A reader of coded files that knows only docs/files.md and the programs there

MANUAL = (Path(__file__).parent.parent / "docs" / "files.md").read_text(encoding="utf-8")
CODED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I64": torch.int64}
SIZE = 131_072  # elements of a block


def program(name: str) -> Callable[..., Any]:
    """The manual's function of this name."""
    (text,) = re.findall(rf"```python\n(def {name}\(.*?)```", MANUAL, re.DOTALL)
    names = dict[str, Any](np=np, xxhash=xxhash)
    exec(text, names)
    found: Callable[..., Any] = names[name]
    return found


def coded(file: Path, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model without loss, or the task vector of a sample."""
    text, made = file.read_bytes(), dict[str, Tensor]()
    length = int.from_bytes(text[:8], "little")
    header, data = json.loads(text[8 : 8 + length]), text[8 + length :]
    said = json.loads(header["__metadata__"]["tvb_coded"])
    assert said["version"] == 1
    for name, (dtype, shape) in said["tensors"].items():
        start, stop = header[name]["data_offsets"]
        numel, own = int(np.prod(shape)), CODED[dtype]
        sampled = said["share"] < 1
        out = torch.zeros(numel, dtype=torch.float32 if sampled else own)
        index, share = stop - 13 * -(-numel // SIZE), said["share"] if len(shape) > 1 else 1
        for block, first in enumerate(range(0, numel, SIZE)):
            count = min(SIZE, numel - first)
            places = np.arange(count)
            if share < 1:
                places = np.array(program("places")(said["seed"], share, name, block, count), int)
            length, form = int.from_bytes(data[index : index + 4], "little"), data[index + 4]
            content = data[start : start + length]
            if form:
                content = zstandard.ZstdDecompressor().decompress(content)
            if form == 2:
                near = base[name].reshape(-1)[first + places]
                units = np.frombuffer(raw(near), np.uint16)
                mantissa = {"BF16": 7, "F16": 10}[dtype]
                content = program("theta")(np.frombuffer(content, np.uint8), units, mantissa)
                content = content.tobytes()
            assert len(content) == len(places) * own.itemsize
            digest = int.from_bytes(data[index + 5 : index + 13], "little")
            assert xxhash.xxh3_64_intdigest(content) == digest
            if content:
                theta = torch.frombuffer(bytearray(content), dtype=own)
                if sampled:
                    near = base[name].reshape(-1)[first + places]
                    theta = (theta.float() - near.float()) / share
                out[first + places] = theta
            start, index = start + length, index + 13
        made[name] = out.view(shape)
    return made


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor's elements."""
    flat = tensor.reshape(-1).clone()
    return flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""


def same(found: Tensor, want: Tensor) -> bool:
    """Whether two tensors are the same to the bit: NaN is itself, and -0 is not 0."""
    return (found.dtype, found.shape, raw(found)) == (want.dtype, want.shape, raw(want))


# Stores of each form

FOUR = TASKS[:4]
ONE_LAYER = partial(llama, num_hidden_layers=1)
SHARE = 0.25
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUERY, LINEAR = {"target_modules": ["q_proj", "up_proj"]}, {"r": 3}
ATTENTION = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "use_rslora": True}


def models(dtype: str, folder: Path, make: Callable[[], Any] = ONE_LAYER, **more: Any) -> Models:
    return hub(make, folder, dtypes=(DTYPES[dtype],), scale=0.002, **{"tasks": FOUR, **more})


def adapters(folder: Path) -> Models:
    return worlds.adapters(folder, (QUERY, ATTENTION, LINEAR, QUERY), ONE_LAYER, FOUR)


def mixed(folder: Path) -> Models:
    """On a base in bfloat16 such a model, an adapter, and a model in float32."""
    from test_lora import train

    made = models("bfloat16", folder)
    made.listed = [*made.listed[:1], f"{made.base}+{folder / 'code'}", *made.listed[2:]]
    change = train(made.base, folder / "code", **QUERY)
    made.states[2] = {name: t.double() + change[name] for name, t in made.states[0].items()}
    made.states[3] = {name: t.float() * 1.001 for name, t in made.states[3].items()}
    save(Path(made.listed[2]), made.states[3])
    return made


# Form -> four models, how a store of them is built, and the codecs of its vectors
FORMS: dict[str, tuple[Callable[[Path], Models], tuple[str, ...], list[str]]] = {
    "dense, float32": (partial(models, "float32"), (), ["dense"] * 4),
    "dense, bfloat16": (partial(models, "bfloat16"), ("--dtype", "bfloat16"), ["dense"] * 4),
    "lossless, bfloat16": (partial(models, "bfloat16"), ("--lossless",), ["lossless"] * 4),
    "lossless, float16": (partial(models, "float16"), (), ["lossless"] * 4),
    "sampled": (partial(models, "bfloat16"), ("--keep", str(SHARE)), ["sampled"] * 4),
    "adapters": (adapters, (), ["adapter"] * 4),
    "mixed": (mixed, (), ["lossless", "adapter", "dense", "lossless"]),
}
OWN = {0: {"weight": 2.0}, 3: {"weight": -3.0}}
WEIGHTS = torch.tensor([2.0, 1.0, 1.0, -3.0], dtype=torch.float64)


def build(made: Models, out: Path, words: Sequence[str], tasks: Sequence[str]) -> Bases:
    own = {k: OWN[n] for k, task in enumerate(tasks) if (n := FOUR.index(task)) in OWN}
    return made.build(out, *words, tasks=tasks, own=own)


def tau_of(made: Models, number: int, names: Sequence[str]) -> Tensor:
    """A task vector without its weight, flat, in float64."""
    base, model = made.states[0], made.states[1 + number]
    return torch.cat([(model[n].double() - base[n].double()).flatten() for n in names])


def vector(state: State, names: Sequence[str]) -> Tensor:
    return torch.cat([state[name].double().flatten() for name in names])


def deltas(bases: Bases, base: State) -> list[dict[str, Tensor]]:
    """The vectors as differences from the base."""
    found = zip(tensors_of(bases), bases.facts.vectors, strict=True)
    return [
        {n: t.float() - base[n].float() for n, t in state.items()}
        if each.codec == "lossless"
        else dict(state)
        for state, each in found
    ]


def by_the_format(store: Path, each: Any, made: Models, number: int) -> State | None:
    """A vector as docs/files.md has it; None of an adapter, whose factors are compared."""
    file = store / each.weights.file
    if each.codec in ("lossless", "sampled"):
        return coded(file, made.states[0])
    if each.codec == "dense":
        return load_file(file)
    folder = Path(str(made.listed[number]).split("+")[1])
    want, found = load_file(folder / "adapter_model.safetensors"), load_file(file)
    assert found.keys() == want.keys() and all(same(found[n], want[n]) for n in want)
    with safe_open(file, "pt") as opened:
        config = json.loads(opened.metadata()["tvb_adapter"])
    assert config == json.loads((folder / "adapter_config.json").read_text())
    return None


def others(folder: Path) -> dict[str, bytes]:
    """The files of a model that are not weights, nor a model card."""
    weights = (".safetensors", ".bin", ".index.json", "README.md")
    files = (f for f in folder.iterdir() if f.is_file() and not f.name.endswith(weights))
    return {f.name: f.read_bytes() for f in files}


def check_copy(model: Path, out: Path) -> None:
    """A model without loss: every tensor and every other file, byte for byte."""
    want, found = load(model), load(out)
    assert want.keys() == found.keys()
    assert all(same(found[name], want[name]) for name in want)
    assert others(model) == others(out)


def check_export(made: Models, number: int, delta: State, codec: str, out: Path) -> None:
    """The model, or theta_0 plus the vector in float64, rounded once."""
    if codec == "lossless":
        check_copy(Path(made.listed[number]), out)
        return
    assert others(out) == others(made.base)
    found = load(out)
    assert found.keys() == made.states[0].keys()
    for name, tensor in load(made.base).items():
        change = delta[name].double() if name in delta else torch.zeros_like(tensor).double()
        want = (tensor.double() + change).to(tensor.dtype)
        eps = torch.finfo(tensor.dtype).eps
        torch.testing.assert_close(found[name], want, rtol=eps, atol=1e-7)
        if tensor.dtype != torch.float32:
            assert (found[name] != want).float().mean() < 0.01, name


@pytest.mark.parametrize("case", FORMS)
def test_vectors_come_back(case: str, tmp_path: Path, monkeypatch: Any) -> None:
    """By the library and by the format; exports, also after store and base have moved together."""
    (make, words, codecs), here = FORMS[case], tmp_path / "here"
    made = make(here / "in")
    bases = build(made, here / "store", words, FOUR)
    facts, names, base = bases.facts, bases.facts.tensors, made.states[0]
    assert [each.codec for each in facts.vectors] == codecs and facts.tasks == list(FOUR)
    assert set(names) == base.keys() - made.copied
    taus = torch.stack([tau_of(made, k, names) for k in range(4)]) * WEIGHTS[:, None]
    torch.testing.assert_close(bases.tensors["gram"], taus @ taus.T, rtol=1e-5, atol=1e-7)
    found = deltas(bases, base)
    for k, each in enumerate(facts.vectors):
        tau = taus[k] / WEIGHTS[k]
        off = float((vector(found[k], names) - tau).norm() / tau.norm())
        rounding = {"sampled": 9.0, "dense": 4e-3 if each.dtype == "bfloat16" else 1e-6}
        assert off <= rounding.get(each.codec, 1e-6), each.name
        if each.codec != "dense":
            assert facts.errors[each.name] == pytest.approx(off, rel=1e-5, abs=1e-6)
        assert facts.norms[each.name] == pytest.approx(float(taus[k].norm()), rel=1e-5)
        read = by_the_format(here / "store", each, made, k)
        given = tensors_of(bases)[k]
        assert read is None or all(same(read[name], given[name]) for name in names)
    tvb("inspect", here / "store")
    here.rename(there := tmp_path / "there")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    made = replace(made, base=there / "in/base", listed=[
        str(model).replace(str(here), str(there)) for model in made.listed
    ])  # fmt: skip
    tvb("export", there / "store", "all", "--all", "--quiet", "--base", made.base)
    tvb("export", "../there/store", "one", "--task", "chat", "--quiet", "--base", made.base)
    assert contents(Path("one")) == contents(Path("all/chat"))
    for k, each in enumerate(facts.vectors):
        check_export(made, k, found[k], each.codec, Path("all") / each.name)
    for task in ("math", "chat"):  # of the library, in the base's dtype
        state = tvb_mergekit.reconstruct(stores.load(there / "store"), made.base, task)
        assert all(same(state[n], t) for n, t in load(Path("all") / task).items())


def alike(found: Bases, want: Bases, base: State) -> None:
    """The same vectors to the bit, and the same numbers up to rounding."""
    one, two = found.facts, want.facts
    assert one.tasks == two.tasks and one.tensors == two.tensors
    for mine, theirs in zip(one.vectors, two.vectors, strict=True):
        files = {key: getattr(mine, key) for key in ("weights", "files", "gates")}
        assert mine == theirs.model_copy(update=files)
        assert mine.gates and theirs.gates
        assert {Path(f.file).name: f.xxh3_128 for f in mine.files} == {
            Path(f.file).name: f.xxh3_128 for f in theirs.files
        }
    for left, right in zip(deltas(found, base), deltas(want, base), strict=True):
        assert all(same(left[name], right[name]) for name in right)
    for key in ("norms", "errors"):
        assert getattr(one, key) == pytest.approx(getattr(two, key), rel=1e-5, abs=1e-7), key
    assert one.parameters == two.parameters
    loose = 0.2 if any(each.codec == "sampled" for each in two.vectors) else 1e-5
    gram = want.tensors["gram"]
    bound = loose * float(gram.diagonal().max())
    torch.testing.assert_close(found.tensors["gram"], gram, rtol=loose, atol=bound)
    assert torch.equal(found.encoder, want.encoder) and torch.equal(found.decoder, want.decoder)


@pytest.mark.parametrize("case", FORMS)
def test_a_task_joins_leaves_and_comes_back(case: str, tmp_path: Path) -> None:
    """As if the store had been built so; then they all go over to Algorithm 1."""
    (make, how, _), store = FORMS[case], tmp_path / "store"
    made = make(tmp_path / "in")
    base = made.states[0]
    build(made, store, how, FOUR[:3])
    (store / "vectors" / "mine.txt").touch()
    words = ("--task", "chat", "--weight", -3, "--quiet")
    tvb("add", store, made.listed[3], *words)
    grown, whole = stores.load(store), build(made, tmp_path / "four", how, FOUR)
    alike(grown, whole, base)
    assert grown.facts.model_bytes == whole.facts.model_bytes
    if case == "sampled":  # of the models, as it was known before the samples were drawn
        old, new = (each.tensors["gram"][:3, :3] for each in (whole, grown))
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-7)
    tvb("remove", store, "--task", "code")
    rest = ["math", "safety", "chat"]
    small = build(made, tmp_path / "rest", how, rest)
    if case != "adapters":  # whose store has the tensors that any of its adapters changed
        alike(stores.load(store), small, base)
    for tasks in (list(FOUR), rest, list(FOUR)):
        tvb("undo", store)
        assert stores.load(store).tasks == tasks
    alike(stores.load(store), whole, base)
    tvb("add", store, made.listed[0], "--task", "again", "--budget", 3, "--force", "--quiet")
    bases = stores.load(store)
    assert bases.num_bases == 3 and not bases.facts.whole and bases.tasks == [*FOUR, "again"]
    known = {error is not None for error in bases.facts.errors.values()}
    assert known == {case != "sampled"}
    names = bases.facts.tensors
    old = [vector(delta, names) for delta in deltas(whole, base)]
    taus = torch.stack([*old, tau_of(made, 0, names)], 1) * torch.cat([WEIGHTS, torch.ones(1)])
    want = taus @ bases.encoder
    got = torch.stack([vector(state, names) for state in tensors_of(bases)], 1)
    eps = 4e-3 if case == "dense, bfloat16" or bases.facts.vectors[0].dtype != "float32" else 1e-5
    assert float((got - want).norm()) <= eps * float(want.norm())
    tvb("add", store, made.listed[1], "--task", "more", "--force", "--quiet")
    tvb("inspect", store)
    state = stores.read_store(store)
    assert state.previous and not any(each.gates for each in state.vectors)  # of tasks alone
    named = {"store.json", ".lock", "vectors/mine.txt", *state.held, *state.previous.held}
    assert contents(store).keys() == named  # nothing is left behind


# Models whose files need care


def more_tokens(folder: Path) -> Models:
    """A model of more tokens, with a folder, and integers and float32 that the base lacks."""
    made = models("bfloat16", folder)
    model, state = Path(made.listed[1]), dict(made.states[2])
    for name in (EMBEDDING, HEAD):
        state[name] = torch.cat([state[name], torch.randn(2, 32).bfloat16()])
    state |= {"ids": torch.arange(7), "scale": torch.randn(5), "mask": torch.tensor([-torch.inf])}
    save(model, state)
    configure(model, vocab_size=98, note="own")
    (model / "notes.json").mkdir()
    return made


def tied_twice(folder: Path) -> Models:
    made = models("bfloat16", folder, TIED)
    state = made.states[1]
    save(Path(made.listed[0]), {**state, HEAD: state[EMBEDDING] + 0})
    return made


def pickled(folder: Path) -> Models:
    made = models("bfloat16", folder)
    as_bin(Path(made.listed[0]))
    as_bin(made.base, 2)
    return made


BF16: dict[str, Any] = {"dtypes": (torch.bfloat16,), "scale": 0.002, "tasks": FOUR}
COPIES: dict[str, tuple[Callable[[Path], Models], dict[str, Any]]] = {
    "shards": (partial(models, "bfloat16", max_shard_size="30KB"), {}),
    "tied": (partial(models, "bfloat16", make=TIED), {}),
    "tied, twice in one": (tied_twice, {}),
    "untied in one": (partial(worlds.one_untied, **BF16), {"exclude": HEAD}),
    "more tokens": (more_tokens, {"exclude": "embed_tokens|lm_head"}),
    "other order": (partial(worlds.other_order, **BF16), {"extra": {"tokenizer_source": "base"}}),
    "many models": (partial(models, "bfloat16", tasks=[f"task{n}" for n in range(14)]), {}),
    "in PyTorch's format": (pickled, {}),
}


@pytest.mark.parametrize("case", COPIES)
def test_exports_are_the_models(case: str, tmp_path: Path) -> None:
    """Every tensor and every other file; files that models have alike are kept once."""
    make, keys = COPIES[case]
    made, store = make(tmp_path / "in"), tmp_path / "store"
    made.build(store, "--lossless", own={0: {"weight": -2.0}}, **keys)
    tvb("export", store, tmp_path / "all", "--all", "--quiet")
    kept = [(path.name, path.read_bytes()) for path in (store / "files").glob("*/*")]
    assert len(kept) == len({*kept})
    own = {each for model in made.models.values() for each in others(model).items()}
    assert {each for each in kept if each[0] != "rest.safetensors"} == own
    for task, model in made.models.items():
        check_copy(model, tmp_path / "all" / task)


# The code of blocks


SIXTEEN = {torch.bfloat16: 7, torch.float16: 10}


def keep(folder: Path, base: State, *models: State, samples: Sequence[Draw] = ()) -> list[Coded]:
    """The models, or samples, as files next to the tensors of the base that fit."""
    start, sources = StateDict(base), [StateDict(model) for model in models]
    items = []
    for name, tensor in models[0].items():
        fits = name in base and base[name].shape == tensor.shape
        own = Part.of(start, name) if fits else None
        inputs = tuple(Part.of(source, name) for source in sources)
        items.append(Item(name, tuple(tensor.shape), own, inputs))
    paths = [folder / f"{k}.safetensors" for k in range(len(models))]
    coding.keep({path: path.stem for path in paths}, items, samples)
    return [Coded(path, start) for path in paths]


def tuned(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """A base and a model like a fine-tuned one."""
    generator = torch.Generator().manual_seed(seed)
    base = (0.05 * torch.randn(shape, generator=generator)).to(dtype)
    return [base, (base.float() + 1e-4 * torch.randn(shape, generator=generator)).to(dtype)]


# Zeros, subnormal numbers, the largest, infinities and NaNs, from each to each
EDGES = [0, 1, 2, 0x007F, 0x0080, 0x03FF, 0x0400, 0x7BFF, 0x7C00, 0x7F7F, 0x7F80, 0x7FFF]
PAIRS = np.meshgrid(*2 * [np.array([sign | e for sign in (0, 0x8000) for e in EDGES], np.uint16)])


@given(
    st.lists(st.integers(0, 40), max_size=3),
    st.sampled_from([*SIXTEEN]),
    st.sampled_from([0, 1, 4, 200, 2**16]),
    st.sampled_from([1.0, 0.25, 0.9]),
    st.integers(0, 2**32 - 1),
)
@example([2 * BLOCK + 5], torch.bfloat16, 3, 1.0, 0)
@example([3, BLOCK], torch.float16, 2**16, 0.25, 1)
@settings(max_examples=80)
def test_every_pattern_comes_back(shape, dtype, far, share, seed):
    """Any 16 bits next to any 16 bits, by the reader and by the manual's programs; any piece."""
    draw = np.random.default_rng(seed)
    base, theta = PAIRS  # all pairs of edges
    if far:
        base = draw.integers(0, 2**16, shape).astype(np.uint16)
        away = draw.integers(-far + 1, far, shape) * (draw.random(shape) < draw.random())
        theta = (base + away).astype(np.uint16)
    if share < 1:  # differences of numbers
        base, theta = base & 0xBBFF, theta & 0xBBFF
    given = [{"w": torch.from_numpy(np.array(each)).view(dtype)} for each in (base, theta)]
    with tempfile.TemporaryDirectory() as folder:
        (found,) = keep(Path(folder), *given, samples=[Draw(seed, share)])
        read, want = coded(found.path, given[0])["w"], given[1]["w"]
        if share < 1:
            tau = want.float() - given[0]["w"].float()
            kept = read != 0 if tau.ndim > 1 else torch.ones_like(tau).bool()
            scale = share if tau.ndim > 1 else 1
            want = torch.where(kept, tau / scale, torch.zeros(()))
            if tau.ndim > 1 and (count := int(tau.count_nonzero())) > 10_000:
                assert abs(int(kept.sum()) / count - share) < 0.02
        assert torch.equal(read, want) if share < 1 else same(read, want)
        want = read if share < 1 else want
        assert same(found.tensor("w"), want)
        start = draw.integers(0, theta.size + 1)
        stop = draw.integers(start, theta.size + 1)
        part = found.read("w", start, stop, torch.empty(theta.size, dtype=want.dtype))
        assert same(part, want.reshape(-1)[start:stop])


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_bits_are_near_the_conditional_entropy(dtype: torch.dtype, tmp_path: Path) -> None:
    base, theta = tuned(1, (2 * BLOCK,), dtype)
    same_base, (found,) = base.clone(), keep(tmp_path, {"w": base}, {"w": theta})
    patterns = [each.view(torch.int16).numpy().astype(np.int64) for each in (base, theta)]
    order = [each ^ (each >> 15 & 0x7FFF) for each in patterns]
    exponents = patterns[0] >> SIXTEEN[dtype] & (1 << 15 - SIXTEEN[dtype]) - 1
    _, pairs = np.unique((exponents << 32) + order[1] - order[0], return_counts=True)
    _, singles = np.unique(exponents, return_counts=True)
    entropy = (singles @ np.log2(singles) - pairs @ np.log2(pairs)) / len(base)
    assert entropy < 8 * found.nbytes / len(base) < 1.1 * entropy
    assert keep(tmp_path, {"w": base}, {"w": same_base})[0].nbytes < 400


@given(st.integers(0, 2**32 - 1))
def test_damaged_blocks_are_refused(seed):
    """Whatever bytes a frame holds, they are decoded into their own place, or refused."""
    draw = np.random.default_rng(seed)
    base, theta = (t.view(torch.uint16).numpy() for t in tuned(seed, (400,), torch.bfloat16))
    content = np.empty(4 * 400 + 300, np.uint8)
    size, _ = units.pack(base, theta, 7, content, np.empty(260, np.int64))
    damaged = content[: draw.integers(0, size + 1)].copy()
    for place in draw.integers(0, max(len(damaged), 1), draw.integers(0, 4)):
        damaged[place:] = draw.integers(0, 256) if len(damaged) else 0
    around = np.full(3 * len(base), 7, base.dtype)
    fits = units.unpack(damaged, base, 7, around[len(base) : 2 * len(base)])
    assert (around[: len(base)] == 7).all() and (around[2 * len(base) :] == 7).all()
    if np.array_equal(damaged, content[:size]):
        assert fits and np.array_equal(around[len(base) : 2 * len(base)], theta)


def sampled(tau: Tensor, seed: int) -> Tensor:
    """A sample of a small matrix by its definition."""
    made, places = torch.zeros(tau.numel()), Draw(seed, SHARE).places("w", 0, tau.numel())
    made[places] = tau.reshape(-1)[places] / SHARE
    return made.view_as(tau)


@pytest.mark.parametrize("shape", [(40, 30), (6, 50)])
def test_wudi_over_samples(shape: tuple[int, int]) -> None:
    """WUDI with corrected products, by its definition in float64; also where M m < n."""
    taus = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    bases = torch.stack([sampled(tau, k) for k, tau in enumerate(taus)])
    normal, right = torch.zeros(shape[1], shape[1]).double(), torch.zeros(shape).double()
    for base in bases.double():
        square = base.T @ base
        square.diagonal().mul_(SHARE)
        square /= SHARE * base.square().sum()
        normal, right = normal + square, right + base @ square
    values, turned = torch.linalg.eigh(normal)
    gain = torch.where(values > 1e-9, -torch.expm1(-30 * values) / values, 0)
    total = bases.double().sum(0)
    want = total - (total @ normal - right) @ (turned * gain) @ turned.T
    found = interference_free(bases, flow_time=30, shares=[SHARE] * 3)
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-3)
