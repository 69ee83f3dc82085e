"""The scores of several models on one axis per task or category, in percent of the specialists'.

A table always gives the same bytes. matplotlib (the extra `plot`) is imported only inside the
functions.
"""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tvb_mergekit.figures import DARK, LABEL, rendered
from tvb_mergekit.score.benchmark import Category, Task
from tvb_mergekit.score.table import Table
from tvb_mergekit.tables import printable, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

By = Literal["tasks", "categories"]
MOST = 200.0  # percent; larger values are drawn there
# Contrast to each wedge at least 3:1 (WCAG 2.2, 1.4.11); markers and dashes differ too.
LINES = ("#0072b2", "#a84300", "#00664a", "#9c3d74", "#7a5400", "#5b3fa0", "#000000")
BASE = "#666666"
MARKERS, DASHES = "osD^vPX*", ("-", "--", "-.", ":")
# Tol's pale colours, for the categories behind the lines
WEDGES = ("#bbccee", "#ccddaa", "#eeeebb", "#ffcccc", "#cceeff", "#dddddd")


def radar(table: Table, kind: str, by: By = "tasks") -> bytes:
    """Draw the compared categories as png, svg or pdf; a missing score is a gap in its line.

    The table needs specialists.
    """
    return rendered(lambda: _figure(table, by), kind)


def heading(table: Table) -> str:
    what = f"{table.benchmark.title}: percent of the specialists' scores"
    return what + table.title.removeprefix(table.benchmark.title)


def _figure(table: Table, by: By) -> Figure:
    from matplotlib.figure import Figure

    columns = [column for column in table.columns if column.kind != "specialists"]
    parts: list[Task | Category] = [*table.compared]
    if by == "tasks":
        parts = [task for category in table.compared for task in category.tasks]
    values = np.array(  # [columns, spokes], None is NaN
        [[table.relative(column, part) for part in parts] for column in columns], dtype=float
    ).reshape(len(columns), len(parts))
    title = heading(table)
    if (values > MOST).any():
        title += f"; what is above {MOST:.0f} is drawn at {MOST:.0f}"
    values = np.minimum(values, MOST)
    highest = float(np.max(values, initial=100.0, where=np.isfinite(values)))

    height = 5.6 + 0.2 * max(len(columns) + 2, len(table.compared))  # upright, for a phone
    figure = Figure(figsize=(6.4, height), layout="constrained")
    figure.suptitle(textwrap.fill(printable(title), 60), x=0.01, ha="left", weight="bold")
    axes: Any = figure.add_subplot(projection="polar")
    step, top = 2 * math.pi / len(parts), 20 * math.ceil((highest + 5) / 20)
    angles = step * np.arange(len(parts))
    axes.set(theta_zero_location="N", theta_direction=-1, ylim=(0, top))
    axes.set(yticks=range(40, top + 1, 40), rlabel_position=math.degrees(step / 2))
    axes.tick_params(axis="y", labelsize=8, labelcolor="#555555")
    axes.tick_params(axis="x", pad=6)
    axes.grid(color="white", linewidth=0.9)
    axes.spines["polar"].set_visible(False)
    axes.set_xticks(angles, [_short(part.label) for part in parts])
    for label, across in zip(axes.get_xticklabels(), np.sin(angles), strict=True):
        label.set_ha("center" if abs(across) < 0.1 else "left" if across > 0 else "right")
    wedges = _draw_wedges(axes, table.compared, top, step, by)
    circle = np.linspace(0, 2 * math.pi, 361), np.full(361, 100.0)
    axes.plot(*circle, color=DARK, lw=1.2, linestyle=(0, (4, 2)), label="specialists: 100")
    for index, (column, row) in enumerate(zip(columns, values, strict=True)):
        total = table.normalized(column)
        axes.plot(
            np.append(angles, angles[:1]),
            np.append(row, row[:1]),
            color=BASE if column.kind == "base" else LINES[index % len(LINES)],
            linestyle=DASHES[index % len(DASHES)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
            linewidth=1.8,
            label=_short(column.head) + ("" if total is None else f": {total.value:.2f}"),
            clip_on=False,
        )
    lines, _ = axes.get_legend_handles_labels()
    figure.legend(handles=wedges, loc="outside lower right")
    figure.legend(handles=lines, title="normalized accuracy", loc="outside lower left")
    return figure


def _draw_wedges(
    axes: Any, categories: tuple[Category, ...], top: int, step: float, by: By
) -> list[Any]:
    from matplotlib.patches import Patch

    wedges, start = [], -step / 2
    for index, category in enumerate(categories):
        colour = WEDGES[index % len(WEDGES)]
        size = step * (len(category.tasks) if by == "tasks" else 1)
        axes.bar(start, top, size, align="edge", color=colour, zorder=0)
        wedges.append(Patch(color=colour, label=_short(category.label)))
        start += size
    return wedges


def _short(text: str) -> str:
    return shortened(printable(text), LABEL)
