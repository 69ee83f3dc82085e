#!/usr/bin/env python
"""Do merges of matrices as such do better than sums? Measured on the small benchmark.

    python evals/mini/matrices.py --preset small --seeds 0,1,2 --method full --method lora \\
        --out mini-runs --report evals/mini/results --page evals/mini/RESULTS.md

`basis_iso`, `basis_tsvm` and `basis_wudi` beside task arithmetic and TIES: over several bases with
lambda tuned and at its default, along lambda, and over tasks that arrive one by one as in the
paper's figure 5; and over the quickstart's models. Cells are computed one after another, in this
process, and kept as those of compare.py; models that are missing are trained.

lambda is the best of LAMBDAS on validation items (of n_i a task, M bases get n_i M/T), a grid with
equal ratios, so that merges with large and small coefficients are searched alike.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import cells
import click
import compare
import data
import pictures
import torch
import train
from plan import HALF, PLANS, Cell, Plan, T, reference
from report import write_study
from runs import Run, Weights, difference
from sheets import (
    Column,
    Record,
    Runs,
    Sheet,
    Spread,
    Value,
    dig,
    name,
    over,
    sheet,
    spread,
    value_of,
)
from transformers.utils import logging

import tvb_mergekit
from tvb_mergekit.settings import resolve_settings

TASKS = tuple(data.TASKS)
LAMBDAS = tuple(float(f"{10 ** (i / 10):.2g}") for i in range(-14, 5))  # 0.04, 0.05 ... 2, 2.5
ENOUGH = 0.95  # of the best accuracy
ANNEALED = 0.75  # of T: from this M on the paper anneals its encoder online
PARTS = ("addition", "online", "quickstart")


@dataclass(frozen=True)
class Merge:
    """A merge method, and the lambda that it has where none is searched."""

    title: str
    method: str
    fixed: float
    settings: dict[str, Any] = field(default_factory=dict)


MERGES = {
    "ta": Merge("task arithmetic", "basis_ta", 0.3),
    "ties": Merge("TIES", "basis_ties", 0.3),
    "iso": Merge("Iso-C", "basis_iso", 1.0),
    "iso_cts": Merge("Iso-CTS, common 0.8", "basis_iso", 1.0, {"common": 0.8}),
    "tsvm": Merge("TSV-M", "basis_tsvm", 1.0),
    "wudi": Merge("WUDI", "basis_wudi", 1.0),
}
# What is it of Iso-C that helps? The sum's matrices as they are, or as long as Iso-C's; and of all
# other tensors the mean, as there.
CONTROLS = {
    "ta_matrices": Merge("task arithmetic, others averaged", "basis_ta", 0.3),
    "ta_lengths": Merge("the same, matrices as long as Iso-C's", "basis_ta", 1.0),
}
ALL = MERGES | CONTROLS
ONLINE = ("ta", "tsvm", "iso", "wudi")
BASES = ("balanced", "ae_exact", "ae_adam_5", "pca", "rand_select")
BUFFERS = {"ae": "ae", "rand_select": "random buffer"}


# ------------------------------------------------------------------------------------------- cells


def addition_cells(plan: Plan) -> list[Cell]:
    every = [("none", T), *((label, m) for m in plan.num_bases if m < T for label in BASES)]
    return [_cell(label, count, plan.items, plan.tested) for label, count in every]


def _cell(label: str, count: int, items: int, tested: int) -> Cell:
    merges = [*(ALL if label == "none" else MERGES)]
    return {"kind": "matrices", "basis": label, "num_bases": count, "seed": 0, "dtype": "float32",
            "items": items, "tested": tested, "lambdas": [*LAMBDAS], "merges": merges}  # fmt: skip


def online_cells(plan: Plan) -> list[Cell]:
    """On half of the test items, as there are many cells."""
    found: list[Cell] = []
    for order in range(plan.orders):
        cell = {"kind": "matrices_online", "order": order, "tested": plan.tested // 2}
        found += [cell | {"how": how, "budget": None} for how in SINGLE]
        for budget in plan.budgets:
            annealed = {"annealed": budget >= ANNEALED * T}
            found.append(cell | {"how": "ae", "budget": budget} | annealed)
            found.append(cell | {"how": "rand_select", "budget": budget})
    return found


def direction(run: Run, bases: tvb_mergekit.Bases, how: str, scale: str = "tasks") -> Weights:
    """What the merge adds to the base at lambda = 1."""
    if how in CONTROLS:
        return _control(run, bases, how)
    merge = ALL[how]
    moved = tvb_mergekit.merge(
        bases, run.base, merge.method, lambda_=1.0, lambda_scale=scale, dtype=torch.float32,
        **merge.settings,
    )  # fmt: skip
    return difference(moved, run.base)


def _control(run: Run, bases: tvb_mergekit.Bases, how: str) -> Weights:
    found, total = direction(run, bases, "iso"), direction(run, bases, "ta")
    for tensor in found:
        if is_matrix(tensor, run.base[tensor].shape):
            ratio = torch.linalg.norm(found[tensor]) / torch.linalg.norm(total[tensor])
            found[tensor] = total[tensor] * (ratio if how == "ta_lengths" else 1)
    return found


# which tensors the new methods merge as matrices
is_matrix: Callable[[str, Sequence[int]], bool]
is_matrix = resolve_settings("basis_iso", {}, TASKS).is_matrix


def measure(run: Run, cell: Cell) -> dict[str, Any]:
    """Merges of some bases, lambda searched and not."""
    bases = cells.built(run, cell)
    items = max(1, round(cell["items"] * bases.num_bases / len(run.tasks)))
    merges = {}
    for how in cell["merges"]:
        along = cells.Direction(run, direction(run, bases, how))
        best, curve = along.search(cell["lambdas"], run.tasks, items)
        fixed = ALL[how].fixed
        merges[how] = {
            "lambda": best,
            "curve": curve,
            "tuned": along.accuracy(best, "test", run.tasks, cell["tested"]),
            "fixed": along.accuracy(fixed, "test", run.tasks, cell["tested"]),
        }
    return {"items": items, "merges": merges}


def measure_online(run: Run, cell: Cell) -> dict[str, Any]:
    """Tasks arrive one by one; what is held after the last, merged without a search."""
    order = cells.order_of(cell)
    if cell["how"] in SINGLE:
        vector, lambdas = SINGLE[cell["how"]](run, order)
        merged = {str(by): (by, vector) for by in lambdas}
    else:
        bases = held(run, cell, order)
        merged = {how: (ALL[how].fixed, direction(run, bases, how, "bases")) for how in ONLINE}
    return {
        "order": order,
        "merges": {
            how: {"lambda": by, "test": run.accuracy(run.shifted((by, vector)), "test", TASKS,
                                                     cell["tested"])}
            for how, (by, vector) in merged.items()
        },
    }  # fmt: skip


def held(run: Run, cell: Cell, order: Sequence[str]) -> tvb_mergekit.Bases:
    """The bases, or the task vectors, that a buffer holds in the end."""
    if cell["how"] == "rand_select":
        *_, kept = cells.kept_tasks(cell, order)
        return tvb_mergekit.build(run.base, {t: run.models[t] for t in kept}, basis="none")
    annealed = {"anneal_every": 500, "anneal_factor": 0.8} if cell["annealed"] else {}
    *_, bases = cells.algorithm_1(run, cell, order, **annealed)
    return bases


# ------------------------------------------------------ online, one vector: with its lambdas, fixed


def _sum(run: Run, order: Sequence[str]) -> tuple[Weights, Sequence[float]]:
    return cells.total(run, order), (cells.PAPERS_LAMBDA,)


def _magmax(run: Run, order: Sequence[str]) -> tuple[Weights, Sequence[float]]:
    *_, (vector, _) = cells.magmax(run, {}, order)
    return vector, (0.3, 0.5, 1.0)


def _ties(run: Run, order: Sequence[str], added: bool) -> tuple[Weights, Sequence[float]]:
    """Continual TIES: of the merged vector before and the new one.

    Published code (fusion_bench, by OPCM's authors) adds lambda times that to the vector before;
    otherwise it takes its place.
    """
    by = cells.PAPERS_LAMBDA if added else 1.0
    vector = {n: by * tensor for n, tensor in run.task_vector(order[0]).items()}
    for task in order[1:]:
        pair = {"before": run.shifted((1.0, vector)), "new": run.models[task]}
        both = direction(run, tvb_mergekit.build(run.base, pair, basis="none"), "ties")
        vector = {n: by * both[n] + (vector[n] if added else 0) for n in both}
    return vector, (1.0 if added else cells.PAPERS_LAMBDA,)


def _opcm(run: Run, order: Sequence[str], alpha: float = 0.5) -> tuple[Weights, Sequence[float]]:
    """OPCM (Tang et al., 2025, arXiv 2501.09522): without what the merged vector has already.

    Of a new matrix, in the singular vectors of the merged one, go the diagonal and the block of the
    directions that hold a share `alpha` of the singular values. All that was added up is then made
    as long as a task vector is on average.
    """
    merged, factor, lengths = run.task_vector(order[0]), 1.0, list[float]()
    lengths.append(cells.norm(merged))
    for task in order[1:]:
        new = run.task_vector(task)
        lengths.append(cells.norm(new))
        for tensor in new:
            if is_matrix(tensor, new[tensor].shape):
                new[tensor] = _outside(new[tensor], merged[tensor], alpha)
        both = {n: factor * merged[n] + new[n] for n in new}
        factor = cells.norm(both) / statistics.fmean(lengths)
        merged = {n: tensor / factor for n, tensor in both.items()}
    return merged, (1.0,)


def _outside(new: torch.Tensor, merged: torch.Tensor, alpha: float) -> torch.Tensor:
    left, sizes, right = torch.linalg.svd(merged.double())
    first = int((sizes.cumsum(0) / sizes.sum() > alpha).int().argmax())
    inner = left.T @ new.double() @ right.T
    inner.diagonal().zero_()
    inner[:first, :first] = 0
    outside: torch.Tensor = left @ inner @ right
    return outside.float()


SINGLE: dict[str, Callable[[Run, Sequence[str]], tuple[Weights, Sequence[float]]]] = {
    "continual_ta": _sum,
    "magmax": _magmax,
    "continual_ties": partial(_ties, added=True),
    "continual_ties_in_place": partial(_ties, added=False),
    "opcm": _opcm,
}
SINGLE_TITLES = {
    ("continual_ta", "0.3"): "continual TA at 0.3",
    ("magmax", "0.3"): "MagMax at 0.3",
    ("magmax", "0.5"): "MagMax at 0.5",
    ("magmax", "1.0"): "MagMax at 1",
    ("continual_ties", "1.0"): "continual TIES, added at 0.3",
    ("continual_ties_in_place", "0.3"): "continual TIES in place, at 0.3",
    ("opcm", "1.0"): "OPCM",
}

# ------------------------------------------------------------------------------------- quickstart

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"


class Quickstart(Run):
    """The quickstart's base and specialists, in float32."""

    def __init__(self, device: str) -> None:
        folders = (QUICKSTART / "models").iterdir()
        tasks = sorted(folder.name for folder in folders if folder.name != "base")
        super().__init__(QUICKSTART / "models", "", device, tasks)

    def items(self, task: str, split: str) -> list[data.Doc]:
        ending = {"validation": ".val.jsonl", "test": ".jsonl"}[split]
        lines = (QUICKSTART / "eval" / "data" / (task + ending)).read_text().splitlines()
        return [{"task": task} | json.loads(line) for line in lines]


def quickstart_records(out: Path, device: str, as_is: bool) -> list[Record]:
    """Over all eight and over four balanced bases, on 100 validation and 200 test items a task."""
    wanted = [_cell("none", 8, 100, 200), _cell("balanced", 4, 100, 200)]
    folder, about = QUICKSTART / "models", {"preset": "quickstart", "method": "full"}
    models = compare.fingerprint(folder, "", [p.name for p in sorted(folder.iterdir())])
    works = []
    for cell in wanted:
        work = compare.work_of(folder, "", device, models, cell)
        works.append(replace(work, file=out / "quickstart" / "cells" / work.file.name))
    if not as_is and not all(work.file.exists() for work in works):
        compare.take(Quickstart(device), "")
    found = compare.serially(works, "quickstart", as_is)
    return [about | {"train_seed": 0} | record for record in found]


# ------------------------------------------------------------------------------------------ tables

Rows = dict[str, list[Spread | None]]


def rows_of(label: str, runs: Runs) -> dict[str, dict[str, Any]]:
    sizes = runs.having("matrices", "num_bases", basis=label)
    suffix = {size: "" if label == "none" else f", M = {size}" for size in sizes}
    return {name(label) + suffix[m]: {"basis": label, "num_bases": m} for m in sizes}


def addition(runs: Runs) -> list[Sheet]:
    """A row for each basis and M, a column for each merge."""
    made = []
    for key, text in {"tuned": "lambda tuned", "fixed": "lambda not tuned"}.items():
        titles = {how: m.title + (f" at {m.fixed:g}" if key == "fixed" else "")
                  for how, m in MERGES.items()}  # fmt: skip
        columns = {titles[how]: Column(runs.normal("merges", how, key)) for how in MERGES}
        rows = {row: of for label in ("none", *BASES) for row, of in rows_of(label, runs).items()}
        caption = f"Merges of matrices and sums, {text}, lambda_scale: tasks: normalized accuracy"
        values = {row: cells_in(runs, columns.values(), of) for row, of in rows.items()}
        made += sheet(runs, caption, "matrices", columns, values, corner="bases")
    return made


def cells_in(runs: Runs, columns: Iterable[Column], of: Mapping[str, Any]) -> list[Spread | None]:
    records = runs.find("matrices", **of)
    return [spread(map(column.value, records)) for column in columns]


def range_of(lambdas: Sequence[float], curve: Sequence[float]) -> tuple[float, float]:
    """Between which lambdas a curve stays above 95 % of its best, straight between its points.

    At the end of the grid the range ends.
    """
    x, top = [math.log(by) for by in lambdas], max(curve)
    enough, best = ENOUGH * top, list(curve).index(top)

    def end(step: int) -> float:
        at = best
        while 0 <= at + step < len(curve) and curve[at + step] >= enough:
            at += step
        beyond = at + step
        if not 0 <= beyond < len(curve):
            return lambdas[at]
        part = (curve[at] - enough) / (curve[at] - curve[beyond])
        return math.exp(x[at] + part * (x[beyond] - x[at]))

    return end(-1), end(1)


def along(runs: Runs, basis: str = "none", count: int = T) -> list[Sheet]:
    """How far off lambda may be."""

    def ranged(how: str, value: Callable[[float, float], float]) -> Value:
        def of(record: Record) -> float | None:
            curve = dig(record, "result", "merges", how, "curve")
            return value(*range_of(record["cell"]["lambdas"], curve)) if curve else None

        return of

    def row(how: str) -> list[Value]:
        return [
            value_of("merges", how, "lambda"),
            runs.normal("merges", how, "tuned"),
            runs.normal("merges", how, "fixed"),
            ranged(how, lambda low, high: low),
            ranged(how, lambda low, high: high),
            ranged(how, lambda low, high: high / low),
        ]

    columns = {"best lambda": ".2f", "accuracy": ".3f", "not tuned": ".3f",
               "95 % from": ".2f", "to": ".2f", "ratio": ".1f"}  # fmt: skip
    records = runs.find("matrices", basis=basis, num_bases=count)
    rows = {
        f"{merge.title} ({merge.fixed:g})": [spread(map(value, records)) for value in row(how)]
        for how, merge in ALL.items()
    }
    caption = "Over all ten task vectors: the best lambda, normalized accuracy there and at the "
    caption += (
        "lambda in brackets, and between which lambdas validation accuracy is 95 % of the best"
    )
    shown = {title: Column(row("ta")[0], form) for title, form in columns.items()}
    return sheet(runs, caption, "matrices", shown, rows)


def per_task(runs: Runs) -> list[Sheet]:
    tasks = [t.replace("_", " ") for t in TASKS]
    own: list[Value] = [value_of("specialists", t) for t in TASKS]
    own.append(lambda record: over(dig(record, "result", "specialists")))
    rows: Rows = {"specialists": [spread(map(v, runs.find("reference"))) for v in own]}
    for label, count in (("none", T), ("balanced", HALF)):
        records = runs.find("matrices", basis=label, num_bases=count)
        for how in ("ta", "iso", "tsvm", "wudi"):
            values: list[Value] = [value_of("merges", how, "tuned", t) for t in TASKS]
            values.append(lambda record, how=how: over(  # type: ignore[misc]
                dig(record, "result", "merges", how, "tuned")))  # fmt: skip
            bases = "all" if label == "none" else f"{count} {label}"
            rows[f"{MERGES[how].title}, {bases}"] = [spread(map(v, records)) for v in values]
    columns = {title: Column(own[0], sd=title == "mean") for title in [*tasks, "mean"]}
    caption = "Accuracy on each task, lambda tuned"
    return sheet(runs, caption, "matrices", columns, rows)


def online_rows(runs: Runs) -> tuple[list[int | None], dict[str, tuple[str, str, Value]]]:
    """The budgets; and title -> how, merge and the value of a record."""
    budgets = runs.having("matrices_online", "budget")
    wanted = {f"{text}, {MERGES[m].title} at {MERGES[m].fixed:g}": (how, m)
              for how, text in BUFFERS.items() for m in ONLINE}  # fmt: skip
    wanted |= {title: key for key, title in SINGLE_TITLES.items()}
    return budgets, {
        title: (how, merge, runs.normal("merges", merge, "test"))
        for title, (how, merge) in wanted.items()
    }


def online(runs: Runs) -> list[Sheet]:
    budgets, rows = online_rows(runs)
    columns = {
        "one vector" if m is None else f"M = {m}": Column(runs.normal("test")) for m in budgets
    }
    values = {
        title: [spread(map(value, runs.find("matrices_online", how=how, budget=m)))
                for m in budgets]
        for title, (how, _, value) in rows.items()
    }  # fmt: skip
    caption = "Tasks arriving one by one, lambda not searched: normalized accuracy after the last"
    return sheet(runs, caption, "matrices_online", columns, values)


def quickstart(runs: Runs) -> list[Sheet]:
    columns, keys = {}, {"best lambda": "lambda", "tuned": "tuned", "not tuned": "fixed"}
    for size, text in ((8, "all eight"), (4, "4 balanced")):
        for title, key in keys.items():
            form = ".2f" if key == "lambda" else ".3f"
            columns[f"{text}: {title}"] = (size, key, form)

    def value(how: str, key: str) -> Value:
        def of(record: Record) -> float | None:
            found = dig(record, "result", "merges", how, key)
            return found if key == "lambda" or not found else over(found, found)

        return of

    rows = {
        f"{merge.title} ({merge.fixed:g})": [
            spread(map(value(how, key), runs.find("matrices", num_bases=size)))
            for size, key, _ in columns.values()
        ]
        for how, merge in ALL.items()
    }
    shown = {title: Column(value("ta", "tuned"), form) for title, (*_, form) in columns.items()}
    caption = "The quickstart's models, lambda_scale: tasks: mean accuracy on eight tasks"
    return sheet(runs, caption, "matrices", shown, rows)


def sheets(records: Sequence[Record], preset: str) -> dict[str, list[Sheet]]:
    full, lora = (Runs(records, preset, method) for method in train.METHODS)
    return {
        "addition": addition(full),
        "addition_lora": addition(lora),
        "lambda": along(full),
        "lambda_lora": along(lora),
        "per_task": per_task(full),
        "per_task_lora": per_task(lora),
        "online": online(full),
        "quickstart": quickstart(Runs(records, "quickstart", "full")),
    }


# ---------------------------------------------------------------------------------------- pictures

LOOKS = {"ta": "none", "ties": "pca", "iso": "ae_exact", "iso_cts": "ae_adam_1", "tsvm":
         "ae_adam_5", "wudi": "balanced", "ta_matrices": "linear_ae", "ta_lengths": "ae_annealed",
         "continual_ta": "none", "opcm": "ae_annealed", "magmax": "magmax"}  # fmt: skip
LEVELS = ("continual TA at 0.3", "MagMax at 0.5", "OPCM")


def curves(records: Sequence[Record], preset: str) -> bytes:
    """Validation accuracy along lambda, over all ten task vectors."""
    with pictures.styled():
        figure, axes = pictures.page(1, 2, 3.8, sharey=True)
        for each, method in zip(axes, train.METHODS, strict=True):
            runs = Runs(records, preset, method)
            found = runs.find("matrices", basis="none", num_bases=T)
            for how, merge in ALL.items():
                paths = [dig(r, "result", "merges", how, "curve") for r in found]
                by = zip(*(path for path in paths if path), strict=True)
                points = [*zip(LAMBDAS, map(spread, by), strict=False)]
                pictures.line(each, LOOKS[how], points, merge.title)
            each.set(xscale="log", xlabel="lambda", title=runs.what)
            each.set_xticks([0.05, 0.1, 0.2, 0.5, 1, 2], ["0.05", "0.1", "0.2", "0.5", "1", "2"])
            each.minorticks_off()
        axes[0].set_ylabel("validation accuracy")
        pictures.legend(figure, axes, 4)
        figure.suptitle("Merges of all ten task vectors along lambda", x=0.01, ha="left")
        return pictures.svg(figure)


def arriving(records: Sequence[Record], preset: str) -> bytes:
    """Accuracy after the last task against the budget; methods of one vector as dashed lines."""
    runs = Runs(records, preset, "full")
    budgets, rows = online_rows(runs)
    with pictures.styled():
        figure, axes = pictures.page(1, 2, 4.2, sharey=True)
        for each, buffer in zip(axes, BUFFERS, strict=True):
            each.set(title=BUFFERS[buffer], xlabel="budget M")
            for title, (how, merge, value) in rows.items():
                if how == buffer:
                    points = [
                        (m, spread(map(value, runs.find("matrices_online", how=how, budget=m))))
                        for m in budgets
                        if m is not None
                    ]
                    pictures.line(each, LOOKS[merge], points, title.partition(", ")[2])
                elif title in LEVELS:
                    found = runs.find("matrices_online", how=how)
                    pictures.level(each, LOOKS[how], spread(map(value, found)), title)
        axes[0].set_ylabel("normalized accuracy")
        pictures.legend(figure, axes, 4)
        title = f"Tasks that arrive one by one, lambda not searched ({runs.what})"
        figure.suptitle(title, x=0.01, ha="left")
        return pictures.svg(figure)


def write(records: Sequence[Record], preset: str, folder: Path, page: Path | None) -> list[Path]:
    """matrices.json and the pictures into FOLDER, and the tables that PAGE marks into PAGE."""
    drawn = {f"{preset}-matrices-lambda": curves(records, preset),
             f"{preset}-matrices-online": arriving(records, preset)}  # fmt: skip
    return write_study("matrices", records, sheets(records, preset), drawn, folder, page)


# ----------------------------------------------------------------------------------------- command


def records_of(
    preset: str, method: str, seed: int, out: Path, device: str, parts: Sequence[str], as_is: bool
) -> list[Record]:
    """What is there of a seed, after what is missing was measured."""
    folder = train.run_folder(out, preset, seed)
    if not as_is:
        train.train_run(preset, method, seed, out, device)
    models, plan = compare.fingerprint(folder, method), PLANS[preset]
    wanted = [reference(plan)[0]]
    wanted += addition_cells(plan) if "addition" in parts else []
    wanted += online_cells(plan) if "online" in parts and method == "full" else []
    works = [compare.work_of(folder, method, device, models, cell) for cell in wanted]
    found = compare.serially(works, f"{folder.name} {method}", as_is)
    return [{"preset": preset, "method": method, "train_seed": seed} | each for each in found]


cells.KINDS |= {"matrices": measure, "matrices_online": measure_online}


@click.command(epilog="Example: python evals/mini/matrices.py --preset tiny --seeds 0")
@compare.study_options
@click.option("--method", "methods", type=click.Choice(train.METHODS), multiple=True,
              default=("full",), show_default=True, help="May be repeated.")  # fmt: skip
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, default=PARTS,
              help="Only this; may be repeated. By default all.")  # fmt: skip
def main(
    preset: str,
    methods: tuple[str, ...],
    seeds: list[int],
    parts: tuple[str, ...],
    out: Path,
    device: str,
    folder: Path | None,
    as_is: bool,
    page: Path | None,
) -> None:
    """Measure merges of matrices beside task arithmetic and TIES, and report it."""
    logging.disable_progress_bar()
    on = train.chosen_device(device)
    records = list[Record]()
    for method in dict.fromkeys(methods):
        for seed in seeds:
            records += records_of(preset, method, seed, out, on, parts, as_is)
    if "quickstart" in parts:
        records += quickstart_records(out, on, as_is)
    if not records:
        raise click.ClickException(f"{out} has no results of {preset}: leave out --as-is")
    for path in write(records, preset, folder or out / f"report-{preset}", page):
        click.echo(path)


if __name__ == "__main__":
    main()
