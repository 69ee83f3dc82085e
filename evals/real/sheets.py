"""The benchmark's own tables and pictures: the paper's tables, and its theory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study import pictures, sheets
from study.cells import Record
from study.report import pairs
from study.sheets import name, scored
from study.tables import Column, Runs, Sheet, Spread, known, sheet, spread

from real.tasks import OUTSIDE, TASKS

# Tables 1 and 2 of the paper, normalized: RoBERTa-base, 12 tasks, 25 %; ViT-B/32, 8 tasks, 50 %
PAPER = {
    ("ta", 12): {"none": 0.777, "rand_select": 0.570, "pca": 0.565, "ae_adam_5": 0.592},
    ("ties", 12): {"none": 0.744, "rand_select": 0.568, "pca": 0.587, "ae_adam_5": 0.587},
    ("localize", 12): {"none": 0.936, "rand_select": 0.769, "pca": 0.763, "ae_adam_5": 0.901},
    ("ta", 8): {"none": 0.766, "rand_select": 0.698, "pca": 0.578, "ae_adam_5": 0.744},
    ("ties", 8): {"none": 0.81, "rand_select": 0.712, "pca": 0.576, "ae_adam_5": 0.741},
    ("localize", 8): {"none": 0.811, "rand_select": 0.580, "pca": 0.489, "ae_adam_5": 0.732},
}


def paper(runs: Runs) -> list[Sheet]:
    """The paper's bases under its three merges, beside its numbers."""
    hows = {"ta": "task arithmetic", "ties": "TIES", "localize": "Localize-and-Stitch",
            "dataless": "Localize-and-Stitch, dataless"}  # fmt: skip
    made, every = [], len(runs.tasks)
    for count in (every // 4, every // 2):
        columns, rows = dict[str, Column](), dict[str, list[Spread | None]]()
        told = {12: 3, 8: 4}.get(every) == count
        for label in ("none", "balanced", "ae_adam_5", "rand_select", "pca"):
            size = every if label == "none" else count
            row = rows.setdefault(name(label), [])
            for how, title in hows.items():
                columns[title] = Column()
                of = {"how": how, "basis": label, "num_bases": size}
                found = runs.find("matrices", **of) or runs.find("learned", **of)
                row.append(spread(map(scored(runs), found)))
                if told and (how, every) in PAPER:
                    columns[f"{title}: the paper"] = Column()
                    value = PAPER[how, every].get(label)
                    row.append(None if value is None else Spread(value, None, 1))
        caption = f"M = {count} of {every} task vectors: normalized accuracy"
        made += sheet(runs, caption, "matrices", columns, rows, corner="bases")
    return made


# ------------------------------------------------------------------------------------------ theory


def bounds(found: dict[str, Any], order: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """Each theorem's bounds, and the losses that were seen, in the order of the tasks."""
    c, epsilon, tasks = found["C"], found["epsilon"], {t: found["tasks"][t] for t in order}
    smooth = {task: abs(each["smoothness"]) for task, each in tasks.items()}
    beyond = math.sqrt(found["eigenvalues"][found["num_bases"]])
    made: dict[str, list[tuple[float, float]]] = {
        "addition": [(smooth[t] * c * (1 + epsilon), gaps(each["added"], order)[0])
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
                       for each in map(found["negated"].get, order)]  # fmt: skip
    return made


def gaps(added: dict[str, float], order: Sequence[str]) -> list[float]:
    """The gap of addition at lambda = 1/T, then at the best lambda; the keys are these lambdas."""
    return [added[by] for by in sorted(added, key=lambda by: abs(float(by) - 1 / len(order)))]


def theory(runs: Runs) -> list[Sheet]:
    every = [r["result"] | {"num_bases": r["cell"]["num_bases"]} for r in runs.find("theory")]
    rows = {}
    for task in runs.tasks if every else ():
        found = [each["tasks"][task] for each in every]
        place = [*runs.tasks].index(task)
        seen = [[bounds(each, runs.tasks)[how][place] for each in every]
                for how in ("addition", "an unseen task")]  # fmt: skip
        rows[f"`{task}`"] = [
            spread(each["norm"] for each in found),
            spread(100 * each["ratio"] for each in found),
            spread(each["largest cosine"] for each in found),
            spread(abs(each["smoothness"]) for each in found),
            spread(gaps(each["added"], runs.tasks)[-1] for each in found),
        ] + [spread(pair[k] for pair in some) for some in seen for k in (1, 0)]  # fmt: skip
    forms = {"norm": ".2f", "ratio, %": ".2f", "largest cosine": ".2f", "L": ".1f",
             "gap, best lambda": ".2f", "gap, 1/T": ".2f", "bound": ".0f",
             "gap, unseen": ".2f", "its bound": ".0f"}  # fmt: skip
    columns = {title: Column(form=form) for title, form in forms.items()}
    caption = "The paper's constants, and losses over the specialist's with their bounds: of "
    caption += "addition, and of the task through the bases of the others"
    facts = {}
    for key in ("C", "epsilon"):
        if value := spread(each[key] for each in every):
            facts[key] = value.mean
    for each in every[:1]:
        facts["lambda_{M+1}"] = each["eigenvalues"][each["num_bases"]]
        for title, points in bounds(each, runs.tasks).items():
            facts[f"{title}: seen"] = max(seen for _, seen in points)
            facts[f"{title}: bound"] = max(bound for bound, _ in points)
    note = "; ".join(f"{key} {value:.3g}" for key, value in facts.items())
    return sheet(runs, caption, "theory", columns, rows, corner="task", facts=facts, note=note)


def bounded(runs: Runs) -> bytes | None:
    """Each bound of the paper against the loss that was seen."""
    if not runs.find("theory"):
        return None
    with pictures.styled():
        figure, (axes,) = pictures.page(1, 1, 4.2)
        for record in runs.find("theory"):
            found = record["result"] | {"num_bases": record["cell"]["num_bases"]}
            for k, (title, points) in enumerate(bounds(found, runs.tasks).items()):
                x, y = zip(*((max(s, 1e-3), b) for b, s in points if known(s)), strict=True)
                axes.scatter(x, y, color=f"C{k}", marker="osD^"[k], label=title)
        axes.plot([1e-3, 1e2], [1e-3, 1e2], color="#888888", linestyle="--", label="equal")
        axes.set(xscale="log", yscale="log", xlabel="rise of the loss", ylabel="bound")
        pictures.legend(figure, [axes])
        return pictures.svg(pictures.title(figure, f"The paper's bounds ({runs.what})"))


def write(records: Sequence[Record], folder: Path, page: Path | None) -> list[Path]:
    """Write real.json and the pictures into FOLDER, and the marked tables into PAGE."""
    singles = {(r["preset"], r["method"]): r["result"]["specialists"]
               for r in records if r["cell"]["kind"] == "reference"}  # fmt: skip
    every = [Runs(records, *pair, [t for t in TASKS if t in singles.get(pair, TASKS)], OUTSIDE)
             for pair in pairs(records)]  # fmt: skip
    return sheets.write("real", every, {"paper": paper, "theory": theory}, {"theory": bounded},
                        folder, page)  # fmt: skip
