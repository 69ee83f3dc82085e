"""How often a merge reads its models: once if the Gram matrix decides nothing, with equal bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from commands import Result, assert_same, merge, recipe, refused, tvb, write
from reference import Dense
from safetensors.torch import save_file
from tiny import TASKS, family, llama, load
from torch import Tensor

from tvb_mergekit.tensors import merging, passes
from tvb_mergekit.tensors.checkpoint import Checkpoint

HALF = {"basis": "balanced", "num_bases": 2}
FORGET = {"forget": "code", "alpha": 0.5, "lambda": 0.3}
DRAWN = {"basis": "rand_select", "num_bases": 3}
VARYING = [{"filter": "mlp", "value": [0.2, 0.6]}, {"value": 0.4}]
# method, keys -> complete reads of each model, without and with G in the cache
READS: list[tuple[str, dict[str, Any], int, int]] = [
    ("basis_ta", HALF, 1, 1),
    ("basis_ta", {**HALF, "num_bases": 3, "lambda_scale": "tasks", "lambda": VARYING}, 1, 1),
    ("basis_ta", {"basis": "none"}, 1, 1),
    ("basis_ta", {"basis": "groups", "num_bases": 2}, 1, 1),
    ("basis_wudi", {"basis": "groups", "num_bases": 2}, 2, 1),
    ("basis_ta", DRAWN, 1, 1),
    ("basis_ta", {"basis": "balanced", "energy": 0.8}, 2, 1),
    ("basis_ta", {"basis": "pca", "num_bases": 2}, 2, 1),
    ("basis_iso", HALF, 1, 1),
    ("basis_iso", {**HALF, "common": 0.6}, 2, 1),
    ("basis_tsvm", {"basis": "none"}, 1, 1),
    ("basis_wudi", DRAWN, 1, 1),
    ("basis_negate", {"basis": "none", **FORGET}, 1, 1),
    ("basis_negate", {**DRAWN, **FORGET}, 2, 1),
    ("basis_negate", {**HALF, **FORGET}, 2, 1),
    ("basis_negate", {"basis": "rand_proj", **FORGET}, 1, 0),
    ("basis_ties", {"basis": "none"}, 2, 2),
    ("basis_ties", {**DRAWN, "merge_func": "mean"}, 2, 2),
    ("basis_ties", HALF, 3, 2),
    ("basis_ties", {**DRAWN, "trim": "tensor"}, 3, 3),
    ("basis_ties", {**HALF, "trim": "tensor"}, 4, 3),
]
OWN = {1: {"weight": 0.3}, 2: {"weight": -1.7}}
KINDS = {
    "16 bits": (torch.float32, torch.bfloat16, torch.float16),
    "64 bits": (torch.float64,),  # by PyTorch instead of the compiled loops
}
Inputs = tuple[Path, list[Path]]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Inputs]:
    """Tensors of several chunks, in several shards."""
    folder = tmp_path_factory.mktemp("models")
    wide = lambda: llama(vocab_size=6000, tie_word_embeddings=True)  # noqa: E731
    return {
        name: family(folder / name, wide, TASKS, dtypes=kinds, max_shard_size="400KB")
        for name, kinds in KINDS.items()
    }


@pytest.fixture
def read() -> Iterator[Counter[str]]:
    """Folder -> bytes that were read of its tensors, without the samples of fingerprints."""
    seen: Counter[str] = Counter()
    original, sampled = Checkpoint.read, Checkpoint.fingerprint

    def reading(self: Checkpoint, name: str, start: int, stop: int, out: Tensor) -> Tensor:
        seen[self.folder.name] += (stop - start) * self.tensors[name].dtype.itemsize
        return original(self, name, start, stop, out)

    def sampling(self: Checkpoint) -> str:
        before = seen.copy()
        found = sampled(self)
        seen.clear()
        seen.update(before)
        return found

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
    method, keys, times, cached = READS[case]
    base, models = inputs[kind]
    sizes = {m.name: sum(t.nbytes for t in load(m).values()) for m in models}
    document = recipe(method, base, models, OWN, dtype="bfloat16", **keys)
    cache = tmp_path / "cache"
    found = merge(document, tmp_path / "out", cache=cache)
    assert [read[m] / size for m, size in sizes.items()] == [times] * len(models)
    assert f"that of reading {times} x" in tvb("check", write(document, tmp_path / "out")).output
    read.clear()
    again = merge(document, tmp_path / "again", cache=cache)
    assert [read[m] / size for m, size in sizes.items()] == [cached] * len(models)
    assert again.facts["gram_cached"] and not found.facts["gram_cached"]
    with two_passes():
        plain = merge(document, tmp_path / "plain", cache="off")
    for other in (again, plain):
        assert_same(found, other)
        same_report(found, other)
    weights = [OWN.get(number, {}).get("weight", 1.0) for number in range(len(models))]
    dense, gram = Dense.of(base, models, weights), found.basis["gram"]
    assert np.abs(gram - dense.gram).max() <= 1e-6 * np.trace(dense.gram)


def same_report(one: Result, other: Result) -> None:
    for name, array in other.basis.items():
        np.testing.assert_array_equal(one.basis[name], array)
    facts, others = one.facts, other.facts
    for key in ("seconds", "gram_cached", "checksum"):
        del facts[key], others[key]
    assert facts == others


def damaged(inputs: Inputs, folder: Path, value: float | None) -> Inputs:
    """The models, of which `code` holds a number, or is the base's."""
    base, models = inputs
    state = load(models[1] if value is not None else base)
    if value is not None:
        state["model.layers.1.mlp.up_proj.weight"].view(-1)[3] = value
    for model in models[1:2]:
        folder.mkdir()
        (folder / "config.json").write_bytes((model / "config.json").read_bytes())
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return base, [models[0], folder, *models[2:]]


FAULTS = {
    None: "task `code`: its task vector is zero",
    float("nan"): "tensor `model.layers.1.mlp.up_proj.weight` of task `code` holds 1 NaN",
    float("-inf"): "tensor `model.layers.1.mlp.up_proj.weight` of task `code` holds 0 NaN and 1",
}
REFUSED = [("basis_ta", HALF), ("basis_iso", HALF), ("basis_ties", {"basis": "none"})]


@pytest.mark.parametrize(("method", "keys"), REFUSED)
@pytest.mark.parametrize("value", FAULTS)
def test_a_fault_leaves_nothing(
    method: str, keys: Any, value: float | None, inputs: dict[str, Inputs], tmp_path: Path
) -> None:
    base, models = damaged(inputs["16 bits"], tmp_path / "code", value)
    document = recipe(method, base, models, **keys)
    before = {"code", "out.yml"}
    cache = tmp_path.with_name(f"{tmp_path.name}-cache")
    done = merge(document, tmp_path / "out", "--out-shard-size", "300K", cache=cache, fails=True)
    assert FAULTS[value] in done.output
    line = refused("merge", write(document, tmp_path / "out"), tmp_path / "out", "--quiet")
    assert FAULTS[value] in line
    assert {path.name for path in tmp_path.iterdir()} == before


def test_sums_of_very_many_tasks_have_a_pass(inputs: dict[str, Inputs], tmp_path: Path) -> None:
    """Where next to a matrix, or a table, too little memory is left for them."""
    document = recipe("basis_iso", *inputs["16 bits"], **HALF)
    plain = merge(document, tmp_path / "plain", cache="off")
    with (
        mock.patch.object(merging, "LEAST", 1000),
        mock.patch.object(merging, "gram_pass", mock.Mock(wraps=passes.gram_pass)) as summed,
    ):
        assert_same(merge(document, tmp_path / "out", cache="off"), plain)
    assert summed.call_count == 1


def test_weight_files(inputs: dict[str, Inputs], read: Counter[str], tmp_path: Path) -> None:
    base, models = inputs["16 bits"]
    files = []
    for path in (base, *models):
        files.append(tmp_path / f"{path.name}.safetensors")
        save_file(load(path), files[-1], metadata={"format": "pt"})
    document = recipe("basis_ta", files[0], files[1:], dtype="bfloat16", **HALF)
    read.clear()
    found = merge(document, tmp_path / "out", command="mergekit-pytorch", cache="off")
    assert read[tmp_path.name] == sum(
        t.nbytes for file in (base, *models) for t in load(file).values()
    )
    with two_passes():
        plain = merge(document, tmp_path / "plain", command="mergekit-pytorch", cache="off")
    assert_same(found, plain)
    same_report(found, plain)
