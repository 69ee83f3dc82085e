"""The library on state dicts, folders and files (merges: test_merges.py)."""

import doctest
import gc
import inspect
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import assert_close, ready
from reference import Dense, expect
from tiny import TASKS
from torch import Tensor, nn
from worlds import World

import tvb_mergekit as tvb
from tvb_mergekit.store import api
from tvb_mergekit.store import attach as attaching

State = dict[str, Tensor]


def five(world: World) -> tuple[State, dict[str, State]]:
    base, *models = world("five").states
    return dict(base), dict(zip(TASKS, map(dict, models), strict=True))


def dense_of(base: State, models: Mapping[str, State]) -> Dense:
    return Dense(base, [*models.values()], [n for n, t in base.items() if t.is_floating_point()])


@pytest.mark.parametrize(("basis", "dtype"), [("pca", torch.bfloat16), ("balanced", torch.float32)])
def test_in_memory_equals_on_disk(basis, dtype, world, tmp_path):
    base, models = five(world)
    keys: dict[str, Any] = {"basis": basis, "num_bases": 2, "exclude": "bias", "dtype": dtype}
    memory = tvb.build(base, models, **keys)
    disk = tvb.build(base, models, tmp_path / "store", **keys)
    files = tvb.build(
        world("five").base, {k: str(v) for k, v in world("five").models.items()}, **keys
    )
    loaded = tvb.load(tmp_path / "store")
    assert isinstance(memory, tvb.Bases) and memory.tasks == list(TASKS)
    assert repr(memory).startswith("Bases(") and len(repr(memory)) < 100
    assert memory.facts["left_out"] == {
        **dict.fromkeys(("ids", "steps"), "not floating point in the base (int64)"),
        "bias": "excluded by the recipe",
    }
    for other in (disk, files, loaded):
        assert set(other.tensors) == set(memory.tensors)
        for name, tensor in memory.tensors.items():
            torch.testing.assert_close(other.tensors[name], tensor, rtol=1e-12, atol=1e-15)
        for mine, theirs in zip(memory.sources, other.sources, strict=True):
            assert set(mine.tensors) == set(theirs.tensors)
            for name in mine.tensors:
                assert torch.equal(mine.tensor(name), theirs.tensor(name))
        assert other.facts["errors"] == memory.facts["errors"]
        one = tvb.reconstruct(other, base, "code")
        two = tvb.reconstruct(memory, base, "code")
        assert all(torch.equal(t, two[n]) for n, t in one.items())
        one, two = tvb.merge(other, base), tvb.merge(memory, base)
        assert all(torch.equal(t, two[n]) for n, t in one.items())


def test_a_base_that_ties_what_its_models_do_not(world: World) -> None:
    """Each name has its own task vector."""
    base, models = five(world)
    base["twin"] = base["embed"]
    for state in models.values():
        state["twin"] = 3 * state["embed"] - 2 * base["embed"]
    bases = tvb.build(base, models, basis="none")
    want = expect(dense_of(base, models), "basis_ta", {"basis": "none"}, {}, TASKS)
    assert_close(tvb.merge(bases, base, "basis_ta"), want.tensors, base, want.boundary)


def test_mistakes_are_user_errors(world: World, tmp_path: Path) -> None:
    base, models = five(world)
    bases = tvb.build(base, models, tmp_path / "store", basis="pca", num_bases=2)
    ae, balanced = tvb.build(base, models, steps=2), {"compress": "balanced"}
    three = tvb.build(base, models, basis="balanced", num_bases=3)
    other = {n: t + 1 if t.is_floating_point() else t for n, t in base.items()}
    short = {**models, "code": models["code"] | {"bias": torch.zeros(3)}}
    for message, call in {
        "unknown key `num_base`": lambda: tvb.build(base, models, num_base=2),
        "no convex": lambda: tvb.add(bases, base, models["math"], "new"),
        "compress by ae, or build": lambda: tvb.add(ae, base, models["math"], "new", **balanced),
        "`num_bases`: new bases begin": lambda: tvb.add(
            None, base, models["math"], "new", num_bases=2
        ),
        "the budget is 2, and the": lambda: tvb.add(three, base, models["math"], "new", budget=2),
        "unknown task 'x'": lambda: tvb.build(base, models, weights={"x": 1.0}),
        "has shape": lambda: tvb.build(base, short),
        "`basis` was set when": lambda: tvb.merge(bases, base, basis="ae"),
        "belongs to the base": lambda: tvb.merge(bases, other),
        "and the weights of": lambda: tvb.reconstruct(bases, other, "math"),
        "no task 'z'": lambda: tvb.reconstruct(bases, base, "z"),
        "expected one of torch.float32": lambda: tvb.build(base, models, dtype=torch.int8),
        "choose one of --lossless, --keep": lambda: tvb.build(
            base, models, "s", keep=0.5, dtype=torch.bfloat16
        ),
        "`dtype` is of type str: expected a torch.dtype": lambda: tvb.build(
            base, models, dtype="float32"
        ),
        "device `tpu:x` cannot be used": lambda: tvb.merge(bases, base, device="tpu:x"),
        "`bases` is of type str: expected bases of": lambda: tvb.merge("store", base),
        "`models` is of type list: expected a mapping": lambda: tvb.build(base, [base]),
        "task 3 is of type int": lambda: tvb.build(base, {3: models["math"]}),
        "`path` is of type Bases: expected a path": lambda: tvb.remove(bases, "math"),
        "holds no torch.Tensor (ndarray)": lambda: tvb.build({"w": np.zeros(2)}, models),
    }.items():
        with pytest.raises(tvb.UserError) as caught:
            call()
        assert message in str(caught.value) and "\n" not in str(caught.value), message
    tvb.build(base, models, tmp_path / "tuned", basis="none", lambda_=0.3, device="cpu")
    assert ready(tmp_path / "tuned", "add")["parameters"]["lambda"] == 0.3


HOSTILE: list[Any] = [
    None, 3, 2.5, True, "", b"w", Path("nowhere"), (), [1], (torch.float32,), {},
    {"w": 1}, {"w": np.zeros(2)}, {1: torch.zeros(2)}, {"w": None}, object(), np.zeros(2),
    torch.zeros(2), nn.Linear(1, 1),
]  # fmt: skip


def test_whatever_is_given_is_taken_or_refused(tmp_path, monkeypatch):
    """Every argument of every public function, and every key, of each wrong type."""
    monkeypatch.chdir(tmp_path)
    base = {"weight": torch.zeros(4, 4)}
    models = {n: {"weight": torch.eye(4)[i].repeat(4, 1)} for i, n in enumerate("abc")}
    bases = tvb.build(base, models, basis="none")
    tvb.build(base, models, "store", basis="none")
    one: dict[str, Any] = {"weight": 1.0, "dtype": torch.float32, "device": "cpu"}
    functions: dict[str, dict[str, Any]] = {
        "build": {"base": base, "models": models, "out": None, "weights": None, **one},
        "load": {"path": "store"},
        "add": {"bases": bases, "base": base, "model": {"weight": 2 * torch.eye(4)}, "task": "d",
                "budget": 4, "compress": "balanced", **one},
        "remove": {"path": "store", "task": "a"},
        "undo": {"path": "store"},
        "reconstruct": {"bases": bases, "base": base, "task": "a", "dtype": None},
        "merge": {"bases": bases, "base": base, "method": "basis_ta", "dtype": None,
                  "device": torch.device("cpu")},
    }  # fmt: skip
    functions["build"] |= {"lossless": False, "keep": None}
    functions["build"].pop("weight")
    for name, good in functions.items():
        keys = [*inspect.signature(getattr(tvb, name)).parameters]
        assert set(good) == {*keys} - {"settings", "parameters"}
    for name in ("build", "merge"):
        functions[name] |= {"exclude": "x", "lambda_": 0.4, "lambda_scale": "bases"}
    functions["build"] |= {"basis": "balanced", "num_bases": 2}
    accepted: dict[tuple[str, str], list[Any]] = {}
    for name, good in functions.items():
        for key in good:
            for value in HOSTILE:
                try:
                    getattr(tvb, name)(**{**good, key: value})
                except tvb.UserError as error:
                    assert "\n" not in str(error), (name, key, value)
                else:
                    accepted.setdefault((name, key), []).append(value)
    assert {path.name for path in tmp_path.iterdir()} == {"store", "nowhere.previous", "nowhere"}
    place = Path("nowhere")
    assert accepted == {
        ("build", "out"): [None, place],
        ("build", "weights"): [None, {}],
        ("build", "keep"): [None],
        **{(name, "exclude"): [3, 2.5] for name in ("build", "merge")},
        **{(name, "lambda_"): [3, 2.5] for name in ("build", "merge")},
        ("build", "num_bases"): [3],
        **{(name, "dtype"): [None] for name in ("build", "reconstruct", "merge")},
        ("add", "bases"): [None, place],
        ("add", "budget"): [None, 3],
        ("add", "compress"): [None],
        ("add", "weight"): [3, 2.5],
        **{key: [place] for key in (("load", "path"), ("undo", "path"))},
    }


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_no_file_stays_open(tiny_models: Path, tmp_path: Path) -> None:
    """Nor is one left to the interpreter to close, which warns of it under `python -X dev`."""
    models = {name: tiny_models / name for name in "ab"}

    def opened() -> set[str]:
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return {os.readlink(link) for link in links if os.path.lexists(link)}

    gc.collect()
    gc.disable()
    before = opened()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number, keys in enumerate(({"keep": 0.5}, {"basis": "none"})):
                tvb.build(tiny_models / "base", models, tmp_path / f"{number}", **keys)
                assert opened() == before, keys
    finally:
        gc.enable()
    assert not [str(each.message) for each in caught if each.category is ResourceWarning]


def test_doctests() -> None:
    for module, least in ((api, 4), (attaching, 6)):
        found = doctest.testmod(module)
        assert found.attempted >= least and not found.failed


def test_importing_is_cheap() -> None:
    code = """
import sys, tvb_mergekit as tvb
assert tvb.__version__
assert not {'torch', 'numpy', 'mergekit', 'transformers'} & set(sys.modules)
tvb.build
import torch
models = {str(index): {'w': torch.eye(3)[index]} for index in range(3)}
for keys in ({'basis': 'ae', 'steps': 3}, {'basis': 'balanced'}):
    tvb.build({'w': torch.zeros(3)}, models, num_bases=2, **keys)
assert not {'mergekit', 'transformers', 'scipy.optimize', 'torch._dynamo'} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# What is left out of the task vectors: said in a warning, refused where it is most


Change = Callable[[State], State]


def state(seed: int) -> State:
    generator = torch.Generator().manual_seed(0)
    sizes = {"a": 40, "b": 30, "c": 5, "d": 5, "e": 5, "head": 15}
    made: State = {n: torch.randn(size, generator=generator) for n, size in sizes.items()}
    for tensor in made.values():
        tensor += 0.1 * seed * torch.randn(tensor.shape, generator=generator)
    return made | {"steps": torch.tensor(seed)}


def without(*names: str, **more: object) -> Change:
    return lambda given: {n: t for n, t in given.items() if n not in names} | more


def numpy(*names: str) -> Change:
    return lambda given: given | {name: given[name].numpy() for name in names}


def prefixed(given: State) -> State:
    return {f"module.{name}": tensor for name, tensor in given.items()}


def tied(given: State) -> State:
    return given | {"twin": given["head"]}


def build(base: State, model: State, **settings: Any) -> Any:
    return tvb.build(base, {"x": model}, basis="none", **settings)


def add(base: State, model: State, **settings: Any) -> Any:
    return tvb.add(None, base, model, "x", budget=2, compress="balanced", **settings)


X = "the model of task `x`: left out of its task vector: "
SAID = [  # the model, the base, and what is said
    (without("head", "steps"), dict, X + "1 missing in the model (head)"),
    (numpy("b"), dict, X + "1 missing in the model (b)"),
    (without("c", "d", "e", "head"), dict, X + "4 missing in the model (c, d, e and 1 more)"),
    (dict, without("head"), X + "1 not in the base (head)"),
]
QUIET = [  # not floating point, no tensor, excluded, tied, and whole
    (without("steps", more=torch.tensor(1), epoch=3), dict, {}),
    (without("head", z_head=torch.ones(1)), dict, {"exclude": "head"}),
    (tied, dict, {}),
    (tied, tied, {}),
]
NONE = "the model of task `x` shares no floating-point tensor with the base: "
NAMES = "6 missing in the model (a, b, c and 3 more), 6 not in the base (module.a, module.b, "
REFUSED = [
    (prefixed, dict, NONE + NAMES + "module.c and 3 more);"),
    (lambda given: {n: t.int() for n, t in given.items()}, dict, "no tensor takes part: every"),
    (without("a", "c", "d", "e"), dict, "55 % of the base would be left out: " + X + "4 missing"),
]  # fmt: skip


@pytest.mark.parametrize("call", [build, add])
@pytest.mark.parametrize(("change", "base_change", "said"), SAID)
def test_what_is_left_out_is_said(call, change, base_change, said):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # garbage of other tests
        call(base_change(state(0)), change(state(1)))
    assert [(w.category, str(w.message), w.filename) for w in caught] == [
        (UserWarning, said, __file__)
    ]


@pytest.mark.parametrize(("change", "base_change", "settings"), QUIET)
def test_what_brings_no_warning(change, base_change, settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(base_change(state(0)), change(state(1)), **settings)


@pytest.mark.parametrize(("change", "base_change", "said"), REFUSED)
def test_a_model_that_lacks_most_is_refused(change: Change, base_change: Change, said: str) -> None:
    with pytest.raises(tvb.UserError) as caught:
        build(base_change(state(0)), change(state(1)))
    assert str(caught.value).startswith(said)


def test_models_that_lack_most_together_are_refused() -> None:
    models = {"x": without("a")(state(1)), "y": without("b")(state(2))}
    with pytest.raises(tvb.UserError, match=r"^70 % .*`x`.*\(a\).*`y`.*\(b\)"):
        tvb.build(state(0), models)


def test_what_is_excluded_is_not_counted() -> None:
    with pytest.warns(UserWarning, match=r"1 missing in the model \(b\)"):
        build({"a": torch.ones(50), "b": torch.ones(10), "c": torch.ones(11)},
              {"c": torch.zeros(11)}, exclude="a")  # fmt: skip
