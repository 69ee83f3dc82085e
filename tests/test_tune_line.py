"""theta_0 + coefficient * Delta: the weights that mergekit-yaml writes, to the last bit."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import yaml
from commands import merge, recipe, tvb
from safetensors.torch import save_file
from test_lora import LINEAR, train
from tiny import TASKS, family, llama, load
from torch import Tensor

from tvb_mergekit.plugin.inputs import Options
from tvb_mergekit.tune import model as models_
from tvb_mergekit.tune.merges import TunedRecipe, read_tuned
from tvb_mergekit.tune.model import Line, MovingModel

BALANCED = {"basis": "balanced", "num_bases": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sum": ("basis_ta", {**BALANCED, "lambda_scale": "tasks"}),
    "sum of three": ("basis_ta", {"basis": "ae", "steps": 100, "num_bases": 3}),
    "gradient": ("basis_ta", {**BALANCED, "lambda": [0.1, 0.3, 1]}),
    "filter": ("basis_ta", {**BALANCED, "lambda": [{"filter": "mlp", "value": 0.7},
                                                  {"value": "1e-1"}]}),
    "ties": ("basis_ties", {**BALANCED, "density": 0.3}),
    "ties by max": ("basis_ties", {**BALANCED, "merge_func": "max"}),
    "iso": ("basis_iso", {**BALANCED, "lambda_scale": "tasks"}),
    "wudi by layer": ("basis_wudi", {"basis": "none", "lambda": [0.5, 1.0], "matrices": "mlp"}),
    "forget": ("basis_negate", {"basis": "pca", "num_bases": 2, "forget": "code", "alpha": 1}),
    "forget from the sum": ("basis_negate",
                            {**BALANCED, "forget": "code,chat", "alpha": 1, "lambda": 0.3}),
    "forget by chance": ("basis_negate", {"basis": "rand_select", "num_bases": 3, "lambda": 0.2,
                                          "forget": "math", "alpha": 1}),
    "some left out": ("basis_ta", {**BALANCED, "exclude": "embed|lm_head"}),
}  # fmt: skip
WHOLE = ("sum", "ties")  # at every point
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SLOW = pytest.mark.slow
STORED = ["mixed", *(pytest.param(dtype, marks=SLOW) for dtype in ("bfloat16", "float32"))]


@pytest.fixture(scope="module", params=STORED)
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Path]]:
    """Stored in one dtype, or in all of them in turn; sizes that no vector length divides."""
    dtypes = [DTYPES[name] for name in ("float32", "bfloat16", "float16")]
    if request.param != "mixed":
        dtypes = [DTYPES[request.param]]
    folder = tmp_path_factory.mktemp(request.param)
    return family(folder, lambda: llama(hidden_size=24, intermediate_size=53), dtypes=dtypes)


def written(document: Mapping[str, Any] | str, path: Path) -> TunedRecipe:
    text = document if isinstance(document, str) else yaml.safe_dump(dict(document))
    path.write_text(text, encoding="utf-8-sig")
    return read_tuned(str(path), Options())


def moved_as_merged(
    tuned: TunedRecipe, work: Path, points: Mapping[float, dict[str, Tensor]]
) -> int:
    """The number of tensors that a line moves, each to the merged tensor of every point."""
    unit = tuned.draw(work / "start", work / "direction")
    for point, made in points.items():
        live = {name: (torch.empty_like(t).view(-1), t.dtype) for name, t in made.items()}
        line = Line(work / "start", work / "direction", unit, live)
        line.move(tuned.coefficients(point, list(line.live)))
        for name, (tensor, _) in line.live.items():
            assert torch.equal(tensor, made[name].view(-1)), (point, name)
    return len(line.live)


@pytest.mark.parametrize("case", CASES)
def test_every_point_is_what_mergekit_writes(case, models, tmp_path, monkeypatch):
    monkeypatch.setattr(models_, "CHUNK", 700)
    base, listed = models
    method, keys = CASES[case]
    document = recipe(method, base, listed, {0: {"weight": 0.6}}, dtype=None, **keys)
    tuned = written(document, tmp_path / "r.yml")
    points = {}
    # outputs in every dtype, of points on both sides of 1
    every = list(zip((0.35, 1.0, 1.7), DTYPES, strict=True))
    place = list(CASES).index(case)
    for point, dtype in every if case in WHOLE else every[place % 3 :][:1]:
        points[point] = merge(tuned.at(point) | {"dtype": dtype}, tmp_path / dtype).tensors
    moved = moved_as_merged(tuned, tmp_path / "line", points)
    assert moved == len(points[point]) - (2 if case == "some left out" else 0)


@pytest.mark.parametrize("what", ["a store", "adapters"])
def test_other_inputs(what: str, tmp_path: Path) -> None:
    """Bases of a store, and adapters."""
    base, listed = family(tmp_path / "in", dtypes=[torch.bfloat16])
    if what == "a store":
        path = tmp_path / "build.yml"
        path.write_text(yaml.safe_dump(recipe("basis_ta", base, listed, dtype=None, **BALANCED)))
        tvb("build", path, tmp_path / "store", "--dtype", "float16", "--quiet")
        tuned = read_tuned(str(tmp_path / "store"), Options())
        assert tuned.share == 2 / len(TASKS)
    else:
        adapters = []
        for seed, task in enumerate(TASKS[:3]):
            train(base, tmp_path / task, seed, target_modules=LINEAR)
            adapters.append(f"{base}+{tmp_path / task}")
        path = tmp_path / "r.yml"
        path.write_text(yaml.safe_dump(recipe("basis_ta", base, adapters, **BALANCED)))
        tuned = read_tuned(str(path), Options())
        assert len(tuned.identity()["checkpoints"]) == 4
    made = merge(tuned.at(0.55), tmp_path / "merged").tensors
    moves = [name for name in made if what == "a store" or "proj" in name]
    assert moved_as_merged(tuned, tmp_path / "line", {0.55: made}) == len(moves)


def rewritten(folder: Path, **changed: Tensor | None) -> None:
    """A checkpoint with other tensors, or without those that are None."""
    state: dict[str, Any] = {**load(folder), **changed}
    kept = {name: tensor for name, tensor in state.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


NO_LINE = {
    "another direction": "not linear in lambda to the last bit",
    "other names": "the loaded model and its files have different names for w",
}


@pytest.mark.parametrize("what", ["tied", "own heads", *NO_LINE])
def test_a_live_model_moves_to_and_fro(what, tmp_path, caplog, monkeypatch):
    """No error piles up, and tied tensors move together; tied models with heads of their own are
    tied only at 0. A line that does not lead through the first merge, or to all weights, is not
    used."""
    dtype = torch.bfloat16 if what == "tied" else torch.float32
    make = partial(llama, tie_word_embeddings=True)
    base, listed = family(tmp_path / "in", make, TASKS[:3], dtypes=[dtype])
    document = recipe("basis_ta", base, listed, dtype=str(dtype).removeprefix("torch."), **BALANCED)
    if what == "own heads":
        for number, folder in enumerate((base, *listed)):
            embedding = load(folder)["model.embed_tokens.weight"]
            rewritten(folder, **{"lm_head.weight": embedding * (1 + number / 10)})
    tuned = written(document, tmp_path / "r.yml")

    def load_model(folder: Path) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        return SimpleNamespace(model=model, device=model.device)

    if what == "another direction":
        draw = TunedRecipe.draw
        monkeypatch.setattr(TunedRecipe, "draw", lambda *given: draw(*given) * (1 + 1e-6))
    elif what == "other names":
        names = lambda *_, **__: [("w", torch.zeros(1))]  # noqa: E731
        monkeypatch.setattr(torch.nn.Module, "named_parameters", names)
    model = MovingModel(tuned, tmp_path / "work", load_model, quiet=True, begin=0.3)
    for point in (0.9, 0.0, 3.0):
        found = model.at(point).model.state_dict()
        merge(tuned.at(point), tmp_path / str(point))
        want = load_model(tmp_path / str(point)).model.state_dict()
        assert [n for n in want if not torch.equal(found[n], want[n])] == []
    assert (model.line is None) == (what in NO_LINE) == ("merged to disk" in caplog.text)
    assert NO_LINE.get(what, "") in caplog.text


HEAD = "merge_method: basis_ta\nbase_model: b\nmodels: [{model: x}, {model: y}]\n"
SLICES = (
    "merge_method: basis_ta\nbase_model: b\nslices:\n- sources: [{model: a, layer_range: "
    "[0, 1]}, {model: b, layer_range: [0, 1]}]\n  parameters: {lambda: 0.5}\n"
)


@pytest.mark.parametrize(
    ("text", "found", "replaced"),
    [  # the number at 0.5, elsewhere, and the part of the text that changes
        (HEAD + "parameters:\n  lambda: 0.4  # a guess\n  basis: ae\n", 0.5, "0.4  # a guess"),
        (HEAD + "parameters: {lambda: [0.1, 0.9]}\n", [0.05, 0.45], None),
        (HEAD + "parameters: {lambda: [{filter: mlp, value: 2}]}\n",
         [{"filter": "mlp", "value": 1.0}], None),
        (HEAD + "parameters:\n  lambda:\n    0.4\n", 0.5, None),
        (HEAD, 0.5, None),
        (SLICES, 0.2, None),  # its default holds elsewhere, and is multiplied too
        ("".join(f"  {line}\n" for line in HEAD.splitlines()), 0.5, None),
    ],
)  # fmt: skip
def test_where_the_coefficient_stands(text, found, replaced, tmp_path):
    tuned = written(f"# mine\n{text}", tmp_path / "r.yml")
    assert tuned.factor == (isinstance(found, list) or text == SLICES)
    document = tuned.at(0.5)
    assert document["parameters"]["lambda"] == found
    if text == SLICES:
        assert document["slices"][0]["parameters"]["lambda"] == 0.25
    changed = tuned.tuned(0.5)
    assert yaml.safe_load(f"# found\n{changed}") == document
    if replaced is not None:
        assert changed == f"# mine\n{text}".replace(replaced, "0.5  # found by tvb tune")
