"""Inspection: numbers against dense numpy, tables on any terminal, plain JSON, whole pictures."""

import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import tvb, write
from rich.console import Console
from worlds import THREE, Models, World

from tvb_mergekit.cli.inspect import print_inspection
from tvb_mergekit.cli.plot import plot
from tvb_mergekit.core.basis import encode
from tvb_mergekit.core.encoders import Encoding
from tvb_mergekit.core.settings import Settings
from tvb_mergekit.errors import UserError
from tvb_mergekit.store.facts import Facts, StoreFacts
from tvb_mergekit.store.inspection import Inspection, as_json
from tvb_mergekit.tensors.checkpoint import Checkpoint

BASES = ("ae", "pca")
NASTY = ["[red]bold[/red]", "<script>alert(1)</script>", "$x_1$ & \\frac", ":smile:"]


def vectors_of(tasks: int) -> np.ndarray:
    """Task vectors [d, T] in groups, of unequal norms."""
    random = np.random.default_rng([0, tasks])
    groups = random.standard_normal((6 * tasks, max(1, tasks // 3)))
    vectors = random.standard_normal((6 * tasks, tasks)) * 10 ** random.uniform(-0.5, 0.5, tasks)
    return vectors + groups[:, random.integers(0, groups.shape[1], tasks)]


def encoding_of(vectors: np.ndarray, basis: str, count: int) -> Encoding:
    gram = torch.from_numpy(vectors.T @ vectors)
    keys: dict[str, Any] = {"steps": 5} if basis.endswith("ae") else {}
    if basis != "none":
        keys["num_bases"] = count
    return encode(gram, Settings("basis_ta", {"basis": basis, **keys}))


def inspected(
    tasks: int = 4,
    basis: str = "balanced",
    count: int | None = None,
    *,
    vectors: np.ndarray | None = None,
    names: Sequence[str] | None = None,
    kind: str = "merge",
    **changes: Any,
) -> Inspection:
    """What a merge, a recipe, a store, or a grown one (without its Gram matrix) would tell."""
    vectors = vectors_of(tasks) if vectors is None else vectors
    encoding = encoding_of(vectors, basis, count or max(1, tasks // 2))
    names = list(names or (f"task-{i}" for i in range(tasks)))
    norms = np.linalg.norm(vectors, axis=0).tolist()
    measures = ("loss", "spectral_bound", "balanced_bound", "relative_gap", "retained_energy")
    facts: dict[str, Any] = {
        "format_version": 1, "versions": {}, "method": "basis_ta", "parameters": {"basis": basis},
        "tasks": names, "models": [f"org/{name}" for name in names], "base_model": "org/base",
        "num_bases": encoding.num_bases, "num_parameters": len(vectors), "dtype": "bfloat16",
        **{key: None if kind == "grown" else getattr(encoding, key) for key in measures},
        "norms": {"base": 100.0, **dict(zip(names, norms, strict=True))},
        "left_out": {"lm_head.weight": "excluded"}, "fingerprints": {},
        "seconds": {},
    }  # fmt: skip
    tensors = {
        "gram": torch.from_numpy(vectors.T @ vectors),
        "eigenvalues": encoding.eigenvalues,
        "encoder": encoding.encoder,
        "decoder": encoding.decoder,
        "reconstruction": encoding.reconstruction if basis == "pca" else None,
    }
    if kind in ("store", "grown"):
        folders = [f"basis-{m:03d}" for m in range(encoding.num_bases)]
        sizes = {f"{name}/model.safetensors": 2_100_000_000 for name in folders}
        sizes["basis-000/tokenizer.json"] = 17_000_000
        facts["store"] = {
            "codec": "dense", "dtype": "bfloat16", "folders": folders, "budget": 4,
            "compress": None, "basis_weights": [2.0] * encoding.num_bases, "base_fingerprint": "f",
            "twins": {},
            "files": {name: {"bytes": size, "xxh3_128": "a"} for name, size in sizes.items()},
            "model_bytes": tasks * 4_200_000_000, "added": 3 * (kind == "grown"),
        }  # fmt: skip
        facts["errors"] = {name: 0.1 * i for i, name in enumerate(names)}
        tensors["gram_bases"] = encoding.encoder.T @ tensors["gram"] @ encoding.encoder
    gone = {
        "grown": ("gram", "eigenvalues"),
        "recipe": ("encoder", "decoder", "reconstruction"),
    }.get(kind, ())
    held = {name: t for name, t in tensors.items() if t is not None and name not in gone}
    schema = StoreFacts if "store" in facts else Facts
    return Inspection(schema.model_validate(facts | changes), held, kind != "recipe")


def printed(inspection: Inspection, width: int = 80, encoding: str = "utf-8", **keys: Any) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="")
    print_inspection(inspection, Console(file=file, width=width, **keys))
    file.flush()
    return raw.getvalue().decode(encoding)


# Numbers


@pytest.mark.parametrize("basis", BASES)
def test_errors_are_those_of_the_dense_vectors(basis: str) -> None:
    for tasks, count in ((1, 1), (9, 4)):
        vectors = vectors_of(tasks)
        inspection = inspected(tasks, basis, count, vectors=vectors)
        tensors = inspection.tensors
        rebuilt = vectors @ tensors["encoder"].numpy() @ tensors["decoder"].numpy()
        if basis == "pca":
            rebuilt = rebuilt + vectors.mean(axis=1, keepdims=True)
        norms = np.linalg.norm(vectors, axis=0)
        expected = np.linalg.norm(rebuilt - vectors, axis=0) / norms
        found = np.array([inspection.errors[task] for task in inspection.tasks])
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
        loss = float(np.square(found * norms).sum())
        assert loss == pytest.approx(inspection.facts.loss, rel=1e-9, abs=1e-12 * norms @ norms)


def test_errors_of_a_zero_task_vector() -> None:
    vectors = vectors_of(4)
    vectors[:, 1] = 0.0
    inspection = inspected(4, "pca", 1, vectors=vectors)  # its mean reaches the zero vector
    assert as_json(inspection)["errors"]["task-1"] is None
    assert inspected(4, vectors=vectors).errors["task-1"] == 0.0


@pytest.mark.parametrize("kind", ["store", "grown"])
def test_cosines_of_task_vectors_and_of_what_a_grown_store_keeps(kind: str) -> None:
    vectors = vectors_of(7)
    inspection = inspected(7, vectors=vectors, kind=kind)
    if kind == "grown":
        tensors = inspection.tensors
        tensors["decoder"][:, 3] = 0.0
        vectors = vectors @ tensors["encoder"].numpy() @ tensors["decoder"].numpy()
    lengths = np.linalg.norm(vectors, axis=0)
    units = vectors / np.where(lengths > 0, lengths, 1.0)
    cosines, of = inspection.cosines
    assert of == ("reconstructed " if kind == "grown" else "") + "task vectors"
    np.testing.assert_allclose(cosines.numpy(), units.T @ units, atol=1e-12)
    assert ((cosines.diagonal() == 1) | (cosines.diagonal() == 0)).all()


@pytest.mark.parametrize("tasks", [1, 6])
def test_choices_against_dense_spans(tasks: int) -> None:
    vectors = vectors_of(tasks)
    inspection = inspected(tasks, vectors=vectors)
    scales = np.linalg.svd(vectors, compute_uv=False)
    total = float(np.square(vectors).sum())
    assert [choice.num_bases for choice in inspection.choices] == list(range(1, tasks + 1))
    for choice in inspection.choices:
        count = choice.num_bases
        bound = float(np.square(scales[count:]).sum())
        assert choice.spectral_bound == pytest.approx(bound, rel=1e-9, abs=1e-12 * total)
        assert choice.retained_energy == pytest.approx(1 - bound / total, rel=1e-12)
        following = scales[count] ** 2 if count < tasks else 0.0
        assert choice.next_eigenvalue == pytest.approx(following, rel=1e-9)
        # the sum of all task vectors first, then the best directions of what is left
        unit = vectors.sum(axis=1, keepdims=True) / np.linalg.norm(vectors.sum(axis=1))
        left = np.linalg.svd(vectors - unit @ (unit.T @ vectors), compute_uv=False)
        balanced = 1 - float(np.square(left[count - 1 :]).sum()) / total
        assert choice.balanced_energy == pytest.approx(balanced, rel=1e-9)
    current = inspection.choices[inspection.num_bases - 1]
    assert current.balanced_energy == pytest.approx(inspection.facts.retained_energy, rel=1e-9)
    energies = np.cumsum(np.square(scales)) / total
    for share, count in inspection.smallest.items():
        assert count == int(np.argmax(energies >= share - 1e-12)) + 1


def test_sizes_and_norms() -> None:
    line = "4 bases of 8 tasks: 8.4 GB in bfloat16, 25.2 GB less than the models' 33.6 GB"
    assert line in printed(inspected(8, kind="store"), 100)
    lengths = np.linalg.norm(vectors_of(2), axis=0).tolist()
    named = inspected(2, names=["base", "code"])
    assert named.norms == inspected(2, kind="grown").norms == pytest.approx(lengths)
    assert named.base_norm is None and inspected(2).base_norm == 100.0  # one place for both


def test_files_that_do_not_fit() -> None:
    good = inspected(4)
    with pytest.raises(UserError, match="`encoder` has shape"):
        Inspection(good.facts, {**good.tensors, "encoder": torch.zeros(4, 3)})
    with pytest.raises(UserError, match="`gram` holds NaN"):
        Inspection(good.facts, {**good.tensors, "gram": good.tensors["gram"] * math.nan})


# Text, JSON and pictures of the edges


def cases() -> dict[str, Inspection]:
    zero = vectors_of(5)
    zero[:, 2] = 0.0
    gone = inspected(6, kind="grown")
    gone.tensors["decoder"].zero_()
    unknown = {f"task-{i}": None for i in range(3)}
    return {
        "one task": inspected(1),
        "a zero task vector, pca": inspected(5, "pca", vectors=zero),
        "zero reconstructions": gone,
        "many tasks and bases": inspected(14, count=13),
        "nasty names": inspected(4, names=NASTY, kind="store"),
        "recipe, control characters": inspected(2, names=["\x1b[2J", "a\nb"], kind="recipe"),
        "errors not known": inspected(3, kind="store", errors=unknown),
    }


# text is drawn as shapes, with what it says in a comment beside them
PANELS = [
    f"<!-- {title}"
    for title in ("Cosines between the", "Encoder weights", "Eigenvalues", "Energy that M bases")
]


@pytest.mark.parametrize("name", cases())
def test_edges(name: str, tmp_path: Path) -> None:
    inspection = cases()[name]
    grown = "gram" not in inspection.tensors
    for width in (20, 60, 100, 200):
        text = printed(inspection, width)
        assert "\x1b" not in text and not re.search(r"\bnan\b", text)
        if width >= 60:
            assert max(map(len, text.splitlines())) <= width
            assert ("the store has grown" if grown else "Energy that M bases can retain") in text
    text = printed(inspection, 60, "ascii")
    assert text.isascii() and "\x1b" not in text

    result = json.loads(json.dumps(as_json(inspection), allow_nan=False))
    assert result["tasks"] == inspection.tasks and result["models"] == inspection.facts.models
    assert len(result["cosines"]) == len(result["norms"]) == result["num_tasks"]
    assert result["cosines_of"] == ("reconstructed " if grown else "") + "task vectors"
    assert len(result["choices"]) == (0 if grown else result["num_tasks"])
    assert (result["eigenvalues"] is None) == grown
    assert result["row_sums"] == inspection.row_sums and result["left_out"]
    for matrix in ("encoder", "decoder"):
        tensor = inspection.tensors.get(matrix)
        assert result[matrix] == (None if tensor is None else tensor.tolist())
    assert set(result["errors"]) == set(inspection.errors)
    assert (result["store"] is None) == (result["sizes"] is None) == (result["what"] != "store")
    keys = {"base_model", "dtype", "parameters", "loss", "spectral_bound", "balanced_bound"}
    assert keys < set(result)

    if name in ("one task", "nasty names", "errors not known"):
        return  # the same panels as others, or drawn below
    pytest.importorskip("matplotlib")
    plot(inspection, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert all(panel in text for panel in PANELS)
    assert ("<!-- not known: the store has grown online" in text) == grown


def test_what_the_tables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    inspection = inspected(8, kind="store")
    text = printed(inspection, 100)
    assert text.startswith(
        "Basis store: M = 4 balanced basis vectors of T = 8 task vectors, bfloat16"
    )
    assert "org/base" in text and "B3" in text and "1 tensor left to the base" in text
    assert "is 2 B0 + 2 B1 + 2 B2 + 2 B3" in text
    assert " 0.2 " in text and "3 tasks added online" in printed(inspected(kind="grown"))
    (row,) = [line for line in text.splitlines() if line.startswith("> 4")]
    assert f"{100 * inspection.choices[3].retained_energy:.2f}" in row
    assert "lambda_{M+1}(G)" in text
    assert "not built" in printed(inspected(kind="recipe"))
    text = printed(inspected(names=NASTY), 120, force_terminal=True, color_system=None)
    assert all(name in text for name in NASTY)  # as they are
    assert "\\x1b[2J" in printed(inspected(2, names=["\x1b[2J", "b"]))
    assert "\x1b[" in printed(inspected(), force_terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search("\x1b\\[3\\d", printed(inspected(), force_terminal=True))


def test_each_kind_of_picture(tmp_path: Path) -> None:
    """The same bytes again, whatever the user's own settings are."""
    matplotlib = pytest.importorskip("matplotlib")
    nasty, small = inspected(4, names=NASTY, kind="store"), inspected(1)
    plot(small, tmp_path / "a.png")
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True}):
        plot(nasty, str(tmp_path / "b.SVG"))
        plot(small, str(tmp_path / "b.PNG"))
        assert matplotlib.rcParams["font.size"] == 30
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.PNG", "b.SVG"]
    one, other = ((tmp_path / name).read_bytes() for name in ("a.png", "b.PNG"))
    assert one == other and one.startswith(b"\x89PNG\r\n\x1a\n")
    picture = (tmp_path / "b.SVG").read_text("utf-8")
    assert picture.startswith("<?xml") and all(panel in picture for panel in PANELS)


# Stores of all tasks


@pytest.fixture
def weighted(world: World) -> Models:
    return replace(world("bf16"), own={0: {"weight": 0.5}, 2: {"weight": -1.0}})


def relative(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    return np.linalg.norm(found - expected, axis=0) / np.linalg.norm(expected, axis=0)


def test_what_a_store_keeps_of_each_task(weighted: Models, tmp_path: Path) -> None:
    store = tmp_path / "store"
    bases = weighted.build(store, "--keep", 0.5, tasks=THREE)
    bases.check_base(Checkpoint.open(weighted.base), "the base")
    told = json.loads(tvb("inspect", store, "--json").stdout)["kept"]
    taus = [weighted.tau(task) for task in THREE]
    exact = np.stack([np.concatenate([t[n].flatten() for n in bases.names]) for t in taus], 1)
    found = (
        np.stack(
            [np.concatenate([v.tensor(n).flatten() for n in bases.names]) for v in bases.vectors], 1
        )
        * bases.scales.numpy()
    )
    assert [each["name"] for each in told["vectors"]] == list(THREE)
    errors = [each["relative_error"] for each in told["vectors"]]
    np.testing.assert_allclose(errors, relative(found, exact), rtol=1e-5)
    assert told["sum"] == pytest.approx(float(relative(found.sum(1), exact.sum(1))), rel=0.1)
    assert sum(each["bytes"] for each in told["vectors"]) == bases.facts["bytes"]


def test_a_store_of_task_vectors_is_told_as_one(weighted: Models, tmp_path: Path) -> None:
    store = tmp_path / "zoo"
    file = write(weighted.recipe(tasks=THREE), store)
    said = tvb("build", file, store, "--keep", "0.5", "--quiet").stdout
    assert "3 task vectors: " in said and " in a sample of 50 % of the entries, " in said
    assert "random errors of " in said and "energy" not in said
    text = tvb("inspect", store).stdout
    assert text.startswith("Task-vector store: T = 3 task vectors at a sample of 50 % of the ")
    for gone in ("none basis", "Retained energy", "The sum of all", "Encoder", "row sum", "> 3"):
        assert gone not in text
    assert "storing changes the sum that addition adds by " in " ".join(text.split())

    for words in (["remove", store], ["add", store, weighted.models["math"]]):
        tvb(*words, "--task", "math")
        told = json.loads(tvb("inspect", store, "--json").stdout)
        assert len(told["kept"]["vectors"]) == told["num_tasks"]
    assert "1 task added online\n" in tvb("inspect", store).stdout

    pytest.importorskip("matplotlib")
    tvb("inspect", store, "--plot", tmp_path / "a.svg")
    assert "<!-- Cosines" in (tmp_path / "a.svg").read_text(encoding="utf-8")
