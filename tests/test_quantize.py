"""Codes of 1 to 8 bits: what they mean, and that no better scale is easily found."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tvb_mergekit.core import quantize
from tvb_mergekit.core.quantize import BITS, GROUP, Width
from tvb_mergekit.tensors import codes

WIDTHS = [Width(bits) for bits in BITS]
KINDS = ("dense", "sparse", "heavy", "one sign", "zeros", "one")


def decoded(blocks: Tensor, width: Width, unit: float, numel: int) -> np.ndarray:
    """By docs/files.md alone, element by element, in float64."""
    made, bits, group = np.zeros(numel), width.bits, GROUP
    size = 2 + group * bits // 8
    for first in range(0, numel, group):
        block = blocks.numpy()[first // group * size :]
        (scale,) = block[:2].view(np.float16)
        stream = np.unpackbits(block[2:size], bitorder="little").astype(int)
        for j in range(min(group, numel - first)):
            level = sum(stream[j * bits + place] << place for place in range(bits))
            level -= 2**bits if level >= 2 ** (bits - 1) else 0
            made[first + j] = unit * float(scale) * (level + (scale.view(np.uint16) & 1) / 2)
    return made


def encoded(x: Tensor, width: Width, unit: float) -> Tensor:
    """The blocks; the errors that `encode` returns are those of decoding."""
    blocks = torch.full((quantize.block_bytes(len(x), width),), 255, dtype=torch.uint8)
    rest = torch.empty_like(x)
    square, error = codes.encode(x / unit, width, rest, blocks)
    missed = x.double() / unit - quantize.decode(blocks, width, 1.0, len(x))
    size = float((x.double() / unit).norm())
    near = np.allclose(
        [square, error], [size**2, float(missed.square().sum())], atol=1e-5 * size**2
    )
    assert near and np.allclose(rest, missed, atol=1e-5 * size)
    return blocks


def elements(kind: str, numel: int, size: float, seed: int) -> Tensor:
    torch.manual_seed(seed)
    x, place = torch.randn(numel), torch.arange(numel)
    made = {
        "dense": lambda: x,
        "sparse": lambda: x * (torch.rand(numel) < 0.2),
        "heavy": lambda: x**5,
        "one sign": lambda: -x.abs(),
        "zeros": lambda: x * (place >= numel // 2),
        "one": lambda: (place == numel // 2).float(),
    }
    return made[kind]() * size


@given(st.floats(1e-30, 1e30), st.integers(1, 2**40))
def test_scales_fit_float16(norm: float, numel: int) -> None:
    """The unit is a power of two, such that scales of the size of the elements are about 1/16."""
    unit = quantize.unit_of(norm, numel)
    assert np.frexp(unit)[0] == 0.5 and 1 / 32 < norm / numel**0.5 / unit < 1 / 8


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(KINDS), st.integers(1, 300) | st.integers(1000, 2500), st.sampled_from(WIDTHS),
    st.sampled_from([1e-30, 1e-9, 1e-4, 1.0, 1e20]), st.integers(0, 2**16), st.data(),
)  # fmt: skip
def test_codes_mean_what_the_format_says(
    kind: str, numel: int, width: Width, size: float, seed: int, data: st.DataObject
) -> None:
    x = elements(kind, numel, size, seed)
    unit = quantize.unit_of(float(x.double().norm()), numel)
    blocks = encoded(x, width, unit)
    assert len(blocks) == 2 * -(-numel // GROUP) + -(-numel * width.bits // 8)
    expected = decoded(blocks, width, unit, numel)
    made = quantize.decode(blocks, width, unit, numel)
    np.testing.assert_allclose(made.numpy(), expected, rtol=1e-6, atol=0)

    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    part = torch.empty(stop - start)
    codes.decode(blocks, width, unit, start, stop, part)
    assert torch.equal(part, made[start:stop])

    # No group is worse off than with nothing at all, and one of zeros stays zero.
    for group, here in zip(x.split(GROUP), made.split(GROUP), strict=True):
        assert (here - group).norm() <= group.norm() * (1 + 1e-3)
        assert here.abs().sum() == 0 or group.abs().sum() > 0


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["dense", "sparse", "heavy"])
def test_the_error_is_nearly_the_least(kind: str, width: Width) -> None:
    x = elements(kind, 200 * GROUP, 1.0, 0)
    error = float((quantize.decode(encoded(x, width, 1.0), width, 1.0, len(x)) - x).norm())
    # With many levels some of a hundred scales happens to fit the few elements of a sparse group.
    allowed = {4: 1.1, 8: 1.2}.get(width.bits, 1.03)
    assert error <= allowed * least_error(x.double().view(-1, GROUP).numpy(), width.bits)


def least_error(x: np.ndarray, bits: int) -> float:
    """For groups [g, 64], over many scales and both kinds of levels, each refined."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    best = (x**2).sum(1)
    largest = abs(x).max(1, keepdims=True)
    for share in np.linspace(0.05, 1.1, 60) / abs(low):
        for offset, sign in itertools.product((0, 0.5), (1, -1)):
            scale = sign * share * largest
            for _ in range(3):
                level = np.clip(np.rint(x / scale - offset), low, high) + offset
                best = np.minimum(best, ((x - scale * level) ** 2).sum(1))
                square = (level**2).sum(1, keepdims=True)
                fit = (x * level).sum(1, keepdims=True) / np.where(square == 0, 1, square)
                scale = np.where(fit == 0, scale, fit)
    return float(np.sqrt(best.sum()))


def test_one_bit_is_sign_times_mean_magnitude() -> None:
    x, width = elements("dense", 64, 1.0, 1), Width(1)
    made = quantize.decode(encoded(x, width, 1.0), width, 1.0, 64)
    torch.testing.assert_close(made, x.sign() * x.abs().mean(), rtol=2e-3, atol=0)
