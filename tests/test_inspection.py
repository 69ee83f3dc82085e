"""Inspection: numbers against dense numpy, tables on any terminal, plain JSON, whole pictures."""

from __future__ import annotations

import html
import io
import json
import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from tvb_mergekit.cli.inspect import Inspection, as_json, error_text, print_inspection
from tvb_mergekit.cli.plot import plot
from tvb_mergekit.core.encoders import Encoding, encode, projection
from tvb_mergekit.errors import UserError
from tvb_mergekit.settings import Settings
from tvb_mergekit.store.facts import Facts, StoreFacts
from tvb_mergekit.tables import shortened

BASES = ("ae", "balanced", "linear_ae", "pca", "rand_select", "none", "rand_proj")
NASTY = ["[red]bold[/red]", "<script>alert(1)</script>", "$x_1$ & \\frac", ":smile:"]


def vectors_of(tasks: int) -> np.ndarray:
    """Task vectors [d, T] in groups, of unequal norms."""
    random = np.random.default_rng([0, tasks])
    groups = random.standard_normal((6 * tasks, max(1, tasks // 3)))
    vectors = random.standard_normal((6 * tasks, tasks)) * 10 ** random.uniform(-0.5, 0.5, tasks)
    return vectors + groups[:, random.integers(0, groups.shape[1], tasks)]


def directions(vectors: np.ndarray, count: int) -> np.ndarray:
    """What `rand_proj` draws here."""
    return np.random.default_rng(7).standard_normal((len(vectors), count))


def encoding_of(vectors: np.ndarray, basis: str, count: int) -> Encoding:
    gram = torch.from_numpy(vectors.T @ vectors)
    if basis == "rand_proj":
        omega = directions(vectors, count)
        sketches = torch.from_numpy(omega.T @ omega), torch.from_numpy(omega.T @ vectors)
        return projection(gram, *sketches)
    keys: dict[str, Any] = {"ae": {"solver": "exact"}, "linear_ae": {"steps": 5}}.get(basis, {})
    if basis != "none":
        keys["num_bases"] = count
    return encode(gram, Settings(method="basis_ta", basis=basis, **keys))  # type: ignore[arg-type]


def inspected(
    tasks: int = 4,
    basis: str = "balanced",
    count: int | None = None,
    *,
    vectors: np.ndarray | None = None,
    names: Sequence[str] | None = None,
    store: bool = False,
    grown: bool = False,
    built: bool = True,
    **changes: Any,
) -> Inspection:
    """What a merge would have written; `store`: a store; `grown`: one without its Gram matrix.

    `changes` are other facts.
    """
    vectors = vectors_of(tasks) if vectors is None else vectors
    encoding = encoding_of(vectors, basis, count or max(1, tasks // 2))
    bases = encoding.num_bases
    names = list(names or (f"task-{i}" for i in range(tasks)))
    norms = np.linalg.norm(vectors, axis=0).tolist()
    gram = torch.from_numpy(vectors.T @ vectors)
    measures = ("loss", "spectral_bound", "balanced_bound", "relative_gap", "retained_energy")
    facts: dict[str, Any] = {
        "format_version": 1,
        "versions": {},
        "method": "basis_ta",
        "parameters": {"basis": basis},
        "tasks": names,
        "models": [f"org/{name}" for name in names],
        "base_model": "org/base",
        "num_bases": bases,
        "num_parameters": len(vectors),
        "dtype": "bfloat16",
        **{key: None if grown else getattr(encoding, key) for key in measures},
        "norms": {"base": 100.0, **dict(zip(names, norms, strict=True))},
        "left_out": {"lm_head.weight": "excluded"},
        "fingerprints": {},
        "gram_cached": False,
        "seconds": {},
    }
    tensors = {
        "gram": gram,
        "eigenvalues": encoding.eigenvalues,
        "encoder": encoding.encoder,
        "decoder": encoding.decoder,
        "reconstruction": encoding.reconstruction if basis == "pca" else None,
        "mixing": encoding.mixing,
    }
    if store or grown:
        weights = [f"basis-{m:03d}/model.safetensors" for m in range(bases)]
        files = {name: {"bytes": 2_100_000_000, "xxh3_128": "a"} for name in weights}
        files["basis-000/tokenizer.json"] = {"bytes": 17_000_000, "xxh3_128": "b"}
        facts["store"] = {
            "contents": "tensors",
            "dtype": "bfloat16",
            "folders": [f"basis-{m:03d}" for m in range(bases)],
            "budget": 4,
            "compress": "ae" if grown else None,
            "basis_weights": [2.0] * bases,
            "base_fingerprint": "f",
            "twins": {},
            "files": files,
            "model_bytes": tasks * 4_200_000_000,
            "added": 3 if grown else 0,
        } | changes.pop("record", {})
        facts["errors"] = {
            name: {"at_least": 0.1 * i, "at_most": 0.15 * i} for i, name in enumerate(names)
        }
        tensors["gram_bases"] = encoding.encoder.T @ gram @ encoding.encoder
    gone = {"gram", "eigenvalues"} if grown else set()
    gone |= set() if built else {"encoder", "decoder", "reconstruction"}
    held = {name: t for name, t in tensors.items() if t is not None and name not in gone}
    schema = StoreFacts if "store" in facts else Facts
    return Inspection(schema.model_validate(facts | changes), held, built)


def printed(inspection: Inspection, width: int = 80, encoding: str = "utf-8", **keys: Any) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="")
    print_inspection(inspection, Console(file=file, width=width, **keys))
    file.flush()
    return raw.getvalue().decode(encoding)


# Numbers


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize(("tasks", "count"), [(1, 1), (2, 1), (5, 2), (9, 4), (6, 6)])
def test_errors_are_those_of_the_dense_vectors(basis: str, tasks: int, count: int) -> None:
    vectors = vectors_of(tasks)
    inspection = inspected(tasks, basis, count, vectors=vectors)
    if basis == "rand_proj":
        unit = np.linalg.qr(directions(vectors, count))[0]
        rebuilt = unit @ (unit.T @ vectors)
    else:
        tensors = inspection.tensors
        rebuilt = vectors @ tensors["encoder"].numpy() @ tensors["decoder"].numpy()
    if basis == "pca":
        rebuilt = rebuilt + vectors.mean(axis=1, keepdims=True)
    norms = np.linalg.norm(vectors, axis=0)
    expected = np.linalg.norm(rebuilt - vectors, axis=0) / norms
    found = np.array([inspection.errors[task] for task in inspection.tasks])
    assert (found[:, 0] == found[:, 1]).all()
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-9, atol=1e-9)
    loss = float(np.square(found[:, 0] * norms).sum())
    assert loss == pytest.approx(inspection.facts.loss, rel=1e-9, abs=1e-12 * norms @ norms)


def test_errors_of_a_zero_task_vector_are_null_in_json() -> None:
    vectors = vectors_of(4)
    vectors[:, 1] = 0.0
    inspection = inspected(4, "pca", 1, vectors=vectors)  # its mean reaches the zero vector
    assert inspection.errors["task-1"] == (math.inf, math.inf)
    assert as_json(inspection)["errors"]["task-1"] == {"at_least": None, "at_most": None}
    assert inspected(4, vectors=vectors).errors["task-1"] == (0.0, 0.0)


@pytest.mark.parametrize("grown", [False, True])
def test_cosines_of_task_vectors_and_of_what_a_grown_store_keeps(grown: bool) -> None:
    vectors = vectors_of(7)
    inspection = inspected(7, vectors=vectors, grown=grown)
    cosines, of = inspection.cosines
    if grown:
        inspection.tensors["decoder"][:, 3] = 0.0
        del inspection.__dict__["cosines"]
        cosines, of = inspection.cosines
        tensors = inspection.tensors
        vectors = vectors @ tensors["encoder"].numpy() @ tensors["decoder"].numpy()
    lengths = np.linalg.norm(vectors, axis=0)
    units = vectors / np.where(lengths > 0, lengths, 1.0)
    assert of == ("reconstructed task vectors" if grown else "task vectors")
    assert cosines.dtype == torch.float64
    np.testing.assert_allclose(cosines.numpy(), units.T @ units, atol=1e-12)
    assert ((cosines.diagonal() == 1) | (cosines.diagonal() == 0)).all()


def test_a_reconstruction_that_cancels_has_no_direction() -> None:
    inspection = inspected(3, "rand_select", 2, grown=True)
    bases = torch.ones(2, 2, dtype=torch.float64) * 3.7  # twice the same basis
    inspection.tensors["gram_bases"].copy_(bases)
    inspection.tensors["decoder"].copy_(torch.tensor([[0.3, 1.0, 0.2], [-0.3, 0.5, 0.1]]))
    expected = [[0.0, 0, 0], [0, 1, 1], [0, 1, 1]]
    np.testing.assert_allclose(inspection.cosines[0].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("tasks", [1, 2, 6, 15])
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
    inspection = inspected(8, store=True)
    line = "4 bases of 2.1 GB each in bfloat16 replace 8 models of 4.2 GB: 25.2 GB less, 75 %"
    assert line in printed(inspection, 100)
    empty = inspected(8, store=True, record={"model_bytes": 0})
    assert empty.sizes is not None and empty.sizes.saved_percent is None
    assert "8.4 GB more" in printed(empty, 100) and inspected(8).sizes is None
    lengths = np.linalg.norm(vectors_of(2), axis=0).tolist()
    named = inspected(2, names=["base", "code"])
    assert named.norms == inspected(2, grown=True).norms == pytest.approx(lengths)
    assert named.base_norm is None and inspected(2).base_norm == 100.0  # one place for both


def test_files_that_do_not_fit() -> None:
    good = inspected(4)
    with pytest.raises(UserError, match="`encoder` has shape"):
        Inspection(good.facts, {**good.tensors, "encoder": torch.zeros(4, 3)})
    with pytest.raises(UserError, match="`gram` holds NaN"):
        Inspection(good.facts, {**good.tensors, "gram": good.tensors["gram"] * math.nan})
    with pytest.raises(UserError, match="neither `gram` nor"):
        Inspection(good.facts, {"encoder": good.tensors["encoder"]})


# Text


def cases() -> dict[str, Inspection]:
    """The edges, by name."""
    zero = vectors_of(5)
    zero[:, 2] = 0.0
    deficient = vectors_of(6)[:, :2] @ np.random.default_rng(0).standard_normal((2, 6))
    gone = inspected(6, grown=True)
    gone.tensors["decoder"].zero_()
    long = [f"llama-3.2-3b-instruct-{'very-' * 20}long-name-{i}" for i in range(4)]
    unknown = {f"task-{i}": {"at_least": None, "at_most": None} for i in range(3)}
    return {
        "one task": inspected(1),
        "M = T": inspected(5, count=5),
        "a zero task vector, pca": inspected(5, "pca", vectors=zero),
        "all task vectors zero": inspected(4, vectors=np.zeros((20, 4))),
        "rank 2": inspected(6, vectors=deficient, count=4),
        "zero reconstructions": gone,
        "80 tasks": inspected(80),
        "80 tasks, 3 bases": inspected(80, count=3),
        "long names": inspected(4, names=long),
        "nasty names": inspected(4, names=NASTY, store=True),
        "other scripts": inspected(3, names=["数学", "código", "🙂"]),
        "control characters": inspected(2, names=["\x1b[2J", "a\nb"]),
        "rand_proj": inspected(6, "rand_proj"),
        "grown store": inspected(8, grown=True),
        "recipe": inspected(6, built=False),
        "errors not known": inspected(3, store=True, errors=unknown),
    }


CASES = list(cases())
DRAWN = [name for name in CASES if name not in ("80 tasks", "rank 2")]  # whose pictures are alike


@pytest.fixture(scope="module")
def edges() -> dict[str, Inspection]:
    return cases()


@pytest.mark.parametrize("name", CASES)
def test_any_terminal(edges: dict[str, Inspection], name: str) -> None:
    for width in (20, 60, 100, 200):
        text = printed(edges[name], width)
        assert "\x1b" not in text and not re.search(r"\bnan\b", text)
        if width >= 60:
            assert max(map(len, text.splitlines())) <= width
            assert "Energy that M bases can retain" in text or "the store has grown" in text
    text = printed(edges[name], 60, "ascii")
    assert text.isascii() and "\x1b" not in text


@pytest.mark.parametrize("name", CASES)
def test_json_is_plain_and_complete(edges: dict[str, Inspection], name: str) -> None:
    inspection = edges[name]
    result = json.loads(json.dumps(as_json(inspection), allow_nan=False))
    assert result["tasks"] == inspection.tasks and result["models"] == inspection.facts.models
    assert len(result["cosines"]) == len(result["norms"]) == result["num_tasks"]
    grown = "gram" not in inspection.tensors
    assert result["cosines_of"] == ("reconstructed " if grown else "") + "task vectors"
    assert len(result["choices"]) == (0 if grown else result["num_tasks"])
    assert (result["eigenvalues"] is None) == grown
    assert result["row_sums"] == inspection.row_sums and result["left_out"]
    for matrix in ("encoder", "decoder"):
        tensor = inspection.tensors.get(matrix)
        assert result[matrix] == (None if tensor is None else tensor.tolist())
    assert set(result["errors"]) == set(inspection.errors)
    assert (result["store"] is None) == (result["sizes"] is None) == (result["what"] != "store")
    for key in ("base_model", "dtype", "parameters", "loss", "spectral_bound", "balanced_bound"):
        assert key in result


def test_what_the_tables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    inspection = inspected(8, store=True)
    text = printed(inspection, 100)
    assert text.startswith(
        "Basis store: M = 4 balanced basis vectors of T = 8 task vectors, bfloat16"
    )
    assert "org/base" in text and "B3" in text and "1 tensor left out" in text
    assert "0.20 to 0.30" in text and "0.000" in text
    (row,) = [line for line in text.splitlines() if line.startswith("> 4")]
    assert f"{100 * inspection.choices[3].retained_energy:.2f}" in row and "█" in row
    assert "lambda_{M+1}(G)" in text and "#" in printed(inspection, 100, "ascii")
    assert "not built" in printed(inspected(4, built=False))
    assert "random directions" in printed(inspected(6, "rand_proj"))
    text = printed(inspected(4, names=NASTY), 120, force_terminal=True, color_system=None)
    assert all(shortened(name, 24) in text for name in NASTY)  # as they are
    assert "\\x1b[2J" in printed(inspected(2, names=["\x1b[2J", "b"]))
    assert "\x1b[" in printed(inspected(), force_terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search("\x1b\\[3\\d", printed(inspected(), force_terminal=True))


def test_many_tasks_are_told_in_short() -> None:
    inspection = inspected(30)
    text = printed(inspection)
    cosines = inspection.cosines[0].numpy()
    pairs = sorted((cosines[i, j] for i in range(30) for j in range(i)), reverse=True)
    for value in [*pairs[:5], pairs[-1]]:
        assert f"{value:.3f}" in text
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("Energy that M"))
    end = next(i for i, line in enumerate(lines) if line.startswith("Smallest M"))
    shown = [int(line.lstrip("> ").split()[0]) for line in lines[start + 2 : end]]
    assert {1, 15, 30, *inspection.smallest.values()} <= set(shown) and len(shown) <= 22
    assert sum(line.startswith("B") for line in lines) == 15 + 1  # and `Balanced bound`


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.12345, 0.12345, "0.123"),
        (0.12345, 0.31, "0.12 to 0.31"),
        (1e-16, 1e-16, "0.000"),
        (3.4e-5, 3.4e-5, "3e-05"),
        (0.0, 0.001, "0.00 to 1e-03"),
        (0.1, math.inf, "at least 0.10"),
        (0.0, math.inf, "?"),
        (math.inf, math.inf, "inf"),
    ],
)
def test_error_text(low: float, high: float, expected: str) -> None:
    assert error_text(low, high) == expected


# Pictures


def check_alone(text: str) -> None:
    """The markup is whole; nothing outside the file is referred to, nothing in it runs."""
    page = ElementTree.fromstring(text.replace("<!DOCTYPE html>", "").replace(META, ""))
    for element in page.iter():
        assert not element.tag.endswith("script")
        for name, value in element.attrib.items():
            assert not name.startswith("on")
            if name.endswith(("href", "src")):
                assert value.startswith(("#", "data:image/png;base64,"))
    found = re.sub(r'xmlns(:xlink)?="[^"]*"', "", text).replace("http://www.w3.org/Graphics", "")
    assert "http" not in found and "@import" not in found


META = '<meta charset="utf-8">'
MAGIC = {"png": b"\x89PNG\r\n\x1a\n", "svg": b"<?xml", "pdf": b"%PDF", "html": b"<!DOCTYPE html>"}


@pytest.mark.parametrize("suffix", MAGIC)
def test_each_kind_of_picture(tmp_path: Path, suffix: str) -> None:
    """The same bytes again, whatever the user's own settings are."""
    matplotlib = pytest.importorskip("matplotlib")
    inspection = inspected(4, names=NASTY, store=True)
    first, second = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix.upper()}"
    plot(inspection, first)
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True}):
        plot(inspection, str(second))
        assert matplotlib.rcParams["font.size"] == 30
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(MAGIC[suffix])
    assert sorted(p.name for p in tmp_path.iterdir()) == [first.name, second.name]
    if suffix in ("svg", "html"):
        text = first.read_text(encoding="utf-8")
        check_alone(text)
    if suffix == "html":
        assert text.count("<table>") == 4 and "<b>" not in text
        said = html.unescape(text)
        for name in NASTY:
            assert name in said and f"org/{name}" in said
        for value in inspection.tensors["encoder"].flatten().tolist():
            assert f"{value:.3f}" in text


@pytest.mark.parametrize("name", DRAWN)
def test_edges_are_drawn(edges: dict[str, Inspection], name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(edges[name], tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    # text is drawn as shapes, with what it says in a comment beside them
    for panel in ("Cosines between the", "Encoder weights", "Eigenvalues", "Energy that M bases"):
        assert f"<!-- {panel}" in text
    grown = "gram" not in edges[name].tensors
    assert ("<!-- not known: the store has grown online" in text) == grown


def test_pictures_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(UserError) as raised:
            plot(inspected(), tmp_path / "a.png")
        expected = "--plot needs matplotlib: pip install 'tvb-mergekit[plot]'"
        assert str(raised.value) == expected
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    for place, want in {
        "a.jpeg": r"\.png, \.svg, \.pdf, \.html",
        "missing/a.png": "cannot write .*no such folder",
        "folder.png": "cannot write .*it is a folder",
    }.items():
        with pytest.raises(UserError, match=want):
            plot(inspected(), tmp_path / place)
    assert [p.name for p in tmp_path.iterdir()] == ["folder.png"]
