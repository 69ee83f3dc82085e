"""Several merges in one process, and inputs that change between them: nothing may be stale."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from commands import Result, assert_close, assert_same, merge, recipe
from reference import Dense, expect
from safetensors.torch import save_file
from tiny import TASKS, family, llama, load

from tvb_mergekit.tensors import merging

THREE = TASKS[:3]
PCA: dict[str, Any] = {"basis": "pca", "num_bases": 2}


def dense_of(base: Path, models: list[Path]) -> Dense:
    states = [load(path) for path in (base, *models)]
    return Dense(states[0], states[1:], list(states[0]))


def wide() -> torch.nn.Module:
    """Tensors of more elements than a fingerprint samples."""
    return llama(vocab_size=512)


@pytest.fixture
def inputs(tmp_path: Path) -> tuple[Path, list[Path]]:
    return family(tmp_path / "models", wide, THREE, tokenizer=False)


# The Gram cache


AGAIN = [
    ("basis_ta", {**PCA, "lambda": 0.9}, {0: {"weight": -2.0, "task": "sums"}}),
    ("basis_ties", {"basis": "balanced", "trim": "tensor"}, {}),
]


@pytest.mark.parametrize(("method", "keys", "own"), AGAIN)
def test_another_merge_of_the_same_inputs_reads_no_gram(method, keys, own, inputs, tmp_path):
    cache = tmp_path / "cache"
    first = merge(recipe("basis_ta", *inputs, **PCA), tmp_path / "first", cache=cache)
    assert first.facts["gram_cached"] is False
    with mock.patch.object(merging, "gram_pass", None):
        again = merge(recipe(method, *inputs, own, **keys), tmp_path / "again", cache=cache)
    assert again.facts["gram_cached"] is True
    fresh = merge(recipe(method, *inputs, own, **keys), tmp_path / "fresh", cache="off")
    assert fresh.facts["gram_cached"] is False
    assert_same(again, fresh)
    for name, array in fresh.basis.items():
        np.testing.assert_array_equal(again.basis[name], array)
    same = ("loss", "num_parameters", "norms", "fingerprints", "parameters")
    assert all(again.facts[key] == fresh.facts[key] for key in same)


@pytest.mark.parametrize(
    "keys",
    [{**PCA, "exclude": "mlp"}, {"basis": "rand_proj", "num_bases": 2}, {**PCA, "order": -1}],
)
def test_what_changes_the_sums_changes_the_entry(keys, inputs, tmp_path):
    cache, more = tmp_path / "cache", {"forget": "code", "alpha": 1}
    base, models = inputs
    merge(recipe("basis_negate", base, models, **PCA, **more), tmp_path / "first", cache=cache)
    models, keys = models[:: keys.get("order", 1)], {**keys, **more}
    keys.pop("order", None)
    other = recipe("basis_negate", base, models, **keys)
    second = merge(other, tmp_path / "second", cache=cache)
    assert second.facts["gram_cached"] is False
    assert_same(second, merge(other, tmp_path / "off", cache="off"))
    if keys["basis"] == "rand_proj":
        other["parameters"]["seed"] = 1
        assert merge(other, tmp_path / "seed", cache=cache).facts["gram_cached"] is False


def change_unsampled(folder: Path) -> None:
    """New values where no fingerprint samples; same path, size and modification time."""
    path = folder / "model.safetensors"
    before = path.stat()
    state = {name: tensor.clone() for name, tensor in load(folder).items()}
    state["model.embed_tokens.weight"].view(-1)[2000:5000] += 0.5
    save_file(state, path, metadata={"format": "pt"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def test_a_damaged_entry_counts_as_absent(inputs: tuple[Path, list[Path]], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    made = recipe("basis_ta", *inputs, **PCA)
    first = merge(made, tmp_path / "first", cache=cache)
    (entry,) = cache.glob("*.safetensors")
    entry.write_bytes(entry.read_bytes()[:-16])
    second = merge(made, tmp_path / "second", cache=cache)
    assert second.facts["gram_cached"] is False
    assert_same(first, second)
    assert merge(made, tmp_path / "third", cache=cache).facts["gram_cached"] is True


def test_mergekit_multi_merges_what_it_has_merged(inputs, tmp_path):
    base, models = inputs
    for number in range(2):
        inter = tmp_path / f"inter{number}"
        first = {"name": "first"} | recipe("basis_ta", base, models, **PCA)
        second = {"name": "second"} | recipe("basis_ties", Path("first"), models, **PCA)
        own = {0: {"weight": 1.0}}
        third = recipe("task_arithmetic", base, ["second"], own, normalize=False, lambda_=0.5)
        words = ("-I", str(inter))
        documents = [first, second, third]
        out = merge(documents, tmp_path / f"out{number}", *words, command="mergekit-multi")
        one, two = Result(inter / "first"), Result(inter / "second")
        want = expect(dense_of(base, models), "basis_ta", PCA, one.basis, THREE)
        assert_close(one.tensors, want.tensors, load(base))
        dense = dense_of(one.folder, models)
        want = expect(dense, "basis_ties", PCA, two.basis, THREE)
        assert_close(two.tensors, want.tensors, dense.base, want.boundary)
        dense = dense_of(base, [two.folder])
        assert_close(out.tensors, dense.split(dense.theta + 0.5 * dense.tau[:, 0]), dense.base)
        change_unsampled(base)
        change_unsampled(models[2])
