"""Every method, basis and solver through `mergekit-yaml`, against the dense reference."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Result, assert_close, merge, merge_outside, recipe
from reference import Dense, expect
from tiny import TASKS, family, gpt2, llama, load

FAST = {"steps": 300}
BASES: dict[str, dict[str, Any]] = {
    "ae": {},  # the default: adam, 4000 steps, M = 3 of 5
    "ae-anneal": {"basis": "ae", "num_bases": 2, "seed": 3, "anneal_every": 50, **FAST},
    "ae-exact": {"basis": "ae", "solver": "exact", "num_bases": 2},
    "balanced": {"basis": "balanced", "num_bases": 2, "lambda_scale": "tasks"},
    "linear_ae": {"basis": "linear_ae", "num_bases": 2, "temperature": 2.0, **FAST},
    "pca": {"basis": "pca", "num_bases": 3},
    "rand_select": {"basis": "rand_select", "basis_ratio": 0.3, "seed": 1},
    "none": {"basis": "none"},
}
TIES = {
    "ae": FAST,
    "ae-anneal": {"trim": "tensor"},
    "ae-exact": {"merge_func": "mean"},
    "balanced": {"density": 0.5},
    "linear_ae": {"merge_func": "max"},
    "pca": {"trim": "tensor", "merge_func": "mean", "density": 0.35},
    "rand_select": {"trim": "tensor", "merge_func": "max"},
    "none": {"density": 0.1},
}
FAST_AE = {"ae": FAST}
NEGATE: dict[str, Any] = {"forget": "code", "alpha": 0.7}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"basis_ta/{k}": ("basis_ta", {"lambda": 0.3, **v}) for k, v in BASES.items()},
    **{f"basis_ties/{k}": ("basis_ties", v | TIES[k]) for k, v in BASES.items()},
    **{
        f"basis_negate/{k}": ("basis_negate", v | FAST_AE.get(k, {}) | NEGATE)
        for k, v in BASES.items()
    },
    "basis_negate/rand_proj": (
        "basis_negate",
        {"basis": "rand_proj", "num_bases": 3, "seed": 7, "lambda": 0.01, **NEGATE},
    ),
    "basis_negate/two": (
        "basis_negate",
        {"basis": "pca", "lambda": 0.2, "forget": "math, safety", "alpha": 1.5},
    ),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16, torch.float32)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"make": llama},
    "gpt2": {"make": gpt2},
    "mixed": {"make": llama, "dtypes": DTYPES, "scale": 0.002, "max_shard_size": "40KB"},
}
# Every case of Llama runs in a process of its own by default; of the others these.
OUTSIDE = ("basis_ta/balanced", "basis_ties/ae", "basis_negate/ae-exact")


@dataclass
class Family:
    base: Path
    models: list[Path]
    dense: Dense
    equal_magnitudes: bool


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    made = {}
    for name, options in FAMILIES.items():
        base, models = family(tmp_path_factory.mktemp(name), **options)
        states = [load(path) for path in (base, *models)]
        made[name] = Family(
            base, models, Dense(states[0], states[1:], list(states[0])), name == "mixed"
        )
    return made


def check(found: Family, case: str, result: Result) -> None:
    method, parameters = CASES[case]
    want = expect(found.dense, method, parameters, result.basis, TASKS)
    assert set(result.tensors) == set(found.dense.names)
    assert all(tensor.dtype == torch.float32 for tensor in result.tensors.values())
    if want.boundary is not None:
        share = sum(int(b.sum()) for b in want.boundary.values()) / len(found.dense.theta)
        # task vectors between bfloat16 checkpoints have many equal magnitudes
        assert share <= (3e-2 if found.equal_magnitudes else 5e-3), "too much is left open"
    assert_close(result.tensors, want.tensors, found.dense.base, want.boundary)


@pytest.fixture(scope="module")
def processes(
    families: dict[str, Family], tmp_path_factory: pytest.TempPathFactory, request: Any
) -> Iterator[dict[tuple[str, str], Future[Result]]]:
    """`mergekit-yaml` on every selected case, two processes at a time."""
    folder = tmp_path_factory.mktemp("merged")
    wanted = [
        (item.callspec.params["model"], item.callspec.params["case"])
        for item in request.session.items
        if item.module is request.module and "processes" in item.fixturenames
    ]
    pool, futures = ThreadPoolExecutor(2), {}
    for number, (model, case) in enumerate(wanted):
        method, parameters = CASES[case]
        made = recipe(method, families[model].base, families[model].models, **parameters)
        out = folder / model / str(number)
        futures[model, case] = pool.submit(merge_outside, made, out)
    yield futures
    pool.shutdown(cancel_futures=True)


def cases() -> list[Any]:
    return [
        pytest.param(
            model,
            case,
            id=f"{model}/{case}",
            marks=() if model == "llama" or case in OUTSIDE else pytest.mark.slow,
        )
        for model in FAMILIES
        for case in CASES
    ]


@pytest.mark.parametrize(("model", "case"), cases())
def test_the_command_equals_the_dense_reference(
    model: str,
    case: str,
    families: dict[str, Family],
    processes: dict[tuple[str, str], Future[Result]],
) -> None:
    check(families[model], case, processes[model, case].result())


@pytest.mark.parametrize("case", [case for case in CASES if case not in OUTSIDE])
@pytest.mark.parametrize("model", ["gpt2", "mixed"])
def test_other_checkpoints_equal_the_dense_reference(
    model: str, case: str, families: dict[str, Family], tmp_path: Path
) -> None:
    method, parameters = CASES[case]
    found = families[model]
    made = recipe(method, found.base, found.models, **parameters)
    check(found, case, merge(made, tmp_path / "out"))


@pytest.mark.parametrize("case", ["basis_ta/pca", "basis_ties/none", "basis_negate/rand_proj"])
def test_sixteen_bit_output_is_the_float32_result_cast_once(
    case: str, families: dict[str, Family], tmp_path: Path
) -> None:
    """`dtype` casts the output, never the inputs: a task vector formed after a cast to bfloat16
    would be mostly rounding."""
    method, parameters = CASES[case]
    found = families["mixed"]
    whole = merge(recipe(method, found.base, found.models, **parameters), tmp_path / "float32")
    for name, kind in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        made = recipe(method, found.base, found.models, dtype=name, **parameters)
        cast = merge(made, tmp_path / name)
        for key, tensor in whole.tensors.items():
            assert torch.equal(cast.tensors[key], tensor.to(kind)), key
        made = recipe(method, found.base, found.models, dtype=None, **parameters)
        made["out_dtype"] = name
        assert_same(merge(made, tmp_path / f"out_{name}"), cast)


def test_the_mixed_family_would_show_an_early_cast(families: dict[str, Family]) -> None:
    dense = families["mixed"].dense
    assert {t.dtype for t in dense.base.values()} == {torch.bfloat16}
    kinds = {next(iter(model.values())).dtype for model in dense.models}
    assert kinds == {torch.float16, torch.float32, torch.bfloat16}
    early = [{k: v.bfloat16() for k, v in m.items()} for m in dense.models]
    rounded = Dense(dense.base, early, dense.names)
    assert np.linalg.norm(rounded.tau - dense.tau) > 1e-2 * np.linalg.norm(dense.tau)


def test_without_dtype_the_output_has_what_the_inputs_promote_to(
    families: dict[str, Family], tmp_path: Path
) -> None:
    found = families["mixed"]
    bare = merge(
        recipe("basis_ta", found.base, found.models, dtype=None, basis="none"), tmp_path / "bare"
    )
    full = merge(recipe("basis_ta", found.base, found.models, basis="none"), tmp_path / "full")
    assert_same(bare, full)


def assert_same(one: Result, other: Result) -> None:
    assert set(one.tensors) == set(other.tensors)
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype
        assert torch.equal(tensor, other.tensors[name]), name
