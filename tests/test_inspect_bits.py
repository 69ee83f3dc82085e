"""The losses of codes, as `tvb inspect` reports them of stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import yaml
from commands import recipe, tvb
from numpy.typing import NDArray

import tvb_mergekit
from tvb_mergekit.store.bits import group_of

WEIGHTS = {0: {"weight": 0.5}, 2: {"weight": -1.0}}
Array = NDArray[np.float64]


class World:
    """A base, three models and their weighted task vectors; recipes over them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base, self.models = tiny.family(root, tasks=tiny.TASKS[:3], dtypes=(torch.bfloat16,))
        base, *models = [tiny.load(folder) for folder in (self.base, *self.models)]
        scales = [WEIGHTS.get(i, {"weight": 1.0})["weight"] for i in range(3)]
        weighted = list(zip(scales, models, strict=True))
        self.taus: dict[str, Array] = {  # [numel, 3]
            n: np.stack([by * (m[n].double() - t.double()).flatten() for by, m in weighted], axis=1)
            for n, t in base.items()
        }

    def recipe(self, name: str, **parameters: Any) -> Path:
        file = self.root / f"{name}.yml"
        made = recipe("basis_ta", self.base, self.models, WEIGHTS, **parameters)
        file.write_text(yaml.safe_dump(made))
        return file


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def relative(found: Array, expected: Array) -> Array:
    return np.linalg.norm(found - expected, axis=0) / np.linalg.norm(expected, axis=0)


@pytest.mark.parametrize("keys", [{}, {"basis": "pca", "num_bases": 2}], ids=["zoo", "pca"])
def test_losses_of_a_store_against_its_decoded_vectors(
    world: World, keys: dict[str, Any], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    tvb("build", world.recipe("losses", **keys), store, "--bits", "2", "--quiet")
    bases = tvb_mergekit.load(store)
    told = json.loads(tvb("inspect", store, "--json").stdout)["codes"]
    encoder = np.eye(3) if not keys else np.c_[bases.tensors["encoder"].numpy(), np.ones(3) / 3]
    names = ["math", "code", "safety"] if not keys else ["B0", "B1", "mean"]
    exact = {name: tau @ encoder for name, tau in world.taus.items()}
    found = {
        name: np.stack([v.tensor(name).double().flatten().numpy() for v in bases.sources], axis=1)
        for name in bases.names
    }

    def both(group: str = "") -> list[Array]:
        picked = [name for name in bases.names if not group or group_of(name) == group]
        return [np.concatenate([of[name] for name in picked]) for of in (found, exact)]

    one, two = both()
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
        one, two = both(name)
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


NAMES = {
    "embeddings": "model.embed_tokens transformer.wte bert.embeddings.word_embeddings",
    "norms": "bert.embeddings.LayerNorm model.layers.0.self_attn.q_norm transformer.h.0.ln_1"
    " model.layers.0.post_attention_layernorm",
    "attention": "model.layers.0.self_attn.q_proj transformer.h.0.attn.c_attn"
    " bert.encoder.layer.0.attention.output.dense",
    "MLP": "bert.encoder.layer.0.output.dense decoder.block.0.layer.1.DenseReluDense.wi_0"
    " model.decoder.layers.0.fc1 model.layers.0.block_sparse_moe.experts.3.w1",
    "output layer": "gpt_neox.embed_out lm_head",
    "other": "visual_projection",
}


def test_groups_of_tensors() -> None:
    for group, names in NAMES.items():
        assert {group_of(f"{name}.weight") for name in names.split()} == {group}
