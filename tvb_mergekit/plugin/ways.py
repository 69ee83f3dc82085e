"""The recipes of `tvb merge STORE --method`: ways to merge all tasks, and to forget each."""

from __future__ import annotations

from typing import Any

from tvb_mergekit.core.settings import EVEN, KEYS, MATRIX_METHODS, MERGING_KEYS, VARYING_KEYS
from tvb_mergekit.errors import check_known
from tvb_mergekit.store.facts import StoreFacts

# Name of a merge of all tasks -> method
ALL_TASKS = {"add": "basis_ta"} | {name: f"basis_{name}" for name in "ties iso tsvm wudi".split()}
ALPHA = 1.0  # forgets all of the reconstructed task vector; less forgets less


def recipe_of(facts: StoreFacts, name: str, store: str, base: str) -> dict[str, Any]:
    """The recipe of this name; `store` and `base` are their paths in it."""
    forgets = {f"forget-{task}": task for task in facts.tasks}
    check_known(name, [*ALL_TASKS, *forgets], f"{store}: --method {name or 'is missing'}")
    method, built = ALL_TASKS.get(name, "basis_negate"), facts.parameters
    # The built recipe's numbers hold for its own method, or for the other of these two.
    shared = method == facts.method or {method, facts.method} <= {"basis_ta", "basis_ties"}
    every = (*MERGING_KEYS, *(VARYING_KEYS if shared else ()))
    keys = [key for key in every if method in KEYS[key].methods]
    parameters = {key: built[key] for key in keys if built.get(key) is not None}
    if method in MATRIX_METHODS and method != facts.method and built["basis"] in EVEN:
        parameters["lambda_scale"] = "tasks"  # so that lambda 1 counts all task vectors
    if facts.whole:
        parameters["basis"] = "none"
    if name in forgets:
        parameters = {"alpha": ALPHA, **parameters, "forget": forgets[name]}
        if facts.whole and not parameters.get("lambda"):  # the other vectors are not needed
            store = f"{store}/{forgets[name]}"
    made: dict[str, Any] = {
        "merge_method": method,
        "base_model": base,
        "models": [{"model": store}],
    }
    dtype = {"dtype": facts.dtype} if facts.dtype else {}
    return made | {"parameters": parameters} | dtype
