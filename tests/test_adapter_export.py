"""Exported LoRA adapters: against float64 SVDs, and as PEFT loads them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from commands import contents, recipe, refused, tvb, write
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Dense, expect
from safetensors.torch import load_file, save_file
from test_lora import dense as dense_of
from test_lora import model_of
from tiny import TASKS, family, gpt2, llama, load
from torch import Tensor

from tvb_mergekit.cli.plot import plot_errors
from tvb_mergekit.core import lora
from tvb_mergekit.store.lora import REPORT
from tvb_mergekit.store.lora import TASKS as SCALES
from tvb_mergekit.tensors.adapter import CONFIG, WEIGHTS, Adapter
from tvb_mergekit.tensors.checkpoint import Checkpoint

Delta = dict[str, Tensor]
MODULES = 7 * 2  # of two layers; the output layer is one more


def best(matrix: Tensor, rank: int) -> float:
    """The least norm of an error at a rank."""
    return float(torch.linalg.svdvals(matrix.double())[rank:].norm())


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 20), st.integers(0, 20), st.data())
@settings(deadline=None, max_examples=60)
def test_truncation_is_the_best_of_its_rank(rows, columns, rank, true, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    matrix = torch.randn(rows, true, generator=generator)
    matrix = matrix @ torch.randn(true, columns, generator=generator)
    found = lora.truncate(matrix, rank)
    assert found.shape == (rows, columns) and found.rank == rank
    error = float((found.left.double() @ found.right.double() - matrix.double()).norm())
    assert error <= best(matrix, rank) + 3e-6 * float(matrix.norm())
    again = lora.truncate(matrix.T.contiguous().T, rank)
    assert torch.equal(found.left, again.left) and torch.equal(found.right, again.right)


def test_truncation_of_a_large_matrix(monkeypatch):
    monkeypatch.setattr(lora, "EXACT", 64)
    torch.manual_seed(0)
    low = torch.randn(300, 5) @ torch.randn(5, 400)
    slow = torch.randn(300, 300) @ torch.diag(torch.arange(1, 301) ** -0.3) @ torch.randn(300, 400)
    for matrix in (low, low.T, slow, slow.T):
        found = lora.truncate(matrix, 5)
        error = float((found.left.double() @ found.right.double() - matrix.double()).norm())
        assert error <= 1.001 * best(matrix, 5) + 3e-6 * float(matrix.norm())
        assert torch.equal(found.left, lora.truncate(matrix, 5).left)
        values = lora.leading_values(matrix, 5)
        assert 5 <= len(values) < 300
        torch.testing.assert_close(
            values[:5], torch.linalg.svdvals(matrix.double())[:5], rtol=0.01, atol=0
        )


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=3), st.data()
)
@settings(deadline=None, max_examples=80)
def test_no_other_ranks_keep_more_for_the_same_bytes(values, data):
    spectra = [torch.tensor(sorted(each, reverse=True), dtype=torch.float64) for each in values]
    costs = [data.draw(st.integers(1, 9)) for _ in values]
    every = list(itertools.product(*(range(len(each) + 1) for each in spectra)))

    def kept(ranks: tuple[int, ...] | list[int]) -> float:
        return sum(float(s[:r].square().sum()) for s, r in zip(spectra, ranks, strict=True))

    def price(ranks: tuple[int, ...] | list[int]) -> int:
        return sum(cost * rank for cost, rank in zip(costs, ranks, strict=True))

    share, budget = data.draw(st.floats(0.01, 1)), data.draw(st.integers(0, 60))
    whole = kept([len(each) for each in spectra])
    by_energy = lora.share_ranks(spectra, costs, energy=share)
    by_bytes = lora.share_ranks(spectra, costs, budget=budget)
    assert kept(by_energy) >= share * whole * (1 - 1e-12) and price(by_bytes) <= budget
    for ranks in (by_energy, by_bytes):
        rivals = [each for each in every if price(each) <= price(ranks)]
        assert kept(ranks) >= max(map(kept, rivals)) * (1 - 1e-12)


# Adapters in files


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    base, listed = family(folder, tasks=TASKS[:3], dtypes=(torch.bfloat16,), scale=0.01)
    return {"base": base, **dict(zip(TASKS, listed, strict=False))}


@pytest.fixture(scope="module")
def stores(models: dict[str, Path]) -> dict[str, Path]:
    made, folder = {}, models["base"].parent / "stores"
    kinds: dict[str, tuple[str, list[object]]] = {
        "dense": ("balanced", []),
        "mean": ("pca", []),
        "codes": ("none", ["--bits", "4"]),
        "codes of bases": ("balanced", ["--bits", "8"]),
        "lossless": ("none", ["--lossless"]),
    }
    for name, (basis, words) in kinds.items():
        keys: dict[str, Any] = {"basis": basis} | ({"num_bases": 2} if basis != "none" else {})
        listed = [models[task] for task in TASKS[:3]]
        plan = recipe("basis_ta", models["base"], listed, {0: {"weight": 2.0}}, None, **keys)
        made[name] = folder / name.replace(" ", "-")
        tvb("build", write(plan, made[name]), made[name], "--quiet", *words)
    return made


def test_a_basis_without_a_direction_makes_no_adapter(models, tmp_path):
    """The third component of three task vectors around their mean."""
    listed = [models[task] for task in TASKS[:3]]
    made = recipe("basis_ta", models["base"], listed, basis="pca", num_bases=3)
    tvb("build", write(made, tmp_path / "r"), tmp_path / "s", "--quiet")
    tvb("export", tmp_path / "s", tmp_path / "out", "--lora", "--rank", 2, "--all", "--sums")
    scales = json.loads((tmp_path / "out" / SCALES).read_text())
    paths = {each["path"]: each["id"] for of in scales.values() for each in of}
    assert paths == {"basis-000": 0, "basis-001": 1, "mean": 2}
    assert "mean" in tvb("inspect", tmp_path / "s", "--lora", "--quiet").stdout
    assert paths.keys() <= {file.name for file in (tmp_path / "out").iterdir()}


def by_peft(base: Path, *adapters: Path) -> tuple[Any, list[Delta]]:
    """The model with its adapters, and the float64 change of each weight by each."""
    model: Any = peft.PeftModel.from_pretrained(model_of(base), adapters[0], "0")
    for number, folder in enumerate(adapters[1:], 1):
        model.load_adapter(folder, str(number))
    return model, [deltas(model, str(number)) for number in range(len(adapters))]


def deltas(model: Any, name: str) -> Delta:
    layers = model.base_model.model.named_modules()
    held = {n: m for n, m in layers if name in getattr(m, "lora_A", ())}
    return {f"{n}.weight": m.get_delta_weight(name).double() for n, m in held.items()}


def norm(delta: Delta) -> float:
    return math.sqrt(sum(float(each.square().sum()) for each in delta.values()))


def off(one: Delta, other: Delta) -> float:
    """The distance of two changes, relative to the second."""
    assert set(one) == set(other)
    return norm({name: one[name] - other[name] for name in one}) / norm(other)


def check(base: Path, folder: Path, tau: Delta, ranks: dict[str, int] | None = None) -> Delta:
    """An adapter is the best of its ranks, says its errors, and loads in PEFT as we read it."""
    _, [found] = by_peft(base, folder)
    read = Adapter.open(folder, Checkpoint.open(base).tensors)
    assert off(found, {name: read.tensor(name).double() for name in read.factors}) <= 1e-6
    said, lost = json.loads((folder / REPORT).read_text())["tensors"], 0.0
    assert set(said) == set(tau)
    for name, change in tau.items():
        rank, known = said[name]["rank"], found.get(name, torch.zeros(()))
        error, size = float((known - change).norm()), float(change.norm())
        assert (rank > 0) == (name in found) == ("reason" not in said[name])
        assert said[name]["norm"] == pytest.approx(size, rel=1e-5)
        assert said[name]["relative_error"] == pytest.approx(error / size, rel=1e-4, abs=1e-6)
        assert error <= best(change, rank) * 1.0001 + 1e-6 * size if rank else True
        assert said[name]["bytes"] == rank * sum(change.shape) * 4
        assert ranks is None or rank == ranks.get(name, 0)
        lost += error**2
    total = json.loads((folder / REPORT).read_text())["all"]
    assert total["relative_error"] == pytest.approx(math.sqrt(lost) / norm(tau), rel=1e-4)
    return found


def tau_of(base: Path, model: Path) -> Delta:
    start = load(base)
    return {name: value.double() - start[name].double() for name, value in load(model).items()}


@pytest.mark.parametrize("kind", ["dense", "mean", "codes", "codes of bases", "lossless"])
def test_a_task_of_each_kind_of_store(models, stores, tmp_path, kind):
    store, base = stores[kind], models["base"]
    tvb("export", store, tmp_path / "full", "--task", "math", "--dtype", "float32")
    done = tvb("export", store, tmp_path / "lora", "--task", "math", "--lora", "--rank", 4)
    tau = tau_of(base, tmp_path / "full")
    matrices = {name for name in tau if tau[name].ndim == 2 and "embed" not in name}
    found = check(base, tmp_path / "lora", tau, dict.fromkeys(matrices, 4))
    assert (
        len(found) == MODULES + 1 and "math, reconstructed (without its weight of 2)" in done.stdout
    )
    config = json.loads((tmp_path / "lora" / CONFIG).read_text())
    assert config["r"] == config["lora_alpha"] == 4 and config["rank_pattern"] == {}
    assert config["target_modules"] == sorted({name.split(".")[-2] for name in matrices})
    if kind == "lossless":
        assert off(tau, tau_of(base, models["math"])) == 0
        words = ("--model", models["math"], "--base", base, tmp_path / "two", "--lora")
        tvb("export", *words, "--rank", 4)
        assert (tmp_path / "two" / WEIGHTS).read_bytes() == (
            tmp_path / "lora" / WEIGHTS
        ).read_bytes()


def test_ranks_by_energy_and_by_bytes(models, stores, tmp_path):
    base, tau = models["base"], tau_of(models["base"], models["code"])
    for name, words in (("energy", ("--energy", 0.9)), ("size", ("--size", "30kB"))):
        tvb("export", stores["lossless"], tmp_path / name, "--task", "code", "--lora", *words)
        found = check(base, tmp_path / name, tau)
        whole = norm(
            {each: tau[each] for each in tau if tau[each].ndim == 2 and "embed" not in each}
        )
        kept = 1 - (norm({each: found[each] - tau[each] for each in found}) / whole) ** 2
        size = (tmp_path / name / WEIGHTS).stat().st_size
        assert 0.9 <= kept <= 0.91 if name == "energy" else 28_000 <= size <= 30_000
        config = json.loads((tmp_path / name / CONFIG).read_text())
        assert config["rank_pattern"] == config["alpha_pattern"] and config["rank_pattern"]
        assert len(load_file(tmp_path / name / WEIGHTS)) == 2 * len(found)


@pytest.mark.parametrize("kind", ["dense", "mean", "codes"])
def test_a_store_as_adapters_and_scales(models, stores, tmp_path, kind):
    """PEFT's `cat` of the bases by `tasks.json` is the adapter of a task."""
    out, store = tmp_path / "out", stores[kind]
    tvb("export", store, out, "--lora", "--rank", 2, "--all", *["--sums"] * (kind != "codes"))
    scales = json.loads((out / SCALES).read_text())
    assert list(scales) == list(TASKS[:3])
    folders = sorted(each.parent for each in out.glob(f"*/{CONFIG}"))
    if kind == "codes":
        paths = [[each["path"], each["id"], each["scale"]] for (each,) in scales.values()]
        assert paths == [[task, number, 1.0] for number, task in enumerate(TASKS[:3])]
        tvb("export", store, tmp_path / "one", "--task", "code", "--lora", "--rank", 2)
        assert (tmp_path / "one" / WEIGHTS).read_bytes() == (out / "code" / WEIGHTS).read_bytes()
        return
    names = ["basis-000", "basis-001", *["mean"] * (kind == "mean")]
    assert [each.name for each in folders] == names
    model, parts = by_peft(models["base"], *(out / name for name in names))
    for task, listed in scales.items():
        assert [each["path"] for each in listed] == names
        weights = [each["scale"] for each in listed]
        [joined] = by_peft(models["base"], out / "tasks" / task)[1]
        added = {n: sum(w * p[n] for w, p in zip(weights, parts, strict=True)) for n in joined}
        assert off(joined, added) <= 1e-6
        model.add_weighted_adapter([str(each["id"]) for each in listed], weights, task, "cat")
        assert off(deltas(model, task), joined) <= 1e-6
    tvb("export", store, tmp_path / "full", "--task", "math", "--dtype", "float32")
    tau = tau_of(models["base"], tmp_path / "full")
    said = json.loads((out / "tasks" / "math" / REPORT).read_text())["tensors"]
    [joined] = by_peft(models["base"], out / "tasks" / "math")[1]
    for name, change in joined.items():
        error = float((change - tau[name]).norm() / tau[name].norm())
        assert said[name]["relative_error"] == pytest.approx(error, rel=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_output_layer_is_left_out(tmp_path, tied):
    make = (lambda: llama(tie_word_embeddings=True)) if tied else llama
    base, [model] = family(tmp_path, make, ["math"], tokenizer=False)
    tvb("export", "--model", model, "--base", base, "--lora", "--rank", 32, tmp_path / "one")
    found = check(base, tmp_path / "one", tau_of(base, model))
    assert len(found) == MODULES + (not tied)


WIDE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 1}


def places(values: Tensor) -> Tensor:
    """The places of bfloat16 numbers in their order: neighbours differ by 1."""
    bits = values.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_adapter_of_rank_16_comes_back(tmp_path, dtype):
    """In matrices of SmolLM2-135M's size, 1 % of whose norm is the adapter's."""
    make = lambda: llama(**WIDE, num_attention_heads=9, num_key_value_heads=3)  # noqa: E731
    base, [model] = family(tmp_path, make, ["math"], dtypes=(torch.bfloat16,), tokenizer=False)
    state, tau = load(base), {}
    for name in [name for name in state if "proj" in name]:
        rows, columns = state[name].shape
        change = torch.randn(rows, 16).double() @ torch.randn(16, columns).double()
        tau[name] = 0.01 * state[name].double().norm() / change.norm() * change
    fused = {name: (value.double() + tau.get(name, 0)).to(dtype) for name, value in state.items()}
    save_file(fused, model / "model.safetensors", {"format": "pt"})
    out = tmp_path / "out"
    tvb("export", "--model", model, "--base", base, out, "--lora", "--rank", 16, "--quiet")
    _, [found] = by_peft(base, out)
    if dtype == torch.float32:
        assert off(found, tau) <= 1e-6
        return
    pairs = [((state[n].double() + found[n]).to(dtype), fused[n]) for n in found]
    steps = torch.cat([(places(a) - places(b)).abs().view(-1) for a, b in pairs])
    assert (steps == 0).double().mean() >= 0.85 and (steps <= 1).double().mean() >= 0.96
    rounding = {name: fused[name].double() - state[name].double() - tau[name] for name in tau}
    assert off(found, tau) <= 0.25 * norm(rounding) / norm(tau)  # most of it is left out


def test_a_model_with_nan_is_named(tmp_path):
    for place in ("model.layers.0.mlp.up_proj.weight", "model.norm.weight"):
        base, [model] = family(tmp_path / place, llama, ["math"], tokenizer=False)
        values = load(model)
        values[place].view(-1)[3] = math.nan
        save_file(values, model / "model.safetensors", {"format": "pt"})
        words = ("--model", model, "--base", base, "--lora", "--rank", 2, tmp_path / "out")
        said = refused("export", *words, "--quiet")
        assert place in said and str(model) in said and "NaN" in said
    assert not (tmp_path / "out").exists()


def test_conv1d_under_both_kinds_of_names(tmp_path):
    base, [model] = family(tmp_path, gpt2, ["math"], tokenizer=False)
    tvb("export", "--model", model, "--base", base, tmp_path / "one", "--lora", "--rank", 3)
    check(base, tmp_path / "one", tau_of(base, model))
    for folder in (base, model):  # as on the Hub
        short = {name.removeprefix("transformer."): each for name, each in load(folder).items()}
        save_file(short, folder / "model.safetensors")
    # A merge's patterns are of mergekit's names.
    keys = {"basis": "none", "matrices": r"^transformer\.h\.0"}
    file = write(recipe("basis_iso", base, [model], **keys), tmp_path / "r")
    tvb("merge", file, tmp_path / "full", "--quiet")
    tvb("merge", file, tmp_path / "lora", "--lora", "--rank", 32, "--quiet")
    full, start = load(tmp_path / "full"), load(base)
    found = by_peft(base, tmp_path / "lora")[1][0]
    tau = {n: full[n].double() - start[n.removeprefix("transformer.")].double() for n in found}
    assert off(found, tau) <= 1e-5 and len(found) == 8
    tvb("export", "--model", model, "--base", base, tmp_path / "two", "--lora", "--rank", 3)
    assert (tmp_path / "one" / WEIGHTS).read_bytes() == (tmp_path / "two" / WEIGHTS).read_bytes()


def test_embeddings_of_t5_and_bart_are_left_out(tmp_path):
    base, [model] = family(tmp_path, tasks=["math"], tokenizer=False)
    names = ("model.shared.weight", "block.0.SelfAttention.relative_attention_bias.weight")
    for folder, value in ((base, 0.0), (model, 1.0)):
        more = {name: torch.full((32, 4), value) for name in names}
        save_file(load(folder) | more, folder / "model.safetensors", {"format": "pt"})
    tvb("export", "--model", model, "--base", base, tmp_path / "out", "--lora", "--rank", 2)
    said = json.loads((tmp_path / "out" / REPORT).read_text())["tensors"]
    assert [said[name]["reason"] for name in names] == ["embeddings"] * 2


WRONG: dict[str, tuple[list[str], str]] = {
    "no size": (["OUT", "--task", "math"], "one of --rank R, --energy SHARE and --size SIZE"),
    "two sizes": (["OUT", "--task", "math", "--rank", "2", "--size", "1MB"], "one of --rank R"),
    "nothing chosen": (["OUT", "--rank", "2"], "one of --task NAME, --basis K, --all and --model"),
    "all bases": (["OUT", "--rank", "2", "--all-bases"], "one of --task NAME, --basis K, --all"),
    "unknown task": (["OUT", "--task", "maht", "--rank", "2"], "did you mean `math`?"),
    "rank": (["OUT", "--task", "math", "--rank", "0"], "'--rank': 0 is not in the range x>=1"),
    "small": (["OUT", "--task", "math", "--size", "4kB"], "--size: 4.0 kB are too little"),
    "no output": (["--task", "math", "--rank", "2"], "name one output folder"),
    "sums": (["OUT", "--task", "math", "--rank", "2", "--sums"], "it goes with --all"),
    "no base": (["--model", "BASE", "--rank", "2"], "--model goes with --base BASE and one output"),
    "same": (
        ["--model", "BASE", "--base", "BASE", "--rank", "2"],
        "no matrix differs from the base",
    ),
    "memory": (["OUT", "--task", "math", "--rank", "2", "--memory", "1MB"], "raise --memory"),
    "inside": (["STORE/in", "--task", "math", "--rank", "2"], "lies in the input"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes(models, stores, tmp_path, case):
    words, message = WRONG[case]
    store, places = stores["dense"], {"OUT": tmp_path / "out", "BASE": models["base"]}
    first = [tmp_path / "out"] if case == "same" else [store]
    given = [str(places.get(word, word)).replace("STORE", str(store)) for word in words]
    before = contents(store)
    assert message in refused("export", *first, *given, "--lora", "--quiet")
    assert contents(store) == before and not list(tmp_path.iterdir())


def test_options_of_adapters_need_lora(stores, tmp_path):
    said = refused("export", stores["dense"], tmp_path / "out", "--task", "math", "--rank", 2)
    assert "--rank is for adapters: add --lora" in said
    words = ("--lora", "--all", tmp_path / "out", "--rank", 2, "--sums")
    assert "the store keeps all tasks" in refused("export", stores["codes"], *words)


# Merges as adapters


FILTERS = [{"filter": "mlp", "value": 0.2}, {"value": 0.7}]
UNEVEN = {0: {"weight": 2.5}, 2: {"weight": -0.5}}
MERGES: dict[str, tuple[str, dict[str, Any]]] = {
    "addition": ("basis_ta", {"basis": "none", "lambda": 0.6, "own": UNEVEN}),
    "filters": ("basis_ta", {"basis": "pca", "num_bases": 2, "lambda": FILTERS}),
    "negation": ("basis_negate", {"basis": "pca", "num_bases": 2, "forget": "code", "alpha": 0.5}),
    "iso": ("basis_iso", {"basis": "none"}),
    "iso-cts": ("basis_iso", {"basis": "none", "common": 0.8, "lambda": 1.5, "own": UNEVEN}),
    "tsvm": ("basis_tsvm", {"basis": "none"}),
    "tsvm of bases": ("basis_tsvm", {"basis": "pca", "num_bases": 2}),
    "wudi": ("basis_wudi", {"basis": "none", "flow_time": 3}),
    "wudi, few directions": ("basis_wudi", {"basis": "none", "rank_share": 0.05}),
}


RANKS = {"mixed adapters": (4, 2, 3), "conv1d adapters": (4, 4, 4)}


@pytest.mark.parametrize("family_of", ["mixed adapters", "conv1d adapters"])
@pytest.mark.parametrize("case", MERGES)
def test_adapters_merge_to_an_adapter_without_loss(world, tmp_path, case, family_of):
    method, keys = MERGES[case]
    models, out = world(family_of), tmp_path / "out"
    tvb("merge", write(models.recipe(method, **keys), tmp_path / "r"), out, "--lora", "--quiet")
    _, [found] = by_peft(models.base, out)
    base, infos = models.states[0], Checkpoint.open(models.base).tensors
    adapters = [Adapter.open(each.partition("+")[2], infos).factors for each in models.listed]
    tuned = [
        {n: t + (dense_of(of[n]) if n in of else 0) for n, t in base.items()} for of in adapters
    ]
    names = [name for name in base if any(name in of for of in adapters)]
    own = keys.get("own", {})
    weights = [own.get(number, {}).get("weight", 1.0) for number in range(3)]
    dense = Dense(base, tuned, names, weights)
    varying: Any = {"lambda": lambda name: 0.2 if "mlp" in name else 0.7}
    varying = varying if keys.get("lambda") is FILTERS else None
    if method == "basis_wudi" and family_of == "conv1d adapters":  # by the base's config.json
        keys = {**keys, "transposed": r"c_(attn|proj|fc)\."}
    want = expect(dense, method, keys, {}, models.tasks, varying).tensors
    change = {name: want[name].double() - base[name].double() for name in found}
    assert set(found) == set(names) and off(found, change) <= 1e-5
    said = json.loads((out / REPORT).read_text())
    assert said["all"]["relative_error"] <= 1e-6 and said["what"].startswith(
        f"{method} of 3 models"
    )
    ranks = {name: said["tensors"][name]["rank"] for name in names}
    config = json.loads((out / CONFIG).read_text())
    assert max(ranks.values()) == config["r"] <= sum(r for r in RANKS[family_of])


TRUNCATED: dict[str, tuple[str, Sequence[str], dict[str, Any]]] = {
    "models": ("", TASKS[:3], {"basis": "balanced", "num_bases": 2, "density": 0.5}),
    "tasks": ("lossless", TASKS[:3], {"basis": "none", "common": 0.5}),
    "bases": ("dense", ("basis-000", "basis-001"), {"lambda": [0.2, 0.9]}),
}


@pytest.mark.parametrize("case", TRUNCATED)
def test_other_merges_are_the_best_of_a_rank(models, stores, tmp_path, case):
    store, names, keys = TRUNCATED[case]
    listed = [stores[store] / name if store else models[name] for name in names]
    method = {"models": "basis_ties", "tasks": "basis_iso", "bases": "basis_ta"}[case]
    file = write(recipe(method, models["base"], listed, **keys), tmp_path / "r")
    tvb("merge", file, tmp_path / "full", "--quiet")
    tvb("merge", file, tmp_path / "lora", "--lora", "--rank", 4, "--quiet")
    check(models["base"], tmp_path / "lora", tau_of(models["base"], tmp_path / "full"))


def test_adapters_by_ties_and_of_a_size(world, tmp_path):
    models, out = world("mixed adapters"), tmp_path / "out"
    file = write(models.recipe("basis_ties", basis="none", trim="tensor"), tmp_path / "r")
    cache = ("--lora-merge-cache", tmp_path / "fused")
    tvb("merge", file, tmp_path / "full", *cache, "--quiet")
    tvb("merge", file, out, "--lora", "--rank", 3, "--quiet")
    found, tau = by_peft(models.base, out)[1][0], tau_of(models.base, tmp_path / "full")
    for name, change in found.items():
        error = float((change - tau[name]).norm())
        assert error <= best(tau[name], 3) * 1.0001 + 1e-5 * float(tau[name].norm())


def test_mistakes_in_merges_to_adapters(models, world, tmp_path):
    made, words = world("mixed adapters"), ("--lora", "--quiet")
    two = recipe("basis_ta", models["base"], [models["math"]])
    parts = made.recipe()
    every = [parts["base_model"], *(each["model"] for each in parts["models"])]
    layers = [{"model": model, "layer_range": [0, 1]} for model in every]
    sliced = [{"sources": layers}]
    module = {"models": parts.pop("models"), "parameters": {"lambda": 2.0}}
    for plan, more, said in (
        (two, words, "no exact factors (not all models are adapters): give --rank R"),
        (two, ("--rank", 2), "--rank is for adapters: add --lora"),
        (two, (*words, "--rank", 2, "--memory", "16.78MB"), "of the merge takes"),
        (parts | {"modules": {"default": module}}, words, "`parameters` of `modules`"),
        (parts | {"modules": {"default": {"slices": sliced}}}, words, "`slices`: an adapter has"),
        (two, (*words, "--rank", 2, "--no-copy-tokenizer"), "--copy-tokenizer: --lora writes"),
        (two, (*words, "--rank", 2, "--size", "1MB"), "--lora goes with one of --rank R"),
        (made.recipe("basis_ties"), words, "no exact factors (basis_ties trims single entries)"),
        (made.recipe(**{"lambda": [0.1, 0.1, 0.9]}), words, "no layer gradient; merge the"),
        (
            made.recipe("basis_ties", density=[{"filter": "mlp", "value": [0.1, 0.1, 1]}]),
            (*words, "--rank", 2),
            "no layer gradient",
        ),
        (
            made.recipe("basis_negate", forget="math", alpha=[{"filter": "mlp", "value": 1}]),
            words,
            "alpha: no value for tensor `model.layers.0.self_attn",
        ),
    ):
        assert said in refused("merge", write(plan, tmp_path / "r"), tmp_path / "out", *more)
    assert not (tmp_path / "out").exists()


def test_errors_over_rank(models, stores, tmp_path):
    picture = tmp_path / "ranks.svg"
    done = tvb("inspect", stores["lossless"], "--lora", "--json", "--plot", picture, "--quiet")
    said = json.loads(done.stdout)
    plot_errors(said["errors"], tmp_path / "ranks.html")
    assert "width: 100%;" in (tmp_path / "ranks.html").read_text()
    assert said["ranks"][:2] == [4, 8] and picture.read_text().count("<svg") == 1
    for task in TASKS[:3]:
        tau = tau_of(models["base"], models[task])
        matrices = [t for name, t in tau.items() if t.ndim == 2 and "embed" not in name]
        for rank, error in zip(said["ranks"], said["errors"][task], strict=True):
            spectra = [torch.linalg.svdvals(each)[:rank] for each in matrices]
            kept = norm({str(k): each for k, each in enumerate(spectra)}) / norm(tau)
            assert error == pytest.approx(math.sqrt(max(0.0, 1 - kept**2)), rel=1e-4, abs=1e-5)
    sizes = [rank * sum(sum(m.shape) for m in matrices) * 4 for rank in (4, 8)]
    assert said["bytes"][:2] == sizes
    assert "rank 16" in tvb("inspect", stores["dense"], "--lora", "--quiet").stdout
