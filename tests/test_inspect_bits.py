"""What codes lose: `tvb inspect` of quantized stores, and of recipes before a build (`--bits`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import yaml
from commands import recipe, refused, tvb
from numpy.typing import NDArray
from safetensors.torch import load_file
from test_lora import train

import tvb_mergekit
from tvb_mergekit.store.bits import group_of

WEIGHTS = {0: {"weight": 0.5}, 2: {"weight": -1.0}}
WIDTHS = (8, 4, 3, 2, 1.5, 1, 0.5)
Array = NDArray[np.float64]


class World:
    """A base, three models and their weighted task vectors; recipes over them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base, self.models = tiny.family(root, tasks=tiny.TASKS[:3], dtypes=(torch.bfloat16,))
        states = [tiny.load(folder) for folder in (self.base, *self.models)]
        scales = [WEIGHTS.get(i, {"weight": 1.0})["weight"] for i in range(3)]
        self.taus: dict[str, Array] = {  # [numel, 3]
            name: np.stack(
                [
                    scale * (state[name].double() - base.double()).flatten().numpy()
                    for scale, state in zip(scales, states[1:], strict=True)
                ],
                axis=1,
            )
            for name, base in states[0].items()
        }

    def recipe(self, name: str, **parameters: Any) -> Path:
        method = "basis_negate" if "forget" in parameters else "basis_ta"
        file = self.root / f"{name}.yml"
        made = recipe(method, self.base, self.models, WEIGHTS, **parameters)
        file.write_text(yaml.safe_dump(made))
        return file

    def compared(self, file: Path, *options: str) -> list[dict[str, Any]]:
        said = tvb("inspect", file, "--bits", "--json", "--quiet", *options).stdout
        return list(json.loads(said)["kept"])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def built(world: World) -> Callable[..., Path]:
    """Build the store of a recipe once."""

    def get(file: Path, *options: str) -> Path:
        store = world.root / "-".join((file.stem, *(option.strip("-") for option in options)))
        if not store.exists():
            tvb("build", file, store, "--quiet", *options)
        return store

    return get


def weight_bytes(store: Path) -> int:
    return sum(file.stat().st_size for file in store.glob("*/*.safetensors"))


def relative(found: Array, expected: Array) -> Array:
    return np.linalg.norm(found - expected, axis=0) / np.linalg.norm(expected, axis=0)


def test_a_recipe_tells_what_builds_would_take_and_lose(
    world: World, built: Callable[..., Path]
) -> None:
    file = world.recipe("plain")
    kept = world.compared(file, "--memory", "20MB")
    assert [each["bits"] for each in kept] == [*WIDTHS, None, None, None]
    for each in kept[: len(WIDTHS)]:
        store = built(file, "--bits", f"{each['bits']:g}")
        facts = json.loads((store / "basis.json").read_text())
        assert each["bytes"] == facts["bytes"] == weight_bytes(store)
        assert each["relative_error"] == pytest.approx(facts["relative_error"], abs=1e-6)
        assert each["mean_error"] == pytest.approx(np.mean(list(each["relative_error"].values())))
        of_sum = json.loads(tvb("inspect", store, "--json").stdout)["codes"]["sum"]
        assert each["sum_error"] is None and of_sum <= each["sum_error_at_most"]


@pytest.mark.parametrize(
    "basis",
    [{}, {"basis": "ae", "solver": "exact"}, {"basis": "pca"}, {"basis": "none"}],
    ids=str,
)
def test_bases_of_a_recipe_against_dense_vectors(
    world: World, built: Callable[..., Path], basis: dict[str, Any]
) -> None:
    kept = world.compared(world.recipe(f"some-{basis.get('basis')}", **basis))[len(WIDTHS) :]
    assert [each["num_bases"] for each in kept] == [1, 2, 3]
    name = basis.get("basis", "none")
    keys = {"basis": "balanced"} if name == "none" else basis
    store = built(world.recipe(f"one-{name}", num_bases=1, **keys))
    assert kept[0]["bytes"] == weight_bytes(store)
    tensors = load_file(store / "basis.safetensors")
    table = tensors.get("reconstruction", tensors["encoder"] @ tensors["decoder"]).numpy()
    taus = np.concatenate(list(world.taus.values()))
    errors = list(kept[0]["relative_error"].values())
    np.testing.assert_allclose(errors, relative(taus @ table, taus), rtol=1e-5)
    of_sum = relative((taus @ table).sum(1), taus.sum(1))
    assert kept[0]["sum_error"] == pytest.approx(float(of_sum), rel=1e-5, abs=1e-6)
    assert kept[2]["mean_error"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("keys", [{}, {"basis": "pca", "num_bases": 2}], ids=["zoo", "pca"])
def test_losses_of_a_store_against_its_decoded_vectors(
    world: World, built: Callable[..., Path], keys: dict[str, Any]
) -> None:
    store = built(world.recipe("plain" if not keys else "mean", **keys), "--bits", "1.5")
    bases = tvb_mergekit.load(store)
    told = json.loads(tvb("inspect", store, "--json").stdout)["codes"]
    encoder = np.eye(3) if not keys else np.c_[bases.tensors["encoder"].numpy(), np.ones(3) / 3]
    names = ["math", "code", "safety"] if not keys else ["B0", "B1", "mean"]
    exact = {name: tau @ encoder for name, tau in world.taus.items()}
    found = {
        name: np.stack([v.tensor(name).double().flatten().numpy() for v in bases.sources], axis=1)
        for name in bases.names
    }

    def both(pick: Callable[[str], bool]) -> tuple[Array, Array]:
        picked = [name for name in bases.names if pick(name)]
        one, two = (np.concatenate([of[name] for name in picked]) for of in (found, exact))
        return one, two

    one, two = both(lambda name: True)
    assert [each["name"] for each in told["vectors"]] == names
    errors = [each["relative_error"] for each in told["vectors"]]
    np.testing.assert_allclose(errors, relative(one, two), rtol=1e-5)
    summed = slice(0, bases.num_bases)  # PCA's mean is in no sum
    of_sum = relative(one[:, summed].sum(1), two[:, summed].sum(1))
    assert told["sum"] == pytest.approx(float(of_sum), rel=1e-5)
    assert sum(each["bytes"] for each in told["vectors"]) == bases.facts["bytes"]

    groups = {each["name"]: each for each in told["groups"]}
    assert set(groups) == {"embeddings", "attention", "MLP", "norms", "output layer"}
    for name, group in groups.items():
        one, two = both(lambda tensor, name=name: group_of(tensor) == name)
        error = np.linalg.norm(one - two) / np.linalg.norm(two)
        assert group["relative_error"] == pytest.approx(error, rel=1e-5)
    sizes = {n: sum(found[t].size for t in found if group_of(t) == n) for n in groups}
    bits = sum(groups[n]["bits"] * sizes[n] for n in groups) / sum(sizes.values())
    assert bits == pytest.approx(bases.facts["bits"])


def test_a_zoo_is_told_as_one(world: World, tmp_path: Path) -> None:
    file, store = world.recipe("plain"), tmp_path / "zoo"
    said = tvb("build", file, store, "--bits", "2", "--quiet").stdout
    assert "3 task vectors: " in said and " in 2 bits, " in said
    assert "; largest relative error of a task: 0.33" in said and "energy" not in said
    text = tvb("inspect", store).stdout
    assert text.startswith("Zoo: T = 3 task vectors at 2 bits, base ")
    for gone in ("none basis", "Retained energy", "The sum of all", "Encoder", "row sum", "> 3"):
        assert gone not in text
    assert "the codes change the sum that" in text and "Codes by kind of tensor" in text
    over = tvb("inspect", store / "recipes/add.yml", "--bits", "--quiet").stdout
    assert "2 balanced bases" in over  # the models of a recipe may be the tasks of a zoo

    for words in (["remove", store], ["add", store, world.models[0], "--base", world.base]):
        tvb(*words, "--task", "math")
        told = json.loads(tvb("inspect", store, "--json").stdout)
        assert told["codes"]["sum"] is None and len(told["codes"]["vectors"]) == told["num_tasks"]
        text = tvb("inspect", store).stdout
        assert text.startswith("Zoo: T = ") and "the codes change" not in text
    assert "1 task added online\n" in text

    two = world.recipe("two", basis="balanced", num_bases=2)
    tvb("build", two, tmp_path / "bases", "--bits", "2", "--quiet")
    text = tvb("inspect", tmp_path / "bases").stdout
    assert "M = 2 balanced basis vectors of T = 3 task vectors, 2 bits" in text
    assert "Codes of the bases" in text and "Encoder weights" in text

    pytest.importorskip("matplotlib")
    for path, panel in ((store, "Error by kind of tensor"), (tmp_path / "bases", "Encoder")):
        tvb("inspect", path, "--plot", tmp_path / "a.svg")
        assert f"<!-- {panel}" in (tmp_path / "a.svg").read_text(encoding="utf-8")


def test_one_table_and_one_picture(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "a.html"
    said = tvb("inspect", world.recipe("plain"), "--bits", "--quiet", "--plot", page).stdout
    lines = said.splitlines()
    assert lines[0].startswith("Ways to keep 3 task vectors of models of 0.1 MB, base ")
    rows = ("8 bits", "1.5 bits, mixed", "1 bit ", "1 balanced basis", "3 balanced bases")
    for row in rows:
        assert sum(line.startswith(row) for line in lines) == 1, row
    text = page.read_text(encoding="utf-8")
    assert "<!-- 1.5 bits, mixed -->" in text and "<!-- M = 3 -->" in text
    assert "1 balanced basis" in text
    monkeypatch.setattr("tvb_mergekit.store.choices.MOST", 2)  # of many tasks only some M
    tried = [each["num_bases"] for each in world.compared(world.recipe("plain"))[len(WIDTHS) :]]
    assert tried == [1, 3]


def test_recipes_of_all_kinds(world: World, tmp_path: Path) -> None:
    random = world.recipe("random", basis="rand_proj", num_bases=2, forget="math", alpha=1.0)
    said = tvb("inspect", random, "--bits", "--quiet").stdout
    assert "2 bits" in said and "balanced" not in said and "No bases: " in said

    for seed, name in enumerate(("one", "two")):
        train(world.base, tmp_path / name, seed=seed)
    models = [f"{world.base}+{tmp_path / name}" for name in ("one", "two")]
    file = tmp_path / "adapters.yml"
    file.write_text(yaml.safe_dump(recipe("basis_ta", world.base, models)))
    (first, *_) = world.compared(file)
    tvb("build", file, tmp_path / "zoo", "--bits", "8", "--quiet")
    facts = json.loads((tmp_path / "zoo/basis.json").read_text())
    assert first["bytes"] == facts["bytes"]
    assert first["relative_error"] == pytest.approx(facts["relative_error"], abs=1e-6)

    theirs = tmp_path / "ties.yml"
    theirs.write_text(yaml.safe_dump(recipe("ties", world.base, world.models)))
    two = world.recipe("two", basis="balanced", num_bases=2)
    tvb("build", two, tmp_path / "store", "--quiet")
    for path, why in {
        theirs: "expected one of basis_ta",
        tmp_path / "store": "is a folder; give a recipe",
        world.base: "is a folder; give a recipe",
        tmp_path / "store/recipes/add.yml": "lists the bases of",
    }.items():
        assert why in refused("inspect", path, "--bits")


NAMES = {
    "model.embed_tokens.weight": "embeddings",
    "transformer.wte.weight": "embeddings",
    "bert.embeddings.word_embeddings.weight": "embeddings",
    "bert.embeddings.LayerNorm.weight": "norms",
    "model.layers.0.self_attn.q_proj.weight": "attention",
    "model.layers.0.self_attn.q_norm.weight": "norms",
    "model.layers.0.post_attention_layernorm.weight": "norms",
    "transformer.h.0.ln_1.weight": "norms",
    "transformer.h.0.attn.c_attn.weight": "attention",
    "bert.encoder.layer.0.attention.output.dense.weight": "attention",
    "bert.encoder.layer.0.output.dense.weight": "MLP",
    "decoder.block.0.layer.1.DenseReluDense.wi_0.weight": "MLP",
    "model.decoder.layers.0.fc1.weight": "MLP",
    "model.layers.0.block_sparse_moe.experts.3.w1.weight": "MLP",
    "gpt_neox.embed_out.weight": "output layer",
    "lm_head.weight": "output layer",
    "visual_projection.weight": "other",
}


def test_groups_of_tensors() -> None:
    assert {name: group_of(name) for name in NAMES} == NAMES
