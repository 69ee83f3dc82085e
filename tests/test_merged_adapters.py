"""Merges of adapters to an adapter: against dense merges in float64, as PEFT loads them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
from commands import recipe, refused, tvb, write
from reference import Dense, expect
from test_lora import dense as dense_of
from test_lora import model_of, train
from torch import Tensor

from tvb_mergekit.tensors.adapter import CONFIG
from tvb_mergekit.tensors.checkpoint import Checkpoint
from tvb_mergekit.tensors.peft_files import open_adapter

Delta = dict[str, Tensor]


def by_peft(base: Path, folder: Path) -> Delta:
    """The float64 change of each weight by an adapter."""
    model: Any = peft.PeftModel.from_pretrained(model_of(base), folder)
    layers = model.base_model.model.named_modules()
    held = {n: m for n, m in layers if isinstance(m, peft.tuners.lora.LoraLayer)}
    return {f"{n}.weight": m.get_delta_weight("default").double() for n, m in held.items()}


def norm(delta: Delta) -> float:
    return math.sqrt(sum(float(each.square().sum()) for each in delta.values()))


def off(one: Delta, other: Delta) -> float:
    """The distance of two changes, relative to the second."""
    assert set(one) == set(other)
    return norm({name: one[name] - other[name] for name in one}) / norm(other)


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
}


RANKS = {"mixed adapters": (4, 2, 3), "conv1d adapters": (4, 4, 4)}


@pytest.mark.parametrize("family_of", ["mixed adapters", "conv1d adapters"])
@pytest.mark.parametrize("case", MERGES)
def test_adapters_merge_to_an_adapter_without_loss(world, tmp_path, case, family_of):
    method, keys = MERGES[case]
    models, out = world(family_of), tmp_path / "out"
    tvb("merge", write(models.recipe(method, **keys), tmp_path / "r"), out, "--lora", "--quiet")
    found = by_peft(models.base, out)
    base, opened = models.states[0], Checkpoint.open(models.base)
    adapters = [open_adapter(each.partition("+")[2], opened).factors for each in models.listed]
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
    config = json.loads((out / CONFIG).read_text())
    assert config["r"] <= sum(RANKS[family_of])
    assert all(len(module.split(".")) == 1 for module in config["target_modules"])


def test_mistakes_in_merges_to_adapters(world, tmp_path):
    made, words, llama = world("mixed adapters"), ("--lora", "--quiet"), world("llama")
    two = recipe("basis_ta", llama.base, llama.listed[:2])
    parts = made.recipe()
    every = [parts["base_model"], *(each["model"] for each in parts.pop("models"))]
    sliced = {"slices": [{"sources": [{"model": each, "layer_range": [0, 1]} for each in every]}]}
    train(made.base, tmp_path / "trained", modules_to_save=["lm_head"])
    dense = recipe("basis_ta", made.base, [f"{made.base}+{tmp_path / 'trained'}"])
    for plan, more, said in (
        (two, words, "no exact factors (not all models are adapters)"),
        (two, ("--dtype", "float16"), "--dtype is for adapters: add --lora"),
        (dense, words, "no exact factors (lm_head.weight: no factors of one matrix"),
        (parts | {"modules": {"default": sliced}}, words, "`slices`: an adapter has"),
        (two, (*words, "--no-copy-tokenizer"), "--copy-tokenizer: --lora writes"),
        (made.recipe("basis_ties"), words, "no exact factors (basis_ties trims single entries)"),
    ):
        assert said in refused("merge", write(plan, tmp_path / "r"), tmp_path / "out", *more)
    assert not (tmp_path / "out").exists()
