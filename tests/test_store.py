"""`tvb build`: what is in a store, against the dense reference; interruption and resumption."""

import functools
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from commands import contents, recipe
from numpy.typing import NDArray
from reference import Dense, coefficients, flat, random_projection
from safetensors.torch import load_file, save_file
from tiny import TASKS, family, load
from transformers import AutoConfig, AutoTokenizer
from worlds import state_dicts

import tvb_mergekit
from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.document import from_mapping
from tvb_mergekit.plugin.inputs import Options, read_inputs
from tvb_mergekit.store import build as building
from tvb_mergekit.store import vectors as folders_
from tvb_mergekit.store.build import build_store
from tvb_mergekit.tensors import merging, writing
from tvb_mergekit.tensors.taskset import TaskSet
from tvb_mergekit.tensors.writing import MARKER

pytestmark = pytest.mark.usefixtures("own_cache")
Array = NDArray[np.float64]
KINDS: dict[str, dict[str, Any]] = {
    "ae": {"num_bases": 3, "steps": 300},
    "ae-exact": {"basis": "ae", "solver": "exact", "num_bases": 2},
    "balanced": {"basis": "balanced", "num_bases": 2},
    "linear_ae": {"basis": "linear_ae", "num_bases": 2, "steps": 300},
    "pca": {"basis": "pca", "num_bases": 2},
    "rand_select": {"basis": "rand_select", "num_bases": 3, "seed": 1},
    "rand_proj": {"basis": "rand_proj", "num_bases": 3, "seed": 7},
    "none": {"basis": "none"},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Half a unit in the last place, relative, and the least step of what is too small for that.
ROUNDING = {"float32": (1e-6, 0.0), "bfloat16": (2.0**-8, 0.0), "float16": (2.0**-11, 2.0**-25)}


def read(
    base: Path,
    models: Sequence[Path],
    own: dict[int, dict[str, Any]] | None = None,
    **parameters: Any,
) -> TaskSet:
    """The inputs of a recipe; `basis_negate` if only that accepts the basis."""
    method = "basis_ta"
    if base.is_file():  # each needs its name
        own = {i: {"task": m.stem, **(own or {}).get(i, {})} for i, m in enumerate(models)}
    if parameters.get("basis") == "rand_proj":
        method = "basis_negate"
        parameters |= {"forget": models[0].name.partition(".")[0], "alpha": 1.0}
    return read_inputs(from_mapping(recipe(method, base, models, own, **parameters)), Options())


def dense_of(base: Path, models: Sequence[Path], exclude: str = "-", **weights: Any) -> Dense:
    read_one = load_file if base.is_file() else load
    states = [read_one(path) for path in (base, *models)]
    floats = [n for n, t in states[0].items() if t.is_floating_point() and exclude not in n]
    names = [n for n in floats if all(n in state for state in states)]
    return Dense(states[0], states[1:], names, **weights)


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
    if kind == "rand_proj":
        bases, inner = random_projection(dense, count, keys["seed"])
        assert "encoder" not in numbers
        close(numbers["decoder"], inner, 3e-6)
    else:
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
        low, high = facts["errors"][task]["at_least"], facts["errors"][task]["at_most"]
        # The square of an error near 0 is known to 1e-6.
        width = 0.05 if dtype != "float32" else 2e-5 if error > 0.1 else 5e-3
        assert 0 <= low <= error <= high < low + width, (task, low, error, high)
    if dtype == "float32":
        loss = float((norms**2 * true**2).sum())
        assert facts["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-9 * np.trace(gram))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, "float32") for kind in KINDS), ("pca", "bfloat16"), ("rand_proj", "float16")],
)
def test_the_bases_are_those_of_the_dense_reference(kind, dtype, world, tmp_path):
    base, models = world("mixed dtypes").base, world("mixed dtypes").listed
    keys = KINDS[kind]
    build_store(read(base, models, **keys), tmp_path / "store", dtype=DTYPES[dtype])
    check(tmp_path / "store", dense_of(base, models), keys, dtype)


def in_shards(patch: pytest.MonkeyPatch, limit: int) -> None:
    def plan(items: Any, _: int, ranks: int = 1) -> list[writing.Shard]:
        return writing.plan_shards(items, limit, ranks)

    patch.setattr(folders_, "plan_shards", plan)


def test_the_files_of_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, models = family(tmp_path / "in", tokenizer=True)
    folder, state = tmp_path / "out/store", load(base)
    in_shards(monkeypatch, 30000)
    build_store(read(base, models, basis="pca", num_bases=2), folder)
    assert {p.name for p in folder.parent.iterdir()} == {"store"}
    names = ["basis-000", "basis-001", "mean"]
    assert {p.name for p in folder.iterdir()} == {
        "basis.json", "basis.safetensors", "recipes", *names,
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


def raw_family(folder: Path, sizes: Mapping[str, tuple[int, ...]]) -> tuple[Path, list[Path]]:
    made = state_dicts(folder, "safetensors", sizes=sizes, tasks=TASKS[:4])
    return made.base, list(made.models.values())


SIZES = {"a": (3, 2150), "b": (50,), "none": (0, 4), "scalar": (), "c": (2, 2, 9000), "d": (1,)}
BIG = {"bias": (1000,), "weight": (1201, 1100), "z": (300, 7)}


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


@pytest.mark.parametrize(("kind", "dtype"), [("pca", "bfloat16"), ("rand_proj", "float32")])
def test_files_are_the_same_however_they_were_made(kind, dtype, tmp_path, monkeypatch):
    base, models = raw_family(tmp_path / "in", BIG)
    cache = str(tmp_path / "cache")
    ways = [("256", "off"), ("1", "off"), ("20", "off"), ("256", cache), ("3", cache)]
    for number, (budget, where) in enumerate(ways):
        monkeypatch.setenv("TVB_MERGEKIT_BLOCK_MB", budget)
        monkeypatch.setenv("TVB_MERGEKIT_CACHE", where)
        inputs = read(base, models, **KINDS[kind])
        build_store(inputs, tmp_path / f"store-{number}", dtype=DTYPES[dtype])
        # ||theta_0|| is summed in another order.
        same(tmp_path / "store-0", tmp_path / f"store-{number}", but=("norms",))
    check(tmp_path / "store-0", dense_of(base, models), KINDS[kind], dtype)


# Interruption


class Stopped(Exception):
    pass


def stop_at(monkeypatch: pytest.MonkeyPatch, place: int, part: bool = False) -> list[int]:
    """Let the call number `place` of FoldersSink.write fail once, `part` of it written."""
    calls = [0]
    original = writing.FoldersSink.write

    def write(self: Any, item: Any, start: int, stop: int, values: Any) -> None:
        calls[0] += 1
        if calls[0] - 1 == place:
            if part:
                self.writers[0].write(False, values[0][: len(values[0]) // 2])
            raise Stopped
        original(self, item, start, stop, values)

    monkeypatch.setattr(writing.FoldersSink, "write", write)
    return calls


@pytest.mark.parametrize(
    ("kind", "part", "shards"), [("pca", True, 10**9), ("rand_proj", False, 20000)]
)
def test_resuming_after_every_piece_gives_the_same_store(kind, part, shards, tmp_path, monkeypatch):
    monkeypatch.setenv("TVB_MERGEKIT_BLOCK_MB", "1")
    monkeypatch.setenv("TVB_MERGEKIT_CACHE", "off")
    in_shards(monkeypatch, shards)
    base, models = raw_family(tmp_path / "in", {**SIZES, "c": (2, 4, 20000)})
    make = functools.partial(read, base, models, **KINDS[kind])
    calls = stop_at(monkeypatch, -1)
    whole = tmp_path / "whole" / "store"
    build_store(make(), whole, dtype=torch.bfloat16)
    pieces = calls[0]
    assert pieces > 10
    check(whole, dense_of(base, models), KINDS[kind], "bfloat16")
    monkeypatch.undo()
    for place in range(pieces):
        with monkeypatch.context() as patch:
            patch.setenv("TVB_MERGEKIT_BLOCK_MB", "1")
            patch.setenv("TVB_MERGEKIT_CACHE", "off")
            in_shards(patch, shards)
            out = tmp_path / f"stopped-{place}" / "store"
            with patch.context() as inner, pytest.raises(Stopped):
                stop_at(inner, place, part)
                build_store(make(), out, dtype=torch.bfloat16)
            assert not out.exists() and out.with_name("store.partial").is_dir()
            patch.setattr(merging, "gram_pass", None)
            build_store(make(), out, dtype=torch.bfloat16, resume=True)
            same(whole, out)
            assert {p.name for p in out.parent.iterdir()} == {"store"}


def interrupted(make: Callable[[], TaskSet], out: Path, place: int) -> Path:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_at(patch, place)
        build_store(make(), out)
    return out.with_name(f"{out.name}.partial")


def test_resuming_with_anything_else_is_refused(tmp_path, caplog):
    """Without `resume` it starts anew, and with it where there is nothing to go on with."""
    base, models = raw_family(tmp_path / "in", SIZES)
    keys = KINDS["pca"]
    out = tmp_path / "store"
    partial = interrupted(lambda: read(base, models, **keys), out, 2)
    before = contents(partial)

    def refused(match: str, inputs: TaskSet, **rest: Any) -> None:
        with pytest.raises(UserError, match=match):
            build_store(inputs, out, resume=True, **rest)
        assert contents(partial) == before and not out.exists()

    other = "other models, settings"
    refused(other, read(base, models, basis="pca", num_bases=3))
    refused(other, read(base, models[::-1], **keys))
    refused(other, read(base, models, **keys), dtype=torch.bfloat16)
    refused(other, read(base, models, {0: {"weight": 2.0}}, exclude="^b$", **keys))
    state = load_file(models[0])
    state["a"].view(-1)[3000] += 1  # not among the samples of a fingerprint
    save_file(state, models[0])
    refused(other, read(base, models, **keys))
    for inputs, resume, said in (
        (read(base, models, **KINDS["balanced"]), False, "is replaced"),
        (read(base, models, **keys), True, "starting again"),
    ):
        shutil.rmtree(out, ignore_errors=True)
        build_store(inputs, out, resume=resume)
        assert said in caplog.text and not partial.exists()
        check(out, dense_of(base, models), KINDS[inputs.settings.basis])


def test_bytes_that_were_lost_are_found_by_resume(tmp_path, monkeypatch):
    base, models = raw_family(tmp_path / "in", SIZES)
    out = tmp_path / "store"
    in_shards(monkeypatch, 1)  # a tensor each
    partial = interrupted(lambda: read(base, models, **KINDS["pca"]), out, 3)
    folder = partial / "basis-001"
    files = [folder / f"model-{number:05d}-of-{len(SIZES):05d}.safetensors" for number in (1, 2, 3)]

    def refused(file: Path, text: bytes, message: str) -> None:
        whole = file.read_bytes()
        file.write_bytes(text)
        with pytest.raises(UserError, match=message) as caught:
            build_store(read(base, models, **KINDS["pca"]), out, resume=True)
        named = partial.name if file.name == building.STATE else file.name
        assert named in str(caught.value) and "\n" not in str(caught.value)
        file.write_bytes(whole)

    for file in files:  # complete ones, the first too
        whole = file.read_bytes()
        refused(file, whole[:-8] + bytes(8), "not what was written")
        refused(file, whole[:-1], "shorter than was written")
    journal = partial / building.JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    for damaged in (lines[1:], [bytes(len(lines[0]) - 1) + b"\n", *lines[1:]]):
        refused(journal, b"".join(damaged), "cannot be read")
    state = json.loads((partial / building.STATE).read_text())
    other = json.dumps(state | {"encoder": "0"}).encode()
    refused(partial / building.STATE, other, "or with another PyTorch")
    refused(partial / building.STATE, b"{", "cannot be continued")
    journal.write_bytes(b"".join(lines)[:-10])  # by a kill; the next run must not write on after it
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_at(patch, 1)
        build_store(read(base, models, **KINDS["pca"]), out, resume=True)
    build_store(read(base, models, **KINDS["pca"]), out, resume=True)
    check(out, dense_of(base, models), KINDS["pca"])
