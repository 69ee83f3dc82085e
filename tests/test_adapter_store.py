"""Stores built from LoRA adapters, against PEFT and dense numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import peft
import pytest
import tiny
import torch
import yaml
from commands import merge, recipe, refused, tvb
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

    def dense(self, weights: tuple[float, ...] = (1.0, 1.0, 1.0), exclude: str = "\0") -> Tensor:
        """T [d, 3] float64."""
        names = [name for name in sorted(self.theta) if exclude not in name]
        rows = [[self.deltas[task][name].flatten() for task in TASKS] for name in names]
        columns = [torch.cat([row[i] for row in rows]) * w for i, w in enumerate(weights)]
        return torch.stack(columns, dim=1)

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


@pytest.fixture(scope="module")
def build(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Build the store of a recipe once."""
    made: dict[str, Path] = {}

    def get(made_of: dict[str, Any], *options: str) -> Path:
        key = json.dumps([made_of, *options])
        if key not in made:
            folder = tmp_path_factory.mktemp("stores") / "store"
            file = folder.with_name("recipe.yml")
            file.write_text(yaml.safe_dump(made_of))
            tvb("build", file, folder, "--quiet", *options)
            made[key] = folder
        return made[key]

    return get


def vectors_of(folder: Path, world: World) -> Tensor:
    """The bases of a store, [d, M] float64."""
    columns = [world.flat(tiny.load(basis)) for basis in sorted(folder.glob("basis-*/"))]
    return torch.stack(columns, dim=1)


def near(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    error = (found.double() - expected).norm() / expected.norm()
    assert float(error) < tolerance


@pytest.mark.parametrize(
    "basis",
    [{}, {"basis": "ae", "solver": "exact"}, {"basis": "pca"}, {"basis": "none", "num_bases": 3}],
    ids=["balanced", "ae", "pca", "none"],
)
def test_bases_are_the_dense_combinations(
    basis: dict[str, Any], world: World, build: Callable[..., Path]
) -> None:
    folder = build(world.recipe(**basis))
    bases, dense = store.load(folder), world.dense()
    near(bases.tensors["gram"], dense.T @ dense)
    near(vectors_of(folder, world), dense @ bases.encoder)
    assert bases.facts["num_parameters"] == sum(
        v.numel() for n, v in world.theta.items() if "proj" in n
    )


def test_adapters_at_few_bits(world: World, build: Callable[..., Path], tmp_path: Path) -> None:
    """Their dense updates, with the errors that are told; one more joins them."""
    made_of = {**world.recipe("math", "code"), "parameters": {}}
    folder = Path(shutil.copytree(build(made_of, "--bits", "2"), tmp_path / "zoo"))
    tvb("add", folder, f"{world.base}+{world.root / 'safety'}", "--task", "safety", "--quiet")
    bases, dense = store.load(folder), world.dense()
    for k, vector in enumerate(bases.vectors):
        found = world.flat({name: vector.tensor(name) for name in bases.names})
        error = float((found - dense[:, k]).norm() / dense[:, k].norm())
        assert bases.facts.relative_error[TASKS[k]] == pytest.approx(error, rel=1e-4)
        assert 0 < error < 0.5


def test_weight_and_exclude(world: World, build: Callable[..., Path]) -> None:
    made_of = world.recipe(exclude="mlp")
    made_of["models"][1]["parameters"] = {"weight": -2.0}
    bases = store.load(build(made_of))
    dense = world.dense((1.0, -2.0, 1.0), exclude="mlp")
    near(bases.tensors["gram"], dense.T @ dense)
    found = vectors_of(bases.path, world)
    assert not any("mlp" in name for name in bases.names)
    near(found.norm(dim=0), (dense @ bases.encoder).norm(dim=0))


PARAMETERS: dict[str, dict[str, Any]] = {
    "basis_ta": {"lambda": 0.7, "lambda_scale": "tasks"},
    "basis_ties": {"lambda": 0.7, "density": 0.4},
    "basis_negate": {"lambda": 0.2, "alpha": 0.9, "forget": "code"},
}


@pytest.mark.parametrize("method", PARAMETERS)
def test_recipes_over_their_bases(
    method: str, world: World, build: Callable[..., Path], tmp_path: Path
) -> None:
    folder = build(world.recipe())
    listed = [folder / store.basis_folder(m) for m in range(2)]
    made_of = recipe(method, world.base, listed, **PARAMETERS[method])
    merged = merge(made_of, tmp_path / "out")
    assert merged.facts["tasks"] == list(TASKS)
    file = commands.write(made_of, tmp_path / "check")
    assert f"{method} over 2 bases" in tvb("check", file).stdout
    moved = world.flat(merged.tensors) - world.flat(world.theta)
    dense, bases = world.dense(), store.load(folder)
    if method == "basis_ta":
        near(moved, 0.7 * 3 / 2 * (dense @ bases.encoder).sum(dim=1))
    if method == "basis_negate":
        forgotten = dense @ bases.encoder @ bases.decoder[:, 1]
        near(moved, 0.2 * (dense @ bases.encoder).sum(dim=1) - 0.9 * forgotten)


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


def test_add_an_adapter(world: World, build: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "store"
    shutil.copytree(build(world.recipe("math", "safety")), folder)
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


@pytest.mark.parametrize("name", ["gpt2", "embeddings"])
def test_other_kinds_of_layers(name: str, tmp_path: Path) -> None:
    """GPT-2 stores its matrices transposed; embeddings have factors of their own."""
    make, target = {
        "gpt2": (tiny.gpt2, ["c_attn", "c_proj", "wte"]),
        "embeddings": (tiny.llama, ["embed_tokens", "lm_head", "v_proj"]),
    }[name]
    base, _ = tiny.family(tmp_path, make, ())
    start = tiny.load(base)
    dense = []
    for seed, task in enumerate(("a", "b")):
        delta = train(base, tmp_path / task, seed=seed, target_modules=target)
        dense.append(torch.cat([delta[n].flatten() for n in sorted(start)]))
    models = [f"{base}+{tmp_path / task}" for task in ("a", "b")]
    file = commands.write(recipe("basis_ta", base, models, basis="none"), tmp_path / "r")
    tvb("build", file, tmp_path / "store", "--quiet")
    made_of = commands.ready(tmp_path / "store", "add.yml")
    made_of["parameters"]["lambda"] = 0.5
    merged = merge(made_of, tmp_path / "out").tensors
    found = torch.cat([(merged[n].double() - start[n]).flatten() for n in sorted(start)])
    near(found, 0.5 * (dense[0] + dense[1]))
