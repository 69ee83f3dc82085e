"""Rivals of stores against their formulas in NumPy, and the search along a grid of lambdas."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from study.kinds import addition, matrices, rivals


def vectors(count: int = 3) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    shapes = {"model.embed.weight": (7, 9), "a.mlp.up_proj.weight": (5, 13), "norm": (11,)}
    return [
        {name: torch.randn(shape) ** 3 + 0.1 for name, shape in shapes.items()}
        for _ in range(count)
    ]


def close(found: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_bitdelta() -> None:
    given = vectors()
    given[0]["norm"][0] = 0.0  # has a sign all the same
    every = rivals.bitdelta(given)
    some = rivals.bitdelta(given, rivals.is_projection)
    for before, after, partly in zip(given, every.vectors, some.vectors, strict=True):
        for name, tensor in before.items():
            x = tensor.double().numpy()
            close(after[name], np.where(x >= 0, 1, -1) * abs(x).mean())
            coded = name == "a.mlp.up_proj.weight"
            assert torch.equal(partly[name], after[name] if coded else tensor.bfloat16().float())
    assert every.nbytes == 3 * (8 + 9 + 2 + 3 * 4)
    assert some.nbytes == 3 * (9 + 4 + 2 * (63 + 11))


@pytest.mark.parametrize(("share", "rank"), [(1 / 5, 1), (1 / 2, 2)])
def test_svd(share: float, rank: int) -> None:
    given = vectors()
    kept = rivals.svd(given, share=share)
    for before, after in zip(given, kept.vectors, strict=True):
        u, s, v = np.linalg.svd(before["a.mlp.up_proj.weight"].double().numpy())
        expected = (u[:, :rank] * s[:rank]) @ v[:rank]
        np.testing.assert_allclose(after["a.mlp.up_proj.weight"], expected, rtol=0.02, atol=0.03)
        assert torch.equal(after["norm"], before["norm"].bfloat16().float())
    embedded = int(7 * share)
    assert kept.nbytes == 3 * 2 * (rank * (5 + 13) + embedded * (7 + 9) + 11)


def test_delta_come() -> None:
    """The error of each triple is that of its bits, and others than projections stay whole."""
    given = vectors()
    kept = rivals.delta_come(given, bits=9)  # all five triples: two with 8 bits, three with 3
    for before, after in zip(given, kept.vectors, strict=True):
        whole = before["a.mlp.up_proj.weight"]
        third = float(torch.linalg.svdvals(whole)[2])
        error = float(torch.linalg.matrix_norm(whole - after["a.mlp.up_proj.weight"], 2))
        assert 0.01 * third < error < third
        assert torch.equal(after["norm"], before["norm"].bfloat16().float())
    groups = sum((c * n * w + c * (16 + w) + 7) // 8 for n in (5, 13) for c, w in ((2, 8), (3, 3)))
    assert kept.nbytes == 3 * (groups + 2 * (63 + 11))
    rows = torch.randn(3, 130)
    back, _ = rivals._grouped(rows, 3)
    for row, found in zip(rows.numpy(), back.T.numpy(), strict=True):
        for part in (slice(128), slice(128, 130)):
            step = float(torch.tensor((max(row[part].max(), 0) - min(row[part].min(), 0)) / 7)
                         .bfloat16())  # fmt: skip
            assert np.abs(row[part] - found[part]).max() <= 1.03 * step / 2 + 0.02 * step * 7
            levels = found[part] / step
            np.testing.assert_allclose(levels, levels.round(), atol=1e-3)


def test_signs_and_svd() -> None:
    given = vectors(1)
    kept = rivals.signs_and_svd(given, bits=0.25)
    x = given[0]["a.mlp.up_proj.weight"].double().numpy()
    coarse = np.where(x >= 0, 1, -1) * abs(x).mean()
    u, s, v = np.linalg.svd(x - coarse)
    expected = coarse + s[0] * np.outer(u[:, 0], v[0])
    found = kept.vectors[0]["a.mlp.up_proj.weight"]
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.03)
    assert kept.nbytes == (9 + 4) + 2 * (5 + 13) + 2 * (63 + 11)


def test_ultradelta() -> None:
    """All kept: 16 levels. A half kept: of each level, and the widest tensors keep more."""
    given = vectors(1)
    (every,) = rivals.ultradelta(given, share=1, step=0).vectors
    (half,) = rivals.ultradelta(given, share=0.5, step=0.1).vectors
    rates = dict[str, float]()
    for name, tensor in given[0].items():
        x = tensor.double().numpy()
        levels = np.round((x - x.min()) / (x.max() - x.min()) * 15) / 15
        close(every[name], levels * (x.max() - x.min()) + x.min())
        kept = half[name] != 0
        close(half[name][kept], 2 * every[name][kept].numpy())
        rates[name] = float(kept.double().mean())
    by_width = sorted(rates, key=lambda name: float(given[0][name].std()))
    assert rates[by_width[0]] < rates[by_width[-1]]
    total = sum(rates[name] * tensor.numel() for name, tensor in given[0].items())
    assert total == pytest.approx(0.5 * (63 + 65 + 11), abs=8)


# The search along a grid


@given(data=st.data(), count=st.integers(1, 12))
def test_a_climb_ends_at_the_maximum_and_asks_once(data, count):
    """Of a score that rises and falls; each neighbour of the maximum was asked for."""
    grid = [float(i + 1) for i in range(count)]
    top, start = (data.draw(st.integers(0, count - 1)) for _ in range(2))
    asked = list[float]()

    def score(point: float) -> float:
        asked.append(point)
        return -abs(point - grid[top])

    point, scores = addition.climbed(grid, score, start)
    assert point == grid[top]
    assert len(asked) == len(set(asked)) == sum(s is not None for s in scores)
    assert all(scores[i] is not None for i in (top - 1, top, top + 1) if 0 <= i < count)
    # The smallest of equal ones:
    assert addition.climbed(grid, lambda point: 0.0, start)[0] == grid[0]


@pytest.mark.parametrize("alike", [True, False])
def test_equal_tasks_count_once_and_orthogonal_ones_all(alike: bool) -> None:
    """After SVC of the sum, and after NUFILT's steps."""
    names, shape = ("a", "b", "c"), (9, 7)
    torch.manual_seed(0)
    q, r = torch.linalg.qr(torch.randn(9, 9))[0], torch.linalg.qr(torch.randn(7, 7))[0]
    parts = [slice(0, 2)] * 3 if alike else [slice(0, 2), slice(2, 4), slice(4, 6)]
    found = {n: {"x.w": q[:, p] @ torch.diag(torch.tensor([3.0, 1.0])) @ r[:, p].T,
                 "norm": torch.ones(2)} for n, p in zip(names, parts, strict=True)}  # fmt: skip
    run = SimpleNamespace(tasks=names, task_vector=found.__getitem__)
    total = {n: sum(each[n] for each in found.values()) for n in ("x.w", "norm")}
    made = matrices._calibrated(run, total)
    assert made["x.w"].shape == shape and torch.equal(made["norm"], total["norm"])
    torch.testing.assert_close(made["x.w"], found["a"]["x.w"] if alike else total["x.w"])
    run.base = {n: torch.zeros_like(each) for n, each in total.items()}
    streamed, _ = matrices._nufilt(run, names, share=2 / 7)
    torch.testing.assert_close(streamed["x.w"], made["x.w"], atol=1e-5, rtol=1e-5)
    assert not streamed["norm"].any()
