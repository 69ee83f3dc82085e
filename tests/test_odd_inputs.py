"""What a merge rarely meets: odd buffers, names, tokenizers and defaults."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import merge, ready, recipe, tvb, write
from mergekit import merge_methods
from safetensors.torch import load_file, save_file
from tiny import family, load
from torch import Tensor

from tvb_mergekit.tensors.stream import whole_parts

BALANCED = {"basis": "balanced", "num_bases": 2}


def saved(folder: Path, **others: Tensor) -> tuple[Path, list[Path]]:
    """A base and three tuned state dicts in files, with more tensors that are the same in all."""
    torch.manual_seed(0)
    base = {"w": torch.randn(40, 8)}
    paths = []
    for index in range(4):
        state = {
            name: tensor + 0.1 * index * torch.randn_like(tensor) for name, tensor in base.items()
        }
        paths.append(folder / f"{index}.pt")
        torch.save({**state, **others}, paths[-1])
    return paths[0], paths[1:]


def test_buffers_that_are_no_floats(tmp_path: Path) -> None:
    """Complex and unsigned ones go into safetensors; what safetensors lack is said before."""
    others = {
        "rotary": torch.randn(3, dtype=torch.complex64),
        "ids": torch.arange(4).to(torch.uint16),
    }
    base, models = saved(tmp_path, **others)
    made = recipe("basis_ta", base, [str(m) for m in models], **BALANCED)
    merge(made, tmp_path / "out", command="mergekit-pytorch")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in others.items())
    base, models = saved(tmp_path, wide=torch.randn(3, dtype=torch.complex128))
    made = recipe("basis_ta", base, [str(m) for m in models], **BALANCED)
    told = merge(made, tmp_path / "no", command="mergekit-pytorch", fails=True).output
    assert "tensor `wide`: safetensors hold no torch.complex128" in told
    merge(made, tmp_path / "bin", "--no-safe-serialization", command="mergekit-pytorch")


def test_a_union_has_what_only_the_base_has(tmp_path: Path) -> None:
    base, *models = (tmp_path / f"{name}.safetensors" for name in ("base", "math", "code"))
    for path, more in ((base, {"b": torch.ones(3)}), *((model, {}) for model in models)):
        save_file({"w": torch.randn(40, 8), **more}, path)
    made = recipe("basis_ta", base, [str(m) for m in models], **BALANCED)
    result = merge(made, tmp_path / "out", "--tensor-union", command="mergekit-pytorch")
    assert set(result.tensors) == {"w", "b"}
    assert result.facts["left_out"]["b"].startswith("missing in")


def test_tokenizers_beside_the_base_s(tmp_path: Path) -> None:
    base, models = family(tmp_path, tasks=("math", "code", "safety"))
    tokens = {"source": "base", "tokens": {"new": {"source": {"kind": "zero"}}}}
    made = recipe("basis_ta", base, models, extra={"tokenizer": tokens}, **BALANCED)
    told = merge(made, tmp_path / "no", fails=True).output
    assert "tokens that the base lacks (such as 'new')" in told
    bad = {"source": "base", "tokens": {"new": {"sauce": 1}}}
    made = recipe("basis_ta", base, models, extra={"tokenizer": bad}, **BALANCED)
    assert (
        "unknown key `sauce` under `tokens.new`" in merge(made, tmp_path / "no", fails=True).output
    )
    store = tmp_path / "store"
    file = write(recipe("basis_ta", base, models, basis="pca", num_bases=2), tmp_path / "pca")
    tvb("build", file, store, "--quiet")
    padded = {"source": "base", "pad_to_multiple_of": 64}
    made = ready(store, "forget-math.yml") | {"tokenizer": padded}
    told = merge(made, tmp_path / "no", fails=True).output
    assert "the store's mean has [96, 32]" in told


@pytest.fixture
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_a_default_dtype_changes_nothing(float64_by_default: None, tmp_path: Path) -> None:
    base, models = family(tmp_path, tasks=("math", "code", "safety"))
    torch.set_default_dtype(torch.float64)  # which saving may have set back
    states = {name: load(path) for name, path in zip("0123", (base, *models), strict=True)}
    merged = merge_methods.merge_state_dicts(states, "basis_ta", base="0", parameters=BALANCED)
    assert all(tensor.dtype == torch.float32 for tensor in merged.values())


def test_what_is_loaded_whole_is_dropped_once_read() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def made() -> list[Tensor]:
        tensors = [torch.zeros(100) for _ in range(3)]
        seen.extend(map(weakref.ref, tensors))
        return tensors

    first, second, _third = whole_parts(made, [torch.float32] * 3, 100)
    del _third  # as rand_proj's inputs, which nothing reads
    for part in (first, second):
        for start in (0, 50):
            assert part.read(start, start + 50, torch.empty(0)).tolist() == [0.0] * 50
    gc.collect()
    assert len(seen) == 3 and all(tensor() is None for tensor in seen)
