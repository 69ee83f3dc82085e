"""The comparison's labels, its records, and the numbers that its tables and pictures show."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import ClassVar

import data
from plan import BASES, HALF, KEYS, SPANS, T
from study import tables
from study.cells import Record
from study.tables import Column, Value, Wanted, dig, known, over, value_of

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

    None where their mean is 0 up to the rounding of cells.jsonl, as PCA's is.
    """
    sums = row_sums(record)
    middle = abs(statistics.fmean(sums)) if sums else 0.0
    return (
        statistics.pstdev(sums) / middle if middle > 1e-5 * max(map(abs, sums), default=0) else None
    )


def at_half(labels: Iterable[str]) -> dict[str, Wanted]:
    """Rows of M = T/2, but for what has no bases or all."""
    sizes = {"none": T, "plain": None, "ascent": None}
    return {name(b): {"basis": b, "num_bases": sizes.get(b, HALF)} for b in labels}


def by_size(
    runs: tables.Runs, kind: str, value: Value, key: str = "num_bases", none: str = "no bases"
) -> dict[str, Column]:
    sizes = runs.having(kind, key)
    titles = [none if size is None else f"M = {size}" for size in sizes]
    return {t: Column(value, wanted={key: m}) for t, m in zip(titles, sizes, strict=True)}
