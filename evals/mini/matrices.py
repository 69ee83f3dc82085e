#!/usr/bin/env python
r"""Merges of matrices against sums, on the small benchmark.

    python evals/mini/matrices.py --preset small --seeds 0,1,2 --method full --method lora \
        --out mini-runs --report evals/mini/results --page evals/mini/RESULTS.md

`basis_iso`, `basis_tsvm` and `basis_wudi` next to task arithmetic and TIES: over bases, along
lambda, over tasks that arrive one by one as in the paper's figure 5, and over the quickstart's
models. Cells are computed in this process; missing models are trained.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
import train
from pictures import LOOKS
from plan import HALF, KEYS, PLANS, T, matrices, matrices_cell, matrices_online, reference
from runs import quickstart as shipped
from runs import trained
from sheets import TASKS, Runs, sized
from study import pictures
from study.cells import Record, measured
from study.command import Asked, study_options
from study.kinds import KINDS
from study.kinds.matrices import ALL, LAMBDAS, MERGES, ONLINE, SINGLE_TITLES
from study.report import pairs, write_study
from study.tables import Column, Sheet, Value, dig, grid, over, sheet, spread, value_of

BASES = ("balanced", "ae_exact", "ae_adam_5", "pca", "rand_select")
BUFFERS = {"ae": "ae", "rand_select": "random buffer"}
ENOUGH = 0.95  # of the best accuracy
PARTS = ("addition", "online", "quickstart")

# ------------------------------------------------------------------------------------------ tables


def addition(runs: Runs) -> list[Sheet]:
    """A row for each basis and M, a column for each merge."""
    made = []
    for key, text in {"tuned": "lambda tuned", "fixed": "lambda not tuned"}.items():
        columns = {
            m.title + (f" at {m.fixed:g}" if key == "fixed" else ""): Column(
                runs.normal("merges", how, key)
            )
            for how, m in MERGES.items()
        }
        labels = ("none", *BASES)
        sizes = [(b, m) for b in labels for m in runs.having("matrices", "num_bases", basis=b)]
        rows = {sized(b, m): {"basis": b, "num_bases": m} for b, m in sizes}
        caption = f"Merges of matrices and sums, {text}, lambda_scale: tasks: normalized accuracy"
        made += grid(runs, caption, "matrices", columns, rows, corner="bases")
    return made


def range_of(lambdas: Sequence[float], curve: Sequence[float]) -> tuple[float, float]:
    """The lambdas around the best with 95 % of its accuracy; straight between points.

    The range ends with the grid.
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
    """The tolerance of lambda."""

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
    own.append(lambda record: over(dig(record, "result", "specialists"), TASKS))
    rows = {"specialists": [spread(map(v, runs.find("reference"))) for v in own]}
    for label, count in (("none", T), ("balanced", HALF)):
        records = runs.find("matrices", basis=label, num_bases=count)
        for how in ("ta", "iso", "tsvm", "wudi"):
            values: list[Value] = [value_of("merges", how, "tuned", t) for t in TASKS]
            values.append(lambda record, how=how: over(  # type: ignore[misc]
                dig(record, "result", "merges", how, "tuned"), TASKS))  # fmt: skip
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
        title: [runs.spread("matrices_online", value, how=how, budget=m) for m in budgets]
        for title, (how, _, value) in rows.items()
    }
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
            runs.spread("matrices", value(how, key), num_bases=size)
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

PICTURED = {"ta": "none", "ties": "pca", "iso": "ae_exact", "iso_cts": "ae_adam_1", "tsvm":
         "ae_adam_5", "wudi": "balanced", "ta_matrices": "linear_ae", "ta_left_out": "rand_select",
         "ta_lengths": "ae_annealed",
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
                pictures.line(each, LOOKS[PICTURED[how]], points, merge.title)
            each.set(xscale="log", xlabel="lambda", title=runs.what)
            each.set_xticks([0.05, 0.1, 0.2, 0.5, 1, 2], ["0.05", "0.1", "0.2", "0.5", "1", "2"])
            each.minorticks_off()
        axes[0].set_ylabel("validation accuracy")
        pictures.legend(figure, axes, 4)
        return pictures.svg(pictures.title(figure, "Merges of all ten task vectors along lambda"))


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
                        (m, runs.spread("matrices_online", value, how=how, budget=m))
                        for m in budgets
                        if m is not None
                    ]
                    pictures.line(each, LOOKS[PICTURED[merge]], points, title.partition(", ")[2])
                elif title in LEVELS:
                    found = runs.spread("matrices_online", value, how=how)
                    pictures.level(each, LOOKS[PICTURED[how]], found, title)
        axes[0].set_ylabel("normalized accuracy")
        pictures.legend(figure, axes, 4)
        title = f"Tasks that arrive one by one, lambda not searched ({runs.what})"
        return pictures.svg(pictures.title(figure, title))


def write(records: Sequence[Record], preset: str, folder: Path, page: Path | None) -> list[Path]:
    """Write matrices.json and the pictures into FOLDER, and the marked tables into PAGE."""
    every = [Runs(records, *pair) for pair in pairs(records)]
    drawn = {f"{preset}-matrices-lambda": curves(records, preset),
             f"{preset}-matrices-online": arriving(records, preset)}  # fmt: skip
    return write_study("matrices", every, sheets(records, preset), drawn, folder, page)


# ----------------------------------------------------------------------------------------- command


def records_of(asked: Asked, method: str, seed: int, parts: Sequence[str]) -> list[Record]:
    """The records of a run, after missing cells were measured."""
    source = trained(asked.preset, method, seed, asked.out, asked.device, asked.as_is)
    plan = PLANS[asked.preset]
    wanted = [reference(plan)[0]]
    wanted += matrices(plan, BASES) if "addition" in parts else []
    wanted += matrices_online(plan) if "online" in parts and method == "full" else []
    return measured(source, wanted, KINDS, KEYS, as_is=asked.as_is)


def quickstart_records(asked: Asked) -> list[Record]:
    """Over all eight and over four balanced bases, on 100 validation and 200 test items a task."""
    wanted = [matrices_cell("none", 8, 100, 200), matrices_cell("balanced", 4, 100, 200)]
    source = shipped(asked.out, asked.device)
    return measured(source, wanted, KINDS, KEYS, as_is=asked.as_is)


@click.command(epilog="Example: python evals/mini/matrices.py --preset tiny --seeds 0")
@study_options(list(PLANS), "tiny", "mini-runs")
@click.option("--method", "methods", type=click.Choice(train.METHODS), multiple=True,
              default=("full",), show_default=True, help="May be repeated.")  # fmt: skip
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, default=PARTS,
              help="Only this; may be repeated. By default all.")  # fmt: skip
def main(asked: Asked, methods: tuple[str, ...], parts: tuple[str, ...]) -> None:
    """Measure merges of matrices beside task arithmetic and TIES, and report it."""
    records = list[Record]()
    for method in dict.fromkeys(methods):
        for seed in asked.seeds:
            records += records_of(asked, method, seed, parts)
    records += quickstart_records(asked) if "quickstart" in parts else []
    asked.finish(records, lambda found, folder: write(found, asked.preset, folder, asked.page))


if __name__ == "__main__":
    main()
