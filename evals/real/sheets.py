"""Tables and pictures of the benchmark on a real model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from study import pictures, tables
from study.cells import Record
from study.kinds.learned import WAYS
from study.kinds.matrices import ALL, ONLINE, SINGLE_TITLES
from study.kinds.theirs import METHODS
from study.report import pairs, write_study
from study.tables import Column, Sheet, Spread, Value, dig, known, over, sheet, spread, value_of

from real.plan import ALPHAS, KEYS, LEARNED, RIVALS, STITCHED, ZOOS
from real.tasks import OUTSIDE, SHIPPED, TASKS
from tvb_mergekit.score.pairs import difference

# Tables 1 and 2 of the paper, normalized: RoBERTa-base, 12 tasks, 25 %; ViT-B/32, 8 tasks, 50 %
PAPER = {
    ("ta", 12): {"none": 0.777, "rand_select": 0.570, "pca": 0.565, "ae_adam_5": 0.592},
    ("ties", 12): {"none": 0.744, "rand_select": 0.568, "pca": 0.587, "ae_adam_5": 0.587},
    ("localize", 12): {"none": 0.936, "rand_select": 0.769, "pca": 0.763, "ae_adam_5": 0.901},
    ("ta", 8): {"none": 0.766, "rand_select": 0.698, "pca": 0.578, "ae_adam_5": 0.744},
    ("ties", 8): {"none": 0.81, "rand_select": 0.712, "pca": 0.576, "ae_adam_5": 0.741},
    ("localize", 8): {"none": 0.811, "rand_select": 0.580, "pca": 0.489, "ae_adam_5": 0.732},
}
NAMES = {"none": "all task vectors", "ae_adam_5": "ae", "ae_exact": "ae, exact",
         "plain": "the task vector itself", "base": "base, zero-shot",
         "finetune": "fine-tuned on the examples",
         "none_subsample": "all task vectors, M/T of the examples"}  # fmt: skip
STITCH = {"localize": "Localize-and-Stitch", "dataless": "the same, dataless"}


class Runs(tables.Runs):
    keys = KEYS

    def __init__(self, records: Iterable[Record], preset: str, method: str):
        self.tasks = SHIPPED if method.endswith("-8") else TASKS  # type: ignore[misc]
        super().__init__(records, preset, method)

    @property
    def half(self) -> int:
        return len(self.tasks) // 2

    def having_cell(self, **wanted: Any) -> list[Record]:
        """Records of any kind whose cells have all wanted values."""
        return [r for r in self.records
                if all(r["cell"].get(key) == value for key, value in wanted.items())]  # fmt: skip

    def mean(self, record: Record) -> float | None:
        return over(self.shares(record, outcome(record)["tuned"]), self.tasks)

    def p(self, one: Sequence[Record], other: Sequence[Record]) -> Spread | None:
        """The paired test of two merges over all items, tasks weighted by their specialists."""
        parts = []
        for a in one:
            for b in (r for r in other if r["train_seed"] == a["train_seed"]):
                own = self.reference[a["train_seed"]]["specialists"]
                x, y = outcome(a).get("items"), outcome(b).get("items")
                if x and y:
                    parts += [(np.array(x[t]) - np.array(y[t])) / (own[t] * len(self.tasks))
                              for t in self.tasks if own[t]]  # fmt: skip
        return Spread(difference(parts).p, None, 1) if parts else None


def outcome(record: Record) -> dict[str, Any]:
    """Scores of the best and of the fixed lambda, and items, of any kind of merge."""
    result, cell = record["result"], record["cell"]
    if cell["kind"] == "learned":
        return {"tuned": result["test"], "items": result.get("each")}
    found: dict[str, Any] = result["merges"][cell["how"]] if "merges" in result else result
    return found


def name(label: str, count: int | None = None) -> str:
    every = label in ("none", "plain", "base", "finetune")
    return NAMES.get(label, label) + ("" if every or count is None else f", M = {count}")


def shown(columns: dict[str, str]) -> dict[str, Column]:
    """Columns of rows that are computed already."""
    return {title: Column(lambda record: None, form) for title, form in columns.items()}


def specialists(runs: Runs) -> list[Sheet]:
    """Each base score beside its specialist's, with the paired test of the two."""
    rows = {}
    for task in runs.tasks:
        parts = [
            np.array(found["items"]["specialists"][task]) - np.array(found["items"]["base"][task])
            for found in runs.reference.values()
            if "items" in found
        ]
        both = [spread(dig(found, key, task) for found in runs.reference.values())
                for key in ("base", "specialists")]  # fmt: skip
        rows[f"`{task}`"] = [*both, Spread(difference(parts).p, None, 1) if parts else None]
    for task in OUTSIDE:
        base = spread(dig(found, "base", task) for found in runs.reference.values())
        rows[f"`{task}`"] = [base, None, None]
    columns = shown({"base": ".3f", "specialist": ".3f", "p": ".1e"})
    return sheet(runs, "Test scores of the base and of each task's specialist", "reference",
                 columns, rows, corner="task")  # fmt: skip


def paper(runs: Runs) -> list[Sheet]:
    """The paper's bases under its three merges, beside its numbers."""
    hows = {"ta": "task arithmetic", "ties": "TIES", **STITCH}
    made = []
    for count in (len(runs.tasks) // 4, runs.half):
        columns, rows = {}, dict[str, list[Spread | None]]()
        told = {12: 3, 8: 4}[len(runs.tasks)] == count
        for label in ("none", "balanced", "ae_adam_5", "rand_select", "pca"):
            size = len(runs.tasks) if label == "none" else count
            row = rows.setdefault(name(label), [])
            for how, title in hows.items():
                columns[title] = ".3f"
                found = runs.having_cell(how=how, basis=label, num_bases=size)
                row.append(spread(map(runs.mean, found)))
                if told and (how, len(runs.tasks)) in PAPER:
                    columns[f"{title}: the paper"] = ".3f"
                    value = PAPER[how, len(runs.tasks)].get(label)
                    row.append(None if value is None else Spread(value, None, 1))
        caption = f"M = {count} of {len(runs.tasks)} task vectors: normalized accuracy"
        made += sheet(runs, caption, "matrices", shown(columns), rows, corner="bases")
    return made


def merges(runs: Runs) -> list[Sheet]:
    """All merges over all task vectors, and over few bases."""
    titles = {how: merge.title for how, merge in ALL.items()}
    titles |= {how: WAYS[how].title for how in (*STITCHED, *LEARNED)}
    every, rows = len(runs.tasks), dict[str, list[Spread | None]]()
    sums = runs.find("matrices", how="ta", basis="none")
    kinds = [("matrices", how) for how in ALL] + [("learned", h) for h in (*STITCHED, *LEARNED)]
    kinds += [("theirs", how) for how in METHODS]
    size = spread(dig(outcome(r), "length") for r in sums)
    for kind, how in kinds:
        found = runs.find(kind, how=how, basis="none", num_bases=every)
        lengths = spread(dig(outcome(r), "length") for r in found)
        ratio = Spread(lengths.mean / size.mean, None, lengths.n) if lengths and size else None
        fixed = [outcome(r).get("fixed") for r in found]
        row = [
            spread(map(runs.mean, found)),
            runs.p(found, sums) if (kind, how) != ("matrices", "ta") else None,
            spread(dig(outcome(r), "lambda") for r in found),
            spread(over(runs.shares(r, f), runs.tasks) for r, f in zip(found, fixed, strict=True)
                   if f),
            ratio,
        ]  # fmt: skip
        for label, count in (("balanced", runs.half), ("balanced", every // 4),
                             ("ae_exact", runs.half)):  # fmt: skip
            few = runs.find(kind, how=how, basis=label, num_bases=count)
            row.append(spread(map(runs.mean, few)))
        rows[f"mergekit's `{how}`" if kind == "theirs" else titles[how]] = row
    columns = shown(
        {
            "all": ".3f",
            "p": ".2g",
            "lambda": ".2f",
            "default lambda": ".3f",
            "length": ".2f",
            f"balanced, M = {runs.half}": ".3f",
            f"balanced, M = {every // 4}": ".3f",
            f"ae, exact, M = {runs.half}": ".3f",
        }
    )
    caption = "Merges over all task vectors and over few bases: normalized accuracy at the best "
    caption += "lambda; p of the paired test against addition; length of the difference over the "
    caption += "sum's, at lambda 1"
    return sheet(runs, caption, "matrices", columns, rows)  # fmt: skip


def bytes_(runs: Runs) -> list[Sheet]:
    hows = ["all", *(f"zoo_{bits}" for bits in ZOOS), f"balanced_{runs.half}"]
    hows += [f"merged_{how}" for how in RIVALS]
    rows = {}
    for how in hows:
        found = runs.find("bits", how=how)
        values: list[Value] = [
            value_of("bits"), value_of("mean_error"), runs.normal("specialists"),
            runs.normal("merges", "ta", "scales", "tasks", "test"), forgotten("target", runs),
        ]  # fmt: skip
        title = how.removeprefix("merged_").replace("zoo_", "store, bits: ")
        rows[title] = [spread(map(value, found)) for value in values]
    columns = {"bits": ".2f", "error": ".3f", "specialists": ".3f", "addition": ".3f",
               "forgetting": ".3f"}  # fmt: skip
    caption = "Bits a parameter, relative error of a task vector, normalized accuracy of the "
    caption += "specialists and of addition, score of a forgotten task (low is good)"
    return sheet(runs, caption, "bits", shown(columns), rows, corner="kept as")


def forgotten(key: str, runs: Runs) -> Value:
    return lambda record: over(
        {t: dig(record, "result", "tasks", t, key) for t in runs.tasks}, runs.tasks
    )


def negation(runs: Runs) -> list[Sheet]:
    start: Value = runs.mean_of("start")
    values: list[Value] = [start, forgotten("target", runs), forgotten("control_before", runs),
                           forgotten("control", runs), forgotten("relative_error", runs),
                           value_of("own", "start"), forgotten("own", runs)]  # fmt: skip
    rows = {
        name(label, count): [
            spread(map(value, runs.find("negation", basis=label, num_bases=count)))
            for value in values
        ]
        for label in ("plain", "ae_exact", "balanced", "pca", "rand_proj")
        for count in runs.having("negation", "num_bases", basis=label)
    }
    columns = shown({"target before": ".3f", "target after": ".3f", "control before": ".3f",
                     "control after": ".3f", "relative error": ".3f", "text loss before": ".3f",
                     "text loss after": ".3f"})  # fmt: skip
    caption = "Each task forgotten from the sum, alpha up to " + str(max(ALPHAS))
    caption += ", where 95 % of the other tasks are kept: means over the tasks; loss of a token "
    caption += "of plain sentences"
    return sheet(runs, caption, "negation", columns, rows)


def online(runs: Runs) -> list[Sheet]:
    budgets = runs.having("matrices_online", "budget")
    wanted = {f"{how}, {ALL[m].title}": (how, m) for how in ("ae", "rand_select") for m in ONLINE}
    wanted |= {title: key for key, title in SINGLE_TITLES.items()}
    rows = {
        title: [
            runs.spread("matrices_online", runs.normal("merges", m, "test"), how=how, budget=b)
            for b in budgets
        ]
        for title, (how, m) in wanted.items()
    }
    columns = {"one vector" if b is None else f"M = {b}": ".3f" for b in budgets}
    caption = "Tasks arriving one by one, lambda not searched: normalized accuracy after the last"
    return sheet(runs, caption, "matrices_online", shown(columns), rows)


def transfer(runs: Runs) -> list[Sheet]:
    rows = {}
    for label in ("base", "finetune", "none", "none_subsample", "balanced", "ae_adam_5",
                  "rand_select", "pca"):  # fmt: skip
        found = runs.find("transfer", basis=label)
        values: list[Value] = [lambda r: over(dig(r, "result", "tasks"), OUTSIDE)]
        values += [value_of("tasks", task) for task in OUTSIDE]
        count = found[0]["cell"]["num_bases"] if found else None
        rows[name(label, count)] = [spread(map(value, found)) for value in values]
    columns = {"mean": ".3f"} | {f"`{task}`": ".3f" for task in OUTSIDE}
    caption = "Few-shot transfer to tasks that no specialist has: test scores"
    return sheet(runs, caption, "transfer", shown(columns), rows)


# ------------------------------------------------------------------------------------------ theory


def bounds(found: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Each theorem's bounds, and the losses that were seen, in the order of the tasks."""
    c, epsilon, tasks = found["C"], found["epsilon"], found["tasks"]
    smooth = {task: each["smoothness"] for task, each in tasks.items()}
    beyond = math.sqrt(found["eigenvalues"][found["num_bases"]])
    made: dict[str, list[tuple[float, float]]] = {
        "addition": [(smooth[t] * c * (1 + epsilon), next(iter(each["added"].values())))
                     for t, each in tasks.items()],
        "an unseen task": [
            (smooth[t] * (c - each["unseen"]["rho"] * each["unseen"]["inner"]),
             each["unseen"]["seen"]) for t, each in tasks.items()],
    }  # fmt: skip
    largest = max(smooth.values())
    for title, how, factor in (("negation", "own", 1.5 + epsilon),
                               ("negation over bases", "rebuilt", 2.5 + 2 * epsilon)):  # fmt: skip
        more = largest * beyond**2 if how == "rebuilt" else 0.0
        made[title] = [(largest * c * factor + more, each[how])
                       for each in found["negated"].values()]  # fmt: skip
    return made


def theory(runs: Runs) -> list[Sheet]:
    every = [r["result"] | {"num_bases": r["cell"]["num_bases"]} for r in runs.find("theory")]
    rows = {}
    for task in runs.tasks if every else ():
        found = [each["tasks"][task] for each in every]
        place = [*runs.tasks].index(task)
        seen = [[each[how][place] for each in map(bounds, every)]
                for how in ("addition", "an unseen task")]  # fmt: skip
        rows[f"`{task}`"] = [
            spread(each["norm"] for each in found),
            spread(100 * each["ratio"] for each in found),
            spread(each["largest cosine"] for each in found),
            spread(each["smoothness"] for each in found),
            spread([*each["added"].values()][-1] for each in found),
        ] + [spread(pair[k] for pair in some) for some in seen for k in (1, 0)]  # fmt: skip
    columns = shown({"norm": ".2f", "ratio, %": ".2f", "largest cosine": ".2f", "L": ".1f",
                     "gap, best lambda": ".2f", "gap, 1/T": ".2f", "bound": ".0f",
                     "gap, unseen": ".2f", "its bound": ".0f"})  # fmt: skip
    caption = "The paper's constants, and losses over the specialist's with their bounds: of "
    caption += "addition, and of the task through the bases of the others"
    facts = {}
    for key in ("C", "epsilon"):
        if value := spread(each[key] for each in every):
            facts[key] = value.mean
    for each in every[:1]:
        facts["lambda_{M+1}"] = each["eigenvalues"][each["num_bases"]]
        for title, points in bounds(each).items():
            facts[f"{title}: seen"] = max(seen for _, seen in points)
            facts[f"{title}: bound"] = max(bound for bound, _ in points)
    note = "; ".join(f"{key} {value:.3g}" for key, value in facts.items())
    return sheet(runs, caption, "theory", columns, rows, corner="task", facts=facts, note=note)


SHEETS: dict[str, Callable[[Runs], list[Sheet]]] = {
    "specialists": specialists, "paper": paper, "merges": merges, "bytes": bytes_,
    "negation": negation, "online": online, "transfer": transfer, "theory": theory,
}  # fmt: skip

# ---------------------------------------------------------------------------------------- pictures

BARS = ("ta", "ties", "iso", "tsvm", "wudi")


def kept(runs: Runs) -> bytes:
    """The share of each specialist's score that merges keep."""
    with pictures.styled():
        figure, (axes,) = pictures.page(1, 1, 4.2)
        for k, how in enumerate(BARS):
            found = runs.find("matrices", how=how, basis="none")
            for place, task in enumerate(runs.tasks):
                cell = spread(runs.shares(r, outcome(r)["tuned"]).get(task) for r in found)
                pictures.bar(axes, place + (k - 2) * 0.16, cell, width=0.16, color=f"C{k}",
                             label=ALL[how].title)  # fmt: skip
        axes.set_xticks(range(len(runs.tasks)), [t.replace("_", "\n") for t in runs.tasks])
        axes.set_ylabel("score over the specialist's")
        pictures.legend(figure, [axes])
        return pictures.svg(pictures.title(figure, f"What each task keeps ({runs.what})"))


def bounded(runs: Runs) -> bytes:
    """Each bound of the paper against the loss that was seen."""
    with pictures.styled():
        figure, (axes,) = pictures.page(1, 1, 4.2)
        for record in runs.find("theory"):
            found = record["result"] | {"num_bases": record["cell"]["num_bases"]}
            for k, (title, points) in enumerate(bounds(found).items()):
                x, y = zip(*((max(s, 1e-3), b) for b, s in points if known(s)), strict=True)
                axes.scatter(x, y, color=f"C{k}", marker="osD^"[k], label=title)
        axes.plot([1e-3, 1e2], [1e-3, 1e2], color="#888888", linestyle="--", label="equal")
        axes.set(xscale="log", yscale="log", xlabel="rise of the loss", ylabel="bound")
        pictures.legend(figure, [axes])
        return pictures.svg(pictures.title(figure, f"The paper's bounds ({runs.what})"))


def write(records: Sequence[Record], folder: Path, page: Path | None) -> list[Path]:
    """Write study.json and the pictures into FOLDER, and the marked tables into PAGE."""
    every = [Runs(records, *pair) for pair in pairs(records)]
    sheets = {f"{r.method}_{title}": make(r) for r in every for title, make in SHEETS.items()}
    drawn = {f"{r.method}-kept": kept(r) for r in every if r.find("matrices")}
    drawn |= {f"{r.method}-theory": bounded(r) for r in every if r.find("theory")}
    return write_study("real", every, sheets, drawn, folder, page)
