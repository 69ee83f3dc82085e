"""The recipes of `tvb merge STORE --method`: ways to merge all tasks, and to forget each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvb_mergekit.core.settings import EVEN, GLOBAL_KEYS, MATRIX_METHODS, VARYING_KEYS
from tvb_mergekit.store.facts import StoreFacts

ALL_TASKS = {  # name of a merge of all tasks -> method
    "add": "basis_ta",
    "ties": "basis_ties",
    "iso": "basis_iso",
    "tsvm": "basis_tsvm",
    "wudi": "basis_wudi",
}
ALPHA = 1.0  # forgets all of the reconstructed task vector; less forgets less
KEPT = ("merge_func", "common", "flow_time", "matrices", "transposed")


def times(setting: Any, factor: float) -> Any:
    """A coefficient as a recipe gives it (number, text, layer gradient or filters), multiplied."""
    if isinstance(setting, Mapping):
        return {**setting, "value": times(setting["value"], factor)}
    if isinstance(setting, list):
        return [times(each, factor) for each in setting]
    return float(setting) * factor


def templates(facts: StoreFacts, store: str, base: str) -> dict[str, dict[str, Any]]:
    """Name -> recipe; `store` and `base` are their paths in it."""
    every = {name: (_parameters(method, facts), store) for name, method in ALL_TASKS.items()}
    for task in facts.tasks:
        parameters = _parameters("basis_negate", facts) | {"forget": task}
        alone = facts.whole and not parameters["lambda"]  # the other vectors are not needed
        every[f"forget-{task}"] = parameters, f"{store}/{task}" if alone else store
    more = {"dtype": facts.dtype} if facts.dtype else {}
    return {
        name: {
            "merge_method": ALL_TASKS.get(name, "basis_negate"),
            "base_model": base,
            "models": [{"model": model}],
            "parameters": parameters,
            **more,
        }
        for name, (parameters, model) in every.items()
    }


def _parameters(method: str, facts: StoreFacts) -> dict[str, Any]:
    """A method's parameters, from the recipe that the store was built by."""
    built, same = facts.parameters, method == facts.method
    # The built recipe's numbers hold for its own method, or for the other of these two.
    shared = same or {method, facts.method} <= {"basis_ta", "basis_ties"}
    parameters: dict[str, Any] = {"basis": "none"} if facts.whole else {}
    for key in (key for key, spec in VARYING_KEYS.items() if method in spec.methods):
        default = VARYING_KEYS[key].default_for(method)
        value = built.get(key, default) if shared else default
        parameters[key] = ALPHA if value is None else value
    parameters["lambda_scale"] = built["lambda_scale"]
    if method in MATRIX_METHODS and not same and built["basis"] in EVEN:
        parameters["lambda_scale"] = "tasks"  # so that lambda 1 counts all task vectors
    kept = [key for key in KEPT if method in GLOBAL_KEYS[key].methods]
    return {**parameters, **{key: built[key] for key in kept if built.get(key) is not None}}
