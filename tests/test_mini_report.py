"""evals/mini/report.py and pictures.py on made-up records, against numbers worked out here."""

from __future__ import annotations

import copy
import json
import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import matplotlib
import numpy as np
import pytest
from mini_modules import loaded

SEEDS = (0, 1, 2)
BASES = "ae_exact ae_adam_5 ae_adam_1 ae_annealed balanced linear_ae pca".split()
STUDY = "ae_adam_0.5 ae_adam_2 ae_adam_10 ae_adam_20 ae_annealed_0.9".split()
SIZES = (2, 5, 8)
Record = dict[str, Any]


@pytest.fixture(scope="module")
def mini() -> Iterator[dict[str, ModuleType]]:
    with loaded() as modules:
        yield modules


@pytest.fixture(scope="module")
def report(mini: dict[str, ModuleType]) -> ModuleType:
    return mini["report"]


def invented(data: ModuleType, preset: str = "small", method: str = "full") -> list[Record]:
    """What a whole comparison of three training seeds leaves, with random numbers in it."""
    rng, records = random.Random(f"{preset}/{method}"), []
    tasks, known = list(data.TASKS), [*data.TASKS, *data.UNSEEN]

    def scores(names: list[str], low: float = 0.3, high: float = 0.9) -> dict[str, float]:
        return {name: rng.uniform(low, high) for name in names}

    def keep(run: int, result: Any, **cell: Any) -> None:
        head = {"preset": preset, "method": method, "train_seed": run}
        records.append(head | {"cell": cell, "seconds": rng.random(), "result": result})

    def addition(
        seed: int,
        basis: str,
        count: int,
        number: int = 0,
        dtype: str = "float32",
        stored: bool = False,
    ) -> None:
        def scale() -> dict[str, Any]:
            grid = [i / 20 for i in range(21)]
            found = {"lambda": rng.choice(grid), "grid": grid, "validation": grid}
            return found | {"seconds": rng.random(), "test": scores(tasks)}

        def merge(way: str) -> dict[str, Any]:
            names = ("bases", "tasks", "decoder") if way == "ta" else ("bases", "tasks")
            found = {name: scale() for name in names}
            return {"seconds": rng.random(), "items": 20, "scales": found}

        ways = ("ta",) if stored or basis in STUDY else ("ta", "ties")
        facts: dict[str, Any] = dict.fromkeys(("loss", "spectral_bound", "balanced_bound"), 1.0)
        facts |= {"relative_gap": None if basis == "none" else rng.random(), "retained_energy": 0.5}
        result = {
            "bytes": 4000 * count // (1 if dtype == "float32" else 2),
            "facts": facts,
            "row_sums": [rng.uniform(0.2, 1.5) for _ in tasks],
            "seconds": {"build": rng.random()},
            "merges": {way: merge(way) for way in ways},
        }
        cell = {"basis": basis, "num_bases": count, "seed": number, "dtype": dtype}
        keep(seed, result, kind="addition", stored=stored, **cell)

    for seed in SEEDS:
        reference = {"base": scores(known, 0.0, 0.1), "specialists": scores(tasks, 0.9, 1.0)}
        keep(seed, reference | {"bytes": 40_000, "parameters": 1000}, kind="reference")
        addition(seed, "none", len(tasks))
        for count in SIZES:
            for basis in BASES:
                addition(seed, basis, count)
            for number in range(2):
                addition(seed, "rand_select", count, number)
        for basis in STUDY:
            addition(seed, basis, 5)
        for number in range(3):
            addition(seed, "ae_exact_mixed", 5, number)
        for dtype in ("float32", "bfloat16", "float16"):
            for basis in ("ae_exact", "balanced", "rand_select"):
                addition(seed, basis, 5, 0, dtype, stored=True)
        for basis in "plain ascent ae_exact ae_adam_5 balanced pca rand_proj".split():
            for size in [None] if basis in ("plain", "ascent") else SIZES:
                keys = ("alpha", "target", "control", "control_before", "relative_error")
                each = {task: scores(list(keys)) for task in tasks}
                if basis == "ascent":
                    each = {task: found | {"relative_error": None} for task, found in each.items()}
                result = {"lambda": 0.3, "start": scores(tasks), "tasks": each}
                keep(seed, result, kind="negation", basis=basis, num_bases=size, seed=0)
        for how in "ae balanced rand_select continual_ta magmax".split():
            for budget in [None] if how in ("continual_ta", "magmax") else SIZES:
                for order in range(2):
                    arrived = rng.sample(tasks, len(tasks))
                    curve = [
                        {"seen": t, "lambda": 0.3, "test": scores(arrived[:t])} for t in (2, 6, 10)
                    ]
                    result = {
                        "order": arrived,
                        "fixed": {"lambda": 0.3, "test": scores(tasks)},
                        "tuned": {"lambda": 0.2, "test": scores(tasks)},
                        "curve": curve if budget in (None, 5) else None,
                    }
                    keep(seed, result, kind="online", how=how, budget=budget, order=order)
        for basis in ("base", "finetune", "none", "none_subsample", "balanced", "rand_select"):
            size = 5 if basis in ("none_subsample", "balanced", "rand_select") else None
            for shots in (4, 16):
                for number in range(2 if basis == "rand_select" else 1):
                    cell = {"basis": basis, "num_bases": size, "seed": number, "shots": shots}
                    keep(seed, {"tasks": scores(list(data.UNSEEN))}, kind="transfer", **cell)
    return records


@pytest.fixture(scope="module")
def records(mini: dict[str, ModuleType]) -> list[Record]:
    return invented(mini["data"])


# ----------------------------------------------------------------------- what the tests work out


def parsed(text: str) -> list[dict[str, dict[str, str]]]:
    """row -> column -> text, of each table in the Markdown."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = ([c.strip() for c in line.split("|")[1:-1]] for line in block.splitlines())
        found.append({row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows})
    return found


def reference(records: list[Record], seed: int) -> Any:
    (found,) = (
        r["result"] for r in records if r["cell"]["kind"] == "reference" and r["train_seed"] == seed
    )
    return found


def pick(records: list[Record], **wanted: Any) -> list[Record]:
    return [r for r in records if all(r["cell"].get(k) == v for k, v in wanted.items())]


def relative(records: list[Record], record: Record, scores: dict[str, float]) -> list[float]:
    own = reference(records, record["train_seed"])["specialists"]
    return [scores[task] / own[task] for task in own]


def written(values: list[float], digits: int = 3) -> str:
    return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"


def merged(record: Record, way: str = "ta", scale: str = "tasks") -> dict[str, float]:
    return record["result"]["merges"][way]["scales"][scale]["test"]


TA, HALF = {"kind": "addition", "stored": False}, 5
Change = Callable[[list[Record]], object]


def changed(records: list[Record], change: Change) -> list[Record]:
    mine = copy.deepcopy(records)
    change(mine)
    return mine


# ------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(("place", "way", "scale"), [
    (0, "ta", "bases"), (1, "ta", "tasks"), (2, "ta", "decoder"),
    (3, "ties", "bases"), (4, "ties", "tasks"),
])  # fmt: skip
def test_addition_is_the_mean_over_tasks_then_over_runs(
    mini: dict[str, ModuleType], records: list[Record], place: int, way: str, scale: str
) -> None:
    tasks = list(mini["data"].TASKS)
    made = mini["report"].tables(records, "small", "full")
    relatives, plain = (parsed(made[name])[place] for name in ("addition", "addition_absolute"))
    assert list(relatives["balanced"]) == ["M = 2", "M = 5", "M = 8", "M = 10"]
    for row, basis in (("balanced", "balanced"), ("rand_select", "rand_select"),
                       ("all task vectors", "none"), ("ae, Adam, t = 5", "ae_adam_5")):  # fmt: skip
        for size in (10,) if basis == "none" else SIZES:
            found = pick(records, **TA, basis=basis, num_bases=size)
            assert len(found) == (6 if basis == "rand_select" else 3)
            tests = [merged(record, way, scale) for record in found]
            pairs = zip(found, tests, strict=True)
            means = [float(np.mean(relative(records, r, test))) for r, test in pairs]
            absolute = [float(np.mean([test[task] for task in tasks])) for test in tests]
            assert relatives[row][f"M = {size}"].replace("*", "") == written(means)
            assert plain[row][f"M = {size}"].replace("*", "") == written(absolute)
    caption = made["addition"].splitlines()[0]
    assert "(small, full, 3 training seeds)" in caption
    assert "n = 3 runs; rand_select: 6." in caption


def test_the_best_basis_of_a_column_is_bold_and_the_reference_never(
    report: ModuleType, records: list[Record]
) -> None:
    for table in parsed(report.tables(records, "small", "full")["addition"]):
        for size in SIZES:
            cells = {row: cells[f"M = {size}"] for row, cells in table.items()}
            means = {
                row: float(text.replace("*", "").split()[0])
                for row, text in cells.items()
                if text != "-"
            }
            bold = {row for row, text in cells.items() if text.startswith("**")}
            assert bold == {row for row, mean in means.items() if mean == max(means.values())}
        assert not any("*" in text for text in table["all task vectors"].values())


def test_equals_are_bold_together_and_one_alone_is_not(
    report: ModuleType, records: list[Record]
) -> None:
    def level(mine: list[Record]) -> None:
        for record in pick(mine, kind="addition"):
            for task in (test := merged(record)):
                test[task] = 0.5 if record["cell"]["basis"] in ("pca", "balanced") else 0.4
        # the reference is as good, and takes no part
        for record in pick(mine, **TA, basis="none"):
            merged(record).update(dict.fromkeys(merged(record), 0.5))
        for record in pick(mine, **TA, num_bases=8):
            mine.append(copy.deepcopy(record))
            mine[-1]["cell"]["num_bases"] = 10

    table = parsed(report.tables(changed(records, level), "small", "full")["addition"])[1]
    assert table["all task vectors"]["M = 10"] == table["pca"]["M = 10"].replace("*", "")
    for title in ("M = 2", "M = 10"):
        assert [row for row, cells in table.items() if "*" in cells[title]] == ["balanced", "pca"]
    alone = [r for r in records if r["cell"].get("basis") in (None, "none", "pca")]
    table = parsed(report.tables(alone, "small", "full")["addition"])[1]
    assert list(table) == ["all task vectors", "pca"]
    assert "*" not in "".join(table["pca"].values())


def test_per_task(mini: dict[str, ModuleType], records: list[Record]) -> None:
    relatives, plain = parsed(mini["report"].tables(records, "small", "full")["per_task"])
    for row, basis, size in (("pca", "pca", HALF), ("all task vectors", "none", 10)):
        found = pick(records, **TA, basis=basis, num_bases=size)
        for task in mini["data"].TASKS:
            own = [reference(records, r["train_seed"])["specialists"][task] for r in found]
            scores = [merged(record)[task] for record in found]
            title = task.replace("_", " ")
            assert plain[row][title] == f"{np.mean(scores):.3f}"
            assert relatives[row][title] == f"{np.mean(np.array(scores) / own):.3f}"
        means = [float(np.mean(relative(records, r, merged(r)))) for r in found]
        assert relatives[row]["mean"] == written(means)


def test_training(mini: dict[str, ModuleType], records: list[Record]) -> None:
    (table,) = parsed(mini["report"].tables(records, "small", "full")["training"])
    results = [reference(records, seed) for seed in SEEDS]
    added = [merged(r) for r in pick(records, **TA, basis="none")]
    task = "math_add"
    assert table["`math_add`"] == {
        "base": written([result["base"][task] for result in results]),
        "specialist": written([result["specialists"][task] for result in results]),
        "addition": written([test[task] for test in added]),
    }
    assert table["`unseen_middle`"]["specialist"] == "-"
    assert table["`unseen_middle`"]["base"] == written(
        [r["base"]["unseen_middle"] for r in results]
    )
    tasks = mini["data"].TASKS
    assert table["mean of ten"]["base"] == written(
        [float(np.mean([result["base"][t] for t in tasks])) for result in results]
    )
    assert table["normalized"]["specialist"] == "1.000 ± 0.000"
    assert table["normalized"]["base"] == written(
        [float(np.mean([r["base"][t] / r["specialists"][t] for t in tasks])) for r in results]
    )


def test_temperature_and_why_show_the_encoder(report: ModuleType, records: list[Record]) -> None:
    made = report.tables(records, "small", "full")
    (study,), (why,) = parsed(made["temperature"]), parsed(made["why"])
    assert list(study)[:3] == ["ae, Adam, t = 0.5", "ae, Adam, t = 1", "ae, Adam, t = 2"]
    assert list(study)[-2:] == ["ae, Adam, annealed x0.9", "ae, exact"]
    for table, row, basis in ((study, "ae, Adam, t = 20", "ae_adam_20"),
                              (why, "ae, exact, mixed", "ae_exact_mixed")):  # fmt: skip
        found = [r["result"] for r in pick(records, **TA, basis=basis, num_bases=HALF)]
        sums = [np.array(result["row_sums"]) for result in found]
        gaps = [1 + result["facts"]["relative_gap"] for result in found]
        assert table[row]["loss / least possible"] == written(gaps, 4)
        assert table[row]["least"] == written([float(s.min()) for s in sums])
        assert table[row]["largest"] == written([float(s.max()) for s in sums])
        variations = [float(s.std() / s.mean()) for s in sums]
        assert table[row]["row sums: variation"] == written(variations)


def test_why_correlates_cells_and_tasks(mini: dict[str, ModuleType], records: list[Record]) -> None:
    found = [
        r
        for r in pick(records, **TA, num_bases=HALF)
        if r["cell"]["basis"] not in ("pca", "linear_ae")
    ]
    sums = np.array([r["result"]["row_sums"] for r in found])
    shares = np.array([relative(records, r, merged(r)) for r in found])
    between = np.corrcoef(sums.std(1) / sums.mean(1), shares.mean(1))[0, 1]
    own = sums / sums.mean(1, keepdims=True)
    across = np.corrcoef(own.ravel(), shares.ravel())[0, 1]
    for seed in SEEDS:
        rows = [i for i, r in enumerate(found) if r["train_seed"] == seed]
        for part in (own, shares):
            part[rows] -= part[rows].mean(0)
    within = np.corrcoef(own.ravel(), shares.ravel())[0, 1]
    facts = mini["report"].summary(records)["small"]["full"]["why"][0]["facts"]
    assert facts == pytest.approx(
        {"cells": 45, "r_variation": between, "r_tasks": across, "r_within_tasks": within}
    )
    note = mini["report"].tables(records, "small", "full")["why"].splitlines()[-1]
    assert [float(r) for r in re.findall(r"-?\d\.\d\d", note)] == pytest.approx(
        [between, across, within], abs=0.00501
    )
    assert "over 45 cells of M = 5" in note and "over 450 pairs" in note


def test_cost(report: ModuleType, records: list[Record]) -> None:
    (table,) = parsed(report.tables(records, "small", "full")["cost"])
    found = [r["result"] for r in pick(records, **TA, basis="pca", num_bases=2)]
    row = table["pca, M = 2"]
    assert row["size"] == "20.0%"
    assert table["all task vectors, M = 10"]["size"] == "100.0%"
    assert row["build, s"] == written([result["seconds"]["build"] for result in found])
    ways = [result["merges"]["ta"] for result in found]
    assert row["one merge, s"] == written([way["seconds"] for way in ways])
    assert row["search, s"] == written([way["scales"]["bases"]["seconds"] for way in ways], 2)


def test_negation(mini: dict[str, ModuleType], records: list[Record]) -> None:
    made = mini["report"].tables(records, "small", "full")
    (table,), (sizes,) = parsed(made["negation"]), parsed(made["negation_by_m"])
    targets, controls, alphas = parsed(made["negation_per_task"])
    for each, key in ((targets, "target"), (controls, "control"), (alphas, "alpha")):
        chosen = pick(records, kind="negation", basis="plain")
        values = [r["result"]["tasks"]["math_add"][key] for r in chosen]
        assert each["the task vector itself"]["math add"] == f"{np.mean(values):.3f}"
    assert list(sizes["pca"]) == ["M = 2", "M = 5", "M = 8", "no bases"]

    def mean(result: Any, key: str) -> float:
        return float(np.mean([result["tasks"][task][key] for task in mini["data"].TASKS]))

    for row, basis, size in (("pca", "pca", HALF), ("gradient ascent", "ascent", None)):
        found = [r["result"] for r in pick(records, kind="negation", basis=basis, num_bases=size)]
        start = [float(np.mean(list(result["start"].values()))) for result in found]
        columns = {"target before": written(start)}
        for key in ("target", "control_before", "control", "relative_error"):
            title = key.replace("_", " ") if "_" in key else f"{key} after"
            none = key == "relative_error" and basis == "ascent"
            columns[title] = "-" if none else written([mean(result, key) for result in found])
        assert table[row] == columns
        title = f"M = {size}" if size else "no bases"
        assert sizes[row][title] == columns["target after"]
    small = [r["result"] for r in pick(records, kind="negation", basis="pca", num_bases=2)]
    assert sizes["pca"]["M = 2"] == written([mean(result, "target") for result in small])


def test_online_runs_are_seeds_times_orders(report: ModuleType, records: list[Record]) -> None:
    text = report.tables(records, "small", "full")["online"]
    for table, key in zip(parsed(text), ("tuned", "fixed"), strict=True):
        for how, budget, title in (("ae", 8, "M = 8"), ("magmax", None, "no budget")):
            if (how, key) == ("magmax", "fixed"):  # 0.3 is for sums, and MagMax is none
                assert how not in table
                continue
            found = pick(records, kind="online", how=how, budget=budget)
            assert len(found) == 6
            means = [float(np.mean(relative(records, r, r["result"][key]["test"]))) for r in found]
            assert table[how][title] == written(means)
    assert "n = 6 runs." in text.splitlines()[0]


def test_transfer(report: ModuleType, records: list[Record]) -> None:
    both, middle, between = parsed(report.tables(records, "small", "full")["transfer"])
    for row, basis in (("rand_select, M = 5", "rand_select"), ("base, zero-shot", "base")):
        found = pick(records, kind="transfer", basis=basis, shots=16)
        tasks = [r["result"]["tasks"] for r in found]
        for table, task in ((middle, "unseen_middle"), (between, "unseen_between")):
            assert table[row]["shots: 16"] == written([scores[task] for scores in tasks])
        means = [float(np.mean(list(scores.values()))) for scores in tasks]
        assert both[row]["shots: 16"] == written(means)


def test_the_json_has_the_tables_numbers_and_the_raw_scores(
    report: ModuleType, records: list[Record]
) -> None:
    found = report.summary(records)["small"]["full"]
    assert set(found) == set(report.SHEETS) == set(report.tables(records, "small", "full"))
    means = [
        float(np.mean(relative(records, r, merged(r))))
        for r in pick(records, **TA, basis="rand_select", num_bases=8)
    ]
    cell = found["addition"][1]["rows"]["rand_select"]["M = 8"]
    spread = {"mean": np.mean(means), "sd": np.std(means, ddof=1), "n": 6}
    assert cell == pytest.approx(spread)
    assert found["addition"][1]["rows"]["rand_select"]["M = 10"] is None

    listed = [json.loads(line) for line in report.listing(records).splitlines()]
    assert len(listed) == len(records)
    for record in listed:
        key = record["train_seed"], record["cell"]
        (source,) = (r for r in records if (r["train_seed"], r["cell"]) == key)
        if record["cell"]["kind"] == "addition":
            scale = record["result"]["merges"]["ta"]["scales"]["tasks"]
            assert set(scale) == {"lambda", "seconds", "test", "validation"}
            assert scale["validation"] == 1.0  # the largest of those invented
            assert scale["test"] == pytest.approx(merged(source), rel=1e-5)


# ------------------------------------------------------------------------- what is not there, twice


def test_the_study_of_precisions_stays_out_of_the_other_tables(
    report: ModuleType, records: list[Record]
) -> None:
    plain = [r for r in records if not r["cell"].get("stored")]
    without = report.tables(plain, "small", "full")
    assert "precision" not in without
    made = report.tables(records, "small", "full")
    (table,) = parsed(made.pop("precision"))
    assert made == without

    assert list(table) == ["ae, exact", "balanced", "rand_select"]
    for dtype, size in {"float32": "0.020", "bfloat16": "0.010"}.items():
        of = {"basis": "rand_select", "num_bases": HALF, "dtype": dtype, "stored": True}
        found = pick(records, kind="addition", **of)
        means = [float(np.mean(relative(records, r, merged(r)))) for r in found]
        assert table["rand_select"][dtype] == written(means)
        assert table["rand_select"][f"{dtype}, MB"] == size


def test_a_cell_that_is_there_twice_counts_once(report: ModuleType, records: list[Record]) -> None:
    def worse(mine: list[Record]) -> None:
        for record in pick(mine, **TA, basis="pca"):
            stale = copy.deepcopy(record)
            merged(stale).update(dict.fromkeys(merged(stale), 0.0))
            mine.insert(0, stale)

    before = report.tables(records, "small", "full")
    assert report.tables(changed(records, worse), "small", "full") == before


def test_other_presets_and_methods_are_not_mixed_in(
    mini: dict[str, ModuleType], records: list[Record]
) -> None:
    more = [*invented(mini["data"], "small", "lora"), *invented(mini["data"], "tiny"), *records]
    report = mini["report"]
    assert report.tables(more, "small", "full") == report.tables(records, "small", "full")
    assert {k: set(v) for k, v in report.summary(more).items()} == {
        "small": {"full", "lora"},
        "tiny": {"full"},
    }


def test_a_missing_task_or_reference_is_said_not_averaged_over(
    report: ModuleType, records: list[Record]
) -> None:
    def forget(mine: list[Record]) -> None:
        del merged(pick(mine, **TA, basis="pca", num_bases=2)[1])["math_add"]
        for record in pick(mine, **TA, basis="balanced", num_bases=8):
            merged(record)["coding_run"] = float("nan")
        for record in pick(mine, **TA, basis="ae_exact"):
            if record["train_seed"] == 2:
                mine.remove(record)

    mine = changed(records, forget)
    text = report.tables(mine, "small", "full")["addition"].split("\n\n| ")[2]
    table = parsed("| " + text)[0]
    found = [r for r in pick(records, **TA, basis="pca", num_bases=2) if r["train_seed"] != 1]
    means = [float(np.mean(relative(records, r, merged(r)))) for r in found]
    assert table["pca"]["M = 2"].replace("*", "") == f"{written(means)} (n=2)"
    assert "(n=" not in table["pca"]["M = 5"]
    assert table["balanced"]["M = 8"] == "-"
    assert "(n=" not in "".join(table["ae, exact"].values())  # the whole row: in the caption
    caption = report.tables(mine, "small", "full")["addition"].splitlines()[0]
    assert "n = 3 runs; ae, exact: 2; rand_select: 6." in caption

    lost = [r for r in records if r["cell"]["kind"] != "reference" or r["train_seed"] != 0]
    made = report.tables(lost, "small", "full")
    assert "n = 2 runs; rand_select: 4." in made["addition"].splitlines()[0]
    assert "n = 3 runs; rand_select: 6." in made["addition_absolute"].splitlines()[0]


def test_a_specialist_that_scored_nothing_counts_as_nothing(
    report: ModuleType, records: list[Record]
) -> None:
    def fail(mine: list[Record]) -> None:
        for seed in SEEDS:
            reference(mine, seed)["specialists"]["math_add"] = 0.0

    (relatives, _) = parsed(report.tables(changed(records, fail), "small", "full")["per_task"])
    assert relatives["pca"]["math add"] == "0.000"
    assert relatives["pca"]["math largest"] != "0.000"


def test_one_run_has_no_spread(report: ModuleType, records: list[Record]) -> None:
    one = [
        r
        for r in records
        if r["train_seed"] == 1 and not r["cell"].get("seed") and not r["cell"].get("order")
    ]
    for text in report.tables(one, "small", "full").values():
        assert "n = 1 run." in text and "1 training seed)" in text
        assert "±" not in "".join(line for line in text.splitlines() if line.startswith("|"))
    cell = report.summary(one)["small"]["full"]["addition"][0]["rows"]["pca"]["M = 2"]
    assert cell["sd"] is None and cell["n"] == 1


NEEDS = {  # name -> the kinds without which it is not there
    "training": {"reference"},
    "addition": {"reference", "addition"},
    "addition_absolute": {"addition"},
    "per_task": {"addition"},
    "temperature": {"addition"},
    "precision": {"addition"},
    "cost": {"addition"},
    "negation": {"negation"},
    "negation_by_m": {"negation"},
    "negation_per_task": {"negation"},
    "online": {"reference", "online"},
    "transfer": {"transfer"},
    "why": {"addition"},
}
DRAWN = {
    "radar": {"reference", "addition"},
    "by_m": {"reference", "addition"},
    "temperature": {"addition"},
    "precision": {"addition"},
    "cost": {"reference", "addition"},
    "negation": {"negation"},
    "online": {"reference", "online"},
    "why": {"reference", "addition"},
}
KINDS = ("reference", "addition", "negation", "online", "transfer")


@pytest.mark.parametrize("kinds", [
    *({kind} for kind in KINDS), *(set(KINDS) - {kind} for kind in KINDS), set(),
], ids=lambda kinds: "+".join(sorted(kinds)) or "none")  # fmt: skip
def test_what_is_not_there_is_left_out(
    mini: dict[str, ModuleType], records: list[Record], kinds: set[str]
) -> None:
    some = [r for r in records if r["cell"]["kind"] in kinds]
    made = mini["report"].tables(some, "small", "full")
    assert set(made) == {name for name, need in NEEDS.items() if need <= kinds}
    drawn = mini["pictures"].draw(some, "small", "full")
    assert set(drawn) == {name for name, need in DRAWN.items() if need <= kinds}


@pytest.mark.parametrize("share", [0.02, 0.1, 0.4])
def test_whatever_was_interrupted_is_reported(
    mini: dict[str, ModuleType], records: list[Record], tmp_path: Path, share: float
) -> None:
    for seed in range(2):
        rng = random.Random(seed)
        some = [copy.deepcopy(r) for r in records if rng.random() < share]
        for record in pick(some, kind="addition"):
            record["result"]["row_sums"] = rng.choice([None, [], record["result"]["row_sums"]])
            record["result"]["facts"]["loss"] = rng.choice([None, float("inf")])
            record["result"]["merges"].pop(rng.choice(["ta", "ties", "other"]), None)
        mini["report"].write(some, tmp_path / str(seed))
        json.loads((tmp_path / str(seed) / "results.json").read_text(), parse_constant=pytest.fail)


# -------------------------------------------------------------------------------------------- files


def backwards(found: Any) -> Any:
    """The same, with the keys of all dicts in another order."""
    if isinstance(found, dict):
        return {key: backwards(found[key]) for key in reversed(found)}
    return [backwards(value) for value in found] if isinstance(found, list) else found


def test_the_same_records_give_the_same_bytes_in_any_order(
    report: ModuleType, records: list[Record], tmp_path: Path
) -> None:
    shuffled = [backwards(r) for r in random.Random(1).sample(records, len(records))]
    page = tmp_path / "page.md"
    page.write_text("<!-- table: small full why -->\n<!-- end -->\n")
    written = []
    for folder, some in (("a", records), ("b", shuffled)):
        paths = report.write(some, tmp_path / folder, page)
        assert sorted(paths) == sorted([*(tmp_path / folder).iterdir(), page])
        written.append({path.name: path.read_bytes() for path in paths})
    assert written[0] == written[1]
    assert set(written[0]) == {
        "page.md", "results.json", "cells.jsonl", "tables.md",
        *(f"small-full-{name}.svg" for name in DRAWN),
    }  # fmt: skip
    for name, text in report.tables(records, "small", "full").items():
        assert f"### {name}\n\n{text}" in written[0]["tables.md"].decode()
    assert json.loads(written[0]["results.json"]) == json.loads(json.dumps(report.summary(records)))


def test_only_what_is_between_the_marks_of_a_page_changes(
    report: ModuleType, records: list[Record], tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n<!-- table: small full online -->\nold\n\n| old |\n<!-- end -->\n"
        "between, é\n<!-- table: small full transfer -->\n<!-- end -->\nno end of line"
    )
    made = report.tables(records, "small", "full")
    some = [r for r in records if r["cell"]["kind"] in ("reference", "online", "transfer")]
    for _ in range(2):
        report.write(some, tmp_path / "out", page)
        assert page.read_text() == (
            f"# Title\n\n<!-- table: small full online -->\n\n{made['online']}\n<!-- end -->\n"
            f"between, é\n<!-- table: small full transfer -->\n\n{made['transfer']}\n<!-- end -->\n"
            "no end of line"
        )


def test_a_page_keeps_the_tables_of_other_presets(
    report: ModuleType, records: list[Record], tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    other = "<!-- table: tiny lora online -->\nold\n<!-- end -->\n"
    page.write_text(other + "<!-- table: small full transfer -->\n<!-- end -->\n")
    some = [r for r in records if r["cell"]["kind"] == "reference"]
    report.write(some, tmp_path / "out", page)
    assert page.read_text() == (
        other + "<!-- table: small full transfer -->\n\n(nothing was measured)\n\n<!-- end -->\n"
    )


@pytest.mark.parametrize(("text", "message"), [
    ("x\n<!-- table: small full nothing -->\n<!-- end -->\n", "line 2: <!-- table: small full "
     "nothing --> names no table; expected"),
    ("<!-- table: online -->\n<!-- end -->\n", "line 1: <!-- table: online --> names no table"),
    ("<!-- table: small full online -->\nx\n", "line 1: no <!-- end --> after this table"),
    ("<!-- table: small full why -->\n<!-- table: small full why -->\n<!-- end -->\n",
     "line 1: no <!-- end --> after this table"),
])  # fmt: skip
def test_a_mistaken_mark_is_one_line_and_nothing_is_written(
    report: ModuleType, records: list[Record], tmp_path: Path, text: str, message: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(click.ClickException) as caught:
        report.write(records, tmp_path / "out", page)
    with pytest.raises(click.ClickException, match=re.escape(caught.value.message)):
        report.check_page(page)
    assert message in caught.value.message and "\n" not in caught.value.message
    assert page.read_text() == text
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------------- pictures


def test_every_picture_is_drawn_and_leaves_no_settings_behind(
    mini: dict[str, ModuleType], records: list[Record]
) -> None:
    pictures = mini["pictures"]
    figures = pictures.draw(records, "small", "full")
    assert set(figures) == set(DRAWN)
    plain = {name: pictures.svg(figure) for name, figure in figures.items()}
    for content in plain.values():
        root = ElementTree.fromstring(content)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert b"<dc:date>" not in content
    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": None, "axes.facecolor": "red"}):
        before = dict(matplotlib.rcParams)
        again = {n: pictures.svg(f) for n, f in pictures.draw(records, "small", "full").items()}
        assert dict(matplotlib.rcParams) == before
    assert again == plain


def test_pictures_draw_the_tables_numbers(
    mini: dict[str, ModuleType], records: list[Record]
) -> None:
    figures = mini["pictures"].draw(records, "small", "full")

    def value(records_: list[Record]) -> float:
        return float(np.mean([np.mean(relative(records, r, merged(r))) for r in records_]))

    panel = figures["by_m"].axes[1]
    lines = {line.get_label(): line.get_ydata() for line in panel.get_lines()}
    sizes = [pick(records, **TA, basis="rand_select", num_bases=size) for size in SIZES]
    assert lines["rand_select"][:3] == pytest.approx([value(found) for found in sizes])
    assert lines["all task vectors"][0] == pytest.approx(value(pick(records, **TA, basis="none")))

    found = pick(records, **TA, basis="rand_select", num_bases=HALF)
    shapes = {line.get_label(): line.get_ydata() for line in figures["radar"].axes[0].get_lines()}
    whole = pick(records, **TA, basis="none")
    for label, of in (("rand_select", found), ("all task vectors", whole)):
        shares = np.mean([relative(records, r, merged(r)) for r in of], 0)
        assert shapes[label] == pytest.approx([*shares, shares[0]])

    points = {
        dots.get_label(): dots.get_offsets().data for dots in figures["why"].axes[0].collections
    }
    assert "pca" not in points and len(points["ae, other temperatures"]) == 15
    sums = [np.array(r["result"]["row_sums"]) for r in found]
    means = [np.mean(relative(records, r, merged(r))) for r in found]
    wanted = sorted([s.std() / s.mean(), mean] for s, mean in zip(sums, means, strict=True))
    assert np.array(sorted(points["rand_select"].tolist())) == pytest.approx(np.array(wanted))

    curves = {line.get_label(): line.get_xydata() for line in figures["online"].axes[1].get_lines()}
    seen = []
    for record in pick(records, kind="online", how="ae", budget=HALF):
        own = reference(records, record["train_seed"])["specialists"]
        test = record["result"]["curve"][0]["test"]
        seen.append(np.mean([score / own[task] for task, score in test.items()]))
    assert curves["ae, M = 5"][0] == pytest.approx([2, np.mean(seen)])
    assert len(curves["magmax"]) == 3


def test_a_method_looks_the_same_in_all_pictures_and_like_no_other_in_one(
    mini: dict[str, ModuleType], records: list[Record]
) -> None:
    looks: dict[str, set[tuple[float, ...]]] = {}
    to_rgb = matplotlib.colors.to_rgb
    for name in ("radar", "by_m", "negation"):
        for axes in mini["pictures"].draw(records, "small", "full")[name].axes:
            here = {line.get_label(): to_rgb(line.get_color()) for line in axes.get_lines()}
            assert len(set(here.values())) == len(here)
            for label, colour in here.items():
                looks.setdefault(label, set()).add(colour)
    assert len(looks) > 8 and all(len(colours) == 1 for colours in looks.values())
