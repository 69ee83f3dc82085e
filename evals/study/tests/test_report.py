"""Tables on the shipped cells: to the byte, missing numbers, marks of a page."""

import copy
import json
import os
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import matplotlib
import mini.sheets
import numpy as np
import pytest
import real.sheets
import study.pictures
import study.sheets
from study.report import write_study

from tvb_mergekit.score.pairs import difference

MINI = Path(mini.sheets.__file__).parent
TA = {"kind": "addition"}
Record = dict[str, Any]


@pytest.fixture(scope="module")
def records() -> list[Record]:
    every = json.loads((MINI / "results" / "mini.json").read_text())["cells"]
    return [record for record in every if record["method"] == "full"]


def test_a_specialist_without_a_right_answer_shifts_no_tasks() -> None:
    """In one seed: its differences count as 0 there, and other tasks keep their items."""
    draw, runs = random.Random(0), SimpleNamespace(tasks=("a", "b"))
    right = [[{t: draw.choices((0, 1), k=k) for t, k in (("a", 50), ("b", 76))} for _ in range(2)]
             for _ in range(2)]  # fmt: skip
    merges = [
        [{"train_seed": seed, "cell": {"kind": "x"}, "result": {"items": items}}
         for seed, items in enumerate(each)] for each in right
    ]  # fmt: skip
    own = [{"a": 0.5, "b": 0.5}, {"a": 0.0, "b": 0.5}]
    runs.reference = [{"specialists": each} for each in own]
    found = study.sheets.p_value(runs, *merges)
    differences = [
        np.mean([(np.array(x[t]) - np.array(y[t])) * (own[seed][t] > 0)
                 for seed, (x, y) in enumerate(zip(*right, strict=True))], axis=0)
        for t in runs.tasks
    ]  # fmt: skip
    assert found is not None and found.mean == difference(differences).p


def runs_of(records: list[Record]) -> Any:
    return mini.sheets.Runs(records, "small", "full", tuple(mini.data.TASKS))


@pytest.mark.parametrize(("sheets", "marks"), [(mini.sheets, 11), (real.sheets, 25)])
def test_the_shipped_tables_are_of_the_shipped_cells(sheets, marks, tmp_path, monkeypatch):
    """To the byte, for any order of the records and any settings of matplotlib."""
    # Only one picture is laid out and written, which takes matplotlib seconds for each.
    whole = iter([study.pictures.svg])
    monkeypatch.setattr(study.pictures, "svg", lambda figure: next(whole, lambda _: b"")(figure))
    folder, page = Path(sheets.__file__).parent, tmp_path / "RESULTS.md"
    file = f"{folder.name}.json"
    shipped = json.loads((folder / "results" / file).read_text())
    page.write_bytes((folder / "RESULTS.md").read_bytes())
    assert page.read_text().count(f"<!-- {folder.name}: ") == marks
    cells = random.Random(1).sample(shipped["cells"], len(shipped["cells"]))
    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": None}):
        files = sheets.write(cells, tmp_path / "out", page)
        assert matplotlib.rcParams["font.size"] == 30
    assert {file.name for file in files} <= {*os.listdir(folder / "results"), "RESULTS.md"}
    assert page.read_bytes() == (folder / "RESULTS.md").read_bytes()
    again = json.loads((tmp_path / "out" / file).read_text())
    assert again["cells"] == shipped["cells"] and again["tables"].keys() == shipped["tables"].keys()


def table_of(records: list[Record]) -> tuple[str, dict[str, dict[str, str]]]:
    """The first line of the second table of addition, and row -> column -> text."""
    text = mini.sheets.addition(runs_of(records))[1].markdown()
    lines = re.findall(r"^\|.*$", text, re.MULTILINE)
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    caption = text.splitlines()[0]
    return caption, {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def pick(records: list[Record], **wanted: Any) -> list[Record]:
    return [r for r in records if all(r["cell"].get(k) == v for k, v in wanted.items())]


def merged(record: Record) -> dict[str, float]:
    return record["result"]["merges"]["ta"]["scales"]["tasks"]["test"]


def test_best_and_missing_numbers(records: list[Record]) -> None:
    """The best basis is bold, the reference never; a missing task makes its mean missing."""
    mine = copy.deepcopy(records)
    for record in pick(mine, kind="addition"):
        best = record["cell"]["basis"] in ("pca", "balanced", "none")
        merged(record).update(dict.fromkeys(merged(record), 0.5 if best else 0.4))
    _, table = table_of(mine)
    assert [row for row, cells in table.items() if "*" in cells["M = 2"]] == ["balanced", "pca"]

    mine = copy.deepcopy(records)
    del merged(pick(mine, **TA, basis="pca", num_bases=2)[1])["math_add"]
    for record in pick(mine, **TA, basis="balanced", num_bases=8):
        merged(record)["coding_run"] = float("nan")
    mine = [r for r in mine if r["cell"].get("basis") != "ae_exact" or r["train_seed"] != 2]
    caption, table = table_of(mine)
    own = {r["train_seed"]: r["result"]["specialists"] for r in pick(records, kind="reference")}
    means = [
        np.mean([score / own[r["train_seed"]][task] for task, score in merged(r).items()])
        for r in pick(records, **TA, basis="pca", num_bases=2)
        if r["train_seed"] != 1
    ]
    text = f"{np.mean(means):.3f} ± {np.std(means, ddof=1):.3f} (n=2)"
    assert table["pca"]["M = 2"].replace("*", "") == text
    assert "(n=" not in table["pca"]["M = 5"] and table["balanced"]["M = 8"] == "-"
    assert "(n=" not in "".join(table["ae, exact"].values())  # the row: in the caption
    assert "n = 3 runs; ae, exact: 2; rand_select: 15." in caption

    lost = [r for r in records if r["cell"]["kind"] != "reference" or r["train_seed"] != 0]
    assert "n = 2 runs; rand_select: 10." in table_of(lost)[0]


@pytest.mark.parametrize(("text", "message"), [
    ("a\n<!-- mini: full_negation -->\nold\n\n| old |\n<!-- end -->\nbetween, é\n<!-- real: x -->\n"
     "old\n<!-- end -->\n<!-- mini: lora_negation -->\nkept\n<!-- end -->\nno end of line", None),
    ("x\n<!-- mini: full_x -->\n<!-- end -->\n", "line 2: <!-- mini: full_x --> names no"),
    ("<!-- mini: full_negation -->\n<!-- mini: full_negation -->\n<!-- end -->\n",
     "line 1: no <!-- end --> after this table"),
])  # fmt: skip
def test_marks_of_a_page(tmp_path, text, message):
    page, out = tmp_path / "page.md", tmp_path / "out"
    page.write_text(text)
    sheet = SimpleNamespace(markdown=lambda: "| new |\n", plain=lambda: {})
    given = ("mini", [], {"full_negation": [sheet], "lora_negation": []}, {}, out, page)
    if message is None:
        for _ in range(2):
            write_study(*given)
            assert page.read_text() == text.replace("old\n\n| old |", "\n| new |\n", 1)
    else:
        with pytest.raises(click.ClickException, match=message):
            write_study(*given)
        assert page.read_text() == text and not out.exists()
