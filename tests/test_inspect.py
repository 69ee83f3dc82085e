"""`tvb inspect`: numbers against dense float64, tables, pictures, and recipes that are refused."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import reference
import torch
import yaml
from commands import refused, slices, tvb, write
from reference import Dense
from safetensors.torch import load_file, save_file
from test_faults import OF_FILES, RECIPES, Case, prepare, recipe, snapshot
from torch import Tensor
from worlds import Models, World

import tvb_mergekit
from tvb_mergekit.errors import MergeRefused, refusing
from tvb_mergekit.store.store import load
from tvb_mergekit.tensors.checkpoint import Checkpoint


class Kind(NamedTuple):
    """What is inspected: its M, whether G is known, the start of its text, and its panels."""

    count: int
    known: bool
    told: str
    panels: str  # the first letters of Cosines, Encoder, Norms, Bits, error (L), energy (S)


KINDS = {
    "tasks": Kind(5, True, r"Store of 5 task vectors \(lossless, [\d.]+ bits\), base ", "CNBS"),
    "sample": Kind(5, True, r"Store of 5 task vectors \(a sample of 50 %, [\d.]+ bits\)", "CNBLS"),
    "balanced": Kind(2, True, "Store: 2 balanced basis vectors of 5 task vectors", "CENLS"),
    "pca": Kind(2, True, r"Store: 2 pca basis vectors of 5 .* \(float16\), base", "CENLS"),
    "grown once": Kind(3, True, "Store: 3 balanced basis vectors of 4 task vectors", "CENLS"),
    "grown": Kind(3, False, "Store: 3 balanced basis vectors of 5 task vectors", "EN"),
    "merge": Kind(2, True, "Merge by basis_ties: 2 balanced basis vectors of 5", "CENLS"),
    "merge of all": Kind(5, False, "Merge by basis_ta: 5 task vectors", "N"),
    "merge of a store": Kind(2, True, "Merge by basis_ta: 2 balanced basis vectors of 5", "CENLS"),
    "recipe.yml": Kind(2, True, "Recipe for basis_ta, not built: 2 ae basis vectors of 5", "CENLS"),
}
PANELS = {
    "C": "Cosines between", "E": "Encoder weights", "N": "Norms of", "B": "Bits of a parameter",
    "L": "Error of each", "S": "Energy that M bases",
}  # fmt: skip


@pytest.fixture(scope="module")
def models(world: World) -> Models:
    return world("bf16")


@pytest.fixture(scope="module")
def made(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with each of KINDS."""
    root = tmp_path_factory.mktemp("inspected")
    two = {"basis": "balanced", "num_bases": 2}
    models.build(root / "tasks")
    models.build(root / "sample", "--keep", 0.5)
    models.build(root / "balanced", "--dtype", "float32", **two)
    models.build(root / "pca", "--dtype", "float16", basis="pca", num_bases=2)
    listed = [*models.models.items()]
    for name, count in {"grown once": 4, "grown": 5}.items():
        for number, (task, model) in enumerate(listed[:count]):
            new = ["--base", models.base, "--budget", 3, "--compress", "balanced"]
            new += ["--dtype", "float32"]
            tvb("add", root / name, model, "--task", task, "--quiet", *([] if number else new))
    models.merge("basis_ties", root / "merge", **two)
    models.merge("basis_ta", root / "merge of all", basis="none")
    tvb("merge", root / "balanced", root / "merge of a store", "--method", "add", "--quiet")
    write(models.recipe(basis="ae", num_bases=2, steps=50), root / "recipe")
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_the_dense_vectors(kind: str, made: Path, models: Models) -> None:
    wanted, told = KINDS[kind], json.loads(tvb("inspect", made / kind, "--json").stdout)
    assert told["tasks"] == list(models.tasks[: told["num_tasks"]])
    assert told["what"] == ("merge" if "merge" in kind else "recipe" if "." in kind else "store")
    names = sorted(models.states[0])
    dense = Dense(models.states[0], list(models.states[1:]), names)
    tau = dense.tau[:, : told["num_tasks"]]
    norms = np.linalg.norm(tau, axis=0)
    assert told["num_bases"] == wanted.count and told["num_parameters"] == len(tau)
    np.testing.assert_allclose([told["norms"][t] for t in told["tasks"]], norms, rtol=1e-6)
    assert told["norms"]["base"] == pytest.approx(np.linalg.norm(dense.theta), rel=1e-6)
    if told["what"] == "store":
        current = load(made / kind).facts
        assert told["sizes"]["store"] == sum(file.bytes for file in current.held.values())
        np.testing.assert_allclose(told["bits"], 8 * np.array(told["bytes"]) / len(tau))
        weights = [file for model in models.models.values() for file in model.glob("*.safetensors")]
        size = sum(file.stat().st_size for file in weights)
        assert kind != "tasks" or 0.8 < told["sizes"]["models"] / size <= 1
        assert "previous" not in told and told["vectors"]
    else:
        assert told["sizes"] is None and told["bytes"] == told["bits"] == []
    assert (told["gram"] is not None) == (told["cosines"] is not None) == wanted.known
    errors = [told["errors"][task] for task in told["tasks"]]
    if not wanted.known:
        assert told["choices"] == [] and set(errors) == {None}
        return
    np.testing.assert_allclose(told["gram"], tau.T @ tau, rtol=1e-5, atol=1e-6 * norms.max() ** 2)
    np.testing.assert_allclose(told["cosines"], (tau / norms).T @ (tau / norms), atol=1e-5)
    encoder, decoder = np.array(told["encoder"]), np.array(told["decoder"])
    rebuilt = tau @ encoder @ decoder + (tau.mean(axis=1, keepdims=True) if kind == "pca" else 0)
    if kind == "sample":
        bases = tvb_mergekit.load(made / kind)
        bases.check_base(Checkpoint.open(models.base), "the base")
        columns = [reference.flat({n: v.tensor(n) for n in names}, names) for v in bases.vectors]
        rebuilt = np.stack(columns, axis=1)
    lost = np.linalg.norm(rebuilt - tau, axis=0)
    np.testing.assert_allclose(errors, lost / norms, rtol=1e-5, atol=1e-5)
    if kind != "sample":
        assert told["loss"] == pytest.approx(float(lost @ lost), rel=1e-4, abs=1e-6 * norms @ norms)
    # what other M would retain: the sum of all task vectors first, then the best directions
    scales, total = np.linalg.svd(tau, compute_uv=False), norms @ norms
    unit = tau.sum(axis=1, keepdims=True) / np.linalg.norm(tau.sum(axis=1))
    left = np.linalg.svd(tau - unit @ (unit.T @ tau), compute_uv=False)
    for count, choice in enumerate(told["choices"], 1):
        bound, balanced = np.square(scales[count:]).sum(), np.square(left[count - 1 :]).sum()
        found = [choice[key] for key in ("retained_energy", "balanced_energy")]
        want = [1 - bound / total, 1 - balanced / total]
        np.testing.assert_allclose(found, want, rtol=1e-6)
    assert [choice["num_bases"] for choice in told["choices"]] == [*range(1, len(norms) + 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_tables_and_pictures_of_each_kind(kind: str, made: Path, tmp_path: Path) -> None:
    """No panel is empty, and none is about nothing."""
    pytest.importorskip("matplotlib")
    text, wanted = tvb("inspect", made / kind, "--plot", tmp_path / "a.svg").stdout, KINDS[kind]
    flat = " ".join(text.split())
    assert re.match(wanted.told, flat), flat[:200]
    assert not re.search(r"\bnan\b|\binf\b|None|none basis", text)
    assert max(map(len, text.splitlines())) <= 80 or "/" in text  # a path is one word
    assert ("Cosines: not known" in flat) == (not wanted.known)
    assert ("What other M would retain: not known" in flat) == (not wanted.known)
    whole = kind in ("tasks", "sample")
    assert whole == (" bits" in flat)
    assert ("E" in wanted.panels) == ("row sum" in text) == ("Encoder weights" in text)
    assert ("Retained energy" in flat) == (wanted.known and not whole)
    assert wanted.count == 5 or not wanted.known or f"> {wanted.count}" in text
    picture = (tmp_path / "a.svg").read_text(encoding="utf-8")
    found = {letter for letter, title in PANELS.items() if f"<!-- {title}" in picture}
    assert found == {*wanted.panels}
    axes = len(re.findall(r'<g id="axes_\d+">', picture))
    assert axes == len(found) + len(found & {"C", "E"})  # their bars of colours


def test_a_report_that_is_damaged(made: Path) -> None:
    for name in ("basis.json", "basis.safetensors"):
        file = made / "merge" / "basis" / name
        before = file.read_bytes()
        for content in (before[:-7], b""):
            file.write_bytes(content)
            assert name in refused("inspect", made / "merge")
        file.write_bytes(before)


# Recipes: refused where merges refuse them, in the same words

NOT_CHECKED = {"overflow"}  # what only writing shows
CASES: dict[str, Case] = RECIPES | OF_FILES


@pytest.mark.parametrize("name", sorted(set(CASES) - NOT_CHECKED))
def test_recipes_that_a_merge_refuses(name, tmp_path, tiny_models, monkeypatch, caplog):
    case = CASES[name]
    prepare(tmp_path / "work", tiny_models, case)
    monkeypatch.chdir(tmp_path / "work")
    before = snapshot(tmp_path)
    done = tvb("inspect", "recipe.yml", "--quiet", code=0 if case.ok else 1)
    assert snapshot(tmp_path) == before
    assert case.ok or re.fullmatch(r"Error: [^\n]+\n", done.stderr), done.stderr
    for want in case.wants:
        assert re.search(want, caplog.text + done.stdout + done.stderr), done.stderr


def test_excluded_tensors_of_a_merge_with_slices(tmp_path, tiny_models, monkeypatch) -> None:
    prepare(tmp_path / "work", tiny_models, Case())
    monkeypatch.chdir(tmp_path / "work")
    document = recipe({"exclude": "lm_head"}) | slices("./base", ["./a", "./b"], [(0, 1), (1, 2)])
    del document["models"]
    Path("recipe.yml").write_text(yaml.safe_dump(document))
    said = " ".join(tvb("inspect", "recipe.yml", "--quiet").stdout.split())
    assert "1 tensor left to the base, excluded by the recipe: lm_head.weight" in said
    file = Path("base/model.safetensors")
    state: dict[str, Tensor] = load_file(file)
    state["lm_head.weight"][0].fill_(torch.nan)
    file.unlink()  # a link to that of other tests
    save_file(state, file, {"format": "pt"})
    assert "32 NaN" in refused("inspect", "recipe.yml", "--quiet")


def test_memory_that_torch_cannot_get_is_a_line() -> None:
    with pytest.raises(MergeRefused, match=r"allocate memory.*; use fewer bases"), refusing():
        torch.empty(10**15)
    with pytest.raises(RuntimeError, match=r"^mine$"), refusing():
        raise RuntimeError("mine")
