"""basis.safetensors and basis.json beside the merged model: keys and values."""

import importlib.metadata
import json
from typing import Any

import pytest
import torch
from commands import Result, merge, recipe, tvb
from reference import adam, loss
from safetensors.torch import save_file
from tiny import TASKS, load

CASES: dict[str, dict[str, Any]] = {
    "ae": {"basis": "ae", "num_bases": 3},
    "exact": {"basis": "ae", "solver": "exact", "num_bases": 2},
    "balanced": {"basis": "balanced", "num_bases": 3},
    "pca": {"basis": "pca", "num_bases": 2},
    "rand_proj": {"basis": "rand_proj", "num_bases": 2},
}


@pytest.fixture(scope="module")
def results(world: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("merged")
    made = {}
    for name, keys in CASES.items():
        method, more = "basis_ta", {}
        if name == "rand_proj":
            method, more = "basis_negate", {"forget": "math", "alpha": 1}
        made[name] = world("llama").merge(method, folder / name, **keys, **more)
    return made


def test_basis_json_says_what_was_merged(results, world):
    base, models = world("llama").base, world("llama").listed
    for case, result in results.items():
        facts = result.facts
        for package in ("tvb-mergekit", "mergekit", "torch"):
            assert facts["versions"][package] == importlib.metadata.version(package)
        assert facts["method"] == ("basis_negate" if case == "rand_proj" else "basis_ta")
        assert (facts["format_version"], facts["left_out"]) == (1, {})
        assert facts["tasks"] == list(TASKS)
        assert (facts["base_model"], facts["models"]) == (str(base), list(map(str, models)))
        assert facts["num_parameters"] == sum(t.numel() for t in load(base).values())
        assert set(facts["fingerprints"]) == {str(path) for path in (base, *models)}
        assert len(set(facts["fingerprints"].values())) == len(TASKS) + 1
        assert set(facts["seconds"]) >= {"encode", "merge"}
        assert all(seconds >= 0 for seconds in facts["seconds"].values())
        card = (result.folder / "README.md").read_text()
        assert "## Task vector bases" in card and all(task in card for task in TASKS)


def test_parameters_are_there_as_resolved(results: dict[str, Result]) -> None:
    found = results["balanced"].facts["parameters"]
    resolved = {"basis": "balanced", "num_bases": 3, "basis_ratio": None, "energy": None}
    resolved |= {"exclude": None, "lambda_scale": "bases", "lambda": 0.4, "seed": 0}
    assert found == resolved | {"weights": dict.fromkeys(TASKS, 1.0)}
    assert results["ae"].facts["parameters"]["solver"] == "adam"
    negated = results["rand_proj"].facts["parameters"]
    assert negated["forget"] == ["math"] and negated["alpha"] == 1 and negated["lambda"] == 0


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
    assert line in " ".join(tvb("inspect", found.folder).output.split())
    told = json.loads(tvb("inspect", found.folder, "--json").output)
    assert told["decoder_losses"] == losses


def test_fingerprints_follow_the_contents(world, results, tmp_path):
    """Not the path, the format or the sharding; any of the values that are sampled."""
    base, models = world("llama").base, world("llama").listed
    before = results["pca"].facts["fingerprints"]
    state = load(models[0])
    same, changed = tmp_path / "same", tmp_path / "changed"
    for folder in (same, changed):
        folder.mkdir()
        (folder / "config.json").write_text((models[0] / "config.json").read_text())
    torch.save(state, same / "pytorch_model.bin")
    state["model.norm.weight"][0] += 1
    save_file(state, changed / "model.safetensors", metadata={"format": "pt"})
    made = recipe("basis_ta", base, [models[1], same, changed], basis="none")
    after = merge(made, tmp_path / "out").facts["fingerprints"]
    assert after[str(base)] == before[str(base)]
    assert after[str(same)] == before[str(models[0])]
    assert after[str(changed)] != before[str(models[0])]
