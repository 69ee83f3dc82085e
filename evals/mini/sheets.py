"""The comparison's labels, its records, their numbers, and its tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import ClassVar

import data
from plan import BASES, DTYPES, HALF, KEYS, SPANS, T
from study import tables
from study.cells import Record
from study.tables import (
    Column,
    Sheet,
    Spread,
    Value,
    Wanted,
    dig,
    grid,
    known,
    over,
    sheet,
    spread,
    value_of,
)

TASKS = tuple(data.TASKS)
MAIN = ["none", *BASES, "rand_select"]
COOLEST_FIRST = [f"ae_adam_{t}" for t in ("0.5", 1, 2, 5, 10, 20)]
COOLEST_FIRST += ["ae_annealed", "ae_annealed_0.9", "ae_exact"]
NEGATION = "plain ascent rand_proj pca ae_adam_5 ae_exact balanced".split()
ONLINE = "continual_ta magmax rand_select ae balanced".split()
TRANSFER = ["base", "finetune", "none", "none_subsample", "rand_select", *SPANS]
TRANSFER += [f"{label}_turned" for label in SPANS]
OTHER_SIGNS = ("pca", "linear_ae")  # row sums of another sign or scale than a mixture's
MERGES = {"ta": "task arithmetic", "ties": "TIES"}
SCALES = {
    "bases": "lambda_scale: bases",
    "tasks": "lambda_scale: tasks",
    "decoder": "sum of reconstructions",  # under task arithmetic alone
}
NAMES = {  # of labels that do not speak for themselves; the others are names of bases in recipes
    "none": "all task vectors",
    "none_subsample": "all task vectors, M/T of the shots",
    "ae_exact": "ae, exact",
    "ae_exact_mixed": "ae, exact, mixed",
    "ae_annealed": "ae, Adam, annealed x0.8",
    "ae_annealed_0.9": "ae, Adam, annealed x0.9",
    "plain": "the task vector itself",
    "ascent": "gradient ascent",
    "base": "base, zero-shot",
    "finetune": "fine-tuned on the shots",
}


def name(label: str) -> str:
    if label.endswith("_turned"):
        return f"{name(label.removesuffix('_turned'))}, made orthogonal"
    temperature = label.removeprefix("ae_adam_")
    return NAMES.get(label, label if temperature == label else f"ae, Adam, t = {temperature}")


def sized(label: str, count: int | None) -> str:
    return name(label) + ("" if label == "none" or count is None else f", M = {count}")


class Runs(tables.Runs):
    """Records of ten tasks; a table never mixes bases of a store on disk with others."""

    tasks: ClassVar[tuple[str, ...]] = TASKS
    keys: ClassVar[tuple[str, ...]] = KEYS

    @staticmethod
    def is_apart(record: Record) -> bool:
        """Whether the bases are on disk, in some precision."""
        cell = record["cell"]
        return bool(cell.get("stored")) or cell.get("dtype", "float32") != "float32"

    def stored(self, record: Record) -> float | None:
        """The bytes of the bases over those of the specialists' files."""
        every = dig(self.reference.get(record["train_seed"]), "bytes")
        return value_of("bytes", per=every)(record) if every else None


def forgotten(key: str) -> Value:
    """The mean over the ten tasks, each forgotten by a model of its own."""

    def value(record: Record) -> float | None:
        return over({t: dig(record, "result", "tasks", t, key) for t in TASKS}, TASKS)

    return value


def tested(merge: str, scale: str) -> tuple[str, ...]:
    return ("merges", merge, "scales", scale, "test")


TA = tested("ta", "tasks")  # what most tables show


def gap(record: Record) -> float | None:
    """The loss over the least that any bases can have; unknown where that is 0."""
    found = dig(record, "result", "facts", "relative_gap")
    return 1 + found if known(found) else None


def row_sums(record: Record) -> list[float]:
    found = dig(record, "result", "row_sums") or []
    return found if len(found) == T and all(map(known, found)) else []


def variation(record: Record) -> float | None:
    """The coefficient of variation of the row sums, which are all there are, not a sample.

    None where their mean is 0 up to the rounding of shipped cells, as PCA's is.
    """
    sums = row_sums(record)
    middle = abs(statistics.fmean(sums)) if sums else 0.0
    return (
        statistics.pstdev(sums) / middle if middle > 1e-5 * max(map(abs, sums), default=0) else None
    )


def at_half(labels: Iterable[str]) -> dict[str, Wanted]:
    """Rows of M = T/2, except for labels without bases or with all."""
    sizes = {"none": T, "plain": None, "ascent": None}
    return {name(b): {"basis": b, "num_bases": sizes.get(b, HALF)} for b in labels}


def by_size(
    runs: tables.Runs, kind: str, value: Value, key: str = "num_bases", none: str = "no bases"
) -> dict[str, Column]:
    sizes = runs.having(kind, key)
    titles = [none if size is None else f"M = {size}" for size in sizes]
    return {t: Column(value, wanted={key: m}) for t, m in zip(titles, sizes, strict=True)}


def pearson(pairs: Sequence[tuple[float, float]]) -> float | None:
    """None for fewer than three pairs, and if one side does not vary."""
    try:
        return statistics.correlation(*zip(*pairs, strict=True)) if len(pairs) > 2 else None
    except statistics.StatisticsError:
        return None


def training(runs: Runs) -> list[Sheet]:
    paths: dict[str, tuple[str, ...]] = {"base": ("base",), "specialist": ("specialists",)}
    paths |= {"addition": TA}
    columns = {title: Column(runs.mean_of(*path)) for title, path in paths.items()}
    sources = [runs.find("reference")] * 2 + [runs.find("addition", basis="none", num_bases=T)]

    def row(values: Iterable[Value]) -> list[Spread | None]:
        return [spread(map(value, some)) for value, some in zip(values, sources, strict=True)]

    rows = {f"`{t}`": row(value_of(*path, t) for path in paths.values()) for t in data.ALL}
    rows["mean of ten"] = row(column.value for column in columns.values())
    rows["normalized"] = row(runs.normal(*path) for path in paths.values())
    caption = "Test accuracy: the base, each task's specialist, the sum of all task vectors"
    found = sheet(runs, caption, "reference", columns, rows, corner="task")
    return found if runs.reference else []


def addition(runs: Runs) -> list[Sheet]:
    sheets = []
    for merge, way in MERGES.items():
        for scale, text in SCALES.items():
            columns = by_size(runs, "addition", runs.normal(*tested(merge, scale)))
            caption = f"Addition, {way}, {text}: normalized accuracy, best bold"
            rows = {name(basis): {"basis": basis} for basis in MAIN}
            sheets += grid(runs, caption, "addition", columns, rows, best_but=name("none"))
    return sheets


def per_task(runs: Runs) -> list[Sheet]:
    def share_of(task: str) -> Value:
        return lambda record: runs.share(record, *TA).get(task)

    sheets = []
    for word, of, mean in (
        ("normalized accuracy", share_of, runs.normal(*TA)),
        ("accuracy", lambda task: value_of(*TA, task), runs.mean_of(*TA)),
    ):
        columns = {t.replace("_", " "): Column(of(t), sd=False) for t in TASKS}
        columns["mean"] = Column(mean)
        caption = f"Addition at M = {HALF}, task arithmetic, {SCALES['tasks']}: {word}"
        sheets += grid(runs, caption, "addition", columns, at_half(MAIN))
    return sheets


def encoder() -> dict[str, Column]:
    return {
        "loss / least possible": Column(gap, ".4f"),
        "row sums: variation": Column(variation),
        "least": Column(lambda record: min(row_sums(record), default=None)),
        "largest": Column(lambda record: max(row_sums(record), default=None)),
    }


def scales(runs: Runs) -> dict[str, Column]:
    return {text: Column(runs.normal(*tested("ta", scale))) for scale, text in SCALES.items()}


def temperature(runs: Runs) -> list[Sheet]:
    caption = f"Temperature t of the softmax at M = {HALF}: encoder, and normalized accuracy of "
    caption += "task arithmetic"
    return grid(runs, caption, "addition", encoder() | scales(runs), at_half(COOLEST_FIRST))


def precision(runs: Runs) -> list[Sheet]:
    columns = {}
    for dtype in DTYPES:
        wanted = {"dtype": dtype, "apart": True}
        size = value_of("bytes", per=1e6)
        columns[f"{dtype}, MB"] = Column(size, sd=False, wanted=wanted)
        columns[dtype] = Column(runs.normal(*TA), wanted=wanted)
    caption = f"Bases in stores at M = {HALF} in three precisions: size, and normalized accuracy "
    caption += f"of task arithmetic, {SCALES['tasks']}"
    return grid(runs, caption, "addition", columns, at_half(MAIN[1:]))


def cost(runs: Runs) -> list[Sheet]:
    rows = {
        f"{name(label)}, M = {size}": {"basis": label, "num_bases": size}
        for label in MAIN
        for size in runs.having("addition", "num_bases", basis=label)
    }
    search = value_of("merges", "ta", "scales", "bases", "seconds")
    columns = {
        "size": Column(runs.stored, ".1%", sd=False),
        "build, s": Column(value_of("seconds", "build")),
        "one merge, s": Column(value_of("merges", "ta", "seconds")),
        "search, s": Column(search, ".2f"),
    }
    caption = "Cost of task arithmetic (size: of the specialists' files, without PCA's mean, one "
    caption += "vector more that its reconstructions need; search: of lambda, by "
    caption += f"{SCALES['bases']}), and its normalized accuracy"
    return grid(runs, caption, "addition", columns | scales(runs), rows)


def negation(runs: Runs) -> list[Sheet]:
    columns = {
        "target before": Column(runs.mean_of("start")),
        "target after": Column(forgotten("target")),
        "control before": Column(forgotten("control_before")),
        "control after": Column(forgotten("control")),
        "relative error": Column(forgotten("relative_error")),
    }
    caption = f"Forgetting one task at M = {HALF}: accuracy on it and on the other nine, error of "
    caption += "its vector; means over the ten tasks"
    return grid(runs, caption, "negation", columns, at_half(NEGATION))


def negation_by_m(runs: Runs) -> list[Sheet]:
    columns = by_size(runs, "negation", forgotten("target"))
    caption = "Forgetting one task: accuracy on it (low is good), mean over the ten tasks"
    rows = {name(basis): {"basis": basis} for basis in NEGATION}
    return grid(runs, caption, "negation", columns, rows)


def online(runs: Runs) -> list[Sheet]:
    sheets = []
    for key, text in {"tuned": "lambda tuned", "fixed": "lambda 0.3"}.items():
        columns = by_size(runs, "online", runs.normal(key, "test"), "budget", "no budget")
        caption = f"Tasks arriving one by one, {text}: normalized accuracy after the last"
        # the paper's lambda is one of sums of task vectors
        shown = [how for how in ONLINE if (key, how) != ("fixed", "magmax")]
        rows = {name(how): {"how": how} for how in shown}
        sheets += grid(runs, caption, "online", columns, rows)
    return sheets


def transfer(runs: Runs) -> list[Sheet]:
    rows = {
        name(label) + ("" if size is None else f", M = {size}"): {"basis": label, "num_bases": size}
        for label in TRANSFER
        for size in runs.having("transfer", "num_bases", basis=label)
    }
    tasks = tuple(data.UNSEEN)
    values: dict[str, Value] = {"mean of both": lambda r: over(dig(r, "result", "tasks"), tasks)}
    values |= {f"`{task}`": value_of("tasks", task) for task in tasks}
    sheets = []
    for word, value in values.items():
        shots = runs.having("transfer", "shots")
        columns = {f"shots: {k or 0}": Column(value, wanted={"shots": k}) for k in shots}
        caption = f"Few-shot transfer to tasks that no specialist has: accuracy, {word}"
        sheets += grid(runs, caption, "transfer", columns, rows)
    return sheets


def compared(runs: Runs) -> list[tuple[Record, float, float]]:
    """Additions at M = T/2 whose row sums compare: each with its variation and its accuracy."""
    value = runs.normal(*TA)
    found = [(r, variation(r), value(r)) for r in runs.find("addition", num_bases=HALF)]
    return [
        (record, unevenness, accuracy)
        for record, unevenness, accuracy in found
        if unevenness is not None
        and accuracy is not None
        and record["cell"]["basis"] not in OTHER_SIGNS
    ]


def why(runs: Runs) -> list[Sheet]:
    """Do the row sums explain what addition loses? Over cells, and over the tasks in them."""
    cells = compared(runs)
    groups: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for record, _, _ in cells:
        shares, sums = runs.share(record, *TA), row_sums(record)
        for task, own in zip(TASKS, sums, strict=True):
            pair = (own / statistics.fmean(sums), shares[task])
            groups.setdefault((record["train_seed"], task), []).append(pair)
    # Some tasks are easier to merge than others; what is left within one has no part in that.
    within = []
    for group in groups.values():
        x, y = map(statistics.fmean, zip(*group, strict=True))
        within += [(a - x, b - y) for a, b in group]
    facts: dict[str, float | int | None] = {
        "cells": len(cells),
        "r_variation": pearson([(x, y) for _, x, y in cells]),
        "r_tasks": pearson([pair for group in groups.values() for pair in group]),
        "r_within_tasks": pearson(within),
    }
    r, r_tasks, r_within = ("-" if v is None else f"{v:.2f}" for v in list(facts.values())[1:])
    note = (
        f"Pearson's r between that variation and that accuracy: {r} over {len(cells)} cells of "
        f"M = {HALF}; between a task's row sum (over the mean row sum) and its normalized "
        f"accuracy: {r_tasks} over {len(within)} pairs, {r_within} with each task's mean over the "
        f"cells of its training seed taken off. Without {' and '.join(OTHER_SIGNS)}, whose row "
        "sums have other signs or another scale."
    )
    caption = f"Row sums of the encoder at M = {HALF}, which are what addition sees of it, and "
    caption += "normalized accuracy of task arithmetic"
    columns = encoder() | {SCALES["tasks"]: Column(runs.normal(*TA))}
    rows = at_half([*MAIN[1:], "ae_exact_mixed"])
    return grid(runs, caption, "addition", columns, rows, facts=facts, note=note)


SHEETS = {
    make.__name__: make
    for make in (training, addition, per_task, temperature, precision, cost,
                 negation, negation_by_m, online, transfer, why)
}  # fmt: skip
