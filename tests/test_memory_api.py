"""`merge_state_dicts` and `merge_tensors` of mergekit, with our methods."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from commands import assert_close
from mergekit import merge_methods
from reference import Dense, expect
from tiny import llama
from torch import Tensor, nn

from tvb_mergekit.encoders import encode
from tvb_mergekit.recipe import resolve_settings

TASKS = ("math", "code", "safety", "chat")
SIZES = {"embed.weight": (50, 16), "layer.weight": (16, 300), "bias": (7,), "empty": (0, 4)}
METHODS: dict[str, dict[str, Any]] = {
    "ta": {"basis": "pca", "num_bases": 2, "lambda": 0.3},
    "ta-default": {"steps": 200},
    "ta-exclude": {"basis": "none", "exclude": "embed"},
    "ties": {"basis": "none", "density": 0.3, "merge_func": "mean"},
    "ties-tensor": {"basis": "balanced", "trim": "tensor", "num_bases": 2},
    "negate": {"basis": "pca", "num_bases": 2, "forget": "code, chat", "alpha": 0.6},
    "negate-proj": {"basis": "rand_proj", "num_bases": 2, "forget": "code", "alpha": 1.0},
}


def made(dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}
    states = {"base": base}
    for number, task in enumerate(TASKS):
        scale = 0.05 * (1 + number)
        states[task] = {
            name: tensor + scale * torch.randn(tensor.shape, generator=generator)
            for name, tensor in base.items()
        }
    return {
        key: {name: t.to(dtypes[i % len(dtypes)]) for name, t in state.items()}
        for i, (key, state) in enumerate(states.items())
    }


def dense_of(states: dict[str, dict[str, Tensor]], exclude: str = "-", **weights: Any) -> Dense:
    names = [name for name in states["base"] if exclude not in name]
    return Dense(states["base"], [states[task] for task in TASKS], names, **weights)


def method_of(case: str) -> str:
    return "basis_" + case.partition("-")[0]


def stored(case: str, keys: dict[str, Any], states: dict[str, dict[str, Tensor]]) -> Any:
    """The encoder of `balanced`, which the formulas leave open and memory merges write nowhere."""
    if keys.get("basis") != "balanced":
        return {}
    settings = resolve_settings(method_of(case), keys, TASKS)
    encoding = encode(torch.from_numpy(dense_of(states).gram), settings)
    assert encoding.encoder is not None
    return {"encoder": encoding.encoder.numpy()}


@pytest.mark.parametrize("case", METHODS)
@pytest.mark.parametrize("mixed", [False, True])
def test_state_dicts_equal_the_reference(case: str, mixed: bool) -> None:
    dtypes = (torch.bfloat16, torch.float32, torch.float16) if mixed else (torch.float32,)
    states, keys = made(dtypes), METHODS[case]
    before = {key: {n: t.clone() for n, t in state.items()} for key, state in states.items()}
    merged = merge_methods.merge_state_dicts(
        states, method_of(case), base="base", parameters=keys, dtype=torch.float32
    )
    assert list(merged) == list(states["base"])
    for key, state in states.items():
        assert all(torch.equal(t, before[key][name]) for name, t in state.items()), "changed"
    dense = dense_of(states, keys.get("exclude", "-"))
    want = expect(dense, method_of(case), keys, stored(case, keys, states), TASKS)
    assert_close(merged, want.tensors, dense.base, want.boundary)
    for name in set(states["base"]) - set(dense.names):
        assert torch.equal(merged[name], states["base"][name].float())
    storage = {t.untyped_storage().data_ptr() for s in states.values() for t in s.values()}
    storage.discard(0)
    assert all(t.untyped_storage().data_ptr() not in storage for t in merged.values())


def test_weights_and_task_names_per_input() -> None:
    states = made()
    own = {"weight": {"math": 1.0, "code": -2.0, "safety": 0.5, "chat": 1.0}}
    keys = {"basis": "pca", "num_bases": 2, "forget": "two", "alpha": 1.0}
    names = {"task": dict(zip(TASKS, ("one", "two", "three", "four"), strict=True))}
    merged = merge_methods.merge_state_dicts(
        states, "basis_negate", base="base", parameters={**keys, **own, **names}
    )
    dense = dense_of(states, weights=list(own["weight"].values()))
    want = expect(dense, "basis_negate", keys, {}, ("one", "two", "three", "four"))
    assert_close(merged, want.tensors, dense.base)


def test_dtypes_of_the_result() -> None:
    states, keys = made((torch.bfloat16, torch.float16)), {"basis": "none"}
    call = merge_methods.merge_state_dicts
    full = call(states, "basis_ta", base="base", parameters=keys, dtype=torch.float32)
    for kind, options in {
        torch.float32: {},  # what bfloat16 and float16 promote to
        torch.bfloat16: {"dtype": torch.bfloat16},
        torch.float16: {"dtype": torch.bfloat16, "out_dtype": torch.float16},
    }.items():
        merged = call(states, "basis_ta", base="base", parameters=keys, **options)
        assert all(torch.equal(t, full[name].to(kind)) for name, t in merged.items())
        assert all(t.dtype == kind for t in merged.values())


def test_integer_buffers_are_copied() -> None:
    states = made()
    for state in states.values():
        state["count"] = torch.tensor([3, 4])
    merged = merge_methods.merge_state_dicts(
        states, "basis_ta", base="base", parameters={"basis": "none"}
    )
    assert torch.equal(merged["count"], torch.tensor([3, 4]))


def test_modules_merge_without_touching_their_gradients() -> None:
    modules: dict[str, nn.Module] = {}
    for number, key in enumerate(("base", *TASKS)):
        torch.manual_seed(number)
        modules[key] = llama()
    merged = merge_methods.merge_state_dicts(
        modules, "basis_ta", base="base", parameters={"basis": "none", "lambda": 0.1}
    )
    states = {k: {n: t.detach() for n, t in m.state_dict().items()} for k, m in modules.items()}
    want = expect(dense_of(states), "basis_ta", {"basis": "none", "lambda": 0.1}, {}, TASKS)
    assert_close(merged, want.tensors, states["base"])
    assert not any(tensor.requires_grad for tensor in merged.values())


@pytest.mark.parametrize("method", ["basis_ta", "basis_ties", "basis_negate"])
def test_tied_tensors_in_memory_count_once(method: str) -> None:
    states = made()
    plain = {"basis": "pca", "num_bases": 2}
    if method == "basis_negate":
        plain |= {"forget": "code", "alpha": 1.0}
    dense = dense_of(states)
    for state in states.values():
        state["head.weight"] = state["embed.weight"]
    merged = merge_methods.merge_state_dicts(states, method, base="base", parameters=plain)
    want = expect(dense, method, plain, {}, TASKS)
    assert_close(merged, want.tensors, dense.base, want.boundary)
    assert torch.equal(merged["head.weight"], merged["embed.weight"])


@pytest.mark.parametrize("case", ["ta", "ties", "ties-tensor", "negate"])
def test_single_tensors_equal_the_reference(case: str) -> None:
    states = made()
    name, keys = "layer.weight", METHODS[case]
    listed = [states[key][name] for key in ("base", *TASKS)]
    keys = {**keys, **({"forget": "2,4"} if "forget" in keys else {})}
    merged = merge_methods.merge_tensors(
        listed, method_of(case), parameters=keys, base_index=0, name=name
    )
    states = {key: {name: state[name]} for key, state in states.items()}
    dense = dense_of(states)
    want = expect(dense, method_of(case), keys, stored(case, keys, states), ("1", "2", "3", "4"))
    assert_close({name: merged}, want.tensors, dense.base, want.boundary)


def test_views_and_other_layouts_are_read_in_place() -> None:
    states = made()
    turned = {
        key: {n: t.t().contiguous().t() if t.dim() == 2 else t for n, t in state.items()}
        for key, state in states.items()
    }
    assert not turned["math"]["layer.weight"].is_contiguous()
    call, keys = merge_methods.merge_state_dicts, {"basis": "pca", "num_bases": 2}
    one = call(states, "basis_ta", base="base", parameters=keys)
    other = call(turned, "basis_ta", base="base", parameters=keys)
    assert all(torch.equal(one[name], other[name]) for name in one)
    np.testing.assert_array_equal(turned["math"]["bias"], states["math"]["bias"])


def test_methods_are_listed_with_their_parameters() -> None:
    known = {method.spec.name: method.spec for method in merge_methods.registered_methods()}
    for name in ("basis_ta", "basis_ties", "basis_negate"):
        keys = {parameter.name for parameter in known[name].parameters}
        assert {"basis", "num_bases", "lambda", "task", "weight"} <= keys
        assert ("density" in keys) == (name == "basis_ties")
        assert ({"forget", "alpha"} <= keys) == (name == "basis_negate")
