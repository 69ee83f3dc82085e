"""The benchmark's own tables and pictures: addition on the paper's grid, of bases and online."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from study import sheets
from study.cells import Record
from study.pictures import by_size as drawn
from study.report import pairs
from study.sheets import BASES, by_size, name, tested
from study.tables import Runs, Sheet, grid, over

from mini import data
from mini.plan import HALF

MERGES = {"ta": "task arithmetic", "ties": "TIES"}
SCALES = {
    "bases": "lambda_scale: bases",
    "tasks": "lambda_scale: tasks",
    "decoder": "sum of reconstructions",  # under task arithmetic alone
}
ONLINE = ("continual_ta", "magmax", "rand_select", "ae", "balanced")


def added(runs: Runs) -> sheets.Rows:
    return {name(basis): runs.find("addition", basis=basis) for basis in BASES}


def addition(runs: Runs) -> list[Sheet]:
    made = []
    for merge, way in MERGES.items():
        for scale, text in SCALES.items():
            columns = by_size(runs, "addition", runs.normal(*tested(merge, scale)))
            caption = f"Addition, {way}, {text}: normalized accuracy, best bold"
            made += grid(runs, caption, "addition", columns, added(runs), best_but=name("none"))
    return made


def buffers(runs: Runs) -> list[Sheet]:
    made = []
    for key, text in {"tuned": "lambda tuned", "fixed": "lambda 0.3"}.items():
        columns = by_size(runs, "online", runs.normal(key, "test"), "budget", "no budget")
        caption = f"Tasks arriving one by one, {text}: normalized accuracy after the last"
        # the paper's lambda is one of sums of task vectors
        shown = [how for how in ONLINE if (key, how) != ("fixed", "magmax")]
        rows = {name(how): runs.find("online", how=how) for how in shown}
        made += grid(runs, caption, "online", columns, rows)
    return made


def by_m(runs: Runs) -> bytes | None:
    panels = {
        f"{way}\n{text}": {
            title: (runs.normal(*tested(merge, scale)), records)
            for title, records in added(runs).items()
        }
        for merge, way in MERGES.items()
        for scale, text in SCALES.items()
        if (merge, scale) != ("ties", "decoder")
    }
    title = f"Addition against M ({runs.what})"
    return drawn(title, panels, "num_bases", "normalized accuracy", 3)


def held(runs: Runs) -> bytes | None:
    """After the last task against the budget, and for one budget after each task."""

    def seen(records: list[Record]) -> list[Record]:
        return [
            {"cell": {"budget": point["seen"]}, "result": {"tuned": point},
             "train_seed": record["train_seed"]}
            for record in records for point in record["result"]["curve"] or ()
        ]  # fmt: skip

    def value(record: Record) -> float | None:
        found = record["result"]["tuned"]["test"]
        return over(runs.shares(record, found), found)

    records = {name(how): runs.find("online", how=how) for how in ONLINE}
    panels = {
        "After the last task": {how: (value, some) for how, some in records.items()},
        f"The tasks seen so far, M = {HALF}": {
            how: (value, seen(some)) for how, some in records.items()
        },
    }
    title = f"Tasks that arrive one by one, lambda tuned ({runs.what})"
    below = ("budget M", "tasks seen")
    return drawn(title, panels, "budget", "normalized accuracy", below=below)


def write(records: Sequence[Record], folder: Path, page: Path | None) -> list[Path]:
    """Write mini.json and the pictures into FOLDER, and the marked tables into PAGE."""
    every = [Runs(records, *pair, tuple(data.TASKS), tuple(data.UNSEEN)) for pair in pairs(records)]
    tables: sheets.Sheets = {"addition": addition, "buffers": buffers}
    return sheets.write("mini", every, tables, {"by_m": by_m, "buffers": held}, folder, page)
