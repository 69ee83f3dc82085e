"""What each key of a recipe does to the merged weights, against the dense reference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Result, assert_close, merge, recipe
from reference import Dense, Value, expect, number_of_bases
from test_merges import assert_same
from tiny import TASKS, family, llama, load

BASIS = {"basis": "pca", "num_bases": 2}
NEGATE = {"basis": "pca", "num_bases": 3, "forget": "chat", "alpha": 0.5}


@pytest.fixture(scope="module")
def base_and_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    return family(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def states(base_and_models: tuple[Path, list[Path]]) -> list[dict[str, torch.Tensor]]:
    base, models = base_and_models
    return [load(path) for path in (base, *models)]


@pytest.fixture(scope="module")
def dense(states: list[dict[str, torch.Tensor]]) -> Dense:
    return Dense(states[0], states[1:], list(states[0]))


def check(
    dense: Dense,
    result: Result,
    method: str,
    parameters: dict[str, Any],
    tasks: Any = TASKS,
    varying: dict[str, Value] | None = None,
) -> None:
    want = expect(dense, method, parameters, result.basis, tasks, varying)
    assert_close(result.tensors, want.tensors, dense.base, want.boundary)


# Against mergekit's own task arithmetic


@pytest.fixture(scope="module")
def arithmetic(
    base_and_models: tuple[Path, list[Path]], tmp_path_factory: pytest.TempPathFactory
) -> Result:
    base, models = base_and_models
    own = {index: {"weight": 1.0} for index in range(len(models))}
    made = recipe("task_arithmetic", base, models, own, normalize=False, lambda_=0.3)
    return merge(made, tmp_path_factory.mktemp("stock") / "out")


@pytest.mark.parametrize("count", range(1, len(TASKS) + 1))
def test_balanced_addition_is_task_arithmetic_over_all_tasks(
    count: int,
    arithmetic: Result,
    base_and_models: tuple[Path, list[Path]],
    dense: Dense,
    tmp_path: Path,
) -> None:
    keys = {"basis": "balanced", "num_bases": count, "lambda_scale": "tasks", "lambda_": 0.3}
    result = merge(recipe("basis_ta", *base_and_models, **keys), tmp_path / "out")
    want = {name: tensor.double() for name, tensor in arithmetic.tensors.items()}
    assert_close(result.tensors, want, dense.base)


def test_addition_without_compression_is_task_arithmetic(
    arithmetic: Result,
    base_and_models: tuple[Path, list[Path]],
    dense: Dense,
    tmp_path: Path,
) -> None:
    result = merge(
        recipe("basis_ta", *base_and_models, basis="none", lambda_=0.3), tmp_path / "out"
    )
    want = {name: tensor.double() for name, tensor in arithmetic.tensors.items()}
    assert_close(result.tensors, want, dense.base)


@pytest.mark.parametrize(
    "basis",
    [{"basis": "none"}]
    + [{"basis": b, "num_bases": len(TASKS)} for b in ("balanced", "pca", "rand_select")]
    + [{"basis": "ae", "solver": "exact", "num_bases": len(TASKS)}],
)
def test_with_as_many_bases_as_tasks_negation_is_plain(
    basis: dict[str, Any], base_and_models: tuple[Path, list[Path]], dense: Dense, tmp_path: Path
) -> None:
    made = recipe("basis_negate", *base_and_models, **basis, forget="code,legal", alpha=0.8)
    result = merge(made, tmp_path / "out")
    plain = dense.theta - 0.8 * (dense.tau[:, 1] + dense.tau[:, 4])
    assert_close(result.tensors, dense.split(plain), dense.base)


# lambda and its scale


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("basis_ta", {**BASIS, "lambda": -0.7, "lambda_scale": "tasks"}),
        ("basis_ties", {**BASIS, "lambda": 1.1, "lambda_scale": "tasks"}),
        ("basis_negate", {**NEGATE, "lambda": 0.6, "lambda_scale": "tasks"}),
        ("basis_negate", {**NEGATE, "lambda": 0.6}),
        ("basis_ta", {**BASIS, "lambda": 0}),
        ("basis_negate", {**NEGATE, "alpha": 0}),
        ("basis_ta", BASIS),
        ("basis_negate", {**NEGATE, "forget": " chat ,math, legal"}),
    ],
)
def test_strengths(
    method: str,
    keys: dict[str, Any],
    base_and_models: tuple[Path, list[Path]],
    dense: Dense,
    tmp_path: Path,
) -> None:
    result = merge(recipe(method, *base_and_models, **keys), tmp_path / "out")
    if keys.get("lambda") == 0 or keys.get("alpha") == 0:
        assert all(torch.equal(result.tensors[n], dense.base[n].float()) for n in dense.names)
    else:
        check(dense, result, method, keys)


# Number of bases


@pytest.mark.parametrize(
    "size",
    [{"num_bases": 1}, {"num_bases": 5}]
    + [{"basis_ratio": ratio} for ratio in (0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 1)]
    + [{"energy": share} for share in (0.01, 0.5, 0.8, 0.95, 0.999, 1)]
    + [{}],
)
def test_the_size_keys_give_the_number_of_bases(
    size: dict[str, Any], base_and_models: tuple[Path, list[Path]], dense: Dense, tmp_path: Path
) -> None:
    made = recipe("basis_ta", *base_and_models, basis="rand_select", **size)
    result = merge(made, tmp_path / "out", cache=base_and_models[0].parent / "cache")
    count = number_of_bases(dense.gram, **size)
    assert result.facts["num_bases"] == count == result.basis["encoder"].shape[1]


# Tensors, tasks and weights


@pytest.mark.parametrize("method", ["basis_ta", "basis_ties", "basis_negate"])
def test_excluded_tensors_stay_the_base_and_leave_the_gram_matrix(
    method: str,
    base_and_models: tuple[Path, list[Path]],
    states: list[dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    pattern = r"embed_tokens|lm_head|layers\.1\.mlp"
    names = [name for name in states[0] if not re.search(pattern, name)]
    part = Dense(states[0], states[1:], names)
    keys = {**(NEGATE if method == "basis_negate" else BASIS), "exclude": pattern}
    result = merge(recipe(method, *base_and_models, **keys), tmp_path / "out")
    check(part, result, method, keys)
    left = set(states[0]) - set(names)
    assert set(result.facts["left_out"]) == left
    assert all(torch.equal(result.tensors[name], states[0][name]) for name in left)
    assert result.facts["num_parameters"] == len(part.theta)


@pytest.mark.parametrize("method", ["basis_ta", "basis_ties", "basis_negate"])
@pytest.mark.parametrize("basis", [{"basis": "pca"}, {"basis": "balanced", "num_bases": 2}])
def test_each_model_has_its_own_name_and_weight(
    method: str,
    basis: dict[str, Any],
    base_and_models: tuple[Path, list[Path]],
    states: list[dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    weights = [1.0, -0.5, 2.0, 1.0, 0.25]
    own = {1: {"weight": -0.5, "task": "programs"}, 2: {"weight": 2}, 4: {"weight": 0.25}}
    keys: dict[str, Any] = dict(basis)
    if method == "basis_negate":
        keys |= {"forget": "programs", "alpha": 0.5}
    result = merge(recipe(method, *base_and_models, own, **keys), tmp_path / "out")
    weighted = Dense(states[0], states[1:], list(states[0]), weights)
    tasks = ["math", "programs", "safety", "chat", "legal"]
    check(weighted, result, method, keys, tasks)
    assert result.facts["tasks"] == tasks
    np.testing.assert_allclose(result.basis["gram"], weighted.gram, rtol=1e-5)


@pytest.mark.parametrize("basis", [{"basis": "none"}, {"basis": "pca", "num_bases": 3}])
@pytest.mark.parametrize("method", ["basis_ta", "basis_ties", "basis_negate"])
def test_the_order_of_the_models_does_not_matter(
    method: str,
    basis: dict[str, Any],
    base_and_models: tuple[Path, list[Path]],
    dense: Dense,
    tmp_path: Path,
) -> None:
    base, models = base_and_models
    keys: dict[str, Any] = dict(basis) | ({"density": 1.0} if method == "basis_ties" else {})
    if method == "basis_negate":
        keys |= {"forget": "chat", "alpha": 0.5}
    one = merge(recipe(method, base, models, **keys), tmp_path / "one")
    mixed = [models[i] for i in (3, 0, 4, 2, 1)]
    other = merge(recipe(method, base, mixed, **keys), tmp_path / "other")
    want = {name: tensor.double() for name, tensor in one.tensors.items()}
    assert_close(other.tensors, want, dense.base)


@pytest.mark.parametrize("basis", ["ae", "balanced", "pca", "none"])
def test_scaling_all_weights_scales_the_bases(
    basis: str,
    base_and_models: tuple[Path, list[Path]],
    dense: Dense,
    tmp_path: Path,
) -> None:
    """B becomes c B: the same as c times lambda."""
    keys: dict[str, Any] = {"basis": basis} | ({"solver": "exact"} if basis == "ae" else {})
    own = {index: {"weight": 4.0} for index in range(len(TASKS))}
    scaled = merge(recipe("basis_ta", *base_and_models, own, lambda_=0.1, **keys), tmp_path / "a")
    plain = merge(recipe("basis_ta", *base_and_models, lambda_=0.4, **keys), tmp_path / "b")
    want = {name: tensor.double() for name, tensor in plain.tensors.items()}
    assert_close(scaled.tensors, want, dense.base)
    np.testing.assert_allclose(scaled.basis["gram"], 16 * plain.basis["gram"], rtol=1e-12)


# Filters and layer gradients


def by_filter(name: str) -> float:
    return 0.1 if "self_attn" in name else 0.9 if "mlp" in name else 0.5


FILTERS = [
    {"filter": "self_attn", "value": 0.1},
    {"filter": "mlp", "value": 0.9},
    {"value": 0.5},
]


@pytest.mark.parametrize(
    ("method", "key", "keys"),
    [
        ("basis_ta", "lambda", BASIS),
        ("basis_ties", "density", {**BASIS, "trim": "tensor"}),
        ("basis_ties", "density", {**BASIS, "trim": "model"}),
        ("basis_ties", "lambda", {**BASIS, "merge_func": "mean"}),
        ("basis_negate", "alpha", NEGATE),
        ("basis_negate", "lambda", NEGATE),
        ("basis_negate", "alpha", {**NEGATE, "basis": "rand_proj"}),
    ],
)
def test_filters_give_each_tensor_its_own_value(
    method: str,
    key: str,
    keys: dict[str, Any],
    base_and_models: tuple[Path, list[Path]],
    dense: Dense,
    tmp_path: Path,
) -> None:
    made = recipe(method, *base_and_models, **{**keys, key: FILTERS})
    result = merge(made, tmp_path / "out")
    check(dense, result, method, keys, varying={key: by_filter})
    assert result.facts["parameters"][key] == [0.1, 0.5, 0.9]


@pytest.mark.parametrize(
    ("method", "key", "keys"),
    [
        ("basis_ta", "lambda", BASIS),
        ("basis_ties", "density", {**BASIS, "trim": "tensor"}),
        ("basis_negate", "alpha", NEGATE),
    ],
)
def test_layer_gradients_give_each_layer_its_own_value(
    method: str, key: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    """mergekit puts layer i of n at i / (n - 1) along the list, and all other tensors at 0."""
    base, models = family(tmp_path / "deep", lambda: llama(num_hidden_layers=3), TASKS[:4])
    states = [load(path) for path in (base, *models)]
    deep = Dense(states[0], states[1:], list(states[0]))
    low, middle, high = 0.1, 0.3, 0.8

    def value(name: str) -> float:
        found = re.search(r"layers\.(\d)\.", name)
        if found is None:
            return low
        return (low, middle, high)[int(found[1])]

    result = merge(
        recipe(method, base, models, **{**keys, key: [low, middle, high]}), tmp_path / "out"
    )
    check(deep, result, method, keys, TASKS[:4], {key: value})


def test_one_value_in_other_clothes_is_that_value(
    base_and_models: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    plain = merge(recipe("basis_ties", *base_and_models, **BASIS, lambda_=0.3), tmp_path / "a")
    clothes: list[Any] = [0.3, 0.3]
    dressed = merge(
        recipe("basis_ties", *base_and_models, **BASIS, lambda_=clothes), tmp_path / "b"
    )
    assert_same(plain, dressed)
