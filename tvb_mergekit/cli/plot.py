"""One figure of an inspection: cosines, encoder, eigenvalues, energy against M, errors.

PNG, SVG, PDF, or an HTML page that also holds the tables. matplotlib (the extra `plot`) is imported
only here, inside the functions. The same inspection gives the same bytes.
"""

from __future__ import annotations

import html
import math
import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tvb_mergekit.atomic import write_file
from tvb_mergekit.cli.inspect import (
    CRITERION,
    Inspection,
    headline,
    remarks,
    sheets,
    smallest_line,
)
from tvb_mergekit.core.encoders.linear import Array
from tvb_mergekit.errors import UserError
from tvb_mergekit.figures import BLUE, DARK, LABEL, ORANGE, PALE, can_draw, rendered
from tvb_mergekit.store.report import WIDE
from tvb_mergekit.tables import Sheet, printable, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf", ".html")
LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue
TITLE_PAD = 18  # points, above the label of the mark at M
TEXT = ' class="text"'  # of a cell that holds no number

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 2em auto; max-width: 1200px;
  padding: 0 1em; }
h1 { font-size: 1.3em; } h2 { font-size: 1.1em; margin-top: 2em; }
svg { width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 0.15em 0.7em; text-align: right; white-space: nowrap; }
th { border-bottom: 1px solid #888; } tr:nth-child(even) td { background: #f5f5f5; }
th:first-child, td:first-child, .text { text-align: left; }
"""


def plot(inspection: Inspection, path: str | os.PathLike[str]) -> None:
    """Draw the figure into `path`, whose suffix says how: .png, .svg, .pdf or .html.

    The file is written beside its place and renamed, so a picture is never half there.

    Raises:
        UserError: another suffix, no matplotlib, or the file cannot be written.
    """
    check_plot(path)
    target = Path(path)
    kind = target.suffix.lower()
    data = rendered(lambda: _figure(inspection), "svg" if kind == ".html" else kind[1:])
    write_file(target, _page(inspection, data).encode() if kind == ".html" else data)


def check_plot(path: str | os.PathLike[str]) -> None:
    """What can be known before anything is read that takes long.

    Raises:
        UserError: another suffix, no matplotlib, no such folder, or `path` is a folder.
    """
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise UserError(
            f"--plot {target}: the file's suffix says what is drawn: expected one of "
            f"{', '.join(SUFFIXES)}"
        )
    if target.is_dir():
        raise UserError(f"cannot write {target}: it is a folder")
    if not target.parent.is_dir():
        raise UserError(f"cannot write {target}: no such folder")
    if not os.access(target.parent, os.W_OK):
        raise UserError(f"cannot write {target}: its folder cannot be written to")
    if not can_draw():
        raise UserError("--plot needs matplotlib: pip install 'tvb-mergekit[plot]'")


def _figure(inspection: Inspection) -> Figure:
    """All panels. Inches grow with T and M, so that every label has room at its font size."""
    import matplotlib
    from matplotlib.figure import Figure

    tasks, bases = len(inspection.tasks), inspection.num_bases
    names = [shortened(printable(task), LABEL) for task in inspection.tasks]
    cell = 0.42 if tasks <= WIDE else 0.2 if tasks <= 30 else 0.135
    size = 8.0 if tasks <= 30 else 7.0  # of task labels, in points
    label = _inches(names, size) + 0.3
    square = max(3.0, cell * tasks)
    encoder = min(max(2.4, cell * bases), square)
    width = max(10.5, square + encoder + 2 * label + 2.2)
    # a large figure is looked at from further away
    matplotlib.rcParams["font.size"] = 9 * math.sqrt(width / 10.5)
    heights = [square + 0.75 * label + 0.6, 3.2, 2.3 + 0.75 * label]
    title = textwrap.fill(
        printable(headline(inspection)), int(10.5 * width), max_lines=3, break_on_hyphens=False
    )
    figure = Figure(figsize=(width, sum(heights) + 0.7), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", size="large")
    rows = figure.add_gridspec(3, 1, height_ratios=heights)
    top = rows[0].subgridspec(1, 2, width_ratios=[square, encoder])
    middle = rows[1].subgridspec(1, 2)
    _draw_cosines(figure.add_subplot(top[0]), inspection, names, size)
    _draw_encoder(figure.add_subplot(top[1]), inspection, names, size)
    _draw_eigenvalues(figure.add_subplot(middle[0]), inspection)
    _draw_energy(figure.add_subplot(middle[1]), inspection)
    _draw_errors(figure.add_subplot(rows[2]), inspection, names, size)
    return figure


def _draw_cosines(axes: Axes, inspection: Inspection, names: Sequence[str], size: float) -> None:
    cosines, of = inspection.cosines
    values = cosines.numpy()
    # The diagonal is known: the colours are for the others, which may all be small.
    largest = float(np.abs(values - np.diag(values.diagonal())).max())
    limit = next((step for step in (0.1, 0.2, 0.5) if 0 < largest <= step), 1.0)
    axes.set_title(f"Cosines between the {of}")
    _heat_map(axes, values, names, names, -limit, limit, size)


def _draw_encoder(axes: Axes, inspection: Inspection, names: Sequence[str], size: float) -> None:
    axes.set_title("Encoder weights")
    encoder = inspection.tensors.get("encoder")
    if encoder is None:
        _say(axes, inspection.why_unknown("encoder"))
        return
    values = encoder.numpy()
    bases = [f"B{m}" for m in range(values.shape[1])]
    limit = float(np.abs(values).max()) or 1.0
    _heat_map(axes, values, names, bases, -limit if values.min() < -1e-12 else 0.0, limit, size)


def _heat_map(
    axes: Axes,
    values: Array,
    rows: Sequence[str],
    columns: Sequence[str],
    low: float,
    high: float,
    size: float,
) -> None:
    colours = "RdBu_r" if low < 0 else "Blues"  # both safe for the colour-blind
    image = axes.imshow(
        values, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="nearest"
    )
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=size)
    _label_x(axes, columns, size)
    axes.set_yticks(range(len(rows)), rows)
    extend = "max" if values.max() > high else "neither"
    bar = axes.figure.colorbar(image, ax=axes, extend=extend, pad=0.02, aspect=30)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize="small")
    if max(len(rows), len(columns)) > WIDE:
        return
    light = np.asarray(image.to_rgba(values))[:, :, :3] @ LUMINANCE
    for (row, column), value in np.ndenumerate(values):
        text = f"{round(float(value), 2) + 0.0:.2f}".replace("-", "\N{MINUS SIGN}")
        colour = "white" if light[row, column] < 0.5 else "black"
        axes.text(column, row, text, ha="center", va="center", size=7.5, color=colour)


def _draw_eigenvalues(axes: Axes, inspection: Inspection) -> None:
    axes.set_title("Eigenvalues", pad=TITLE_PAD)
    if "eigenvalues" not in inspection.tensors:
        _say(axes, inspection.why_unknown("gram"))
        return
    values = inspection.tensors["eigenvalues"].clamp(min=0.0).numpy()
    places = np.arange(1, len(values) + 1)
    positive = values[values > 0]
    if len(positive) and positive.max() > 100 * positive.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        if zeros := len(values) - len(positive):
            text = f"{zeros} of {len(values)} are 0: not drawn"
            axes.text(0.98, 0.96, text, **_place(axes, "right", "top"))
        values = np.where(values > 0, values, np.nan)
    else:
        axes.set_ylim(0, 1.08 * float(values.max(initial=0.0)) or 1.0)
    axes.plot(places, values, color=PALE, linewidth=1, zorder=1)
    within = places <= inspection.num_bases
    dots: dict[str, Any] = {"color": BLUE, "markersize": 6.0 if len(values) <= 30 else 3.5}
    for some, inside, label in ((within, BLUE, "within M"), (~within, "white", "left out")):
        axes.plot(places[some], values[some], "o", markerfacecolor=inside, label=label, **dots)
    axes.set(xlabel="m", ylabel="λₘ of the Gram matrix")
    _count_x(axes, len(values), inspection.num_bases, inspection.num_bases + 0.5)
    # beside the title: a flat spectrum leaves no corner free
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=1.4, ncols=2)


def _draw_energy(axes: Axes, inspection: Inspection) -> None:
    axes.set_title("Energy that M bases can retain", pad=TITLE_PAD)
    choices, current = inspection.choices, inspection.num_bases
    if not choices:
        _say(axes, inspection.why_unknown("gram"))
        return
    places = [choice.num_bases for choice in choices]
    energies = [100 * choice.retained_energy for choice in choices]
    style = "o-" if len(places) <= 30 else "-"
    spectral: dict[str, Any] = {"color": BLUE, "linewidth": 2.5, "markersize": 5}
    axes.plot(places, energies, style, label="any bases (spectral)", **spectral)
    lowest = min(energies)
    if choices[0].balanced_energy is not None:
        balanced = [100 * (choice.balanced_energy or 0.0) for choice in choices]
        axes.plot(places, balanced, "--", color=ORANGE, label="balanced bases")
        lowest = min(lowest, *balanced)
    if inspection.facts.retained_energy is not None:
        energy = 100 * inspection.facts.retained_energy
        label = f"these ({inspection.basis}): {energy:.1f} %"
        marker: dict[str, Any] = {"color": DARK, "markersize": 7, "markerfacecolor": "none"}
        axes.plot([current], [energy], "D", label=label, **marker)
        lowest = min(lowest, energy)
    # from a round number below, so that the approach to 100 % can be read
    bottom = 10 * math.floor(max(lowest - 5, 0) / 10)
    axes.set_ylim(bottom, 100 + 0.06 * (100 - bottom))
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set(xlabel="M", ylabel="retained energy, %")
    _count_x(axes, len(places), current, current)
    axes.legend(loc="lower right")


def _draw_errors(axes: Axes, inspection: Inspection, names: Sequence[str], size: float) -> None:
    axes.set_title("Error of each reconstructed task vector, relative to its norm")
    errors = inspection.errors
    if all(pair == (0.0, math.inf) for pair in errors.values()):
        _say(axes, inspection.why_unknown("errors"))
        return
    places = np.arange(len(names))
    ranges = np.array([errors.get(task, (math.nan, math.nan)) for task in inspection.tasks])
    low, high = np.where(np.isfinite(ranges), ranges, np.nan).T
    axes.bar(places, low, 0.7, color=BLUE)
    wide = high - low > 1e-9
    if wide.any():
        spread = [np.zeros(wide.sum()), (high - low)[wide]]
        whisker: dict[str, Any] = {"ecolor": DARK, "capsize": min(4.0, 60 / len(names))}
        label = "at least (bar) to at most (whisker)"
        axes.errorbar(places[wide], low[wide], yerr=spread, fmt="none", label=label, **whisker)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)  # beside the title
    for place, pair in zip(places, ranges, strict=True):
        if not np.isfinite(pair).all():
            text = "∞" if np.isinf(pair).any() and pair[0] > 0 else "?"
            axes.text(float(place), 0, text, ha="center")
    top = float(np.nanmax(np.append(high, 0.0)))
    axes.set_ylim(0, 1.0 if top < 1e-6 else 1.15 * top)
    if top < 1e-6 and np.isfinite(high).all():
        axes.text(0.5, 0.5, "0: nothing is lost", **_place(axes, "center", "center"), color=DARK)
    axes.set_xlim(-0.7, len(names) - 0.3)
    _label_x(axes, names, size)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("‖τ̂ − τ‖ / ‖τ‖")


def _count_x(axes: Axes, count: int, bases: int, place: float) -> None:
    """An axis of 1 to `count`, with a mark for M at `place`."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0.5, count + 0.7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.axvline(place, color=DARK, linewidth=1, linestyle=":", zorder=0)
    axes.annotate(
        f"M = {bases}",
        (place, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 1),
        textcoords="offset points",
        ha="center",
        va="bottom",
        size=8,
    )


def _place(axes: Axes, horizontal: str, vertical: str) -> dict[str, Any]:
    return {"transform": axes.transAxes, "ha": horizontal, "va": vertical}


def _say(axes: Axes, why: str) -> None:
    """An empty panel that says why it is empty."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set(visible=True, color="#cccccc")
    axes.text(0.5, 0.5, why, **_place(axes, "center", "center"), color=DARK)


def _label_x(axes: Axes, names: Sequence[str], size: float) -> None:
    """Level if there is room, else slanted; upright where even those would run together."""
    # before the layout is settled, so about
    room = 0.8 * axes.bbox.width / axes.figure.dpi / len(names)
    turn = 0 if _inches(names, size) < room else 45 if room > 2 * size / 72 else 90
    axes.set_xticks(
        range(len(names)),
        names,
        rotation=turn,
        ha="right" if turn == 45 else "center",
        rotation_mode="anchor" if turn == 45 else "default",
        size=size,
    )


def _inches(names: Sequence[str], size: float) -> float:
    """The width of the longest name in points of `size`, about."""
    return max(map(len, names)) * 0.62 * size / 72


def _page(inspection: Inspection, svg: bytes) -> str:
    """One HTML file that refers to no other: style, figure, tables."""
    picture = re.sub(r"\A.*?(?=<svg)|<metadata>.*?</metadata>", "", svg.decode(), flags=re.DOTALL)
    title = html.escape(printable(headline(inspection)))
    lines = [*remarks(inspection), smallest_line(inspection), CRITERION]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f"<title>{title}</title><style>{STYLE}</style></head><body>",
            f"<h1>{title}</h1>",
            *(f"<p>{html.escape(printable(line))}</p>" for line in lines if line),
            picture.replace("<svg ", '<svg role="img" aria-label="the tables below, drawn" ', 1),
            *(_html_table(sheet) for sheet in sheets(inspection)),
            "</body></html>",
            "",
        ]
    )


def _html_table(sheet: Sheet) -> str:
    def row(tag: str, cells: Sequence[str]) -> str:
        inner = "".join(
            f"<{tag}{TEXT if column in sheet.left else ''}>{html.escape(printable(cell))}</{tag}>"
            for column, cell in zip(sheet.head, cells, strict=True)
        )
        return f"<tr>{inner}</tr>"

    return "\n".join(
        [
            f'<h2>{html.escape(sheet.title)}</h2><div class="wide"><table>',
            f"<thead>{row('th', sheet.head)}</thead><tbody>",
            *(row("td", cells) for cells in sheet.rows),
            "</tbody></table></div>",
        ]
    )
