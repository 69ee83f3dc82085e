"""Exported bases are models: transformers loads them, and mergekit's own methods merge them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import merge, recipe
from tiny import family

import tvb_mergekit as tvb
from tvb_mergekit.store.export import basis_columns, export
from tvb_mergekit.tensors.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A base, a store of four tasks in two bases under it, and the models theta_0 + B_m."""
    folder = tmp_path_factory.mktemp("export")
    base, models = family(folder / "in", tasks=("math", "code", "safety", "chat"))
    named = {model.name: model for model in models}
    bases = tvb.build(base, named, folder / "store", basis="balanced", num_bases=2)
    export(
        bases,
        Checkpoint.open(base),
        base,
        basis_columns(bases, [0, 1]),
        ["basis-000", "basis-001"],
        folder / "models",
        what=["one", "two"],
    )
    return base, folder / "store", folder / "models"


def test_task_arithmetic_over_them_is_addition_over_the_bases(
    exported: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    base, store, models = exported
    listed = [models / "basis-000", models / "basis-001"]
    own = {index: {"weight": 1.0} for index in range(2)}
    theirs = merge(
        recipe("task_arithmetic", base, listed, own=own, normalize=False, lambda_=0.7),
        tmp_path / "theirs",
    )
    ours = merge(
        recipe("basis_ta", base, [store / path.name for path in listed], lambda_=0.7),
        tmp_path / "ours",
    )
    for name, tensor in ours.tensors.items():
        torch.testing.assert_close(theirs.tensors[name], tensor, rtol=0, atol=3e-7)
