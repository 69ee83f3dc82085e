"""Models stored without loss: the bytes of a file, and that every bit comes back."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import formats
import numpy as np
import pytest
import torch
import xxhash
import zstandard
from formats import raw, same
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tvb_mergekit.errors import UserError
from tvb_mergekit.tensors import lossless, units
from tvb_mergekit.tensors.lossless import BLOCK, Keeping, Lossless
from tvb_mergekit.tensors.passes import gram_pass
from tvb_mergekit.tensors.stream import Item, Part, StateDict

by_the_format = partial(formats.lossless, size=BLOCK)
SIXTEEN = {torch.bfloat16: 7, torch.float16: 10}


def keep(folder: Path, base: dict[str, Tensor], *models: dict[str, Tensor]) -> list[Lossless]:
    """The models as files, next to the tensors of the base that fit."""
    start, sources = StateDict(base), [StateDict(model) for model in models]
    items = []
    for name, tensor in models[0].items():
        fits = name in base and base[name].shape == tensor.shape
        own = Part.of(start, name) if fits else None
        inputs = tuple(Part.of(source, name) for source in sources)
        items.append(Item(name, tuple(tensor.shape), own, inputs))
    keeping = Keeping([folder / str(k) for k in range(len(models))], items)
    keeping.write()
    found = [Lossless.open(file.folder) for file in keeping.files]
    for each in found:
        each.base = start
    return found


def tuned(draw: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """A base and a model like a fine-tuned one."""
    base = torch.from_numpy(0.05 * draw.standard_normal(shape, np.float32)).to(dtype)
    noise = torch.from_numpy(1e-4 * draw.standard_normal(shape, np.float32))
    return [base, (base.float() + noise).to(dtype)]


@given(
    st.lists(st.integers(0, 40), max_size=3),
    st.sampled_from(list(SIXTEEN)),
    st.sampled_from([1, 4, 200, 2**16]),
    st.integers(0, 2**32 - 1),
)
@example([2 * BLOCK + 5], torch.bfloat16, 3, 0)
@example([BLOCK], torch.float16, 2**16, 1)
@settings(max_examples=60, deadline=None)
def test_every_pattern_comes_back(shape, dtype, far, seed):
    """Arbitrary 16 bits next to arbitrary 16 bits, by the reader and by the manual's program."""
    draw = np.random.default_rng(seed)
    base = draw.integers(0, 2**16, shape).astype(np.uint16)
    away = draw.integers(-far + 1, far, shape) * (draw.random(shape) < draw.random())
    theta = (base + away).astype(np.uint16)
    given = [{"w": torch.from_numpy(np.array(each)).view(dtype)} for each in (base, theta)]
    with tempfile.TemporaryDirectory() as folder:
        (found,) = keep(Path(folder), *given)
        assert same(found.tensor("w"), given[1]["w"])
        read = by_the_format(found.folder / "model.safetensors", given[0])
        assert read["w"] == np.array(theta).tobytes()
        start = draw.integers(0, theta.size + 1)
        stop = draw.integers(start, theta.size + 1)
        part = found.read("w", start, stop, torch.empty(theta.size, dtype=dtype))
        assert same(part, given[1]["w"].reshape(-1)[start:stop])


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_all_pairs_of_special_patterns(dtype: torch.dtype, tmp_path: Path) -> None:
    """Zeros, subnormal numbers, the largest, infinities and NaNs, from each to each."""
    edges = [0, 1, 2, 0x007F, 0x0080, 0x03FF, 0x0400, 0x7BFF, 0x7C00, 0x7F7F, 0x7F80, 0x7FFF]
    every = np.array([sign | edge for sign in (0, 0x8000) for edge in edges], np.uint16)
    pairs = (torch.from_numpy(each.ravel().copy()) for each in np.meshgrid(every, every))
    base, theta = ({"w": each.view(dtype)} for each in pairs)
    (found,) = keep(tmp_path, base, theta)
    assert same(found.tensor("w"), theta["w"])


def test_a_file_in_bytes(tmp_path: Path) -> None:
    """A file of the format, byte by byte."""
    base = {"w": torch.tensor([1.0, 0.5, -1.0, 0.5]).bfloat16()}
    theta = {"w": base["w"].view(torch.int16).add(torch.tensor([1, 0, 300, -1])).short()}
    theta = {"w": theta["w"].view(torch.bfloat16)}
    content = np.empty(400, np.uint8)
    patterns = (each["w"].view(torch.uint16).numpy() for each in (base, theta))
    size, _ = units.pack(*patterns, 7, content, np.empty(260, np.int64))
    # Exponent 127 has +1 and -300 units, symbols 2 and 599 in 8 bits; 126 has 0 and -1 in 2 bits.
    widths, rest = [0] * 126 + [2, 8] + [0] * 128, [255, 0, 599 - 255 - 255]
    assert content[:size].tolist() == [1, 0, 0, 0, 1, 0, 0, 0, *widths, *rest, 2, 255, 0 | 1 << 2]
    (found,) = keep(tmp_path, base, theta)
    block = raw(theta["w"])  # shorter than a frame
    assert by_the_format(found.folder / "model.safetensors", base)["w"] == block
    data = (found.folder / "model.safetensors").read_bytes()
    digest = xxhash.xxh3_64_intdigest(block)
    assert data.endswith(block + bytes([8, 0, 0, 0, 0]) + digest.to_bytes(8, "little"))


def test_tensors_that_the_base_does_not_fit(tmp_path: Path) -> None:
    """Other dtypes, other shapes and integers are kept too; several models share a pass."""
    draw = np.random.default_rng(0)
    base, one = ({"w": each} for each in tuned(draw, (300, 999), torch.bfloat16))
    models = [
        {**one, "wide": torch.randn(7, 3), "ids": torch.arange(5), "half": one["w"][:1].half()}
        for _ in range(2)
    ]
    models[1]["w"] = base["w"]
    both = keep(tmp_path, base | {"wide": torch.zeros(7, 3).half()}, *models)
    for found, model in zip(both, models, strict=True):
        assert list(found.tensors) == list(model)
        assert all(same(found.tensor(name), tensor) for name, tensor in model.items())
        read = by_the_format(found.folder / "model.safetensors", base)
        assert {name: raw(tensor) for name, tensor in model.items()} == read
    entries = both[0].stored.tensors["w"].nbytes, both[1].stored.tensors["w"].nbytes
    assert entries[1] < 400 < entries[0] < 0.25 * models[0]["w"].nbytes


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_bits_are_near_the_conditional_entropy(dtype: torch.dtype, tmp_path: Path) -> None:
    base, theta = tuned(np.random.default_rng(1), (2 * BLOCK,), dtype)
    (found,) = keep(tmp_path, {"w": base}, {"w": theta})
    patterns = [each.view(torch.int16).numpy().astype(np.int64) for each in (base, theta)]
    order = [each ^ (each >> 15 & 0x7FFF) for each in patterns]
    exponents = patterns[0] >> SIXTEEN[dtype] & (1 << 15 - SIXTEEN[dtype]) - 1
    _, pairs = np.unique((exponents << 32) + order[1] - order[0], return_counts=True)
    _, singles = np.unique(exponents, return_counts=True)
    entropy = (singles @ np.log2(singles) - pairs @ np.log2(pairs)) / len(base)
    assert entropy < 8 * found.nbytes / len(base) < 1.1 * entropy


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_damaged_blocks_are_refused(seed):
    """Whatever bytes a frame holds, they are decoded without harm, or refused."""
    draw = np.random.default_rng(seed)
    base, theta = (t.view(torch.uint16).numpy() for t in tuned(draw, (400,), torch.bfloat16))
    content = np.empty(4 * 400 + 300, np.uint8)
    size, _ = units.pack(base, theta, 7, content, np.empty(260, np.int64))
    damaged = content[: draw.integers(0, size + 1)].copy()
    for place in draw.integers(0, max(len(damaged), 1), draw.integers(0, 4)):
        damaged[place:] = draw.integers(0, 256) if len(damaged) else 0
    units.unpack(damaged, base, 7, np.empty_like(base))


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    base, theta = tuned(np.random.default_rng(0), (500,), torch.bfloat16)
    (found,) = keep(tmp_path, {"w": base}, {"w": theta})
    file = tmp_path / "0" / "model.safetensors"
    whole, place = file.read_bytes(), found.stored.tensors["w"].offset
    assert place is not None
    found_so = 0
    for at in range(place, len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :])
        again = Lossless.open(file)
        again.base = found.base
        try:  # a few bits of a frame decide nothing
            assert same(again.tensor("w"), theta)
        except UserError as error:
            assert "model.safetensors: tensor `w` is not what was stored; restore it" in str(error)
            found_so += 1
    assert found_so > 0.9 * (len(whole) - place)
    file.write_bytes(whole)
    other = Lossless.open(file)
    other.base = StateDict({"w": theta})
    with pytest.raises(UserError, match="not what was stored"):
        other.tensor("w")


def test_a_section_gets_a_code_of_its_own() -> None:
    """Sections are worth their blocks of zstd."""
    base, theta = tuned(np.random.default_rng(2), (BLOCK,), torch.bfloat16)
    form, made = lossless.encode(theta, base)
    content = zstandard.ZstdDecompressor().decompress(made)
    assert form == lossless.UNITS
    assert len(made) < 0.95 * len(zstandard.ZstdCompressor(level=3).compress(content))


def test_a_pass_decodes_each_block_once(monkeypatch, tmp_path: Path) -> None:
    """For a number of models at which pieces were not multiples of a block."""
    base, theta = tuned(np.random.default_rng(4), (5 * BLOCK + 3,), torch.bfloat16)
    other = theta.clone()
    other[-1] += 1
    found = keep(tmp_path, {"w": base}, *[{"w": theta}] * 11, {"w": other})
    decode = mock.Mock(wraps=lossless.decode)
    monkeypatch.setattr(lossless, "decode", decode)
    prints = {model.fingerprint() for model in found}
    assert not decode.called and len(prints) == 2
    parts = [Part.of(model, "w") for model in found]
    items = [Item("w", (len(base),), Part.of(StateDict({"w": base}), "w"), tuple(parts))]
    rest = Item("v", (1,), None, tuple(Part.of(StateDict({"v": theta[:1]}), "v") for _ in found))
    sums = gram_pass([*items, rest], [str(k) for k in range(12)])
    assert decode.call_count == 12 * 6
    tau = theta.double() - base.double()
    assert sums.gram[0, 1] == pytest.approx(float(tau @ tau + theta[0].double() ** 2), rel=1e-6)
