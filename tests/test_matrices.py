"""Merges by singular directions against dense float64, written from the papers' formulas."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tvb_mergekit
from tvb_mergekit.core.matrices import NULL, rounding_noise
from tvb_mergekit.core.methods.iso import isotropic
from tvb_mergekit.core.methods.tsvm import singular_vectors
from tvb_mergekit.core.methods.wudi import interference_free
from tvb_mergekit.core.settings import METHODS as KINDS

Array = reference.Array
svd = np.linalg.svd
FORMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "isotropic": ("isotropic", "basis_iso", {}),
    "cts": ("isotropic", "basis_iso", {"common": 0.6}),
    "singular_vectors": ("singular_vectors", "basis_tsvm", {}),
    "exact": ("interference_free", "basis_wudi", {"flow_time": "exact"}),
    "stopped": ("interference_free", "basis_wudi", {"flow_time": 300.0}),
    "auto": ("interference_free", "basis_wudi", {"flow_time": "auto"}),
}
SINGLE = ("stopped", "auto")  # computed in float32
METHODS = {k: partial(KINDS[method].function, **keys) for k, (_, method, keys) in FORMS.items()}
DENSE = {k: partial(getattr(reference, name), **keys) for k, (name, _, keys) in FORMS.items()}
least = METHODS["exact"]
SHAPES = [(4, 40, 60), (8, 60, 40), (5, 31, 31), (1, 20, 30), (1, 30, 20), (2, 73, 12)]
SHAPES += [(3, 16, 135)]  # fewer rows in all than columns


def interference(merged: Tensor, bases: Tensor) -> float:
    """WUDI's loss of a D [m, n]: sum_m ||(D - B_m) B_m^T||_F^2 / ||B_m||_F^2, in float64."""
    total = 0.0
    for base in bases.double():
        product = (merged.double() - base) @ base.T
        total += float(product.square().sum() / base.square().sum()) if base.any() else 0.0
    return total


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trained(count: int, rows: int, columns: int, decay: float = 4.0, seed: int = 0) -> Tensor:
    """Matrices with singular values from 1 to 10^-decay, half of each the same for all."""
    generator, rank = np.random.default_rng(seed), min(rows, columns)

    def one() -> Array:
        left = np.linalg.qr(generator.normal(size=(rows, rank)))[0]
        right = np.linalg.qr(generator.normal(size=(columns, rank)))[0]
        return left * np.logspace(0, -decay, rank) @ right.T

    shared = one()
    return torch.tensor(np.stack([shared + one() for _ in range(count)]), dtype=torch.float32)


def low_rank(count: int, rows: int, columns: int, rank: int) -> Tensor:
    return noise(count, rows, rank) @ noise(count, rank, columns, seed=1)


def off(found: Tensor, expected: Array | Tensor) -> float:
    """The relative difference in the Frobenius norm."""
    assert found.dtype == torch.float32 and found.shape == tuple(expected.shape)
    expected = torch.as_tensor(expected).double()
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [noise, trained])
def test_a_merge_is_the_formula_in_float64(method: str, shape: tuple[int, ...], kind) -> None:
    bases = kind(*shape)
    before = bases.clone()
    found = METHODS[method](bases)
    assert off(found, DENSE[method](bases.double().numpy())) < (1e-4 if method in SINGLE else 1e-5)
    assert torch.equal(bases, before)
    assert torch.equal(found, METHODS[method](bases))


def test_iso_cts_never_takes_more_directions_than_there_are() -> None:
    # 12 / 8 rounds to 2, which would be 16 of 12
    assert torch.linalg.matrix_rank(isotropic(noise(8, 12, 15), common=0.0)) == 12


def test_what_does_not_interfere_stays_the_sum() -> None:
    apart = torch.zeros(2, 8, 9)
    apart[0, :4, :4], apart[1, 4:, 4:8] = noise(4, 4), noise(4, 4, seed=1)
    for bases in (apart, noise(1, 7, 5)):
        for name in ("exact", "stopped", "singular_vectors"):
            assert off(METHODS[name](bases), bases.sum(0)) < 1e-6
    assert not singular_vectors(noise(4, 3, 50)).any()  # 3 // 4 directions each


@settings(max_examples=25)
@given(st.sampled_from(SHAPES), st.sampled_from([noise, trained]), st.integers(0, 99))
def test_the_flow_goes_from_the_sum_to_the_least(shape, kind, seed: int) -> None:
    """The loss falls, the distance grows below its bound, and directions without input stay."""
    bases = kind(*shape, seed=seed)
    bases[..., -1] = 0
    total, times = bases.double().sum(0), [0.01, 1.0, 30.0, 300.0, 1e4, 1e30]
    before, moved = interference(total, bases), 0.0
    bound = before
    assert off(interference_free(bases, flow_time=1e-9), total) < 1e-6
    for time in times:
        merged = interference_free(bases, flow_time=time)
        assert off(interference_free(bases, flow_time=time * 1.001), merged) < 2e-3
        after, far = interference(merged, bases), float((merged - total).norm())
        assert after <= before * (1 + 1e-6) + 1e-12 and far >= moved * (1 - 1e-5) - 1e-6
        assert far <= 0.6382 * (time * bound) ** 0.5 * (1 + 1e-5) + 1e-6
        assert not merged[:, -1].any()
        before, moved = after, far
    assert off(merged, least(bases)) < 1e-6


@pytest.mark.parametrize(("rank", "long"), [(4, True), (6, False)])
def test_auto_is_long_where_most_inputs_are_left_alone(rank: int, long: bool) -> None:
    """Three updates of rank 4 change 12 of 30 inputs, of rank 6 more than half; as cores too."""
    bases = low_rank(3, 40, 30, rank)
    found = interference_free(bases, flow_time="auto")
    assert (off(interference_free(bases, flow_time=300), found) < 1e-6) == long
    right = torch.linalg.svd(bases.flatten(0, 1), full_matrices=False).Vh[: 3 * rank]
    core = interference_free(bases @ right.T, flow_time="auto", spanned=30)
    assert off(core @ right, found) < 1e-5


@pytest.mark.parametrize("shape", [(3, 40, 70), (3, 70, 40), (2, 20, 90), (3, 300, 250)], ids=str)
def test_null_directions_stay_null(shape: tuple[int, ...]) -> None:
    """Matrices of rank 4 give partial isometries, and solutions of least norm."""
    bases = low_rank(*shape, 4)
    dense, rank = bases.double().numpy(), 4 * shape[0]
    left, sizes, right = svd(dense.sum(0), full_matrices=False)
    expected = sizes.mean() * left[:, :rank] @ right[:rank]
    assert off(isotropic(bases), expected) < 1e-5
    each = [(*svd(base, full_matrices=False), 4) for base in dense]
    left, sizes, right = reference.side_by_side(each)
    tsvm = reference.orthonormal(left) * sizes @ reference.orthonormal(right)
    assert off(singular_vectors(bases), tsvm) < 1e-5
    assert off(least(bases), DENSE["exact"](dense)) < 1e-5
    assert off(METHODS["cts"](bases), expected) < 1e-4  # only the sum has directions


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(2, 256, 200), (2, 120, 500), (3, 500, 150)], ids=str)
def test_rounding_makes_no_directions(method: str, dtype: torch.dtype, shape) -> None:
    """Bases in 16 bits that mix four adapters merge as the exact ones, rows of unequal size too."""
    mixing = torch.rand(shape[0], 4, generator=torch.Generator().manual_seed(2))
    exact = torch.einsum("mt,tij->mij", mixing, low_rank(4, *shape[1:], 2))
    exact *= torch.logspace(0, -1, shape[1])[:, None]
    unit, stored = torch.finfo(dtype).eps / 2, exact.to(dtype).float()
    found = METHODS[method](stored, noise=[rounding_noise(base, dtype) for base in stored])
    assert off(found, DENSE[method](exact.double().numpy())) < 20 * unit


def test_null_is_relative_to_the_largest_singular_value() -> None:
    for size, rank in ((10 * NULL, 3), (NULL / 10, 2)):
        bases = torch.diag(torch.tensor([1.0, 0.5, size]))[None]
        assert torch.linalg.matrix_rank(isotropic(bases)) == rank
        assert torch.linalg.matrix_rank(singular_vectors(bases), rtol=1e-9) == rank


@pytest.mark.parametrize("method", METHODS)
def test_degenerate_matrices(method: str) -> None:
    merge = METHODS[method]
    for shape in [(3, 4, 5), (2, 1, 6), (2, 6, 1), (1, 1, 1)]:
        assert torch.equal(merge(torch.zeros(shape)), torch.zeros(shape[1:]))
    for shape in [(1, 1, 7), (1, 7, 1), (1, 1, 1)]:  # one vector is one direction
        assert off(merge(noise(*shape)), noise(*shape)[0]) < 1e-6
    for scale in (1e-30, 1e15):
        assert off(merge(noise(3, 6, 8) * scale), merge(noise(3, 6, 8)).double() * scale) < 1e-5


# Merges by the library


def test_a_model_and_its_transpose_give_one_merge() -> None:
    """WUDI looks at the inputs of a matrix: its columns, or the rows if the recipe says so."""
    start = {"experts.w": noise(3, 12, 8), "wide": noise(5, 11)}
    found = [{n: t + k * noise(*t.shape, seed=k) / 10 for n, t in start.items()} for k in range(3)]
    other = [{name: t.mT.contiguous() for name, t in state.items()} for state in found]
    merges = []
    for state, more in ((found, {}), (other, {"transposed": "."}), (other, {})):
        bases = tvb_mergekit.build(state[0], dict(zip("ab", state[1:], strict=True)), basis="none")
        merges.append(tvb_mergekit.merge(bases, state[0], "basis_wudi", flow_time="auto", **more))
    for name in start:
        assert torch.allclose(merges[1][name].mT, merges[0][name], atol=1e-6)
        assert not torch.allclose(merges[2][name].mT, merges[0][name], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1e-1, 3e-3])
@pytest.mark.parametrize("method", ["basis_iso", "basis_tsvm", "basis_wudi", "exact"])
def test_short_updates_of_low_rank(method: str, size: float, dtype: torch.dtype) -> None:
    """Adapters fused in float32, whose length is `size` times the base's, over stores."""
    torch.manual_seed(0)
    base = {"w": 0.02 * torch.randn(128, 160)}
    updates = torch.randn(4, 128, 4, dtype=torch.float64) @ torch.randn(4, 4, 160).double()
    updates *= size * base["w"].norm() / updates.norm(dim=(1, 2), keepdim=True)
    models = {t: {"w": (base["w"] + u).float()} for t, u in zip("abcd", updates, strict=True)}
    bases = tvb_mergekit.build(base, models, basis="balanced", num_bases=2, dtype=dtype)
    exact = torch.einsum("tij,tm->mij", updates, bases.encoder).numpy()
    keys: dict[str, Any] = {"flow_time": "exact"} if method == "exact" else {}
    method = "basis_wudi" if keys else method
    merged = tvb_mergekit.merge(bases, base, method, lambda_=1.0, dtype=torch.float64, **keys)["w"]
    want = torch.from_numpy(reference.OF_MATRICES[method](exact, **keys))
    assert (merged - base["w"] - want).norm() < 0.05 * want.norm()


def test_a_merge_that_explodes_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """WUDI over bases of few directions; stopped early it stays near their sum."""
    torch.manual_seed(0)

    def decaying() -> Tensor:
        left, right = (torch.linalg.qr(torch.randn(size, 24))[0] for size in (24, 64))
        return (left * torch.logspace(0, -5, 24)) @ right.T

    base, shared = {"w": torch.zeros(24, 64), "v": torch.zeros(3)}, decaying()
    models = {task: {"w": shared + decaying(), "v": torch.ones(3)} for task in "ab"}
    bases = tvb_mergekit.build(base, models, basis="none")
    total = sum(model["w"] for model in models.values())
    for time, said in (("exact", ["w"]), (300, [])):
        caplog.clear()
        merged = tvb_mergekit.merge(bases, base, "basis_wudi", flow_time=time)["w"]
        assert (merged.norm() > 10 * total.norm()) == bool(said)
        assert [r.args[1] for r in caplog.records if "`flow_time`" in r.msg] == said  # type: ignore[index]
