"""theta_0 + coefficient * Delta: the weights that mergekit-yaml writes, to the last bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from commands import merge, recipe, tvb
from safetensors.torch import save_file
from tiny import TASKS, family, load
from torch import Tensor

from tvb_mergekit.plugin.inputs import Options
from tvb_mergekit.plugin.tuning import TunedRecipe, read_tuned
from tvb_mergekit.tuning import line as lines
from tvb_mergekit.tuning.line import Line, Live, Point
from tvb_mergekit.tuning.model import Model
from tvb_mergekit.writing import MemorySink

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BALANCED = {"basis": "balanced", "num_bases": 2}
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "sum": ("basis_ta", {**BALANCED, "lambda_scale": "tasks"}),
    "sum of three": ("basis_ta", {"basis": "ae", "solver": "exact", "num_bases": 3}),
    "gradient": ("basis_ta", {**BALANCED, "lambda": [0.1, 0.3, 1]}),
    "filter": ("basis_ta", {**BALANCED, "lambda": [{"filter": "mlp", "value": 0.7},
                                                  {"value": "1e-1"}]}),
    "ties": ("basis_ties", {**BALANCED, "density": 0.3}),
    "ties by tensor": ("basis_ties", {**BALANCED, "trim": "tensor", "merge_func": "max"}),
    "forget": ("basis_negate", {"basis": "pca", "num_bases": 2, "forget": "code", "alpha": 1}),
    "forget from the sum": ("basis_negate",
                            {**BALANCED, "forget": "code,chat", "alpha": 1, "lambda": 0.3}),
    "forget by chance": ("basis_negate", {"basis": "rand_proj", "num_bases": 3, "lambda": 0.2,
                                          "forget": "math", "alpha": 1}),
    "some left out": ("basis_ta", {**BALANCED, "exclude": "embed|lm_head"}),
}  # fmt: skip
STOCK: dict[str, tuple[str, dict[str, Any]]] = {
    "task_arithmetic": ("task_arithmetic", {}),
    "task_arithmetic, normalized": ("task_arithmetic", {"normalize": True}),
    "mergekit's ties": ("ties", {"density": 0.4, "lambda": [0.5, 1.0]}),
    "breadcrumbs": ("breadcrumbs", {"density": 0.8}),
}
DTYPES = {"float32": FP32, "bfloat16": BF16, "float16": FP16}


SLOW = pytest.mark.slow
STORED = ["mixed", *(pytest.param(dtype, marks=SLOW) for dtype in ("bfloat16", "float32"))]


@pytest.fixture(scope="module", params=STORED)
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Path]]:
    """Stored in one dtype, or in all of them in turn; sizes that no vector length divides."""
    from tiny import llama

    dtypes = [FP32, BF16, FP16] if request.param == "mixed" else [DTYPES[request.param]]
    folder = tmp_path_factory.mktemp(request.param)
    return family(folder, lambda: llama(hidden_size=24, intermediate_size=53), dtypes=dtypes)


def written(document: Mapping[str, Any], path: Path) -> TunedRecipe:
    path.write_text(yaml.safe_dump(dict(document), sort_keys=False))
    return read_tuned(str(path), Options())


def drawn(tuned: TunedRecipe, folder: Path) -> Line:
    return Line(folder, tuned.draw(folder), torch.device("cpu"))


def same(line: Line, tuned: TunedRecipe, point: Point, made: dict[str, Tensor]) -> int:
    coefficients = tuned.coefficients(point, line.names)
    for name in line.names:
        want = made[name]
        pieces = [value for _, value in line.at(name, coefficients[name], want.dtype)]
        assert torch.equal(torch.cat(pieces).view(want.shape), want), name
    return len(line.names)


@pytest.mark.parametrize("case", [*OURS, *STOCK])
def test_every_point_is_what_mergekit_writes(
    case: str, models: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "PIECE", 700)
    base, listed = models
    method, keys = {**OURS, **STOCK}[case]
    weighted = range(len(listed)) if case in STOCK else [0]
    own = {index: {"weight": 0.6} for index in weighted}
    tuned = written(recipe(method, base, listed, own, dtype=None, **keys), tmp_path / "r.yml")
    assert tuned.linear
    line = drawn(tuned, tmp_path / "line")
    # outputs in every dtype, of points on both sides of 1
    for number, (dtype, value) in enumerate(zip(DTYPES, (0.35, 1.0, 1.7), strict=True)):
        if method in ("basis_ta", "basis_ties", "basis_negate"):
            document = {**tuned.at(Point(value)), "dtype": dtype}
        elif dtype == "float32":  # `dtype` would be that of mergekit's arithmetic
            document = tuned.at(Point(value))
        else:
            document = {**tuned.at(Point(value)), "out_dtype": dtype}
        made = merge(document, tmp_path / str(number)).tensors
        count = same(line, tuned, Point(value), made)
        assert count == len(made) - (2 if case == "some left out" else 0)


def test_a_line_over_a_store(tmp_path: Path) -> None:
    base, listed = family(tmp_path / "in", dtypes=[BF16])
    path = tmp_path / "build.yml"
    path.write_text(yaml.safe_dump(recipe("basis_ta", base, listed, dtype=None, **BALANCED)))
    tvb("build", path, tmp_path / "store", "--dtype", "float16", "--quiet")
    tuned = read_tuned(str(tmp_path / "store"), Options())
    line = drawn(tuned, tmp_path / "line")
    made = merge(tuned.at(Point(0.55)), tmp_path / "merged").tensors
    assert same(line, tuned, Point(0.55), made) == len(made)
    # a weight for each basis: merged in memory
    point = Point(0.4, (0.3, 1.25))
    made = merge(tuned.at(point), tmp_path / "weighted").tensors
    sink = MemorySink(1)
    tuned.merge_into(point, sink, {name: tensor.dtype for name, tensor in made.items()})
    (found,) = sink.states
    assert set(found) == set(made) and all(torch.equal(found[name], made[name]) for name in made)


def test_a_line_over_adapters(tmp_path: Path) -> None:
    """mergekit fuses them, into the same folder for the line and for the merge."""
    from test_lora import LINEAR, train

    base, _ = family(tmp_path / "in", tasks=TASKS[:1], dtypes=[BF16])
    adapters = []
    for seed, task in enumerate(TASKS[:3]):
        train(base, tmp_path / task, seed, target_modules=LINEAR)
        adapters.append(f"{base}+{tmp_path / task}")
    document = recipe("basis_ta", base, adapters, dtype="bfloat16", **BALANCED)
    (tmp_path / "r.yml").write_text(yaml.safe_dump(document))
    fused = str(tmp_path / "fused")
    tuned = read_tuned(str(tmp_path / "r.yml"), Options(lora_merge_cache=fused))
    line = drawn(tuned, tmp_path / "line")
    made = merge(tuned.at(Point(0.6)), tmp_path / "merged", "--lora-merge-cache", fused).tensors
    assert same(line, tuned, Point(0.6), made) == len(made)
    assert len(tuned.identity()["checkpoints"]) == 4


def test_a_live_model_moves_to_and_fro(tmp_path: Path) -> None:
    """No error piles up, tied tensors move together, and what was kept on the device is the same
    as what comes from the files."""
    import transformers
    from tiny import llama

    base, listed = family(tmp_path / "in", lambda: llama(tie_word_embeddings=True), dtypes=[BF16])
    tuned = written(
        recipe("basis_ta", base, listed, dtype="bfloat16", **BALANCED), tmp_path / "r.yml"
    )
    tuned.write(Point(0.2), tmp_path / "first")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    live = Live(model, tmp_path / "first")
    unit = tuned.draw(tmp_path / "line")
    line = Line(tmp_path / "line", unit, torch.device("cpu"), room=20_000)
    assert 0 < len(line._kept) < len(line.names)
    names = line.names
    assert line.differs(live, dict.fromkeys(names, 0.2)) == []
    assert line.differs(live, dict.fromkeys(names, 0.3)) != []
    for value in (0.9, 0.0, 3.0, 0.35):
        line.move(live, tuned.coefficients(Point(value), names))
    made = merge(tuned.at(Point(0.35)), tmp_path / "made").tensors
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    for name, tensor in made.items():
        assert torch.equal(state[name], tensor), name
    assert load(tmp_path / "first").keys() == made.keys()


def rewritten(folder: Path, **changed: Tensor | None) -> None:
    """A checkpoint with other tensors, or without those that are None."""
    state: dict[str, Any] = {**load(folder), **changed}
    kept = {name: tensor for name, tensor in state.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("what", ["own heads", "a bias that one lacks"])
def test_points_of_odd_models_from_0_on(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tied models with heads of their own are tied only at 0, and mergekit merges an optional
    tensor from the models that have it."""
    import transformers
    from tiny import llama

    def opt() -> torch.nn.Module:
        return transformers.OPTForCausalLM(
            transformers.OPTConfig(vocab_size=96, hidden_size=32, ffn_dim=48, num_hidden_layers=1,
                                   num_attention_heads=2, max_position_embeddings=64,
                                   word_embed_proj_dim=32)
        )  # fmt: skip

    heads = what == "own heads"
    make = (lambda: llama(tie_word_embeddings=True)) if heads else opt
    base, listed = family(tmp_path / "in", make, TASKS[:3])
    own: dict[int, dict[str, Any]] = {}
    keys: dict[str, Any] = dict(BALANCED)
    if heads:
        for number, folder in enumerate((base, *listed)):
            embedding = load(folder)["model.embed_tokens.weight"]
            rewritten(folder, **{"lm_head.weight": embedding * (1 + number / 10)})
    else:
        rewritten(listed[0], **{"model.decoder.layers.0.fc1.bias": None})
        own, keys = {index: {"weight": 0.5} for index in range(3)}, {}
    method = "basis_ta" if heads else "task_arithmetic"
    tuned = written(recipe(method, base, listed, own, **keys), tmp_path / "r.yml")

    def load_model(folder: Path) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        return SimpleNamespace(model=model, device=model.device)

    model = Model(tuned, tmp_path / "work", load_model, quiet=True, begin=0.3)
    for value in (0.0, 0.3, 0.7):
        found = model.at(Point(value)).model.state_dict()
        merge(tuned.at(Point(value)), tmp_path / str(value))
        want = load_model(tmp_path / str(value)).model.state_dict()
        assert [n for n in want if not torch.equal(found[n], want[n])] == []
    assert model._line is not None and "merged to disk" not in caplog.text


@pytest.mark.parametrize(
    ("setting", "factor"),
    [(0.4, False), ("4e-1", False), (None, False), ([0.2], True), ([0.1, 0.9], True)],
)
def test_where_the_coefficient_stands(setting: Any, factor: bool, tmp_path: Path) -> None:
    keys = {} if setting is None else {"lambda": setting}
    (tmp_path / "b").mkdir()
    document = recipe("basis_ta", tmp_path / "b", [tmp_path / t for t in TASKS], **BALANCED, **keys)
    tuned = written(document, tmp_path / "r.yml")
    assert tuned.factor == factor and tuned.key == "lambda"
    found = tuned.at(Point(0.5))["parameters"]["lambda"]
    assert found == ([0.05, 0.45] if setting == [0.1, 0.9] else [0.1] if factor else 0.5)
    assert yaml.safe_load(tuned.tuned(Point(0.5))) == tuned.at(Point(0.5))


def test_a_module_s_own_lambda_is_multiplied(tmp_path: Path) -> None:
    """Its default holds elsewhere, and is multiplied too."""
    document = {
        "merge_method": "task_arithmetic",
        "base_model": "b",
        "slices": [
            {"sources": [{"model": m, "layer_range": [0, 1]} for m in "ab"],
             "parameters": {"lambda": 0.5}},
        ],
    }  # fmt: skip
    tuned = written(document, tmp_path / "r.yml")
    found = tuned.at(Point(0.2))
    assert tuned.factor and found["slices"][0]["parameters"]["lambda"] == 0.1
    assert found["parameters"]["lambda"] == 0.2


def test_the_user_s_own_text_is_kept(tmp_path: Path) -> None:
    text = (
        "# mine\nmerge_method: basis_ta\nbase_model: b\nmodels: [{model: x}, {model: y}]\n"
        "parameters:\n  lambda: 0.4  # a guess\n  basis: balanced\n"
    )
    (tmp_path / "r.yml").write_text(text)
    tuned = read_tuned(str(tmp_path / "r.yml"), Options())
    changed = text.replace("0.4  # a guess", "0.35  # found by tvb tune")
    assert tuned.tuned(Point(0.35)) == changed
    other = text.replace("parameters:\n  lambda: 0.4  # a guess\n  basis: balanced\n",
                         "parameters: {lambda: 0.4, basis: balanced}\n")  # fmt: skip
    (tmp_path / "r.yml").write_text(other)
    tuned = read_tuned(str(tmp_path / "r.yml"), Options())
    assert yaml.safe_load(tuned.tuned(Point(0.35)))["parameters"]["lambda"] == 0.35


@pytest.mark.parametrize("form", ["indented", "with a mark", "null"])
def test_recipes_that_are_written_oddly(form: str, tmp_path: Path) -> None:
    """What stands in tuned.yml below its comment is YAML still."""
    document: dict[str, Any] = recipe("basis_ta", tmp_path / "b", [tmp_path / t for t in TASKS])
    document["parameters"] = None if form == "null" else {"lambda": 0.4}
    text = yaml.safe_dump(document, sort_keys=False)
    if form == "indented":
        text = "".join(f"  {line}" for line in text.splitlines(keepends=True))
    encoding = "utf-8-sig" if form == "with a mark" else "utf-8"
    (tmp_path / "r.yml").write_text(text, encoding=encoding)
    for folder in (tmp_path / "b", *(tmp_path / t for t in TASKS)):
        folder.mkdir()
        save_file({"w": torch.zeros(1)}, folder / "model.safetensors")
    tuned = read_tuned(str(tmp_path / "r.yml"), Options())
    assert yaml.safe_load(f"# found\n{tuned.tuned(Point(0.2))}") == tuned.at(Point(0.2))
    assert tuned.at(Point(0.2))["parameters"] == {"lambda": 0.2}
    assert "lambda" not in (tuned.identity()["recipe"]["parameters"] or {})
