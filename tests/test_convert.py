"""`tvb convert`: the paper's authors' folders, as `test_authors` writes them, become stores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from commands import merge, ready, refused, tvb
from safetensors.torch import load_file, save_file
from test_authors import INFO, SHAPES, TASKS, VECTORS, WRITERS, M, autoencoder, dense, named, pca
from torch import Tensor

from tvb_mergekit import store

CASES = list(WRITERS)


def write_base(folder: Path) -> Path:
    """As the authors' zero-shot models: one file, and tensors beside those of the task vectors."""
    generator = torch.Generator().manual_seed(8)
    state = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    state |= {"frozen": torch.ones(3), "count": torch.tensor(7)}
    torch.save(state, folder / "zeroshot.pt")
    return folder / "zeroshot.pt"


class Converted:
    """One of the authors' folders, its store, and the numbers that both are about."""

    def __init__(self, root: Path, case: str) -> None:
        root.mkdir()
        self.base, self.store = write_base(root), root / "store"
        self.expected = WRITERS[case][1](root / "run")
        self.basis = WRITERS[case][0]
        options = ["--base", self.base, "--quiet"]
        self.said = tvb("convert", root / "run", self.store, *options).stdout
        self.theta = torch.load(self.base, weights_only=True)
        vectors = torch.load(root / "run" / VECTORS, weights_only=True)["basis_vectors"]
        self.vectors = dense(vectors)  # [d, M] float64

    def change(self, state: dict[str, Tensor]) -> Tensor:
        """state - theta_0 of the tensors that the task vectors have, [d] float64."""
        assert set(state) == set(self.theta)
        assert torch.equal(state["frozen"], self.theta["frozen"])
        assert torch.equal(state["count"], self.theta["count"])
        return dense([{name: state[name].double() - self.theta[name] for name in SHAPES}])[:, 0]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Converted]:
    root = tmp_path_factory.mktemp("converted")
    return {case: Converted(root / case, case) for case in CASES}


def near(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_the_store_holds_the_published_numbers(case: str, converted: dict[str, Converted]) -> None:
    made = converted[case]
    bases = store.load(made.store)
    assert bases.tasks == TASKS and bases.num_bases == M and bases.basis == made.basis
    found = dense([{n: v.tensor(n) for n in SHAPES} for v in bases.vectors])
    near(found, made.vectors, 1e-7)
    near(bases.decoder, made.expected["W_d"])
    near(bases.tensors["gram_bases"], made.vectors.T @ made.vectors)
    assert set(bases.facts["left_out"]) == {"frozen", "count"}
    assert "2 bases of 5 tasks" in made.said
    assert ("mean" in bases.facts["store"]["folders"]) == (case == "pca")


@pytest.mark.parametrize("case", CASES)
def test_recipes_over_it_give_the_dense_numbers(
    case: str, converted: dict[str, Converted], tmp_path: Path
) -> None:
    made = converted[case]
    recipes = {file.stem for file in (made.store / "recipes").iterdir()}
    forget = {f"forget-{task}" for task in TASKS}
    assert recipes == forget | (set() if case == "rand_proj" else {"add", "ties"})
    changes: dict[str, Tensor] = {}
    for name in sorted(recipes & {"add", "ties", "forget-MNIST"}):
        text = (made.store / "recipes" / f"{name}.yml").read_text()
        assert "mergekit-pytorch" in text
        made_of = ready(made.store, f"{name}.yml")
        if name == "ties":
            made_of["parameters"]["density"] = 1.0
        file = tmp_path / f"{name}.yml"
        file.write_text(yaml.safe_dump(made_of))
        assert f"over {M} bases" in tvb("check", file).stdout
        merged = merge(made_of, tmp_path / name, command="mergekit-pytorch")
        changes[name] = made.change(merged.tensors)
        assert merged.facts["tasks"] == TASKS
    near(changes["forget-MNIST"], -made.expected["T_hat"][:, TASKS.index("MNIST")])
    if "add" in recipes:
        near(changes["add"], 0.4 * made.vectors.sum(dim=1))
        signs = made.vectors.sum(dim=1).sign()[:, None]
        elected = torch.where(made.vectors.sign() == signs, made.vectors, 0.0)
        near(changes["ties"], 0.4 * elected.sum(dim=1))


@pytest.mark.parametrize("case", CASES)
def test_inspect_and_export(case: str, converted: dict[str, Converted], tmp_path: Path) -> None:
    made = converted[case]
    found = json.loads(tvb("inspect", made.store, "--json").stdout)
    assert found["norms"] == [None] * 5 and found["choices"] == []
    assert found["cosines_of"].startswith("reconstruct")
    assert found["cosines_of"].endswith("less their mean") == (case == "pca")
    assert found["errors"]["MNIST"] == {"at_least": 0.0, "at_most": None}
    said = tvb("inspect", made.store).stdout
    assert "not in the files that" in said and "grown" not in said
    assert "3 files" in tvb("check", made.store).stdout or case == "pca"
    tvb("export", made.store, tmp_path / "out", "--task", "DTD", "--quiet")
    state = load_file(tmp_path / "out/model.safetensors")
    near(made.change(state), made.expected["T_hat"][:, TASKS.index("DTD")])


def test_plot(converted: dict[str, Converted], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tvb("inspect", converted["pca"].store, "--plot", tmp_path / "pca.png")
    assert (tmp_path / "pca.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype: str, tmp_path: Path) -> None:
    base = write_base(tmp_path)
    pca(tmp_path / "run")
    tvb("convert", tmp_path / "run", tmp_path / "store", "--base", base, "--dtype", dtype)
    bases = store.load(tmp_path / "store")
    assert {info.dtype for v in bases.sources for info in v.tensors.values()} == {bases.dtype}


# Names


def test_prefix(tmp_path: Path) -> None:
    """Their names may have more in front than the base's: --prefix says what."""
    autoencoder(tmp_path / "run")
    content = torch.load(tmp_path / "run" / VECTORS, weights_only=True)
    longer = [{f"image_encoder.{n}": t for n, t in v.items()} for v in content["basis_vectors"]]
    torch.save(content | {"basis_vectors": longer}, tmp_path / "run" / VECTORS)
    base, out = write_base(tmp_path), tmp_path / "store"
    words = ("convert", tmp_path / "run", out, "--base", base)
    assert "it has `proj`: --prefix image_encoder." in refused(*words)
    assert "does not begin with --prefix x." in refused(*words, "--prefix", "x.")
    tvb(*words, "--prefix", "image_encoder.")
    assert set(store.load(out).names) == set(SHAPES)


def test_a_base_with_longer_or_other_names(tmp_path: Path) -> None:
    autoencoder(tmp_path / "run")
    state = torch.load(write_base(tmp_path), weights_only=True)
    save_file({f"model.{n}": t for n, t in state.items()}, tmp_path / "longer.safetensors")
    save_file({"other": torch.ones(2)}, tmp_path / "other.safetensors")
    words = ("convert", tmp_path / "run", tmp_path / "store", "--base")
    assert "has `model.proj`: give the base" in refused(*words, tmp_path / "longer.safetensors")
    assert "give the model that they were" in refused(*words, tmp_path / "other.safetensors")
    torch.save(named(torch.randn(56)) | {"proj": torch.ones(4, 6)}, tmp_path / "turned.pt")
    assert "proj" in refused(*words, tmp_path / "turned.pt")


# What is missing or in the way


@pytest.mark.parametrize("file", [INFO, VECTORS, "AWB.pt"])
def test_missing_files(file: str, tmp_path: Path) -> None:
    autoencoder(tmp_path / "run")
    base = write_base(tmp_path)
    (tmp_path / "run" / file).unlink()
    before = {path.name for path in tmp_path.iterdir()}
    assert file in refused("convert", tmp_path / "run", tmp_path / "store", "--base", base)
    assert {path.name for path in tmp_path.iterdir()} == before


def test_places(converted: dict[str, Converted], tmp_path: Path) -> None:
    autoencoder(tmp_path / "run")
    base, source = write_base(tmp_path), tmp_path / "run"
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/basis-000").write_text("mine")
    shutil.copytree(converted["pca"].store, tmp_path / "there")
    before = sorted(tmp_path.rglob("*"))
    for out, want in {
        "run": "is the input",
        "run/x": "lies in the input",
        "zeroshot.pt": "is a file",
        "notes": "already holds basis-000",
        "there": "already holds",
    }.items():
        assert want in refused("convert", source, tmp_path / out, "--base", base)
    out = tmp_path / "store"
    for given in ("nope.pt", "./nope", "nope/nope"):
        assert f"base {given}: no such" in refused("convert", source, out, "--base", given)
    given = tmp_path / "run" / INFO
    assert str(given) in refused("convert", source, out, "--base", given)
    assert "Directory" in tvb("convert", base, out, "--base", base, code=2).stderr
    assert "--base" in tvb("convert", source, out, code=2).stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_converted_store_cannot_grow(converted: dict[str, Converted], tmp_path: Path) -> None:
    state = torch.load(write_base(tmp_path), weights_only=True)
    state["proj"] += 1
    torch.save(state, tmp_path / "tuned.pt")
    for case in ("softmax", "pca"):
        made = converted[case].store
        assert "it cannot grow" in refused("add", made, tmp_path / "tuned.pt", "--task", "new")
