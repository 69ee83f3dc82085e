"""What the library leaves out of the task vectors: said in a warning, refused where it is most."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import recipe, refused, tvb
from safetensors.torch import save_file

import tvb_mergekit as library

pytestmark = pytest.mark.usefixtures("own_cache")
State = dict[str, Any]
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
    return library.build(base, {"x": model}, basis="none", **settings)


def add(base: State, model: State, **settings: Any) -> Any:
    return library.add(None, base, model, "x", budget=2, compress="balanced", **settings)


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
    with pytest.raises(library.UserError) as caught:
        build(base_change(state(0)), change(state(1)))
    assert str(caught.value).startswith(said)


def test_models_that_lack_most_together_are_refused() -> None:
    models = {"x": without("a")(state(1)), "y": without("b")(state(2))}
    with pytest.raises(library.UserError, match=r"^70 % .*`x`.*\(a\).*`y`.*\(b\)"):
        library.build(state(0), models)


def test_what_is_excluded_is_not_counted() -> None:
    with pytest.warns(UserWarning, match=r"1 missing in the model \(b\)"):
        build({"a": torch.ones(50), "b": torch.ones(10), "c": torch.ones(11)},
              {"c": torch.zeros(11)}, exclude="a")  # fmt: skip


def test_weight_files_of_a_recipe(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    models = {"base": dict, "x": without("head"), "y": prefixed}
    for number, (name, change) in enumerate(models.items()):
        save_file(change(state(number)), tmp_path / f"{name}.safetensors")
    base, x, y = (tmp_path / f"{name}.safetensors" for name in models)
    file = tmp_path / "recipe.yml"
    file.write_text(yaml.safe_dump(recipe("basis_ta", base, [x], basis="none")))
    with caplog.at_level(logging.WARNING):
        tvb("build", file, tmp_path / "store")
    assert "left out of its task vector: 1 missing in the model (head)" in caplog.text
    file.write_text(yaml.safe_dump(recipe("basis_ta", base, [x, y], basis="none")))
    told = refused("build", file, tmp_path / "out")
    assert "`y.safetensors` shares no floating-point tensor with the base" in told
    assert not (tmp_path / "out").exists()
