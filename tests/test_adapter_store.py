"""Stores built from LoRA adapters, against PEFT and dense numbers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import commands
import peft
import pytest
import tiny
import torch
from commands import recipe, refused, tvb
from test_lora import LINEAR, changes, model_of, train
from torch import Tensor

from tvb_mergekit.store import store

State = dict[str, Tensor]
TASKS = ("math", "code", "safety")


class World:
    """A base, three adapters with different targets, and what fusing each adds to the base."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base, (self.full,) = tiny.family(root, tasks=("full",))
        configs: dict[str, dict[str, Any]] = {
            "math": {},
            "code": {"target_modules": ["q_proj", "up_proj"], "r": 2, "task_type": "CAUSAL_LM"},
            "safety": {"use_rslora": True, "target_modules": LINEAR[:4], "r": 3},
        }
        self.deltas = {
            name: train(self.base, root / name, seed=seed, **config)
            for seed, (name, config) in enumerate(configs.items())
        }
        self.theta = {name: value.double() for name, value in tiny.load(self.base).items()}

    def dense(self) -> Tensor:
        """T [d, 3] float64."""
        columns = [[self.deltas[t][n].flatten() for n in sorted(self.theta)] for t in TASKS]
        return torch.stack([torch.cat(column) for column in columns], dim=1)

    def flat(self, state: State) -> Tensor:
        """In the order of `dense`, zero for what is not there."""
        return torch.cat(
            [
                state[n].double().flatten() if n in state else torch.zeros_like(v).flatten()
                for n, v in sorted(self.theta.items())
            ]
        )

    def recipe(self, *names: str, **changed: Any) -> dict[str, Any]:
        models = [f"{self.base}+{self.root / name}" for name in names or TASKS]
        changed = {"basis": "balanced", "num_bases": 2, **changed}
        return recipe("basis_ta", self.base, models, **changed)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def build(made_of: dict[str, Any], out: Path, *options: str) -> Path:
    tvb("build", commands.write(made_of, out), out, "--quiet", *options)
    return out


def vectors_of(folder: Path, world: World) -> Tensor:
    """The bases of a store, [d, M] float64."""
    columns = [world.flat(tiny.load(basis)) for basis in sorted(folder.glob("basis-*/"))]
    return torch.stack(columns, dim=1)


def near(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    error = (found.double() - expected).norm() / expected.norm()
    assert float(error) < tolerance


def test_bases_are_the_dense_combinations(world: World, tmp_path: Path) -> None:
    bases = store.load(build(world.recipe(), tmp_path / "store"))
    dense = world.dense()
    near(bases.tensors["gram"], dense.T @ dense)
    near(vectors_of(tmp_path / "store", world), dense @ bases.encoder)
    numels = [v.numel() for n, v in world.theta.items() if "proj" in n]
    assert bases.facts["num_parameters"] == sum(numels)


def test_adapters_at_few_bits(world: World, tmp_path: Path) -> None:
    made_of = {**world.recipe("math", "code"), "parameters": {}}
    folder = build(made_of, tmp_path / "store", "--bits", "2")
    tvb("add", folder, f"{world.base}+{world.root / 'safety'}", "--task", "safety", "--quiet")
    bases, dense = store.load(folder), world.dense()
    for k, vector in enumerate(bases.vectors):
        found = world.flat({name: vector.tensor(name) for name in bases.names})
        error = float((found - dense[:, k]).norm() / dense[:, k].norm())
        assert bases.facts.relative_error[TASKS[k]] == pytest.approx(error, rel=1e-4)
        assert 0 < error < 0.5


# What is not s B A, or not only adapters


def test_dora_and_trained_modules_are_fused_instead(world: World, tmp_path: Path) -> None:
    dora = train(world.base, tmp_path / "dora", use_dora=True)
    trained = tmp_path / "trained"
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(model_of(world.base), settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            parameter.data.add_(0.1)
    model.save_pretrained(trained)
    expected = [world.flat(changes(model.merge_and_unload(), world.base)), world.flat(dora)]
    for adapter, change in zip((trained, tmp_path / "dora"), expected, strict=True):
        models = [f"{world.base}+{world.root / 'math'}", f"{world.base}+{adapter}"]
        file = commands.write(recipe("basis_ta", world.base, models), tmp_path / "r")
        for command in (("build", file, tmp_path / "store"), ("check", file), ("inspect", file)):
            said = refused(*command)
            assert str(adapter) in said and "--fuse --lora-merge-cache DIR" in said
        assert "--lora-merge-cache DIR" in refused("build", file, tmp_path / "store", "--fuse")
        fused = ["--fuse", "--lora-merge-cache", tmp_path / "fused"]
        tvb("build", file, tmp_path / "store", *fused, "--quiet")
        assert not (tmp_path / "store/basis-000/adapter_config.json").exists()
        dense = torch.stack([world.dense()[:, 0], change], dim=1)
        near(store.load(tmp_path / "store").tensors["gram"], dense.T @ dense)
        tvb("check", file, *fused, "--deep")
        shutil.rmtree(tmp_path / "store")


def test_adapters_of_another_base(world: World, tmp_path: Path) -> None:
    wide, _ = tiny.family(tmp_path, lambda: tiny.llama(hidden_size=64), ())
    train(wide, tmp_path / "wide", target_modules=["q_proj"])
    models = [f"{world.base}+{tmp_path / 'wide'}"]
    file = commands.write(recipe("basis_ta", world.base, models), tmp_path / "r")
    assert "take the base that it was trained on" in refused("check", file)
    models = [f"{world.full}+{world.root / 'math'}", f"{world.base}+{world.root / 'code'}"]
    file = commands.write(recipe("basis_ta", world.base, models), tmp_path / "r")
    said = refused("build", file, tmp_path / "store")
    assert f"adapts {world.full}" in said and "--fuse" in said
    file = commands.write(recipe("basis_ta", world.base, [world.root / "math"]), tmp_path / "r")
    assert "BASE+ADAPTER" in refused("check", file)
    assert {p.name for p in tmp_path.iterdir()} == {"base", "wide", "r.yml"}


# Growing


def test_add_an_adapter(world: World, tmp_path: Path) -> None:
    folder = build(world.recipe("math", "safety"), tmp_path / "store")
    model = f"{world.base}+{world.root / 'code'}"  # targets fewer modules than the store holds
    tvb("add", folder, model, "--task", "code", "--budget", 3, "--quiet")
    bases = store.load(folder)
    near(vectors_of(folder, world), world.dense()[:, [0, 2, 1]] @ bases.encoder)
    near(vectors_of(folder, world)[:, 2], world.dense()[:, 1])
    train(world.base, tmp_path / "more", target_modules=["embed_tokens", "q_proj"])
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    said = refused("add", folder, f"{world.base}+{tmp_path / 'more'}", "--task", "more")
    assert "`model.embed_tokens.weight`" in said and "no adapter targets it" in said
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
