"""One task, many tasks, mergekit's own options, and parameters in other places of a recipe."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Result, assert_close, assert_same, merge, recipe, slices, write
from mergekit import merge_methods
from processes import run
from reference import Dense, expect
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import TASKS, as_bin, family, load

THREE = TASKS[:3]
PCA: dict[str, Any] = {"basis": "pca", "num_bases": 2}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    return family(tmp_path_factory.mktemp("models"), tasks=THREE)


def dense_of(base: Path, models: list[Path], **weights: Any) -> Dense:
    states = [load(path) for path in (base, *models)]
    return Dense(states[0], states[1:], list(states[0]), **weights)


# How many tasks


@pytest.mark.parametrize(
    ("method", "basis"),
    [
        ("basis_ta", "ae"),
        ("basis_ta", "linear_ae"),
        ("basis_ta", "rand_select"),
        ("basis_negate", "ae-exact"),
        ("basis_negate", "balanced"),
        ("basis_negate", "none"),
    ],
)
def test_one_task(method: str, basis: str, inputs: tuple[Path, list[Path]], tmp_path: Path) -> None:
    base, models = inputs
    keys: dict[str, Any] = {"basis": basis.partition("-")[0]}
    keys |= {"solver": "exact"} if basis == "ae-exact" else {}
    keys |= {"forget": "math", "alpha": 1} if method == "basis_negate" else {}
    result = merge(recipe(method, base, models[:1], **keys), tmp_path / "out")
    dense = dense_of(base, models[:1])
    want = expect(dense, method, keys, result.basis, THREE[:1])
    assert_close(result.tensors, want.tensors, dense.base)
    assert result.facts["num_bases"] == 1
    assert result.facts["retained_energy"] == pytest.approx(1, abs=1e-6)


def test_two_models_that_are_the_same(inputs: tuple[Path, list[Path]], tmp_path: Path) -> None:
    """A Gram matrix of deficient rank: every basis still gives finite, right sums."""
    base, models = inputs
    twin = Path(shutil.copytree(models[0], tmp_path / "twin"))
    dense = dense_of(base, [*models, twin])
    for basis in ("balanced", "ae", "pca", "none"):
        keys: dict[str, Any] = {"basis": basis, "lambda_scale": "tasks", "lambda": 0.2}
        keys |= {"solver": "exact", "num_bases": 3} if basis == "ae" else {}
        result = merge(recipe("basis_ta", base, [*models, twin], **keys), tmp_path / basis)
        assert all(tensor.isfinite().all() for tensor in result.tensors.values())
        encoder, gram = result.basis["encoder"], dense.gram
        scale = 0.2 * 4 / encoder.shape[1]
        merged = dense.theta + scale * (dense.tau @ encoder).sum(axis=1)
        assert_close(result.tensors, dense.split(merged), dense.base)
        if basis in ("balanced", "none"):
            plain = dense.theta + 0.2 * dense.tau.sum(axis=1)
            assert_close(result.tensors, dense.split(plain), dense.base)
        if basis == "ae":  # three bases for what spans three dimensions
            assert result.facts["loss"] <= 1e-6 * np.trace(gram)


# mergekit's options


OPTIONS: list[tuple[str, tuple[str, ...]]] = [
    ("bin", ("--lazy-unpickle",)),
    ("safetensors", ("--clone-tensors",)),
    ("bin", ("--async-write", "--write-threads", "2")),
    ("safetensors", ("--no-write-model-card",)),
    ("safetensors", ("--no-copy-tokenizer",)),
    ("bin", ("--read-to-gpu", "--device", "cpu")),
    ("safetensors", ("--random-seed", "5")),
    ("safetensors", ("--no-safe-serialization",)),
    ("safetensors", ("one MB of blocks",)),
]


@pytest.fixture(scope="module")
def plain(inputs: tuple[Path, list[Path]], tmp_path_factory: pytest.TempPathFactory) -> Result:
    out = tmp_path_factory.mktemp("plain") / "out"
    return merge(recipe("basis_ties", *inputs, **PCA), out, cache="off")


@pytest.mark.parametrize(("stored", "options"), OPTIONS)
def test_options_do_not_change_the_result(
    stored: str,
    options: tuple[str, ...],
    plain: Result,
    inputs: tuple[Path, list[Path]],
    tmp_path: Path,
) -> None:
    if stored == "bin":
        base, models = family(tmp_path / "bin", tasks=THREE)
        for folder in (base, *models):
            as_bin(folder, 2)
        inputs = base, models
    blocks = options == ("one MB of blocks",)
    words, env = ((), {"TVB_MERGEKIT_BLOCK_MB": "1"}) if blocks else (options, {})
    made = recipe("basis_ties", *inputs, **PCA)
    other = merge(made, tmp_path / "other", *words, cache="off", env=env)
    assert_same(plain, other)
    assert (other.folder / "README.md").exists() == ("--no-write-model-card" not in options)
    assert (other.folder / "basis" / "basis.json").exists()
    binary = bool(list(other.folder.glob("pytorch_model*.bin")))
    assert binary == ("--no-safe-serialization" in options)


def test_a_merge_prints_a_summary_and_other_programs_open_its_files(
    plain: Result, inputs: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    write(recipe("basis_ties", *inputs, **PCA), tmp_path / "out")
    done = run(["mergekit-yaml", "out.yml", "out"], tmp_path)
    assert done.code == 0, done.err
    for text in ("Cosines", "Encoder weights", "Retained energy", "Written to", *THREE):
        assert text in done.out
    assert "Gram matrix: 100%" in done.err
    assert "Cosines" not in plain.output and "Gram matrix" not in plain.output
    for name in ("model.safetensors", "basis/basis.safetensors"):
        with safe_open(tmp_path / "out" / name, framework="pt") as file:
            assert file.metadata()["format"] == "pt"


# Parameters in other places


@pytest.mark.parametrize("place", ["slices", "modules"])
def test_weights_and_names_in_slices_and_modules(
    place: str, inputs: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    base, models = inputs
    own = {0: {"weight": -1.5, "task": "sums"}, 2: {"weight": 0.5}}
    keys = {**PCA, "forget": "sums", "alpha": 0.5}
    plain = merge(recipe("basis_negate", base, models, own, **keys), tmp_path / "plain")
    made = recipe("basis_negate", base, models, own, **keys)
    listed = made.pop("models")
    if place == "modules":
        made["modules"] = {"default": {"models": listed, "parameters": made.pop("parameters")}}
    else:
        made |= slices(base, models, [(0, 1), (1, 2)])
        for part in made["slices"]:
            for index, values in own.items():
                part["sources"][index]["parameters"] = dict(values)
    assert_same(plain, merge(made, tmp_path / "out"))


def test_weights_with_random_projections(inputs: tuple[Path, list[Path]], tmp_path: Path) -> None:
    base, models = inputs
    keys = {"basis": "rand_proj", "num_bases": 2, "seed": 3, "forget": "code", "alpha": 1}
    made = recipe("basis_negate", base, models, {1: {"weight": -3.0}}, **keys)
    result = merge(made, tmp_path / "out")
    dense = dense_of(base, models, weights=[1.0, -3.0, 1.0])
    want = expect(dense, "basis_negate", keys, result.basis, THREE)
    assert_close(result.tensors, want.tensors, dense.base)


# mergekit-pytorch and memory


@pytest.mark.parametrize("option", ["--tensor-union", "--tensor-intersection"])
def test_raw_tensors_that_not_all_models_have(option: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    states = [{n: torch.randn(30, generator=generator) for n in "xy"} for _ in range(3)]
    del states[1]["y"]
    states[0]["steps"] = states[1]["steps"] = states[2]["steps"] = torch.tensor([5])
    paths = [tmp_path / f"{name}.safetensors" for name in ("base", "a", "b")]
    for path, state in zip(paths, states, strict=True):
        save_file(state, path)
    made = recipe("basis_ta", paths[0], paths[1:], dtype="bfloat16", basis="none")
    result = merge(made, tmp_path / "out", option, command="mergekit-pytorch")
    dense = Dense(states[0], states[1:], ["x"])
    full = dense.split(dense.theta + 0.4 * dense.tau.sum(axis=1))["x"]
    torch.testing.assert_close(result.tensors["x"].double(), full, rtol=2**-8, atol=1e-6)
    assert torch.equal(result.tensors["steps"], states[0]["steps"])
    if option == "--tensor-union":
        assert torch.equal(result.tensors["y"], states[0]["y"].bfloat16())
        assert result.facts["left_out"]["y"] == "missing in a.safetensors"
        states[2]["z"] = torch.ones(3)  # nothing that it could be added to
        save_file(states[2], paths[2])
        refused = merge(made, tmp_path / "no", option, command="mergekit-pytorch", fails=True)
        assert "Error: tensor `z` is not in the base" in refused.output
    else:
        assert set(result.tensors) == {"x", "steps"}


def test_float64_tensors_in_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    states = {
        key: {"w": torch.randn(50, generator=generator, dtype=torch.float64)} for key in "abc"
    }
    merged = merge_methods.merge_state_dicts(
        states, "basis_ta", base="a", parameters={"basis": "none"}
    )
    dense = Dense(states["a"], [states["b"], states["c"]], ["w"])
    want = dense.split(dense.theta + 0.4 * dense.tau.sum(axis=1))
    assert merged["w"].dtype == torch.float64
    assert_close(merged, want, dense.base)
