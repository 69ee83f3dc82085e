"""Parts of figures in one style, as SVG: the same figure gives the same bytes.

matplotlib's pyplot is not used, so nothing global changes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from study.cells import Record
from study.tables import Spread, Value, having, spread
from tvb_mergekit.figures import DARK, METADATA

WIDTH = 9.0  # inches, about as wide as a README
SETTINGS: Any = {
    "svg.hashsalt": "tvb-mergekit",
    "text.parse_math": False,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 6,
}
# Okabe and Ito's colours, and darker ones of Tol's; markers differ as well
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999933",
           "#332288", "#888888", "#aa4499", "#661100")  # fmt: skip
Look = tuple[str, str]  # colour and marker
Row = tuple[Value, list[Record]]
Points = Sequence[tuple[float, Spread | None]]


@contextmanager
def styled() -> Iterator[None]:
    """Use matplotlib's defaults and these settings; the user's come back afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        yield


def svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format="svg", metadata=METADATA["svg"])
    return buffer.getvalue()


def look(place: int) -> Look:
    return COLOURS[place % len(COLOURS)], "oD^X*dvps.<h"[place % len(COLOURS)]


def page(rows: int, columns: int, height: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    for each in axes.flat:
        each.grid(axis="y")
    return figure, list(axes.flat)


def line(axes: Axes, look: Look, points: Points, text: str) -> None:
    """Draw means over a band of one sd to each side, with gaps for unknown means."""
    if not any(cell for _, cell in points):
        return
    x = [place for place, _ in points]
    mean = [cell.mean if cell else math.nan for _, cell in points]
    sd = [(cell.sd or 0.0) if cell else math.nan for _, cell in points]
    low, high = ([m + sign * s for m, s in zip(mean, sd, strict=True)] for sign in (-1, 1))
    axes.fill_between(x, low, high, color=look[0], alpha=0.1, linewidth=0)
    axes.plot(x, mean, color=look[0], marker=look[1], label=text)


def level(axes: Axes, look: Look, cell: Spread | None, text: str) -> None:
    if cell:
        axes.axhline(cell.mean, color=look[0], linestyle="--", label=text)


def bar(axes: Axes, place: float, cell: Spread | None, **how: Any) -> None:
    if cell:
        whisker = {"ecolor": DARK, "elinewidth": 1, "capsize": 2}
        axes.bar(place, cell.mean, yerr=cell.sd or None, error_kw=whisker, **how)


def by_size(
    text: str, panels: Mapping[str, Mapping[str, Row]], key: str, label: str,
) -> bytes | None:  # fmt: skip
    """Draw a line along M for each row, and a dashed one for a row of one M.

    Args:
        panels: title -> the rows of a panel. Rows of one place look alike in all panels.

    Returns: the picture, or None if no row has several M.
    """

    def sizes(records: list[Record]) -> list[int]:
        return sorted({r["cell"].get(key) or 0 for r in records})

    if all(len(sizes(records)) < 2 for rows in panels.values() for _, records in rows.values()):
        return None
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    with styled():
        figure, every = page(down, across, 1 + 3.2 * down, sharex=True, sharey=True)
        for axes, (heading, rows) in zip(every, panels.items(), strict=False):
            axes.set(title=heading, xlabel="M")
            axes.tick_params(labelbottom=True)
            ticks = set[int]()
            for place, (name, (value, records)) in enumerate(rows.items()):
                found = sizes(records)
                points = [(m, spread(map(value, having(records, **{key: m})))) for m in found if m]
                if len(found) > 1:
                    ticks.update(found)
                    line(axes, look(place), points, name)
                else:
                    level(axes, look(place), spread(map(value, records)), name)
            axes.set_xticks(sorted(ticks))
        for axes in every:
            axes.set_visible(axes.has_data())
        for axes in every[::across]:
            axes.set_ylabel(label)
        legend(figure, every, 4)
        return svg(title(figure, text))


def title(figure: Figure, text: str) -> Figure:
    figure.suptitle(text, x=0.01, ha="left")
    return figure


def legend(figure: Figure, axes: Iterable[Axes], columns: int = 5) -> None:
    """Draw one legend below all panels, with each label once."""
    handles: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)
