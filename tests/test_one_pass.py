"""How often a merge reads its models: once if the Gram matrix decides nothing."""

import math
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from commands import merge, recipe
from reference import Dense
from safetensors.torch import save_file
from tiny import load
from torch import Tensor
from worlds import World

from tvb_mergekit.tensors.checkpoint import Checkpoint

HALF = {"basis": "balanced", "num_bases": 2}
FORGET = {"forget": "code", "alpha": 0.5, "lambda": 0.3}
DRAWN = {"basis": "rand_select", "num_bases": 3}
VARYING = [{"filter": "mlp", "value": [0.2, 0.6]}, {"value": 0.4}]
# method, keys -> complete reads of each model
READS: list[tuple[str, dict[str, Any], int]] = [
    ("basis_ta", {**HALF, "num_bases": 3, "lambda_scale": "tasks", "lambda": VARYING}, 1),
    ("basis_ta", DRAWN, 1),
    ("basis_ta", {"basis": "pca", "num_bases": 2}, 2),
    ("basis_iso", HALF, 1),
    ("basis_iso", {**HALF, "common": 0.6}, 2),
    ("basis_tsvm", {"basis": "none"}, 1),
    ("basis_wudi", {"basis": "groups", "num_bases": 2}, 2),
    ("basis_negate", {"basis": "none", **FORGET}, 1),
    ("basis_negate", {**DRAWN, **FORGET}, 2),
    ("basis_ties", {**DRAWN, "merge_func": "mean"}, 2),
    ("basis_ties", HALF, 3),
]
OWN = {1: {"weight": 0.3}, 2: {"weight": -1.7}}


@pytest.fixture
def read() -> Iterator[Counter[str]]:
    """Folder -> bytes that were read of its tensors, without the samples of fingerprints."""
    seen: Counter[str] = Counter()
    original, sampled = Checkpoint.read, Checkpoint.fingerprint

    def reading(self: Checkpoint, name: str, start: int, stop: int, out: Tensor) -> Tensor:
        seen[self.folder.name] += (stop - start) * self.tensors[name].dtype.itemsize
        return original(self, name, start, stop, out)

    def sampling(self: Checkpoint) -> str:
        with mock.patch.object(Checkpoint, "read", original):
            return sampled(self)

    with (
        mock.patch.object(Checkpoint, "read", reading),
        mock.patch.object(Checkpoint, "fingerprint", sampling),
    ):
        yield seen


@pytest.mark.parametrize(("method", "keys", "times"), READS)
def test_reads(method, keys, times, world: World, read, tmp_path):
    """A merge reads as often as it must, and computes G only if it is needed or free."""
    models = world("mixed dtypes")
    found = models.merge(method, tmp_path / "out", own=OWN, **keys)
    sizes = {p.name: sum(t.nbytes for t in load(p).values()) for p in models.models.values()}
    assert {m: read[m] / size for m, size in sizes.items()} == dict.fromkeys(sizes, times)
    weights = [OWN.get(number, {}).get("weight", 1.0) for number in range(5)]
    gram = Dense(models.states[0], models.states[1:], [*models.states[0]], weights).gram
    norms = [found.facts["norms"][task] for task in found.facts["tasks"]]
    np.testing.assert_allclose(norms, np.sqrt(np.diag(gram)), rtol=1e-6)
    if times > 1:
        assert np.abs(found.basis["gram"] - gram).max() <= 1e-6 * np.trace(gram)
    else:
        assert "gram" not in found.basis and found.facts["loss"] is None
        assert "No Gram matrix" in (tmp_path / "out" / "README.md").read_text()


WEIGHT = "model.layers.0.mlp.up_proj.weight"
FAULTS: list[tuple[str, dict[str, Any], float | None, str]] = [
    ("basis_ta", HALF, None, "task `code`: its task vector is zero"),
    ("basis_iso", HALF, -math.inf, f"tensor `{WEIGHT}` of task `code` holds 0 NaN and 1"),
    ("basis_ties", {"basis": "none"}, math.nan, f"tensor `{WEIGHT}` of task `code` holds 1 NaN"),
]


@pytest.mark.parametrize(("method", "keys", "value", "said"), FAULTS)
def test_a_fault_leaves_nothing(method, keys, value, said, world, tmp_path):
    """The model `code` holds a NaN or an infinity, or is the base."""
    models = world("llama")
    shutil.copytree(models.listed[1], tmp_path / "code")
    state = load(models.base if value is None else models.listed[1])
    if value is not None:
        state[WEIGHT].view(-1)[3] = value
    save_file(state, tmp_path / "code" / "model.safetensors", metadata={"format": "pt"})
    listed = [models.listed[0], tmp_path / "code", *models.listed[2:]]
    document = recipe(method, models.base, listed, **keys)
    done = merge(document, tmp_path / "out", "--out-shard-size", "300K", fails=True)
    assert said in done.output
    assert {path.name for path in tmp_path.iterdir()} == {"code", "out.yml"}


def test_a_fault_of_a_second_name_is_named(world: World, tmp_path: Path) -> None:
    """A tensor that counts under another name is not summed, and its NaN stops the merge too."""
    models = world("tied")
    shutil.copytree(models.listed[1], tmp_path / "code")
    state = dict(models.states[2])
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["lm_head.weight"][0, 0] = math.nan
    save_file(state, tmp_path / "code" / "model.safetensors", metadata={"format": "pt"})
    for basis in ({"basis": "none"}, {"basis": "pca", "num_bases": 1}):
        document = recipe("basis_ta", models.base, [models.listed[0], tmp_path / "code"], **basis)
        told = merge(document, tmp_path / "out", fails=True).output
        assert "tensor `lm_head.weight` of task" in told and "holds 1 NaN" in told
