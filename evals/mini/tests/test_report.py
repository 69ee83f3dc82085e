"""evals/mini/compare.py and pictures.py on the shipped cells: the shipped tables, and numpy's."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import matplotlib
import numpy as np
import pytest

SHIPPED = Path(__file__).resolve().parent.parent / "results"
SEEDS, SIZES, HALF = (0, 1, 2), (2, 5, 8), 5
TA = {"kind": "addition", "stored": False}
Record = dict[str, Any]


@pytest.fixture(scope="module")
def every() -> list[Record]:
    return [json.loads(line) for line in (SHIPPED / "cells.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def records(every: list[Record]) -> list[Record]:
    return [record for record in every if record["method"] == "full"]


def tables_of(mini: SimpleNamespace, records: list[Record]) -> dict[str, str]:
    found: dict[str, str] = mini.compare.tables(mini.sheets.Runs(records, "small", "full"))
    return found


# ----------------------------------------------------------------------- what the tests work out


def parsed(text: str) -> list[dict[str, dict[str, str]]]:
    """row -> column -> text, of each table in the Markdown."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = ([c.strip() for c in line.split("|")[1:-1]] for line in block.splitlines())
        found.append({row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows})
    return found


def pick(records: list[Record], **wanted: Any) -> list[Record]:
    return [r for r in records if all(r["cell"].get(k) == v for k, v in wanted.items())]


def specialists(records: list[Record], seed: int) -> Any:
    (found,) = (r for r in pick(records, kind="reference") if r["train_seed"] == seed)
    return found["result"]["specialists"]


def relative(records: list[Record], record: Record, scores: dict[str, float]) -> list[float]:
    own = specialists(records, record["train_seed"])
    return [scores[task] / own[task] for task in sorted(scores)]


def merged(record: Record, way: str = "ta", scale: str = "tasks") -> dict[str, float]:
    return record["result"]["merges"][way]["scales"][scale]["test"]


def written(values: list[float], digits: int = 3) -> str:
    return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"


def numbers(found: Any, *path: str) -> Iterator[tuple[tuple[str, ...], float]]:
    """All numbers of nested dicts and lists, by their path."""
    if isinstance(found, (dict, list)):
        items = found.items() if isinstance(found, dict) else enumerate(found)
        for key, value in items:
            yield from numbers(value, *path, str(key))
    elif isinstance(found, (int, float)):
        yield path, found


# ------------------------------------------------------------------------------------------ numbers


def backwards(found: Any) -> Any:
    """The same, with the keys of all dicts in another order."""
    if isinstance(found, dict):
        return {key: backwards(found[key]) for key in reversed(found)}
    return [backwards(value) for value in found] if isinstance(found, list) else found


def test_the_shipped_tables_are_of_the_shipped_cells(
    mini: SimpleNamespace, every: list[Record], tmp_path: Path
) -> None:
    """To the byte, whatever the order of the records and the user's settings of matplotlib."""
    shuffled = [backwards(record) for record in random.Random(1).sample(every, len(every))]
    files = []
    own = {"font.size": 30, "svg.hashsalt": None, "axes.facecolor": "red"}
    for out, some, style in (("a", every, {}), ("b", shuffled, own)):
        page = tmp_path / out / "RESULTS.md"
        page.parent.mkdir()
        shutil.copy(mini.path / "RESULTS.md", page)
        with matplotlib.rc_context(style):
            before = dict(matplotlib.rcParams)
            paths = mini.compare.write(some, tmp_path / out / "results", page)
            assert dict(matplotlib.rcParams) == before
        files.append({path.name: path.read_bytes() for path in paths})
    assert files[0] == files[1]
    others = "bits.json small-full-bits.svg learned.json matrices.json "  # of other studies
    others += "small-matrices-lambda.svg small-matrices-online.svg"
    assert {"RESULTS.md", *(path.name for path in SHIPPED.iterdir())} == {
        *others.split(), *files[0]
    }  # fmt: skip
    assert files[0]["RESULTS.md"] == (mini.path / "RESULTS.md").read_bytes()
    for name in ("tables.md", "cells.jsonl"):
        assert files[0][name] == (SHIPPED / name).read_bytes()
    # the cells are rounded to six digits, and the numbers were not made from them
    found, want = map(
        json.loads, (files[0]["results.json"], (SHIPPED / "results.json").read_text())
    )
    assert dict(numbers(found)) == pytest.approx(dict(numbers(want)), rel=1e-3, abs=1e-6)
    for name in (name for name in files[0] if name.endswith(".svg")):
        root = ElementTree.fromstring(files[0][name])
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and b"<dc:date>" not in files[0][name]


def test_the_best_basis_of_a_column_is_bold_and_the_reference_never(
    mini: SimpleNamespace, records: list[Record]
) -> None:
    mine = copy.deepcopy(records)
    for record in pick(mine, kind="addition"):
        best = record["cell"]["basis"] in ("pca", "balanced", "none")
        merged(record).update(dict.fromkeys(merged(record), 0.5 if best else 0.4))
    table = parsed(tables_of(mini, mine)["addition"])[1]
    assert [row for row, cells in table.items() if "*" in cells["M = 2"]] == ["balanced", "pca"]
    # one alone is not
    alone = [r for r in records if r["cell"].get("basis") in (None, "none", "pca")]
    table = parsed(tables_of(mini, alone)["addition"])[1]
    assert list(table) == ["all task vectors", "pca"] and "*" not in "".join(table["pca"].values())


# ------------------------------------------------------------------------- what is not there, twice


def test_a_missing_task_or_reference_is_said_not_averaged_over(
    mini: SimpleNamespace, records: list[Record]
) -> None:
    mine = copy.deepcopy(records)
    del merged(pick(mine, **TA, basis="pca", num_bases=2)[1])["math_add"]
    for record in pick(mine, **TA, basis="balanced", num_bases=8):
        merged(record)["coding_run"] = float("nan")
    mine = [r for r in mine if r["cell"].get("basis") != "ae_exact" or r["train_seed"] != 2]
    text = tables_of(mini, mine)["addition"]
    table = parsed(text.replace("*", ""))[1]
    found = [r for r in pick(records, **TA, basis="pca", num_bases=2) if r["train_seed"] != 1]
    means = [float(np.mean(relative(records, r, merged(r)))) for r in found]
    assert table["pca"]["M = 2"] == f"{written(means)} (n=2)"
    assert "(n=" not in table["pca"]["M = 5"] and table["balanced"]["M = 8"] == "-"
    assert "(n=" not in "".join(table["ae, exact"].values())  # the whole row: in the caption
    assert "n = 3 runs; ae, exact: 2; rand_select: 15." in text.splitlines()[0]

    lost = [r for r in records if r["cell"]["kind"] != "reference" or r["train_seed"] != 0]
    made = tables_of(mini, lost)
    assert "n = 2 runs; rand_select: 10." in made["addition"].splitlines()[0]
    assert "n = 3 runs; rand_select: 15." in made["addition_absolute"].splitlines()[0]


# -------------------------------------------------------------------------------------------- files


def test_only_what_is_between_the_marks_of_a_page_changes(
    mini: SimpleNamespace, records: list[Record], tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    other = "<!-- table: tiny lora online -->\nold\n<!-- end -->\n"  # of a preset that is not here
    page.write_text(
        f"# Title\n{other}\n<!-- table: small full training -->\nold\n\n| old |\n<!-- end -->\n"
        "between, é\n<!-- table: small full transfer -->\n<!-- end -->\nno end of line"
    )
    some = pick(records, kind="reference")
    (training,) = tables_of(mini, some).values()
    for _ in range(2):
        mini.compare.write(some, tmp_path / "out", page)
        assert page.read_text() == (
            f"# Title\n{other}\n<!-- table: small full training -->\n\n{training}\n<!-- end -->\n"
            "between, é\n<!-- table: small full transfer -->\n\n(nothing was measured)\n\n"
            "<!-- end -->\nno end of line"
        )


@pytest.mark.parametrize(("text", "message"), [
    ("x\n<!-- table: small full nothing -->\n<!-- end -->\n", "line 2: <!-- table: small full "
     "nothing --> names no table; expected"),
    ("<!-- table: online -->\n<!-- end -->\n", "line 1: <!-- table: online --> names no table"),
    ("<!-- table: small full why -->\n<!-- table: small full why -->\n<!-- end -->\n",
     "line 1: no <!-- end --> after this table"),
])  # fmt: skip
def test_a_mistaken_mark_is_one_line_and_nothing_is_written(
    mini: SimpleNamespace, records: list[Record], tmp_path: Path, text: str, message: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(click.ClickException) as caught:
        mini.compare.write(pick(records, kind="reference"), tmp_path / "out", page)
    with pytest.raises(click.ClickException, match=re.escape(caught.value.message)):
        mini.compare.check_page(page)
    assert message in caught.value.message and "\n" not in caught.value.message
    assert page.read_text() == text and not (tmp_path / "out").exists()
