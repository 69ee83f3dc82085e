"""The scores of several models on one axis per task or category, in percent of the specialists'.

matplotlib (the extra `plot`) is imported only here, inside the functions. The same table gives the
same bytes.
"""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Literal

import numpy as np

from tvb_mergekit.figures import DARK, LABEL, PALE, rendered
from tvb_mergekit.score.benchmark import Category, Task
from tvb_mergekit.score.table import Table
from tvb_mergekit.tables import printable, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

By = Literal["tasks", "categories"]
CIRCLE = 6.2  # inches across
LETTER = 0.08  # inches, about, of a label's letter
MOST = 200.0  # percent; what is beyond is drawn there
# Okabe and Ito's colours, told apart by markers and dashes too
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS, DASHES = "osD^vPX*", ("-", "--", "-.", ":")
# Tol's pale colours, for the categories behind the lines
WEDGES = ("#bbccee", "#ccddaa", "#eeeebb", "#ffcccc", "#cceeff", "#dddddd")


def radar(table: Table, kind: str, by: By = "tasks") -> bytes:
    """The picture as png, svg or pdf, of the categories that are compared.

    Needs specialists in the table; a score that is missing is a gap in its line.
    """
    return rendered(lambda: _figure(table, by), kind)


def _figure(table: Table, by: By) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    def short(text: str) -> str:
        return shortened(printable(text), LABEL)

    columns = [column for column in table.columns if column.kind != "specialists"]
    categories = table.compared
    parts: list[Task | Category] = [*categories]
    if by == "tasks":
        parts = [task for category in categories for task in category.tasks]
    names = [short(part.label) for part in parts]
    values = np.array(  # [columns, spokes], None is NaN
        [[table.relative(column, part) for part in parts] for column in columns], dtype=float
    ).reshape(len(columns), len(parts))
    beyond = bool((values > MOST).any())
    values = np.minimum(values, MOST)
    highest = float(np.max(values, initial=100.0, where=np.isfinite(values)))
    top = 20 * math.ceil((highest + 5) / 20)
    step = 2 * math.pi / len(names)
    angles = step * np.arange(len(names))

    lines = []
    for column in columns:
        total = table.normalized(column)
        lines.append(short(column.head) + ("" if total is None else f": {total.value:.2f}"))
    legends = [*lines, "normalized accuracy", *(category.label for category in categories)]
    # In inches, since constrained layout does not see what stands around a circle.
    beside = 0.3 + LETTER * max(map(len, names))
    width = CIRCLE + 2 * beside + 0.7 + LETTER * max(map(len, legends))
    height = CIRCLE + 1.4
    figure = Figure(figsize=(width, height))
    place = (beside / width, 0.4 / height, CIRCLE / width, CIRCLE / height)
    axes = figure.add_axes(place, projection="polar")
    axes.set_theta_zero_location("N")  # type: ignore[attr-defined]
    axes.set_theta_direction(-1)  # type: ignore[attr-defined]
    axes.set_ylim(0, top)
    ticks = 20 if top <= 120 else 40
    axes.set_yticks(range(ticks, top + 1, ticks))
    axes.tick_params(axis="y", labelsize=8, labelcolor="#555555")
    axes.set_rlabel_position(math.degrees(step / 2))  # type: ignore[attr-defined]
    axes.grid(color="white", linewidth=0.9)
    axes.spines["polar"].set_visible(False)
    axes.set_xticks(angles, [])
    for name, angle in zip(names, angles, strict=True):  # tick labels are not laid out when turned
        across, up = math.sin(angle), math.cos(angle)
        axes.text(
            *(angle, 1.04 * top, name),
            ha="center" if abs(across) < 0.1 else "left" if across > 0 else "right",
            va="center" if abs(up) < 0.9 else "bottom" if up > 0 else "top",
        )
    wedges = []
    start = -step / 2
    for index, category in enumerate(categories):
        colour = WEDGES[index % len(WEDGES)]
        size = step * (len(category.tasks) if by == "tasks" else 1)
        axes.bar(start, top, size, align="edge", color=colour, zorder=0)
        wedges.append(Patch(color=colour, label=short(category.label)))
        start += size
    around = np.linspace(0, 2 * math.pi, 361)
    hundred = np.full(361, 100.0)
    dashed = (0, (4, 2))
    axes.plot(around, hundred, color=DARK, lw=1.2, linestyle=dashed, label="specialists: 100")
    for index, (column, line, row) in enumerate(zip(columns, lines, values, strict=True)):
        axes.plot(
            np.append(angles, angles[:1]),
            np.append(row, row[:1]),
            color=PALE if column.kind == "base" else LINES[index % len(LINES)],
            linestyle=DASHES[index % len(DASHES)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
            linewidth=1.8,
            label=line,
            clip_on=False,
        )
    title = printable(
        f"{table.benchmark.title}: percent of the specialists' scores"
        f"{table.title.removeprefix(table.benchmark.title)}"
    )
    title = textwrap.fill(title, int(10 * width), max_lines=2)
    if beyond:
        title += f"; what is above {MOST:.0f} is drawn at {MOST:.0f}"
    figure.text(0.01, 1 - 0.1 / height, title, ha="left", va="top", weight="bold")
    below, corner = (1.0, 1 - 0.5 / height), (1.0, 0.0)
    title = "normalized accuracy"
    figure.legend(title=title, loc="upper right", bbox_to_anchor=below, alignment="left")
    figure.legend(handles=wedges, loc="lower right", bbox_to_anchor=corner, alignment="left")
    return figure
