"""`tvb build`: what is in a store, against the dense reference; interruption."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors
import torch
from commands import recipe
from numpy.typing import NDArray
from reference import Dense, coefficients, flat
from safetensors.torch import load_file
from tiny import TASKS, family, load
from transformers import AutoConfig, AutoTokenizer
from worlds import state_dicts

import tvb_mergekit
from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.document import from_mapping
from tvb_mergekit.plugin.inputs import Options, read_inputs
from tvb_mergekit.store import api
from tvb_mergekit.store import vectors as folders_
from tvb_mergekit.store.build import build_store
from tvb_mergekit.tensors import writing
from tvb_mergekit.tensors.taskset import TaskSet
from tvb_mergekit.tensors.writing import MARKER

Array = NDArray[np.float64]
KINDS: dict[str, dict[str, Any]] = {
    "ae": {"num_bases": 3, "steps": 300},
    "balanced": {"basis": "balanced", "num_bases": 2},
    "linear_ae": {"basis": "linear_ae", "num_bases": 2, "steps": 300},
    "pca": {"basis": "pca", "num_bases": 2},
    "rand_select": {"basis": "rand_select", "num_bases": 3, "seed": 1},
    "none": {"basis": "none"},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Half a unit in the last place, relative, and the least step of what is too small for that.
ROUNDING = {"float32": (1e-6, 0.0), "bfloat16": (2.0**-8, 0.0), "float16": (2.0**-11, 2.0**-25)}


def document(
    base: Path,
    models: Sequence[Path],
    own: dict[int, dict[str, Any]] | None = None,
    **parameters: Any,
) -> dict[str, Any]:
    return recipe("basis_ta", base, models, own, **parameters)


def read(base: Path, models: Sequence[Path], own: Any = None, **parameters: Any) -> TaskSet:
    if base.is_file():  # the library takes weight files
        own = own or {}
        named = {own.get(i, {}).get("task", m.stem): str(m) for i, m in enumerate(models)}
        weights = [own.get(i, {}).get("weight", 1.0) for i in range(len(models))]
        return api._inputs(base, named, dict(zip(named, weights, strict=True)), parameters)
    return read_inputs(from_mapping(document(base, models, own, **parameters)), Options())


def dense_of(base: Path, models: Sequence[Path]) -> Dense:
    states = [load_file(path) if path.is_file() else load(path) for path in (base, *models)]
    return Dense(states[0], states[1:], [n for n, t in states[0].items() if t.is_floating_point()])


def stored(folder: Path, dense: Dense, count: int, dtype: torch.dtype) -> Array:
    """[d, M] as the files hold it."""
    found = [load(folder / f"basis-{m:03d}") for m in range(count)]
    for state in found:
        assert {n: (t.shape, t.dtype) for n, t in state.items()} == {
            n: (dense.base[n].shape, dtype) for n in dense.names
        }
    return np.stack([flat(state, dense.names) for state in found], axis=1)


def close(found: Array, want: Array, tolerance: float = 1e-6) -> None:
    assert found.shape == want.shape
    assert np.linalg.norm(found - want) <= tolerance * np.linalg.norm(want)


def check(folder: Path, dense: Dense, keys: dict[str, Any], dtype: str = "float32") -> None:
    """Bases, mean, coefficients and errors of a store against the dense float64 reference."""
    facts = json.loads((folder / "basis.json").read_text())
    held = load_file(folder / "basis.safetensors")
    assert all(tensor.dtype == torch.float64 for tensor in held.values())
    numbers = {name: tensor.numpy() for name, tensor in held.items()}
    kind, count, gram = str(keys.get("basis", "ae")), facts["num_bases"], dense.gram
    close(numbers["gram"], gram)
    close(numbers["eigenvalues"], np.sort(np.linalg.eigvalsh(gram))[::-1])
    want = coefficients(dense, keys, numbers)
    close(numbers["encoder"], want.encoder, 2e-5)
    close(numbers["decoder"], want.decoder, 1e-4)
    bases = dense.tau @ numbers["encoder"]
    close(numbers["gram_bases"], bases.T @ bases, 2e-6)
    found = stored(folder, dense, count, DTYPES[dtype])
    relative, least = ROUNDING[dtype]
    assert np.linalg.norm(found - bases) <= (relative + 1e-6) * np.linalg.norm(bases)
    bound = (relative + 1e-6) * np.abs(bases) + least + 2e-7 * np.abs(bases).max()
    assert (np.abs(found - bases) <= bound).all()
    offset = np.zeros((len(dense.theta), 1))
    assert (folder / "mean").exists() == (kind == "pca")
    if kind == "pca":
        mean = dense.tau.mean(axis=1, keepdims=True)
        offset = flat(load(folder / "mean"), dense.names)[:, None]
        assert np.linalg.norm(offset - mean) <= (relative + 1e-6) * np.linalg.norm(mean)
    norms = np.linalg.norm(dense.tau, axis=0)
    rebuilt = found @ numbers["decoder"] + offset
    true = np.linalg.norm(rebuilt - dense.tau, axis=0) / norms
    for task, error in zip(facts["tasks"], true, strict=True):
        # The square of an error near 0 is known to 1e-6; the rounding of stored bases is not in it.
        width = 0.05 if dtype != "float32" else 2e-5 if error > 0.1 else 5e-3
        assert abs(facts["errors"][task] - error) < width, (task, error)
    if dtype == "float32":
        loss = float((norms**2 * true**2).sum())
        assert facts["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-9 * np.trace(gram))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, "float32") for kind in KINDS), ("pca", "bfloat16"), ("ae", "float16")],
)
def test_the_bases_are_those_of_the_dense_reference(kind, dtype, world, tmp_path):
    base, models = world("mixed dtypes").base, world("mixed dtypes").listed
    keys = KINDS[kind]
    build_store(read(base, models, **keys), tmp_path / "store", dtype=DTYPES[dtype])
    check(tmp_path / "store", dense_of(base, models), keys, dtype)


def in_shards(limit: int) -> Any:
    def plan(items: Any, _: int) -> list[writing.Shard]:
        return writing.plan_shards(items, limit)

    return mock.patch.object(folders_, "plan_shards", plan)


def test_the_files_of_a_store(tmp_path: Path) -> None:
    base, models = family(tmp_path / "in", tokenizer=True)
    folder, state = tmp_path / "out/store", load(base)
    with in_shards(30000):
        build_store(read(base, models, basis="pca", num_bases=2), folder)
    assert {p.name for p in folder.parent.iterdir()} == {"store"}
    names = ["basis-000", "basis-001", "mean"]
    assert {p.name for p in folder.iterdir()} == {
        "basis.json", "basis.safetensors", *names,
    }  # fmt: skip
    facts = json.loads((folder / "basis.json").read_text())
    assert facts["store"]["folders"] == names
    assert set(facts["seconds"]) == {"gram", "encode", "write"}
    assert facts["num_parameters"] == sum(t.numel() for t in state.values())
    assert facts["store"]["model_bytes"] == 5 * sum(t.nbytes for t in state.values())
    for index, name in enumerate(names):
        place = folder / name
        shards = sorted(p.name for p in place.glob("*.safetensors"))
        where = json.loads((place / "model.safetensors.index.json").read_text())
        assert {p.name for p in place.iterdir()} == {
            *shards, "model.safetensors.index.json", "config.json", "generation_config.json",
            "tokenizer.json", "tokenizer_config.json",
        }  # fmt: skip
        assert len(shards) > 2
        seen: dict[str, str] = {}
        for number, shard in enumerate(shards):
            assert shard == f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            assert (place / shard).stat().st_size <= 30000 + 2000
            with safetensors.safe_open(place / shard, framework="pt") as file:
                assert file.metadata() == {"format": "pt", MARKER: name}
                seen |= dict.fromkeys(file.keys(), shard)
        assert where["weight_map"] == seen and set(seen) == set(state)
        assert where["metadata"]["total_size"] == 4 * facts["num_parameters"]
        config = json.loads((place / "config.json").read_text())
        assert config.pop(MARKER) == {"folder": name, "index": index}
        assert config == json.loads((base / "config.json").read_text())
        assert AutoConfig.from_pretrained(place).hidden_size == 32
        assert AutoTokenizer.from_pretrained(place)("t1 t5")["input_ids"] == [1, 5]
        for file_name in (*shards, "model.safetensors.index.json"):
            record = facts["store"]["files"][f"{name}/{file_name}"]
            assert record == writing.file_record(place / file_name)
    (base / "config.json").write_text('["ab"]')
    with pytest.raises(UserError, match="expected an object, found list"):
        tvb_mergekit.build(base, {"a": models[0]}, tmp_path / "out/other", basis="none")
    assert not (tmp_path / "out/other").exists()


SIZES = {"a": (3, 2150), "b": (50,), "none": (0, 4), "scalar": (), "c": (2, 2, 9000), "d": (1,)}
BIG = {"bias": (1000,), "weight": (601, 1100), "z": (300, 7)}


def raw_family(
    folder: Path,
    sizes: Mapping[str, tuple[int, ...]] = SIZES,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
) -> tuple[Path, list[Path]]:
    made = state_dicts(folder, "safetensors", dtypes, sizes=sizes, tasks=TASKS[:4])
    return made.base, list(made.models.values())


def same(one: Path, other: Path, but: Sequence[str] = ()) -> None:
    """Two stores are alike byte for byte but for the seconds in basis.json and their own paths."""
    files = sorted(p.relative_to(one) for p in one.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(other) for p in other.rglob("*") if p.is_file())
    for name in files:
        mine, theirs = (one / name).read_bytes(), (other / name).read_bytes()
        if str(name) == "basis.json":
            left, right = json.loads(mine), json.loads(theirs)
            for key in ("seconds", *but):
                left.pop(key), right.pop(key)
            assert left == right
        else:
            mine = mine.replace(os.fsencode(one), b"STORE")
            assert mine == theirs.replace(os.fsencode(other), b"STORE"), name


@pytest.mark.parametrize(("kind", "dtype"), [("pca", "bfloat16"), ("balanced", "float32")])
def test_files_are_the_same_however_they_were_made(kind, dtype, tmp_path):
    base, models = raw_family(tmp_path / "in", BIG)
    before = torch.get_num_threads()
    for number, threads in enumerate((1, 2, 3)):
        torch.set_num_threads(threads)
        inputs = read(base, models, **KINDS[kind])
        build_store(inputs, tmp_path / f"store-{number}", dtype=DTYPES[dtype])
        same(tmp_path / "store-0", tmp_path / f"store-{number}")
    torch.set_num_threads(before)
    check(tmp_path / "store-0", dense_of(base, models), KINDS[kind], dtype)


# Interruption


def test_an_interrupted_build_begins_again(tmp_path: Path) -> None:
    """An error leaves nothing; what a kill leaves is replaced, and a user's folder is not."""
    (base, models), out = raw_family(tmp_path / "in"), tmp_path / "store"
    inputs, partial = read(base, models, **KINDS["pca"]), tmp_path / "store.partial"
    with mock.patch.object(writing.FoldersSink, "write", side_effect=OSError("full")):
        with pytest.raises(OSError, match="full"):
            build_store(inputs, out)
    assert not partial.exists() and not out.exists()
    partial.mkdir()
    (partial / "mine").touch()
    with pytest.raises(UserError, match=r"store.partial is in the way: move or delete it"):
        build_store(inputs, out)
    (partial / ".unfinished").touch()
    build_store(inputs, out)
    assert not partial.exists() and not (out / ".unfinished").exists()
    check(out, dense_of(base, models), KINDS["pca"])
