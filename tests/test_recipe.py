"""The recipe's keys: what is resolved, and what every mistake says."""

import numpy as np
import pytest
from mergekit.common import ModelReference

from tvb_mergekit.core.settings import (
    METHODS,
    VARYING_KEYS,
    check_tasks,
    check_value,
    resolve_settings,
)
from tvb_mergekit.errors import UserError
from tvb_mergekit.plugin.recipe import default_task_name

TASKS = ["math", "code", "safety", "7", "law", "med", "chat", "wiki"]
FORGET = {"forget": "math", "alpha": 0.5}


def test_defaults_are_those_of_the_contract() -> None:
    settings = resolve_settings("basis_ta", {}, TASKS)
    found = {"basis": "ae", "num_bases": None, "basis_ratio": 0.5, "seed": 0}
    found |= {"temperature": 5.0, "steps": 4000, "learning_rate": 0.01, "weight_decay": 1e-6}
    found |= {"lambda_scale": "bases", "merge_func": "sum"}
    assert all(getattr(settings, key) == value for key, value in found.items())
    with pytest.raises(AttributeError):
        settings.seed = 1
    halves = {(0.5, 8): 4, (0.5, 5): 3, (0.01, 8): 1, (1.0, 8): 8, (0.25, 10): 3}  # rounded up
    for (ratio, tasks), bases in halves.items():
        found = resolve_settings("basis_ta", {"basis_ratio": ratio}, ["t"] * tasks)
        assert found.bases_of(tasks) == bases
    defaults = {method: VARYING_KEYS["lambda"].default_for(method) for method in METHODS}
    assert defaults == {"basis_ta": 0.4, "basis_ties": 0.4, "basis_negate": 0.0} | dict.fromkeys(
        ["basis_iso", "basis_tsvm", "basis_wudi"], 1.0
    )


@pytest.mark.parametrize(
    ("method", "given", "expected"),
    [
        ("basis_ta", {"learning_rate": "1e-3"}, {"learning_rate": 1e-3}),
        ("basis_ta", {"lambda": [0.1, "0.4"], "exclude": "embed|head"}, {"exclude": "embed|head"}),
        ("basis_ties", {"density": {"value": 0.5}, "merge_func": "max"}, {"merge_func": "max"}),
        ("basis_negate", {"forget": " math , 7", "alpha": 0}, {"forget": ("math", "7")}),
        ("basis_wudi", {"flow_time": "exact"}, {"flow_time": "exact"}),
        ("basis_negate", {"forget": 7, "alpha": "0.3"}, {"forget": ("7",)}),
    ],
)
def test_resolves(method: str, given: dict[str, object], expected: dict[str, object]) -> None:
    resolved = resolve_settings(method, given, TASKS)
    assert {key: getattr(resolved, key) for key in expected} == expected
    assert all(type(getattr(resolved, key)) is type(value) for key, value in expected.items())


BAD: dict[str, list[tuple[dict[str, object], str]]] = {
    "basis_ta": [
        ({"Basis": "ae"}, "did you mean `basis`?"),
        ({"zzz": 1}, "unknown key `zzz` under parameters: Known keys: basis, seed"),
        ({"a\nb": 1}, "unknown key `a\\nb`"),
        ({"basis": "blanced"}, "`basis` is 'blanced': Input should be 'ae', "),
        ({"basis": "none", "num_bases": 4}, "belongs to basis ae or linear_ae or pca"),
        ({"temperature": float("inf")}, "`temperature` is inf: Input should be a finite"),
        ({"seed": 2**64}, "`seed` is 18446744073709551616: Input should be less than"),
        ({"basis": "pca", "steps": 9}, "`steps` belongs to basis ae or linear_ae, not to pca"),
        ({"exclude": ""}, "`exclude` is '': String should have at least 1"),
        ({"lambda": [{"filter": "x", "value": "y"}]}, "`lambda` is 'y': Input should"),
    ],
    "basis_tb": [({}, "unknown method `basis_tb`: expected one of basis_iso")],
    "basis_negate": [
        (FORGET | {"merge_func": "sum"}, "`merge_func` belongs to basis_ties"),
        ({"forget": "math"}, "basis_negate needs `alpha` as a parameter"),
        (FORGET | {"forget": "math,,code"}, "the unknown task ''"),
        (FORGET | {"forget": ["math"]}, "`forget` is ['math']: Input should be a valid string"),
    ],
    "basis_wudi": [
        (
            {"flow_time": 0},
            "`flow_time` is 0: Input should be 'exact' or ",
        ),
        ({"ridge": 0.1}, "unknown key `ridge`"),
    ],
    "basis_ties": [
        ({"density": 0}, "`density` is 0: Input should be greater than 0"),
        ({"merge_func": True}, "`merge_func` is True; quote a name"),
    ],
}


ROWS = [(method, *row) for method, rows in BAD.items() for row in rows]


@pytest.mark.parametrize(("method", "given", "fragment"), ROWS)
def test_mistakes_are_told_in_one_line(method, given, fragment):
    with pytest.raises(UserError) as caught:
        resolve_settings(method, given, TASKS)
    assert fragment in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match="lists no models" if method in METHODS else "unknown"):
        resolve_settings(method, given, [])


VALUES = [("weight", "-0.5", -0.5), ("num_bases", np.int64(2), 2), ("task", 12, "12")]


@pytest.mark.parametrize(("key", "value", "expected"), VALUES)
def test_values_of_one_key(key: str, value: object, expected: object) -> None:
    found = check_value(key, value)
    assert found == expected and type(found) is type(expected)
    for wrong in ("nan", False, -1e300, np.bool_(True), " ") if key != "task" else (" ", True):
        with pytest.raises(UserError, match=f"`{key}` is "):
            check_value(key, wrong)


def test_names_of_tasks_from_paths() -> None:
    names = {"./models/math/": "math", "org/math-7b@main": "math-7b", "org/m@refs/pr/1": "m"}
    names |= {"./base+./adapters/code//": "code", "/": "/"}
    for path, name in names.items():
        assert default_task_name(ModelReference.parse(path)) == name


REFUSED = {
    "the task name '' of model './b' is empty, or": ["math", ""],
    "'a,b' of model './a' is empty, or has a comma": ["a,b", "c"],
    "an outer blank": ["math", " code"],
    "control character": ["math", "co\nde"],
    "'math' of model './b' is also that of model ./a: give it another `task:`": ["math", "math"],
}


@pytest.mark.parametrize("said", REFUSED)
def test_check_tasks_refuses(said: str) -> None:
    with pytest.raises(UserError) as caught:
        check_tasks(REFUSED[said], ["./a", "./b"])
    assert said in str(caught.value) and "\n" not in str(caught.value)
