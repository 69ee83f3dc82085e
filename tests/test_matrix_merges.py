"""Merges of matrices: odd shapes, what counts as a matrix, 16 bits, and what explodes."""

from typing import Any

import pytest
import torch
from commands import assert_close
from reference import OF_MATRICES, Dense, expect
from torch import Tensor

import tvb_mergekit

SHAPES = {
    "experts.w": (3, 12, 8), "experts.row": (2, 1, 5), "conv1d.weight": (8, 1, 4),
    "patch.weight": (4, 3, 2, 2), "tall": (9, 4), "wide": (5, 11), "row": (1, 9), "column": (9, 1),
    "one": (1, 1), "same": (6, 6), "empty": (0, 4), "embed.weight": (7, 6), "norm": (13,),
}  # fmt: skip
TASKS = ("a", "b", "c", "d", "e")


def states(tasks: int = 5) -> list[dict[str, Tensor]]:
    """A base and models; `same` never moves, `tall` moves in one direction."""
    torch.manual_seed(0)
    base = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    base["tall"].round_()
    models = [{n: t + 0.1 * torch.randn(t.shape) for n, t in base.items()} for _ in range(tasks)]
    for model in models:
        model["same"] = base["same"].clone()
        model["tall"] = base["tall"] + torch.outer(torch.randn(9).mul(4).round(), torch.ones(4))
    return [base, *models]


@pytest.mark.parametrize("matrices", [None, ".", "w$|embed"])
@pytest.mark.parametrize("method", ["basis_iso", "basis_tsvm", "basis_wudi"])
def test_shapes(method: str, matrices: str | None) -> None:
    """Slices of three dimensions, rows, columns, zeros and nothing, against dense float64."""
    found = states()
    if method == "basis_wudi":  # of low rank it is less exact: see test_matrices.py
        for model in found[1:]:
            model["tall"] += torch.randn(9, 4)
    keys: dict[str, Any] = {"lambda": 0.7}
    keys |= {"flow_time": "exact"} if method == "basis_wudi" else {}  # in float64
    keys |= {} if matrices is None else {"matrices": matrices}
    bases = tvb_mergekit.build(found[0], dict(zip(TASKS, found[1:], strict=True)), basis="none")
    given = {"lambda_" if key == "lambda" else key: value for key, value in keys.items()}
    merged = tvb_mergekit.merge(bases, found[0], method, **given)
    dense = Dense(found[0], found[1:], [*SHAPES])
    want = expect(dense, method, {"basis": "none", **keys}, {}, TASKS).tensors
    assert_close(merged, want, found[0], strict=1e-5 if method == "basis_wudi" else 2e-6)
    assert torch.equal(merged["same"], found[0]["same"])
    with pytest.raises(tvb_mergekit.UserError, match="`matrices` is 'zzz'"):
        tvb_mergekit.merge(bases, found[0], method, matrices="zzz")


def test_a_model_and_its_transpose_give_one_merge() -> None:
    """WUDI looks at the inputs of a matrix: its columns, or the rows if the recipe says so."""
    found, turned = states(), ("experts.w", "wide", "tall")
    other = [{n: t.mT.contiguous() if n in turned else t for n, t in s.items()} for s in found]
    merges = []
    for state, more in ((found, {}), (other, {"transposed": "experts|wide|tall"}), (other, {})):
        models = dict(zip(TASKS, state[1:], strict=True))
        bases = tvb_mergekit.build(state[0], models, basis="none")
        merges.append(tvb_mergekit.merge(bases, state[0], "basis_wudi", flow_time=30, **more))
    for name in turned:
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
    want = torch.from_numpy(OF_MATRICES[method](exact, **keys))
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
