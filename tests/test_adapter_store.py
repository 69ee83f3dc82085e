"""Stores built from LoRA adapters, against PEFT and dense numbers."""

import shutil
from pathlib import Path

import commands
import peft
import pytest
import tiny
import torch
from commands import contents, recipe, refused, tvb
from test_lora import changes, model_of, train
from torch import Tensor
from worlds import Models

from tvb_mergekit.store import store

BALANCED = {"basis": "balanced", "num_bases": 2}


@pytest.fixture
def adapters(world) -> Models:
    return world("mixed adapters")


def flat(state: dict[str, Tensor], made: Models) -> Tensor:
    """In the order of `dense`, zero for what is not there."""
    parts = [state.get(n, torch.zeros(v.shape)) for n, v in sorted(made.states[0].items())]
    return torch.cat([part.double().flatten() for part in parts])


def dense(made: Models) -> Tensor:
    """T [d, 3] float64."""
    return torch.stack([flat(made.tau(task), made) for task in made.tasks], dim=1)


def vectors_of(folder: Path, made: Models) -> Tensor:
    """The bases of a store, [d, M] float64."""
    columns = [flat(tiny.load(basis), made) for basis in sorted(folder.glob("basis-*/"))]
    return torch.stack(columns, dim=1)


def near(found: Tensor, expected: Tensor) -> None:
    error = (found.double() - expected).norm() / expected.norm()
    assert float(error) < 1e-5


def test_bases_are_the_dense_combinations(adapters: Models, tmp_path: Path) -> None:
    bases, tau = adapters.build(tmp_path / "store", **BALANCED), dense(adapters)
    near(bases.tensors["gram"], tau.T @ tau)
    near(vectors_of(tmp_path / "store", adapters), tau @ bases.encoder)
    numels = [v.numel() for n, v in adapters.states[0].items() if "proj" in n]
    assert bases.facts["num_parameters"] == sum(numels)


# What is not s B A, or not only adapters


def test_dora_and_trained_modules_are_fused_instead(adapters: Models, tmp_path: Path) -> None:
    base, trained, out = adapters.base, tmp_path / "trained", tmp_path / "store"
    dora = train(base, tmp_path / "dora", use_dora=True)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(model_of(base), settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            parameter.data.add_(0.1)
    model.save_pretrained(trained)
    expected = changes(model.merge_and_unload(), base), dora
    for adapter, change in zip((trained, tmp_path / "dora"), expected, strict=True):
        models = [adapters.listed[0], f"{base}+{adapter}"]
        file = commands.write(recipe("basis_ta", base, models), tmp_path / "r")
        for command in (("build", file, out), ("check", file), ("inspect", file)):
            said = refused(*command)
            assert str(adapter) in said and "--fuse --lora-merge-cache DIR" in said
        assert "--lora-merge-cache DIR" in refused("build", file, out, "--fuse")
        fused = ["--fuse", "--lora-merge-cache", tmp_path / "fused"]
        tvb("build", file, out, *fused, "--quiet")
        tau = torch.stack([dense(adapters)[:, 0], flat(change, adapters)], dim=1)
        near(store.load(out).tensors["gram"], tau.T @ tau)
        tvb("check", file, *fused, "--deep")
        shutil.rmtree(out)


def test_adapters_of_another_base(adapters: Models, tmp_path: Path) -> None:
    base, (math, code, _) = adapters.base, (str(each) for each in adapters.listed)
    wide, (full,) = tiny.family(tmp_path, lambda: tiny.llama(hidden_size=64), ("full",))
    train(wide, tmp_path / "wide", target_modules=["q_proj"])
    for models, said in (
        ([f"{base}+{tmp_path / 'wide'}"], "take the base that it was trained on"),
        ([math.replace(str(base), str(full)), code], f"adapts {full}"),
        ([math.partition("+")[2]], "BASE+ADAPTER"),
    ):
        file = commands.write(recipe("basis_ta", base, models), tmp_path / "r")
        assert said in refused("check", file)


def test_add_an_adapter(adapters: Models, tmp_path: Path) -> None:
    folder, tau = tmp_path / "store", dense(adapters)
    adapters.build(folder, tasks=["math", "safety"], **BALANCED)
    # it targets fewer modules than the store holds
    tvb("add", folder, adapters.listed[1], "--task", "code", "--budget", 3, "--quiet")
    bases, found = store.load(folder), vectors_of(folder, adapters)
    near(found, tau[:, [0, 2, 1]] @ bases.encoder)
    near(found[:, 2], tau[:, 1])
    train(adapters.base, tmp_path / "more", target_modules=["embed_tokens", "q_proj"])
    before = contents(folder)
    said = refused("add", folder, f"{adapters.base}+{tmp_path / 'more'}", "--task", "more")
    assert "`model.embed_tokens.weight`" in said and "no adapter targets it" in said
    assert before == contents(folder)
