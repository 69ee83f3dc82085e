"""Inspection: numbers against dense numpy, tables on any terminal, plain JSON, whole pictures."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from tvb_mergekit.encoders import Encoding, encode, projection
from tvb_mergekit.errors import UserError
from tvb_mergekit.inspection import (
    Inspection,
    as_json,
    error_text,
    print_inspection,
    shortened,
)
from tvb_mergekit.plots import plot
from tvb_mergekit.recipe import Settings

BASES = ("ae", "balanced", "linear_ae", "pca", "rand_select", "none")
NASTY = ["[red]bold[/red]", "<script>alert(1)</script>", "$x_1$ & \\frac", ":smile:"]


def vectors_of(tasks: int, seed: int = 0) -> np.ndarray:
    """Task vectors [d, T] in groups, of unequal norms."""
    random = np.random.default_rng([seed, tasks])
    groups = random.standard_normal((6 * tasks, max(1, tasks // 3)))
    vectors = random.standard_normal((6 * tasks, tasks)) * 10 ** random.uniform(-0.5, 0.5, tasks)
    return vectors + groups[:, random.integers(0, groups.shape[1], tasks)]


def encoding_of(vectors: np.ndarray, basis: str, count: int) -> Encoding:
    gram = torch.from_numpy(vectors.T @ vectors)
    if basis == "rand_proj":
        omega = np.random.default_rng(7).standard_normal((len(vectors), count))
        sketches = torch.from_numpy(omega.T @ omega), torch.from_numpy(omega.T @ vectors)
        return projection(gram, *sketches)
    keys: dict[str, Any] = {"solver": "exact"} if basis == "ae" else {}
    if basis == "linear_ae":
        keys["steps"] = 5
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
) -> Inspection:
    """What a merge would have written; `store`: a store; `grown`: one without its Gram matrix."""
    vectors = vectors_of(tasks) if vectors is None else vectors
    encoding = encoding_of(vectors, basis, count or max(1, tasks // 2))
    bases = encoding.num_bases
    names = list(names or (f"task-{i}" for i in range(tasks)))
    norms = np.linalg.norm(vectors, axis=0).tolist()
    gram = torch.from_numpy(vectors.T @ vectors)
    measures = ("loss", "spectral_bound", "balanced_bound", "relative_gap", "retained_energy")
    facts: dict[str, Any] = {
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
        facts["store"] = {
            "contents": "tensors",
            "dtype": "bfloat16",
            "budget": 4,
            "compress": "ae" if grown else None,
            "basis_weights": [2.0] * bases,
            "base_fingerprint": "f",
            "files": {
                **{
                    f"basis-{m:03d}/model.safetensors": {"bytes": 2_100_000_000, "xxh3_128": "a"}
                    for m in range(bases)
                },
                "basis-000/tokenizer.json": {"bytes": 17_000_000, "xxh3_128": "b"},
            },
            "model_bytes": tasks * 4_200_000_000,
            "added": 3 if grown else 0,
        }
        spread = [0.1 * i for i in range(tasks)]
        facts["errors"] = {
            name: {"at_least": low, "at_most": 1.5 * low}
            for name, low in zip(names, spread, strict=True)
        }
        tensors["gram_bases"] = encoding.encoder.T @ gram @ encoding.encoder
    gone = {"gram", "eigenvalues"} if grown else set()
    gone |= set() if built else {"encoder", "decoder", "reconstruction"}
    return Inspection(
        facts, {name: t for name, t in tensors.items() if t is not None and name not in gone}
    )


def printed(inspection: Inspection, width: int = 80, encoding: str = "utf-8", **keys: Any) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="")
    print_inspection(inspection, Console(file=file, width=width, **keys))
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("basis", [*BASES, "rand_proj"])
@pytest.mark.parametrize(("tasks", "count"), [(1, 1), (2, 1), (5, 2), (9, 4), (6, 6)])
def test_errors_are_those_of_the_dense_vectors(basis: str, tasks: int, count: int) -> None:
    vectors = vectors_of(tasks)
    inspection = inspected(tasks, basis, count, vectors=vectors)
    decoder = inspection.tensors["decoder"].numpy()
    if basis == "rand_proj":
        omega = np.random.default_rng(7).standard_normal((len(vectors), count))
        rebuilt = np.linalg.qr(omega)[0]
        rebuilt = rebuilt @ (rebuilt.T @ vectors)
    else:
        rebuilt = vectors @ inspection.tensors["encoder"].numpy() @ decoder
    if basis == "pca":
        rebuilt = rebuilt + vectors.mean(axis=1, keepdims=True)
    norms = np.linalg.norm(vectors, axis=0)
    expected = np.linalg.norm(rebuilt - vectors, axis=0) / norms
    found = np.array([inspection.errors[task] for task in inspection.tasks])
    assert (found[:, 0] == found[:, 1]).all()
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-9, atol=1e-9)
    loss = float(np.square(found[:, 0] * norms).sum())
    assert loss == pytest.approx(inspection.facts["loss"], rel=1e-9, abs=1e-12 * norms @ norms)


def test_cosines_of_the_task_vectors() -> None:
    vectors = vectors_of(7)
    cosines, reconstructed = inspected(7, vectors=vectors).cosines
    units = vectors / np.linalg.norm(vectors, axis=0)
    assert not reconstructed and cosines.dtype == torch.float64
    np.testing.assert_allclose(cosines.numpy(), units.T @ units, atol=1e-14)
    assert (cosines.diagonal() == 1).all()


def test_cosines_of_the_reconstructed_task_vectors() -> None:
    vectors = vectors_of(7)
    inspection = inspected(7, vectors=vectors, grown=True)
    inspection.tensors["decoder"][:, 3] = 0.0
    rebuilt = (
        vectors @ inspection.tensors["encoder"].numpy() @ inspection.tensors["decoder"].numpy()
    )
    units = rebuilt / np.where(np.arange(7) == 3, 1.0, np.linalg.norm(rebuilt, axis=0))
    cosines, reconstructed = inspection.cosines
    assert reconstructed and cosines.isfinite().all()
    np.testing.assert_allclose(cosines.numpy(), units.T @ units, atol=1e-12)
    assert (cosines[3] == 0).all() and (cosines[:, 3] == 0).all()


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
    assert current.balanced_energy == pytest.approx(inspection.facts["retained_energy"], rel=1e-9)
    energies = np.cumsum(np.square(scales)) / total
    for share, count in inspection.smallest.items():
        assert count == int(np.argmax(energies >= share - 1e-12)) + 1


def test_sizes_and_their_sentence() -> None:
    inspection = inspected(8, store=True)
    sizes = inspection.sizes
    assert sizes is not None
    assert (sizes.models, sizes.store, sizes.saved) == (
        33_600_000_000,
        8_400_000_000,
        25_200_000_000,
    )
    assert sizes.saved_percent == pytest.approx(75.0)
    line = "4 bases of 2.1 GB each in bfloat16 replace 8 models of 4.2 GB: 25.2 GB less, 75 %"
    assert line in printed(inspection, 100)
    inspection.facts["store"]["model_bytes"] = 0
    assert inspection.sizes is not None and inspection.sizes.saved_percent is None
    assert "8.4 GB more" in printed(inspection, 100)
    assert inspected(8).sizes is None


def test_norms_and_a_task_called_base() -> None:
    vectors = vectors_of(2)
    inspection = inspected(2, vectors=vectors, names=["base", "code"])
    assert inspection.norms == pytest.approx(np.linalg.norm(vectors, axis=0).tolist())
    assert inspection.base_norm is None  # `norms` has one place for both
    assert inspected(2).base_norm == 100.0
    assert inspected(2, grown=True).norms == pytest.approx(np.linalg.norm(vectors, axis=0).tolist())


def cases() -> dict[str, Inspection]:
    """The edges, by name."""
    zero = vectors_of(5)
    zero[:, 2] = 0.0
    flat = np.zeros((20, 4))
    deficient = vectors_of(6)[:, :2] @ np.random.default_rng(0).standard_normal((2, 6))
    gone = inspected(6, grown=True)
    gone.tensors["decoder"].zero_()
    long = [f"llama-3.2-3b-instruct-{'very-' * 20}long-name-{i}" for i in range(4)]
    endless = inspected(3, store=True)
    endless.facts["errors"] = {"task-0": {"at_least": None, "at_most": None}}
    return {
        "one task": inspected(1),
        "M = T": inspected(5, count=5),
        "none": inspected(5, "none"),
        "a zero task vector": inspected(5, vectors=zero),
        "a zero task vector, pca": inspected(5, "pca", vectors=zero),
        "all task vectors zero": inspected(4, vectors=flat),
        "rank 2": inspected(6, vectors=deficient, count=4),
        "zero reconstructions": gone,
        "80 tasks": inspected(80),
        "80 tasks, 3 bases": inspected(80, count=3),
        "long names": inspected(4, names=long),
        "nasty names": inspected(4, names=NASTY, store=True),
        "other scripts": inspected(3, names=["数学", "código", "🙂"]),
        "control characters": inspected(2, names=["\x1b[2J", "a\nb"]),
        "pca": inspected(6, "pca"),
        "rand_proj": inspected(6, "rand_proj"),
        "store": inspected(4, store=True),
        "grown store": inspected(8, grown=True),
        "grown store of 30": inspected(30, grown=True),
        "recipe": inspected(6, built=False),
        "errors not known": endless,
    }


CASES = list(cases())
ALIKE = {"80 tasks", "none", "rank 2", "store", "grown store of 30", "a zero task vector"}
DRAWN = [name for name in CASES if name not in ALIKE]  # the others' pictures show nothing new


@pytest.fixture(scope="module")
def edges() -> dict[str, Inspection]:
    return cases()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("width", [20, 60, 100, 200])
def test_terminal_of_any_width(edges: dict[str, Inspection], name: str, width: int) -> None:
    text = printed(edges[name], width)
    assert "\x1b" not in text and not re.search(r"\bnan\b", text)
    if width >= 60:
        assert max(map(len, text.splitlines())) <= width
        assert "Energy that M bases can retain" in text or "the store has grown" in text


@pytest.mark.parametrize("name", CASES)
def test_terminal_that_knows_ascii_only(edges: dict[str, Inspection], name: str) -> None:
    text = printed(edges[name], 60, "ascii")
    assert text.isascii() and "\x1b" not in text


@pytest.mark.parametrize("soft_wrap", [False, True])
def test_colours_only_where_wanted(monkeypatch: pytest.MonkeyPatch, soft_wrap: bool) -> None:
    keys: dict[str, Any] = {"force_terminal": True, "soft_wrap": soft_wrap}
    assert "\x1b[" in printed(inspected(), **keys)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in printed(inspected(), **keys).replace("\x1b[3m", "")  # italics may stay


def test_names_are_printed_as_they_are() -> None:
    text = printed(inspected(4, names=NASTY), 120, force_terminal=True, color_system=None)
    for name in NASTY:
        assert shortened(name, 24) in text
    assert "\\x1b[2J" in printed(inspected(2, names=["\x1b[2J", "b"]))


def test_what_the_tables_say() -> None:
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
    assert sum(line.startswith("B") for line in lines) == 15


@pytest.mark.parametrize("name", CASES)
def test_json_is_plain_and_complete(edges: dict[str, Inspection], name: str) -> None:
    inspection = edges[name]
    result = json.loads(json.dumps(as_json(inspection), allow_nan=False))
    assert result["tasks"] == inspection.tasks and result["models"] == inspection.facts["models"]
    assert len(result["cosines"]) == len(result["norms"]) == result["num_tasks"]
    grown = "gram" not in inspection.tensors
    of = "reconstructed task vectors" if grown else "task vectors"
    assert result["cosines_of"] == of
    assert len(result["choices"]) == (0 if grown else result["num_tasks"])
    assert (result["eigenvalues"] is None) == grown
    assert result["row_sums"] == inspection.row_sums and result["left_out"]
    for matrix in ("encoder", "decoder"):
        tensor = inspection.tensors.get(matrix)
        assert result[matrix] == (None if tensor is None else tensor.tolist())
    assert set(result["errors"]) == set(inspection.errors)
    assert (result["store"] is None) == (result["sizes"] is None) == (inspection.store is None)
    for key in ("base_model", "dtype", "parameters", "loss", "spectral_bound", "balanced_bound"):
        assert key in result


def test_infinite_errors_are_null() -> None:
    vectors = vectors_of(4)
    vectors[:, 1] = 0.0
    inspection = inspected(4, "pca", 1, vectors=vectors)  # its mean reaches the zero vector
    assert inspection.errors["task-1"] == (math.inf, math.inf)
    assert as_json(inspection)["errors"]["task-1"] == {"at_least": None, "at_most": None}
    assert inspected(4, vectors=vectors).errors["task-1"] == (0.0, 0.0)


def test_files_that_do_not_fit() -> None:
    good = inspected(4)
    with pytest.raises(UserError, match="`encoder` has shape"):
        Inspection(good.facts, {**good.tensors, "encoder": torch.zeros(4, 3)})
    with pytest.raises(UserError, match="`gram` holds NaN"):
        Inspection(good.facts, {**good.tensors, "gram": good.tensors["gram"] * math.nan})
    with pytest.raises(UserError, match="neither `gram` nor"):
        Inspection(good.facts, {"encoder": good.tensors["encoder"]})


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [("math", 4, "math"), ("abcdefgh", 5, "ab…gh"), ("abcdefgh", 6, "abc…gh"), ("", 4, "")],
)
def test_shortened(text: str, width: int, expected: str) -> None:
    assert shortened(text, width) == expected


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


class Page(HTMLParser):
    """The tags, their attributes and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check_alone(page: Page, text: str) -> None:
    """Nothing outside the file is referred to, nothing in it runs."""
    assert page.open == [] and "script" not in page.tags
    for name, value in page.attributes:
        if name.startswith("xmlns"):
            text = text.replace(str(value), "")
        elif name in ("href", "src", "xlink:href"):
            assert str(value).startswith(("#", "data:image/png;base64,"))
            text = text.replace(str(value), "")
        assert not name.startswith("on")
    assert "http" not in text and "@import" not in text


MAGIC = {"png": b"\x89PNG\r\n\x1a\n", "svg": b"<?xml", "pdf": b"%PDF", "html": b"<!DOCTYPE html>"}


@pytest.mark.parametrize("suffix", MAGIC)
def test_each_kind_of_picture(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    inspection = inspected(3, names=["math", "<b>&", "$\\bad$"])
    first, second = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix.upper()}"
    plot(inspection, first)
    plot(inspection, str(second))
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(MAGIC[suffix])
    assert sorted(p.name for p in tmp_path.iterdir()) == [first.name, second.name]
    if suffix in ("svg", "html"):
        text = first.read_text(encoding="utf-8").replace("http://www.w3.org/Graphics", "")
        page = Page(text)
        assert "svg" in page.tags
        check_alone(page, text)


def test_html_escapes_and_holds_the_tables(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    inspection = inspected(4, names=NASTY, store=True)
    plot(inspection, tmp_path / "a.html")
    page = Page((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert page.tags.count("table") == 4 and "b" not in page.tags
    for name in NASTY:
        assert name in page.text and f"org/{name}" in page.text
    for value in inspection.tensors["encoder"].flatten().tolist():
        assert f"{value:.3f}" in page.text


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


def test_the_users_own_settings_do_not_matter(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    plot(inspected(), tmp_path / "a.svg")
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True}):
        plot(inspected(), tmp_path / "b.svg")
        assert matplotlib.rcParams["font.size"] == 30
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_pictures_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"\.png, \.svg, \.pdf, \.html"):
        plot(inspected(), tmp_path / "a.jpeg")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(UserError) as raised:
            plot(inspected(), tmp_path / "a.png")
        expected = "--plot needs matplotlib: pip install 'tvb-mergekit[plot]'"
        assert str(raised.value) == expected
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match="cannot write"):
        plot(inspected(), tmp_path / "missing" / "a.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UserError, match="cannot write"):
        plot(inspected(), tmp_path / "folder.png")
    assert [p.name for p in tmp_path.iterdir()] == ["folder.png"]
