"""What each key of a recipe does to the merged weights, against the dense reference."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import assert_close, assert_same, merge, recipe
from reference import Dense, expect, number_of_bases
from tiny import TASKS, family, llama, load

PCA = {"basis": "pca", "num_bases": 2}
NEGATE = {"basis": "pca", "num_bases": 3, "forget": "chat", "alpha": 0.5}
RENAMED = ["math", "programs", "safety", "chat", "legal"]
OWN = {1: {"weight": -0.5, "task": "programs"}, 2: {"weight": 2}, 4: {"weight": 0.25}}
EXCLUDE = r"embed_tokens|lm_head|layers\.1\.mlp"
METHODS = {"basis_ta": PCA, "basis_ties": PCA, "basis_negate": NEGATE}


@pytest.fixture(scope="module")
def base_and_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """Of three layers, since gradients go over layers."""
    return family(tmp_path_factory.mktemp("llama"), lambda: llama(num_hidden_layers=3))


@pytest.fixture(scope="module")
def states(base_and_models: tuple[Path, list[Path]]) -> list[dict[str, torch.Tensor]]:
    base, models = base_and_models
    return [load(path) for path in (base, *models)]


# Filters and layer gradients

FILTERS = [
    {"filter": "self_attn", "value": 0.1},
    {"filter": "mlp", "value": 0.9},
    {"value": 0.5},
]
GRADIENT = [0.1, 0.3, 0.8]


def by_filter(name: str) -> float:
    return 0.1 if "self_attn" in name else 0.9 if "mlp" in name else 0.5


def by_layer(name: str) -> float:
    """mergekit puts layer i of n at i / (n - 1) along the list, and all other tensors at 0."""
    found = re.search(r"layers\.(\d)\.", name)
    return GRADIENT[int(found[1])] if found else GRADIENT[0]


@dataclass
class Case:
    """A recipe; `varying` is a key with a value for each tensor, as the recipe says it and as it
    comes out."""

    method: str
    keys: dict[str, Any]
    own: dict[int, dict[str, Any]] = field(default_factory=dict)
    varying: tuple[str, list[Any], Callable[[str], float]] | None = None


CASES = {
    "default lambda": Case("basis_ta", PCA),
    "lambda by tasks": Case("basis_ta", {**PCA, "lambda": -0.7, "lambda_scale": "tasks"}),
    "lambda by tasks, ties": Case("basis_ties", {**PCA, "lambda": 1.1, "lambda_scale": "tasks"}),
    "lambda by tasks, negate": Case(
        "basis_negate", {**NEGATE, "lambda": 0.6, "lambda_scale": "tasks"}
    ),
    "lambda and alpha": Case("basis_negate", {**NEGATE, "lambda": 0.6}),
    "lambda 0": Case("basis_ta", {**PCA, "lambda": 0}),
    "alpha 0": Case("basis_negate", {**NEGATE, "alpha": 0}),
    "forget several": Case("basis_negate", {**NEGATE, "forget": " chat ,math, legal"}),
    **{f"exclude, {m}": Case(m, {**k, "exclude": EXCLUDE}) for m, k in METHODS.items()},
    **{f"own weights, {m}": Case(m, k, OWN) for m, k in METHODS.items()},
    "own weights, balanced": Case("basis_ta", {"basis": "balanced", "num_bases": 2}, OWN),
    "lambda by filter": Case("basis_ta", PCA, varying=("lambda", FILTERS, by_filter)),
    "lambda by filter, ties": Case(
        "basis_ties", {**PCA, "merge_func": "mean"}, varying=("lambda", FILTERS, by_filter)
    ),
    "density by filter, tensor": Case(
        "basis_ties", {**PCA, "trim": "tensor"}, varying=("density", FILTERS, by_filter)
    ),
    "density by filter, model": Case(
        "basis_ties", {**PCA, "trim": "model"}, varying=("density", FILTERS, by_filter)
    ),
    "lambda by filter, negate": Case(
        "basis_negate", NEGATE, varying=("lambda", FILTERS, by_filter)
    ),
    "alpha by filter, rand_proj": Case(
        "basis_negate", {**NEGATE, "basis": "rand_proj"}, varying=("alpha", FILTERS, by_filter)
    ),
    "lambda by layer": Case("basis_ta", PCA, varying=("lambda", GRADIENT, by_layer)),
    "density by layer": Case(
        "basis_ties", {**PCA, "trim": "tensor"}, varying=("density", GRADIENT, by_layer)
    ),
    "alpha by layer": Case("basis_negate", NEGATE, varying=("alpha", GRADIENT, by_layer)),
}


@pytest.mark.parametrize("name", CASES)
def test_keys(
    name: str,
    base_and_models: tuple[Path, list[Path]],
    states: list[dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    case = CASES[name]
    excluded = case.keys.get("exclude", "^$")
    names = [tensor for tensor in states[0] if not re.search(excluded, tensor)]
    weights = [case.own.get(i, {}).get("weight", 1.0) for i in range(len(TASKS))]
    dense = Dense(states[0], states[1:], names, weights)
    written, varying = dict(case.keys), None
    if case.varying is not None:
        key, said, of_tensor = case.varying
        written[key], varying = said, {key: of_tensor}
    result = merge(recipe(case.method, *base_and_models, case.own, **written), tmp_path / "out")
    tasks = RENAMED if case.own else TASKS
    want = expect(dense, case.method, case.keys, result.basis, tasks, varying)
    assert_close(result.tensors, want.tensors, dense.base, want.boundary)
    facts, left = result.facts, set(states[0]) - set(names)
    same = left | (set(names) if 0 in (case.keys.get("lambda"), case.keys.get("alpha")) else set())
    assert all(torch.equal(result.tensors[tensor], states[0][tensor]) for tensor in same)
    assert set(facts["left_out"]) == left and facts["num_parameters"] == len(dense.theta)
    assert facts["tasks"] == list(tasks)
    np.testing.assert_allclose(result.basis["gram"], dense.gram, rtol=1e-5)
    if varying is not None:
        assert facts["parameters"][key] == sorted({of_tensor(tensor) for tensor in names})


def test_a_list_of_one_value_is_that_value(
    base_and_models: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    plain = merge(recipe("basis_ties", *base_and_models, **PCA, lambda_=0.3), tmp_path / "a")
    several = recipe("basis_ties", *base_and_models, **PCA, lambda_=[0.3, 0.3])
    assert_same(plain, merge(several, tmp_path / "b"))


@pytest.mark.parametrize(
    "size",
    [
        *({"num_bases": 5}, {}),
        *({"basis_ratio": ratio} for ratio in (0.01, 0.3, 0.5, 0.7, 1)),
        *({"energy": share} for share in (0.01, 0.8, 0.999, 1)),
    ],
)
def test_the_size_keys_give_the_number_of_bases(
    size: dict[str, Any],
    base_and_models: tuple[Path, list[Path]],
    states: list[dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    made = recipe("basis_ta", *base_and_models, basis="rand_select", **size)
    result = merge(made, tmp_path / "out", cache=base_and_models[0].parent / "cache")
    gram = Dense(states[0], states[1:], list(states[0])).gram
    count = number_of_bases(gram, **size)
    assert result.facts["num_bases"] == count == result.basis["encoder"].shape[1]


# Where nothing is lost


@pytest.fixture(scope="module")
def arithmetic(
    base_and_models: tuple[Path, list[Path]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    """mergekit's own task arithmetic over all tasks."""
    own = {index: {"weight": 1.0} for index in range(len(TASKS))}
    made = recipe("task_arithmetic", *base_and_models, own, normalize=False, lambda_=0.3)
    merged = merge(made, tmp_path_factory.mktemp("stock") / "out").tensors
    return {name: tensor.double() for name, tensor in merged.items()}


@pytest.mark.parametrize("count", [*range(1, len(TASKS) + 1), None])
def test_balanced_addition_is_task_arithmetic_over_all_tasks(
    count: int | None,
    arithmetic: dict[str, torch.Tensor],
    base_and_models: tuple[Path, list[Path]],
    states: list[dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    """And so is addition without compression."""
    keys = {"basis": "balanced", "num_bases": count} if count else {"basis": "none"}
    made = recipe("basis_ta", *base_and_models, **keys, lambda_scale="tasks", lambda_=0.3)
    assert_close(merge(made, tmp_path / "out").tensors, arithmetic, states[0])


@pytest.mark.parametrize("basis", ["none", "balanced", "pca", "rand_select", "ae"])
def test_with_as_many_bases_as_tasks_negation_is_plain(
    basis: str,
    base_and_models: tuple[Path, list[Path]],
    states: list[dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    keys: dict[str, Any] = {"num_bases": len(TASKS)} if basis != "none" else {}
    keys |= {"solver": "exact"} if basis == "ae" else {}
    made = recipe(
        "basis_negate", *base_and_models, basis=basis, forget="code,legal", alpha=0.8, **keys
    )
    dense = Dense(states[0], states[1:], list(states[0]))
    plain = dense.theta - 0.8 * (dense.tau[:, 1] + dense.tau[:, 4])
    assert_close(merge(made, tmp_path / "out").tensors, dense.split(plain), dense.base)
