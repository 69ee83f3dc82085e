"""The comparison's tables as pictures: one colour per method in all of them."""

from __future__ import annotations

import math
from typing import Any

import sheets
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plan import HALF, T
from sheets import (
    MAIN,
    MERGES,
    NEGATION,
    ONLINE,
    SCALES,
    TA,
    TASKS,
    Runs,
    at_half,
    forgotten,
    name,
    tested,
)
from study import pictures as parts
from study.pictures import Points, bar, legend, page
from study.tables import Spread, Value, over, spread

# Okabe and Ito's colours, and darker ones of Tol's; markers differ as well
LOOKS = {
    "none": ("#000000", "s"),
    "ae_exact": ("#0072b2", "o"),
    "ae_adam_5": ("#d55e00", "D"),
    "ae_adam_1": ("#56b4e9", "d"),
    "ae_annealed": ("#882255", "v"),
    "balanced": ("#009e73", "^"),
    "linear_ae": ("#888888", "P"),
    "pca": ("#cc79a7", "X"),
    "rand_select": ("#e69f00", "*"),
    "ae_exact_mixed": ("#332288", "."),
    "rand_proj": ("#999933", "p"),
    "ascent": ("#661100", "h"),
    "magmax": ("#aa4499", "<"),
    "ae, other temperatures": ("#d55e00", "x"),
}
LOOKS |= {"plain": LOOKS["none"], "continual_ta": LOOKS["none"], "ae": LOOKS["ae_exact"]}


def draw(runs: Runs) -> dict[str, Figure]:
    """name -> picture; a picture without records is left out."""
    figures = {}
    with parts.styled():
        for make in (radar, by_m, negation, online, why):
            figure = make(runs)
            if figure is not None:
                title = f"{TITLES[make.__name__]} ({runs.what})"
                figures[make.__name__] = parts.title(figure, title)
    return figures


TITLES = {
    "radar": f"Normalized accuracy of each task, M = {HALF}, {SCALES['tasks']}",
    "by_m": "Addition: normalized accuracy against M",
    "negation": "Forgetting one task out of the sum of ten",
    "online": "Tasks that arrive one by one, lambda tuned",
    "why": f"Row sums of the encoder against what addition reaches, M = {HALF}",
}


def line(axes: Axes, label: str, points: Points, text: str = "") -> None:
    parts.line(axes, LOOKS[label], points, text or name(label))


def level(axes: Axes, label: str, cell: Spread | None, text: str = "") -> None:
    parts.level(axes, LOOKS[label], cell, text or name(label))


def addition(runs: Runs, value: Value, **wanted: Any) -> Spread | None:
    return runs.spread("addition", value, **wanted)


def radar(runs: Runs) -> Figure | None:
    figure = Figure(figsize=(6.5, 5.6), layout="constrained")
    axes: Any = figure.add_subplot(projection="polar")
    angles = [2 * math.pi * i / T for i in range(T)]
    drawn = False
    for label in ("none", "ae_adam_5", "balanced", "pca", "rand_select"):
        records = runs.find("addition", basis=label, num_bases=T if label == "none" else HALF)
        shares = [share for r in records if over(share := runs.share(r, *TA), TASKS) is not None]
        if not shares:
            continue
        drawn = True
        means = [sum(share[task] for share in shares) / len(shares) for task in TASKS]
        colour, marker = LOOKS[label]
        style = "--" if label == "none" else "-"
        axes.plot([*angles, 0.0], [*means, means[0]], style, color=colour, marker=marker,
                  markersize=4, label=name(label))  # fmt: skip
    axes.set_theta_zero_location("N")
    axes.set_xticks(angles, [task.replace("_", "\n") for task in TASKS])
    axes.tick_params(axis="x", pad=12)
    axes.set_ylim(0, None)
    axes.set_rlabel_position(180 / T)  # between two tasks
    legend(figure, [axes], 3)
    return figure if drawn else None


def by_m(runs: Runs) -> Figure | None:
    sizes = [size for size in runs.having("addition", "num_bases") if size]
    panels = [
        (merge, scale, runs.normal(*tested(merge, scale))) for merge in MERGES for scale in SCALES
    ]
    figure, axes = page(len(MERGES), len(SCALES), 6.6, sharex=True, sharey=True)
    for each, (merge, scale, value) in zip(axes, panels, strict=True):
        each.set_title(f"{MERGES[merge]}\n{SCALES[scale]}")
        level(each, "none", addition(runs, value, basis="none", num_bases=T))
        for label in MAIN[1:]:
            line(each, label, [(m, addition(runs, value, basis=label, num_bases=m)) for m in sizes])
    if not any(each.has_data() for each in axes):
        return None
    for each in axes:
        each.set_visible(each.has_data())
        each.set_xticks(sizes)
        each.set_xlabel("M")
    for each in axes[:: len(SCALES)]:
        each.set_ylabel("normalized accuracy")
    legend(figure, axes)
    return figure


def negation(runs: Runs) -> Figure | None:
    def at(key: str, basis: str, size: int | None) -> Spread | None:
        return runs.spread("negation", forgotten(key), basis=basis, num_bases=size)

    sizes = [size for size in runs.having("negation", "num_bases") if size]
    figure, axes = page(1, 2, 4.2)
    axes[0].set_title("Accuracy on the forgotten task")
    for label in NEGATION:
        line(axes[0], label, [(size, at("target", label, size)) for size in sizes])
        level(axes[0], label, at("target", label, None))
    axes[0].set_xticks(sizes)
    axes[0].set_xlabel("M")
    wanted = at_half(NEGATION).values()
    rows = [of for of in wanted if at("target", of["basis"], of["num_bases"])]
    for place, of in enumerate(rows):
        for shift, (key, alpha) in enumerate((("target", 1.0), ("control", 0.4))):
            how = {"color": LOOKS[of["basis"]][0], "alpha": alpha, "width": 0.38}
            bar(axes[1], place + 0.4 * shift - 0.2, at(key, of["basis"], of["num_bases"]), **how)
    axes[1].set_title(f"M = {HALF}: the task (full), the other nine (pale)")
    names = [name(of["basis"]) for of in rows]
    axes[1].set_xticks(range(len(rows)), names, rotation=30, ha="right")
    legend(figure, axes[:1], 4)
    return figure if rows or axes[0].has_data() else None


def online(runs: Runs) -> Figure | None:
    value = runs.normal("tuned", "test")
    budgets = [budget for budget in runs.having("online", "budget") if budget]
    figure, axes = page(1, 2, 4.2, sharey=True)
    for how in ONLINE:
        cells = [(b, runs.spread("online", value, how=how, budget=b)) for b in budgets]
        line(axes[0], how, cells)
        level(axes[0], how, runs.spread("online", value, how=how, budget=None))
        curves = [r for r in runs.find("online", how=how) if r["result"].get("curve")]
        # of one budget: the nearest to T/2
        sizes = {r["cell"].get("budget") for r in curves}
        shown = min(sizes, default=None, key=lambda b: abs((b or HALF) - HALF))
        found: dict[int, list[float | None]] = {}
        for record in (r for r in curves if r["cell"].get("budget") == shown):
            for point in record["result"]["curve"]:
                shares = runs.shares(record, point["test"])
                found.setdefault(point["seen"], []).append(over(shares, point["test"]))
        points = [(seen, spread(found[seen])) for seen in sorted(found)]
        line(axes[1], how, points, name(how) + (f", M = {shown}" if shown else ""))
    if not any(each.has_data() for each in axes):
        return None
    axes[0].set_title("After the last task")
    axes[0].set_xticks(budgets)
    axes[0].set_xlabel("budget, vectors held")
    axes[0].set_ylabel("normalized accuracy")
    axes[1].set_title("The tasks seen so far")
    axes[1].set_xlabel("tasks seen")
    for each in axes:
        each.legend(*each.get_legend_handles_labels(), loc="best", fontsize=7.5)
    return figure


def why(runs: Runs) -> Figure | None:
    found: dict[str, list[tuple[float, float]]] = {}
    for record, unevenness, accuracy in sheets.compared(runs):
        basis = record["cell"]["basis"]
        label = basis if basis in LOOKS else "ae, other temperatures"
        found.setdefault(label, []).append((unevenness, accuracy))
    figure, axes = page(1, 1, 4.2)
    for label, (colour, marker) in LOOKS.items():
        if label in found:
            x, y = zip(*found[label], strict=True)
            axes[0].scatter(x, y, 36, color=colour, marker=marker, alpha=0.8, linewidths=0.8,
                            label=name(label))  # fmt: skip
    axes[0].set_xlabel("variation of the row sums (standard deviation / mean)")
    axes[0].set_ylabel(f"normalized accuracy, {SCALES['tasks']}")
    legend(figure, axes)
    return figure if found else None
