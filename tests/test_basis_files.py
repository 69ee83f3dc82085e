"""basis.safetensors and basis.json beside the merged model: keys and values."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Result, merge, recipe, tvb
from reference import Dense, adam, balanced_bound, coefficients, loss, spectral_bound
from rich.console import Console
from safetensors.torch import save_file
from tiny import TASKS, family, load

from tvb_mergekit.store.facts import read_facts
from tvb_mergekit.store.report import print_summary

CASES: dict[str, dict[str, Any]] = {
    "ae": {"basis": "ae", "num_bases": 3},
    "exact": {"basis": "ae", "solver": "exact", "num_bases": 2},
    "balanced": {"basis": "balanced", "num_bases": 3},
    "linear_ae": {"basis": "linear_ae", "num_bases": 2, "steps": 200},
    "pca": {"basis": "pca", "num_bases": 2},
    "rand_select": {"basis": "rand_select", "num_bases": 2},
    "none": {"basis": "none"},
    "rand_proj": {"basis": "rand_proj", "num_bases": 2},
}


@pytest.fixture(scope="module")
def base_and_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    return family(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def dense(base_and_models: tuple[Path, list[Path]]) -> Dense:
    base, models = base_and_models
    states = [load(path) for path in (base, *models)]
    return Dense(states[0], states[1:], list(states[0]))


@pytest.fixture(scope="module")
def results(
    base_and_models: tuple[Path, list[Path]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("merged")
    made = {}
    for name, keys in CASES.items():
        method, more = "basis_ta", {}
        if name == "rand_proj":
            method, more = "basis_negate", {"forget": "math", "alpha": 1}
        made[name] = merge(recipe(method, *base_and_models, **keys, **more), folder / name)
    return made


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_the_reference_s(
    case: str, results: dict[str, Result], dense: Dense
) -> None:
    result, gram = results[case], dense.gram
    held, facts = result.basis, result.facts
    size, count = len(TASKS), facts["num_bases"]
    names = {"gram", "eigenvalues", "decoder"}
    names |= {"mixing"} if case == "rand_proj" else {"encoder"}
    names |= {"reconstruction"} if case == "pca" else set()
    assert set(held) == names
    np.testing.assert_allclose(held["gram"], gram, atol=1e-6 * np.trace(gram))
    np.testing.assert_array_equal(held["gram"], held["gram"].T)
    values = held["eigenvalues"]
    assert values.shape == (size,) and (np.diff(values) <= 0).all()
    np.testing.assert_allclose(values, np.sort(np.linalg.eigvalsh(gram))[::-1], rtol=1e-5)
    assert held["decoder"].shape == (count, size)
    bound = spectral_bound(gram, count)
    assert facts["spectral_bound"] == pytest.approx(bound, rel=1e-5, abs=1e-9 * np.trace(gram))
    if case == "rand_proj":
        return
    want = coefficients(dense, CASES[case], held)
    np.testing.assert_allclose(held["encoder"], want.encoder, atol=1e-5)
    np.testing.assert_allclose(held["decoder"], want.decoder, atol=2e-5)
    if case == "pca":
        np.testing.assert_allclose(held["reconstruction"], want.reconstruction, atol=1e-5)
    reached = loss(gram, want.reconstruction)
    assert facts["loss"] == pytest.approx(reached, rel=1e-4, abs=1e-9 * np.trace(gram))
    assert facts["retained_energy"] == pytest.approx(1 - reached / np.trace(gram), abs=1e-6)
    if case == "none":
        assert facts["relative_gap"] is None
    else:
        assert facts["relative_gap"] == pytest.approx(reached / bound - 1, abs=1e-4)
    if case == "balanced":
        assert facts["balanced_bound"] == pytest.approx(balanced_bound(gram, count), rel=1e-5)
        assert facts["loss"] == pytest.approx(facts["balanced_bound"], rel=1e-9)
    else:
        assert facts["balanced_bound"] is None


def test_basis_json_says_what_was_merged(
    results: dict[str, Result], base_and_models: tuple[Path, list[Path]], dense: Dense
) -> None:
    base, models = base_and_models
    for case, result in results.items():
        facts = result.facts
        for package in ("tvb-mergekit", "mergekit", "torch"):
            assert facts["versions"][package] == importlib.metadata.version(package)
        assert facts["method"] == ("basis_negate" if case == "rand_proj" else "basis_ta")
        assert (facts["format_version"], facts["left_out"]) == (1, {})
        assert facts["tasks"] == list(TASKS)
        assert (facts["base_model"], facts["models"]) == (str(base), list(map(str, models)))
        assert facts["num_parameters"] == len(dense.theta)
        assert set(facts["fingerprints"]) == {str(path) for path in (base, *models)}
        assert len(set(facts["fingerprints"].values())) == len(TASKS) + 1
        assert set(facts["seconds"]) >= {"gram", "encode", "merge"}
        assert all(seconds >= 0 for seconds in facts["seconds"].values())
        card = (result.folder / "README.md").read_text()
        assert "## Task vector bases" in card and all(task in card for task in TASKS)


def test_parameters_are_there_as_resolved(results: dict[str, Result]) -> None:
    assert results["ae"].facts["parameters"] == {
        "basis": "ae",
        "num_bases": 3,
        "basis_ratio": None,
        "energy": None,
        "solver": "adam",
        "temperature": 5.0,
        "steps": 4000,
        "learning_rate": 0.01,
        "weight_decay": 1e-6,
        "anneal_every": 0,
        "anneal_factor": 0.9,
        "decoder": "least_squares",
        "seed": 0,
        "exclude": None,
        "lambda_scale": "bases",
        "lambda": 0.4,
        "weights": {task: 1.0 for task in TASKS},
    }
    negated = results["rand_proj"].facts["parameters"]
    assert negated["forget"] == ["math"] and negated["alpha"] == 1 and negated["lambda"] == 0
    assert "solver" not in results["pca"].facts["parameters"]


def test_the_loss_with_either_decoder_is_told(results: dict[str, Result]) -> None:
    assert results["exact"].facts["decoder_losses"] is None
    found = results["ae"]
    gram = found.basis["gram"]
    want = {
        decoder: loss(gram, adam(gram, 3, decoder=decoder).reconstruction)
        for decoder in ("least_squares", "learned")
    }
    losses = found.facts["decoder_losses"]
    assert losses == pytest.approx(want, rel=1e-4)
    assert losses["least_squares"] == found.facts["loss"] < losses["learned"]
    line = f"least squares {losses['least_squares']:.6g}, learned {losses['learned']:.6g}"
    assert line in (found.folder / "README.md").read_text()
    shown = io.StringIO()
    facts = read_facts(found.folder / "basis/basis.json")
    print_summary(facts, {}, "out", Console(file=shown, soft_wrap=True))
    assert line in shown.getvalue()
    inspected = tvb("inspect", found.folder)
    assert line in " ".join(inspected.output.split())
    told = json.loads(tvb("inspect", found.folder, "--json").output)
    assert told["decoder_losses"] == losses


def test_fingerprints_follow_the_contents(
    base_and_models: tuple[Path, list[Path]], results: dict[str, Result], tmp_path: Path
) -> None:
    """Not the path, the format or the sharding; any of the values that are sampled."""
    base, models = base_and_models
    before = results["none"].facts["fingerprints"]
    state = load(models[0])
    same, changed = tmp_path / "same", tmp_path / "changed"
    for folder in (same, changed):
        folder.mkdir()
        (folder / "config.json").write_text((models[0] / "config.json").read_text())
    torch.save(state, same / "pytorch_model.bin")
    state = {name: tensor.clone() for name, tensor in state.items()}
    state["model.norm.weight"][0] += 1
    save_file(state, changed / "model.safetensors", metadata={"format": "pt"})
    made = recipe("basis_ta", base, [models[1], same, changed], basis="none")
    after = merge(made, tmp_path / "out").facts["fingerprints"]
    assert after[str(base)] == before[str(base)]
    assert after[str(same)] == before[str(models[0])]
    assert after[str(changed)] != before[str(models[0])]


def test_left_out_gives_each_tensor_s_reason(tmp_path: Path) -> None:
    base, models = family(tmp_path, tasks=TASKS[:3])
    state = load(models[1])
    del state["model.norm.weight"]
    state["extra.weight"] = torch.zeros(3)
    save_file(state, models[1] / "model.safetensors", metadata={"format": "pt"})
    made = recipe("basis_ta", base, models, basis="none", exclude=r"layers\.0\.mlp\.up")
    facts = merge(made, tmp_path / "out").facts
    assert set(facts["left_out"]) == {
        "model.norm.weight",
        "extra.weight",
        "model.layers.0.mlp.up_proj.weight",
    }
    assert facts["left_out"]["model.norm.weight"] == "missing in code"
    assert "excluded" in facts["left_out"]["model.layers.0.mlp.up_proj.weight"]
    assert str(models[1]) in facts["left_out"]["extra.weight"]


def test_merging_changes_no_input_and_twice_gives_the_same_bytes(
    base_and_models: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    base, models = base_and_models

    def digest(folder: Path) -> dict[str, str]:
        return {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.iterdir())
        }

    before = [digest(path) for path in (base, *models)]
    made = recipe("basis_ties", base, models)
    one, other = (merge(made, tmp_path / n, cache=tmp_path / f"c-{n}") for n in ("one", "other"))
    assert [digest(path) for path in (base, *models)] == before
    for name, array in one.basis.items():
        np.testing.assert_array_equal(array, other.basis[name])
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (one.folder / file).read_bytes() == (other.folder / file).read_bytes(), file
    drop = {"seconds": None, "gram_cached": None}
    assert one.facts | drop == other.facts | drop
    assert json.loads((one.folder / "config.json").read_text())["model_type"] == "llama"
