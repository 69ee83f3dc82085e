"""Tables on the shipped cells: to the byte, missing numbers, marks of a page."""

import itertools
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import matplotlib
import numpy as np
import pytest
import real.sheets
import study.pictures
import study.sheets
import study.tables
from study.report import write_study

from tvb_mergekit.score.pairs import difference

Record = dict[str, Any]


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


def test_the_shipped_tables_are_of_the_shipped_cells(tmp_path, monkeypatch):
    """To the byte, for any order of the records and any settings of matplotlib."""
    # Only one picture is laid out and written, which takes matplotlib seconds for each.
    whole = iter([study.pictures.svg])
    monkeypatch.setattr(study.pictures, "svg", lambda figure: next(whole, lambda _: b"")(figure))
    folder, page = Path(real.sheets.__file__).parent, tmp_path / "RESULTS.md"
    shipped = json.loads((folder / "results" / "real.json").read_text())
    page.write_bytes((folder / "RESULTS.md").read_bytes())
    assert page.read_text().count("<!-- real: ") == 25
    cells = random.Random(1).sample(shipped["cells"], len(shipped["cells"]))
    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": None}):
        files = real.sheets.write(cells, tmp_path / "out", page)
        assert matplotlib.rcParams["font.size"] == 30
    assert {file.name for file in files} <= {*os.listdir(folder / "results"), "RESULTS.md"}
    assert page.read_bytes() == (folder / "RESULTS.md").read_bytes()
    again = json.loads((tmp_path / "out" / "real.json").read_text())
    assert again["cells"] == shipped["cells"] and again["tables"].keys() == shipped["tables"].keys()


def test_missing_numbers() -> None:
    """A missing task makes its mean missing; a mean over fewer runs than its row's says so."""
    own = {"a": 0.8, "b": 0.5}

    def record(seed: int, kind: str, result: Record, **cell: Any) -> Record:
        return {"preset": "full", "method": "full", "train_seed": seed,
                "cell": {"kind": kind, **cell}, "result": result}  # fmt: skip

    records = [record(seed, "reference", {"specialists": own}) for seed in range(3)]
    for seed, count in itertools.product(range(3), (2, 4)):
        test = {"a": 0.1 * seed, "b": 0.1 * count}
        if (seed, count) == (1, 2):
            del test["b"]
        cell = {"basis": "pca", "num_bases": count}
        records.append(record(seed, "learned", {"test": test}, **cell))
    runs = study.tables.Runs(records, "full", "full", ("a", "b"))
    columns = {f"M = {m}": study.tables.Column(runs.normal("test"), wanted={"num_bases": m})
               for m in (2, 4, 8)}  # fmt: skip
    rows = {"pca": runs.find("learned"), "ae": []}
    (found,) = study.tables.grid(runs, "caption", "learned", columns, rows)
    head, _, *lines = (line for line in found.markdown().splitlines() if line.startswith("|"))
    two, four = ([(seed / 8 + count / 5) / 2 for seed in seeds]
                 for count, seeds in ((2, (0, 2)), (4, (0, 1, 2))))  # fmt: skip
    texts = [f"{np.mean(each):.3f} ± {np.std(each, ddof=1):.3f}" for each in (two, four)]
    assert head == "| method | M = 2 | M = 4 |"
    assert lines == [f"| pca | {texts[0]} (n=2) | {texts[1]} |"]


@pytest.mark.parametrize(("text", "message"), [
    ("a\n<!-- real: full_negation -->\nold\n\n| old |\n<!-- end -->\nbetween, é\n<!-- my: x -->\n"
     "old\n<!-- end -->\n<!-- real: lora_negation -->\nkept\n<!-- end -->\nno end of line", None),
    ("x\n<!-- real: full_x -->\n<!-- end -->\n", "line 2: <!-- real: full_x --> names no"),
    ("<!-- real: full_negation -->\n<!-- real: full_negation -->\n<!-- end -->\n",
     "line 1: no <!-- end --> after this table"),
])  # fmt: skip
def test_marks_of_a_page(tmp_path, text, message):
    page, out = tmp_path / "page.md", tmp_path / "out"
    page.write_text(text)
    sheet = SimpleNamespace(markdown=lambda: "| new |\n", plain=lambda: {})
    given = ("real", [], {"full_negation": [sheet], "lora_negation": []}, {}, out, page)
    if message is None:
        for _ in range(2):
            write_study(*given)
            assert page.read_text() == text.replace("old\n\n| old |", "\n| new |\n", 1)
    else:
        with pytest.raises(click.ClickException, match=message):
            write_study(*given)
        assert page.read_text() == text and not out.exists()
