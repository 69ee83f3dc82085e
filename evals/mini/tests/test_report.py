"""evals/mini/report.py and pictures.py on made-up records, against numbers worked out here."""

from __future__ import annotations

import copy
import json
import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import matplotlib
import numpy as np
import pytest

SEEDS = (0, 1, 2)
BASES = "ae_exact ae_adam_5 ae_adam_1 ae_annealed balanced linear_ae pca".split()
STUDY = "ae_adam_0.5 ae_adam_2 ae_adam_10 ae_adam_20 ae_annealed_0.9".split()
SIZES = (2, 5, 8)
Record = dict[str, Any]


def invented(data: Any, preset: str = "small", method: str = "full") -> list[Record]:
    """What a whole comparison of three training seeds leaves, with random numbers in it."""
    rng, records = random.Random(f"{preset}/{method}"), []
    tasks, known = list(data.TASKS), [*data.TASKS, *data.UNSEEN]

    def scores(names: list[str], low: float = 0.3, high: float = 0.9) -> dict[str, float]:
        return {name: rng.uniform(low, high) for name in names}

    def keep(run: int, result: Any, **cell: Any) -> None:
        head = {"preset": preset, "method": method, "train_seed": run}
        records.append(head | {"cell": cell, "seconds": rng.random(), "result": result})

    def addition(
        seed: int, basis: str, count: int, number: int = 0, dtype: str = "float32",
        stored: bool = False,
    ) -> None:  # fmt: skip
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
def records(mini: SimpleNamespace) -> list[Record]:
    return invented(mini.data)


@pytest.fixture(scope="module")
def made(mini: SimpleNamespace, records: list[Record]) -> dict[str, str]:
    tables: dict[str, str] = mini.report.tables(records, "small", "full")
    return tables


# ----------------------------------------------------------------------- what the tests work out


def parsed(text: str) -> list[dict[str, dict[str, str]]]:
    """row -> column -> text without bold, of each table in the Markdown."""
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


def normalized(records: list[Record], record: Record, scores: dict[str, float]) -> float:
    return float(np.mean(relative(records, record, scores)))


def written(values: list[float], digits: int = 3) -> str:
    return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"


def merged(record: Record, way: str = "ta", scale: str = "tasks") -> dict[str, float]:
    return record["result"]["merges"][way]["scales"][scale]["test"]


def mean(scores: Any) -> float:
    return float(np.mean(list(scores.values())))


def forgotten(key: str) -> Callable[[Record], float]:
    return lambda r: mean({t: found[key] for t, found in r["result"]["tasks"].items()})


TA, HALF = {"kind": "addition", "stored": False}, 5
STORED = {"kind": "addition", "stored": True, "num_bases": HALF}
PLAIN = {"kind": "negation", "basis": "plain"}


# ------------------------------------------------------------------------------------------ numbers


def test_cells_are_means_over_tasks_then_over_runs(
    mini: SimpleNamespace, records: list[Record], made: dict[str, str]
) -> None:
    tasks = mini.data.TASKS

    def norm(way: str = "ta", scale: str = "tasks") -> Callable[[Record], float]:
        return lambda r: normalized(records, r, merged(r, way, scale))

    def share(task: str) -> Callable[[Record], float]:
        own = {seed: reference(records, seed)["specialists"][task] for seed in SEEDS}
        return lambda r: merged(r)[task] / own[r["train_seed"]]

    def sums(of: Callable[[Any], float]) -> Callable[[Record], float]:
        return lambda r: float(of(np.array(r["result"]["row_sums"])))

    def online(key: str) -> Callable[[Record], float]:
        return lambda r: normalized(records, r, r["result"][key]["test"])

    def base(r: Record) -> float:
        return float(
            np.mean([r["result"]["base"][t] / r["result"]["specialists"][t] for t in tasks])
        )

    def result(*path: str) -> Callable[[Record], float]:
        def value(found: Any) -> float:
            for key in ("result", *path):
                found = found[key]
            return float(found)

        return value

    pca = {**TA, "basis": "pca", "num_bases": HALF}
    pca2, hot = pca | {"num_bases": 2}, pca | {"basis": "ae_adam_20"}
    none = {**TA, "basis": "none", "num_bases": 10}
    given = {"kind": "reference"}
    ascent = {"kind": "negation", "basis": "ascent"}
    forget = {"kind": "negation", "basis": "pca", "num_bases": HALF}
    ae8 = {"kind": "online", "how": "ae", "budget": 8}
    shots = {"kind": "transfer", "basis": "rand_select", "num_bases": HALF, "shots": 16}
    zero = {"kind": "transfer", "basis": "base", "shots": 16}
    search = result("merges", "ta", "scales", "bases", "seconds")
    cases: list[tuple[str, int, str, str, Record, Callable[[Record], float], int | None]] = []
    ways = [("ta", "bases"), ("ta", "tasks"), ("ta", "decoder"), ("ties", "bases"),
            ("ties", "tasks")]  # fmt: skip
    for place, way in enumerate(ways):
        names = {"all task vectors": "none", "ae, Adam, t = 5": "ae_adam_5"}
        for row in ("balanced", "rand_select", *names):
            basis = names.get(row, row)
            for size in (10,) if basis == "none" else SIZES:
                cell = {**TA, "basis": basis, "num_bases": size}
                column = f"M = {size}"
                cases.append(("addition", place, row, column, cell, norm(*way), 3))
                plain = lambda r, way=way: mean(merged(r, *way))  # noqa: E731
                cases.append(("addition_absolute", place, row, column, cell, plain, 3))
    for row, cell in (("pca", pca), ("all task vectors", none)):
        for task in tasks:
            title = task.replace("_", " ")
            cases.append(("per_task", 0, row, title, cell, share(task), None))
            score = lambda r, task=task: merged(r)[task]  # noqa: E731
            cases.append(("per_task", 1, row, title, cell, score, None))
        cases.append(("per_task", 0, row, "mean", cell, norm(), 3))
    cases += [
        ("training", 0, "`math_add`", "base", given, result("base", "math_add"), 3),
        ("training", 0, "`math_add`", "specialist", given, result("specialists", "math_add"), 3),
        ("training", 0, "`math_add`", "addition", none, lambda r: merged(r)["math_add"], 3),
        ("training", 0, "`unseen_middle`", "base", given, result("base", "unseen_middle"), 3),
        ("training", 0, "mean of ten", "specialist", given,
         lambda r: mean(r["result"]["specialists"]), 3),
        ("training", 0, "normalized", "base", given, base, 3),
        ("cost", 0, "pca, M = 2", "build, s", pca2, result("seconds", "build"), 3),
        ("cost", 0, "pca, M = 2", "one merge, s", pca2, result("merges", "ta", "seconds"), 3),
        ("cost", 0, "pca, M = 2", "search, s", pca2, search, 2),
        ("negation", 0, "pca", "target before", forget, lambda r: mean(r["result"]["start"]), 3),
        ("negation", 0, "pca", "target after", forget, forgotten("target"), 3),
        ("negation", 0, "pca", "control before", forget, forgotten("control_before"), 3),
        ("negation", 0, "pca", "control after", forget, forgotten("control"), 3),
        ("negation", 0, "pca", "relative error", forget, forgotten("relative_error"), 3),
        ("negation", 0, "gradient ascent", "target after", ascent, forgotten("target"), 3),
        ("negation_by_m", 0, "pca", "M = 5", forget, forgotten("target"), 3),
        ("negation_by_m", 0, "gradient ascent", "no bases", ascent, forgotten("target"), 3),
        ("online", 0, "ae", "M = 8", ae8, online("tuned"), 3),
        ("online", 1, "ae", "M = 8", ae8, online("fixed"), 3),
        ("online", 0, "magmax", "no budget", {"kind": "online", "how": "magmax"},
         online("tuned"), 3),
        ("transfer", 0, "rand_select, M = 5", "shots: 16", shots,
         lambda r: mean(r["result"]["tasks"]), 3),
        ("transfer", 1, "base, zero-shot", "shots: 16", zero, result("tasks", "unseen_middle"), 3),
        ("transfer", 2, "base, zero-shot", "shots: 16", zero, result("tasks", "unseen_between"), 3),
    ]  # fmt: skip
    for place, key in enumerate(("target", "control", "alpha")):
        value = result("tasks", "math_add", key)
        cases.append(("negation_per_task", place, "the task vector itself", "math add", PLAIN,
                      value, None))  # fmt: skip
    mixed = pca | {"basis": "ae_exact_mixed"}
    for table, row, cell in (("temperature", "ae, Adam, t = 20", hot),
                             ("why", "ae, exact, mixed", mixed)):  # fmt: skip
        gap = lambda r: 1 + r["result"]["facts"]["relative_gap"]  # noqa: E731
        variation = sums(lambda s: s.std() / s.mean())
        cases += [
            (table, 0, row, "loss / least possible", cell, gap, 4),
            (table, 0, row, "least", cell, sums(np.min), 3),
            (table, 0, row, "largest", cell, sums(np.max), 3),
            (table, 0, row, "row sums: variation", cell, variation, 3),
        ]
    for dtype in ("float32", "bfloat16", "float16"):
        cell = STORED | {"basis": "rand_select", "dtype": dtype}
        cases.append(("precision", 0, "rand_select", dtype, cell, norm(), 3))

    tables = {name: parsed(text.replace("*", "")) for name, text in made.items()}
    assert {case[0] for case in cases} == set(tables)
    for name, place, row, column, cell, value, digits in cases:
        found = pick(records, **cell)
        assert len(found) in (3, 6, 9)
        values = [value(record) for record in found]
        expected = f"{np.mean(values):.3f}" if digits is None else written(values, digits)
        assert tables[name][place][row][column] == expected, (name, row, column)

    assert tables["training"][0]["normalized"]["specialist"] == "1.000 ± 0.000"
    assert tables["training"][0]["`unseen_middle`"]["specialist"] == "-"
    assert tables["cost"][0]["pca, M = 2"]["size"] == "20.0%"
    assert tables["cost"][0]["all task vectors, M = 10"]["size"] == "100.0%"
    assert tables["negation"][0]["gradient ascent"]["relative error"] == "-"
    assert "magmax" not in tables["online"][1]  # 0.3 is for sums, and MagMax is none
    sizes = {"float32, MB": "0.020", "bfloat16, MB": "0.010"}
    assert sizes.items() <= tables["precision"][0]["rand_select"].items()
    for name, columns in (("addition", "M = 2, M = 5, M = 8, M = 10"),
                          ("negation_by_m", "M = 2, M = 5, M = 8, no bases")):  # fmt: skip
        assert ", ".join(tables[name][0]["pca"]) == columns
    study = list(tables["temperature"][0])
    assert study[:3] == ["ae, Adam, t = 0.5", "ae, Adam, t = 1", "ae, Adam, t = 2"]
    assert study[-2:] == ["ae, Adam, annealed x0.9", "ae, exact"]
    caption = made["addition"].splitlines()[0]
    assert "(small, full, 3 training seeds)" in caption and "n = 3 runs; rand_sele" in caption
    assert "n = 6 runs." in made["online"].splitlines()[0]


def test_the_best_basis_of_a_column_is_bold_and_the_reference_never(
    mini: SimpleNamespace, records: list[Record], made: dict[str, str]
) -> None:
    for table in parsed(made["addition"]):
        for size in SIZES:
            cells = {row: cells[f"M = {size}"] for row, cells in table.items()}
            means = {row: float(text.replace("*", "").split()[0])
                     for row, text in cells.items() if text != "-"}  # fmt: skip
            bold = {row for row, text in cells.items() if text.startswith("**")}
            assert bold == {row for row, value in means.items() if value == max(means.values())}
        assert not any("*" in text for text in table["all task vectors"].values())
    # equals are bold together; the reference is as good, and takes no part
    mine = copy.deepcopy(records)
    for record in pick(mine, kind="addition"):
        best = record["cell"]["basis"] in ("pca", "balanced", "none")
        merged(record).update(dict.fromkeys(merged(record), 0.5 if best else 0.4))
    table = parsed(mini.report.tables(mine, "small", "full")["addition"])[1]
    assert [row for row, cells in table.items() if "*" in cells["M = 2"]] == ["balanced", "pca"]
    # one alone is not
    alone = [r for r in records if r["cell"].get("basis") in (None, "none", "pca")]
    table = parsed(mini.report.tables(alone, "small", "full")["addition"])[1]
    assert list(table) == ["all task vectors", "pca"] and "*" not in "".join(table["pca"].values())


def test_why_correlates_cells_and_tasks(
    mini: SimpleNamespace, records: list[Record], made: dict[str, str]
) -> None:
    found = [r for r in pick(records, **TA, num_bases=HALF)
             if r["cell"]["basis"] not in ("pca", "linear_ae")]  # fmt: skip
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
    facts = mini.report.summary(records)["small"]["full"]["why"][0]["facts"]
    expected = {"cells": 45, "r_variation": between, "r_tasks": across, "r_within_tasks": within}
    assert facts == pytest.approx(expected)
    note = made["why"].splitlines()[-1]
    said = [float(r) for r in re.findall(r"-?\d\.\d\d", note)]
    assert said == pytest.approx([between, across, within], abs=0.00501)
    assert "over 45 cells of M = 5" in note and "over 450 pairs" in note


def test_the_json_has_the_tables_numbers_and_the_raw_scores(
    mini: SimpleNamespace, records: list[Record], made: dict[str, str]
) -> None:
    found = mini.report.summary(records)["small"]["full"]
    assert set(found) == set(mini.report.SHEETS) == set(made)
    some = pick(records, **TA, basis="rand_select", num_bases=8)
    means = [normalized(records, r, merged(r)) for r in some]
    rows = found["addition"][1]["rows"]["rand_select"]
    spread = {"mean": np.mean(means), "sd": np.std(means, ddof=1), "n": 6}
    assert rows["M = 8"] == pytest.approx(spread) and rows["M = 10"] is None
    listed = [json.loads(line) for line in mini.report.listing(records).splitlines()]
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


def test_what_is_of_another_study_stays_out(
    mini: SimpleNamespace, records: list[Record], made: dict[str, str]
) -> None:
    def tables(some: list[Record]) -> dict[str, str]:
        found: dict[str, str] = mini.report.tables(some, "small", "full")
        return found

    # bases on disk are in the table of precisions alone
    plain = [r for r in records if not r["cell"].get("stored")]
    assert tables(plain) == {name: text for name, text in made.items() if name != "precision"}
    # a cell that is there twice counts once, as the last time
    stale = copy.deepcopy(pick(records, **TA, basis="pca"))
    for record in stale:
        merged(record).update(dict.fromkeys(merged(record), 0.0))
    assert tables([*stale, *records]) == made
    # other presets and methods
    more = [*invented(mini.data, "small", "lora"), *invented(mini.data, "tiny"), *records]
    assert tables(more) == made
    summary = {key: set(value) for key, value in mini.report.summary(more).items()}
    assert summary == {"small": {"full", "lora"}, "tiny": {"full"}}


def test_a_missing_task_or_reference_is_said_not_averaged_over(
    mini: SimpleNamespace, records: list[Record]
) -> None:
    mine = copy.deepcopy(records)
    del merged(pick(mine, **TA, basis="pca", num_bases=2)[1])["math_add"]
    for record in pick(mine, **TA, basis="balanced", num_bases=8):
        merged(record)["coding_run"] = float("nan")
    for record in pick(mine, **TA, basis="ae_exact"):
        if record["train_seed"] == 2:
            mine.remove(record)
    text = mini.report.tables(mine, "small", "full")["addition"]
    table = parsed(text.replace("*", ""))[1]
    found = [r for r in pick(records, **TA, basis="pca", num_bases=2) if r["train_seed"] != 1]
    means = [normalized(records, r, merged(r)) for r in found]
    assert table["pca"]["M = 2"] == f"{written(means)} (n=2)"
    assert "(n=" not in table["pca"]["M = 5"] and table["balanced"]["M = 8"] == "-"
    assert "(n=" not in "".join(table["ae, exact"].values())  # the whole row: in the caption
    captions = [line for line in text.splitlines() if line.startswith("Addition")]
    assert "n = 3 runs; ae, exact: 2; rand_select: 6." in captions[0]

    lost = [r for r in records if r["cell"]["kind"] != "reference" or r["train_seed"] != 0]
    made = mini.report.tables(lost, "small", "full")
    assert "n = 2 runs; rand_select: 4." in made["addition"].splitlines()[0]
    assert "n = 3 runs; rand_select: 6." in made["addition_absolute"].splitlines()[0]

    mine = copy.deepcopy(records)  # a specialist that scored nothing counts as nothing
    for seed in SEEDS:
        reference(mine, seed)["specialists"]["math_add"] = 0.0
    relatives, _ = parsed(mini.report.tables(mine, "small", "full")["per_task"])
    assert relatives["pca"]["math add"] == "0.000" != relatives["pca"]["math largest"]


def test_one_run_has_no_spread(mini: SimpleNamespace, records: list[Record]) -> None:
    one = [r for r in records if r["train_seed"] == 1
           and not r["cell"].get("seed") and not r["cell"].get("order")]  # fmt: skip
    for text in mini.report.tables(one, "small", "full").values():
        assert "n = 1 run." in text and "1 training seed)" in text
        assert "±" not in "".join(line for line in text.splitlines() if line.startswith("|"))
    cell = mini.report.summary(one)["small"]["full"]["addition"][0]["rows"]["pca"]["M = 2"]
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
    mini: SimpleNamespace, records: list[Record], kinds: set[str]
) -> None:
    some = [r for r in records if r["cell"]["kind"] in kinds]
    made = mini.report.tables(some, "small", "full")
    assert set(made) == {name for name, need in NEEDS.items() if need <= kinds}
    drawn = mini.pictures.draw(some, "small", "full")
    assert set(drawn) == {name for name, need in DRAWN.items() if need <= kinds}


@pytest.mark.parametrize("share", [0.02, 0.2])
def test_whatever_was_interrupted_is_reported(
    mini: SimpleNamespace, records: list[Record], tmp_path: Path, share: float
) -> None:
    for seed in range(1):
        rng = random.Random(seed)
        some = [copy.deepcopy(r) for r in records if rng.random() < share]
        for record in pick(some, kind="addition"):
            record["result"]["row_sums"] = rng.choice([None, [], record["result"]["row_sums"]])
            record["result"]["facts"]["loss"] = rng.choice([None, float("inf")])
            record["result"]["merges"].pop(rng.choice(["ta", "ties", "other"]), None)
        mini.report.write(some, tmp_path / str(seed))
        json.loads((tmp_path / str(seed) / "results.json").read_text(), parse_constant=pytest.fail)


# -------------------------------------------------------------------------------------------- files


def backwards(found: Any) -> Any:
    """The same, with the keys of all dicts in another order."""
    if isinstance(found, dict):
        return {key: backwards(found[key]) for key in reversed(found)}
    return [backwards(value) for value in found] if isinstance(found, list) else found


def test_the_same_records_give_the_same_bytes_in_any_order(
    mini: SimpleNamespace, records: list[Record], made: dict[str, str], tmp_path: Path
) -> None:
    shuffled = [backwards(r) for r in random.Random(1).sample(records, len(records))]
    page = tmp_path / "page.md"
    page.write_text("<!-- table: small full why -->\n<!-- end -->\n")
    files = []
    own = {"font.size": 30, "svg.hashsalt": None, "axes.facecolor": "red"}  # of a user's
    for folder, some, style in (("a", records, {}), ("b", shuffled, own)):
        with matplotlib.rc_context(style):
            before = dict(matplotlib.rcParams)
            paths = mini.report.write(some, tmp_path / folder, page)
            assert dict(matplotlib.rcParams) == before
        assert sorted(paths) == sorted([*(tmp_path / folder).iterdir(), page])
        files.append({path.name: path.read_bytes() for path in paths})
    assert files[0] == files[1]
    pictures = {f"small-full-{name}.svg" for name in DRAWN}
    assert set(files[0]) == {"page.md", "results.json", "cells.jsonl", "tables.md", *pictures}
    for name in pictures:
        root = ElementTree.fromstring(files[0][name])
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and b"<dc:date>" not in files[0][name]
    for name, text in made.items():
        assert f"### {name}\n\n{text}" in files[0]["tables.md"].decode()
    summary = mini.report.summary(records)
    assert json.loads(files[0]["results.json"]) == json.loads(json.dumps(summary))


def test_only_what_is_between_the_marks_of_a_page_changes(
    mini: SimpleNamespace, records: list[Record], made: dict[str, str], tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    other = "<!-- table: tiny lora online -->\nold\n<!-- end -->\n"  # of a preset that is not here
    page.write_text(
        f"# Title\n{other}\n<!-- table: small full training -->\nold\n\n| old |\n<!-- end -->\n"
        "between, é\n<!-- table: small full transfer -->\n<!-- end -->\nno end of line"
    )
    some = [r for r in records if r["cell"]["kind"] == "reference"]
    (training,) = mini.report.tables(some, "small", "full").values()
    for _ in range(2):
        mini.report.write(some, tmp_path / "out", page)
        assert page.read_text() == (
            f"# Title\n{other}\n<!-- table: small full training -->\n\n{training}\n<!-- end -->\n"
            "between, é\n<!-- table: small full transfer -->\n\n(nothing was measured)\n\n"
            "<!-- end -->\nno end of line"
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
    mini: SimpleNamespace, records: list[Record], tmp_path: Path, text: str, message: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    some = [r for r in records if r["cell"]["kind"] == "reference"]
    with pytest.raises(click.ClickException) as caught:
        mini.report.write(some, tmp_path / "out", page)
    with pytest.raises(click.ClickException, match=re.escape(caught.value.message)):
        mini.report.check_page(page)
    assert message in caught.value.message and "\n" not in caught.value.message
    assert page.read_text() == text and not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------------- pictures


@pytest.fixture(scope="module")
def figures(mini: SimpleNamespace, records: list[Record]) -> Any:
    return mini.pictures.draw(records, "small", "full")


def test_pictures_draw_the_tables_numbers(mini: SimpleNamespace, records: list[Record]) -> None:
    figures = mini.pictures.draw(records, "small", "full")

    def value(some: list[Record]) -> float:
        return float(np.mean([normalized(records, r, merged(r)) for r in some]))

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


def test_a_method_looks_the_same_in_all_pictures_and_like_no_other_in_one(figures: Any) -> None:
    looks: dict[str, set[tuple[float, ...]]] = {}
    to_rgb = matplotlib.colors.to_rgb
    for name in ("radar", "by_m", "negation"):
        for axes in figures[name].axes:
            here = {line.get_label(): to_rgb(line.get_color()) for line in axes.get_lines()}
            assert len(set(here.values())) == len(here)
            for label, colour in here.items():
                looks.setdefault(label, set()).add(colour)
    assert len(looks) > 8 and all(len(colours) == 1 for colours in looks.values())
