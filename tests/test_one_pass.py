"""How often a merge reads its models: once if the Gram matrix decides nothing, with equal bits."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from commands import assert_same, merge, recipe, refused, write
from numpy.typing import NDArray
from reference import Dense
from safetensors.torch import save_file
from tiny import TASKS, family, llama, load
from torch import Tensor

from tvb_mergekit.tensors import merging
from tvb_mergekit.tensors.checkpoint import Checkpoint

HALF = {"basis": "balanced", "num_bases": 2}
FORGET = {"forget": "code", "alpha": 0.5, "lambda": 0.3}
DRAWN = {"basis": "rand_select", "num_bases": 3}
VARYING = [{"filter": "mlp", "value": [0.2, 0.6]}, {"value": 0.4}]
# method, keys -> complete reads of each model
READS: list[tuple[str, dict[str, Any], int]] = [
    ("basis_ta", HALF, 1),
    ("basis_ta", {**HALF, "num_bases": 3, "lambda_scale": "tasks", "lambda": VARYING}, 1),
    ("basis_ta", {"basis": "none"}, 1),
    ("basis_ta", {"basis": "groups", "num_bases": 2}, 1),
    ("basis_wudi", {"basis": "groups", "num_bases": 2}, 2),
    ("basis_ta", DRAWN, 1),
    ("basis_ta", {"basis": "pca", "num_bases": 2}, 2),
    ("basis_iso", HALF, 1),
    ("basis_iso", {**HALF, "common": 0.6}, 2),
    ("basis_tsvm", {"basis": "none"}, 1),
    ("basis_wudi", DRAWN, 1),
    ("basis_negate", {"basis": "none", **FORGET}, 1),
    ("basis_negate", {**DRAWN, **FORGET}, 2),
    ("basis_negate", {**HALF, **FORGET}, 2),
    ("basis_ties", {"basis": "none"}, 2),
    ("basis_ties", {**DRAWN, "merge_func": "mean"}, 2),
    ("basis_ties", HALF, 3),
]
OWN = {1: {"weight": 0.3}, 2: {"weight": -1.7}}
KINDS = {
    "16 bits": (torch.float32, torch.bfloat16, torch.float16),
    "64 bits": (torch.float64,),  # by PyTorch instead of the compiled loops
}
WIDE = partial(llama, vocab_size=6000, num_hidden_layers=1, tie_word_embeddings=True)


class Inputs(NamedTuple):
    """A base and its models, the bytes of each model, and the Gram matrix in float64."""

    base: Path
    models: list[Path]
    sizes: dict[str, int]
    gram: NDArray[np.float64]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Inputs]:
    """Tensors of several chunks, in several shards."""
    folder, made = tmp_path_factory.mktemp("models"), {}
    for name, kinds in KINDS.items():
        base, models = family(folder / name, WIDE, TASKS, dtypes=kinds, max_shard_size="400KB")
        sizes = {m.name: sum(t.nbytes for t in load(m).values()) for m in models}
        weights = [OWN.get(number, {}).get("weight", 1.0) for number in range(len(models))]
        made[name] = Inputs(base, models, sizes, Dense.of(base, models, weights).gram)
    return made


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


def two_passes() -> Any:
    """As if the Gram matrix always decided."""
    return mock.patch.object(merging, "before_gram", lambda *_: None)


@pytest.mark.parametrize(
    ("case", "kind"),
    [*((n, "16 bits") for n in range(len(READS))), (0, "64 bits"), (6, "64 bits"), (15, "64 bits")],
)
def test_reads_and_bits(
    case: int, kind: str, inputs: dict[str, Inputs], read: Counter[str], tmp_path: Path
) -> None:
    """A merge reads as often as it must, and computes G only if it is needed or free."""
    method, keys, times = READS[case]
    base, models, sizes, gram = inputs[kind]
    document = recipe(method, base, models, OWN, dtype="bfloat16", **keys)
    found = merge(document, tmp_path / "out")
    assert {m: read[m] / size for m, size in sizes.items()} == dict.fromkeys(sizes, times)
    with two_passes():
        assert_same(found, plain := merge(document, tmp_path / "plain"))
    norms = [found.facts["norms"][task] for task in found.facts["tasks"]]
    np.testing.assert_allclose(norms, np.sqrt(np.diag(gram)), rtol=1e-6)
    assert np.abs(plain.basis["gram"] - gram).max() <= 1e-6 * np.trace(gram)
    if times > 1:
        assert np.abs(found.basis["gram"] - gram).max() <= 1e-6 * np.trace(gram)
        assert found.facts["loss"] == pytest.approx(plain.facts["loss"], rel=1e-9)
    else:
        assert "gram" not in found.basis and found.facts["loss"] is None
        assert "No Gram matrix" in (tmp_path / "out" / "README.md").read_text()


WEIGHT = "model.layers.0.mlp.up_proj.weight"
SAID = {
    None: "task `code`: its task vector is zero",
    math.nan: f"tensor `{WEIGHT}` of task `code` holds 1 NaN",
    -math.inf: f"tensor `{WEIGHT}` of task `code` holds 0 NaN and 1",
}
WHOLE = {"basis": "none"}
FAULTS: list[tuple[str, dict[str, Any], float | None]] = [
    ("basis_ta", HALF, None),
    ("basis_ta", HALF, math.nan),
    ("basis_iso", HALF, None),
    ("basis_iso", HALF, -math.inf),
    ("basis_ties", WHOLE, None),
    ("basis_ties", WHOLE, math.nan),
]


@pytest.mark.parametrize(("method", "keys", "value"), FAULTS)
def test_a_fault_leaves_nothing(method, keys, value, inputs, tmp_path):
    """The model `code` holds a NaN or an infinity, or is the base."""
    base, models, *_ = inputs["16 bits"]
    code = tmp_path / "code"
    shutil.copytree(models[1], code, ignore=shutil.ignore_patterns("*.safetensors*"))
    state = load(base if value is None else models[1])
    if value is not None:
        state[WEIGHT].view(-1)[3] = value
    save_file(state, code / "model.safetensors", metadata={"format": "pt"})
    document = recipe(method, base, [models[0], code, *models[2:]], **keys)
    done = merge(document, tmp_path / "out", "--out-shard-size", "300K", fails=True)
    said = refused("merge", write(document, tmp_path / "out"), tmp_path / "out", "--quiet")
    assert SAID[value] in done.output and SAID[value] in said
    assert {path.name for path in tmp_path.iterdir()} == {"code", "out.yml"}


def test_a_fault_of_a_second_name_is_named(tmp_path: Path) -> None:
    """A tensor that counts under another name is not summed, and its NaN stops the merge too."""
    base, models = family(tmp_path, partial(llama, tie_word_embeddings=True), TASKS[:2])
    state = load(models[1])
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["lm_head.weight"][0, 0] = math.nan
    save_file(state, models[1] / "model.safetensors", metadata={"format": "pt"})
    for basis in ({"basis": "none"}, {"basis": "pca", "num_bases": 1}):
        document = recipe("basis_ta", base, models, **basis)
        told = merge(document, tmp_path / "out", fails=True).output
        assert "tensor `lm_head.weight` of task" in told and "holds 1 NaN" in told
